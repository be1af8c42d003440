"""The site has a page for everything that is public, and its menu has every page."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def rendering(name: str) -> ModuleType:
    """A module of those that draw the site, which are no package."""
    sys.path.insert(0, str(ROOT / "docs/rendering"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    return rendering("pages")


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    return rendering("drawing")


@pytest.fixture(scope="module")
def docstrings() -> ModuleType:
    return rendering("docstrings")


def leaves(menu: object) -> list[str]:
    """The addresses in a menu of mkdocs."""
    if isinstance(menu, str):
        return [menu]
    return [address for entry in (menu.values() if isinstance(menu, dict) else menu) for address in leaves(entry)]  # type: ignore[attr-defined]


def test_the_menu_has_every_page_and_no_other(pages: ModuleType) -> None:
    menu = leaves(pages.menu())
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    made = {address for address in pages.made() if address.endswith(".md")}
    assert len(menu) == len(set(menu)) and set(menu) == written | made


def test_a_new_page_comes_last(pages: ModuleType) -> None:
    assert pages.ordered(["c", "a", "b"], ["b", "x"]) == ["b", "a", "c"]


def test_every_public_name_has_its_place(pages: ModuleType) -> None:
    text = "\n".join(pages.reference().values())
    for init in (ROOT / "pyro_evidence").rglob("__init__.py"):
        for name, path in pages.names_of(init).items():
            assert f"::: {path}\n" in text + "\n" or pages.in_a_module(path), name


def test_links_of_pages_at_the_top_go_where_the_site_has_them(pages: ModuleType) -> None:
    given = "[a](docs/which_engine.md) [b](tutorials/01_swap_the_engine.ipynb) [c](CONTRIBUTING.md) [d](LICENSE)"
    assert pages.moved(given) == "[a](which_engine.md) [b](tutorials/01_swap_the_engine.md) [c](contributing.md) d"


@pytest.mark.parametrize("fields", [":param x: a number,\n    or two.\n:return: one.", ""])
def test_examples_stand_as_code_above_the_fields(docstrings: ModuleType, fields: str) -> None:
    """Below, the parser takes them for a part of the last field."""
    example = ">>> for x in (1, 2):\n...     print(f(x))  # doctest: +SKIP\n1\n  2"
    for text in (f"What it is.\n\nMore.\n\n{example}\n\n{fields}", f"What it is.\n\nMore.\n\n{fields}\n\n{example}"):
        code = "```pycon\n>>> for x in (1, 2):\n...     print(f(x))\n1\n  2\n```"
        assert docstrings.readable(text.strip()) == f"What it is.\n\nMore.\n\n{code}\n\n{fields}".strip()
    assert docstrings.readable("One line.\n\n:param x: a number.") == "One line.\n\n:param x: a number."


@pytest.mark.parametrize("title", ["Tutorial 01: swap the engine", "1. Swap the engine", "Swap the engine"])
def test_titles_of_tutorials_have_no_number(pages: ModuleType, title: str) -> None:
    """The menu has them in the order of need."""
    assert pages.titled(f"# {title}\n\n## 2. steps\n") == "# Swap the engine\n\n## 2. steps\n"


def test_boxes_stand_below_all_that_point_to_them(drawing: ModuleType) -> None:
    text = 'flowchart TD\n    a["a/"]\n    b["b/"]\n    c("c.py")\n    a --> b\n    b --> c\n    a --> c\n'
    nodes, arrows = dict(drawing.NODE.findall(text)), drawing.ARROW.findall(text)
    assert nodes == {"a": "a/", "b": "b/", "c": "c.py"} and len(arrows) == 3
    assert drawing.levels(list(nodes), arrows) == [["a"], ["b"], ["c"]]
    at = drawing.places([["a"], ["b"], ["c"]], arrows)
    assert at["a"][1] < at["b"][1] < at["c"][1]
    assert drawing.svg(text).count("<rect") == 3 and drawing.svg(text).count("marker-end") == 3
