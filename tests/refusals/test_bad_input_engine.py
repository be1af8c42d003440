"""What the engine refuses, and what its error messages say."""

import math
import time

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import (
    BadInput,
    ImproperPosterior,
    LaplaceEvidence,
    NotAMode,
    NotConverged,
    NotPositiveDefinite,
    TooLarge,
    damped,
    exact_hessian,
)
from tests.models_for_tests.engine_models import classes, linear, logistic_shared, targets


def wide_logistic(X: Tensor, t: Tensor | None = None) -> Tensor:
    """A prior so wide that it is none."""
    w = pyro.sample("w", dist.Normal(0.0, 1e12).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def flat_linear(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1e12).expand([X.shape[-1]]).to_event(1))
    pyro.sample("y", dist.Normal(X @ w, 1.0).to_event(1), obs=y)


def test_collinear_features_with_a_flat_prior() -> None:
    X, y = targets()
    with pytest.raises((NotPositiveDefinite, ImproperPosterior), match=r"site 'w'.*(two columns|collinear)"):
        LaplaceEvidence(flat_linear).run(torch.cat([X, X[:, :1]], -1), y)


def test_separable_classes_with_a_flat_prior() -> None:
    X, _ = classes()
    with pytest.raises((ImproperPosterior, NotPositiveDefinite, NotAMode), match=r"site 'w'.*prior"):
        LaplaceEvidence(wide_logistic).run(X, (X[:, 0] > 0).double())


def test_a_density_that_rises_for_ever_has_no_mode() -> None:
    def rising(y: Tensor) -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("y", y * x.square())

    with pytest.raises((NotAMode, NotPositiveDefinite), match="site 'x'"):
        LaplaceEvidence(rising).run(torch.tensor(2.0))


def test_a_flat_direction_is_improper_not_a_number() -> None:
    def ridge(y: Tensor) -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1e10).expand([2]).to_event(1))
        pyro.sample("y", dist.Normal(x.sum(), 1.0), obs=y)

    with pytest.raises((ImproperPosterior, NotPositiveDefinite), match="site 'x'"):
        LaplaceEvidence(ridge).run(torch.tensor(0.3))


def test_a_saddle_on_the_way_is_left() -> None:
    """Start and saddle coincide: the origin of a double well."""

    def well(y: Tensor) -> None:
        x = pyro.sample("x", dist.Normal(0.0, 10.0))
        pyro.factor("y", -(x.square() - y).square())

    from pyro_evidence.laplace import approximation
    from pyro_evidence.program import LogJoint

    joint = LogJoint(well, (torch.tensor(4.0),))
    mode = approximation.search_modes(
        approximation.laplace_problem(joint), torch.zeros(1, 1), joint.initial_theta, cold=False
    )
    assert bool(mode.converged[0]) and abs(float(mode.u[0, 0])) == pytest.approx(2.0, abs=0.01)
    assert bool(mode.left_saddle[0])
    assert approximation.laplace_state(
        approximation.laplace_problem(joint), joint.initial_theta, torch.zeros(1)
    ).left_saddle
    assert not approximation.laplace_state(
        approximation.laplace_problem(joint), joint.initial_theta, torch.ones(1) * 1.9
    ).left_saddle


def test_damping_is_a_visible_choice() -> None:
    X, y = targets()
    X = torch.cat([X, X[:, :1]], -1)
    posterior = LaplaceEvidence(flat_linear, curvature=damped(exact_hessian, 1e-3)).run(X, y)
    assert posterior.diagnostics(100)["curvature"] == "damped(exact_hessian, 0.001)"


@pytest.mark.parametrize("amount", [-1.0, math.inf, math.nan])
def test_a_damping_that_is_no_precision_is_refused(amount: float) -> None:
    with pytest.raises(BadInput, match=r"amount=.*at least 0"):
        damped(exact_hessian, amount)


def test_a_dense_hessian_that_does_not_fit_is_refused_before_it_is_allocated() -> None:
    def many(y: Tensor) -> None:
        f = pyro.sample("f", dist.Normal(torch.zeros(len(y)), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(f.cumsum(0).exp(), 1.0).to_event(1), obs=y)

    begin = time.perf_counter()
    with pytest.raises(TooLarge, match=r"[\d,]{14,} bytes.*'f'"):
        LaplaceEvidence(many).run(torch.zeros(100_000))
    assert time.perf_counter() - begin < 20.0


def test_a_perfect_fit_makes_the_noise_precision_run_away() -> None:
    X, _ = targets()
    with pytest.raises(NotConverged, match="infinity"):
        LaplaceEvidence(linear).run(X, X[:, 0])


def test_data_go_to_run_not_to_the_constructor() -> None:
    with pytest.raises(BadInput, match=r"Tensor.*run"):
        LaplaceEvidence(torch.zeros(3))  # type: ignore[arg-type]


def test_posterior_before_any_fit() -> None:
    with pytest.raises(BadInput, match=r"call run"):
        _ = LaplaceEvidence(logistic_shared).posterior
