"""What correlated noise would gain: said with the remedy where it is much, and confirmed by the evidence."""

import pytest
import torch
from torch import Tensor

from pyro_evidence import EvidenceEM
from pyro_evidence.mixture.posterior import gain
from pyro_evidence.models.mixture import FullNoise, gaussian_mixture


def blobs(correlation: float) -> Tensor:
    g = torch.Generator().manual_seed(0)
    tril = torch.linalg.cholesky(torch.tensor([[1.0, correlation], [correlation, 1.0]]))
    return torch.cat([torch.randn(100, 2, generator=g) @ tril.T, torch.randn(100, 2, generator=g) @ tril.T + 8.0])


def test_gain_of_one_component() -> None:  # oracle: two normal fits by maximum likelihood
    x = blobs(0.9)[:100]
    e = x - x.mean(0)
    S = e.T @ e / 100.0
    full = torch.distributions.MultivariateNormal(x.mean(0), S).log_prob(x).sum()
    apart = torch.distributions.Normal(x.mean(0), S.diagonal().sqrt()).log_prob(x).sum()
    assert gain(e, torch.ones(100)) == pytest.approx(float(full - apart))


def test_crabs_like_data_are_told_of_full_noise(capsys) -> None:
    data = blobs(0.95)
    posterior = EvidenceEM(gaussian_mixture(2)).run(data)
    found = posterior.diagnostics(200)
    assert found["correlation_gain"] > 20.0
    posterior.summary()
    assert "noise=FullNoise()" in capsys.readouterr().out
    remedy = EvidenceEM(gaussian_mixture(2, noise=FullNoise())).run(data)  # the error message's advice
    assert float(remedy.log_evidence) > float(posterior.log_evidence) + 20.0
    assert remedy.diagnostics(200)["notes"] == []


def test_uncorrelated_noise_is_left_alone(capsys) -> None:
    posterior = EvidenceEM(gaussian_mixture(2)).run(blobs(0.0))
    assert posterior.diagnostics(200)["notes"] == []
