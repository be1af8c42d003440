"""How a posterior shows itself: ``table()``, ``summary()`` and what a notebook displays."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import CorrCholeskyTransform

from pyro_evidence import display
from pyro_evidence.display import Axes, Table
from pyro_evidence.errors import BadInput
from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.laplace.uncertainty import HyperparameterCovariance, message
from pyro_evidence.numerics.coordinates import Coordinate, is_identity
from pyro_evidence.posterior import diagnostics
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.parameters import NOTHING
from pyro_evidence.settings import check_probability
from pyro_evidence.structure.names import Coords, Dims, Names, names_of

Row = dict[str, float]
Rows = dict[str, Row]


@dataclass(frozen=True)
class Layout:
    """How the rows are to be written.

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
        low, high = (f"{100.0 * level:.4g}%" for level in self.levels)
        return low, high

    def in_order(self, parts: Iterable[Coordinate]) -> list[Coordinate]:
        """Those that the model names, in its order, and the others after them."""
        order = {name: place for place, name in enumerate(self.names.dims)}
        return sorted(parts, key=lambda p: order.get(p.name, len(order)))

    def shown(self, alive: Tensor) -> Tensor:
        """Flat places of the elements that are listed, those alive first to last."""
        return alive.reshape(-1).nonzero().flatten()[: self.most]

    def rows(self, name: str, shape: Sequence[int], places: Tensor, columns: Mapping[str, Tensor]) -> Rows:
        """Rows of some elements, ``columns`` holding one number for each of ``places``."""
        index = (
            torch.stack(torch.unravel_index(places, torch.Size(shape)), -1) if len(shape) else places[:, None][:, :0]
        )
        labels = [self.names.label(name, i) for i in index.tolist()]
        values = {c: v.tolist() for c, v in columns.items()}
        return {label: {c: float(v[k]) for c, v in values.items()} for k, label in enumerate(labels)}

    def left_out(self, name: str, alive: Tensor) -> list[str]:
        """What is to be said of the elements that are not listed."""
        pruned, more = int((~alive).sum()), int(alive.sum()) - len(self.shown(alive))
        said = [f"{name}: {pruned} of {alive.numel()} elements are pruned"] if pruned else []
        return [*said, *([f"{name}: {more} more, in table()"] if more else [])]


def is_correlation(part: Coordinate) -> bool:
    """Whether a value is a Cholesky factor of correlations."""
    transform: Any = part.transform
    while hasattr(transform, "base_transform"):
        transform = transform.base_transform
    parts = getattr(transform, "parts", [transform])
    return bool(parts) and isinstance(parts[-1], CorrCholeskyTransform) and len(part.shape) == 2


def correlations(factor: Tensor) -> Tensor:
    """The correlations below the diagonal of ``L L'``, ``(..., K)``, row by row.

    >>> correlations(torch.tensor([[1.0, 0.0], [0.6, 0.8]]))
    tensor([0.6000])
    """
    size = factor.shape[-1]
    row, column = torch.tril_indices(size, size, -1)
    return (factor @ factor.mT)[..., row, column]


def correlation_rows(layout: Layout, name: str, size: int, columns: Mapping[str, Tensor]) -> Rows:
    """Rows of correlations: which two, and their numbers."""
    pairs = torch.tril_indices(size, size, -1).T.tolist()
    words = [layout.names.words(name, pair) for pair in pairs]
    values = {c: v.tolist() for c, v in columns.items()}
    return {
        f"{name}: correlation of {b}, {a}": {c: float(v[k]) for c, v in values.items()}
        for k, (a, b) in enumerate(words)
    }


def of_draws(draws: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Moments and quantiles of columns of draws, ``(S, K)``."""
    low, median, high = draws.quantile(draws.new_tensor([layout.levels[0], 0.5, layout.levels[1]]), 0)
    return dict(
        zip(("value", "sd", "median", *layout.ends), (draws.mean(0), draws.std(0), median, low, high), strict=True)
    )


def of_normal(mean: Tensor, sd: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Moments and quantiles of normal distributions, without draws."""
    low, high = (mean + torch.special.ndtri(mean.new_tensor(level)) * sd for level in layout.levels)
    return dict(zip(("value", "sd", "median", *layout.ends), (mean, sd, mean, low, high), strict=True))


LISTED = 12  # elements of a site that summary() lists
COLUMNS = {
    "value": "the mean; of a hyperparameter that was maximised, where it is",
    "sd": "standard deviation",
    "median": "",
    "gamma": "how many parameters of that prior precision the data determine",
}
Values = dict[str, Tensor]


class Shown:
    """A posterior over named sites that can be tabulated and printed."""

    _gaussian: ClassVar[bool] = True  # whether sites on the whole real line are normal, by their quantiles
    _tabulated: ClassVar[int] = 4_000  # draws, where there are other sites

    def get_samples(self, num_samples: int, seed: int) -> Values:
        """Draws of every site."""
        raise NotImplementedError

    def quantiles(self, q: list[float]) -> Values:
        """Marginal quantiles of every site."""
        raise NotImplementedError

    @property
    def _joint(self) -> LogJoint:
        raise NotImplementedError

    def _alive(self) -> Mapping[str, Tensor]:
        """Which elements of each site were not switched off, by unconstrained element."""
        return {}

    def _hypers(self, spread: HyperparameterCovariance | None, layout: Layout) -> tuple[Rows, list[str]]:
        """Rows of what was maximised."""
        return {}, []

    def _spread(self) -> HyperparameterCovariance | None:
        """How well hyperparameters are determined, where that is known and cheap."""
        return None

    def _below(self, spread: HyperparameterCovariance | None) -> list[str]:
        """What summary() says below its table."""
        return []

    def table(
        self, prob: float = 0.9, *, coords: Coords | None = None, dims: Dims | None = None, most: int | None = None
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
        return self._table(self._spread(), prob, coords, dims, most)

    def summary(self, prob: float = 0.9) -> None:
        """Print the table, twelve rows of a site at most, then the evidence and how far to trust it."""
        spread = self._spread()
        print(self._table(spread, prob, None, None, LISTED))  # noqa: T201
        print("\n".join(self._below(spread)))  # noqa: T201 - printing is what summary() is for, as in MCMC

    def plot(self, axes: Axes | None = None, *, prob: float = 0.9) -> Axes:
        """The table as a picture: a point and an interval for each element, twelve of a site at most.

        Others are in :mod:`pyro_evidence.plots`.

        >>> posterior.plot()  # doctest: +SKIP

        :param axes: to draw on; None takes matplotlib's present ones.
        :param prob: in the intervals.
        :raises ImportError: without matplotlib.
        """
        axes = display.matplotlib("pyplot").gca() if axes is None else axes
        display.check_axes(axes)
        found = self._table(self._spread(), prob, None, None, LISTED).rows
        low, high = (f"{100.0 * level:.4g}%" for level in (0.5 - 0.5 * prob, 0.5 + 0.5 * prob))
        columns = [[row.get(c, math.nan) for row in found.values()] for c in ("value", low, high)]
        display.intervals(axes, list(found), *columns)
        axes.set_xlabel(f"value, {100.0 * prob:.4g} % interval")
        return axes

    def _repr_html_(self) -> str:
        table = self._table(None, 0.9, None, None, LISTED)
        return f"<p>{html.escape(repr(self))}</p>{table._repr_html_()}"

    def _table(
        self,
        spread: HyperparameterCovariance | None,
        prob: float,
        coords: Coords | None,
        dims: Dims | None,
        most: int | None,
    ) -> Table:
        check_probability("prob", prob)
        layout = Layout(names_of(self._joint, coords, dims), (0.5 - 0.5 * prob, 0.5 + 0.5 * prob), most)
        rows, said = self._hypers(spread, layout)
        sites, more = self._sites(layout)
        columns = {c: COLUMNS[c] for c in ("value", "sd", "median")}
        columns |= {end: "end of the interval" for end in layout.ends} | {"gamma": COLUMNS["gamma"]}
        return Table(rows | sites, columns, [*said, *more], digits=4)

    def _sites(self, layout: Layout) -> tuple[Rows, list[str]]:
        """Rows of latent sites; draws are taken once, where a site is not normal."""
        parts = layout.in_order(p for p in self._joint.latents if p.name != NOTHING)
        normal = [p.name for p in parts if self._gaussian and is_identity(p.transform)]
        levels = torch.special.ndtr(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist()
        known = {n: v for n, v in self.quantiles(levels).items() if n in normal} if normal else {}
        draws = self.get_samples(self._tabulated, seed=0) if len(normal) < len(parts) else {}
        rows: Rows = {}
        said: list[str] = []
        for part in parts:
            alive = self._alive().get(part.name, torch.ones(part.unconstrained_shape, dtype=torch.bool)).cpu()
            if is_correlation(part):
                found = of_draws(correlations(draws[part.name]), layout)
                rows |= correlation_rows(layout, part.name, part.shape[-1], found)
                continue
            alive = alive if part.shape == part.unconstrained_shape else torch.ones(part.shape, dtype=torch.bool)
            places = layout.shown(alive)
            rows |= layout.rows(part.name, part.shape, places, _numbers(part, places, known, draws, layout))
            said += layout.left_out(part.name, alive)
        return rows, said


def _numbers(part: Coordinate, places: Tensor, known: Values, draws: Values, layout: Layout) -> Values:
    """Moments and intervals of some elements of a site, normal where its quantiles are known."""
    if part.name in known:
        mean, above = (v.reshape(-1)[places].double() for v in known[part.name])
        return of_normal(mean, above - mean, layout)
    found = draws[part.name]
    return of_draws(found.reshape(len(found), -1)[:, places].double(), layout)


def hyper_rows(
    state: LaplaceState, values: Values, gamma: Values, spread: HyperparameterCovariance | None, layout: Layout
) -> tuple[Rows, list[str]]:
    """A row for each element of each hyperparameter that is not pruned, and what is to be said of the others.

    :param values: constrained, a pruned precision inf.
    :param gamma: of those that are precisions.
    :param spread: how well they are determined, where it is known.
    """
    rows: Rows = {}
    said: list[str] = []
    for part in layout.in_order(state.problem.joint.hypers):
        if is_correlation(part):
            rows |= _correlations(state, part, spread, layout)
            continue
        alive = values[part.name].isfinite()
        places = layout.shown(alive)
        columns = {"value": values[part.name], **_spreads(state, part, spread, layout)}
        if part.name in gamma and gamma[part.name].shape == part.shape:
            columns["gamma"] = gamma[part.name]
        rows |= layout.rows(part.name, part.shape, places, {c: v.reshape(-1)[places] for c, v in columns.items()})
        said += layout.left_out(part.name, alive)
    held, more = _held({n: v for n, v in values.items() if n not in state.problem.joint.hypers.slices}, layout)
    return rows | held, [*said, *more]


def _held(values: Values, layout: Layout) -> tuple[Rows, list[str]]:
    """Params that were not maximised: their values."""
    rows: Rows = {}
    said: list[str] = []
    for name, value in values.items():
        places = layout.shown(torch.ones(value.shape, dtype=torch.bool))
        rows |= layout.rows(name, value.shape, places, {"value": value.reshape(-1)[places]})
        said += layout.left_out(name, torch.ones(value.shape, dtype=torch.bool))
    return rows, said


def _spreads(state: LaplaceState, part: Coordinate, spread: HyperparameterCovariance | None, layout: Layout) -> Values:
    """Standard deviations and intervals, where there are any."""
    if spread is None:
        return {}
    columns = {"sd": spread.sd[part.name]}
    if part.unconstrained_shape == part.shape:
        columns |= dict(zip(layout.ends, _interval(state, part, spread, layout), strict=True))
        for edge in (e for e in spread.edges if e.name == part.name):
            for column, end in zip(layout.ends, edge.interval, strict=True):
                columns[column].reshape(-1)[edge.index] = end
    return columns


def _interval(state: LaplaceState, part: Coordinate, spread: HyperparameterCovariance, layout: Layout) -> list[Tensor]:
    """Ends, in the coordinates of the search, where the log evidence is nearest to a parabola."""
    block = state.problem.joint.hypers.slices[part.name]
    sd = spread.unconstrained.diagonal()[block].sqrt()
    ends = [state.theta[block] + torch.special.ndtri(sd.new_tensor(level)) * sd for level in layout.levels]
    found = torch.stack([part.transform(end.reshape(part.unconstrained_shape)) for end in ends])
    return list(found.sort(0).values.clone())


def _correlations(
    state: LaplaceState, part: Coordinate, spread: HyperparameterCovariance | None, layout: Layout
) -> Rows:
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
    return correlation_rows(layout, part.name, part.shape[-1], {c: v.detach() for c, v in columns.items()})


class ShownWhole(Shown):
    """Hyperparameters above the sites of the table, evidence and warnings below it."""

    state: LaplaceState

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        """Constrained values by name."""
        raise NotImplementedError

    @property
    def gamma(self) -> dict[str, Tensor]:
        """Numbers of well-determined parameters."""
        raise NotImplementedError

    @property
    def pruned(self) -> dict[str, Tensor]:
        """Masks of what was switched off."""
        raise NotImplementedError

    def diagnostics(self) -> dict[str, Any]:
        """How far to trust the numbers."""
        raise NotImplementedError

    def _said_of_blocks(self) -> list[str]:
        """What there is to say of the error of the log evidence."""
        raise NotImplementedError

    def _alive(self) -> dict[str, Tensor]:
        return {n: ~mask for n, mask in self.pruned.items()}

    def _hypers(self, spread: HyperparameterCovariance | None, layout: Layout) -> tuple[Rows, list[str]]:
        return hyper_rows(self.state, self.hyperparameters, self.gamma, spread, layout)

    def _below(self, spread: HyperparameterCovariance | None) -> list[str]:
        edges = () if spread is None else spread.edges
        said = [*(message(edge) for edge in edges), *self._said_of_blocks()]
        return diagnostics.lines(self.diagnostics(), said)


NO_AXIS = "every axis was pruned, so {}; use get_samples(...), whose weights are 0."
DRAWN = 12  # axes in a picture


class ShownAxes:
    """What a posterior with ``state``, ``alpha``, ``active`` and ``num_active`` prints and draws."""

    def columns(self: Any) -> dict[str, Tensor]:
        """What :meth:`summary` tabulates, one number per active axis."""
        return {"alpha": self.alpha[self.active], "u": self.state.x[: self.num_active]}

    def table(self: Any) -> Table:
        """The axes that are kept, a row each, and how many are pruned; ``.to_pandas()`` has the numbers."""
        columns, index = self.columns(), torch.nonzero(self.active).flatten().tolist()
        rows = {f"axis {i}": {n: float(c[k]) for n, c in columns.items()} for k, i in enumerate(index)}
        pruned = len(self.active) - len(index)
        said = [f"{pruned} of {len(self.active)} axes are pruned"] if pruned else []
        return Table(rows, dict.fromkeys(columns, ""), said, digits=4)

    def summary(self: Any) -> None:
        """Print the axes that are kept, then the log evidence and how far to trust it."""
        lines = [str(self.table()), *(f"{k} = {v}" for k, v in self.diagnostics().items())]
        lines.append(f"the log evidence is {self.evidence_note}")
        print("\n".join(lines))  # noqa: T201 - printing is what summary() is for, as in MCMC

    def _repr_html_(self: Any) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self.table()._repr_html_()}"

    def plot(self: Any, axes: Axes | None = None, *, prob: float = 0.9) -> Axes:
        """The axes that are kept, twelve at most, those furthest from zero: a point and an interval for each weight.

        >>> posterior.plot()  # doctest: +SKIP

        :param axes: to draw on; None takes matplotlib's present ones.
        :param prob: in the intervals.
        :raises BadInput: where every axis was pruned.
        :raises ImportError: without matplotlib.
        """
        axes = display.matplotlib("pyplot").gca() if axes is None else axes
        display.check_axes(axes)
        check_probability("prob", prob)
        if not self.num_active:
            raise BadInput(NO_AXIS.format("there is nothing to draw"))
        middle, sd = self.state.x[: self.num_active], self._deviations()[: self.num_active]
        order = (middle.abs() / sd).argsort(descending=True)[:DRAWN].sort().values
        reach = float(torch.special.ndtri(torch.tensor(0.5 + 0.5 * prob, dtype=torch.float64))) * sd
        names = [f"axis {int(i)}" for i in torch.nonzero(self.active).flatten()[order]]
        display.intervals(axes, names, *((middle + k * reach)[order].tolist() for k in (0, -1, 1)))
        axes.set_xlabel(f"weight, {100.0 * prob:.4g} % interval")
        return axes
