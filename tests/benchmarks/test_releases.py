"""The table of a release's speeds: what is met, what became slower, on rows made by hand."""

import json

import pytest

from benchmarks import releases

ROW = {"ours": 2.0, "peer": 4.0, "unit": 1.0, "target": 1.0}


def test_a_row_is_held_against_its_peer_and_the_release_before() -> None:
    found = releases.line("case", ROW, {**ROW, "peer": 4.4})
    assert found == "| case | 2 | 4 | 0.5 | 1 | met | 1.10 |  |"
    slower = releases.line("case", ROW, {**ROW, "ours": 1.5})
    assert slower.endswith("| met | 1.33 | SLOWER |")


def test_seconds_are_compared_in_units_of_a_fixed_job() -> None:
    """On a machine half as fast the same program takes twice as long and is no slower."""
    fast = {"ours": 1.0, "unit": 0.5, "target": 1.5}
    found = releases.line("case (s)", {"ours": 2.0, "unit": 1.0, "target": 1.5}, fast)
    assert found == "| case (s) | 2 |  | 2 | 1.5 | missed | 1.00 |  |"


def test_a_first_release_is_compared_with_none() -> None:
    assert releases.line("case", ROW, None).endswith("| met | nan |  |")


def test_releases_come_in_order(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("0.10.0", "0.2.0", "0.1.0"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": {}}))
    monkeypatch.setattr(releases, "RESULTS", tmp_path)
    assert list(releases.releases()) == ["0.1.0", "0.2.0", "0.10.0"]


def test_the_plot_is_drawn(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(iter(releases.CASES))
    for name, ours in {"0.1.0": 2.0, "0.2.0": 1.0}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": {case: {**ROW, "ours": ours}}}))
    monkeypatch.setattr(releases, "RESULTS", tmp_path)
    releases.plot(tmp_path / "releases.png")
    assert (tmp_path / "releases.png").stat().st_size > 1000
