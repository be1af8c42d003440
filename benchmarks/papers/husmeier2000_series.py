"""Husmeier (2000), sec. 4.3 and Figure 5: the stochastic time series, eighty networks and five ways to regularise."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import torch
from results import Results, prose, table
from torch import Tensor
from tqdm import tqdm

from pyro_evidence import datasets
from pyro_evidence.mixture import BoundedInflation, Unregularised, WeightDecay, corrected
from pyro_evidence.mixture import evidence as mixture_evidence
from pyro_evidence.mixture import fit as mixture_fit
from pyro_evidence.mixture.expectation import (
    Mixture,
    MixtureData,
    e_step,
    mixture_data,
    natural_parameters,
    responsibilities,
    solve_weights,
)
from pyro_evidence.mixture.updates import SharedParameters, Update, estep
from pyro_evidence.numerics.evidence import log_evidence as laplace


@dataclass(frozen=True)
class Networks:
    """80 networks: data in their bases, and their starts."""

    train: MixtureData
    test: MixtureData
    start: Mixture
    ties: SharedParameters


Basis = Callable[[Tensor], Tensor]


def hidden_units(generator: torch.Generator, log_width: int) -> Basis:
    """Ten tanh units with random weights, and the bias: the paper's."""
    weights = math.exp(log_width) * torch.randn(2, 1, 10, generator=generator)
    return lambda x: torch.cat([torch.tanh(x * weights[0] + weights[1]), torch.ones_like(x)], -1)


def with_direct_input(generator: torch.Generator, log_width: int) -> Basis:
    """The same and the input itself, as in a functional-link network."""
    inner = hidden_units(generator, log_width)
    return lambda x: torch.cat([inner(x), x], -1)


def cubic(generator: torch.Generator, log_width: int) -> Basis:
    """Powers up to the third of the input, centred."""
    return lambda x: (2.0 * x - 1.0) ** torch.arange(4)


def networks(seed: int, make: Callable[[torch.Generator, int], Basis]) -> Networks:
    """Four widths of the random weights, four of the adaptable ones, five draws each."""
    series = datasets.stochastic_series(1200, seed=seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    bases, starts = [], []
    for log_width in (-1, 0, 1, 2):
        for spread in (0.1, 0.25, 0.5, 1.0):
            for _ in range(5):
                bases.append(make(generator, log_width)(series.X))
                starts.append(spread * torch.randn(10, 1, bases[-1].shape[-1], generator=generator))
    G, w = torch.stack(bases), torch.stack(starts)
    Y = series.t[:, None].expand(len(G), -1, 1)
    ones = torch.ones_like(w[0])
    start = Mixture(w, torch.ones(w.shape[:3]), torch.full(w.shape[:2], -math.log(10)), 0.01 + 0 * w, 0 * ones)
    each = torch.arange(10)[:, None]
    ties = SharedParameters(each[..., None].expand(ones.shape), ones, each, ones[..., 0], ones > 0, ones[..., 0] > 0)
    return Networks(mixture_data(Y[:, :200], G[:, :200]), mixture_data(Y[:, 200:], G[:, 200:]), start, ties)


def log_density(data: MixtureData, features: Tensor, at: Mixture) -> Tensor:
    return responsibilities(features, natural_parameters(at, data.layout))[1]


def committee(log_densities: Tensor) -> float:
    """Test error of the mean density of networks ``(R, N)``."""
    return -float((log_densities.logsumexp(0) - math.log(len(log_densities))).mean())


def log_evidence(nets: Networks, at: Mixture) -> Tensor:
    """Laplace, full Hessian, at the weights' mode, nats, shape ``(R,)``."""
    mode = at
    for _ in range(20):  # Newton's full Hessian of all networks would not fit into memory
        mode = replace(mode, w=solve_weights(e_step(nets.train, mode), nets.train.layout, mode))
    A = mixture_evidence.full(nets.train, mode, estep(nets.train, mode, nets.ties, mixture_evidence.full).stats)
    log_det = mixture_evidence.well_determined(A, mode.alpha).log_det
    found = laplace(mixture_evidence.log_joint(nets.train, mode), log_det, mode.alpha[0].numel())
    return torch.where(found.isfinite(), found, -torch.inf)


def evolution(update: Update, warm_up: int, nets: Networks, num_steps: int = 100) -> dict[str, Any]:
    """Test error (nats per datum) of the networks after every round; committees; the network of highest evidence."""
    at, mean_curve, best_curve, seconds, committees = nets.start, [], [], 0.0, {}
    warm = Unregularised(rho=getattr(update, "rho", 0.0))
    features = nets.test.columns(natural_parameters(at, nets.test.layout).shape[-1])
    for step in range(1, num_steps + 1):
        begin = time.process_time()
        new = (warm if step <= warm_up else update)(estep(nets.train, at, nets.ties, mixture_evidence.block))
        at = new.where(mixture_fit.change(new, new).isfinite(), at)
        seconds += time.process_time() - begin
        each = log_density(nets.test, features, at)
        error = -each.mean(-1)
        mean_curve.append(float(error.mean()))
        best_curve.append(float(error.min()))
        if step in (20, num_steps):
            committees[str(step)] = committee(each)
    order = log_evidence(nets, at).argsort(descending=True)
    return {
        "mean": mean_curve,
        "best": best_curve,
        "committee": committees,
        "chosen": float(error[order[0]]),
        "top 20": committee(each[order[:20]]),
        "singular": int((at.noise.flatten(1).amax(-1) > 1e6).sum()),
        "seconds": seconds,
    }


REGULARISERS: dict[str, tuple[Update, int, str]] = {  # update, warm-up, line of the paper's figure
    "EV cut-off": (Unregularised(), 0, "k:"),
    "weight decay 0.01": (WeightDecay(0.01), 0, "k-."),
    "weight decay 0.1": (WeightDecay(0.1), 0, "k--"),
    "naive Bayes": (WeightDecay(0.1, rho=0.1), 0, "k-"),
    "evidence, no warm-up": (corrected, 0, "C0:"),
    "evidence": (corrected, 10, "C0-"),
    "evidence, gamma prior 0.002": (BoundedInflation(rho=0.002), 10, "C1-"),
}
REALISATIONS = 5


def series(cache: Results[Any]) -> str:
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, (update, warm_up, _) in tqdm(REGULARISERS.items(), desc="Time series, 80 networks"):
        runs[name] = [
            cache.get(f"series {name} {s}", lambda u=update, w=warm_up, s=s: evolution(u, w, networks(s, hidden_units)))
            for s in range(REALISATIONS)
        ]
    limit = mean(bayes_limit(s) for s in range(REALISATIONS))
    figure5(runs, limit)
    steps = (5, 10, 20, 30, 60, 100)
    rows = [
        [name, *(f"{mean(r['mean'][s - 1] for r in rs):.3f}" for s in steps), *committees(rs)]
        for name, rs in runs.items()
    ]
    head = ["mean test error after", *steps, *COMMITTEES]
    best = [[name, *(f"{mean(r['best'][s - 1] for r in rs):.3f}" for s in steps)] for name, rs in runs.items()]
    note = prose(f"""
        200 training and 1000 test pairs, {REALISATIONS} realisations, 80 networks each; means over realisations, nats
        per datum. Bayes limit on these test sets {limit:.3f} (-1.182 in the long run). Chosen: the one network of
        highest log evidence; top 20: a committee of the 20 of highest log evidence. Singular: networks with a noise
        precision above 1e6, of 80. Seconds: CPU of 100 rounds of 80 networks, one thread.
    """)
    parts = [
        "## Figure 5: the stochastic time series\n\n![Figure 5](husmeier2000_figure5.png)\n",
        note,
        table(head, rows),
        "\nBest of the 80 networks, on the test set:\n",
        table(["best test error after", *steps], best),
        "",
        nearer(cache, runs),
    ]
    return "\n".join(parts)


COMMITTEES = ("committee at 20", "committee at 100", "chosen", "top 20", "singular", "seconds")


def committees(runs: list[dict[str, Any]]) -> list[str]:
    found = [mean(r["committee"][s] for r in runs) for s in ("20", "100")]
    found += [mean(r[n] for r in runs) for n in ("chosen", "top 20")]
    last = [f"{mean(r['singular'] for r in runs):.0f}", f"{mean(r['seconds'] for r in runs):.1f}"]
    return [f"{v:.3f}" for v in found] + last


def nearer(cache: Results[Any], runs: dict[str, list[dict[str, Any]]]) -> str:
    """Other bases in the place of the paper's, evidence scheme, same series."""
    bases = {"tanh units and the input": with_direct_input, "cubic polynomial": cubic}
    rows = [
        [
            "the paper's tanh units",
            f"{mean(r['mean'][-1] for r in runs['evidence']):.3f}",
            *committees(runs["evidence"]),
        ]
    ]
    for name, make in tqdm(bases.items(), desc="Other bases"):
        rs = [
            cache.get(f"basis {name} {s}", lambda s=s, m=make: evolution(corrected, 10, networks(s, m)))
            for s in range(REALISATIONS)
        ]
        rows.append([name, f"{mean(r['mean'][-1] for r in rs):.3f}", *committees(rs)])
    head = ["basis", "mean", *COMMITTEES]
    return f"Nearer to the Bayes limit with another basis (evidence, 100 rounds):\n\n{table(head, rows)}\n"


def bayes_limit(seed: int) -> float:
    """Test error of the density that made the test data, nats per datum."""
    data = datasets.stochastic_series(1200, seed=seed)
    return -float(datasets.stochastic_series_log_density(data.X[200:, 0], data.t[200:]).mean())


def figure5(runs: dict[str, list[dict[str, Any]]], limit: float) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), sharey=True, layout="constrained")
    for ax, kind in zip(axes, ("mean", "best"), strict=True):
        for name, (_, _, line) in REGULARISERS.items():
            curves = torch.tensor([r[kind] for r in runs[name]]).mean(0)
            ax.plot(range(1, len(curves) + 1), curves.tolist(), line, label=name)
        ax.axhline(limit, color="grey", linewidth=0.8)
        ax.set(xlabel="round", title=f"{kind} test error of 80 networks", ylim=(1.1 * limit, 0.5))
    axes[0].set_ylabel("mean NLL / nats")
    axes[1].legend(fontsize="small")
    figure.savefig(Path(__file__).with_name("husmeier2000_figure5.png"), dpi=80)
    plt.close(figure)
