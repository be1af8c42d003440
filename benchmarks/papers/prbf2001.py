"""Constantinopoulos, Titsias and Likas (2001), Tables 1 to 4 on the real data: spherical kernels, 5 folds.

    OMP_NUM_THREADS=1 python benchmarks/papers/prbf2001.py [results.jsonl] > prbf2001.md      # about 25 CPU minutes

Each table cell's folds and penalties are one batch.  Every batch is written to ``results.jsonl`` (default
``.benchmarks/prbf2001.jsonl``) as soon as it is done, and is not done again.  The data are read from the folder that
PYRO_EVIDENCE_DATA names.  scikit-learn and SciPy are needed for the trivial baselines and for Student's t.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from results import Results
from scipy.stats import t as student
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from tqdm.auto import tqdm

from pyro_evidence import Start, datasets
from pyro_evidence.fitting.em import repeated
from pyro_evidence.models.covariances import Spherical
from pyro_evidence.prbf import Ascent, DataCovariance, KMeans, RandomPoints
from pyro_evidence.prbf.data import Training
from pyro_evidence.prbf.densities import Point, class_data, log_density
from pyro_evidence.prbf.fit import first, keep_dead_kernels, next_round, warmed_up
from pyro_evidence.prbf.start import Initial
from pyro_evidence.prbf.updates import Update, exact_m_step, prbf2001_update

FOLDS, STEPS = 5, 100
MULTIPLES = (0.0, 5.0, 10.0, 15.0, 20.0)
CORRECTED: dict[str, Update] = {"exact M-step": exact_m_step, "ascent": Ascent()}
KIND = Spherical()
Record = dict[str, list[list[float]]]


@dataclass(frozen=True)
class Table:
    """One table of the paper: kernels, and error in per cent without a penalty and for each multiple."""

    name: str
    title: str
    sizes: tuple[int, ...]
    paper: tuple[tuple[float, ...], ...]
    seeds: int
    initial: Initial
    raw: bool = False
    corrected_seeds: int = 1  # for the corrected updates, which cost more


random_points, k_means, wide_k_means = RandomPoints(), KMeans(), DataCovariance(KMeans())
STARTS: dict[Initial, str] = {
    random_points: "random data as centres, the covariance of all data",
    k_means: "k-means, each kernel with the covariance of its cluster",
    wide_k_means: "k-means, the covariance of all data",
}


TABLES = [
    Table("pima", "Table 1: Pima", (6, 8, 10, 12, 14), (
        (30.33, 30.07, 28.26, 28.00, 27.35), (31.25, 28.25, 27.21, 26.82, 25.78), (28.91, 26.30, 26.56, 27.60, 26.82),
        (28.00, 27.73, 27.99, 26.81, 26.43), (27.47, 25.64, 27.86, 28.39, 25.38)), 10, random_points,
        corrected_seeds=3),
    Table("satimage", "Table 2: Satimage", (6, 9, 12, 15, 18), (
        (24.12, 17.09, 17.01, 16.08, 16.16), (23.92, 17.20, 16.92, 16.05, 15.69), (24.10, 17.08, 16.41, 15.99, 15.71),
        (22.74, 16.58, 15.80, 15.85, 15.68), (22.55, 15.88, 15.99, 15.76, 15.48)), 4, k_means, True),
    Table("phoneme", "Table 3: Phoneme", (8, 10, 12, 14, 16), (
        (21.12, 21.58, 21.23, 21.57, 21.33), (20.97, 21.66, 21.27, 21.64, 21.10), (21.08, 21.44, 20.81, 20.70, 20.62),
        (21.34, 21.16, 20.99, 20.75, 20.38), (21.03, 20.81, 20.97, 20.55, 20.57)), 4, wide_k_means),
    Table("ionosphere", "Table 4: Ionosphere", (4, 6, 8, 10, 12), (
        (24.49, 17.37, 12.83, 11.69, 9.42), (19.11, 12.26, 10.25, 9.40, 9.41), (14.52, 10.26, 10.80, 9.11, 9.70),
        (14.80, 12.83, 10.82, 9.40, 9.70), (14.80, 12.83, 10.25, 8.83, 9.11)), 10, random_points),
]  # fmt: skip


def load(name: str) -> tuple[Tensor, Tensor]:
    parts = [datasets.csv(f"satimage_{p}") for p in ("train", "test")] if name == "satimage" else [datasets.csv(name)]
    X, t = torch.cat([p.X for p in parts]), torch.cat([p.t for p in parts])
    return X, t.unique(return_inverse=True)[1]


Split = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def splits(X: Tensor, y: Tensor, seed: int, *, raw: bool) -> list[Split]:
    """Training and test set of each fold, stratified; standardised by the training set unless ``raw``."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    order = order[y[order].argsort(stable=True)]
    fold = torch.empty_like(y)
    fold[order] = torch.arange(len(y)) % FOLDS
    found = []
    for f in range(FOLDS):
        train, test = fold != f, fold == f
        scale = X[train].std(0, correction=0)
        scale = torch.ones_like(scale) if raw else torch.where(scale > 0, scale, 1.0)
        Z = (X - X[train].mean(0)) / scale
        found.append(((Z[train], y[train]), (Z[test], y[test])))
    return found


def batch(table: Table, M: int, seed: int, methods: list[tuple[float, Update]]) -> Record:
    """Error in per cent and test NLL in nats per datum, by method and fold; all folds from the same starts."""
    X, y = load(table.name)
    K = int(y.max()) + 1
    folds = splits(X, y, seed, raw=table.raw)
    allowed = torch.ones(K, M, dtype=torch.bool)
    starts = [
        table.initial(Training(*train, KIND, allowed), Start(seed=1000 * seed + f))
        for f, (train, _) in enumerate(folds)
    ]
    errors, losses = [], []
    for multiples, update in grouped(methods):
        scores = []
        for net, (train, (x, t)) in zip(starts, folds, strict=True):
            alpha = torch.tensor(multiples) * len(train[0]) / (K * M)
            many = net[torch.zeros(len(multiples), dtype=torch.long)]
            point = rounds(first(class_data(*train, K, KIND), many, alpha), update, STEPS)
            log_density_of_classes = log_density(point.net, KIND, KIND.features(x))
            log_proba = (log_density_of_classes + point.net.class_prior.log().unsqueeze(1)).log_softmax(-1)
            scores.append([score(each, t) for each in log_proba])
        for each in zip(*scores, strict=True):
            errors.append([s[0] for s in each])
            losses.append([s[1] for s in each])
    return {"error": errors, "nll": losses}


def rounds(point: Point, update: Update, num: int) -> Point:
    """So many rounds from ``point``, after the warm-up that ``update`` asks for."""
    return repeated(warmed_up(point, update, keep_dead_kernels), num, next_round).point


def grouped(methods: list[tuple[float, Update]]) -> list[tuple[list[float], Update]]:
    """Methods with the same update together, in their order."""
    found: list[tuple[list[float], Update]] = []
    for multiple, update in methods:
        if found and found[-1][1] is update:
            found[-1][0].append(multiple)
        else:
            found.append(([multiple], update))
    return found


def score(log_proba: Tensor, y: Tensor) -> tuple[float, float]:
    wrong = 100.0 * float((log_proba.argmax(-1) != y).double().mean())
    return wrong, -float(log_proba.gather(-1, y.unsqueeze(-1)).mean())


def trivial(table: Table, seed: int) -> Record:
    """Errors of linear, quadratic and logistic discrimination, by method and fold."""
    makers = (
        LinearDiscriminantAnalysis,
        lambda: QuadraticDiscriminantAnalysis(reg_param=0.05),
        lambda: LogisticRegression(max_iter=2000),
    )
    X, y = load(table.name)
    errors = []
    for make in makers:
        folds = splits(X, y, seed, raw=False)
        models = [make().fit(a.numpy(), b.numpy()) for (a, b), _ in folds]
        errors.append([100.0 * float(np.mean(m.predict(x.numpy()) != t.numpy()))
                       for m, (_, (x, t)) in zip(models, folds, strict=True)])  # fmt: skip
    return {"error": errors}


def corrected_t(differences: list[float]) -> tuple[float, float]:
    """Mean over folds and seeds, and the two-sided p of Nadeau and Bengio's (2003) corrected t-test."""
    num = len(differences)
    spread = (1.0 / num + 1.0 / (FOLDS - 1)) * stdev(differences) ** 2
    if spread == 0.0:
        return mean(differences), 1.0
    return mean(differences), float(2.0 * student.sf(abs(mean(differences)) / math.sqrt(spread), num - 1))


def cells(runs: dict[tuple[int, int], Record], table: Table, method: int, what: str) -> list[str]:
    """Mean and standard deviation over seeds of the cross-validated number, for each M."""
    found = []
    for M in table.sizes:
        seeds = [mean(runs[M, s][what][method]) for s in range(table.seeds) if (M, s) in runs]
        found.append(f"{mean(seeds):.2f}" + (f" ± {stdev(seeds):.2f}" if len(seeds) > 1 else ""))
    return found


def differences(runs: dict[tuple[int, int], Record], M: int, a: int, b: int) -> list[float]:
    return [
        x - y for (m, _), r in sorted(runs.items()) if m == M for x, y in zip(r["error"][a], r["error"][b], strict=True)
    ]


def row(name: str, parts: list[str]) -> str:
    return f"| {name} | " + " | ".join(parts) + " |"


def published(table: Table, results: Results[Record]) -> dict[tuple[int, int], Record]:
    """The paper's update at every penalty, by number of kernels and seed."""
    keys = [(M, seed) for M in table.sizes for seed in range(table.seeds)]
    methods = [(c, prbf2001_update) for c in MULTIPLES]
    return {
        (M, s): results.get(f"{table.name} {M} {s}", lambda M=M, s=s: batch(table, M, s, methods))
        for M, s in tqdm(keys, desc=table.title)
    }


def corrected(table: Table, results: Results[Record]) -> dict[tuple[int, int], Record]:
    """The corrected updates at c = 20, with fewer seeds."""
    keys = [(M, seed) for M in table.sizes for seed in range(table.corrected_seeds)]
    methods = [(20.0, update) for update in CORRECTED.values()]
    return {
        (M, s): results.get(f"{table.name} {M} {s} corrected", lambda M=M, s=s: batch(table, M, s, methods))
        for M, s in tqdm(keys, desc=f"{table.title}, corrected updates")
    }


def report(table: Table, results: Results[Record]) -> str:
    runs, better = published(table, results), corrected(table, results)
    simple = [
        results.get(f"{table.name} trivial {s}", lambda s=s: trivial(table, s)) for s in range(min(table.seeds, 3))
    ]
    head = ["update, error in % (paper)", *(f"M = {M}" for M in table.sizes)]
    lines = [f"## {table.title}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for i, c in enumerate(MULTIPLES):
        ours = cells(runs, table, i, "error")
        name = "plain EM" if c == 0 else f"published, c = {c:g}"
        lines.append(row(name, [f"{a} ({b:.2f})" for a, b in zip(ours, table.paper[i], strict=True)]))
    for i, name in enumerate(CORRECTED):
        lines.append(row(f"{name}, c = 20, fewer seeds", cells(better, table, i, "error")))
    for i in range(1, len(MULTIPLES)):
        tests = [corrected_t(differences(runs, M, i, 0)) for M in table.sizes]
        lines.append(row(f"c = {MULTIPLES[i]:g} minus plain (p)", [f"{d:+.2f} ({p:.3f})" for d, p in tests]))
    for i in (0, len(MULTIPLES) - 1):
        lines.append(row(f"test NLL in nats, c = {MULTIPLES[i]:g}", cells(runs, table, i, "nll")))
    for i, name in enumerate(CORRECTED):
        lines.append(row(f"test NLL in nats, {name}, c = 20", cells(better, table, i, "nll")))
    whole = [mean(d) for d in zip(*(differences(runs, M, i, 0) for M in table.sizes for i in range(1, 5)), strict=True)]
    total, p = corrected_t(whole)
    paper = mean(table.paper[i][j] - table.paper[0][j] for i in range(1, 5) for j in range(5))
    flat = [mean([e for r in simple for e in r["error"][i]]) for i in range(3)]
    names = zip(("LDA", "QDA", "logistic regression"), flat, strict=True)
    text = "Trivial baselines: " + ", ".join(f"{n} {e:.1f} %" for n, e in names) + "."
    gain = f"Mean over penalties and M of published minus plain: {total:+.2f} (p = {p:.4f}); paper {paper:+.2f}."
    return "\n".join([*lines, "", f"{table.seeds} seeds. Start: {STARTS[table.initial]}. {gain} {text}", ""])


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    results = Results(Path(sys.argv[1] if len(sys.argv) > 1 else ".benchmarks/prbf2001.jsonl"))
    print("# Constantinopoulos, Titsias and Likas (2001), Tables 1 to 4\n")
    print("Mean ± sd over seeds, each a fresh stratified 5-fold split and start; p: Nadeau and Bengio's test.\n")
    for table in TABLES:
        published(table, results)
    for table in TABLES:
        print(report(table, results), flush=True)


if __name__ == "__main__":
    main()
