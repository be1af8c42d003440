"""What a fit returns, against the linear-Gaussian closed forms, Pyro's own posteriors, and NUTS."""

import dataclasses
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoDiagonalNormal
from torch import Tensor
from torch.distributions import Normal, constraints

from pyro_evidence import BadInput, LaplaceEvidence, LaplacePosterior, Start, diagonal
from tests.models_for_tests.posterior_models import (
    Module,
    assert_approx,
    assert_exact,
    class_data,
    fitted_linear,
    fitted_logistic,
    fitted_mixture,
    fitted_supports,
    inputs,
    linear,
    linear_log_evidence,
    linear_posterior,
    logistic,
    many_supports,
    mixture,
    mixture_data,
    regression_data,
    supports_data,
    two_sites,
    unskewed,
)


def short_nuts(model, *args) -> dict[str, Tensor]:
    mcmc = MCMC(NUTS(model, max_tree_depth=2), num_samples=3, warmup_steps=2, disable_progbar=True)
    mcmc.run(*args)
    return mcmc.get_samples()


def test_linear_posterior_is_the_closed_form() -> None:
    X, t = regression_data()
    posterior = fitted_linear()
    mean, _ = linear_posterior(X, t)
    assert_exact(posterior.log_evidence, linear_log_evidence(X, t))
    assert_approx(posterior.mode["w"], mean)
    assert posterior.median().keys() == {"w"}
    assert_exact(posterior.median()["w"], posterior.mode["w"])


def test_hyperparameters_are_those_of_the_reported_evidence() -> None:
    X, t = regression_data()
    posterior = LaplaceEvidence(linear).run(X, t)
    alpha, beta = (float(posterior.hyperparameters[n]) for n in ("alpha", "beta"))
    assert_exact(posterior.log_evidence, linear_log_evidence(X, t, alpha, beta))
    assert posterior.log_evidences[-1] == float(posterior.log_evidence)
    _, covariance = linear_posterior(X, t, alpha, beta)
    assert_approx(posterior.gamma["alpha"], 2.0 - alpha * covariance.trace())
    assert posterior.gamma.keys() == {"alpha"}


def test_draws_have_the_mean_and_the_covariance() -> None:  # Monte Carlo, 4 standard errors
    num = 20_000
    mean, covariance = linear_posterior(*regression_data())
    w = fitted_linear().get_samples(num, seed=1)["w"]
    variance = covariance.diagonal()
    assert ((w.mean(0) - mean).abs() < 4.0 * (variance / num).sqrt()).all()
    noise = ((variance[:, None] * variance + covariance**2) / num).sqrt()  # of a Gaussian's sample covariance
    assert ((w.mT.cov() - covariance).abs() < 4.0 * noise).all()


@pytest.mark.parametrize(
    ("model", "data"),
    [(many_supports, supports_data()), (mixture, mixture_data()), (linear, regression_data())],
    ids=["supports", "enumerated", "linear"],
)
def test_draws_look_like_those_of_mcmc(model, data) -> None:  # oracle: Pyro
    posterior = LaplaceEvidence(model, maximise=(), start=Start(tour=0)).run(*data)
    ours, theirs = posterior.get_samples(3), short_nuts(posterior.model, *data)
    assert list(ours) == list(theirs)
    assert {n: (v.shape, v.dtype) for n, v in ours.items()} == {n: (v.shape, v.dtype) for n, v in theirs.items()}


def test_draws_have_the_dotted_names_of_a_module() -> None:
    posterior = LaplaceEvidence(Module()).run(*regression_data())
    ours, theirs = posterior.get_samples(3), short_nuts(posterior.model, *regression_data())
    assert {n: v.shape for n, v in ours.items()} == {n: v.shape for n, v in theirs.items()}
    assert list(ours) == ["layer.weight"]
    assert posterior.hyperparameters.keys() == {"layer.alpha", "layer.bias", "scale"}


def test_draws_lie_in_the_support() -> None:
    draws = fitted_supports().get_samples(500, seed=0)
    assert constraints.simplex.check(draws["probs"]).all()
    assert constraints.positive.check(draws["scale"]).all()
    assert constraints.unit_interval.check(draws["chance"]).all()
    assert constraints.corr_cholesky.check(draws["corr"]).all()
    for value in draws.values():
        assert not value.requires_grad


def test_a_single_precision_model_gives_single_precision() -> None:
    data = tuple(x.float() for x in regression_data())
    torch.set_default_dtype(torch.float32)
    posterior = LaplaceEvidence(linear, maximise=()).run(*data)
    values = [posterior.get_samples(3), posterior.mode, posterior.quantiles(0.5), posterior.hyperparameters]
    values += [posterior.guide(), posterior.median()]
    assert {v.dtype for found in values for v in found.values()} == {torch.float32}
    assert posterior.log_prob(*data).dtype == torch.float32
    assert {v.dtype for v in short_nuts(posterior.model, *data).values()} == {torch.float32}
    torch.testing.assert_close(posterior.mode["w"], fitted_linear().mode["w"].float(), rtol=1e-4, atol=1e-4)


def test_a_seed_fixes_the_draws() -> None:
    posterior = fitted_linear()
    first = posterior.get_samples(5, seed=7)["w"]
    torch.manual_seed(99)
    assert torch.equal(posterior.get_samples(5, seed=7)["w"], first)
    assert torch.equal(posterior.get_samples(5, seed=torch.tensor(7).numpy()[()])["w"], first)
    assert not torch.equal(posterior.get_samples(5, seed=8)["w"], first)


def test_without_a_seed_the_draws_follow_the_callers_generator_and_leave_it_alone() -> None:
    posterior = fitted_linear()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = posterior.get_samples(5)["w"]
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert not torch.equal(posterior.get_samples(5)["w"], first)
    torch.manual_seed(3)
    assert torch.equal(posterior.get_samples(5)["w"], first)


def test_draws_are_unrelated_to_what_the_caller_draws_next() -> None:  # noise added to them is independent
    posterior, num = fitted_linear(), 4000
    torch.manual_seed(0)
    w = posterior.get_samples(num)["w"]
    noise = torch.randn(num, 2)
    correlation = torch.corrcoef(torch.cat([w, noise], -1).mT)[:2, 2:]
    assert (correlation.abs() < 4.0 / math.sqrt(num)).all()


def test_quantiles_are_those_of_the_gaussian() -> None:
    mean, covariance = linear_posterior(*regression_data())
    levels = torch.tensor([0.05, 0.5, 0.975])
    expected = torch.stack([Normal(mean, covariance.diagonal().sqrt()).icdf(q) for q in levels])
    for q in (levels, levels.tolist(), tuple(levels.tolist())):
        assert_approx(fitted_linear().quantiles(q)["w"], expected)
    assert_approx(fitted_linear().quantiles(0.975)["w"], expected[2])


def test_quantiles_and_median_are_those_of_an_autoguide() -> None:  # oracle: Pyro
    posterior = unskewed(fitted_supports())
    guide = AutoDiagonalNormal(many_supports)
    guide(*supports_data())
    names = [n for n, _ in guide.prototype_trace.iter_stochastic_nodes()]
    slices = posterior.state.problem.joint.latents.slices
    order = torch.cat([torch.arange(slices[n].start, slices[n].stop) for n in names])
    guide.loc = torch.nn.Parameter(posterior._about_mean.u[order])
    guide.scale = posterior.state.precision.variance[0, order].sqrt()
    for ours, theirs in (
        (posterior.quantiles([0.1, 0.5, 0.9]), guide.quantiles([0.1, 0.5, 0.9])),
        (posterior.median(), guide.median()),
    ):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_approx(ours[name], theirs[name].detach())


@pytest.mark.parametrize("q", [1.5, [0.5, -0.1], float("nan")])
def test_quantiles_refuse_what_is_no_probability(q) -> None:
    with pytest.raises(BadInput, match="probabilities between 0 and 1"):
        fitted_linear().quantiles(q)


def test_a_diagonal_posterior_has_its_own_sd() -> None:
    X, t = regression_data()
    posterior = LaplaceEvidence(linear, maximise=(), curvature=diagonal).run(X, t)
    sd = (0.5 + 4.0 * X.square().sum(0)).rsqrt()
    mean, _ = linear_posterior(X, t)
    assert_approx(posterior.quantiles(float(Normal(0.0, 1.0).cdf(torch.tensor(1.0))))["w"], mean + sd)
    w = posterior.get_samples(20_000, seed=0)["w"]
    assert ((w.std(0) / sd - 1.0).abs() < 4.0 / math.sqrt(2.0 * 20_000)).all()


def test_log_prob_of_new_data_is_at_the_mode() -> None:
    posterior, X = fitted_logistic(), inputs(7, seed=5)
    t = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    expected = dist.Bernoulli(logits=X @ posterior.mode["w"]).log_prob(t)
    assert_exact(posterior.log_prob(X, t), expected)
    assert_exact(posterior.log_prob(X, t=t), expected)
    assert not posterior.log_prob(X, t).requires_grad


def test_log_prob_without_arguments_is_of_the_training_data() -> None:
    assert_exact(fitted_logistic().log_prob(), fitted_logistic().log_prob(*class_data()))
    assert fitted_logistic().log_prob().shape == (40,)


def test_log_prob_of_several_sites_is_their_sum() -> None:
    x, first, second = inputs(9)[:, 0], inputs(9, seed=1)[:, 0], torch.arange(9.0) % 3.0
    posterior = LaplaceEvidence(two_sites).run(x, first, second)
    w = posterior.mode["w"]
    parts = {
        "first": Normal(w * x, 1.0).log_prob(first),
        "second": dist.Poisson((w + x).exp()).log_prob(second),
    }
    found = posterior.log_likelihood(x, first, second)
    assert found.keys() == parts.keys()
    for name, expected in parts.items():
        assert_exact(found[name], expected)
    assert_exact(posterior.log_prob(x, first, second), parts["first"] + parts["second"])


def test_log_prob_of_a_mixture_sums_the_assignment_out() -> None:
    posterior, x = fitted_mixture(), torch.tensor([-3.0, 0.1, 2.5, 40.0])
    cells = Normal(posterior.mode["loc"], 0.5).log_prob(x.unsqueeze(-1)) + torch.tensor([0.3, 0.7]).log()
    assert_exact(posterior.log_prob(x), cells.logsumexp(-1))


def test_log_prob_carries_no_graph() -> None:
    offset = torch.zeros(2, requires_grad=True)  # of somebody else's, inside the model

    def model(X: Tensor, t: Tensor | None = None) -> Tensor:
        return linear(X + offset, t)

    posterior = LaplaceEvidence(model, maximise=()).run(*regression_data())
    assert_exact(posterior.log_prob(*regression_data()), fitted_linear().log_prob())
    assert not posterior.log_prob(*regression_data()).requires_grad


def test_log_prob_asks_for_missing_targets() -> None:
    with pytest.raises(BadInput, match=r"\['t'\] have no data in these arguments"):
        fitted_logistic().log_prob(inputs(7))


@pytest.mark.parametrize("arguments", [(inputs(7), torch.zeros(6)), (torch.ones(7, 3), torch.zeros(7)), ()])
def test_log_prob_says_what_does_not_fit(arguments) -> None:
    keywords = {} if arguments else {"unknown": torch.zeros(3)}
    with pytest.raises(BadInput, match="the model cannot be run on these arguments"):
        fitted_logistic().log_prob(*arguments, **keywords)


def test_log_prob_refuses_sites_of_different_shapes() -> None:
    with pytest.raises(BadInput, match=r"observed sites have different shapes, .*'x': \(2, 3\).*log_likelihood"):
        fitted_supports().log_prob()


def test_repr_is_short() -> None:
    posterior = fitted_logistic()
    expected = f"LaplacePosterior(log_evidence={float(posterior.log_evidence):.6g}, sites=['w'], "
    assert repr(posterior) == expected + "hyperparameters=['alpha'], status='converged')"


def test_a_posterior_is_equal_to_itself_alone_and_can_be_pickled() -> None:
    posterior = fitted_logistic()
    other: LaplacePosterior = pickle.loads(pickle.dumps(posterior))
    assert posterior == posterior
    assert posterior != other
    assert posterior != dataclasses.replace(posterior, restarts=torch.zeros(2))
    assert torch.equal(other.get_samples(3, seed=0)["w"], posterior.get_samples(3, seed=0)["w"])


def test_nuts_on_the_model_agrees() -> None:  # Monte Carlo: 4 standard errors of NUTS
    posterior = LaplaceEvidence(logistic).run(*class_data(400))
    mcmc = MCMC(NUTS(posterior.model), num_samples=200, warmup_steps=60, disable_progbar=True)
    mcmc.run(*class_data(400))
    w = mcmc.get_samples()["w"]
    size = mcmc.diagnostics()["w"]["n_eff"].clamp(max=200.0)
    sd = posterior.get_samples(20_000, seed=0)["w"].std(0)
    assert ((w.mean(0) - posterior.mode["w"]).abs() < 4.0 * sd / size.sqrt()).all()
    assert ((w.std(0) / sd - 1.0).abs() < 4.0 / (2.0 * size).sqrt()).all()
    assert not list(pyro.get_param_store())
