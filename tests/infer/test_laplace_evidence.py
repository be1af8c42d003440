"""LaplaceEvidence against closed forms, other programs and itself by another route."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, NotConverged, Start, Status, Stop, exact_hessian, gauss_newton
from pyro_evidence.fitting.iterate import iterate
from pyro_evidence.laplace import approximation, type2
from pyro_evidence.program import LogJoint
from tests.models_for_tests.engine_models import (
    classes,
    curve,
    hierarchical,
    linear,
    logistic_ard,
    logistic_noncentred,
    logistic_sd,
    logistic_shared,
    mixture,
    network,
    targets,
    two_clusters,
)


def exact_log_evidence(X: Tensor, y: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Oracle: the weights of a linear-Gaussian model integrated out on paper."""
    covariance = torch.eye(len(y)) / beta + X @ X.T / alpha
    return dist.MultivariateNormal(torch.zeros(len(y)), covariance).log_prob(y)


def fixed_logistic(X: Tensor, t: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def test_log_evidence_is_exact_for_a_linear_gaussian_model() -> None:
    X, y = targets()
    posterior = LaplaceEvidence(linear, maximise=()).run(X, y)
    expected = exact_log_evidence(X, y, torch.tensor(1.0), torch.tensor(1.0))
    torch.testing.assert_close(posterior.log_evidence, expected, rtol=1e-12, atol=1e-10)


def test_learned_hyperparameters_are_the_optimum_of_the_exact_evidence() -> None:
    X, y = targets()
    posterior = LaplaceEvidence(linear).run(X, y)
    logs = [posterior.hyperparameters[n].log().requires_grad_() for n in ("alpha", "beta")]
    expected = exact_log_evidence(X, y, logs[0].exp(), logs[1].exp())
    torch.testing.assert_close(posterior.log_evidence, expected.detach(), rtol=1e-12, atol=1e-10)
    for slope in torch.autograd.grad(expected, logs):
        assert abs(float(slope)) < 1e-6


def test_diabetes_equals_bayesian_ridge() -> None:
    sklearn = pytest.importorskip("sklearn")
    data = sklearn.datasets.load_diabetes()
    X, y = data.data, data.target - data.target.mean()
    settings = {"alpha_1": 0, "alpha_2": 0, "lambda_1": 0, "lambda_2": 0, "tol": 1e-13, "max_iter": 10_000}
    ridge = sklearn.linear_model.BayesianRidge(fit_intercept=False, compute_score=True, **settings).fit(X, y)
    posterior = LaplaceEvidence(linear).run(torch.tensor(X), torch.tensor(y))
    assert float(posterior.hyperparameters["alpha"]) == pytest.approx(ridge.lambda_, rel=1e-6)
    assert float(posterior.hyperparameters["beta"]) == pytest.approx(ridge.alpha_, rel=1e-6)
    assert float(posterior.log_evidence) == pytest.approx(ridge.scores_[-1], rel=1e-12)


def test_weak_signal_alpha_is_the_evidence_optimum_not_the_joint_mode() -> None:
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(40, 20, generator=generator)
    y = X @ (0.3 * torch.randn(20, generator=generator)) + torch.randn(40, generator=generator)

    def model(X: Tensor, y: Tensor) -> None:
        alpha = pyro.param("alpha", lambda: torch.tensor(1.0), constraint=dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(0.0, alpha.rsqrt()).expand([20]).to_event(1))
        pyro.sample("y", dist.Normal(X @ w, 1.0).to_event(1), obs=y)

    alpha = LaplaceEvidence(model).run(X, y).hyperparameters["alpha"]
    grid = torch.linspace(math.log(float(alpha)) - 1.0, math.log(float(alpha)) + 1.0, 2001)
    heights = torch.stack([exact_log_evidence(X, y, a.exp(), torch.tensor(1.0)) for a in grid])
    assert float(alpha.log() - grid[heights.argmax()]) == pytest.approx(0.0, abs=1e-3)


def test_pima_log_evidence(data_dir) -> None:  # type: ignore[no-untyped-def]
    from pyro_evidence.datasets import pima

    data = pima()
    X = (data.X - data.X.mean(0)) / data.X.std(0, correction=0)
    X = torch.cat([X, torch.ones(len(X), 1)], -1)
    posterior = LaplaceEvidence(fixed_logistic).run(X, data.t)
    assert float(posterior.log_evidence) == pytest.approx(-383.9206, abs=1e-4)  # three other programs agree on it
    found = posterior.diagnostics(num_samples=20_000)
    assert found["pareto_k"] < 0.5
    assert abs(found["log_evidence_importance"] + 383.882) < 0.002 + 4 * found["log_evidence_importance_se"]


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (linear, targets()),
        (logistic_ard, classes(120)),
        (logistic_shared, classes()),
        (network, curve()),
        (mixture, (two_clusters(),)),
    ],
)
def test_mackays_metric_and_the_plain_gradient_agree_at_convergence(model, data) -> None:  # type: ignore[no-untyped-def]
    joint = LogJoint(model, data)
    at = approximation.laplace_problem(joint)
    assert at.structure.groups is not None
    plain = replace(at, structure=replace(at.structure, groups=None))
    start = joint.initial(1, seed=0)[0]
    stop = Stop(gradient_tolerance=1e-7, num_steps=300, progress=False)
    fits = [
        iterate(
            type2.step,
            type2.type2_state(approximation.laplace_state(p, joint.initial_theta, start, cold=True)),
            stop,
            "x",
        )
        for p in (at, plain)
    ]
    assert [f.status for f in fits] == [Status.CONVERGED] * 2
    assert fits[0].state.objective == pytest.approx(fits[1].state.objective, abs=1e-8)
    torch.testing.assert_close(fits[0].state.laplace.theta, fits[1].state.laplace.theta, rtol=1e-5, atol=1e-5)


def test_fixed_point_of_mackay_holds_exactly_for_gaussian_noise() -> None:
    X, y = targets()
    posterior = LaplaceEvidence(linear).run(X, y)
    w, gamma = posterior.mode["w"], posterior.gamma["alpha"]
    torch.testing.assert_close(posterior.hyperparameters["alpha"], gamma / w.square().sum(), rtol=1e-6, atol=0.0)
    noise = (len(y) - gamma) / (y - X @ w).square().sum()
    torch.testing.assert_close(posterior.hyperparameters["beta"], noise, rtol=1e-6, atol=0.0)


def test_parametrisation_changes_nothing() -> None:
    """Law: precisions, standard deviations, and a non-centred site are one model."""
    X, t = classes()
    by_precision, by_sd = LaplaceEvidence(logistic_ard).run(X, t), LaplaceEvidence(logistic_sd).run(X, t)
    torch.testing.assert_close(
        by_precision.hyperparameters["alpha"].rsqrt(), by_sd.hyperparameters["sd"], rtol=1e-5, atol=0.0
    )
    assert float(by_precision.log_evidence) == pytest.approx(float(by_sd.log_evidence), abs=1e-9)
    centred, noncentred = (
        LaplaceEvidence(logistic_shared).run(X, t),
        LaplaceEvidence(logistic_noncentred).run(X, t),
    )
    assert float(centred.log_evidence) == pytest.approx(float(noncentred.log_evidence), abs=1e-9)
    torch.testing.assert_close(
        centred.hyperparameters["alpha"], noncentred.hyperparameters["alpha"], rtol=1e-5, atol=0.0
    )


def test_rescaled_targets_move_the_log_evidence_by_n_log_c() -> None:
    X, y = targets()
    plain, scaled = LaplaceEvidence(linear).run(X, y), LaplaceEvidence(linear).run(X, 1000.0 * y)
    shift = float(plain.log_evidence - scaled.log_evidence)
    assert shift == pytest.approx(len(y) * math.log(1000.0), abs=1e-7)
    torch.testing.assert_close(scaled.hyperparameters["beta"] * 1e6, plain.hyperparameters["beta"], rtol=1e-5, atol=0.0)


def test_type_ii_map_counts_the_prior_of_the_site() -> None:
    """Oracle: a fine grid over the latent scale, each held by conditioning."""
    X, t = classes()
    posterior = LaplaceEvidence(hierarchical, maximise=["tau"]).run(X, t)
    tau = posterior.hyperparameters["tau"]
    grid = float(tau) * torch.linspace(0.9, 1.1, 41)
    heights = []
    for value in grid:
        held = LaplaceEvidence(pyro.poutine.condition(hierarchical, {"tau": value})).run(X, t).log_evidence
        heights.append(float(held))  # the conditioned site counts as data: its prior is in the joint
    assert abs(int(torch.tensor(heights).argmax()) - 20) <= 1
    assert float(posterior.log_hyperposterior) == pytest.approx(max(heights), abs=1e-4)
    prior = dist.HalfNormal(2.0).log_prob(tau)
    torch.testing.assert_close(posterior.log_hyperposterior - posterior.log_evidence, prior)


def test_an_irrelevant_input_is_pruned_by_a_mask() -> None:
    generator = torch.Generator().manual_seed(5)
    X, y = targets(200)
    noise = torch.randn(200, 3, generator=generator)

    def model(X: Tensor, y: Tensor) -> None:
        alpha = pyro.param("alpha", lambda: torch.ones(7), constraint=dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(0.0, alpha.rsqrt()).to_event(1))
        pyro.sample("y", dist.Normal(X @ w, 0.3).to_event(1), obs=y)

    posterior = LaplaceEvidence(model).run(torch.cat([X, noise], -1), y)
    pruned = posterior.pruned["w"]
    assert not bool(pruned[:4].any())
    kept = torch.cat([X, noise], -1)[:, ~pruned]
    alpha = posterior.hyperparameters["alpha"]
    covariance = 0.09 * torch.eye(200) + kept @ torch.diag(1.0 / alpha[~pruned]) @ kept.T
    expected = dist.MultivariateNormal(torch.zeros(200), covariance).log_prob(y)
    torch.testing.assert_close(posterior.log_evidence, expected, rtol=1e-12, atol=1e-9)
    assert bool(pruned.any()) and bool(alpha[pruned].isinf().all())
    assert bool((posterior.mode["w"][pruned] == 0).all()) and bool((posterior.gamma["alpha"][pruned] == 0).all())


def test_pruning_follows_the_sign_of_the_slope_at_infinite_precision() -> None:
    """Oracle: with orthogonal inputs the best precision is infinite iff (x'y)^2 beta <= x'x (Faul and Tipping 2002)."""
    generator = torch.Generator().manual_seed(0)
    X = torch.linalg.qr(torch.randn(50, 30, generator=generator)).Q
    y = torch.randn(50, generator=generator)

    def model(X: Tensor, y: Tensor) -> None:
        alpha = pyro.param("alpha", lambda: torch.ones(30), constraint=dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(0.0, alpha.rsqrt()).to_event(1))
        pyro.sample("y", dist.Normal(X @ w, 1.0).to_event(1), obs=y)

    posterior = LaplaceEvidence(model, stop=Stop(gradient_tolerance=1e-9)).run(X, y)
    projection = (X.T @ y).square()
    assert torch.equal(posterior.pruned["w"], projection <= 1.0)
    expected = 1.0 / (projection - 1.0)[projection > 1.0]  # the optimum in closed form
    torch.testing.assert_close(posterior.hyperparameters["alpha"][projection > 1.0], expected, rtol=1e-4, atol=0.0)


def test_gauss_newton_equals_the_exact_hessian_for_linear_predictors() -> None:
    X, t = classes()
    exact = LaplaceEvidence(logistic_ard, curvature=exact_hessian).run(X, t)
    other = LaplaceEvidence(logistic_ard, curvature=gauss_newton).run(X, t)
    torch.testing.assert_close(exact.log_evidence, other.log_evidence)


def test_step_descends_and_arrives_where_run_arrives() -> None:
    X, t = classes()
    engine = LaplaceEvidence(logistic_ard)
    losses = [engine.step(X, t) for _ in range(40)]
    assert isinstance(losses[0], float)
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(losses))
    expected = LaplaceEvidence(logistic_ard).run(X, t)
    assert -losses[-1] == pytest.approx(float(expected.log_evidence), abs=1e-7)
    torch.testing.assert_close(engine.posterior.mode["w"], expected.mode["w"], rtol=1e-4, atol=1e-6)


def test_running_out_of_steps_is_loud_and_keeps_the_posterior() -> None:
    X, t = classes()
    with pytest.raises(NotConverged, match="raise num_steps") as caught:
        LaplaceEvidence(logistic_ard, stop=Stop(num_steps=2)).run(X, t)
    kept = caught.value.posterior
    with pytest.warns(UserWarning, match="raise num_steps"):
        quiet = LaplaceEvidence(logistic_ard, stop=Stop(num_steps=2, throw=False)).run(X, t)
    torch.testing.assert_close(kept.log_evidence, quiet.log_evidence)  # type: ignore[attr-defined]
    assert "ran out of steps" in quiet.status and len(quiet.log_evidences) == 3


def test_interruption_keeps_the_last_good_state(monkeypatch: pytest.MonkeyPatch) -> None:
    X, t = classes()
    original, calls = type2.step, []

    def impatient(state):  # type: ignore[no-untyped-def]
        calls.append(state)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(state)

    monkeypatch.setattr(type2, "step", impatient)
    with pytest.warns(UserWarning, match="last good state"):
        posterior = LaplaceEvidence(logistic_ard).run(X, t)
    assert len(posterior.log_evidences) == 3 and "interrupted" in posterior.status
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="ran out of steps"):
        expected = LaplaceEvidence(logistic_ard, stop=Stop(num_steps=2, throw=False)).run(X, t)
    torch.testing.assert_close(posterior.log_evidence, expected.log_evidence)


def test_equal_data_go_on_and_other_data_begin_anew() -> None:
    X, t = classes()
    engine = LaplaceEvidence(logistic_ard)
    losses = [engine.step(X.clone(), t=t.clone()) for _ in range(4)]
    assert losses[3] < losses[2] < losses[1] < losses[0]
    assert engine.step(X.flip(0), t=t.flip(0)) == pytest.approx(losses[0])


def test_nothing_global_is_touched() -> None:
    X, t = classes()
    pyro.param("other", torch.tensor(3.0))
    random_state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    posterior = LaplaceEvidence(logistic_ard, start=Start(restarts=3)).run(X, t)
    posterior.get_samples(5)
    posterior.diagnostics(500)
    assert torch.equal(random_state, torch.get_rng_state()) and torch.get_default_dtype() == dtype
    assert list(pyro.get_param_store().keys()) == ["other"]


def test_a_stored_value_is_the_start_and_hyper_empty_holds_it() -> None:
    X, t = classes()
    pyro.get_param_store().setdefault("alpha", torch.full((4,), 3.0), dist.constraints.positive)
    held = LaplaceEvidence(logistic_ard, maximise=()).run(X, t)
    torch.testing.assert_close(held.hyperparameters["alpha"], torch.full((4,), 3.0))
    assert held.log_evidences == (float(held.log_evidence),)


def test_float32_data_give_a_float32_posterior() -> None:
    X, t = (v.float() for v in classes(200))
    torch.set_default_dtype(torch.float32)
    try:
        posterior = LaplaceEvidence(logistic_shared).run(X, t)
    finally:
        torch.set_default_dtype(torch.float64)
    exact = LaplaceEvidence(logistic_shared).run(X.double(), t.double())
    assert posterior.mode["w"].dtype == torch.float32
    assert float(posterior.log_evidence) == pytest.approx(float(exact.log_evidence), abs=1e-3)


def small_groups(y: Tensor) -> None:
    """A site of one group for each column; one scale is maximised with its prior."""
    scale = pyro.sample("scale", dist.LogNormal(y.new_zeros(()), 1.0))
    loc = pyro.sample("loc", dist.Normal(y.new_zeros(()), 2.0))
    a = pyro.sample("a", dist.Normal(loc, scale).expand([y.shape[-1]]).to_event(1))
    pyro.sample("y", dist.Poisson(a.exp()).expand(y.shape).to_event(2), obs=y)


def test_single_precision_takes_no_more_work_than_double(monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.poisson(torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(20, 4), generator=torch.Generator().manual_seed(0))
    calls, evidences = [], []
    plain = LogJoint.density
    for dtype in (torch.float64, torch.float32):
        counted: list[int] = []

        def density(self: LogJoint, *args: Any, counted: list[int] = counted) -> Tensor:
            counted.append(1)
            return plain(self, *args)

        monkeypatch.setattr(LogJoint, "density", density)
        found = LaplaceEvidence(small_groups, maximise=["scale"], stop=Stop(progress=False)).run(y.to(dtype))
        calls.append(len(counted))
        evidences.append(float(found.log_evidence))
    assert evidences[1] == pytest.approx(evidences[0], abs=1e-3)
    assert calls[1] <= 2 * calls[0]


def rounded_inside(y: Tensor) -> None:
    """A product that torch rounds to single precision."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    pyro.sample("y", dist.Bernoulli(logits=(w.float() * 3.0).double()).expand(y.shape).to_event(2), obs=y)


def test_a_mode_at_the_rounding_of_its_model_is_one() -> None:
    y = torch.bernoulli(torch.full((200, 3), 0.3), generator=torch.Generator().manual_seed(0))
    found = LaplaceEvidence(rounded_inside, stop=Stop(progress=False)).run(y)

    def exact(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("y", dist.Bernoulli(logits=w * 3.0).expand(y.shape).to_event(2), obs=y)

    expected = LaplaceEvidence(exact, stop=Stop(progress=False)).run(y)
    assert float(found.log_evidence) == pytest.approx(float(expected.log_evidence), abs=1e-4)
