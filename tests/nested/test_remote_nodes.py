"""Nodes of a product rule that follow from the others; oracle: all of them."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_evidence.nested import integration
from pyro_evidence.nested.inner import ConditionalModes
from pyro_evidence.numerics.quadrature import rules
from pyro_evidence.numerics.quadrature.densities import Interpolated
from pyro_evidence.precision.dense import Diagonal, Separate


def outer(curve: Any, rows: list[int], monkeypatch: pytest.MonkeyPatch, num: int = 3) -> integration.OuterMode:
    """The mode of a log density of a few coordinates, with an inner mode that follows them."""

    def solved(_: Any, theta: Tensor, start: Tensor, **__: Any) -> ConditionalModes:
        rows.append(len(theta))
        precision = Separate(tuple(Diagonal(row.unsqueeze(0).exp()) for row in theta))
        return ConditionalModes(theta, (0.3 * theta).sin(), precision, curve(theta))

    monkeypatch.setattr(integration, "solve_inner", solved)
    monkeypatch.setattr(integration, "is_batched", lambda _: False)
    state: Any = SimpleNamespace(problem=None, theta=torch.zeros(num).double(), u=torch.zeros(num).double())
    eye = torch.eye(num).double()
    return integration.OuterMode(state, torch.arange(num), eye, eye)


def all_nodes(found: integration.OuterMode, num: int, monkeypatch: pytest.MonkeyPatch) -> integration.Integral:
    """The same rule with every node searched."""
    monkeypatch.setattr(integration, "FIRST", -math.inf)
    monkeypatch.setattr(integration, "FOLLOWED", 0.0)
    return integration.by_product(found, found.gaussian, num)


def moments(found: integration.Integral) -> tuple[Tensor, Tensor]:
    """Of the coordinates, by the rule."""
    assert isinstance(found.density, Interpolated)
    rule = rules.product(found.density.rule, found.density.num_dims)
    log_weights = rule.log_weights + found.density.log_ratio.flatten()
    return integration.weighted_moments(found.chart.forward(rule.nodes), log_weights)


def long_tail(phi: Tensor) -> Tensor:
    """One axis falls off exponentially on either side, three times as fast on one; the other one follows it."""
    z = 1.5 * phi[:, 0]
    slow = 0.91 * z - 3.25 * torch.nn.functional.softplus(z + 0.94)
    return slow - 0.5 * (phi[:, 1] - 0.6 * phi[:, 0].tanh()).square()


def skewed(phi: Tensor) -> Tensor:
    """Nearly normal."""
    return -0.5 * phi.square().sum(-1) + 0.03 * phi[:, 0] * phi[:, 1].square() + 0.02 * phi[:, 2].sin()


def square_of_tails(phi: Tensor) -> Tensor:
    """Its corners hold much of the mass."""
    return -2.0 * (phi.abs() - 3.0).square().sum(-1)


def test_remote_nodes_follow_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    found = outer(skewed, rows, monkeypatch)
    some = integration.by_product(found, found.gaussian, 9)
    assert sum(rows) < 0.45 * (5**3 + 7**3 + 9**3)
    rows.clear()
    every = all_nodes(found, 9, monkeypatch)
    assert sum(rows) == 5**3 + 7**3 + 9**3
    assert float(some.log_evidence) == pytest.approx(float(every.log_evidence), abs=1e-4)
    for actual, expected in zip(moments(some), moments(every), strict=True):
        assert torch.allclose(actual, expected, atol=1e-3)
    assert float(some.log_weights.exp().sum()) == pytest.approx(1.0)
    assert bool(torch.isfinite(some.nodes.precision.variance).all())


def test_remote_nodes_are_searched_where_they_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    found = outer(square_of_tails, rows, monkeypatch)
    some = integration.by_product(found, found.gaussian, 7)
    assert rows[0] < sum(rows) < 5**3 + 7**3  # the far corners, and none twice
    every = all_nodes(found, 7, monkeypatch)
    assert float(some.log_evidence) == pytest.approx(float(every.log_evidence), abs=0.02 / integration.MOVES)
    assert torch.allclose(moments(some)[1], moments(every)[1], rtol=0.002)


def test_remote_nodes_of_a_long_tail_follow_from_the_rules_before(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    found = outer(long_tail, rows, monkeypatch, num=2)
    some = integration.by_product(found, found.gaussian, 11)
    assert sum(rows) < 0.7 * (5**2 + 7**2 + 9**2 + 11**2)
    every = all_nodes(found, 11, monkeypatch)
    assert float(some.log_evidence) == pytest.approx(float(every.log_evidence), abs=5e-4)
    assert torch.allclose(moments(some)[1], moments(every)[1], rtol=0.002)
