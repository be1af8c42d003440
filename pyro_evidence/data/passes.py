"""Passes over chunks, each compared with the first: a fit adds up sums that are of the same rows, or says so."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.chunks import Chunks, arguments, has_rows, num_rows, require_repeatable, shape_of
from pyro_evidence.data.ranks import Statistics, zeros_like
from pyro_evidence.errors import BadInput, NotConverged

DOUBLE = torch.finfo(torch.float64).eps
SAID = {  # of what a pass adds up
    "rows": "{value:.0f} rows",
    "missing": "{value:.0f} numbers that are nan or infinite in {column}",
    "sums": "{column} adding up to {value!r}",
    "squares": "squares of {column} adding up to {value!r}",
}


@dataclass(frozen=True)
class ColumnSums(Statistics):
    """What a pass adds up of columns, in double precision, by which it is told from a pass over other rows."""

    rows: Tensor  # ()
    missing: Tensor  # (C,) how many numbers are nan or infinite; the sums are of the others
    sums: Tensor  # (C,)
    squares: Tensor  # (C,)

    @staticmethod
    def of(columns: Sequence[Tensor]) -> "ColumnSums":
        """The sums over one chunk.

        :param columns: ``(n, C)`` of each argument.
        """
        finite, gaps = without_gaps(columns)
        sums = torch.cat([x.sum(0, dtype=torch.float64) for x in finite])
        squares = torch.cat([x.double().square().sum(0) for x in finite])
        return ColumnSums(sums.new_tensor(float(len(finite[0]))), gaps, sums, squares)

    @staticmethod
    def combined(columns: Sequence[Tensor], weights: Sequence[Tensor]) -> "ColumnSums":
        """The sums of one combination of all columns, at a fraction of the cost.

        Squares of a combination change also where the numbers of one column are handed out to other rows.
        """
        parts = [(x @ w.to(x)).double() for x, w in zip(columns, weights, strict=True)]
        one = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        sums, squares, gaps = one.sum(), one @ one, one.new_zeros(1)
        if not bool(sums.isfinite()):
            finite, each = without_gaps(columns)
            if bool(each.any()):
                return ColumnSums.combined(finite, weights)._with_gaps(each)
        return ColumnSums(sums.new_tensor(float(len(one))), gaps, sums.reshape(1), squares.reshape(1))

    def _with_gaps(self, missing: Tensor) -> "ColumnSums":
        return ColumnSums(self.rows, missing.sum().reshape(1), self.sums, self.squares)


def without_gaps(columns: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Columns with 0 in place of what is nan or infinite, and how many of these each one had, ``(C,)``."""
    missing = torch.cat([len(x) - x.isfinite().sum(0) for x in columns])
    return [torch.where(x.isfinite(), x, 0.0) for x in columns], missing.double()


def columns_of(args: Sequence[Any]) -> list[Tensor]:
    """The columns of real numbers ``(n, C)`` of each argument that is made of numbers.

    A number that comes with a chunk counts once for each of its rows.
    """
    size, found = num_rows(args), []
    device = next(x.device for x in args if isinstance(x, Tensor) and x.dim())
    for x in args:
        x = torch.tensor(x, dtype=torch.float64) if isinstance(x, int | float) else x
        if isinstance(x, Tensor) and x.layout is torch.strided and not x.is_meta:
            x = (torch.view_as_real(x) if x.is_complex() else x).detach().to(device)
            x = x if x.is_floating_point() else x.double()
            found.append(x.reshape(size, -1) if has_rows(x, size) else x.reshape(1, -1).expand(size, -1))
    return found


class SameRows:
    """Chunks of which every complete pass must hold the rows of the first, in any order and in chunks of any size.

    Compared are number of rows, columns and dtypes, and sums and sums of squares of one combination of all columns,
    each in units of its own size; where these differ, another pass tells which column it is.

    :raises BadInput: for what can be gone through only once; at the end of a pass over other rows, naming the pass, the
        column, and both numbers.
    """

    def __init__(self, chunks: Chunks) -> None:
        require_repeatable(chunks)
        self.chunks = chunks
        self.groups = getattr(chunks, "groups", None)
        self.passes = 0
        self.number = 0  # of the first complete pass, with which the others are compared
        self.changed = False  # whether a pass was refused
        self.kinds: list[str] = []
        self.eps = DOUBLE  # rounding of the coarsest dtype
        self.weights: list[Tensor] = []
        self.each: ColumnSums | None = None  # of all columns
        self.all: ColumnSums | None = None  # of their combination

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        self.passes += 1
        number = self.passes
        each: ColumnSums | None = None
        combined: ColumnSums | None = None
        for place, chunk in enumerate(self.chunks):
            args = arguments(place, chunk)
            kinds = [shape_of(x) for x in args]
            if self.all is not None and kinds != self.kinds:
                self._refuse(f"columns {', '.join(self.kinds)}", f"{', '.join(kinds)} in chunk {place}", number)
            columns = columns_of(args) if num_rows(args) else []
            if columns:
                if self.all is None and each is None:
                    self._begin(kinds, columns)
                if kinds == self.kinds:  # else whoever goes through these chunks first refuses them
                    if self.all is None:
                        each = _plus(each, ColumnSums.of(columns))
                    combined = _plus(combined, ColumnSums.combined(columns, self.weights))
            yield args
        if self.all is None:
            self.each, self.all, self.number = each, combined, number
        else:
            self._compare(zeros_like(self.all) if combined is None else combined, number)

    def _begin(self, kinds: list[str], columns: list[Tensor]) -> None:
        """A combination of columns of these kinds, each in units of its size in the first chunk."""
        self.kinds, self.eps = kinds, max(torch.finfo(x.dtype).eps for x in columns)
        sizes = [(x.square().sum(0) / len(x)).sqrt().double() for x in without_gaps(columns)[0]]
        angles = torch.arange(1.0, sum(map(len, sizes)) + 1.0).to(sizes[0]).split([len(x) for x in sizes])
        pairs = zip(angles, sizes, strict=True)
        self.weights = [a.sin() / torch.where((x > 0.0) & x.isfinite(), x, 1.0) for a, x in pairs]

    def _compare(self, here: ColumnSums, number: int) -> None:
        assert self.all is not None and self.each is not None
        floor = sum(map(len, self.weights)) ** 0.5  # of what a row adds up: columns are in units of their size
        found = _difference(self.all, here, self.eps, ["a combination of all columns"], floor)
        if found is None:
            return
        again: ColumnSums | None = None
        for place, chunk in enumerate(self.chunks):
            args = arguments(place, chunk)
            if num_rows(args) and [shape_of(x) for x in args] == self.kinds:
                again = _plus(again, ColumnSums.of(columns_of(args)))
        if again is not None and int(again.rows) == int(here.rows):
            names = [f"column {i} of argument {place}" for place, w in enumerate(self.weights) for i in range(len(w))]
            found = _difference(self.each, again, self.eps, names) or found
        self._refuse(*found, number)

    def _refuse(self, before: str, now: str, number: int) -> None:
        self.changed = True
        raise BadInput(
            f"the rows changed while a fit went over their chunks: {before} in pass {self.number}, {now} in pass "
            f"{number}. Expected the same rows in every pass, in any order: read them from one place, or pass all of "
            f"them to run(...)."
        )


def _plus(total: ColumnSums | None, sums: ColumnSums) -> ColumnSums:
    return sums if total is None else total + sums


def _difference(
    there: ColumnSums, here: ColumnSums, eps: float, names: list[str], floor: float = 0.0
) -> tuple[str, str] | None:
    """In what two passes differ by more than rounding, as each of them has it; None where they agree.

    Numbers of size ``s`` that are rounded anew, and ``n`` additions of them in double precision, move a sum by some
    ``s (eps sqrt(n) + 2.2e-16 n^1.5)``, as errors of either sign do (Higham and Mary, 2019); twice that counts as none.
    """
    n = there.rows
    size = (there.squares / n).sqrt().clamp(min=floor)  # rounding is of the numbers that a sum may cancel
    rounding = 2.0 * size * (eps * n.sqrt() + DOUBLE * n**1.5)
    limits = {"rows": 0.0 * n, "missing": 0.0 * n, "sums": rounding, "squares": 2.0 * size * rounding}
    for what, limit in limits.items():
        before, now = getattr(there, what).reshape(-1), getattr(here, what).reshape(-1)
        differs = (before != now) & ~((before - now).abs() <= limit)  # of nan, too
        if bool(differs.any()):
            i = int(differs.nonzero()[0])
            one, other = (SAID[what].format(value=x[i].item(), column=names[i]) for x in (before, now))
            return one, other
    return None


@contextmanager
def each_pass_compared(chunks: Chunks) -> Iterator[SameRows]:
    """The chunks for a fit inside; after an error of it one more pass, which may tell that other rows have caused it.

    :raises BadInput: as :class:`SameRows`.
    """
    found = SameRows(chunks)
    try:
        yield found
    except Exception as error:
        if found.all is not None and not (found.changed or isinstance(error, NotConverged)):
            for _ in found:
                pass
        raise
