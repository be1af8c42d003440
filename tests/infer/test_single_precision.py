"""Data in single precision give the relevance machines what the same data give in double precision."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import REVM, RVM, LaplacePrior


def weights(X: Tensor) -> Tensor:
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1], 3), 1.0).to_event(2))
    assert isinstance(w, Tensor)
    return w


def softmax(X: Tensor, t: Tensor) -> None:
    eta = X @ weights(X)
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Categorical(logits=eta), obs=t)


def normalised(X: Tensor, t: Tensor) -> None:
    eta = X @ weights(X)
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Categorical(probs=eta.softmax(-1)), obs=t)


def with_offsets(X: Tensor, t: Tensor) -> None:
    eta = X @ weights(X) + pyro.sample("b", dist.Normal(X.new_zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Categorical(logits=eta), obs=t)


def bounded(X: Tensor, t: Tensor) -> None:
    eta = 3.0 * (X @ weights(X)).tanh()
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Categorical(logits=eta), obs=t)


def data(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(40, size, generator=generator, dtype=torch.float32)
    return X, (X[:, :3] + 1.5 * torch.randn(40, 3, generator=generator)).argmax(-1)


CASES: dict[str, tuple[int, Callable[..., Any]]] = {
    "softmax": (4, lambda: REVM(softmax)),
    "normalised": (4, lambda: REVM(normalised)),
    "with_offsets": (4, lambda: REVM(with_offsets, site="w")),
    "bounded": (4, lambda: REVM(bounded)),
    "laplace_prior": (4, lambda: REVM(softmax, prior=LaplacePrior())),
    "more_weights_than_data": (30, lambda: REVM(softmax, ridge=0.1)),
    "rvm": (4, lambda: RVM(softmax)),
}


@pytest.mark.parametrize("case", CASES)
def test_single_precision_arrives_where_double_does(case: str) -> None:
    size, engine = CASES[case]
    X, t = data(size, seed=1)
    single, double = engine().run(X, t), engine().run(X.double(), t)
    assert single.num_active == double.num_active
    assert float(single.log_evidence) == pytest.approx(float(double.log_evidence), abs=5e-3)
    assert torch.allclose(single.state.y, double.state.y, atol=2e-3)
