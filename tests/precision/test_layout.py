"""Entries that are put at their places make panels that are blocks of the dense matrix."""

import pytest
import torch
from torch import Tensor

from pyro_evidence.precision.blocks import layout
from pyro_evidence.precision.elimination import Fronts, Order


def long(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


CASES: dict[str, tuple[int, Tensor, Order]] = {  # size, coordinates of each factor, who is eliminated when
    "groups around two": (
        6,
        long([0, 4, 5], [1, 4, 5], [2, 4, 5], [3, 4, 5]),
        Order(((Fronts(long([0], [1], [2], [3]), long([4, 5], [4, 5], [4, 5], [4, 5])),),), torch.tensor([4, 5])),
    ),
    "pairs around one": (
        5,
        long([0, 1, 4], [2, 3, 4]),
        Order(((Fronts(long([0, 1], [2, 3]), long([4], [4])),),), torch.tensor([4])),
    ),
    "a chain, its ends with one neighbour": (
        5,
        long([0, 1], [1, 2], [2, 3], [3, 4]),
        Order(
            ((Fronts(long([0], [2], [4]), long([1, 5], [1, 3], [3, 5])),), (Fronts(long([1]), long([3])),)),
            torch.tensor([3]),
        ),
    ),
    "two sizes at once": (
        4,
        long([0, 3, 3], [1, 2, 3]),
        Order(((Fronts(long([0]), long([3])), Fronts(long([1, 2]), long([3]))),), torch.tensor([3])),
    ),
    "nothing eliminated": (3, long([0, 1], [1, 2]), Order((), torch.arange(3))),
}


@pytest.mark.parametrize("name", CASES)
def test_panels_are_blocks_of_the_matrix(name: str) -> None:
    size, index, order = CASES[name]
    value = torch.rand(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = torch.zeros(size + 1, size + 1, dtype=torch.float64)  # the last coordinate is padding
    for coordinates in index:
        A[coordinates[:, None], coordinates] = (value + value.mT)[coordinates[:, None], coordinates]
    found = layout(order, size)
    flat = torch.zeros(found.total, dtype=torch.float64)
    flat[found.places(index).long()] = torch.stack([A[row[:, None], row] for row in index])
    rest = torch.cat([order.rest, torch.tensor([size])])
    expected = [A[rest[:, None], rest]]
    for front in (front for level in order.levels for front in level):
        columns = torch.cat([front.own, front.border], -1)
        expected += [A[own[:, None], column] for own, column in zip(front.own, columns, strict=True)]
    assert torch.equal(flat, torch.cat([block.flatten() for block in expected]))
