r"""First and second derivatives of every term of a density at the nodes of all blocks, each in its own coordinates.

A term sees few coordinates, so that a few passes give the derivatives of all terms, however many coordinates blocks
share: one for each colour of :class:`Second` and one for each pair of colours.  Of data that see latents through one
predictor they are taken of that, :math:`\partial_{ab} \ell = \ell' \eta_{ab} + \ell'' \eta_a \eta_b`.  Where it is
affine in the coordinates of each block, as an item's discrimination times a person's ability is, so are its
derivatives: they are taken at one node, and moments of :math:`\ell'` and :math:`\ell''` over all nodes do the rest.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_evidence.blocks.partition import Partition
from pyro_evidence.blocks.terms import BlockDensity, Terms
from pyro_evidence.numerics import batched
from pyro_evidence.numerics.derivatives import Forward, generic_directions, pullbacks
from pyro_evidence.numerics.linalg import relative_rounding
from pyro_evidence.program.predictors import LikelihoodTerm
from pyro_evidence.structure.factor_cells import by_width
from pyro_evidence.structure.factor_density import Second

FAR = 16.0  # times a half: standard deviations of a block under a normal prior, where no node has weight
Table = tuple[Tensor | None, ...]  # (Q, F) at nodes; or (F,) at the first, and what steps add; None for zero
Orders = Callable[[Tensor, bool], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Family:
    """Some terms of a density that are differentiated together.

    :ivar parts: name, positions in it (None for all), and coordinates ``(F, k)``.
    :ivar likelihood: how they see the latents, where that is one affine predictor each.
    """

    density: BlockDensity
    parts: tuple[tuple[str, Tensor | None, Tensor], ...]
    likelihood: LikelihoodTerm | None = None

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

    @cached_property
    def places(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """Where the slope along each colour is added: to those of blocks, and to those in shared coordinates, flat."""
        p = self.density.partition
        num = len(p.shared)
        own = [x if bool((x < len(p.own)).any()) else None for x in self.own]
        shared = [self.owner * (num + 1) + x if bool((x < num).any()) else None for x in self.shared]
        return list(zip(own, shared, strict=True))

    @cached_property
    def pair_places(self) -> list[list[tuple[int, Tensor]]]:
        """To which of the tables of :func:`_empty` second derivatives along a pair of colours are added, and where."""
        p, found = self.density.partition, list[list[tuple[int, Tensor]]]()
        n, num = len(p.own), len(p.shared)
        sides = [(self.shared, num, self.shared, num), (self.own, n, self.shared, num)]
        sides.append((self.own, n, self.member, p.width))
        met = [((rows < r).any(1).tolist(), (columns < c).any(1).tolist()) for rows, r, columns, c in sides]
        for a, b in self.second.pairs:
            ways = [(k, i, j) for k in range(3) for i, j in {(a, b), (b, a)} if met[k][0][i] and met[k][1][j]]
            found.append([(k, sides[k][0][i] * (sides[k][3] + 1) + sides[k][2][j]) for k, i, j in ways])
        return found

    def coordinates(self, own: Tensor) -> list[Tensor]:
        """Coordinates of blocks ``(Q, n)``: the first, second, ... of each term's block, ``(Q, F)`` each."""
        padded = torch.nn.functional.pad(own, (0, 1))
        return [padded[:, place] for place in self.density.partition.members[self.owner].unbind(-1)]

    @property
    def is_affine(self) -> bool:
        """Whether predictors are affine in the coordinates of blocks: from a point without pattern, near and far."""
        assert self.likelihood is not None
        p, joint = self.density.partition, self.density.joint
        base, away = 0.5 * generic_directions(2, p.size, joint.initial_u)
        moves = torch.stack([away, -2.0 * away, FAR * away, -FAR * away])[:, p.own]
        with torch.no_grad():
            points = torch.stack([base.index_add(0, p.own, move) for move in moves])
            found = predictors(self.density, self.likelihood, points, joint.initial_theta)
            steps = _steps(predictors(self.density, self.likelihood, self._unit_steps(base), joint.initial_theta))
        close = relative_rounding(joint.dtype)
        return torch.allclose(found.double(), _at(steps, self.coordinates(moves)).double(), rtol=close, atol=close)

    def _unit_steps(self, u: Tensor) -> Tensor:
        """A point ``(D,)``, and it moved by one in the first, second, ... coordinate of all blocks, ``(1 + d, D)``."""
        p = self.density.partition
        steps = [torch.zeros_like(u).index_fill(0, p.own[places[places < len(p.own)]], 1.0) for places in p.members.mT]
        return torch.stack([u, *(u + step for step in steps)])

    @cached_property
    def _zero(self) -> list[list[bool]]:
        """Which parts of :meth:`tables` of affine predictors vanish everywhere: at a point without pattern."""
        joint = self.density.joint
        u = 0.5 * generic_directions(1, self.density.partition.size, joint.initial_u)
        every = self._derivatives(self._unit_steps(u[0]), joint.initial_theta, False)
        return [[not bool(x.any()) for x in _steps(each)] for each in every]

    def tables(self, u: Tensor, theta: Tensor, create_graph: bool, only_beside: bool = False) -> list[Table]:
        """Predictors, or terms, their first derivatives along colours, and second ones along pairs of colours.

        At rows ``(Q, D)``; affine ones at the first row, and what steps of one in the coordinates of blocks add.

        :param only_beside: whether second ones between blocks and what they share are all that is asked for.
        """
        if self.likelihood is None:
            return [(x,) for x in self._derivatives(u, theta, create_graph, only_beside)]
        own = torch.zeros_like(u[0], dtype=torch.bool).index_fill(0, self.density.partition.own, True)
        with torch.enable_grad():
            rows = self._unit_steps(torch.where(own, u[0].detach(), u[0]))
            every = zip(self._derivatives(rows, theta, create_graph), self._zero, strict=True)
            return [tuple(None if no else x for x, no in zip(_steps(each), zero, strict=True)) for each, zero in every]

    def _derivatives(self, u: Tensor, theta: Tensor, create_graph: bool, only_beside: bool = False) -> list[Any]:
        """:meth:`tables` at rows ``(Q, D)``, ``(Q, F)`` each; None for what is not asked for."""
        with torch.enable_grad():
            u = u if create_graph else u.detach().requires_grad_()
            if self.likelihood is None:
                names = dict.fromkeys(n.split("+")[0].split(", ")[0] for n, _, _ in self.parts)
                found = self.density.cells(u, theta, tuple(names))
                x = torch.cat([found[n] if rows is None else found[n][:, rows] for n, rows, _ in self.parts], -1)
            else:
                x = predictors(self.density, self.likelihood, u, theta)
            factors, pairs = Forward(x, u, create_graph=create_graph), self.second.pairs
            if only_beside:
                pairs = [pair for pair, places in zip(pairs, self.pair_places, strict=True) if 1 in dict(places)]
            firsts = [None] * self.second.num_colours if only_beside else self.second.firsts(factors)
            seconds = dict(zip(pairs, self.second.seconds(factors, pairs), strict=True))
            every = [x, *firsts, *map(seconds.get, self.second.pairs)]
        return every if create_graph else [x if x is None else x.detach() for x in every]


def _steps(rows: Tensor) -> tuple[Tensor, ...]:
    """The first of rows ``(1 + d, F)``, and what the others add to it."""
    start, *others = rows.unbind(0)
    return start, *(other - start for other in others)


def _at(table: Table, moves: Sequence[Tensor]) -> Any:
    """A table at nodes, ``(Q, F)``, or ``(F,)`` where all are the same; zero as a number."""
    total: Any = 0.0 if table[0] is None else table[0]
    for move, step in zip(moves, table[1:], strict=True):
        total = total if step is None else total + move * step
    return total


def predictors(density: BlockDensity, likelihood: LikelihoodTerm, u: Tensor, theta: Tensor) -> Tensor:
    """The predictors of a site's data at rows ``(R, D)``, ``(R, N)``."""
    return density.by_rows(lambda row: likelihood.blocks(density.joint.trace(row, theta)).squeeze(-1), u)


def families(density: BlockDensity) -> list[Family]:
    """All terms that see a coordinate: those of each site with one predictor a datum by themselves."""
    if density.families:
        return density.families
    rest: list[tuple[str, Tensor | None, Tensor]] = []
    likelihoods = {} if density.joint.discrete else {likelihood.site: likelihood for likelihood in density.likelihoods}
    for name, table in density.partition.touched.items():
        if density.names is None or any(part.split(", ")[0] in density.names for part in name.split("+")):
            parts = tuple((name, rows, index) for rows, index in by_width(table))
            alone = (
                name in likelihoods and len(parts) == 1 and parts[0][1] is None and _is_all(density, likelihoods[name])
            )
            if alone and (family := Family(density, parts, likelihoods[name])).is_affine:
                density.families.append(family)
            else:
                rest += parts
    if rest:
        density.families.append(Family(density, tuple(rest)))
    return density.families


def _is_all(density: BlockDensity, likelihood: LikelihoodTerm) -> bool:
    """Whether each datum of a site sees the latents through one predictor of its own, at a point without pattern."""
    joint = density.joint
    if likelihood.mixture is not None or likelihood.layout.num_coupled != 1:
        return False
    u, theta = 0.5 * generic_directions(1, joint.latents.size, joint.initial_u), joint.initial_theta
    with torch.no_grad():
        each, eta = (
            likelihood.log_likelihoods(joint.trace(joint.initial_u, theta)),
            predictors(density, likelihood, u, theta),
        )
        found = each(likelihood.layout.natural(eta.unsqueeze(-1).to(joint.dtype))).double()
        expected = density.cells(u, theta, (likelihood.site,))[likelihood.site]
    close = relative_rounding(joint.dtype)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=close, atol=close)


@dataclass(frozen=True, eq=False)
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


class _Sums(NamedTuple):
    """Sums over nodes.  Second derivatives of affine predictors wait for the moments of all of them.

    :ivar mean: as in :class:`TermDerivatives`, and so is ``square``.
    :ivar totals: its last three without affine families, flat, with a place for none.
    :ivar moments: of affine families, those of :func:`_moments`.
    """

    mean: Tensor
    square: Tensor
    totals: list[Tensor]
    moments: list[list[Tensor]]


@dataclass(frozen=True, eq=False)
class _Evaluated:
    """A family at one setting of the hyperparameters and of what blocks share.

    :ivar orders: derivatives of the likelihood in affine predictors; None: terms are differentiated as they stand.
    :ivar tables: of affine predictors; none for others, whose tables are those of each node.
    """

    family: Family
    orders: Orders | None = None
    tables: Sequence[Table] = ()

    @property
    def parts(self) -> list[Tensor]:
        """The parts of tables."""
        return [x for table in self.tables for x in table if x is not None]


@dataclass(frozen=True, eq=False)
class Evaluated:
    """All families at one setting of the hyperparameters ``theta`` and of what blocks share.

    :ivar u: rows, of which the first has what blocks share, and the coordinates of blocks from which nodes move.
    """

    u: Tensor
    theta: Tensor
    families: list[_Evaluated]

    @classmethod
    def of(cls, density: BlockDensity, u: Tensor, theta: Tensor) -> "Evaluated":
        """At the first of rows ``(Q, D)``, or where the last one was if only blocks were elsewhere."""
        known, shared = density.evaluated.get("values"), density.partition.shared
        if known is None or not (torch.equal(known.u[0, shared], u[0, shared]) and torch.equal(known.theta, theta)):
            known = density.evaluated["values"] = cls._made(density, u[:1].detach(), theta.detach(), False)
        return known

    def with_graph(self, density: BlockDensity) -> "Evaluated":
        """Families at this place again, with a graph in leaves of their own."""
        u, theta = (x.clone().requires_grad_() for x in (self.u, self.theta))
        return self._made(density, u, theta, True)

    @classmethod
    def _made(cls, density: BlockDensity, u: Tensor, theta: Tensor, create_graph: bool) -> "Evaluated":
        joint, found = density.joint, list[_Evaluated]()
        for family in families(density):
            if family.likelihood is None:
                found.append(_Evaluated(family))
                continue
            with torch.set_grad_enabled(create_graph):
                orders = family.likelihood.orders(joint.trace(joint.initial_u, theta), joint.dtype)
            found.append(_Evaluated(family, orders, family.tables(u, theta, create_graph)))
        return cls(u, theta, found)


def _summed(place: Evaluated, u: Tensor, share: Tensor, follows: Tensor | None, create_graph: bool) -> _Sums:
    """Over nodes ``(Q, D)``, of families as they are at a place."""
    p, (num_nodes, size) = place.families[0].family.density.partition, share.shape
    moves = (u - place.u.detach())[:, p.own]  # of blocks from where affine predictors were evaluated, (Q, n)
    n, num, moments, totals = len(p.own), len(p.shared), list[list[Tensor]](), _empty(p, share)
    slopes = share.new_zeros(num_nodes, n + 1), share.new_zeros(num_nodes, size * (num + 1))
    for each in place.families:
        family, num_colours = each.family, each.family.second.num_colours
        tables = each.tables or family.tables(u, place.theta, create_graph, follows is None)
        own = family.coordinates(moves) if each.tables else []
        weight, first = share[:, family.owner], torch.ones_like(share[:1, :1])
        second = None
        if each.orders is not None:
            first, second = each.orders(_at(tables[0], own), create_graph)
        for table, places in zip(tables[1 : 1 + num_colours], family.places, strict=True):
            slope = None if follows is None else first * _at(table, own)
            for index, total in zip(places, slopes, strict=True):
                if index is not None and slope is not None:
                    total.scatter_add_(1, index.expand(num_nodes, -1), slope.expand(num_nodes, -1))
        found = _moments(weight * first, None if second is None else weight * second, own)
        if each.tables:
            moments.append(found)
        else:
            _add_seconds(family, tables, found, totals)
    if follows is None:
        return _Sums(share.new_zeros(0), share.new_zeros(0), totals, moments)
    of_blocks, of_shared = slopes[0][:, :-1, None], slopes[1].reshape(num_nodes, size, num + 1)[..., :-1]
    along = of_shared.index_add(1, p.block, of_blocks * follows)
    weighted = share.unsqueeze(-1) * along
    square = weighted[:, :-1].flatten(0, 1).mT @ along[:, :-1].flatten(0, 1)
    return _Sums(weighted.sum(0), square, totals, moments)


def _moments(first: Tensor, second: Tensor | None, moves: Sequence[Tensor]) -> list[Tensor]:
    """Sums over nodes of ``first`` ``(Q, F)``, then of it times moves, of ``second``, and of it times two of these.

    Where there is no second, what is given: each node has a table of its own.
    """
    if second is None:
        return [first]
    found = [first.sum(0), *((first * move).sum(0) for move in moves)]
    by = [second, *(second * move for move in moves)]
    found += [x.sum(0) for x in by]
    return found + [(by[1 + k] * moves[j]).sum(0) for k in range(len(moves)) for j in range(k, len(moves))]


def _add_seconds(family: Family, tables: Sequence[Table], moments: Sequence[Tensor], totals: list[Tensor]) -> None:
    """One family's second derivatives, summed over nodes, to those of all."""
    width, num_colours = len(tables[0]), family.second.num_colours
    linear, flat = moments[:width], iter(moments[width:])
    square = {(j, k): next(flat) for j in range(width) for k in range(j, width)} if len(moments) > width else {}
    bent = [
        [_dot([square[min(j, k), max(j, k)] for k in range(width)], table) for j in range(width)] if square else []
        for table in tables[1 : 1 + num_colours]
    ]
    for (a, b), table, places in zip(family.second.pairs, tables[1 + num_colours :], family.pair_places, strict=True):
        parts = [_dot(linear, table), _dot(bent[a], tables[1 + b]) if square else None]
        for part in parts:
            if part is not None:
                each = part if part.dim() == 1 else part.sum(0)
                for k, place in places:
                    totals[k].index_add_(0, place, each)


def _dot(a: Iterable[Tensor | None], b: Iterable[Tensor | None]) -> Tensor | None:
    """Sum of products; None for zero."""
    products = [x * y for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return sum(products[1:], products[0]) if products else None


def _empty(p: Partition, like: Tensor) -> list[Tensor]:
    """Zeros for second derivatives: in shared coordinates, beside blocks and within them, flat."""
    n, num = len(p.own), len(p.shared)
    return [like.new_zeros((r + 1) * (c + 1)) for r, c in ((num, num), (n, num), (n, p.width))]


def by_terms(density: BlockDensity) -> bool:
    """Whether the derivatives of single terms take fewer passes than there are shared coordinates."""
    num = len(density.partition.shared)
    if num < 2 or not density.partition.touched:
        return False
    return sum(len(family.second.pairs) for family in families(density)) < num


def term_derivatives(
    terms: Terms, rows: Tensor, shared: Tensor, share: Tensor, follows: Tensor | None
) -> TermDerivatives:
    """At blocks ``(Q, n)`` and shared coordinates ``(P,)``; their own derivatives are for one reverse pass.

    :param share: weights of nodes in each block, and last of what belongs to none, ``(Q, G + 1)``.
    :param follows: the path along which blocks follow shared coordinates, ``(n, P)``; None: first derivatives are left
        out.
    """
    u = terms.density.whole(rows, shared)
    return TermDerivatives(*_OfNodes.apply(u, terms.theta, share, follows, terms.density))


class _OfNodes(torch.autograd.Function):
    """:class:`TermDerivatives` in chunks of nodes, evaluated again on the way back so that no graph is held."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, theta: Tensor, share: Tensor, follows: Tensor | None, density: BlockDensity
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(u, theta, share, follows)
        ctx.set_materialize_grads(False)
        place, found = Evaluated.of(density, u, theta), None
        for rows, weights in _chunks(density, u, share):
            part = _summed(place, rows, weights, follows, False)
            if found is not None:
                for total, more in zip(tree_leaves(found), tree_leaves(part), strict=True):
                    total.add_(more)
            found = found or part
        assert found is not None
        affine = [each for each in place.families if each.tables]
        for each, moments in zip(affine, found.moments, strict=True):
            _add_seconds(each.family, each.tables or [], moments, found.totals)
        ctx.density, ctx.place, ctx.moments = density, place, found.moments
        return found.mean, found.square, *_trimmed(density.partition, found.totals)

    @staticmethod
    def backward(ctx: Any, *by: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        (u, theta, share, follows), density = ctx.saved_tensors, ctx.density
        place, p = ctx.place.with_graph(density), density.partition
        held = [
            replace(each, tables=each.tables and [tuple(map(_leaf, t)) for t in each.tables]) for each in place.families
        ]
        made, leaves = ([x for each in these for x in each.parts] for these in (place.families, held))
        moments, totals = [list(map(_leaf, each)) for each in ctx.moments], _empty(p, share)
        with torch.enable_grad():
            for each, own in zip([each for each in held if each.tables], moments, strict=True):
                _add_seconds(each.family, each.tables or [], own, totals)
            found = pullbacks(_weighed(_trimmed(p, totals), by[2:]), (*leaves, *chain(*moments)))
            by_leaves, weights, by_rows = found[: len(leaves)], (*by, *found[len(leaves) :]), list[list[Tensor]]()
            by_theta, by_follows = torch.zeros_like(theta), None if follows is None else torch.zeros_like(follows)
            for part in _chunks(density, u, share):
                rows, own_share, path = map(_leaf, (*part, follows))
                sums = _summed(replace(place, families=held), rows, own_share, path, True)
                whole = [sums.mean, sums.square, *_trimmed(p, sums.totals), *chain(*sums.moments)]
                places = (rows, own_share, place.theta, *leaves, *(() if path is None else (path,)))
                found = pullbacks(_weighed(whole, weights), places)
                by_rows.append(found[:2])
                by_theta, by_follows = by_theta + found[2], None if by_follows is None else by_follows + found[-1]
                by_leaves = [x + y for x, y in zip(by_leaves, found[3:], strict=False)]
            by_u, by_share = (torch.cat(parts) for parts in zip(*by_rows, strict=True))
            for x, slope in zip(made, by_leaves, strict=True):
                through = pullbacks(x, (place.u, place.theta), slope)
                by_u[:1] += through[0]
                by_theta = by_theta + through[1]
        return by_u, by_theta, by_share, by_follows, None


def _leaf(x: Tensor | None) -> Any:
    """A tensor of these numbers whose derivatives can be asked for."""
    return None if x is None else x.detach().requires_grad_()


def _weighed(found: Iterable[Tensor], weights: Iterable[Tensor | None]) -> Tensor:
    """The sum of all elements, weighed."""
    return torch.as_tensor(sum((x * w).sum() for x, w in zip(found, weights, strict=True) if w is not None))


def _trimmed(p: Partition, totals: Sequence[Tensor]) -> list[Tensor]:
    """Sums of second derivatives as tables, without the places for none."""
    widths = (len(p.shared), len(p.shared), p.width)
    return [total.reshape(-1, c + 1)[:-1, :-1] for total, c in zip(totals, widths, strict=True)]


def _chunks(density: BlockDensity, u: Tensor, share: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Nodes that are differentiated together: each derivative keeps about as much as the run that it is of.

    Slopes of blocks in shared coordinates and what is made of them are four tables more, few of them filled perhaps.
    """
    kept = density.joint.row_bytes or batched.BATCH_BYTES
    kept *= 1 + sum(len(family.second.pairs) for family in families(density))
    size = max(1, batched.BATCH_BYTES // max(1, kept + 4 * 8 * share.shape[1] * len(density.partition.shared)))
    return zip(u.split(size), share.split(size), strict=True)
