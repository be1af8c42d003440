"""When does the evidence order networks?  After Penny and Roberts (1999), on data from a teacher network.

    python benchmarks/papers/penny1999.py [--seeds 5] [--sizes 20 60 180 540]

The paper finds the order useful from 5 to 10 data per weight on.  Here: two classes, three inputs.  For each number of
data, networks of several sizes are fitted from two starts each; every distinct mode is a model, judged by its log
evidence and by its log likelihood of 2000 test data.  Two figures: the rank correlation of both within one data set,
and how often, of two models, the one of higher evidence is the better, by the data per weight of the larger one.

What is done is kept in ``.benchmarks/penny1999.json``; stopped with Ctrl-C, it shows the data sets that are done.
Table and picture go to ``penny1999.md`` and ``penny1999.png`` beside this file.
"""

import argparse
import contextlib
import json
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_evidence import LaplaceEvidence, LaplacePosterior, Start, Stop, gauss_newton
from pyro_evidence.compare import linearised
from pyro_evidence.models.mlp import MLP, Binary

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
CACHE = Path(".benchmarks/penny1999.json")
HERE = Path(__file__).parent
HIDDEN = (1, 2, 3, 4, 6)
BINS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 1000.0)  # data per weight of the larger network
STOP = Stop(tolerance=1e-4, gradient_tolerance=0.05, num_steps=15, throw=False, progress=False)
Model = dict[str, Any]


def teacher(num: int, seed: int, draw: int) -> tuple[Tensor, Tensor]:
    """Labels by a network with three hidden units, whose weights hang on ``seed`` alone."""
    net = MLP(3, 3, output=Binary())
    weights = {n: 4.0 * v[0] for n, v in net.starts(1, seed).items()}
    generator = torch.Generator().manual_seed(1000 * seed + draw)
    X = torch.randn(num, 3, generator=generator)
    return X, torch.bernoulli(torch.sigmoid(2.0 * net.predictor(X, weights)[:, 0]), generator=generator)


def test_score(posterior: LaplacePosterior, X: Tensor, t: Tensor) -> float:
    """Mean log likelihood per test datum, the outputs' variance moderating the probabilities.  MacKay (1992)."""
    mean_eta, variance = (x[:, 0] for x in linearised(posterior, X))
    moderated = mean_eta / (1.0 + torch.pi / 8.0 * variance).sqrt()
    return float(torch.distributions.Bernoulli(logits=moderated).log_prob(t).mean())


def fitted(num: int, num_hidden: int, seed: int) -> list[Model]:
    """Log evidence, test score and number of weights of every distinct mode."""
    X, t = teacher(num, seed, 1)
    test = teacher(2000, seed, 2)
    net = MLP(3, num_hidden, output=Binary())
    engine = LaplaceEvidence(net, curvature=gauss_newton, start=Start(restarts=2, seed=seed), stop=STOP)
    engine.run(X, t)
    size = sum(torch.Size(shape).numel() for shape in net.shapes.values())
    return [
        {"evidence": float(p.log_evidence), "test": test_score(p, *test), "weights": size, "data": num}
        for p in engine.posteriors
    ]


def different(models: Sequence[Model]) -> list[Model]:
    """Models that differ by a tenth of a nat in evidence or a thousandth in score: networks shrink to others."""
    found = {(round(m["evidence"], 1), round(m["test"], 3)): m for m in models}
    return list(found.values())


def rank_correlation(models: Sequence[Model]) -> float | None:
    """Spearman's, of log evidence and test score; None for fewer than three models."""
    if len(models) < 3:
        return None
    columns = (torch.tensor([m[key] for m in models]) for key in ("evidence", "test"))
    return float(torch.corrcoef(torch.stack([c.argsort().argsort().double() for c in columns]))[0, 1])


def shortfall(models: Sequence[Model]) -> tuple[float, float]:
    """Nats per test datum below the best model: of the one of highest evidence, and of one taken at random."""
    best = max(m["test"] for m in models)
    chosen = max(models, key=lambda m: m["evidence"])
    return best - chosen["test"], best - mean(m["test"] for m in models)


def spread(values: Sequence[float]) -> str:
    """Mean and its standard error."""
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{mean(values):.2f} ± {error:.2f}"


def done(known: dict[str, list[Model]], num: int, num_seeds: int) -> list[list[Model]]:
    """The different models of each data set of ``num`` data whose networks are all fitted."""
    sets = [[known.get(f"{num} {h} {seed}", []) for h in HIDDEN] for seed in range(num_seeds)]
    return [different([m for models in one for m in models]) for one in sets if all(one)]


def by_size(runs: dict[int, list[list[Model]]]) -> tuple[list[str], list[tuple[float, float]]]:
    """A row of the table, and a point of the picture, for each number of data."""
    lines, points = [], []
    for num, each in runs.items():
        if not each:
            continue
        correlations = [c for c in map(rank_correlation, each) if c is not None]
        ratio = num / mean(m["weights"] for run in each for m in run)
        chosen, random = (mean(x) for x in zip(*map(shortfall, each), strict=True))
        shown = spread(correlations) if correlations else "too few different models"
        lines.append(
            f"| {num} | {len(each)} | {ratio:.1f} | {sum(map(len, each))} | {shown} | {chosen:.3f} | {random:.3f} |"
        )
        if correlations:
            points.append((ratio, mean(correlations)))
    return lines, points


def by_pair(runs: dict[int, list[list[Model]]]) -> tuple[list[str], list[tuple[float, float]]]:
    """Of two different models of the same data, how often the one of higher evidence is the better."""
    pairs = [
        (a["data"] / max(a["weights"], b["weights"]), (a["evidence"] - b["evidence"]) * (a["test"] - b["test"]) > 0)
        for each in runs.values()
        for run in each
        for a, b in combinations(run, 2)
    ]
    lines, points = [], []
    for low, high in pairwise(BINS):
        inside = [(x, right) for x, right in pairs if low <= x < high]
        if inside:
            share, upper = mean(right for _, right in inside), f"{high:g}" if high < BINS[-1] else "more"
            lines.append(f"| {low:g} to {upper} | {len(inside)} | {100 * share:.0f} % |")
            points.append((mean(x for x, _ in inside), share))
    return lines, points


def picture(correlations: list[tuple[float, float]], shares: list[tuple[float, float]]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.6))
    left.semilogx(*zip(*correlations, strict=True), marker="o")
    left.set(xlabel="data per weight, mean over networks", ylabel="rank correlation", ylim=(-1.05, 1.05))
    right.semilogx(*zip(*shares, strict=True), marker="o")
    right.set(xlabel="data per weight of the larger of two", ylabel="share ordered rightly", ylim=(0.0, 1.05))
    for axes, chance in ((left, 0.0), (right, 0.5)):
        axes.set_xticks([1, 2, 5, 10, 20, 50], labels=["1", "2", "5", "10", "20", "50"])
        axes.minorticks_off()
        axes.axvspan(5.0, 10.0, alpha=0.2)
        axes.axhline(chance, color="grey", linestyle=":")
    figure.suptitle("Log evidence against test log likelihood (shaded: Penny and Roberts, 5 to 10 data per weight)")
    figure.tight_layout()
    figure.savefig(HERE / "penny1999.png", dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 60, 180, 540])
    args = parser.parse_args()
    known = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    work = [(s, n, h) for s in range(args.seeds) for n in args.sizes for h in HIDDEN]
    with contextlib.suppress(KeyboardInterrupt):
        for s, n, h in tqdm(work, desc="networks"):
            if (key := f"{n} {h} {s}") not in known:
                known[key] = fitted(n, h, s)
                CACHE.parent.mkdir(exist_ok=True)
                CACHE.write_text(json.dumps(known))
    runs = {n: done(known, n, args.seeds) for n in args.sizes}
    (sizes, correlations), (pairs, shares) = by_size(runs), by_pair(runs)
    text = "\n".join(
        [
            "# Does the evidence order networks?\n",
            f"After Penny and Roberts (1999); hidden units {HIDDEN}, two starts each.",
            "`python benchmarks/papers/penny1999.py` writes this.\n",
            "| data | teachers | data per weight, mean | different models | rank correlation of evidence and score"
            " | test nats per datum lost by the highest evidence | lost by a model at random |",
            "|---|---|---|---|---|---|---|",
            *sizes,
            "\n| data per weight of the larger of two models | pairs | ordered rightly |\n|---|---|---|",
            *pairs,
            "\n![figure](penny1999.png)\n",
        ]
    )
    print(text)
    (HERE / "penny1999.md").write_text(text)
    picture(correlations, shares)


if __name__ == "__main__":
    main()
