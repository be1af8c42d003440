"""Every public class shows how it is used, and what it shows is so."""

import doctest
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import pyro_evidence

PACKAGE = Path(pyro_evidence.__file__).parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public_classes() -> dict[str, type]:
    """The classes in the ``__all__`` of the package and of its folders, by the first path that reaches them."""
    folders = [f"pyro_evidence.{path.parent.name}" for path in sorted(PACKAGE.glob("*/__init__.py"))]
    found: dict[type, str] = {}
    for name in ("pyro_evidence", *folders):
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            if inspect.isclass(value := getattr(module, public)):
                found.setdefault(value, f"{name}.{public}")
    return {name: value for value, name in found.items()}


def examples() -> Iterator[doctest.DocTest]:
    """The examples in all docstrings of the package: of classes, methods, functions and modules."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for path in sorted(PACKAGE.rglob("*.py")):
        if ">>>" in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
            module = importlib.import_module(name)
            yield from (test for test in finder.find(module, name) if test.examples)


@pytest.mark.parametrize("test", list(examples()), ids=lambda test: test.name.removeprefix("pyro_evidence."))
def test_example_is_so(test: doctest.DocTest) -> None:
    said: list[str] = []
    failed = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append, clear_globs=True).failed
    assert not failed, "".join(said)


def test_every_public_class_has_one() -> None:
    classes = public_classes()
    assert len(classes) > 40
    assert [name for name, value in classes.items() if ">>>" not in (value.__dict__["__doc__"] or "")] == []


def test_a_false_example_is_seen() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "false", None, 0)
    with pytest.raises(AssertionError, match="Expected"):
        test_example_is_so(test)
