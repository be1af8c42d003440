"""The code on every page of the guide runs as it stands, chains shorter, one page after another in its own room."""

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
CHAIN = re.compile(r"\b((?:num_samples|warmup_steps)=)100\b")  # that nobody looks at here may be shorter
PAGES = [path for path in sorted(DOCS.glob("*.md")) if BLOCK.search(path.read_text(encoding="utf-8"))]


def test_there_are_pages_with_code() -> None:
    assert {"coming_from", "guide", "which_engine"} <= {path.stem for path in PAGES}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_code_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    if "from pyro_evidence.models.formula" in path.read_text(encoding="utf-8"):
        pytest.importorskip("formulae")
    code = "\n".join(BLOCK.findall(path.read_text(encoding="utf-8")))
    exec(compile(CHAIN.sub(r"\g<1>20", code), path.name, "exec"), {"__name__": path.stem})
