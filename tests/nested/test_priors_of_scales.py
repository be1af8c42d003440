"""Eight schools under other priors of how much they differ, in other units and forms, against quadrature."""

from collections.abc import Callable
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop
from tests.models_for_tests.sampled_scales import SCHOOL_SDS, SCHOOLS

X = torch.linspace(-40.0, 25.0, 20001)  # unconstrained


@dataclass(frozen=True)
class Case:
    """A prior of the spread, and what of it is sampled.

    :ivar scale: the standard deviation that a value stands for.
    :ivar unit: in which effects and their errors are measured, ``times`` by which effects alone are larger.
    """

    prior: Callable[[Tensor], dist.Distribution]
    scale: Callable[[Tensor], Tensor] = lambda value: value
    unit: float = 1.0
    times: float = 1.0
    width: float = 5.0  # of the prior of their mean
    dtype: torch.dtype = torch.float64

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        y, sd = self.unit * self.times * SCHOOLS, self.unit * SCHOOL_SDS
        return y.to(self.dtype), sd.to(self.dtype)

    def model(self, y: Tensor, sd: Tensor) -> None:
        one = torch.ones((), dtype=self.dtype)
        mu = pyro.sample("mu", dist.Normal(0.0 * one, self.width * self.unit * one))
        tau = self.scale(pyro.sample("t", self.prior(one)))
        with pyro.plate("schools", len(y)):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            pyro.sample("y", dist.Normal(theta, sd), obs=y)

    def exact(self) -> tuple[float, float, float]:
        """Oracle: log evidence, mean and deviation of the unconstrained site; all but it on paper."""
        (y, sd), prior = (part.double() for part in self.data), self.prior(torch.ones(()))
        transform = torch.distributions.biject_to(prior.support)
        value = transform(X)
        variance = sd**2 + self.scale(value).unsqueeze(-1) ** 2
        precision = 1.0 / (self.width * self.unit) ** 2 + (1.0 / variance).sum(-1)
        mean = (y / variance).sum(-1) / precision
        height = dist.Normal(0.0, variance.sqrt()).log_prob(y).sum(-1) + 0.5 * precision * mean**2
        height = height - 0.5 * ((self.width * self.unit) ** 2 * precision).log()
        height = height + prior.log_prob(value.clamp(min=1e-300)) + transform.log_abs_det_jacobian(X, value)
        height = height.nan_to_num(nan=-1e9, neginf=-1e9)
        log_evidence = torch.trapezoid((height - height.max()).exp(), X).log() + height.max()
        density = (height - log_evidence).exp()
        middle = torch.trapezoid(density * X, X)
        return float(log_evidence), float(middle), float(torch.trapezoid(density * (X - middle) ** 2, X)) ** 0.5


CASES = {
    "HalfCauchy(25)": Case(lambda one: dist.HalfCauchy(25.0 * one)),
    "Uniform(0, 100)": Case(lambda one: dist.Uniform(0.0 * one, 100.0 * one)),
    "LogNormal": Case(lambda one: dist.LogNormal(0.0 * one, one)),
    "inverse gamma variance": Case(lambda one: dist.InverseGamma(2.0 * one, 20.0 * one), lambda value: value.sqrt()),
    "gamma precision": Case(lambda one: dist.Gamma(one, one), lambda value: value.rsqrt()),
    "vague gamma precision": Case(lambda one: dist.Gamma(0.1 * one, 0.1 * one), lambda value: value.rsqrt()),
    "nearly alike": Case(lambda one: dist.HalfNormal(one), times=0.05),
    "far apart": Case(lambda one: dist.HalfCauchy(1000.0 * one), times=100.0, width=1000.0),
    "thousands": Case(lambda one: dist.HalfCauchy(5000.0 * one), unit=1000.0),
    "thousandths": Case(lambda one: dist.HalfCauchy(0.005 * one), unit=0.001),
    "single precision": Case(lambda one: dist.HalfCauchy(5.0 * one), dtype=torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_any_prior_of_a_spread_in_any_unit(name: str) -> None:
    case = CASES[name]
    log_evidence, mean, sd = case.exact()
    posterior = LaplaceEvidence(case.model, stop=Stop(progress=False)).run(*case.data)
    assert posterior.marginalised_sites == ("t",)
    assert float(posterior.log_evidence) == pytest.approx(log_evidence, abs=0.02)
    found = posterior.integral.moments
    assert float(found[0]) == pytest.approx(mean, abs=0.05 * sd) and float(found[1]) == pytest.approx(sd, rel=0.05)
