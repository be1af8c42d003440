"""Three to six scales of a skewed density with long tails: lattices and draws beside the exact marginal."""

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, NotAMode, Stop
from pyro_evidence.nested import integration

NUM = 20
FINER = 0.15  # log units, for the noise, which is known best


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cumulative(num: int) -> Tensor:
    """What innovations add to a level later on, ``(num, num - 1)``."""
    return torch.ones(num, num - 1, dtype=torch.float64).tril(-1)


DAYS = torch.arange(NUM).double()
LEVEL = cumulative(NUM)
SLOPE = torch.ones(NUM, NUM, dtype=torch.float64).tril(-1) @ LEVEL
TREND = (0.1 * SLOPE @ normal(NUM - 1, seed=0)) + 0.3 * LEVEL @ normal(NUM - 1, seed=1) + normal(NUM, seed=2)


def local_linear_trend(y: Tensor) -> None:
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    of_level = pyro.sample("level", dist.HalfNormal(1.0))
    of_slope = pyro.sample("slope", dist.HalfNormal(1.0))
    start = pyro.sample("start", dist.Normal(0.0, 5.0))
    begin = pyro.sample("begin", dist.Normal(0.0, 1.0))
    with pyro.plate("steps", NUM - 1):
        level = pyro.sample("e_level", dist.Normal(0.0, of_level))
        slope = begin + pyro.sample("e_slope", dist.Normal(0.0, of_slope)).cumsum(-1)
    before = torch.cat([begin.unsqueeze(-1), slope[..., :-1]], -1)
    mean = start + torch.cat([torch.zeros(1).double(), (before + level).cumsum(-1)], -1)
    with pyro.plate("data", NUM):
        pyro.sample("y", dist.Normal(mean, noise), obs=y)


A, B, C = (each.flatten() for each in torch.meshgrid(*[torch.arange(3)] * 3, indexing="ij"))
FACTORS = {"a": A, "b": B, "c": C}
ROWS = 0.8 * normal(3, seed=4)[A] + 0.5 * normal(3, seed=5)[B] + 0.3 * normal(3, seed=6)[C] + 0.6 * normal(27, seed=7)


def crossed(y: Tensor) -> None:
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    for name, member in FACTORS.items():
        scale = pyro.sample(f"of_{name}", dist.HalfNormal(1.0))
        with pyro.plate(name, 3):
            mean = mean + pyro.sample(f"e_{name}", dist.Normal(0.0, scale))[member]
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, noise), obs=y)


def own(rows: Tensor) -> Tensor:
    return rows @ rows.T


def same(member: Tensor) -> Tensor:
    return (member.unsqueeze(-1) == member).double()


ONE = torch.ones(27, 27, dtype=torch.float64)
CASES: dict[str, tuple[Callable[[Tensor], None], Tensor, Tensor, dict[str, Tensor], float]] = {
    "local linear trend": (
        local_linear_trend,
        TREND,
        25.0 + DAYS.outer(DAYS),
        {"level": own(LEVEL), "noise": torch.eye(NUM).double(), "slope": own(SLOPE)},
        0.45,
    ),
    "crossed": (
        crossed,
        ROWS,
        25.0 * ONE,
        {"noise": torch.eye(27).double()} | {f"of_{name}": same(member) for name, member in FACTORS.items()},
        0.55,
    ),
}


def by_quadrature(y: Tensor, fixed: Tensor, parts: dict[str, Tensor], step: float) -> tuple[float, Tensor, Tensor]:
    """Oracle: log evidence, means and deviations of the scales, the rest integrated on paper."""
    steps = {name: FINER if name == "noise" else step for name in parts}
    u = torch.cartesian_prod(*[torch.arange(-8.0 + 4.0 * (n == "noise"), 1.5, steps[n]).double() for n in parts])
    heights = []
    for rows in u.split(5000):
        covariance = fixed + sum(
            (2.0 * u).exp()[:, None, None] * part for u, part in zip(rows.T, parts.values(), strict=True)
        )
        likelihood = dist.MultivariateNormal(torch.zeros_like(y), covariance, validate_args=False).log_prob(y)
        heights.append(likelihood + (dist.HalfNormal(1.0).log_prob(rows.exp()) + rows).sum(-1))
    height = torch.cat(heights)
    weights, scales = height.softmax(0).unsqueeze(-1), u.exp()
    mean = (weights * scales).sum(0)
    sd = (weights * (scales - mean).square()).sum(0).sqrt()
    return float(height.logsumexp(0)) + math.log(math.prod(steps.values())), mean, sd


@pytest.mark.parametrize("case", [pytest.param(n, marks=[pytest.mark.slow] * (n == "crossed")) for n in CASES])
def test_scales_that_products_of_nodes_do_not_settle_have_the_moments_of_quadrature(case: str) -> None:
    model, y, fixed, parts, step = CASES[case]
    log_evidence, mean, sd = by_quadrature(y, fixed, parts, step)
    posterior = LaplaceEvidence(model, stop=Stop(progress=False, quadrature_tol=0.01)).run(y)
    assert ("lattice" if len(parts) == 3 else "draws") in posterior.diagnostics()["integration"]
    assert float(posterior.log_evidence) == pytest.approx(log_evidence, abs=0.02)
    draws = posterior.get_samples(4000, seed=0)
    for i, name in enumerate(parts):
        assert abs(float(draws[name].mean() - mean[i])) < 0.06 * float(sd[i]), name
        assert float(draws[name].std() / sd[i]) == pytest.approx(1.0, abs=0.08), name


def many_crossed(prior: dist.Distribution, num: int) -> tuple[Callable[[Tensor], None], Tensor, Tensor]:
    """Forty rows of ``num`` factors of three levels each, their spreads .8, .5, .3, .1 and 0; the factors' levels."""
    generator = torch.Generator().manual_seed(0)
    members = torch.stack([torch.randint(0, 3, (40,), generator=generator) for _ in range(num)])
    spreads = zip((0.8, 0.5, 0.3, 0.1, 0.0), members, strict=False)
    y = 0.6 * normal(40, seed=0) + sum(sd * normal(3, seed=10 + i)[m] for i, (sd, m) in enumerate(spreads))

    def model(y: Tensor) -> None:
        noise = pyro.sample("noise", prior)
        mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
        for i, member in enumerate(members):
            scale = pyro.sample(f"of_{i}", prior)
            with pyro.plate(f"levels_{i}", 3):
                mean = mean + pyro.sample(f"e_{i}", dist.Normal(0.0, scale))[member]
        with pyro.plate("data", 40):
            pyro.sample("y", dist.Normal(mean, noise), obs=y)

    return model, y, members


def by_importance(y: Tensor, members: Tensor, prior: dist.Distribution) -> float:
    """Oracle: log evidence by 65,536 logistic points of the log scales, known to .015 nats; the rest on paper."""
    parts = [torch.eye(len(y)).double(), *(same(member) for member in members)]
    uniform = torch.quasirandom.SobolEngine(len(parts), scramble=True, seed=3).draw(2**16, dtype=torch.float64)
    logit = uniform.clamp(1e-12, 1.0 - 1e-12).logit()
    scale = torch.tensor([0.12] + [0.8] * len(members), dtype=torch.float64)
    u = torch.tensor([-0.5] + [-0.9] * len(members), dtype=torch.float64) + scale * logit
    log_weights = (scale.log() - logit.sigmoid().log() - (-logit).sigmoid().log()).sum(-1)
    log_weights += (prior.log_prob(u.exp()) + u).sum(-1)
    for rows, weights in zip(u.split(4096), log_weights.split(4096), strict=True):
        covariance = 25.0 + sum((2.0 * u).exp()[:, None, None] * A for u, A in zip(rows.T, parts, strict=True))
        weights += dist.MultivariateNormal(torch.zeros_like(y), covariance, validate_args=False).log_prob(y)
    return float(log_weights.logsumexp(0)) - math.log(len(u))


def test_a_skewed_density_in_six_dimensions_is_drawn_from() -> None:
    """A central composite design is .06 nats low."""
    prior = dist.HalfNormal(torch.tensor(1.0, dtype=torch.float64))
    model, y, members = many_crossed(prior, 5)
    posterior = LaplaceEvidence(model, stop=Stop(progress=False)).run(y)
    off = float(posterior.log_evidence) - by_importance(y, members, prior)
    assert abs(off) < 0.03
    assert abs(off) < 2.0 * math.hypot(float(posterior.log_evidence_error), 0.015)


def test_where_few_draws_carry_the_weight_the_design_is_taken_with_their_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(integration.importance, "effective_sample_size", lambda _: torch.tensor(5.0))
    model, y, _ = many_crossed(dist.HalfNormal(torch.tensor(1.0, dtype=torch.float64)), 5)
    integral = LaplaceEvidence(model, stop=Stop(progress=False)).run(y).integral
    assert "design" in integral.method and integral.error > 0.02


def test_draws_without_an_inner_mode_are_worth_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, y, _ = many_crossed(dist.HalfNormal(torch.tensor(1.0, dtype=torch.float64)), 3)
    drawn = integration._drawn

    def none(*given: Any) -> tuple[Any, Tensor]:
        nodes, log_mass = drawn(*given)
        return nodes, torch.full_like(log_mass, -math.inf)

    monkeypatch.setattr(integration, "_drawn", none)
    monkeypatch.setattr(integration, "NUM_DRAWS", (256, 512))
    with pytest.raises(NotAMode, match=r"256 draws there are worth 0\.0"):
        LaplaceEvidence(model, stop=Stop(progress=False)).run(y)
