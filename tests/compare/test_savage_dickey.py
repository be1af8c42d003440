"""Bayes factors of a point, against closed forms and quadrature."""

import pyro.distributions as dist
import pytest
import torch
from pyro import param, plate, sample
from torch import Tensor

from pyro_evidence import BadInput, LaplaceEvidence, Stop, savage_dickey


def double(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


DATA = torch.tensor([0.5, 1.2, 0.3, 2.0], dtype=torch.float64)


def line(y: Tensor) -> None:
    slope = sample("slope", dist.Normal(double(0.0), double(2.0)))
    level = sample("level", dist.Normal(double(1.0), double(3.0)))
    with plate("data", len(y)):
        sample("y", dist.Normal(level + slope * torch.arange(len(y)), double(0.7)), obs=y)


def line_evidence(y: Tensor, with_slope: bool) -> float:
    x = torch.arange(len(y), dtype=torch.float64).unsqueeze(-1)
    covariance = 0.49 * torch.eye(len(y), dtype=torch.float64) + 9.0 + (4.0 * x @ x.T if with_slope else 0.0)
    return float(dist.MultivariateNormal(torch.ones_like(y), covariance).log_prob(y))


@pytest.mark.parametrize("far", [0.0, 60.0])
def test_a_slope_of_zero_is_the_model_without_it(far: float) -> None:
    y = DATA + far * torch.arange(len(DATA))  # 60 is a hundred standard deviations out
    found = savage_dickey(LaplaceEvidence(line).run(y), {"slope": 0.0})
    expected = line_evidence(y, with_slope=False) - line_evidence(y, with_slope=True)
    assert found.log_bayes_factor == pytest.approx(expected, abs=1e-8)
    assert found.log_prior_density == pytest.approx(float(dist.Normal(0.0, 2.0).log_prob(double(0.0))))
    assert found.depends == ()


def shrunk(y: Tensor) -> None:
    tau = sample("tau", dist.HalfNormal(double(1.0)))
    mu = sample("mu", dist.Normal(double(0.0), tau))
    with plate("data", len(y)):
        sample("y", dist.Normal(mu, double(1.0)), obs=y)


def test_a_prior_that_depends_on_other_sites_is_integrated() -> None:
    tau = torch.linspace(1e-4, 7.0, 5001, dtype=torch.float64)
    mu = torch.linspace(-7.0, 7.0, 1000, dtype=torch.float64)  # none at 0, where the prior is infinite

    def prior(at: Tensor) -> Tensor:
        over = dist.HalfNormal(1.0).log_prob(tau) + dist.Normal(0.0, tau).log_prob(at.unsqueeze(-1))
        return over.logsumexp(-1) + (tau[1] - tau[0]).log()

    total = prior(mu) + dist.Normal(mu.unsqueeze(-1), 1.0).log_prob(DATA).sum(-1)
    log_evidence = total.logsumexp(0) + (mu[1] - mu[0]).log()
    found = savage_dickey(LaplaceEvidence(shrunk, stop=Stop(quadrature_tol=1e-4)).run(DATA), {"mu": 1.0})
    expected = float(dist.Normal(1.0, 1.0).log_prob(DATA).sum() - log_evidence)
    assert found.log_bayes_factor == pytest.approx(expected, abs=0.02)
    assert found.log_prior_density == pytest.approx(float(prior(double(1.0).reshape(1))), abs=0.01)


def test_sites_whose_prior_depends_on_the_point_are_named() -> None:
    found = savage_dickey(LaplaceEvidence(shrunk).run(DATA), {"tau": 1.0})
    assert found.depends == ("mu",)
    assert "of mu the prior is that given the point" in str(found)
    expected = dist.MultivariateNormal(torch.zeros(4, dtype=torch.float64), 1.0 + torch.eye(4, dtype=torch.float64))
    posterior = LaplaceEvidence(shrunk).run(DATA)
    difference = float(expected.log_prob(DATA) - posterior.log_evidence)
    assert found.log_bayes_factor == pytest.approx(difference, abs=1e-8)


def test_maximised_params_are_held() -> None:
    def model(y: Tensor) -> None:
        noise = param("noise", double(1.0), constraint=dist.constraints.positive)
        slope = sample("slope", dist.Normal(double(0.0), double(2.0)))
        level = sample("level", dist.Normal(double(1.0), double(3.0)))
        with plate("data", len(y)):
            sample("y", dist.Normal(level + slope * torch.arange(len(y)), noise), obs=y)

    y = torch.cat([DATA, 0.5 + DATA])
    posterior = LaplaceEvidence(model).run(y)
    noise = float(posterior.hyperparameters["noise"])
    x = torch.arange(len(y), dtype=torch.float64).unsqueeze(-1)
    values = []
    for spread in (0.0, 4.0):
        covariance = noise**2 * torch.eye(len(y), dtype=torch.float64) + 9.0 + spread * x @ x.T
        values.append(float(dist.MultivariateNormal(torch.ones_like(y), covariance).log_prob(y)))
    assert savage_dickey(posterior, {"slope": 0.0}).log_bayes_factor == pytest.approx(values[0] - values[1], abs=1e-8)


def test_bad_points() -> None:
    posterior = LaplaceEvidence(shrunk).run(DATA)
    with pytest.raises(BadInput, match="expected latent sites"):
        savage_dickey(posterior, {"nu": 0.0})
    with pytest.raises(BadInput, match="expected latent sites"):
        savage_dickey(posterior, {})
    with pytest.raises(BadInput, match="in the support"):
        savage_dickey(posterior, {"tau": -1.0})
    with pytest.raises(BadInput, match="has shape"):
        savage_dickey(posterior, {"mu": torch.zeros(2)})


def test_a_point_of_all_sites_is_the_density_there() -> None:
    def model(y: Tensor) -> None:
        mean = sample("mean", dist.Normal(double(0.0), double(2.0)))
        with plate("data", len(y)):
            sample("y", dist.Normal(mean, double(1.0)), obs=y)

    found = savage_dickey(LaplaceEvidence(model).run(DATA), {"mean": 0.5})
    precision = 0.25 + len(DATA)
    posterior = dist.Normal(DATA.sum() / precision, precision**-0.5)
    assert found.log_posterior_density == pytest.approx(float(posterior.log_prob(double(0.5))), abs=1e-9)
    assert found.standard_error == pytest.approx(0.0, abs=1e-9)
