"""What a posterior of many groups costs after its fit: seconds of the processor and memory, each job by itself.

    OMP_NUM_THREADS=1 python benchmarks/after_the_fit.py [--groups 100000] [--only predict]

Counts in groups of ten, the scale and the fixed effects maximised, fitted once and saved; every job runs in a process
of its own, which loads the posterior. Memory is the most that the process ever held. Linux and macOS.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Predictive
from torch import Tensor
from torch.distributions import constraints

import pyro_evidence
from pyro_evidence import LaplaceEvidence, LaplacePosterior, Stop
from pyro_evidence.evidence_check import importance_sampling

GIB = 2**30 if sys.platform == "darwin" else 2**20  # of the largest memory
QUIET = Stop(progress=False)
Data = tuple[Tensor, Tensor, Tensor]


def groups(X: Tensor, group: Tensor, y: Tensor | None = None, *, num: int = 0) -> None:
    s = pyro.param("s", torch.ones(()), constraint=constraints.positive)
    b = pyro.param("b", torch.zeros(3))
    with pyro.plate("groups", num or int(group.max()) + 1):
        a = pyro.sample("a", dist.Normal(0.0, s))
    with pyro.plate("rows", len(group)):
        pyro.sample("y", dist.Poisson((b[0] + X @ b[1:] + a[group]).exp()), obs=y)


def flat(X: Tensor, group: Tensor, y: Tensor | None = None, *, num: int = 0) -> None:
    b = pyro.sample("b", dist.Normal(torch.zeros(3), 5.0).to_event(1))
    with pyro.plate("rows", len(group)):
        pyro.sample("y", dist.Poisson((b[0] + X @ b[1:]).exp()), obs=y)


def counts(num: int) -> Data:
    """Ten rows a group on average, an effect of standard deviation .8 for each."""
    generator = torch.Generator().manual_seed(0)
    group = torch.randint(num, (10 * num,), generator=generator)
    X, effects = torch.randn(10 * num, 2, generator=generator), 0.8 * torch.randn(num, generator=generator)
    rate = (0.5 + X @ torch.tensor([0.5, -0.3]) + effects[group]).exp()
    return X, group, torch.poisson(rate, generator=generator)


Job = Callable[[LaplacePosterior, Path, Data], Any]
JOBS: dict[str, Job] = {
    "load": lambda p, _, data: None,
    "200 draws": lambda p, _, data: p.get_samples(200, seed=0),
    "log_likelihood": lambda p, _, data: p.log_likelihood(),
    "log_prob": lambda p, _, data: p.log_prob(),
    "predict, 1,000 rows": lambda p, _, data: p.predict(data[0][:1000], data[1][:1000], num=p.mode["a"].numel()),
    "predict, all rows": lambda p, _, data: p.predict(data[0], data[1], num=p.mode["a"].numel()),
    "Predictive, 20 draws": lambda p, _, data: Predictive(p.model, guide=p.guide, num_samples=20)(*data[:2]),
    "to_inference_data": lambda p, _, data: pyro_evidence.to_inference_data(p, num_samples=20),
    "importance_sampling": lambda p, _, data: importance_sampling(p),
    "diagnostics": lambda p, _, data: p.diagnostics(),
    "blocks": lambda p, _, data: p.blocks("a"),
    "compare_evidence": lambda p, folder, data: pyro_evidence.compare_evidence(
        groups=p, flat=LaplacePosterior.load(folder / "flat.pt", flat)
    ),
}


def one(name: str, folder: Path, num: int) -> None:
    """One job, its cost as JSON."""
    data, start = counts(num), process_time()
    posterior = LaplacePosterior.load(folder / "groups.pt", groups)
    start = start if name == "load" else process_time()
    JOBS[name](posterior, folder, data)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GIB
    print(json.dumps({"seconds": process_time() - start, "gib": held}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--only", action="append", choices=list(JOBS))
    parser.add_argument("--one", nargs=2, metavar=("JOB", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    if asked.one:
        return one(asked.one[0], Path(asked.one[1]), asked.groups)
    print(f"{asked.groups:,} groups of ten\n\n| job | seconds | GiB |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        data, start = counts(asked.groups), process_time()
        LaplaceEvidence(groups, stop=QUIET).run(*data).save(Path(folder) / "groups.pt")
        print(f"| fit and save | {process_time() - start:.2f} | |", flush=True)
        LaplaceEvidence(flat, stop=QUIET).run(*data).save(Path(folder) / "flat.pt")
        for name in asked.only or JOBS:
            print(_row(name, folder, asked.groups), flush=True)


def _row(name: str, folder: str, num: int) -> str:
    command = [sys.executable, __file__, "--groups", str(num), "--one", name, folder]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        return f"| {name} | {ended.stderr.strip().splitlines()[-1][:100]} | |"
    found = json.loads(ended.stdout.strip().splitlines()[-1])
    return f"| {name} | {found['seconds']:.2f} | {found['gib']:.2f} |"


if __name__ == "__main__":
    main()
