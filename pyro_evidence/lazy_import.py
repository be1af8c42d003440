"""Imports when they are first asked for: names of a folder, and packages that not every installation has."""

import ast
import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def import_extra(name: str, missing: str) -> Any:
    """A module of a package that not every installation has.

    :raises ImportError: with ``missing``, what a user reads where it is not there.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(missing) from error


class _Folder(ModuleType):
    """A package whose public names lie in modules that are imported on demand."""

    on_demand: Mapping[str, str]  # name -> module

    def __getattr__(self, name: str) -> Any:
        path = self.on_demand.get(name, f"{self.__name__}.{name}")
        try:
            module = None if name.startswith("_") else import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:  # something else is missing
                raise
            module = None
        if module is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(module, name, module) if name in self.on_demand else module
        self.__dict__[name] = value
        return value

    def __dir__(self) -> list[str]:
        return [*self.__dict__["__all__"], *(name for name in self.__dict__ if name.startswith("__"))]

    def __setattr__(self, name: str, value: Any) -> None:
        """A submodule that is imported does not hide the function of its name."""
        path = self.on_demand.get(name)
        if path is None or not isinstance(value, ModuleType):
            super().__setattr__(name, value)
        elif path == value.__name__:
            self.__dict__[name] = getattr(value, name, value)


def import_on_demand(package: str) -> None:
    """Let the names that a package imports for type checkers be found when they are asked for.

    They are its ``__all__`` too, unless it has one that leaves some out.

    :param package: its ``__name__``; the names are those that its block ``if TYPE_CHECKING:`` imports.
    """
    module = sys.modules[package]
    source = module.__spec__.loader.get_source(package)  # type: ignore[union-attr]
    (block,) = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    module.__dict__["on_demand"] = {
        alias.name: f"{package}.{alias.name}" if node.module == package else node.module
        for node in imports
        for alias in node.names
    }
    module.__dict__.setdefault("__all__", sorted(module.__dict__["on_demand"]))
    module.__class__ = _Folder
