"""A file holds tensors, numbers and words: whole or not at all, whoever writes beside it and whatever is done to it."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pyro_evidence import files
from pyro_evidence.errors import BadInput, NotWritten

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the locks and signals of Linux")
CONTENT: dict[str, Any] = {
    "double": torch.arange(6.0, dtype=torch.float64).reshape(2, 3),
    "single": torch.tensor([0.1, -0.0, math.inf, math.nan]),
    "half": torch.tensor([1.5, 2.5]).bfloat16(),
    "number": torch.tensor(-3),
    "mask": torch.tensor([True, False]),
    "complex": torch.tensor([1.0 + 2.0j]),
    "empty": torch.empty(0, 3),
    "repeated": torch.ones(1).expand(4),
    "turned": torch.arange(6).reshape(2, 3).mT,
    "words": ["a", "é\ud800", ""],
    "numbers": (0.1, -0.0, 1.0, 3, 10**40, True, None),
    "infinite": [math.inf, -math.inf],
    "nested": {1: {"a": [torch.zeros(2)]}, (2, 3): ()},
    "kinds": [torch.float32, torch.device("cpu"), torch.Size([2, 0])],
}


def assert_equal(found: Any, expected: Any) -> None:
    """Equal in value and type; tensors in shape and dtype as well."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, list | tuple) and not isinstance(expected, torch.Size):
        assert type(found) is type(expected) and len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_equal(a, b)
    else:
        assert (type(found), repr(found)) == (type(expected), repr(expected))


def test_everything_comes_back(tmp_path: Path) -> None:
    files.write(CONTENT, tmp_path / "file")
    assert_equal(files.read(tmp_path / "file"), CONTENT)


def test_the_layout_is_that_of_safetensors(tmp_path: Path) -> None:
    files.write({"a": CONTENT["double"], "b": CONTENT["number"]}, tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    size = int(np.frombuffer(whole[:8], "<u8")[0])
    header = json.loads(whole[8 : 8 + size])
    metadata = header.pop("__metadata__")
    assert (8 + size) % 8 == 0 and all(isinstance(text, str) for text in metadata.values())
    assert {name: (e["dtype"], e["shape"]) for name, e in header.items()} == {"0": ("F64", [2, 3]), "1": ("I64", [])}
    data = {name: whole[8 + size :][slice(*e["data_offsets"])] for name, e in header.items()}
    assert np.frombuffer(data["0"], "<f8").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert np.frombuffer(data["1"], "<i8").tolist() == [-3]


def test_tensors_that_share_memory_come_back_apart(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    files.write(
        {"whole": whole, "part": whole[1:3], "again": whole, "turned": whole.reshape(2, 3).mT}, tmp_path / "file"
    )
    found = files.read(tmp_path / "file")
    assert_equal(found, {"whole": whole, "part": whole[1:3], "again": whole, "turned": whole.reshape(2, 3).mT})
    assert len({t.untyped_storage().data_ptr() for t in found.values()}) == 4


def test_a_machine_with_the_large_end_first_writes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = torch.frombuffer(bytearray(np.array([1.5, -2.0], ">f8").tobytes()), dtype=torch.float64)
    monkeypatch.setattr(sys, "byteorder", "big")
    files.write({"a": swapped}, tmp_path / "file")
    assert torch.equal(files.read(tmp_path / "file")["a"], swapped)
    monkeypatch.undo()
    assert files.read(tmp_path / "file")["a"].tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    ("value", "kind"),
    [(object(), "object"), ({1, 2}, "set"), (np.float64(1.0), "float64"), (torch.eye(2).to_sparse(), "sparse_coo")],
)
def test_what_a_file_cannot_hold_is_refused_by_its_place(value, kind, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=rf"the content\['a'\]\[1\] is a .*{kind}"):
        files.write({"a": [0, value]}, tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_a_changed_bit_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write({"a": torch.ones(2), "log_evidence": -1.5, "status": "converged"}, path)
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 7):  # every byte, and every place in one
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match="cannot be read"):
            files.read(path)


def test_every_shortened_or_lengthened_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write({"a": torch.ones(2)}, path)
    whole = path.read_bytes()
    for part in [*(whole[:n] for n in range(len(whole))), whole + b"\0", whole * 2]:
        path.write_bytes(part)
        with pytest.raises(BadInput, match="cannot be read"):
            files.read(path)


def forged(path: Path, change) -> None:
    """A file with another header whose digest fits."""
    whole, tensors = path.read_bytes(), list(load_file(path).values())
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    change(header)
    header["__metadata__"]["sha256"] = files.digest(header["__metadata__"].get("content", ""), tensors)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size :])


def entry(**values: Any):
    return lambda header: header["0"].update(values)


def content(text: str):
    return lambda header: header["__metadata__"].update(content=text)


@pytest.mark.parametrize(
    "change",
    [
        entry(shape=[2**62]),
        entry(shape=[-1, -2]),
        entry(shape="a"),
        entry(dtype="F9"),
        entry(data_offsets=[0, 4]),
        entry(data_offsets=[4, 8]),
        entry(data_offsets=None),
        content("[" * 100_000),
        content('{"os": "system"}'),
        content('{"dtype": "load"}'),
        content('{"dtype": "os"}'),
        content('{"tensor": 7, "on": "cpu"}'),
        content('{"tensor": 0, "on": "nowhere"}'),
        content('{"tensor": 0, "on": "cpu", "complex": true}'),
        content('{"dict": [[{"dict": []}, 1]]}'),
        content("{}"),
        lambda header: header.update(extra=header["0"]),
        lambda header: header["__metadata__"].update(writer="somebody else"),
        lambda header: header["__metadata__"].pop("content"),
    ],
)
def test_a_forged_header_is_refused(change, tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write({"a": torch.ones(1, dtype=torch.float64)}, path)
    forged(path, lambda header: None)
    files.read(path)
    forged(path, change)
    with pytest.raises(BadInput, match="cannot be read"):
        files.read(path)


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write({"a": 1}, path)
    whole = path.read_bytes()
    text = whole[8:].rstrip()[:-1] + b', "__metadata__": {}}'
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(BadInput, match="cannot be read"):
        files.read(path)


def test_a_device_that_is_not_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write({"a": torch.ones(1)}, path)
    forged(path, content('{"dict": [["a", {"tensor": 0, "on": "cuda:3"}]]}'))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, match=r"its tensors were on cuda:3, .* map_location='cpu'"):
        files.read(path)
    for place in ("cpu", torch.device("cpu"), {"cuda:3": "cpu"}):
        assert files.read(path, place)["a"].tolist() == [1.0]
    with pytest.raises(BadInput, match="expected a device such as 'cpu'"):
        files.read(path, lambda storage, place: storage)  # type: ignore[arg-type]


def test_a_file_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="cannot be read"):
        files.read(tmp_path)


# Writers


def test_a_link_goes_on_pointing_at_the_file(tmp_path: Path) -> None:
    files.write({"a": 1}, tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    files.write({"a": 2}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert files.read(tmp_path / "file") == {"a": 2}


def test_a_long_name(tmp_path: Path) -> None:
    files.write({"a": 1}, tmp_path / ("é" * 127))
    assert [p.name for p in tmp_path.iterdir()] == ["é" * 127]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "file", tmp_path):
        with pytest.raises(NotWritten, match=r"could not be written .* what was there before is as it was"):
            files.write({"a": 1}, path)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write({"a": 1}, tmp_path / "file")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotWritten, match=r"\(No space left on device\).*bytes free"):
        files.write({"a": 2}, tmp_path / "file")
    assert files.read(tmp_path / "file") == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


WRITES = textwrap.dedent(
    """
    import os, sys, torch
    from pyro_evidence import files
    number, path = 1.0 + bool(os.fork()), sys.argv[1]
    while True:
        files.write({"a": torch.full((200_000,), number)}, path)
    """
)


@LINUX
def test_two_writers_and_a_reader_meet_whole_files_only(tmp_path: Path) -> None:
    path = tmp_path / "file"
    command = [sys.executable, "-c", WRITES, str(path)]
    place = Path(__file__).parents[1]
    writers = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, start_new_session=True)
    try:
        wait_for(path.exists)
        seen = {files.read(path)["a"].unique().tolist().__repr__() for _ in range(200)}
    finally:
        os.killpg(writers.pid, signal.SIGKILL)
        writers.communicate()  # until neither has the pipe
    assert seen <= {"[1.0]", "[2.0]"} and len(seen) >= 1
    files.write({"a": 3}, path)  # what they left half done goes
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@LINUX
def test_the_part_of_a_living_writer_stays(tmp_path: Path) -> None:
    with files.replacing(tmp_path / "file") as slow:
        slow.write_bytes(b"half")
        files.write({"a": 1}, tmp_path / "file")
        slow.write_bytes(slow.read_bytes() + b" and half")
    assert (tmp_path / "file").read_bytes() == b"half and half"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def wait_for(condition) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise TimeoutError("the writers did not begin")


LITTLE = textwrap.dedent(
    """
    import resource, sys, torch
    from pyro_evidence import files
    large = torch.ones(5_000_000, dtype=torch.float64)  # 38 MiB
    files.write({"a": 1}, sys.argv[1])
    pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + 2**24, pages + 2**24))
    files.write({"a": large}, sys.argv[1])
    """
)


@LINUX
def test_writing_takes_little_memory_beside_the_tensors(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LITTLE, str(tmp_path / "file")], cwd=Path(__file__).parents[1], check=True)
    assert float(files.read(tmp_path / "file")["a"].sum()) == 5e6


def test_tensors_of_other_dtypes_are_refused_though_the_check_sum_fits(tmp_path: Path) -> None:
    tensor = torch.ones(2).to(torch.float8_e4m3fn)
    text = json.dumps({"dict": [["a", {"tensor": 0, "on": "cpu"}]]})
    metadata = {"writer": files.WRITER, "content": text, "sha256": files.digest(text, [tensor])}
    save_file({"0": tensor}, tmp_path / "file", metadata)
    with pytest.raises(BadInput, match=r"it holds tensors of .*float8_e4m3fn"):
        files.read(tmp_path / "file")
