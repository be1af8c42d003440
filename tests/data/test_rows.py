"""Rows in pieces: sums and samples are those of all rows at once."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pyro_evidence.data.ranks import Communicator
from pyro_evidence.data.rows import Rows, scattered
from pyro_evidence.errors import BadInput

X = torch.randn(1000, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
CHUNKS = [(x,) for x in X.split(300)]


def streamed() -> Rows[Tensor]:
    return Rows.of_chunks("X", CHUNKS, lambda number, args: args[0])


def column(x: Tensor) -> tuple[Tensor]:
    return (x,)


def test_a_sum_over_chunks_is_that_over_all_rows() -> None:
    assert len(streamed()) == 1000
    for rows in (streamed(), Rows.resident(X, 1000)):
        torch.testing.assert_close(rows.total(lambda x: x.mT @ x), X.mT @ X, rtol=1e-12, atol=0)
        torch.testing.assert_close(rows.mapped(torch.exp).total(lambda x: x.sum(0)), X.exp().sum(0))


def test_a_sample_depends_on_the_rows_not_on_the_chunks() -> None:
    (few,) = streamed().sampled(100, column)
    assert 90 <= len(few) <= 110
    assert torch.equal(few, Rows.resident(X, 1000).sampled(100, column)[0])
    assert torch.equal(few, X[scattered(torch.arange(1000)) < 100 * 2**32 // 1000])
    assert torch.equal(streamed().sampled(2000, column)[0], X)


def test_rows_are_selected_by_their_numbers_and_columns() -> None:
    found, none = streamed().selected(lambda x: (x, None), lambda n, x: (n > 500) & (x[0][:, 0] > 0.0))
    assert torch.equal(found, X[501:][X[501:, 0] > 0.0])
    assert none is None


@dataclass(frozen=True)
class Second(Communicator):
    """The second of two processes, whose other one says nothing."""

    rank: int = 1
    num_ranks: int = 2


def test_a_process_without_rows_adds_zeros_of_the_same_shape() -> None:
    rows = replace(streamed(), pieces=(), counts=(1000, 0), communicator=Second())
    assert torch.equal(rows.total(lambda x: x.mT @ x), torch.zeros(3, 3, dtype=torch.float64))


def test_rows_that_all_processes_have_are_shared_out() -> None:
    rows = Rows.shared(X[:5], Second())
    assert rows.counts == (2, 3)
    assert torch.equal(rows.total(lambda x: x.sum(0)), X[2:5].sum(0))


def test_a_chunk_that_is_refused_is_named() -> None:
    def check(number: int, args: tuple[Tensor]) -> None:
        if number == 2:
            raise BadInput(f"chunk {number} is bad.")

    with pytest.raises(BadInput, match="chunk 2 is bad"):
        Rows.of_chunks("X", CHUNKS, lambda number, args: args[0], check=check)
