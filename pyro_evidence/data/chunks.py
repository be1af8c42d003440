"""Chunks as they are handed over, tuples of a model's arguments for some of the rows, and where these may come from."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_evidence import files
from pyro_evidence.data.arrays import as_tensor, exactly, require_dense, require_rows
from pyro_evidence.data.ranks import COMMUNICATOR, SINGLE_PROCESS, Communicator
from pyro_evidence.errors import BadInput
from pyro_evidence.lazy_import import import_extra
from pyro_evidence.settings import check_count

NO_CHUNK = "no chunk, not even an empty one"
SIZE = 100_000  # rows of a slice or of a chunk, by default
FEW = 256  # rows on which a model is recognised where others hold more
Chunks = Iterable[Sequence[Any]]  # the model's positional arguments for some of the rows, as often as asked


def require_repeatable(chunks: Any) -> None:
    """Refuse what can be gone through only once, or not at all.

    :raises BadInput: naming its type.
    """
    single = isinstance(chunks, memoryview) or (isinstance(chunks, Tensor) and not chunks.dim())
    if single or not isinstance(chunks, Iterable):
        raise BadInput(f"chunks is a {type(chunks).__name__}; expected a list of tuples of the model's arguments.")
    if iter(chunks) is chunks:
        raise BadInput(
            f"chunks is a {type(chunks).__name__}, which can be gone through only once; expected a list, a DataLoader, "
            "or another object that starts anew each time it is iterated."
        )


def arguments(number: int, chunk: Any) -> tuple[Any, ...]:
    """One chunk as arguments; arrays of NumPy's, mapped from a file or not, become tensors.

    :raises BadInput: for what is no tuple.
    """
    if not isinstance(chunk, tuple | list) or not chunk:
        raise BadInput(f"chunk {number} is a {type(chunk).__name__}; expected a tuple of the model's arguments.")
    found = tuple(as_tensor(x) for x in chunk)
    for place, x in enumerate(found):
        if isinstance(x, Tensor):
            require_dense(f"argument {place} of chunk {number}", x)
    return found


def num_rows(args: Sequence[Any]) -> int:
    """Rows of a chunk: those of the first tensor among its arguments.

    :raises BadInput: where there is none.
    """
    first = next((x for x in args if isinstance(x, Tensor) and x.dim()), None)
    if first is None:
        raise BadInput("a chunk holds no tensor with rows; expected the model's arguments, as (X, t).")
    return len(first)


def kind(model: Any, args: Sequence[Any]) -> str:
    """Description of a model and its arguments but for the number of rows: to compare chunks, and processes."""
    return f"{re.sub(' at 0x[0-9a-f]+', '', repr(model))} on {shapes_of(args)}"  # addresses differ between processes


def shapes_of(args: Sequence[Any]) -> str:
    """Shape but for the number of rows, and dtype, of each tensor; the type of anything else."""
    return ", ".join(
        f"(., {', '.join(map(str, x.shape[1:]))}) {str(x.dtype).removeprefix('torch.')}"
        if isinstance(x, Tensor) and x.dim()
        else type(x).__name__
        for x in args
    )


def with_rows(chunks: Chunks) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """The chunks that are not empty, with their numbers."""
    for number, chunk in enumerate(chunks):
        args = arguments(number, chunk)
        if num_rows(args):
            yield number, args


def looked_through(
    model: Any, chunks: Chunks, join: Communicator, check: Callable[[int, tuple[Any, ...]], Any]
) -> tuple[int, ...]:
    """One pass in which every chunk is checked, here and elsewhere; the rows of each process.

    :param check: raises for what is wrong with a chunk; told its number and its arguments.
    :raises BadInput: on every process what is wrong on one of them, and where they are of different kinds.
    """
    num, first = 0, ""
    with heard_by_all(join):
        require_repeatable(chunks)
        for number, chunk in enumerate(chunks):
            args = arguments(number, chunk)
            here, rows = kind(model, args), num_rows(args)
            first = first or here
            if here != first:
                raise BadInput(f"chunk {number} is {here}, the first {first}: expected the same.")
            if rows:
                try:
                    check(number, args)
                except BadInput as error:
                    said = str(error).split("Trace Shapes:")[0].strip()  # which Pyro appends to what a model raises
                    raise BadInput(said if f"chunk {number}" in said else f"chunk {number}: {said}") from error
            num += rows
    join.check_equal("models, columns or dtypes", first or NO_CHUNK)
    counts = tuple(int(x) for x in join.gathered(torch.tensor([float(num)], dtype=torch.float64)))
    if not sum(counts):
        raise BadInput("the chunks hold no rows; expected at least one.")
    return counts


@contextmanager
def heard_by_all(join: Communicator) -> Iterator[None]:
    """Inside, an error of one process is raised by all of them, at the end."""
    wrong: Exception | None = None
    try:
        yield
    except Exception as error:
        wrong = error
    join.raise_together(wrong)


def agree_on_kind(model: Any, chunks: Chunks, join: Communicator, make: Callable[[tuple[Any, ...]], Any]) -> None:
    """Refuse processes with different models, columns or dtypes, as their first chunks show them.

    :param make: raises for what is wrong with the first rows of a process, before they are shared.
    :raises BadInput: on all of them; also for what can be gone through only once.
    """
    if join is SINGLE_PROCESS:
        return require_repeatable(chunks)
    first = NO_CHUNK
    with heard_by_all(join):
        require_repeatable(chunks)
        for chunk in chunks:
            first = kind(model, arguments(0, chunk))
            break
        for _, args in with_rows(chunks):
            make(few(args))
            break
    join.check_equal("models, columns or dtypes", first)


def first_rows(chunks: Chunks, join: Communicator) -> tuple[Any, ...]:
    """The first chunk that has rows; among several processes the first few rows of all, the same on each.

    Arguments that are no tensors with as many rows as the first one are taken as they are.

    :raises BadInput: where there are none.
    """
    some = next((args for _, args in with_rows(chunks)), None)
    if join is not SINGLE_PROCESS:
        args = few(some or next(arguments(number, chunk) for number, chunk in enumerate(chunks)))
        return tuple(join.gathered(x)[:FEW] if has_rows(x, num_rows(args)) else x for x in args)
    if some is None:
        raise BadInput("the chunks hold no rows; expected at least one tuple of the model's arguments with some.")
    return some


def few(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The first few rows of some."""
    size = num_rows(args)
    return tuple(x[:FEW].contiguous() if has_rows(x, size) else x for x in args)


def cut_rows(args: Sequence[Any], size: int, rows: Any) -> tuple[Any, ...]:
    """Arguments with some rows, a slice or their numbers, of each tensor of ``size`` rows; others as they are."""
    return tuple(x[rows] if has_rows(x, size) else x for x in args)


def has_rows(x: Any, size: int) -> bool:
    """Whether an argument is a tensor of so many rows."""
    return isinstance(x, Tensor) and x.dim() > 0 and len(x) == size


def digest_of_chunks(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A hash of all bytes of the columns, one chunk after the other, and of those of other processes; one pass.

    :param args: of ``run_chunks``: the chunks.
    """
    chunks = args[0] if args else kwargs["chunks"]
    require_repeatable(chunks)
    columns: dict[int, Any] = {}
    latest: dict[int, str] = {}  # what has no rows of its own: the same in every chunk, however they are cut
    for number, chunk in enumerate(chunks):
        args = arguments(number, chunk)
        for place, value in enumerate(args):
            column = columns.setdefault(place, hashlib.sha256())
            if has_rows(value, num_rows(args)):
                column.update(files.bytes_of(value.detach()))
                continue
            tensors: list[Tensor] = []
            text = files.encoded(value, tensors, f"argument {place} of chunk {number}")
            here = files.digest(json.dumps(text), tensors)
            if here != latest.get(place):
                latest[place] = here
                column.update(here.encode())
    said = COMMUNICATOR.get().gather_str(" ".join(c.hexdigest() for c in columns.values()))
    return hashlib.sha256(" ".join(said).encode()).hexdigest()


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

    def __init__(self, *arrays: Any, size: int = SIZE) -> None:
        require_rows("Slices", *arrays)
        self.arrays = arrays
        self.size: int = check_count("size", size)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for begin in range(0, max(1, len(self.arrays[0])), self.size):
            yield tuple(as_tensor(a[begin : begin + self.size]) for a in self.arrays)


class Parquet:
    """A Parquet file, or several, in chunks of some rows.  Needs the extra ``[parquet]``.

    Pages that have a checksum are compared with it (``pyarrow.parquet.write_table(..., write_page_checksum=True)``).  A
    file without, as most are, does not tell a number that was damaged from another one.

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
        size: int = SIZE,
        dtype: torch.dtype | None = torch.float64,
    ) -> None:
        paths = [path] if isinstance(path, str | Path) else path
        named = [[c] if isinstance(c, str) else c for c in columns] if isinstance(columns, list | tuple) else [[]]
        words = [name for names in named for name in names] if all(isinstance(n, list | tuple) for n in named) else []
        if not isinstance(paths, list | tuple) or not paths or not all(isinstance(p, str | Path) for p in paths):
            raise BadInput(f"path={path!r}; expected the path of a Parquet file, or a list of some.")
        if not all(named) or not words or not all(isinstance(name, str) for name in words):
            raise BadInput(
                f"columns={columns!r}; expected for each argument the name of a column or a list of some, such as "
                f"[('x1', 'x2'), 'y']."
            )
        if not isinstance(dtype, torch.dtype | None):
            raise BadInput(f"dtype={dtype!r}; expected one of torch's, such as torch.float64, or None.")
        self.paths: list[Path] = [Path(p) for p in paths]
        self.columns: tuple[str | Sequence[str], ...] = tuple(columns)
        self._names: list[str] = list(dict.fromkeys(words))
        self.size: int = check_count("size", size)
        self.dtype = dtype
        for each in self.paths:
            with self._opened(each):
                pass

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        """A file that has each column once; what goes wrong while it is read is an error message that names it."""
        needed = "Parquet needs pyarrow: pip install 'pyro_evidence[parquet]'."
        arrow, parquet = (import_extra(m, needed) for m in ("pyarrow", "pyarrow.parquet"))
        try:
            if path.exists() and not path.is_file():  # a pipe would be waited for
                raise BadInput(f"{path} cannot be read as a Parquet file: it is no regular file; expected one on disk.")
            if path.exists() and (size := _size_of_footer(path)) > files.LONGEST_HEADER:
                raise OSError(f"it says that it describes itself in {size:,} bytes")
            with parquet.ParquetFile(path, page_checksum_verification=True) as file:
                there = file.schema_arrow.names
                for name in self._names:
                    if there.count(name) > 1:
                        raise BadInput(f"{path} has a column {name} twice; expected one of that name. Rename one.")
                if missing := [name for name in self._names if name not in there]:
                    names = ", ".join(sorted(there))
                    raise BadInput(f"{path} has no column {', '.join(missing)}; expected names among {names}.")
                yield file
        except FileNotFoundError:
            raise
        except (arrow.ArrowException, OSError, UnicodeError) as error:
            raise BadInput(
                f"{path} cannot be read as a Parquet file ({error}): it is damaged or foreign; expected a file that "
                f"pyarrow.parquet.write_table or DataFrame.to_parquet wrote."
            ) from error

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
            raise BadInput(f"{path}: column {name} holds {column.type}; expected numbers, or true and false.")
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


def _size_of_footer(path: Path) -> int:
    """Bytes of the description at the end of a Parquet file, which is read whole before anything else."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8))
        size, magic = file.read(4), file.read(4)
    return int.from_bytes(size, "little") if magic in (b"PAR1", b"PARE") else 0


def _argument(columns: Mapping[str, Tensor], names: str | Sequence[str]) -> Tensor:
    """One of the model's arguments: a column, or several side by side in their common dtype."""
    if isinstance(names, str):
        return columns[names]
    parts = [columns[n] for n in names]
    common = max((p.dtype for p in parts), key=lambda d: (d.is_floating_point, d.itemsize))
    return torch.stack([exactly(p, common, f"column {n}") for p, n in zip(parts, names, strict=True)], -1)
