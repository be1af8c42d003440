"""The terms of a log joint density in families: those that touch equally many coordinates side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.structure.factors.touches import Groups


@dataclass(frozen=True)
class Member:
    """Some cells of one entry of :func:`pyro_evidence.structure.factors.cells.cells`."""

    name: str
    rows: Tensor | None  # positions in the flattened entry, None for all

    def of(self, cells: Mapping[str, Tensor]) -> Tensor:
        """The cells, ``(F,)``."""
        flat = cells[self.name].reshape(-1)
        return flat if self.rows is None else flat[self.rows]


@dataclass(frozen=True)
class Family:
    """Factors that touch ``k`` different coordinates each."""

    members: tuple[Member, ...]
    index: Tensor  # (F, k)

    def of(self, cells: Mapping[str, Tensor]) -> Tensor:
        """The factors' values, nats, ``(F,)``."""
        parts = [member.of(cells) for member in self.members]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def table(groups: Groups, shape: Sequence[int]) -> Tensor:
    """The coordinates of each element of a tensor of this shape, flattened, ``(F, m)``; -1 for none."""
    num = torch.Size(shape).numel()
    columns = [g.expand(*shape, g.shape[-1]).reshape(num, g.shape[-1]) for g in groups]
    return torch.cat(columns, -1)


def distinct(index: Tensor) -> list[tuple[Tensor | None, Tensor]]:
    """Rows of coordinates by how many different ones they hold: the rows' positions, and ``(F, k)`` without repeats."""
    if (index.shape[-1] == 1 and bool((index >= 0).all())) or _are_apart(index):
        return [(None, index)]
    ordered = index.sort(-1).values
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    fresh &= ordered >= 0
    counts = fresh.sum(-1)
    found: list[tuple[Tensor | None, Tensor]] = []
    for k in counts.unique().tolist():
        if k:
            rows = (counts == k).nonzero().squeeze(-1)
            part = ordered[rows][fresh[rows]].reshape(-1, k)
            found.append((None if len(rows) == len(index) else rows, part))
    return found


def _are_apart(index: Tensor) -> bool:
    """Whether the columns hold coordinates of ranges that do not overlap, so that nothing repeats."""
    low, high = index.amin(0), index.amax(0)
    order = low.argsort()
    return bool((low >= 0).all()) and bool((low[order][1:] > high[order][:-1]).all())


def families(touched: Mapping[str, Groups], shapes: Mapping[str, Sequence[int]]) -> tuple[Family, ...]:
    """Every term that touches a coordinate, in families."""
    found: dict[int, list[tuple[Member, Tensor]]] = {}
    for name, groups in touched.items():
        if groups:
            for rows, index in distinct(table(groups, shapes[name])):
                found.setdefault(index.shape[-1], []).append((Member(name, rows), index))
    return tuple(
        Family(tuple(member for member, _ in parts), torch.cat([index for _, index in parts]))
        for _, parts in sorted(found.items())
    )
