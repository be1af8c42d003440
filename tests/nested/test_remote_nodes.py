"""Nodes of a product rule that follow from others by kriging; oracle: every node of a finer one."""

import math
from dataclasses import replace
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


def moments(phi: Tensor, log_mass: Tensor) -> tuple[float, Tensor, Tensor]:
    """Log of the sum of masses at places ``(K, d)``, means and standard deviations."""
    share = log_mass.softmax(0).unsqueeze(-1)
    mean = (share * phi).sum(0)
    return float(log_mass.logsumexp(0)), mean, (share * (phi - mean).square()).sum(0).sqrt()


def test_searches_begin_where_modes_along_the_axes_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """To first order they would begin up to 2.8 away, for the derivative is three times too large."""
    found, starts = outer(lambda theta: -0.5 * theta.square().sum(-1), [], monkeypatch, 2), list[Tensor]()
    assert len(found.probed.u)  # where modes along the axes are
    solved = integration.solve_inner

    def noted(problem: Any, theta: Tensor, start: Tensor, **how: Any) -> ConditionalModes:
        starts.append(start)
        return solved(problem, theta, start, **how)

    monkeypatch.setattr(integration, "solve_inner", noted)
    within, beyond = torch.tensor([[0.5, -2.2], [1.1, 3.7], [-2.9, 0.1]]).double(), torch.tensor([[5.0, 5.0]]).double()
    found.inner(within)
    found.inner(beyond)
    assert torch.allclose(starts[0], (0.3 * within).sin(), atol=0.1)
    assert torch.equal(starts[1], beyond)  # to first order


def test_nodes_on_axes_alone_lead_wherever_memory_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Least squares by pivoting took products that are rounding for something or nothing, as arrays were aligned."""
    found = outer(lambda theta: -0.5 * theta.square().sum(-1), [], monkeypatch, 2)
    assert len(found.probed.u)
    trend, slopes, held = found._modes_along_axes, list[Tensor](), list[Tensor]()
    for size in range(200):
        held.append(torch.randn(size % 37 + 1))
        slopes.append(replace(trend, z=trend.z.clone())._coefficients[1])
    assert torch.allclose(torch.stack(slopes), slopes[0].expand(200, -1), atol=1e-6)


def exact(found: integration.OuterMode, curve: Any) -> tuple[float, Tensor, Tensor]:
    """By 41 nodes on each axis, every one of them evaluated."""
    rule, where = rules.product(rules.gauss_hermite(41), found.gaussian.num_dims), found.gaussian
    phi = where.forward(rule.nodes)
    return moments(phi, curve(phi) + where.log_slope(rule.nodes) + integration.log_volume_of(rule))


def by_density(found: integration.Integral) -> tuple[float, Tensor, Tensor]:
    """By the curve through the nodes that were searched."""
    assert isinstance(found.density, Interpolated)
    rule = rules.product(found.density.rule, found.density.num_dims)
    log_mass = rule.log_weights + found.density.log_ratio.flatten() + found.log_evidence
    return moments(found.standardisation.forward(rule.nodes), log_mass)


def long_tail(phi: Tensor) -> Tensor:
    """One axis falls off exponentially on either side, three times as fast on one; the other one follows it."""
    z = 1.5 * phi[:, 0]
    slow = 0.91 * z - 3.25 * torch.nn.functional.softplus(z + 0.94)
    return slow - 0.5 * (phi[:, 1] - 0.6 * phi[:, 0].tanh()).square()


def turned_tail(phi: Tensor) -> Tensor:
    """Like long_tail, whose tails lie on a curve."""
    return long_tail(torch.stack([phi[:, 0], phi[:, 1] - 0.3 * phi[:, 0].square().clamp(max=4.0)], -1))


def skewed(phi: Tensor) -> Tensor:
    """Nearly normal."""
    return -0.5 * phi.square().sum(-1) + 0.03 * phi[:, 0] * phi[:, 1].square() + 0.02 * phi[:, 2].sin()


def square_of_tails(phi: Tensor) -> Tensor:
    """Its corners hold much of the mass."""
    return -2.0 * (phi.abs() - 3.0).square().sum(-1)


def of_variances(phi: Tensor) -> Tensor:
    """Two scales under half-normal priors; data whose variances are sums of theirs, and as large as at the mode, 0."""
    load = (1.5 * torch.arange(2.0, 26.0, 2.0).double().sin()).exp().view(6, 2)
    ratio = ((2.0 * phi).exp() @ load.mT + 0.1) / (load.sum(-1) + 0.1)
    return -(ratio.log() + 1.0 / ratio).sum(-1) + (phi - 0.5 * (2.0 * phi).exp()).sum(-1)


TOLERANCE = 0.02
MAY_MOVE = 2.0 * TOLERANCE / integration.MOVES  # what the curve may leave, and what the number of nodes may


@pytest.mark.parametrize(
    ("curve", "num", "most"), [(skewed, 3, 60), (square_of_tails, 2, 250), (long_tail, 2, 60), (turned_tail, 2, 120)]
)
def test_nodes_follow_from_as_many_as_they_need(
    curve: Any, num: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    found = outer(curve, rows, monkeypatch, num)
    some = integration._settled(found, found.gaussian, TOLERANCE)
    assert some is not None and sum(rows) <= most
    (log_evidence, mean, sd), (own, own_mean, own_sd) = exact(found, curve), by_density(some)
    assert float(some.log_evidence) == pytest.approx(own) == pytest.approx(log_evidence, abs=MAY_MOVE)
    assert float(((own_mean - mean) / sd).abs().max()) < integration.SD_PER_NAT * TOLERANCE
    assert float((own_sd / sd).log().abs().max()) < integration.SD_PER_NAT * TOLERANCE
    assert 0.0 < some.error < TOLERANCE  # where the largest product has not settled, by what it has moved
    assert float(some.log_weights.exp().sum()) == pytest.approx(1.0)
    assert bool(torch.isfinite(some.nodes.precision.variance).all())


def test_what_tails_of_scales_hold_together_is_within_the_error_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    curvature = -torch.autograd.functional.hessian(lambda phi: of_variances(phi.view(1, 2))[0], torch.zeros(2).double())
    found = replace(outer(of_variances, [], monkeypatch, num=2), precision=curvature)
    some = integration._settled(found, where := found.gaussian.skewed(found.profile), TOLERANCE)
    z = torch.cartesian_prod(*[torch.arange(-9.0, 9.1, 0.25).double()] * 2)
    log_evidence = float((of_variances(where.forward(z)) + where.log_slope(z)).logsumexp(0)) + 2.0 * math.log(0.25)
    assert some is not None and abs(float(some.log_evidence) - log_evidence) < some.error < TOLERANCE


def test_the_nodes_along_the_axes_are_those_at_which_other_modes_were_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[int] = []
    found = outer(long_tail, rows, monkeypatch, num=2)
    some, probes = integration._settled(found, found.gaussian, TOLERANCE), found.gaussian.probes()
    assert some is not None
    among = torch.cdist(some.phi, probes, compute_mode="donot_use_mm_for_euclid_dist").amin(-1) < 1e-9
    assert int(among.sum()) > 10 and sum(rows) - len(probes) == int((~among).sum())
    assert int((some.phi == found.centre).all(-1).sum()) == 1  # the mode is on every axis


def test_the_integral_is_made_again_from_the_nodes_that_were_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outer(long_tail, [], monkeypatch, num=2)
    some = integration._settled(found, found.gaussian, TOLERANCE)
    assert some is not None and isinstance(some.density, Interpolated)
    again = integration.by_product(
        found, some.standardisation, len(some.density.rule.nodes), some.standardisation.inverse(some.phi)
    )
    assert float(again.log_evidence) == pytest.approx(float(some.log_evidence), abs=1e-8)
    torch.testing.assert_close(again.log_weights, some.log_weights, rtol=0.0, atol=1e-6)


def test_a_node_without_a_mode_that_counts_leaves_no_integral(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(phi: Tensor) -> Tensor:
        return torch.where(phi[:, 0] > 1.0, -torch.inf, skewed(phi))

    found = outer(lost, [], monkeypatch)
    assert integration._settled(found, found.gaussian, TOLERANCE) is None


def test_a_lattice_leaves_out_cells_without_a_mode_and_refuses_infinite_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the integral of a normal density, of which four standard deviations hold all but 1e-4."""

    def integral(far: float) -> integration.Integral | None:
        found = outer(lambda phi: torch.where(phi[:, 0] > 4.0, far, -0.5 * phi[:, 0].square()), [], monkeypatch, num=1)
        return integration.adaptive_grid(found, found.gaussian, TOLERANCE, torch.zeros(0, 1).double())

    found = integral(math.nan)
    assert found is not None and float(found.log_evidence) == pytest.approx(0.5 * math.log(math.tau), abs=1e-3)
    assert integral(math.inf) is None


@pytest.mark.parametrize(("most", "has_result"), [(40, True), (10, False)])
def test_a_curve_that_may_see_few_nodes_says_its_error(
    most: int, has_result: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    found = outer(turned_tail, rows, monkeypatch, num=2)
    monkeypatch.setattr(integration, "MOST_SEARCHED", most)
    some = integration._settled(found, found.gaussian, TOLERANCE)
    assert (some is not None) is has_result
    if some is not None:
        log_evidence = exact(found, turned_tail)[0]
        assert abs(float(some.log_evidence) - log_evidence) < some.error
        assert some.error > TOLERANCE / integration.MOVES
