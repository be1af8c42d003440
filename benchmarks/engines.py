"""What each engine costs at sizes that users have: CPU seconds and peak memory of whole fits, one thread.

    OMP_NUM_THREADS=1 python benchmarks/engines.py                # the table of docs/which_engine.md, Markdown
    OMP_NUM_THREADS=1 python benchmarks/engines.py --only RVM     # some of the rows

Every fit runs in a process of its own, forked from one in which a small fit of the same kind has loaded what is loaded
once; memory is the most that it held beyond that, its data included.  Linux and macOS.
"""

import argparse
import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_evidence import REVM, RVM, VRVM, EvidenceEM, LaplaceEvidence, OverlapEM, Start, Stop
from pyro_evidence.models.basis import GaussianRBF, Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.gp import gp_classifier, gp_regression
from pyro_evidence.models.kernels import RBF
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.mlp import MLP
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.regression import Learned, regression

QUIET = Stop(progress=False, throw=False)
UNIT = 1 if sys.platform == "darwin" else 1024  # of the largest memory, bytes


@dataclass(frozen=True)
class Case:
    """A fit of ``rows`` x ``columns``; ``small`` rows load what is loaded once."""

    engine: str
    what: str
    rows: int
    columns: int
    fit: Callable[..., Any]
    data: Callable[[int, int], tuple[Tensor, ...]]
    small: int = 60


def heaps(rows: int, columns: int) -> tuple[Tensor, ...]:
    """Ten clusters of standard deviation 1 about centres of standard deviation 4."""
    generator = torch.Generator().manual_seed(0)
    which = torch.arange(rows) % 10
    return ((4.0 * torch.randn(10, columns, generator=generator))[which] + noise(rows, columns, generator),)


def noise(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator)


def measured(rows: int, columns: int) -> tuple[Tensor, ...]:
    """A smooth function of the first column, linear in the others, with noise."""
    generator = torch.Generator().manual_seed(0)
    X = noise(rows, columns, generator)
    t = torch.sin(2.0 * X[:, 0]) + X[:, 1:] @ torch.linspace(1.0, 0.0, columns - 1)
    return X, t + 0.3 * torch.randn(rows, generator=generator)


def labelled(rows: int, columns: int) -> tuple[Tensor, ...]:
    X, t = measured(rows, columns)
    return X, (t > 0).double()


def regressed() -> Any:
    return LaplaceEvidence(regression(Linear(), beta=Learned(torch.tensor(1.0))), stop=QUIET)


def relevant(X: Tensor, t: Tensor) -> Any:
    return RVM(regression(GaussianRBF(X, 1.0)), noise="beta", stop=replace(QUIET, num_steps=2000))


def mixed(num_components: int) -> Callable[[], Any]:
    return lambda: EvidenceEM(gaussian_mixture(num_components), stop=QUIET)


def laplace(model: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: LaplaceEvidence(model(), start=Start(restarts=1), stop=QUIET)


def overlapping() -> Any:
    return OverlapEM(prbf(8), stop=QUIET)


CASES = [
    Case("LaplaceEvidence", "regression", 100_000, 20, regressed, measured),
    Case("LaplaceEvidence", "classifier", 100_000, 20, laplace(lambda: classifier(Linear())), labelled),
    Case("LaplaceEvidence", "Gaussian process", 300, 2, laplace(lambda: gp_regression(RBF())), measured),
    Case("LaplaceEvidence", "the same, labels", 300, 2, laplace(lambda: gp_classifier(RBF())), labelled),
    Case("EvidenceEM", "mixture, 15 for 10 clusters", 10_000, 8, mixed(15), heaps, 100),
    Case("EvidenceEM", "the same", 100_000, 8, mixed(15), heaps, 100),
    Case("EvidenceEM", "12 planes for 10", 5_000, 20, lambda: EvidenceEM(mppca(12, 2), stop=QUIET), heaps, 100),
    Case("RVM", "a kernel on each datum", 500, 2, relevant, measured),
    Case("REVM", "200 kernels, labels", 2_000, 4, lambda X, t: REVM(classifier(GaussianRBF(X[:200], 2.0))), labelled),
    Case("VRVM", "a kernel on each, labels", 200, 2, lambda X, t: VRVM(classifier(GaussianRBF(X, 1.0))), labelled),
    Case("OverlapEM", "8 kernels", 10_000, 8, overlapping, labelled),
    Case("OverlapEM", "the same", 100_000, 8, overlapping, labelled),
    Case("LaplaceEvidence", "network of 8 hidden units", 500, 4, laplace(lambda: MLP(4, 8)), measured),
]


def fitted(case: Case, rows: int) -> None:
    args = case.data(rows, case.columns)
    make = case.fit
    engine = make(*args) if make.__code__.co_argcount else make()
    engine.run(*args)


def high_water() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT / 2**20


def cost(case: Case) -> dict[str, float] | str:
    """CPU seconds and MiB, in a process of its own; or what went wrong."""
    fitted(case, case.small)
    read, write = os.pipe()
    if not (child := os.fork()):
        before, begin = high_water(), time.process_time()
        try:
            fitted(case, case.rows)
            said: Any = {"seconds": time.process_time() - begin, "MiB": high_water() - before}
        except Exception as error:
            said = f"{type(error).__name__}: {error}"[:60]
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    found: dict[str, float] | str = json.loads(os.read(read, 4096))
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of an engine and its model, to run those")
    only = parser.parse_args().only
    print("| engine | model | rows x columns | CPU seconds | MiB |\n|---|---|---|---|---|")
    for case in (c for c in CASES if only in f"{c.engine}, {c.what}"):
        found = cost(case)
        said = found if isinstance(found, str) else f"{found['seconds']:.2f} | {found['MiB']:.0f}"
        print(f"| `{case.engine}` | {case.what} | {case.rows:,} x {case.columns} | {said} |", flush=True)


if __name__ == "__main__":
    main()
