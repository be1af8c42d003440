"""Data of a mixture of probabilistic PCA that come in chunks, pass by pass: a pass is a sum."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.data import ranks as joining
from pyro_evidence.data.ranks import Communicator, Sums

SCATTER = 2654435761  # odd, 2^32 times the golden ratio: multiples of it modulo 2^32 are spread evenly


@dataclass(frozen=True)
class StreamedRows:
    """Rows ``(N, m)`` of all processes that are never together, nan where missing."""

    passes: Callable[[], Iterator[Tensor]]  # those of this process, a chunk at a time
    join: Communicator
    counts: tuple[int, ...]  # rows of each process
    nothing: Tensor  # (0, m)
    gappy: bool

    def __len__(self) -> int:
        return sum(self.counts)

    @property
    def shape(self) -> torch.Size:
        """``(N, m)``."""
        return torch.Size((len(self), self.nothing.shape[1]))

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.nothing.device

    @property
    def numbered(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks with the numbers of their rows among those of all processes."""
        number = sum(self.counts[: self.join.rank])
        for chunk in self.passes():
            yield torch.arange(number, number + len(chunk)), chunk
            number += len(chunk)

    def mapped(self, of: Callable[[Tensor], Tensor]) -> "StreamedRows":
        """The rows with every chunk changed."""
        return replace(self, passes=lambda: map(of, self.passes()))


Rows = Tensor | StreamedRows


def added_up(Y: Rows, of: Callable[[Tensor], Sums]) -> Sums:
    """One pass: the sum of ``of`` over all rows."""
    if isinstance(Y, Tensor):
        return of(Y)
    return joining.total(Y.join, Y.passes(), of, lambda: of(Y.nothing))


def has_gaps(Y: Rows) -> bool:
    """Whether some of the data, which are finite otherwise, are nan; needs no memory."""
    return bool(Y.sum().isnan()) if isinstance(Y, Tensor) else Y.gappy


def filled(Y: Rows) -> Rows:
    """The data with zeros where they are missing."""
    if not has_gaps(Y):
        return Y
    return Y.nan_to_num(0.0) if isinstance(Y, Tensor) else replace(Y.mapped(lambda y: y.nan_to_num(0.0)), gappy=False)


def sampled(Y: Rows, most: int) -> Tensor:
    """About ``most`` of the data where there are more, scattered over all by the numbers of their rows."""
    if isinstance(Y, Tensor):
        return Y if len(Y) <= most else Y[_scattered(torch.arange(len(Y)), len(Y), most).to(Y.device)]
    found = [Y.nothing, *(y[_scattered(number, len(Y), most).to(y.device)] for number, y in Y.numbered)]
    return Y.join.gathered(torch.cat(found))


def shared_sample(Y: Rows, most: int) -> Rows:
    """The same, of which each process adds up a part."""
    found = sampled(Y, most)
    if isinstance(Y, Tensor) or Y.join.num_ranks == 1:
        return found
    join, each = Y.join, joining.share(Y.join, len(found))
    counts = tuple(int(x) for x in join.gathered(torch.tensor([float(each.stop - each.start)])))
    return replace(Y, passes=lambda: iter([found[each]]), counts=counts)


def _scattered(number: Tensor, num_rows: int, most: int) -> Tensor:
    """Which of the rows of these numbers are in the sample."""
    return ((number * SCATTER) % 2**32 < min(most, num_rows) * 2**32 // num_rows).nonzero().flatten()


def column_variances(Y: Rows) -> Tensor:
    """Variance of each column, nothing missing, shape ``(m,)``."""
    if isinstance(Y, Tensor):
        return Y.var(0, correction=0)
    mean = added_up(Y, lambda y: y.sum(0)) / len(Y)
    return added_up(Y, lambda y: (y - mean).square().sum(0)) / len(Y)
