"""Which coordinates fall into independent blocks once the others, the global ones, are given."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_evidence.numerics.batched import BATCH_NUMBERS
from pyro_evidence.numerics.quadrature.rules import GENERATORS, PRODUCT_DIMS
from pyro_evidence.precision.blocks import BlockPlan, block_plan
from pyro_evidence.precision.dense import Pattern
from pyro_evidence.precision.elimination import Fronts, Order, components, graph_of
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure.factor_cells import by_width, coordinate_table
from pyro_evidence.structure.factors import NotSparse, followed_terms

MOST_DIMS = max(GENERATORS)  # of a block
MOST_GLOBALS = 100  # coordinates around which the blocks are integrated, each a pass for its second derivatives
WIDEST = 128  # coordinates of one term, beyond which there are no blocks worth looking for


@dataclass(frozen=True, eq=False)
class Partition:
    """Blocks that no term of the log joint density joins, and the coordinates that they share.

    Blocks are numbered in the order of :attr:`fronts`; the number :attr:`num_blocks` stands for none of them.
    """

    size: int  # D
    fronts: tuple[Tensor, ...]  # (G, d) coordinates of the blocks of one width, straight or curved, for each
    shared: Tensor  # (P,) the global coordinates
    held: Tensor  # (H,) those that are pruned
    owner: Mapping[str, Tensor]  # the block of each term of the log joint density, flat, by name
    touched: Mapping[str, Tensor] = field(default_factory=dict)  # the coordinates of each, ``(F, m)``, -1 for none
    curved: tuple[bool, ...] = ()  # of each front, whether its blocks have coordinates such as logs of latents

    @cached_property
    def own(self) -> Tensor:
        """The coordinates of all blocks, one block after the other, ``(n,)``."""
        return torch.cat([front.flatten() for front in self.fronts]) if self.fronts else self.shared[:0]

    @cached_property
    def block(self) -> Tensor:
        """The block of each of :attr:`own`, ``(n,)``."""
        widths = [torch.full((len(front),), front.shape[-1], device=front.device) for front in self.fronts]
        every = torch.arange(self.num_blocks, device=self.shared.device)
        return every.repeat_interleave(torch.cat(widths)) if widths else every

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return sum(len(front) for front in self.fronts)

    @property
    def width(self) -> int:
        """Coordinates of the widest block."""
        return max((front.shape[-1] for front in self.fronts), default=0)

    @cached_property
    def members(self) -> Tensor:
        """Where coordinates of each block, and last of none, stand in :attr:`own`, ``(G + 1, d)``; ``n`` for none."""
        num, start = len(self.own), 0
        found = [self.shared.new_full((1, self.width), num)]
        for front in self.fronts:
            places = torch.arange(start, start + front.numel(), device=front.device).reshape(front.shape)
            found.insert(-1, torch.nn.functional.pad(places, (0, self.width - front.shape[-1]), value=num))
            start += front.numel()
        return torch.cat(found)

    @cached_property
    def mates(self) -> tuple[Tensor, ...]:
        """For each of :attr:`own`, where the first, second, ... coordinate of its block stands there, ``(n,)`` each.

        Past the end of narrower blocks, its own place.
        """
        places, itself = self.members[self.block], torch.arange(len(self.own), device=self.own.device)
        return torch.where(places < len(self.own), places, itself.unsqueeze(-1)).unbind(-1)

    @cached_property
    def place(self) -> Tensor:
        """Where each of the ``D`` coordinates stands in ``own``, then ``shared``, then ``held``."""
        order = torch.cat([self.own, self.shared, self.held])
        return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))

    @cached_property
    def plan(self) -> BlockPlan:
        """Blocks are eliminated first, held coordinates with them, then what they share."""
        fronts = [Fronts(front, self.shared.expand(len(front), -1)) for front in self.fronts]
        if len(self.held):
            fronts.append(Fronts(self.held.unsqueeze(-1), self.held.new_zeros(len(self.held), 0)))
        return block_plan(Pattern(self.size, ()), Order((tuple(fronts),), self.shared))

    def block_of(self, index: Tensor) -> Tensor:
        """The block that coordinates ``(..., k)`` belong to, -1 for none of them, shape ``(...)``."""
        known = torch.full((self.size + 1,), self.num_blocks, device=index.device)
        known[self.own] = self.block
        return known[index].amin(-1) if index.shape[-1] else known.new_full(index.shape[:-1], self.num_blocks)

    @property
    def sentence(self) -> str:
        """A sentence for the reader: numbers of blocks and of global coordinates."""
        parts = [f"{len(f):,} block{'s' if len(f) > 1 else ''} of {f.shape[-1]}" for f in self.fronts]
        return f"{' and '.join(parts)} by quadrature; {len(self.shared)} global coordinates around them"


def partition(joint: LogJoint, active: Tensor, *, crossed: bool = False) -> Partition | NotSparse:
    """The blocks of a model, or why there are none.

    :param crossed: whether latents of one plate multiply those of another, of which one is shared, however large.
    :param active: coordinates that are not pruned, ``(D,)`` bool.
    """
    followed = followed_terms(joint, joint.initial(1, seed=0)[0], joint.initial_theta, ())
    if isinstance(followed, NotSparse):
        return followed
    widest = max((sum(g.shape[-1] for g in groups) for groups in followed.groups.values()), default=0)
    if widest > WIDEST:
        return NotSparse(f"{followed.widest} ties {widest:,} coordinates together", followed.widest.coordinates)
    place = torch.arange(len(active) + 1, device=active.device)
    place[:-1][~active], place[-1] = -1, -1  # of coordinates that are held, and of none
    touched = {n: place[coordinate_table(g, followed.shapes[n])] for n, g in followed.groups.items() if g}
    edges = _edges(touched, joint.latents.size, joint.device)
    own = [torch.full((part.size,), i, device=joint.device) for i, part in enumerate(joint.latents)]
    found = _best(edges, active, torch.cat(own) if crossed else None)
    if found is None:
        few = "few" if crossed else f"at most {MOST_GLOBALS}"
        return NotSparse(f"no set of {few} coordinates, given which the others fall into small blocks, was found")
    return _partition(touched, *found, torch.nonzero(~active).flatten(), joint.latents.curved)


def around(joint: LogJoint, shared: Tensor, most: int) -> Partition | NotSparse:
    """The blocks that are left once chosen coordinates are given.

    :param shared: which these are, ``(D,)`` bool.
    :param most: coordinates of a block.
    """
    followed = followed_terms(joint, joint.initial(1, seed=0)[0], joint.initial_theta, ())
    if isinstance(followed, NotSparse):
        return followed
    touched = {n: coordinate_table(g, followed.shapes[n]) for n, g in followed.groups.items() if g}
    label = _components(_edges(touched, joint.latents.size, joint.device), ~shared, most)
    if label is None:
        return NotSparse(f"given what chunks share, more than {most} coordinates are tied together")
    return _partition(touched, label, torch.nonzero(shared).flatten(), label[:0], joint.latents.curved)


def _edges(touched: Mapping[str, Tensor], size: int, device: torch.device) -> Tensor:
    """Pairs of coordinates that meet in a term, both ways, ``(2, E)``."""
    every = torch.arange(size, device=device).unsqueeze(-1)
    joined = [part for index in touched.values() for _, part in by_width(index) if part.shape[-1] > 1]
    return graph_of(Pattern(size, (every, *joined))).edges


def _best(edges: Tensor, active: Tensor, sites: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Blocks of at most three coordinates around the fewest others; wider ones where there are none such.

    Of two crossed plates the one whose blocks are narrower.

    :param sites: number of the site of each coordinate, where plates are crossed: sites that touch as many others, as
        plates of one length do, are told apart.
    """
    crossed = sites is not None
    wider: tuple[Tensor, Tensor] | None = None
    degree = torch.bincount(edges[0], minlength=len(active)) if edges.numel() else torch.zeros_like(active).long()
    degree = degree if sites is None else degree * (int(sites.max()) + 1) + sites
    for limit in degree[active].unique().flip(0).tolist():
        shared = active & (degree > limit)  # those that touch most others
        if not _are_few(shared, active, crossed):
            break
        label = _components(edges, active & ~shared, MOST_DIMS)
        if label is not None and bool((label >= 0).any()) and _is_shared(edges, label, shared):
            if crossed and _width(label) > 1:
                other = _components(edges, shared, _width(label) - 1)
                if other is not None and _are_few(label >= 0, active, crossed) and _is_shared(edges, other, label >= 0):
                    label, shared = other, label >= 0
            found = label, torch.nonzero(shared).flatten()
            if _width(label) <= PRODUCT_DIMS:
                return found
            wider = wider or found
    return wider


def _are_few(shared: Tensor, active: Tensor, crossed: bool) -> bool:
    """Whether second derivatives in so many coordinates can be had."""
    num = int(shared.sum())
    return num <= MOST_GLOBALS or (crossed and num * int((active & ~shared).sum()) <= BATCH_NUMBERS)


def _width(label: Tensor) -> int:
    """Coordinates of the widest block."""
    return int(torch.bincount(label[label >= 0]).max()) if bool((label >= 0).any()) else 0


def _is_shared(edges: Tensor, label: Tensor, shared: Tensor) -> bool:
    """Whether at least half of the coordinates outside of blocks are seen by two blocks or more; not so in a chain."""
    here, there = edges[:, shared[edges[0]] & (label[edges[1]] >= 0)]
    pairs = torch.unique(here * len(label) + label[there])
    blocks = torch.bincount(pairs // len(label), minlength=len(label))
    return 2 * int((blocks[shared] >= 2).sum()) >= int(shared.sum())


def _components(edges: Tensor, local: Tensor, most: int) -> Tensor | None:
    """For each local coordinate the lowest one that it is joined to, -1 for the others; None for larger sets."""
    label = components(len(local), edges[:, local[edges[0]] & local[edges[1]]].mT)
    counts = torch.bincount(label[local], minlength=1)
    return torch.where(local, label, -1) if int(counts.max()) <= most else None


def _partition(touched: Mapping[str, Tensor], label: Tensor, shared: Tensor, held: Tensor, curved: Tensor) -> Partition:
    """The blocks that labels stand for, those of one size together, those with curved coordinates by themselves.

    :param touched: the coordinates of each term, by name.
    :param label: of the block of each coordinate, -1 for none, ``(D,)``.
    """
    members = torch.nonzero(label >= 0).flatten()
    members = members[label[members].argsort(stable=True)]
    block, counts = torch.unique_consecutive(label[members], return_inverse=True, return_counts=True)[1:]
    bent = torch.zeros_like(counts).index_add(0, block, curved.to(counts)[members]).clamp(max=1)
    kind = torch.stack([counts, bent], 1)
    kinds = kind.unique(dim=0)
    fronts = tuple(members[(kind[block] == one).all(-1)].reshape(-1, int(one[0])) for one in kinds)
    bare = Partition(len(label), fronts, shared, held, {}, touched, tuple(kinds[:, 1].bool().tolist()))
    return replace(bare, owner={n: bare.block_of(index) for n, index in touched.items()})
