r"""First and second derivatives of every term of a density at the nodes of all blocks, each in its own coordinates.

A term sees few coordinates, so that a few passes give the derivatives of all terms, however many coordinates blocks
share: one for each colour of :class:`Second` and one for each pair of colours.  Of data that see latents through one
predictor they are taken of that, :math:`\partial_{ab} \ell = \ell' \eta_{ab} + \ell'' \eta_a \eta_b`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor

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
    """Derivatives of all terms at nodes ``(Q, D)``, added up.

    :ivar of_blocks: first ones in the blocks' own coordinates, ``(Q, n)``.
    :ivar of_shared: those of each block, and last of no block, in shared coordinates, ``(Q, G + 1, P)``.
    :ivar shared: second ones in shared coordinates, nodes weighed, ``(P, P)``.
    :ivar beside: the same between blocks and shared coordinates, ``(n, P)``.
    :ivar within: the same between own coordinates and each member of their block, ``(n, d)``.
    """

    of_blocks: Tensor
    of_shared: Tensor
    shared: Tensor
    beside: Tensor
    within: Tensor


def _summed(family: Family, derivatives: Iterator[Tensor], share: Tensor) -> list[Tensor]:
    """The fields of :class:`TermDerivatives` for one family, from what :meth:`Family.derivatives` gives.

    :param share: weights of nodes in each block, ``(Q, G + 1)``.
    """
    p, second, weight = family.density.partition, family.second, share[:, family.owner]
    n, num = len(p.own), len(p.shared)
    of_blocks, of_shared = share.new_zeros(len(share), n + 1), share.new_zeros(len(share), share.shape[1] * (num + 1))
    for own, shared, slope in zip(family.own, family.shared, islice(derivatives, second.num_colours), strict=True):
        of_blocks = of_blocks.index_add(1, own, slope)
        if bool((shared < num).any()):
            of_shared = of_shared.index_add(1, family.owner * (num + 1) + shared, slope)
    sides = [(family.shared, num, family.shared, num), (family.own, n, family.shared, num)]
    sides.append((family.own, n, family.member, p.width))
    totals = [share.new_zeros((num_rows + 1) * (num_columns + 1)) for _, num_rows, _, num_columns in sides]
    met = [((rows < r).any(1).tolist(), (columns < c).any(1).tolist()) for rows, r, columns, c in sides]
    for (a, b), found in zip(second.pairs, derivatives, strict=True):
        each = (weight * found).sum(0)
        for k, (rows, _, columns, num_columns) in enumerate(sides):
            for i, j in {(a, b), (b, a)}:
                if met[k][0][i] and met[k][1][j]:
                    totals[k] = totals[k].index_add(0, rows[i] * (num_columns + 1) + columns[j], each)
    wholes = [total.reshape(-1, c + 1)[:-1, :-1] for total, (_, _, _, c) in zip(totals, sides, strict=True)]
    return [of_blocks[:, :-1], of_shared.reshape(*share.shape, num + 1)[..., :-1], *wholes]


def by_terms(density: BlockDensity) -> bool:
    """Whether the derivatives of single terms take fewer passes than there are shared coordinates."""
    num = len(density.partition.shared)
    if num < 2 or not density.partition.touched:
        return False
    return sum(len(family.second.pairs) for family in families(density)) < num


def term_derivatives(terms: Terms, rows: Tensor, shared: Tensor, share: Tensor) -> TermDerivatives:
    """At blocks ``(Q, n)`` and shared coordinates ``(P,)``; their own derivatives are for one reverse pass.

    :param share: weights of nodes in each block, and last of what belongs to none, ``(Q, G + 1)``.
    """
    u = terms.density.whole(rows, shared)
    found = [_Sums.apply(u, terms.theta, share, each) for each in families(terms.density)]
    return TermDerivatives(*(torch.stack(parts).sum(0) for parts in zip(*found, strict=True)))


class _Sums(torch.autograd.Function):
    """:func:`_summed` in chunks of nodes, evaluated again on the way back so that no graph is held."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, theta: Tensor, share: Tensor, family: Family) -> tuple[Tensor, ...]:
        ctx.save_for_backward(u, theta, share)
        ctx.family = family
        ctx.set_materialize_grads(False)
        slopes, seconds = list[list[Tensor]](), list[Tensor]()
        for part, weights in _chunks(family, u, share):
            with torch.enable_grad():
                every = family.derivatives(part.detach().requires_grad_(), theta.detach(), False)
                found = [x.detach() for x in _summed(family, (x.detach() for x in every), weights.detach())]
            slopes.append(found[:2])
            seconds = [x + y for x, y in zip(seconds, found[2:], strict=True)] if seconds else found[2:]
        return *(torch.cat(parts) for parts in zip(*slopes, strict=True)), *seconds

    @staticmethod
    def backward(ctx: Any, *by: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
        (u, theta, share), of_rows, start = ctx.saved_tensors, list[list[Tensor]](), 0
        by_theta = torch.zeros_like(theta)
        for part in _chunks(ctx.family, u, share):
            rows = slice(start, start + len(part[0]))
            weights = [x if x is None or i > 1 else x[rows] for i, x in enumerate(by)]
            leaves = [x.detach().requires_grad_() for x in (*part, theta)]
            with torch.enable_grad():
                found = _summed(ctx.family, ctx.family.derivatives(leaves[0], leaves[2], True), leaves[1])
                total = torch.stack([(x * w).sum() for x, w in zip(found, weights, strict=True) if w is not None]).sum()
                *own, more = pullbacks(total, *leaves)
            of_rows.append(own)
            by_theta, start = by_theta + more, rows.stop
        by_u, by_share = (torch.cat(parts) for parts in zip(*of_rows, strict=True))
        return by_u, by_theta, by_share, None


def _chunks(family: Family, u: Tensor, share: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Nodes that are differentiated together: each derivative keeps about as much as the run that it is of."""
    kept = family.density.joint.row_bytes or batched.BATCH_BYTES
    size = max(1, batched.BATCH_BYTES // max(1, kept * (1 + len(family.second.pairs))))
    return zip(u.split(size), share.split(size), strict=True)
