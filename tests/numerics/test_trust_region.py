"""The trust region: the best step in a ball, the way back to a valley's floor, and what that saves."""

from functools import partial

import pytest
import torch
from torch import Tensor

from pyro_evidence.numerics import trust_region
from pyro_evidence.numerics.line_search import SearchPoint
from pyro_evidence.numerics.newton import Limits, Mode
from pyro_evidence.numerics.trust_region import CurvedValley, higher
from tests.models_for_tests.toy_density import A, Toy, banana, gaussian, wells

NONE = torch.zeros(0)
assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
assert_approx = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-8)


def gorge(u: Tensor, theta: Tensor) -> Tensor:
    """A bent valley with walls 1e6 times as steep as its floor; mode at (1, 1)."""
    return -(1.0 - u[..., 0]).square() - 1e6 * (u[..., 1] - u[..., 0].square()).square()


def search(f, u: Tensor, *, num_steps: int = 200, seen: list[Tensor] | None = None) -> Mode:
    density = Toy(f)
    watch = (lambda v: None) if seen is None else lambda v: seen.append(v.clone())
    return trust_region.ascend(density, density.precision, u, NONE, Limits(1e-14, num_steps, watch))


def number(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quadratic(values: Tensor, along: Tensor, p: Tensor) -> Tensor:
    return (along * p).sum(-1) - 0.5 * (values * p.square()).sum(-1)


@pytest.mark.parametrize("lowest", [-2.0, 0.0, 0.5])
def test_no_step_in_the_ball_is_better(
    lowest: float,
) -> None:  # oracle: random points, and the conditions of a maximum on a ball
    values = torch.cat([torch.full((5, 1), lowest), 1.0 + number(5, 2).abs()], -1).sort(-1).values
    along, radius = number(5, 3, seed=1), torch.tensor([0.1, 0.5, 1.0, 3.0, 1e3])
    best, shift = trust_region._best_within(values, along, radius)
    assert bool((best.norm(dim=-1) <= radius * (1.0 + 1e-5)).all())
    others = number(2000, 5, 3, seed=2)
    others = others / others.norm(dim=-1, keepdim=True) * radius[:, None]
    others = others * torch.linspace(0.0, 1.0, 2000)[:, None, None]
    height = quadratic(values, along, best)
    assert bool((height >= quadratic(values, along, others) - 1e-9 * (1.0 + height.abs())).all())
    assert bool((shift[:, 0] >= max(0.0, -lowest)).all())
    torch.testing.assert_close((values + shift) * best, along, rtol=1e-5, atol=1e-5)  # to the bisection's accuracy


def test_a_saddle_at_rest_is_left_along_its_downward_direction_to_the_edge() -> None:
    values, along = torch.tensor([[-3.0, 1.0]]), torch.zeros(1, 2)  # the hard case: nothing pulls
    best, _ = trust_region._best_within(values, along, torch.tensor([0.7]))
    assert_approx(best.abs(), torch.tensor([[0.7, 0.0]]))


def floor_of(values: Tensor) -> tuple[CurvedValley, Tensor]:
    """Of one row in three dimensions, and the matrix that it inverts."""
    vectors, scale = torch.linalg.qr(number(1, 3, 3)).Q, 0.5 + number(1, 3, seed=1).abs()
    root = vectors[0] * values.sqrt()
    return CurvedValley(vectors, values[None], scale, number(1, 3, seed=2)), torch.diag(
        scale[0]
    ) @ root @ root.T * scale[0]


def test_the_way_back_takes_the_excess_of_the_slope_away() -> None:  # oracle: dense linear algebra
    floor, matrix = floor_of(torch.tensor([0.5, 1.0, 40.0]))
    slope = number(1, 3, seed=3)
    promised = floor.scale[0] * (floor.vectors[0] @ floor.promised[0])
    assert_exact(matrix @ floor.back(slope)[0], slope[0] - promised)
    assert_exact(floor.back(promised[None]), torch.zeros(1, 3))


def test_what_the_model_promised_is_the_slope_after_its_own_step() -> None:
    """On a quadratic the model is exact, so a trial has no excess slope and is not moved."""
    seen: list[Tensor] = []
    back = CurvedValley.back

    def spy(self: CurvedValley, slope: Tensor) -> Tensor:
        seen.append(back(self, slope))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CurvedValley, "back", spy)
        search(gaussian, torch.full((1, 3), 30.0), num_steps=1)  # farther than the first radius
    assert seen and all(float(move.abs().max()) < 1e-9 for move in seen)


@pytest.mark.parametrize(
    "start",
    [[-1.2, 1.0], pytest.param([2.0, 2.0], marks=pytest.mark.slow), pytest.param([-2.0, 4.0], marks=pytest.mark.slow)],
)
def test_the_floor_is_followed_in_a_fraction_of_the_steps(start: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for corrections in (trust_region.CORRECTIONS, 0):
        monkeypatch.setattr(trust_region, "CORRECTIONS", corrections)
        seen: list[Tensor] = []
        mode = search(gorge, torch.tensor([start]), num_steps=2000, seen=seen)
        assert bool(mode.converged.all())
        assert_approx(mode.u, torch.ones(1, 2))
        heights = torch.cat(seen)
        assert bool((heights.diff() >= -1e-12 * (1.0 + heights[1:].abs())).all())
        counts.append(len(seen))
    assert counts[0] < 0.5 * counts[1]


def test_the_better_of_two_trials_row_by_row() -> None:
    u = torch.arange(8.0).reshape(4, 2)
    ours = SearchPoint(u, torch.tensor([1.0, 1.0, torch.nan, 1.0]), torch.ones(4, 2))
    slope = torch.tensor([[2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [2.0, torch.inf]])
    other = SearchPoint(-u, torch.tensor([2.0, 0.5, -9.0, 5.0]), slope)
    chosen = higher(ours, other, torch.ones(4, dtype=torch.bool))
    assert chosen.objective.tolist() == [2.0, 1.0, -9.0, 1.0]
    assert_exact(chosen.u, torch.tensor([[-0.0, -1.0], [2.0, 3.0], [-4.0, -5.0], [6.0, 7.0]]))
    assert higher(ours, other, torch.tensor([False, True, True, True])).objective.tolist() == [1.0, 1.0, -9.0, 1.0]


@pytest.mark.parametrize(("worth", "gradients"), [(0.1, 3), (1.0, 2), (10.0, 1)])
def test_a_correction_that_gains_little_is_the_last(worth: float, gradients: int) -> None:
    """Each correction goes half the way to the floor, so that it gains a quarter of the one before: 1.5, .375, ..."""
    asked: list[Tensor] = []

    class Valley:
        def gradient(self, u: Tensor) -> tuple[Tensor, Tensor]:
            asked.append(u)
            return -0.5 * u.square().sum(-1), -u

    one = torch.ones(1, 1)
    floor = CurvedValley(torch.eye(1)[None], 2.0 * one, one, torch.zeros(1, 1))
    trial = SearchPoint(2.0 * one, torch.tensor([-2.0]), -2.0 * one)
    reached = trust_region._on_floor(Valley().gradient, trial, floor, torch.tensor([worth]))
    assert len(asked) == gradients and float(reached.objective) == -0.5 * 0.25 ** (gradients - 1)


class Known(Toy):
    """A density whose Gauss-Newton curvature is its own."""

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        return self.precision(u, theta)


@pytest.mark.parametrize(("away", "looked"), [(1e7, False), (1.0, True)])
def test_a_mode_that_is_far_is_not_followed_further(away: float, looked: bool) -> None:
    density, calls = Known(gaussian), []

    def exact(u: Tensor, theta: Tensor) -> Tensor:
        calls.append(u)
        return density.precision(u, theta)

    for num_steps, expected in ((trust_region.FOLLOWED, looked), (200, True)):
        calls.clear()
        start = torch.full((1, 3), away, dtype=torch.float64)
        mode = trust_region.climb(density, exact, start, NONE, Limits(1e-14, num_steps))
        assert bool(calls) is expected is bool(mode.converged.all())


@pytest.mark.parametrize(("followed", "given_up"), [(5, True), (4, False)])
def test_only_a_search_that_follows_gives_up(followed: int, given_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust_region, "FOLLOWED", followed)
    density, calls = Known(gaussian), []

    def exact(u: Tensor, theta: Tensor) -> Tensor:
        calls.append(u)
        return density.precision(u, theta)

    trust_region.climb(density, exact, torch.full((1, 3), 1e7, dtype=torch.float64), NONE, Limits(1e-14, 5))
    assert bool(calls) is not given_up


def test_a_batch_of_rows_is_a_loop() -> None:
    u = torch.tensor([[-1.2, 1.0], [1.0, 1.0], [0.0, 3.0]])
    for f in (banana, wells):
        whole, rows = search(f, u), [search(f, row.unsqueeze(0)) for row in u]
        for name in ("u", "log_joint", "precision", "converged", "left_saddle"):
            assert_approx(getattr(whole, name).double(), torch.cat([getattr(row, name) for row in rows]).double())


def test_a_quadratic_beyond_the_first_radius_arrives() -> None:
    mode = search(gaussian, torch.full((1, 3), 1e3))
    assert bool(mode.converged.all()) and not bool(mode.left_saddle.any())
    assert_approx(mode.precision[0], A)
    assert float(mode.gradient.abs().max()) < 1e-6
