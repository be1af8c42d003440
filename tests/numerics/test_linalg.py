"""Cholesky factors that are right or refused; memory that is there or not."""

import pickle
from pathlib import Path

import pytest
import torch

from pyro_evidence.errors import NotPositiveDefinite, TooLarge
from pyro_evidence.numerics import linalg
from pyro_evidence.numerics.linalg import available_bytes, cholesky, require_memory

CPU = torch.device("cpu")


def test_factor_gives_the_matrix_back_in_double() -> None:
    B = torch.randn(2, 3, 3, dtype=torch.float32)
    A = B @ B.mT + torch.eye(3, dtype=torch.float32)
    tril = cholesky(A, "A")
    assert tril.dtype == torch.float64
    torch.testing.assert_close(tril @ tril.mT, A.double(), rtol=1e-10, atol=1e-12)


def test_letter_has_eigenvalue_and_row() -> None:
    A = torch.eye(4).expand(3, 4, 4).clone()
    A[1, 2, 2] = -2.0
    with pytest.raises(NotPositiveDefinite, match=r"A, shape \(3, 4, 4\), has smallest eigenvalue -2.00e\+00.*w\[2\]"):
        cholesky(A, "A", lambda i: f"w[{i}]")
    with pytest.raises(NotPositiveDefinite, match=r"smallest eigenvalue 0.00e.*coordinate 1.*damped"):
        cholesky(torch.tensor([1.0, 0.0]).diag(), "A")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_letter_about_what_is_not_finite(value: float) -> None:
    A = torch.eye(3)
    A[2, 2] = value
    with pytest.raises(NotPositiveDefinite, match="contains inf or nan, first in the row of coordinate 2"):
        cholesky(A, "A")


def test_nothing_is_added_to_a_nearly_singular_matrix() -> None:
    A = torch.tensor([[1.0, 1.0 - 1e-13], [1.0 - 1e-13, 1.0]])
    torch.testing.assert_close(torch.det(cholesky(A, "A")) ** 2, torch.det(A), rtol=1e-2, atol=0.0)


def test_free_memory_is_a_sensible_number() -> None:
    assert 2**20 < available_bytes(CPU) < 2**60


def files(folder: Path, **contents: str) -> None:
    for name, text in contents.items():
        (folder / name.replace("_", ".")).write_text(text)


def test_caches_count_as_free_and_a_container_has_its_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files(tmp_path, meminfo="MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 4000 kB\n")
    monkeypatch.setattr(linalg, "MEMORY_TABLE", tmp_path / "meminfo")
    monkeypatch.setattr(linalg, "CONTROL_GROUP", tmp_path)
    assert available_bytes(CPU) == 4_096_000
    files(tmp_path, memory_max="max\n", memory_current="900\n", memory_stat="anon 100\nfile 300\n")
    assert available_bytes(CPU) == 4_096_000
    files(tmp_path, memory_max="1000\n")
    assert available_bytes(CPU) == 1000 - 900 + 300


def test_a_system_that_does_not_say_has_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg, "MEMORY_TABLE", tmp_path / "missing")
    assert available_bytes(CPU) >= 2**28


def test_too_much_is_refused_with_both_numbers_and_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg, "available_bytes", lambda device: 10_000_000)
    require_memory(10_000_000, "it", CPU)
    with pytest.raises(TooLarge, match=r"it needs 10,000,001 bytes; 10,000,000 are free on cpu.*maximise=.*diagonal"):
        require_memory(10_000_001, "it", CPU)


def test_nobody_asks_for_what_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg, "available_bytes", lambda device: 1 / 0)
    require_memory(linalg.SMALL, "it", CPU)


def test_signs_of_columns_are_the_same_whatever_they_were() -> None:
    V = torch.linalg.eigh(torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 1.0], [0.0, 1.0, 2.0]]))[1]
    for flip in ([1.0, 1.0, -1.0], [-1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]):
        torch.testing.assert_close(linalg.fix_signs(V * torch.tensor(flip)), linalg.fix_signs(V), rtol=0.0, atol=0.0)
    torch.testing.assert_close(linalg.fix_signs(V).abs(), V.abs())
    assert not bool(linalg.fix_signs(torch.zeros(3, 2)).any())


def test_eigenvalues_are_taken_only_for_whoever_reads_the_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(NotPositiveDefinite) as refused:
        patch.setattr(torch.linalg, "eigh", lambda *_: pytest.fail("nobody has read it yet"))
        cholesky(-torch.eye(3), "A")
    copied = pickle.loads(pickle.dumps(refused.value))
    assert str(copied) == str(refused.value)
    assert "-1.00e+00" in str(copied)
