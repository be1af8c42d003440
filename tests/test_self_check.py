"""``python -m pyro_evidence``: versions and a check, and what it says when the check fails."""

import re
from importlib import metadata
from pathlib import Path

import pytest

from pyro_evidence import __main__ as self_check
from pyro_evidence import __version__

ROOT = Path(__file__).resolve().parents[1]


def test_it_names_versions_and_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert self_check.main() == 0
    said = capsys.readouterr().out
    assert said.startswith("python 3.") and f"torch {metadata.version('torch')}\n" in said
    assert f"pyro-evidence {__version__}\n" in said
    assert "as it should be" in said.splitlines()[-1]


@pytest.mark.parametrize("found", [1e-3, float("nan")])
def test_it_says_when_the_number_is_wrong(
    found: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "difference", lambda: found)
    assert self_check.main() == 1
    assert "please report it" in capsys.readouterr().out


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "ASKED", ["torch", "no-such-package"])
    assert "no-such-package is not installed" in self_check.versions()


def test_what_is_missing_and_optional_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "ASKED", ["torch", "no-such-package"])
    monkeypatch.setattr(self_check, "OPTIONAL", ["no-such-package"])
    assert "no-such-package is not installed, and optional" in self_check.versions()


def test_extras_alone_are_optional() -> None:
    listed = re.search(r"^dependencies = \[(.*)\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert listed is not None
    needed = {re.split("[<>=]", name)[0] for name in re.findall('"(.*?)"', listed[1])}
    assert needed | {"pyro-evidence"} == set(self_check.ASKED) - set(self_check.OPTIONAL)
