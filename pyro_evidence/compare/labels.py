"""Mixture components under one labelling: draws are renamed, at least cost, to agree on who owns which datum."""

import math

import torch
from torch import Tensor

from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.simulate import responsibility_rows
from pyro_evidence.structure.symmetries import axes_of_length, renamed


def assign(cost: Tensor) -> list[int]:
    """The column of each row in the permutation of least total cost, for a square matrix ``(K, K)``.

    Shortest augmenting paths with dual prices, ``O(K^3)``: each row in turn gets a column, and others move along the
    cheapest path.  Kuhn (1955), Munkres (1957).
    """
    table, size = cost.tolist(), len(cost)
    owner = [-1] * (size + 1)  # row of each column; behind the last one stands the row that is to get a column
    rows, columns = [0.0] * size, [0.0] * (size + 1)  # prices
    for row in range(size):
        cheapest, came_from, left = [math.inf] * size, [size] * size, list(range(size))
        seen, column, owner[size] = list[int](), size, row
        while owner[column] >= 0:
            seen.append(column)
            for j in left:
                slack = table[owner[column]][j] - rows[owner[column]] - columns[j]
                if slack < cheapest[j]:
                    cheapest[j], came_from[j] = slack, column
            column = min(left, key=cheapest.__getitem__)
            left.remove(column)
            step = cheapest[column]
            for j in seen:
                rows[owner[j]] += step
                columns[j] -= step
            for j in (*left, column):
                cheapest[j] -= step
        while column != size:
            owner[column], column = owner[came_from[column]], came_from[column]
    return sorted(range(size), key=owner.__getitem__)


def overlap_cost(resp: Tensor, reference: Tensor) -> Tensor:
    """Minus the data that old component k and reference component j share, shape ``(..., K, K)``.

    :param resp: responsibilities ``(..., N, K)``.
    :param reference: responsibilities ``(N, K)``; its components are the rows of the result.
    """
    return -torch.einsum("nj,...nk->...jk", reference, resp)


Draws = dict[str, Tensor]


def matched(joint: LogJoint, draws: Draws, reference: Tensor | None = None) -> tuple[Draws, Tensor, int]:
    """Draws with their components renamed, the reference they agree with, and how often neighbours disagreed.

    :param draws: ``(C, T) + site shape``.
    :param reference: responsibilities ``(N, K)``; None takes those of the first draw, refined by one pass.
    :return: renamed draws; mean responsibilities after renaming ``(N, K)``; number of label switches within
        chains.
    """
    u = joint.latents.flat(draws).flatten(0, 1)
    resp = responsibility_rows(joint, u, joint.initial_theta)
    resp = resp.reshape(len(u), -1, resp.shape[-1])
    orders = _orders(resp, resp[0] if reference is None else reference)
    if reference is None:
        orders = _orders(resp, renamed(resp, orders, -1).mean(0))
    first = next(iter(draws.values()))
    chains = orders.reshape(*first.shape[:2], -1)
    switches = int((chains[:, 1:] != chains[:, :-1]).any(-1).sum())
    axes = axes_of_length(joint, joint.num_states)
    own = {n: renamed(draws[n].flatten(0, 1), orders, axis + 1).reshape(draws[n].shape) for n, axis in axes.items()}
    return draws | own, renamed(resp, orders, -1).mean(0), switches


def _orders(resp: Tensor, reference: Tensor) -> Tensor:
    """For every draw the old label of each new one, ``(S, K)``."""
    return torch.tensor([assign(cost) for cost in overlap_cost(resp, reference)])
