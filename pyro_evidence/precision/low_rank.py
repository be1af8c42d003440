"""A sparse precision and a few dense directions more: terms that see many coordinates through a few sums of them.

With ``x = (u, z)``, ``z = B u + c``, and ``K`` minus the second derivatives in ``x``, the precision of ``u`` is
``A = K_uu + K_uz B + B' K_zu + B' K_zz B = S + U C U'`` with ``S = K_uu = L L'`` sparse.  With ``L^-1 U = Q R`` it is
``A = L (I + Q (G - I) Q') L'``, ``G = I + R C R'`` (the matrix determinant lemma; Golub and Van Loan, 2013, 2.1.4).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyro_evidence.errors import NotPositiveDefinite
from pyro_evidence.numerics.linalg import Label, cholesky
from pyro_evidence.precision.blocks import elimination
from pyro_evidence.precision.dense import Elements, Pattern, Plan, StructuredPrecision


@dataclass(frozen=True)
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
        """For each family the coordinates, a sum's place taken by some coordinate, and which are no sums."""
        own = [index < self.size for index in self.pattern.index]
        pairs = zip(self.pattern.index, own, strict=True)
        return [(torch.where(keep, index, index[:, :1] % self.size), keep) for index, keep in pairs]

    @property
    def sentence(self) -> str:
        """What is eliminated and how."""
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
        K_uz, K_zz = self._border(elements)
        eye = torch.eye(len(K_zz)).to(K_zz)
        C = torch.cat([torch.cat([torch.zeros_like(eye), eye], -1), torch.cat([eye, K_zz], -1)])
        U = torch.cat([K_uz, self.B.mT], -1)
        own = tuple(
            element * (keep.unsqueeze(-1) & keep.unsqueeze(-2))
            for element, (_, keep) in zip(elements, self._own, strict=True)
        )
        try:
            return LowRank(self, self.inner.factorise(own, label), U, C, label)
        except NotPositiveDefinite:
            return self._held(own, U, C, label)

    def _held(self, own: Elements, U: Tensor, C: Tensor, label: Label) -> "LowRank":
        """With one coordinate of each sum held, and let go again in the border: a field that its sum alone pins."""
        chosen = self.B.abs().argmax(-1)
        amount = max(float(own[0].abs().median()), 1.0)
        held = own[0].index_add(0, chosen, amount * torch.ones(len(chosen), 1, 1).to(own[0]))
        units = torch.zeros(self.size, len(chosen)).to(U)
        units[chosen, torch.arange(len(chosen))] = 1.0
        C = torch.block_diag(C, -amount * torch.eye(len(chosen)).to(C))
        return LowRank(self, self.inner.factorise((held, *own[1:]), label), torch.cat([U, units], -1), C, label)

    def _border(self, elements: Elements) -> tuple[Tensor, Tensor]:
        """``K_uz`` ``(D, r)`` and ``K_zz`` ``(r, r)``."""
        num = len(self.B)
        border = self.B.new_zeros(self.size + num, num)
        for index, element in zip(self.pattern.index, elements, strict=True):
            for column, values in zip(index.unbind(-1), element.unbind(-1), strict=True):
                rows = (column >= self.size).nonzero()[:, 0]
                if len(rows):
                    place = index[rows], (column[rows] - self.size).unsqueeze(-1).expand(-1, index.shape[-1])
                    border.index_put_(place, values[rows].to(border), accumulate=True)
        return border.split([self.size, num])


@dataclass(frozen=True)
class LowRank(StructuredPrecision):
    """``A = S + U C U'`` by factors of ``S``; one row."""

    plan: LowRankPlan
    inner: StructuredPrecision  # S
    U: Tensor  # (D, q), of which the columns from r to 2 r are B'
    C: Tensor  # (q, q)
    label: Label

    def __post_init__(self) -> None:
        assert len(self.G)  # whether it is positive definite shows here

    @cached_property
    def QR(self) -> tuple[Tensor, Tensor]:
        """Of ``L^-1 U``, ``(D, q)`` and ``(q, q)``."""
        found = torch.linalg.qr(self._forward(self.U.mT).mT)
        return found.Q, found.R

    @cached_property
    def G(self) -> Tensor:
        """Lower Cholesky factor of ``I + R C R'``, ``(q, q)``."""
        R = self.QR[1]
        G = torch.eye(len(R)).to(R) + R @ self.C @ R.mT
        place = int(self.U[:, : len(self.plan.B) * 2].abs().sum(-1).argmax())
        return cholesky(0.5 * (G + G.mT), "posterior precision A over its sums", lambda _: self.label(place))

    @cached_property
    def W(self) -> Tensor:
        """``L'^-1 Q``, ``(D, q)``."""
        return self.inner.unwhiten(self.QR[0].mT).mT

    @property
    def log_det(self) -> Tensor:
        """``log |A|``, shape ``(1,)``."""
        return self.inner.log_det + 2.0 * self.G.diagonal().log().sum()

    @cached_property
    def _more(self) -> Tensor:
        """``N = G^-1 - I``: the inverse of ``A`` is that of ``S`` and ``W N W'``."""
        return torch.cholesky_inverse(self.G) - torch.eye(len(self.G)).to(self.G)

    @cached_property
    def variance(self) -> Tensor:
        """Diagonal of ``A^-1``, shape ``(1, D)``."""
        return self.inner.variance + ((self.W @ self._more) * self.W).sum(-1)

    @cached_property
    def adjoint(self) -> Elements:
        """The covariance of ``x = (u, z)`` where factors touch it, per family ``(F, k, k)``."""
        size, num = self.plan.size, len(self.plan.B)
        R = self.QR[1][:, num : 2 * num]
        half = torch.linalg.solve_triangular(self.G, R, upper=False)  # (q, r)
        cross = self.W @ torch.linalg.solve_triangular(self.G.mT, half, upper=True)  # A^-1 B', (D, r)
        whole = torch.cat([cross, half.mT @ half])  # cov(x, z)
        pairs = zip(self.plan.pattern.index, self.plan._own, self.inner.adjoint, strict=True)
        return tuple(self._entries(index, keep, own, whole, size) for index, (_, keep), own in pairs)

    def _entries(self, index: Tensor, keep: Tensor, own: Tensor, whole: Tensor, size: int) -> Tensor:
        W = self.W[index.clamp(max=size - 1)]  # clamp: a sum, replaced below
        found = own + W @ self._more @ W.mT
        if bool(keep.all()):
            return found
        number = (index - size).clamp(min=0)  # clamp: no sum, not used
        by_column = whole[index.unsqueeze(-1), number.unsqueeze(-2)]  # right where the column is a sum
        found = torch.where(keep.unsqueeze(-2), found, by_column)
        return torch.where(keep.unsqueeze(-1), found, by_column.mT)

    def covariance(self, coordinates: Tensor) -> Tensor:
        """``A^-1`` among chosen coordinates, ``(c, c)``."""
        W = self.W[coordinates]
        return self.inner.covariance(coordinates) + W @ self._more @ W.mT

    def solve(self, b: Tensor) -> Tensor:
        """``A^-1 b`` for each row of ``b``, ``(R, D)``."""
        return self.unwhiten(self._turned(self._forward(b), transposed=False))

    def unwhiten(self, white: Tensor) -> Tensor:
        """White noise ``(S, D)`` to noise of covariance ``A^-1``."""
        return self.inner.unwhiten(self._turned(white.to(self.U), transposed=True))

    def whiten(self, rows: Tensor) -> Tensor:
        """Takes :meth:`unwhiten` back."""
        x, Q = self.inner.whiten(rows), self.QR[0]
        part = x @ Q
        return x + (part @ self.G - part) @ Q.mT

    def _forward(self, b: Tensor) -> Tensor:
        """``L^-1 b`` of rows."""
        return self.inner.whiten(self.inner.solve(b.to(self.U)))

    def _turned(self, x: Tensor, transposed: bool) -> Tensor:
        """``(I + Q (F - I) Q')^-1`` or its transposed, of rows, with ``F`` the factor of ``G``."""
        Q = self.QR[0]
        part = x @ Q
        F = self.G.mT if transposed else self.G
        return x + (torch.linalg.solve_triangular(F, part.mT, upper=transposed).mT - part) @ Q.mT
