"""What docs/architecture.md is made of: the picture of the imports, the table of parts, the files that a fit enters.

Run by ``make picture``; the tests hold the page to it.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.test_architecture import ORDER, PACKAGE, imported_parts, nodes, part, sources

PAGE = PACKAGE.parent / "docs/architecture.md"
MARK = "<!-- {}: written by make picture -->"
WALKS = ("line", "two Gaussians")


def parts(root: Path) -> list[str]:
    """The parts that there are, in their order."""
    there = {part(root, path) for path in sources(root)}
    return [name for name in ORDER if name in there]


def imports(root: Path) -> dict[str, set[str]]:
    """For each part the parts that its files import."""
    found: dict[str, set[str]] = {name: set() for name in parts(root)}
    for path in sources(root):
        here = part(root, path)
        if here in found:
            found[here] |= set(imported_parts(root, path)) & (found.keys() - {here})
    return found


def below(name: str, wanted: dict[str, set[str]]) -> set[str]:
    """All that a part reaches, by any number of imports."""
    return wanted[name].union(*(below(other, wanted) for other in wanted[name]))


def arrows(wanted: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports without which something would no longer be reached, lowest part first."""
    found = []
    for name, others in wanted.items():
        by_others = set().union(*(below(other, wanted) for other in others))
        found += [(name, other) for other in wanted if other in others - by_others]
    return found


def said(root: Path, name: str) -> str:
    """The first line of the docstring of a part."""
    path = root / f"{name}.py"
    module = nodes(path if path.exists() else root / name / "__init__.py")[0]
    return (ast.get_docstring(module) or "").split("\n")[0].replace("``", "`")


def is_folder(root: Path, name: str) -> bool:
    return (root / name).is_dir()


def picture(root: Path) -> str:
    """Mermaid's text for the arrows; folders are boxes, single files are round."""
    shapes = [f'    {n}["{n}/"]' if is_folder(root, n) else f'    {n}("{n}.py")' for n in reversed(parts(root))]
    lines = [f"    {upper} --> {lower}" for upper, lower in arrows(imports(root))]
    return "\n".join(["```mermaid", "flowchart TD", *shapes, *lines, "```"])


def table(root: Path) -> str:
    """What each part holds, bottom up."""
    rows = [f"| `{n}{'/' if is_folder(root, n) else '.py'}` | {said(root, n)} |" for n in parts(root)]
    return "\n".join(["| part | holds |", "|---|---|", *rows])


def walk(fit: str) -> list[str]:
    """Files of the package in the order in which one of the fits of ``benchmarks/metrics.py`` first calls them."""
    command = [sys.executable, str(PACKAGE.parent / "benchmarks/metrics.py"), "--walk", fit]
    env = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}  # this tree, whichever is installed
    done = subprocess.run(command, cwd=PACKAGE.parent, env=env, capture_output=True, text=True, check=True)
    paths = [path for path, _ in json.loads(done.stdout.splitlines()[-1])]
    return [path.removeprefix(f"{PACKAGE.name}/") for path in dict.fromkeys(paths)]


def numbered(root: Path, files: list[str]) -> str:
    """Each file with the first line of its docstring."""
    docs = [ast.get_docstring(nodes(root / name)[0]) or "" for name in files]
    firsts = [doc.split("\n")[0].replace("``", "`") for doc in docs]
    return "\n".join(f"{i}. `{name}`: {first}" for i, (name, first) in enumerate(zip(files, firsts, strict=True), 1))


def written(page: str, root: Path, walks: dict[str, list[str]] | None = None) -> str:
    """The page with its picture and its table as the imports have them, and the files that fits enter.

    :param walks: heading of a list on the page -> files; none where the lists are to stay.
    """
    lists = {name: numbered(root, files) for name, files in (walks or {}).items()}
    for name, text in {"picture": picture(root), "table": table(root), **lists}.items():
        mark = MARK.format(name)
        pattern = re.escape(mark) + r"\n.*?\n" + re.escape(mark)
        assert re.search(pattern, page, flags=re.DOTALL), f"{PAGE.name} has lost its pair of marks {mark}"
        page = re.sub(pattern, lambda _, m=mark, t=text: f"{m}\n\n{t}\n\n{m}", page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    walks = {fit: walk(fit) for fit in WALKS}
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), PACKAGE, walks), encoding="utf-8")
