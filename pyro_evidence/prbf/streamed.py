"""The network's data in chunks, pass by pass, from this process and from others; and starts that see a sample."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.chunks import Chunks, arguments, looked_through, with_rows
from pyro_evidence.data.ranks import SINGLE_PROCESS, Communicator
from pyro_evidence.errors import BadInput
from pyro_evidence.mixture.data import SCATTER
from pyro_evidence.models.prbf import PRBF, check_inputs, class_labels
from pyro_evidence.prbf.densities import ClassBlock, ClassData, blocks_of, varied
from pyro_evidence.prbf.start import Training, Whole

SAMPLE = 2**14  # data that a start sees where there are more, as many of each class

Labelled = tuple[Tensor, Tensor]  # X (n, D) float64 and labels (n,) int64 of some of the data


@dataclass(frozen=True)
class Rows:
    """All data, pass by pass.

    :ivar counts: rows of each process.
    """

    model: PRBF
    passes: Callable[[], Iterator[Labelled]]
    join: Communicator
    counts: tuple[int, ...]

    @staticmethod
    def of_chunks(model: PRBF, chunks: Chunks, join: Communicator) -> "Rows":
        """The rows of chunks counted and checked, in one pass.

        :raises BadInput: on chunks that cannot be used, naming the first.
        """
        counts = looked_through(model, chunks, join, lambda number, args: _checked(model, number, args))

        def passes() -> Iterator[Labelled]:
            if not counts[join.rank]:
                yield labelled(model, arguments(0, next(iter(chunks))))
            yield from (labelled(model, args) for _, args in with_rows(chunks))

        return Rows(model, passes, join, counts)

    @staticmethod
    def of_tensors(model: PRBF, X: Tensor, labels: Tensor) -> "Rows":
        """The rows of two tensors, all here."""
        return Rows(model, lambda: iter([(X, labels)]), SINGLE_PROCESS, (len(X),))

    @property
    def num_rows(self) -> int:
        """Of all processes."""
        return sum(self.counts)

    def totals(self) -> "Totals":
        """What must be known of all data before the first round; two passes.

        :raises BadInput: on an absent class, or where no input varies.
        """
        num_classes = self.model.num_classes
        per_class = self._sum(lambda X, y: torch.bincount(y + 1, minlength=num_classes + 1).to(X))
        mean = self._sum(lambda X, _: X.sum(0)) / self.num_rows
        scatter = self._sum(lambda X, _: (X - mean).mT @ (X - mean)) / self.num_rows
        found = Totals(per_class, mean, scatter)
        found.require_usable()
        return found

    def _sum(self, of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        parts = [of(X, y) for X, y in self.passes()]
        return self.join.total(torch.stack(parts).sum(0))

    def training(self, totals: "Totals", allowed: Tensor) -> Training:
        """What a start sees: all data, or where they are many about as many of each class, chosen by their numbers."""
        X, y = self._sample(totals)
        whole = None if self.num_rows <= SAMPLE else totals.whole
        return Training(X, y, self.model.kernels, allowed.to(X.device), whole)

    def _sample(self, totals: "Totals") -> Labelled:
        present = int((totals.per_class > 0).sum())
        each = 2.0**32 * SAMPLE / (present * torch.where(totals.per_class > 0, totals.per_class, 1.0))
        below = torch.full_like(each, 2.0**32) if self.num_rows <= SAMPLE else each.clamp(max=2.0**32)  # all of them
        number, found = sum(self.counts[: self.join.rank]), []
        for X, y in self.passes():
            place = (torch.arange(number, number + len(X), device=X.device) * SCATTER) % 2**32
            number += len(X)
            chosen = (place < below.long()[y + 1]).nonzero().flatten()
            found.append((X[chosen], y[chosen]))
        X, y = (self.join.gathered(torch.cat(column)) for column in zip(*found, strict=True))
        return X, y

    def data(self, totals: "Totals") -> "StreamedClassData":
        """The data about their mean, read anew in every pass."""
        kind, num_classes = self.model.kernels, self.model.num_classes

        def pieces(size: int) -> Iterator[tuple[int, ClassBlock]]:
            for X, y in self.passes():
                blocks, hidden = blocks_of(kind.features(X - totals.mean), y, num_classes)
                yield from ClassData(blocks, hidden, kind, totals.unit(kind.floor), size).pieces

        return StreamedClassData(
            (), None, kind, totals.unit(kind.floor), source=Source(pieces, self.join, totals.per_class)
        )


@dataclass(frozen=True)
class Totals:
    """What is known of all data.

    :ivar per_class: number of data without a label, then of each class, shape ``(1 + K,)``.
    """

    per_class: Tensor
    mean: Tensor  # (D,)
    scatter: Tensor  # (D, D) covariance

    @property
    def variance(self) -> Tensor:
        """Of each input; a constant input gets the mean of the others."""
        variance = self.scatter.diagonal()
        return varied(variance, variance + self.mean.square())

    def unit(self, floor: float) -> Tensor:
        """Smallest variance of each input."""
        return floor * self.variance

    @property
    def whole(self) -> Whole:
        """For a start that sees a sample."""
        known = self.per_class[1:]
        covariance = self.scatter.diagonal_scatter(self.variance)
        return Whole(known / known.sum(), covariance, int(self.per_class.sum()))

    def require_usable(self) -> None:
        """Refuse an absent class and inputs that do not vary.

        :raises BadInput: naming the classes.
        """
        require_present(self.per_class[1:])
        if not bool((self.scatter.diagonal() > 1e-20 * self.mean.square()).any()):
            raise BadInput("all rows of X are the same; expected data that vary, or no kernel has a width.")


def require_present(per_class: Tensor) -> None:
    """Refuse a class of which there are no data.

    :raises BadInput: naming it.
    """
    if len(absent := (per_class == 0).nonzero().flatten().tolist()):
        raise BadInput(
            f"no row of X has label {absent}; expected at least one of each class from 0 to {len(per_class) - 1}. Set "
            f"num_classes to the number of classes that occur, and number them from 0; -1, nan and None mean that a "
            f"label is unknown."
        )


@dataclass(frozen=True)
class Source:
    """Where the pieces come from, and how many data of each class there are among all processes."""

    pieces: Callable[[int], Iterable[tuple[int, ClassBlock]]]
    join: Communicator
    per_class: Tensor  # (1 + K,)


@dataclass(frozen=True)
class StreamedClassData(ClassData):
    """Data that are never together: every pass reads the chunks anew, and adds up what all processes found."""

    source: Source = field(kw_only=True)
    keeps = False

    def total(self, here: Tensor) -> Tensor:
        """The sum over all processes."""
        return self.source.join.total(here)

    @property
    def pieces(self) -> Iterable[tuple[int, ClassBlock]]:
        """Data of this process with their class, one chunk after the other."""
        return self.source.pieces(self.size)

    @property
    def class_counts(self) -> Tensor:
        """Labelled data of each class, ``N_k``, shape ``(K,)``."""
        return self.source.per_class[1:]

    @property
    def num_data(self) -> Tensor:
        """All data, labelled or not, shape ``()``."""
        return self.source.per_class.sum()

    @property
    def is_labelled(self) -> bool:
        """Whether every datum of every process has a label."""
        return not bool(self.source.per_class[0] > 0)

    def rows(self, index: Tensor) -> "StreamedClassData":
        """Some rows of the batch: all have the same data."""
        return self


def labelled(model: PRBF, args: tuple[Any, ...]) -> Labelled:
    """Inputs in float64 and labels as int64."""
    X, labels = args if len(args) == 2 else (args[0], None)
    y = class_labels(labels, len(X), model.num_classes).to(X.device)
    return X.detach().double(), torch.zeros_like(y) if model.num_classes == 1 else y


def _checked(model: PRBF, number: int, args: tuple[Any, ...]) -> None:
    """Refuse a chunk that cannot be used.

    :raises BadInput: naming it.
    """
    if len(args) > 2:
        raise BadInput(f"chunk {number} has {len(args)} arguments; expected (X, labels), or (X,) of one class.")
    try:
        check_inputs(args[0])
        labelled(model, args)
    except BadInput as error:
        raise BadInput(f"chunk {number}: {error}") from error
