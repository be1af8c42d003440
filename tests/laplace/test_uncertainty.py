"""Uncertainty of maximised hyperparameters against closed forms and lme4."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import LaplaceEvidence, LaplacePosterior, Stop
from pyro_evidence.errors import NotAMode
from pyro_evidence.laplace import uncertainty
from pyro_evidence.laplace.approximation import laplace_problem, laplace_state
from pyro_evidence.laplace.uncertainty import hyperparameter_covariance, moved
from pyro_evidence.program import LogJoint
from tests.laplace.test_hyperparameters import GROUP, covariance, data, log_evidence, mixed
from tests.models_for_tests.engine_models import positive

QUIET = Stop(progress=False)
SCHOOLS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def fit(model: Callable[..., None], *args: Tensor, **settings: object) -> LaplacePosterior:
    return LaplaceEvidence(model, stop=QUIET, **settings).run(*args)  # type: ignore[arg-type]


def test_covariance_is_the_inverse_of_the_closed_forms_hessian() -> None:
    X, y = data()
    found = fit(mixed, X, y)
    spread = found.hyperparameter_covariance()
    hessian = torch.autograd.functional.hessian(lambda t: log_evidence(t, X, y), found.state.theta)
    torch.testing.assert_close(spread.unconstrained, torch.linalg.inv(-hessian), rtol=1e-4, atol=1e-7)
    value = found.hyperparameters
    scale = torch.tensor([1.0, 1.0, float(value["sd"]), float(value["sigma"])])
    torch.testing.assert_close(spread.constrained, spread.unconstrained * scale * scale[:, None])
    torch.testing.assert_close(spread.sd["sigma"], spread.constrained[3, 3].sqrt())
    assert spread.sd["b"].shape == (2,) and spread.labels == (("b", 0), ("b", 1), ("sd", 0), ("sigma", 0))
    assert spread.edges == ()


def test_other_units_scale_it() -> None:
    X, y = data()
    sd = [fit(mixed, X, c * y).hyperparameter_covariance().sd["b"] for c in (1.0, 1000.0)]
    torch.testing.assert_close(sd[1], 1000.0 * sd[0], rtol=1e-5, atol=0.0)


def restricted(X: Tensor, y: Tensor) -> None:
    """Fixed effects under a flat prior, integrated."""
    sd, sigma = positive("sd", 0.7), positive("sigma", 0.6)
    b = pyro.sample("b", dist.ImproperUniform(constraints.real_vector, (), (2,)))
    a = pyro.sample("a", dist.Normal(torch.zeros(8), sd).to_event(1))
    pyro.sample("y", dist.Normal(X @ b + a[GROUP], sigma).to_event(1), obs=y)


def test_flat_fixed_effects_integrated_are_restricted_maximum_likelihood() -> None:
    """Patterson and Thompson (1971), constants as an integral has them."""
    X, y = data()
    found = fit(restricted, X, y)
    theta = found.state.theta.clone().requires_grad_()
    V = covariance(theta[0].exp(), theta[1].exp())
    A = X.T @ torch.linalg.solve(V, X)
    residual = y - X @ torch.linalg.solve(A, X.T @ torch.linalg.solve(V, y))
    quadratic = residual @ torch.linalg.solve(V, residual)
    expected = -0.5 * (38 * math.log(math.tau) + torch.logdet(V) + torch.logdet(A) + quadratic)
    assert float(found.log_evidence) == pytest.approx(float(expected.detach()), abs=1e-9)
    assert float(torch.autograd.grad(expected, theta)[0].abs().max()) < 1e-5


def schools(y: Tensor) -> None:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, ERRORS), obs=y)


def height(tau: float) -> float:
    """Oracle: log density of the data with both means integrated, plus the log prior density of tau."""
    V = torch.diag(ERRORS.square() + tau**2) + 25.0
    prior = float(dist.HalfCauchy(5.0).log_prob(torch.tensor(tau)))
    return float(dist.MultivariateNormal(torch.zeros(8), V).log_prob(SCHOOLS)) + prior


def test_a_scale_at_zero_has_an_interval_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = fit(schools, SCHOOLS, maximise=["tau"])
    spread = found.hyperparameter_covariance()
    assert bool(spread.sd["tau"].isnan())
    (edge,) = spread.edges
    assert (edge.name, edge.end, edge.interval[0]) == ("tau", 0.0, 0.0) and edge.value < 0.1
    assert height(edge.interval[1]) == pytest.approx(height(0.0) - 1.9207, abs=0.02)
    found.summary()
    said = capsys.readouterr().out
    assert "tau[0] = 0.00" in said and "is at an end of its range, 0" in said and "Integrate it" in said


def test_a_probability_of_zero_has_the_interval_of_its_likelihood_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    """None of the six in ten draws that the first class leaves: ``6 log(1 - p / .6)`` falls by 1.92.

    A simplex has fewer coordinates than elements, and one coordinate that of either of the last two classes.
    """

    def model(counts: Tensor) -> None:
        rows = pyro.param("rows", torch.full((2, 3), 1.0 / 3.0), constraint=constraints.simplex)
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mean, 1.0), obs=torch.tensor(0.3))
        with pyro.plate("r", 2):
            pyro.sample("n", dist.Multinomial(probs=rows, validate_args=False), obs=counts)

    for second, index in (([4.0, 0.0, 6.0], 4), ([4.0, 6.0, 0.0], 5)):
        found = fit(model, torch.tensor([[5.0, 7.0, 3.0], second]))
        (edge,) = found.hyperparameter_covariance().edges
        assert (edge.name, edge.index, edge.end) == ("rows", index, pytest.approx(0.0, abs=1e-6))
        assert edge.value < 0.05
        assert edge.interval == (edge.end, pytest.approx(0.6 - 0.6 * math.exp(-1.9207 / 6.0), rel=1e-3))
        found.summary()
        assert f"rows[{index}] = " in capsys.readouterr().out
    assert moved([1.0, 0.0], [0.7, 0.3 - 1e-9]) == 1


OF_FIVE = torch.arange(12).repeat_interleave(5)


def slopes(x: Tensor, y: Tensor) -> None:
    """Random intercepts and slopes of twelve groups; the correlation of these is a hyperparameter of its own."""
    sd, sigma = positive("sd", torch.tensor([0.7, 0.5])), positive("sigma", 0.5)
    r = pyro.param("r", torch.tensor(0.1), constraint=constraints.interval(-1.0, 1.0))
    row = torch.stack([r, (1.0 - r * r).sqrt()])
    tril = torch.stack([sd[0] * torch.tensor([1.0, 0.0]), sd[1] * row])
    with pyro.plate("groups", 12):
        a = pyro.sample("a", dist.MultivariateNormal(torch.zeros(2), scale_tril=tril))
    with pyro.plate("data", 60):
        pyro.sample("y", dist.Normal(a[OF_FIVE, 0] + a[OF_FIVE, 1] * x, sigma), obs=y)


def of_slopes(x: Tensor, y: Tensor, numbers: Sequence[float]) -> float:
    """Oracle: the log likelihood of both scales, their correlation and the noise, effects integrated out."""
    first, second, r, sigma = numbers
    Z = torch.zeros(60, 24)
    Z[torch.arange(60), 2 * OF_FIVE], Z[torch.arange(60), 2 * OF_FIVE + 1] = 1.0, x
    covariance = torch.tensor([[first**2, first * second * r], [first * second * r, second**2]])
    V = sigma**2 * torch.eye(60) + Z @ torch.block_diag(*[covariance] * 12) @ Z.T
    return float(dist.MultivariateNormal(torch.zeros(60), V).log_prob(y))


def test_a_scale_of_slopes_near_zero_has_the_interval_of_its_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose correlation says nothing there, so that its interval is all of its range, and something further on."""
    generator, searches, search = torch.Generator().manual_seed(3), [], uncertainty.reached
    x = torch.randn(60, generator=generator)
    y = 0.8 * torch.randn(12, generator=generator)[OF_FIVE] + 0.5 * torch.randn(60, generator=generator)
    found = fit(slopes, x, y)
    monkeypatch.setattr(uncertainty, "reached", lambda *args: searches.append(args) or search(*args))
    ties, scale = sorted(found.hyperparameter_covariance().edges, key=lambda edge: edge.name)
    assert ties.name == "r" and ties.interval == (-1.0, pytest.approx(1.0, abs=1e-12))
    assert (scale.name, scale.index, scale.interval[0]) == ("sd", 1, 0.0)

    def fall(rest: Any) -> float:
        first, r, sigma = math.exp(rest[0]), math.tanh(rest[1]), math.exp(rest[2])
        return float(found.log_evidence) - of_slopes(x, y, (first, scale.interval[1], r, sigma))

    profile = minimize(fall, [-0.4, 0.0, -0.6], method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-6})
    assert profile.fun == pytest.approx(1.9207, abs=0.02)
    assert len(searches) < 50


def test_a_step_that_gains_nothing_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    state, tried = fit(mixed, *data()).state, list[object]()
    monkeypatch.setattr(uncertainty, "first_accepted", lambda step, *_, **__: tried.append(step))
    profile = uncertainty.ProfileState(state, "b", 0, torch.tensor([1]), torch.eye(1))
    assert profile.highest(float(state.theta[0]) + 1.0) is not None and len(tried) == 1


def test_the_summary_gives_standard_deviations(capsys: pytest.CaptureFixture[str]) -> None:
    found = fit(mixed, *data())
    found.summary()
    printed = capsys.readouterr().out
    for place, sd in enumerate(found.hyperparameter_covariance().sd["b"].tolist()):
        assert f" {sd:.4g} " in next(line for line in printed.splitlines() if f" b[{place}] " in line)


def test_what_is_pruned_has_none() -> None:
    def model(y: Tensor) -> None:
        alpha = positive("alpha", torch.ones(2))
        w = pyro.sample("w", dist.Normal(torch.zeros(2), alpha.rsqrt()).to_event(1))
        pyro.sample("y", dist.Normal(w.expand(y.shape), 1.0).to_event(2), obs=y)

    y = torch.tensor([3.0, 0.01]) + torch.tensor([[1.0], [-1.0]]).expand(2, 2)
    sd = fit(model, y).hyperparameter_covariance().sd["alpha"]
    assert sd.isnan().tolist() == [False, True]


def test_without_a_maximum_there_is_none() -> None:
    X, y = data()
    joint = LogJoint(mixed, (X, y))
    theta = joint.initial_theta + torch.tensor([0.0, 0.0, -9.0, -2.0])
    state = laplace_state(laplace_problem(joint), theta, joint.initial_u, cold=True)
    with pytest.raises(NotAMode, match="minus the Hessian of the log evidence"):
        hyperparameter_covariance(state)


def test_without_hyperparameters_it_is_empty() -> None:
    def model(y: Tensor) -> None:
        pyro.sample("y", dist.Normal(pyro.sample("w", dist.Normal(0.0, 1.0)), 1.0), obs=y)

    spread = fit(model, torch.tensor(1.0)).hyperparameter_covariance()
    assert spread.unconstrained.shape == spread.constrained.shape == (0, 0) and spread.sd == {}
