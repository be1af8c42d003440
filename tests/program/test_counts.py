"""Poisson counts by their log rate: the same numbers as the distribution's own."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.numerics.linear_predictor import slope_and_curvature
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.predictors import LikelihoodTerm
from pyro_evidence.structure.recognise import recognise

X = torch.linspace(-1.0, 2.0, 12, dtype=torch.float64).reshape(6, 2)


def model(y: Tensor, factor: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
    with pyro.plate("rows", len(y)), pyro.poutine.scale(scale=0.5):
        pyro.sample("y", dist.Poisson((X @ w).exp()), obs=y)


def likelihood_of(y: Tensor) -> tuple[LikelihoodTerm, LogJoint]:
    joint = LogJoint(model, (y,), {})
    linear = recognise(joint).linear
    assert linear is not None
    return linear.linear[0].likelihood, joint


@pytest.mark.parametrize("counts", [[0.0, 1.0, 2.0, 7.0, 30.0, 0.0], [1e6, 0.0, 1.0, 1.0, 0.0, 3.0]])
def test_values_slopes_and_curvatures_are_the_distributions_own(counts: list[float]) -> None:
    y = torch.tensor(counts, dtype=torch.float64)
    likelihood, joint = likelihood_of(y)
    trace = joint.trace(joint.initial_u, joint.initial_theta)
    eta = torch.tensor([-3.0, -0.5, 0.0, 1.0, 4.0, 9.0], dtype=torch.float64).reshape(1, 6, 1)
    value, slope, blocks = slope_and_curvature(likelihood.log_likelihood(trace), likelihood.layout, eta)
    rate = eta[0, :, 0].exp()
    torch.testing.assert_close(value[0], 0.5 * dist.Poisson(rate).log_prob(y).sum())
    torch.testing.assert_close(slope[0, :, 0], 0.5 * (y - rate))
    torch.testing.assert_close(blocks()[0, :, 0, 0], 0.5 * rate)


def test_factorials_that_are_kept_are_those_of_the_counts_in_double_precision() -> None:
    y = torch.tensor([1e5, 3.0, 0.0, 777.0, 1e4, 12.0])
    likelihood, joint = likelihood_of(y.double())
    for counts in (y, y + 1.0, y):
        trace = LogJoint(model, (counts,), {}).trace(joint.initial_u, joint.initial_theta)
        closed = likelihood.closed(trace)
        assert closed is not None
        expected = 0.5 * dist.Poisson(torch.ones(6, dtype=torch.float64)).log_prob(counts.double()).sum()
        value = closed(torch.zeros(1, 6, 1, dtype=torch.float64))[0][0]
        torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
