"""The hyperparameters of a posterior: in the param store, pruned, and latent ones."""

import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal
from pyro.optim import ClippedAdam
from torch import Tensor
from torch.distributions import Gamma, constraints

from pyro_evidence import LaplaceEvidence, LaplacePosterior, Start
from tests.models_for_tests.posterior_models import (
    Module,
    ard,
    assert_approx,
    assert_exact,
    inputs,
    linear,
    linear_log_evidence,
    mixture_data,
    precision_prior,
    regression_data,
)


def test_the_store_is_untouched_until_it_is_asked_for() -> None:
    posterior = LaplaceEvidence(linear).run(*regression_data())
    assert not list(pyro.get_param_store())
    posterior.update_param_store()
    for name, value in posterior.hyperparameters.items():
        assert_exact(pyro.param(name).detach(), value)
    assert set(pyro.get_param_store()) == {"alpha", "beta"}


def test_the_rest_of_an_svi_script_goes_on_from_the_store() -> None:
    posterior = LaplaceEvidence(linear).run(*regression_data())
    posterior.update_param_store()
    assert pyro.get_param_store()._constraints["alpha"] is constraints.positive
    svi = SVI(linear, AutoDelta(linear), pyro.optim.SGD({"lr": 1e-3}), Trace_ELBO())
    svi.step(*regression_data())
    alpha = float(pyro.param("alpha").detach())
    assert alpha > 0.0
    assert alpha != float(posterior.hyperparameters["alpha"])
    assert alpha == pytest.approx(float(posterior.hyperparameters["alpha"]), rel=0.1)


def test_the_store_takes_shape_and_constraint_of_this_model() -> None:
    posterior = LaplaceEvidence(linear).run(*regression_data())
    pyro.param("alpha", torch.zeros(7))
    pyro.param("somebody_elses", torch.ones(2))
    posterior.update_param_store()
    assert_exact(pyro.param("alpha").detach(), posterior.hyperparameters["alpha"])
    assert_exact(pyro.param("somebody_elses").detach(), torch.ones(2))
    pyro.get_param_store()["alpha"] = torch.tensor(3.0)
    assert_exact(pyro.get_param_store()._params["alpha"].detach(), torch.tensor(3.0).log())


def learned_mixture(x: Tensor) -> None:
    """Enumerated for the fit, its assignment drawn when the model is simply run."""
    width = pyro.param("width", x.new_tensor(1.0), constraint=constraints.positive)
    loc = pyro.sample("loc", dist.Normal(x.new_tensor([-2.0, 2.0]), 0.5).to_event(1))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(x.new_tensor([0.3, 0.7])))
        pyro.sample("x", dist.Normal(loc[z], width), obs=x)


def test_updating_twice_is_updating_once_and_draws_nothing() -> None:
    posterior = LaplaceEvidence(learned_mixture, start=Start(restarts=4)).run(*mixture_data())
    before = torch.get_rng_state()
    posterior.update_param_store()
    posterior.update_param_store()
    assert_exact(pyro.param("width").detach(), posterior.hyperparameters["width"])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_reads_its_params_after_the_update_and_not_before() -> None:
    module = Module()
    bias = module.layer.bias.detach().clone()
    posterior = LaplaceEvidence(module).run(*regression_data())
    assert_exact(module.scale.detach(), torch.tensor(1.0))
    assert_exact(module.layer.bias.detach(), bias)
    posterior.update_param_store()
    found = {"scale": module.scale, "layer.alpha": module.layer.alpha, "layer.bias": module.layer.bias}
    for name, expected in posterior.hyperparameters.items():
        assert_exact(found[name].detach(), expected)
        assert_exact(pyro.param(name).detach(), expected)
    assert pyro.get_param_store()._params["layer.bias"] is module.layer.bias
    assert isinstance(module.layer.bias, torch.nn.Parameter)


def test_the_updated_module_predicts_as_the_posterior_does() -> None:
    module, X = Module(), inputs(5, seed=3)
    posterior = LaplaceEvidence(module).run(*regression_data())
    posterior.update_param_store()
    draws = []
    for model in (module, posterior.model):
        torch.manual_seed(0)
        draws.append(Predictive(model, posterior.get_samples(10, seed=0))(X)["t"].detach())
    assert_exact(*draws)


def pruned_data() -> tuple[Tensor, Tensor]:
    """Three inputs; the data put the weight of the second exactly at its prior mean, 1."""
    X = torch.cat([inputs(), inputs(seed=5)[:, :1]], -1)
    noise = inputs(seed=6)[:, 0]
    noise = noise - X @ torch.linalg.lstsq(X, noise.unsqueeze(-1)).solution[:, 0]
    return X, X @ torch.tensor([2.5, 1.0, -1.0]) + 0.5 * noise / noise.std()


@pytest.fixture(scope="module")
def pruned() -> LaplacePosterior:
    pyro.clear_param_store()  # a fixture of a module begins before those of its tests
    return LaplaceEvidence(ard).run(*pruned_data())


def test_a_pruned_precision_is_infinite_and_counts_for_nothing(pruned) -> None:
    assert pruned.pruned["w"].tolist() == [False, True, False]
    assert pruned.hyperparameters["alpha"].isfinite().tolist() == [True, False, True]
    assert float(pruned.hyperparameters["alpha"][1]) == math.inf
    assert float(pruned.gamma["alpha"][1]) == 0.0
    assert (pruned.gamma["alpha"][[0, 2]] > 0.5).all()
    assert pruned.diagnostics()["num_pruned"] == 1


def test_a_pruned_weight_stays_at_its_prior_mean(pruned) -> None:
    assert (pruned.get_samples(100)["w"][:, 1] == 1.0).all()
    assert float(pruned.mode["w"][1]) == 1.0
    assert (pruned.quantiles([0.0, 0.01, 0.5, 1.0])["w"][:, 1] == 1.0).all()
    assert pruned.get_samples(100)["w"][:, [0, 2]].std(0).min() > 0.01


def test_the_evidence_is_that_of_the_model_without_the_pruned_weight(pruned) -> None:  # oracle: closed form
    X, t = pruned_data()
    alpha = pruned.hyperparameters["alpha"][[0, 2]]
    kept = X[:, [0, 2]]
    covariance = 0.25 * torch.eye(30) + kept @ (kept / alpha).mT
    expected = torch.distributions.MultivariateNormal(X.sum(-1), covariance).log_prob(t)
    assert_exact(pruned.log_evidence, expected)
    found = pruned.diagnostics()
    assert found["log_evidence_importance"] == pytest.approx(float(expected), abs=1e-6)
    A = 4.0 * kept.mT @ kept + alpha.diag()
    assert found["smallest_eigenvalue"] == pytest.approx(float(torch.linalg.eigvalsh(A)[0]))


def test_the_model_of_a_pruned_posterior_is_finite(pruned) -> None:
    trace = poutine.trace(poutine.condition(pruned.model, data=pruned.mode)).get_trace(*pruned_data())
    assert trace.log_prob_sum().isfinite()
    assert trace.nodes["alpha"]["value"].isfinite().all()
    draws = Predictive(pruned.model, guide=pruned.guide, num_samples=20)(pruned_data()[0])
    assert (draws["w"][..., 1] == 1.0).all()


def test_the_store_of_a_pruned_posterior_is_finite(pruned) -> None:
    pruned.update_param_store()
    alpha = pyro.param("alpha").detach()
    assert alpha.isfinite().all()
    assert_exact(alpha[[0, 2]], pruned.hyperparameters["alpha"][[0, 2]])
    assert alpha[1] > 100.0 * alpha[[0, 2]].max()


def by_standard_deviations(X: Tensor, t: Tensor | None = None) -> Tensor:
    scale = pyro.param("scale", X.new_ones(3), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(X.new_ones(3), scale).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Normal(X @ w, 0.5), obs=t)


def test_a_pruned_standard_deviation_is_zero(pruned) -> None:
    posterior = LaplaceEvidence(by_standard_deviations).run(*pruned_data())
    assert_approx(posterior.log_evidence, pruned.log_evidence)
    assert_approx(posterior.hyperparameters["scale"], pruned.hyperparameters["alpha"].rsqrt())
    assert float(posterior.hyperparameters["scale"][1]) == 0.0


def test_a_maximised_site_is_a_hyperparameter() -> None:  # oracle: autograd through the closed form
    X, t = regression_data()
    posterior = LaplaceEvidence(precision_prior, maximise=["alpha"]).run(X, t)
    assert posterior.hyperparameters.keys() == {"alpha"}
    assert posterior.get_samples(2).keys() == {"w"}
    alpha = posterior.hyperparameters["alpha"].clone().requires_grad_()
    covariance = 0.25 * torch.eye(30) + X @ X.mT / alpha
    log_evidence = torch.distributions.MultivariateNormal(torch.zeros(30), covariance).log_prob(t)
    log_prior = Gamma(2.0, 1.0).log_prob(alpha)
    assert_exact(posterior.log_evidence, log_evidence.detach())
    assert_exact(posterior.log_hyperposterior, (log_evidence + log_prior).detach())
    (gradient,) = torch.autograd.grad(log_evidence + log_prior, alpha)
    assert abs(float(gradient)) < 1e-5
    assert posterior.log_evidences[-1] == float(posterior.log_hyperposterior)


def test_the_model_conditions_on_a_maximised_site() -> None:
    posterior = LaplaceEvidence(precision_prior, maximise=["alpha"]).run(*regression_data())
    trace = poutine.trace(posterior.model).get_trace(*regression_data())
    assert trace.nodes["alpha"]["is_observed"]
    assert_exact(trace.nodes["alpha"]["value"], posterior.hyperparameters["alpha"])
    posterior.update_param_store()
    assert not list(pyro.get_param_store())


def test_held_params_are_reported_as_they_were_held() -> None:
    pyro.param("alpha", torch.tensor(2.5), constraint=constraints.positive)
    posterior = LaplaceEvidence(linear, maximise=()).run(*regression_data())
    assert {n: float(v) for n, v in posterior.hyperparameters.items()} == {"alpha": 2.5, "beta": 4.0}
    assert_exact(posterior.log_evidence, linear_log_evidence(*regression_data(), alpha=2.5))
    assert posterior.gamma == {}


def test_the_model_needs_no_store() -> None:
    posterior = LaplaceEvidence(linear).run(*regression_data())
    pyro.param("alpha", torch.tensor(1e6), constraint=constraints.positive)
    trace = poutine.trace(posterior.model).get_trace(*regression_data())
    alpha = posterior.hyperparameters["alpha"]
    expected = dist.Normal(0.0, alpha.rsqrt()).log_prob(trace.nodes["w"]["value"]).sum()
    trace.compute_log_prob()
    assert_approx(trace.nodes["w"]["log_prob_sum"], expected)


def test_svi_runs_on_the_model_at_fixed_hyperparameters() -> None:  # oracle: the exact Gaussian posterior
    data = regression_data()
    posterior = LaplaceEvidence(linear).run(*data)
    guide = AutoMultivariateNormal(posterior.model, init_scale=0.01)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    svi = SVI(posterior.model, guide, ClippedAdam({"lr": 0.05, "lrd": 0.98}), Trace_ELBO(num_particles=4))
    for _ in range(150):
        svi.step(*data)
    sd = posterior.state.precision.variance[0].sqrt()
    off = (guide.loc.detach() - posterior.state.u) / sd
    assert bool((off.abs() < 0.25).all())
    alpha = poutine.trace(pickle.loads(pickle.dumps(posterior.model))).get_trace(*data).nodes["alpha"]["value"]
    assert_exact(alpha, posterior.hyperparameters["alpha"])
    assert all(name.startswith("Auto") for name in pyro.get_param_store())
    pyro.clear_param_store()
