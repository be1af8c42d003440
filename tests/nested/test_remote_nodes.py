"""Nodes of a product rule that follow from the others; oracle: all of them."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_evidence.nested import integration
from pyro_evidence.nested.inner import ConditionalModes
from pyro_evidence.precision.dense import Diagonal, Separate


def outer(curve: Any, rows: list[int], monkeypatch: pytest.MonkeyPatch) -> integration.OuterMode:
    """The mode of a log density of three coordinates, with an inner mode that follows them."""

    def solved(_: Any, theta: Tensor, start: Tensor, **__: Any) -> ConditionalModes:
        rows.append(len(theta))
        precision = Separate(tuple(Diagonal(row.unsqueeze(0).exp()) for row in theta))
        return ConditionalModes(theta, (0.3 * theta).sin(), precision, curve(theta))

    monkeypatch.setattr(integration, "solve_inner", solved)
    monkeypatch.setattr(integration, "is_batched", lambda _: False)
    state: Any = SimpleNamespace(problem=None, theta=torch.zeros(3).double(), u=torch.zeros(3).double())
    eye = torch.eye(3).double()
    return integration.OuterMode(state, torch.arange(3), eye, eye)


def skewed(phi: Tensor) -> Tensor:
    """Nearly normal."""
    return -0.5 * phi.square().sum(-1) + 0.03 * phi[:, 0] * phi[:, 1].square() + 0.02 * phi[:, 2].sin()


def square_of_tails(phi: Tensor) -> Tensor:
    """Its corners hold much of the mass."""
    return -2.0 * (phi.abs() - 3.0).square().sum(-1)


def test_remote_nodes_follow_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    found = outer(skewed, rows, monkeypatch)
    some = integration.by_product(found, found.straight, 9)
    assert sum(rows) < 0.35 * 9**3
    monkeypatch.setattr(integration, "REMOTE", -math.inf)
    every = integration.by_product(found, found.straight, 9)
    assert rows[-1] == 9**3
    assert float(some.log_evidence) == pytest.approx(float(every.log_evidence), abs=1e-6)
    for actual, expected in zip(some.moments, every.moments, strict=True):
        assert torch.allclose(actual, expected, atol=1e-5)
    assert torch.allclose(some.nodes.u, every.nodes.u, atol=0.1)
    assert bool(torch.isfinite(some.nodes.precision.variance).all())


def test_remote_nodes_are_searched_where_they_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    found = outer(square_of_tails, rows, monkeypatch)
    some = integration.by_product(found, found.straight, 7)
    assert rows[0] < sum(rows) < 7**3  # the far corners, and none twice
    monkeypatch.setattr(integration, "REMOTE", -math.inf)
    every = integration.by_product(found, found.straight, 7)
    assert float(some.log_evidence) == pytest.approx(float(every.log_evidence), abs=0.02 / integration.MOVES)
    assert torch.allclose(some.moments[1], every.moments[1], rtol=0.002)
