"""Gaussian processes in Pyro models: recognised, and equal to the dense path, to scikit-learn and to closed forms."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from sklearn.datasets import load_breast_cancer
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process import kernels as sk
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import LaplaceEvidence, LaplacePosterior, Start, Stop, gauss_newton
from pyro_evidence.datasets import ripley_train
from pyro_evidence.laplace import approximation, gradient
from pyro_evidence.laplace.approximation import laplace_state
from pyro_evidence.laplace.metric import information
from pyro_evidence.models.basis import Learned
from pyro_evidence.models.gp import gp_classifier, gp_poisson, gp_regression
from pyro_evidence.models.kernels import RBF, Linear, Matern32, Matern52, RationalQuadratic
from pyro_evidence.numerics.derivatives import pullback
from pyro_evidence.precision import gaussian_process as process
from pyro_evidence.precision.gaussian_process import LatentPrecision, WhitenedFactor
from pyro_evidence.program import LogJoint
from pyro_evidence.structure import density, groups, probes
from pyro_evidence.structure import recognise as structure

QUIET = Stop(progress=False)
Data = tuple[Tensor, Tensor]


def data(num_data: int = 14, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(num_data, 2, generator=generator)
    return X, (X.sum(-1) + 0.8 * torch.randn(num_data, generator=generator) > 0).double()


def covariance(X: Tensor) -> Tensor:
    scale = pyro.param("scale", torch.tensor(0.9), constraint=constraints.positive)
    amplitude = pyro.param("amplitude", torch.tensor(1.4), constraint=constraints.positive)
    return amplitude * (-0.5 * torch.cdist(X, X).square() / scale**2).exp() + 0.01 * torch.eye(len(X))


def by_hand(X: Tensor, t: Tensor) -> None:
    """As a user would write it."""
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(X)), covariance(X)))
    pyro.sample("t", dist.Bernoulli(logits=f).to_event(1), obs=t)


def by_cholesky(X: Tensor, t: Tensor) -> None:
    """The same by its factor, with an intercept that is a latent beside it."""
    level = pyro.sample("level", dist.Normal(0.3, 2.0))
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(X)), scale_tril=torch.linalg.cholesky(covariance(X))))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Poisson((f + level).exp()), obs=2.0 * t)


def two_processes(X: Tensor, t: Tensor) -> None:
    """A sum of two functions, one of them with a mean to learn, and noise to learn."""
    mean = pyro.param("mean", torch.tensor(0.2))
    noise = pyro.param("noise", torch.tensor(0.7), constraint=constraints.positive)
    f = pyro.sample("f", dist.MultivariateNormal(mean * torch.ones(len(X)), covariance(X)))
    K = 0.5 * X @ X.T + 0.1 * torch.eye(len(X))
    g = pyro.sample("g", dist.MultivariateNormal(torch.zeros(len(X)), K))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(f + 2.0 * g, noise), obs=t)


def repeated(X: Tensor, t: Tensor) -> None:
    """Several counts at some of the inputs, none at others."""
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(X)), covariance(X)))
    where = torch.tensor([0, 0, 1, 2, 3, 3, 5, 6])
    with pyro.plate("data", 8):
        pyro.sample("t", dist.Poisson(f[where].exp()), obs=t[where] + 1.0)


def robust(X: Tensor, t: Tensor) -> None:
    """Heavy tails: the likelihood is not log-concave."""
    noise = pyro.param("noise", torch.tensor(0.3), constraint=constraints.positive)
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(X)), covariance(X)))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.StudentT(4.0, f, noise), obs=X.sum(-1) + 6.0 * (torch.arange(len(X)) == 4))


def softmax(X: Tensor, t: Tensor) -> None:
    """Three classes, each with a function of its own."""
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(3, len(X)), covariance(X)).to_event(1))
    label = (t + (torch.arange(len(X)) % 3 == 0)).long()
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Categorical(logits=f.mT), obs=label)


def with_prior(X: Tensor, t: Tensor) -> None:
    """The lengthscale is a latent site."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    K = (-0.5 * torch.cdist(X, X).square() / scale**2).exp() + 0.01 * torch.eye(len(X))
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(X)), K))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=f), obs=t)


MODELS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (by_hand, by_cholesky, two_processes, repeated, robust, softmax)
}
MODELS |= {
    "gp_regression": gp_regression(RBF(torch.ones(2)), jitter=1e-2),
    "gp_classifier": gp_classifier(Matern32() + Linear(0.5), jitter=1e-2),
    "gp_softmax": gp_classifier(RBF(), num_classes=3, mean=Learned(0.1), jitter=1e-2),
    "gp_poisson": gp_poisson(RationalQuadratic(), jitter=1e-2),
}
each_model = pytest.mark.parametrize("name", MODELS)


def problems(model: Callable[..., Any], maximise: Any = None) -> tuple[approximation.Problem, approximation.Problem]:
    """The problem as it is solved, and by autograd alone."""
    X, t = data()
    at = approximation.laplace_problem(LogJoint(model, (X, t), maximise=maximise))
    assert at.latent is not None, "not recognised"
    return at, replace(at, structure=replace(at.structure, known=None))


@each_model
def test_state_and_gradient_are_those_of_the_dense_path(name: str) -> None:
    ours, dense = problems(MODELS[name])
    theta, start = ours.joint.initial_theta + 0.1, ours.joint.initial(1, seed=0)[0]
    a, b = (approximation.laplace_state(at, theta, start, cold=True) for at in (ours, dense))
    assert isinstance(a.precision, LatentPrecision)
    for get in ("u", "log_joint", "log_evidence"):
        torch.testing.assert_close(getattr(a, get), getattr(b, get), rtol=1e-8, atol=1e-8)
    for number in ("log_det", "variance", "log_det_gradient"):
        torch.testing.assert_close(getattr(a.precision, number), getattr(b.precision, number), rtol=1e-7, atol=1e-8)
    v = torch.linspace(-1.0, 1.0, len(a.u)).unsqueeze(0)
    torch.testing.assert_close(a.precision.solve(v), b.precision.solve(v), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(gradient.slope(a).total, gradient.slope(b).total, rtol=1e-6, atol=1e-7)
    every = torch.ones(len(a.u), dtype=torch.bool)
    torch.testing.assert_close(
        a.precision.least_precise_direction(every).abs(),
        b.precision.least_precise_direction(every).abs(),
        rtol=0.3,
        atol=0.05,
    )


@each_model
def test_square_roots_of_the_posterior_covariance(name: str) -> None:
    at, _ = problems(MODELS[name])
    state = approximation.laplace_state(at, at.joint.initial_theta, at.joint.initial(1, seed=0)[0], cold=True)
    assert isinstance(state.precision, LatentPrecision)
    root = state.precision.unwhiten(torch.eye(len(state.u)))
    torch.testing.assert_close(root.mT @ root, state.precision.log_det_gradient[0], rtol=1e-8, atol=1e-9)
    tril = state.precision.scale_tril
    torch.testing.assert_close(tril @ tril.mT, state.precision.log_det_gradient[0], rtol=1e-8, atol=1e-9)
    assert bool((tril.diagonal() > 0).all()) and bool((tril.triu(1) == 0).all())


@each_model
def test_the_density_is_the_models(name: str) -> None:
    ours, dense = problems(MODELS[name])
    u = ours.joint.initial(3, seed=1)
    assert ours.structure.latent is not None
    for f in ("log_joint", "precision", "precision_diagonal"):
        a, b = (getattr(at.structure.fastest, f)(u, at.joint.initial_theta) for at in (ours, dense))
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-8, atol=1e-8)


def test_a_latent_hyperparameter_is_maximised_with_its_prior_or_integrated_by_the_general_path() -> None:
    X, t = data()
    posterior = LaplaceEvidence(with_prior, maximise=["scale"], stop=QUIET).run(X, t)
    assert posterior.state.problem.latent is not None
    found = float(posterior.hyperparameters["scale"])

    def height(scale: float) -> float:
        fixed = poutine.condition(with_prior, data={"scale": torch.tensor(scale)})
        return float(LaplaceEvidence(fixed, stop=QUIET).run(X, t).log_evidence)  # an observed site: its prior counts

    assert height(found) > max(height(0.98 * found), height(1.02 * found))
    assert height(found) == pytest.approx(float(posterior.log_hyperposterior), abs=1e-8)
    both = approximation.laplace_problem(LogJoint(with_prior, (X, t)))
    assert both.latent is None  # the covariance depends on another latent


def test_other_curvatures_and_masked_sites_go_the_general_way() -> None:
    X, t = data()
    joint = LogJoint(by_hand, (X, t))
    assert approximation.laplace_problem(joint, gauss_newton).latent is not None
    assert approximation.laplace_problem(joint, lambda density, u, theta: density.precision(u, theta)).latent is None
    state = LaplaceEvidence(by_hand, maximise=(), stop=QUIET).run(X, t).state
    general = LaplaceEvidence(
        by_hand, maximise=(), stop=QUIET, curvature=lambda density, u, theta: density.precision(u, theta)
    ).run(X, t)
    torch.testing.assert_close(state.log_evidence, general.log_evidence, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_regression_is_scikit_learns_value_and_gradient(seed: int) -> None:
    X, _ = data(40, seed)
    y = X.sum(-1).sin() + 0.3 * X[:, 0]
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(4, generator=generator)
    kernel = RBF(Learned(start[1:3].exp()), Learned(start[0].exp()))
    joint = LogJoint(gp_regression(kernel, beta=Learned((-start[3]).exp()), jitter=1e-8), (X, y))
    at = approximation.laplace_problem(joint)
    state = approximation.laplace_state(at, joint.initial_theta, joint.initial_u)
    rival = sk.ConstantKernel(1.0) * sk.RBF([1.0, 1.0]) + sk.WhiteKernel(1.0)
    machine = GaussianProcessRegressor(rival, alpha=1e-8, optimizer=None).fit(X.numpy(), y.numpy())
    value, slope = machine.log_marginal_likelihood(start.numpy(), eval_gradient=True)
    assert float(state.log_evidence) == pytest.approx(value, rel=1e-8, abs=1e-8)
    found = gradient.slope(state).total  # beta, both lengthscales, variance
    expected = torch.from_numpy(slope)[[3, 1, 2, 0]] * torch.tensor([-1.0, 1.0, 1.0, 1.0])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


SETS = ("ripley", "breast cancer")


def data_set(name: str, request: pytest.FixtureRequest) -> Data:
    """A third of Ripley's training set, or a quarter of the breast cancer data."""
    if name == "ripley":
        request.getfixturevalue("data_dir")  # skips where there is none
        ripley = ripley_train()
        return ripley.X[::3].double(), ripley.t[::3].double()
    X, t = load_breast_cancer(return_X_y=True)
    X = (X - X.mean(0)) / X.std(0)
    return torch.from_numpy(X[::4]), torch.from_numpy(t[::4]).double()


RIVALS = {
    "RBF": (lambda v, s: RBF(s, v), lambda: 1.0 * sk.RBF(1.0)),
    "Matern 3/2": (lambda v, s: Matern32(s, v), lambda: 1.0 * sk.Matern(1.0, nu=1.5)),
    "Matern 5/2": (lambda v, s: Matern52(s, v), lambda: 1.0 * sk.Matern(1.0, nu=2.5)),
}


def settled(machine: Any, theta: np.ndarray) -> tuple[float, np.ndarray]:
    """scikit-learn stops Newton 1e-10 nats from the mode; called again it goes on from where it was."""
    machine.base_estimator_.warm_start, machine.base_estimator_.max_iter_predict = True, 300
    machine.base_estimator_.f_cached = np.zeros(len(machine.base_estimator_.y_train_))
    for _ in range(4):
        found = machine.log_marginal_likelihood(theta, eval_gradient=True, clone_kernel=False)
    return found


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", RIVALS)
def test_classification_is_scikit_learns_value_and_gradient(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    X, t = data_set(name, request)
    ours, theirs = RIVALS[kind]
    model = gp_classifier(ours(Learned(), Learned()), jitter=1e-10)
    at = approximation.laplace_problem(LogJoint(model, (X, t)))
    machine = GaussianProcessClassifier(theirs(), optimizer=None).fit(X.numpy(), t.numpy())
    rng = np.random.default_rng(1)
    for _ in range(4):
        theta = rng.normal(0.5, 1.0, 2)  # log variance, log lengthscale
        value, slope = settled(machine, theta)
        state = approximation.laplace_state(at, torch.from_numpy(theta[::-1].copy()), at.joint.initial_u)
        assert float(state.log_evidence) == pytest.approx(value, abs=1e-6)
        torch.testing.assert_close(
            gradient.slope(state).total, torch.from_numpy(slope[::-1].copy()), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("name", SETS)
def test_maximised_evidence_is_at_least_scikit_learns(name: str, request: pytest.FixtureRequest) -> None:
    X, t = data_set(name, request)
    start = {"ripley": 1.0, "breast cancer": 5.0}[name]
    posterior = LaplaceEvidence(gp_classifier(RBF(Learned(start)), jitter=1e-10), stop=QUIET).run(X, t)
    machine = GaussianProcessClassifier(1.0 * sk.RBF(start)).fit(X.numpy(), t.numpy())
    assert float(posterior.log_evidence) > machine.log_marginal_likelihood_value_ - 1e-6
    assert posterior.diagnostics(num_samples=200)["gradient_norm"] < 1e-6


def test_a_saved_posterior_loads(tmp_path: Path) -> None:
    X, t = data()
    model = gp_classifier(RBF())
    posterior = LaplaceEvidence(model, stop=QUIET).run(X, t)
    posterior.save(tmp_path / "gp.pt")
    loaded = LaplacePosterior.load(tmp_path / "gp.pt", model)
    torch.testing.assert_close(loaded.get_samples(5, seed=1), posterior.get_samples(5, seed=1))


def test_restarts_of_a_concave_posterior_are_one_mode() -> None:
    X, t = data()
    posterior = LaplaceEvidence(by_hand, start=Start(restarts=3), stop=QUIET).run(X, t)
    assert posterior.restarts.shape == (3,) and float(posterior.restarts.std()) == 0.0


def test_a_kept_prior_is_not_used_for_other_numbers() -> None:
    X, t = data()
    model = gp_classifier(RBF(Learned(0.7), Learned(1.5)), jitter=1e-2)
    at = approximation.laplace_problem(LogJoint(model, (X, t)))
    fresh = [
        approximation.laplace_problem(LogJoint(gp_classifier(RBF(Learned(0.7), Learned(1.5)), jitter=1e-2), (Y, t)))
        for Y in (X, 1.1 * X)
    ]
    theta = torch.tensor([0.3, -0.2])
    for _ in range(2):
        for move in (0.0, 0.5):
            a, b = (approximation.laplace_state(p, theta + move, p.joint.initial_u) for p in (at, fresh[0]))
            torch.testing.assert_close(a.log_evidence, b.log_evidence, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        X.mul_(1.1)  # in place
    a = approximation.laplace_state(approximation.laplace_problem(LogJoint(model, (X, t))), theta, at.joint.initial_u)
    b = approximation.laplace_state(fresh[1], theta, at.joint.initial_u)
    torch.testing.assert_close(a.log_evidence, b.log_evidence, rtol=1e-12, atol=1e-12)


def test_an_outlier_under_heavy_tails_has_negative_curvature() -> None:
    at, _ = problems(robust)
    state = approximation.laplace_state(at, at.joint.initial_theta, at.joint.initial(1, seed=0)[0], cold=True)
    assert isinstance(state.precision, LatentPrecision) and isinstance(state.precision.mode.factor, WhitenedFactor)


def test_a_process_is_recognised_however_large_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "SMALL_JACOBIAN", 1)
    monkeypatch.setattr(structure, "DENSER_THAN_DATA", 0)
    for name in ("by_hand", "softmax", "two_processes"):
        assert approximation.laplace_problem(LogJoint(MODELS[name], data())).latent is not None


def test_few_evaluations_find_the_hyperparameters(monkeypatch: pytest.MonkeyPatch) -> None:
    X, t = data(60)
    calls, search = list[Tensor](), approximation.laplace_state

    def counted(at: Any, theta: Tensor, start: Tensor, **how: bool) -> Any:
        calls.append(theta)
        return search(at, theta, start, **how)

    monkeypatch.setattr(approximation, "laplace_state", counted)
    LaplaceEvidence(gp_classifier(RBF()), stop=QUIET).run(X, t)
    assert 3 < len(calls) < 25


def noisy(X: Tensor, t: Tensor, shared: bool) -> None:
    """A noise precision to learn, which may be the precision of the function as well."""
    beta = pyro.param("beta", torch.tensor(1.3), constraint=constraints.positive)
    K = (-0.5 * torch.cdist(X, X).square()).exp() + 0.01 * torch.eye(len(X))
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(X)), K / beta if shared else K))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(f, beta.rsqrt()), obs=t)


@pytest.mark.parametrize("shared", [True, False])
def test_the_slope_that_a_group_is_judged_by_is_that_of_the_log_joint(shared: bool) -> None:
    X, t = data()
    joint = LogJoint(noisy, (X, t, shared))
    near, wanted = probes.near(joint), torch.tensor([True])
    assert near is not None
    expected = pullback(near.typical.log_joint, near.typical.theta)
    torch.testing.assert_close(groups._slope(near.typical, wanted), expected, rtol=1e-10, atol=1e-10)
    assert (approximation.laplace_problem(joint).structure.groups is None) == shared


def bent(X: Tensor, t: Tensor) -> None:
    """Numbers of any sign: in the mean of the function, in heavy-tailed noise, and in the covariance."""
    level, noise, turn = (pyro.param(n, torch.tensor(x)) for n, x in (("level", 0.4), ("noise", -0.3), ("turn", 0.7)))
    K = (1.0 + turn**2) * (-0.5 * torch.cdist(X, X).square()).exp() + 0.01 * torch.eye(len(X))
    f = pyro.sample("f", dist.MultivariateNormal(level.sin() * X[:, 0] + level**2, K))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.StudentT(4.0, f + noise * X[:, 1], noise.exp()), obs=t)


@pytest.mark.parametrize("names", [["level"], ["level", "noise"], ["turn", "level"]])
def test_information_about_real_numbers_is_that_of_the_dense_path(names: list[str]) -> None:
    ours, dense = problems(bent)
    theta, start = ours.joint.initial_theta + 0.1, ours.joint.initial(1, seed=0)[0]
    index = torch.tensor([ours.joint.hypers.slices[n].start for n in names])
    found, expected = (information(laplace_state(at, theta, start, cold=True), index) for at in (ours, dense))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)


def test_a_mean_is_learned_without_a_derivative_of_a_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    at, _ = problems(gp_regression(RBF(), mean=Learned(0.5)))
    state = laplace_state(at, at.joint.initial_theta, at.joint.initial_u)
    monkeypatch.setattr(type(at.density), "log_joint", None)
    mean = at.joint.hypers.slices["mean"].start
    assert float(information(state, torch.tensor([mean]))) > 0.0


def test_the_mode_of_labels_is_found_by_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    at, dense = problems(gp_classifier(RBF(), jitter=1e-2))
    laplace_state(at, at.joint.initial_theta, at.joint.initial_u)  # where the formula is recognised
    expected = laplace_state(dense, at.joint.initial_theta + 0.3, at.joint.initial_u)
    monkeypatch.setattr(density, "slope_and_curvature", None)
    monkeypatch.setattr(process, "slope_and_curvature", None)
    state = laplace_state(at, at.joint.initial_theta + 0.3, at.joint.initial_u)
    torch.testing.assert_close(state.log_evidence, expected.log_evidence, rtol=1e-9, atol=1e-9)


def test_no_factors_are_looked_for_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "_factors", None)
    assert approximation.laplace_problem(LogJoint(gp_classifier(RBF()), data(structure.SMALL + 1))).latent is not None


def test_no_variance_is_computed_where_no_weight_has_a_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, LatentPrecision] = {}  # each keeps what it has computed
    variance = LatentPrecision.variance.func  # type: ignore[attr-defined]

    def counted(precision: LatentPrecision) -> Tensor:
        asked[id(precision)] = precision
        return variance(precision)

    monkeypatch.setattr(LatentPrecision, "variance", property(counted))
    LaplaceEvidence(gp_regression(RBF()), stop=QUIET).run(*data(40))
    assert len(asked) <= 2  # where the search begins and ends, for the look around the mode
