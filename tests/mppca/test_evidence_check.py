"""Importance sampling of principal subspaces is over their orbits; labellings and parameters are counted."""

import math

import pytest
import torch

from pyro_evidence import EvidenceEM, compare_evidence, importance_sampling
from pyro_evidence.models.mppca import mppca
from pyro_evidence.mppca.posterior import MPPCAPosterior

GENERATOR = torch.Generator().manual_seed(1)
LINE = torch.randn(12, 1, generator=GENERATOR) * torch.tensor([1.0, -0.7]) + 0.4 * torch.randn(
    12, 2, generator=GENERATOR
)


def by_quadrature(posterior: MPPCAPosterior) -> float:
    """Both loadings of one axis in the plane on a grid; the latent coordinate is integrated on paper."""
    alpha, beta, mu = (posterior.hyperparameters[name].squeeze() for name in ("alpha", "beta", "mu"))
    axis = torch.linspace(-7.0, 7.0, 801, dtype=torch.float64) / alpha.sqrt()
    W = torch.cartesian_prod(axis, axis)
    covariance = W.unsqueeze(-1) * W.unsqueeze(-2) + torch.eye(2) / beta
    log_lik = torch.distributions.MultivariateNormal(mu, covariance).log_prob(LINE.double().unsqueeze(1)).sum(0)
    log_prior = 0.5 * (alpha.log() - math.log(math.tau)) * 2.0 - 0.5 * alpha * W.square().sum(-1)
    return float((log_lik + log_prior).logsumexp(0) + 2.0 * (axis[1] - axis[0]).log())


def test_importance_sampling_is_over_the_orbits() -> None:
    posterior = EvidenceEM(mppca(1, 1)).run(LINE)
    found = importance_sampling(posterior)
    assert found.log_evidence == pytest.approx(by_quadrature(posterior), abs=3.0 * found.standard_error)
    assert found.standard_error < 0.02
    assert found.reliable
    assert not posterior.diagnostics()["exact"]


def test_labellings_and_maximised_parameters_are_counted() -> None:
    Y = torch.cat([LINE + 5.0, LINE - 5.0])
    one, two = (EvidenceEM(mppca(num, 1)).run(Y) for num in (1, 2))
    rows = {row.name: row for row in compare_evidence(one=one, two=two, throw=False).rows}
    assert rows["two"].log_labels == pytest.approx(math.log(2.0))
    assert rows["one"].log_labels == 0.0
    assert (rows["one"].num_hyperparameters, rows["two"].num_hyperparameters) == (4, 9)


def test_the_error_of_the_log_evidence_is_over_the_orbits() -> None:
    """Blocks of loadings see the orbit as a direction of great width, and were 3.2 nats off."""
    generator = torch.Generator().manual_seed(0)
    W, noise = 2.0 * torch.randn(5, 2, generator=generator), torch.randn(100, 5, generator=generator)
    posterior = EvidenceEM(mppca(1, 2)).run(torch.randn(100, 2, generator=generator) @ W.T + noise)
    found, error = importance_sampling(posterior, seed=1), posterior.log_evidence_error
    assert error.signed == pytest.approx(found.log_evidence - float(posterior.log_evidence), abs=0.1)
    assert abs(error.signed) < float(error) < 0.5
    assert "pass nodes" not in str(posterior.summary())
