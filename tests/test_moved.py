"""Every old path still works, says where its content is now, and warns once for each use."""

import importlib

import pytest

import pyro_evidence
from pyro_evidence import moved


@pytest.mark.parametrize("old", sorted(moved.MODULES))
def test_every_module_has_a_new_place(old: str) -> None:
    assert importlib.import_module(f"pyro_evidence.{moved.MODULES[old]}")
    assert importlib.import_module(f"pyro_evidence.{old}").__name__ == f"pyro_evidence.{old}"


@pytest.mark.parametrize("old", sorted(moved.NAMES))
def test_every_name_has_a_new_place(old: str) -> None:
    module, _, name = f"pyro_evidence.{moved.NAMES[old]}".rpartition(".")
    assert hasattr(importlib.import_module(module), name)


def test_an_old_path_gives_the_same_object_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"ops\.basis\.Linear has moved.*models\.basis\.Linear"):
        from pyro_evidence.ops.basis import Linear  # type: ignore[import-not-found]
    assert Linear is importlib.import_module("pyro_evidence.models.basis").Linear


@pytest.mark.parametrize("folder", sorted(moved.FOLDERS))
def test_a_module_that_became_a_folder_keeps_its_names(folder: str) -> None:
    there = importlib.import_module(f"pyro_evidence.{moved.FOLDERS[folder]}")
    here = importlib.import_module(f"pyro_evidence.{folder}")
    own = [n for n, x in vars(there).items() if getattr(x, "__module__", "") == there.__name__]
    name = next(n for n in own if n not in vars(here))
    with pytest.warns(DeprecationWarning, match=f"use pyro_evidence.{moved.FOLDERS[folder]}.{name}"):
        assert getattr(importlib.import_module(f"pyro_evidence.{folder}"), name) is getattr(there, name)


def test_a_name_that_never_was_is_missing() -> None:
    with pytest.raises(ImportError, match="nothing_of_the_kind"):
        from pyro_evidence.ops.basis import nothing_of_the_kind  # type: ignore[import-not-found]  # noqa: F401
    assert not hasattr(pyro_evidence, "nothing_of_the_kind")


@pytest.mark.parametrize("folder", ["prbf", "mixture", "laplace"])
def test_a_name_that_no_folder_has_is_missing(folder: str) -> None:
    assert not hasattr(importlib.import_module(f"pyro_evidence.{folder}"), "nothing_of_the_kind")
