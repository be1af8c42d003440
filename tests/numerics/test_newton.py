"""Newton's method: the mode of what has one, and honest flags where it does not arrive."""

from functools import partial

import pytest
import torch
from torch import Tensor

from pyro_evidence.errors import ImproperPosterior, NotAMode
from pyro_evidence.numerics import newton
from pyro_evidence.numerics.newton import Limits, Mode, climb, not_a_mode
from tests.models_for_tests.toy_density import MEAN, A, Toy, banana, cliff, gaussian, logistic, wells

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
assert_approx = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-8)

NONE = torch.zeros(0)


def search(f, u: Tensor, *, num_steps: int = 50, thin: bool = False, seen: list[Tensor] | None = None) -> Mode:
    density = Toy(f)
    choice = density.precision_diagonal if thin else density.precision
    watch = (lambda v: None) if seen is None else lambda v: seen.append(v.clone())
    return climb(density, choice, u, NONE, Limits(2e-14, num_steps, watch))


def test_a_gaussian_takes_one_step() -> None:
    seen: list[Tensor] = []
    mode = search(gaussian, torch.randn(2, 3), seen=seen)
    assert len(seen) == 1 and bool(mode.converged.all())
    assert_exact(mode.u, MEAN.expand(2, 3))
    assert_exact(mode.precision, A.expand(2, 3, 3))
    assert_exact(mode.log_joint, torch.zeros(2))
    assert float(mode.decrement.max()) < 1e-25


def test_decrement_is_the_squared_gradient_in_units_of_the_precision() -> None:
    u = torch.randn(1, 3)
    mode = search(gaussian, u, num_steps=1)
    d = u - MEAN
    seen = search(gaussian, u, num_steps=0)
    assert not bool(seen.converged.any())
    assert_exact(seen.u, u)
    assert_exact(mode.gradient, torch.zeros(1, 3), atol=1e-10)
    assert_exact(seen.gradient, -(d @ A))


@pytest.mark.parametrize(
    ("f", "thin"),
    [(f, False) for f in (logistic, banana, wells, cliff)] + [(f, True) for f in (logistic, wells, cliff)],
)
def test_numbers_at_the_end_belong_together(f, thin: bool) -> None:
    u = 0.5 + torch.rand(4, 2)
    mode = search(f, u, thin=thin)
    assert bool(mode.converged.all()) and bool(mode.definite.all())
    density = Toy(f)
    value, slope = density.gradient(mode.u, NONE)
    assert_exact(mode.log_joint, value)
    assert_exact(mode.gradient, slope)
    dense = density.precision(mode.u, NONE)
    assert_exact(mode.precision, dense.diagonal(dim1=-2, dim2=-1) if thin else dense)
    assert float(mode.gradient.abs().max()) < 1e-6


def test_modes_on_paper() -> None:
    assert_approx(search(banana, torch.tensor([[-1.2, 1.0], [0.0, 3.0]])).u, torch.ones(2, 2))
    assert_approx(search(cliff, torch.tensor([[0.01, 5.0]])).u, torch.ones(1, 2))
    assert_approx(search(wells, torch.tensor([[0.3, -0.2], [-4.0, 2.0]])).u, torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))


@pytest.mark.parametrize("start", [[0.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [2e-7, 1.0], [-1.0, 5e-7]])
def test_a_saddle_or_a_minimum_is_left(start: list[float]) -> None:
    mode = search(wells, torch.tensor([start]))
    assert bool(mode.converged.all())
    assert_approx(mode.u.abs(), torch.ones(1, 2))


def test_a_batch_of_rows_is_a_loop() -> None:
    u = torch.tensor([[-1.2, 1.0], [1.0, 1.0], [0.0, 3.0]])
    whole, rows = search(banana, u), [search(banana, row.unsqueeze(0)) for row in u]
    for name in ("u", "log_joint", "precision", "converged"):
        assert_approx(getattr(whole, name), torch.cat([getattr(row, name) for row in rows]))


def test_steps_never_descend() -> None:
    seen: list[Tensor] = []
    search(banana, torch.tensor([[-1.2, 1.0], [3.0, -2.0]]), seen=seen)
    heights = torch.stack(seen)
    assert bool((heights.diff(dim=0) >= -1e-12).all())


def test_coordinates_may_come_in_any_order_and_unit() -> None:
    """Newton's steps do not depend on them."""
    u, scale, order = torch.tensor([[0.3, -0.2, 2.0]]), torch.tensor([1e-3, 1.0, 1e3]), torch.tensor([2, 0, 1])
    plain = search(logistic, u)
    scaled = search(lambda v, theta: logistic(v * scale, theta), u / scale)
    moved = search(lambda v, theta: logistic(v[..., order.argsort()], theta), u[:, order])
    assert_approx(scaled.u * scale, plain.u)
    assert_approx(moved.u[:, order.argsort()], plain.u)


def test_a_search_ends_where_rounding_alone_moves_it() -> None:
    """A stiff curve around a high level: each second difference of it is rounded."""
    curve, count = torch.diff(torch.eye(200).double(), n=2, dim=0), list[float]()
    y, A = 1e3 + wander(200), 1e10 * curve.mT @ curve + torch.eye(200).double()

    def gradient(u: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        bent, away = u @ curve.mT, u - y
        value = -300.0 - 5e9 * bent.square().sum(-1) - 0.5 * away.square().sum(-1)
        return value, -1e10 * bent @ curve - away

    def direction(u: Tensor, rows: Tensor, slope: Tensor) -> newton.Direction:
        found = newton.by_absolute_value(A.unsqueeze(0), slope)
        count.append(float(found.decrement))
        return found

    mode = newton.search(gradient, direction, torch.zeros(1, 200).double(), newton.limits_of(torch.float64))
    assert bool(mode.converged) and len(count) <= 5 and count[-1] < 1e-11
    assert torch.allclose(mode.u[0], torch.linalg.solve(A, y), rtol=1e-6)


def wander(size: int) -> Tensor:
    torch.manual_seed(0)
    return 0.1 * torch.randn(size).double().cumsum(0)


def test_running_out_of_steps_is_said() -> None:
    mode = search(banana, torch.tensor([[-1.2, 1.0], [1.0, 1.0]]), num_steps=2)
    assert mode.converged.tolist() == [False, True]


def test_what_has_no_mode_is_not_converged() -> None:
    assert not bool(search(lambda u, theta: u.sum(-1), torch.zeros(1, 2)).converged.any())
    assert not bool(search(lambda u, theta: -u.abs().sum(-1), torch.ones(1, 2)).converged.any())


def test_a_search_that_ends_early_in_the_datas_unit_is_no_infinite_integral() -> None:
    """Far off and rising says that of a logarithm alone."""
    mode = search(lambda u, theta: banana(u - 5000.0, theta), torch.tensor([[4998.8, 5001.0]]), num_steps=2)
    known = partial(not_a_mode, mode, 0, label=str)
    assert isinstance(known(curved=torch.tensor([False, False])), NotAMode)
    assert isinstance(known(curved=torch.tensor([True, True])), ImproperPosterior)


def test_curvature_that_is_nan_is_not_a_mode() -> None:
    nowhere = torch.full((1, 3, 3), torch.nan)
    mode = climb(Toy(gaussian), lambda *_: nowhere, torch.zeros(1, 3), NONE, Limits(1e-14, 5, print))
    assert not bool(mode.converged.any())


def test_a_scale_that_runs_to_zero_is_told_of_differences_that_outnumber_what_they_are_of() -> None:
    """Of 264 normal densities on the edges of a lattice of 144 latents, 143 integrate the differences."""
    place, rise, logs = torch.tensor([-65.0]).double(), torch.tensor([-120.0]).double(), torch.tensor([True])
    found = newton.rises_without_end(place, rise, logs, lambda _: "site 's'")
    assert found is not None
    assert "120 nats a unit at site 's'" in str(found) and "differences of latents have a density each" in str(found)
    assert newton.rises_without_end(place, -rise, logs, lambda _: "site 's'") is None
