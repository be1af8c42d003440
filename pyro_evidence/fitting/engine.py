"""The decorator of every engine: fits take turns among threads, say what memory lacked, and keep checkpoints."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from pyro_evidence.data.chunks import digest_of_chunks
from pyro_evidence.fitting.checkpoint import digest, recorder_of, recording
from pyro_evidence.fitting.process_state import exclusive, within_memory

Kind = TypeVar("Kind", bound=type)
FITS: dict[str, Callable[..., str] | None] = {"run": digest, "run_chunks": digest_of_chunks, "step": None}


def engine(kind: Kind) -> Kind:
    """A class of engines whose methods that fit leave the process as they found it, whatever is thrown inside.

    Threads wait for one another, and memory that cannot be had is an error message.  ``run`` and ``run_chunks`` keep a
    checkpoint where ``stop`` says so, and go on from one after ``resume``.
    """
    for name in FITS.keys() & vars(kind).keys():
        setattr(kind, name, _guarded(vars(kind)[name], FITS[name]))
    return kind


def _guarded(fit: Callable[..., Any], known_by: Callable[..., str] | None) -> Callable[..., Any]:
    """A method in which no other thread changes the engine or global state.

    :param known_by: what tells data from other data; None where nothing is recorded.
    """

    @within_memory
    @wraps(fit)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with exclusive(self):
            recorder = None if known_by is None else recorder_of(self, lambda: known_by(args, kwargs))
            with recording(recorder):
                return fit(self, *args, **kwargs)

    return wrapped
