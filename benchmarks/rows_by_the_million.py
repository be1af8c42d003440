"""Rows that are made on the fly, pass by pass, and never held: CPU seconds, passes and peak memory of whole fits.

    OMP_NUM_THREADS=1 python benchmarks/rows_by_the_million.py                       # 1e6 rows x 16, Markdown
    OMP_NUM_THREADS=1 python benchmarks/rows_by_the_million.py --rows 10000000       # ten times as many
    OMP_NUM_THREADS=1 python benchmarks/rows_by_the_million.py --ranks 4             # 50 clusters on 1, 2 and 4 ranks

Every fit runs in a fresh process, after a small one that loads what is loaded once; memory is what the process held
at most beyond that.  Making the rows is part of every pass and is timed apart.  With ``--ranks`` the rows are those of
so many processes; seconds are the CPU time of the slowest, so that a shared machine does not count, and the efficiency
is the CPU time of one process over that of all together.  The last column is the time of 1e8 rows on one core if the
number of passes stays what it is.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_evidence import RVM, EvidenceEM, LaplaceEvidence, Start, Stop
from pyro_evidence.data.distributed import shards
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.regression import regression

SHARED = "EvidenceEM, 55 components for 50 clusters in 32 columns, one start"  # what --ranks shares out
COLUMNS, CLUSTERS, SIZE = 16, 8, 100_000
QUIET = Stop(progress=False, throw=False)
Make = Callable[[int, int], tuple[Tensor, ...]]


class Made:
    """Chunks that are made when they are asked for, always the same; ``passes`` counts, ``seconds`` is their making."""

    def __init__(self, make: Make, chunks: range, size: int) -> None:
        self.make, self.chunks, self.size = make, chunks, size
        self.passes, self.seconds = 0, 0.0

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        self.passes += 1
        for number in self.chunks:
            begin = time.process_time()
            chunk = self.make(number, self.size)
            self.seconds += time.process_time() - begin
            yield chunk


def clusters(number: int, size: int, num: int = CLUSTERS, columns: int = COLUMNS) -> tuple[Tensor, ...]:
    """Clusters of standard deviation 1 about centres of standard deviation 3."""
    centres = 3.0 * torch.randn(num, columns, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + number)
    which = torch.randint(num, (size,), generator=generator)
    return (centres[which] + torch.randn(size, columns, generator=generator),)


def labelled(number: int, size: int) -> tuple[Tensor, ...]:
    """Inputs and labels of a logistic model."""
    X, t = measured(number, size)
    return X, (t > 0).double()


def measured(number: int, size: int) -> tuple[Tensor, ...]:
    """Inputs and targets of a linear model with noise, half of whose weights are zero."""
    generator = torch.Generator().manual_seed(1 + number)
    X = torch.randn(size, COLUMNS, generator=generator)
    w = torch.linspace(1.0, -1.0, COLUMNS) * (torch.arange(COLUMNS) % 2)
    return X, X @ w + torch.randn(size, generator=generator)


FITS: dict[str, tuple[Callable[[], Any], Make]] = {
    "EvidenceEM, 12 components for 8 clusters": (lambda: EvidenceEM(gaussian_mixture(12), stop=QUIET), clusters),
    "EvidenceEM, 10 planes for 8 clusters": (
        lambda: EvidenceEM(mppca(10, 2), start=Start(restarts=2), stop=QUIET),
        clusters,
    ),
    "LaplaceEvidence, logistic": (lambda: LaplaceEvidence(classifier(Linear()), stop=QUIET), labelled),
    "RVM, its noise found": (lambda: RVM(regression(Linear()), noise="beta", stop=QUIET), measured),
    SHARED: (
        lambda: EvidenceEM(gaussian_mixture(55), start=Start(restarts=1), stop=QUIET),
        partial(clusters, num=50, columns=32),
    ),
}


def one(name: str, rows: int) -> dict[str, float]:
    """One fit in this process, or in this rank."""
    make_engine, make = FITS[name]
    make_engine().run_chunks(Made(make, range(2), 500))
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    size = min(SIZE, rows // ranks)
    made = Made(make, range(rank, rows // size, ranks), size)
    before, begin = high_water(), time.process_time()
    if ranks == 1:
        make_engine().run_chunks(made)
    else:
        with shards():
            make_engine().run_chunks(made)
    seconds = time.process_time() - begin
    return {"seconds": seconds, "making": made.seconds, "passes": made.passes, "MiB": high_water() - before}


def high_water() -> float:
    """Most memory that this process has held so far, MiB; Linux."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fresh(name: str, rows: int, ranks: int = 1) -> list[dict[str, float]]:
    """The same in processes of their own."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    command = [sys.executable, __file__, "--one", name, "--rows", str(rows)]
    started = [
        subprocess.Popen(
            command, env=os.environ | (group | {"RANK": str(i)} if ranks > 1 else {}), stdout=subprocess.PIPE, text=True
        )
        for i in range(ranks)
    ]
    return [json.loads(process.communicate()[0]) for process in started]


def row(name: str, rows: int) -> str:
    (found,) = fresh(name, rows)
    own = found["seconds"] - found["making"]
    hours = own * 1e8 / rows / 3600
    return (
        f"| {name} | {found['passes']:.0f} | {own:.1f} s | {found['making']:.1f} s | {found['MiB']:.0f} MiB "
        f"| {1e9 * own / rows / found['passes']:.0f} ns | {hours:.2f} h |"
    )


def scaling(rows: int, ranks: int) -> Iterator[str]:
    alone = 0.0
    for number in (n for n in (1, 2, 4, 8) if n <= ranks):
        each = [found["seconds"] - found["making"] for found in fresh(SHARED, rows, number)]
        alone = alone or each[0]
        yield f"| {number} | {max(each):.1f} s | {alone / sum(each):.2f} |"


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--only", default="", help="a part of the name of the fits to run")
    parser.add_argument("--one")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one, arguments.rows)))
        return
    if arguments.ranks > 1:
        print("| ranks | CPU seconds of the slowest | efficiency |\n|---|---|---|")
        for line in scaling(arguments.rows, arguments.ranks):
            print(line, flush=True)
        return
    print(f"{arguments.rows:,} rows x {COLUMNS}, {SIZE:,} at a time\n")
    print("| fit | passes | CPU | making the rows | beyond a small fit | per row and pass | 1e8 rows, one core |")
    print("|---|---|---|---|---|---|---|")
    for name in (n for n in FITS if arguments.only in n):
        print(row(name, arguments.rows), flush=True)


if __name__ == "__main__":
    main()
