"""The last good state of a long fit in a file, and the same fit again from there.

A run is a sequence of loops.  The file holds where each of them has got to: of those that are done the end, of the one
that is going on the last state.  A run that is resumed makes all its preparations anew, which leads to the same models,
structures and functions; these stand in the file only as places in the state that a loop began with.  The decorator of
engines begins and ends a run.
"""

import copy
import dataclasses
import hashlib
import inspect
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from pyro_evidence import files
from pyro_evidence.data.chunks import digest_of_chunks, heard_by_all
from pyro_evidence.data.passes import each_pass_compared
from pyro_evidence.data.ranks import COMMUNICATOR, SINGLE_PROCESS, require_same_settings
from pyro_evidence.errors import BadInput, NotConverged, NotPositiveDefinite, NotWritten
from pyro_evidence.fitting.codec import (
    WORDS,
    Known,
    children,
    deserialised,
    encoded_arguments,
    places,
    require_same,
    serialised,
)
from pyro_evidence.fitting.process_state import entry_point, exclusive, restored_global_state
from pyro_evidence.numerics.linalg import PER_NUMBER, expect
from pyro_evidence.settings import check_path, stacklevel

FORMAT = "pyro_evidence checkpoint 5"
PROGRESS = {"tuple": [[int, object], [int, {"tuple": [[int, float]]}], [int, object], [int, object]]}
LOOP = {"name": str, "start": float, "done": bool, "count": int, "progress": PROGRESS}
CHECKPOINT = {"format": str, "engine": str, "data": str, "loops": [LOOP]}
TAKEN = "It is no checkpoint, and is not overwritten: give another name, or remove it."
SAME = 1e-6  # relative difference of numbers that may be rounding on two machines


def digest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """SHA-256 of the data in hexadecimal: all bytes of the arrays among the arguments, words, containers, and places.

    :raises BadInput: for an argument of another kind, naming it.
    """
    values, named = [_in_a_file(value) for value in args], {n: _in_a_file(value) for n, value in kwargs.items()}
    return files.digest(*encoded_arguments(values, named, ", or fit without Stop(checkpoint=...)"))


def _in_a_file(value: Any) -> Any:
    """Arrays, tables and dataclasses as tensors, words and containers; anything else as it is."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "__array__"):
        array = value.__array__()
        elements = array.tolist() if array.dtype.hasobject else hashlib.sha256(array.tobytes()).hexdigest()
        return [kind, str(array.dtype), array.shape, [*map(str, getattr(value, "columns", ()))], elements]
    if isinstance(value, slice) or dataclasses.is_dataclass(value):
        return [kind, *_in_a_file(children(value))]
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        items = [_in_a_file(item) for item in value]
        return {list: items, tuple: tuple(items)}.get(type(value), [kind, *items])
    if isinstance(value, WORDS) and type(value) not in WORDS:
        return [kind, repr(value)]
    return {key: _in_a_file(item) for key, item in value.items()} if isinstance(value, Mapping) else value


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a loop stands.

    :ivar step: what is repeated.
    :ivar status: why the loop is at its end; None while it goes on.
    :ivar last: the state before the last step, by which a file's state is checked; None before the first.
    """

    step: Any
    state: Any
    objectives: tuple[float, ...]
    status: Any = None
    last: Any = None


@dataclasses.dataclass(frozen=True)
class Loop:
    """One loop of a run that may be recorded.

    :ivar begin: where it begins, for an earlier run has been here: where that had got to.
    """

    begin: Progress
    name: str
    start: float  # the objective of its own beginning
    number: int = 0
    recorder: "Recorder | None" = None
    known: Known = dataclasses.field(default_factory=dict)

    def note(self, now: Progress) -> None:
        """After a step: to the disk when it is time."""
        recorder = self.recorder
        if recorder is not None and not recorder.over and time.monotonic() - recorder.written >= recorder.interval:
            recorder.write(self, now)

    def end(self, now: Progress, interrupted: bool) -> None:
        """After the last step; at an interrupt the file is written, and what follows is no part of it."""
        if self.recorder is None or self.recorder.over:
            return
        if interrupted:
            self.recorder.write(self, dataclasses.replace(now, status=None))
            self.recorder.over = True
        elif self.number >= len(self.recorder.done):
            try:
                self.recorder.done.append(self.stored(now))
            except BadInput as error:  # it cannot be serialised: nothing more is written
                self.recorder.over = True
                _warn(error)

    def stored(self, now: Progress) -> dict[str, Any]:
        """For the file."""
        progress = serialised((now.state, now.objectives, now.status, now.last), self.known)
        done, count = now.status is not None, len(now.objectives)
        return {"name": self.name, "start": self.start, "done": done, "count": count, "progress": progress}


class Recorder:
    """Writes down where a run has got to, and knows where an earlier one had."""

    def __init__(self, path: str | Path, interval: float, header: dict[str, Any], earlier: Sequence[Any] = ()) -> None:
        self.path, self.interval, self.header = path, interval, header
        self.earlier: list[Any] = list(earlier)
        self.done: list[Any] = [loop for loop in earlier if loop["done"]]
        self.count = 0
        self.over = not COMMUNICATOR.get().is_first  # nothing more is written, here
        self.written: float = time.monotonic()

    def begun(self, name: str, begin: Progress, start: float) -> Loop:
        """The next loop of the run.

        :raises BadInput: when the earlier run's loop was another.
        """
        number, known = self.count, places((begin.step, begin.state))
        self.count += 1
        if number < len(self.earlier):
            begin = self._deserialised(self.earlier[number], (name, start), begin)
        return Loop(begin, name, start, number, self, known)

    def _deserialised(self, earlier: Mapping[str, Any], here: tuple[str, float], begin: Progress) -> Progress:
        """Where an earlier run's loop had got to: its last step is made again, and leads to the state of the file."""
        if earlier["name"] != here[0] or not math.isclose(earlier["start"], here[1], rel_tol=SAME, abs_tol=SAME):
            raise BadInput(
                f"{self.path}: {earlier['name']} began at {earlier['start']:.10g}; here {here[0]} begins at "
                f"{here[1]:.10g}. It is of another model or of other settings: resume with the engine that was "
                f"interrupted, or fit anew."
            )
        try:
            stored = deserialised(earlier["progress"], (begin.step, begin.state))
            state, objectives, status, last = stored
            if not (isinstance(status, Enum) if earlier["done"] else status is None):
                raise ValueError("its status is not that of a loop that has ended, or of one that goes on")
            made = [begin.state]
            if len(objectives) > len(begin.objectives):
                with restored_global_state():
                    made = [last, begin.step(last)]
            known = (*begin.objectives, *(each.objective for each in made))
            found = (*objectives[: len(begin.objectives)], *objectives[-len(made) :])
            require_same((state, found), (made[-1], known), SAME)
            if len(objectives) != earlier["count"]:
                raise ValueError(f"it holds {len(objectives)} objectives, and {earlier['count']} by its count")
        except files.UNFIT as error:
            raise files.unreadable(self.path, error, "checkpoint", "Stop(checkpoint=path)") from error
        return Progress(begin.step, made[-1], objectives, status, last)

    def begin(self) -> None:
        """Have a checkpoint at the path; an older one stays until there is something better.

        :raises BadInput: for a file that is no checkpoint.
        :raises NotWritten: where the file cannot be written.
        """
        taken, folder = f"Stop(checkpoint={str(self.path)!r})", Path(os.path.realpath(self.path)).parent
        try:
            kind = str(files.read(self.path).get("format"))
        except FileNotFoundError:
            return self.save()
        except BadInput as error:
            raise BadInput(f"{taken}: {error} {TAKEN}") from error
        if kind != FORMAT:
            raise BadInput(f"{taken}: the file holds a {kind:.60}; expected a checkpoint, or none. {TAKEN}")
        if not os.access(folder, os.W_OK):
            raise NotWritten(f"{taken}: the folder {folder} may not be written to. Give the name of a file elsewhere.")

    def write(self, loop: Loop, now: Progress) -> None:
        """Everything to the disk; where that fails the fit goes on, and says so."""
        try:
            self.save(loop.stored(now))
        except (NotWritten, BadInput) as error:
            _warn(error)
        self.written = time.monotonic()

    def save(self, *going_on: dict[str, Any]) -> None:
        """The same, loudly.

        :raises NotWritten: where the file cannot be written.
        """
        files.write(self.header | {"loops": [*self.done, *going_on]}, self.path)


def _warn(error: Exception) -> None:
    warnings.warn(f"no checkpoint: {error} The fit goes on.", stacklevel=stacklevel())


_CURRENT: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def begun(name: str, begin: Progress, start: float) -> Loop:
    """The next loop of the run that is going on, which may be recorded.

    :param begin: where it would begin.
    :param start: its objective there.
    """
    recorder = _CURRENT.get()
    return Loop(begin, name, start) if recorder is None else recorder.begun(name, begin, start)


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Loops inside are recorded; a run within a run belongs to the outer one."""
    token = _CURRENT.set(_CURRENT.get() or recorder)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def recorder_of(engine: Any, data: Callable[[], str]) -> Recorder | None:
    """The recorder of a run where the engine's ``stop`` asks for one, or it was resumed; else None.

    Of several processes the first writes the file, all of them read it.

    :param data: what tells the run's data from other data.
    :raises BadInput: for other data than those of the fit that is resumed, naming the file.
    """
    earlier: Mapping[str, Any] | None = getattr(engine, "_earlier", None)
    stop: Any = getattr(engine, "stop", None)  # an engine that is not iterative has none
    path: str | Path | None = stop and (stop.checkpoint or (earlier["path"] if earlier else None))
    if path is None or _CURRENT.get() is not None:
        return None
    header = {"format": FORMAT, "engine": type(engine).__name__, "data": data()}
    if earlier is not None and earlier["data"] != header["data"]:
        raise BadInput(
            f"{earlier['path']} is of a fit to other data: values, shapes or dtypes of the arguments differ. Pass "
            f"run(...) what the interrupted fit was given, or fit anew without resume(...)."
        )
    recorder = Recorder(path, stop.checkpoint_interval, header, () if earlier is None else earlier["loops"])
    with heard_by_all(COMMUNICATOR.get()):
        if not recorder.over:
            recorder.begin()
    return recorder


# Methods that fit, and what tells their data from other data; None where no checkpoint is kept.
FITS: dict[str, Callable[..., str] | None] = {"run": digest, "run_chunks": digest_of_chunks, "step": None}


NOT_FITTED = "nothing is fitted yet; call run(...), or step(...) where there is one, with the model's data first."


class Engine:
    """An engine, whose methods that fit leave the process as they found it, whatever is thrown inside.

    Threads wait for one another, and memory that cannot be had is an error message.  ``run`` and ``run_chunks`` keep a
    checkpoint where ``stop`` says so, and go on from one that was resumed.  All passes over chunks are of the same
    rows.  Among processes that share out rows ``run`` is ``run_chunks`` of those of this one.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, known_by in FITS.items():
            if name in vars(cls) and not any(name in vars(base) for base in cls.__mro__[1:]):
                fit = vars(cls)[name]
                fit = _guarded(_of_own_rows(fit) if name == "run" else fit, known_by)
                setattr(cls, name, _over_same_rows(fit) if name == "run_chunks" else fit)


Kept = TypeVar("Kept", bound="Resumable")


class Resumable(Engine):
    """An engine that goes round and round, and can go on from a checkpoint."""

    def resume(self: Kept, path: str | Path) -> Kept:
        """This engine, whose next ``run`` on the same data goes on from a checkpoint that ``stop`` asked for.

        Data and model must be those of the fit.  Of every loop the last step is made again, and must lead to the state
        that the file holds; the objectives of the steps between its first and its last are believed.

        :raises BadInput: for a file that is no checkpoint of such an engine.
        :raises FileNotFoundError: where there is none.
        """
        check_path("path", path)
        content = files.read(path)
        if content.get("format") != FORMAT or content.get("engine") != type(self).__name__:
            kind = content.get("engine" if content.get("format") == FORMAT else "format")
            raise BadInput(
                f"{path} holds a {kind!s:.60}; expected a checkpoint of {type(self).__name__}, which "
                f"Stop(checkpoint=path) writes while it runs."
            )
        files.check(content, CHECKPOINT, str(path), {})
        found = copy.copy(self)
        found._earlier = dict(content) | {"path": path}  # type: ignore[attr-defined]
        return found


def _of_own_rows(fit: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, which among several processes takes the arguments for a chunk."""

    @wraps(fit)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if COMMUNICATOR.get() is SINGLE_PROCESS:
            return fit(self, *args, **kwargs)
        named = inspect.signature(fit).parameters
        given = inspect.signature(self.model if "kwargs" in named else partial(fit, self)).bind(*args, **kwargs)
        return self.run_chunks([(*given.args, *given.kwargs.values())])

    return wrapped


def _over_same_rows(fit: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose passes over chunks are compared, as are processes that share out rows, before it and after it."""

    @wraps(fit)
    def wrapped(self: Any, chunks: Any, *args: Any, **kwargs: Any) -> Any:
        communicator = COMMUNICATOR.get()
        with heard_by_all(communicator), each_pass_compared(chunks) as compared:
            if communicator is not SINGLE_PROCESS:
                require_same_settings(self, communicator)
            return fit(self, compared, *args, **kwargs)

    return wrapped


def _guarded(fit: Callable[..., Any], known_by: Callable[..., str] | None) -> Callable[..., Any]:
    """A method in which no other thread changes the engine or global state; the posterior knows how long it took.

    :param known_by: what tells data from other data; None where nothing is recorded.
    """

    @entry_point
    @wraps(fit)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with exclusive(self):
            expect(PER_NUMBER * max((x.numel() for x in args if isinstance(x, Tensor)), default=0))
            recorder = None if known_by is None else recorder_of(self, lambda: known_by(args, kwargs))
            try:
                begun = time.process_time()
                with recording(recorder):
                    found = fit(self, *args, **kwargs)
                if hasattr(found, "fit_seconds"):
                    vars(found)["fit_seconds"] = time.process_time() - begun
                return found
            except NotConverged:
                raise
            except Exception as error:
                if recorder is not None and recorder.earlier and str(recorder.path) not in str(error):
                    raise BadInput(
                        f"the fit that went on from {recorder.path} failed ({type(error).__name__}: {error}): either "
                        f"that file was damaged or changed, or the model fails there. Fit anew, without resume(...)."
                    ) from error
                if isinstance(error, LinAlgError):
                    said = " ".join(str(error).split("Trace Shapes:")[0].split())
                    raise NotPositiveDefinite(
                        f"a matrix of the model has no factor where the search has come to ({said}); expected a "
                        f"covariance that is positive definite for all settings that its prior allows. Add more to its "
                        f"diagonal, as in K + 1e-6 * torch.eye(len(K)), compute in double precision, not float32, or "
                        f"give its settings priors that say more."
                    ) from error
                raise

    return wrapped
