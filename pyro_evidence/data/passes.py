"""Passes over chunks, each compared with the first: a fit adds up sums that are of the same rows, or says so."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.chunks import Chunks, Slices, arguments, has_rows, num_rows, require_repeatable, shapes_of
from pyro_evidence.errors import BadInput, NotConverged
from pyro_evidence.settings import seeded

DOUBLE = torch.finfo(torch.float64).eps
SAID = (  # of what a pass adds up of a column
    "{value:.0f} numbers that are nan or infinite in {column}",
    "{column} adding up to {value!r}",
    "squares of {column} adding up to {value!r}",
)


def columns_of(args: Sequence[Any], size: int) -> list[Tensor]:
    """The columns of real numbers ``(n, C)`` of each argument that is made of numbers, on the device of the first.

    A number that comes with a chunk counts once for each of its rows.
    """
    found: list[Tensor] = []
    for x in args:
        if isinstance(x, int | float):
            x = torch.tensor(x, dtype=torch.float64)
        if isinstance(x, Tensor):
            x = x.detach() if x.requires_grad else x
            if not x.is_floating_point():
                x = torch.view_as_real(x) if x.is_complex() else x.double()
            x = x.to(found[0].device) if found and x.device != found[0].device else x
            if not has_rows(x, size):
                x = x.reshape(1, -1).expand(size, -1)
            found.append(x if x.dim() == 2 else x.reshape(size, -1))
    return found


def column_sums(columns: Sequence[Tensor]) -> Tensor:
    """Number of nan or infinite entries of each column, and sum and sum of squares of the others, ``(3, C)``."""
    sums = torch.cat([x.sum(0, dtype=torch.float64) for x in columns])
    if bool(sums.isfinite().all()):
        return torch.stack([torch.zeros_like(sums), sums, torch.cat([x.double().square().sum(0) for x in columns])])
    missing = torch.cat([len(x) - x.isfinite().sum(0) for x in columns])
    return torch.stack([missing.double(), *column_sums([x.nan_to_num(0.0, 0.0, 0.0) for x in columns])[1:]])


def kinds_of(args: Sequence[Any]) -> list[Any]:
    """Dtype and shape of each argument but for its number of rows, or its type: the same in all chunks."""
    return [(x.dtype, x.dim(), x.shape[1:]) if isinstance(x, Tensor) else type(x) for x in args]


@dataclass(frozen=True, eq=False)
class Combination:
    """One combination of all columns, each in units of its size in the first chunk.

    Its squares change also where the numbers of one column are handed out to other rows.

    :ivar kinds: of the arguments, as :func:`kinds_of`; ``shapes`` in words.
    :ivar weights: of each argument's columns, ``(C,)`` each, in their dtype.
    :ivar by_row: the same times a weight of each row, row by row, ``(n C,)`` each, for as many as a chunk had so far.
    """

    kinds: list[Any]
    shapes: str
    weights: list[Tensor]
    by_row: list[Tensor]

    @staticmethod
    def of(args: Sequence[Any], columns: Sequence[Tensor]) -> "Combination":
        """A combination of the columns of the first chunk with rows."""
        sizes = (column_sums(columns)[2] / len(columns[0])).sqrt()
        units = torch.where((sizes > 0.0) & sizes.isfinite(), sizes, 1.0)
        weights = (torch.arange(1.0, len(sizes) + 1.0).to(sizes).sin() / units).split([x.shape[1] for x in columns])
        own = [w.to(x) for w, x in zip(weights, columns, strict=True)]
        return Combination(kinds_of(args), shapes_of(args), own, [w[:0] for w in own])

    def sums(self, columns: Sequence[Tensor]) -> Tensor:
        """:func:`column_sums` of the columns of a chunk, and of their combination, ``(3, C + 1)``."""
        found = column_sums(columns)
        columns = [x.nan_to_num(0.0, 0.0, 0.0) for x in columns] if bool(found[0].any()) else columns
        parts = [(x @ w).double() for x, w in zip(columns, self.weights, strict=True)]
        return torch.cat([found, column_sums([torch.stack(parts).sum(0).unsqueeze(-1)])], -1)

    def marks(self, columns: Sequence[Tensor]) -> list[float] | None:
        """For each argument the combination of a chunk's columns, added up with weights of the rows; None with gaps.

        Equal rows in the same order have equal marks, to the last digit.  The weights are of either sign, since
        rounding is of the size of a sum, no two alike, and none near zero; those of fewer rows are the first of more.
        """
        found = []
        for i, (x, weights) in enumerate(zip(columns, self.weights, strict=True)):
            if len(self.by_row[i]) < x.numel():
                sizes, signs = torch.rand(len(x), 2, generator=seeded(0), dtype=torch.float64).unbind(-1)
                rows = ((0.5 + sizes) * (signs - 0.5).sign()).to(weights)
                self.by_row[i] = torch.outer(rows, weights).reshape(-1)
            found.append(float(x.reshape(-1).dot(self.by_row[i][: x.numel()])))
        return found if all(map(math.isfinite, found)) else None

    @property
    def names(self) -> list[str]:
        """Names of all columns, and of the combination."""
        numbers = [(i, place) for place, w in enumerate(self.weights) for i in range(len(w))]
        return [*(f"column {i} of argument {place}" for i, place in numbers), "a combination of all columns"]


@dataclass(frozen=True, eq=False)
class Part:
    """Sums of a chunk for a pass: number of rows, :meth:`Combination.marks`, and :meth:`Combination.sums`."""

    rows: int
    marks: list[float] | None
    sums: Tensor


@dataclass
class Pass:
    """Sums of one pass, by which it is told from a pass over other rows.

    :ivar first: the pass that it is compared with; None for that pass itself.
    :ivar of: the combination of columns; None before the first chunk with rows of the first pass.
    :ivar parts: of each chunk with rows so far; that of the first pass where the marks are the same.
    """

    number: int
    first: "Pass | None" = None
    of: Combination | None = None
    parts: list[Part] = field(default_factory=list)

    def add(self, args: Sequence[Any]) -> None:
        """Add up a chunk, whose arguments must be of the kinds of the first."""
        size = num_rows(args)
        columns = columns_of(args, size) if size else []
        if not columns:
            return
        if self.of is None:
            self.of = Combination.of(args, columns)
        marks, place = self.of.marks(columns), len(self.parts)
        there = self.first.parts[place] if self.first is not None and place < len(self.first.parts) else None
        if there is None or marks is None or marks != there.marks:
            there = Part(size, marks, self.of.sums(columns))
        self.parts.append(there)

    @property
    def rows(self) -> int:
        """Number of rows so far."""
        return sum(part.rows for part in self.parts)

    @property
    def sums(self) -> Tensor:
        """:meth:`Combination.sums` over all chunks."""
        return torch.stack([part.sums for part in self.parts]).sum(0)


def difference(there: Pass, here: Pass) -> tuple[str, str] | None:
    """In what two passes differ by more than rounding, as each of them has it; None where they agree.

    Numbers of size ``s`` that are rounded anew, and ``n`` additions of them in double precision, move a sum by some
    ``s (eps sqrt(n) + 2.2e-16 n^1.5)``, as errors of either sign do (Higham and Mary, 2019); twice that counts as none.
    """
    n, of = there.rows, there.of
    if n != here.rows or of is None:
        return f"{n} rows", f"{here.rows} rows"
    before, now = there.sums, here.sums
    size = (before[2] / n).sqrt()  # rounding is of the numbers that a sum may cancel
    size[-1:].clamp_(min=len(of.names) ** 0.5)  # of what a row adds up: columns are in units of their size
    eps = max(torch.finfo(w.dtype).eps for w in of.weights)  # of the coarsest dtype
    rounding = 2.0 * size * (eps * n**0.5 + DOUBLE * n**1.5)
    limit = torch.stack([torch.zeros_like(size), rounding, 2.0 * size * rounding])
    differs = (before != now) & ~((before - now).abs() <= limit)  # of nan, too
    if not bool(differs.any()):
        return None
    i, what = differs.mT.nonzero()[0].tolist()
    one, other = (SAID[what].format(value=x[what, i].item(), column=of.names[i]) for x in (before, now))
    return one, other


def tensors_in_memory(chunks: Chunks) -> list[tuple[Tensor, int]] | None:
    """The tensors that chunks are made of, and how often torch has written to each; None where rows are made anew.

    Of memory that torch did not allocate, an array of NumPy's say, it cannot tell.
    """
    if type(chunks) in (list, tuple):
        found = [x for chunk in chunks if isinstance(chunk, tuple | list) for x in chunk]  # others are refused
    elif type(chunks) is Slices:
        found = list(chunks.arrays)
    else:
        return None
    if not all(isinstance(x, Tensor) and x.layout is torch.strided and not x.is_inference() for x in found):
        return None
    if not all(x.untyped_storage().resizable() for x in found):
        return None
    return [(x, x._version) for x in found]


def are_untouched(there: list[tuple[Tensor, int]] | None, now: list[tuple[Tensor, int]] | None) -> bool:
    """Whether the chunks are the very same tensors, to which nothing has been written."""
    if there is None or now is None or len(there) != len(now):
        return False
    return all(x is y and before == after for (x, before), (y, after) in zip(there, now, strict=True))


class SameRows:
    """Chunks of which every complete pass must hold the rows of the first, in any order and in chunks of any size.

    Compared are number of rows, columns and dtypes, and sums and sums of squares of each column and of one combination
    of all columns, each in units of its own size; a chunk that is as it was in the first pass is not added up again.
    Tensors that stay in memory are not gone through: torch counts how often each is written to.

    :raises BadInput: for what can be gone through only once; at the end of a pass over other rows, naming the pass, the
        column, and both numbers.
    """

    def __init__(self, chunks: Chunks) -> None:
        require_repeatable(chunks)
        self.chunks = chunks
        self.groups = getattr(chunks, "groups", None)
        self.passes = 0
        self.of: Combination | None = None  # of the first chunk with rows, also of a pass that was broken off
        self.first: Pass | None = None  # that was complete, with which the others are compared
        self.in_memory: list[tuple[Tensor, int]] | None = None  # when that began
        self.changed = False  # whether a pass was refused

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        self.passes += 1
        first, in_memory = self.first, tensors_in_memory(self.chunks)
        here, known, alike = Pass(self.passes, first, self.of), self.of is not None, True
        compared = first is None or not are_untouched(self.in_memory, in_memory)
        for place, chunk in enumerate(self.chunks):
            args = arguments(place, chunk)
            if compared:
                if here.of is None or kinds_of(args) == here.of.kinds:
                    here.add(args)
                elif first is not None or (known and not here.parts):  # else it was never seen, and is refused as it is
                    self._refuse(here, f"columns {here.of.shapes}", f"{shapes_of(args)} in chunk {place}")
                else:
                    alike = False
                self.of = here.of
            yield args
        if first is None:
            self.first, self.in_memory = here if alike and here.of is not None else None, in_memory
        elif compared:
            found = None if here.parts == first.parts else difference(first, here)
            if found is not None:
                self._refuse(here, *found)
        elif not are_untouched(self.in_memory, tensors_in_memory(self.chunks)):  # amid the pass, so this one once more
            self.passes -= 1
            for _ in self:
                pass

    def _refuse(self, here: Pass, before: str, now: str) -> None:
        self.changed = True
        first = "an earlier pass" if self.first is None else f"pass {self.first.number}"
        raise BadInput(
            f"the rows changed while a fit went over their chunks: {before} in {first}, {now} in pass "
            f"{here.number}. Expected the same rows in every pass, in any order: read them from one place, or pass all "
            f"of them to run(...)."
        )


@contextmanager
def each_pass_compared(chunks: Chunks) -> Iterator[SameRows]:
    """The chunks for a fit inside, whose first look at one chunk comes after a pass that adds up all.

    After an error of the fit one more pass, which may tell that other rows have caused it.

    :raises BadInput: as :class:`SameRows`.
    """
    found = SameRows(chunks)
    for _ in found:
        pass
    try:
        yield found
    except Exception as error:
        if found.first is not None and not (found.changed or isinstance(error, NotConverged)):
            for _ in found:
                pass
        raise
