"""Data in single precision give the relevance machines what the same data give in double precision."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import REVM, RVM
from pyro_evidence.relevance import L1Prior, score_centre


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


def of_one_dtype(own: torch.dtype) -> Any:
    """Noise that refuses predictors in another precision than its own."""

    class Strict(dist.Normal):
        def log_prob(self, value: Tensor) -> Tensor:
            noise = super().log_prob(value)
            return (noise.unsqueeze(-1) @ torch.ones(1, 1, dtype=own)).squeeze(-1)

    return Strict


STRICT = {d: of_one_dtype(d) for d in (torch.float32, torch.float64)}


def strict(X: Tensor, t: Tensor) -> None:
    eta = X @ weights(X)
    with pyro.plate("data", len(X)):
        pyro.sample("t", STRICT[X.dtype](eta, 1.0).to_event(1), obs=torch.nn.functional.one_hot(t).to(X))


def data(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(40, size, generator=generator, dtype=torch.float32)
    return X, (X[:, :3] + 1.5 * torch.randn(40, 3, generator=generator)).argmax(-1)


CASES: dict[str, tuple[int, Callable[..., Any]]] = {
    "softmax": (4, lambda: REVM(softmax)),
    "normalised": (4, lambda: REVM(normalised)),
    "with_offsets": (4, lambda: REVM(with_offsets, site="w")),
    "bounded": (4, lambda: REVM(bounded)),
    "laplace_prior": (4, lambda: REVM(softmax, prior=L1Prior())),
    "more_weights_than_data": (30, lambda: REVM(softmax, ridge=0.1)),
    "one_dtype": (4, lambda: REVM(strict)),
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


def test_chunks_in_single_precision() -> None:
    """Bernoulli: the derivative of torch's own log likelihood is single where only the log odds are double."""
    X, t = data(4, seed=1)
    t = (t == 0).to(X)

    def logistic(X: Tensor, t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(X.new_zeros(4), 1.0).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)

    single = REVM(logistic).run_chunks(list(zip(X.split(15), t.split(15), strict=True)))
    double = REVM(logistic).run(X.double(), t.double())
    torch.testing.assert_close(single.wald, double.wald, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("settings", [{}, {"prior": L1Prior()}, {"centre": score_centre}])
@pytest.mark.parametrize("ridge", [1e-4, 1e-6])
@pytest.mark.filterwarnings("ignore::UserWarning")  # that the ridge is too small
def test_saturated_classes_in_single_precision(settings: dict[str, Any], ridge: float) -> None:
    """Curvatures of 1e-7 and less: rounding of the likelihood to single precision would make them negative."""
    X = data(3, seed=0)[0][:, :2]
    Phi = (-torch.cdist(X, X).square() / 0.3).exp()
    t = (X[:, 0] > 0.2).long() + (X[:, 1] > 0).long()
    single, double = (REVM(softmax, ridge=ridge, **settings).run(P, t) for P in (Phi, Phi.double()))
    torch.testing.assert_close(single.wald[:20], double.wald[:20], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(single.log_evidence, double.log_evidence, rtol=1e-7, atol=0)
