"""Calibration of Laplace's posterior where it is not exact: logistic regression and a small mixture."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Start, sbc
from tests.compare.test_sbc import laplace
from tests.models_for_tests.exact_models import location


def logistic(X: Tensor, t: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def ordered_mixture(x: Tensor) -> None:
    """Two components whose labels mean something: one left, one right."""
    left = pyro.sample("left", dist.Normal(-3.0, 0.7))
    right = pyro.sample("right", dist.Normal(3.0, 0.7))
    centre = torch.stack([left, right])
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.6])), infer={"enumerate": "parallel"})
        pyro.sample("x", dist.Normal(centre[z], 1.0), obs=x)


def test_conjugate_model() -> None:
    assert sbc(location, laplace, torch.zeros(12), num_simulations=100).p_value > 0.01


@pytest.mark.slow
def test_logistic_regression() -> None:
    X = torch.randn(150, 2, generator=torch.Generator().manual_seed(0))
    found = sbc(logistic, laplace, X, torch.zeros(150), num_simulations=300)
    assert found.p_value > 0.01, str(found)


@pytest.mark.slow
def test_small_mixture() -> None:
    found = sbc(
        ordered_mixture,
        lambda m: LaplaceEvidence(m, maximise=(), start=Start(restarts=2)),
        torch.zeros(40),
        num_simulations=300,
    )
    assert set(found.names) == {"left", "right"}
    assert found.p_value > 0.01, str(found)
