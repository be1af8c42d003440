"""How a posterior shows itself: ``table()``, ``summary()`` and what a notebook displays."""

import html
import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from pyro_evidence import drawing
from pyro_evidence.drawing import Axes
from pyro_evidence.laplace.hyperparameters.uncertainty import HyperparameterCovariance
from pyro_evidence.laplace.summary.elements import (
    Layout,
    Rows,
    correlation_rows,
    correlations,
    is_correlation,
    of_draws,
    of_normal,
)
from pyro_evidence.laplace.summary.names import Coords, Dims, names_of
from pyro_evidence.numerics.coordinates import Coordinate, is_identity
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.parameters import NOTHING
from pyro_evidence.settings import check_probability
from pyro_evidence.tables import Table

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
        axes = drawing.matplotlib("pyplot").gca() if axes is None else axes
        drawing.check_axes(axes)
        found = self._table(self._spread(), prob, None, None, LISTED).rows
        low, high = (f"{100.0 * level:.4g}%" for level in (0.5 - 0.5 * prob, 0.5 + 0.5 * prob))
        columns = [[row.get(c, math.nan) for row in found.values()] for c in ("value", low, high)]
        drawing.intervals(axes, list(found), *columns)
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
