"""Predictions at new inputs against scikit-learn, conditioning on paper, and quadrature."""

import pickle
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process import kernels as sk
from torch import Tensor

from pyro_evidence import BadInput, LaplaceEvidence, LaplacePosterior, Stop, UnsupportedModel, predict_latent
from pyro_evidence.models.gp import gp_classifier, gp_regression
from pyro_evidence.models.kernels import RBF
from pyro_evidence.numerics.quadrature.rules import nodes_and_weights
from pyro_evidence.precision.gaussian_process import LatentPrecision

QUIET = Stop(progress=False)


def data(num_data: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(num_data, 2, generator=generator)
    return X, (X.sum(-1) + 0.8 * torch.randn(num_data, generator=generator) > 0).double()


def fitted(model: Any, *args: Any) -> LaplacePosterior:
    return LaplaceEvidence(model, maximise=(), stop=QUIET).run(*args)


def test_regression_predicts_as_scikit_learn() -> None:
    X, _ = data()
    y, new = X.sum(-1).sin(), data(5, 1)[0]
    found = predict_latent(fitted(gp_regression(RBF(0.8, 1.3), beta=20.0, jitter=1e-9), X, y), new)
    machine = GaussianProcessRegressor(1.3 * sk.RBF(0.8), alpha=0.05 + 1e-9, optimizer=None).fit(X.numpy(), y.numpy())
    mean, covariance = (torch.from_numpy(x) for x in machine.predict(new.numpy(), return_cov=True))
    torch.testing.assert_close(found.mean, mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.covariance, covariance, rtol=1e-7, atol=2e-8)
    torch.testing.assert_close(found.variance, found.covariance.diagonal())


@pytest.mark.skipif(
    not hasattr(GaussianProcessClassifier, "latent_mean_and_variance"), reason="scikit-learn 1.6 or newer"
)
def test_classification_predicts_as_scikit_learn() -> None:
    X, t = data()
    new = data(5, 1)[0]
    found = predict_latent(fitted(gp_classifier(RBF(0.8, 2.0), jitter=1e-9), X, t), new)
    machine = GaussianProcessClassifier(2.0 * sk.RBF(0.8), optimizer=None).fit(X.numpy(), t.numpy())
    mean, variance = (torch.from_numpy(x) for x in machine.latent_mean_and_variance(new.numpy()))
    torch.testing.assert_close(found.mean, mean, rtol=1e-5, atol=1e-5)  # its Newton stops early
    torch.testing.assert_close(found.variance, variance, rtol=1e-5, atol=1e-5)
    averaged = torch.from_numpy(machine.predict_proba(new.numpy())[:, 1])
    torch.testing.assert_close(found.probability(), averaged, rtol=0.0, atol=2e-3)  # its integral is approximate
    assert float((found.probability() - found.mean.sigmoid()).abs().max()) > 0.005  # not the plug-in
    torch.testing.assert_close(found.expected(torch.sigmoid), found.probability(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_classes", [3, 4])
def test_averaged_class_probabilities(num_classes: int) -> None:
    X, t = data()
    label = (t + (torch.arange(len(X)) % 3 == 0)).long()
    model = gp_classifier(RBF(0.8, 2.0), num_classes=num_classes)
    new = data(4, 1)[0]
    posterior = fitted(model, X, label)
    found = predict_latent(posterior, new)
    assert found.mean.shape == (num_classes, 4)
    probability = found.probability()
    draws = found.get_samples(20_000, seed=1).softmax(1)
    error = draws.std(0) / 20_000**0.5
    assert bool(((draws.mean(0) - probability.mT).abs() < 5.0 * error).all())
    torch.testing.assert_close(probability.sum(-1), torch.ones(4))
    drawn = Predictive(posterior.model, guide=posterior.guide, num_samples=600)(new)
    assert drawn["t"].shape == (600, 4) and drawn["f"].reshape(600, -1).shape == (600, 4 * num_classes)
    shares = torch.nn.functional.one_hot(drawn["t"], num_classes).double().mean(0)
    assert float((shares - probability).abs().max()) < 4.0 * 0.5 / 600**0.5


def three_classes() -> tuple[LaplacePosterior, Tensor]:
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(60, 2, generator=generator)
    labels = (X[:, 0] > 0.0).long() + (X[:, 1] > 0.3).long()
    return fitted(gp_classifier(RBF(), num_classes=3), X, labels), torch.randn(5, 2, generator=generator)


def test_a_stiff_prior_does_not_hide_the_process() -> None:
    """At the mode the gradient is a difference of terms a million times as large, and rounding is what is left."""
    posterior, _ = three_classes()
    assert isinstance(posterior.state.precision, LatentPrecision)


def test_classes_of_an_input_do_not_depend_on_the_other_inputs() -> None:
    posterior, new = three_classes()
    together = posterior.predict(new)
    alone = torch.cat([posterior.predict(row.unsqueeze(0)) for row in new])
    torch.testing.assert_close(together, alone, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(together.sum(-1), torch.ones(5))


def test_predicted_classes_are_averages_by_quadrature() -> None:
    X, t = data()
    new = torch.tensor([[0.3, -0.2], [2.0, 1.0]])
    posterior = fitted(gp_classifier(RBF(1.0, 2.0), num_classes=3), X, t.long() + (X[:, 0] > 1.0))
    found = predict_latent(posterior, new)
    nodes, weights = nodes_and_weights(40, found.mean)
    grid, volume = torch.cartesian_prod(nodes, nodes, nodes), torch.cartesian_prod(weights, weights, weights).prod(-1)
    for i, probability in enumerate(posterior.predict(new, num_samples=4096)):
        each = torch.arange(3) * 2 + i
        tril = torch.linalg.cholesky(found.covariance[each][:, each])
        exact = volume @ (found.mean[:, i] + grid @ tril.mT).softmax(-1)
        torch.testing.assert_close(probability, exact, rtol=0.0, atol=2e-3)


def test_predictive_draws_at_new_inputs_and_at_old_ones() -> None:
    X, _ = data()
    y, new = X.sum(-1).sin(), data(5, 1)[0]
    posterior = fitted(gp_regression(RBF(0.8, 1.3), beta=20.0), X, y)
    found = predict_latent(posterior, new)
    guide = pickle.loads(pickle.dumps(posterior.guide))
    drawn = Predictive(posterior.model, guide=guide, num_samples=1000)(new)
    drawn = {name: value.reshape(1000, -1) for name, value in drawn.items()}  # Predictive adds a dim for the plate
    assert drawn["f"].shape == (1000, 5) and drawn["t"].shape == (1000, 5)
    assert bool(((drawn["f"].mean(0) - found.mean).abs() < 5.0 * (found.variance / 1000).sqrt()).all())
    expected = found.covariance + 0.05 * torch.eye(5)
    assert float((drawn["t"].T.cov() - expected).abs().max()) < 6.0 * float(expected.diagonal().max()) / 1000**0.5
    again = Predictive(posterior.model, guide=posterior.guide, num_samples=1000)(X)
    torch.testing.assert_close(again["f"].reshape(1000, -1).mean(0), posterior.mode["f"], rtol=0.0, atol=0.05)


def two_parts(X: Tensor, t: Tensor | None = None) -> None:
    """A process and an intercept."""
    level = pyro.sample("level", dist.Normal(0.0, 2.0))
    K = RBF(0.8, 1.0)(X) + 1e-3 * torch.eye(len(X))
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(X)), K))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(f + level, 0.3), obs=t)


def test_other_latents_are_drawn_jointly_with_the_function() -> None:  # oracle: conditioning on paper
    X, _ = data()
    y, new = 3.0 + X.sum(-1).sin(), data(3, 1)[0]
    posterior = LaplaceEvidence(two_parts, stop=QUIET).run(X, y)
    drawn = Predictive(posterior.model, guide=posterior.guide, num_samples=1000)(new)
    total = drawn["f"].reshape(1000, 3) + drawn["level"].reshape(1000, 1)
    prior = RBF(0.8, 1.0)(torch.cat([X, new])) + 4.0
    inverse = torch.linalg.inv(prior[:12, :12] + (0.09 + 1e-3) * torch.eye(12))
    mean = prior[12:, :12] @ inverse @ y
    variance = (prior[12:, 12:] + 1e-3 * torch.eye(3) - prior[12:, :12] @ inverse @ prior[:12, 12:]).diagonal()
    assert bool(((total.mean(0) - mean).abs() < 5.0 * (variance / 1000).sqrt()).all())
    assert bool((total.var(0) / variance - 1.0).abs().max() < 5.0 * (2.0 / 1000) ** 0.5)
    found = predict_latent(posterior, new)
    assert found.mean.shape == (3,) and posterior.mode["level"] > 1.0


def no_process(X: Tensor, t: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(w * X[:, 0], 1.0), obs=t)


def fixed_length(X: Tensor, t: Tensor | None = None) -> None:
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(12), RBF(0.8, 1.0)(data()[0]) + 0.1 * torch.eye(12)))
    pyro.sample("t", dist.Normal(f, 1.0).to_event(1), obs=t)


def test_letters() -> None:
    X, t = data()
    with pytest.raises(UnsupportedModel, match="dense Gaussian prior"):
        predict_latent(fitted(no_process, X, t), X)
    posterior = fitted(gp_classifier(RBF(1.0, 1.0)), X, t)
    with pytest.raises(BadInput, match=r"argument 0 has shape \(5, 3\), but was fitted with \(12, 2\)"):
        predict_latent(posterior, torch.ones(5, 3))
    with pytest.raises(BadInput, match=r"site='g'; expected one of the latent functions: f"):
        predict_latent(posterior, X, site="g")
    with pytest.raises(BadInput, match="'f' does not grow with its inputs"):
        predict_latent(fitted(fixed_length, X, t), X)


def test_targets_with_next_to_no_noise_are_a_fit() -> None:
    """Far below the jitter of the kernel.  Oracle: a dense normal.

    What observations explain of the covariance is all of it but for the last digits: solving by the difference of the
    two had lost these, and the curvature was not believed.
    """
    X = torch.randn(20, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, one = X[:, 0].sin(), torch.eye(20).double()
    posterior = LaplaceEvidence(gp_regression(RBF(), beta=1e13), stop=QUIET).run(X, y)
    found = posterior.hyperparameters
    K = found["kernel.variance"] * (-0.5 * ((X - X.mT) / found["kernel.lengthscale"]).square()).exp()
    dense = torch.distributions.MultivariateNormal(torch.zeros(20).double(), K + (1e-6 + 1e-13) * one)
    assert float(posterior.log_evidence) == pytest.approx(float(dense.log_prob(y)), abs=1e-5)
    precision = posterior.state.precision
    exact = torch.linalg.inv(K + 1e-6 * one).add(1e13 * one)
    torch.testing.assert_close(precision.solve(exact), one, rtol=0.0, atol=1e-6)
    mean, sd = posterior.predict(torch.tensor([[0.5]]).double(), return_std=True)
    assert abs(float(mean) - float(torch.tensor(0.5).sin())) < 4.0 * float(sd) < 0.02
