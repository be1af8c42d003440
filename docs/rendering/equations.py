"""The index of published equations, docs/equations.md, written from the docstrings by ``make equations``."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pyro_evidence"
PAGE = ROOT / "docs" / "equations.md"
YEAR = re.compile(r"\(\d{4}\)")
NAME = r"(?:(?:van|de|del|Del|Le)\s)?[A-Z][\w'-]+"
SOURCE = re.compile(rf"((?:{NAME}(?:, | and ))*{NAME}(?: et al\.)?) \((\d{{4}})\)")
PLACE = re.compile(
    r"(?:below |after )?(?:eqs?\.|secs?\.|sections?|algorithms?|theorem|chapters?|appendix|table) ?[A-Z]?\d[\d.]*[a-z]?"
    r"(?:(?:, | and | to |-)[A-Z]?\d[\d.]*[a-z]?)*"
)
HEAD = """# Equations

Where published equations stand in the code, by source and number, read from the docstrings (`make equations`).

| source | place | in the code |
|---|---|---|
"""


def citations(text: str) -> Iterator[tuple[str, str]]:
    """Source and place of each citation in a docstring that names an equation, a section or an algorithm."""
    text = " ".join(text.split())
    found = list(SOURCE.finditer(text))
    for index, match in enumerate(found):
        following = found[index + 1].start() if index + 1 < len(found) else len(text)
        tail = text[match.end() : following]
        for place in PLACE.finditer(re.split(r"(?<=\d)\.(?=\s|$)|;", tail)[0]):
            yield f"{match[1]} ({match[2]})", place[0].rstrip(".")


def entries(package: Path) -> list[tuple[str, str, str]]:
    """Source, place and name of the module, class or function, sorted."""
    found = set()
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).with_suffix("").as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                name = module if isinstance(node, ast.Module) else f"{module}: {node.name}"
                text = ast.get_docstring(node, clean=False) or ""
                found |= {(source, place, name) for source, place in citations(text)} if YEAR.search(text) else set()
    return sorted(found, key=lambda entry: (entry[0], [int(n) for n in re.findall(r"\d+", entry[1])], entry[1:]))


def page(package: Path) -> str:
    """The text of the page."""
    return HEAD + "".join(f"| {source} | {place} | `{name}` |\n" for source, place, name in entries(package))


if __name__ == "__main__":
    PAGE.write_text(page(PACKAGE), encoding="utf-8")
