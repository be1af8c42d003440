"""Memory that was asked for and could not be had: one letter for it, whoever asked."""

import re
from collections.abc import Callable, Iterator
from functools import cached_property, wraps
from types import FunctionType
from typing import Any, TypeVar

import torch

from pyro_evidence.errors import TooLarge

# The words of torch, on either device, and of NumPy.
ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGT]i?B)", re.IGNORECASE)
POWER = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}
Function = TypeVar("Function", bound=Callable[..., Any])


def within_memory(function: Function) -> Function:
    """A function whose failed allocations are a letter, whatever was made of them on the way up.

    It takes derivatives as it needs, also where the caller has switched gradients off.

    >>> import torch
    >>> from pyro_evidence.memory import within_memory
    >>> within_memory(torch.empty)(2**58, dtype=torch.float64)
    Traceback (most recent call last):
        ...
    pyro_evidence.errors.TooLarge: 2,305,843,009,213,693,952 bytes were asked for at once...
    """

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            with torch.enable_grad():
                return function(*args, **kwargs)
        except Exception as error:
            asked = None if isinstance(error, TooLarge) else next(filter(None, map(bytes_asked, _causes(error))), None)
            if asked is None:
                raise
            raise _letter(asked) from error

    return wrapped  # type: ignore[return-value]


class WithinMemory:
    """A class whose public methods, and those of its children, answer failed allocations by a letter."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in list(vars(cls).items()):
            if not name.startswith("_"):
                _wrap(cls, name, member)


def _wrap(cls: type, name: str, member: Any) -> None:
    if isinstance(member, FunctionType):
        setattr(cls, name, within_memory(member))
    elif isinstance(member, property) and member.fget is not None:
        setattr(cls, name, property(within_memory(member.fget), member.fset, member.fdel, member.__doc__))
    elif isinstance(member, cached_property):
        member.func = within_memory(member.func)


def bytes_asked(error: BaseException) -> int | None:
    """How many bytes an allocation that failed had asked for; None for another error.

    >>> bytes_asked(RuntimeError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ..."))
    1610612736
    """
    if not isinstance(error, RuntimeError | MemoryError) or (found := ASKED.search(str(error))) is None:
        return None
    return round(float(found[1]) * 1024 ** POWER[found[2][0].lower()])


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those that led to it, the last first."""
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        yield now
        now = now.__cause__ or now.__context__


def _letter(asked: int) -> TooLarge:
    return TooLarge(
        f"{asked:,} bytes were asked for at once and could not be had; expected room for them beside what is held "
        f"already. Ask for fewer draws (num_samples=), give fewer rows or starts at a time (run_chunks(...), "
        f"start=Start(restarts=1)), maximise sites rather than integrate them (hyper=[...]), or pass "
        f"curvature=diagonal: one number a coordinate."
    )
