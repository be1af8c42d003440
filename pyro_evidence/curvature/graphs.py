"""Graphs of coordinates: which parts hang together, and whether they close to cycles."""

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
