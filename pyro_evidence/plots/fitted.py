"""Pictures of what a fitted model says: groups in order, one input at a time, new data beside those that were seen."""

from typing import Any

import torch

from pyro_evidence import display
from pyro_evidence.display import PROB, Axes, check_axes, intervals, with_labels
from pyro_evidence.errors import BadInput
from pyro_evidence.posterior import averages
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.program.checks import as_tensors
from pyro_evidence.program.simulate import from_predictive
from pyro_evidence.settings import check_count
from pyro_evidence.structure.names import as_written

BINS = 30  # of a histogram: about the root of a thousand data
POINTS = 40  # along a curve, each of them an average over all rows


def caterpillar(
    axes: Axes,
    posterior: LaplacePosterior,
    *,
    site: str,
    effect: str | None = None,
    prob: float = PROB,
    most: int = 60,
) -> Axes:
    """The elements of a site in order of their means, each with its interval: which groups stand out.

    Of more than ``most`` the lowest and the highest are drawn.  Names are those of the table.

    >>> caterpillar(plt.gca(), posterior, site="u_subject", effect="days")  # doctest: +SKIP

    :param site: a latent site.
    :param effect: of groups that have several, ``"Intercept"`` or a slope; None for all on one axis.
    :param prob: in the intervals.
    :raises BadInput: for a name that is no latent site, and for an effect that it has not.
    """
    check_axes(axes)
    found = {n: r for n, r in posterior.table(prob).rows.items() if n == site or n.startswith(f"{site}[")}
    if not found:
        raise BadInput(f"site={site!r}; expected a latent site with an element alive, one of {list(posterior.mode)}.")
    if effect is not None:
        known = sorted({n.removesuffix("]").rpartition(", ")[2] for n in found})
        found = {n: r for n, r in found.items() if n.endswith(f", {effect}]")}
        if not found:
            raise BadInput(f"effect={effect!r} of {site!r}; expected one of {known}.")
    ends = [c for c in next(iter(found.values())) if c.endswith("%")]
    order = sorted(found, key=lambda n: found[n]["value"])
    if len(order) > most:
        order = [*order[: most // 2], *order[len(order) - (most - most // 2) :]]
    low, high = ([found[n][end] for n in order] for end in ends)
    intervals(axes, order, [found[n]["value"] for n in order], low, high)
    axes.axvline(0.0, color="grey", linewidth=display.THIN, linestyle=":")
    return with_labels(axes, f"{site}: mean and {display.percent(prob)} % interval", legend=False)


def partial_dependence(
    axes: Axes, posterior: Any, X: Any, *, column: int | str, num_points: int = POINTS, quantile: float = 0.1
) -> Axes:
    """The mean prediction as one input moves and the others stay as they are, averaged over the rows of ``X``.

    The band holds the rows between two quantiles: where it is not parallel to the line, inputs act together.
    Friedman (2001).

    :param posterior: whatever has ``predict(X)``; for classes the probability of label 1 is drawn.
    :param X: rows ``(N, D)``, a tensor or a data frame; a frame where a formula has made the model.
    :param column: number of the input, or its name in a data frame.
    :param quantile: of the rows below the band, and above it.
    :raises BadInput: for a column that is not there.
    """
    check_axes(axes)
    check_count("num_points", num_points, at_least=2)
    names = [str(c) for c in getattr(X, "columns", [])]
    by_formula = hasattr(as_written(getattr(getattr(posterior, "_joint", None), "model", None)), "formula")
    (rows,), _ = as_tensors((X[[column]].astype(float) if by_formula and column in names else X,), {})
    place = 0 if by_formula and column in names else names.index(column) if column in names else column
    if not isinstance(place, int) or not 0 <= place < rows.shape[-1]:
        raise BadInput(f"column={column!r}; expected one of {names or list(range(rows.shape[-1]))}.")
    grid = torch.linspace(float(rows[:, place].min()), float(rows[:, place].max()), num_points).to(rows)
    predicted = []
    for value in grid:
        moved = rows.index_fill(1, torch.tensor(place), float(value))
        mean = posterior.predict(X.assign(**{str(column): float(value)}) if by_formula else moved)
        predicted.append(mean if mean.dim() == 1 else mean[:, 1])
    found = torch.stack(predicted)
    low, high = found.quantile(quantile, -1), found.quantile(1.0 - quantile, -1)
    axes.fill_between(
        grid.tolist(), low.tolist(), high.tolist(), alpha=display.SHADE, label=f"rows, {1 - 2 * quantile:.0%}"
    )
    axes.plot(grid.tolist(), found.mean(-1).tolist(), label="mean of the rows")
    return with_labels(axes, str(column) if column in names else f"input {place}", "prediction")


def average_predictions(
    axes: Axes,
    posterior: Any,
    *,
    column: str,
    by: str | None = None,
    frame: Any = None,
    kind: str = "response",
    prob: float = PROB,
) -> Axes:
    """The average prediction of a formula's model as one column moves, with its interval: what a smooth looks like.

    The numbers are those of ``posterior.means``: a line and a band along a column of numbers, one for each level of
    ``by`` and each class; for a factor a point and an interval for each level.

    >>> average_predictions(plt.gca(), posterior, column="day", kind="population")  # doctest: +SKIP

    :param posterior: of a model that :func:`~pyro_evidence.models.formula.mixed` has made.
    :param column: of the data frame.
    :param by: another column, within whose levels rows are averaged.
    :param frame: the rows, those of the fit by default.
    :param kind: ``"response"``, ``"link"`` or ``"population"``, without the effects of groups.
    :param prob: in the intervals.
    :raises BadInput: for a model that no formula made, and for a column that it has not.
    """
    check_axes(axes)
    rows = averages.frame_of(posterior, frame, column, by)
    levels, seen = averages.levels_of(posterior, column), rows[column]
    grid = torch.zeros(0) if levels else torch.linspace(float(seen.min()), float(seen.max()), POINTS)
    table = posterior.means(column, values=grid.tolist(), by=by, frame=rows, kind=kind, prob=prob).rows
    value, _, *ends = next(iter(table.values()))
    labels, numbers = list(table), torch.tensor([[row[c] for c in (value, *ends)] for row in table.values()])
    if levels:
        intervals(axes, labels, *numbers.T.tolist())
        return with_labels(axes, f"{kind}: mean and {display.percent(prob)} % interval", legend=False)
    curves = numbers.unflatten(0, (len(grid), -1))
    for number, (label, found) in enumerate(zip(labels, curves.movedim(1, 0), strict=False)):
        name = label.partition("]")[2].removeprefix(", ")
        display.curve(axes, grid, found, share=prob, number=number, name=name)
    return with_labels(axes, column, f"{kind}, {display.percent(prob)} % band", legend=curves.shape[1] > 1)


def predictive_check(axes: Axes, posterior: LaplacePosterior, *, site: str | None = None, num_sets: int = 50) -> Axes:
    """The data beside sets of new data from the fitted model, as histograms with the same bins.

    Gelman, Meng and Stern (1996).  Where the data leave the band of the new sets, the model misses something.

    :param site: the observed site, where there are several.
    :param num_sets: of new data; the band holds nine in ten of them.
    :raises BadInput: for a name that is no observed site.
    """
    check_axes(axes)
    joint = posterior.state.problem.joint
    name = site or joint.observed[0]
    if name not in joint.observed or (site is None and len(joint.observed) > 1):
        raise BadInput(f"site={site!r}; expected one of the observed sites: {', '.join(joint.observed)}.")
    draws = posterior.get_samples(num_sets, seed=0)
    u = joint.latents.flat({p.name: draws.get(p.name, torch.zeros(num_sets, *p.shape)) for p in joint.latents})
    new = from_predictive(joint, posterior.state.theta, u, 0)[name].reshape(num_sets, -1).double()
    seen = joint.trace(joint.initial_u, posterior.state.theta).nodes[name]["value"].detach().reshape(-1).double()
    ends = torch.linspace(
        float(torch.minimum(seen.min(), new.min())), float(torch.maximum(seen.max(), new.max())), BINS + 1
    )
    counts = torch.stack([torch.histogram(row, ends.double()).hist for row in new])
    middle = (0.5 * (ends[1:] + ends[:-1])).tolist()
    low, high = counts.quantile(counts.new_tensor(display.CENTRAL), 0).tolist()
    axes.fill_between(middle, low, high, step="mid", alpha=display.SHADE, label="new data, 90 % of the sets")
    axes.step(middle, torch.histogram(seen, ends.double()).hist.tolist(), where="mid", color="black", label="the data")
    return with_labels(axes, name, "number of data")
