"""Ranks of which the last is different, fails, or falls silent: one fit that all agree on, or one message for all."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases.expect import reached, says
from tests.cases.rank_fits import mixture, rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its ranks"),
]
ROOT = Path(__file__).parents[2]

Said = list[dict[str, Any]]


def run(name: str, size: int = 2, strike: str = "") -> Said:
    """What each of the ranks says: ``log_evidence``, ``error``, or neither, and the signal that ended it."""
    command = [sys.executable, str(ROOT / "tests/cases/rank_fits.py"), name, str(size), *([strike] if strike else [])]
    where = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=where, stdout=subprocess.PIPE, text=True, timeout=120)
    reached(done.returncode == 0, f"the script ended with {done.returncode}")
    said: Said = json.loads(done.stdout.splitlines()[-1])
    reached(all(x["began"] for x in said), f"not every rank began its fit: {said}")
    return said


def say_all(said: Said, *words: str) -> None:
    """Assert that each rank ends in an error with these words."""
    for number, rank in enumerate(said):
        assert "error" in rank, f"rank {number} has no error: {rank}"
        says(rank["error"], *words)


@pytest.mark.parametrize(("what", "size"), [("nothing", 2), ("no rows", 3), ("one row", 3), ("chunks", 2)])
def test_ranks_agree_with_one_process(what: str, size: int) -> None:
    alone = float(mixture().run(rows()[0]).log_evidence)
    for rank in run(what, size):
        assert rank["log_evidence"] == pytest.approx(alone, rel=1e-9)


def test_a_slow_rank_changes_nothing() -> None:
    slow = run("delay", 3)
    assert len({rank["log_evidence"] for rank in slow}) == 1


@pytest.mark.parametrize(
    ("what", "size", "words"),
    [
        ("nan", 2, ["rank 1: BadInput", "nan", "row 1, column 3"]),
        ("inf", 2, ["rank 1: BadInput", "inf", "columns [3]"]),
        ("huge", 2, ["BadInput", "finite"]),
        ("nan, Laplace", 3, ["rank 2: BadInput", "1 nan (first at [1, 3])"]),
        ("nan label", 2, ["rank 1: BadInput", "the label nan"]),
        ("label 7", 2, ["rank 1: BadInput", "the label 7", "0 to 1"]),
        ("float32", 2, ["BadInput", "ranks have different models, columns or dtypes", "float32"]),
        ("columns", 3, ["BadInput", "ranks have different models, columns or dtypes", "(., 3)"]),
        ("components", 3, ["BadInput", "ranks have different models", "num_components=4"]),
        ("engine", 2, ["BadInput", "ranks have different models"]),
        ("all empty", 2, ["BadInput", "hold no rows"]),
        ("no chunk", 3, ["BadInput", "rank 2 no chunk"]),
        ("generator", 2, ["rank 1: BadInput", "generator", "only once"]),
        ("seed", 2, ["BadInput", "rank", "seed"]),
        ("restarts", 2, ["BadInput", "rank", "restarts"]),
        ("stop", 2, ["BadInput", "rank", "num_steps"]),
        ("prior", 3, ["BadInput", "ranks have different models"]),
        ("site", 3, ["BadInput", "ranks have different models"]),
        ("link", 2, ["BadInput", "ranks have different models"]),
        ("error", 3, ["rank 2", "the sixth run of this rank"]),
        ("shrinking", 2, ["rank 1", "pass"]),
        ("fails before", 2, ["rank 1", "ZeroDivisionError"]),
    ],
)
def test_what_is_wrong_on_one_rank_is_said_on_all(what: str, size: int, words: list[str]) -> None:
    say_all(run(what, size), *words)


@pytest.mark.parametrize("what", ["leaves"])
def test_a_rank_that_leaves_is_named_by_the_others(what: str) -> None:
    said = run(what, 3)
    reached("error" not in said[-1] and "log_evidence" not in said[-1], "the last rank has not left")
    say_all(said[:-1], "rank 2")


@pytest.mark.parametrize("strike", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_struck_is_named_by_the_others(strike: str, size: int) -> None:
    """Killed or stopped in the middle of its fit."""
    said = run("long", size, strike)
    reached(said[-1]["signal"] == signal.SIGKILL, f"the last rank was not struck: {said[-1]}")
    reached(all("log_evidence" not in rank for rank in said), "the fit was over before")
    say_all(said[:-1], f"rank {size - 1}")
