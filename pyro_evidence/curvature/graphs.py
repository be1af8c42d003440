"""Graphs of coordinates: which parts hang together, whether they close to cycles, colours of their nodes."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
    """How many of the differences along ``edges`` ``(E, 2)`` follow from the others: 0 for a forest.

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

    Derivatives along the sums of all coordinates of a colour then tell the coordinates of each factor apart.

    :param families: the coordinates that each factor touches, all different, ``(F, k)`` each.
    """
    colours = _by_column(size, families)
    if all(_is_proper(colours, index) for index in families):
        return colours
    return _greedy(size, families)


def _is_proper(colours: Tensor, index: Tensor) -> bool:
    """Whether the coordinates of each factor differ in colour."""
    found = colours[index].sort(-1).values
    return bool((found[:, 1:] != found[:, :-1]).all())


def _by_column(size: int, families: Sequence[Tensor]) -> Tensor:
    """Each column of each family a colour, the largest family first; right for plates and global sites."""
    device = families[0].device if families else None
    colours = torch.full((size,), -1, dtype=torch.long, device=device)
    num = 0
    for index in sorted(families, key=lambda x: -x.numel()):
        for column in index.unbind(-1):
            fresh = column[colours[column] < 0]
            if len(fresh):
                taken = colours[index[colours[column] < 0]]
                colours[fresh] = _free(taken, num)
                num = max(num, int(colours.max()) + 1)
    return colours


def _free(taken: Tensor, num: int) -> int:
    """The first colour that none of the neighbours has."""
    used = set(taken[taken >= 0].unique().tolist())
    return next(c for c in range(num + 1) if c not in used)


def _greedy(size: int, families: Sequence[Tensor]) -> Tensor:
    """The first free colour for one coordinate after the other."""
    starts, others = _neighbours(size, families)
    colours = [-1] * size
    for v in range(size):
        used = 0
        for w in others[starts[v] : starts[v + 1]]:
            if colours[w] >= 0:
                used |= 1 << colours[w]
        colours[v] = (~used & (used + 1)).bit_length() - 1
    found = torch.tensor(colours, device=families[0].device)
    touched = torch.zeros_like(found, dtype=torch.bool)
    for index in families:
        touched[index.reshape(-1)] = True
    return torch.where(touched, found, -1)


def _neighbours(size: int, families: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Who shares a factor with whom, as lists: where each coordinate's others start, and the others."""
    pairs = [
        index[:, [i, j]] for index in families for i in range(index.shape[1]) for j in range(index.shape[1]) if i != j
    ]
    if not pairs:
        return [0] * (size + 1), []
    keys = torch.cat([p[:, 0] * size + p[:, 1] for p in pairs]).unique()
    first, second = keys // size, keys % size
    starts = torch.zeros(size + 1, dtype=torch.long, device=keys.device)
    starts[1:] = torch.bincount(first, minlength=size).cumsum(0)
    return starts.tolist(), second.tolist()
