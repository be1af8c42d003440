"""Choosing the penalty of the PRBF and its number of kernels: what works, and what does not.

    OMP_NUM_THREADS=1 python benchmarks/papers/prbf2001_choices.py [results.jsonl] > prbf2001_choices.md

First part: the evidence for ``alpha``, a negative result.  The penalty of eq. 17 has no normaliser, so an evidence
needs a reading of it.  Three were tried, all by Laplace's approximation over the centres, the rest held:

A. as it stands: log likelihood - penalty - 1/2 log det H.  It falls with alpha: the best alpha is 0.
B. normalised as a Gaussian of each centre about its subkernels: adds M D / 2 log alpha - 1/2 sum log det S_j.  The data
   are used twice, as the prior's mean is made of them; maxima inside come from the likelihood's fall alone.
C. a random effect of each class, nu_jk ~ N(mu_j, 4 S_j / (alpha P_jk)), with subkernel means as data: the only coherent
   one, a function of one number.  At plain EM it gives the source's order of magnitude; fitted again at that alpha and
   estimated again, it runs away where classes were rejected, because a rejected class has no distance left.

None is an option of the package.  Second part: choice by inner cross-validation, averages over alpha, kernels added one
by one, each beside a fixed c = 20 and a fixed M, on the same splits.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from prbf2001 import KIND, TABLES, Record, Table, load, rounds, row, score, splits
from results import Results
from torch import Tensor
from tqdm.auto import tqdm

from pyro_evidence import OverlapEM, Start, Stop
from pyro_evidence.models.prbf import prbf
from pyro_evidence.prbf import AlphaPerKernel, add_kernels, average_networks, choose_alpha, log_loss
from pyro_evidence.prbf.data import Training
from pyro_evidence.prbf.densities import Point, class_data
from pyro_evidence.prbf.fit import first
from pyro_evidence.prbf.updates import prbf2001_update

GRID = (0.03, 0.1, 0.3, 1.0, 3.0, 5.0, 10.0, 15.0, 20.0, 50.0)
STOP = Stop(num_steps=100, tolerance=0.0, gradient_tolerance=0.0, progress=False)
SETTINGS = [("pima", 6), ("pima", 10), ("ionosphere", 4), ("ionosphere", 8)]


def table_of(name: str) -> Table:
    return next(t for t in TABLES if t.name == name)


def curvature(point: Point, b: int, X: Tensor, y: Tensor) -> Tensor:
    """Hessian of minus the log likelihood in the centres of row ``b``, shape ``(M D, M D)``."""
    net = point.net
    variance, log_mixing = net.covariance[b, :, 0], net.mixing[b].log()[y]

    def minus_log_likelihood(centres: Tensor) -> Tensor:
        offset = X.unsqueeze(1) - centres.reshape(-1, X.shape[1])
        kernels = -0.5 * offset.square().sum(-1) / variance - 0.5 * X.shape[1] * (math.tau * variance).log()
        return -(kernels + log_mixing).logsumexp(-1).sum()

    return torch.func.hessian(minus_log_likelihood)(net.loc[b].flatten())


def readings(name: str, M: int) -> Record:
    """Evidence A and B on the grid, and the multiples that C finds, one-shot and after six rounds of refitting."""
    table = table_of(name)
    (X, y), _ = splits(*load(name), 0, raw=table.raw)[0]
    K, D = int(y.max()) + 1, X.shape[1]
    net = table.initial(Training(X, y, KIND, torch.ones(K, M, dtype=torch.bool)))
    data, unit = class_data(X, y, K, KIND), len(X) / (K * M)

    def fitted(multiples: tuple[float, ...]) -> Point:
        many = net[torch.zeros(len(multiples), dtype=torch.long)]
        return rounds(first(data, many, unit * torch.tensor(multiples)), prbf2001_update, 100)

    point = fitted(GRID)
    found_a, found_b = [], []
    for b, alpha in enumerate(point.alpha):
        prior = (0.25 * alpha / point.net.covariance[b]).expand(M, D).flatten()
        log_det = torch.linalg.slogdet(curvature(point, b, X, y) + prior.diag())[1]
        found_a.append(float(point.objective[b] - 0.5 * log_det))
        found_b.append(float(point.objective[b] - 0.5 * log_det + 0.5 * prior.log().sum()))
    plain_point = fitted((0.0,))
    path = [random_effects(plain_point) / unit]
    while len(path) < 7 and path[-1] < 1e3:
        path.append(random_effects(fitted((path[-1],))) / unit)
    return {"A": [found_a], "B": [found_b], "C": [path]}


def random_effects(point: Point) -> float:
    """The ``alpha`` of the highest evidence under reading C, on a fine grid up to 1e6."""
    alpha = torch.logspace(-3, 6, 2000).reshape(-1, 1, 1)
    P, R, d = point.net.ownership[0], point.counts[0], point.distance[0]
    used = (P > 1e-12) & (R > 1e-6)
    spread = 4.0 / (alpha * P.where(used, torch.ones(()))) + 1.0 / R.where(used, torch.ones(()))
    evidence = -0.5 * torch.where(used, point.data.dim * spread.log() + d / spread, 0.0).sum((-1, -2))
    return float(alpha.flatten()[evidence.argmax()])


def evidence_part(results: Results[Record]) -> str:
    lines = ["| data, M | A: best c | B: best c | C: c, fitted again and again |", "|---|---|---|---|"]
    for name, M in tqdm(SETTINGS, desc="evidence"):
        r = results.get(f"readings {name} {M}", lambda n=name, m=M: readings(n, m))
        best = [GRID[max(range(len(GRID)), key=r[w][0].__getitem__)] for w in "AB"]
        path = ", ".join("runs away" if c > 1e3 else f"{c:.1f}" for c in r["C"][0])
        lines.append(row(f"{name}, {M}", [f"{best[0]:g}", f"{best[1]:g}", path]))
    return "\n".join(lines)


Method = Callable[[OverlapEM, Tensor, Tensor, int], Callable[[Tensor], Tensor]]


def fixed(c: float) -> Method:
    return lambda engine, X, y, seed: replace(engine, alpha=AlphaPerKernel(c)).run(X, y).log_proba


def by_error(engine: OverlapEM, X: Tensor, y: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    return replace(engine, alpha=choose_alpha(engine, X, y, seed=seed).alpha).run(X, y).log_proba


def by_log_loss(engine: OverlapEM, X: Tensor, y: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    return replace(engine, alpha=choose_alpha(engine, X, y, score=log_loss, seed=seed).alpha).run(X, y).log_proba


def averaged(engine: OverlapEM, X: Tensor, y: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    return average_networks(engine, X, y).log_proba


def added(c: float) -> Method:
    def grow(engine: OverlapEM, X: Tensor, y: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
        path = add_kernels(replace(engine, alpha=AlphaPerKernel(c)), X, y, most=engine.model.num_kernels, seed=seed)
        return path.posteriors[-1].log_proba  # as many kernels as the others have

    return grow


METHODS: dict[str, Method] = {
    "plain EM": fixed(0.0),
    "c = 20": fixed(20.0),
    "c by inner error": by_error,
    "c by inner log loss": by_log_loss,
    "average of c = 5, 10, 15, 20": averaged,
    "kernels added, plain EM": added(0.0),
    "kernels added, c = 20": added(20.0),
}


def compared(name: str, M: int, seed: int, method: Method) -> Record:
    """Test error in per cent and NLL in nats of one method on five folds."""
    table, found = table_of(name), []
    X, y = load(name)
    for f, (train, test) in enumerate(splits(X, y, seed, raw=table.raw)):
        engine = OverlapEM(
            prbf(M, int(y.max()) + 1),
            update=prbf2001_update,
            start=Start(seed=1000 * seed + f),
            initial=table.initial,
            stop=STOP,
        )
        found.append(score(method(engine, *train, seed)(test[0]), test[1]))
    return {"error": [[e for e, _ in found]], "nll": [[n for _, n in found]]}


def choices_part(results: Results[Record], num_seeds: int = 3) -> str:
    lines = [
        row("method: error in %, NLL in nats", [f"{name}, M = {M}" for name, M in SETTINGS]),
        "|---" * (len(SETTINGS) + 1) + "|",
    ]
    for label, method in tqdm(METHODS.items(), desc="choices"):
        parts = []
        for name, M in SETTINGS:
            runs = [
                results.get(f"{label} {name} {M} {s}", lambda n=name, m=M, s=s, f=method: compared(n, m, s, f))
                for s in range(num_seeds)
            ]
            parts.append(", ".join(f"{mean(mean(r[w][0]) for r in runs):.2f}" for w in ("error", "nll")))
        lines.append(row(label, parts))
    return "\n".join(lines)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    results = Results(Path(sys.argv[1] if len(sys.argv) > 1 else ".benchmarks/prbf2001_choices.jsonl"))
    print("# The penalty and the number of kernels\n\n## Evidence for the penalty: a negative result\n")
    print(evidence_part(results), "\n\n## Choices on the same splits, published update, mean of 3 seeds\n", flush=True)
    print(choices_part(results), flush=True)


if __name__ == "__main__":
    main()
