"""Files of other people: checkpoints that were tampered with, paths that are no checkpoint, posteriors signed again."""

import math
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pyro_evidence import EvidenceEM, LaplaceEvidence, LaplacePosterior, Stop, files, settings
from pyro_evidence.fitting.checkpoint import digest
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


# --- paths that are no checkpoint ---


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="issue 2: the fit runs to its end without a checkpoint")
def test_a_folder_is_refused_as_a_checkpoint_at_the_start(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no checkpoint")
        says(refusal(lambda: mixture(tmp_path).run(*heaps())), str(tmp_path), "folder")


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="issue 2: the file is overwritten")
def test_a_file_that_is_no_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "mydata.csv"
    path.write_text("1,2,3\n" * 3)
    try:
        message = refusal(lambda: mixture(path).run(*heaps()))
    finally:
        assert path.read_text(errors="replace") == "1,2,3\n" * 3
    says(message, str(path), "checkpoint")


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="issue 2: arrays of NumPy are not in the digest")
def test_other_numpy_data_have_another_digest() -> None:
    zeros, ones = np.zeros(3), np.ones(3)
    reached(digest([torch.zeros(3)], {}) != digest([torch.ones(3)], {}), "tensors are not told apart either")
    assert digest([zeros], {}) != digest([ones], {})


# --- saved posteriors ---


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="issue 2: the numbers of a file are believed")
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
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="issue 2: 0600 becomes 0644")
def test_a_private_file_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "fit.pt"
    files.write({"a": 1}, path)
    os.chmod(path, 0o600)
    files.write({"a": 2}, path)
    reached(files.read(path)["a"] == 2, "the second content was not written")
    assert path.stat().st_mode & 0o777 == 0o600
