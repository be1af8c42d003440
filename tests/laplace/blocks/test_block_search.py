"""The search for modes of blocks ends where rounding leads it, and where it ends is the mode."""

from collections.abc import Iterator
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.blocks import local
from pyro_evidence.laplace.approximation import LaplaceState, Problem, laplace_problem, laplace_state
from pyro_evidence.nested.inner import MarginalisedJoint, marginalised_problem
from pyro_evidence.program.log_joint import LogJoint
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
    return replace(
        marginalised_problem(MarginalisedJoint(beta_binomial, (COUNTS,), marginalise=["kappa"]), None), nodes=7
    )


def found(log_kappa: float) -> LaplaceState:
    """Far from the start, as at the ends of an marginalised axis."""
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


TAU, SEEN = 0.007, torch.tensor([0.3, -0.2, 1.9, 0.5, 0.1, 0.7])


def narrow(y: Tensor) -> None:
    """Effects that lie so close to what they share that they move with it."""
    d = pyro.sample("d", dist.Normal(0.0, 1.0))
    with pyro.plate("studies", len(y)):
        theta = pyro.sample("theta", dist.StudentT(8.0, d, TAU))
        pyro.sample("y", dist.Normal(theta, 0.5), obs=y)


def narrow_on_a_grid() -> float:
    """Oracle: the log evidence by sums over the effects, in units of their spread, and over what they share."""
    d, away = torch.linspace(-5.0, 5.0, 2001).double(), TAU * torch.linspace(-15.0, 15.0, 3001).double().sinh() / 3e4
    theta = d.unsqueeze(-1) + away
    total = dist.Normal(0.0, 1.0).log_prob(d)
    for y in SEEN.double():
        each = dist.StudentT(8.0, 0.0, TAU).log_prob(away) + dist.Normal(theta, 0.5).log_prob(y)
        total = total + torch.trapezoid(each.exp(), away).log()
    return float(torch.trapezoid(total.exp(), d).log())


def test_blocks_that_move_with_what_they_share_are_followed(runs: list[int]) -> None:
    inside = replace(laplace_problem(LogJoint(narrow, (SEEN.double(),))), nodes=7)
    state = laplace_state(inside, inside.joint.initial_theta, torch.full((7,), -0.4).double())
    assert float(state.log_evidence) == pytest.approx(narrow_on_a_grid(), abs=0.05)
    assert runs[0] <= 60
