"""Where a network's mode is about to vanish or to merge with others: found by the curvature, and the end of a climb."""

import math
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import (
    LaplaceEvidence,
    NotAMode,
    NotConverged,
    Start,
    Status,
    Stop,
    exact_hessian,
    gauss_newton,
)
from pyro_evidence.compare import linearised
from pyro_evidence.errors import NotSmooth
from pyro_evidence.laplace import approximation, mode_checks, remedies, restarts, type2
from pyro_evidence.laplace.approximation import (
    LaplaceBatch,
    LaplaceState,
    Problem,
    laplace_problem,
    laplace_state,
)
from pyro_evidence.models.mlp import MLP
from pyro_evidence.numerics.line_search import alone
from pyro_evidence.precision.dense import Dense
from pyro_evidence.program import LogJoint


def line(num: int = 60) -> tuple[Tensor, Tensor]:
    """Targets that a straight line explains: hidden units have nothing to bend, and can be turned into one another."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(num, 3, generator=generator)
    return X, X[:, 0] - 0.5 * X[:, 1] + 0.3 * torch.randn(num, generator=generator)


def at_start(num_hidden: int = 2) -> LaplaceState:
    problem = laplace_problem(LogJoint(MLP(3, num_hidden), line(), {}))
    u = restarts.starts(problem.joint, 1, 0)[0]
    return laplace_state(problem, problem.joint.initial_theta, u, cold=True)


def least_share(state: LaplaceState) -> float:
    """Least eigenvalue of the exact curvature in units of Gauss-Newton's, by LAPACK."""
    density, u = state.problem.density, state.u.unsqueeze(0)
    exact, positive = (c(density, u, state.theta)[0].detach() for c in (exact_hessian, gauss_newton))
    tril = torch.linalg.cholesky(positive)
    half = torch.linalg.solve_triangular(tril, exact, upper=False)
    return float(torch.linalg.eigvalsh(torch.linalg.solve_triangular(tril, half.mT, upper=False))[0])


def test_a_mode_vanishes_where_little_of_gauss_newtons_curvature_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    state = at_start()
    share = least_share(state)
    monkeypatch.setattr(type2, "HIGHER", math.inf)
    assert 0.05 < share < 0.95
    for soft, expected in ((0.99 * share, False), (1.01 * share, True)):
        monkeypatch.setattr(remedies, "SOFT", soft)
        assert remedies.near_fold(state) is expected
        after = type2.step(type2.type2_state(state))
        assert (after.stop_reason is Status.VANISHING) is expected


def test_where_a_mode_vanishes_the_climb_goes_over_to_a_higher_one_a_round_on() -> None:
    begun = type2.type2_state(at_start())
    after = type2._at_higher_mode(begun)
    assert after.stop_reason is None and after.objective > begun.objective + type2.HIGHER
    move = after.laplace.theta - begun.laplace.theta
    kept = after.laplace.problem.active.all()
    assert 0.0 < float(move.abs().max()) <= type2.NEAR + 1e-12 or not bool(kept)


def test_where_none_is_higher_by_a_nat_that_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = type2.type2_state(at_start())
    found = approximation.laplace_state

    def no_higher(problem: Problem, theta: Tensor, start: Tensor, *, cold: bool = False) -> LaplaceState:
        assert cold
        return replace(found(problem, theta, start, cold=cold), log_evidence=begun.laplace.log_evidence + 0.9)

    monkeypatch.setattr(approximation, "laplace_state", no_higher)
    after = type2._at_higher_mode(begun)
    assert after.stop_reason is Status.VANISHING and after.laplace is begun.laplace


@pytest.mark.parametrize(("share", "first"), [(1.0, 1.0), (0.01, 0.04), (0.5, 1.0)])
def test_after_a_short_step_the_next_is_begun_four_times_as_long(
    share: float, first: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = replace(type2.type2_state(at_start()), share=share)
    direction, tried = 0.1 * torch.ones(5), []

    def no_mode(problem: Problem, theta: Tensor, start: Tensor, *, cold: bool = False) -> LaplaceState:
        tried.append(float((theta - begun.laplace.theta)[0] / 0.1))
        raise ArithmeticError

    monkeypatch.setattr(approximation, "laplace_state", no_mode)
    assert alone(type2._line_search(begun, direction), type2.answer) is None
    torch.testing.assert_close(tried[:3], [first, first / 4.0, first / 16.0])


def test_every_start_of_a_network_with_nothing_to_bend_ends_where_it_can_be_used() -> None:
    X, t = line()
    engine = LaplaceEvidence(MLP(3, 3), start=Start(restarts=2), stop=Stop(progress=False, throw=False))
    with pytest.warns(UserWarning, match="the posterior mode is about to vanish"):
        engine.run(X, t)
    fine = {Status.CONVERGED.value, Status.VANISHING.value}
    assert {posterior.status for posterior in engine.posteriors} <= fine
    new = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
    mean, _ = linearised(engine.posterior, new)
    assert float((mean[:, 0] - new[:, 0] + 0.5 * new[:, 1]).square().mean().sqrt()) < 0.15  # noise .3 on 60 rows
    assert "fewer hidden units" in Status.VANISHING.value
    assert LaplaceEvidence(MLP(3, 1), stop=Stop(progress=False)).run(X, t).log_evidence > engine.posterior.log_evidence


def test_a_warm_up_goes_on_as_long_as_the_log_evidence_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at the highest that it has seen, some rounds after which it has looked no further."""
    problem: Problem = at_start().problem
    seen: list[LaplaceBatch] = []
    near = restarts.near_mode

    def watched(*given: Any) -> LaplaceBatch:
        seen.append(near(*given))
        return seen[-1]

    monkeypatch.setattr(restarts, "near_mode", watched)
    place = restarts.starts(problem.joint, 1, 0)
    theta, u = restarts.warm_up(problem, problem.joint.initial_theta.unsqueeze(0).clone(), place)
    heights = [float(found.objective) for found in seen]
    best = max(range(len(seen)), key=heights.__getitem__)
    assert 3 <= best == len(seen) - 1 - restarts.PATIENCE < restarts.ROUNDS
    assert torch.equal(theta, seen[best].theta) and torch.equal(u, seen[best].u)


def two_means(t: Tensor) -> None:
    """Two components of data of one cluster; the spread of their means is maximised."""
    spread = pyro.param("spread", torch.tensor(5.0), constraint=constraints.positive)
    with pyro.plate("components", 2):
        m = pyro.sample("m", dist.Normal(0.0, spread))
    with pyro.plate("data", len(t)):
        k = pyro.sample("k", dist.Categorical(torch.ones(2)), infer={"enumerate": "parallel"})
        pyro.sample("t", dist.Normal(m[k], 1.0), obs=t)


def test_components_that_merge_have_no_kink() -> None:
    t = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with pytest.raises(NotConverged, match="singular"):
        LaplaceEvidence(two_means, stop=Stop(progress=False)).run(t)


@pytest.mark.parametrize(("power", "error", "said"), [(4, NotAMode, "to merge"), (1, NotSmooth, "has a kink")])
def test_a_quartic_is_told_from_a_corner(power: int, error: type[Exception], said: str) -> None:
    """Where next to no curvature is left, both slopes change by more than it says: a quartic's by less, the nearer."""

    def flat() -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1e5))
        pyro.factor("top", -(x.abs() ** power))

    problem = laplace_problem(LogJoint(flat, (), {}))
    neighbourhood = problem.around(torch.zeros(1), problem.joint.initial_theta)
    products = mode_checks.of_precision(Dense(torch.full((1, 1, 1), 1e-5)), problem.active)
    with pytest.raises(error, match=said) as caught:
        mode_checks.certify(neighbourhood, products)
    assert (type(caught.value) is NotSmooth) == (power == 1)
