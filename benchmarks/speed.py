"""How long a fit takes, against other engines on the same model in the same process: one Markdown table.

    OMP_NUM_THREADS=1 python benchmarks/speed.py

Double precision, and one thread but in the last rows.  Everything is run once unmeasured before it is measured; times
are medians of processor time, and only their ratios carry over to another machine.  The Pima rows and sleepstudy need
PYRO_EVIDENCE_DATA.
The rows of 1000 dense weights time the problem of bench_linear_predictor.py, which also shows where that time
and the memory go.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import bench_linear_predictor as dense
import pyro
import pyro.distributions as dist
import timing
import torch
from pandas import read_csv
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO, config_enumerate
from pyro.infer.autoguide import AutoLaplaceApproximation
from pyro.optim import Adam
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import EvidenceEM, LaplaceEvidence, Start, Stop
from pyro_evidence.datasets import pima, standardised
from pyro_evidence.laplace.approximation import laplace_problem as problem_of
from pyro_evidence.laplace.approximation import laplace_state
from pyro_evidence.models.formula import mixed
from pyro_evidence.models.mixture import FullNoise, gaussian_mixture
from pyro_evidence.program import LogJoint

NUM_RESTARTS = 64
QUIET = Stop(progress=False)


@dataclass(frozen=True)
class Row:
    """One comparison; it is met when the rival takes at least ``target`` times as long as we do."""

    case: str
    ours: float  # seconds
    rival: float  # seconds
    target: float

    @property
    def ratio(self) -> float:
        return self.rival / self.ours

    def __str__(self) -> str:
        stop_reason = "met" if self.ratio >= self.target else "MISSED"
        cells = [
            self.case,
            f"{self.ours:.4f}",
            f"{self.rival:.4f}",
            f"{self.ratio:.3g}",
            f"{self.target:g}",
            stop_reason,
        ]
        return f"| {' | '.join(cells)} |"


def seconds(job: Callable[[], object], num_repeats: int) -> float:
    """Median processor time of ``job``, after one run that is not counted; other processes hardly change it."""
    job()
    times = []
    for _ in range(num_repeats):
        pyro.set_rng_seed(0)
        times.append(timing.seconds(job))
    return median(times)


def logistic(X: Tensor, t: Tensor) -> None:
    """Logistic regression; every weight, the bias too, has prior precision 1."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def logistic_ard(X: Tensor, t: Tensor) -> None:
    """The same with a learned precision for each weight."""
    alpha = pyro.param("alpha", torch.ones(X.shape[-1]), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[-1]), alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


@config_enumerate
def mixture(x: Tensor) -> None:
    """Three Gaussians on a line, the component of each datum summed out."""
    mixing = pyro.sample("mixing", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        loc = pyro.sample("loc", dist.Normal(0.0, 5.0))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(mixing))
        pyro.sample("x", dist.Normal(loc[z], scale[z]), obs=x)


def mixture_data() -> Tensor:
    """200 numbers from three clusters, two of which overlap a little."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.tensor([-3.0, 0.0, 4.0])[torch.randint(3, (200,), generator=generator)]
    return centre + 0.7 * torch.randn(200, generator=generator)


def nuts(X: Tensor, t: Tensor) -> None:
    MCMC(NUTS(logistic), num_samples=500, warmup_steps=500, disable_progbar=True).run(X, t)


def svi(X: Tensor, t: Tensor) -> None:
    guide = AutoLaplaceApproximation(logistic)
    engine = SVI(logistic, guide, Adam({"lr": 0.02}), Trace_ELBO())
    for _ in range(1000):
        engine.step(X, t)
    guide.laplace_approximation(X, t)


def pima_rows() -> Iterator[Row]:
    """Logistic regression, N=768, nine weights, on standardised inputs and a bias column."""
    data = standardised(pima())
    X, t = torch.cat([data.X, torch.ones(len(data.X), 1)], 1), data.t
    fixed = seconds(lambda: LaplaceEvidence(logistic, stop=QUIET).run(X, t), 15)
    ard = seconds(lambda: LaplaceEvidence(logistic_ard, stop=QUIET).run(X, t), 9)
    by_svi = seconds(lambda: svi(X, t), 3)
    by_nuts = seconds(lambda: nuts(X, t), 3)
    yield Row("Pima, precisions fixed, against NUTS 500+500", fixed, by_nuts, 100)
    yield Row("the same against 1000 SVI steps + AutoLaplaceApproximation", fixed, by_svi, 20)
    yield Row("Pima, 9 precisions learned, against that without learning any", ard, by_svi, 1)


def restarts_row() -> Row:
    """What one of many restarts costs."""
    x = mixture_data()
    alone = seconds(lambda: LaplaceEvidence(mixture, stop=QUIET).run(x), 7)
    together = seconds(lambda: LaplaceEvidence(mixture, start=Start(restarts=NUM_RESTARTS), stop=QUIET).run(x), 3)
    case = f"mixture, N=200, K=3: one of {NUM_RESTARTS} restarts, against one alone"
    return Row(case, together / NUM_RESTARTS, alone, 10)


def dense_rows() -> Iterator[Row]:
    """Logistic regression, N=5000, D=1000, in units of one weighted Gram matrix."""
    X, t = dense.problem()
    b = torch.rand(len(X))
    at = problem_of(LogJoint(dense.logistic, (X, t)))
    theta, start = at.joint.initial_theta, at.joint.initial_u
    product = seconds(lambda: X.T @ (b[:, None] * X), 7)
    mode = seconds(lambda: laplace_state(at, theta, start, cold=True), 3)
    whole = seconds(lambda: LaplaceEvidence(dense.logistic, maximise=(), stop=QUIET).run(X, t), 3)
    yield Row("N=5000, D=1000: mode + Hessian + evidence, against X'(b X)", mode, product, 1 / 25)
    yield Row("the same: all of run(), finding the predictor included", whole, product, 1 / 25)


def threads_rows() -> Iterator[Row]:
    """Small fits where torch has as many threads as there are cores, against one thread."""
    generator = torch.Generator().manual_seed(0)
    centres = 6.0 * torch.randn(8, 3, generator=generator)
    Y = centres[torch.arange(20_000) % 8] + torch.randn(20_000, 3, generator=generator)
    fits = {"mixture, N=20,000 x 3, K=8": lambda: EvidenceEM(gaussian_mixture(8, noise=FullNoise()), stop=QUIET).run(Y)}
    if "PYRO_EVIDENCE_DATA" in os.environ:
        model, args = mixed(
            "Reaction ~ Days + (Days | Subject)", read_csv(Path(os.environ["PYRO_EVIDENCE_DATA"]) / "sleepstudy.csv")
        )
        fits["sleepstudy"] = lambda: LaplaceEvidence(model, stop=QUIET).run(*args)
    for case, fit in fits.items():
        alone = seconds(fit, 3)
        torch.set_num_threads(os.cpu_count() or 1)
        yield Row(f"{case}: {torch.get_num_threads()} threads, against one", seconds(fit, 3), alone, 1 / 1.3)
        torch.set_num_threads(1)


def threads() -> str:
    """What decides how fast the linear algebra below everything runs."""
    variables = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_CORETYPE"]
    settings = [f"{name}={os.environ.get(name, 'unset')}" for name in variables]
    return ", ".join([*settings, f"torch {torch.__version__} on {torch.get_num_threads()} thread(s)"])


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    pyro.enable_validation(False)  # as fast as the rivals can be
    print(threads(), end="\n\n")
    print("| case | ours, s | rival, s | rival / ours | target | |\n|---|---|---|---|---|---|")
    if "PYRO_EVIDENCE_DATA" in os.environ:
        for row in pima_rows():
            print(row)
    else:
        print("| Pima: left out, PYRO_EVIDENCE_DATA is not set | | | | | |")
    print(restarts_row())
    for row in [*dense_rows(), *threads_rows()]:
        print(row)


if __name__ == "__main__":
    main()
