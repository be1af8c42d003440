"""Networks and Gaussian processes on data that hardly are any: one datum, one class, no input, inputs twice."""

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import BadInput, LaplaceEvidence, LaplacePosterior, Stop, gauss_newton, predict_latent
from pyro_evidence.models.basis import Learned
from pyro_evidence.models.gp import gp_classifier, gp_poisson, gp_regression
from pyro_evidence.models.kernels import RBF
from pyro_evidence.models.mlp import MLP, Binary, Regression, Softmax

QUIET = Stop(progress=False)
X = torch.linspace(-1.0, 1.0, 6)[:, None]
ONE = torch.full((1, 1), 0.5)


def fit(model: Callable[..., Any], X: Tensor, t: Tensor, **settings: Any) -> LaplacePosterior:
    return LaplaceEvidence(model, stop=QUIET, **settings).run(X, t)


def test_regression_on_one_datum_is_a_normal_density() -> None:
    posterior = fit(gp_regression(RBF(1.0, 2.0), beta=4.0, jitter=0.5), ONE, torch.tensor([1.5]))
    expected = dist.Normal(0.0, math.sqrt(2.0 + 0.5 + 0.25)).log_prob(torch.tensor(1.5))
    torch.testing.assert_close(posterior.log_evidence, expected)
    torch.testing.assert_close(posterior.mode["f"], torch.tensor([1.5 * 2.5 / 2.75]))


@pytest.mark.parametrize(
    ("model", "log_likelihood"),
    [
        (gp_classifier(RBF(1.0, 0.5), jitter=0.0), lambda f: torch.nn.functional.logsigmoid(f)),
        (gp_poisson(RBF(1.0, 0.5), mean=0.0, jitter=0.0), lambda f: f - f.exp()),
    ],
)
def test_one_datum_under_laplace_is_near_the_integral(model: Any, log_likelihood: Callable[[Tensor], Tensor]) -> None:
    """Oracle: quadrature over the one value of the function."""
    f = torch.linspace(-8.0, 8.0, 8001)
    density = dist.Normal(0.0, math.sqrt(0.5)).log_prob(f) + log_likelihood(f)
    integral = float(density.logsumexp(0) + math.log(16.0 / 8000))
    assert abs(float(fit(model, ONE, torch.ones(1)).log_evidence) - integral) < 0.02


@pytest.mark.parametrize(
    ("output", "t"),
    [
        (Regression(beta=1.0), torch.tensor([0.7])),
        (Binary(), torch.ones(1)),
        (Softmax(3), torch.tensor([2])),
    ],
)
def test_a_network_on_one_datum_is_near_the_average_over_its_prior(output: Any, t: Tensor) -> None:
    """Oracle: 2e5 random networks."""
    net = MLP(1, 2, output=output, alpha=4.0)
    generator = torch.Generator().manual_seed(0)
    w = {n: 0.5 * torch.randn(200_000, *s, generator=generator) for n, s in net.shapes.items()}
    likelihood = output.distribution(net.predictor(ONE, w), {"beta": torch.ones(1)}).log_prob(t).exp()
    assert abs(float(fit(net, ONE, t).log_evidence) - math.log(float(likelihood.mean()))) < 0.05


@pytest.mark.parametrize("output", [Binary(), pytest.param(Softmax(3), marks=pytest.mark.slow)])
def test_labels_of_one_class_take_the_evidence_of_a_constant(output: Any) -> None:
    """Hyperparameters are maximised, so at least as good as the bias alone, and no better than certainty."""
    posterior = fit(MLP(1, 2, output=output), X, torch.ones(6), curvature=gauss_newton)
    num_classes = max(2, output.num_outputs)
    assert -6.0 * math.log(num_classes) < float(posterior.log_evidence) < 0.0
    assert bool(posterior.pruned["W1"].all())  # the input does not matter
    assert bool((posterior.log_prob() > math.log(0.9)).all())


def test_one_class_in_a_softmax_process_is_predicted_everywhere() -> None:
    posterior = fit(gp_classifier(RBF(), num_classes=3), X, torch.ones(6))
    assert bool((predict_latent(posterior, 3.0 * X).probability().argmax(-1) == 1).all())
    assert -6.0 * math.log(3.0) < float(posterior.log_evidence) < -math.log(3.0)


def by_hand(X: Tensor, t: Tensor) -> None:
    scale = pyro.param("scale", torch.ones(()), constraint=constraints.positive)
    K = torch.exp(-0.5 * torch.cdist(X, X).square() / scale**2)
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(X)), K))
    pyro.sample("t", dist.Bernoulli(logits=f).to_event(1), obs=t)


TWICE = torch.cat([X, X[2:3]])
BAD: list[tuple[str, Callable[..., Any], Tensor, Tensor]] = [
    (r"Inputs 2 and 6 are 0 apart.*more jitter", gp_regression(RBF(), jitter=0.0), TWICE, torch.ones(7)),
    (r"Inputs 2 and 6 are 0 apart.*more jitter", gp_classifier(RBF(), jitter=0.0), TWICE, torch.ones(7)),
    (r"\(7, 7\).*inputs that occur twice.*more jitter", by_hand, TWICE, torch.ones(7)),
    (r"\(6, 0\).*no data", gp_regression(RBF()), X[:, :0], torch.ones(6)),
    (r"\(6, 0\).*no data", gp_classifier(RBF()), X[:, :0], torch.ones(6)),
    (r"\(6, 0\).*expected floats of shape \(N, 1\)", MLP(1, 2), X[:, :0], torch.ones(6)),
]


@pytest.mark.parametrize(("message", "model", "X", "t"), BAD)
def test_the_engine_hands_the_letter_on(message: str, model: Any, X: Tensor, t: Tensor) -> None:
    with pytest.raises(BadInput, match=message):
        fit(model, X, t)


@pytest.mark.parametrize("value", [0.0, math.inf])
def test_a_lengthscale_without_a_covariance_is_refused(value: float) -> None:
    for setting in (value, Learned(value), torch.tensor([1.0, value])):
        with pytest.raises(BadInput, match=f"lengthscale with the value {value:g}; expected finite and greater than 0"):
            RBF(setting)


@pytest.mark.parametrize(("value", "log_odds_alike"), [(1e-300, False), (1e300, True)])
def test_the_limits_of_the_lengthscale_are_noise_and_a_constant(value: float, log_odds_alike: bool) -> None:
    pyro.param("kernel.lengthscale", torch.tensor(value), constraint=constraints.positive)
    posterior = fit(gp_classifier(RBF(variance=1.0)), X, torch.tensor([0.0, 0, 1, 0, 1, 1]), maximise=())
    f = posterior.mode["f"]
    if log_odds_alike:
        torch.testing.assert_close(f, f[:1].expand(6), rtol=1e-3, atol=1e-3)
    else:
        torch.testing.assert_close(f.abs(), f[:1].abs().expand(6))  # each datum alone
        assert float(f[0]) < 0 < float(f[-1])
