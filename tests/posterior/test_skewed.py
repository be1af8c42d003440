"""Draws, quantiles and tables of skewed densities beside conjugate posteriors in closed form."""

import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence
from pyro_evidence.posterior.laplace import LaplacePosterior

COUNTS = torch.tensor([1.0, 4.0, 2.0, 1.0])
CLASSES = torch.tensor([0, 0, 1, 1, 1, 1, 3, 1, 0])


def rates(y: Tensor) -> None:
    with pyro.plate("places", len(y)):
        rate = pyro.sample("rate", dist.Gamma(0.5, 0.1))
        pyro.sample("y", dist.Poisson(rate), obs=y)


def shares(y: Tensor) -> None:
    p = pyro.sample("p", dist.Dirichlet(torch.ones(4)))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Categorical(p), obs=y)


@pytest.fixture(scope="module")
def counted() -> LaplacePosterior:
    return LaplaceEvidence(rates).run(COUNTS)


def close(found: Tensor, mean: Tensor, sd: Tensor) -> None:
    assert bool(((found.mean(0) - mean).abs() < 0.1 * sd).all())
    assert bool((found.std(0) / sd - 1.0).abs().amax() < 0.1)


def test_rates_of_sparse_counts(counted: LaplacePosterior) -> None:
    """Gamma posteriors; about the mode of their logarithms the first would have twice its mean."""
    shape = COUNTS + 0.5
    close(counted.get_samples(4000, seed=1)["rate"], shape / 1.1, shape.sqrt() / 1.1)


def test_shares_of_few_data() -> None:
    a = torch.bincount(CLASSES, minlength=4) + 1.0
    sd = (a * (a.sum() - a) / a.sum() ** 2 / (a.sum() + 1.0)).sqrt()
    close(LaplaceEvidence(shares).run(CLASSES).get_samples(4000, seed=1)["p"], a / a.sum(), sd)


def test_the_table_and_quantiles_are_those_of_the_draws(counted: LaplacePosterior) -> None:
    draws = counted.get_samples(20_000, seed=2)["rate"]
    levels = torch.tensor([0.05, 0.5, 0.95])
    rows = list(counted.table().rows.values())
    for k, row in enumerate(rows):
        spread = float(draws[:, k].std())
        assert abs(row["value"] - float(draws[:, k].mean())) < 0.05 * spread
        assert abs(row["median"] - float(draws[:, k].median())) < 0.05 * spread
    inside = [(draws <= q).double().mean(0) for q in counted.quantiles(levels.tolist())["rate"]]
    assert bool((torch.stack(inside) - levels.unsqueeze(-1)).abs().amax() < 0.02)


def test_nothing_is_said_against_draws_that_are_right(
    counted: LaplacePosterior, capsys: pytest.CaptureFixture[str]
) -> None:
    counted.summary()
    said = capsys.readouterr().out
    assert "not to be trusted" not in said and "is off by" not in said


def test_the_guide_has_the_density_of_its_draws(counted: LaplacePosterior) -> None:
    """Its integral is one, and its log density that of the draws."""
    law = counted.guide.gaussian
    u = law.sample((2000,))
    wide = dist.Normal(counted.state.u, 2.0 * counted.state.precision.variance[0].sqrt()).to_event(1)
    points = wide.sample((20_000,))
    assert abs(float((law.log_prob(points) - wide.log_prob(points)).logsumexp(0)) - math.log(20_000)) < 0.1
    white = torch.randn(50, len(counted.state.u))
    drawn, log_density = law.density.drawn(white)
    torch.testing.assert_close(law.log_prob(drawn), log_density, rtol=1e-5, atol=1e-5)
    assert bool(u.isfinite().all())


def normal_mean(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def many_rates(y: Tensor) -> None:
    with pyro.plate("places", len(y)):
        log_rate = pyro.sample("log_rate", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Poisson(log_rate.exp()), obs=y)


def rates_of_a_learned_size(y: Tensor) -> None:
    loc = pyro.param("loc", torch.zeros(()))
    with pyro.plate("places", len(y)):
        log_rate = pyro.sample("log_rate", dist.Normal(loc, 1.0))
        pyro.sample("y", dist.Poisson(log_rate.exp()), obs=y)


@pytest.mark.parametrize(
    ("model", "y"),
    [(normal_mean, torch.zeros(3)), (many_rates, torch.ones(60)), (rates_of_a_learned_size, COUNTS)],
)
def test_without_skewness_beside_maximised_params_and_of_many_coordinates_draws_are_normal(
    model: Callable[..., None], y: Tensor
) -> None:
    found = LaplaceEvidence(model).run(y)
    assert found._skewed is None
    white = torch.randn(5, len(found.state.u))
    torch.testing.assert_close(found._unwhitened(white), found._about_mean.u + found.state.precision.unwhiten(white))
