"""Mixture components under one labelling: draws are renamed, at least cost, to agree on who owns which datum."""

import math

import torch
from torch import Tensor

from pyro_evidence.laplace.tour import axes_of_length, renamed
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.simulate import responsibility_rows


def assign(cost: Tensor) -> list[int]:
    """The column of each row in the permutation of least total cost, for a square matrix ``(K, K)``.

    Shortest augmenting paths with dual prices, ``O(K^3)``.  Kuhn (1955), Munkres (1957).
    """
    owner: list[int] = [-1] * len(cost)  # row of each column
    row_price, column_price = [0.0] * len(cost), [0.0] * len(cost)
    table = cost.tolist()
    for row in range(len(cost)):
        _augment(table, row, owner, row_price, column_price)
    found = [0] * len(cost)
    for column, row in enumerate(owner):
        found[row] = column
    return found


def _augment(table: list[list[float]], row: int, owner: list[int], rows: list[float], columns: list[float]) -> None:
    """Give ``row`` a column, moving others along the cheapest path."""
    size = len(table)
    cheapest, came_from, done = [math.inf] * size, [-1] * size, [False] * size
    column, current = -1, row
    while current != -1:
        if column >= 0:
            done[column] = True
        for j in range(size):
            slack = table[current][j] - rows[current] - columns[j]
            if not done[j] and slack < cheapest[j]:
                cheapest[j], came_from[j] = slack, column
        column = min((j for j in range(size) if not done[j]), key=cheapest.__getitem__)
        step = cheapest[column]
        rows[row] += step
        for j, seen in enumerate(done):
            if seen:
                rows[owner[j]] += step
                columns[j] -= step
            else:
                cheapest[j] -= step
        current = owner[column]
    while column >= 0:
        before = came_from[column]
        owner[column] = row if before < 0 else owner[before]
        column = before


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
