"""Linear predictors that see few latents each: ``J`` row by row, no ``(N, C, D)`` array anywhere."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyro_evidence.numerics.linear_predictor import Layout
from pyro_evidence.program.predictors import Slot

CHUNK = 2**22  # numbers of a (rows, k, k) array that may be held at a time


@dataclass(frozen=True)
class SparseRows:
    """``J`` of ``eta = J u + c``: ``N`` data of ``C`` elements that see ``k`` coordinates."""

    index: Tensor  # (N, k) different coordinates
    value: Tensor  # (N, C, k)
    size: int  # D

    @cached_property
    def _columns(self) -> tuple[Tensor, Tensor]:
        """Which columns hold one coordinate for all data, and which do not."""
        same = (self.index == self.index[:1]).all(0)
        return same.nonzero().squeeze(-1), (~same).nonzero().squeeze(-1)

    def product(self, u: Tensor) -> Tensor:
        """``J u`` of rows ``(R, D)``, shape ``(R, N, C)``."""
        shared, own = self._columns
        total = torch.einsum("rk,nck->rnc", u[:, self.index[0, shared]], self.value[..., shared])
        for j in own.tolist():
            total = total + u.index_select(1, self.index[:, j]).unsqueeze(-1) * self.value[..., j]
        return total

    def back(self, slope: Tensor) -> Tensor:
        """``J' s`` for ``s`` ``(N, C)``, shape ``(D,)``."""
        shared, own = self._columns
        each = torch.einsum("nc,nck->nk", slope, self.value) if self.value.shape[1] > 1 else slope * self.value[:, 0]
        total = slope.new_zeros(self.size)
        total.index_add_(0, self.index[0, shared], each[:, shared].sum(0))
        for j in own.tolist():
            total.index_add_(0, self.index[:, j], each[:, j])
        return total

    @cached_property
    def _unique(self) -> tuple[Tensor, Tensor]:
        """The different rows of ``index``, and which of them each datum has."""
        own = self.index[:, self._columns[1]]
        key = _key(own)
        _, owner = key.unique(return_inverse=True)
        first = torch.zeros(int(owner.max()) + 1, dtype=torch.long, device=owner.device)
        first[owner] = torch.arange(len(owner), device=owner.device)
        return self.index[first], owner

    @property
    def touched(self) -> Tensor:
        """The coordinates of each sum of data that see the same, ``(F, k)``."""
        return self._unique[0]

    def elements(self, B: Tensor) -> Tensor:
        """``sum J_n' B_n J_n`` over the data that see the same coordinates, ``(F, k, k)``.

        :param B: ``(N, C, C)``.
        """
        index, owner = self._unique
        total = self.value.new_zeros(*index.shape, index.shape[-1], dtype=torch.float64)
        for rows in self._chunks():
            J = self.value[rows]
            total.index_add_(0, owner[rows], (J.mT @ (B[rows] @ J)).double())
        return total

    def sandwiched(self, weights: Tensor) -> Tensor:
        """``J_n W_f J_n'``, with ``f`` the sum that datum ``n`` is in, ``(N, C, C)``.

        :param weights: ``(F, k, k)``.
        """
        owner = self._unique[1]
        return torch.cat([self.value[r] @ weights[owner[r]] @ self.value[r].mT for r in self._chunks()])

    def _chunks(self) -> Iterator[slice]:
        size = max(1, CHUNK // max(1, self.index.shape[-1] ** 2))
        return (slice(start, start + size) for start in range(0, len(self.index), size))


def _key(own: Tensor) -> Tensor:
    """One number for each row, equal where the rows are."""
    key = own.new_zeros(len(own))
    for column in own.unbind(-1):
        key = key * (int(column.max()) + 1) + column
        if int(key.max()) >= 2**31:
            key = key.unique(return_inverse=True)[1]
    return key


@dataclass(frozen=True)
class SparseLinear:
    """One observed site that sees the latents only through ``eta = J u + c``, ``c`` free of ``u``; ``J`` sparse."""

    slot: Slot
    rows: SparseRows

    @property
    def layout(self) -> Layout:
        """How the elements of ``eta`` couple."""
        return self.slot.layout

    def eta(self, u: Tensor, offset: Tensor) -> Tensor:
        """Predictors of rows ``(R, D)`` with ``c = offset``, blocks ``(R, N, C)``."""
        return self.rows.product(u) + offset

    def reach(self, u: Tensor) -> Tensor:
        """``|J| |u|`` for one row ``(D,)``, the size of what each predictor is summed from, ``(N, C)``."""
        return SparseRows(self.rows.index, self.rows.value.abs(), self.rows.size).product(u.abs().unsqueeze(0))[0]
