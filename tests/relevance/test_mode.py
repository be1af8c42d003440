"""Newton with a reused factor, against the stationarity condition written out."""

import pytest
import torch
from torch import Tensor

from pyro_evidence.numerics.linear_predictor import Part
from pyro_evidence.relevance import mode
from pyro_evidence.relevance.targets import LinearTarget


def logistic_target(Phi: Tensor, t: Tensor) -> LinearTarget:
    def log_likelihood(eta: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid((2.0 * t - 1.0).unsqueeze(-1) * eta).sum((-2, -1))

    return LinearTarget.resident((Part(log_likelihood, Phi.unsqueeze(1), torch.zeros(len(Phi), 1)),))


@pytest.mark.parametrize(("num_weights", "ridge"), [(5, 1e-2), (450, 1e-2), (450, 1e-5)])
def test_the_gradient_is_zero(num_weights: int, ridge: float) -> None:
    """450 weights take the way of conjugate gradients."""
    X = torch.randn(120, 3)
    centres = torch.randn(num_weights, 3)
    Phi = torch.exp(-torch.cdist(X, centres))
    t = (X[:, 0] + 0.3 * torch.randn(120) > 0).double()
    found = mode.mode(logistic_target(Phi, t), torch.full((num_weights,), ridge), torch.zeros(num_weights))
    gradient = Phi.T @ (t - torch.sigmoid(Phi @ found.x)) - ridge * found.x
    assert found.converged
    assert float(gradient.abs().max()) < 1e-7


def test_says_when_the_curvature_is_not_positive() -> None:
    def log_likelihood(eta: Tensor) -> Tensor:
        return 0.5 * eta.square().sum((-2, -1))

    target = LinearTarget.resident((Part(log_likelihood, torch.eye(2).unsqueeze(1), torch.zeros(2, 1)),))
    assert not mode.mode(target, torch.full((2,), 0.5), torch.ones(2)).converged
