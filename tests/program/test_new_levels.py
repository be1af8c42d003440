"""Groups that a fit has not seen: their predictive distribution on paper."""

import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive
from torch import Tensor

from pyro_evidence import LaplaceEvidence, LaplacePosterior, Stop

NUM, SPREAD, NOISE = 30, 2.0, 0.5


def model(group: Tensor, num_groups: int, y: Tensor | None = None) -> None:
    """A random intercept."""
    with pyro.plate("groups", num_groups):
        a = pyro.sample("a", dist.Normal(0.0, SPREAD))
    with pyro.plate("data", len(group)):
        pyro.sample("y", dist.Normal(a[group], NOISE), obs=y)


@pytest.fixture(scope="module")
def posterior() -> LaplacePosterior:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    group = torch.arange(NUM).repeat_interleave(3)
    y = SPREAD * torch.randn(NUM)[group] + NOISE * torch.randn(len(group))
    return LaplaceEvidence(model, stop=Stop(progress=False)).run(group, NUM, y)


def test_an_unseen_group_is_drawn_from_its_prior(posterior: LaplacePosterior) -> None:
    draws = Predictive(posterior.model, guide=posterior.guide, num_samples=800)(torch.tensor([3, NUM, NUM]), NUM + 1)
    y = draws["y"]
    prior = SPREAD**2 + NOISE**2
    assert abs(float(y[:, 1].var()) / prior - 1.0) < 4.0 * (2.0 / 800) ** 0.5
    between = float(torch.cov(y[:, 1:].mT)[0, 1])  # two data of one unseen group share its effect
    assert abs(between - SPREAD**2) < 4.0 * (prior**2 + SPREAD**4) ** 0.5 / 800**0.5
    known = NOISE**2 + 1.0 / (1.0 / SPREAD**2 + 3.0 / NOISE**2)
    assert abs(float(y[:, 0].var()) / known - 1.0) < 4.0 * (2.0 / 800) ** 0.5


def test_draws_of_any_source_meet_other_plate_sizes(posterior: LaplacePosterior) -> None:
    samples = posterior.get_samples(7, seed=0)
    for num in (1, NUM, 2 * NUM):
        found = Predictive(posterior.model, samples)(torch.zeros(4, dtype=torch.long), num)
        assert found["y"].shape == (7, 4)


def test_densities_of_unseen_groups_stand_at_their_prior_mean(posterior: LaplacePosterior) -> None:
    y = torch.tensor([0.5, -1.0, 2.0])
    found = posterior.log_prob(torch.tensor([3, NUM, NUM + 4]), NUM + 5, y)
    loc = torch.stack([posterior.mode["a"][3], torch.zeros(()), torch.zeros(())])
    torch.testing.assert_close(found, dist.Normal(loc, NOISE).log_prob(y))
    fewer = posterior.log_prob(torch.tensor([3, 1]), 4, y[:2])  # of a table with the first groups only
    torch.testing.assert_close(fewer, dist.Normal(posterior.mode["a"][[3, 1]], NOISE).log_prob(y[:2]))


def test_the_model_can_still_be_pickled(posterior: LaplacePosterior) -> None:
    again = pickle.loads(pickle.dumps(posterior.model))
    found = Predictive(again, posterior.get_samples(3, seed=0))(torch.tensor([NUM + 4]), NUM + 5)
    assert found["y"].shape == (3, 1)
