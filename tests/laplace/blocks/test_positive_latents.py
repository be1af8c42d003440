"""Rates and one-sided errors of rows, by default, beside lattices over what is left once they are integrated.

Gamma-Poisson by its conjugate form, a half-normal beside a normal by Azzalini's (1985) density.
"""

import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, NestedPosterior, Stop, UnsupportedModel
from pyro_evidence.nested import inner

Lattice = Callable[[Tensor, Tensor, Tensor], Tensor]


def rates(y: Tensor) -> None:
    mean, shape = (pyro.sample(n, dist.LogNormal(y.new_zeros(()), 1.0)) for n in ("mean", "shape"))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Poisson(pyro.sample("rate", dist.Gamma(shape, shape / mean))), obs=y)


def of_rates(y: Tensor, log_mean: Tensor, log_shape: Tensor) -> Tensor:
    mean, shape = log_mean.exp().unsqueeze(-1), log_shape.exp().unsqueeze(-1)
    prior = dist.Normal(0.0, 1.0)
    return (
        dist.GammaPoisson(shape, shape / mean).log_prob(y).sum(-1)
        + prior.log_prob(log_mean)
        + prior.log_prob(log_shape)
    )


def inefficiencies(y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 2.0))
    scale = pyro.sample("scale", dist.LogNormal(y.new_zeros(()) - 1.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mean - pyro.sample("u", dist.HalfNormal(scale)), 0.2), obs=y)


def of_inefficiencies(y: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    scale, away = log_scale.exp().unsqueeze(-1), y - mean.unsqueeze(-1)
    both = (scale.square() + 0.04).sqrt()
    each = dist.Normal(0.0, both).log_prob(away) + math.log(2.0) + torch.special.log_ndtr(-away * scale / (0.2 * both))
    return each.sum(-1) + dist.Normal(0.0, 2.0).log_prob(mean) + dist.Normal(-1.0, 1.0).log_prob(log_scale)


def drawn(kind: str, num: int) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(num)
        if kind == "rates":
            return torch.poisson(torch._standard_gamma(torch.full((num,), 2.0)))
        return 1.0 - 0.5 * torch.randn(num).abs() + 0.2 * torch.randn(num)


MODELS: dict[str, tuple[Callable[[Tensor], None], Lattice]] = {
    "rates": (rates, of_rates),
    "inefficiencies": (inefficiencies, of_inefficiencies),
}


@pytest.mark.parametrize(("kind", "num"), [("rates", 60), ("inefficiencies", 100)])
def test_what_rows_share_beside_their_positive_latents(kind: str, num: int) -> None:
    """Logs of so many latents have Jacobians that move the joint mode: 116 nats off, where rows are not integrated."""
    model, density = MODELS[kind]
    y, axis = drawn(kind, num), torch.linspace(-4.0, 5.0, 91)
    first, second = (part.flatten() for part in torch.meshgrid(axis, axis, indexing="ij"))
    height = torch.cat([density(y, *pair) for pair in zip(first.split(4096), second.split(4096), strict=True)])
    posterior = LaplaceEvidence(model).run(y)
    off = float(posterior.log_evidence) - float(height.logsumexp(0)) - 2.0 * math.log(0.1)
    assert abs(off) < min(0.06, 0.01 + 3.0 * posterior.log_evidence_error)
    share, draws = height.softmax(0), posterior.get_samples(300, seed=0)["mean"]
    values = first if kind == "inefficiencies" else first.exp()
    mean = float(share @ values)
    deviation = float(share @ (values - mean).square()) ** 0.5
    assert abs(float(draws.mean()) - mean) < 0.2 * deviation
    assert 0.8 < float(draws.std()) / deviation < 1.25


def test_laplace_of_all_latents_says_that_it_is_far_off() -> None:
    """Where the integrals of blocks have no mode near the joint one, the next term of Laplace's series tells."""
    y = drawn("inefficiencies", 100)
    assert LaplaceEvidence(inefficiencies, nodes=1).run(y).log_evidence_error > 10.0


def test_chunks_of_rows_with_rates_want_all_rows() -> None:
    y = drawn("inefficiencies", 60)
    chunks = [(y[:35],), (y[35:],)]
    with pytest.raises(UnsupportedModel, match=r"u have an end of their range.*nodes=15.*nodes=1"):
        LaplaceEvidence(inefficiencies).run_chunks(chunks)
    by_laplace = LaplaceEvidence(inefficiencies, nodes=1)
    whole = by_laplace.run(y)
    assert float(by_laplace.run_chunks(chunks).log_evidence) == pytest.approx(float(whole.log_evidence), abs=1e-6)


def shrunk(X: Tensor, y: Tensor) -> None:
    noise = pyro.sample("noise", dist.HalfNormal(y.new_ones(())))
    with pyro.plate("columns", X.shape[1]):
        scale = pyro.sample("scale", dist.Gamma(y.new_tensor(2.0), 2.0))
        w = pyro.sample("w", dist.Normal(0.0, scale))
    pyro.sample("y", dist.Normal(X @ w, noise).to_event(1), obs=y)


def test_scales_of_other_latents_are_no_blocks() -> None:
    """Each is a block, given its weight; but integrated the prior of that weight has a peak at zero, not a mode."""
    generator = torch.Generator().manual_seed(0)
    X, noise = torch.randn(40, 4, generator=generator), torch.randn(40, generator=generator)
    posterior = LaplaceEvidence(shrunk).run(X, X @ torch.tensor([1.0, -2.0, 0.0, 0.0]) + 0.5 * noise)
    assert set(posterior.marginalised_sites) == {"noise", "scale"}


def test_as_many_hyperparameters_as_have_room_are_searched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = LaplaceEvidence(rates, stop=Stop(progress=False)).run(drawn("rates", 60))
    assert isinstance(posterior, NestedPosterior)
    centre, near, sizes = posterior.integral.outer_mode.centre, inner.near_states, list[int]()
    monkeypatch.setattr(inner, "near_states", lambda *args, **how: sizes.append(len(args[1])) or near(*args, **how))
    posterior.integral.outer_mode.inner(centre.expand(200, -1))
    assert sizes == [200]
