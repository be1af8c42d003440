"""The page on the architecture shows the imports that there are, and the files that fits enter."""

import re
from pathlib import Path

import pytest

from tests.architecture_page import MARK, PAGE, WALKS, arrows, below, imports, picture, walk, written
from tests.test_architecture import PACKAGE


def test_the_picture_is_that_of_the_imports() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page, PACKAGE) == page, "run make picture"


def test_the_arrows_reach_what_the_imports_reach() -> None:
    wanted = imports(PACKAGE)
    drawn: dict[str, set[str]] = {name: set() for name in wanted}
    for upper, lower in arrows(wanted):
        drawn[upper].add(lower)
    assert all(below(name, drawn) == below(name, wanted) for name in wanted)
    assert sum(map(len, drawn.values())) < sum(map(len, wanted.values()))


def test_a_new_import_changes_the_picture(tmp_path: Path) -> None:
    for name, text in {"errors.py": "", "settings.py": "", "files.py": "import pyro_evidence.settings"}.items():
        (tmp_path / "pyro_evidence").mkdir(exist_ok=True)
        (tmp_path / "pyro_evidence" / name).write_text(text)
    root = tmp_path / "pyro_evidence"
    assert arrows(imports(root)) == [("files", "settings")]
    (root / "settings.py").write_text("from pyro_evidence.errors import BadInput")
    (root / "files.py").write_text("import pyro_evidence.settings\nimport pyro_evidence.errors")
    assert arrows(imports(root)) == [("settings", "errors"), ("files", "settings")]
    assert "settings --> errors" in picture(root)
    page = "\n".join(mark + "\n\n" + mark for mark in map(MARK.format, ("picture", "table")))
    assert written(written(page, root), root) == written(page, root) != page


@pytest.mark.parametrize("fit", WALKS)
def test_the_lists_are_the_files_that_a_fit_enters(fit: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page, PACKAGE, {fit: walk(fit)}) == page, "run make picture"


def test_every_decision_is_listed_and_every_file_on_the_page_exists() -> None:
    folder = PAGE.parent / "decisions"
    listed = re.findall(r"\((\d{4}[\w-]+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert listed == sorted(path.name for path in folder.glob("[0-9]*.md"))
    for page in (PAGE, *folder.glob("*.md")):
        named = re.findall(r"`((?:[a-z_\d]+/)*[a-z_\d]+\.py)`", page.read_text(encoding="utf-8"))
        places = (PACKAGE, PACKAGE.parent)
        assert [name for name in named if not any((place / name).exists() for place in places)] == []
