"""Hierarchies that long chains have been run on, with data from fixed seeds: what the fits are held against."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from tests.models_for_tests.sampled_scales import generated

AT_BATS = 45.0
HITS = torch.tensor([18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7], dtype=torch.float64)


def baseball(hits: Tensor) -> None:
    """Batting averages of eighteen players, partially pooled on the logit scale; Efron and Morris (1975)."""
    loc, scale = pyro.sample("loc", dist.Normal(-1.0, 1.0)), pyro.sample("scale", dist.HalfCauchy(1.0))
    with pyro.plate("players", len(hits)):
        alpha = pyro.sample("alpha", dist.Normal(loc, scale))
        pyro.sample("hits", dist.Binomial(AT_BATS, logits=alpha), obs=hits)


def baseball_in_noise(hits: Tensor) -> None:
    """The same in coordinates that chains move in well."""
    loc, scale = pyro.sample("loc", dist.Normal(-1.0, 1.0)), pyro.sample("scale", dist.HalfCauchy(1.0))
    with pyro.plate("players", len(hits)):
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        alpha = pyro.deterministic("alpha", loc + scale * eta)
        pyro.sample("hits", dist.Binomial(AT_BATS, logits=alpha), obs=hits)


def captures(history: Tensor) -> None:
    """Survival that varies from season to season; whether an animal lives is enumerated."""
    mean, sigma = pyro.sample("mean", dist.Normal(0.5, 1.0)), pyro.sample("sigma", dist.HalfNormal(1.0))
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))
    with pyro.plate("seasons", history.shape[1] - 1):
        logit = pyro.sample("logit", dist.Normal(mean, sigma))
    with pyro.plate("animals", len(history), dim=-1):
        z, seen = torch.ones(len(history)), torch.zeros(len(history)).bool()
        for t in pyro.markov(range(history.shape[1])):
            alive = torch.where(seen, z * logit[t - 1].sigmoid(), 1.0) if t else z
            z = pyro.sample(f"z_{t}", dist.Bernoulli(alive), infer={"enumerate": "parallel"})
            with poutine.mask(mask=seen):
                pyro.sample(f"y_{t}", dist.Bernoulli(rho * z), obs=history[:, t])
            seen = seen | history[:, t].bool()


def captures_summed(history: Tensor) -> None:
    """The same with the animals' lives summed out on paper: next seasons of capture are multinomial."""
    mean, sigma = pyro.sample("mean", dist.Normal(0.5, 1.0)), pyro.sample("sigma", dist.HalfNormal(1.0))
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))
    with pyro.plate("seasons", history.shape[1] - 1):
        phi = pyro.sample("logit", dist.Normal(mean, sigma)).sigmoid()
    released, again = intervals(history)
    for t, row in enumerate(again):
        alive = phi[t:].cumprod(0) * (1.0 - rho) ** torch.arange(len(phi) - t) * rho
        pyro.factor(f"from_{t}", (row[t:] * alive.log()).sum() + (released[t] - row.sum()) * (1.0 - alive.sum()).log())


def intervals(history: Tensor) -> tuple[Tensor, Tensor]:
    """How many were released in each season but the last, and in which they were caught next, ``(T-1, T-1)``."""
    num = history.shape[1] - 1
    released, again = history[:, :-1].sum(0), torch.zeros(num, num)
    for row in history:
        seasons = row.nonzero().flatten().tolist()
        for first, second in pairwise(seasons):
            again[first, second - 1] += 1
    return released, again


def lives(num: int = 120, seasons: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    survive = torch.tensor([0.8, 0.5, 0.75, 0.6, 0.85, 0.65], dtype=torch.float64)
    alive, found = torch.ones(num), torch.zeros(num, seasons)
    entered = torch.arange(num) % (seasons - 1)
    for t in range(seasons):
        survived = torch.rand(num, generator=generator, dtype=torch.float64) < survive[t - 1]
        alive = torch.where(entered < t, alive * survived, alive)
        caught = torch.rand(num, generator=generator, dtype=torch.float64) < 0.6
        found[:, t] = torch.where(entered == t, torch.ones(num), (entered < t) * alive * caught)
    return found


REGION = torch.arange(60) % 6
YEAR = (torch.arange(60) // 6).double() / 5.0 - 0.9


def regions(y: Tensor) -> None:
    """Growth curves by region: levels and rates with spreads of their own, and a noise scale."""
    level, rate = pyro.sample("level", dist.Normal(0.0, 5.0)), pyro.sample("rate", dist.Normal(0.0, 5.0))
    spreads = [pyro.sample(name, dist.HalfNormal(2.0)) for name in ("of_levels", "of_rates")]
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("regions", 6):
        a, b = pyro.sample("a", dist.Normal(level, spreads[0])), pyro.sample("b", dist.Normal(rate, spreads[1]))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a[REGION] + b[REGION] * YEAR, sigma), obs=y)


def regions_in_noise(y: Tensor) -> None:
    """The same in coordinates that chains move in well."""
    level, rate = pyro.sample("level", dist.Normal(0.0, 5.0)), pyro.sample("rate", dist.Normal(0.0, 5.0))
    spreads = [pyro.sample(name, dist.HalfNormal(2.0)) for name in ("of_levels", "of_rates")]
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("regions", 6):
        noise = [pyro.sample(name, dist.Normal(0.0, 1.0)) for name in ("for_a", "for_b")]
        a = pyro.deterministic("a", level + spreads[0] * noise[0])
        b = pyro.deterministic("b", rate + spreads[1] * noise[1])
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a[REGION] + b[REGION] * YEAR, sigma), obs=y)


def grown() -> Tensor:
    a, b = 2.0 + 1.2 * generated(6, seed=5), 1.0 + 0.6 * generated(6, seed=6)
    return a[REGION] + b[REGION] * YEAR + 0.8 * generated(60, seed=7)


PLATES = torch.cartesian_prod(torch.arange(2), torch.arange(2)).double().repeat(5, 1)
SEEDS = torch.tensor([39, 62, 81, 51, 39, 6, 74, 72, 51, 79, 13, 16, 30, 28, 45, 4, 12, 41, 30, 51]).double()


def germination(k: Tensor) -> None:
    """Binomial counts with two factors, their interaction, and an effect of each plate."""
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([4]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
    design = torch.stack([torch.ones(20), PLATES[:, 0], PLATES[:, 1], PLATES.prod(-1)], -1)
    with pyro.plate("plates", 20):
        b = pyro.sample("b", dist.Normal(0.0, sigma))
        pyro.sample("k", dist.Binomial(SEEDS, logits=design @ w + b), obs=k)


def germination_in_noise(k: Tensor) -> None:
    """The same in coordinates that chains move in well."""
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([4]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
    design = torch.stack([torch.ones(20), PLATES[:, 0], PLATES[:, 1], PLATES.prod(-1)], -1)
    with pyro.plate("plates", 20):
        noise = pyro.sample("noise", dist.Normal(0.0, 1.0))
        b = pyro.deterministic("b", sigma * noise)
        pyro.sample("k", dist.Binomial(SEEDS, logits=design @ w + b), obs=k)


def germinated() -> Tensor:
    eta = -0.5 + 0.1 * PLATES[:, 0] + 1.3 * PLATES[:, 1] - 0.8 * PLATES.prod(-1) + 0.4 * generated(20, seed=8)
    return torch.binomial(SEEDS, eta.sigmoid(), generator=torch.Generator().manual_seed(9))


AGES = (
    0.5 * torch.tensor([2, 3, 3, 3, 5, 8, 10, 10, 14, 16, 17, 18, 19, 19, 20, 24, 24, 26, 26, 29, 31, 33, 34]).double()
)


def lengths(y: Tensor) -> None:
    """A curve that levels off, its noise a sampled precision."""
    end, gap = pyro.sample("end", dist.Normal(0.0, 10.0)), pyro.sample("gap", dist.LogNormal(0.0, 1.0))
    decay, beta = pyro.sample("decay", dist.Uniform(0.5, 1.0)), pyro.sample("beta", dist.Gamma(1.0, 0.01))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(end - gap * decay**AGES, beta.rsqrt()), obs=y)


def measured() -> Tensor:
    return 2.65 - 0.95 * 0.86**AGES + 0.1 * generated(23, seed=10)


PLACES = torch.linspace(-2.0, 2.0, 11, dtype=torch.float64)
FOUND = torch.tensor([12, 9, 14, 6, 3, 5, 4, 8, 19, 25, 17]).double()


def process(y: Tensor) -> None:
    """Poisson counts under a Gaussian process whose length and size are sampled."""
    length, size = pyro.sample("length", dist.InverseGamma(5.0, 5.0)), pyro.sample("size", dist.HalfNormal(2.0))
    gaps = (PLACES[:, None] - PLACES) / length
    K = size**2 * (-0.5 * gaps.square()).exp() + 1e-4 * torch.eye(11)
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(11), K))
    with pyro.plate("data", 11):
        pyro.sample("y", dist.Poisson(f.exp()), obs=y)


def process_in_noise(y: Tensor) -> None:
    """The same in coordinates that chains move in well."""
    length, size = pyro.sample("length", dist.InverseGamma(5.0, 5.0)), pyro.sample("size", dist.HalfNormal(2.0))
    gaps = (PLACES[:, None] - PLACES) / length
    K = size**2 * (-0.5 * gaps.square()).exp() + 1e-4 * torch.eye(11)
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([11]).to_event(1))
    f = pyro.deterministic("f", torch.linalg.cholesky(K) @ z)
    with pyro.plate("data", 11):
        pyro.sample("y", dist.Poisson(f.exp()), obs=y)


@dataclass(frozen=True)
class LongRun:
    """A model with its data.

    :ivar sampled: the same density in a form that chains run on well.
    :ivar marginalised: sites that are integrated numerically.
    :ivar chains: how many, their warm-up, their draws.
    :ivar named: what the fit is told of them, where it does not find all.
    """

    model: Callable[[Tensor], None]
    data: Callable[[], Tensor]
    marginalised: tuple[str, ...]
    sampled: Callable[[Tensor], None] | None = None
    chains: tuple[int, int, int] = (2, 400, 1000)
    named: tuple[str, ...] | None = None


LONG_RUNS = {
    "baseball": LongRun(baseball, lambda: HITS, ("scale",), baseball_in_noise),
    "captures": LongRun(captures, lives, ("sigma",), captures_summed, (3, 500, 1500)),
    "regions": LongRun(regions, grown, ("of_levels", "of_rates", "sigma"), regions_in_noise, (2, 300, 600)),
    "germination": LongRun(germination, germinated, ("sigma",), germination_in_noise),
    "lengths": LongRun(lengths, measured, ("beta", "decay")),
    "process": LongRun(process, lambda: FOUND, ("length", "size"), process_in_noise, (2, 300, 500)),
}
