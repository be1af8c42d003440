"""Files of which one entry was changed, and the digest made anew: each is refused by an error that names it, or right.

A few changes of each kind of file, drawn with a seed; ``python -m tests.cases.changed_files`` tries them all.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pyro_evidence import files
from pyro_evidence.nested.integration import by_lattice
from tests.cases.changed_files import (
    POSTERIORS,
    checkpoint_ending_of,
    checkpoint_endings,
    ending,
    ending_of,
    numbers,
    posterior_endings,
    thawed,
)


@pytest.mark.parametrize("name", POSTERIORS)
def test_a_changed_posterior_is_refused_or_right(name: str, tmp_path: Path) -> None:
    endings = dict(posterior_endings(name, tmp_path, 5))
    assert {what: found for what, found in endings.items() if found not in ("refused", "right")} == {}
    assert "refused" in endings.values()


def _coarser(parts: Any, place: int) -> None:
    parts[place] = parts[place].float()


FOUND: dict[str, tuple[str, Callable[[Any], Any]]] = {  # changes that were believed, or computed with without an end
    "weights below zero": ("mixture", lambda content: content["held"]["mixing"].neg_()),
    "weights above one": ("mixture", lambda content: content["held"]["mixing"].mul_(1.1)),
    "a precision of zero": ("mixture", lambda content: content["held"]["beta"][..., -1:].zero_()),
    "a coarser log evidence": ("planes", lambda content: content.update(log_evidence=content["log_evidence"].float())),
    "coarser kernels": ("kernels of classes", lambda content: _coarser(content["network"], 0)),
    "a precision that is nan": ("RVM", lambda content: content["alpha"][-1:].fill_(math.nan)),
    "a coarser bound": ("VRVM", lambda content: _coarser(content["fit"], 1)),
    "no tail": ("nested", lambda content: content["nested"]["axes"][3][-1:].zero_()),
    "a billion nodes": ("blocks", lambda content: content.update(nodes=10**9)),
    "another slope": ("logistic", lambda content: content.update(decrement=0.25)),
    "another dtype": ("logistic", lambda content: content.update(dtype=torch.float32)),
    "a node more inside": ("nested", lambda content: content["nested"].update(nodes_in_blocks=2)),
    "a billion groups": ("blocks", lambda content: content["args"].__setitem__(2, 10**9)),
    "a billion nodes inside": ("nested", lambda content: content["nested"].update(nodes_in_blocks=10**9)),
    "a billion nodes outside": ("nested", lambda content: content["nested"].update(num_nodes=10**9)),
}


@pytest.mark.parametrize("case", FOUND)
def test_changes_that_were_found_are_refused(case: str, tmp_path: Path) -> None:
    name, change = FOUND[case]
    assert ending_of(name, tmp_path, change) == "refused"


def test_the_spacing_of_a_lattice_is_that_of_the_fit_or_refused(tmp_path: Path) -> None:
    kind, path, step = POSTERIORS["nested"], tmp_path / "posterior", 0.5
    fitted = kind.posterior
    mode = fitted.integral.outer_mode
    cells = torch.arange(-14, 15).unsqueeze(-1)
    integral = by_lattice(mode, mode.gaussian, cells, step)
    state = replace(fitted.state, log_evidence=integral.log_evidence)
    replace(fitted, state=state, integral=replace(integral, error=0.0)).save(path)
    content, expected = thawed(files.read(path)), numbers(kind.load(path))
    assert content["nested"]["step"] == step
    for other in (step * (1.0 + 1e-12), 2.0 * step, 0.9 * step, 0.1 * step, 1e-9, -step, 0.0, math.nan):
        content["nested"]["step"] = other
        files.write(content, path)
        found = ending(lambda: kind.load(path), path, expected)
        assert found == ("right" if math.isclose(other, step) else "refused"), other


OF_STATES: dict[str, tuple[str, Callable[[Any], Any]]] = {  # changes of a checkpoint's last state that were believed
    "a precision that is nan": ("RVM", lambda state: state["alpha"][-1:].fill_(math.nan)),
    "a precision without an end": ("RVM", lambda state: state["alpha"][-1:].fill_(-math.inf)),
    "precisions below zero": ("RVM", lambda state: state["alpha"].neg_()),
    "data of free noise": ("VRVM", lambda state: state.update(num_data=0.25)),
    "another scale": ("VRVM", lambda state: state.update(log_scale=state["log_scale"] + 1.0)),
    "rates below zero": ("VRVM", lambda state: state["rate"].neg_()),
    "turned rates": ("VRVM", lambda state: state["rate"].copy_(state["rate"].flip(0))),
    "rounds that were not": ("OverlapEM", lambda state: state["since"].add_(1)),
}


@pytest.mark.parametrize("case", OF_STATES)
def test_changes_of_the_last_state_are_refused(case: str, tmp_path: Path) -> None:
    name, change = OF_STATES[case]
    assert checkpoint_ending_of(name, tmp_path, change) == "refused"


@pytest.mark.parametrize("name", ["RVM", "VRVM", "EvidenceEM", "OverlapEM"])
def test_a_fit_that_goes_on_from_a_changed_checkpoint_is_refused_or_right(name: str, tmp_path: Path) -> None:
    endings = dict(checkpoint_endings(name, tmp_path, 5))
    assert {what: found for what, found in endings.items() if found not in ("refused", "right")} == {}
    assert "refused" in endings.values()
