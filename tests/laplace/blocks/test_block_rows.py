"""Modes of what blocks share, at many hyperparameters together: those of each alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pyro_evidence.blocks.marginal import Marginal, SharedIterate, near_places
from pyro_evidence.blocks.terms import BlockDensity, RowTerms
from pyro_evidence.laplace.approximation import Problem, laplace_problem, laplace_state, near_states
from pyro_evidence.nested import inner
from pyro_evidence.program.log_joint import LogJoint
from tests.models_for_tests.grouped_models import (
    Model,
    enumerated,
    fixed,
    groups,
    heavy,
    intercepts,
    problem_of,
    slopes,
)

SMALL = groups(4, 5)


def marginal_of(problem: Problem) -> Marginal:
    assert problem.marginal is not None
    return problem.marginal


def some_rows(problem: Problem) -> tuple[Tensor, Tensor]:
    """Hyperparameters about the first ones, and the mode at these as a start."""
    theta, u = problem.joint.initial_theta, problem.joint.initial_u
    start = laplace_state(problem, theta, u, cold=True).u
    moves = 0.4 * torch.linspace(-1.0, 1.0, 5).unsqueeze(-1) * torch.ones_like(theta)
    return theta + moves, start.expand(5, -1)


@pytest.mark.parametrize("model", [fixed, intercepts, slopes, heavy, enumerated])
def test_places_and_precisions_are_those_of_rows_alone(model: Model) -> None:
    problem = problem_of(model, *SMALL, nodes=5)
    marginal = marginal_of(problem)
    theta, start = some_rows(problem)
    for row, t, u in zip(near_places(marginal, theta, start), theta, start, strict=True):
        alone = marginal.find(t, u)
        assert isinstance(row, SharedIterate)
        for found, expected in ((row.each, alone.each), (row.shared, alone.shared), (row.curvature, alone.curvature)):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        precisions = [marginal.precision(t, place) for place in (row, alone)]
        torch.testing.assert_close(precisions[0].log_det_gradient, precisions[1].log_det_gradient, rtol=1e-5, atol=1e-6)


def test_a_row_that_does_not_arrive_is_left_out() -> None:
    problem = problem_of(intercepts, *SMALL, nodes=5)
    theta, start = some_rows(problem)
    theta[2], start = torch.nan, start.clone()
    found = near_places(marginal_of(problem), theta, start)
    assert [place is None for place in found] == [False, False, True, False, False]


def test_outer_values_are_solved_together(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(intercepts, *SMALL, nodes=5)
    theta, start = some_rows(problem)
    prior = inner.log_priors(problem, theta)
    expected = inner._one_by_one(problem, theta[:1], start[:1], [1], prior=prior, held=None, rough=False)[2]
    monkeypatch.setattr(inner, "_state", lambda *_: None)
    found = inner._one_by_one(problem, theta, start, [1] * len(theta), prior=prior, held=None, rough=False)
    assert bool(found[2].isfinite().all())
    torch.testing.assert_close(found[2][:1], expected, rtol=0.0, atol=1e-7)


def test_heights_to_a_thousandth_of_a_nat_take_fewer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(heavy, *SMALL, nodes=5)
    theta, start = some_rows(problem)
    prior, calls, run = inner.log_priors(problem, theta), list[int](), RowTerms.__call__
    monkeypatch.setattr(RowTerms, "__call__", lambda *args: calls.append(1) or run(*args))
    heights, num = [], [0]
    for rough in (False, True):
        states = near_states(problem, theta, start, prior, rough=rough)
        assert states is not None
        heights.append([float(state.log_evidence) for state in states if state is not None])
        num.append(len(calls))
    assert len(heights[0]) == 5 and heights[1] == pytest.approx(heights[0], abs=1e-3)
    assert num[2] - num[1] < num[1]


def test_a_quadratic_prior_of_blocks_takes_one_run_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = laplace_problem(LogJoint(slopes, groups(101, 2)))  # correlated effects, by factors
    marginal = problem.by_quadrature(5)
    assert marginal is not None and marginal.density.is_quadratic
    theta, start = some_rows(problem)
    u = start + 0.3 * torch.randn(5, 203, generator=torch.Generator().manual_seed(0))
    run_by_run = replace(marginal, density=replace(marginal.density, is_quadratic=False))
    expected, runs, cells = run_by_run.integrated(theta, u), [], BlockDensity.cells
    monkeypatch.setattr(BlockDensity, "cells", lambda *args: runs.append(args) or cells(*args))
    torch.testing.assert_close(marginal.integrated(theta, u), expected, rtol=1e-12, atol=1e-9)
    assert len(runs) == 1
