"""The last good state of a long fit in a file, and the same fit again from there.

A run is a sequence of loops.  The file holds where each of them has got to: of those that are done the end, of the one
that is going on the last state.  A run that is resumed makes all its preparations anew, which leads to the same models,
structures and functions; these stand in the file only as places in the state that a loop began with.
"""

import copy
import dataclasses
import hashlib
import importlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from pyro_evidence import tensor_file
from pyro_evidence.chunks.digest import digest_of_chunks
from pyro_evidence.chunks.join import JOIN
from pyro_evidence.errors import BadInput, NotWritten
from pyro_evidence.settings import outside

FORMAT = "pyro_evidence checkpoint 1"
PACKAGE = __name__.split(".", maxsplit=1)[0]
WORDS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
SAME = 1e-6  # relative difference between two objectives that may be rounding on two machines
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "dict": dict}
Place = list[Any]  # keys that lead from the root to an object inside
Known = Mapping[int, tuple[Place, Any]]  # by identity, which is one's own as long as the object is kept


@runtime_checkable
class Essential(Protocol):
    """A state that holds more than files can, and is made again from less."""

    @property
    def essence(self) -> tuple[Any, ...]:
        """What :meth:`of_essence` takes."""

    @classmethod
    def of_essence(cls, *parts: Any) -> Any:
        """The same state again."""


def children(value: Any) -> list[tuple[Any, Any]]:
    """What a value is made of, by key: fields, entries, items; nothing for what is taken as a whole."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) and not isinstance(value, torch.Size) else []


def places(root: Any) -> Known:
    """Where each object inside ``root`` is, by its identity; without lists and dicts, which may change in place."""
    found: dict[int, tuple[Place, Any]] = {}
    pending: list[tuple[Any, Place]] = [(root, [])]
    while pending:
        value, place = pending.pop()
        if isinstance(value, WORDS) or id(value) in found:
            continue
        if not isinstance(value, list | dict):
            found[id(value)] = place, value
        pending += [(child, [*place, key]) for key, child in children(value)]
    return found


def put_down(value: Any, known: Known) -> Any:
    """A value as tensors, words and containers; what is ``known`` as its place.

    :raises BadInput: for what can be neither.
    """
    if isinstance(value, WORDS) and not isinstance(value, Enum):
        return value
    if id(value) in known:
        return {"same": list(known[id(value)][0])}
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Essential):
        return {**_named(type(value)), "essence": [put_down(part, known) for part in value.essence]}
    inside = [[key, put_down(child, known)] for key, child in children(value)]
    if type(value) in (list, tuple, dict):
        return {type(value).__name__: inside}
    return {**_named(value), "inside": inside if _has_parts(value) else None}


def _has_parts(value: Any) -> bool:
    """Whether a value is an object with fields or items, no class, function or member."""
    return not isinstance(value, type) and (dataclasses.is_dataclass(value) or isinstance(value, tuple))


def _named(value: Any) -> dict[str, Any]:
    """The class or function of this package that a value is, or is one of."""
    if isinstance(value, Enum):
        return {"member": value.name, **_named(type(value))}
    named = type(value) if _has_parts(value) else value
    module, name = getattr(named, "__module__", ""), getattr(named, "__qualname__", "")
    if module.split(".")[0] != PACKAGE or "." in name or not name:
        raise BadInput(
            f"the fit holds a {type(value).__name__} that came up on the way, which a file without code cannot hold."
        )
    return {"module": module, "name": name}


def taken_up(stored: Any, root: Any) -> Any:
    """The value that :func:`put_down` has put down, its places looked up in ``root``; no code of the file's is run."""
    if not isinstance(stored, dict):
        return stored
    if "same" in stored:
        return _at(root, stored["same"])
    kind = next(iter(stored))
    if kind in CONTAINERS:
        items = [(key, taken_up(child, root)) for key, child in stored[kind]]
        return dict(items) if kind == "dict" else CONTAINERS[kind](v for _, v in items)
    return _object(stored, root)


def _object(stored: Mapping[str, Any], root: Any) -> Any:
    """An object of a class of this package, or such a class, function or member itself."""
    named = _find(stored["module"], stored["name"])
    if "member" in stored:
        return named[stored["member"]]
    if "essence" in stored:
        return _essential(named)(*(taken_up(part, root) for part in stored["essence"]))
    if stored["inside"] is None:
        return named
    return _built(named, {key: taken_up(child, root) for key, child in stored["inside"]})


def _at(root: Any, place: Sequence[Any]) -> Any:
    for key in place:
        root = dict(children(root))[key]
    return root


def _find(module: str, name: str) -> Any:
    """A class or function of this package.

    :raises ValueError: for any other.
    """
    if module.split(".")[0] != PACKAGE:
        raise ValueError(f"it names {module[:60]}")
    return getattr(importlib.import_module(module), name)


def _essential(kind: Any) -> Callable[..., Any]:
    """How to make a state again; of a class that says so itself."""
    if not isinstance(kind, type) or "of_essence" not in vars(kind):
        raise ValueError("it names what makes no state")
    return kind.of_essence  # type: ignore[attr-defined]


def _built(kind: type, inside: dict[Any, Any]) -> Any:
    """An object of this kind with these fields or items; nothing of its class is called."""
    if issubclass(kind, tuple):
        return tuple.__new__(kind, inside.values())
    if not dataclasses.is_dataclass(kind):
        raise ValueError(f"it holds a {kind.__name__}")
    found: Any = object.__new__(kind)
    for name in (f.name for f in dataclasses.fields(kind)):
        object.__setattr__(found, name, inside[name])
    return found


def digest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What tells data from other data: all bytes of the tensors among the arguments, with their places."""
    found = hashlib.sha256()
    pending: list[tuple[str, Any]] = [("", [list(args), dict(kwargs)])]
    while pending:
        place, value = pending.pop()
        pending += [(f"{place}/{key}", child) for key, child in children(value)]
        if isinstance(value, Tensor):
            found.update(f"{place} {value.dtype} {tuple(value.shape)}".encode())
            found.update(tensor_file.bytes_of(value.detach()))
        elif isinstance(value, WORDS):
            found.update(f"{place} {value!r}".encode())
    return found.hexdigest()


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a loop stands.

    :ivar step: what is repeated; where it keeps a journal, that counts as well.
    :ivar status: why the loop is at its end; None while it goes on.
    """

    step: Any
    state: Any
    objectives: tuple[float, ...]
    status: Any = None


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

    def note(self, state: Any, objectives: Sequence[float]) -> None:
        """After a step: to the disk when it is time."""
        if self.recorder is not None and self.recorder.is_time:
            self.recorder.write(self, state, objectives)

    def end(self, state: Any, objectives: Sequence[float], status: Any, interrupted: bool) -> None:
        """After the last step; at an interrupt the file is written, and what follows is no part of it."""
        if self.recorder is None or self.recorder.over:
            return
        if interrupted:
            self.recorder.write(self, state, objectives)
            self.recorder.over = True
        elif self.number >= len(self.recorder.done):
            self.recorder.finish(self, state, objectives, status)

    def stored(self, state: Any, objectives: Sequence[float], status: Any = None) -> dict[str, Any]:
        """For the file; ``status`` where the loop is done."""
        known = {k: v for k, v in self.known.items() if k != id(self.begin.step) or not _has_parts(self.begin.step)}
        progress = put_down((self.begin.step, state, list(objectives), status), known)
        return {"name": self.name, "start": self.start, "done": status is not None, "progress": progress}


class Recorder:
    """Writes down where a run has got to, and knows where an earlier one had."""

    def __init__(self, path: str | Path, every: float, header: dict[str, Any], earlier: Sequence[Any] = ()) -> None:
        self.path, self.every, self.header = path, every, header
        self.earlier: list[Any] = list(earlier)
        self.done: list[Any] = [loop for loop in earlier if loop["done"]]
        self.count, self.over = 0, False
        self.written: float = time.monotonic()
        self.quiet = False  # another process writes the file

    def begun(self, name: str, begin: Progress, start: float) -> Loop:
        """The next loop of the run.

        :raises BadInput: when the earlier run's loop was another.
        """
        number, root = self.count, (begin.step, begin.state)
        self.count, known = self.count + 1, places(root)
        if number < len(self.earlier):
            begin = self._taken_up(self.earlier[number], (name, start), root)
        return Loop(begin, name, start, number, self, known)

    def _taken_up(self, earlier: Mapping[str, Any], here: tuple[str, float], root: tuple[Any, Any]) -> Progress:
        """Where an earlier run's loop had got to."""
        if earlier["name"] != here[0] or not math.isclose(earlier["start"], here[1], rel_tol=SAME, abs_tol=SAME):
            raise BadInput(
                f"{self.path}: {earlier['name']} began at {earlier['start']:.10g}; here {here[0]} begins at "
                f"{here[1]:.10g}. It is of another model or of other settings: resume with the engine that was "
                f"interrupted, or fit anew."
            )
        try:
            step, state, objectives, status = taken_up(earlier["progress"], root)
        except tensor_file.UNFIT as error:
            raise tensor_file.unreadable(self.path, f"{type(error).__name__}: {error}") from error
        if step is not root[0]:  # a step that keeps a journal goes on with it
            vars(root[0]).update(vars(step))
        return Progress(root[0], state, tuple(objectives), status)

    @property
    def is_time(self) -> bool:
        """Whether the last writing is long ago."""
        return not (self.over or self.quiet) and time.monotonic() - self.written >= self.every

    def finish(self, loop: Loop, state: Any, objectives: Sequence[float], status: Any) -> None:
        """Keep the end of a loop; where it cannot be put down, nothing more is written."""
        try:
            self.done.append(loop.stored(state, objectives, status))
        except BadInput as error:
            self.over = True
            _warn(error)

    def write(self, loop: Loop, state: Any, objectives: Sequence[float]) -> None:
        """Everything to the disk; where that fails the fit goes on, and says so."""
        try:
            self.save(loop.stored(state, objectives))
        except (NotWritten, BadInput) as error:
            _warn(error)
        self.written = time.monotonic()

    def save(self, *going_on: dict[str, Any]) -> None:
        """The same, loudly.

        :raises NotWritten: where the file cannot be written.
        """
        tensor_file.write(self.header | {"loops": [*self.done, *going_on]}, self.path)


def _warn(error: Exception) -> None:
    warnings.warn(f"no checkpoint: {error} The fit goes on.", stacklevel=outside())


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
    if recorder is None or _CURRENT.get() is not None:
        yield
        return
    token = _CURRENT.set(recorder)
    try:
        yield
    finally:
        _CURRENT.reset(token)


Run = TypeVar("Run", bound=Callable[..., Any])


def recorded(run: Run, known_by: Callable[..., str] = digest) -> Run:
    """An engine's ``run`` that keeps a checkpoint where its ``stop`` says so, and goes on from one after ``resume``."""

    @wraps(run)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with recording(_recorder(self, lambda: known_by(args, kwargs))):
            return run(self, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


def recorded_chunks(run: Run) -> Run:
    """A ``run_chunks`` that keeps a checkpoint; of several processes the first writes the file, all of them read it."""
    return recorded(run, digest_of_chunks)


def _recorder(engine: Any, data: Callable[[], str]) -> Recorder | None:
    earlier: Mapping[str, Any] | None = getattr(engine, "_earlier", None)
    path: str | Path | None = engine.stop.checkpoint or (earlier["path"] if earlier else None)
    if path is None or _CURRENT.get() is not None:
        return None
    header = {"format": FORMAT, "engine": type(engine).__name__, "data": data()}
    if earlier is not None:
        _require_same(earlier, header)
    recorder = Recorder(path, engine.stop.every, header, () if earlier is None else earlier["loops"])
    recorder.quiet = not JOIN.get().is_first
    if not (recorder.quiet or Path(path).exists()):  # an older one stays until there is something better
        recorder.save()
    return recorder


def _require_same(earlier: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Refuse other data.

    :raises BadInput: naming the file.
    """
    if earlier["data"] != header["data"]:
        raise BadInput(
            f"{earlier['path']} is of a fit to other data: values, shapes or dtypes of the arguments differ. Pass "
            f"run(...) what the interrupted fit was given, or fit anew without resume(...)."
        )


Engine = TypeVar("Engine")


def resumed(engine: Engine, path: str | Path) -> Engine:
    """A copy of the engine whose next ``run`` goes on where the checkpoint's fit was.

    :raises BadInput: for a file that is no checkpoint of such an engine.
    :raises FileNotFoundError: where there is none.
    """
    content = tensor_file.read(path)
    if content.get("format") != FORMAT or content["engine"] != type(engine).__name__:
        kind = content.get("engine", content.get("format"))
        raise BadInput(
            f"{path} holds a {str(kind)[:60]}; expected a checkpoint of {type(engine).__name__}, which "
            f"Stop(checkpoint=path) writes while it runs."
        )
    found = copy.copy(engine)
    found._earlier = dict(content) | {"path": path}  # type: ignore[attr-defined]
    return found
