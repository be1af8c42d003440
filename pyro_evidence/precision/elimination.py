"""In which order coordinates are eliminated: independent blocks of few neighbours first, level by level.

The blocks of one level do not touch each other, so that they are eliminated in one batch; what each leaves behind is a
clique of its neighbours.  On groups this is the elimination of a plate, on nested groups of one plate after the other,
on a chain cyclic reduction: every second block, then every second one of those left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.numerics.batched import BATCH_NUMBERS
from pyro_evidence.precision.dense import Pattern

LARGEST_REST = 5000  # coordinates that may be left for one dense matrix
MOST_PAIRS = 100_000_000  # of neighbours, over all blocks: what is left is then dense, if it fits
# Seconds of one thread, for choices between ways of the same result: an entry scattered, a multiplication in a product,
# the cube of a dense matrix' size with a share of its inverse, a batch of blocks, a block of several coordinates, a
# multiplication in its panel.
SCATTER, MULTIPLY, CUBE, BATCH, BLOCK, PANEL = 1e-8, 1e-10, 2.5e-11, 7e-5, 3e-6, 1.5e-10
VISIT, TIMES = 2e-6, 30  # the same of an edge in a search for stretches; how often a plan is used at least
MARKS = 16  # places of a table that are cleared and read in the time in which one number is sorted
PORTION = BATCH_NUMBERS  # entries that are held, or looked up, at a time
KEY = 2**62  # beyond it numbers of rows and random keys would run over


@dataclass(frozen=True, eq=False)
class Fronts:
    """Blocks of one size that are eliminated together, each with the coordinates it then still touches."""

    own: Tensor  # (G, d), padded with the number of coordinates
    border: Tensor  # (G, p), padded too

    @property
    def width(self) -> int:
        """Columns of each block's panel, ``d + p``."""
        return self.own.shape[-1] + self.border.shape[-1]


@dataclass(frozen=True, eq=False)
class Order:
    """Who is eliminated when."""

    levels: tuple[tuple[Fronts, ...], ...]
    rest: Tensor  # (P,) coordinates of the dense remainder


@dataclass(frozen=True, eq=False)
class Graph:
    """Graph of what is left to eliminate: nodes, each a set of coordinates with the same neighbours, and edges."""

    node: Tensor  # (D,) the node of each coordinate, -1 where it has been eliminated
    weight: Tensor  # (n,) coordinates of each node
    edges: Tensor  # (2, E) both ways, sorted by the first

    @property
    def size(self) -> int:
        """Coordinates that are left."""
        return int(self.weight.sum())

    @property
    def degree(self) -> Tensor:
        """Coordinates that each node touches, its own not counted, ``(n,)``."""
        return torch.zeros_like(self.weight).index_add_(0, self.edges[0], self.weight[self.edges[1]])


def elimination_order(pattern: Pattern) -> Order:
    """Levels of independent blocks, and the coordinates that are left for a dense matrix."""
    graph, levels, pairs, seconds = merged(graph_of(pattern)), list[tuple[Fronts, ...]](), 0, 0.0
    columns = [column for index in pattern.index if index.shape[-1] > 1 for column in index.unbind(-1)]
    before = list[tuple[float, Graph]]()  # each level
    while len(graph.weight):
        before.append((seconds, graph))
        choices = [_Choice(graph, chosen) for chosen in (independent(graph), *plates(graph, columns))]
        best = min(choices, key=attrgetter("seconds"))
        if graph.size <= LARGEST_REST and CUBE * graph.size**3 <= best.seconds:
            break
        pairs, seconds = pairs + best.pairs, seconds + best.seconds - CUBE * float(best.left) ** 3
        if pairs > MOST_PAIRS and best.left > LARGEST_REST:
            break
        levels.append(fronts_of(graph, best.chosen))
        graph = merged(without(graph, best.chosen))
        columns = columns if len(choices) > 1 else []
    least, found = seconds + CUBE * float(graph.size) ** 3, levels
    for level, (spent, whole) in enumerate(before):  # perhaps stretches there, and what stays is dense
        if VISIT * whole.edges.shape[-1] <= TIMES * (least - spent):
            last = min(stretches(whole), key=attrgetter("seconds"), default=None)
            if last is not None and spent + last.seconds < least:
                least, found = spent + last.seconds, [*levels[:level], fronts_of(last.graph, last.chosen)]
                graph = without(last.graph, last.chosen)
    return Order(tuple(found), torch.nonzero(graph.node >= 0).squeeze(-1))


@dataclass(frozen=True, eq=False)
class _Choice:
    """Nodes that may be eliminated next, and what that would cost."""

    graph: Graph
    chosen: Tensor  # (n,) bool, no two of them neighbours

    @cached_property
    def left(self) -> int:
        """Coordinates that stay."""
        return self.graph.size - int(self.graph.weight[self.chosen].sum())

    @cached_property
    def pairs(self) -> int:
        """Entries among the neighbours, over all blocks."""
        return int(self.graph.degree[self.chosen].square().sum())

    @property
    def seconds(self) -> float:
        """Seconds for this level, updates scattered or made by one product, and for a dense matrix of what stays."""
        panels = float(_of_panels(self.graph.weight[self.chosen].double(), self.graph.degree[self.chosen]).sum())
        product = MULTIPLY * (self.graph.size - self.left) * float(self.left) ** 2
        batches = 1 + len(torch.unique(self.graph.weight[self.chosen]))
        return BATCH * batches + panels + min(SCATTER * self.pairs, product) + CUBE * float(self.left) ** 3


def stretches(graph: Graph) -> list[_Choice]:
    """Blocks of nodes at successive distances from a far end, apart by nodes of one distance, which stay.

    Each of the choices has blocks about twice as large as the one before.  Nodes that touch most others stay; where
    these alone join the others, as in a plate, there is nothing to cut.
    """
    hub, found = 2 * graph.degree > graph.size, list[_Choice]()
    here, there = edges = graph.edges[:, ~hub[graph.edges].any(0)]
    if not edges.numel():
        return found
    far = distances(len(hub), edges)
    leads_on = torch.zeros_like(hub).index_fill(0, here[far[there] > far[here]], True)
    sizes = torch.bincount(far, graph.weight * ~hub)  # of each distance
    length, alone = int(sizes.max()), len(hub) + torch.arange(len(hub), device=far.device)
    while 2 * length < graph.size:
        block = (sizes.cumsum(0) - sizes) // length
        within = ~hub & ~((block.diff(append=block[-1:]) > 0)[far] & leads_on)
        name = torch.where(within, block[far], alone)
        name = torch.unique(name, return_inverse=True)[1]
        joined = contracted(graph, name, int(name.max()) + 1)
        chosen = torch.zeros_like(joined.weight, dtype=torch.bool).index_fill(0, name[within], True)
        found.append(_Choice(joined, chosen))
        length *= 2
    return found


def distances(size: int, edges: Tensor) -> Tensor:
    """The distance of each of ``size`` nodes from one that is far from the others, in edges, ``(n,)``.

    That is where a search by breadth from any node ends.  Parts that are not connected follow each other.

    :param edges: both ways, sorted by the first, ``(2, E)``.
    """
    starts, others = [0, *torch.bincount(edges[0], minlength=size).cumsum(0).tolist()], edges[1].tolist()
    far, end = [-1] * size, -1
    for root in range(size):
        ahead = [root] if far[root] < 0 else []
        for _ in range(2 * len(ahead)):  # the second time from where the first has ended
            for node in ahead:
                far[node] = -1
            ahead = ahead[-1:]
            far[ahead[0]] = end + 1
            for node in ahead:
                for other in others[starts[node] : starts[node + 1]]:
                    if far[other] < 0:
                        far[other] = far[node] + 1
                        ahead.append(other)
        end = far[ahead[-1]] if ahead else end
    return torch.tensor(far, device=edges.device)


def plates(graph: Graph, columns: Sequence[Tensor]) -> list[Tensor]:
    """The nodes in each column of an index, where they do not touch each other, and the solitary, ``(n,)`` bool."""
    found, alone = [], graph.degree == 0
    for column in columns:
        node = graph.node[column]
        chosen = alone.clone()
        chosen[node[node >= 0]] = True
        inside = chosen[graph.edges[0]] & chosen[graph.edges[1]]
        if bool(chosen.any()) and not bool(inside.any()):
            found.append(chosen)
    return found


def graph_of(pattern: Pattern) -> Graph:
    """The coordinates and the pairs that occur in one factor."""
    size, device = pattern.size, pattern.device
    several = (index for index in pattern.index if index.shape[-1] > 1)
    rows = [index[first_of_each(row_numbers(index, size))] for index in several]
    keys = [torch.unique(own.unsqueeze(-1) * size + own.unsqueeze(-2)) for own in rows]  # of pairs both ways
    key = torch.cat([torch.empty(0, dtype=torch.long, device=device), *keys])
    key = key[key // size != key % size]
    one_each = torch.ones(size, dtype=torch.long, device=device)
    return Graph(torch.arange(size, device=device), one_each, _edges(torch.unique(key), size))


def row_numbers(index: Tensor, size: int) -> Tensor:
    """A number for each row of ``index`` ``(F, k)`` from 0 on, the same for equal rows, ``(F,)``."""
    number, range_ = index.new_zeros(len(index)), 1
    for column in index.unbind(-1):
        if range_ * size >= KEY:
            values, number = torch.unique(number, return_inverse=True)
            range_ = len(values)
        number, range_ = number * size + column, range_ * size
    return torch.unique(number, return_inverse=True)[1]


def first_of_each(number: Tensor) -> Tensor:
    """Where each number from 0 on occurs first."""
    count = int(number.max()) + 1 if len(number) else 0
    places = torch.arange(len(number), device=number.device)
    return torch.full((count,), len(number), device=number.device).scatter_reduce_(0, number, places, "amin")


def _edges(key: Tensor, size: int) -> Tensor:
    return torch.stack([key // size, key % size])


def merged(graph: Graph) -> Graph:
    """Nodes that touch each other and the same others made one.

    Sets are compared by sums of random 64-bit numbers; a mistaken merger would be met later by an entry without place.
    """
    count, (here, there) = len(graph.weight), graph.edges
    generator = torch.Generator().manual_seed(0)  # its own: the caller's random state stays
    token = torch.randint(-KEY, KEY, (count,), generator=generator).to(here.device)
    number = torch.unique(token.index_add(0, here, token[there]), return_inverse=True)[1]
    first = first_of_each(number)
    if len(first) == count:
        return graph
    rank = torch.empty_like(first).scatter_(0, first.argsort(), torch.arange(len(first), device=first.device))
    return contracted(graph, rank[number], len(first))  # nodes keep the order of their first members


def contracted(graph: Graph, name: Tensor, count: int) -> Graph:
    """The graph with all nodes of one name ``(n,)``, from 0 to ``count``, made one."""
    weight = graph.weight.new_zeros(count).index_add_(0, name, graph.weight)
    here, there = name[graph.edges]
    key = torch.unique((here * count + there)[here != there])
    node = torch.where(graph.node >= 0, name[graph.node.clamp(min=0)], -1)  # clamp: those eliminated have no node
    return Graph(node, weight, _edges(key, count))


def independent(graph: Graph) -> Tensor:
    """Nodes that do not touch each other, of locally lowest degree, ``(n,)`` bool.

    Ties go to the lower bit-reversed position, which on a chain takes every second node.
    """
    degree, (here, there) = graph.degree, graph.edges
    place, bits = torch.arange(len(degree), device=degree.device), max(1, (len(degree) - 1).bit_length())
    reversed_bits = sum(((place >> bit & 1) << (bits - 1 - bit) for bit in range(bits)), torch.zeros_like(place))
    key = degree * 2**bits + reversed_bits
    last = torch.iinfo(torch.long).max
    chosen = torch.zeros_like(degree, dtype=torch.bool)
    for _ in range(3):
        lowest = torch.full_like(key, last).scatter_reduce_(0, here, key[there], "amin")
        chosen |= key < lowest
        near = torch.zeros_like(chosen).index_put_((here[chosen[there]],), torch.ones((), dtype=torch.bool))
        out = chosen | near | (degree > degree[chosen].amax())
        key = torch.where(out, last, key)
    return chosen


def without(graph: Graph, chosen: Tensor) -> Graph:
    """The graph once the chosen nodes are eliminated: the neighbours of each touch each other."""
    stays = ~chosen
    name = torch.where(stays, stays.cumsum(0) - 1, -1)
    count, (here, there) = int(stays.sum()), graph.edges
    kept = stays[here] & stays[there]
    old = name[here[kept]] * count + name[there[kept]]
    front, other = here[chosen[here]], name[there[chosen[here]]]
    key = _with_cliques(old, front, other, count)
    node = torch.where(graph.node >= 0, name[graph.node.clamp(min=0)], -1)  # clamp: those eliminated have no node
    return Graph(node, graph.weight[stays], _edges(key, max(count, 1)))


def _with_cliques(old: Tensor, front: Tensor, other: Tensor, count: int) -> Tensor:
    """Sorted keys of the edges there were and of the pairs ``other`` that share a ``front`` (sorted)."""
    touched = torch.unique_consecutive(front, return_counts=True)[1]
    start = touched.cumsum(0) - touched
    width = touched.repeat_interleave(touched)  # for each entry the number of entries of its front
    start = start.repeat_interleave(touched)
    if count <= 2 * LARGEST_REST and count**2 <= MARKS * int(width.sum()):
        seen = torch.zeros(count * count, dtype=torch.bool, device=old.device)
        seen[old] = True
        for part in _portions(width):
            seen[_clique(other, start, width, part, count)] = True
        seen.view(count, count).fill_diagonal_(False)
        return torch.nonzero(seen).squeeze(-1)
    keys = [torch.unique(_clique(other, start, width, part, count)) for part in _portions(width)]
    key = torch.unique(torch.cat([old, *keys]))
    return key[key // count != key % count]


def _clique(other: Tensor, start: Tensor, width: Tensor, part: slice, count: int) -> Tensor:
    return other[part].repeat_interleave(width[part]) * count + other[runs_from(start[part], width[part])]


def _portions(width: Tensor) -> list[slice]:
    """Slices of about equal sums."""
    counts = torch.unique_consecutive(width.cumsum(0) // PORTION, return_counts=True)[1]
    return [slice(a, b) for a, b in pairwise([0, *counts.cumsum(0).tolist()])]


def runs_from(start: Tensor, count: Tensor) -> Tensor:
    """``start, start + 1, ...``, ``count`` of them, one run after the other."""
    before = count.cumsum(0) - count
    return torch.arange(int(count.sum()), device=count.device) + (start - before).repeat_interleave(count)


def fronts_of(graph: Graph, chosen: Tensor) -> tuple[Fronts, ...]:
    """The chosen nodes with what they touch, in coordinates, in batches of one shape."""
    alive = torch.nonzero(graph.node >= 0).squeeze(-1)
    coordinates = alive[graph.node[alive].argsort(stable=True)]  # of each node, one after the other
    offset = graph.weight.cumsum(0) - graph.weight
    nodes = torch.nonzero(chosen).squeeze(-1)
    here, there = graph.edges[:, chosen[graph.edges[0]]]
    border = coordinates[runs_from(offset[there], graph.weight[there])]
    owner = here.repeat_interleave(graph.weight[there])
    border = border[(owner * len(graph.node) + border).argsort()]  # ascending within each front
    own, width = graph.weight[nodes], graph.degree[nodes]
    first = width.cumsum(0) - width
    return tuple(
        Fronts(*(_padded(values, start[same], count[same], len(graph.node)) for values, start, count in sides))
        for sides in [((coordinates, offset[nodes], own), (border, first, width))]
        for same in _batches(own, width)
    )


def _batches(own: Tensor, width: Tensor) -> list[Tensor]:
    """Blocks of like shape together, padded to the largest where that costs less than another batch."""
    shapes, shape, counts = torch.unique(torch.stack([own, width], -1), dim=0, return_inverse=True, return_counts=True)
    batch, held = list[int](), (0, 0, 0)  # how many, and the largest
    for (columns, beside), count in zip(shapes.tolist(), counts.tolist(), strict=True):
        apart, joined = (count, columns, beside), (count + held[0], columns, max(beside, held[2]))
        seconds = [num * (SCATTER * p**2 + _of_panels(d, p)) for num, d, p in (joined, held, apart)]
        fits = seconds[0] <= seconds[1] + seconds[2] + BATCH
        held = joined if fits else apart
        batch.append((batch[-1] if batch else 0) + (not fits))
    found = torch.tensor(batch, device=own.device)[shape]
    return [torch.nonzero(found == number).squeeze(-1) for number in range(batch[0], batch[-1] + 1)]


def _of_panels(own: Any, border: Any) -> Any:
    """Seconds for the panels of blocks, one number or a tensor of each."""
    return BLOCK * (own > 1) + PANEL * own**2 * (own / 3.0 + border)


def _padded(values: Tensor, first: Tensor, count: Tensor, pad: int) -> Tensor:
    column = torch.arange(int(count.max()), device=values.device)
    inside = column < count.unsqueeze(-1)
    place = torch.where(inside, first.unsqueeze(-1) + column, 0)
    return torch.where(inside, values[place], pad) if len(values) else place.new_full(place.shape, pad)


def components(size: int, edges: Tensor) -> Tensor:
    """For each of ``size`` nodes the lowest node that it is connected with by ``edges`` ``(E, 2)``.

    >>> components(4, torch.tensor([[0, 2], [3, 2]]))
    tensor([0, 1, 0, 0])
    """
    label = torch.arange(size, device=edges.device)
    while True:
        ends = label[edges]
        lower = label.scatter_reduce(0, ends.flatten(), ends.amin(-1).repeat_interleave(2), "amin")
        while not torch.equal(lower, lower[lower]):
            lower = lower[lower]
        if torch.equal(lower, label):
            return label
        label = lower


def num_cycles(edges: Tensor) -> int:
    """Number of differences along ``edges`` ``(E, 2)`` that follow from the others: 0 for a forest.

    Where it is not 0, a normal density for each edge, multiplied, is not a density of the nodes' differences: with
    scale ``s`` it falls as ``s^-E`` where the field's own falls as ``s^-(E - cycles)``.

    >>> num_cycles(torch.tensor([[0, 1], [1, 2], [2, 0]]))
    1
    """
    nodes, compact = torch.unique(edges, return_inverse=True)
    parts = len(torch.unique(components(len(nodes), compact)))
    return len(edges) - len(nodes) + parts


def coloured(size: int, families: Sequence[Tensor]) -> Tensor:
    """A colour for each of ``size`` coordinates, numbered from zero, ``(D,)``; -1 for those in no family.

    The first free one for one coordinate after the other.  Derivatives along the sums of all coordinates of a colour
    then tell the coordinates of each factor apart.

    :param families: the coordinates that each factor touches, all different, ``(F, k)`` each.
    """
    here, there = graph_of(Pattern(size, tuple(families))).edges
    starts, others = [0, *torch.bincount(here, minlength=size).cumsum(0).tolist()], there.tolist()
    colours = [-1] * size
    for v in sorted(set().union(*(index.unique().tolist() for index in families))):
        used = 0
        for w in others[starts[v] : starts[v + 1]]:
            if colours[w] >= 0:
                used |= 1 << colours[w]
        colours[v] = (~used & (used + 1)).bit_length() - 1
    return torch.tensor(colours, device=here.device)
