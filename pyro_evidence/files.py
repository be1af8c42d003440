"""Tensors, numbers and words in a file without code: written whole or not at all, read whole or not at all.

The layout is that of safetensors, whose library reads and writes it.  What is no tensor stands in its metadata, under
``content``, as JSON.  The entry ``sha256`` there is the digest of the content and of all tensors.
"""

import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from pyro_evidence.errors import BadInput, NotWritten

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

Content = Mapping[str, Any]
MapLocation = str | torch.device | Mapping[str, str] | None

WRITER = "pyro_evidence file 2"
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint64, torch.uint32, torch.uint16),
)
WORDS = (bool, int, str, type(None))  # what JSON keeps as it is
MADE_OF: dict[str, Any] = {"float": float, "device": torch.device, "tuple": tuple, "size": torch.Size}
OTHER = "It is damaged or changed, or of another release."
LONGEST_HEADER = 100_000_000  # bytes: the library refuses longer ones
UNFIT = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, OverflowError, MemoryError)
UNREADABLE = (*UNFIT, RecursionError, OSError, SafetensorError)


def write(content: Content, path: str | Path) -> None:
    """Put ``content`` into a file: tensors, numbers, strings, and lists, tuples and dicts of them.

    :raises BadInput: for anything else.
    :raises NotWritten: when the disk is full or the folder is not to be written to; what was there before is as it was.
    """
    tensors: list[Tensor] = []
    text = json.dumps(encoded(content, tensors), allow_nan=False)
    metadata = {"writer": WRITER, "content": text, "sha256": digest(text, tensors)}
    with replacing(path) as part:
        save_file({str(i): tensor for i, tensor in enumerate(tensors)}, part, metadata)


def read(path: str | Path, map_location: MapLocation = None) -> dict[Any, Any]:
    """The content of a file that :func:`write` wrote.

    :param map_location: device on which the tensors are wanted, or device of the file -> device wanted; by default each
        comes to the device it was on.
    :raises BadInput: for any other file, a damaged one, or a device that is not here.
    :raises FileNotFoundError: where there is none.
    """
    if callable(map_location):
        raise BadInput(f"map_location={map_location!r} is a function; expected a device such as 'cpu', or a dict.")
    try:
        metadata, whole = _whole(path)
        if metadata["writer"] != WRITER:
            raise ValueError(f"it was written by {metadata['writer']!r:.60}")
        named = load(whole)  # checks the place of every tensor
        tensors = [named[str(i)] for i in range(len(named))]
        if strange := {t.dtype for t in tensors} - {*DTYPES}:
            raise ValueError(f"it holds tensors of {strange}")
        if digest(metadata["content"], tensors) != metadata["sha256"]:
            raise ValueError("the check sum does not fit")
        return dict(_decoded(json.loads(metadata["content"]), tensors, map_location))
    except FileNotFoundError:
        raise
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    except UNREADABLE as error:
        raise unreadable(path, error) from error


def _whole(path: str | Path) -> tuple[Any, bytes]:
    """Metadata of the header, and all bytes, of a regular file that is as long as its header says.

    By one handle: a file that is put in its place meanwhile does not mix with it.  No more than the header is read of
    any other file, and a pipe is not waited for.

    :raises ValueError: for anything else, saying what it is.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is a folder" if stat.S_ISDIR(about.st_mode) else "it is no regular file")
        begin = file.read(8)
        size = int.from_bytes(begin, "little")
        header = file.read(min(size, LONGEST_HEADER))
        entries = json.loads(header)
        metadata = entries.pop("__metadata__")
        length = len(begin) + size + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if length != about.st_size:
            raise ValueError(f"it has {about.st_size:,} bytes, and {length:,} by its header")
        return metadata, begin + header + file.read()


def unreadable(
    path: str | Path,
    error: Exception,
    kind: str = "checkpoint or saved posterior",
    writer: str = "Stop(checkpoint=path) or posterior.save(path)",
) -> BadInput:
    """The error message for a file that is none of ours, or whose content does not hang together."""
    said = " ".join(str(error).split())
    reason = f"{type(error).__name__}: {said:.200}" if said else type(error).__name__
    return BadInput(
        f"{path} cannot be read as a {kind} ({reason}): it is damaged or foreign; expected a file that {writer} wrote."
    )


@dataclass(frozen=True)
class Array:
    """A tensor that a file is to hold; part of a schema.

    :ivar axes: a letter for each axis, which stands for one length wherever it occurs in a file, or a number; None for
        a tensor of any shape.
    :ivar dtype: None for any floating one.
    :ivar finite: whether nan and inf are refused.
    """

    axes: str | None = None
    dtype: torch.dtype | None = None
    finite: bool = True

    def fits(self, value: Any, sizes: dict[str, int]) -> bool:
        """Whether a value is such a tensor; letters that are met for the first time get their lengths."""
        if not isinstance(value, Tensor) or not (
            value.is_floating_point() if self.dtype is None else value.dtype == self.dtype
        ):
            return False
        if self.axes is not None:
            letters = self.axes.split()
            known = {**dict(zip(letters, value.shape, strict=False)), **sizes, "1": 1}
            if [known.get(letter) for letter in letters] != list(value.shape):
                return False
            sizes.update(known)
        return not self.finite or bool(value.isfinite().all())

    def words(self, sizes: Mapping[str, int]) -> str:
        """The expected entries in words, for an error message."""
        axes = [str(sizes.get(letter, letter)) for letter in (self.axes or "").split()]
        kind = "floats" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        shape = "" if self.axes is None else f" of shape ({', '.join(axes)})"
        return f"a tensor{shape} of {'finite ' * self.finite}{kind}"


Double = partial(Array, dtype=torch.float64)  # of what is computed in double precision whatever the data are in


def check(value: Any, schema: Any, where: str, sizes: dict[str, int]) -> None:
    """Refuse a part of a file that is not as its schema says.

    A schema is an :class:`Array`, a type (``object`` for anything, ``float`` for any number), None, a tuple of
    alternatives, a list with the schema of all items or of each of several, or a dict of schemas by name, or of one for
    every name under ``str``.

    :param where: the file and the place in it.
    :param sizes: lengths by the letters of arrays that were checked already; more are added.
    :raises BadInput: with the place, what is there and what was expected.
    """
    if isinstance(schema, tuple) and isinstance(value, list | tuple | Mapping):
        schema = next((each for each in schema if isinstance(each, list | dict)), schema)
    if isinstance(schema, dict) and isinstance(value, Mapping):
        each = dict.fromkeys(value, schema[str]) if str in schema else schema
        missing, unknown = sorted(each.keys() - value.keys()), sorted(map(repr, value.keys() - each.keys()))
        if missing or unknown or not all(isinstance(name, str) for name in value):
            raise BadInput(
                f"{where} lacks entries {missing} and has unknown ones [{', '.join(unknown)}]; expected those that are "
                f"written here. {OTHER}"
            )
        for name, inside in each.items():
            check(value[name], inside, f"{where}[{name!r}]", sizes)
    elif isinstance(schema, list) and isinstance(value, list | tuple) and len(schema) in (1, len(value)):
        for i, item in enumerate(value):
            check(item, schema[i % len(schema)], f"{where}[{i}]", sizes)
    elif not any(_fits(value, each, sizes) for each in (schema if isinstance(schema, tuple) else (schema,))):
        raise BadInput(f"{where} is {_shown(value)}; expected {_expected(schema, sizes)}. {OTHER}")


def _fits(value: Any, schema: Any, sizes: dict[str, int]) -> bool:
    if isinstance(schema, Array):
        return schema.fits(value, sizes)
    if schema is None or isinstance(value, bool):
        return value is schema or schema in (bool, object)
    return isinstance(schema, type) and isinstance(value, int | float if schema is float else schema)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        strange = "" if value.isfinite().all() else ", some of them not finite"
        return f"a tensor of shape {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}{strange}"
    return f"{value!r:.60}" if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"


def _expected(schema: Any, sizes: Mapping[str, int]) -> str:
    if isinstance(schema, tuple):
        return ", or ".join(_expected(each, sizes) for each in schema)
    if isinstance(schema, Array):
        return schema.words(sizes)
    return "None" if schema is None else f"a {(schema if isinstance(schema, type) else type(schema)).__name__}"


def encoded(value: Any, tensors: list[Tensor], where: str = "the content", whose: str = "") -> Any:
    """A value as JSON holds it; tensors go into the list, as real pairs where they are complex.

    :param where: the place of the value, for the error message, and ``whose`` it is.
    :raises BadInput: for what a file without code cannot hold.
    """
    if type(value) in WORDS or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta or (value.dtype not in DTYPES and not value.is_complex()):
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise BadInput(
                f"{where}{whose} is a tensor of {value.dtype}, {value.layout}, on {value.device}; expected a dense one "
                f"with numbers, of {names}."
            )
        real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        real = real.detach().resolve_neg().cpu().contiguous()  # as the library takes them, no two sharing memory
        memory = {t.untyped_storage().data_ptr() for t in tensors}
        tensors.append(real.clone() if real.untyped_storage().data_ptr() in memory else real)
        kind = {"complex": True} if value.is_complex() else {}
        return {"tensor": len(tensors) - 1, "on": str(value.device), **kind}
    if isinstance(value, Mapping) and all(type(key) in (*WORDS, float, tuple) for key in value):
        pairs = [(encoded(k, tensors, where, whose), v, f"{where}[{k!r}]") for k, v in value.items()]
        return {"dict": [[key, encoded(inside, tensors, place, whose)] for key, inside, place in pairs]}
    if type(value) in (list, tuple, torch.Size):
        items = [encoded(item, tensors, f"{where}[{i}]", whose) for i, item in enumerate(value)]
        return items if type(value) is list else {type(value).__name__.lower(): items}
    if type(value) in (float, torch.dtype, torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise BadInput(
        f"{where}{whose} is a {type(value).__name__}, which a file without code cannot hold; expected tensors, "
        f"numbers, strings, or lists, tuples and dicts of them."
    )


def bytes_of(value: Tensor) -> memoryview:
    """The elements in order, little-endian."""
    flat = value.cpu().contiguous().reshape(-1)
    flat = flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)  # a single number
    flat = flat.view(torch.uint8)
    if sys.byteorder == "big":
        flat = flat.reshape(-1, value.element_size()).flip(-1).reshape(-1)
    return flat.numpy().data


def digest(text: str, tensors: Sequence[Tensor]) -> str:
    """SHA-256 of a text and of dtype, shape and elements of tensors."""
    found = hashlib.sha256(text.encode())
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(bytes_of(tensor))
    return found.hexdigest()


def _decoded(value: Any, tensors: Sequence[Tensor], map_location: MapLocation) -> Any:
    """The value that :func:`encoded` has put down, its tensors where they are to go."""
    decoded = partial(_decoded, tensors=tensors, map_location=map_location)
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        on = value["on"]
        device = torch.device(map_location.get(on, on) if isinstance(map_location, Mapping) else map_location or on)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise BadInput(f"its tensors were on {on}, and {device} is not here. Pass map_location='cpu'.")
        found = tensors[value["tensor"]].to(device)
        return torch.view_as_complex(found) if value.get("complex") else found
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {decoded(k): decoded(v) for k, v in inner}
    if kind in MADE_OF:
        return MADE_OF[kind](decoded(inner))
    dtype = getattr(torch, inner) if kind == "dtype" else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it holds a {kind:.60}")
    return dtype


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path to write to; the file there takes the place of ``path`` when it is whole and on the disk.

    Whoever reads ``path`` meets the old file or the new one, whatever happens to this process or to others that write
    there; what others left behind when they were killed is removed.  Whoever could read the old file can read the new.

    :raises NotWritten: when the system refuses.
    """
    target = Path(os.path.realpath(path))  # the file itself, where path is a link to it
    try:
        with _own_folder(target) as folder:
            permissions = target.stat().st_mode & 0o777 if target.exists() else folder.stat().st_mode & 0o666
            folder.chmod(stat.S_IRWXU)  # what is written there may be private
            part = folder / "part"
            yield part
            with open(part, "r+b") as file:
                os.fsync(file.fileno())
            part.chmod(permissions)  # those of the file before; of a new one as open() would have made it
            os.replace(part, target)
        with _handle(target.parent) as handle, suppress(OSError):  # the new name too, where folders can be synchronised
            os.fsync(handle)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NotWritten(
            f"{path} could not be written ({reason}); what was there before is as it was. Expected a folder that is "
            f"there, may be written to and has room: {_room(target.parent)}."
        ) from error


@contextmanager
def _own_folder(target: Path) -> Iterator[Path]:
    """A new folder beside the target, locked while its writer lives; those that nobody has locked are removed first.

    A writer whose folder is gone when it has locked it was taken for a killed one: it begins anew.
    """
    if os.path.lexists(target) and not target.is_file():  # a device or a pipe would be gone
        raise OSError("it is a folder" if target.is_dir() else "it is no regular file, or links that lead nowhere")
    stem = f"{target.name[:50]}."  # names have a limit
    for entry in os.scandir(target.parent):
        if re.fullmatch(re.escape(stem) + "[0-9a-f]{16}[.]part", entry.name):
            with _handle(entry.path) as handle:
                if _locked(handle, wait=False):  # whoever wrote there is gone
                    shutil.rmtree(entry.path, ignore_errors=True)
    while True:
        folder = target.parent / f"{stem}{secrets.token_hex(8)}.part"
        folder.mkdir()
        with _handle(folder) as handle:
            _locked(handle, wait=True)
            if folder.exists():
                try:
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                return


@contextmanager
def _handle(folder: str | Path) -> Iterator[int]:
    """A handle of a folder; -1, which no system call takes, where folders have none."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield -1
        return
    try:
        yield handle
    finally:
        os.close(handle)


def _locked(handle: int, *, wait: bool) -> bool:
    """Whether a folder is ours alone, as long as its handle lives; False where there are no locks."""
    with suppress(OSError, ValueError, AttributeError):
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return True
    return False


def _room(folder: Path) -> str:
    """Number of free bytes, in words."""
    with suppress(OSError):
        return f"{folder} has {shutil.disk_usage(folder).free:,} bytes free"
    return f"{folder} cannot be looked at"
