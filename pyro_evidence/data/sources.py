"""Where chunks come from: arrays that are sliced, those mapped from a file too, and Parquet files."""

from collections.abc import Iterator, Sequence
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
        self._require_columns()

    def _require_columns(self) -> None:
        """Refuse names that a file does not have.

        :raises BadInput: naming file and columns.
        """
        for path in self.paths:
            with _opened(path) as file:
                there = set(file.schema_arrow.names)
            missing = [n for n in self._names if n not in there]
            if missing:
                raise BadInput(
                    f"{path} has no column {', '.join(missing)}; expected names among {', '.join(sorted(there))}."
                )

    @property
    def _names(self) -> list[str]:
        names = [n for c in self.columns for n in ([c] if isinstance(c, str) else c)]
        return list(dict.fromkeys(names))

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for path in self.paths:
            with _opened(path) as file:
                for batch in file.iter_batches(batch_size=self.size, columns=self._names):
                    yield tuple(self._argument(batch, c) for c in self.columns)

    def _argument(self, batch: Any, names: str | Sequence[str]) -> Tensor:
        if isinstance(names, str):
            return self._column(batch, names)
        parts = [self._column(batch, n) for n in names]
        common = max((p.dtype for p in parts), key=lambda d: (d.is_floating_point, d.itemsize))
        return torch.stack([p.to(common) for p in parts], -1)

    def _column(self, batch: Any, name: str) -> Tensor:
        """One column; what is null becomes nan."""
        found = batch.column(batch.schema.get_field_index(name)).to_numpy(zero_copy_only=False)
        if found.dtype.kind not in "fiub":
            raise BadInput(f"column {name} holds {found.dtype}; expected numbers.")
        tensor = torch.tensor(found)
        return tensor if self.dtype is None else tensor.to(self.dtype)


def _opened(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("Parquet needs pyarrow: pip install 'pyro_evidence[parquet]'.") from error
    return parquet.ParquetFile(path)
