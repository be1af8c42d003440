"""Independent groups, whole, in chunks, and on ranks: CPU seconds, passes, and how far the log evidence is off.

    OMP_NUM_THREADS=1 python benchmarks/groups_by_the_chunk.py                  # 20,000 groups of ten rows, Markdown
    OMP_NUM_THREADS=1 python benchmarks/groups_by_the_chunk.py --groups 100000

A logistic model with four shared weights, an intercept for each group, and their scale maximised.  Every fit runs in
processes of its own; seconds are the CPU time of the slowest.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from itertools import pairwise

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.data.distributed import shards
from pyro_evidence.data.rows import Rows

ROWS = 10  # of a group


def model(g: Tensor, X: Tensor, y: Tensor) -> None:
    """Groups about a shared regression."""
    scale = pyro.param("scale", torch.tensor(0.7), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(4), 3.0).to_event(1))
    with pyro.plate("groups", int(g.max()) + 1):
        a = pyro.sample("a", dist.Normal(0.0, scale))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=a[g] + X @ w), obs=y)


def data(num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Groups one after the other."""
    generator = torch.Generator().manual_seed(1)
    g, X = torch.arange(num).repeat_interleave(ROWS), torch.randn(ROWS * num, 4, generator=generator)
    logits = torch.randn(num, generator=generator)[g] + X @ torch.tensor([0.5, -0.3, 0.0, 0.2])
    return g, X, torch.bernoulli(logits.sigmoid(), generator=generator)


def parts(num: int, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The same in ``count`` chunks."""
    g, X, y = data(num)
    ends = [i * num // count for i in range(count + 1)]
    cuts = [slice(a * ROWS, b * ROWS) for a, b in pairwise(ends)]
    return [(g[c] - g[c][0], X[c], y[c]) for c in cuts]


def fit(groups: int, chunks: int, ranks: int) -> dict[str, float]:
    """One fit of this process's share."""
    engine = LaplaceEvidence(model, stop=Stop(progress=False))
    passes, total = [0], Rows.total

    def counted(self: Rows[object], *args: object) -> object:
        passes[0] += 1
        return total(self, *args)  # type: ignore[arg-type]

    Rows.total = counted  # type: ignore[method-assign, assignment]
    if ranks > 1:
        with shards() as here:
            shard = parts(groups, ranks)[here.rank]
            begin = time.process_time()
            found = engine.run_chunks([shard], local=["a"])
    else:
        own = parts(groups, chunks)
        begin = time.process_time()
        found = engine.run_chunks(own, local=["a"]) if chunks > 1 else engine.run(*own[0])
    seconds = time.process_time() - begin
    return {"seconds": seconds, "passes": passes[0], "log_evidence": float(found.log_evidence)}


def begun(groups: int, chunks: int, ranks: int) -> dict[str, float]:
    """The slowest of the processes that share one fit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, __file__, "--groups", str(groups), "--fit", str(chunks), str(ranks)]
    processes = [
        subprocess.Popen(command, env=os.environ | address | {"RANK": str(i)}, stdout=subprocess.PIPE, text=True)
        for i in range(ranks)
    ]
    said = [json.loads(process.communicate()[0]) for process in processes]
    return max(said, key=lambda x: x["seconds"])


def main() -> None:
    """The table, or one of its fits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=20_000)
    parser.add_argument("--fit", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if given.fit:
        return print(json.dumps(fit(given.groups, *given.fit)))
    print("| fit | passes | CPU, slowest process | log evidence off, relative |\n|---|---|---|---|")
    whole = begun(given.groups, 1, 1)
    for name, chunks, ranks in [("whole", 1, 1), ("4 chunks", 4, 1), ("20 chunks", 20, 1), ("2 ranks", 1, 2)]:
        found = whole if name == "whole" else begun(given.groups, chunks, ranks)
        off = abs(found["log_evidence"] / whole["log_evidence"] - 1.0)
        print(f"| {name} | {found['passes'] or ''} | {found['seconds']:.1f} s | {off:.1e} |", flush=True)


if __name__ == "__main__":
    main()
