"""Pictures of comparisons and calibrations: each function draws on the Axes that it is given, and returns them.

matplotlib is an extra and is imported when something is drawn.  Ticks, titles and the rest stay the caller's.
"""

import math
from itertools import cycle

import torch
from torch import Tensor

from pyro_evidence.compare.comparison import Comparison, flattened
from pyro_evidence.compare.discrepancy import QUARTILES, gaussian_divergence, quantiles
from pyro_evidence.compare.prequential import Prequential
from pyro_evidence.compare.sbc import Calibration
from pyro_evidence.display import DASHES, MARKERS, NUM_GRID, SHADE, SMALL, THIN, Axes, check_axes, with_labels
from pyro_evidence.errors import BadInput
from pyro_evidence.plots.posterior import element_labels

MOST_POINTS = 500  # of each engine in a scatter plot
BAND = 2.5758  # standard deviations that hold 99 % of a normal


def prequential_difference(axes: Axes, one: Prequential, other: Prequential) -> Axes:
    """By how many nats the first model's forecasts are ahead, cumulated over the steps; above zero it is better.

    :raises BadInput: for those of other steps.
    """
    check_axes(axes)
    if not torch.equal(one.steps, other.steps):
        raise BadInput("two prequential log evidences; expected them of the same steps: the same first and step.")
    axes.axhline(0.0, linewidth=THIN, color="black")
    ahead = (one.log_scores - other.log_scores).cumsum(0)
    axes.plot(one.steps[1:].tolist(), ahead.tolist())
    return with_labels(axes, "steps", "nats ahead", legend=False)


def overlaid(axes: Axes, comparison: Comparison, site: str, element: int = 0) -> Axes:
    """Marginal densities of one element of a site, every engine that has it, the reference as a filled area.

    Kernel estimates with Silverman's bandwidth.

    :param element: position in ``reshape(-1)`` of the site's value.
    :raises BadInput: when the reference lacks the site or the element.
    """
    check_axes(axes)
    draws = {n: r.draws[site] for n, r in comparison.runs.items() if site in r.draws}
    size = draws[comparison.reference][0, 0].numel() if comparison.reference in draws else 0
    if not 0 <= element < size:
        raise BadInput(
            f"site {site!r}, element {element}: expected an element of the {size} that the reference has of that site."
        )
    rows = {n: flattened(v) for n, v in draws.items()}
    columns = {n: v[:, element] for n, v in rows.items() if v.shape[1] == size and len(v) > 1}
    reference = columns[comparison.reference]
    spread = 4.0 * float(reference.std())
    grid = torch.linspace(float(reference.mean()) - spread, float(reference.mean()) + spread, NUM_GRID).to(reference)
    dashes = cycle(DASHES)
    for name, values in columns.items():
        height = _density(values, grid).tolist()
        if name == comparison.reference:
            axes.fill_between(grid.tolist(), height, alpha=SHADE, label=f"{name} (reference)")
        else:
            axes.plot(grid.tolist(), height, next(dashes), label=name)
    return with_labels(axes, element_labels(site, draws[comparison.reference][0, 0])[element], "density")


def worst_pair(axes: Axes, comparison: Comparison, engine: str) -> Axes:
    """Draws of the two coordinates in which an engine and the reference differ most.

    The pair whose fitted normals have the largest symmetric Kullback-Leibler divergence; the elements that do not
    vary in both are left out.

    :param engine: name of a run.
    :raises BadInput: when they have not two varying elements in common.
    """
    check_axes(axes)
    draws = {n: comparison.runs[n].draws for n in (engine, comparison.reference) if n in comparison.runs}
    if len(draws) < 2 or not draws[engine]:
        raise BadInput(
            f"engine={engine!r} has no draws beside the reference; expected another run that has draws, of "
            f"{list(comparison.runs)}."
        )
    names, a, b = _common(draws[engine], draws[comparison.reference])
    if len(names) < 2:
        raise BadInput(f"{names} vary in both; expected two elements at least, for a pair. Draw overlaid(...) instead.")
    i, j = divmod(int(gaussian_divergence(a, b).argmax()), len(names))
    for marker, name, rows in (("o", comparison.reference, b), ("^", engine, a)):
        kept = rows[:: max(1, len(rows) // MOST_POINTS)]
        axes.scatter(kept[:, i].tolist(), kept[:, j].tolist(), s=SMALL, marker=marker, alpha=0.5, label=name)
    return with_labels(axes, names[i], names[j])


def calibration(axes: Axes, comparison: Comparison, num_bins: int = 10) -> Axes:
    """Whether predictions of held-out data mean what they say: one line per engine, the diagonal is right.

    For two classes the share of class 1 against its predicted probability, in bins of equal size.  For numbers and
    counts the share of data below each predictive quantile.

    :raises BadInput: for a comparison without held-out data.
    """
    check_axes(axes)
    if not comparison.held_out:
        raise BadInput("the comparison has no predictions; pass compare(..., held_out=(X_new, t_new)).")
    axes.plot([0.0, 1.0], [0.0, 1.0], color="grey", linewidth=THIN)
    binary = all(found.binary for found in comparison.held_out.values())
    for marker, (name, found) in zip(cycle(MARKERS), comparison.held_out.items(), strict=False):
        if binary:
            probability, observed = found.prediction.mean, found.prediction.observed
            bins = [part for part in probability.argsort().tensor_split(num_bins) if len(part)]
            x, y = (torch.stack([values[b].mean() for b in bins]) for values in (probability, observed))
        else:
            x = (torch.arange(len(found.pit), dtype=torch.float64) + 1.0) / len(found.pit)
            y, x = x, found.pit.sort().values
        axes.plot(x.tolist(), y.tolist(), marker=marker, markersize=SMALL, label=name)
    what = "of class 1" if binary else "of a smaller value"
    return with_labels(axes, f"predicted probability {what}", "share of the held-out data")


def rank_histogram(axes: Axes, found: Calibration, name: str | None = None) -> Axes:
    """Ranks of the truth among posterior draws, with the band that holds 99 % of the bars of a calibrated engine.

    Talts et al. (2018), figure 3: a valley is a posterior too narrow, a mode one too wide, a slope a bias.

    :param name: which quantity; default the one with the smallest p-value.
    :raises BadInput: for a name that was not ranked.
    """
    check_axes(axes)
    name = found.names[int(found.p_values.argmin())] if name is None else name
    if name not in found.names:
        raise BadInput(f"no quantity {name!r} was ranked; expected one of {list(found.names)}.")
    expected = len(found.ranks) / found.num_bins
    half = BAND * math.sqrt(expected * (1.0 - 1.0 / found.num_bins))
    axes.axhspan(max(expected - half, 0.0), expected + half, color="lightgrey")
    axes.bar(range(found.num_bins), found.histogram(name).tolist())
    p = float(found.p_values[found.names.index(name)])
    return with_labels(axes, f"rank of {name}, {found.num_bins} bins, p = {p:.2g}", "data sets", legend=False)


def _density(values: Tensor, grid: Tensor) -> Tensor:
    """Kernel estimate of a density at the points of a grid, ``(G,)``."""
    levels = quantiles(values.unsqueeze(-1), torch.tensor(QUARTILES))[:, 0]
    robust = torch.minimum(values.std(), (levels[1] - levels[0]) / 1.34)
    width = 0.9 * torch.where(robust > 0, robust, values.std()) * len(values) ** -0.2
    if not float(width) > 0.0:  # all draws equal: no density to show
        return torch.zeros_like(grid)
    standard = (grid.unsqueeze(-1) - values) / width
    return (-0.5 * standard.square()).exp().mean(-1) / (width * math.sqrt(math.tau))


def _common(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[list[str], Tensor, Tensor]:
    """Labels and draws ``(S, E)`` of the elements that vary in both."""
    sites = [n for n in sorted(set(a) & set(b)) if a[n].shape[2:] == b[n].shape[2:]]
    if not sites:
        return [], torch.zeros(0, 0), torch.zeros(0, 0)
    names = [label for n in sites for label in element_labels(n, b[n][0, 0])]
    x, y = (torch.cat([flattened(d[n]) for n in sites], -1) for d in (a, b))
    varies = (x.std(0) > 0) & (y.std(0) > 0)
    return [n for n, v in zip(names, varies.tolist(), strict=True) if v], x[:, varies], y[:, varies]
