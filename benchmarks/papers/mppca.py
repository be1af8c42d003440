"""Husmeier (2000), section 4.3, on public data: Figure 6 and Table 3, mixtures of probabilistic PCA; and digits.

    python benchmarks/papers/mppca.py [results.jsonl] > mppca.md

The paper's sleep data are not public.  On each data set two classes of equal size get a density each, 24 times (K = 4
and 6, three splits, two widths, two seeds), 60 rounds, of which 5 are direct; q = 2.  Table 3's t compares the
evidence scheme with unregularised training after 60 rounds, and with its best round on the test set.  Every run is
written to ``results.jsonl`` as soon as it is done, and is not done again.  Figure 6 goes to ``mppca_figure6.png``
beside this file.  Satimage and pima are read from the folder
that PYRO_EVIDENCE_DATA names; breast cancer and digits come with scikit-learn.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from results import Results
from torch import Tensor
from tqdm.auto import tqdm

from pyro_evidence import EvidenceEM, Start, Stop, class_conditional, datasets
from pyro_evidence.fitting.em import advance, moved_to
from pyro_evidence.mixture import Unregularised
from pyro_evidence.mixture.updates import BoundedInflation, SharedParameters, Update
from pyro_evidence.models.mppca import mppca
from pyro_evidence.mppca import expectation as kernels
from pyro_evidence.mppca import fit as mppca_fit
from pyro_evidence.mppca import start as mppca_start
from pyro_evidence.mppca.data import Observations
from pyro_evidence.mppca.expectation import FactorAnalysers
from pyro_evidence.mppca.updates import MPPCAUpdate, literal_gamma, no_gamma

Record = dict[str, float]
Simulations = list[list[float]]  # of each: E1, E2, error % of plain training, of the evidence scheme, of best rounds
NUM_ROUNDS, NUM_DIRECT, Q = 60, 5, 2
BLOCKS = 6  # of fresh splits
# name: rows of each class for training, what the paper-like experiment was done on
DATA: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], int]] = {
    "breast cancer, PCA 10": (lambda: two(datasets.breast_cancer(), 0, 1, components=10), 100),
    "pima": (lambda: two(datasets.pima(), 0, 1, components=8), 130),
    "satimage 5 v 7, PCA 10": (lambda: two(datasets.csv("satimage_train"), 5, 7, components=10), 100),
    "satimage 3 v 4": (lambda: two(datasets.csv("satimage_train"), 3, 4, components=36), 100),
    "digits 4 v 9, PCA 10": (lambda: two(datasets.digits(), 4, 9, components=10), 80),
}
SCHEMES = {"as printed": MPPCAUpdate(literal_gamma), "default": mppca_fit.rule_of(BoundedInflation())}
PAPER = ((9.65, 7.93, 2.36), (4.58, 1.40, 0.74))


def two(data: datasets.Dataset, a: int, b: int, components: int) -> tuple[Tensor, Tensor]:
    """Two classes, standardised, on their leading principal components."""
    assert data.t is not None
    kept = (data.t == a) | (data.t == b)
    X = data.X[kept]
    X = X[:, X.std(0) > 0]
    X = (X - X.mean(0)) / X.std(0)
    if components < X.shape[1]:
        X = X @ torch.linalg.eigh(X.T @ X).eigenvectors.flip(-1)[:, :components]
    return X, (data.t[kept] == b).long()


def evolution(train: Tensor, test: Tensor, start: FactorAnalysers, rule: MPPCAUpdate) -> Tensor:
    """Log density of both classes' test data after each round, ``(rounds, R, N)``."""
    K, m = start.W.shape[1:3]
    ties = SharedParameters.of(torch.arange(K)[:, None].expand(K, Q), torch.arange(K)[:, None].expand(K, m))
    batch = mppca_fit.first(Observations.resident(train), start, ties, torch.ones(m), rule)
    path = []
    for step in range(NUM_ROUNDS):
        if step < NUM_DIRECT:
            batch = moved_to(batch, mppca_start.direct(batch.data, batch.it.analysers))
        else:
            batch = advance(batch)
        path.append(kernels.log_joint(test, batch.it.analysers).logsumexp(-1))
    return torch.stack(path)


def starts(train: Tensor, K: int) -> FactorAnalysers:
    """Footnote 14: W = 0, centres from a Normal about the mean of the class, two widths, two seeds: four rows."""
    m, rows = train.shape[1], []
    for width in (0.5, 1.0):
        for seed in (0, 1):
            mu = train.mean(0) + torch.randn(K, m, generator=torch.Generator().manual_seed(1000 * K + seed))
            rows.append((mu, torch.full((K, m), 1.0 / width)))
    mu, beta = (torch.stack(x) for x in zip(*rows, strict=True))
    on = torch.ones(4, K, Q, dtype=torch.bool)
    return FactorAnalysers(torch.zeros(4, K, m, Q), mu, beta, torch.full((4, K), -math.log(K)), 0.01 * on, on)


def parted(name: str, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Training and test data of the two classes."""
    (X, labels), num = DATA[name][0](), DATA[name][1]
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    rows = [order[labels[order] == c] for c in (0, 1)]
    return [X[r[:num]] for r in rows], [X[r[num:]] for r in rows]


def simulations(name: str, block: int, rule: MPPCAUpdate) -> Simulations:
    """All 24 of one block of splits."""
    runs: Simulations = []
    for split in range(3):
        trains, tests = parted(name, 100 * block + split)
        truth = torch.cat([torch.full((len(t),), c) for c, t in enumerate(tests)])
        for K in (4, 6):
            runs += one_split(trains, torch.cat(tests), truth, K, rule)
    return runs


def table(runs: Simulations) -> Record:
    """The six t statistics of one block of splits, and the mean errors of the three methods."""
    columns = list(zip(*runs, strict=True))
    found = {}
    for i, measure in enumerate(("E1", "E2", "error")):
        for other, offset in (("plain", 0), ("stopped", 6)):
            gaps = [a - b for a, b in zip(columns[offset + i], columns[3 + i], strict=True)]
            found[f"{measure} {other}"] = math.sqrt(len(gaps)) * mean(gaps) / max(stdev(gaps), 1e-12)
        found |= {
            f"mean {measure} {n}": mean(columns[o + i]) for n, o in (("plain", 0), ("evidence", 3), ("stopped", 6))
        }
    return found


def one_split(trains: list[Tensor], test: Tensor, truth: Tensor, K: int, rule: MPPCAUpdate) -> Simulations:
    """For each of four starts: E1, E2 and error of plain training, of the evidence scheme, and of the best rounds."""
    ends = {}
    for name, used in (("plain", MPPCAUpdate(no_gamma, alpha=0.0)), ("evidence", rule)):
        paths = [evolution(train, test, starts(train, K), used) for train in trains]
        nll = torch.stack([-p[..., truth == c].mean(-1) for c, p in enumerate(paths)], -1)  # (rounds, R, 2)
        wrong = 100.0 * ((paths[1] > paths[0]) != truth.bool()).double().mean(-1)
        ends[name] = torch.cat([nll, wrong.unsqueeze(-1)], -1)
    plain, evidence, best = ends["plain"][-1], ends["evidence"][-1], ends["plain"].amin(0)
    return torch.cat([plain, evidence, best], -1).tolist()


def table3(results: Results[Any]) -> str:
    lines = [
        "| data, block of splits, scheme | t against plain: E1 E2 error | its best round | error %: plain, own, best |",
        "|---|---|---|---|",
        f"| the paper (sleep) | {' '.join(map(str, PAPER[0]))} | {' '.join(map(str, PAPER[1]))} | |",
    ]
    blocks = [(name, block) for name in DATA for block in range(BLOCKS if name.startswith("breast") else 1)]
    settings = [(name, block, scheme) for name, block in blocks for scheme in SCHEMES]
    for name, block, scheme in tqdm(settings, desc="Table 3"):
        key = f"{name} {block}" if scheme == "as printed" else f"{name} {block} {scheme}"
        r = results.get(key, lambda n=name, b=block, s=scheme: table(simulations(n, b, SCHEMES[s])))
        t = [" ".join(f"{r[f'{m} {o}']:.2f}" for m in ("E1", "E2", "error")) for o in ("plain", "stopped")]
        error = " / ".join(f"{r[f'mean error {n}']:.1f}" for n in ("plain", "evidence", "stopped"))
        lines.append(f"| {name}, {block}, {scheme} | {t[0]} | {t[1]} | {error} |")
    return "\n".join(lines)


def figure6(results: Results[Any], name: str = "breast cancer, PCA 10") -> None:
    """Above, how E goes, for each class; below, all 24 simulations against unregularised training."""
    runs = results.get(f"figure 6 {name}", lambda: simulations(name, 0, SCHEMES["default"]))
    figure, axes = plt.subplots(2, 2, figsize=(9, 7.5), layout="constrained")
    trains, tests = parted(name, 0)
    for c, (train, test) in enumerate(zip(trains, tests, strict=True)):
        draw_evolution(axes[0, c], train, test)
        axes[0, c].set_title(f"Class {c + 1}, K = 6: nats per datum")
    draw_scatter(axes[1, 0], runs, {"E, class 1": (0, "x"), "E, class 2": (1, "o")})
    draw_scatter(axes[1, 1], runs, {"misclassified, %": (2, "o")})
    figure.suptitle(f"{name}: without regularisation, and with the evidence; q = {Q}")
    figure.savefig(Path(__file__).with_name("mppca_figure6.png"), dpi=80)
    plt.close(figure)


def draw_evolution(ax: Axes, train: Tensor, test: Tensor) -> None:
    """Minus the mean log density of training data, thin, and of test data, bold; the first start."""
    for label, rule, style in (
        ("plain", MPPCAUpdate(no_gamma, alpha=0.0), "--"),
        ("evidence", SCHEMES["default"], "-"),
    ):
        for part, data, width in (("training", train, 0.8), ("test", test, 2.2)):
            E = -evolution(train, data, starts(train, 6), rule)[:, 0].mean(-1)
            ax.plot(range(1, NUM_ROUNDS + 1), E, style, color="black", lw=width, label=f"{label}, {part}")
    ax.set_xlabel("round")
    ax.legend(fontsize=8, ncol=2, loc="center right")


def draw_scatter(ax: Axes, runs: Simulations, measures: dict[str, tuple[int, str]]) -> None:
    """One mark for each simulation; below the diagonal the evidence is better."""
    for label, (i, marker) in measures.items():
        face = "none" if marker == "o" else None
        x, y = [r[i] for r in runs], [r[3 + i] for r in runs]
        ax.scatter(x, y, marker=marker, label=label, **({"facecolors": face, "edgecolors": "C1"} if face else {}))
    low, high = min(*ax.get_xlim(), *ax.get_ylim()), max(*ax.get_xlim(), *ax.get_ylim())
    ax.plot([low, high], [low, high], "--", color="grey", lw=1)
    ax.set(xlabel="without regularisation", ylabel="evidence", aspect="equal")
    ax.legend(fontsize=8)


def digits(results: Results[Any]) -> str:
    """One density per digit, as Tipping and Bishop (1999) and smaller; ten times ten for all; 450 rows for test."""
    data = datasets.digits()
    stop = Stop(tolerance=1e-5, num_steps=40, throw=False, progress=False)

    def errors(num_components: int, num_latents: int, update: Update) -> Record:
        X, t, Z, s = split_rows(data)
        model, start = mppca(num_components, num_latents), Start(restarts=2)
        found = class_conditional(EvidenceEM(model, update=update, start=start, stop=stop, deletion=None), X, t)
        wrong = float((found.labels(Z) != s).double().mean())
        left = mean(p.num_components for p in found.posteriors)
        return {"error": 100.0 * wrong, "log density": float(found.log_prob(Z, s).mean()), "left": left}

    def whole() -> Record:
        X, _, Z, _ = split_rows(data)
        found = EvidenceEM(mppca(10, 10), start=Start(restarts=2), stop=stop, deletion=None).run(X)
        return {"test": float(found.log_prob(Z).mean()), "train": float(found.log_prob(X).mean())}

    lines = ["| per class | scheme | components left, mean | test error % | log p(digit) |", "|---|---|---|---|---|"]
    updates = {"evidence": BoundedInflation(), "plain": Unregularised(rho=0.05)}
    settings = [(1, 5, "evidence"), (1, 10, "evidence"), (2, 10, "evidence"), (10, 10, "evidence"), (10, 10, "plain")]
    for K, q, name in tqdm(settings, desc="Digits"):
        r = results.get(f"digits {K} {q} {name}", lambda k=K, n=q, u=updates[name]: errors(k, n, u))
        lines.append(f"| {K} x {q} axes | {name} | {r['left']:.1f} | {r['error']:.2f} | {r['log density']:.4f} |")
    r = results.get("digits whole", whole)
    return (
        "\n".join(lines) + f"\n\n10 components of 10 axes in all: {r['test']:.2f} nats per test row ({r['train']:.2f})."
    )


def split_rows(data: datasets.Dataset) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test rows and labels, grey values over 16."""
    assert data.t is not None
    order = torch.randperm(len(data.X), generator=torch.Generator().manual_seed(0))
    scaled = data.X / 16.0
    a, b = order[:1347], order[1347:]
    return scaled[a], data.t[a], scaled[b], data.t[b]


def main() -> None:
    torch.set_default_dtype(torch.float64)
    plt.switch_backend("Agg")
    results = Results[Any](Path(sys.argv[1] if len(sys.argv) > 1 else "mppca.jsonl"))
    print("# Mixtures of probabilistic PCA on public data\n\n## Table 3 (24 runs; positive: evidence is better)\n")
    print(table3(results))
    figure6(results)
    print("\n## Figure 6\n\n![Figure 6 in spirit, breast cancer](mppca_figure6.png)")
    print("\n## Handwritten digits, 8 x 8\n", flush=True)
    print(digits(results), flush=True)


if __name__ == "__main__":
    main()
