"""The target of a model's weights against the likelihood and the other prior written out."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.relevance.weights import Weights, weights_of

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
T = (X[:, 0] > 0.2).double()


def model(X: Tensor, t: Tensor) -> None:
    level = pyro.sample("a_level", dist.Normal(0.5, 2.0))  # before the weights in the flat vector
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 0.1).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w + level), obs=t)


def weights() -> Weights:
    return weights_of(LogJoint(model, (X, T)), "w")


def test_weights_come_first_and_find_their_places() -> None:
    found = weights()
    assert found.num_weights == 3 and found.num_others == 1
    y = torch.tensor([1.0, 2.0, 3.0, 9.0], dtype=torch.float64)
    assert found.flat(y).tolist() == [9.0, 1.0, 2.0, 3.0]
    assert found.values(y[:3])["w"].tolist() == [1.0, 2.0, 3.0]


def test_the_weights_own_prior_does_not_count_and_the_others_does() -> None:
    y = torch.tensor([[0.4, -1.0, 0.3, 0.7], [0.0, 2.0, -0.5, -1.1]], dtype=torch.float64)

    def written_out(y: Tensor) -> Tensor:
        eta = X @ y[:3] + y[3]
        return (T * eta - torch.nn.functional.softplus(eta)).sum() + dist.Normal(0.5, 2.0).log_prob(y[3])

    value, gradient = weights().target.gradient(y)
    torch.testing.assert_close(value, torch.stack([written_out(row) for row in y]))
    torch.testing.assert_close(weights().target.value(y), value)
    slopes = [torch.autograd.functional.jacobian(written_out, row) for row in y]
    torch.testing.assert_close(gradient, torch.stack(slopes))
    curvature = [-torch.autograd.functional.hessian(written_out, row) for row in y]
    torch.testing.assert_close(weights().target.precision(y), torch.stack(curvature))


def test_several_sites_need_a_name() -> None:
    with pytest.raises(BadInput, match="say which hold the weights"):
        weights_of(LogJoint(model, (X, T)), None)
