"""Flat priors on scales, Stan's default: a posterior where there is one, an integral that is no evidence."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import BadInput, ImproperPosterior, LaplaceEvidence, Stop, compare_evidence

QUIET = Stop(progress=False)
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]).double()
EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]).double()


def flat(support: constraints.Constraint, *shape: int) -> dist.ImproperUniform:
    return dist.ImproperUniform(support, (), shape)


def schools(errors: Tensor, effects: Tensor) -> None:
    mu, tau = pyro.sample("mu", flat(constraints.real)), pyro.sample("tau", flat(constraints.positive))
    with pyro.plate("schools", len(errors)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("effects", dist.Normal(theta, errors), obs=effects)


def schools_by_quadrature(num: int) -> tuple[float, float]:
    """The integral over mu in closed form and over log tau on a grid: its log, and the median of tau."""
    log_tau = torch.linspace(-12.0, math.log(1e6), 40_001).double()
    variance = ERRORS[:num].square() + (2.0 * log_tau).exp().unsqueeze(-1)
    V = 1.0 / (1.0 / variance).sum(-1)
    mean = (EFFECTS[:num] / variance).sum(-1) * V
    rows = dist.Normal(mean.unsqueeze(-1), variance.sqrt()).log_prob(EFFECTS[:num]).sum(-1)
    height = rows + 0.5 * (2.0 * math.pi * V).log() + log_tau
    mass = height.softmax(0).cumsum(0)
    step = (log_tau[1] - log_tau[0]).log()
    return float(height.logsumexp(0) + step), float(log_tau[(mass < 0.5).sum()].exp())


@pytest.mark.parametrize("num", [8, 4])
def test_a_spread_of_groups(num: int) -> None:
    posterior = LaplaceEvidence(schools, stop=QUIET).run(ERRORS[:num], EFFECTS[:num])
    log_integral, median = schools_by_quadrature(num)
    assert float(posterior.log_evidence) == pytest.approx(log_integral, abs=0.02)
    tau = posterior.get_samples(4000, seed=0)["tau"]
    assert float(tau.log().median()) == pytest.approx(math.log(median), abs=0.1)


def test_a_posterior_without_an_integral_is_refused_soon() -> None:
    """Of two groups' spread the density falls as 1 / tau: its integral has no end, and 10,000 runs said no more."""
    runs = 0

    def counted(errors: Tensor, effects: Tensor) -> None:
        nonlocal runs
        runs += 1
        schools(errors, effects)

    with pytest.raises(ImproperPosterior, match="no integral"):
        LaplaceEvidence(counted, stop=QUIET).run(ERRORS[:2], EFFECTS[:2])
    assert runs < 1000


def regression(X: Tensor, y: Tensor) -> None:
    w, sigma = pyro.sample("w", flat(constraints.real_vector, 3)), pyro.sample("sigma", flat(constraints.positive))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


def test_a_regression_has_the_integral_of_its_closed_form() -> None:
    """sigma squared is inverse gamma, with n - p - 1 degrees of freedom; coefficients are Student's."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = X @ torch.tensor([1.0, -2.0, 0.5]).double() + 0.7 * torch.randn(40, generator=generator, dtype=torch.float64)
    n, p = X.shape
    w = torch.linalg.lstsq(X, y.unsqueeze(-1)).solution.squeeze(-1)
    S, a = float((y - X @ w).square().sum()), (n - p - 1) / 2
    log_integral = math.lgamma(a) - a * math.log(S / 2) - math.log(2.0) - (n - p) / 2 * math.log(2 * math.pi)
    log_integral -= 0.5 * float(torch.logdet(X.T @ X))
    mean_of_sigma = math.sqrt(S / 2) * math.exp(math.lgamma(a - 0.5) - math.lgamma(a))
    posterior = LaplaceEvidence(regression, stop=QUIET).run(X, y)
    assert float(posterior.log_evidence) == pytest.approx(log_integral, abs=0.02)
    draws = posterior.get_samples(4000, seed=0)
    assert float(draws["sigma"].mean()) == pytest.approx(mean_of_sigma, rel=0.01)
    torch.testing.assert_close(draws["w"].mean(0), w, rtol=0.0, atol=0.02)


def test_the_summary_says_that_it_is_no_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    posterior = LaplaceEvidence(schools, stop=QUIET).run(ERRORS, EFFECTS)
    posterior.summary()
    assert "flat prior for mu, tau: " in capsys.readouterr().out
    with pytest.raises(BadInput, match="flat prior for mu, tau"):
        compare_evidence(a=posterior, b=posterior)
