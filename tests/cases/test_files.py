"""Files of other people: checkpoints that were tampered with, paths that are no checkpoint, posteriors signed again."""

import copy
import math
import os
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from pyro_evidence import EvidenceEM, LaplaceEvidence, LaplacePosterior, Stop, files, settings
from pyro_evidence.fitting.checkpoint import FORMAT, digest
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import gaussian_mixture
from tests.cases.expect import reached, refusal, says
from tests.fitting.test_checkpoint import heaps, killed_at

QUIET = Stop(progress=False, throw=False)
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=GENERATOR, dtype=torch.float64)
LABELS = (X[:, 0] + torch.randn(60, generator=GENERATOR, dtype=torch.float64) > 0).double()


def mixture(path: Path | None = None) -> EvidenceEM:
    return EvidenceEM(
        gaussian_mixture(4), stop=Stop(progress=False, throw=False, checkpoint=path, checkpoint_interval=0.0)
    )


def logistic() -> LaplacePosterior:
    return LaplaceEvidence(classifier(Linear()), stop=QUIET).run(X, LABELS)


# --- a checkpoint that names what is to be called ---


def entries(content: Any) -> Iterator[list[Any]]:
    """All pairs of a name and a value inside what a checkpoint holds."""
    if isinstance(content, dict):
        for value in content.values():
            yield from entries(value)
    if isinstance(content, list):
        if len(content) == 2 and isinstance(content[0], str):
            yield content
        for value in content:
            yield from entries(value)


def thawed(content: Any) -> Any:
    """The same with plain dicts and lists, which can be changed in place."""
    if isinstance(content, dict):
        return {key: thawed(value) for key, value in content.items()}
    return [thawed(value) for value in content] if isinstance(content, list) else content


def test_a_checkpoint_calls_no_function_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of a killed fit is changed so that the update of the mixture is a function of the file's choice."""
    path, calls = tmp_path / "fit", []

    def planted(*args: Any) -> None:
        calls.append(args)

    monkeypatch.setattr(settings, "planted", planted, raising=False)
    reached(killed_at(mixture(), heaps(), path, 5), "the fit was over before it was killed")
    content = thawed(files.read(path))
    updates = [entry for entry in entries(content["loops"][-1]["progress"]) if entry[0] == "update"]
    reached(len(updates) > 0, "the checkpoint holds no update")
    for entry in updates:
        entry[1] = {"kind": "settings:planted", "inside": []}
    files.write(content, path)
    try:
        message = refusal(lambda: mixture().resume(path).run(*heaps()))
    finally:
        assert not calls, "the function that the file names was called"
    says(message, str(path), "planted")


# --- what is no file ---


def zeros(folder: Path) -> Path:
    return Path("/dev/zero")


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def unix_socket(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    return folder / "socket"


def sparse(folder: Path, start: bytes = b"") -> Path:
    """Forty gigabytes of nothing."""
    (folder / "sparse").write_bytes(start)
    os.truncate(folder / "sparse", 40 * 2**30)
    return folder / "sparse"


def sparse_header(folder: Path) -> Path:
    return sparse(folder, (39 * 2**30).to_bytes(8, "little"))


def sparse_after_a_header(folder: Path) -> Path:
    files.write({"a": torch.ones(2)}, folder / "whole")
    return sparse(folder, (folder / "whole").read_bytes())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the special files of Linux")
@pytest.mark.parametrize("read", [lambda path: LaplacePosterior.load(path, None), lambda path: mixture().resume(path)])
@pytest.mark.parametrize("make", [zeros, pipe, unix_socket, Path, sparse, sparse_header, sparse_after_a_header])
def test_what_is_no_file_of_that_length_is_refused_before_it_is_read(make: Any, read: Any, tmp_path: Path) -> None:
    path, said = make(tmp_path), []
    reader = threading.Thread(target=lambda: said.append(refusal(lambda: read(path))), daemon=True)
    reader.start()
    reader.join(10.0)
    assert said, "the reading has not ended"
    says(said[0], str(path), "cannot be read")


def test_no_more_is_read_of_a_file_than_its_header_names(tmp_path: Path) -> None:
    """A few bytes more, which fit into memory: forty gigabytes would be refused for want of it."""
    files.write({"a": torch.ones(2)}, tmp_path / "whole")
    (tmp_path / "longer").write_bytes((tmp_path / "whole").read_bytes() + b"0" * 8)
    size = (tmp_path / "longer").stat().st_size
    says(
        refusal(lambda: files.read(tmp_path / "longer")), "longer", f"it has {size} bytes, and {size - 8} by its header"
    )


# --- paths that are no checkpoint ---


def test_a_folder_is_refused_as_a_checkpoint_at_the_start(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no checkpoint")
        says(refusal(lambda: mixture(tmp_path).run(*heaps())), str(tmp_path), "folder")


def test_a_file_that_is_no_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "mydata.csv"
    path.write_text("1,2,3\n" * 3)
    try:
        message = refusal(lambda: mixture(path).run(*heaps()))
    finally:
        assert path.read_text(errors="replace") == "1,2,3\n" * 3
    says(message, str(path), "checkpoint")


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"1,2,3"], ids=["empty", "zeros", "text"])
def test_no_file_of_others_is_overwritten_whatever_it_holds(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    says(refusal(lambda: mixture(path).run(*heaps())), str(path), "is no checkpoint", "another name")
    assert path.read_bytes() == content


def test_a_saved_posterior_is_not_overwritten_by_a_checkpoint(tmp_path: Path) -> None:
    logistic().save(tmp_path / "fit.pt")
    says(refusal(lambda: mixture(tmp_path / "fit.pt").run(*heaps())), "fit.pt", "laplace posterior", "is no checkpoint")


def test_a_checkpoint_of_another_fit_gives_way(tmp_path: Path) -> None:
    path = tmp_path / "fit"
    files.write({"format": FORMAT, "engine": "RVM", "data": "", "loops": []}, path)
    mixture(path).run(*heaps())
    assert files.read(path)["engine"] == "EvidenceEM"


def test_a_folder_that_may_not_be_written_to_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fit"
    files.write({"format": FORMAT, "engine": "RVM", "data": "", "loops": []}, path)
    monkeypatch.setattr(os, "access", lambda folder, how: Path(folder) != tmp_path)  # root may write everywhere
    says(refusal(lambda: mixture(path).run(*heaps())), str(path), "may not be written to")


def test_a_folder_that_is_not_there_is_said_at_the_start(tmp_path: Path) -> None:
    says(refusal(lambda: mixture(tmp_path / "none" / "fit").run(*heaps())), "none/fit", "could not be written")


@pytest.mark.parametrize(
    "use", [lambda path: mixture(path), lambda path: mixture().resume(path), lambda path: logistic().save(path)]
)
@pytest.mark.parametrize("path", ["fit\0.pt", ""], ids=["null byte", "empty"])
def test_a_path_without_a_file_is_named(use: Any, path: str) -> None:
    says(refusal(lambda: use(path)), "null", "empty", "expected the name of a file")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the special files of Linux")
def test_a_pipe_is_not_replaced_by_a_posterior(tmp_path: Path) -> None:
    path = pipe(tmp_path)
    says(refusal(lambda: logistic().save(path)), str(path), "no regular file")
    assert path.is_fifo()


def test_a_link_to_itself_is_not_replaced_by_a_posterior(tmp_path: Path) -> None:
    (path := tmp_path / "loop").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(path)
    says(refusal(lambda: logistic().save(path)), str(path), "links that lead nowhere")
    assert path.is_symlink()


def test_a_link_to_itself_is_refused_as_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "loop"
    path.symlink_to(path)
    says(refusal(lambda: mixture(path).run(*heaps())), str(path), "no checkpoint")


class Pair(NamedTuple):
    """An argument of a model with names inside."""

    x: Tensor
    n: int


class Word(str):
    """A word of another class."""


DIFFERENT: list[tuple[Any, Any]] = [
    (np.zeros(3), np.ones(3)),
    (np.zeros(3), np.zeros(3, dtype=np.float32)),
    (np.zeros((2, 3)), np.zeros((3, 2))),
    (np.array(["a", "b"]), np.array(["a", "c"])),
    (np.array(["a", None], dtype=object), np.array(["a", "b"], dtype=object)),
    (np.array(["2020-01-01"], dtype="datetime64[D]"), np.array(["2020-01-02"], dtype="datetime64[D]")),
    ([np.zeros(3), {"a": (np.zeros(1),)}], [np.zeros(3), {"a": (np.ones(1),)}]),
    (pd.DataFrame({"a": [1, 2]}), pd.DataFrame({"b": [1, 2]})),
    (pd.DataFrame({"a": [1, 2], "s": ["x", "y"]}), pd.DataFrame({"a": [1, 2], "s": ["x", "z"]})),
    (pd.Series(["x", "y"], dtype="category"), pd.Series(["x", "z"], dtype="category")),
    (torch.zeros(2), torch.zeros(2, dtype=torch.complex64)),
    (torch.ones(1, dtype=torch.complex64) * 1j, (torch.ones(1, dtype=torch.complex64) * 1j).conj()),
    (None, "None"),
    ([], ()),
    ([1, [2]], [[1], 2]),
    ({"a": {"b": 1}}, {"a/b": 1}),
    ("a", "b"),
    (1, True),
    (Stop(num_steps=3), Stop(num_steps=4)),
    (Pair(torch.zeros(2), 1), Pair(torch.ones(2), 1)),
    (Word("a"), Word("b")),
    ([np.float64(1.0)], [np.float64(2.0)]),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=str)
def test_other_data_have_another_digest(one: Any, other: Any) -> None:
    for of in (lambda value: digest([value], {}), lambda value: digest([], {"name": value})):
        assert of(one) != of(other)
        assert of(copy.deepcopy(one)) == of(one)
    assert digest([], {"a": one, "b": other}) == digest([], {"b": other, "a": one})


@pytest.mark.parametrize(
    "value",
    [torch.eye(2).to_sparse(), torch.ones(2, device="meta"), {1, 2}, len, object(), np.array([object()])],
    ids=["sparse", "meta", "set", "function", "object", "array of objects"],
)
def test_what_cannot_be_digested_is_named(value: Any) -> None:
    says(refusal(lambda: digest([0, {"net": [value]}], {})), "argument 1['net'][0]", "checkpoint")


# --- saved posteriors ---


@pytest.mark.parametrize("value", [math.nan, 12.5], ids=str)
def test_a_changed_evidence_is_noticed_though_it_was_signed_again(tmp_path: Path, value: float) -> None:
    path = tmp_path / "fit.pt"
    posterior = logistic()
    posterior.save(path)
    model = classifier(Linear())
    reached(float(LaplacePosterior.load(path, model).log_evidence) == float(posterior.log_evidence), "no copy")
    content = dict(files.read(path))
    reached(isinstance(content["log_evidence"], Tensor), "the file holds no log evidence")
    files.write(content | {"log_evidence": torch.tensor(value)}, path)
    says(refusal(lambda: LaplacePosterior.load(path, model)), str(path), "log_evidence")


def test_other_peoples_unfinished_files_stay(tmp_path: Path) -> None:
    (tmp_path / "fit.pt.download.part").write_text("half of a download")
    (tmp_path / "fit.pt.folder.part").mkdir()
    files.write({"a": 1}, tmp_path / "fit.pt")
    reached((tmp_path / "fit.pt").exists(), "nothing was written")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fit.pt", "fit.pt.download.part", "fit.pt.folder.part"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs permissions of Unix")
def test_a_private_file_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "fit.pt"
    files.write({"a": 1}, path)
    os.chmod(path, 0o600)
    files.write({"a": 2}, path)
    reached(files.read(path)["a"] == 2, "the second content was not written")
    assert path.stat().st_mode & 0o777 == 0o600
