"""The page of the house shows the imports that there are, and its walk is the way that a run takes."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import EvidenceEM, LaplaceEvidence, Stop
from pyro_evidence.models.mixture import gaussian_mixture
from tests.picture_of_imports import MARK, PAGE, arrows, below, imports, picture, written
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


def logistic(X: Tensor, t: Tensor | None = None) -> Tensor:
    alpha = pyro.param("alpha", torch.ones(()), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, alpha**-0.5).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        found: Tensor = pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)
    return found


def files_entered(run: Callable[[], object]) -> list[str]:
    """Files of the package in the order in which a fit first calls something in them."""
    found: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.setdefault(path.relative_to(PACKAGE).as_posix())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return list(found)


def walk(heading: str) -> list[str]:
    """The files that a section of the page numbers."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}")[1].split("## ")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section, flags=re.MULTILINE)


def test_the_walk_is_the_way_of_a_run() -> None:
    X, engine = torch.randn(60, 2, generator=torch.Generator().manual_seed(0)), LaplaceEvidence(logistic)
    entered = files_entered(lambda: engine.run(X, (X[:, 0] > 0.3).double()).log_evidence)
    files = walk("One walk")
    assert len(files) > 10 and set(files) <= set(entered)
    assert files == sorted(files, key=entered.index)


def test_a_mixture_is_fitted_in_five_files() -> None:
    engine = EvidenceEM(gaussian_mixture(2), stop=Stop(tolerance=0.0, num_steps=3))
    entered = files_entered(lambda: engine.run(torch.randn(30, 2, generator=torch.Generator().manual_seed(0))))
    files = walk("Another")
    assert len(files) == 5 and set(files) <= set(entered)
    assert files[:4] == sorted(files[:4], key=entered.index)  # the loop's file holds the settings of stopping too


def test_every_decision_is_listed_and_every_file_on_the_page_exists() -> None:
    folder = PAGE.parent / "decisions"
    listed = re.findall(r"\((\d{4}[\w-]+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert listed == sorted(path.name for path in folder.glob("[0-9]*.md"))
    for page in (PAGE, *folder.glob("*.md")):
        named = re.findall(r"`((?:[a-z_\d]+/)*[a-z_\d]+\.py)`", page.read_text(encoding="utf-8"))
        places = (PACKAGE, PACKAGE.parent)
        assert [name for name in named if not any((place / name).exists() for place in places)] == []
