"""A sparse precision and a few dense directions more: terms that see many coordinates through a few sums of them.

With ``x = (u, z)``, ``z = B u + c``, and ``K`` minus the second derivatives in ``x``, the precision of ``u`` is
``A = K_uu + K_uz B + B' K_zu + B' K_zz B = S + U C U'`` with ``S = K_uu = L L'`` sparse.  With ``L^-1 U = Q R`` it is
``A = L (I + Q (G - I) Q') L'``, ``G = I + R C R'`` (the matrix determinant lemma; Golub and Van Loan, 2013, 2.1.4).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import NotPositiveDefinite
from pyro_evidence.numerics.linalg import Label, cholesky
from pyro_evidence.precision.blocks import BlockPlan, elimination
from pyro_evidence.precision.dense import Elements, Pattern, Plan, Precision


@dataclass(frozen=True, eq=False)
class LowRankPlan(Plan):
    """Who is eliminated when among the coordinates themselves; the sums are a border of low rank."""

    pattern: Pattern  # of x = (u, z)
    B: Tensor  # (r, D)

    @property
    def size(self) -> int:
        """Coordinates ``D``, sums apart."""
        return self.B.shape[-1]

    @cached_property
    def inner(self) -> Plan:
        """For ``S``."""
        return elimination(Pattern(self.size, tuple(index for index, _ in self._own)))

    @cached_property
    def _own(self) -> list[tuple[Tensor, Tensor]]:
        """For each family the coordinates, a sum's place taken by one of the same factor, and which are no sums."""
        own = [(index, index < self.size) for index in self.pattern.index]
        first = [index.gather(1, keep.byte().argmax(-1, keepdim=True)) % self.size for index, keep in own]
        return [(torch.where(keep, index, one), keep) for (index, keep), one in zip(own, first, strict=True)]

    @property
    def sentence(self) -> str:
        """Sentence on the elimination."""
        num = len(self.B)
        return f"{self.inner.sentence}; {num} sum{'s' * (num > 1)} over many coordinates, as a border of low rank"

    @property
    def num_bytes(self) -> int:
        """That of the sparse part."""
        return self.inner.num_bytes

    def factorise(self, elements: Elements, label: Label) -> "LowRank":
        """Factors of the sparse part, and of what the sums add.

        :raises NotPositiveDefinite: naming a coordinate.
        """
        return self._together(tuple(own.unsqueeze(0) for own in elements), label).row(0)

    def factorise_rows(self, elements: Elements, label: Label) -> Precision:
        """Those of several matrices at a time, where the sparse part is eliminated in blocks."""
        blocks = isinstance(self.inner, BlockPlan)
        return self._together(elements, label) if blocks else super().factorise_rows(elements, label)

    def _together(self, families: Elements, label: Label) -> "LowRank":
        num = len(self.B)
        border = self.B.new_zeros(len(families[0]), (self.size + num) * num)
        for family, (entry, place) in zip(families, self._meets, strict=True):
            border.scatter_add_(1, place.expand(len(family), -1), family.flatten(1)[:, entry].to(border))
        K_uz, K_zz = border.unflatten(-1, (-1, num)).split([self.size, num], -2)
        eye = torch.eye(K_zz.shape[-1]).to(K_zz).expand_as(K_zz)
        C = torch.cat([torch.cat([torch.zeros_like(eye), eye], -1), torch.cat([eye, K_zz], -1)], -2)
        U = torch.cat([K_uz, self.B.mT.expand(len(K_uz), -1, -1)], -1)
        pairs = zip(families, self._inside, strict=True)
        own = tuple(family if bool(inside.all()) else family * inside for family, inside in pairs)
        try:
            inner = self._inner_rows(own, label)
        except NotPositiveDefinite:
            inner, U, C = self._held(own, U, C, label)
        Q, R = torch.linalg.qr(inner.half_solve(U.mT).mT)
        sign = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0.0, -1.0, 1.0).unsqueeze(-2)  # else they jump
        Q, R = Q * sign, R * sign.mT
        G = torch.eye(R.shape[-1]).to(R) + R @ C @ R.mT
        largest = int(U[0, :, : 2 * num].abs().sum(-1).argmax())
        G = cholesky(0.5 * (G + G.mT), "posterior precision A over its sums", lambda _: label(largest))
        return LowRank(self, inner, Q, R, G)

    def _inner_rows(self, families: Elements, label: Label) -> Precision:
        whole = self.inner.factorise_rows(families, label)
        return whole.row(0) if len(families[0]) == 1 else whole

    def _held(self, own: Elements, U: Tensor, C: Tensor, label: Label) -> tuple[Precision, Tensor, Tensor]:
        """With one coordinate of each sum held, and let go again in the border: a field that its sum alone pins."""
        chosen, num = self.B.abs().argmax(-1), len(self.B)
        amount = max(float(own[0].abs().median()), 1.0)
        held = own[0].index_add(1, chosen, amount * own[0].new_ones(len(U), num, 1, 1))
        units = U.new_zeros(self.size, num)
        units[chosen, torch.arange(num)] = 1.0
        more = (-amount * torch.eye(num).to(C)).expand(len(C), num, num)
        C = torch.stack([torch.block_diag(*pair) for pair in zip(C, more, strict=True)])
        U = torch.cat([U, units.expand(len(U), -1, -1)], -1)
        return self._inner_rows((held, *own[1:]), label), U, C

    @cached_property
    def _inside(self) -> list[Tensor]:
        """Which entries of each family are between coordinates, ``(F, k, k)``."""
        return [keep.unsqueeze(-1) & keep.unsqueeze(-2) for _, keep in self._own]

    @cached_property
    def _meets(self) -> list[tuple[Tensor, Tensor]]:
        """Which entries of each family are in the column of a sum, and where those are in the border, flat."""
        found = []
        for index in self.pattern.index:
            row, column = (x.expand(*index.shape, index.shape[-1]) for x in (index.unsqueeze(-1), index.unsqueeze(-2)))
            entry = (column >= self.size).flatten().nonzero().flatten()
            place = row.flatten()[entry] * len(self.B) + column.flatten()[entry] - self.size
            found.append((entry, place))
        return found


@dataclass(frozen=True, eq=False)
class LowRank(Precision):
    """``A = L (I + Q (G G' - I) Q') L'`` by factors of ``S = L L'``, of ``R`` rows; one of them knows its inverse."""

    plan: LowRankPlan
    inner: Any  # the precision S
    Q: Tensor  # (R, D, q) QR factors of L^-1 U
    R: Tensor  # (R, q, q), of which the columns from r to 2 r are those of B'
    G: Tensor  # (R, q, q) lower Cholesky factor of I + R C R'

    def row(self, index: int) -> "LowRank":
        """One of several."""
        return LowRank(self.plan, self.inner.row(index), *(x[index : index + 1] for x in (self.Q, self.R, self.G)))

    @property
    def panels(self) -> tuple[Tensor, ...]:
        """Those of ``S``, and ``G'`` beside its diagonal times ``Q'``."""
        border = torch.cat([self.G.mT, self.G.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * self.Q.mT], -1)
        return (*self.inner.panels, border.unsqueeze(1))

    def with_panels(self, panels: tuple[Tensor, ...]) -> "LowRank":
        """Others of this plan, with ``Q`` made orthonormal again; their inverses are not known."""
        *inner, border = panels
        G, Q = (x.mT for x in border.squeeze(1).split([self.G.shape[-1], self.plan.size], -1))
        Q = Q / G.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        Q = torch.linalg.solve_triangular(torch.linalg.cholesky(Q.mT @ Q), Q.mT, upper=False).mT
        return LowRank(self.plan, self.inner.with_panels(tuple(inner)), Q, self.R[:0], G)

    @cached_property
    def W(self) -> Tensor:
        """``L'^-1 Q`` of one row, ``(D, q)``."""
        return self.inner.unwhiten(self.Q[0].mT).mT

    @property
    def log_det(self) -> Tensor:
        """``log |A|``, shape ``(R,)``."""
        return self.inner.log_det + 2.0 * self.G.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @cached_property
    def _more(self) -> Tensor:
        """``N = G^-1 - I``: the inverse of ``A`` is that of ``S`` and ``W N W'``."""
        return torch.cholesky_inverse(self.G[0]) - torch.eye(self.G.shape[-1]).to(self.G)

    @cached_property
    def variance(self) -> Tensor:
        """Diagonal of ``A^-1``, shape ``(1, D)``."""
        return self.inner.variance + ((self.W @ self._more) * self.W).sum(-1)

    @cached_property
    def log_det_gradient(self) -> Elements:
        """The covariance of ``x = (u, z)`` where factors touch it, per family ``(F, k, k)``."""
        size, num = self.plan.size, len(self.plan.B)
        R, G = self.R[0, :, num : 2 * num], self.G[0]
        half = torch.linalg.solve_triangular(G, R, upper=False)  # (q, r)
        cross = self.W @ torch.linalg.solve_triangular(G.mT, half, upper=True)  # A^-1 B', (D, r)
        whole = torch.cat([cross, half.mT @ half])  # cov(x, z)
        pairs = zip(self.plan.pattern.index, self.plan._own, self.inner.log_det_gradient, strict=True)
        return tuple(self._entries(index, keep, own, whole, size) for index, (_, keep), own in pairs)

    def _entries(self, index: Tensor, keep: Tensor, own: Tensor, whole: Tensor, size: int) -> Tensor:
        place = index.clamp(max=size - 1)  # clamp: a sum, replaced below
        found = own + (self.W @ self._more)[place] @ self.W[place].mT
        if bool(keep.all()):
            return found
        number = (index - size).clamp(min=0)  # clamp: no sum, not used
        by_column = whole[index.unsqueeze(-1), number.unsqueeze(-2)]  # right where the column is a sum
        found = torch.where(keep.unsqueeze(-2), found, by_column)
        return torch.where(keep.unsqueeze(-1), found, by_column.mT)

    def solve(self, b: Tensor) -> Tensor:
        """``A^-1 b`` for each row of ``b``, ``(S, D)``; each by its own where they are several."""
        return self.unwhiten(self._turned(self.inner.half_solve(b.to(self.Q)), transposed=False))

    def unwhiten(self, white: Tensor) -> Tensor:
        """White noise ``(S, D)`` to noise of covariance ``A^-1``."""
        return self.inner.unwhiten(self._turned(white.to(self.Q), transposed=True))

    def whiten(self, rows: Tensor) -> Tensor:
        """Takes :meth:`unwhiten` back."""
        x = self.inner.whiten(rows).view(len(self.Q), -1, self.plan.size)
        part = x @ self.Q
        return (x + (part @ self.G - part) @ self.Q.mT).flatten(0, 1)

    def _turned(self, x: Tensor, transposed: bool) -> Tensor:
        """``(I + Q (F - I) Q')^-1`` or its transposed, of rows, with ``F`` the factor of ``G``."""
        x = x.view(len(self.Q), -1, self.plan.size)
        part = x @ self.Q
        F = self.G.mT if transposed else self.G
        return (x + (torch.linalg.solve_triangular(F, part.mT, upper=transposed).mT - part) @ self.Q.mT).flatten(0, 1)
