"""Data that count as often as their weights say: whole numbers are repeated rows, for every engine that takes them."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import REVM, RVM, VRVM, LaplaceEvidence, Stop
from pyro_evidence.errors import BadInput
from pyro_evidence.models import weighted
from pyro_evidence.models.basis import GaussianRBF, Learned, Polynomial
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.regression import regression

X = torch.linspace(-1.0, 1.0, 30, dtype=torch.float64).unsqueeze(-1)
BUMPS = GaussianRBF(X[::3], 0.5)
WEIGHT = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).repeat(10)
ROWS = torch.arange(30).repeat_interleave(WEIGHT.long())
LONG = Stop(num_steps=3000, progress=False)

Engine = Callable[[Any], Any]
CASES: dict[str, tuple[Engine, Any, bool]] = {
    "LaplaceEvidence": (LaplaceEvidence, regression(Polynomial(2)), False),
    "LaplaceEvidence, labels": (LaplaceEvidence, classifier(Polynomial(2)), True),
    "RVM": (lambda m: RVM(m, noise="beta", stop=LONG), regression(BUMPS, beta=Learned(1.0)), False),
    "RVM, labels": (lambda m: RVM(m, stop=LONG), classifier(BUMPS), True),
    "VRVM, labels": (lambda m: VRVM(m, stop=LONG), classifier(BUMPS), True),
    "REVM": (REVM, regression(BUMPS, beta=10.0), False),
}


def targets(labels: bool) -> Tensor:
    noise = torch.randn(len(X), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    t = torch.sin(3.0 * X[:, 0]) + 0.3 * noise
    return (t + noise > 0.0).double() if labels else t


@pytest.mark.parametrize("name", CASES)
def test_whole_numbers_are_repeated_rows(name: str) -> None:
    engine, model, labels = CASES[name]
    t = targets(labels)
    once, again = engine(weighted(model, WEIGHT)).run(X, t), engine(model).run(X[ROWS], t[ROWS])
    assert float(once.log_evidence) == pytest.approx(float(again.log_evidence), rel=1e-7)
    torch.testing.assert_close(once.predict(X[:5]), again.predict(X[:5]), rtol=1e-5, atol=1e-6)
    assert float(once.log_evidence) != pytest.approx(float(engine(model).run(X, t).log_evidence), rel=1e-3)


def test_new_data_count_once() -> None:
    posterior = LaplaceEvidence(weighted(regression(Polynomial(2)), WEIGHT)).run(X, targets(False))
    assert posterior.predict(X[:4]).shape == (4,)  # other rows than the weights


@pytest.mark.parametrize("weight", [torch.tensor([1.0, -1.0]), torch.zeros(3), torch.ones(2, 2), [1.0, 2.0]])
def test_weights_that_cannot_be_meant_are_refused(weight: Any) -> None:
    with pytest.raises(BadInput, match=r"expected a tensor \(N,\) of finite numbers of at least 0, not all 0"):
        weighted(regression(Polynomial(1)), weight)


def whole(X: Tensor, t: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.Normal(torch.zeros(()).double(), 1.0))
    return pyro.sample("t", dist.Normal(w * X[:, 0], 1.0).to_event(1), obs=t)


def test_data_with_one_density_for_all_are_refused() -> None:
    with pytest.raises(
        BadInput, match=r"site 't' has data of shape \(30,\), and there are 30 weights; .*a plate over rows"
    ):
        weighted(whole, WEIGHT)(X, targets(False))
    with pytest.raises(BadInput, match=r"shape \(30,\), and there are 3 weights"):
        weighted(regression(Polynomial(1), alpha=1.0, beta=1.0), WEIGHT[:3])(X, targets(False))
