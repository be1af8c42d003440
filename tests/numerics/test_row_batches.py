"""Rows at once, in parts, or one by one: always the same numbers."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyro_evidence.numerics import row_batches

A = torch.arange(50.0).reshape(10, 5)


def quadratic(x: Tensor, y: Tensor) -> Tensor:
    return (A @ x).exp().sum() * y


def branching(x: Tensor, y: Tensor) -> Tensor:
    return x.sum() if x[0] > 0 else y


X, Y = torch.linspace(-0.1, 0.1, 35).reshape(7, 5), torch.linspace(1.0, 2.0, 7)


def test_bytes_of_one_row_are_the_intermediates_and_not_the_data() -> None:
    # what autograd keeps of a row: x itself, A x or its exponential, their sum, y; but no copy of A
    found = row_batches.bytes_per_row(quadratic, X[0], Y[0])
    assert found is not None
    assert 8 * 10 <= found <= 8 * (5 + 2 * 10 + 2)


def _saturating(data: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.sigmoid(data @ x).exp().sum()


def test_measuring_lets_the_data_go() -> None:
    data = torch.randn(20, 5)
    watched, function = weakref.ref(data), _saturating(data)
    assert row_batches.bytes_per_row(function, X[0])
    del data, function
    gc.collect()
    assert watched() is None


def test_a_function_that_takes_no_batch_has_no_size() -> None:
    assert row_batches.bytes_per_row(branching, X[0], Y[0]) is None


@pytest.mark.parametrize("row_bytes", [None, 1, row_batches.BATCH_BYTES // 3, 10 * row_batches.BATCH_BYTES])
def test_parts_of_any_size_give_the_same(row_bytes: int | None) -> None:
    expected = torch.stack([quadratic(x, y) for x, y in zip(X, Y, strict=True)])
    torch.testing.assert_close(row_batches.apply(quadratic, (X, Y), row_bytes, quadratic), expected)


def test_where_a_batch_fails_rows_go_one_by_one() -> None:
    expected = torch.stack([branching(x, y) for x, y in zip(X, Y, strict=True)])
    torch.testing.assert_close(row_batches.apply(branching, (X, Y), 1, branching), expected)


def test_what_fails_on_one_row_is_raised() -> None:
    def broken(x: Tensor, y: Tensor) -> Tensor:
        raise KeyError("row")

    with pytest.raises(KeyError, match="row"):
        row_batches.apply(broken, (X, Y), 1, broken)
