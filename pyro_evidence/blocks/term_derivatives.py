r"""First and second derivatives of every term of a density at the nodes of all blocks, each in its own coordinates.

A term sees few coordinates, so that a few passes give the derivatives of all terms, however many coordinates blocks
share: one for each colour of :class:`Second` and one for each pair of colours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.blocks.terms import BlockDensity, Terms
from pyro_evidence.numerics import batched


@dataclass(frozen=True)
class TermDerivatives:
    """Of all terms that see a coordinate, ``F`` of them, at rows ``(Q, D)``.

    :ivar slopes: along each colour, ``(C, Q, F)``.
    :ivar seconds: along each pair of colours, ``(P, Q, F)``.
    """

    density: BlockDensity
    slopes: Tensor
    seconds: Tensor

    def slope_of_blocks(self) -> Tensor:
        """First derivatives in the blocks' own coordinates, ``(Q, n)``."""
        layout, size = self.density.layout, len(self.density.partition.own)
        total = self.slopes.new_zeros(self.slopes.shape[1], size + 1)
        for place, slope in zip(layout.own, self.slopes, strict=True):
            total = total.index_add(1, place, slope)
        return total[:, :-1]

    def slope_of_shared(self) -> Tensor:
        """First derivatives of each block in shared coordinates, and last those of no block, ``(Q, G + 1, P)``."""
        layout, p = self.density.layout, self.density.partition
        num, size = p.num_blocks + 1, len(p.shared) + 1
        total = self.slopes.new_zeros(self.slopes.shape[1], num * size)
        for place, slope in zip(layout.shared, self.slopes, strict=True):
            total = total.index_add(1, layout.owner * size + place, slope)
        return total.reshape(-1, num, size)[..., :-1]

    def second_of_shared(self, share: Tensor) -> Tensor:
        """Second derivatives in shared coordinates, nodes weighed by ``share`` ``(Q, G + 1)``, ``(P, P)``."""
        size = len(self.density.partition.shared)
        return self._second(share, self.density.layout.shared, size, self.density.layout.shared, size)

    def second_beside(self, share: Tensor) -> Tensor:
        """Second derivatives between blocks and shared coordinates, ``(n, P)``."""
        layout, p = self.density.layout, self.density.partition
        return self._second(share, layout.own, len(p.own), layout.shared, len(p.shared))

    def second_of_blocks(self, share: Tensor) -> Tensor:
        """Second derivatives between own coordinates and each member of their block, ``(n, d)``."""
        layout, p = self.density.layout, self.density.partition
        return self._second(share, layout.own, len(p.own), layout.member, p.width)

    def _second(self, share: Tensor, rows: Tensor, num_rows: int, columns: Tensor, num_columns: int) -> Tensor:
        """A matrix of second derivatives, rows and columns of each term by colour ``(C, F)``; the last are none."""
        total = self.seconds.new_zeros((num_rows + 1) * (num_columns + 1))
        weight = share[:, self.density.layout.owner]
        for (a, b), second in zip(self.density.layout.pairs, self.seconds, strict=True):
            each = (weight * second).sum(0)
            for i, j in {(a, b), (b, a)}:
                if bool((rows[i] < num_rows).any()) and bool((columns[j] < num_columns).any()):
                    total = total.index_add(0, rows[i] * (num_columns + 1) + columns[j], each)
        return total.reshape(num_rows + 1, num_columns + 1)[:-1, :-1]


def by_terms(density: BlockDensity) -> bool:
    """Whether the derivatives of single terms take fewer passes than there are shared coordinates."""
    return bool(density.seen) and len(density.second.pairs) < len(density.partition.shared)


def term_derivatives(terms: Terms, rows: Tensor, shared: Tensor) -> TermDerivatives:
    """At blocks ``(Q, n)`` and shared coordinates ``(P,)``; their own derivatives are for one reverse pass."""
    u = terms.density.whole(rows, shared)
    return TermDerivatives(terms.density, *_Orders.apply(u, terms.theta, terms.density))


class _Orders(torch.autograd.Function):
    """:meth:`Second.orders` in chunks of rows, evaluated again on the way back so that no graph is held."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, theta: Tensor, density: BlockDensity) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(u, theta)
        ctx.density = density
        ctx.set_materialize_grads(False)
        found = [density.second.orders(_values(density, theta.detach()), part) for part in _chunks(density, u)]
        return torch.cat([slopes for slopes, _ in found], 1), torch.cat([seconds for _, seconds in found], 1)

    @staticmethod
    def backward(ctx: Any, *by: Tensor | None) -> tuple[Tensor, Tensor, None]:
        (u, theta), density = ctx.saved_tensors, ctx.density
        by_u, by_theta, start = [], torch.zeros_like(theta), 0
        for part in _chunks(density, u):
            weights = [None if b is None else b[:, start : start + len(part)] for b in by]
            leaf, t = part.detach().requires_grad_(), theta.detach().requires_grad_()
            found = density.second.orders_back(_values(density, t), leaf, weights[0], weights[1], (leaf, t))
            by_u.append(found[0])
            by_theta, start = by_theta + found[1], start + len(part)
        return torch.cat(by_u), by_theta, None


def _chunks(density: BlockDensity, u: Tensor) -> Sequence[Tensor]:
    return u.split(max(1, batched.BATCH_BYTES // (density.joint.row_bytes or batched.BATCH_BYTES)))


def _values(density: BlockDensity, theta: Tensor) -> Any:
    def values(u: Tensor) -> tuple[Tensor, ...]:
        found = density.cells(u, theta)
        return tuple(found[n] if chosen is None else found[n][:, chosen] for n, chosen, _ in density.seen)

    return values
