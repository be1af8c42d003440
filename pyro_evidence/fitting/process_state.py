"""Global state of Pyro and torch, used by one thread at a time and left as it was.

Pyro's stack of handlers, its param store and its switch for validation belong to the process, and so do torch's random
numbers and Python's filters of warnings.  Whatever touches them here holds one lock meanwhile: fits in several threads
take turns at running models, and do the rest side by side.
"""

import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, wraps
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import pyro
import torch
from pyro.params.param_store import ParamStoreDict
from pyro.poutine import runtime
from torch import Tensor

from pyro_evidence.errors import TooLarge
from pyro_evidence.numerics.linalg import one_thread_if_small
from pyro_evidence.settings import seeded

# The words of torch, on either device, and of NumPy.
ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGT]i?B)", re.IGNORECASE)
POWER = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}
Function = TypeVar("Function", bound=Callable[..., Any])


def entry_point(function: Function) -> Function:
    """A function whose failed allocations are an error message, whatever was made of them on the way up.

    Of a class it is every public method and property that the class itself defines.  It takes derivatives as it needs,
    also where the caller has switched gradients off or is in inference mode, and computes on one thread what is not
    worth several.

    >>> import torch
    >>> from pyro_evidence.fitting.process_state import entry_point
    >>> entry_point(torch.empty)(2**58, dtype=torch.float64)
    Traceback (most recent call last):
        ...
    pyro_evidence.errors.TooLarge: 2,305,843,009,213,693,952 bytes were asked for at once...
    """
    if isinstance(function, type):
        for name, member in [(n, m) for n, m in vars(function).items() if not n.startswith("_")]:
            if isinstance(member, FunctionType):
                setattr(function, name, entry_point(member))
            elif isinstance(member, property) and member.fget is not None:
                found = property(entry_point(member.fget), member.fset, member.fdel, member.__doc__)
                setattr(function, name, found)
            elif isinstance(member, cached_property):
                member.func = entry_point(member.func)
        return function

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            with torch.inference_mode(mode=False), one_thread_if_small():  # gradients are on as well
                return function(*args, **kwargs)
        except Exception as error:
            now: BaseException | None = None if isinstance(error, TooLarge) else error
            asked, seen = None, list[BaseException]()
            while now is not None and now not in seen and not asked:  # it, and those that led to it, the last first
                seen.append(now)
                asked, now = bytes_asked(now), now.__cause__ or now.__context__
            if not asked:
                raise
            raise TooLarge(
                f"{asked:,} bytes were asked for at once and could not be had; expected room for them beside what is "
                f"held already. Ask for fewer draws (num_samples=), give fewer rows or starts at a time "
                f"(run_chunks(...), start=Start(restarts=1)), maximise sites rather than integrate them "
                f"(maximise=[...]), or pass curvature=diagonal: one number a coordinate."
            ) from error

    return wrapped  # type: ignore[return-value]


def bytes_asked(error: BaseException) -> int | None:
    """Bytes that a failed allocation had asked for; None for another error.

    >>> bytes_asked(RuntimeError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ..."))
    1610612736
    """
    if not isinstance(error, RuntimeError | MemoryError) or (found := ASKED.search(str(error))) is None:
        return None
    return round(float(found[1]) * 1024 ** POWER[found[2][0].lower()])


class _Locks:
    """One lock for what is global, and one for each engine that has been run."""

    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):  # a child must not wait for a thread that it does not have
            os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """Locks that nobody holds."""
        self.common = threading.RLock()
        self.engines: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()

    def of(self, engine: Any) -> Any:
        """The lock of one engine."""
        with self.common:
            return self.engines.setdefault(engine, threading.RLock())


_LOCKS = _Locks()
_SWITCHES = (pyro.distributions, pyro.infer, pyro.poutine)


@contextmanager
def _guarded(lock: Any, *, validated: bool = True, stored: bool = True) -> Iterator[None]:
    """Whatever is thrown inside, Pyro's handlers, plates and switches, and torch's for gradients, are those of before.

    An interrupt may come while Pyro enters or leaves a plate, and leave it entered for ever.  One generator guards all
    that a run of a model changes: a fit of a line runs it twenty times.

    :param validated: False switches Pyro's validation off inside.
    :param stored: False empties the param store inside; outside it is the very same one as before.
    """
    stacks: list[list[Any]] = [runtime._PYRO_STACK, runtime._DIM_ALLOCATOR._stack]
    with lock:
        with _LOCKS.common:  # no other thread is amid a model
            before = [list(stack) for stack in stacks]
            switches, gradients = [part.is_validation_enabled() for part in _SWITCHES], torch.is_grad_enabled()
        store = vars(pyro.get_param_store())
        contents = {} if stored else dict(store)
        try:
            if not validated and any(switches):
                _validate([False] * len(switches))
            if not stored:
                store.update(vars(ParamStoreDict()))
            yield
        except BaseException:
            with _LOCKS.common:
                for stack, content in zip(stacks, before, strict=True):
                    stack[:] = content
                _validate(switches)
            torch.set_grad_enabled(gradients)
            raise
        finally:
            store.update(contents)
        if not validated:
            _validate(switches)


def _validate(switches: Sequence[bool]) -> None:
    """Switch Pyro's validation of distributions, of inference and of handlers on or off."""
    for part, on in zip(_SWITCHES, switches, strict=True):
        part.enable_validation(on)


def restored_global_state() -> AbstractContextManager[None]:
    """After an error inside, global state is as it was before."""
    return _guarded(nullcontext())


def global_lock() -> AbstractContextManager[None]:
    """Inside, no other thread of this package changes global state; after an error it is as it was before."""
    return _guarded(_LOCKS.common)


def exclusive(engine: Any) -> AbstractContextManager[None]:
    """Inside, no other thread changes this engine; after an error global state is as it was before."""
    return _guarded(_LOCKS.of(engine))


def without_validation() -> AbstractContextManager[None]:
    """Pyro's validation off inside."""
    return _guarded(_LOCKS.common, validated=False)


def empty_store() -> AbstractContextManager[None]:
    """An empty param store inside; outside the very same one as before."""
    return _guarded(_LOCKS.common, stored=False)


def without_validation_or_params() -> AbstractContextManager[None]:
    """Validation off and an empty param store inside."""
    return _guarded(_LOCKS.common, validated=False, stored=False)


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """The caller's random state is as it was afterwards, on every device that is in use."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with global_lock(), torch.random.fork_rng(devices):
        yield


def generator_of(seed: int | None) -> torch.Generator:
    """Random numbers of one's own, on the processor; the caller's generator stays where it is.

    :param seed: None takes one from the state of the caller's generator.
    :raises BadInput: for what is no seed.
    """
    if seed is None:
        with own_random_numbers():
            seed = int(torch.randint(2**62, (), device="cpu"))
    return seeded(seed)


@contextmanager
def own_warnings(action: Any, message: str = "") -> Iterator[None]:
    """Another filter inside, ``"ignore"`` or ``"error"``, for warnings that match ``message``, all by default."""
    with global_lock(), warnings.catch_warnings():
        warnings.filterwarnings(action, message)
        yield


def put_into_store(values: Mapping[str, Tensor], limits: Mapping[str, Any]) -> None:
    """Write params to Pyro's global store, whatever stands there under their names.

    :param limits: their constraints, by name.
    """
    with global_lock():
        store = pyro.get_param_store()
        for name, value in values.items():
            if name in store:  # perhaps of another shape or constraint
                del store[name]
            store.setdefault(name, value.detach().clone(), limits[name])
