"""``python -m pyro_evidence``: versions and a check, and what it says when the check fails."""

from importlib import metadata

import pytest

from pyro_evidence import __main__ as self_check
from pyro_evidence import __version__


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
