"""Rows of a value are rows of each of its tensors; functions of rows at once, in parts, or one by one are the same."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from pyro_evidence.numerics import batched
from pyro_evidence.numerics.batched import Batched


@dataclass(frozen=True)
class Line(Batched):
    slope: Tensor
    offset: Tensor
    unit: Tensor

    common: ClassVar[frozenset[str]] = frozenset({"unit"})


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


A = torch.arange(50.0).reshape(10, 5)


def quadratic(x: Tensor, y: Tensor) -> Tensor:
    return (A @ x).exp().sum() * y


def branching(x: Tensor, y: Tensor) -> Tensor:
    return x.sum() if x[0] > 0 else y


X, Y = torch.linspace(-0.1, 0.1, 35).reshape(7, 5), torch.linspace(1.0, 2.0, 7)


def test_bytes_of_one_row_are_the_intermediates_and_not_the_data() -> None:
    # what autograd keeps of a row: x itself, A x or its exponential, their sum, y; but no copy of A
    found = batched.bytes_per_row(quadratic, X[0], Y[0])
    assert found is not None
    assert 8 * 10 <= found <= 8 * (5 + 2 * 10 + 2)


def _saturating(data: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.sigmoid(data @ x).exp().sum()


def test_measuring_lets_the_data_go() -> None:
    data = torch.randn(20, 5)
    watched, function = weakref.ref(data), _saturating(data)
    assert batched.bytes_per_row(function, X[0])
    del data, function
    gc.collect()
    assert watched() is None


def test_a_function_that_takes_no_batch_has_no_size() -> None:
    assert batched.bytes_per_row(branching, X[0], Y[0]) is None


@pytest.mark.parametrize("row_bytes", [None, 1, batched.BATCH_BYTES // 3, 10 * batched.BATCH_BYTES])
def test_parts_of_any_size_give_the_same(row_bytes: int | None) -> None:
    expected = torch.stack([quadratic(x, y) for x, y in zip(X, Y, strict=True)])
    torch.testing.assert_close(batched.apply(quadratic, (X, Y), row_bytes, quadratic), expected)


def in_place(x: Tensor, y: Tensor) -> Tensor:
    held = torch.zeros_like(y)
    held.add_(x.sum())
    return held * y


@pytest.mark.parametrize("f", [quadratic, branching, in_place])
def test_what_all_rows_share_is_as_if_each_had_it(f: Callable[[Tensor, Tensor], Tensor]) -> None:
    expected = torch.stack([f(x, Y[3]) for x in X])
    torch.testing.assert_close(batched.apply(f, (X,), 1000, f, shared=(Y[3],)), expected)


def test_what_all_rows_share_is_looked_at_once() -> None:
    seen = []

    def looking(x: Tensor, y: Tensor) -> Tensor:
        seen.append(torch._C._functorch.is_batchedtensor(y))
        return x.sum() * y

    batched.apply(looking, (X,), 1000, looking, shared=(Y[3],))
    assert seen and not any(seen)


def test_where_a_batch_fails_rows_go_one_by_one() -> None:
    expected = torch.stack([branching(x, y) for x, y in zip(X, Y, strict=True)])
    torch.testing.assert_close(batched.apply(branching, (X, Y), 1, branching), expected)


def test_what_fails_on_one_row_is_raised() -> None:
    def broken(x: Tensor, y: Tensor) -> Tensor:
        raise KeyError("row")

    with pytest.raises(KeyError, match="row"):
        batched.apply(broken, (X, Y), 1, broken)


def test_a_row_whose_matrix_is_singular_leaves_the_others_together() -> None:
    def log_scale(x: Tensor, y: Tensor) -> Tensor:
        return torch.linalg.cholesky(y * torch.eye(5)).diagonal().log().sum() + x.sum()

    expected = (X.sum(1) + 2.5 * Y.log()).index_fill(0, torch.tensor(3), torch.nan)
    found = batched.apply(log_scale, (X, Y.index_fill(0, torch.tensor(3), -1.0)), 1000, pytest.fail)
    torch.testing.assert_close(found, expected, equal_nan=True)
