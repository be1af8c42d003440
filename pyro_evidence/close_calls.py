"""Decisions that rounding may have turned: noted where they are taken, kept with the posterior, said in its summary."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from pyro_evidence.errors import NotConverged

NEAR = 1e4  # roundings from the margin, below which a decision is told
VALUE = 45.0  # roundings of one number that a sum over data, such as a log evidence, is good to
SHOWN = 5  # decisions that a summary names

_NOTED: ContextVar[dict[str, float] | None] = ContextVar("close_calls", default=None)
Run = TypeVar("Run", bound=Callable[..., Any])
Loaded = TypeVar("Loaded")


class Decided:
    """What has been found by decisions.

    :ivar close_calls: those that were nearer to their margin than 1e4 times the rounding, and their distance in units
        of that rounding, in the order in which they were met.  On another processor they may be taken otherwise.
    """

    close_calls: tuple[tuple[str, float], ...] = ()

    @property
    def _kept_calls(self) -> dict[str, Any]:
        """What a file holds of them."""
        return {"close_calls": [list(call) for call in self.close_calls]}


def noted(decision: str, distance: Tensor | float, size: Tensor | float = 0.0, eps: float = 2.2e-16) -> None:
    """Note a decision whose distance to its margin is less than 1e4 times the rounding.

    :param decision: in words.
    :param distance: of what was compared to where it would be decided otherwise, of either sign, any shape.
    :param size: of the larger of the numbers that were compared; they are good to 45 (1 + size) ``eps``.
    :param eps: relative rounding of one number.

    >>> from pyro_evidence.close_calls import collected, noted
    >>> with collected() as calls:
    ...     noted("whether to keep the axis", 1e-13, size=10.0)
    ...     noted("whether to go on", 1e-3, size=10.0)
    >>> list(calls)
    ['whether to keep the axis']
    """
    calls = _NOTED.get()
    if calls is None:
        return
    nearest = _nearest(distance, size) / (VALUE * eps)
    if nearest < NEAR:
        calls[decision] = min(nearest, calls.get(decision, NEAR))


def _nearest(distance: Tensor | float, size: Tensor | float) -> float:
    """Least distance in units of its number; loops note one in every step, which must cost them little."""
    if not isinstance(size, Tensor) or size.numel() == 1:
        return _least(distance) / (1.0 + abs(float(size)))
    return _least(torch.as_tensor(distance).detach() / (1.0 + size.detach().abs()))


def _least(distance: Tensor | float) -> float:
    if not isinstance(distance, Tensor) or distance.numel() == 1:
        return abs(float(distance))
    return float(distance.detach().abs().min()) if distance.numel() else math.inf


@contextmanager
def collected() -> Iterator[dict[str, float]]:
    """What is noted inside: decisions, and their distances in units of the rounding."""
    calls: dict[str, float] = {}
    token = _NOTED.set(calls)
    try:
        yield calls
    finally:
        _NOTED.reset(token)


def with_close_calls(run: Run) -> Run:
    """A fit whose posterior knows the close calls on the way to it, also one that is carried by an error."""

    @wraps(run)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with collected() as calls:
            try:
                return _keep(calls.items(), run(*args, **kwargs))
            except NotConverged as error:
                _keep(calls.items(), error.posterior)
                raise

    return wrapped  # type: ignore[return-value]


def recalled(posterior: Loaded, record: Mapping[str, Any]) -> Loaded:
    """A loaded posterior, with the close calls that its file holds; older files hold none."""
    return cast(Loaded, _keep(record.get("close_calls", ()), posterior))


def _keep(calls: Iterable[Sequence[Any]], posterior: Any) -> Any:
    found = tuple((decision, distance) for decision, distance in calls)
    if found and isinstance(posterior, Decided):
        object.__setattr__(posterior, "close_calls", found)  # of a frozen value that nobody has seen yet
    return posterior


def sentences(calls: tuple[tuple[str, float], ...]) -> list[str]:
    """What a summary says of close calls; nothing where there are none."""
    if not calls:
        return []
    named = [f"{decision} ({distance:.2g} times the rounding)" for decision, distance in calls[:SHOWN]]
    more = f"; and {len(calls) - SHOWN} more" if len(calls) > SHOWN else ""
    said = "decided within 1e4 times the rounding, so that another processor may decide otherwise"
    return [f"{said}: {'; '.join(named)}{more}"]
