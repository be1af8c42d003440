"""How fast: ratios of CPU seconds in one run on one thread, against each other and against one eigendecomposition.

    PYRO_EVIDENCE_DATA=folder python benchmarks/revm_speed.py [--size 2000] [--rows 1000000]

With sklearn-rvm and fastrvm installed beside it, RVM is compared with both on Ripley's data, and with fastrvm
on 2000 and 3000 points; scikit-rvm is on no package index.  ``--rows`` fits that many rows of 500 columns, made
on the fly in chunks, and reports the memory that was added; ``--only-rows`` nothing else.
"""

import argparse
import resource
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module

import pyro
import pyro.distributions as dist
import torch
from timing import least
from torch import Tensor

from pyro_evidence import REVM, RVM, Stop
from pyro_evidence.datasets import csv, ripley_test, ripley_train
from pyro_evidence.fitting.iterate import iterate
from pyro_evidence.program import LogJoint
from pyro_evidence.relevance import L1Prior, fast_marginal
from pyro_evidence.relevance.axis_priors import AxisPrior, GaussianPrior
from pyro_evidence.relevance.eigen_state import REVMSettings, base_centre, eigen_state
from pyro_evidence.relevance.quadratic import laplace_at_base
from pyro_evidence.relevance.weights import weights_of

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)


def model(Phi: Tensor, t: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.Normal(Phi.new_zeros(Phi.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(Phi)):
        return pyro.sample("t", dist.Bernoulli(logits=Phi @ w), obs=t)


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
    weights = weights_of(LogJoint(model, problem, maximise=()), "w")
    settings, zero = REVMSettings(prior, base_centre, laplace_at_base), torch.zeros(weights.num_weights)
    return least(lambda: eigen_state(weights.target, weights.num_weights, zero, 1e-2, settings), 5)


def rvm_seconds(problem: tuple[Tensor, Tensor]) -> float:
    """The same for the sequential algorithm."""
    target = weights_of(LogJoint(model, problem, maximise=()), "w").target
    return least(lambda: iterate(fast_marginal.step, fast_marginal.empty(target), STOP, "RVM"), 2)


def against_each_other() -> None:
    print("| data | N | GREVM s | LREVM / GREVM | RVM / GREVM | RVM / GREVM, engines on the Pyro model |")
    print("|---|---|---|---|---|---|")
    for name, sigmas in SIGMAS.items():
        ours, theirs = (half(name, sigma) for sigma in sigmas)
        grevm, lrevm = (revm_seconds(ours, prior) for prior in (GaussianPrior(), L1Prior()))
        engines = least(partial(RVM(model, stop=STOP).run, *theirs), 2) / least(partial(REVM(model).run, *ours))
        ratios = f"{lrevm / grevm:.1f} | {rvm_seconds(theirs) / grevm:.1f} | {engines:.1f}"
        print(f"| {name} | {len(ours[0])} | {grevm:.4f} | {ratios} |", flush=True)


def kernel(X: Tensor, centres: Tensor) -> Tensor:
    """``exp(-4 d^2)`` and a bias."""
    return torch.cat([(-4.0 * torch.cdist(X, centres).square()).exp(), torch.ones(len(X), 1)], 1)


def against_peers() -> None:
    """RVM: seconds as ratios to ours, from the model to the posterior and of the fit alone; test errors."""
    train, test = ripley_train(), ripley_test()
    assert train.t is not None and test.t is not None
    peers = [("fastrvm", "RVC"), ("sklearn_rvm", "EMRVC")]
    print(
        "\n| RVM on | ours s (fit alone) | test error | peer | peer / ours (fit alone) | test error |\n"
        + "|---" * 6
        + "|"
    )
    print("| Ripley | | | scikit-rvm: no distribution on any package index | | |")
    compared("Ripley", (train.X, train.t), (test.X, test.t), peers)
    for size in (2000, 3000):
        X = torch.rand(size + 1000, 2, generator=torch.Generator().manual_seed(0)) * 3.0
        odds = 6.0 * (X[:, 0] * 3.0).sin() * (X[:, 1] * 2.0).cos()
        t = (torch.rand(len(X), generator=torch.Generator().manual_seed(1)) < torch.sigmoid(odds)).double()
        compared(f"N = {size}", (X[:size], t[:size]), (X[size:], t[size:]), peers[:1])


Half = tuple[Tensor, Tensor]  # inputs and labels


def compared(name: str, train: Half, test: Half, peers: list[tuple[str, str]]) -> None:
    (X, t), (X_test, t_test) = train, test
    Phi, repeats = kernel(X, X), 5 if len(X) < 1000 else 1
    target = weights_of(LogJoint(model, (Phi, t), maximise=()), "w").target
    fit = least(lambda: iterate(fast_marginal.step, fast_marginal.empty(target), STOP, "RVM"), repeats)
    own = least(lambda: RVM(model, stop=STOP).run(Phi, t), repeats)
    eta = RVM(model, stop=STOP).run(Phi, t).predictor(kernel(X_test, X))[0]
    error = float(((eta > 0) != t_test.bool()).double().mean())
    for module, maker in peers:
        try:
            peer = getattr(import_module(module), maker)
        except ImportError:
            print(f"| {name} | {own:.3f} ({fit:.3f}) | {error:.3f} | {module}: not installed | | |")
            continue
        data = X.numpy(), t.numpy().astype(int)
        theirs = least(lambda make=peer, at=data: make(kernel="rbf", gamma=4.0).fit(*at), min(repeats, 3))
        found = peer(kernel="rbf", gamma=4.0).fit(*data).predict(X_test.numpy())
        wrong = float((torch.as_tensor(found).double() != t_test).double().mean())
        ratios = f"{theirs / own:.2f} ({theirs / fit:.2f})"
        print(f"| {name} | {own:.3f} ({fit:.3f}) | {error:.3f} | {module} | {ratios} | {wrong:.3f} |", flush=True)


class Rows:
    """Chunks of a large logistic problem, made anew in each pass."""

    def __init__(self, num_rows: int, num_columns: int = 500, size: int = 20_000) -> None:
        self.num_rows, self.num_columns, self.size, self.passes = num_rows, num_columns, size, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        for seed in range(self.num_rows // self.size):
            generator = torch.Generator().manual_seed(seed)
            Phi = torch.rand(self.size, self.num_columns, generator=generator).mul_(4.0).sub_(2.0)
            odds = Phi[:, :10].sum(1)
            yield Phi, (torch.rand(self.size, generator=generator) < torch.sigmoid(odds)).double()


def in_chunks(num_rows: int) -> None:
    """Peak memory that a fit of 500 columns adds, and its passes."""
    REVM(model).run_chunks(Rows(500, size=500))  # what torch loads once, in little memory
    rows, before = Rows(num_rows), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    posterior = REVM(model).run_chunks(rows)
    taken = time.process_time() - start
    start = time.process_time()
    for Phi, _ in Rows(num_rows):  # noqa: B007 - made, not used, but for the last
        pass
    making = time.process_time() - start
    gram = num_rows / rows.size * least(lambda: Phi.T @ Phi)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    print(
        f"\nGREVM on {num_rows} rows of 500 columns in chunks of 20000: {posterior.num_active} axes, "
        f"{rows.passes} passes, the first of them of one chunk; {taken:.0f} s, {taken / gram:.1f} times the "
        f"{gram:.1f} s of one Gram matrix, of which {(rows.passes - 1) * making:.0f} s make the data; "
        f"{before / 2**20:.2f} GiB before the fit and {peak:.2f} GiB more at its peak",
        flush=True,
    )


def against_eigh(size: int) -> None:
    X = torch.randn(size, 5, generator=torch.Generator().manual_seed(0))
    t = (X[:, 0] + 0.5 * torch.randn(size, generator=torch.Generator().manual_seed(1)) > 0).double()
    Phi = (-torch.cdist(X, X) / 2.0).exp()
    A = Phi.T @ Phi
    one = least(lambda: torch.linalg.eigh(A), 1)
    whole = least(lambda: REVM(model, ridge=1e-2).run(Phi, t), 1)
    print(f"\nGREVM end to end, N = M = {size}: {whole:.2f} s, {whole / one:.2f} times one eigh ({one:.2f} s)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--only-rows", action="store_true")
    args = parser.parse_args()
    if args.rows:  # first, so that the peak is its own
        in_chunks(args.rows)
    if not args.only_rows:
        against_each_other()
        against_peers()
        against_eigh(args.size)
