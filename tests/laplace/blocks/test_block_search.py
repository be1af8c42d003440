"""The search for modes of blocks ends where rounding leads it, and where it ends is the mode."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState, Problem, laplace_state
from pyro_evidence.laplace.blocks import local
from pyro_evidence.laplace.nested.outer_joint import OuterJoint, outer_problem
from tests.models_for_tests.sampled_scales import COUNTS, beta_binomial


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many times all blocks have been evaluated."""
    counted, exact = [0], local.local

    def counting(*args, **kwargs):
        counted[0] += 1
        return exact(*args, **kwargs)

    monkeypatch.setattr(local, "local", counting)
    yield counted


def problem() -> Problem:
    return replace(outer_problem(OuterJoint(beta_binomial, (COUNTS,), outer=["kappa"]), None), nodes=7)


def found(log_kappa: float) -> LaplaceState:
    """Far from the start, as at the ends of an outer axis."""
    return laplace_state(problem(), torch.tensor([log_kappa]).double(), torch.linspace(-2.0, 2.0, 10).double())


def log_evidence(log_kappa: float) -> float:
    """Oracle: the players' rates integrated on paper, the mean's logit on a grid."""
    logit = torch.linspace(-8.0, 8.0, 2001).double()
    kappa, m, size = 1.0 + torch.tensor(log_kappa).double().exp(), logit.sigmoid(), torch.tensor(20.0).double()

    def log_beta(a: Tensor, b: Tensor) -> Tensor:
        return a.lgamma() + b.lgamma() - (a + b).lgamma()

    a, b = m * kappa, (1.0 - m) * kappa
    rows = [log_beta(k + a, size - k + b) - log_beta(a, b) - log_beta(k + 1, size - k + 1) for k in COUNTS]
    total = torch.stack(rows).sum(0) - len(COUNTS) * (size + 1.0).log() + (m * (1.0 - m)).log()
    return float(torch.trapezoid((total + 25.0).exp(), logit).log() - 25.0)


@pytest.mark.parametrize(("log_kappa", "most"), [(2.6, 150), (4.805, 150), (12.0, 300)])
def test_rounding_of_large_terms_does_not_keep_it(log_kappa: float, most: int, runs: list[int]) -> None:
    state = found(log_kappa)
    assert float(state.log_evidence) == pytest.approx(log_evidence(log_kappa), abs=0.05)
    assert runs[0] <= most
