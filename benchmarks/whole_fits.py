"""Whole fits of mixtures, not single iterations, beside scikit-learn with as many starts: CPU seconds and peak memory.

    OMP_NUM_THREADS=1 python benchmarks/whole_fits.py                 # all cases but the largest, Markdown on stdout
    OMP_NUM_THREADS=1 python benchmarks/whole_fits.py --large         # N = 1e6 and heavy tails too, some minutes
    OMP_NUM_THREADS=1 python benchmarks/whole_fits.py --numbers       # K = 5 and K = 15 offered for twelve clusters

Every fit runs in a fresh process.  Seconds are those of the process from the call of ``run`` or ``fit`` to its end,
after a fit of 200 rows that loads what is loaded once; memory is the most that the process ever held, less what
it had held before the call, the data included.  One thread.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from pyro_evidence import EvidenceEM, Start, Stop
from pyro_evidence.mixture.posterior import MixturePosterior
from pyro_evidence.models.mixture import FullNoise, gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.mppca import MPPCAPosterior

QUIET = Stop(progress=False, throw=False)


@dataclass(frozen=True)
class Case:
    """``K`` components offered for ``clusters`` of ``m`` columns; ``target`` in multiples of the peer, or seconds."""

    N: int
    K: int
    clusters: int
    m: int
    starts: int = 5
    full: bool = False
    planes: int = 0
    tails: bool = False  # Student's t of four degrees of freedom
    target: str = ""
    memory: str = ""


CASES = [
    Case(250, 10, 4, 2, target="120 ms"),
    Case(10_000, 15, 10, 8, target="6 x", memory="50 MiB"),
    Case(100_000, 15, 10, 8, target="4 x", memory="150 MiB"),
    Case(100_000, 12, 6, 20, full=True, target="4 x"),
    Case(20_000, 8, 5, 36, planes=3, target="5 s"),
]
LARGE = [
    Case(1_000_000, 55, 50, 32, starts=1, target="3 x", memory="1 GiB"),
    Case(300_000, 12, 8, 12, tails=True),
]
NUMBERS = [Case(2_400, K, 12, 6, planes=planes) for planes in (0, 2) for K in (5, 15)]


def data(case: Case) -> torch.Tensor:
    """Clusters of standard deviation 1 about centres of standard deviation 4; or planes."""
    generator = torch.Generator().manual_seed(0)
    which = torch.randint(case.clusters, (case.N,), generator=generator)
    Y = (4.0 * torch.randn(case.clusters, case.m, generator=generator))[which]
    if not case.planes:
        noise = torch.randn(case.N, case.m, generator=generator)
        heavy = torch.randn(4, case.N, 1, generator=generator).square().mean(0).sqrt() if case.tails else 1.0
        return Y + noise / heavy
    W = torch.randn(case.clusters, case.m, case.planes, generator=generator)
    within = (W[which] @ torch.randn(case.N, case.planes, 1, generator=generator)).squeeze(-1)
    return Y + within + 0.5 * torch.randn(case.N, case.m, generator=generator)


def fitted(case: Case, Y: torch.Tensor) -> MixturePosterior | MPPCAPosterior:
    model = mppca(case.K, case.planes) if case.planes else gaussian_mixture(case.K, **noise(case))
    return EvidenceEM(model, start=Start(restarts=case.starts), stop=QUIET).run(Y)


def ours(case: Case, Y: torch.Tensor) -> float:
    return float(fitted(case, Y).num_components)


def noise(case: Case) -> dict[str, FullNoise]:
    return {"noise": FullNoise()} if case.full else {}


def theirs(case: Case, Y: torch.Tensor) -> float:
    from sklearn.mixture import GaussianMixture

    kind = "full" if case.full else "diag"
    peer = GaussianMixture(case.K, covariance_type=kind, n_init=case.starts, random_state=0, max_iter=500)
    peer.fit(Y.numpy())
    return float((np.asarray(peer.weights_) > 0).sum())


def measured(fit: Callable[[Case, torch.Tensor], float], case: Case) -> dict[str, float]:
    """CPU seconds, MiB and components of one fit in this process."""
    Y = data(case)
    few = replace(case, N=200, starts=1)
    fit(few, data(few))
    before, begin = high_water(), time.process_time()
    found = fit(case, Y)
    return {"seconds": time.process_time() - begin, "MiB": high_water() - before, "components": found}


def high_water() -> float:
    """Most memory that this process has held so far, MiB; Linux."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fresh(who: str, case: Case) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--one", who, json.dumps(asdict(case))]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def row(case: Case) -> str:
    a = fresh("ours", case)
    b = None if case.planes else fresh("theirs", case)
    shape = (
        f"N={case.N}, {case.K} for {case.clusters}, m={case.m}{', full' * case.full}{', planes' * bool(case.planes)}"
    )
    peer = "" if b is None else f"{b['seconds']:.2f} s, {b['MiB']:.0f} MiB"
    ratio = "" if b is None else f"{a['seconds'] / b['seconds']:.1f} x"
    return (
        f"| {shape}, {case.starts} starts | {a['seconds']:.2f} s, {a['MiB']:.0f} MiB, K={a['components']:.0f} | {peer} "
        f"| {ratio} | {case.target} {case.memory} |"
    )


def number(case: Case) -> str:
    """How many components are found from a number that is offered, and the log evidence per datum."""
    found = fitted(case, data(case))
    kind = "planes" if case.planes else "clusters"
    height = float(found.log_evidence) / case.N
    return f"| {case.clusters} {kind}, {case.K} offered | {found.num_components} | {height:.3f} |"


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--numbers", action="store_true")
    parser.add_argument("--one", nargs=2)
    arguments = parser.parse_args()
    if arguments.one:
        who, case = arguments.one[0], Case(**json.loads(arguments.one[1]))
        print(json.dumps(measured(ours if who == "ours" else theirs, case)))
        return
    if arguments.numbers:
        print("| data | components | nats per datum |\n|---|---|---|")
        for case in NUMBERS:
            print(number(case), flush=True)
        return
    print("| case | ours | scikit-learn | ratio | target |\n|---|---|---|---|---|")
    for case in CASES + (LARGE if arguments.large else []):
        print(row(case), flush=True)


if __name__ == "__main__":
    main()
