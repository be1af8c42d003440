"""Where a process of the package or of its tests writes: bars to stderr, caches into the tree."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import tests.conftest, matplotlib, platformdirs
print(platformdirs.user_cache_dir("arviz"), matplotlib.get_cachedir(), matplotlib.get_configdir(), sep="\\n")
import arviz
import time
from pyro_evidence.fitting.iterate import bar_of
with bar_of("an engine", True, total=4) as bar:
    for _ in range(4):
        time.sleep(0.3)
        bar.update()
with bar_of("a silent engine", False, total=1) as bar:
    time.sleep(1.1)
    bar.update()
print("the result")
"""


def test_progress_is_no_part_of_the_output_and_what_the_tests_import_writes_into_the_tree(tmp_path: Path) -> None:
    """Nothing in a home that is empty, and a folder for each process where nothing is locked."""
    pytest.importorskip("arviz")
    empty = {name: str(tmp_path) for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR")}
    own = {**{n: v for n, v in os.environ.items() if n != "TQDM_DISABLE"}, "PYTHONPATH": str(ROOT), **empty}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=own, capture_output=True, text=True, check=True)
    assert "an engine" in done.stderr and "4/4" in done.stderr and "a silent engine" not in done.stderr
    arviz, *others, result = done.stdout.splitlines()
    assert result == "the result"
    assert all(Path(path).is_relative_to(ROOT) for path in (arviz, *others))
    assert list(tmp_path.iterdir()) == []
    assert not Path(arviz).is_relative_to(os.environ["XDG_CACHE_HOME"])
