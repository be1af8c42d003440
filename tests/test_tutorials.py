"""Every tutorial runs to its last assertion, and its notebook is that same tutorial, executed."""

import os
import runpy
from pathlib import Path

import jupytext
import matplotlib.pyplot as plt
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "tutorials"
TUTORIALS = sorted(FOLDER.glob("*.py"))

each_tutorial = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[str]:
    return [cell.source for cell in jupytext.read(path).cells if cell.cell_type == kind]


def test_there_are_tutorials_and_no_notebook_without_one() -> None:
    assert TUTORIALS
    assert {path.stem for path in FOLDER.glob("*.ipynb")} <= {path.stem for path in TUTORIALS}


@each_tutorial
def test_tutorial_runs(path: Path) -> None:
    try:
        runpy.run_path(str(path))
    except FileNotFoundError as error:
        if "PYRO_EVIDENCE_DATA" not in str(error) or "PYRO_EVIDENCE_DATA" in os.environ:
            raise
        pytest.skip(str(error))
    finally:
        plt.close("all")


@each_tutorial
@pytest.mark.parametrize("kind", ["code", "markdown"])
def test_notebook_has_the_same_cells(path: Path, kind: str) -> None:
    assert cells(path.with_suffix(".ipynb"), kind) == cells(path, kind), "run make tutorials"


@each_tutorial
def test_notebook_was_executed_from_top_to_bottom(path: Path) -> None:
    notebook = jupytext.read(path.with_suffix(".ipynb"))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error"]


@each_tutorial
def test_notebook_shows_nothing_by_accident(path: Path) -> None:
    notebook = jupytext.read(path.with_suffix(".ipynb"))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output.get("data", {}).get("text/plain", output.get("text", "")) for output in outputs]
    assert [text for text in texts if text.lstrip("[").startswith(("Text(", "<matplotlib", "<Axes"))] == []
    assert [text[:100] for text in texts if len(text) > 5000] == []


@each_tutorial
def test_notebook_holds_no_path_of_the_machine_it_ran_on(path: Path) -> None:
    text = path.with_suffix(".ipynb").read_text(encoding="utf-8")
    places = ("/home/", "/root/", "/tmp/", "/usr/", "/Users/", "site-packages", str(FOLDER.parent))
    assert [place for place in places if place in text] == []
