"""Draws of all rows at once: the model runs once, and every row has random numbers of its own."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.simulate import from_predictive, from_prior

NUM = 1000
FAR = 1.95 * (2.0 / NUM) ** 0.5  # two samples are further apart once in a thousand times, Kolmogorov and Smirnov
ONE = torch.ones(2)

PRIORS = {
    "normal": dist.Normal(0.3 * ONE, 2.0),
    "uniform": dist.Uniform(-ONE, 2.0),
    "exponential": dist.Exponential(3.0 * ONE),
    "cauchy": dist.Cauchy(ONE, 1.0),
    "half-Cauchy": dist.HalfCauchy(ONE),
    "gamma": dist.Gamma(0.7 * ONE, 1.0),
    "Student's t": dist.StudentT(4.0 * ONE),
    "multivariate": dist.MultivariateNormal(ONE, torch.tensor([[2.0, 0.5], [0.5, 1.0]])),
    "log-normal": dist.LogNormal(0.0 * ONE, 1.0),
    "Weibull": dist.Weibull(2.0 * ONE, 1.5),
    "beta": dist.Beta(0.7 * ONE, 1.5),
    "Dirichlet": dist.Dirichlet(torch.tensor([0.7, 0.2])),
    "von Mises": dist.VonMises(0.5 * ONE, 2.0),
    "stable": dist.Stable(1.5 * ONE, 0.2, 2.0, 1.0),
}


@pytest.mark.parametrize("name", PRIORS)
def test_all_rows_are_drawn_in_one_run(name: str) -> None:
    runs, prior = [], PRIORS[name].to_event(1 - PRIORS[name].event_dim)

    def model(y: Tensor) -> None:
        runs.append(None)
        x = pyro.sample("x", prior)
        pyro.sample("y", dist.Gamma(2.0, 1.0).expand([2]).to_event(1), obs=y.abs() + 0.0 * x)

    joint = LogJoint(model, (ONE,))
    runs.clear()
    drawn = from_prior(joint, joint.initial_theta, NUM, seed=0)
    assert len(runs) == 1
    assert len(set(drawn["x"].flatten().tolist())) == 2 * NUM and len(set(drawn["y"].flatten().tolist())) == 2 * NUM
    for ours, theirs in zip(drawn["x"].T, prior.sample((NUM,)).T, strict=True):
        ends = torch.cat([ours, theirs]).sort().values
        shares = [torch.searchsorted(part.sort().values, ends, right=True) / NUM for part in (ours, theirs)]
        assert float((shares[0] - shares[1]).abs().max()) < FAR
    runs.clear()
    new = from_predictive(joint, joint.initial_theta, torch.zeros(NUM, 2), seed=0)["y"]
    assert len(runs) == 1
    assert new.shape == (NUM, 2) and len(set(new.flatten().tolist())) == 2 * NUM


class Filled(dist.Normal):
    """A sampler that returns a tensor of its own after it is filled."""

    def rsample(self, sample_shape: tuple[int, ...] = ()) -> Tensor:
        noise = torch.zeros(self.shape(torch.Size(sample_shape)))
        noise.normal_()
        return self.loc + self.scale * noise


def test_samplers_of_others_keep_the_numbers_that_they_drew() -> None:
    def model(y: Tensor) -> None:
        pyro.sample("y", dist.Normal(pyro.sample("x", Filled(ONE, 1.0).to_event(1)), 1.0).to_event(1), obs=y)

    joint = LogJoint(model, (ONE,))
    drawn = from_prior(joint, joint.initial_theta, 50, seed=0)["x"]
    assert len(set(drawn.flatten().tolist())) == 100 and 0.7 < float(drawn.std()) < 1.3
