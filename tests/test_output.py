"""Where a process of the package or of its tests writes: bars to stderr, caches into the tree."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BAR = """
import time
from pyro_evidence.fitting.iterate import bar_of
with bar_of("an engine", True, total=4) as bar:
    for _ in range(4):
        time.sleep(0.5)
        bar.update()
print("the result")
"""
CACHES = """
import tests.conftest, matplotlib, platformdirs
print(platformdirs.user_cache_dir("arviz"), matplotlib.get_cachedir(), matplotlib.get_configdir(), sep="\\n")
import arviz
"""


def printed(script: str, **environment: str) -> tuple[str, str]:
    """What a process prints, and what it says on stderr."""
    own = {**{n: v for n, v in os.environ.items() if n != "TQDM_DISABLE"}, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", script], env=own, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_progress_is_no_part_of_the_output() -> None:
    out, err = printed(BAR)
    assert out == "the result\n"
    assert "an engine" in err and "4/4" in err


def test_what_the_tests_import_writes_into_the_tree(tmp_path: Path) -> None:
    """Nothing in a home that is empty, and a folder for each process where nothing is locked."""
    pytest.importorskip("arviz")
    empty = {name: str(tmp_path) for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR")}
    arviz, *others = printed(CACHES, **empty)[0].split()
    assert all(Path(path).is_relative_to(ROOT) for path in (arviz, *others))
    assert list(tmp_path.iterdir()) == []
    assert not Path(arviz).is_relative_to(os.environ["XDG_CACHE_HOME"])
