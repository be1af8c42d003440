"""What counts as a fit that moved, on figures made by hand; and what is kept of a posterior."""

import json
import math
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import baseline

BEFORE = {
    "engine": "LaplaceEvidence",
    "decided": {"status": "converged", "num_components": 2},
    "log_evidence": -99.0,
    "mode": {"w": [1.0, -20.0]},
    "sd": {"w": [0.1, 0.1]},
    "hyperparameters": {"alpha": [5.0, math.inf]},
    "gamma": {"alpha": [1.5]},
}


def changed(what: str, value: Any, name: str | None = None) -> dict[str, Any]:
    now = deepcopy(BEFORE)
    if name is None:
        now[what] = value
    else:
        now[what][name] = value
    return now


@pytest.mark.parametrize("loose", [False, True])
def test_the_same_figures_are_no_difference(loose: bool) -> None:
    assert baseline.compared({"fit": deepcopy(BEFORE)}, {"fit": BEFORE}, loose) == {}


@pytest.mark.parametrize(
    ("now", "strict", "loose"),
    [
        (changed("log_evidence", -99.0 + 0.9e-7), False, False),  # within 1e-9 (1 + 99)
        (changed("log_evidence", -99.0 - 1.1e-7), True, False),
        (changed("log_evidence", -99.0 - 1.1e-6), True, True),
        (changed("log_evidence", -98.0), True, False),  # higher
        (changed("log_evidence", math.nan), True, True),
        (changed("mode", [1.0 + 1.9e-8, -20.0], "w"), False, False),  # within 1e-9 of the largest
        (changed("mode", [1.0 + 2.1e-8, -20.0], "w"), True, False),
        (changed("mode", [1.0 + 0.9e-4, -20.0], "w"), True, False),
        (changed("mode", [1.0 + 1.1e-4, -20.0], "w"), True, True),  # above .001 standard deviations
        (changed("mode", [1.0], "w"), True, True),
        (changed("mode", {}), True, True),
        (changed("hyperparameters", [5.1, math.inf], "alpha"), True, False),
        (changed("hyperparameters", [5.0, 1e9], "alpha"), True, False),
        (changed("gamma", [1.6], "alpha"), True, False),
        (changed("decided", "ran out of steps", "status"), True, True),
        (changed("decided", 3, "num_components"), True, True),
    ],
)
def test_a_difference_is_seen(now: dict[str, Any], strict: bool, loose: bool) -> None:
    assert bool(baseline.differences(now, BEFORE, loose=False)) is strict
    assert bool(baseline.differences(now, BEFORE, loose=True)) is loose


def test_hyperparameters_stand_for_modes_where_no_deviations_are_known() -> None:
    before = {**BEFORE, "sd": {}}
    for alpha, seen in ((5.0004, False), (5.0006, True)):
        now = changed("hyperparameters", [alpha, math.inf], "alpha")
        assert bool(baseline.differences(now, before, loose=True)) is seen


def test_what_moved_is_said() -> None:
    assert baseline.differences(changed("log_evidence", -99.5), BEFORE, loose=False) == [
        "log evidence: -99.5, before -99, by -0.5"
    ]
    assert baseline.compared({"a": BEFORE}, {"b": BEFORE}, loose=True) == {"a": ["is new"], "b": ["is gone"]}


class Refused:
    """A posterior without a log evidence."""

    status = "converged: all of it"
    active = torch.tensor([True, False])
    objectives = (1.0, 2.0)

    @property
    def mode(self) -> dict[str, torch.Tensor]:
        return {"w": torch.arange(100.0)}

    @property
    def log_evidence(self) -> torch.Tensor:
        raise ArithmeticError("no volume")

    def quantiles(self, q: list[float]) -> dict[str, torch.Tensor]:
        away = torch.special.ndtri(torch.tensor(q, dtype=torch.float64))
        return {"w": 3.0 * away.unsqueeze(-1).expand(-1, 100)}


def test_figures_of_a_posterior() -> None:
    found = baseline.figures("REVM", Refused())
    assert found["decided"] == {"status": "converged", "active": 1}
    assert found["log_evidence"] == 2.0
    assert found["mode"]["w"] == [*map(float, range(0, 100, 9)), baseline.rounded(328350**0.5)]
    assert found["sd"]["w"][:-1] == pytest.approx([3.0] * 12)
    assert found["hyperparameters"] == found["gamma"] == {}


def test_runs_inside_a_run_are_a_part_of_it() -> None:
    kept: list[dict[str, Any]] = []

    def inner() -> Any:
        return SimpleNamespace(status="inner", log_evidence=torch.tensor(1.0))

    recorded = baseline.recording(inner, "RVM", kept.append)

    def marginalised(fail: bool) -> Any:
        recorded()
        if fail:
            raise ValueError("no")
        return SimpleNamespace(status="outer", log_evidence=torch.tensor(2.0))

    both = baseline.recording(marginalised, "REVM", kept.append)
    both(fail=False)
    with pytest.raises(ValueError, match="no"):
        both(fail=True)
    recorded()
    assert [each["decided"].get("status") for each in kept] == ["outer", None, "inner"]
    assert kept[1]["decided"] == {"error": "ValueError"}


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    baseline.write(tmp_path / "kept.json", {"fit": BEFORE})
    text = (tmp_path / "kept.json").read_text(encoding="utf-8")
    assert json.loads(text)["fits"] == {"fit": BEFORE}
    assert '    "w": [1.0, -20.0]\n' in text


def test_the_committed_file_has_all_portable_fits() -> None:
    fits = json.loads(baseline.KEPT_FIGURES.read_text(encoding="utf-8"))["fits"]
    assert sum("," in name for name in fits) == 23
    tutorials = {path.stem for path in (baseline.ROOT / "tutorials").glob("[0-9]*.py")}
    later = {"16_fields_and_series", "17_which_columns", "18_a_new_subject"}  # than the tree of the file
    assert {name.split(" #")[0] for name in fits if " #" in name} == tutorials - later
