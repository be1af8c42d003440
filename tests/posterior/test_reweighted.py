"""Weighted draws against closed forms, and what diagnostics and summary say of the unweighted ones."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive
from torch import Tensor

from pyro_evidence import BadInput, LaplaceEvidence, to_inference_data
from pyro_evidence.numerics.importance import Smoothed, resampled, weighted_quantiles
from pyro_evidence.posterior import diagnostics
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.precision.choices import damped, exact_hessian
from tests.models_for_tests.posterior_models import fitted_linear

TIMES = torch.tensor([0.4, 1.9, 0.7])


def waiting(times: Tensor, t: Tensor | None = None) -> None:
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(times)):
        pyro.sample("t", dist.Exponential(rate), obs=t)


def regression(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 10.0).expand([X.shape[1]]).to_event(1))
    sigma = pyro.sample("sigma", dist.LogNormal(0.0, 3.0))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


def fitted() -> LaplacePosterior:
    return LaplaceEvidence(waiting).run(TIMES, TIMES)


def exact() -> torch.distributions.Gamma:
    return torch.distributions.Gamma(5.0, 1.0 + TIMES.sum())


def crowded() -> LaplacePosterior:
    """Six weights and a noise scale by sixty data: the joint mode of the scale is too low, and draws are about it."""
    X = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    return LaplaceEvidence(regression, marginalise=(), curvature=damped(exact_hessian, 1e-12)).run(
        X, X[:, 0] + torch.randn(60, generator=torch.Generator().manual_seed(1))
    )


def test_moments_and_quantiles_are_those_of_the_exact_posterior() -> None:  # oracle: conjugacy
    corrected = fitted().importance_resampled(20_000)
    assert corrected.pareto_k < 0.7
    assert float(corrected.mean()["rate"]) == pytest.approx(float(exact().mean), rel=0.02)
    assert float(corrected.std()["rate"]) == pytest.approx(float(exact().stddev), rel=0.03)
    log_evidence = 5.0 * -(1.0 + TIMES.sum()).log() + math.lgamma(5.0) - math.lgamma(2.0)
    assert float(corrected.log_evidence) == pytest.approx(float(log_evidence), abs=4.0 * corrected.log_evidence_error)
    draws = exact().sample((200_000,))
    levels = torch.tensor([0.05, 0.5, 0.95])
    torch.testing.assert_close(
        corrected.quantiles([0.05, 0.5, 0.95])["rate"], draws.quantile(levels), rtol=0.08, atol=0
    )
    torch.testing.assert_close(corrected.median()["rate"], corrected.quantiles(0.5)["rate"])


def test_resampled_draws_have_the_weighted_moments() -> None:  # law
    corrected = fitted().importance_resampled(8_000)
    draws = corrected.get_samples(8_000, seed=1)["rate"]
    assert draws.shape == (8_000,)
    torch.testing.assert_close(draws.mean(), corrected.mean()["rate"], rtol=0.01, atol=0)
    torch.testing.assert_close(draws.std(), corrected.std()["rate"], rtol=0.02, atol=0)
    assert torch.equal(draws, corrected.get_samples(8_000, seed=1)["rate"])


def test_weights_are_those_of_their_draws_however_many_are_evaluated_together() -> None:
    """Oracle: the log joint at the draws, over the density of the normal that they are from."""
    y = torch.randn(100_000, generator=torch.Generator().manual_seed(0))

    def shifted(y: Tensor) -> None:
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        skewed = pyro.sample("skewed", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(shift + 0.0 * skewed, 1.0), obs=y)

    posterior = LaplaceEvidence(shifted, marginalise=()).run(y)
    found = posterior.importance_resampled(100, seed=1)
    u, joint = found.draws["skewed"].log(), posterior.state.problem.joint
    normal = dist.Normal(
        posterior.mode["skewed"].log(), posterior.state.precision.variance[0][joint.latents.slices["skewed"]].sqrt()
    )
    exact = dist.Gamma(2.0, 1.0).log_prob(u.exp()) + u - normal.log_prob(u)
    weights = posterior.log_weights(100, seed=1)
    torch.testing.assert_close(weights - weights.mean(), exact - exact.mean(), rtol=0, atol=1e-6)


def test_the_noise_scale_of_a_crowded_regression() -> None:  # oracle: w integrated on paper, sigma by quadrature
    posterior = crowded()
    X, y = posterior.state.problem.joint.args
    log_sigma = torch.linspace(-3.0, 3.0, 2001)
    covariance = 100.0 * X @ X.T + torch.diag_embed((2.0 * log_sigma).exp().unsqueeze(-1).expand(-1, 60))
    height = torch.distributions.MultivariateNormal(torch.zeros(60), covariance).log_prob(y)
    mass = (height + torch.distributions.Normal(0.0, 3.0).log_prob(log_sigma)).softmax(0)
    mean = float(mass @ log_sigma.exp())
    sd = float((mass @ log_sigma.exp().square() - mean**2).sqrt())
    found = posterior.diagnostics()
    assert found["pareto_k"] < 0.7
    assert found["largest_mean_shift"] > 0.3 and found["largest_mean_shift_site"] == "sigma"
    corrected = posterior.importance_resampled(8_000)
    assert float(corrected.mean()["sigma"]) == pytest.approx(mean, abs=0.1 * sd)
    assert float(corrected.std()["sigma"]) == pytest.approx(sd, rel=0.1)
    assert abs(float(posterior.get_samples(8_000, seed=0)["sigma"].mean()) - mean) > 0.3 * sd


def test_the_summary_says_what_the_weights_change(capsys) -> None:
    posterior = crowded()
    posterior.summary()
    text = capsys.readouterr().out
    assert "is off by" in text
    assert "take draws from posterior.importance_resampled(...)" in text
    posterior.importance_resampled(1000).summary()
    assert "1000 draws, weighted: worth" in capsys.readouterr().out


def test_an_exact_evidence_is_called_exact(capsys) -> None:
    posterior = fitted_linear()
    assert posterior.diagnostics()["exact"] is True
    posterior.summary()
    text = capsys.readouterr().out
    assert "(exact: given the hyperparameters the posterior is Gaussian)" in text
    assert "k-hat" not in text
    assert posterior.importance_resampled(200).effective_sample_size == pytest.approx(200.0)


def test_the_summary_speaks_of_a_gap_whatever_k_hat() -> None:
    numbers = {"log_evidence": -10.0, "log_evidence_importance": -10.5, "log_evidence_importance_se": 0.1}
    rest = {"pareto_k": -0.5, "log_evidence_per_restart": [], "curvature": "exact_hessian"}
    rest |= {"status": "converged", "failed_restarts": []}
    said = "\n".join(diagnostics.lines(numbers | rest))
    assert "Laplace's log evidence is 0.50 nats too high by importance sampling (0.1 is its standard error)" in said
    for gap in (0.29, 0.05):  # within three standard errors; below a tenth of a nat
        near = numbers | {
            "log_evidence_importance": -10.0 - gap,
            "log_evidence_importance_se": gap / (2.9, 5.0)[gap < 0.1],
        }
        assert "importance sampling (" not in "\n".join(diagnostics.lines(near | rest)).partition("\n")[2]


@pytest.mark.parametrize(("importance_sampling", "is_said"), [(-10.5, False), (-9.5, True)])
def test_few_draws_that_miss_mass_do_not_doubt_what_more_have_added(importance_sampling: float, is_said: bool) -> None:
    """A hidden Markov model of twenty data was said to be .58 nats too high, and is .003 off."""
    found = {"log_evidence": -10.0, "log_evidence_importance": importance_sampling, "log_evidence_importance_se": 0.1}
    found |= {"pareto_k": 0.4, "status": "converged"}
    said = diagnostics.lines(found, added=True)
    assert any("by importance sampling (0.1" in line for line in said) == is_said


def test_shifts_by_hand() -> None:
    draws = {"x": torch.tensor([0.0, 2.0]), "c": torch.ones(2)}
    found = diagnostics.shifts((draws, draws), Smoothed(torch.tensor([0.25, 0.75]).log(), 0.0))
    assert found["largest_mean_shift"] == pytest.approx(0.5)  # 1.5 - 1, sd 1
    assert found["largest_sd_ratio"] == pytest.approx(1.0 / math.sqrt(0.75))
    assert found["largest_mean_shift_site"] == "x"


def test_predictive_takes_the_guide() -> None:
    corrected = fitted().importance_resampled(4_000)
    torch.manual_seed(0)
    for parallel in (False, True):
        predictive = Predictive(corrected.model, guide=corrected.guide, num_samples=300, parallel=parallel)
        drawn = predictive(torch.zeros(5))
        assert drawn["t"].shape[-1] == 5
        assert float(drawn["rate"].mean()) == pytest.approx(float(exact().mean), rel=0.15)


def test_arviz_takes_it() -> None:
    pytest.importorskip("arviz")
    data = to_inference_data(fitted().importance_resampled(1_000), num_samples=400)
    assert data.posterior["rate"].shape == (4, 100)


def test_systematic_resampling_takes_each_as_often_as_its_weight_says() -> None:  # law
    weights = torch.rand(50, generator=torch.Generator().manual_seed(0)).log_softmax(0).exp()
    taken = torch.bincount(resampled(weights, 1000, torch.Generator().manual_seed(1)), minlength=50)
    assert float((taken - 1000.0 * weights).abs().max()) < 1.0 + 1e-9


def test_weighted_quantiles_of_equal_weights_are_hazens() -> None:  # oracle: numpy
    numpy = pytest.importorskip("numpy")
    x = torch.randn(101, 2, generator=torch.Generator().manual_seed(0))
    levels = torch.tensor([0.01, 0.3, 0.5, 0.99])
    found = weighted_quantiles(x, torch.full((101,), 1.0 / 101.0), levels)
    expected = numpy.quantile(x.numpy(), levels.numpy(), axis=0, method="hazen")
    torch.testing.assert_close(found, torch.as_tensor(expected))


def test_refusals() -> None:
    with pytest.raises(BadInput, match="num_samples=5; expected a whole number of at least 100"):
        fitted().importance_resampled(5)
    with pytest.raises(BadInput, match="expected probabilities between 0 and 1"):
        fitted().importance_resampled(100).quantiles(1.5)
