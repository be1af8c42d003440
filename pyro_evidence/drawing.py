"""Shapes on axes of matplotlib, which is an extra and imported when something is drawn.  No posterior is known here."""

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput

Axes = Any  # matplotlib.axes.Axes
MARKERS = "osD^vPX<>*"  # of classes and components, beside their colours
DASHES = ("-", "--", "-.", ":")  # of curves, beside their colours


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


def matplotlib(part: str) -> Any:
    """A module of matplotlib.

    :raises ImportError: where it is missing.
    """
    try:
        return import_module(f"matplotlib.{part}")
    except ImportError as error:
        raise ImportError("Pictures need matplotlib, which is missing: pip install 'pyro-evidence[plots]'.") from error


def rows(axes: Axes, labels: Sequence[str]) -> None:
    """One row per label, the first on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)


def intervals(
    axes: Axes, labels: Sequence[str], middle: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> None:
    """A point and an interval in each row; nothing where a number is nan."""
    places = range(len(labels))
    axes.hlines(places, low, high)
    axes.plot(middle, places, "o", markersize=4)
    rows(axes, labels)


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
    return {"color": f"C{number % 10}", "linestyle": DASHES[number % len(DASHES)]}


def points_of(number: int) -> dict[str, Any]:
    """Colour and shape of the points of a class."""
    return {"color": f"C{number % 10}", "marker": MARKERS[number % len(MARKERS)], "linestyle": "none"}


def ellipses(axes: Axes, shares: Tensor, centres: Tensor, trils: Tensor, *, mass: float, **style: Any) -> None:
    """A line around each kernel ``(K, 2)``, which holds ``mass`` of it, the wider the larger its share ``(K,)``.

    A kernel of share 0 has none.
    """
    radius = math.sqrt(-2.0 * math.log1p(-mass))  # chi-square with two degrees of freedom
    for share, centre, tril in zip(shares.tolist(), centres, trils.expand(*centres.shape, 2), strict=True):
        if share > 0:
            ellipse(axes, centre, tril, radius, **style, linewidth=0.5 + 2.5 * share)


def ellipse(axes: Axes, centre: Tensor, tril: Tensor, radius: float, **style: Any) -> None:
    """The line ``radius`` standard deviations around a centre ``(2,)``, of the covariance's Cholesky factor."""
    angle = torch.linspace(0.0, math.tau, 101, dtype=centre.dtype)
    x, y = (centre.unsqueeze(-1) + radius * tril @ torch.stack([angle.cos(), angle.sin()])).tolist()
    axes.plot(x, y, **style)
