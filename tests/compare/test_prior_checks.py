"""Power-scaling against closed forms and ArviZ's weights; the prior predictive tail against a chi-square."""

import math

import arviz as az
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.compare import power_scaling, prior_data_conflict
from pyro_evidence.compare.prior_checks import distance

QUIET = Stop(progress=False)


def heights(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def grouped(y: Tensor) -> None:
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    with pyro.plate("groups", len(y)):
        b = pyro.sample("b", dist.Normal(1.0, tau))
        pyro.sample("y", dist.Normal(b, 1.0), obs=y)


@pytest.mark.parametrize("y", [[0.5, -0.2, 0.4], [5.0, 6.0, 7.0]])
def test_the_two_numbers_are_those_of_arviz_by_weights(y: list[float]) -> None:
    """Weights of exact quantiles, as many as draws, whose range enters: it varies by a fifth between sets of draws."""
    t = torch.tensor(y, dtype=torch.float64)
    found = power_scaling(LaplaceEvidence(heights, stop=QUIET).run(t))
    levels = (torch.arange(1_000, dtype=torch.float64) + 0.5) / 1_000
    mu = t.sum() / 4.0 + 0.5 * torch.special.ndtri(levels)
    idata = az.from_dict(
        posterior={"mu": mu[None].numpy()},
        log_likelihood={"y": dist.Normal(mu.unsqueeze(-1), 1.0).log_prob(t)[None].numpy()},
    )
    idata.add_groups({"log_prior": {"mu": dist.Normal(0.0, 1.0).log_prob(mu)[None].numpy()}})
    for component, value in (("prior", found.prior), ("likelihood", found.likelihood)):
        expected = float(az.psens(idata, component=component)["mu"])
        assert float(value["mu"]) == pytest.approx(expected, rel=0.3)


def test_sensitivity_is_said_of_what_the_prior_moves() -> None:
    far = power_scaling(LaplaceEvidence(heights, stop=QUIET).run(torch.tensor([8.0, 9.0])))
    assert "mu: prior-data conflict" in str(far)
    many = power_scaling(LaplaceEvidence(heights, stop=QUIET).run(torch.linspace(-2.0, 2.0, 400)))
    assert not many.table().notes


def test_marginalised_sites_are_refitted_alike() -> None:
    found = power_scaling(LaplaceEvidence(grouped, stop=QUIET).run(torch.tensor([0.0, 2.0, 1.0, 4.0, -1.0, 1.5])))
    assert set(found.prior) == {"tau", "b"}
    assert found.prior["b"].shape == (6,)
    assert 0.01 < float(found.prior["tau"]) < 0.5


def test_the_distance_of_samples() -> None:
    """Nothing between a sample and itself; all there can be between samples that do not overlap, seen from one end."""
    x = torch.linspace(0.0, 1.0, 100)
    assert float(distance(x, x)) == 0.0
    assert 0.95 < float(distance(x, x + 50.0)) <= 1.0


@pytest.mark.parametrize("far", [0.0, 2.0, 4.0])
def test_the_tail_of_a_normal_prior_predictive(far: float) -> None:
    """Densities fall with the square of the distance from the mean: a chi-square with as many degrees as data."""
    y = torch.tensor([1.0, 0.5, 1.5], dtype=torch.float64) + far
    found = prior_data_conflict(LaplaceEvidence(heights, stop=QUIET).run(y), num_simulations=400)
    covariance = torch.eye(3, dtype=torch.float64) + 1.0
    square = float(y @ torch.linalg.solve(covariance, y))
    expected = 1.0 - float(torch.special.gammainc(torch.tensor(1.5), torch.tensor(0.5 * square)))
    assert found.p_value == pytest.approx(expected, abs=3.0 * math.sqrt(expected * (1.0 - expected) / 400) + 1e-3)
