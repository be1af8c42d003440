"""Small random problems: an answer that obeys the laws of an evidence, or a letter.

``PYRO_EVIDENCE_CASES=2000 pytest tests/properties`` tries more of them, and others each time; without it the cases are
few and always the same.
"""

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import REVM, RVM, VRVM, EvidenceEM, LaplaceEvidence, NotConverged, OverlapEM, Start, Stop
from pyro_evidence.errors import BadInput, ImproperPosterior, NotAMode, NotPositiveDefinite, TooLarge, UnsupportedModel
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from pyro_evidence.prbf import StartFrom

CASES = int(os.environ.get("PYRO_EVIDENCE_CASES", "0"))
LAWS, KINDS = 7, 9  # tests that share the cases among them
FEW = settings(
    max_examples=max(8, CASES // KINDS) if CASES else 8,
    derandomize=not CASES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
LETTERS = (BadInput, UnsupportedModel, NotPositiveDefinite, NotAMode, ImproperPosterior, TooLarge, NotConverged)
QUIET = Stop(progress=False, throw=False)
ROUNDS = Stop(tolerance=0.0, num_steps=12, progress=False)


def linear(X: Tensor, t: Tensor | None = None, weight: Tensor | None = None) -> None:
    alpha = pyro.param("alpha", X.new_ones(()), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)), pyro.poutine.scale(scale=1.0 if weight is None else weight):
        pyro.sample("t", dist.Normal(X @ w, 0.7), obs=t)


def logistic(X: Tensor, t: Tensor | None = None, weight: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), 1.0).to_event(1))
    with pyro.plate("data", len(X)), pyro.poutine.scale(scale=1.0 if weight is None else weight):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


@dataclass(frozen=True)
class Problem:
    """Rows, and what is to be told from them."""

    X: Tensor
    t: Tensor

    @property
    def labels(self) -> Tensor:
        return (self.t > self.t.median()).to(self.X)


@st.composite
def problems(draw: Callable[..., Any], tame: bool = False) -> Problem:
    """A few rows and columns of any size and kind: repeated, constant, zero, tied, far from zero."""
    N, D = draw(st.integers(6 if tame else 1, 24)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    X = torch.randn(N, D, generator=generator, dtype=torch.float64)
    t = X.sum(-1) + torch.randn(N, generator=generator, dtype=torch.float64)
    if tame:
        return Problem(X, t)
    X = X * 10.0 ** draw(st.integers(-80, 80) | st.integers(-3, 3)) + draw(st.sampled_from([0.0, 0.0, 1.0, 1e6]))
    kind = draw(st.sampled_from(["plain", "zero", "constant", "twice", "rounded", "nan", "inf", "huge"]))
    if kind in ("zero", "constant"):
        X[:, 0] = float(kind == "constant")
    elif kind == "twice":
        X = torch.cat([X, X], -1)
    elif kind == "rounded":
        X = X.sign()
    elif kind != "plain":
        X[-1, 0] = {"nan": math.nan, "inf": math.inf, "huge": 1e160}[kind]
    t = t * draw(st.sampled_from([1.0, 1.0, 1e-6, 1e6]))
    return Problem(X, t)


ENGINES: dict[str, Callable[[Problem], Any]] = {
    "Laplace": lambda p: LaplaceEvidence(linear, stop=QUIET).run(p.X, p.t),
    "Laplace, classes": lambda p: LaplaceEvidence(logistic, stop=QUIET).run(p.X, p.labels),
    "RVM": lambda p: RVM(linear, stop=Stop(num_steps=100, progress=False, throw=False)).run(p.X, p.t),
    "RVM, classes": lambda p: RVM(logistic, stop=Stop(num_steps=100, progress=False, throw=False)).run(p.X, p.labels),
    "VRVM": lambda p: VRVM(logistic, stop=Stop(num_steps=20, progress=False, throw=False)).run(p.X, p.labels),
    "REVM": lambda p: REVM(logistic).run(p.X, p.labels),
    "EvidenceEM": lambda p: EvidenceEM(gaussian_mixture(2), stop=ROUNDS, deletion=None, start=Start(restarts=1)).run(
        p.X
    ),
    "EvidenceEM, planes": lambda p: EvidenceEM(mppca(2, 1), stop=ROUNDS, deletion=None).run(p.X),
    "OverlapEM": lambda p: OverlapEM(prbf(2, 2), stop=ROUNDS).run(p.X, p.labels.long()),
}


def numbers(posterior: Any) -> Tensor:
    """Everything that is not to be nan."""
    height = posterior.objectives[-1] if hasattr(posterior, "objectives") else posterior.log_evidence
    return torch.as_tensor(height, dtype=torch.float64)


def quietly(fit: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit()


@pytest.mark.parametrize("name", ENGINES)
def test_an_answer_or_a_letter(name) -> None:
    @FEW
    @given(problems())
    def check(problem: Problem) -> None:
        try:
            posterior = quietly(lambda: ENGINES[name](problem))
        except LETTERS as letter:
            assert len(str(letter)) > 40
            return
        refused = getattr(posterior, "refusal", "")
        assert refused or not bool(numbers(posterior).isnan())

    check()


# Laws.  Each is a problem and the same problem told otherwise, and what that does to the log evidence, nats.


def evidence(model: Any, *args: Tensor) -> Tensor:
    return quietly(lambda: LaplaceEvidence(model, stop=QUIET).run(*args).log_evidence)


def same(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def laws_hold(law: Callable[[Problem], None]) -> None:
    FEW(given(problems(tame=True))(law))()


MODELS = {"linear": (linear, lambda p: p.t), "logistic": (logistic, lambda p: p.labels)}


@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_rows_and_columns_is_nothing(name) -> None:
    model, target = MODELS[name]

    def law(p: Problem) -> None:
        t = target(p)
        same(evidence(model, p.X.flip(0).flip(1), t.flip(0)), evidence(model, p.X, t))

    laws_hold(law)


@pytest.mark.parametrize("name", MODELS)
def test_every_row_twice_at_half_its_weight_is_the_same_data(name) -> None:
    model, target = MODELS[name]

    def law(p: Problem) -> None:
        t, half = target(p), torch.full((2 * len(p.X),), 0.5, dtype=torch.float64)
        same(evidence(model, p.X.repeat(2, 1), t.repeat(2), half), evidence(model, p.X, t))

    laws_hold(law)


def test_a_column_of_zeros_tells_nothing() -> None:
    def law(p: Problem) -> None:
        wide = torch.cat([p.X, torch.zeros_like(p.X[:, :1])], -1)
        same(evidence(logistic, wide, p.labels), evidence(logistic, p.X, p.labels))
        for engine in (RVM, REVM):
            a, b = (quietly(lambda X=X, e=engine: e(logistic).run(X, p.labels).log_evidence) for X in (wide, p.X))
            same(a, b)

    laws_hold(law)


def test_labels_may_be_exchanged() -> None:
    def law(p: Problem) -> None:
        same(evidence(logistic, -p.X, 1.0 - p.labels), evidence(logistic, p.X, p.labels))
        for engine in (RVM, REVM):
            a, b = (
                quietly(lambda t=t, e=engine: e(logistic).run(p.X, t).log_evidence) for t in (1.0 - p.labels, p.labels)
            )
            same(a, b)

    laws_hold(law)


def test_relevance_has_no_units() -> None:
    def law(p: Problem) -> None:
        a, b = (quietly(lambda X=X: RVM(logistic).run(X, p.labels).log_evidence) for X in (p.X * 2.0**40, p.X))
        same(a, b)

    laws_hold(law)


def test_mixtures_have_no_units() -> None:
    def law(p: Problem) -> None:
        fits = [quietly(lambda X=X: ENGINES["EvidenceEM"](Problem(X, p.t)).log_evidence) for X in (p.X, 1024.0 * p.X)]
        same(fits[1] + p.X.numel() * math.log(1024.0), fits[0], 1e-5)

    laws_hold(law)


def test_single_precision_is_double_precision_with_fewer_digits() -> None:
    def law(p: Problem) -> None:
        X, t = p.X.float(), p.t.float()
        single, double = evidence(linear, X, t), evidence(linear, X.double(), t.double())
        same(single.double(), double, 1e-3)

    laws_hold(law)


def test_rows_of_a_network_may_come_in_any_order() -> None:
    def law(p: Problem) -> None:
        y, start = p.labels.long(), StartFrom(p.X[:3])
        there = quietly(lambda: OverlapEM(prbf(3, 2), start=start, stop=ROUNDS).run(p.X, y))
        back = quietly(lambda: OverlapEM(prbf(3, 2), start=start, stop=ROUNDS).run(p.X.flip(0), y.flip(0)))
        same(torch.tensor(back.objectives[-1]), torch.tensor(there.objectives[-1]))

    laws_hold(law)
