"""Rounds of many restarts as one batch, on a family whose every round halves the way to its optimum."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pyro_evidence.errors import NotConverged
from pyro_evidence.fitting.em import (
    LONGEST,
    Phase,
    Restarts,
    advance,
    choose,
    leap,
    repeated,
    run_em,
    warmed,
)
from pyro_evidence.fitting.iterate import Fit, Status, Stop
from pyro_evidence.numerics.batched import Batched


@dataclass(frozen=True)
class Place(Batched):
    x: Tensor  # (R,)


@dataclass(frozen=True)
class Halving(Restarts):
    """Maximises ``-(x - update)^2``; rows past ``edge`` are no parameters, rows past ``cliff`` have no likelihood."""

    at: Place
    phases: tuple[Phase, ...] = ()
    edge: float = torch.inf
    cliff: float = torch.inf

    @property
    def parameters(self) -> Place:
        return self.at

    @property
    def log_likelihood(self) -> Tensor:
        return torch.where(self.at.x > self.cliff, torch.nan, -(self.at.x - self.update).square())

    @property
    def log_evidence(self) -> Tensor:
        return torch.where(self.failed, -torch.inf, self.log_likelihood)

    def proposed(self) -> Place:
        return Place(0.5 * (self.at.x + self.update))

    def reached(self, parameters: Place) -> "Halving":
        return replace(self, at=parameters)

    def change_to(self, parameters: Place) -> Tensor:
        return torch.where(parameters.x > self.edge, torch.nan, (parameters.x - self.at.x).abs())

    def warm_up(self, num_rounds: int, step: object) -> tuple[Phase, ...]:
        return self.phases

    def complaint(self, parameters: Place, row: int) -> str:
        return f"{float(parameters.x[row]):g} is too far"


def begun(*x: float, goal: float = 0.0, phases: tuple[Phase, ...] = (), **limits: float) -> Halving:
    num = len(x)
    where = Place(torch.tensor(x))
    state = {"failed": torch.zeros(num).bool(), "change": torch.full((num,), torch.inf)}
    return Halving(where, phases, update=goal, **state, **limits)


def test_a_round_is_every_rows_own() -> None:
    after = advance(begun(4.0, -2.0))
    assert after.at.x.tolist() == [2.0, -1.0] and after.change.tolist() == [2.0, 1.0]
    assert after.num_rounds == 1 and after.objective == -1.0 and after.gradient_norm == 2.0
    assert after.stop_reason is None and after.reasons == ()


@pytest.mark.parametrize("limit", ["edge", "cliff"])
def test_a_row_that_fails_stays_and_says_why_while_the_others_go_on(limit: str) -> None:
    start = begun(4.0, 1.0, goal=10.0, **{limit: 6.0})  # to 7, then not any more; to 5.5, then to 7.75
    one = advance(start)
    assert one.at.x.tolist() == [4.0, 5.5] and one.failed.tolist() == [True, False]
    assert one.reasons == ("restart 0: round 1: 7 is too far",) and one.change.tolist() == [0.0, 4.5]
    two = advance(one)
    assert two.at.x.tolist() == [4.0, 5.5] and two.stop_reason is Status.FAILED
    assert two.reasons == (*one.reasons, "restart 1: round 2: 7.75 is too far")
    assert two.objective == -(4.5**2)  # of no log evidence any more, but of a log likelihood


def test_where_none_is_left_the_error_holds_all_reasons() -> None:
    failed = repeated(begun(4.0, 1.0, goal=10.0, edge=6.0), 2)
    with pytest.raises(NotConverged, match=r"rho=0.05\)\.\nrestart 0: .*7 is too far\nrestart 1: .*7.75"):
        choose(None, Fit(failed, Status.FAILED, ()), None, Stop())  # type: ignore[arg-type]


def test_a_warm_up_is_counted_and_what_follows_stops_by_itself() -> None:
    phases = (8.0, advance, 2), (-8.0, advance, 0)
    stop = Stop(tolerance=1e-3, gradient_tolerance=1e-3, num_steps=50)
    fit = run_em(begun(0.0, phases=phases), 2, stop)
    assert fit.objectives[0] == -36.0  # two halvings towards 8 lead to 6
    assert fit.status is Status.CONVERGED and 0.0 < float(fit.state.at.x) < 1e-3
    alone = warmed(begun(0.0, phases=phases), 2)
    assert alone.at.x.tolist() == [6.0] and alone.update == 0.0 and alone.change.tolist() == [torch.inf]


def test_a_warm_up_in_which_all_fail_is_the_end() -> None:
    fit = run_em(begun(4.0, goal=10.0, phases=((10.0, advance, 3),), edge=6.0), 3, Stop())
    assert fit.status is Status.FAILED and fit.state.num_rounds == 1 and len(fit.objectives) == 1


def test_a_leap_ends_at_the_fixed_point_of_an_iteration_with_one_rate() -> None:
    end = torch.tensor([[1.0, -2.0, 3.0], [0.0, 5.0, 0.5]], dtype=torch.float64)
    rate = torch.tensor([[0.5], [0.9]], dtype=torch.float64)
    x = [end + rate**i * torch.tensor([2.0, -1.0, 0.3], dtype=torch.float64) for i in range(3)]
    torch.testing.assert_close(leap(*x), end, rtol=1e-12, atol=1e-12)


def test_a_leap_is_no_longer_than_allowed_and_no_shorter_than_two_rounds() -> None:
    """A rate of almost 1 asks for thousands of steps at once, one that turns back for less than one."""
    slow = [torch.tensor([[0.9999**i]], dtype=torch.float64) for i in range(3)]
    r, v = slow[1] - slow[0], slow[2] - 2.0 * slow[1] + slow[0]
    torch.testing.assert_close(leap(*slow), slow[0] + 2.0 * LONGEST * r + LONGEST**2 * v, rtol=1e-14, atol=0.0)
    turning = [torch.tensor([[(-0.9) ** i]], dtype=torch.float64) for i in range(3)]
    torch.testing.assert_close(leap(*turning), turning[2], rtol=1e-14, atol=1e-15)
    still = torch.ones(1, 2, dtype=torch.float64)
    assert torch.equal(leap(still, still, still), still)
