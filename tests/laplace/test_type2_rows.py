"""Restarts as one batch against the same restarts one by one, and the evidence of networks against quadrature."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_evidence import (
    BadInput,
    LaplaceEvidence,
    LaplacePosterior,
    NotAMode,
    NotConverged,
    Start,
    Status,
    Stop,
    committee,
    gauss_newton,
)
from pyro_evidence.fitting.iterate import Fit, iterate
from pyro_evidence.laplace import approximation, gradient, type2
from pyro_evidence.laplace.approximation import is_singular
from pyro_evidence.models.mlp import MLP, Regression, ard
from pyro_evidence.numerics import newton, trust_region
from pyro_evidence.program import LogJoint

STOP = Stop(progress=False)
LOOSE = Stop(gradient_tolerance=1e-3, progress=False)


def wave(num: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-2.0, 2.0, num)
    return x[:, None], torch.sin(2.0 * x) + 0.1 * torch.randn(num, generator=generator)


def problem_of(net: MLP) -> approximation.Problem:
    return approximation.laplace_problem(LogJoint(net, wave()), gauss_newton)


def test_rows_have_the_numbers_and_slopes_of_single_states() -> None:
    at = problem_of(MLP(1, 2))
    generator = torch.Generator().manual_seed(1)
    theta = at.joint.initial_theta + 0.3 * torch.randn(3, 5, generator=generator)
    active = torch.ones(3, 7, dtype=torch.bool)
    assert at.structure.groups is not None
    active[1, at.structure.groups.member == 2] = False  # a row with pruned weights
    start = torch.randn(3, 7, generator=generator)
    mode = approximation.modes_of_rows(at, theta, active, start, 200)
    points = approximation.at_modes(theta, active, mode, mode.converged)
    mode = approximation.modes_of_rows(at, theta, active, start, 200)
    own = [approximation.replace(at, active=a) for a in active]
    states = [approximation.state_of_row(own[row], theta[row], start[row], mode, row) for row in range(3)]
    found = gradient.slopes(at, states)
    for row in range(3):
        single = approximation.laplace_state(own[row], theta[row], points.u[row])
        torch.testing.assert_close(points.objective[row], single.log_evidence, rtol=1e-10, atol=1e-9)
        torch.testing.assert_close(states[row].log_evidence, single.log_evidence, rtol=1e-10, atol=1e-9)
        slope = gradient.slope(single)
        torch.testing.assert_close(found.total[row], slope.total, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found.joint[row], slope.joint, rtol=1e-6, atol=1e-7)


def two_fits() -> list[Fit[type2.TypeII]]:
    at = problem_of(MLP(1, 2, alpha={"b1": 1.0, "b2": 1.0}))
    generator = torch.Generator().manual_seed(1)
    states = [
        approximation.laplace_state(at, at.joint.initial_theta + shift, torch.randn(7, generator=generator), cold=True)
        for shift in (0.0, 0.5)
    ]
    return [Fit(type2.type2_state(s), Status.BY_HAND, (s.objective,)) for s in states]


def test_a_batch_takes_the_steps_of_single_loops() -> None:
    """Law: whoever answers what a step asks for, it is the same step."""
    fits = two_fits()
    for fit, moved in zip(fits, type2.climb(fits, LOOSE), strict=True):
        alone = iterate(type2.step, fit.state, LOOSE, "x")
        assert alone.status is Status.CONVERGED
        assert moved.objectives == pytest.approx(alone.objectives, abs=1e-6)
        torch.testing.assert_close(moved.state.laplace.theta, alone.state.laplace.theta, rtol=1e-4, atol=1e-4)


def test_a_mode_that_the_batch_has_not_found_is_searched_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    fits, found = two_fits(), type2.modes_of_rows
    searched: list[int] = []
    monkeypatch.setattr(type2, "modes_of_rows", lambda *given: searched.append(1) or found(*given))
    whole = type2.climb(fits, LOOSE)
    assert searched  # it is the batch that found them
    monkeypatch.setattr(type2, "modes_of_rows", lambda *given: replace(found(*given), converged=torch.zeros(2) > 0))
    for one, other in zip(whole, type2.climb(fits, LOOSE), strict=True):
        assert one.objectives == pytest.approx(other.objectives, abs=1e-6)


def test_a_fit_whose_step_fails_stays_where_it_was_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of one fit then says what fails."""
    fits, steps = two_fits(), type2.steps

    def failing(state: type2.TypeII) -> Any:
        if state is fits[0].state:
            raise NotAMode("none")
        return (yield from steps(state))

    monkeypatch.setattr(type2, "steps", failing)
    together = type2.climb(fits, LOOSE)
    assert together[0].state is fits[0].state and together[0].objectives == fits[0].objectives
    assert together[1].state.objective > fits[1].state.objective + 0.1


def linear_given_the_unit(w: Tensor, b: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """``log p(t | w, b)`` of one tanh unit with ``v, c ~ N(0, 1)`` and noise precision 25 integrated out."""
    h = torch.tanh(x * w[:, None] + b[:, None])
    K = h.unsqueeze(-1) * h.unsqueeze(-2) + 1.0 + torch.eye(len(x)) / 25.0
    return torch.distributions.MultivariateNormal(torch.zeros(len(x)), K).log_prob(t)


def test_evidence_plus_log_copies_is_the_integral_over_all_modes() -> None:
    """Oracle: quadrature over the hidden unit's weights, the output's integrated out on paper."""
    x = torch.linspace(-2.0, 2.0, 12)
    t = torch.tanh(1.5 * x + 0.5)
    net = MLP(1, 1, alpha=1.0, output=Regression(beta=25.0))
    posterior = LaplaceEvidence(net, start=Start(restarts=4)).run(x[:, None], t)
    axis = torch.linspace(-6.0, 6.0, 161)
    w, b = (g.reshape(-1) for g in torch.meshgrid(axis, axis, indexing="ij"))
    prior = -0.5 * (w.square() + b.square()) - math.log(2.0 * math.pi)
    cells = linear_given_the_unit(w, b, x, t) + prior + 2.0 * math.log(float(axis[1] - axis[0]))
    expected = float(cells.logsumexp(0))
    assert net.log_copies(posterior.mode) == pytest.approx(math.log(2.0))
    found = float(posterior.log_evidence) + net.log_copies(posterior.mode)
    assert found == pytest.approx(expected, abs=0.3)  # Laplace's own error
    assert abs(found - expected) < abs(float(posterior.log_evidence) - expected)


def test_posteriors_are_the_distinct_modes_and_make_a_committee() -> None:
    X, t = wave()
    engine = LaplaceEvidence(
        MLP(1, 2, alpha=1.0, output=Regression(beta=50.0)), curvature=gauss_newton, start=Start(restarts=6), stop=STOP
    )
    best = engine.run(X, t)
    modes = engine.posteriors
    heights = [float(p.log_evidence) for p in modes]
    assert heights == sorted(heights, reverse=True) and len(set(heights)) == len(heights) >= 1
    assert heights[0] == float(best.log_evidence)
    found = committee(modes)
    torch.testing.assert_close(found.weights, torch.tensor(heights).softmax(0))
    assert found.log_evidence == pytest.approx(float(torch.tensor(heights).logsumexp(0)))
    before = torch.get_rng_state()
    draws = found.predict(X[:5], num_samples=40)["t"]
    assert draws.shape == (40, 5) and torch.equal(draws, found.predict(X[:5], num_samples=40)["t"])
    assert torch.equal(before, torch.get_rng_state())


def test_a_committee_draws_each_member_by_its_share() -> None:
    """Law: the mean of the draws is the weighted mean of the members'; log copies count as evidence."""
    X, t = wave(12)
    fits = [LaplaceEvidence(MLP(1, 1, alpha=a, output=Regression(beta=25.0))).run(X, t) for a in (1.0, 30.0)]
    gap = float(fits[0].log_evidence - fits[1].log_evidence)
    even = committee(fits, log_copies=[0.0, gap])
    torch.testing.assert_close(even.weights, torch.tensor([0.5, 0.5]))
    means = [committee([p]).predict(X, num_samples=300)["t"].mean(0) for p in fits]
    draws = even.predict(X, num_samples=300)["t"]
    error = draws.std(0) / math.sqrt(150.0)
    assert bool(((draws.mean(0) - 0.5 * (means[0] + means[1])).abs() < 5.0 * error).all())


def test_impossible_committees_are_refused() -> None:
    X, t = wave(12)
    one, other = (LaplaceEvidence(MLP(1, 1, alpha=1.0, output=Regression(beta=25.0))).run(X, y) for y in (t, t + 1.0))
    for posteriors, copies, match in [
        ([], None, "got 0 things"),
        ([one], [math.nan], "expected 1 finite numbers"),
        ([one, other], None, "different data"),
    ]:
        with pytest.raises(BadInput, match=match):
            committee(posteriors, log_copies=copies)


def test_irrelevant_inputs_get_a_large_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(80, 3, generator=generator)
    t = torch.tanh(2.0 * X[:, 0]) + 0.1 * torch.randn(80, generator=generator)
    stop = Stop(gradient_tolerance=1e-2, tolerance=1e-4, progress=False, throw=False)
    posterior = LaplaceEvidence(MLP(3, 2, alpha=ard(3)), curvature=gauss_newton, stop=stop).run(X, t)
    alpha = posterior.hyperparameters["alpha_W1"]
    assert bool((alpha[1:] > 100.0 * alpha[0]).all())
    assert bool((posterior.gamma["alpha_W1"][1:] < posterior.gamma["alpha_W1"][0]).all())


def test_a_start_on_a_saddle_is_left() -> None:
    """All weights zero, and exact copies of hidden units, are nearly stationary, but no mode."""
    at = problem_of(MLP(1, 2, alpha=1.0, output=Regression(beta=25.0)))
    nothing = at.joint.initial_theta
    A = at.structure.fastest.precision(torch.zeros(1, 7), nothing)
    assert float(torch.linalg.eigvalsh(A)[0, 0]) < 0.0  # oracle: the origin is a saddle, whatever its slope
    copies = at.joint.latents.flat(
        {"W1": torch.ones(1, 2), "b1": torch.zeros(2), "W2": torch.ones(2, 1), "b2": torch.zeros(1)}
    )
    for start in (torch.zeros(7), copies):
        state = approximation.laplace_state(at, nothing, start, cold=True)
        exact = at.structure.fastest.precision(state.u.unsqueeze(0), nothing)
        assert float(torch.linalg.eigvalsh(exact)[0, 0]) > 0.0


class Valley:
    """Rosenbrock's valley: curved, its curvature indefinite beside it."""

    blocks = (slice(0, 2),)

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        return -100.0 * (u[:, 1] - u[:, 0].square()).square() - (1.0 - u[:, 0]).square()

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        u = u.detach().requires_grad_()
        value = self.log_joint(u, theta)
        return value.detach(), torch.autograd.grad(value.sum(), u)[0]

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        x, y = u.T
        A = torch.stack([1200.0 * x.square() - 400.0 * y + 2.0, -400.0 * x, -400.0 * x, torch.full_like(x, 200.0)], -1)
        return A.reshape(-1, 2, 2)

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        J = torch.stack([-20.0 * u[:, 0], torch.full_like(u[:, 0], 10.0)], -1)
        return 2.0 * J.unsqueeze(-1) * J.unsqueeze(-2) + torch.tensor([[2.0, 0.0], [0.0, 0.0]])


@pytest.mark.parametrize("search", [trust_region.climb, partial(trust_region.ascend, scale=None)])
def test_trust_region_follows_a_curved_valley(search) -> None:
    start = torch.tensor([[-1.2, 1.0], [2.0, 2.0], [0.0, 3.0]])
    density = Valley()
    mode = search(density, density.precision, start, torch.zeros(0), newton.Limits(1e-14, 100))
    assert bool(mode.converged.all())
    torch.testing.assert_close(mode.u, torch.ones(3, 2))


def test_trust_region_leaves_a_saddle_from_rest() -> None:
    class Saddle(Valley):
        def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
            return -u[:, 0].square() - (u[:, 1].square() - 1.0).square()

        def precision(self, u: Tensor, theta: Tensor) -> Tensor:
            return torch.stack([torch.full_like(u[:, 0], 2.0), 12.0 * u[:, 1].square() - 4.0], -1).diag_embed()

    density = Saddle()
    limits = newton.Limits(1e-14, 50)
    mode = trust_region.ascend(density, density.precision, torch.zeros(1, 2), torch.zeros(0), limits)
    assert bool(mode.converged.all()) and float(mode.u[0, 1].abs()) == pytest.approx(1.0)
    assert mode.left_saddle.tolist() == [True]
    near = torch.tensor([[0.1, 0.9]])
    mode = trust_region.ascend(density, density.precision, near, torch.zeros(0), limits)
    assert mode.left_saddle.tolist() == [False]


def test_a_saddle_that_was_left_is_not_forgotten() -> None:
    """By the steps in the hyperparameters that follow, by a batch of them, and by the diagnostics."""
    state = type2.type2_state(approximation.laplace_state(problem_of(MLP(1, 1)), torch.zeros(5), torch.ones(4)))
    for left_saddle in (False, True):
        from_there = approximation.replace(state, laplace=approximation.replace(state.laplace, left_saddle=left_saddle))
        after = type2.step(from_there)
        assert after.laplace is not state.laplace and after.laplace.left_saddle == left_saddle
        fits = [Fit(from_there, Status.BY_HAND, (0.0,))] * 2
        together = type2.climb(fits, Stop(num_steps=1, progress=False))
        assert [fit.state.laplace.left_saddle for fit in together] == [left_saddle] * 2
        assert LaplacePosterior(after.laplace, "", (), torch.zeros(1)).diagnostics(100)["left_a_saddle"] is left_saddle


def test_a_curvature_that_becomes_singular_is_called_by_its_name() -> None:
    state = type2.type2_state(
        approximation.laplace_state(problem_of(MLP(1, 2)), torch.zeros(5), torch.randn(7), cold=True)
    )
    assert not is_singular(state.laplace)
    flat = state.laplace.precision
    thin = approximation.replace(state.laplace, precision=type(flat)(1e-3 * flat.tril))
    assert is_singular(thin)
    assert "curvature=gauss_newton" in Status.SINGULAR.value


def test_failures_of_all_restarts_are_told() -> None:
    X, t = wave()
    with pytest.raises((NotAMode, NotConverged, BadInput)):
        LaplaceEvidence(MLP(1, 2), start=Start(restarts=2)).run(X, t * torch.nan)


def test_log_evidences_of_rows_are_as_exact_as_their_modes() -> None:
    """With single precision as torch's default, too: of 5/2 log 2 pi as of all else."""
    rows, numbers, yes = torch.zeros(1, 5), torch.zeros(1), torch.ones(1) > 0
    mode = newton.Mode(rows, numbers, rows, torch.eye(5).unsqueeze(0), numbers, yes, yes, rows, rows, ~yes)
    torch.set_default_dtype(torch.float32)
    found = approximation.at_modes(rows, rows > -1.0, mode, yes).objective
    assert float(found) == pytest.approx(2.5 * math.log(2.0 * math.pi), abs=1e-12)
