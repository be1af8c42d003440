"""Tensors, numbers and words in a file without code: written whole or not at all, read whole or not at all.

The layout is that of safetensors: eight bytes that say how long the header is (little-endian), the header as JSON, then
the bytes of the tensors one after another, also little-endian.  What is no tensor stands in the header's metadata,
under ``content``, as JSON again.  The entry ``sha256`` there is the digest of all other bytes of the file: of the whole
file with zeros in its own place.
"""

import hashlib
import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput, NotWritten

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

Content = Mapping[str, Any]
MapLocation = str | torch.device | Mapping[str, str] | None

WRITER = "pyro_evidence file 1"
UNSIGNED = "0" * 64  # in place of the digest, while it is computed
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WORDS = (bool, int, str, type(None))  # what JSON keeps as it is
UNFIT = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, OverflowError, MemoryError)


class Record(dict[Any, Any]):
    """What a file holds; an entry that is missing is an error message."""

    def __init__(self, items: Any, path: str | Path) -> None:
        super().__init__(items)
        self.path = path

    def __missing__(self, key: Any) -> Any:
        """Refuse.

        :raises BadInput: always, naming the entry.
        """
        raise BadInput(
            f"{self.path} lacks its entry {key!r}: it is of another kind, or of another release; expected a file that "
            f"this release's save(path) wrote. It has {sorted(map(str, self))}."
        )


def write(content: Content, path: str | Path) -> None:
    """Put ``content`` into a file: tensors, numbers, strings, and lists, tuples and dicts of them.

    :raises BadInput: for anything else.
    :raises NotWritten: when the disk is full or the folder is not to be written to; what was there before is as it was.
    """
    tensors: list[Tensor] = []
    tree = _encoded(content, tensors)
    blocks = [bytes_of(t) for t in tensors]
    head = _head(tree, tensors, blocks)
    with replacing(path) as file:
        file.write(_signed(head, blocks))
        for block in blocks:
            file.write(block)


def read(path: str | Path, map_location: MapLocation = None) -> Record:
    """The content of a file that :func:`write` wrote.

    :param map_location: device on which the tensors are wanted, or device of the file -> device wanted; by default each
        comes to the device it was on.
    :raises BadInput: for any other file, a damaged one, or a device that is not here.
    :raises FileNotFoundError: where there is none.
    """
    whole = _whole(path)
    try:
        header, data = _opened(whole)
        return _decoded(json.loads(header["content"]), _tensors(header, data, _places(map_location)), path)
    except (*UNFIT, RecursionError) as error:
        if isinstance(error, BadInput):
            raise BadInput(f"{path}: {error}") from error
        raise unreadable(path, _reason(error)) from error


def unreadable(
    path: str | Path, reason: str, kind: str = "saved posterior", writer: str = "posterior.save(path)"
) -> BadInput:
    """The error message for a file that is none of ours."""
    return BadInput(
        f"{path} cannot be read as a {kind} ({reason}): it is damaged or foreign; expected a file that {writer} wrote."
    )


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__


def _whole(path: str | Path) -> bytearray:
    """All bytes of a file, by one handle: a file that is put in its place meanwhile does not mix with it."""
    try:
        with open(path, "rb") as file:
            return bytearray(file.read())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, _reason(error)) from error


def _encoded(value: Any, tensors: list[Tensor], where: str = "the content") -> Any:
    """A value as JSON holds it; tensors go into the list."""
    if type(value) in WORDS or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, Tensor):
        return _encoded_tensor(value, tensors, where)
    if isinstance(value, Mapping):
        pairs = [[_encoded(k, tensors, where), _encoded(v, tensors, f"{where}[{k!r}]")] for k, v in value.items()]
        return {"dict": pairs}
    if type(value) in (list, tuple, torch.Size):
        items = [_encoded(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if type(value) is list else {type(value).__name__.lower(): items}
    if type(value) in (float, torch.dtype, torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise BadInput(
        f"{where} is a {type(value).__name__}, which a file without code cannot hold; expected tensors, numbers, "
        f"strings, or lists, tuples and dicts of them."
    )


def _encoded_tensor(value: Tensor, tensors: list[Tensor], where: str) -> Any:
    """Its number in the list, as real pairs where it is complex, and the device it was on."""
    if value.layout != torch.strided or (value.dtype not in NAMES and not value.is_complex()):
        raise BadInput(
            f"{where} is a tensor of {value.dtype}, {value.layout}; expected a dense one of {', '.join(DTYPES)}."
        )
    tensors.append((torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).detach())
    kind = {"complex": True} if value.is_complex() else {}
    return {"tensor": len(tensors) - 1, "on": str(value.device), **kind}


def bytes_of(value: Tensor) -> memoryview:
    """The elements in order, little-endian."""
    flat = value.cpu().contiguous().reshape(-1)
    flat = flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)  # a single number
    return _little_endian(flat.view(torch.uint8), value.element_size()).numpy().data


def _little_endian(flat: Tensor, size: int) -> Tensor:
    """Bytes turned round on a machine that has the large end first."""
    return flat if sys.byteorder == "little" else flat.reshape(-1, size).flip(-1).reshape(-1)


def _head(tree: Any, tensors: list[Tensor], blocks: list[memoryview]) -> bytes:
    """The header without its digest, its length in front."""
    entries: dict[str, Any] = {
        "__metadata__": {"writer": WRITER, "sha256": UNSIGNED, "content": json.dumps(tree, allow_nan=False)}
    }
    end = 0
    for i, (tensor, block) in enumerate(zip(tensors, blocks, strict=True)):
        start, end = end, end + block.nbytes
        entries[str(i)] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of eight, as the layout asks
    return len(text).to_bytes(8, "little") + text


def _digest(head: bytes, blocks: list[memoryview]) -> str:
    found = hashlib.sha256(head)
    for block in blocks:
        found.update(block)
    return found.hexdigest()


def _signed(head: bytes, blocks: list[memoryview]) -> bytes:
    """The header with the digest of everything in its place, which is the first that looks like it."""
    return head.replace(UNSIGNED.encode(), _digest(head, blocks).encode(), 1)


def _opened(whole: bytearray) -> tuple[dict[str, Any], memoryview]:
    """Header and data of a file whose digest fits; the header's metadata are lifted into it."""
    size = int.from_bytes(whole[:8], "little")
    if len(whole) < 8 or size > len(whole) - 8:
        raise ValueError("it is shorter than it says")
    header = json.loads(bytes(whole[8 : 8 + size]), object_pairs_hook=_unique)
    metadata = header.pop("__metadata__")
    if metadata["writer"] != WRITER:
        raise ValueError(f"it was written by {str(metadata['writer'])[:60]!r}")
    head, data = bytes(whole[: 8 + size]), memoryview(whole)[8 + size :]
    unsigned = head.replace(str(metadata["sha256"]).encode(), UNSIGNED.encode(), 1)
    if _digest(unsigned, [data]) != metadata["sha256"]:
        raise ValueError("the check sum does not fit")
    return {"content": metadata["content"], "tensors": header}, data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are all different: of two with one name, readers may believe either."""
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


Tensors = Callable[[int, str], Tensor]  # number, device -> tensor


def _tensors(header: dict[str, Any], data: memoryview, place: Callable[[str], torch.device]) -> Tensors:
    """How to get at the tensors.

    :raises ValueError: unless they fill the data from end to end.
    """
    entries = [header["tensors"][str(i)] for i in range(len(header["tensors"]))]
    ends = [0, *(e["data_offsets"][1] for e in entries)]
    if [e["data_offsets"][0] for e in entries] != ends[:-1] or ends[-1] != data.nbytes:
        raise ValueError("the tensors do not fill the file")

    def tensor(number: int, on: str) -> Tensor:
        entry = entries[number]
        dtype, (start, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
        if end - start != math.prod(entry["shape"]) * dtype.itemsize or any(s < 0 for s in entry["shape"]):
            raise ValueError("a shape does not fit its data")
        flat = torch.frombuffer(data[start:end], dtype=torch.uint8).clone() if end > start else torch.empty(0)
        flat = _little_endian(flat.to(torch.uint8), dtype.itemsize)
        return flat.view(dtype).reshape(entry["shape"]).to(place(on))

    return tensor


def _places(map_location: MapLocation) -> Callable[[str], torch.device]:
    """Where a tensor of the file is to go.

    :raises BadInput: for what is no device.
    """
    if callable(map_location):
        raise BadInput(f"map_location={map_location!r} is a function; expected a device such as 'cpu', or a dict.")

    def place(on: str) -> torch.device:
        device = torch.device(map_location.get(on, on) if isinstance(map_location, Mapping) else map_location or on)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise BadInput(f"its tensors were on {on}, and {device} is not here. Pass map_location='cpu'.")
        return device

    return place


def _decoded(value: Any, tensor: Tensors, path: str | Path) -> Any:
    """The value that :func:`_encoded` has put down."""
    if isinstance(value, list):
        return [_decoded(item, tensor, path) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        found = tensor(value["tensor"], value["on"])
        return torch.view_as_complex(found) if value.get("complex") else found
    ((kind, inner),) = value.items()
    if kind == "dict":
        return Record([(_decoded(k, tensor, path), _decoded(v, tensor, path)) for k, v in inner], path)
    if kind in ("tuple", "size"):
        items = (_decoded(item, tensor, path) for item in inner)
        return tuple(items) if kind == "tuple" else torch.Size(items)
    return _decoded_word(kind, inner)


def _decoded_word(kind: str, text: str) -> Any:
    if kind == "float":
        return float(text)
    if kind == "device":
        return torch.device(text)
    found = getattr(torch, text) if kind == "dtype" else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"it holds a {kind[:60]}")
    return found


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write to that takes the place of ``path`` when it is whole and on the disk.

    Whoever reads ``path`` meets the old file or the new one, whatever happens to this process or to others that write
    there; what others left behind when they were killed is removed.

    :raises NotWritten: when the system refuses.
    """
    target = Path(os.path.realpath(path))  # the file itself, where path is a link to it
    try:
        with _begun(target) as (part, file):
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()  # elsewhere an open file cannot be renamed
            os.replace(part, target)
        _settle(target.parent)
    except OSError as error:
        raise NotWritten(
            f"{path} could not be written ({error.strerror or error}); what was there before is as it was. Expected a "
            f"folder that is there, may be written to and has room: {_room(target.parent)}."
        ) from error


@contextmanager
def _begun(target: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file beside the target, locked while its writer lives, gone at the end."""
    if target.is_dir():
        raise IsADirectoryError(21, "it is a folder")
    stem = f"{target.name[:50]}."  # names have a limit
    _sweep(target.parent, stem)
    part, file = _own(target.parent, stem)
    try:
        with file:
            yield part, file
    finally:
        part.unlink(missing_ok=True)


def _own(folder: Path, stem: str) -> tuple[Path, BinaryIO]:
    """A new file under a name of its own, locked."""
    while True:
        part = folder / f"{stem}{secrets.token_hex(8)}.part"
        file = open(part, "xb")  # the caller closes it
        _locked(file, wait=True)
        if part.exists():
            return part, file
        file.close()  # another writer took it for abandoned in the moment before it was locked


def _sweep(folder: Path, stem: str) -> None:
    """Remove the parts of writers that were killed: those that nobody has locked."""
    for entry in os.scandir(folder):
        if entry.name.startswith(stem) and entry.name.endswith(".part") and _abandoned(entry.path):
            Path(entry.path).unlink(missing_ok=True)


def _abandoned(part: str) -> bool:
    try:
        with open(part, "r+b") as file:
            return _locked(file, wait=False)
    except OSError:
        return False


def _locked(file: BinaryIO, wait: bool) -> bool:
    """Whether the file is now ours alone, until it is closed or the process ends; False where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (OSError, AttributeError):
        return False
    return True


def _settle(folder: Path) -> None:
    """Have the new name on the disk as well, where folders can be synchronised."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:  # of a file system that cannot
        pass
    finally:
        os.close(handle)


def _room(folder: Path) -> str:
    """How many bytes are free, in words."""
    try:
        found = os.statvfs(folder)
    except (OSError, AttributeError):
        return f"{folder} cannot be looked at"
    return f"{folder} has {found.f_bavail * found.f_frsize:,} bytes free"
