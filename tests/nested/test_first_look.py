"""How many draws are weighed before a further site is marginalised; oracle: the share that many draws keep."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.laplace import approximation
from pyro_evidence.posterior.nested import ENOUGH, FIRST_LOOK, NestedPosterior
from pyro_evidence.precision.dense import Dense, Separate


def times(y: Tensor, group: Tensor) -> None:
    scale, shape = pyro.sample("scale", dist.HalfNormal(1.0)), pyro.sample("shape", dist.LogNormal(0.0, 1.0))
    with pyro.plate("groups", 4):
        a = pyro.sample("a", dist.Normal(0.0, scale))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Weibull(a[group].exp(), shape), obs=y)


@pytest.mark.parametrize(("num", "end", "looks"), [(400, 0.02, [FIRST_LOOK]), (8, 0.3, [FIRST_LOOK, 500])])
def test_few_draws_settle_it_where_they_keep_their_weight(
    num: int, end: float, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, y = torch.arange(num) % 4, torch.linspace(end, 1.0 - end, num).log().neg()
    asked, weighed = list[int](), NestedPosterior._weighed

    def noted(self: NestedPosterior, num_samples: int, seed: int, kept: bool = True) -> tuple[Tensor, Tensor]:
        asked.append(num_samples)
        return weighed(self, num_samples, seed, kept)

    posterior = LaplaceEvidence(times, marginalise=["scale"], stop=Stop(progress=False)).run(y.double(), group)
    assert posterior.relative_ess > ENOUGH
    monkeypatch.setattr(NestedPosterior, "_weighed", noted)
    del vars(posterior)["relative_ess"]
    assert posterior.candidate_hyperparameters == ()
    assert asked == looks


def test_wide_designs_are_searched_by_their_algebra_with_the_same_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By autograd a row of a batch asks for a pass through all data for each coordinate."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    y = (X[:, 0] + torch.randn(200, generator=generator, dtype=torch.float64) > 0).double()

    def shrunk(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.HalfNormal(torch.ones((), dtype=torch.float64)))
        with pyro.plate("columns", 4):
            w = pyro.sample("w", dist.Normal(0.0, scale))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    posterior = LaplaceEvidence(shrunk, stop=Stop(progress=False)).run(y)
    found, phi = posterior.integral.outer_mode, posterior.integral.phi[::3]
    together = found.inner(phi)
    monkeypatch.setattr(approximation, "LIGHT", 0)
    alone = found.inner(phi)
    assert isinstance(together.precision, Dense) and isinstance(alone.precision, Separate)
    for a, b in ((together.u, alone.u), (together.log_density, alone.log_density)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
