"""The first of ever shorter steps that a rule accepts: for rows as for one state, on functions known on paper."""

from functools import partial

import pytest
import torch
from torch import Tensor

from pyro_evidence.numerics.line_search import (
    Backtracking,
    Line,
    SearchPoint,
    along_step,
    any_rise,
    armijo,
    clear_rise,
    first_accepted,
    halved_while_clear,
    lead_uphill,
    to_peak,
    to_peak_or_quarter,
)

assert_exact = partial(torch.testing.assert_close, rtol=1e-12, atol=0.0)
USUAL = Backtracking()


def parabola(u: Tensor) -> SearchPoint:
    return SearchPoint(u, -(u * u).sum(-1), -2.0 * u)


def searched(step: Tensor, search: Backtracking = USUAL, rows: Tensor | None = None) -> tuple[SearchPoint, Tensor]:
    """From 1 in each row along ``step`` ``(R, 1)`` on ``-u^2``; the promise of a step is twice its way down."""
    here = parabola(torch.ones_like(step))
    line = Line((here.gradient * step).sum(-1), torch.zeros(len(step)))

    def trial(left: Tensor, scale: Tensor) -> SearchPoint:
        return parabola(along_step(here.u[left], scale, step[left]))

    return search(here, torch.arange(len(step)) if rows is None else rows, line, trial)


def test_each_row_takes_the_first_step_that_rises() -> None:
    # u = 1 + s step: above -1 where |u| < 1, that is for s step in (-2, 0)
    new, left = searched(torch.tensor([[-1.0], [-3.0], [-7.5]]))
    assert new.u.flatten().tolist() == [0.0, -0.5, -0.875]
    assert torch.equal(new.objective, -new.u.flatten().square()) and torch.equal(new.gradient, -2.0 * new.u)
    assert not len(left)


def test_rows_that_never_rise_and_rows_not_asked_keep_their_place() -> None:
    new, left = searched(
        torch.tensor([[1.0], [-1.0], [-1.0]]), Backtracking(any_rise, num_trials=5), torch.tensor([0, 2])
    )
    assert new.u.flatten().tolist() == [1.0, 1.0, 0.0]
    assert left.tolist() == [0]


def test_the_peak_of_the_parabola_is_found_at_once() -> None:
    new, _ = searched(torch.tensor([[-3.0], [-2.5]]), Backtracking(shorter=to_peak))
    assert_exact(new.u, torch.zeros(2, 1), atol=1e-14)


def test_a_step_is_shortened_to_between_a_tenth_and_a_half() -> None:
    line = Line(torch.ones(4), torch.zeros(4))
    rise = torch.tensor([-1e6, 0.99, torch.nan, -torch.inf])
    assert to_peak(rise, torch.ones(4), line).tolist() == [0.1, 0.5, 0.1, 0.1]
    assert to_peak_or_quarter(rise, torch.ones(4), line).tolist() == [0.1, 0.5, 0.25, 0.1]


def test_rules_on_the_edge() -> None:
    line, one, half = Line(torch.tensor([1.0]), torch.tensor([1e-3])), torch.ones(1), torch.full((1,), 0.5)
    assert bool(armijo(torch.tensor([-0.5e-3]), one, line)) and not bool(armijo(torch.tensor([-0.95e-3]), one, line))
    assert bool(clear_rise(torch.tensor([-0.5e-3]), one, line))
    assert not bool(clear_rise(torch.tensor([0.9e-3]), half, line)) and bool(
        clear_rise(torch.tensor([2e-3]), half, line)
    )
    assert not bool(any_rise(torch.zeros(1), one, line))


def test_a_step_whose_half_promises_less_than_rounding_is_tried_once() -> None:
    """Halved ten times where it promises a thousand times the rounding; nowhere is there a rise."""
    tried = []

    def trial(rows: Tensor, scale: Tensor) -> SearchPoint:
        tried.append(rows.tolist())
        return SearchPoint(scale.unsqueeze(-1), -torch.ones(len(rows)), scale.unsqueeze(-1))

    start = SearchPoint(torch.zeros(2, 1), torch.zeros(2), torch.zeros(2, 1))
    line = Line(torch.tensor([1e-12, 1e-9]), torch.full((2,), 1e-12))
    _, left = Backtracking(clear_rise, halved_while_clear, shortest=0.5**40)(start, torch.arange(2), line, trial)
    assert tried == [[0, 1]] + 9 * [[1]]
    assert left.tolist() == []


def test_one_state_goes_as_a_row() -> None:
    tried: list[float] = []

    def trial(scale: float) -> tuple[float, float]:
        tried.append(scale)
        u = 1.0 - 7.5 * scale
        return -u * u, u

    assert first_accepted(trial, -1.0, 15.0) == -0.875
    assert tried == [1.0, 0.5, 0.25]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_never_accepted(value: float) -> None:
    assert first_accepted(lambda scale: (value if scale == 1.0 else 1.0, scale), 0.0) == 0.5
    assert first_accepted(lambda _: (value, "there"), 0.0, search=Backtracking(num_trials=3)) is None


def test_what_cannot_be_computed_is_not_accepted_and_a_start_without_a_value_takes_any() -> None:
    assert first_accepted(lambda scale: None if scale > 0.3 else (1.0, scale), 0.0) == 0.25
    assert first_accepted(lambda scale: (-5.0, scale), -torch.inf) == 1.0


def test_a_search_ends_at_its_shortest_step() -> None:
    tried: list[float] = []

    def trial(scale: float) -> None:
        tried.append(scale)

    assert first_accepted(trial, 0.0, search=Backtracking(shortest=0.2)) is None
    assert tried == [1.0, 0.5, 0.25]


def test_ways_uphill_have_no_valley() -> None:
    """Of two hills at -3 and 3 the way to 3 rises from the one side of it all along, not from beyond the valley."""

    def height(rows: Tensor) -> Tensor:
        return torch.logaddexp(-(rows - 3.0).square(), -(rows + 3.0).square()).squeeze(-1)

    places = torch.tensor([[-4.0], [-1.0], [0.5], [2.0], [9.0]])
    assert lead_uphill(height, places, torch.tensor([3.0])).tolist() == [False, False, True, True, True]
    assert lead_uphill(height, places[:2], torch.tensor([[-3.0], [3.0]])).tolist() == [True, False]
