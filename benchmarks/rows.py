"""Fits that people wait for: processor seconds, calls, and where the time goes.

    OMP_NUM_THREADS=1 python benchmarks/rows.py [PART OF A NAME ...] [--write]

Each row in a process of its own.  Seconds are the least of a few runs after one to warm up; calls and shares are of one
more run under cProfile, which makes Python about twice as slow, so that shares of Python are upper bounds.  Rows with a
peer are timed by ``releases.py``, ``whole_fits.py``, ``laplace_nuts.py`` and ``block_quadrature_speed.py`` beside it;
here is their profile.  ``--write`` puts the table into ``results/rows.md``.
"""

import argparse
import cProfile
import json
import os
import pstats
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import releases
import torch
from block_quadrature_speed import data as binary_groups
from block_quadrature_speed import latent as of_groups
from timing import least

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.regression import regression

Job = Callable[[], Any]
QUIET = Stop(progress=False)
RESULT = Path(__file__).parent / "results" / "rows.md"
README = Path(__file__).parents[1] / "README.md"
README_ROW = "README's first example, beyond importing torch and Pyro (s)"


def schools() -> Job:
    """Eight schools as the README has them."""
    from first_page import fitted

    return fitted


def line() -> Job:
    """A line through thirty points."""
    x = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    y = 1.0 + 2.0 * x.squeeze(-1) + 0.3 * torch.randn(30, generator=torch.Generator().manual_seed(0))
    model = regression(Linear())
    return lambda: LaplaceEvidence(model, stop=QUIET).run(x, y)


def answers(persons: int, items: int) -> tuple[np.random.Generator, torch.Tensor, torch.Tensor]:
    """A generator, and the person and the item of each answer."""
    person, item = np.repeat(np.arange(persons), items), np.tile(np.arange(items), persons)
    return np.random.default_rng(0), torch.tensor(person), torch.tensor(item)


def graded() -> Job:
    """Ordinal answers of 100 persons to 20 items, all scales sampled."""
    rng, person, item = answers(100, 20)
    ability, hardness = 1.2 * rng.normal(size=100), 0.8 * rng.normal(size=20)
    latent = ability[person] - hardness[item] + rng.logistic(size=len(person))
    y = torch.tensor((latent[:, None] > np.array([-1.0, 0.0, 1.2])).sum(1)).double()

    def model() -> None:
        spread = [pyro.sample(name, dist.HalfNormal(2.0)) for name in ("persons", "items")]
        base = dist.Normal(torch.zeros(3), 3.0).to_event(1)
        cut = pyro.sample("cut", dist.TransformedDistribution(base, dist.transforms.OrderedTransform()))
        with pyro.plate("P", 100):
            a = pyro.sample("a", dist.Normal(0.0, spread[0]))
        with pyro.plate("I", 20):
            b = pyro.sample("b", dist.Normal(0.0, spread[1]))
        with pyro.plate("answers", len(y)):
            pyro.sample("y", dist.OrderedLogistic(a[person] - b[item], cut), obs=y)

    return lambda: LaplaceEvidence(model, stop=QUIET).run()


def guessed() -> Job:
    """The three-parameter logistic model: 150 persons, 20 items."""
    rng, person, item = answers(150, 20)
    guess, ability = rng.uniform(0.1, 0.3, 20), rng.normal(size=150)
    hardness, slope = 0.8 * rng.normal(size=20), np.exp(0.3 * rng.normal(size=20))
    p = 1.0 / (1.0 + np.exp(-slope[item] * (ability[person] - hardness[item])))
    y = torch.tensor((rng.uniform(size=len(p)) < guess[item] + (1.0 - guess[item]) * p) * 1.0)

    def model() -> None:
        spread = pyro.sample("spread", dist.HalfNormal(2.0))
        with pyro.plate("I", 20):
            b = pyro.sample("b", dist.Normal(0.0, spread))
            a = pyro.sample("a", dist.LogNormal(0.0, 0.5))
            g = pyro.sample("g", dist.Beta(5.0, 17.0))
        with pyro.plate("P", 150):
            t = pyro.sample("t", dist.Normal(0.0, 1.0))
        with pyro.plate("answers", len(y)):
            probs = g[item] + (1.0 - g[item]) * torch.sigmoid(a[item] * (t[person] - b[item]))
            pyro.sample("y", dist.Bernoulli(probs), obs=y)

    return lambda: LaplaceEvidence(model, stop=QUIET).run()


def seven_nodes() -> Job:
    """Random intercepts of 10,000 groups by seven nodes each."""
    data = binary_groups(10_000)
    return lambda: LaplaceEvidence(of_groups, nodes=7, stop=QUIET).run(*data)


def ours(make: Callable[[], releases.Jobs]) -> Callable[[], Job]:
    """Our side of a case of ``releases.py``."""
    return lambda: make()["ours"]


# Row -> its job, runs.
ROWS: dict[str, tuple[Callable[[], Job], int]] = {
    "eight schools (s)": (schools, 5),
    "a line through 30 points (s)": (line, 7),
    "logistic regression, 100 x 3 (s)": (ours(releases.logistic), 7),
    "GP regression, 300": (ours(lambda: releases.gp_regression(300)), 3),
    "GP regression, 2,000": (ours(lambda: releases.gp_regression(2000)), 1),
    "GP classification, 100": (ours(lambda: releases.gp_classification(100)), 5),
    "GP classification, 200": (ours(lambda: releases.gp_classification(200)), 5),
    "RVM, Ripley": (ours(releases.rvm), 5),
    "MLP 300, four starts (s)": (ours(releases.network), 1),
    "comparison of two models": (ours(releases.comparison), 1),
    "7 nodes, 10,000 groups": (seven_nodes, 1),
    "ordinal answers, 100 x 20 (s)": (graded, 1),
    "3PL, 150 x 20 (s)": (guessed, 1),
}

PLACES = {
    r"run_backward": "torch's derivatives",
    r"torch\.|built-in method|method '": "tensor operations",
    r"torch/_functorch|torch/func": "vmap",
    r"/pyro/|torch/distributions": "Pyro and distributions",
    r"/pyro_evidence/": "our Python",
}


def shares(profile: cProfile.Profile) -> tuple[int, str]:
    """Number of calls, and the shares of kinds of work; then our functions that most time passes through."""
    stats: Any = pstats.Stats(profile)
    own: Counter[str] = Counter()
    through: Counter[str] = Counter()
    for (path, _, name), (_, _, own_time, cumulative, _) in stats.stats.items():
        own[next((kind for pattern, kind in PLACES.items() if re.search(pattern, f"{path} {name}")), "other")] += (
            own_time
        )
        if "/pyro_evidence/" in path and not name.startswith("<"):
            through[f"{Path(path).stem}.{name}"] = max(through[f"{Path(path).stem}.{name}"], cumulative)
    total = sum(own.values())
    kinds = ", ".join(f"{kind} {x / total:.0%}" for kind, x in own.most_common() if x > 0.02 * total)
    inner = [f"{name} {x / total:.0%}" for name, x in through.most_common(60) if 0.08 * total < x < 0.6 * total]
    return stats.total_calls, f"{kinds}; through {', '.join(inner[:6])}"


def measured(name: str) -> tuple[float, int, str]:
    """Least seconds, calls and shares."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if name != README_ROW:
        make, num = ROWS[name]
        job = make()
        found = least(job, num)
    else:
        code = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)[0]
        timed = (
            "import time, torch, pyro.distributions; a = time.process_time()\n"
            + code
            + "\nprint(time.process_time() - a)"
        )
        with TemporaryDirectory() as compiled:  # by the first run, as an installation keeps it
            kept = {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
            options: Any = {"capture_output": True, "text": True, "check": True}
            options["env"] = kept | {"PYTHONPYCACHEPREFIX": compiled}
            runs = [subprocess.run([sys.executable, "-c", timed], **options) for _ in range(3)]
        found = min(float(run.stdout.split()[-1]) for run in runs[1:])

        def job() -> None:
            exec(code, {})

    profile = cProfile.Profile()
    profile.runcall(job)
    return (found, *shares(profile))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of the names of rows; default all")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.row:
        print(json.dumps(measured(asked.row)))
        return
    lines = ["| row | s | calls | where the time goes |", "|---|---|---|---|"]
    for name in [README_ROW, *ROWS]:
        if not asked.names or any(part in name for part in asked.names):
            done = subprocess.run(
                [sys.executable, __file__, "--row", name], capture_output=True, text=True, check=False
            )
            if done.returncode:
                print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            seconds, calls, said = json.loads(done.stdout.splitlines()[-1])
            lines.append(f"| {name} | {seconds:.3g} | {calls:,} | {said} |")
            print(lines[-1], flush=True)
    if asked.write:
        head = "# Where the time of fits goes\n\nWritten by `python benchmarks/rows.py --write`, which says how.\n"
        RESULT.write_text("\n".join([head, *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
