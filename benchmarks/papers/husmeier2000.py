"""Husmeier (2000) on public data: Ripley's classes (sec. 4.1) and the stochastic time series (sec. 4.2, Figure 5).

    python benchmarks/papers/husmeier2000.py [results.json] > husmeier2000.md

Every run is written to ``results.json`` as soon as it is done, and is not done again.  Ripley's data are read from the
folder that PYRO_EVIDENCE_DATA names.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_evidence import EvidenceEM, Start, Stop, Unregularised, WeightDecay, class_conditional, datasets, derived
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.ops import mixture_evidence, mixture_mode, mixture_rows
from pyro_evidence.ops.basis import RandomVectorFunctionalLink
from pyro_evidence.ops.mixture import Mixture, MixtureData, mixture_data, natural_parameters, responsibilities
from pyro_evidence.ops.mixture_updates import Guarded, Ties, Update, estep

Record = dict[str, float]


class Results:
    """Numbers by key, kept on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, Record] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: str, compute: Callable[[], Record]) -> Record:
        if key not in self.known:
            self.known[key] = compute()
            self.path.write_text(json.dumps(self.known))
        return self.known[key]


def ripley(engine: EvidenceEM, *, standardised: bool = False) -> Record:
    """E1, E2 (nats per datum), test error (per cent), components that are left."""
    train, test = datasets.ripley_train(), datasets.ripley_test()
    X, Z = train.X, test.X
    if standardised:
        Z, X = (Z - X.mean(0)) / X.std(0), (X - X.mean(0)) / X.std(0)
    found = class_conditional(engine, X, train.t)
    log_density = found.log_density(Z)
    units = float(train.X.std(0).log().sum()) if standardised else 0.0
    nll = [units - float(log_density[test.t == c, c].mean()) for c in (0, 1)]
    error = 100.0 * float((found.predict(Z) != test.t).double().mean())
    num = [p.num_components for p in found.posteriors]
    return {"E1": nll[0], "E2": nll[1], "error": error, "K1": num[0], "K2": num[1]}


def in_spec(r: Record) -> bool:
    return r["E1"] <= 0.080 and r["E2"] <= 0.073 and r["error"] <= 9.1 and r["K1"] == r["K2"] == 2


def ripley_grid(results: Results) -> str:
    lines = ["| data | runs in spec | E1 mean (max) | E2 mean (max) | error mean (max) |", "|---|---|---|---|---|"]
    for standardised in (False, True):
        runs = []
        settings = [(K, width, seed) for K in (2, 5, 10, 15, 20) for width in (0.5, 1.0) for seed in range(10)]
        for K, width, seed in tqdm(settings, desc="Ripley, default settings"):
            engine = EvidenceEM(gaussian_mixture(K), start=Start(seed=1000 + seed, width=width))
            key = f"grid {standardised} {K} {width} {seed}"
            runs.append(results.get(key, lambda e=engine, s=standardised: ripley(e, standardised=s)))
        cells = [f"{mean(r[n] for r in runs):.4f} ({max(r[n] for r in runs):.4f})" for n in ("E1", "E2", "error")]
        name = "standardised" if standardised else "raw"
        lines.append(f"| {name} | {sum(map(in_spec, runs))} of {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ripley_table(results: Results) -> str:
    """Table 1: one start each, 20 steps, the evidence scheme against plain EM from the same start."""
    names = ("E1", "E2", "error")
    rows: list[list[float]] = []
    settings = [(K, width, seed) for K in (5, 10, 15, 20) for width in (0.5, 1.0) for seed in range(3)]
    for K, width, seed in tqdm(settings, desc="Ripley, Table 1"):
        pair = []
        for name, update in (("evidence", Guarded()), ("plain", Unregularised())):
            start = Start(restarts=1, seed=seed, width=width, warm_up=0)
            stop = Stop(num_steps=20, tolerance=0.0, throw=False, progress=False)
            engine = EvidenceEM(gaussian_mixture(K), update=update, start=start, deletion=None, stop=stop)
            pair.append(results.get(f"table {name} {K} {width} {seed}", lambda e=engine: ripley(e)))
        rows.append([pair[1][n] - pair[0][n] for n in names])
    t = [math.sqrt(len(rows)) * mean(c) / stdev(c) for c in zip(*rows, strict=True)]
    paper = (4.02, 6.24, 5.97)
    lines = ["| measure | t, plain EM minus evidence | the paper's t |", "|---|---|---|"]
    return "\n".join(lines + [f"| {n} | {a:.2f} | {b} |" for n, a, b in zip(names, t, paper, strict=True)])


def series(num: int, generator: torch.Generator) -> Tensor:
    """Eq. 4.3: two maps of the unit interval, coupled at random."""
    y, path = torch.rand((), generator=generator), []
    for a, kappa, xi in torch.rand(num, 3, generator=generator):
        y = (3.0 + a) * y * (1.0 - y) if xi > 1.0 / 3.0 else 1.0 - y ** (0.5 + 0.75 * kappa)
        path.append(y)
    return torch.stack(path)


def networks(seed: int) -> tuple[MixtureData, MixtureData, Mixture, Ties]:
    """Training and test data in 80 random bases, and the 80 starts."""
    generator = torch.Generator().manual_seed(seed)
    path = series(1402, generator)[200:]
    bases, starts = [], []
    for log_width in (-1, 0, 1, 2):
        for spread in (0.1, 0.25, 0.5, 1.0):
            for _ in range(5):
                weights = math.exp(log_width) * torch.randn(1, 10, generator=generator)
                biases = math.exp(log_width) * torch.randn(10, generator=generator)
                bases.append(RandomVectorFunctionalLink(weights, biases))
                starts.append(spread * torch.randn(10, 1, 11, generator=generator))
    data = []
    for part in (path[:201], path[201:]):
        G = torch.stack([basis(part[:-1, None])[:, 1:] for basis in bases])  # hidden units and bias only
        data.append(mixture_data(part[1:, None].expand(len(G), -1, 1), G))
    w = torch.stack(starts)
    at = Mixture(
        w, torch.ones(w.shape[:3]), torch.full(w.shape[:2], -math.log(10)), 0.01 + 0 * w, torch.zeros(10, 1, 11)
    )
    each = torch.arange(10)[:, None]
    ones = torch.ones(10, 1, 11)
    return (
        data[0],
        data[1],
        at,
        Ties(each[..., None].expand(10, 1, 11), ones, each, ones[..., 0], ones > 0, ones[..., 0] > 0),
    )


def log_density(data: MixtureData, at: Mixture) -> Tensor:
    return responsibilities(data.features, natural_parameters(at, data.layout))[1]


STEPS = (5, 10, 20, 30, 60, 100)


def evolution(update: Update, warm_up: int, seed: int) -> Record:
    """Mean test error in nats per datum at some steps; the committee, and the network of highest log evidence."""
    train, test, at, ties = networks(seed)
    found = {}
    for step in range(1, STEPS[-1] + 1):
        chosen = Unregularised() if step <= warm_up else update
        new = chosen(estep(train, at, ties, mixture_evidence.block))
        at = mixture_rows.chosen(mixture_rows.is_sound(new), new, at)
        if step in STEPS:
            found[str(step)] = -float(log_density(test, at).mean())
    each = log_density(test, at)
    found["committee"] = -float((each.logsumexp(0) - math.log(len(each))).mean())
    mode = mixture_mode.find_mode(train, at, num_em=20, num_newton=0)
    A = mixture_evidence.full(train, mode, estep(train, mode, ties, mixture_evidence.full).stats)
    evidence = mixture_evidence.log_evidence(mixture_evidence.log_joint(train, mode), A, mode.alpha)
    found["by evidence"] = -float(each[torch.where(evidence.isfinite(), evidence, -torch.inf).argmax()].mean())
    return found


def figure5(results: Results) -> str:
    methods: dict[str, tuple[Update, int]] = {
        "eigenvalue cut-off": (Unregularised(), 0),
        "weight decay 0.01": (WeightDecay(0.01), 0),
        "weight decay 0.1": (WeightDecay(0.1), 0),
        "naive Bayes": (WeightDecay(0.1, rho=0.1), 0),
        "evidence, 10 plain steps": (derived, 10),
        "evidence, gamma prior 0.002": (Guarded(rho=0.002), 10),
    }
    head = [*map(str, STEPS), "committee", "by evidence"]
    lines = [f"| method | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for name, (update, warm_up) in tqdm(methods.items(), desc="Time series, 80 networks"):
        runs = [
            results.get(f"series {name} {s}", lambda u=update, w=warm_up, s=s: evolution(u, w, s)) for s in range(3)
        ]
        lines.append(f"| {name} | {' | '.join(f'{mean(r[h] for r in runs):.3f}' for h in head)} |")
    return "\n".join(lines)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    results = Results(Path(sys.argv[1] if len(sys.argv) > 1 else "husmeier2000.json"))
    print("# Husmeier (2000) on public data\n\n## Ripley, class-conditional, default settings\n")
    print(ripley_grid(results), "\n\n## Ripley, Table 1 (20 steps, critical value 1.71)\n", flush=True)
    print(
        ripley_table(results), "\n\n## Time series: mean test error over 80 networks and 3 realisations\n", flush=True
    )
    print(figure5(results), flush=True)


if __name__ == "__main__":
    main()
