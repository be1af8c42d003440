"""Small random problems: an answer that obeys the laws of an evidence, or an error message.

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
KINDS = 9  # tests that share the cases among them
FEW = settings(
    max_examples=max(8, CASES // KINDS) if CASES else 8,
    derandomize=not CASES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TAME = settings(FEW, max_examples=FEW.max_examples // 2)  # of laws that hold to rounding in each problem
OWN_ERRORS = (BadInput, UnsupportedModel, NotPositiveDefinite, NotAMode, ImproperPosterior, TooLarge, NotConverged)
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
    N, D = draw(st.integers(6 if tame else 1, 24)), draw(st.integers(2 if tame else 1, 4))
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
        except OWN_ERRORS as message:
            assert len(str(message)) > 40
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
    TAME(given(problems(tame=True))(law))()


COUNTED = Stop(tolerance=0.0, num_steps=60, progress=False)
ENOUGH = Stop(num_steps=500, progress=False, throw=False)

# Engine -> log evidence (or what it maximises) of rows, targets and weights of rows, nats.  Engines of densities take
# one component, whose optimum is the only one; networks of kernels start where they are told.
Fit = Callable[..., Any]
WEIGHTED: dict[str, tuple[Fit, bool]] = {  # with whether the targets are labels
    "Laplace": (lambda X, *data: LaplaceEvidence(linear, stop=QUIET).run(X, *data).log_evidence, False),
    "Laplace, classes": (lambda X, *data: LaplaceEvidence(logistic, stop=QUIET).run(X, *data).log_evidence, True),
    "RVM": (lambda X, *data: RVM(linear, stop=ENOUGH).run(X, *data).log_evidence, False),
    "RVM, classes": (lambda X, *data: RVM(logistic, stop=ENOUGH).run(X, *data).log_evidence, True),
    "VRVM": (lambda X, *data: VRVM(linear, stop=COUNTED).run(X, *data).log_evidence, False),
    "VRVM, classes": (lambda X, *data: VRVM(logistic, stop=COUNTED).run(X, *data).log_evidence, True),
    "REVM": (lambda X, *data: REVM(linear).run(X, *data).log_evidence, False),
    "REVM, classes": (lambda X, *data: REVM(logistic).run(X, *data).log_evidence, True),
}
ALL: dict[str, tuple[Fit, bool]] = WEIGHTED | {
    "EvidenceEM": (lambda X, *data: of_rows(gaussian_mixture(1), X), False),
    "EvidenceEM, planes": (lambda X, *data: of_rows(mppca(1, 1), X), False),
    "OverlapEM": (lambda X, t: network(X, t), True),
}


def of_rows(model: Any, X: Tensor) -> Tensor:
    return EvidenceEM(model, stop=COUNTED, deletion=None, start=Start(restarts=1)).run(X).log_evidence


def network(X: Tensor, t: Tensor, scale: float = 1.0) -> Tensor:
    """Three kernels that begin at fixed places, whatever the order of the rows; ``scale`` is the unit."""
    start = StartFrom(scale * torch.tensor([[0.5], [-0.5], [0.0]], dtype=torch.float64).expand(3, X.shape[-1]))
    return torch.tensor(OverlapEM(prbf(3, 2), initial=start, stop=ROUNDS).run(X, t.long()).objectives[-1])


def told(name: str, p: Problem, table: dict[str, tuple[Fit, bool]] = ALL) -> tuple[Fit, Tensor]:
    """The fit of that name, and the targets that go with it."""
    fit, wants_labels = table[name]
    return lambda *args: quietly(lambda: fit(*args)), p.labels if wants_labels else p.t


@pytest.mark.parametrize("name", ALL)
def test_the_order_of_rows_and_columns_is_nothing(name) -> None:
    def law(p: Problem) -> None:
        fit, t = told(name, p)
        same(fit(p.X.flip(0).flip(1), t.flip(0)), fit(p.X, t))

    laws_hold(law)


@pytest.mark.parametrize("name", WEIGHTED)
def test_every_row_twice_at_half_its_weight_is_the_same_data(name) -> None:
    def law(p: Problem) -> None:
        (fit, t), half = told(name, p), torch.full((2 * len(p.X),), 0.5, dtype=torch.float64)
        same(fit(p.X.repeat(2, 1), t.repeat(2), half), fit(p.X, t))

    laws_hold(law)


@pytest.mark.parametrize("name", sorted(WEIGHTED.keys() - {"VRVM", "VRVM, classes"}))  # in whose bound weights cost
def test_a_column_of_zeros_tells_nothing(name) -> None:
    def law(p: Problem) -> None:
        fit, t = told(name, p)
        same(fit(torch.cat([p.X, torch.zeros_like(p.X[:, :1])], -1), t), fit(p.X, t))

    laws_hold(law)


@pytest.mark.parametrize("name", [name for name, (_, labels) in ALL.items() if labels])
def test_labels_may_be_exchanged(name) -> None:
    def law(p: Problem) -> None:
        fit, t = told(name, p)
        same(fit(p.X, 1.0 - t), fit(p.X, t))

    laws_hold(law)


# What a unit of the rows is worth, nats: for densities log(unit) a number, for weights whose prior is learned nothing.
UNIT = 2.0**10
UNITS: dict[str, Callable[[Problem], tuple[Tensor, Tensor]]] = {
    "Laplace": lambda p: of_units(lambda X: LaplaceEvidence(linear, stop=QUIET).run(X, p.t).log_evidence, p, 0),
    "Laplace, classes": lambda p: of_units(
        lambda X: LaplaceEvidence(learned, stop=QUIET).run(X, p.labels).log_evidence, p, 0
    ),
    "RVM": lambda p: of_units(lambda X: RVM(linear, stop=ENOUGH).run(X, p.t).log_evidence, p, 0),
    "RVM, classes": lambda p: of_units(lambda X: RVM(logistic, stop=ENOUGH).run(X, p.labels).log_evidence, p, 0),
    "REVM": lambda p: (
        REVM(linear, ridge=1e-2 * UNIT**2).run(UNIT * p.X, p.t).log_evidence,
        REVM(linear).run(p.X, p.t).log_evidence,
    ),
    "REVM, classes": lambda p: (
        REVM(logistic, ridge=1e-2 * UNIT**2).run(UNIT * p.X, p.labels).log_evidence,
        REVM(logistic).run(p.X, p.labels).log_evidence,
    ),
    "EvidenceEM": lambda p: of_units(lambda X: of_rows(gaussian_mixture(2), X), p, p.X.numel()),
    "EvidenceEM, planes": lambda p: of_units(lambda X: of_rows(mppca(2, 1), X), p, p.X.numel()),
    "OverlapEM": lambda p: (
        network(UNIT * p.X, p.labels, UNIT) + p.X.numel() * math.log(UNIT),
        network(p.X, p.labels),
    ),
}


def of_units(fit: Fit, p: Problem, numbers: int) -> tuple[Tensor, Tensor]:
    return fit(UNIT * p.X) + numbers * math.log(UNIT), fit(p.X)


def learned(X: Tensor, t: Tensor) -> None:
    """Classes, the prior precision to be learned."""
    alpha = pyro.param("alpha", X.new_ones(()), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), alpha.rsqrt()).to_event(1))
    pyro.sample("t", dist.Bernoulli(logits=X @ w).to_event(1), obs=t)


@pytest.mark.parametrize("name", UNITS)
def test_what_the_rows_are_measured_in_is_worth_what_it_is(name) -> None:
    def law(p: Problem) -> None:
        found, expected = quietly(lambda: UNITS[name](p))
        same(found, expected, 1e-5)

    laws_hold(law)


def test_single_precision_is_double_precision_with_fewer_digits() -> None:
    def law(p: Problem) -> None:
        X, t = p.X.float(), p.t.float()
        single, double = evidence(linear, X, t), evidence(linear, X.double(), t.double())
        same(single.double(), double, 1e-3)

    laws_hold(law)
