"""Marginals on a grid against closed forms: their normaliser, moments, quantiles and change of variables."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import Gamma, LogNormal, Normal
from torch.distributions.transforms import ExpTransform, identity_transform

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.errors import BadInput
from pyro_evidence.nested.marginal import Marginal, constrained, unconstrained
from pyro_evidence.numerics.coordinates import Coordinate
from pyro_evidence.numerics.quadrature.rules import gauss_hermite

LEVELS = [0.05, 0.5, 0.9]


def test_a_scale_has_what_laplace_leaves_out_of_its_density() -> None:
    """Three answers of each of 80 persons: Laplace inside has the spread .6 deviations low.  Oracle: a grid."""
    persons, s = torch.arange(80).repeat_interleave(3), torch.linspace(0.005, 6.0, 600, dtype=torch.float64)
    y = torch.arange(3) < torch.tensor([0, 1, 2, 3]).repeat_interleave(torch.tensor([16, 24, 24, 16]))[:, None]
    y = y.double()

    def model(y: Tensor) -> None:
        s = pyro.sample("s", dist.HalfNormal(y.new_tensor(2.0)))
        with pyro.plate("persons", 80):
            u = pyro.sample("u", dist.Normal(y.new_tensor(0.0), s))
        pyro.sample("y", dist.Bernoulli(logits=u[persons]).to_event(1), obs=y)

    rule, right = gauss_hermite(40), y.sum(1)
    eta = s[:, None, None] * rule.nodes[:, 0]
    each = right[:, None] * eta - 3.0 * torch.nn.functional.softplus(eta)
    log_density = (each + rule.log_weights).logsumexp(-1).sum(-1) - s.square() / 8.0
    share = log_density.softmax(0)
    mean = float((share * s).sum())
    sd = float((share * (s - mean).square()).sum()) ** 0.5
    posterior = LaplaceEvidence(model, stop=Stop(progress=False)).run(y.flatten())
    assert float(posterior.marginal("s").mean) == pytest.approx(mean, abs=0.1 * sd)


def check(found: Marginal, exact: object, element: int = 0) -> None:
    assert float(found.mean[element]) == pytest.approx(float(exact.mean), rel=1e-4)  # type: ignore[attr-defined]
    assert float(found.sd[element]) == pytest.approx(float(exact.stddev), rel=1e-3)  # type: ignore[attr-defined]
    below = exact.cdf(found.quantiles(LEVELS)[:, element])  # type: ignore[attr-defined]
    torch.testing.assert_close(below, torch.tensor(LEVELS, dtype=torch.float64), rtol=0.0, atol=1e-4)


def test_a_density_up_to_a_constant_becomes_one() -> None:
    x = torch.linspace(-9.0, 13.0, 2001, dtype=torch.float64)[:, None]
    exact = Normal(torch.tensor(1.5, dtype=torch.float64), 1.2)
    found = unconstrained(x, 7.0 * exact.log_prob(x).exp())
    torch.testing.assert_close(found.density, exact.log_prob(x).exp())
    torch.testing.assert_close(found.mass, exact.cdf(x), rtol=0.0, atol=1e-5)
    check(found, exact)


def test_a_positive_site_has_the_density_of_its_logarithm_over_its_value() -> None:
    part = Coordinate("s", ExpTransform(), torch.Size([2]), torch.Size([2]))
    x = torch.linspace(-8.0, 6.0, 8001, dtype=torch.float64)[:, None].expand(-1, 2)
    gamma = Gamma(torch.tensor(3.0, dtype=torch.float64), 2.0)
    normal = Normal(torch.tensor(0.2, dtype=torch.float64), 0.5)
    density = torch.stack([(gamma.log_prob(x[:, 0].exp()) + x[:, 0]).exp(), normal.log_prob(x[:, 1]).exp()], -1)
    found = constrained(part, x, density)
    torch.testing.assert_close(found.density[:, 0], gamma.log_prob(found.values[:, 0]).exp())
    check(found, gamma, 0)
    check(found, LogNormal(torch.tensor(0.2, dtype=torch.float64), 0.5), 1)


def test_levels_that_are_no_probabilities_are_refused() -> None:
    part = Coordinate("w", identity_transform, torch.Size([1]), torch.Size([1]))
    x = torch.linspace(-1.0, 1.0, 11, dtype=torch.float64)[:, None]
    with pytest.raises(BadInput, match=r"quantiles\(1.5\): expected probabilities between 0 and 1"):
        constrained(part, x, 1.0 - x.square()).quantiles(1.5)
