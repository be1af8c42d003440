"""The posterior as a Pyro guide, and the model that goes with it, wherever Pyro takes the two."""

import pickle
from typing import Any

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, Importance, Predictive, Trace_ELBO, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.infer.importance import vectorized_importance_weights
from torch import Tensor
from torch.distributions import MultivariateNormal, constraints

from pyro_evidence import LaplaceEvidence, LaplacePosterior, diagonal
from tests.models_for_tests.posterior_models import (
    Module,
    assert_approx,
    assert_exact,
    fitted_linear,
    fitted_logistic,
    fitted_mixture,
    fitted_supports,
    inputs,
    linear,
    linear_log_evidence,
    linear_posterior,
    many_supports,
    mixture_data,
    regression_data,
    supports_data,
    two_sites,
    unskewed,
)


def traced(posterior: LaplacePosterior, *args: Tensor) -> tuple[Any, Any]:
    """One draw of the guide, and the model at it."""
    guide = poutine.trace(posterior.guide).get_trace(*args)
    return guide, poutine.trace(poutine.replay(posterior.model, trace=guide)).get_trace(*args)


def log_ratio(posterior: LaplacePosterior, u: Tensor) -> Tensor:
    """Oracle: the log joint over a multivariate normal of torch's, both in unconstrained space."""
    state = posterior.state
    gaussian = MultivariateNormal(posterior._about_mean.u, covariance_matrix=state.precision.log_det_gradient[0])
    return state.problem.joint.log_joint(u, state.theta) - gaussian.log_prob(u)


def test_density_of_a_draw_counts_every_jacobian() -> None:
    posterior = unskewed(fitted_supports())
    for _ in range(3):
        guide, model = traced(posterior, *supports_data())
        u = guide.nodes["_laplace_latent"]["value"]
        assert_exact(model.log_prob_sum() - guide.log_prob_sum(), log_ratio(posterior, u))


def test_sites_are_in_the_plates_of_the_model() -> None:
    guide, model = traced(fitted_supports(), *supports_data())
    for name in fitted_supports().mode:
        frames = [[(f.name, f.dim, f.size) for f in t.nodes[name]["cond_indep_stack"]] for t in (guide, model)]
        assert frames[0] == frames[1]
        assert guide.nodes[name]["fn"].event_dim == model.nodes[name]["fn"].event_dim
    assert guide.nodes["_laplace_latent"]["infer"]["is_auxiliary"]


def test_a_call_returns_every_integrated_site_and_looks_at_no_argument() -> None:
    guide = fitted_linear().guide
    torch.manual_seed(0)
    first = guide(*regression_data())
    torch.manual_seed(0)
    assert_exact(guide()["w"], first["w"])
    assert first.keys() == {"w"}


def test_draws_have_the_closed_forms_covariance() -> None:
    mean, covariance = linear_posterior(*regression_data())
    latent = poutine.trace(fitted_linear().guide).get_trace().nodes["_laplace_latent"]["fn"]
    assert_approx(latent.mean, mean)
    assert_exact(latent.covariance_matrix, covariance)


def test_a_diagonal_posterior_makes_a_diagonal_guide() -> None:
    X, t = regression_data()
    posterior = LaplaceEvidence(linear, maximise=(), curvature=diagonal).run(X, t)
    latent = poutine.trace(posterior.guide).get_trace().nodes["_laplace_latent"]["fn"]
    assert posterior.guide.gaussian.base_dist.scale.shape == (
        2,
    )  # a matrix would not fit where a diagonal is asked for
    assert_exact(latent.variance, 1.0 / (0.5 + 4.0 * X.square().sum(0)))


def test_masked_out_it_costs_no_density() -> None:
    guide = fitted_supports().guide
    with poutine.mask(mask=False):
        trace = poutine.trace(guide).get_trace()
    assert float(trace.nodes["probs"]["fn"].log_density) == 0.0
    assert float(trace.log_prob_sum()) == 0.0


def test_predictions_for_new_inputs_have_the_shapes_of_an_autoguide() -> None:  # oracle: Pyro
    data = supports_data()
    auto = AutoDiagonalNormal(many_supports)
    auto(*data)
    ours = Predictive(fitted_supports().model, guide=fitted_supports().guide, num_samples=4)(*data)
    theirs = Predictive(many_supports, guide=auto, num_samples=4)(*data)
    assert {n: v.shape for n, v in ours.items()} == {n: v.shape for n, v in theirs.items()}


@pytest.mark.parametrize("source", ["guide", "samples"])
def test_predictions_for_new_inputs_have_the_closed_forms_moments(source) -> None:  # 4 standard errors
    X, num = inputs(6, seed=4), 1000
    posterior = fitted_linear()
    if source == "guide":
        predictive = Predictive(posterior.model, guide=posterior.guide, num_samples=num)
    else:
        predictive = Predictive(posterior.model, posterior.get_samples(num))
    t = predictive(X)["t"]
    mean, covariance = linear_posterior(*regression_data())
    variance = 0.25 + (X @ covariance * X).sum(-1)
    assert t.shape == (num, 6)
    assert ((t.mean(0) - X @ mean).abs() < 4.0 * (variance / num).sqrt()).all()
    assert ((t.var(0) / variance - 1.0).abs() < 4.0 * (2.0 / num) ** 0.5).all()


def test_predictions_of_a_module() -> None:
    posterior = LaplaceEvidence(Module()).run(*regression_data())
    found = Predictive(posterior.model, guide=posterior.guide, num_samples=3)(inputs(5))
    assert found["t"].shape == (3, 5)
    assert found["layer.weight"].shape == (3, 1, 1, 2)


def test_importance_returns_the_evidence_of_a_linear_model() -> None:  # oracle: closed form
    posterior = fitted_linear()
    found = Importance(posterior.model, posterior.guide, num_samples=20).run(*regression_data())
    assert_approx(found.get_log_normalizer(), linear_log_evidence(*regression_data()))


def test_importance_agrees_with_the_evidence_check() -> None:  # 4 standard errors of both
    posterior, num = fitted_logistic(), 300
    args = posterior.state.problem.joint.args
    found = Importance(posterior.model, posterior.guide, num_samples=num).run(*args)
    check = posterior.diagnostics()
    error = check["log_evidence_importance_se"] * (1.0 + 4000 / num) ** 0.5
    assert abs(float(found.get_log_normalizer()) - check["log_evidence_importance"]) < 4.0 * error


@pytest.mark.parametrize("num_particles", [1, 5])
def test_elbo_of_a_linear_model_is_the_evidence(num_particles) -> None:  # the bound is tight there
    elbo = Trace_ELBO(num_particles=num_particles)
    loss = elbo.loss(fitted_linear().model, fitted_linear().guide, *regression_data())
    assert_approx(torch.tensor(-loss), linear_log_evidence(*regression_data()))


def test_elbo_of_a_mixture_with_the_assignment_enumerated() -> None:
    posterior = fitted_mixture()
    elbo = TraceEnum_ELBO(max_plate_nesting=1, num_particles=100)
    loss = elbo.loss(config_enumerate(posterior.model), posterior.guide, *mixture_data())
    assert abs(-loss - float(posterior.log_evidence)) < 1e-3


def test_vectorised_particles_are_independent_draws() -> None:
    x, first, second = inputs(9)[:, 0], inputs(9, seed=1)[:, 0], torch.arange(9.0) % 3.0
    posterior = LaplaceEvidence(two_sites).run(x, first, second)
    elbo = Trace_ELBO(num_particles=2000, vectorize_particles=True, max_plate_nesting=1)
    loss = elbo.loss(posterior.model, posterior.guide, x, first, second)
    assert abs(-loss - float(posterior.log_evidence)) < 0.05


def test_vectorised_weights_are_those_of_each_draw() -> None:
    posterior = unskewed(fitted_supports())
    weights, _, guide = vectorized_importance_weights(
        posterior.model, posterior.guide, *supports_data(), num_samples=5, max_plate_nesting=2
    )
    u = guide.nodes["_laplace_latent"]["value"].reshape(5, -1)
    assert guide.nodes["b"]["value"].shape == (5, 2, 3)
    assert guide.nodes["probs"]["value"].shape == (5, 1, 1, 4)
    assert_exact(weights, log_ratio(posterior, u))


def test_guide_and_model_survive_pickling_and_do_not_notice_it() -> None:
    posterior = LaplaceEvidence(linear).run(*regression_data())
    guide, model = posterior.guide, posterior.model
    copies = pickle.loads(pickle.dumps((guide, model)))
    draws = []
    for one_guide, one_model in ((guide, model), copies):
        torch.manual_seed(0)
        draws.append(Predictive(one_model, guide=one_guide, num_samples=5)(inputs(3))["t"])
    assert_exact(*draws)
    assert len(pickle.dumps(guide)) < 10_000  # no data, no traces


def test_the_guide_of_every_support_survives_pickling() -> None:
    guide = fitted_supports().guide
    again = pickle.loads(pickle.dumps(guide))
    draws = []
    for one in (guide, again):
        torch.manual_seed(0)
        draws.append(poutine.trace(one).get_trace())
    assert draws[0].log_prob_sum() == draws[1].log_prob_sum()


def test_a_model_in_another_process_has_the_fitted_hyperparameters() -> None:
    """As it is sent there; tests/compare/test_chains.py sends one."""
    pyro.param("alpha", torch.tensor(1e4), constraint=constraints.positive)  # the model itself says 0.5
    model, given = (
        LaplaceEvidence(linear, maximise=()).run(*regression_data()).model,
        {"w": torch.tensor([0.01, -0.02])},
    )
    sent = pickle.dumps(model)
    pyro.clear_param_store()
    models = pickle.loads(sent), model, linear
    found, here, other = (
        poutine.trace(poutine.condition(m, given)).get_trace(*regression_data()).log_prob_sum().detach() for m in models
    )
    assert torch.equal(found, here) and abs(float(found - other)) > 1.0


@pytest.mark.slow
def test_spawned_chains_of_nuts_see_the_fitted_hyperparameters(monkeypatch) -> None:
    monkeypatch.setattr("pyro.infer.mcmc.api.mp.cpu_count", lambda: 3)  # two chains at once, however few cores
    pyro.param("alpha", torch.tensor(1e4), constraint=constraints.positive)  # the model itself says 0.5
    posterior = LaplaceEvidence(linear, maximise=()).run(*regression_data())
    settings = {"num_chains": 2, "mp_context": "spawn", "disable_progbar": True}
    mcmc = MCMC(NUTS(posterior.model, max_tree_depth=3), num_samples=40, warmup_steps=40, **settings)
    mcmc.run(*regression_data())
    w = mcmc.get_samples(group_by_chain=True)["w"]
    mean, covariance = linear_posterior(*regression_data(), alpha=1e4)
    assert w.shape == (2, 40, 2)
    assert not torch.equal(w[0], w[1])
    assert ((w.mean((0, 1)) - mean).abs() < covariance.diagonal().sqrt()).all()  # 1.6 away with alpha = 0.5
