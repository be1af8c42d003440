"""Where the entries of a matrix lie in the panels of its eliminated blocks and in the dense remainder.

All panels are parts of one flat vector: for each block ``(d, d + p)``, its own columns first, then those of its border;
last the dense remainder with one more row and column, which takes what is padding.  An entry between a block and its
border has one place, whichever way round it is asked for, so that sums over both triangles count it twice.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.precision.elimination import Fronts, Order

PORTION = 2_000_000  # entries that are looked up at a time


@dataclass(frozen=True)
class PanelLayout:
    """Places of entries; made by :func:`layout`."""

    size: int  # D
    total: int  # length of the flat vector
    turn: Tensor  # (D + 1,) level at which a coordinate is eliminated; the remainder and the padding come last
    block: Tensor  # (D + 1,) number of the block of a coordinate; the remainder is block 0
    row: Tensor  # (D + 1,) row within the panel
    base: Tensor  # (num_blocks,) where the panel of a block starts
    width: Tensor  # (num_blocks,) length of its rows
    own: Tensor  # (num_blocks,) how many of its columns are its own
    border_key: Tensor  # (B,) block * (D + 1) + coordinate of each border entry, sorted
    border_column: Tensor  # (B,) its column

    def places(self, index: Tensor) -> Tensor:
        """Where the entries among the coordinates in each row of ``index`` ``(U, k)`` lie, ``(U, k, k)``."""
        count, width = index.shape
        length = max(1, PORTION // max(1, width**2))
        parts = [self._place(part.unsqueeze(-1), part.unsqueeze(-2)) for part in index.split(length)]
        found = torch.cat(parts) if parts else index.new_empty(count, width, width)
        return found.int() if self.total < 2**31 else found  # half the memory

    def _place(self, i: Tensor, j: Tensor) -> Tensor:
        """Place of the pairs ``(i, j)``: in the panel of whichever is eliminated first."""
        i, j = torch.broadcast_tensors(i, j)
        swap = self.turn[j] < self.turn[i]
        first, other = torch.where(swap, j, i), torch.where(swap, i, j)
        block = self.block[first]
        column = torch.where(block == self.block[other], self.row[other], self._column(block, other))
        return self.base[block] + self.row[first] * self.width[block] + column

    def _column(self, block: Tensor, other: Tensor) -> Tensor:
        if not len(self.border_key):
            return torch.zeros_like(other)
        key = block * (self.size + 1) + other
        found = torch.searchsorted(self.border_key, key).clamp(max=len(self.border_key) - 1)  # clamp: past the end
        known = (self.border_key[found] == key) | (block == self.block[other]) | (other == self.size)
        assert bool(known.all()), "an entry of the pattern has no place"
        return torch.where(self.border_key[found] == key, self.border_column[found], self.width[block] - 1)


def layout(order: Order, size: int) -> PanelLayout:
    """The places of all entries, given who is eliminated when."""
    device = order.rest.device
    fronts = [front for level in order.levels for front in level]
    counts = torch.tensor([1, *(len(front.own) for front in fronts)], device=device)
    widths = torch.tensor([len(order.rest) + 1, *(_width(front) for front in fronts)], device=device)
    owns = torch.tensor([len(order.rest) + 1, *(front.own.shape[-1] for front in fronts)], device=device)
    width, own = widths.repeat_interleave(counts), owns.repeat_interleave(counts)
    room = width * own
    turn, block, row = (torch.zeros(size + 1, dtype=torch.long, device=device) for _ in range(3))
    turn[order.rest], turn[size] = len(order.levels), len(order.levels) + 1
    row[order.rest], row[size] = torch.arange(len(order.rest), device=device), len(order.rest)
    numbers = torch.arange(len(width), device=device).split(counts.tolist())[1:]
    depths = [number for number, level in enumerate(order.levels) for _ in level]
    for front, number, level in zip(fronts, numbers, depths, strict=True):
        turn[front.own], block[front.own] = level, number.unsqueeze(-1)
        row[front.own] = torch.arange(front.own.shape[-1], device=device)
    key, column = _borders(fronts, numbers, size, device)
    return PanelLayout(size, int(room.sum()), turn, block, row, room.cumsum(0) - room, width, own, key, column)


def _width(front: Fronts) -> int:
    return front.own.shape[-1] + front.border.shape[-1]


def _borders(
    fronts: list[Fronts], numbers: tuple[Tensor, ...], size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    keys, columns = [torch.empty(0, dtype=torch.long, device=device)], [torch.empty(0, dtype=torch.long, device=device)]
    for front, number in zip(fronts, numbers, strict=True):
        real = front.border < size
        column = front.own.shape[-1] + torch.arange(front.border.shape[-1], device=device)
        keys.append((number.unsqueeze(-1) * (size + 1) + front.border)[real])
        columns.append(column.expand_as(front.border)[real])
    key, columns_ = torch.cat(keys), torch.cat(columns)
    order = key.argsort()
    return key[order], columns_[order]
