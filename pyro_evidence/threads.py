"""What Pyro and torch keep once for a whole process, taken by one thread at a time and left as it was.

Pyro's stack of handlers, its param store and its switch for validation belong to the process, and so do torch's random
numbers and Python's filters of warnings.  Whatever touches them here holds one lock meanwhile: fits in several threads
take turns at running models, and do the rest side by side.
"""

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import pyro
import torch
from pyro.params.param_store import ParamStoreDict
from pyro.poutine import runtime
from torch import Tensor

from pyro_evidence.memory import within_memory


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
Run = TypeVar("Run", bound=Callable[..., Any])


_SWITCHES = (pyro.distributions, pyro.infer, pyro.poutine)


@contextmanager
def as_before() -> Iterator[None]:
    """Whatever is thrown inside, Pyro's handlers, plates and switches, and torch's for gradients, are those of before.

    An interrupt may come while Pyro enters or leaves a plate, and leave it entered for ever.
    """
    stacks: list[list[Any]] = [runtime._PYRO_STACK, runtime._DIM_ALLOCATOR._stack]
    with _LOCKS.common:  # no other thread is amid a model
        before = [list(stack) for stack in stacks]
        switches, gradients = [part.is_validation_enabled() for part in _SWITCHES], torch.is_grad_enabled()
    try:
        yield
    except BaseException:
        with _LOCKS.common:
            for stack, content in zip(stacks, before, strict=True):
                stack[:] = content
            for part, on in zip(_SWITCHES, switches, strict=True):
                part.enable_validation(on)
        torch.set_grad_enabled(gradients)
        raise


@contextmanager
def alone() -> Iterator[None]:
    """Inside, no other thread of this package touches what is global; what is thrown leaves it :func:`as_before`."""
    with _LOCKS.common, as_before():
        yield


def one_at_a_time(run: Run) -> Run:
    """A method of an engine that changes it: each of several threads waits for the one before; memory has a letter."""

    @wraps(run)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _LOCKS.of(self), as_before():
            return within_memory(run)(self, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


@contextmanager
def without_validation() -> Iterator[None]:
    """Pyro's validation off inside."""
    with alone(), pyro.validation_enabled(False):
        yield


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """The caller's random state is as it was afterwards, on every device that is in use."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with alone(), torch.random.fork_rng(devices):
        yield


@contextmanager
def own_warnings(action: Any, message: str = "") -> Iterator[None]:
    """Another filter inside, ``"ignore"`` or ``"error"``, for warnings that match ``message``, all by default."""
    with alone(), warnings.catch_warnings():
        warnings.filterwarnings(action, message)
        yield


@contextmanager
def empty_store() -> Iterator[None]:
    """An empty param store inside; outside the very same one as before."""
    with alone():
        contents = vars(pyro.get_param_store())
        before = dict(contents)
        contents.update(vars(ParamStoreDict()))
        try:
            yield
        finally:
            contents.update(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Validation off and an empty param store inside."""
    with without_validation(), empty_store():
        yield


def put_into_store(values: Mapping[str, Tensor], limits: Mapping[str, Any]) -> None:
    """Write params to Pyro's global store, whatever stands there under their names.

    :param limits: their constraints, by name.
    """
    with alone():
        store = pyro.get_param_store()
        for name, value in values.items():
            if name in store:  # perhaps of another shape or constraint
                del store[name]
            store.setdefault(name, value.detach().clone(), limits[name])
