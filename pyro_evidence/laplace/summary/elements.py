"""Rows of the table: elements that are alive, their moments and intervals, correlations in place of their factors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import CorrCholeskyTransform

from pyro_evidence.laplace.summary.names import Names
from pyro_evidence.numerics.coordinates import Coordinate

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
