"""Chunks as they are handed over: tuples of a model's arguments for some of the rows, gone through once a pass."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pyro_evidence import files
from pyro_evidence.data.arrays import as_tensor, require_dense
from pyro_evidence.data.ranks import COMMUNICATOR, SINGLE_PROCESS, Communicator
from pyro_evidence.errors import BadInput

NO_CHUNK = "no chunk, not even an empty one"
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


def agree_on_kind(
    model: Any, chunks: Chunks, join: Communicator, make: Callable[[tuple[Any, ...]], Any] = lambda _: None
) -> None:
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


def require_same_density(joint: Any, join: Communicator) -> None:
    """Refuse processes whose models are others on the same first rows: their sites, or their density at one point.

    :param joint: the model's :class:`~pyro_evidence.program.log_joint.LogJoint` on :func:`first_rows`.
    :raises BadInput: on all of them.
    """
    if join is not SINGLE_PROCESS:
        value = float(joint.log_joint(joint.initial(1, seed=0)[0], joint.initial_theta))
        sites = ", ".join([*joint.latents.names, *joint.observed])
        join.check_equal("models", f"sites {sites} with log density {value:.6g} at one point of the first rows")


def first_rows(chunks: Chunks, join: Communicator) -> tuple[Any, ...]:
    """The first chunk that has rows; among several processes the first few rows of all, the same on each.

    Arguments that are no tensors with as many rows as the first one are taken as they are.

    :raises BadInput: where there are none.
    """
    if join is SINGLE_PROCESS:
        found = next((args for _, args in with_rows(chunks)), None)
        if found is None:
            raise BadInput("the chunks hold no rows; expected at least one tuple of the model's arguments with some.")
        return found
    some = next((args for _, args in with_rows(chunks)), None)
    args = few(some or next(arguments(number, chunk) for number, chunk in enumerate(chunks)))
    size = num_rows(args)
    return tuple(join.gathered(x)[:FEW] if has_rows(x, size) else x for x in args)


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
