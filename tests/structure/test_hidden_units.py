"""Networks are told from other non-linear models by their hidden units, and take Gauss-Newton by default."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_evidence import LaplaceEvidence, LaplacePosterior, Start, exact_hessian, gauss_newton
from pyro_evidence.laplace.approximation import laplace_problem
from pyro_evidence.models.mlp import MLP
from pyro_evidence.nested.inner import MarginalisedJoint
from pyro_evidence.program.log_joint import LogJoint


def normal(name: str, *shape: int) -> Tensor:
    value: Tensor = pyro.sample(name, dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))
    return value


def one_layer(X: Tensor, t: Tensor) -> None:
    """Two units, weight decay of the second layer learned."""
    decay = pyro.param("decay", torch.ones(()), constraint=constraints.positive)
    W, b, v = 2.0 * normal("W", X.shape[-1], 2), normal("b", 2), normal("v", 2) / decay
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(torch.tanh(X @ W + b) @ v, 0.3), obs=t)


def two_layers(X: Tensor, t: Tensor) -> None:
    """As wide as the inputs are many, both of them."""
    hidden = torch.tanh(X @ normal("A", 2, 2) + normal("a", 2))
    hidden = torch.relu(hidden @ normal("B", 2, 2) + normal("b", 2))
    c = normal("c", 2)
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=hidden @ c), obs=(t > 0).double())


class Module(PyroModule):  # type: ignore[misc]
    """Rows of weights are units here, and the noise is a site of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = PyroModule[nn.Linear](2, 2), PyroModule[nn.Linear](2, 1)
        self.hidden.weight = PyroSample(dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
        self.hidden.bias = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        self.out.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))

    def forward(self, X: Tensor, t: Tensor) -> None:
        sigma = pyro.sample("sigma", dist.Gamma(4.0, 8.0))
        mean = self.out(torch.tanh(self.hidden(X))).squeeze(-1)
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Normal(mean, sigma), obs=t)


def logistic(X: Tensor, t: Tensor) -> None:
    w = normal("w", 2)
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=(t > 0).double())


def dose_response(X: Tensor, t: Tensor) -> None:
    top, slope, middle = normal("top"), normal("slope"), normal("middle")
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(top * torch.sigmoid(slope.exp() * (X[:, 0] - middle)), 0.2), obs=t)


def curves_of_items(X: Tensor, t: Tensor) -> None:
    """Two sites of four exchangeable elements, but each datum sees one of them only."""
    rate, size = normal("rate", 4), normal("size", 4)
    item = torch.arange(len(X)) % 4
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(size[item] * torch.exp(-rate[item].exp() * X[:, 1].abs()), 0.3), obs=t)


def factors(X: Tensor, t: Tensor) -> None:
    """A product of matrices is bilinear: nothing bends; the prior forbids turns."""
    scores = pyro.sample("scores", dist.StudentT(4.0, torch.zeros(len(X), 2), 1.0).to_event(2))
    pyro.sample("X", dist.Normal(scores @ normal("loadings", 2, 2), 0.5).to_event(2), obs=X)


def nothing_to_do(X: Tensor, t: Tensor) -> None:
    """Exchangeable sites that the data do not see, beside a bent predictor."""
    normal("idle", 5), normal("idler", 5)
    dose_response(X, t)


def data(num: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(num, 2, generator=generator)
    return X, torch.sin(2.0 * X[:, 0]) + 0.1 * torch.randn(num, generator=generator)


NETWORKS: dict[str, Callable[..., Any]] = {
    "one layer": one_layer,
    "two layers": two_layers,
    "a model of the package": MLP(2, 1),
    "another": MLP(2, 3),
}
OTHERS = [logistic, dose_response, curves_of_items, factors, nothing_to_do]


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_take_gauss_newton(name: str) -> None:
    joint = LogJoint(NETWORKS[name], data())
    assert laplace_problem(joint).curvature is gauss_newton
    assert laplace_problem(joint, exact_hessian).curvature is exact_hessian


@pytest.mark.parametrize("model", OTHERS)
def test_other_models_keep_the_exact_hessian(model: Callable[..., Any]) -> None:
    assert laplace_problem(LogJoint(model, data())).curvature is exact_hessian


def test_a_network_whose_noise_is_integrated_takes_it_inside_and_says_it_outside() -> None:
    engine = LaplaceEvidence(Module())
    inner = engine._problem(data(), {})
    assert isinstance(inner.joint, MarginalisedJoint) and engine._full is not None
    assert inner.curvature is engine._full.curvature is gauss_newton


def wave(num: int = 20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = 4.0 * torch.rand(num, 1, generator=generator) - 2.0
    return X, torch.sin(2.5 * X[:, 0]) + 0.15 * torch.randn(num, generator=generator)


def test_the_documented_recipe_converges(capsys: pytest.CaptureFixture[str]) -> None:
    posterior = LaplaceEvidence(one_layer, start=Start(restarts=4)).run(*wave())
    assert isinstance(posterior, LaplacePosterior) and posterior.status == "converged"
    posterior.summary()
    assert "curvature: gauss_newton, not the exact Hessian, the default of networks" in capsys.readouterr().out
