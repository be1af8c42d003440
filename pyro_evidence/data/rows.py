"""Rows of data in pieces, of this process and of others: a pass over them is a sum."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pyro_evidence.data.chunks import Chunks, first_rows, looked_through, with_rows
from pyro_evidence.data.ranks import SINGLE_PROCESS, Communicator, Sums, share, zeros_like

COPIED_ROWS = 2**16  # of the data, that are copied together
PLACES = 2**32  # of scattered rows
SCATTER = 2654435761  # odd, PLACES times the golden ratio: multiples of it modulo PLACES are spread evenly

Piece = TypeVar("Piece")
Other = TypeVar("Other")


@dataclass(frozen=True)
class Rows(Generic[Piece]):
    """Rows of data, whether they are in memory, read a chunk at a time, or held by several processes.

    :ivar pieces: those of this process; a tuple where they stay in memory, else an iterable that reads them anew each
        time it is gone through.
    :ivar example: a piece, with rows or without, for what a pass over no rows would give: zeros of the same shapes.
    :ivar counts: number of rows of each process.

    >>> import torch
    >>> from pyro_evidence.data.rows import Rows
    >>> rows = Rows.of_chunks("model", [(torch.ones(3, 2),), (torch.ones(2, 2),)], lambda number, args: args[0])
    >>> len(rows), rows.total(lambda x: x.sum(0)).tolist()
    (5, [5.0, 5.0])
    """

    pieces: Iterable[Piece]
    example: Piece
    counts: tuple[int, ...]
    communicator: Communicator = field(default=SINGLE_PROCESS)

    @staticmethod
    def resident(piece: Other, num_rows: int) -> "Rows[Other]":
        """Rows that are all in memory, as one piece."""
        return Rows((piece,), piece, (num_rows,))

    @staticmethod
    def shared(rows: Tensor, communicator: Communicator) -> "Rows[Tensor]":
        """Rows ``(N, ...)`` that all processes have, of which each adds up its share."""
        shares = [rows[share(rank, communicator.num_ranks, len(rows))] for rank in range(communicator.num_ranks)]
        return Rows((shares[communicator.rank],), rows[:0], tuple(map(len, shares)), communicator)

    @staticmethod
    def of_chunks(
        model: Any,
        chunks: Chunks,
        read: Callable[[int, tuple[Any, ...]], Other],
        *,
        check: Callable[[int, tuple[Any, ...]], Any] | None = None,
        example: Other | None = None,
        communicator: Communicator = SINGLE_PROCESS,
    ) -> "Rows[Other]":
        """Rows of chunks, counted and checked in one pass over all of them.

        :param read: a chunk as a piece, from its number and its arguments; called in every pass.
        :param check: raises for what is wrong with a chunk, when it is seen first; None for ``read``.
        :param example: None for the first chunk that has rows; among several processes for the first few rows of all.
        :raises BadInput: on every process what is wrong on one of them, and for chunks without rows.
        """
        counts = looked_through(model, chunks, communicator, check or read)
        pieces = Repeated(lambda: (read(number, args) for number, args in with_rows(chunks)))
        if example is None:
            example = read(0, first_rows(chunks, communicator))
        return Rows(pieces, example, counts, communicator)

    def __len__(self) -> int:
        """Number of rows of all processes."""
        return sum(self.counts)

    def mapped(self, of: Callable[[Piece], Other]) -> "Rows[Other]":
        """The rows with every piece changed: at once where they stay in memory, else in every pass."""
        pieces = self.pieces
        if isinstance(pieces, tuple) and pieces:
            changed = tuple(map(of, pieces))
            return Rows(changed, changed[0], self.counts, self.communicator)
        return Rows(Repeated(lambda: map(of, pieces)), of(self.example), self.counts, self.communicator)

    def total(self, of: Callable[[Piece], Sums]) -> Sums:
        """One pass: the sum of ``of`` over the pieces of this process and of all others."""
        found: Sums | None = None
        try:
            for piece in self.pieces:
                found = of(piece) if found is None else found + of(piece)
        except Exception as error:  # the others must not wait for this pass
            self.communicator.raise_together(error)
        return self.communicator.total(zeros_like(of(self.example)) if found is None else found)

    def selected(
        self,
        columns: Callable[[Piece], Sequence[Any]],
        chosen: Callable[[Tensor, Sequence[Any]], Tensor],
    ) -> tuple[Any, ...]:
        """Some rows of all processes, one after the other: each column as one tensor, or None; one pass.

        :param columns: of a piece, a tensor ``(n, ...)`` each, or None but for the first.
        :param chosen: mask ``(n,)`` of the rows that are wanted, from their numbers among those of all processes and
            their columns.
        """
        number = sum(self.counts[: self.communicator.rank])
        found = [[None if x is None else x[:0] for x in columns(self.example)]]
        for piece in self.pieces:
            here = columns(piece)
            numbers = torch.arange(number, number + len(here[0]), device=here[0].device)
            number += len(here[0])
            mask = chosen(numbers, here)
            found.append([None if x is None else x[mask.to(x.device)] for x in here])
        parts = zip(*found, strict=True)
        return tuple(None if x[0] is None else self.communicator.gathered(torch.cat(x)) for x in parts)

    def sampled(self, most: int, columns: Callable[[Piece], Sequence[Any]]) -> tuple[Any, ...]:
        """The columns of about ``most`` rows where there are more, scattered over all; one pass."""
        below = min(most, len(self)) * PLACES // len(self)
        return self.selected(columns, lambda numbers, _: scattered(numbers) < below)


@dataclass(frozen=True)
class Repeated(Generic[Piece]):
    """Pieces that are made anew each time they are gone through."""

    make: Callable[[], Iterator[Piece]]

    def __iter__(self) -> Iterator[Piece]:
        return self.make()


def with_ones(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values ``(n, m)``, and weights of 1 for their rows."""
    return values, values.new_ones(1).expand(len(values))


def column_moments(rows: Rows[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, mean, and mean square about it, of what is not nan in each column, ``(m,)`` each; two passes.

    :param rows: values ``(n, m)`` and the weights ``(n,)`` of their rows.
    """

    def sums(piece: tuple[Tensor, Tensor], of: Callable[[Tensor], Tensor]) -> Tensor:
        found = []
        for Y, weight in zip(*(x.split(COPIED_ROWS) for x in piece), strict=True):
            share = weight.unsqueeze(-1) * ~Y.isnan()
            found.append(torch.stack([share.sum(0), (share * of(Y).nan_to_num()).sum(0)]))
        return torch.stack(found).sum(0)

    count, total = rows.total(lambda piece: sums(piece, lambda Y: Y))
    count = count.clamp(min=torch.finfo(count.dtype).tiny)  # a column without data has mean 0
    mean = total / count
    return count, mean, rows.total(lambda piece: sums(piece, lambda Y: (Y - mean).square()))[1] / count


def scattered(numbers: Tensor) -> Tensor:
    """Places of numbered rows, whole numbers from 0, below :data:`PLACES`, spread evenly (Fibonacci hashing)."""
    return (numbers * SCATTER) % PLACES
