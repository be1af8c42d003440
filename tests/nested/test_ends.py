"""Latents near an end of their support, or of two modes, beside a sampled noise; oracles: grids, prior draws."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.posterior.multimodal import ImportancePosterior
from pyro_evidence.posterior.nested import NestedPosterior

QUIET = Stop(progress=False)
NEAR = torch.tensor([-0.1, 0.4, 0.2, -0.3, 0.5, 0.1], dtype=torch.float64)
FAR = torch.tensor([1.1, 0.7, 1.5, 1.2, 0.9, 1.4], dtype=torch.float64)
Moments = tuple[float, float, list[float]]  # mean, standard deviation, and quantiles at LEVELS
LEVELS = [0.05, 0.5, 0.95]


def on_a_grid(prior: dist.TorchDistribution, x: Tensor) -> dict[str, Moments]:
    """Of ``a`` and its noise ``s``, on the logs of both."""
    log_a, log_s = torch.linspace(-30.0, 2.5, 3000).double(), torch.linspace(-4.0, 2.5, 300).double()
    a, s = log_a.exp(), log_s.exp()
    height = (prior.log_prob(a) + log_a).unsqueeze(-1) + dist.HalfNormal(torch.ones(()).double()).log_prob(s) + log_s
    height = height + dist.Normal(a[:, None, None], s[:, None]).log_prob(x).sum(-1)
    mass, found = (height - height.amax()).exp(), {}
    for name, value, each in (("a", a, mass.sum(1)), ("s", s, mass.sum(0))):
        share = each / each.sum()
        mean = share @ value
        places = torch.searchsorted(share.cumsum(0), torch.tensor(LEVELS).double())
        found[name] = float(mean), float(share @ (value - mean).square()) ** 0.5, value[places].tolist()
    return found


@pytest.mark.parametrize(
    ("prior", "x"),
    [(dist.Gamma(0.5, 1.0), NEAR), (dist.Gamma(0.2, 1.0), FAR), (dist.Weibull(1.0, 0.7), NEAR)],
    ids=["near", "far", "Weibull"],
)
def test_table_quantiles_and_draws_beside_a_grid(prior: dist.TorchDistribution, x: Tensor) -> None:
    def model(x: Tensor) -> None:
        a, s = pyro.sample("a", prior), pyro.sample("s", dist.HalfNormal(torch.ones(()).double()))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(a, s), obs=x)

    found, truth = LaplaceEvidence(model, stop=QUIET).run(x), on_a_grid(prior, x)
    assert isinstance(found, NestedPosterior)
    rows, ends, draws = found.table().rows, found.quantiles(LEVELS), found.get_samples(2000, seed=1)
    for name, (mean, sd, places) in truth.items():
        marginal = found.marginal(name)
        for value, deviation, within in (
            (rows[name]["value"], rows[name]["sd"], 0.1),
            (float(marginal.mean), float(marginal.sd), 0.1),
            (float(draws[name].mean()), float(draws[name].std()), 0.15),
        ):
            assert abs(value - mean) < within * sd and abs(deviation / sd - 1.0) < within
        assert all(abs(float(end) - place) < 0.15 * sd for end, place in zip(ends[name], places, strict=True))


@pytest.mark.parametrize(("x", "num_modes"), [(FAR, 2), (2.0 * NEAR - 0.3, 1)], ids=["two modes", "one"])
def test_the_table_of_an_integral_over_modes(x: Tensor, num_modes: int) -> None:
    """Of a square the modes are two, or one that is flat: the scale's mean was a third to half a deviation off."""
    zero = torch.zeros(()).double()

    def model(x: Tensor) -> None:
        a, s = pyro.sample("a", dist.Normal(zero, 1.0)), pyro.sample("s", dist.HalfNormal(zero + 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(a**2, s), obs=x)

    found = LaplaceEvidence(model, stop=QUIET).run(x)
    assert isinstance(found, ImportancePosterior) and len(found.states) == num_modes
    a, log_s = torch.linspace(-5.0, 5.0, 1001).double(), torch.linspace(-4.0, 2.5, 400).double()
    s = log_s.exp()
    height = dist.Normal(zero, 1.0).log_prob(a).unsqueeze(-1) + dist.HalfNormal(zero + 1.0).log_prob(s) + log_s
    share = (height + dist.Normal(a[:, None, None] ** 2, s[:, None]).log_prob(x).sum(-1)).flatten().softmax(0)
    share, rows = share.reshape(len(a), len(s)), found.table().rows
    for name, value, each in (("a", a, share.sum(1)), ("s", s, share.sum(0))):
        mean = each @ value
        sd = float(each @ (value - mean).square()) ** 0.5
        assert abs(rows[name]["value"] - float(mean)) < 0.1 * sd and abs(rows[name]["sd"] / sd - 1.0) < 0.1
    levels = found.quantiles([0.05, 0.95])["s"]
    inside = [float(share.sum(0)[s <= level].sum()) for level in levels]
    assert abs(inside[0] - 0.05) < 0.02 and abs(inside[1] - 0.95) < 0.02


def test_one_wide_block_is_integrated_by_draws() -> None:
    """By spheres five positive coefficients of ten data had the log evidence .09 nats too high, eight 1.1."""
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(10, 8, generator=generator, dtype=torch.float64)
    y = 0.5 * X[:, 0] + 0.5 * torch.randn(10, generator=generator, dtype=torch.float64)

    def model(y: Tensor) -> None:
        s = pyro.sample("s", dist.HalfNormal(torch.ones(()).double()))
        w = pyro.sample("w", dist.HalfNormal(torch.ones(8).double()).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(X @ w, s), obs=y)

    found = LaplaceEvidence(model, stop=QUIET).run(y)
    w, s = torch.randn(2**18, 9, generator=generator, dtype=torch.float64).abs().split([8, 1], -1)
    parts = zip((w @ X.mT).split(2**16), s.split(2**16), strict=True)
    logs = torch.cat([dist.Normal(mean, s).log_prob(y).sum(-1) for mean, s in parts])
    spread = float((logs - logs.amax()).exp().std() / (logs - logs.amax()).exp().mean()) / len(logs) ** 0.5
    truth = float(logs.logsumexp(0)) - math.log(len(logs))
    assert abs(float(found.log_evidence) - truth) < 3.0 * (float(found.log_evidence_error) + spread)
    assert float(found.log_evidence_error) < 0.1
