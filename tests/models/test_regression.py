"""Linear regression on a basis, and the prior on weights, against densities and optima from elsewhere."""

import math
import pickle
from collections.abc import Callable
from functools import partial

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_evidence.errors import BadInput
from pyro_evidence.models.basis import GaussianRBF, Linear, Polynomial
from pyro_evidence.models.regression import LEARNED, Learned, LinearModel, regression

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
assert_approx = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-8)


def problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(20, 3, generator=generator)
    return X, X @ torch.tensor([2.0, -1.0, 0.5]) + 1.0 + 0.3 * torch.randn(20, generator=generator)


def log_joint(model: Callable[..., Tensor], w: Tensor, X: Tensor, t: Tensor) -> Tensor:
    trace = poutine.trace(poutine.condition(model, data={"w": w})).get_trace(X, t)
    return trace.log_prob_sum()


def params() -> dict[str, Tensor]:
    return {name: value.detach() for name, value in pyro.get_param_store().items()}


def expected_log_joint(w: Tensor, precision: Tensor, beta: float, Phi: Tensor, t: Tensor) -> Tensor:
    """``log p(w) + log p(t | w)`` from two multivariate normals given by their precisions."""
    prior = MultivariateNormal(torch.zeros_like(w), precision_matrix=precision.diag())
    likelihood = MultivariateNormal(Phi @ w, precision_matrix=beta * torch.eye(len(t)))
    return prior.log_prob(w) + likelihood.log_prob(t)


PRIORS = [
    ({"alpha": 2.0, "alpha_bias": 0.1}, [2.0, 2.0, 2.0, 0.1]),
    ({"alpha": torch.tensor(2.0), "alpha_bias": torch.tensor(0.1)}, [2.0, 2.0, 2.0, 0.1]),
    ({"alpha": Learned(2.0), "alpha_bias": Learned(0.1)}, [2.0, 2.0, 2.0, 0.1]),
    ({"alpha": 2.0, "alpha_bias": None}, [2.0, 2.0, 2.0, 2.0]),
    ({"alpha": torch.tensor([2.0, 3.0, 5.0])}, [2.0, 3.0, 5.0, 1.0]),
    ({"alpha": Learned(torch.tensor([2.0, 3.0, 5.0]))}, [2.0, 3.0, 5.0, 1.0]),
    ({"alpha": torch.tensor([2.0, 3.0]), "groups": torch.tensor([0, 1, 0])}, [2.0, 3.0, 2.0, 1.0]),
    ({"alpha": Learned(torch.tensor([2.0, 3.0])), "groups": torch.tensor([1, 1, 0])}, [3.0, 3.0, 2.0, 1.0]),
    ({"alpha": Learned(4.0), "groups": torch.tensor([1, 2, 0])}, [4.0, 4.0, 4.0, 1.0]),
    (
        {"alpha": torch.tensor([2.0, 3.0]), "groups": torch.tensor([0, 0, 0, 1]), "alpha_bias": None},
        [2.0, 2.0, 2.0, 3.0],
    ),
]


@pytest.mark.parametrize(("settings", "precision"), PRIORS)
def test_log_joint_is_that_of_two_multivariate_normals(settings, precision) -> None:
    X, t = problem()
    w = torch.tensor([0.3, -2.0, 1.0, 0.7])
    Phi = torch.cat([X, torch.ones(20, 1)], -1)
    actual = log_joint(regression(Linear(), beta=5.0, **settings), w, X, t)
    assert_exact(actual, expected_log_joint(w, torch.tensor(precision), 5.0, Phi, t))


def test_a_learned_noise_precision_begins_at_its_start() -> None:
    X, t = problem()
    w = torch.tensor([0.3, -2.0, 1.0])
    actual = log_joint(regression(Linear(bias=False), beta=Learned(0.1)), w, X, t)
    assert_exact(actual, expected_log_joint(w, torch.ones(3), 0.1, X, t))


def test_gradient_vanishes_at_the_ridge_solution() -> None:  # oracle: another program
    linear_model = pytest.importorskip("sklearn.linear_model")
    X, t = problem()
    ridge = linear_model.Ridge(alpha=2.0 / 5.0, fit_intercept=False, tol=1e-12).fit(X.numpy(), t.numpy())
    w = torch.tensor(ridge.coef_, requires_grad=True)
    joint = log_joint(regression(Linear(bias=False), alpha=2.0, beta=5.0), w, X, t)
    (gradient,) = torch.autograd.grad(joint, w)
    assert_approx(gradient, torch.zeros(3))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # forward mode of torch 2.13
def test_hessian_is_minus_the_posterior_precision() -> None:  # also: torch.func goes through the model
    X, t = problem()
    model = regression(Polynomial(2), alpha=2.0, alpha_bias=0.1, beta=5.0)
    with pyro.validation_enabled(False):
        hessian = torch.func.hessian(lambda w: log_joint(model, w, X, t))(torch.zeros(7))
    Phi = torch.cat([X, X**2, torch.ones(20, 1)], -1)
    assert_exact(-hessian, 5.0 * Phi.mT @ Phi + torch.tensor([2.0] * 6 + [0.1]).diag())


@pytest.mark.parametrize(
    ("settings", "shapes"),
    [
        ({}, {"alpha": (), "alpha_bias": (), "beta": ()}),
        ({"alpha_bias": None}, {"alpha": (), "beta": ()}),
        ({"alpha": 1.0}, {"alpha_bias": (), "beta": ()}),
        ({"alpha": 1.0, "alpha_bias": 1.0, "beta": 1.0}, {}),
        ({"groups": torch.arange(3)}, {"alpha": (3,), "alpha_bias": (), "beta": ()}),
        ({"groups": torch.tensor([0, 1, 1, 0]), "alpha_bias": None}, {"alpha": (2,), "beta": ()}),
    ],
)
def test_only_what_the_caller_leaves_open_is_a_param(settings, shapes) -> None:
    regression(Linear(), **settings)(*problem())
    assert {name: tuple(value.shape) for name, value in params().items()} == shapes


def test_a_basis_without_bias_has_no_precision_for_it() -> None:
    regression(Linear(bias=False))(*problem())
    assert params().keys() == {"alpha", "beta"}


def test_any_function_is_a_basis() -> None:
    X, t = problem()
    w = torch.tensor([0.3, -2.0, 1.0])
    actual = log_joint(regression(torch.sin, alpha=2.0, beta=5.0), w, X, t)
    assert_exact(actual, expected_log_joint(w, torch.full((3,), 2.0), 5.0, X.sin(), t))


def test_dtype_follows_the_inputs_and_numbers_are_not_rounded() -> None:
    X, t = problem()
    for dtype, default in [(torch.float32, torch.float64), (torch.float64, torch.float32)]:
        pyro.clear_param_store()
        torch.set_default_dtype(default)
        model = regression(Linear(), alpha=0.1, groups=torch.zeros(3, dtype=torch.int64))
        trace = poutine.trace(model).get_trace(X.to(dtype), t.to(dtype))
        sites = [trace.nodes[name]["value"] for name in ("w", "t", "alpha_bias", "beta")]
        assert {value.dtype for value in sites} == {dtype}
        scale = trace.nodes["w"]["fn"].base_dist.scale
        assert_exact(scale[0].double(), torch.tensor(0.1, dtype=dtype).rsqrt().double())


def test_the_model_returns_targets_when_given_and_draws_them_otherwise() -> None:
    X, t = problem()
    model = regression(Linear())
    assert model(X, t) is t
    assert not torch.equal(model(X), model(X))


@pytest.mark.parametrize("parallel", [False, True])
def test_predictive_draws_about_the_linear_predictor(parallel: bool) -> None:
    X, _ = problem()
    w = torch.linspace(-1.0, 1.0, 6 * 4).reshape(6, 4)
    model = regression(Linear(), beta=1e24)
    draws = Predictive(model, {"w": w}, parallel=parallel, return_sites=["t", "_RETURN"])(X)
    expected = w @ torch.cat([X, torch.ones(20, 1)], -1).mT
    assert_approx(draws["t"], expected)
    assert_approx(draws["_RETURN"], expected)


@pytest.mark.parametrize("parallel", [False, True])
def test_prior_predictive_has_the_shapes_of_the_sites(parallel: bool) -> None:
    X, _ = problem()
    draws = Predictive(regression(Linear()), num_samples=6, parallel=parallel)(X)
    assert {name: tuple(value.shape) for name, value in draws.items()} == {"w": (6, 1, 4), "t": (6, 20)}


def test_particles_in_a_plate_equal_particles_in_a_loop() -> None:
    X, t = problem()
    guide = AutoDelta(regression(Linear()))
    arguments = (regression(Linear()), guide, X, t)
    once = Trace_ELBO().loss(*arguments)
    many = Trace_ELBO(num_particles=5, vectorize_particles=True, max_plate_nesting=1).loss(*arguments)
    assert_exact(many, once)


def test_pickles_and_compares_by_content() -> None:
    X, t = problem()
    model = regression(GaussianRBF(X[:4], 0.5), groups=torch.tensor([0, 0, 1, 1]), alpha_bias=0.1)
    other = pickle.loads(pickle.dumps(model))
    assert other == model
    assert hash(other) == hash(model)
    w = torch.ones(5)
    assert_exact(log_joint(other, w, X, t), log_joint(model, w, X, t))


@pytest.mark.parametrize(
    "changed",
    [
        {"alpha": 1.0},
        {"alpha_bias": Learned(2.0)},
        {"beta": 1.0},
        {"groups": torch.zeros(3, dtype=torch.int64)},
    ],
)
def test_other_settings_compare_unequal(changed) -> None:
    assert regression(Linear(), **changed) != regression(Linear())
    assert regression(Linear(), **changed) == regression(Linear(), **changed)


def test_settings_are_visible() -> None:
    text = repr(regression(Polynomial(3), alpha=0.25))
    assert "degree=3" in text and "alpha=0.25" in text and "beta=Learned(start=1.0)" in text


def test_nuts_runs_on_it() -> None:
    X, t = problem()
    model: LinearModel = regression(Linear(), alpha=1.0, alpha_bias=0.01, beta=10.0)
    mcmc = MCMC(NUTS(model), num_samples=5, warmup_steps=5, disable_progbar=True)
    mcmc.run(X, t)
    assert mcmc.get_samples()["w"].shape == (5, 4)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"alpha": 0.0}, "alpha has the value 0; expected finite and greater than 0"),
        ({"alpha": Learned(-1.5)}, "alpha has the value -1.5"),
        ({"alpha": torch.tensor([1.0, math.inf, 1.0])}, "alpha has the value inf"),
        ({"alpha": torch.tensor([1.0, math.nan, 1.0])}, "alpha has the value nan"),
        ({"alpha_bias": 0.0}, "alpha_bias has the value 0"),
        ({"beta": -2.0}, "beta has the value -2"),
        ({"beta": torch.ones(2)}, r"beta has shape \(2,\); expected one number\."),
        ({"alpha": torch.ones(2, 2)}, r"alpha has shape \(2, 2\); expected one number, or one per"),
        ({"groups": torch.zeros(3)}, r"groups has shape \(3,\) and dtype torch.float64; expected whole"),
        ({"groups": torch.zeros(1, 3, dtype=torch.int64)}, r"groups has shape \(1, 3\)"),
        ({"groups": torch.tensor([0, 2, 2])}, r"groups uses the numbers \[0, 2\]; expected all of 0, 1"),
        ({"groups": torch.tensor([1, 1, 1])}, r"groups uses the numbers \[1\]"),
        ({"groups": torch.zeros(0, dtype=torch.int64)}, r"groups uses the numbers \[\]"),
        ({"groups": torch.tensor([0, 1, 1]), "alpha": torch.ones(3)}, r"expected \(\) or \(2,\), one per group"),
    ],
)
def test_impossible_settings_are_refused(settings, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        regression(Linear(), **settings)


@pytest.mark.parametrize("alpha_bias", [0.1, Learned(2.0), torch.tensor(1.0)])
def test_a_precision_for_no_bias_is_refused(alpha_bias) -> None:
    with pytest.raises(BadInput, match=r"has no bias column; give it bias=True"):
        regression(Linear(bias=False), alpha_bias=alpha_bias)
    assert regression(Linear(bias=False), alpha_bias=None) == regression(Linear(bias=False), alpha_bias=LEARNED)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"alpha": torch.ones(4)},
            r"alpha has 4 entries, but the basis has 3 functions \(the bias.*not counted",
        ),
        ({"alpha": torch.ones(1)}, "alpha has 1 entries, but the basis has 3"),
        ({"groups": torch.arange(4)}, "groups has 4 entries, but the basis has 3 functions"),
        (
            {"groups": torch.arange(3), "alpha_bias": None},
            r"groups has 3 entries, but the basis has 4 functions; expected as many\.",
        ),
    ],
)
def test_a_prior_of_another_length_than_the_basis_is_refused(settings, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        regression(Linear(), **settings)(*problem())


@pytest.mark.parametrize("shape", [(20, 1), (1, 20), (19,), ()])
def test_targets_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    X, _ = problem()
    with pytest.raises(BadInput, match=r"X has 20 rows; expected \(20,\)"):
        regression(Linear())(X, torch.zeros(shape))


def test_a_stale_param_store_is_refused() -> None:
    X, t = problem()
    regression(Linear(), groups=torch.arange(3))(X, t)
    with pytest.raises(BadInput, match=r"'alpha' has shape \(3,\).*these data need \(\).*clear_param_store"):
        regression(Linear())(X, t)
    pyro.clear_param_store()
    regression(Linear())(X, t)
    with pytest.raises(BadInput, match=r"'alpha' has .* torch.float64.*torch.float32"):
        regression(Linear())(X.float(), t.float())
