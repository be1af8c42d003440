"""``posterior.predict`` of every engine against closed forms, quadrature and the engine's own density."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import REVM, RVM, VRVM, BadInput, EvidenceEM, LaplaceEvidence, UnsupportedModel, predict_latent
from pyro_evidence.models.gp import gp_regression
from pyro_evidence.models.kernels import RBF
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.survival import Gompertz
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.predict import completed


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, X_NEW = random(50, 3), random(6, 3, seed=1)
Y = X @ torch.tensor([1.0, -1.0, 0.5]) + 0.5 * random(50, seed=2)
LABELS = (Y > 0.0).to(X.dtype)
CLASSES = (Y > -0.5).long() + (Y > 0.5).long()


def linear(X: Tensor, t: Tensor) -> None:  # the targets are no optional argument
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, 0.5), obs=t)


def logistic(X: Tensor, t: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def softmax(X: Tensor, t: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 3]).to_event(2))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Categorical(logits=X @ w), obs=t)


def counts(X: Tensor, t: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 0.5).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Poisson((X @ w).exp()), obs=t)


def two_sites(X: Tensor, t: Tensor | None = None, k: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, 0.5), obs=t)
        pyro.sample("k", dist.Bernoulli(logits=X @ w), obs=k)


def heavy(X: Tensor, t: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Cauchy(X @ w, 0.5), obs=t)


def predictive(posterior: LaplacePosterior) -> tuple[Tensor, Tensor]:
    covariance = posterior.state.precision.log_det_gradient[0]
    return X_NEW @ posterior.median()["w"], (X_NEW @ covariance * X_NEW).sum(-1)


def test_linear_regression_in_closed_form() -> None:  # oracle: Bishop (2006), eq. 3.58
    posterior = LaplaceEvidence(linear).run(X, Y)
    mean, variance = predictive(posterior)
    found, sd = posterior.predict(X_NEW, return_std=True)
    torch.testing.assert_close(found, mean)  # mirrored draws: exact for what is linear
    torch.testing.assert_close(sd, (variance + 0.25).sqrt(), rtol=0.02, atol=0)
    low, high = posterior.predict(X_NEW, quantiles=[0.16, 0.84], num_samples=4000)
    torch.testing.assert_close(0.5 * (high - low), 0.9945 * sd, rtol=0.1, atol=0)
    torch.testing.assert_close(posterior.predict(), X @ posterior.mode["w"])


def test_class_probabilities_are_averaged() -> None:  # oracle: Gauss-Hermite quadrature
    posterior = LaplaceEvidence(logistic).run(X, LABELS)
    mean, variance = predictive(posterior)
    z = torch.linspace(-8.0, 8.0, 2001)
    mass = torch.distributions.Normal(0.0, 1.0).log_prob(z).softmax(0)
    expected = torch.sigmoid(mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * z) @ mass
    torch.testing.assert_close(posterior.predict(X_NEW, num_samples=4000), expected, rtol=0, atol=0.01)
    levels = posterior.predict(X_NEW, quantiles=[0.05, 0.95])
    assert bool((levels[0] < expected).all()) and bool((levels[1] > expected).all())


@pytest.mark.parametrize("engine", [RVM, REVM, VRVM])
def test_engines_of_relevant_weights(engine: Any) -> None:  # law: means of what is linear are the predictor's
    posterior = engine(linear).run(X, Y)
    mean, sd = posterior.predict(X_NEW, return_std=True)
    expected, variance = posterior.predictor(X_NEW, None)
    torch.testing.assert_close(mean, expected)
    torch.testing.assert_close(sd, (variance + 0.25).sqrt(), rtol=0.02, atol=0)
    labels = engine(logistic).run(X, LABELS)
    by_draws, _ = labels.predict(X_NEW, return_std=True)
    torch.testing.assert_close(labels.predict(X_NEW), by_draws, rtol=0, atol=0.03)


def test_classes_of_a_categorical() -> None:
    posterior = LaplaceEvidence(softmax).run(X, CLASSES)
    found = posterior.predict(X_NEW)
    assert found.shape == (6, 3)
    torch.testing.assert_close(found.sum(-1), torch.ones(6))
    mean, sd = posterior.predict(X_NEW, return_std=True)
    assert sd.shape == (6, 3) and bool((sd > 0.0).all())
    torch.testing.assert_close(mean, found)
    torch.testing.assert_close(RVM(softmax).run(X, CLASSES).predict(X_NEW).sum(-1), torch.ones(6))


def test_counts_have_their_own_spread() -> None:  # oracle: draws
    posterior = LaplaceEvidence(counts).run(X, torch.arange(50.0) % 3)
    mean, sd = posterior.predict(X_NEW, return_std=True)
    w = posterior.get_samples(100_000, seed=1)["w"]
    rate = (w @ X_NEW.T).exp()
    torch.testing.assert_close(mean, rate.mean(0), rtol=0.02, atol=0)
    torch.testing.assert_close(sd, (rate.var(0) + rate.mean(0)).sqrt(), rtol=0.03, atol=0)


def test_processes_at_new_inputs() -> None:  # oracle: Rasmussen and Williams (2006), eq. 2.25 and 2.26
    posterior = LaplaceEvidence(gp_regression(RBF())).run(X[:, :1], Y)
    mean, sd = posterior.predict(X_NEW[:, :1], return_std=True, num_samples=4000)
    latent = predict_latent(posterior, X_NEW[:, :1])
    torch.testing.assert_close(mean, latent.mean)
    noise = 1.0 / posterior.hyperparameters["beta"]
    torch.testing.assert_close(sd, (latent.variance + noise).sqrt(), rtol=0.03, atol=0)


def test_mixtures_predict_their_mean() -> None:  # oracle: the fitted density
    data = torch.cat([random(40, 2), random(40, 2, seed=3) + 5.0])
    posterior = EvidenceEM(gaussian_mixture(2)).run(data)
    found = posterior.predict(num_samples=2000)
    torch.testing.assert_close(found.mean(0), posterior.mean()[0], rtol=0.02, atol=0.02)


def test_one_of_several_sites() -> None:
    posterior = LaplaceEvidence(two_sites).run(X, Y, LABELS)
    torch.testing.assert_close(posterior.predict(X_NEW, site="t"), X_NEW @ posterior.mode["w"], rtol=0.02, atol=0.02)
    assert posterior.predict(X_NEW, site="k").shape == (6,)
    with pytest.raises(BadInput, match="site=None; expected one of the observed sites: t, k, as in site='t'"):
        posterior.predict(X_NEW)


def test_letters() -> None:
    posterior = LaplaceEvidence(linear).run(X, Y)
    with pytest.raises(BadInput, match="expected one of the two"):
        posterior.predict(X_NEW, return_std=True, quantiles=[0.5])
    with pytest.raises(BadInput, match="num_samples=0; expected a whole number of at least 1"):
        posterior.predict(X_NEW, num_samples=0)
    with pytest.raises(BadInput, match="the model cannot be run on these arguments"):
        posterior.predict(X_NEW[:, :2])
    cauchy = LaplaceEvidence(heavy).run(X, Y)
    with pytest.raises(ValueError, match="quantiles"):
        cauchy.predict(X_NEW)
    assert cauchy.predict(X_NEW, quantiles=[0.05, 0.5, 0.95]).shape == (3, 6)


def test_the_callers_random_numbers_are_left_alone() -> None:
    posterior = LaplaceEvidence(logistic).run(X, LABELS)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = posterior.predict(X_NEW)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, posterior.predict(X_NEW))


def test_missing_targets_are_none() -> None:
    assert completed(linear, (X_NEW,), {}) == ((X_NEW,), {"t": None})
    assert completed(logistic, (X_NEW,), {}) == ((X_NEW,), {})
    assert completed(print, (1,), {"a": 2}) == ((1,), {"a": 2})


def test_quantiles_want_no_moments() -> None:  # oracle: survival exp(1 - e^t) where all is known
    def model(y: Tensor | None = None) -> None:
        rate = pyro.sample("rate", dist.LogNormal(0.0, 1e-6))
        pyro.sample("y", Gompertz(rate, 1.0).expand([2000]).to_event(1), obs=y)

    posterior = LaplaceEvidence(model).run(torch.full((2000,), 0.5))
    found = posterior.predict(quantiles=[0.25, 0.5, 0.75]).mean(-1)
    levels = torch.tensor([0.25, 0.5, 0.75])
    torch.testing.assert_close(1.0 - (1.0 - found.exp()).exp(), levels.to(found), atol=0.02, rtol=0.0)
    with pytest.raises(UnsupportedModel, match="ask for quantiles"):
        posterior.predict()


def test_a_single_number_has_predictive_quantiles() -> None:
    """Of a count outside of all plates: they are of the beta binomial distribution, whose cumulative sums are exact."""

    def coin(k: Tensor | None = None) -> None:
        p = pyro.sample("p", dist.Beta(2.0, 3.0))
        pyro.sample("k", dist.Binomial(10, p), obs=k)

    low, high = LaplaceEvidence(coin).run(torch.tensor(3.0)).predict(quantiles=[0.1, 0.9], num_samples=4000)
    levels = dist.BetaBinomial(torch.tensor(5.0), torch.tensor(10.0), 10).log_prob(torch.arange(11.0)).exp().cumsum(0)
    assert low.shape == () and [float(low), float(high)] == [float((levels < q).sum()) for q in (0.1, 0.9)]
