"""A posterior as a table, a printed summary, a picture, and what a notebook displays."""

import html
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributions import CorrCholeskyTransform, constraints

from pyro_evidence import display
from pyro_evidence.display import PROB, Axes, Table, by_label
from pyro_evidence.fitting.process_state import entry_point
from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.laplace.uncertainty import HyperparameterCovariance
from pyro_evidence.numerics.coordinates import Coordinate, is_identity, transform_steps
from pyro_evidence.posterior import averages, effects
from pyro_evidence.posterior.diagnostics import NUM_WEIGHTED
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.parameters import DUMMY_SITE
from pyro_evidence.program.sites import Values
from pyro_evidence.settings import check_probability
from pyro_evidence.structure.names import Coords, Dims, Names, as_written, names_of

Rows = dict[str, dict[str, float]]
CORRELATIONS = "correlations, "  # how the names of their panels begin, as no site's does
LISTED = 12  # elements of a site that summary() lists
LEAST_SECONDS = 1.0  # that a summary may take of the processor, however short the fit was: nobody waits long for it
COLUMNS = {
    "value": "the mean; of a hyperparameter that was maximised, where it is",
    "sd": "standard deviation",
    "median": "",
    "gamma": "how many parameters of that prior precision the data determine",
    "alpha": "the prior precision of the weight; under a Laplace prior twice its rate",
    "h": "curvature of the log likelihood along the axis",
    "z^2": "Wald statistic of the axis, kept above 1",
}


@dataclass(frozen=True)
class TableLayout:
    """Names, levels and number of a table's rows.

    :ivar names: of elements.
    :ivar levels: two probabilities, the ends of the intervals.
    :ivar most: rows of one site, None for all.
    """

    names: Names
    levels: tuple[float, float]
    most: int | None

    @property
    def ends(self) -> tuple[str, str]:
        """Headings of the intervals' columns."""
        low, high = (f"{display.percent(level)}%" for level in self.levels)
        return low, high

    def in_order(self, parts: Iterable[Coordinate]) -> list[Coordinate]:
        """Those that the model names, in its order, and the others after them."""
        order = {name: place for place, name in enumerate(self.names.dims)}
        return sorted(parts, key=lambda p: order.get(p.name, len(order)))

    def listed(self, name: str, alive: Tensor) -> tuple[Tensor, list[str], list[str]]:
        """Flat places of the elements of one site that are listed, their names, and what is to be said of the others.

        :param alive: which are not pruned, bool, in the site's shape.
        """
        every = alive.reshape(-1).nonzero().flatten()
        places = every[: self.most]
        labels = [self.names.label(name, i) for i in alive.nonzero()[: self.most].tolist()]
        pruned, more = alive.numel() - len(every), len(every) - len(places)
        said = [f"{name}: {pruned} of {alive.numel()} elements are pruned"] if pruned else []
        return places, labels, [*said, *([f"{name}: {more} more, in table()"] if more else [])]

    def correlation_rows(self, name: str, size: int, columns: Mapping[str, Tensor], of: Sequence[int] = ()) -> Rows:
        """Rows of correlations: which two, and their numbers; of one of a batch of matrices, at the place ``of``."""
        pairs = [self.names.words(name, (*of, *pair)) for pair in torch.tril_indices(size, size, -1).T.tolist()]
        where = name.removeprefix("L_") + (f"[{', '.join(map(str, of))}]" if len(of) else "")
        return by_label([f"cor({b}, {a}) of {where}" for *_, a, b in pairs], columns)


def is_correlation(part: Coordinate) -> bool:
    """Whether a value is a Cholesky factor of correlations."""
    last = transform_steps(part.transform)[-1:]
    return any(isinstance(step, CorrCholeskyTransform) for step in last) and len(part.shape) == 2


def correlations(factor: Tensor) -> Tensor:
    """The correlations below the diagonal of ``L L'``, ``(..., K)``, row by row.

    >>> correlations(torch.tensor([[1.0, 0.0], [0.6, 0.8]]))
    tensor([0.6000])
    """
    size = factor.shape[-1]
    row, column = torch.tril_indices(size, size, -1)
    return (factor @ factor.mT)[..., row, column]


def of_draws(draws: Tensor, layout: TableLayout) -> Values:
    """Moments and quantiles of columns of draws, ``(S, K)``."""
    low, median, high = draws.quantile(draws.new_tensor([layout.levels[0], 0.5, layout.levels[1]]), 0)
    return {"value": draws.mean(0), "sd": draws.std(0), "median": median, layout.ends[0]: low, layout.ends[1]: high}


def of_normal(mean: Tensor, sd: Tensor, layout: TableLayout) -> Values:
    """Moments and quantiles of normal distributions, without draws."""
    low, high = (mean + torch.special.ndtri(mean.new_tensor(level)) * sd for level in layout.levels)
    return {"value": mean, "sd": sd, "median": mean, layout.ends[0]: low, layout.ends[1]: high}


@entry_point
class Tabulated(Protocol):
    """A posterior over named sites as a table, a printed summary, a picture, and what a notebook displays."""

    _normal: ClassVar[bool] = False  # sites on the whole real line are: by their quantiles, without draws
    _skewed: Any = None  # a density that is not normal, which sites on the real line are draws of too
    _num_tabulated: ClassVar[int] = NUM_WEIGHTED  # draws, where there are other sites
    get_samples: Callable[..., Values]  # of every site
    quantiles: Callable[..., Values]  # marginal, of every site
    _notes: Callable[[float], list[str]]  # below the summary's table, of a check until that time of the processor

    @property
    def _joint(self) -> LogJoint: ...

    @property
    def pruned(self) -> Values:
        """Which elements of each site were switched off, bool masks of the sites' unconstrained shapes."""
        return {}

    def _hyper_rows(self, layout: TableLayout, errors: bool) -> tuple[Rows, list[str]]:
        """Rows of what was maximised, and what is to be said of it; ``errors``: with standard deviations."""
        return {}, []

    def _draws_until(self, until: float) -> Values:
        """Draws for a table, fewer where they would take until after ``until``."""
        return self.get_samples(self._num_tabulated, seed=0)

    def table(
        self, prob: float = PROB, *, coords: Coords | None = None, dims: Dims | None = None, most: int | None = None
    ) -> Table:
        """Hyperparameters and sites, a row for each element that is not pruned: value, deviation, interval.

        Fixed effects and spreads as params have the standard deviations of :meth:`hyperparameter_covariance`; their
        intervals are taken where they have no bounds (log scales, Fisher's transformation of correlations).
        ``.to_pandas()`` has the numbers.

        :param prob: in the intervals, which leave out as much on both sides.
        :param coords: dimension -> names of its elements, with ``dims`` site -> dimensions, as for ArviZ.  Columns of a
            data frame are known without them.
        :param most: rows of one site; None for all.
        :raises BadInput: for a ``prob`` outside 0 to 1, and for names that do not fit.
        """
        return self._table(prob, names_of(self._joint, coords, dims), most)

    def fixed(self) -> Table:
        """The rows of :meth:`table` that are fixed effects of a formula's model; of every formula in it.

        :raises BadInput: for a model that no formula made.
        """
        return effects.effects_of(self, fixed=True)

    def effects(self, group: str) -> Table:
        """The effects of each level of a grouping of a formula's model, as lme4's ``ranef``: values and deviations.

        :param group: as the formula has it; ``"group_zi"`` in a formula of zero inflation.
        :raises BadInput: for a model that no formula made, and for a grouping that it has not.
        """
        return effects.group_effects(self, group)

    def variances(self) -> Table:
        """Standard deviations of groups, correlations and parameters of the family, as lme4's ``VarCorr``.

        :raises BadInput: for a model that no formula made.
        """
        return effects.effects_of(self, fixed=False)

    def means(
        self,
        column: str | Sequence[str],
        *,
        values: Sequence[Any] | Mapping[str, Sequence[Any]] = (),
        by: str | None = None,
        frame: Any = None,
        kind: str = "response",
        prob: float = PROB,
    ) -> Table:
        """Average predictions of a formula's model with a column set to each of its levels, in every row.

        Values are plug-ins at the mode, their standard deviations by the delta method, maximised fixed effects
        included, where the posterior is one Gaussian; averages over draws elsewhere.

        :param column: or several, set to every combination of their levels.
        :param values: of the column, or of several by name; by default the levels of a factor.
        :param by: a column within whose levels rows are averaged; None for all rows.
        :param frame: the rows, those of the fit by default.
        :param kind: of the predictions, as :meth:`predict` has it.
        :raises BadInput: for a model that no formula made, and for a column that it has not.

        >>> posterior.means(["treatment", "dose"], values={"dose": [1.0, 2.0]})  # doctest: +SKIP
        """
        columns = list(column) if isinstance(column, list | tuple) else [column]
        return averages.answered(self, columns, partial(averages.level_means, values), by, frame, kind, prob)

    def comparisons(
        self,
        column: str,
        *,
        step: float = 1.0,
        by: str | None = None,
        frame: Any = None,
        kind: str = "response",
        prob: float = PROB,
    ) -> Table:
        """Average differences of predictions: levels of a factor less the first, 1 less 0, or a number a step higher.

        :param column: and all other settings, as for :meth:`means`.

        >>> posterior.comparisons("treatment", by="sex")  # doctest: +SKIP
        """
        return averages.answered(self, [column], partial(averages.contrasts, step), by, frame, kind, prob)

    def slopes(
        self, column: str, *, by: str | None = None, frame: Any = None, kind: str = "response", prob: float = PROB
    ) -> Table:
        """Average derivatives of predictions in a column of numbers.

        :param column: and all other settings, as for :meth:`means`.

        >>> posterior.slopes("dose")  # doctest: +SKIP
        """
        return averages.answered(self, [column], averages.derivative, by, frame, kind, prob)

    def _table(
        self, prob: float, names: Names, most: int | None, errors: bool = True, until: float = math.inf
    ) -> Table:
        check_probability(prob)
        layout = TableLayout(names, (0.5 - 0.5 * prob, 0.5 + 0.5 * prob), most)
        rows, said = self._hyper_rows(layout, errors)
        sites, more = site_rows(self, layout, until)
        columns = {c: COLUMNS[c] for c in ("value", "sd", "median")}
        columns |= {end: "end of the interval" for end in layout.ends} | {"gamma": COLUMNS["gamma"]}
        legend = [f"gamma: {COLUMNS['gamma']}"] * any("gamma" in row for row in rows.values())
        return Table(rows | sites, columns, [*said, *more, *legend], digits=4)

    def summary(self, prob: float = PROB, *, check: bool = True) -> None:
        """Print the table, twelve rows of a site at most, then the evidence and how far to trust it.

        Of a formula's model it begins with what was fitted, and to how many rows and groups.

        It takes the processor no longer than the fit did, or a second, whichever is more: half of it for the table's
        draws, the rest for a check of means, standard deviations and log evidence, which stops as soon as it is known
        whether they are off, and says what is not known where time is up.

        :param prob: in the intervals.
        :param check: False prints the table alone.
        """
        took, now = getattr(self, "fit_seconds", 0.0), time.process_time()
        seconds = max(LEAST_SECONDS, took)
        if heading := getattr(as_written(self._joint.model), "heading", ()):
            print("\n".join([*heading, f"fitted in {took:.2g} s of the processor", ""]))  # noqa: T201
        print(self._table(prob, names_of(self._joint), LISTED, until=now + 0.5 * seconds))  # noqa: T201
        if check:
            print("\n".join(self._notes(now + 0.9 * seconds)))  # noqa: T201 - printing is what summary() is for, as in MCMC

    def plot(self, axes: Axes | None = None, *, prob: float = PROB) -> Axes:
        """The table as a picture: a point and an interval for each element, twelve of a site at most on one axis.

        A figure of its own has a panel for each site, and of a formula's groups for each of their coefficients;
        precisions and other positive values that lie far apart are on a logarithmic axis.  A Gaussian process of one
        input is drawn as its curve, a mixture with its data, the vectors of an RVM within theirs.  Others are in
        :mod:`pyro_evidence.plots`.

        >>> posterior.plot()  # doctest: +SKIP

        :param axes: to draw on; None makes a figure of its own, whose first panel comes back.
        :param prob: in the intervals.
        :raises ImportError: without matplotlib.
        """
        most = LISTED if axes is not None else 2 * LISTED  # two coefficients of as many groups
        found, what = self.table(prob, most=most), f"value, {display.percent(prob)} % interval"
        _, _, _, *ends, _ = found.columns
        rows = [(label, *(row.get(c, math.nan) for c in ("value", *ends))) for label, row in found.rows.items()]
        if axes is not None:
            return display.on_panels(axes, [display.Panel("", rows)], what)
        dims = getattr(as_written(self._joint.model), "dims", {})
        fixed = {site for site, along in dims.items() if along[0].startswith("coefficient")}
        parts = (*self._joint.latents, *self._joint.hypers)
        notes = [note for note in found.notes if not note.startswith("gamma:")]
        panels = _panels(rows, fixed, {part.name for part in parts if not is_identity(part.transform)})
        return display.on_panels(axes, panels, "\n".join([what, *notes]))

    def _repr_html_(self) -> str:
        found = self._table(PROB, names_of(self._joint), LISTED, errors=False)  # which may be expensive
        return f"<p>{html.escape(repr(self))}</p>{found._repr_html_()}"


def _panels(rows: Sequence[Sequence[Any]], fixed: set[str], positive: set[str]) -> list[display.Panel]:
    """Rows by site, of groups by coefficient, correlations by group; single ones together, positive ones first.

    :param fixed: sites of fixed effects, whose intercepts are of another size than the slopes.
    :param positive: sites that may be on a logarithmic axis.
    """
    panels: dict[str, list[tuple[str, Sequence[Any]]]] = {}
    for label, *numbers in rows:
        pair, _, of = label.removeprefix("cor(").partition(") of ")
        if of:
            panels.setdefault(CORRELATIONS + of, []).append((pair, (label, *numbers)))
            continue
        site, _, inside = label.removesuffix("]").partition("[")
        element, _, effect = inside.rpartition(", ")
        named = bool(element) and not effect.isdigit()
        panel = label if inside == "Intercept" and site in fixed else f"{site}, {effect}" if named else site
        panels.setdefault(panel, []).append((element if named else inside or site, (label, *numbers)))
    together = {n for n in panels if n.partition("[")[0] in fixed or n.startswith(CORRELATIONS)}
    apart = {n: found for n, found in panels.items() if len(found) > 1 or n in together}
    single = [found[0][1] for n, found in panels.items() if n not in apart]
    several = [
        display.Panel(n, [(short, *row[1:]) for short, row in found], n in positive) for n, found in apart.items()
    ]
    scales = [row for row in single if row[0].partition("[")[0] in positive]
    kinds = (scales, True), ([row for row in single if row not in scales], False)
    return several + [display.Panel("", found, far) for found, far in kinds if found]


def site_rows(posterior: Tabulated, layout: TableLayout, until: float) -> tuple[Rows, list[str]]:
    """Rows of latent sites; draws are taken once, where a site is not normal."""
    parts = layout.in_order(p for p in posterior._joint.latents if p.name != DUMMY_SITE)
    straight = posterior._normal and posterior._skewed is None
    normal = [p.name for p in parts if straight and is_identity(p.transform)]
    levels = torch.special.ndtr(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist()
    known = posterior.quantiles(levels) if normal else {}
    draws = posterior._draws_until(until) if len(normal) < len(parts) else {}
    num = min((len(draw) for draw in draws.values()), default=posterior._num_tabulated)
    pruned = posterior.pruned
    rows: Rows = {}
    said = [f"of {num} draws, where table() has {posterior._num_tabulated}"] if num < posterior._num_tabulated else []
    for part in parts:
        name = part.name
        if is_correlation(part):
            rows |= layout.correlation_rows(name, part.shape[-1], of_draws(correlations(draws[name]), layout))
            continue
        alive = torch.ones(part.shape, dtype=torch.bool)
        if name in pruned and part.shape == part.unconstrained_shape:
            alive = ~pruned[name].cpu()
        places, labels, more = layout.listed(name, alive)
        if name in normal:
            mean, above = (v.double().reshape(-1)[places] for v in known[name])
            columns = of_normal(mean, above - mean, layout)
        else:
            columns = of_draws(draws[name].reshape(len(draws[name]), -1)[:, places].double(), layout)
        rows |= by_label(labels, columns)
        said += more
    return rows, said


def hyper_rows(posterior: Any, spread: HyperparameterCovariance | None, layout: TableLayout) -> tuple[Rows, list[str]]:
    """A row for each element of each hyperparameter of a posterior that is not pruned, and a note on the others.

    :param spread: how well they are determined, where it is known.
    """
    state, values, gamma, pruned = posterior.state, posterior.hyperparameters, posterior.gamma, posterior.pruned
    hypers = state.problem.joint.hypers  # what was not maximised comes last
    rows: Rows = {}
    said: list[str] = []
    for part in layout.in_order(hypers):
        if is_correlation(part):
            rows |= layout.correlation_rows(part.name, part.shape[-1], _correlations(state, part, spread, layout))
            continue
        value = values[part.name]
        columns = {"value": value, **_spreads(state, part, value, spread, layout)}
        if part.name in gamma and gamma[part.name].shape == part.shape:
            columns["gamma"] = gamma[part.name]
        places, labels, more = layout.listed(part.name, value.isfinite())
        rows |= by_label(labels, {c: v.reshape(-1)[places] for c, v in columns.items()})
        said += more
    for name in (n for n in values if n not in hypers.slices):
        value, alive = values[name], torch.ones(values[name].shape, dtype=torch.bool)
        if name in pruned:
            alive = ~pruned[name].cpu()
        if state.problem.joint.param_constraints.get(name) is constraints.corr_cholesky:
            found: Rows = {}
            for of in alive[..., 0, 0].nonzero().tolist():
                found |= layout.correlation_rows(name, value.shape[-1], {"value": correlations(value[tuple(of)])}, of)
            rows |= dict(list(found.items())[: layout.most])
            left = len(found) - len(list(found)[: layout.most])
            said += [f"{name}: {left} more, in table()"] if left else []
            continue
        places, labels, more = layout.listed(name, alive)
        rows |= by_label(labels, {"value": value.reshape(-1)[places]})
        said += more
    return rows, said


def _spreads(
    state: LaplaceState,
    part: Coordinate,
    value: Tensor,
    spread: HyperparameterCovariance | None,
    layout: TableLayout,
) -> Values:
    """Standard deviations, and intervals in the coordinates of the search, where log evidence is nearest a parabola."""
    if spread is None:
        return {}
    columns = {"sd": spread.sd[part.name]}
    if any(step.domain.event_dim for step in transform_steps(part.transform)):  # moved together
        normal = of_normal(value.double(), columns["sd"], layout)
        columns |= {end: normal[end] for end in layout.ends}
    else:
        block = state.problem.joint.hypers.slices[part.name]
        sd = spread.unconstrained.diagonal()[block].sqrt()
        ends = [state.theta[block] + torch.special.ndtri(sd.new_tensor(level)) * sd for level in layout.levels]
        found = torch.stack([part.transform(end.reshape(part.unconstrained_shape)) for end in ends])
        columns |= dict(zip(layout.ends, found.sort(0).values.clone(), strict=True))
        for edge in (e for e in spread.edges if e.name == part.name):
            for column, end in zip(layout.ends, edge.interval, strict=True):
                columns[column].reshape(-1)[edge.index] = end
    return columns


def _correlations(
    state: LaplaceState, part: Coordinate, spread: HyperparameterCovariance | None, layout: TableLayout
) -> Values:
    """Correlations, their intervals by Fisher's transformation."""
    block = state.problem.joint.hypers.slices[part.name]
    theta = state.theta[block]
    value = correlations(part.transform(theta))
    columns = {"value": value}
    if spread is not None:
        jacobian = torch.autograd.functional.jacobian(lambda t: correlations(part.transform(t)).atanh(), theta)
        sd = (jacobian @ spread.unconstrained[block, block] @ jacobian.mT).diagonal().sqrt()
        columns["sd"] = sd * (1.0 - value.square())
        for column, level in zip(layout.ends, layout.levels, strict=True):
            columns[column] = (value.atanh() + torch.special.ndtri(sd.new_tensor(level)) * sd).tanh()
    return {c: v.detach() for c, v in columns.items()}
