"""Every tutorial runs to its last assertion, and its notebook is that same tutorial, executed."""

import os
import re
import runpy
from pathlib import Path

import jupytext
import matplotlib.pyplot as plt
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parents[1] / "tutorials"
TUTORIALS = sorted(FOLDER.glob("*.py"))

each_tutorial = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[str]:
    return [cell.source for cell in jupytext.read(path).cells if cell.cell_type == kind]


def test_there_are_tutorials_and_no_notebook_without_one() -> None:
    assert TUTORIALS
    assert {path.stem for path in FOLDER.glob("*.ipynb")} <= {path.stem for path in TUTORIALS}


def complaints(figure: Figure) -> list[str]:
    """Axes of numbers that do not say of what, and points whose class is told by colour alone."""
    figure.canvas.draw()
    return [
        f"figure {figure.number}, axes {i}: {what}"
        for i, axes in enumerate(figure.axes)
        if axes.axison
        for what in [*(f"no label on {k}" for k in "xy" if not is_labelled(axes, k)), *colours_alone(axes)]
    ]


def is_labelled(axes: Axes, kind: str) -> bool:
    """Whether an axis, or one that it shares, has a label, or words in place of numbers."""
    shared = getattr(axes, f"get_shared_{kind}_axes")().get_siblings(axes)
    ticks = [label.get_text() for label in getattr(axes, f"get_{kind}ticklabels")()]
    numbers = [text for text in ticks if re.fullmatch(r"[-+\N{MINUS SIGN}]?[\d.]+|\$.*\$", text)]
    return not numbers or any(getattr(a, f"get_{kind}label")() for a in shared)


def colours_alone(axes: Axes) -> list[str]:
    values = [c.get_array() for c in axes.collections if isinstance(c, PathCollection) and c.get_array() is not None]
    return ["colour alone tells classes apart" for found in values if len(set(found.tolist())) < 10]


@pytest.mark.parametrize("labelled", [("x", "y"), ("x",), ()])
def test_an_axis_without_a_label_is_seen(labelled: tuple[str, ...]) -> None:
    figure, axes = plt.subplots()
    axes.scatter([0.0, 1.0], [2.0, 3.0], c=[0, 1])
    axes.set(**{f"{kind}label": "what it is" for kind in labelled})
    assert len(complaints(figure)) == 3 - len(labelled)
    plt.close(figure)


def test_every_picture_is_in_a_tutorial() -> None:
    modules = (FOLDER.parent / "pyro_evidence" / "plots").glob("*.py")
    drawn = {
        name for path in modules for name in re.findall(r"^def ([a-z]\w*)\(\s*axes", path.read_text(), re.MULTILINE)
    }
    text = "".join(path.read_text(encoding="utf-8") for path in TUTORIALS)
    assert len(drawn) > 15
    assert {name for name in drawn if f".{name}(" not in text} == set()


# NUTS, or many fits: their notebooks are executed at a release, and what they fit is tested where it lives
LONGEST = ("01", "02", "03", "04", "05", "06", "07", "08", "09", "10", "11", "12", "13", "14", "16", "17", "18")


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[pytest.mark.slow] * p.name.startswith(LONGEST), id=p.stem) for p in TUTORIALS]
)
def test_tutorial_runs(path: Path) -> None:
    try:
        runpy.run_path(str(path))
        assert [place for number in plt.get_fignums() for place in complaints(plt.figure(number))] == []
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
