"""Corners of a log density, and second derivatives that are not those of its slope, are named with site and family."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import RVM, LaplaceEvidence, NotAMode
from pyro_evidence.errors import NotSmooth
from pyro_evidence.laplace import mode_checks
from pyro_evidence.laplace.approximation import laplace_problem
from pyro_evidence.numerics.derivatives import generic_directions, pullback
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.program.log_joint import LogJoint
from tests.gallery import idioms
from tests.models_for_tests.posterior_models import fitted_linear, fitted_logistic, fitted_supports

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([1.0, -1.0, 0.5])


class HalfWrong(dist.Normal):
    """A normal distribution whose slope is right and whose second derivative is zero at a mean of exactly 0."""

    def log_prob(self, value: Tensor) -> Tensor:
        at_zero = (self.loc.detach() == 0).to(self.loc)
        frozen = (self.loc * (value - self.loc).detach() + super().log_prob(value).detach()) / 1.0
        return at_zero * frozen + (1.0 - at_zero) * super().log_prob(value)


def flawed(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    pyro.sample("y", HalfWrong(mu.expand(2), torch.ones(2)).to_event(1), obs=y)


def corner(y: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a.abs(), 1.0), obs=y)


def rectified(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(torch.relu(X @ w), 0.5), obs=y)


def binomial(X: Tensor, k: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("k", dist.Binomial(20, logits=X @ w), obs=k)


def test_a_second_derivative_that_is_wrong_at_the_mode_is_named() -> None:
    with pytest.raises(NotSmooth, match="site 'y', a HalfWrong, has a kink at the posterior mode: its second derivat"):
        LaplaceEvidence(flawed).run(torch.tensor([0.3, -0.3]))


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (idioms.lasso, (idioms.X, idioms.Y), "site 'w', a Laplace, has a kink where the search .*jumps by 1.00e\\+03"),
        (idioms.absolute_errors, (idioms.X, idioms.Y), "site 'y', a Laplace, has a kink"),
        (corner, (torch.full((4,), -1.0),), "site 'y', a Normal, has a kink .*jumps by 8.00e\\+00 along site 'a'"),
    ],
)
def test_corners_are_named_with_their_jump(model: Callable[..., Any], data: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(NotAMode, match=message):
        LaplaceEvidence(model).run(*data)


def one_laplace(y: Tensor) -> None:
    pyro.sample("y", dist.Laplace(pyro.sample("a", dist.Normal(0.0, 1.0)), 1.0), obs=y)


@pytest.mark.parametrize("away", [0.0, 1e-9, 1e-7])
def test_a_search_that_stopped_short_of_a_corner_names_it(away: float) -> None:
    problem = laplace_problem(LogJoint(one_laplace, (torch.tensor(0.5),)))
    u, theta = torch.tensor([0.5 + away]), problem.joint.initial_theta
    slope = problem.density.gradient(u.unsqueeze(0), theta)[1][0]
    with pytest.raises(NotSmooth, match=r"site 'y', a Laplace, has a kink .*jumps by 2\.00e\+00"):
        mode_checks.require_no_corner(problem.around(u, theta), slope)


@pytest.mark.parametrize("of_each", [0.3, 1.0, 7.0])
def test_stairs_are_told_however_many_are_in_a_piece(of_each: float) -> None:
    def model(y: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(0.1 * torch.floor(0.5 * mode_checks.PIECES * of_each * a + 0.3), 1.0), obs=y)

    problem, u = laplace_problem(LogJoint(model, (torch.tensor(0.5),))), torch.tensor([0.1])
    said = mode_checks.jump_message(problem.around(u, problem.joint.initial_theta), torch.ones_like(u), "there")
    assert said is not None and "along site 'a', there" in said


def test_the_letters_remedies() -> None:
    assert math.isfinite(float(LaplaceEvidence(idioms.smooth_lasso).run(idioms.X, idioms.Y).log_evidence))
    assert RVM(idioms.lasso).run(idioms.X, idioms.Y).num_active == 3


def test_a_rectified_predictor_away_from_its_corners_is_fitted() -> None:
    assert math.isfinite(float(LaplaceEvidence(rectified).run(X, Y.abs()).log_evidence))


@pytest.mark.parametrize("fitted", [fitted_linear, fitted_logistic, fitted_supports])
def test_smooth_models_have_small_errors(fitted: Callable[[], LaplacePosterior]) -> None:  # law
    state = fitted().state
    products = mode_checks.of_precision(state.precision, state.problem.active)
    assert mode_checks.curvature_error(state.around, products, 1e-4) < 1e-6
    row, unit = state.u.detach().unsqueeze(0).requires_grad_(), state.precision.variance[0].sqrt()
    slope = pullback(state.problem.density.log_joint(row, state.theta).sum(), row, create_graph=True)
    directions = generic_directions(2, len(state.u), unit) * unit
    images = torch.stack([-pullback(slope, row, v.unsqueeze(0))[0] for v in directions])
    products = mode_checks.Products(directions, images, unit, state.precision)
    assert mode_checks.curvature_error(state.around, products, 1e-4) < 1e-6


def test_a_curvature_that_is_half_of_the_true_one_is_found_out() -> None:  # oracle: halved on purpose
    state = fitted_logistic().state
    products = mode_checks.of_precision(state.precision, state.problem.active)
    halved = replace(products, images=0.5 * products.images)
    error = mode_checks.curvature_error(state.around, halved, 1e-4)
    assert error == pytest.approx(0.5, abs=1e-3)


def effects_apart(apart: float, x: Tensor, y: Tensor) -> None:
    """Intercepts and slopes of eight groups, that are each other's opposites but for so much."""
    group = torch.arange(len(x)) % 8
    with pyro.plate("groups", 8):
        tril = torch.tensor([[1.0, 0.0], [-1.0, apart]])
        u = pyro.sample("u", dist.MultivariateNormal(torch.zeros(2), scale_tril=tril))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Poisson((1.0 + u[group, 0] + x * u[group, 1]).exp()), obs=y)


def effects_in_one(x: Tensor, y: Tensor) -> None:
    group = torch.arange(len(x)) % 8
    with pyro.plate("groups", 8):
        u = pyro.sample("u", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Poisson((1.0 + (1.0 - x) * u[group]).exp()), obs=y)


def test_latents_that_are_nearly_functions_of_one_another_have_no_kink() -> None:
    x = torch.linspace(-1.0, 1.0, 40)
    y = torch.poisson((1.0 + x).exp(), generator=torch.Generator().manual_seed(0))
    expected = float(LaplaceEvidence(effects_in_one).run(x, y).log_evidence)
    found = LaplaceEvidence(partial(effects_apart, 1e-7)).run(x, y)
    assert float(found.log_evidence) == pytest.approx(expected, abs=0.01)
    with pytest.raises(NotAMode, match=r"determine one another .* site 'u'"):
        LaplaceEvidence(partial(effects_apart, 1e-8)).run(x, y)


def test_even_odds() -> None:  # oracle: the beta-binomial sum is uniform, 1 / 11
    posterior = LaplaceEvidence(idioms.completely_pooled).run(torch.tensor([10.0]), torch.tensor([5.0]))
    assert float(posterior.log_evidence) == pytest.approx(-math.log(11.0), abs=0.03)
    sd = float(posterior.get_samples(4000, seed=0)["phi"].std())
    assert sd == pytest.approx(math.sqrt(36.0 / (144.0 * 13.0)), rel=0.05)  # Beta(6, 6)


def test_rvm_keeps_the_weights_of_a_binomial() -> None:
    p = torch.sigmoid(X @ torch.tensor([1.0, -1.0, 0.5]))
    k = torch.binomial(torch.full((40,), 20.0), p, generator=torch.Generator().manual_seed(1))
    assert RVM(binomial).run(X, k).num_active == 3


def flawed_weights(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", HalfWrong(X @ w, torch.ones(len(X))), obs=y)


def test_where_a_search_starts_from_zero_second_derivatives_are_looked_at() -> None:
    with pytest.raises(NotSmooth, match="site 'y', a HalfWrong, has a kink where the search starts"):
        RVM(flawed_weights).run(X, Y)


def large_numbers(t: Tensor) -> None:
    """Linear and Gaussian; the posterior of the mean is narrower than the spacing of float32 there."""
    w = pyro.sample("w", dist.Normal(0.0, 1e7))
    pyro.sample("t", dist.Normal(w, 0.01).expand(t.shape).to_event(1), obs=t)


def test_single_precision_is_no_corner() -> None:
    """The same density: a corner nowhere, but rounded slopes in float32."""
    t = 4e5 + torch.arange(30.0, dtype=torch.float32)
    torch.set_default_dtype(torch.float32)
    with pytest.raises(ArithmeticError, match="double precision"):
        LaplaceEvidence(large_numbers).run(t)
    torch.set_default_dtype(torch.float64)
    assert bool(LaplaceEvidence(large_numbers).run(t.double()).log_evidence.isfinite())
