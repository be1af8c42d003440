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
from pyro_evidence.structure.factor_density import Second


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
        density, names = self.density, dict.fromkeys(n.split("+")[0].split(", ")[0] for n, _, _ in self.parts)
        if self.slot is None:
            found = density.cells(u, theta, tuple(names))
            x = torch.cat([found[n] if rows is None else found[n][:, rows] for n, rows, _ in self.parts], -1)
        else:
            x = predictors(density, self.slot, u, theta)
        along = self.second.firsts(x, u)
        if self.slot is None:
            yield from along
            yield from self.second.seconds(along, u, create_graph)
            return
        eta = x if create_graph else x.detach().requires_grad_()
        value = likelihood(density, self.slot, theta)(eta)
        first = pullback(value.sum(), eta, create_graph=True)
        for each in along:
            yield first * each
        second = pullback(first.sum(), eta, create_graph=create_graph)
        for (a, b), bent in zip(self.second.pairs, self.second.seconds(along, u, create_graph), strict=True):
            yield first * bent + second * along[a] * along[b]


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
    """Derivatives of all terms at nodes ``(Q, D)``, added up, nodes weighed.

    :ivar mean: first ones of each block, and last of no block, along the path, ``(G + 1, P)``.
    :ivar square: products of two of these at one node, of all blocks, ``(P, P)``.
    :ivar shared: second ones in shared coordinates, ``(P, P)``.
    :ivar beside: the same between blocks and shared coordinates, ``(n, P)``.
    :ivar within: the same between own coordinates and each member of their block, ``(n, d)``.
    """

    mean: Tensor
    square: Tensor
    shared: Tensor
    beside: Tensor
    within: Tensor


def _summed(
    density: BlockDensity, u: Tensor, theta: Tensor, share: Tensor, follows: Tensor, create_graph: bool
) -> list[Tensor]:
    """The fields of :class:`TermDerivatives`; without a graph, ``u`` still requires a gradient."""
    p, (num_nodes, size) = density.partition, share.shape
    n, num = len(p.own), len(p.shared)
    slopes = share.new_zeros(num_nodes, n + 1), share.new_zeros(num_nodes, size * (num + 1))
    totals = [share.new_zeros((r + 1) * (c + 1)) for r, c in ((num, num), (n, num), (n, p.width))]
    for family in families(density):
        derivatives = family.derivatives(u, theta, create_graph)
        _add(family, derivatives if create_graph else (x.detach() for x in derivatives), share, slopes, totals)
    of_blocks, of_shared = slopes[0][:, :-1, None], slopes[1].reshape(num_nodes, size, num + 1)[..., :-1]
    each = of_shared.index_add(1, p.block, of_blocks * follows)
    weighted = share.unsqueeze(-1) * each
    square = weighted[:, :-1].flatten(0, 1).mT @ each[:, :-1].flatten(0, 1)
    wholes = [total.reshape(-1, c + 1)[:-1, :-1] for total, c in zip(totals, (num, num, p.width), strict=True)]
    return [weighted.sum(0), square, *wholes]


def _add(
    family: Family, derivatives: Iterator[Tensor], share: Tensor, slopes: tuple[Tensor, Tensor], totals: list[Tensor]
) -> None:
    """One family's, to the first derivatives of blocks and of what they share, and to sums of second ones, flat."""
    p, second, weight = family.density.partition, family.second, share[:, family.owner]
    n, num = len(p.own), len(p.shared)
    for own, shared, slope in zip(family.own, family.shared, islice(derivatives, second.num_colours), strict=True):
        slopes[0].scatter_add_(1, own.expand_as(slope), slope)
        if bool((shared < num).any()):
            slopes[1].scatter_add_(1, (family.owner * (num + 1) + shared).expand_as(slope), slope)
    sides = [(family.shared, num, family.shared, num), (family.own, n, family.shared, num)]
    sides.append((family.own, n, family.member, p.width))
    met = [((rows < r).any(1).tolist(), (columns < c).any(1).tolist()) for rows, r, columns, c in sides]
    for (a, b), found in zip(second.pairs, derivatives, strict=True):
        each = (weight * found).sum(0)
        for k, (rows, _, columns, num_columns) in enumerate(sides):
            for i, j in {(a, b), (b, a)}:
                if met[k][0][i] and met[k][1][j]:
                    totals[k].index_add_(0, rows[i] * (num_columns + 1) + columns[j], each)


def by_terms(density: BlockDensity) -> bool:
    """Whether the derivatives of single terms take fewer passes than there are shared coordinates."""
    num = len(density.partition.shared)
    if num < 2 or not density.partition.touched:
        return False
    return sum(len(family.second.pairs) for family in families(density)) < num


def term_derivatives(terms: Terms, rows: Tensor, shared: Tensor, share: Tensor, follows: Tensor) -> TermDerivatives:
    """At blocks ``(Q, n)`` and shared coordinates ``(P,)``; their own derivatives are for one reverse pass.

    :param share: weights of nodes in each block, and last of what belongs to none, ``(Q, G + 1)``.
    :param follows: the path along which blocks follow shared coordinates, ``(n, P)``.
    """
    u = terms.density.whole(rows, shared)
    return TermDerivatives(*_Sums.apply(u, terms.theta, share, follows, terms.density))


class _Sums(torch.autograd.Function):
    """:func:`_summed` in chunks of nodes, evaluated again on the way back so that no graph is held."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, theta: Tensor, share: Tensor, follows: Tensor, density: BlockDensity
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(u, theta, share, follows)
        ctx.density = density
        ctx.set_materialize_grads(False)
        sums = list[Tensor]()
        for part, weights in _chunks(density, u, share):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                found = _summed(density, leaf, theta.detach(), weights.detach(), follows.detach(), False)
            sums = [x.add_(y) for x, y in zip(sums, found, strict=True)] if sums else found
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *by: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        (u, theta, share, follows), of_rows = ctx.saved_tensors, list[list[Tensor]]()
        totals = [torch.zeros_like(theta), torch.zeros_like(follows)]
        for part in _chunks(ctx.density, u, share):
            leaves = [x.detach().requires_grad_() for x in (*part, theta, follows)]
            with torch.enable_grad():
                found = _summed(ctx.density, leaves[0], leaves[2], leaves[1], leaves[3], True)
                total = torch.stack([(x * w).sum() for x, w in zip(found, by, strict=True) if w is not None]).sum()
                *own, by_theta, by_follows = pullbacks(total, leaves)
            of_rows.append(own)
            totals = [totals[0] + by_theta, totals[1] + by_follows]
        by_u, by_share = (torch.cat(parts) for parts in zip(*of_rows, strict=True))
        return by_u, totals[0], by_share, totals[1], None


def _chunks(density: BlockDensity, u: Tensor, share: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Nodes that are differentiated together: each derivative keeps about as much as the run that it is of.

    Slopes of blocks in shared coordinates and what is made of them are four tables more, few of them filled perhaps.
    """
    kept = density.joint.row_bytes or batched.BATCH_BYTES
    kept *= 1 + sum(len(family.second.pairs) for family in families(density))
    size = max(1, batched.BATCH_BYTES // max(1, kept + 4 * 8 * share.shape[1] * len(density.partition.shared)))
    return zip(u.split(size), share.split(size), strict=True)
