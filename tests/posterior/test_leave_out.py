"""Leave-one-group-out from one fit, against closed forms and fits anew."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.errors import BadInput, TooLarge
from pyro_evidence.posterior import reweighted
from tests.models_for_tests.sampled_scales import SCHOOL_SDS, SCHOOLS, generated, schools_centred

QUIET = Stop(progress=False)
GROUP = torch.arange(40) % 8
Y = generated(8, seed=1)[GROUP] + 0.5 * generated(40, seed=2)


def levels(group: Tensor, y: Tensor, num: int = 8) -> None:
    """Everything Gaussian, scales known."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with pyro.plate("groups", num):
        a = pyro.sample("a", dist.Normal(mu, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a[group], 0.5), obs=y)


def of_group(g: int) -> float:
    """Oracle: the Gaussian density of one group's data given all others'."""
    same = (GROUP[:, None] == GROUP).double()
    S = 4.0 + same + 0.25 * torch.eye(40)
    inside, rest = GROUP == g, GROUP != g
    gain = torch.linalg.solve(S[rest][:, rest], S[rest][:, inside]).T
    covariance = S[inside][:, inside] - gain @ S[rest][:, inside]
    return float(dist.MultivariateNormal(gain @ Y[rest], covariance).log_prob(Y[inside]))


@pytest.mark.parametrize("by", ["group", GROUP])
def test_a_gaussian_model_is_exact(by: object) -> None:
    found = LaplaceEvidence(levels, stop=QUIET).run(GROUP, Y).loo(by=by)
    expected = torch.tensor([of_group(g) for g in range(8)])
    torch.testing.assert_close(found.elpd, expected, rtol=0, atol=1e-6)
    assert torch.equal(found.groups, torch.arange(8)) and bool((found.pareto_k < 0.5).all())
    assert float(found.total) == pytest.approx(float(expected.sum())) and not len(found.doubtful)
    assert repr(found).startswith("LOOResult(total=")


def without_school(left: int) -> float:
    """Oracle: log evidences of eight and of seven schools, by quadrature over tau, mu on paper."""
    log_tau = torch.linspace(-25.0, 9.0, 4001)

    def log_evidence(keep: Tensor) -> Tensor:
        variance = SCHOOL_SDS[keep] ** 2 + log_tau.exp().unsqueeze(-1) ** 2
        precision = 1.0 / 25.0 + (1.0 / variance).sum(-1)
        mean = (SCHOOLS[keep] / variance).sum(-1) / precision
        value = dist.Normal(0.0, variance.sqrt()).log_prob(SCHOOLS[keep]).sum(-1)
        value = value + 0.5 * precision * mean**2 - 0.5 * (25.0 * precision).log()
        value = value + dist.HalfCauchy(5.0).log_prob(log_tau.exp()) + log_tau
        return torch.trapezoid((value - value.max()).exp(), log_tau).log() + value.max()

    everyone = torch.arange(8)
    return float(log_evidence(everyone) - log_evidence(everyone[everyone != left]))


def test_scales_are_integrated_without_the_group() -> None:
    posterior = LaplaceEvidence(schools_centred, stop=QUIET).run(SCHOOLS)
    found = posterior.loo(by="schools")
    expected = torch.tensor([without_school(g) for g in range(8)])
    torch.testing.assert_close(found.elpd, expected, rtol=0, atol=0.02)
    torch.testing.assert_close(posterior.loo().elpd, found.elpd)


def test_labels_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = LaplaceEvidence(levels, stop=QUIET).run(GROUP, Y)
    with pytest.raises(BadInput, match=r"by holds 3 labels; expected .* one label for each of the 40 data"):
        posterior.loo(by=torch.arange(3))
    with pytest.raises(BadInput, match=r"by='region'; expected an argument of the model, \['group', 'y'\], or a plate"):
        posterior.loo(by="region")
    with pytest.raises(BadInput, match=r"by='num'; expected .* one label for each of the 40 data"):
        LaplaceEvidence(levels, stop=QUIET).run(GROUP, Y, num=8).loo(by="num")
    monkeypatch.setattr(reweighted, "LARGEST", 5)
    with pytest.raises(TooLarge, match="leaving 8 groups of 40 data out, with 9 coordinates"):
        posterior.loo(by="group")


COUNTED = torch.arange(200) % 50
KNOWN = torch.binomial(
    torch.full((200,), 6.0),
    (0.8 * generated(50, seed=4)).sigmoid()[COUNTED],
    generator=torch.Generator().manual_seed(5),
)


def counted(group: Tensor, k: Tensor) -> None:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 1.0)), pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("groups", 50):
        a = pyro.sample("a", dist.Normal(mu, tau))
    with pyro.plate("data", len(k)):
        pyro.sample("k", dist.Binomial(6.0, logits=a[group]), obs=k)


@pytest.mark.slow
def test_fifty_fits_anew_say_the_same() -> None:
    whole = LaplaceEvidence(counted, stop=QUIET).run(COUNTED, KNOWN)
    found = whole.loo(by="group")
    again = [LaplaceEvidence(counted, stop=QUIET).run(COUNTED[COUNTED != g], KNOWN[COUNTED != g]) for g in range(50)]
    expected = torch.stack([whole.log_evidence - one.log_evidence for one in again])
    assert float((found.elpd - expected).abs().max()) < 0.1 and float(found.total - expected.sum()) == pytest.approx(
        0.0, abs=0.5
    )
    assert bool((found.pareto_k < 0.7).all())
