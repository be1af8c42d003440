"""Assignment of columns to rows at least cost: which component is which."""

import math

import torch
from torch import Tensor


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
        _reprice(cheapest[column], row, owner, (rows, columns), (cheapest, done))
        current = owner[column]
    while column >= 0:
        before = came_from[column]
        owner[column] = row if before < 0 else owner[before]
        column = before


def _reprice(
    step: float,
    row: int,
    owner: list[int],
    prices: tuple[list[float], list[float]],
    path: tuple[list[float], list[bool]],
) -> None:
    (rows, columns), (cheapest, done) = prices, path
    rows[row] += step
    for j, seen in enumerate(done):
        if seen:
            rows[owner[j]] += step
            columns[j] -= step
        else:
            cheapest[j] -= step


def overlap_cost(resp: Tensor, reference: Tensor) -> Tensor:
    """Minus the data that old component k and reference component j share, shape ``(..., K, K)``.

    :param resp: responsibilities ``(..., N, K)``.
    :param reference: responsibilities ``(N, K)``; its components are the rows of the result.
    """
    return -torch.einsum("nj,...nk->...jk", reference, resp)
