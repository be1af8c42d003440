"""Rows of a value are rows of each of its tensors; what is shared stays."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_evidence.numerics.batched import Batched


@dataclass(frozen=True)
class Line(Batched):
    slope: Tensor
    offset: Tensor
    unit: Tensor

    shared: ClassVar[frozenset[str]] = frozenset({"unit"})


def lines(num: int = 4) -> Line:
    return Line(torch.randn(num, 2, 3), torch.arange(float(num)), torch.tensor(7.0))


def test_rows_are_taken_by_position_and_by_mask() -> None:
    all_of_them, mask = lines(), torch.tensor([True, False, False, True])
    assert torch.equal(all_of_them[torch.tensor([2])].slope, all_of_them.slope[2:3])
    assert all_of_them[mask].offset.tolist() == [0.0, 3.0]
    assert all_of_them[mask].unit is all_of_them.unit


def test_rows_are_chosen_one_by_one() -> None:
    a, b = lines(), lines()
    mixed = a.where(torch.tensor([True, False, True, False]), b)
    assert torch.equal(mixed.slope[::2], a.slope[::2]) and torch.equal(mixed.slope[1::2], b.slope[1::2])


def test_rows_are_put_back_where_they_were() -> None:
    a, rows = lines(), torch.tensor([3, 1])
    again = lines().with_rows(rows, a[rows]).with_rows(torch.tensor([0, 2]), a[torch.tensor([0, 2])])
    assert torch.equal(again.slope, a.slope) and torch.equal(again.offset, a.offset)
