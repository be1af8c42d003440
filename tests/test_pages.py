"""The code on every page of the guide runs as it stands, one page after another in its own room."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [path for path in sorted(DOCS.glob("*.md")) if BLOCK.search(path.read_text(encoding="utf-8"))]


def test_there_are_pages_with_code() -> None:
    assert {"coming_from", "guide", "which_engine"} <= {path.stem for path in PAGES}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_code_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    if "from pyro_evidence.models.formula" in path.read_text(encoding="utf-8"):
        pytest.importorskip("formulae")
    room: dict[str, Any] = {"__name__": path.stem}
    exec(compile("\n".join(BLOCK.findall(path.read_text(encoding="utf-8"))), path.name, "exec"), room)
