"""Effective draws a second: NUTS in a posterior's coordinates beside Pyro's default, on fifteen models.

    python -m benchmarks.laplace_nuts [--draws 500] [NAME ...]

Pyro's NUTS takes as many steps of warm-up as draws (a column), ours a tenth; both warm-ups are counted, and for ours
the writing down of the density as well. The fit that ours begins with has a column, and is counted in the last ratio.
Seconds are the processor's, one thread; effective draws are the least over all coordinates. Rows are written to
benchmarks/results/laplace_nuts.md as they come, in place of those of the same name.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch

torch.set_default_dtype(torch.float64)  # before models make tensors

from pyro.infer import MCMC, NUTS
from pyro.ops.stats import effective_sample_size
from torch import Tensor

from pyro_evidence import LaplaceEvidence, LaplaceNUTS, Stop
from tests.models_for_tests import sampled_scales as scales
from tests.models_for_tests.long_runs import LONG_RUNS

TABLE = Path(__file__).parent / "results" / "laplace_nuts.md"
HEAD = """# NUTS in a posterior's coordinates

Written by `python -m benchmarks.laplace_nuts`, which says what is measured.

| model | coordinates | draws | Pyro: s, effective | ours: fit s, s, effective | ratio | with the fit |
|---|---|---|---|---|---|---|
"""


def correlated_design(num: int, size: int, correlation: float) -> Tensor:
    common = scales.generated(num, 1, seed=1)
    return correlation**0.5 * common + (1.0 - correlation) ** 0.5 * scales.generated(num, size, seed=2)


def logistic(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def poisson(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Poisson((X @ w).exp()), obs=y)


def items(person: Tensor, item: Tensor, y: Tensor) -> None:
    """A Rasch model of 300 persons and 40 items."""
    with pyro.plate("persons", 300):
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
    with pyro.plate("items", 40):
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=theta[person] - b[item]), obs=y)


def classified(X: Tensor, y: Tensor) -> None:
    """A Gaussian process behind binary data."""
    K = (-0.5 * ((X[:, None] - X) / 0.3).square()).exp() + 1e-4 * torch.eye(len(X))
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(X)), 2.0 * K))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def answers() -> tuple[Tensor, Tensor, Tensor]:
    person, item = torch.arange(300).repeat_interleave(10), (7 * torch.arange(3000)) % 40
    logit = scales.generated(300, seed=3)[person] - scales.generated(40, seed=4)[item]
    return person, item, (logit + scales.generated(3000, seed=5) > 0).double()


def binary(X: Tensor) -> tuple[Tensor, Tensor]:
    return X, (X[:, 0] - X[:, 1] + scales.generated(len(X), seed=6) > 0).double()


def counted(X: Tensor) -> tuple[Tensor, Tensor]:
    return X, (0.5 * X[:, 0] + 0.3 * scales.generated(len(X), seed=7)).exp().mul(2.0).floor()


UNITS = torch.tensor([1.0, 1e-2, 1e2, 1e3, 1.0])
LINE = torch.linspace(-1.0, 1.0, 40)
Data = Callable[[], tuple[Any, ...]]
MODELS: dict[str, tuple[Any, Data]] = {
    "eight schools, centred": (scales.schools_centred, lambda: (scales.SCHOOLS,)),
    "eight schools, non-centred": (scales.schools_noncentred, lambda: (scales.SCHOOLS,)),
    "regression, sampled noise": (scales.regression, lambda: (scales.X, scales.Y)),
    "robust regression": (scales.student, lambda: (scales.X, scales.Y)),
    "negative binomial": (scales.overdispersed, lambda: (scales.X, scales.COUNTS.repeat(7)[:60])),
    "logistic, correlated .95": (logistic, lambda: binary(correlated_design(300, 20, 0.95))),
    "logistic, 100 coefficients": (logistic, lambda: binary(correlated_design(500, 100, 0.5))),
    "logistic, other units": (logistic, lambda: binary(scales.generated(200, 5, seed=8) * UNITS)),
    "counts, correlated .9": (poisson, lambda: counted(correlated_design(200, 10, 0.9))),
    "persons and items, 340": (items, answers),
    "Gaussian process, binary": (classified, lambda: (LINE, (LINE.mul(4.0).sin() > 0).double())),
    "baseball, centred": (LONG_RUNS["baseball"].model, lambda: (LONG_RUNS["baseball"].data(),)),
    "germination": (LONG_RUNS["germination"].model, lambda: (LONG_RUNS["germination"].data(),)),
    "growth by region": (LONG_RUNS["regions"].model, lambda: (LONG_RUNS["regions"].data(),)),
    "Poisson process, settings sampled": (LONG_RUNS["process"].model, lambda: (LONG_RUNS["process"].data(),)),
}


def measured(kernel: Any, data: tuple[Any, ...], warmup_steps: int, num_samples: int) -> tuple[float, float]:
    """Seconds, and the least effective number of draws."""
    pyro.set_rng_seed(0)
    start = time.process_time()
    mcmc = MCMC(kernel, num_samples=num_samples, warmup_steps=warmup_steps, disable_progbar=True)
    mcmc.run(*data)
    seconds = time.process_time() - start
    rows = [v.reshape(1, len(v), -1) for v in mcmc.get_samples().values()]
    worth = torch.cat([effective_sample_size(each).flatten() for each in rows])
    worth = torch.where(worth > 0, worth, num_samples).clamp(max=num_samples)  # draws that alternate: no more than all
    return seconds, float(worth.min())


def row(name: str, num_samples: int) -> str:
    """One line of the table."""
    model, made = MODELS[name]
    data = made()
    start = time.process_time()
    posterior = LaplaceEvidence(model, stop=Stop(progress=False)).run(*data)
    fit = time.process_time() - start
    ours, effective = measured(LaplaceNUTS(posterior), (), num_samples // 10, num_samples)
    pyros, theirs = measured(NUTS(model), data, num_samples, num_samples)
    rate = theirs / pyros
    ratios = [effective / seconds / rate for seconds in (ours, fit + ours)]
    numbers = f"{pyros:.1f}, {theirs:.0f} | {fit:.1f}, {ours:.1f}, {effective:.0f} | {ratios[0]:.1f} | {ratios[1]:.1f}"
    return f"| {name} | {len(posterior.state.u)} | {num_samples} | {numbers} |"


def written(name: str, line: str) -> None:
    """Put a line in its place."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    kept = {each.split("|")[1].strip(): each for each in lines if each.startswith("| ") and "---" not in each}
    kept[name] = line
    TABLE.write_text(HEAD + "\n".join(kept[n] for n in MODELS if n in kept) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)}; by default all")
    parser.add_argument("--draws", type=int, default=500)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in asked.names or MODELS:
        line = row(name, asked.draws)
        written(name, line)
        print(line, flush=True)


if __name__ == "__main__":
    main()
