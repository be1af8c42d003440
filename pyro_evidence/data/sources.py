"""Where chunks come from: arrays that are sliced, those mapped from a file too, and Parquet files."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.arrays import as_tensor, require_rows
from pyro_evidence.errors import BadInput
from pyro_evidence.settings import check_count


class Slices:
    """Arrays in slices of some rows: tensors, NumPy's arrays, or what ``numpy.load(..., mmap_mode="r")`` maps.

    :param arrays: the model's arguments, of one length; a slice is copied when it is its turn.
    :param size: rows of a slice.
    :raises BadInput: for arrays of different lengths.

    >>> import torch
    >>> from pyro_evidence.data import Slices
    >>> [len(x) for x, _ in Slices(torch.zeros(25, 2), torch.zeros(25), size=10)]
    [10, 10, 5]
    """

    def __init__(self, *arrays: Any, size: int = 100_000) -> None:
        require_rows("Slices", *arrays)
        self.arrays = arrays
        self.size: int = check_count("size", size)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for begin in range(0, max(1, len(self.arrays[0])), self.size):
            yield tuple(as_tensor(a[begin : begin + self.size]) for a in self.arrays)


class Parquet:
    """A Parquet file, or several, in chunks of some rows.  Needs the extra ``[parquet]``.

    :param path: of a file, or of several that are read one after the other.
    :param columns: for each of the model's arguments the name of a column, ``(N,)``, or of several, ``(N, m)``.
    :param size: rows of a chunk, at most.
    :param dtype: of the tensors; None leaves each column its own, several of them their common one.
    :raises ImportError: without pyarrow.
    :raises BadInput: here or while it is gone through, for what is no Parquet file or a damaged one, for a column that
        is not there or occurs twice, and for numbers that ``dtype`` would round.

    >>> import os, tempfile
    >>> import pyarrow
    >>> from pyarrow import parquet
    >>> from pyro_evidence.data import Parquet
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "rows.parquet")
    ...     parquet.write_table(pyarrow.table({"a": [1.0, 2.0, 3.0], "b": [0.0, 0.5, 1.0], "t": [0, 1, 1]}), path)
    ...     [tuple(X.shape) for X, t in Parquet(path, [("a", "b"), "t"], size=2)]
    [(2, 2), (1, 2)]
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        columns: Sequence[str | Sequence[str]],
        *,
        size: int = 100_000,
        dtype: torch.dtype | None = torch.float64,
    ) -> None:
        self.paths: list[Path] = [Path(path)] if isinstance(path, str | Path) else [Path(p) for p in path]
        self.columns: tuple[str | Sequence[str], ...] = tuple(columns)
        self.size: int = check_count("size", size)
        self.dtype = dtype
        for each in self.paths:
            with self._opened(each):
                pass

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        """A file that has each column once; what goes wrong while it is read is an error message that names it."""
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise ImportError("Parquet needs pyarrow: pip install 'pyro_evidence[parquet]'.") from error
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise BadInput(f"{path} cannot be read as a Parquet file: it is no regular file; expected one on disk.")
        try:
            with parquet.ParquetFile(path) as file:
                there = file.schema_arrow.names
                for name in self._names:
                    if there.count(name) > 1:
                        raise BadInput(
                            f"{path} has a column {name} twice; expected one of that name. Rename the other."
                        )
                if missing := [name for name in self._names if name not in there]:
                    names = ", ".join(sorted(there))
                    raise BadInput(f"{path} has no column {', '.join(missing)}; expected names among {names}.")
                yield file
        except FileNotFoundError:
            raise
        except (ArrowException, OSError, UnicodeDecodeError) as error:
            raise BadInput(
                f"{path} cannot be read as a Parquet file ({error}): it is damaged or foreign; expected a file that "
                f"pyarrow.parquet.write_table or DataFrame.to_parquet wrote."
            ) from error

    @property
    def _names(self) -> list[str]:
        names = [n for c in self.columns for n in ([c] if isinstance(c, str) else c)]
        return list(dict.fromkeys(names))

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for path in self.paths:
            with self._opened(path) as file:
                for batch in file.iter_batches(batch_size=self.size, columns=self._names):
                    columns = {name: self._column(batch, name, path) for name in self._names}
                    yield tuple(_argument(columns, names) for names in self.columns)

    def _column(self, batch: Any, name: str, path: Path) -> Tensor:
        """One column; what is null becomes nan.

        :raises BadInput: for what are no numbers, and for numbers that would be rounded.
        """
        from pyarrow import ArrowInvalid

        column = batch.column(batch.schema.get_field_index(name))
        found = column.to_numpy(zero_copy_only=False)
        if found.dtype.kind not in "fiub":
            raise BadInput(f"{path}: column {name} holds {found.dtype}; expected numbers.")
        given = torch.tensor(found)  # whole numbers beside null have become float64
        dtype = self.dtype or given.dtype
        try:  # Arrow refuses to round whole numbers, and to cut fractions off
            column.cast("float32" if dtype.itemsize == 2 else str(dtype).removeprefix("torch."))
            if column.null_count and not dtype.is_floating_point:
                raise ValueError("nothing at all in some rows")
        except (ArrowInvalid, ValueError) as error:
            raise BadInput(
                f"column {name} of {path} holds numbers ({error}) which {dtype} would round; expected some that it "
                f"holds. Pass dtype=None or dtype=torch.int64 for whole numbers, subtract an offset from them, or drop "
                f"rows that hold null."
            ) from error
        return given.to(dtype)


def _argument(columns: Mapping[str, Tensor], names: str | Sequence[str]) -> Tensor:
    """One of the model's arguments: a column, or several side by side in their common dtype."""
    if isinstance(names, str):
        return columns[names]
    parts = [columns[n] for n in names]
    common = max((p.dtype for p in parts), key=lambda d: (d.is_floating_point, d.itemsize))
    return torch.stack([p.to(common) for p in parts], -1)
