"""Modes at infinity and plateaus are refused, whatever the curvature there; proper posteriors are not."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import ImproperPosterior, LaplaceEvidence

X = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
NOISY = (X[:, 0] + torch.randn(80, generator=torch.Generator().manual_seed(1)) > 0.0).to(X.dtype)
SEPARABLE = (X[:, 0] - X[:, 1] > 0.0).to(X.dtype)


def classes(prior: Any) -> Callable[..., None]:
    def model(X: Tensor, t: Tensor) -> None:
        w = pyro.sample("w", prior)
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)

    return model


def flat() -> Any:
    return dist.ImproperUniform(constraints.real, (), (6,))


def normal(sd: float, size: int = 6) -> Any:
    return dist.Normal(0.0, sd).expand([size]).to_event(1)


def log_gamma(y: Tensor) -> None:
    rate = pyro.sample("rate", dist.Gamma(0.1, 0.1))
    pyro.sample("y", dist.Exponential(rate), obs=y)


def cauchy(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Cauchy(0.0, 1.0))
    pyro.sample("y", dist.Normal(mu, 10.0), obs=y)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_separable_classes_under_a_flat_prior(scale: float) -> None:  # in any unit of the inputs
    with pytest.raises(ImproperPosterior, match="points at site 'w', unconstrained element"):
        LaplaceEvidence(classes(flat())).run(scale * X, SEPARABLE)


def test_separable_classes_under_a_nearly_flat_prior() -> None:
    x = torch.linspace(-1.0, 1.0, 8).unsqueeze(-1)
    with pytest.raises(ImproperPosterior, match="2 posterior standard deviations away"):
        LaplaceEvidence(classes(normal(1e4, 1))).run(x, (x[:, 0] > 0.0).to(x.dtype))


def test_collinear_columns_under_a_flat_prior() -> None:
    twice = torch.cat([X[:, :5], X[:, :1]], 1)
    with pytest.raises(ArithmeticError, match=r"collinear|coincide"):
        LaplaceEvidence(classes(flat())).run(twice, NOISY)


@pytest.mark.parametrize("labels", [NOISY, SEPARABLE])
def test_the_letters_remedy(labels: Tensor) -> None:
    posterior = LaplaceEvidence(classes(normal(10.0))).run(X, labels)
    assert posterior.status == "converged"


@pytest.mark.parametrize(("model", "y"), [(log_gamma, torch.tensor(1.0)), (cauchy, torch.tensor(0.3))])
def test_skewed_and_heavy_tails_are_proper(model: Callable[..., None], y: Tensor) -> None:
    assert LaplaceEvidence(model).run(y).status == "converged"


def test_flat_priors_with_enough_data_are_proper() -> None:
    assert LaplaceEvidence(classes(flat())).run(X, NOISY).status == "converged"


def test_a_mode_at_the_origin_is_proper() -> None:
    balanced = torch.cat([X, X]), torch.cat([NOISY, 1.0 - NOISY])
    posterior = LaplaceEvidence(classes(flat())).run(*balanced)
    assert float(posterior.mode["w"].abs().max()) < 1e-6
