"""When does the evidence order networks?  After Penny and Roberts (1999), on data from a teacher network.

    python benchmarks/papers/penny1999.py [--seeds 2] [--sizes 20 60 180 540]

An experiment to run, not a result: that the order becomes useful from 5 to 10 data per weight on (the shaded band)
is the paper's finding and has not been reproduced here.

Two classes, three inputs.  For each number of data, networks of several sizes are fitted from three starts each, every
distinct mode is a model, and the rank correlation between log evidence and log likelihood of 2000 test data is the
figure's height; its abscissa is the number of data per weight.  What is done is kept in ``.benchmarks/penny1999.json``;
the table goes to the terminal, the picture to ``.benchmarks/penny1999.png``.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_evidence import LaplaceEvidence, LaplacePosterior, Stop, gauss_newton, linearised
from pyro_evidence.models.mlp import MLP, Binary

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
FOLDER = Path(".benchmarks")
HIDDEN = (1, 2, 4, 7)
STOP = Stop(tolerance=1e-4, gradient_tolerance=0.05, num_steps=15, throw=False, progress=False)


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


def fitted(num: int, num_hidden: int, seed: int) -> list[dict[str, Any]]:
    """Log evidence, test score and weights of every distinct mode."""
    X, t = teacher(num, seed, 1)
    test = teacher(2000, seed, 2)
    net = MLP(3, num_hidden, output=Binary())
    engine = LaplaceEvidence(net, curvature=gauss_newton, restarts=3, stop=STOP, seed=seed)
    engine.run(X, t)
    size = sum(torch.Size(shape).numel() for shape in net.shapes.values())
    return [
        {"evidence": float(p.log_evidence), "test": test_score(p, *test), "weights": size} for p in engine.posteriors
    ]


def different(models: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Models that differ by a tenth of a nat in evidence or a thousandth in score: networks shrink to others."""
    found = {(round(m["evidence"], 1), round(m["test"], 3)): m for m in models}
    return list(found.values())


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's; nan for fewer than three."""
    if len(a) < 3:
        return float("nan")
    ranks = torch.stack([torch.tensor(x).argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 60, 180, 540])
    args = parser.parse_args()
    cache = FOLDER / "penny1999.json"
    known = json.loads(cache.read_text()) if cache.exists() else {}
    work = [(n, h, s) for n in args.sizes for h in HIDDEN for s in range(args.seeds)]
    for n, h, s in tqdm(work, desc="networks"):
        key = f"{n} {h} {s}"
        if key not in known:
            known[key] = fitted(n, h, s)
            FOLDER.mkdir(exist_ok=True)
            cache.write_text(json.dumps(known))
    lines, points = ["| data | data per weight | rank correlation, mean over seeds | models |", "|---|---|---|---|"], []
    for n in args.sizes:
        runs = [different([m for h in HIDDEN for m in known[f"{n} {h} {s}"]]) for s in range(args.seeds)]
        each = [rank_correlation([m["evidence"] for m in run], [m["test"] for m in run]) for run in runs]
        ratio = n / mean(m["weights"] for run in runs for m in run)
        points.append((ratio, mean(each)))
        lines.append(f"| {n} | {ratio:.1f} | {mean(each):.2f} | {sum(map(len, runs))} |")
    print("\n".join(["# Does the evidence order networks?\n", *lines]))
    figure, axes = plt.subplots()
    axes.semilogx(*zip(*points, strict=True), marker="o")
    axes.axvspan(5.0, 10.0, alpha=0.2)
    axes.set(xlabel="data per weight", ylabel="rank correlation of log evidence and test score", ylim=(-1.05, 1.05))
    figure.savefig(FOLDER / "penny1999.png")


if __name__ == "__main__":
    main()
