"""What the tests of known defects share: proof of having reached the place they attack, refusals, limits of time.

A defect that is not mended yet is marked ``xfail(strict=True, raises=..., reason="issue N: ...")``.  Such a mark must
not hide another failure, a renamed argument for instance: what a test needs before its assertion is asked for by
:func:`reached`, whose error no mark lists, and :func:`refusal` lets everything through that is no error of the package.
"""

import contextlib
import io
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from pyro_evidence.errors import (
    BadInput,
    ImproperPosterior,
    NotAMode,
    NotConverged,
    NotPositiveDefinite,
    NotWritten,
    TooLarge,
    UnsupportedModel,
)

OWN_ERRORS = (
    BadInput,
    ImproperPosterior,
    NotAMode,
    NotConverged,
    NotPositiveDefinite,
    NotWritten,
    TooLarge,
    UnsupportedModel,
)


class NotReached(Exception):
    """The test did not come to the place that it is about, so it says nothing."""


class TooSlow(AssertionError):
    """What was asked for within a time was not done."""


class _Expired(BaseException):
    """Raised by the timer; no ``except Exception`` on the way catches it."""


def reached(happened: bool, what: str) -> None:
    """Ask for what must hold before the assertion of a test means anything.

    :raises NotReached: where it does not.
    """
    if not happened:
        raise NotReached(what)


def refusal(attempt: Callable[[], object]) -> str:
    """The message with which the package refuses, on one line.

    :raises AssertionError: where nothing is refused; errors that are not the package's own pass through.
    """
    try:
        found = attempt()
    except OWN_ERRORS as error:
        return " ".join(str(error).split())
    raise AssertionError(f"expected a refusal; got {found!r}")


def says(message: str, *parts: str) -> None:
    """Assert that all of these words are in a message, in any case."""
    missing = [part for part in parts if part.lower() not in message.lower()]
    assert not missing, f"{missing} not in: {message}"


def summary_of(posterior: Any) -> str:
    """What ``posterior.summary()`` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        posterior.summary()
    return printed.getvalue()


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Let what is inside use so much processor time, not more.

    :raises TooSlow: at the limit; the process goes on.
    """
    if not hasattr(signal, "SIGPROF"):
        pytest.skip("needs a timer of processor time")

    def ring(number: int, frame: FrameType | None) -> None:
        raise _Expired

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except _Expired:
        raise TooSlow(f"not done in {seconds:g} s of processor time") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
