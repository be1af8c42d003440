"""Communication between processes that hold shares of the rows: a pass is a sum, and sums of all processes add up."""

import hashlib
import platform
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.metadata import version
from types import CellType, CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor


class Statistics:
    """A frozen dataclass of tensors, which are added up field by field: ``a + b`` are those of both sets of rows."""

    def __add__(self, other: Any) -> Any:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return type(self)(*(a + b for a, b in pairs))


Sums = TypeVar("Sums", bound=Any)  # over rows: a tensor, or a value made of tensors; ``+`` adds two passes


@dataclass(frozen=True)
class Communicator:
    """Communication of this process with those that hold the other rows; as it stands here there are none.

    :ivar rank: number of this process, out of ``num_ranks``.
    :ivar restarts: those that have the same rows, among whom restarts are shared out; None where nobody has.
    :ivar is_first: whether this process speaks for all: shows progress, writes files.
    """

    rank: int = 0
    num_ranks: int = 1
    restarts: "Communicator | None" = None
    is_first: bool = True

    def total(self, here: Sums) -> Sums:
        """Sum over all processes, in the order of their ranks."""
        return here

    def gathered(self, rows: Tensor) -> Tensor:
        """Rows of all processes, one after the other."""
        return rows

    def check_equal(self, what: str, here: str) -> None:
        """Refuse processes that say different things of themselves.

        :raises BadInput: on all of them.
        """

    def gather_str(self, here: str) -> list[str]:
        """Texts of all processes, in their order."""
        return [here]

    def raise_together(self, wrong: BaseException | None) -> None:
        """Raise on every process what is wrong on one of them."""
        if wrong is not None:
            raise wrong


EMPTY = CellType()  # of a closure, whose variable has no value yet
SINGLE_PROCESS = Communicator()  # which has all rows
COMMUNICATOR: ContextVar[Communicator] = ContextVar("join", default=SINGLE_PROCESS)


def require_same_settings(engine: Any, join: Communicator) -> None:
    """Refuse processes with other versions, engines, models or settings.

    Functions are compared by their code, and the real numbers and tensors that they close over.

    :raises BadInput: on all of them, naming the first setting that differs.
    """
    packages = [f"{name} {version(name)}" for name in ("torch", "pyro-ppl")]
    join.check_equal("versions", ", ".join([f"Python {platform.python_version()}", *packages]))
    settings = {name: value for name, value in vars(engine).items() if not name.startswith("_")}
    settings["resumed"] = getattr(engine, "_earlier", None) is not None
    join.check_equal("models", f"{type(engine).__name__} of {_described(settings.pop('model'))}")
    for name, value in settings.items():
        join.check_equal("settings", f"{name}={_described(value)}")


def _described(value: Any) -> str:
    """A setting in words that are the same in every process, with a hash of what it does where it is a function."""
    text = re.sub(r" at 0x[0-9a-f]+|, progress=\w+", "", repr(value))
    while hasattr(value, "func"):
        value = value.func
    if not hasattr(value, "__code__"):
        return text
    return f"{text} (code {hashlib.sha256(_source(value.__code__, *_held(value, [])).encode()).hexdigest():.8})"


def _source(code: CodeType, *held: str) -> str:
    """Instructions, names and constants of a function, wherever its file is."""
    constants = [_source(x) if isinstance(x, CodeType) else str(type(x)) for x in code.co_consts]
    numbers = [repr(x) for x in code.co_consts if isinstance(x, int | float | str)]
    return repr([code.co_code, code.co_names, constants, numbers, held])


def _held(function: Any, seen: list[Any]) -> list[str]:
    """The real numbers, tensors and functions that a function closes over, and its defaults among these.

    Whole numbers and words are left out: they may be a process's own, as its number and its files are.
    """
    seen.append(function)
    found = []
    for value in (*(function.__defaults__ or ()), *(x.cell_contents for x in function.__closure__ or () if x != EMPTY)):
        if isinstance(value, Tensor):
            found.append(f"{tuple(value.shape)} {value.detach().tolist()}")
        elif isinstance(value, float):
            found.append(repr(value))
        elif hasattr(value, "__code__") and value not in seen:
            found.append(_source(value.__code__, *_held(value, seen)))
    return found


def share(rank: int, num_ranks: int, num_rows: int) -> slice:
    """The part of rows that all processes have which one of them adds up."""
    return slice(rank * num_rows // num_ranks, (rank + 1) * num_rows // num_ranks)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors that a value is made of, in the order of its fields."""
    if isinstance(value, Tensor):
        yield value
        return
    if not is_dataclass(value):
        raise TypeError(f"a {type(value).__name__} cannot be added up over ranks")
    for f in fields(value):
        yield from tensors_of(getattr(value, f.name))


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The value with other tensors."""
    if isinstance(value, Tensor):
        return next(tensors)
    return replace(value, **{f.name: with_tensors(getattr(value, f.name), tensors) for f in fields(value)})


def zeros_like(sums: Sums) -> Sums:
    """Sums over no rows, of the same shapes."""
    return with_tensors(sums, (torch.zeros_like(x) for x in tensors_of(sums)))
