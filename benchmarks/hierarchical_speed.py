"""Hierarchical models of real size beside GPBoost, lme4 and glmmTMB: processor seconds, memory, log likelihood.

    pip install gpboost; apt-get install r-cran-lme4 r-cran-glmmtmb
    PYRO_EVIDENCE_DATA=... python benchmarks/hierarchical_speed.py [case ...]

Fixed effects and scales are parameters on both sides, fitted from the same data; one thread; each fit in a process of
its own, so that its memory is its own. Seconds are the processor's, of the fit alone; ours come after a fit of twenty
rows, because torch loads modules, for a second, when derivatives are first taken. A peer that is not there is skipped
with a line. ``--peer PYTHON`` names the interpreter that has GPBoost, if this one has not.
"""

import argparse
import csv
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
Data = dict[str, np.ndarray]


# Data, the same for all sides -----------------------------------------------------------------------------------------


def grouped(num_groups: int) -> Data:
    """Counts, ten in each group on average, whose rates differ between groups."""
    rng, num = np.random.default_rng(0), 10 * num_groups
    group = rng.integers(num_groups, size=num)
    X = np.stack([np.ones(num), rng.normal(size=num), rng.normal(size=num)], 1)
    eta = X @ [0.5, 0.5, -0.3] + 0.8 * rng.normal(size=num_groups)[group]
    return {"X": X, "g0": group, "y": rng.poisson(np.exp(eta)).astype(float)}


def crossed(num_persons: int, num_items: int, num: int) -> Data:
    """Answers of persons to items drawn at random."""
    rng = np.random.default_rng(0)
    person, item = rng.integers(num_persons, size=num), rng.integers(num_items, size=num)
    X = np.stack([np.ones(num), rng.normal(size=num)], 1)
    eta = X @ [0.2, 0.5] + rng.normal(size=num_persons)[person] + 0.7 * rng.normal(size=num_items)[item]
    return {"X": X, "g0": person, "g1": item, "y": (rng.random(num) < 1.0 / (1.0 + np.exp(-eta))).astype(float)}


def state_space(num: int) -> Data:
    """Counts whose log rate wanders back to its mean."""
    rng, x = np.random.default_rng(0), np.zeros(num)
    steps = 0.2 * rng.normal(size=num)
    for t in range(1, num):
        x[t] = 0.95 * x[t - 1] + steps[t]
    return {"y": rng.poisson(np.exp(1.0 + x)).astype(float)}


def lattice(side: int) -> Data:
    """Counts on a grid whose log rate is smooth."""
    rng = np.random.default_rng(0)
    a, b = np.meshgrid(np.linspace(0, 3, side), np.linspace(0, 3, side), indexing="ij")
    rate = np.exp(0.7 + np.sin(2 * a) * np.cos(3 * b)).ravel()
    node = np.arange(side * side).reshape(side, side)
    across = np.stack([node[:, :-1].ravel(), node[:, 1:].ravel()], 1)
    down = np.stack([node[:-1].ravel(), node[1:].ravel()], 1)
    return {"edges": np.concatenate([across, down]), "y": rng.poisson(rate).astype(float)}


def table(name: str) -> list[dict[str, str]]:
    with (Path(os.environ["PYRO_EVIDENCE_DATA"]) / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def codes(rows: list[dict[str, str]], column: str) -> np.ndarray:
    return np.unique([row[column] for row in rows], return_inverse=True)[1]


def dummies(rows: list[dict[str, str]], column: str) -> list[np.ndarray]:
    """Indicators of all levels but the first."""
    levels = sorted({row[column] for row in rows})
    return [np.array([float(row[column] == level) for row in rows]) for level in levels[1:]]


def verbagg() -> Data:
    rows = table("verbagg")
    anger = np.array([float(row["Anger"]) for row in rows])
    columns = [np.ones(len(rows)), anger, *dummies(rows, "Gender"), *dummies(rows, "btype"), *dummies(rows, "situ")]
    y = np.array([float(row["r2"] in ("Y", "1", "1.0")) for row in rows])
    return {"X": np.stack(columns, 1), "g0": codes(rows, "id"), "g1": codes(rows, "item"), "y": y}


def insteval(binary: bool) -> Data:
    rows = table("insteval")
    y, one = np.array([float(row["y"]) for row in rows]), np.ones(len(rows))
    factors = {"g0": codes(rows, "s"), "g1": codes(rows, "d")}
    if binary:
        return {"X": np.stack([one, *dummies(rows, "service")], 1), **factors, "y": (y >= 4).astype(float)}
    return {"X": one[:, None], **factors, "g2": codes(rows, "dept"), "y": y}


# Ours -----------------------------------------------------------------------------------------------------------------


def by_factors(data: Data, likelihood: str):
    """A model with an effect for each level of each factor; fixed effects and scales are parameters."""
    import pyro
    import pyro.distributions as dist
    import torch
    from torch.distributions import constraints

    X, y = (torch.as_tensor(data[name]) for name in ("X", "y"))
    factors = [torch.as_tensor(data[name]) for name in sorted(data) if name.startswith("g")]
    sizes = [int(factor.max()) + 1 for factor in factors]
    positive, one = constraints.positive, torch.ones((), dtype=torch.float64)

    def model(X, factors, y):
        eta = X @ pyro.param("b", torch.zeros(X.shape[1], dtype=torch.float64))
        for number, (factor, size) in enumerate(zip(factors, sizes, strict=True)):
            scale = pyro.param(f"s{number}", one, constraint=positive)
            with pyro.plate(f"levels{number}", size):
                eta = eta + pyro.sample(f"a{number}", dist.Normal(0.0, scale))[factor]
        with pyro.plate("rows", len(X)):
            if likelihood == "gaussian":
                pyro.sample("y", dist.Normal(eta, pyro.param("sigma", one, constraint=positive)), obs=y)
            elif likelihood == "poisson":
                pyro.sample("y", dist.Poisson(eta.exp()), obs=y)
            else:
                pyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    return model, (X, factors, y)


def in_time(data: Data, likelihood: str):
    import pyro
    import pyro.distributions as dist
    import torch
    from torch.distributions import constraints

    y = torch.as_tensor(data["y"])

    def model(y):
        scale = pyro.param("scale", torch.tensor(0.5).double(), constraint=constraints.positive)
        phi = pyro.param("phi", torch.tensor(0.5).double(), constraint=constraints.interval(-1.0, 1.0))
        level = pyro.param("level", torch.tensor(0.0).double())
        with pyro.plate("times", len(y)):
            x = pyro.sample("x", dist.Normal(0.0, 10.0 * torch.ones((), dtype=torch.float64)))
            pyro.sample("y", dist.Poisson((level + x).exp()), obs=y)
        zero = torch.zeros(len(y) - 1, dtype=torch.float64)
        with pyro.plate("steps", len(y) - 1):
            pyro.sample("dx", dist.Normal(x[1:] - phi * x[:-1], scale), obs=zero)

    return model, (y,)


def on_a_grid(data: Data, likelihood: str):
    import pyro
    import pyro.distributions as dist
    import torch
    from torch.distributions import constraints

    from pyro_evidence.models.gmrf import ICAR, Neighbours

    graph, y = Neighbours(torch.as_tensor(data["edges"])), torch.as_tensor(data["y"])

    def model(y):
        scale = pyro.param("scale", torch.tensor(0.5).double(), constraint=constraints.positive)
        x = pyro.sample("x", ICAR(graph, scale, level=3.0))
        with pyro.plate("nodes", len(y)):
            pyro.sample("y", dist.Poisson(x.exp()), obs=y)

    return model, (y,)


def ours(case: "Case", folder: Path) -> dict[str, float]:
    import pyro
    import torch

    from pyro_evidence import LaplaceEvidence

    torch.set_num_threads(1)
    warm_up()
    pyro.clear_param_store()
    model, args = case.model(case.data(), case.likelihood)
    start = time.process_time()
    posterior = LaplaceEvidence(model).run(*args)
    seconds = time.process_time() - start
    print(getattr(posterior, "structure", ""), file=sys.stderr)
    return {"seconds": seconds, "log_likelihood": float(posterior.log_evidence)}


def warm_up() -> None:
    from pyro_evidence import LaplaceEvidence

    model, args = by_factors(grouped(2), "poisson")
    LaplaceEvidence(model).run(*args)


# Theirs ---------------------------------------------------------------------------------------------------------------


def gpboost(case: "Case", folder: Path) -> dict[str, float]:
    import gpboost

    data = case.data()
    factors = np.stack([data[name] for name in sorted(data) if name.startswith("g")], 1)
    names = {"poisson": "poisson", "bernoulli": "bernoulli_logit", "gaussian": "gaussian"}
    start = time.process_time()
    fitted = gpboost.GPModel(
        group_data=factors,
        likelihood=names[case.likelihood],
        matrix_inversion_method="cholesky",
        num_parallel_threads=1,
    )
    fitted.fit(y=data["y"], X=data["X"])
    seconds = time.process_time() - start
    return {"seconds": seconds, "log_likelihood": -float(fitted.get_current_neg_log_likelihood())}


def in_r(case: "Case", folder: Path, package: str) -> dict[str, float]:
    """Seconds inside R; data go by a binary file."""
    data = case.data()
    factors = [name for name in sorted(data) if name.startswith("g")]
    columns = [data["y"], *data["X"].T[1:], *(data[name] for name in factors)]
    (folder / "data.bin").write_bytes(np.stack(columns).astype("<f8").tobytes())
    xs = [f"x{i}" for i in range(data["X"].shape[1] - 1)]
    formula = " + ".join(["y ~ 1", *xs, *(f"(1|{name})" for name in factors)])
    family = {"poisson": "poisson", "bernoulli": "binomial", "gaussian": "gaussian"}[case.likelihood]
    fit = {
        "glmmTMB": f"glmmTMB({formula}, data=d, family={family})",
        "lme4": f"lmer({formula}, data=d, REML=FALSE)"
        if family == "gaussian"
        else f"glmer({formula}, data=d, {family})",
    }[package]
    names = ",".join(f"'{name}'" for name in ["y", *xs, *factors])
    script = f"""
    suppressPackageStartupMessages(library({package}))
    v <- readBin("{folder / "data.bin"}", "double", {len(columns) * len(columns[0])}, endian="little")
    d <- as.data.frame(matrix(v, ncol={len(columns)})); names(d) <- c({names}); rm(v)
    for (n in c({",".join(f"'{name}'" for name in factors)})) d[[n]] <- factor(d[[n]])
    t <- sum(system.time(m <- {fit})[c("user.self", "sys.self")])
    cat("\\nRESULT", t, sprintf("%.6f", as.numeric(logLik(m))), "\\n")
    """
    found = subprocess.run(["Rscript", "-e", script], capture_output=True, text=True, check=True)
    seconds, value = next(line for line in found.stdout.splitlines() if line.startswith("RESULT")).split()[1:]
    return {"seconds": float(seconds), "log_likelihood": float(value)}


def glmmtmb(case: "Case", folder: Path) -> dict[str, float]:
    return in_r(case, folder, "glmmTMB")


def lme4(case: "Case", folder: Path) -> dict[str, float]:
    return in_r(case, folder, "lme4")


SIDES = {"ours": ours, "GPBoost": gpboost, "glmmTMB": glmmtmb, "lme4": lme4}


def has_r(package: str) -> bool:
    if shutil.which("Rscript") is None:
        return False
    return subprocess.run(["Rscript", "-e", f"library({package})"], capture_output=True, check=False).returncode == 0


def has_gpboost(python: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec("gpboost") is not None
    return subprocess.run([python, "-c", "import gpboost"], capture_output=True, check=False).returncode == 0


# Cases ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    data: Callable[[], Data]
    likelihood: str
    peers: tuple[str, ...] = ()
    target: str = ""
    model: Callable = by_factors


CASES = {
    "1,000 groups": Case(lambda: grouped(1_000), "poisson", ("glmmTMB", "GPBoost"), "0.6 s, .5 x glmmTMB"),
    "10,000 groups": Case(lambda: grouped(10_000), "poisson", ("glmmTMB", "GPBoost"), "1.5 s, .2 x glmmTMB"),
    "100,000 groups": Case(lambda: grouped(100_000), "poisson", ("GPBoost",), "2 x GPBoost, 2 GiB"),
    "verbagg": Case(verbagg, "bernoulli", ("glmmTMB", "GPBoost"), "1 x glmmTMB"),
    "insteval, y >= 4": Case(lambda: insteval(True), "bernoulli", ("glmmTMB", "GPBoost"), "1 x glmmTMB"),
    "insteval, three factors": Case(lambda: insteval(False), "gaussian", ("lme4", "GPBoost"), ".5 x lme4"),
    "crossed 42,000 x 100": Case(lambda: crossed(42_000, 100, 1_000_000), "bernoulli", (), "30 s"),
    "state space 100,000": Case(lambda: state_space(100_000), "poisson", (), "20 s", in_time),
    "grid 300 x 300": Case(lambda: lattice(300), "poisson", (), "60 s", on_a_grid),
}


def one(name: str, side: str) -> None:
    """Run one side of one case and print what was found, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        found = SIDES[side](CASES[name], Path(folder))
    who = resource.RUSAGE_CHILDREN if side in ("glmmTMB", "lme4") else resource.RUSAGE_SELF
    found["gib"] = resource.getrusage(who).ru_maxrss / 2**20
    print(json.dumps(found))


def in_its_own_process(name: str, side: str, python: str, limit: float) -> dict[str, float]:
    command = [python if side == "GPBoost" else sys.executable, __file__, "--run", name, side]
    environment = {**os.environ, **ONE_THREAD}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=limit)
    if found.returncode:
        raise RuntimeError(found.stderr.strip().splitlines()[-1] if found.stderr.strip() else "no message")
    return json.loads(found.stdout.strip().splitlines()[-1])


def row(name: str, side: str, python: str, limit: float) -> str:
    try:
        found = in_its_own_process(name, side, python, limit)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return f"| {name} | {side} | - | - | {str(error)[:160]} |"
    return f"| {name} | {side} | {found['seconds']:.2f} | {found['gib']:.2f} | {found['log_likelihood']:.4f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="case")
    parser.add_argument("--run", nargs=2, metavar=("case", "side"), help="one side of one case, in this process")
    parser.add_argument("--peer", default=sys.executable, help="the interpreter that has GPBoost")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one fit")
    given = parser.parse_args()
    if given.run:
        one(*given.run)
        return
    present = {"ours": True, "GPBoost": has_gpboost(given.peer), "glmmTMB": has_r("glmmTMB"), "lme4": has_r("lme4")}
    for side in (side for side, there in present.items() if not there):
        print(f"{side} is not there and is skipped.")
    print("| case | side | seconds | GiB | log likelihood |\n|---|---|---|---|---|")
    for name in given.cases:
        for side in ("ours", *CASES[name].peers):
            if present[side]:
                print(row(name, side, given.peer, given.limit), flush=True)
        print(f"| {name} | target | {CASES[name].target} | | |", flush=True)


if __name__ == "__main__":
    main()
