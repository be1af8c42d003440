"""How fast: ratios in one run on one thread, against each other and against one eigendecomposition.

    PYRO_EVIDENCE_DATA=folder python benchmarks/revm_speed.py [--size 2000]

With sklearn-rvm and fastrvm installed beside it, RVM is compared with both on Ripley's data; scikit-rvm is
on no package index.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence import REVM, RVM, LaplacePrior, LogJoint, Stop
from pyro_evidence.axis_priors import AxisPrior, GaussianPrior
from pyro_evidence.datasets import csv, ripley_test, ripley_train
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


# The sigma of lowest 5 x 2-fold error for GREVM (ridge 0.01) and for RVM.
SIGMAS = {
    "bupa": (2.0, 1.0),
    "heart": (7.0, 2.0),
    "hepatitis": (2.0, 2.0),
    "votes": (2.0, 3.0),
    "wpbc": (3.0, 0.01),
}
STOP = Stop(num_steps=2000, throw=False, progress=False)


def half(name: str, sigma: float) -> tuple[Tensor, Tensor]:
    """A kernel problem as in the paper: half of the data, exp(-d / 2 sigma^2), a bias."""
    data = csv(name)
    X = torch.where(data.X.isnan(), data.X.nanmean(0), data.X)
    X = (X - X.mean(0)) / X.std(0)
    rows = torch.randperm(len(X), generator=torch.Generator().manual_seed(100))[: len(X) // 2]
    assert data.t is not None
    t = (data.t == data.t.max()).double()[rows]
    return torch.cat([(-torch.cdist(X[rows], X[rows]) / (2.0 * sigma**2)).exp(), torch.ones(len(rows), 1)], 1), t


def revm_seconds(problem: tuple[Tensor, Tensor], prior: AxisPrior) -> float:
    """The fit, without reading the model."""
    weights = weights_of(LogJoint(model, problem, hyper=()), "w")
    recipe, zero = Recipe(prior, base_centre, laplace_at_base, fixed_others), torch.zeros(weights.num_weights)
    return seconds(lambda: eigen_state(weights.target, weights.num_weights, zero, 1e-2, recipe), 5)


def rvm_seconds(problem: tuple[Tensor, Tensor]) -> float:
    """The same for the sequential algorithm."""
    target = weights_of(LogJoint(model, problem, hyper=()), "w").target
    return seconds(lambda: iterate(fast_marginal.step, fast_marginal.empty(target), STOP, "RVM"), 2)


def against_each_other() -> None:
    print("| data | N | GREVM s | LREVM / GREVM | RVM / GREVM | RVM / GREVM, engines on the Pyro model |")
    print("|---|---|---|---|---|---|")
    for name, sigmas in SIGMAS.items():
        ours, theirs = (half(name, sigma) for sigma in sigmas)
        grevm, lrevm = (revm_seconds(ours, prior) for prior in (GaussianPrior(), LaplacePrior()))
        engines = seconds(partial(RVM(model, stop=STOP).run, *theirs), 2) / seconds(partial(REVM(model).run, *ours))
        ratios = f"{lrevm / grevm:.1f} | {rvm_seconds(theirs) / grevm:.1f} | {engines:.1f}"
        print(f"| {name} | {len(ours[0])} | {grevm:.4f} | {ratios} |", flush=True)


def against_peers() -> None:
    """Ripley's problem: seconds as ratios to our engine's, test errors."""
    train, test = ripley_train(), ripley_test()
    assert train.t is not None and test.t is not None
    X, t, X_test, t_test = (
        train.X.numpy(),
        train.t.numpy().astype(int),
        test.X.numpy(),
        test.t.numpy().astype(int),
    )
    kernels = [(-4.0 * torch.cdist(data.X, train.X).square()).exp() for data in (train, test)]
    Phi, Phi_test = (torch.cat([K, torch.ones(len(K), 1)], 1) for K in kernels)
    own = seconds(lambda: RVM(model, stop=STOP).run(Phi, train.t))
    eta = RVM(model, stop=STOP).run(Phi, train.t).predictor(Phi_test)[0].numpy()
    print(f"\nRVM on Ripley's data: ours {own:.3f} s, test error {((eta > 0) != t_test).mean():.3f}")
    for module, name in (("fastrvm", "RVC"), ("sklearn_rvm", "EMRVC")):
        try:
            peer = getattr(import_module(module), name)
        except ImportError:
            print(f"{module} is not installed")
            continue
        theirs = seconds(lambda make=peer: make(kernel="rbf", gamma=4.0).fit(X, t), 2)
        wrong = (peer(kernel="rbf", gamma=4.0).fit(X, t).predict(X_test) != t_test).mean()
        print(f"{module}: {theirs / own:.2f} times our seconds, test error {wrong:.3f}")


def against_eigh(size: int) -> None:
    X = torch.randn(size, 5, generator=torch.Generator().manual_seed(0))
    t = (X[:, 0] + 0.5 * torch.randn(size, generator=torch.Generator().manual_seed(1)) > 0).double()
    Phi = (-torch.cdist(X, X) / 2.0).exp()
    A = Phi.T @ Phi
    one = seconds(lambda: torch.linalg.eigh(A), 1)
    whole = seconds(lambda: REVM(model, ridge=1e-2).run(Phi, t), 1)
    print(f"\nGREVM end to end, N = M = {size}: {whole:.2f} s, {whole / one:.2f} times one eigh ({one:.2f} s)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2000)
    size = parser.parse_args().size
    against_each_other()
    against_peers()
    against_eigh(size)
