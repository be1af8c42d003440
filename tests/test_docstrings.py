"""Docstrings: those that are there can be read alone, and none is missing where one is needed."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.test_architecture import nodes, sources

PACKAGE = Path(__file__).resolve().parents[1] / "pyro_evidence"
LEANS = re.compile(r"(The same( of| as| with|:|\.|$)|Itself|As above|Both\.|One round\.|Its \w+\.)")

Found = tuple[str, ast.FunctionDef | ast.ClassDef, bool]  # where, what, whether inside a class


@cache
def definitions(root: Path) -> list[Found]:
    """Every class and function of the package, methods too."""
    found = []
    for path in sources(root):
        methods = {inner for n in nodes(path) if isinstance(n, ast.ClassDef) for inner in n.body}
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.append((f"{path.relative_to(root)}:{node.lineno} {node.name}", node, node in methods))
    return found


def leaning_docstrings(root: Path) -> list[str]:
    """Docstrings whose first words point at another docstring: they cannot be read alone."""
    said = [(where, ast.get_docstring(node) or "") for where, node, _ in definitions(root)]
    return [f"{where}: {text.splitlines()[0]}" for where, text in said if LEANS.match(text)]


def silent_methods(root: Path) -> list[str]:
    """Public methods of more than one statement that say nothing, and whose namesakes do not either."""
    methods = [
        (where, node) for where, node, inside in definitions(root) if inside and isinstance(node, ast.FunctionDef)
    ]
    explained = {node.name for _, node in methods if ast.get_docstring(node)}
    return [
        where
        for where, node in methods
        if not node.name.startswith("_") and node.name not in explained and len(node.body) > 1
    ]


def test_every_docstring_can_be_read_alone() -> None:
    assert leaning_docstrings(PACKAGE) == []


def test_methods_of_more_than_one_statement_say_what_they_do() -> None:
    assert silent_methods(PACKAGE) == []


def test_breaches_are_seen(tmp_path: Path) -> None:
    text = '''
class A:
    def one(self):
        return 1

    def two(self):
        x = 1
        return x

    def three(self):
        """The same with more."""

    def four(self):
        """What it is."""

class B:
    def four(self):
        x = 1
        return x
'''
    (tmp_path / "a.py").write_text(text)
    assert [line.split()[-1] for line in silent_methods(tmp_path)] == ["two"]
    assert [line.split(":")[1].split()[-1] for line in leaning_docstrings(tmp_path)] == ["three"]
