"""Every test starts from the same state: float64, one thread, an empty param store, validation on, seed 0."""

import atexit
import gc
import os
import random
import re
import shutil
from functools import cache
from pathlib import Path

# Before anything imports matplotlib or ArviZ: what they keep is kept in the tree.  ArviZ writes a stamp once a day
# without a lock, so that each process has a folder of its own; matplotlib locks its list of fonts, which takes seconds.
os.environ["MPLBACKEND"] = "Agg"
os.environ["MPLCONFIGDIR"] = str(Path(__file__).resolve().parents[1] / "build/cache/matplotlib")
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).resolve().parents[1] / f"build/cache/{os.getpid()}")

import numpy as np
import pyro
import pytest
import torch

from pyro_evidence.mppca import MPPCAPosterior
from tests.models_for_tests.mppca_cases import fit, planes

ROOT = Path(__file__).resolve().parents[1]

LONGER = ROOT / "tests/longer_tests.txt"

atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
gc.disable()  # while tests are collected, which makes millions of objects and frees none
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)  # also for tensors that a module makes while it is imported


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before the fixtures of a module too, which begin before those of its tests."""
    torch.set_default_dtype(torch.float64)
    pyro.clear_param_store()


@pytest.fixture(autouse=True)
def same_start() -> None:
    torch.set_default_dtype(torch.float64)
    pyro.clear_param_store()
    pyro.enable_validation(True)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002, the generator of others' code
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack for every accelerator that is absent


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data, which is not part of the repository."""
    if "PYRO_EVIDENCE_DATA" not in os.environ:
        pytest.skip("needs real data: PYRO_EVIDENCE_DATA names no folder with pima.csv and the others")
    return Path(os.environ["PYRO_EVIDENCE_DATA"])


@pytest.fixture(scope="module")
def two() -> MPPCAPosterior:
    """A mixture of two planes, fitted."""
    return fit(planes())


@pytest.fixture(scope="session")
def readme_blocks() -> list[str]:
    """The Python blocks of the README, in order."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@cache
def longer_tests() -> frozenset[str]:
    """Folders, files and tests that ``--quick`` leaves out."""
    return frozenset(LONGER.read_text(encoding="utf-8").splitlines())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help=f"leave out the tests that {LONGER.name} lists")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is left out as a whole is not even read."""
    return True if config.getoption("--quick") and os.path.relpath(collection_path, ROOT) in longer_tests() else None


def pytest_collection_finish() -> None:
    """What was collected stays to the end: the garbage collector need not look at it again and again."""
    gc.freeze()
    gc.set_threshold(7_000, 20, 20)  # of a fit's graphs, hardly one is a cycle
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: item.path.name != "test_tutorials.py"
    )  # the longest first: no process ends on one alone
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in longer_tests()])
        items[:] = [item for item in items if item.nodeid not in longer_tests()]
