"""How a posterior on a few axes of weight space shows itself: ``table()``, ``summary()`` and a picture."""

import html
from typing import Any

import torch
from torch import Tensor

from pyro_evidence import drawing
from pyro_evidence.drawing import Axes
from pyro_evidence.errors import BadInput
from pyro_evidence.settings import check_probability
from pyro_evidence.tables import Table

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
        axes = drawing.matplotlib("pyplot").gca() if axes is None else axes
        drawing.check_axes(axes)
        check_probability("prob", prob)
        if not self.num_active:
            raise BadInput(NO_AXIS.format("there is nothing to draw"))
        middle, sd = self.state.x[: self.num_active], self._deviations()[: self.num_active]
        order = (middle.abs() / sd).argsort(descending=True)[:DRAWN].sort().values
        reach = float(torch.special.ndtri(torch.tensor(0.5 + 0.5 * prob, dtype=torch.float64))) * sd
        names = [f"axis {int(i)}" for i in torch.nonzero(self.active).flatten()[order]]
        drawing.intervals(axes, names, *((middle + k * reach)[order].tolist() for k in (0, -1, 1)))
        axes.set_xlabel(f"weight, {100.0 * prob:.4g} % interval")
        return axes
