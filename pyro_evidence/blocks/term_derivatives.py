r"""First and second derivatives of every term of a density at the nodes of all blocks, each in its own coordinates.

A term sees few coordinates, so that a few passes give the derivatives of all terms, however many coordinates blocks
share: one for each colour of :class:`Second` and one for each pair of colours.  Of data that see latents through one
predictor they are taken of that, :math:`\partial_{ab} \ell = \ell' \eta_{ab} + \ell'' \eta_a \eta_b`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.blocks.partition import Partition
from pyro_evidence.blocks.terms import BlockDensity, Terms
from pyro_evidence.numerics import batched
from pyro_evidence.numerics.derivatives import generic_directions, pullback, pullbacks
from pyro_evidence.numerics.linalg import relative_rounding
from pyro_evidence.program.predictors import LikelihoodTerm
from pyro_evidence.structure.factor_cells import by_width
from pyro_evidence.structure.factor_derivatives import Second


@dataclass(frozen=True)
class Family:
    """Some terms of a density that are differentiated together.

    :ivar parts: name, positions in it (None for all), and coordinates ``(F, k)``.
    :ivar slot: how they see the latents, where that is one predictor each.
    """

    density: BlockDensity
    parts: tuple[tuple[str, Tensor | None, Tensor], ...]
    slot: LikelihoodTerm | None = None

    @cached_property
    def second(self) -> Second:
        """The colours of the coordinates."""
        return Second(self.density.partition.size, tuple(index for _, _, index in self.parts))

    @cached_property
    def owner(self) -> Tensor:
        """The block of each term, ``(F,)``."""
        owner = self.density.partition.owner
        return torch.cat([owner[n] if rows is None else owner[n][rows] for n, rows, _ in self.parts])

    @cached_property
    def own(self) -> Tensor:
        """The place among those of blocks of the coordinate of each colour, ``(C, F)``; past the end: none."""
        num = len(self.density.partition.own)
        return torch.where(self._place < num, self._place, num)

    @cached_property
    def shared(self) -> Tensor:
        """The same among the shared ones, ``(C, F)``."""
        p = self.density.partition
        place, num = self._place - len(p.own), len(p.shared)
        return torch.where((place >= 0) & (place < num), place, num)

    @cached_property
    def member(self) -> Tensor:
        """Which coordinate of its block that is, ``(C, F)``; past the end: none."""
        p = self.density.partition
        each = [torch.arange(f.shape[-1], device=f.device).repeat(len(f)) for f in p.fronts]
        return torch.cat([*each, p.own.new_full((1,), p.width)])[self.own]

    @cached_property
    def _place(self) -> Tensor:
        """Where the coordinate of each colour stands among all, ``(C, F)``; past the end: none."""
        p, colours = self.density.partition, self.second.colours
        columns = []
        for _, _, index in self.parts:
            place = index.new_full((len(index), self.second.num_colours), p.size)
            columns.append(place.scatter(1, colours[index], p.place[index]))
        return torch.cat(columns).mT.contiguous()

    def derivatives(self, u: Tensor, theta: Tensor, create_graph: bool) -> Iterator[Tensor]:
        """First derivatives along each colour, then second ones along each pair of colours, ``(R, F)`` each.

        :param u: rows ``(R, D)`` that require a gradient.
        """
        x = self._values(u, theta)
        along = self.second.firsts(x, u)
        if self.slot is None:
            yield from along
            yield from self.second.seconds(along, u, create_graph)
            return
        eta = x if create_graph else x.detach().requires_grad_()
        value = likelihood(self.density, self.slot, theta)(eta)
        first = pullback(value.sum(), eta, create_graph=True)
        for each in along:
            yield first * each
        second = pullback(first.sum(), eta, create_graph=create_graph)
        for (a, b), bent in zip(self.second.pairs, self.second.seconds(along, u, create_graph), strict=True):
            yield first * bent + second * along[a] * along[b]

    def _values(self, u: Tensor, theta: Tensor) -> Tensor:
        """The terms at rows, ``(R, F)``, or the predictors through which they see the latents."""
        density, slot = self.density, self.slot
        if slot is not None:
            return predictors(density, slot, u, theta)
        found = density.cells(u, theta, tuple(dict.fromkeys(n.split("+")[0].split(", ")[0] for n, _, _ in self.parts)))
        return torch.cat([found[n] if chosen is None else found[n][:, chosen] for n, chosen, _ in self.parts], -1)


def predictors(density: BlockDensity, slot: LikelihoodTerm, u: Tensor, theta: Tensor) -> Tensor:
    """The predictors of a site's data at rows ``(R, D)``, ``(R, N)``."""
    return density.by_rows(lambda row: slot.blocks(density.joint.trace(row, theta)).squeeze(-1), u)


def likelihood(density: BlockDensity, slot: LikelihoodTerm, theta: Tensor) -> Callable[[Tensor], Tensor]:
    """The log likelihood of each datum, ``(R, N)``, as a function of their predictors."""
    each = slot.log_likelihoods(density.joint.trace(density.joint.initial_u, theta))
    return lambda eta: each(slot.layout.natural(eta.unsqueeze(-1).to(density.joint.dtype))).double()


def families(density: BlockDensity) -> list[Family]:
    """All terms that see a coordinate: those of each site with one predictor a datum by themselves."""
    if density.families:
        return density.families
    rest: list[tuple[str, Tensor | None, Tensor]] = []
    slots = {} if density.joint.discrete else {slot.site: slot for slot in density.slots}
    for name, table in density.partition.touched.items():
        if density.names is None or any(part.split(", ")[0] in density.names for part in name.split("+")):
            parts = tuple((name, rows, index) for rows, index in by_width(table))
            alone = name in slots and len(parts) == 1 and parts[0][1] is None and _is_all(density, slots[name])
            if alone:
                density.families.append(Family(density, parts, slots[name]))
            else:
                rest += parts
    if rest:
        density.families.append(Family(density, tuple(rest)))
    return density.families


def _is_all(density: BlockDensity, slot: LikelihoodTerm) -> bool:
    """Whether each datum of a site sees the latents through one predictor of its own, at a point without pattern."""
    joint = density.joint
    if slot.mixture is not None or slot.layout.num_coupled != 1:
        return False
    u, theta = 0.5 * generic_directions(1, joint.latents.size, joint.initial_u), joint.initial_theta
    with torch.no_grad():
        found = likelihood(density, slot, theta)(predictors(density, slot, u, theta))
        expected = density.cells(u, theta, (slot.site,))[slot.site]
    close = relative_rounding(joint.dtype)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=close, atol=close)


@dataclass(frozen=True)
class TermDerivatives:
    """Of some terms at rows ``(Q, D)``.

    :ivar slopes: along each colour, ``(C, Q, F)``.
    :ivar seconds: along each pair of colours, ``(P, Q, F)``.
    """

    family: Family
    slopes: Tensor
    seconds: Tensor

    def slope_of_blocks(self) -> Tensor:
        """First derivatives in the blocks' own coordinates, ``(Q, n)``."""
        total = self.slopes.new_zeros(self.slopes.shape[1], len(self._p.own) + 1)
        for place, slope in zip(self.family.own, self.slopes, strict=True):
            total = total.index_add(1, place, slope)
        return total[:, :-1]

    def slope_of_shared(self) -> Tensor:
        """First derivatives of each block in shared coordinates, and last those of no block, ``(Q, G + 1, P)``."""
        num, size = self._p.num_blocks + 1, len(self._p.shared) + 1
        total = self.slopes.new_zeros(self.slopes.shape[1], num * size)
        for place, slope in zip(self.family.shared, self.slopes, strict=True):
            if bool((place < size - 1).any()):
                total = total.index_add(1, self.family.owner * size + place, slope)
        return total.reshape(-1, num, size)[..., :-1]

    def second_of_shared(self, share: Tensor) -> Tensor:
        """Second derivatives in shared coordinates, nodes weighed by ``share`` ``(Q, G + 1)``, ``(P, P)``."""
        shared, size = self.family.shared, len(self._p.shared)
        return self._second(share, shared, size, shared, size)

    def second_beside(self, share: Tensor) -> Tensor:
        """Second derivatives between blocks and shared coordinates, ``(n, P)``."""
        return self._second(share, self.family.own, len(self._p.own), self.family.shared, len(self._p.shared))

    def second_of_blocks(self, share: Tensor) -> Tensor:
        """Second derivatives between own coordinates and each member of their block, ``(n, d)``."""
        return self._second(share, self.family.own, len(self._p.own), self.family.member, self._p.width)

    @property
    def _p(self) -> Partition:
        return self.family.density.partition

    def _second(self, share: Tensor, rows: Tensor, num_rows: int, columns: Tensor, num_columns: int) -> Tensor:
        """A matrix of second derivatives, rows and columns of each term by colour ``(C, F)``."""
        total = self.seconds.new_zeros((num_rows + 1) * (num_columns + 1))
        weight = share[:, self.family.owner]
        in_rows, in_columns = (
            (place < num).any(1).tolist() for place, num in ((rows, num_rows), (columns, num_columns))
        )
        for (a, b), second in zip(self.family.second.pairs, self.seconds, strict=True):
            ways = [(i, j) for i, j in {(a, b), (b, a)} if in_rows[i] and in_columns[j]]
            each = (weight * second).sum(0) if ways else second
            for i, j in ways:
                total = total.index_add(0, rows[i] * (num_columns + 1) + columns[j], each)
        return total.reshape(num_rows + 1, num_columns + 1)[:-1, :-1]


def by_terms(density: BlockDensity) -> bool:
    """Whether the derivatives of single terms take fewer passes than there are shared coordinates."""
    num = len(density.partition.shared)
    if num < 2 or not density.partition.touched:
        return False
    return sum(len(family.second.pairs) for family in families(density)) < num


def term_derivatives(terms: Terms, rows: Tensor, shared: Tensor) -> list[TermDerivatives]:
    """At blocks ``(Q, n)`` and shared coordinates ``(P,)``; their own derivatives are for one reverse pass."""
    u = terms.density.whole(rows, shared)
    return [TermDerivatives(each, *_Orders.apply(u, terms.theta, each)) for each in families(terms.density)]


class _Orders(torch.autograd.Function):
    """:meth:`Family.derivatives` in chunks of rows, evaluated again on the way back so that no graph is held."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, theta: Tensor, family: Family) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(u, theta)
        ctx.family = family
        ctx.set_materialize_grads(False)
        num, start = family.second.num_colours, 0
        found = u.new_empty(num + len(family.second.pairs), len(u), len(family.owner))
        for part in _chunks(family, u):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                for into, each in zip(found, family.derivatives(leaf, theta.detach(), False), strict=True):
                    into[start : start + len(part)] = each.detach()
            start += len(part)
        return found[:num], found[num:]

    @staticmethod
    def backward(ctx: Any, *by: Tensor | None) -> tuple[Tensor, Tensor, None]:
        (u, theta), by_u, start = ctx.saved_tensors, [], 0
        by_theta = torch.zeros_like(theta)
        for part in _chunks(ctx.family, u):
            chosen = [None if x is None else x[:, start : start + len(part)] for x in by]
            of_part, more = _pulled_back(ctx.family, part, theta, *chosen)
            by_u.append(of_part)
            by_theta, start = by_theta + more, start + len(part)
        return torch.cat(by_u), by_theta, None


def _pulled_back(
    family: Family, u: Tensor, theta: Tensor, by_slopes: Tensor | None, by_seconds: Tensor | None
) -> list[Tensor]:
    """Derivatives in ``u`` and ``theta`` of first and second derivatives, weighed and added up."""
    u, theta = u.detach().requires_grad_(), theta.detach().requires_grad_()
    num = family.second.num_colours
    with torch.enable_grad():
        found = family.derivatives(u, theta, True)
        pairs = [] if by_slopes is None else list(zip(islice(found, num), by_slopes, strict=True))
        if by_seconds is not None:
            pairs += zip(islice(found, 0 if pairs else num, None), by_seconds, strict=True)
        total = torch.stack([(x * weight).sum() for x, weight in pairs]).sum()
        return pullbacks(total, u, theta)


def _chunks(family: Family, u: Tensor) -> Sequence[Tensor]:
    """Rows that are differentiated together: each derivative keeps about as much as the run that it is of."""
    kept = family.density.joint.row_bytes or batched.BATCH_BYTES
    return u.split(max(1, batched.BATCH_BYTES // max(1, kept * (1 + len(family.second.pairs)))))
