"""How fast: ratios in one run on one thread.  Our engines against each other, and against one eigendecomposition.

    PYRO_EVIDENCE_DATA=folder python benchmarks/revm_speed.py [--size 2000]

Other packages (scikit-rvm, sklearn-rvm, fastrvm) are not measured: none of them installs beside current releases of
NumPy and scikit-learn.
"""

import argparse
import time
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence import REVM, RVM, LaplacePrior, LogJoint, Stop
from pyro_evidence.axis_priors import GaussianPrior
from pyro_evidence.datasets import csv
from pyro_evidence.eigen_state import Recipe, base_centre, eigen_state, fixed_others
from pyro_evidence.infer import fast_marginal
from pyro_evidence.infer.iterate import iterate
from pyro_evidence.quadratic import laplace_at_base
from pyro_evidence.weights import weights_of

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)


def model(Phi: Tensor, t: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.Normal(Phi.new_zeros(Phi.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(Phi)):
        return pyro.sample("t", dist.Bernoulli(logits=Phi @ w), obs=t)


def seconds(f: Callable[[], object], repeats: int = 3) -> float:
    """The least of a few."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return min(times)


def halves(name: str) -> tuple[Tensor, Tensor]:
    """A kernel problem as in the paper: half of the data, sigma 3, a bias."""
    data = csv(name)
    X = torch.where(data.X.isnan(), data.X.nanmean(0), data.X)
    X = (X - X.mean(0)) / X.std(0)
    rows = torch.randperm(len(X), generator=torch.Generator().manual_seed(100))[: len(X) // 2]
    assert data.t is not None
    t = (data.t == data.t.max()).double()[rows]
    return torch.cat([(-torch.cdist(X[rows], X[rows]) / 18.0).exp(), torch.ones(len(rows), 1)], 1), t


def against_each_other() -> None:
    recipes = [
        Recipe(p, base_centre, laplace_at_base, fixed_others) for p in (GaussianPrior(), LaplacePrior())
    ]
    stop = Stop(num_steps=2000, throw=False, progress=False)
    print("| data | N | GREVM s | LREVM / GREVM | RVM / GREVM | RVM / GREVM, engines on the Pyro model |")
    print("|---|---|---|---|---|---|")
    for name in ("bupa", "heart", "hepatitis", "votes", "wpbc"):
        Phi, t = halves(name)
        target = weights_of(LogJoint(model, (Phi, t), hyper=()), "w").target
        zero = torch.zeros(Phi.shape[1])
        grevm, lrevm = (
            seconds(lambda r=r: eigen_state(target, len(zero), zero, 1e-2, r), 5) for r in recipes
        )
        rvm = seconds(lambda: iterate(fast_marginal.step, fast_marginal.empty(target), stop, "RVM"), 2)
        whole = seconds(lambda: RVM(model, stop=stop).run(Phi, t), 2) / seconds(
            lambda: REVM(model).run(Phi, t)
        )
        print(
            f"| {name} | {len(Phi)} | {grevm:.4f} | {lrevm / grevm:.1f} | {rvm / grevm:.1f} | {whole:.1f} |"
        )


def against_eigh(size: int) -> None:
    X = torch.randn(size, 5, generator=torch.Generator().manual_seed(0))
    t = (X[:, 0] + 0.5 * torch.randn(size, generator=torch.Generator().manual_seed(1)) > 0).double()
    Phi = (-torch.cdist(X, X) / 2.0).exp()
    A = Phi.T @ Phi
    one = seconds(lambda: torch.linalg.eigh(A), 1)
    whole = seconds(lambda: REVM(model, ridge=1e-2).run(Phi, t), 1)
    print(
        f"\nGREVM end to end, N = M = {size}: {whole:.2f} s = {whole / one:.2f} eigh of that size ({one:.2f} s)"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=2000)
    size = parser.parse_args().size
    against_each_other()
    against_eigh(size)
