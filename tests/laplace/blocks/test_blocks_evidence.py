"""Blocks integrated by quadrature: against integrals to many digits, closed forms and differences."""

import math
from dataclasses import replace
from typing import Any

import mpmath
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_evidence.blocks import integrals
from pyro_evidence.blocks.terms import RowTerms
from pyro_evidence.laplace.approximation import laplace_state
from pyro_evidence.laplace.gradient import slope
from tests.models_for_tests.engine_models import positive
from tests.models_for_tests.grouped_models import (
    Model,
    enumerated,
    fixed,
    groups,
    heavy,
    intercepts,
    problem_of,
    slopes,
    state_of,
)

SMALL = groups(4, 5)


def log_integral(eta: Tensor, y: Tensor, sd: float) -> Any:
    """``log int prod_n p(y_n | eta_n + b) N(b | 0, sd) db`` to twenty digits."""
    pairs = list(zip(eta.tolist(), y.tolist(), strict=True))

    def density(b: Any) -> Any:
        value = mpmath.npdf(b, 0, sd)
        for e, t in pairs:
            value *= 1 / (1 + mpmath.exp(-(2 * t - 1) * (mpmath.mpf(e) + b)))
        return value

    with mpmath.workdps(22):
        return mpmath.log(mpmath.quad(density, mpmath.linspace(-11 * sd, 11 * sd, 9)))


def exact(X: Tensor, group: Tensor, num: int, y: Tensor, sd: float = 1.0) -> float:
    """The log evidence of :func:`fixed` at its first values."""
    eta = X @ torch.tensor([0.3, -0.2])
    return float(sum(log_integral(eta[group == g], y[group == g], sd) for g in range(num)))


def test_25_nodes_are_the_integral() -> None:
    data = groups(5, 10)
    expected = exact(*data)
    assert float(state_of(fixed, *data, nodes=25).log_evidence) == pytest.approx(expected, abs=1e-10)
    assert abs(float(state_of(fixed, *data, nodes=1).log_evidence) - expected) > 0.01


def test_seven_nodes_err_by_a_hundredth_of_a_nat_for_a_thousand_groups() -> None:
    data = groups(1000, 10)
    few, many = (float(state_of(fixed, *data, nodes=n).log_evidence) for n in (7, 31))
    assert abs(few - many) < 0.01


@pytest.mark.parametrize("nodes", [2, 5, 8])
def test_nothing_changes_where_laplace_is_exact(nodes: int) -> None:
    X, group, num, _ = groups(6, 3)
    y = X[:, 1]

    def model(y: Tensor) -> None:
        w, s = pyro.sample("w", dist.Normal(0.5, 2.0)), positive("s", 0.7)
        with pyro.plate("groups", num):
            b = pyro.sample("b", dist.Normal(0.0, s))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(w * X[:, 0] + b[group], 0.4), obs=y)

    J, Z = X[:, :1], torch.nn.functional.one_hot(group).double()
    covariance = 4.0 * J @ J.mT + 0.49 * Z @ Z.mT + 0.16 * torch.eye(len(y))
    expected = MultivariateNormal(0.5 * J[:, 0], covariance).log_prob(y)
    assert float(state_of(model, y, nodes=nodes).log_evidence) == pytest.approx(float(expected), abs=1e-9)


def test_nothing_changes_in_two_dimensions_either() -> None:  # nodes along any other axes would miss
    X, group, num, _ = groups(3, 4)
    y, tril = X[:, 1], torch.tensor([[1.0, 0.0], [0.9, 0.3]])

    def model(y: Tensor) -> None:
        s = positive("s", 1.0)
        with pyro.plate("groups", num):
            a = pyro.sample("a", dist.MultivariateNormal(torch.zeros(2), scale_tril=s * tril))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(a[group, 0] + a[group, 1] * X[:, 0], 0.3), obs=y)

    Z = torch.stack([torch.ones(len(X)), X[:, 0]], -1) @ tril
    covariance = (Z @ Z.mT) * (group.unsqueeze(-1) == group) + 0.09 * torch.eye(len(y))
    expected = MultivariateNormal(torch.zeros(len(y)), covariance).log_prob(y)
    assert float(state_of(model, y, nodes=2).log_evidence) == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.parametrize("model", [fixed, intercepts, slopes, heavy, enumerated])
@pytest.mark.parametrize("nodes", [3, 7])
def test_slope_is_that_of_the_log_evidence(model: Model, nodes: int) -> None:
    problem = problem_of(model, *SMALL, nodes=nodes)
    theta, u = problem.joint.initial_theta, problem.joint.initial_u
    state = laplace_state(problem, theta, u, cold=True)
    h = 1e-3

    def at(move: Tensor) -> float:
        return float(laplace_state(problem, theta + move, state.u).log_evidence)

    steps = h * torch.eye(len(theta))
    expected = [(8.0 * (at(e) - at(-e)) - at(2.0 * e) + at(-2.0 * e)) / (12.0 * h) for e in steps]
    assert slope(state).total.tolist() == pytest.approx(expected, rel=1e-7, abs=1e-8)


def on_a_grid(problem: Any, shared: Tensor, own: Tensor) -> float:
    """``log sum exp`` of the log joint over a fine grid, one block's coordinates after the other's."""
    theta, total = problem.joint.initial_theta, 0.0
    at_shared = float(problem.joint.log_joint(shared, theta))
    for front in own:
        axes = [torch.linspace(-9.0, 9.0, 181)] * len(front)
        z = torch.cartesian_prod(*axes).reshape(-1, len(front))
        rows = shared.expand(len(z), -1).index_copy(1, front, z)
        log_step = len(front) * math.log(0.1)
        total += float(problem.joint.log_joint(rows, theta).logsumexp(0)) - at_shared + log_step
    return total + at_shared


@pytest.mark.parametrize(("model", "nodes", "error"), [(fixed, 15, 1e-6), (heavy, 31, 2e-3), (slopes, 9, 1e-4)])
def test_integrals_are_those_of_a_fine_grid(model: Model, nodes: int, error: float) -> None:
    state = state_of(model, *SMALL, nodes=nodes)
    marginal = state.problem.marginal
    assert marginal is not None and state.place is not None
    (front,) = marginal.partition.fronts
    expected = on_a_grid(state.problem, state.u, front)
    assert float(state.place.each.sum()) == pytest.approx(expected, abs=error)


def test_sites_summed_out_count_in_their_block() -> None:
    X, group, num, y = groups(3, 4)
    data = X[:, 0].reshape(num, -1)

    def block(b: Tensor, row: Tensor) -> Tensor:
        each = [
            dist.Normal(b + 0.8 * z, 0.5).log_prob(row.unsqueeze(-1)).sum(0) + math.log(p)
            for z, p in ((0.0, 0.7), (1.0, 0.3))
        ]
        return torch.stack(each).logsumexp(0) + dist.Normal(0.0, 1.0).log_prob(b)

    b = torch.linspace(-9.0, 9.0, 20001)
    expected = sum(float(block(b, row).logsumexp(0)) + math.log(18.0 / 20000) for row in data)
    found = float(state_of(enumerated, X, group, num, y, nodes=25).log_evidence)
    assert found == pytest.approx(expected, abs=1e-6)


def test_groups_of_all_sizes_even_none() -> None:
    X, group, _, y = groups(5, 4)
    kept = torch.tensor([i for i in range(20) if group[i] != 2 and not (group[i] == 3 and i % 4)])
    data = X[kept], group[kept], 5, y[kept]
    expected = exact(*data)
    assert float(state_of(fixed, *data, nodes=25).log_evidence) == pytest.approx(expected, abs=1e-8)


def test_single_precision_is_close() -> None:
    data = groups(30, 4)
    expected = float(state_of(fixed, *data, nodes=7).log_evidence)
    torch.set_default_dtype(torch.float32)
    single = tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in data)
    assert float(state_of(fixed, *single, nodes=7).log_evidence) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("width", [3, 4])
def test_wider_blocks(width: int) -> None:
    X, group, num, y = groups(3, 6)

    def model(y: Tensor) -> None:
        s = positive("s", 1.0)
        with pyro.plate("groups", num), pyro.plate("effects", width):
            b = pyro.sample("b", dist.Normal(0.0, s))
        features = torch.stack([torch.ones(len(X)), X[:, 0], X[:, 1], X[:, 0] * X[:, 1]])[:width]
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Bernoulli(logits=(features * b[:, group]).sum(0)), obs=y)

    few, many = (state_of(model, y, nodes=n) for n in (7, 11))
    assert few.problem.marginal is not None and few.problem.marginal.partition.width == width
    laplace = float(state_of(model, y, nodes=1).log_evidence)
    gap = abs(float(few.log_evidence - many.log_evidence))
    assert gap < 0.2 * abs(float(many.log_evidence) - laplace)


def test_a_pruned_state_has_blocks_of_what_is_left() -> None:
    problem = problem_of(intercepts, *SMALL, nodes=7)
    groups_ = problem.structure.groups
    assert groups_ is not None
    member = groups_.member == 0
    assert bool(member.any())
    pruned = problem.without(member)
    plain = replace(pruned, nodes=1)
    theta, u = problem.joint.initial_theta, problem.joint.initial_u
    found, by_laplace = (laplace_state(p, theta, u, cold=True) for p in (pruned, plain))
    assert abs(float(found.log_evidence - by_laplace.log_evidence)) < 0.1


def with_more_data(X: Tensor, group: Tensor, num: int, y: Tensor) -> None:
    """Two observed sites: counts in the groups, and numbers that see what they share alone."""
    w = pyro.sample("w", dist.Normal(0.5, 3.0).expand([2]).to_event(1))
    s = positive("s", 0.8)
    with pyro.plate("groups", num):
        b = pyro.sample("b", dist.Normal(0.0, s))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Poisson((0.3 * X @ w + b[group]).exp()), obs=y)
    with pyro.plate("others", len(X)):
        pyro.sample("z", dist.Bernoulli(logits=X[:, 1] * w[0]), obs=(X[:, 0] > 0).double())


@pytest.mark.parametrize("model", [intercepts, with_more_data])
def test_louis_formula_is_what_derivatives_give(model: Model) -> None:
    state = state_of(model, *SMALL, nodes=5)
    marginal = state.problem.marginal
    assert marginal is not None and integrals.is_linear(marginal.density, 5)
    p, terms = marginal.partition, marginal.density.terms(state.theta)
    own, shared = state.u[p.own], state.u[p.shared] + torch.tensor([0.4, -0.3])
    found = marginal.place(terms, own, shared)
    by_derivatives = RowTerms(marginal.density, state.theta.unsqueeze(0))
    expected = marginal.place(by_derivatives, own.unsqueeze(0), shared.unsqueeze(0))
    for name in ("each", "slope", "curvature"):
        assert torch.allclose(getattr(found, name), getattr(expected, name)[0], rtol=1e-10, atol=1e-10)


def test_the_model_run_row_by_row_gives_the_same_terms() -> None:
    problem = problem_of(with_more_data, *SMALL, nodes=5)
    marginal = problem.marginal
    assert marginal is not None and marginal.density.linear is not None
    p, theta = marginal.partition, problem.joint.initial_theta
    rows, shared = torch.randn(3, len(p.own)), torch.randn(len(p.shared))
    by_rows = replace(marginal.density, linear=None).terms(theta)(rows, shared)
    assert torch.allclose(marginal.density.terms(theta)(rows, shared), by_rows, rtol=1e-12)
    whole = torch.cat([rows, shared.expand(3, -1)], 1)[:, p.place]
    assert torch.allclose(by_rows.sum(-1), problem.joint.log_joint(whole, theta), rtol=1e-12)
