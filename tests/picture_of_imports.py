"""The house as a picture: which part of the package imports which, in the text of docs/architecture.md.

Run by ``make picture``; the tests hold the page to it.
"""

import ast
import re
from pathlib import Path

from tests.test_architecture import ORDER, PACKAGE, imported_parts, part, sources

PAGE = PACKAGE.parent / "docs/architecture.md"
MARK = "<!-- {}: written by make picture -->"


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
    tree = ast.parse((path if path.exists() else root / name / "__init__.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").split("\n")[0].replace("``", "`")


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


def written(page: str, root: Path) -> str:
    """The page with its picture and its table as the imports have them."""
    for name, text in {"picture": picture(root), "table": table(root)}.items():
        mark = MARK.format(name)
        pattern = re.escape(mark) + r"\n.*?\n" + re.escape(mark)
        assert re.search(pattern, page, flags=re.DOTALL), f"{PAGE.name} has lost its pair of marks {mark}"
        page = re.sub(pattern, lambda _, m=mark, t=text: f"{m}\n\n{t}\n\n{m}", page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), PACKAGE), encoding="utf-8")
