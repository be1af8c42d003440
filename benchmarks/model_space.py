"""Sums over structures, and many fits at once: right against closed forms and fits one by one, and how long they take.

    python benchmarks/model_space.py [NAME ...]

One thread; processor seconds of whole runs.  ``uscrime`` wants R with r-cran-mass, whose data it reads; ``limited``
enumerates 65,536 structures of ten data sets, half a minute each, beside its searches of a second.
"""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from pyro_evidence import LaplaceEvidence, Start, Stop, bootstrap, compare_evidence, explore, run_many, sbc
from pyro_evidence.models.kernels import RBF, Linear, Periodic
from pyro_evidence.program.branching import fixed

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
BRANCHING = {"branching": True}
QUIET = Stop(progress=False)
Found = TypeVar("Found")


def selection(likelihood: Callable, scale: float, intercept: bool = False) -> Callable:
    """A regression whose columns are chosen."""

    def model(X, y=None):
        keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([X.shape[1]]).to_event(1), infer=BRANCHING)
        w = pyro.sample("w", dist.Normal(0.0, scale).expand([X.shape[1]]).to_event(1))
        b = pyro.sample("b", dist.Normal(0.0, scale)) if intercept else 0.0
        with pyro.plate("data", len(X)):
            pyro.sample("y", likelihood(b + X @ (w * keep)), obs=y)

    return model


def logistic(eta):
    return dist.Bernoulli(logits=eta)


def simulated(num: int, size: int, seed: int, binary: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns that have a half of their variance in common; a third of them matter."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(num, size, generator=generator) + 0.7 * torch.randn(num, 1, generator=generator)
    w = 0.3 * torch.randn(size, generator=generator) * (torch.rand(size, generator=generator) < 0.4)
    noise = torch.randn(num, generator=generator)
    return X, (torch.sigmoid(X @ w) > torch.special.ndtr(noise)).double() if binary else X @ w + 0.5 * noise


def timed(run: Callable[[], Found]) -> tuple[Found, float]:
    begun = time.process_time()
    return run(), time.process_time() - begun


def conjugate() -> str:
    X, y = simulated(100, 10, 0, binary=False)
    model = selection(lambda eta: dist.Normal(eta, 0.5), 1.0)
    found, seconds = timed(lambda: LaplaceEvidence(model).run(X, y))
    every = torch.tensor(list(product([0.0, 1.0], repeat=10)))
    exact = torch.stack(
        [dist.MultivariateNormal(torch.zeros(100), 0.25 * torch.eye(100) + (X * k) @ X.T).log_prob(y) for k in every]
    )
    away = abs(float(found.log_evidence - exact.logsumexp(0) + 10 * math.log(2.0)))
    inclusion = float((found.inclusion("keep") - exact.softmax(0) @ every).abs().max())
    return f"log evidence {away:.1e} off, inclusion {inclusion:.1e}; {seconds:.2f} s"


def pima() -> str:
    rows = torch.from_numpy(
        np.loadtxt(Path(os.environ["PYRO_EVIDENCE_DATA"]) / "pima_532.csv", delimiter=",", skiprows=1)
    )
    found, seconds = timed(
        lambda: LaplaceEvidence(selection(logistic, 10.0, intercept=True)).run(rows[:, 1:], rows[:, 0])
    )
    noted = torch.tensor([0.930, 1.000, 0.013, 0.020, 0.997, 0.953, 0.134])
    return f"inclusion {float((found.inclusion('keep') - noted).abs().max()):.1e} from the noted; {seconds:.2f} s"


def crimes() -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of MASS's UScrime, all but So as logarithms and centred, and the log rate."""
    text = "d <- MASS::UScrime; i <- names(d) != 'So'; d[i] <- log(d[i]); write.csv(d, row.names = FALSE)"
    done = subprocess.run(["Rscript", "-e", text], capture_output=True, text=True, check=True)
    rows = torch.tensor([[float(x) for x in line.split(",")] for line in done.stdout.splitlines()[1:]])
    return rows[:, :-1] - rows[:, :-1].mean(0), rows[:, -1]


def zellner_siow(X: torch.Tensor, y: torch.Tensor) -> None:
    """A g prior with the scale sampled; wide priors, the same in all structures, on intercept and noise."""
    keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([X.shape[1]]).to_event(1), infer=BRANCHING)
    g = pyro.sample("g", dist.InverseGamma(0.5, 0.5 * len(X)))
    sigma = pyro.sample("sigma", dist.LogNormal(y.std().log(), 20.0))
    b = pyro.sample("b", dist.Normal(y.mean(), 10.0))
    kept = X * keep
    tril = torch.linalg.cholesky(kept.T @ kept + torch.diag(1.0 - keep))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    w = torch.linalg.solve_triangular(tril.T, z.unsqueeze(-1), upper=True).squeeze(-1)
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(b + sigma * g.sqrt() * (kept @ w), sigma), obs=y)


def uscrime() -> str:
    X, y = crimes()
    found, seconds = timed(lambda: LaplaceEvidence(zellner_siow, stop=QUIET).run(X, y))
    n, centred, log_g = len(X), y - y.mean(), torch.linspace(-12.0, 16.0, 501)
    prior = dist.InverseGamma(0.5, 0.5 * n).log_prob(log_g.exp()) + log_g + (log_g[1] - log_g[0]).log()
    keep, log_bayes = found.found.values["keep"], []  # Liang et al. (2008), eq. 6, integrated over g
    for some in keep.split(1024):
        gram = some.unsqueeze(-1) * (X.T @ X) * some.unsqueeze(-2) + torch.diag_embed(1.0 - some)
        moved = some * (X.T @ centred)
        share = (moved * torch.linalg.solve(gram, moved)).sum(-1, keepdim=True) / centred.square().sum()
        of_g = (n - 1.0 - some.sum(-1, keepdim=True)) * log_g.exp().log1p()
        log_bayes.append((0.5 * (of_g - (n - 1.0) * (log_g.exp() * (1.0 - share)).log1p()) + prior).logsumexp(-1))
    exact = torch.cat(log_bayes)
    away = float((found.inclusion("keep") - exact.softmax(0) @ keep).abs().max())
    noted = {0: 0.850, 2: 0.974, 3: 0.664, 4: 0.448, 12: 0.996, 13: 0.896}  # M, Ed, Po1, Po2, Ineq, Prob
    apart = max(abs(float(found.inclusion("keep")[i]) - p) for i, p in noted.items())
    best = float(found.log_evidences.max() - found.log_evidences[keep.sum(-1) == 0])
    return (
        f"32,768 linear models, g sampled, inclusion {away:.1e} off the integral on paper, {apart:.1e} off the noted; "
        f"best log Bayes factor {best:.3f} (noted 23.868, on paper {float(exact.max()):.3f}); {seconds:.1f} s"
    )


def many() -> str:
    X, y = simulated(500, 12, 1, binary=True)
    model = selection(logistic, 1.0)
    found, seconds = timed(lambda: LaplaceEvidence(model).run(X, y))
    alone = [
        float(
            LaplaceEvidence(fixed(model, found.found.of(i)), stop=QUIET).run(X, y).log_evidence - found.log_evidences[i]
        )
        for i in range(0, 4096, 512)
    ]
    return f"4,096 logistic models, fits of their own {max(map(abs, alone)):.1e} off; {seconds:.2f} s"


def limited() -> str:
    away, covered, seconds = [], 0, []
    for seed in range(10):
        X, y = simulated(1000, 16, seed, binary=True)
        every = LaplaceEvidence(selection(logistic, 1.0), stop=QUIET).run(X, y)
        engine = LaplaceEvidence(selection(logistic, 1.0), start=Start(structures=2000))
        found, spent = timed(partial(engine.run, X, y))
        masses = dict(zip(map(tuple, every.found.values["keep"].tolist()), every.probabilities.tolist(), strict=True))
        truth = 1.0 - sum(masses[tuple(row)] for row in found.found.values["keep"].tolist())
        away.append(float((found.inclusion("keep") - every.inclusion("keep")).abs().max()))
        covered += found.unvisited >= truth
        seconds.append(spent)
    return f"inclusion at most {max(away):.4f} off, unvisited covers {covered} of 10; {max(seconds):.1f} s at most"


def fifty() -> str:
    X, y = simulated(500, 50, 0, binary=True)
    pairs = [
        timed(lambda seed=seed: LaplaceEvidence(selection(logistic, 1.0), start=Start(seed=seed)).run(X, y))
        for seed in (0, 1)
    ]
    (one, first), (other, second) = pairs
    away = float((one.inclusion("keep") - other.inclusion("keep")).abs().max())
    return f"two searches {away:.3f} apart, unvisited {one.unvisited:.2f}; {first:.1f} and {second:.1f} s"


def mixed() -> str:
    """Random intercepts of a hundred groups, both spreads maximised, and eight columns that are chosen."""
    generator = torch.Generator().manual_seed(0)
    X, noise = torch.randn(10_000, 8, generator=generator), torch.randn(10_000, generator=generator)
    group = torch.arange(10_000) % 100
    y = X @ torch.tensor([0.5, -0.3, 0.1, 0.03, 0.02, 0.0, 0.0, 0.0]) + noise
    y = y + 0.7 * torch.randn(100, generator=generator)[group]

    def model(X, group, y):
        keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([8]).to_event(1), infer=BRANCHING)
        positive, one = dist.constraints.positive, torch.tensor(1.0)
        tau, sigma = (pyro.param(name, one, constraint=positive) for name in ("tau", "sigma"))
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([8]).to_event(1))
        with pyro.plate("groups", 100):
            level = pyro.sample("level", dist.Normal(0.0, tau))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(b + X @ (w * keep) + level[group], sigma), obs=y)

    found, seconds = timed(lambda: LaplaceEvidence(model, stop=QUIET).run(X, group, y))
    places, away = found.found.values["keep"], 0.0
    for k in (0, int(found.order[0]), 255):  # in closed form, at the maximum's own spreads
        end, kept = found._member(k).hyperparameters, X * places[k]
        effects = torch.cat(
            [torch.nn.functional.one_hot(group).double() * end["tau"], kept, 2.0 * torch.ones(len(X), 1)], -1
        )
        exact = dist.LowRankMultivariateNormal(torch.zeros(len(X)), effects, end["sigma"].square().expand(len(X)))
        away = max(away, abs(float(exact.log_prob(y) - found.log_evidences[k])))
    return (
        f"{len(places)} mixed models, {len(found.failures)} failed, {away:.1e} off the normal density; {seconds:.1f} s"
    )


def counts() -> str:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(200, 3, generator=generator)
    y = torch.poisson((0.5 * X[:, 0] + torch.randn(200, generator=generator) * 0.8).exp(), generator=generator)

    def poisson(X, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Poisson((X @ w).exp()), obs=y)

    def negative_binomial(X, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        size = pyro.sample("size", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.GammaPoisson(size, size / (X @ w).exp()), obs=y)

    def zero_inflated(X, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        gate = pyro.sample("gate", dist.Beta(1.0, 1.0))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.ZeroInflatedPoisson((X @ w).exp(), gate=gate), obs=y)

    def hurdle(X, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        gate, above = pyro.sample("gate", dist.Beta(1.0, 1.0)), y > 0
        with pyro.plate("data", len(X)):
            pyro.sample("crossed", dist.Bernoulli(1.0 - gate), obs=above.double())
            rate = (X @ w).exp()
            log_prob = dist.Poisson(rate).log_prob(y) - (-(-rate).expm1()).log()
            pyro.factor("y", torch.where(above, log_prob, 0.0))

    programs = {"Poisson": poisson, "negative binomial": negative_binomial}
    programs |= {"zero-inflated": zero_inflated, "hurdle": hurdle}
    found, seconds = timed(lambda: explore(programs, X, y))
    begun = time.process_time()
    alone = {n: LaplaceEvidence(m, stop=QUIET).run(X, y) for n, m in programs.items()}
    apart = time.process_time() - begun
    compared = compare_evidence(throw=False, **{n.replace(" ", "_").replace("-", "_"): p for n, p in alone.items()})
    shares = {n: round(float(p), 4) for n, p in found.values_of("program").items()}
    return f"{shares}, compare_evidence {compared.probabilities}; {seconds:.2f} s, the fits alone {apart:.2f} s"


def kernels() -> str:
    path = Path(os.environ["PYRO_EVIDENCE_DATA"]) / "drivers.csv"
    counts = [line.split(",")[0] for line in path.read_text().splitlines()[1:]]
    y = torch.tensor([float(count) for count in counts if count not in ("", "NA")]).log()
    X = torch.arange(float(len(y))).unsqueeze(-1)
    bases = {"line": Linear(), "trend": RBF(), "season": Periodic()}
    found, seconds = timed(lambda: explore(bases, X, y - y.mean(), engine=partial(LaplaceEvidence, stop=QUIET)))
    texts, away = found.labels["kernel"], 0.0
    for k in range(5):
        end = found.member(k).hyperparameters
        level = found.member(k)._joint.model.function.kernel
        K = level.resolved(lambda name, setting, _, end=end: end.get(name, setting))(X)
        K = K + (1e-6 + 1.0 / end["beta"]) * torch.eye(len(y))
        exact = dist.MultivariateNormal(torch.zeros(len(y)), K).log_prob(y - y.mean())
        away = max(away, abs(float(exact - found.member(k).log_evidence)))
    best = [texts[int(found.structure(k)["kernel"])] for k in range(3)]
    failed = len(found.failures)
    return f"best {best} of {len(texts)}, {failed} failed, evidences {away:.1e} off the normal density; {seconds:.1f} s"


def grouped(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A column and targets of 60 rows in ten groups, for each fit."""
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(num, 60, generator=generator) for _ in range(2))
    levels = torch.randn(num, 10, generator=generator).repeat(1, 6)
    return x, 1.0 + 0.5 * x + 0.8 * levels + 0.6 * noise


def intercepts(sampled: bool) -> Callable:
    """Random intercepts of ten groups, both spreads sampled or maximised."""

    def model(x, y):
        if sampled:
            tau, sigma = (pyro.sample(name, dist.HalfNormal(1.0)) for name in ("tau", "sigma"))
        else:
            positive, one = dist.constraints.positive, torch.tensor(1.0)
            tau, sigma = (pyro.param(name, one, constraint=positive) for name in ("tau", "sigma"))
        a, b = (pyro.sample(name, dist.Normal(0.0, 10.0)) for name in "ab")
        with pyro.plate("groups", 10):
            level = pyro.sample("level", dist.Normal(0.0, tau))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(a + b * x + level.repeat(6), sigma), obs=y)

    return model


def table(sampled: bool) -> str:
    x, y = grouped(2000)
    engine = LaplaceEvidence(intercepts(sampled), stop=QUIET)
    fits, seconds = timed(lambda: run_many(engine, x, y))
    begun, looked = time.process_time(), range(7, 2000, 100)
    away = max(abs(float(engine.run(x[k], y[k]).log_evidence - fits.log_evidence[k])) for k in looked)
    alone = (time.process_time() - begun) / len(looked)
    return f"2,000 fits, {len(fits.errors)} failed, {len(looked)} by themselves {away:.1e} off; {seconds:.1f} s, " + (
        f"a loop {2000 * alone:.0f} s"
    )


def many_maximised() -> str:
    return table(sampled=False)


def many_sampled() -> str:
    return table(sampled=True)


def schools(sigma, y):
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def calibration() -> str:
    sigma = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    engine = partial(LaplaceEvidence, stop=QUIET)
    found, seconds = timed(lambda: sbc(schools, engine, sigma, torch.zeros(8), num_simulations=500))
    return f"500 fits, {len(found.failures)} failed, all parameters p = {found.p_value:.2f}; {seconds:.1f} s"


def resampled() -> str:
    X, y = simulated(200, 3, 0, binary=False)

    def model(X, y):
        w = pyro.sample("w", dist.Normal(0.0, 10.0).expand([3]).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    posterior = LaplaceEvidence(model, stop=QUIET).run(X, y)
    (medians, _), seconds = timed(lambda: bootstrap(posterior, 200).estimates("w"))
    inverse = torch.linalg.inv(X.T @ X)
    residual = y - X @ (inverse @ X.T @ y)
    sandwich = (inverse @ (X * residual.square().unsqueeze(-1)).T @ X @ inverse).diagonal().sqrt()
    ratio = (medians.std(0) / sandwich).tolist()
    return f"bootstrap of 200, deviations over White's {[round(r, 3) for r in ratio]} (+- 0.05); {seconds:.1f} s"


CASES = {
    f.__name__: f
    for f in (
        *(conjugate, pima, uscrime, many, limited, fifty, mixed, counts, kernels),
        *(many_maximised, many_sampled, calibration, resampled),
    )
}

if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        print(f"{name}: {CASES[name]()}", flush=True)
