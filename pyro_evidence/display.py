"""A table of short texts, as plain text, Markdown and HTML."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.lazy_import import import_extra

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Table:
    """Rows of numbers under named columns, with remarks below.

    :ivar rows: label -> column -> number; nan is shown as nothing, and a column of nothing but nan not at all.
    :ivar columns: column -> what it says, in the order to show.
    :ivar notes: a line each.
    :ivar corner: heading of the labels.
    :ivar digits: significant ones that are shown; ``rows`` has them all.

    >>> print(Table({"w[0]": {"value": 1.23456, "sd": 0.5}}, {"value": "the mean", "sd": "its standard deviation"}))
          value   sd
    w[0]   1.23  0.5
    """

    rows: Mapping[str, Numbers]
    columns: Mapping[str, str]
    notes: Sequence[str] = ()
    corner: str = ""
    digits: int = 3

    @cached_property
    def cells(self) -> list[list[str]]:
        """The texts that are shown, headings first."""
        used = [c for c in self.columns if any(not math.isnan(row.get(c, math.nan)) for row in self.rows.values())]
        cells = [[self.corner, *used]]
        for label, row in self.rows.items():
            numbers = [row.get(c, math.nan) for c in used]
            cells.append([label, *("" if math.isnan(v) else f"{v:.{self.digits}g}" for v in numbers)])
        return cells

    def __str__(self) -> str:
        widths = [max(len(row[i]) for row in self.cells) for i in range(len(self.cells[0]))]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in self.cells]
        return "\n".join([*lines, *self.notes])

    def to_markdown(self) -> str:
        """The table for a README or an issue."""
        head, *body = self.cells
        lines = [head, ["---"] * len(head), *body]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return "\n".join([table, *(["", *(f"- {note}" for note in self.notes)] if self.notes else [])])

    def _repr_html_(self) -> str:
        head, *body = self.cells
        titles = "".join(f'<th title="{html.escape(self.columns.get(c, ""))}">{html.escape(c)}</th>' for c in head)
        rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in body)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<table><tr>{titles}</tr>{rows}</table>{notes}"

    def to_pandas(self) -> Any:
        """The numbers as a ``pandas.DataFrame``, one row per label.

        :raises ImportError: when pandas is missing.
        """
        pandas = import_extra("pandas", "to_pandas() needs pandas: pip install pandas.")
        found = pandas.DataFrame.from_dict({n: dict(row) for n, row in self.rows.items()}, orient="index")
        return found[[c for c in self.columns if c in found] + [c for c in found if c not in self.columns]]


def by_label(labels: Sequence[str], columns: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Rows of a table, one for each label, from columns of as many numbers."""
    values = {c: v.tolist() for c, v in columns.items()}
    return {label: {c: float(v[k]) for c, v in values.items()} for k, label in enumerate(labels)}


class Shown:
    """A result that is read as a table."""

    table: Callable[[], Table]

    def __str__(self) -> str:
        return str(self.table())

    def to_markdown(self) -> str:
        """The table for a README or an issue."""
        return self.table().to_markdown()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def to_pandas(self) -> Any:
        """The numbers as a ``pandas.DataFrame``.

        :raises ImportError: when pandas is missing.
        """
        return self.table().to_pandas()


Axes = Any  # matplotlib.axes.Axes
MARKERS = "osD^vPX<>*"  # of classes and components, beside their colours
DASHES = ("-", "--", "-.", ":")  # of curves, beside their colours
SMALL = 4  # points, of a marker
THIN = 0.8  # points, of a line beside another that matters more
SHADE = 0.2  # opacity of a band behind a line
ROW, TITLE = 0.22, 2.0  # inches of a row of a panel, and rows of what stands above and below them
FAR = 100.0  # of positive numbers, times the smallest: smaller ones would be dots at zero
NUM_GRID = 200  # points along a line, which the eye sees as smooth
PROB = 0.9  # in intervals, where nobody says how much
CENTRAL = (0.5 - 0.5 * PROB, 0.5 + 0.5 * PROB)  # ends of a central interval


def check_axes(axes: Axes) -> None:
    """Refuse what cannot be drawn on.

    :raises ImportError: without matplotlib.
    :raises BadInput: unless ``axes`` are Axes of matplotlib.
    """
    expected = matplotlib("axes").Axes
    if not isinstance(axes, expected):
        raise BadInput(
            f"axes is a {type(axes).__name__}; expected matplotlib's Axes first: plt.gca(), or those that "
            f"plt.subplots() makes."
        )


def axes_or_own(axes: Axes | None) -> Axes:
    """The Axes to draw on: those given, or those of a new figure.

    :raises ImportError: without matplotlib.
    :raises BadInput: for what are no Axes.
    """
    axes = matplotlib("pyplot").figure(layout="constrained").gca() if axes is None else axes
    check_axes(axes)
    return axes


def matplotlib(part: str) -> Any:
    """A module of matplotlib.

    :raises ImportError: where it is missing.
    """
    missing = "Pictures need matplotlib, which is missing: pip install 'pyro-evidence[plots]'."
    return import_extra(f"matplotlib.{part}", missing)


def percent(share: float) -> str:
    """A share of one in per cent, without the sign.

    >>> percent(0.05)
    '5'
    """
    return f"{100.0 * share:.4g}"


def rows(axes: Axes, labels: Sequence[str]) -> None:
    """One row per label, the first on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)


def intervals(
    axes: Axes, labels: Sequence[str], middle: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> None:
    """A point and an interval in each row, an arrow where it has no end; nothing where a number is nan."""
    places = range(len(labels))
    finite = [value for column in (middle, low, high) for value in column if math.isfinite(value)]
    edge = 2.0 * max(map(abs, finite), default=1.0)
    axes.hlines(places, low, [min(value, edge) for value in high])
    if unbounded := [place for place in places if high[place] == math.inf]:
        axes.plot([edge] * len(unbounded), unbounded, ">", color="C0")
    axes.plot(middle, places, "o", color="C0", markersize=SMALL)
    rows(axes, labels)


@dataclass(frozen=True)
class Panel:
    """Rows of a picture with a title: a label, a point and two ends each.

    :ivar positive: whether the axis may be logarithmic, where the largest is more than :data:`FAR` times the smallest.
    """

    title: str
    rows: Sequence[Sequence[Any]]
    positive: bool = False


def on_panels(axes: Axes | None, panels: Sequence[Panel], x: str) -> Axes:
    """Panels below each other on a figure of their own, whose first Axes come back; or their rows on Axes that are."""
    if axes is not None or not panels:
        axes, every_row = axes_or_own(axes), [row for panel in panels for row in panel.rows]
        intervals(axes, *zip(*every_row, strict=True) if every_row else ((), (), (), ()))
        return with_labels(axes, x, legend=False)
    heights = [len(panel.rows) + TITLE for panel in panels]
    size = 6.4, ROW * (sum(heights) + TITLE + x.count("\n"))
    figure = matplotlib("pyplot").figure(figsize=size, layout="constrained")
    every: list[Axes] = list(figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0])
    for axes, panel in zip(every, panels, strict=True):
        labels, *columns = zip(*panel.rows, strict=True)
        intervals(axes, labels, *columns)
        axes.set_title(panel.title, loc="left", fontsize="medium")
        numbers = [value for column in columns for value in column if math.isfinite(value)]
        least, most = min(numbers, default=0.0), max(numbers, default=0.0)
        if panel.positive and most > FAR * least > 0.0:
            axes.set_xscale("log")
        elif least < 0.0 < most:
            axes.axvline(0.0, color="grey", linewidth=THIN, linestyle=":")
    with_labels(every[-1], x, legend=False)
    return every[0]


def curve(axes: Axes, x: Tensor, values: Tensor, *, share: float, number: int = 0, name: str = "") -> None:
    """A line and the band around it that holds a share of the posterior.

    :param values: of the line and of the band's two ends, ``(G, 3)``.
    :param number: among curves on the same Axes, by which its colour is chosen.
    :param name: of the line where there are several, whose bands have no names of their own.
    """
    band = {"alpha": SHADE, "color": f"C{number}", "label": None if name else f"{percent(share)} % band"}
    middle, low, high = values.T.tolist()
    axes.fill_between(x.tolist(), low, high, **band)
    axes.plot(x.tolist(), middle, **line_of(number), label=name or "mean")


def with_labels(axes: Axes, x: str, y: str | None = None, *, legend: bool = True) -> Axes:
    """The Axes with names of what runs along them, and of the lines."""
    axes.set_xlabel(x)
    if y is not None:
        axes.set_ylabel(y)
    if legend:
        axes.legend()
    return axes


def check_plane(name: str, pair: tuple[int, int], num: int) -> None:
    """Refuse what names no plane of ``num`` dimensions.

    :raises BadInput: unless these are two different numbers from 0 to ``num - 1``.
    """
    if num < 2:
        raise BadInput(f"there is {num} column; expected two at least, for a picture of a plane.")
    if len(set(pair)) != 2 or not all(0 <= i < num for i in pair):
        raise BadInput(f"{name}={pair}; expected two different numbers from 0 to {num - 1}.")


def line_of(number: int) -> dict[str, Any]:
    """Colour and dashes of the lines of a class."""
    return {"color": f"C{number}", "linestyle": DASHES[number % len(DASHES)]}


def points_of(number: int) -> dict[str, Any]:
    """Colour and shape of the points of a class."""
    return {"color": f"C{number}", "marker": MARKERS[number % len(MARKERS)], "linestyle": "none"}


def kernel_ellipses(axes: Axes, shares: Tensor, centres: Tensor, trils: Tensor, *, mass: float, **style: Any) -> None:
    """A line around each kernel ``(K, 2)``, which holds ``mass`` of it, the wider the larger its share ``(K,)``.

    A kernel of share 0 has none.
    """
    radius = math.sqrt(-2.0 * math.log1p(-mass))  # chi-square with two degrees of freedom
    for share, centre, tril in zip(shares.tolist(), centres, trils.expand(*centres.shape, 2), strict=True):
        if share > 0:
            ellipse(axes, centre, tril, radius, **style, linewidth=0.5 + 2.5 * share)


def ellipse(axes: Axes, centre: Tensor, tril: Tensor, radius: float, **style: Any) -> None:
    """The line ``radius`` standard deviations around a centre ``(2,)``, of the covariance's Cholesky factor."""
    angle = torch.linspace(0.0, math.tau, NUM_GRID, dtype=centre.dtype)
    x, y = (centre.unsqueeze(-1) + radius * tril @ torch.stack([angle.cos(), angle.sin()])).tolist()
    axes.plot(x, y, **style)
