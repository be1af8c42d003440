"""Gaussian processes whose settings are sampled: integrated over them, the function's values inside."""

import pyro.distributions as dist
import pytest
import torch

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.models.gp import gp_regression
from pyro_evidence.models.kernels import RBF
from pyro_evidence.structure.density import Climbing

PRIOR = dist.LogNormal(torch.tensor(0.0, dtype=torch.float64), 0.7)
NOISE = 25.0  # precision


def test_the_log_evidence_of_a_process_is_that_of_quadrature_over_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the prior covariance at each node; no second derivative is taken of the density, a pass for each value."""

    def no_passes(*_: object) -> None:
        raise AssertionError("the curvature of a process is known from its covariance")

    monkeypatch.setattr(Climbing, "precision", no_passes)
    generator = torch.Generator().manual_seed(0)
    X = torch.linspace(0.0, 4.0, 40, dtype=torch.float64).unsqueeze(-1)
    y = (2.0 * X[:, 0]).sin() + 0.2 * torch.randn(40, generator=generator, dtype=torch.float64)
    posterior = LaplaceEvidence(gp_regression(RBF(PRIOR, PRIOR), beta=NOISE), stop=Stop(progress=False)).run(X, y)

    log_settings = torch.linspace(-2.5, 3.0, 111, dtype=torch.float64)  # the rule of trapezoids, to rounding
    places = torch.cartesian_prod(log_settings, log_settings)
    lengthscale, variance = places.exp()[:, :, None, None].unbind(1)
    prior = (PRIOR.log_prob(places.exp()) + places).sum(-1)
    K = variance * (-0.5 * (X - X.mT).square() / lengthscale.square()).exp()
    K.diagonal(dim1=-2, dim2=-1).add_(1e-6 + 1.0 / NOISE)
    log_joint = prior + dist.MultivariateNormal(torch.zeros(40, dtype=torch.float64), K).log_prob(y)
    expected = log_joint.logsumexp(0) + 2.0 * (log_settings[1] - log_settings[0]).log()
    torch.testing.assert_close(posterior.log_evidence, expected, rtol=0.0, atol=Stop().quadrature_tol)
