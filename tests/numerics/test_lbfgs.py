"""Quasi-Newton ascent: the same modes as Newton's, without a Hessian."""

from functools import partial

import pytest
import torch
from torch import Tensor

from pyro_evidence.numerics import lbfgs
from pyro_evidence.numerics.lbfgs import ascend
from tests.models_for_tests.toy_density import MEAN, Toy, banana, cliff, gaussian, logistic, wells

assert_approx = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)

NONE = torch.zeros(0)


def search(f, u: Tensor, *, num_steps: int = 500, seen: list[Tensor] | None = None) -> Tensor:
    watch = (lambda v: None) if seen is None else lambda v: seen.append(v.clone())
    return ascend(lambda v: Toy(f).gradient(v, NONE), u, tolerance=1e-8, num_steps=num_steps, watch=watch)


def test_modes_on_paper() -> None:
    assert_approx(search(gaussian, torch.randn(2, 3)), MEAN.expand(2, 3))
    assert_approx(search(banana, torch.tensor([[-1.2, 1.0], [0.0, 3.0]])), torch.ones(2, 2))
    assert_approx(search(cliff, torch.tensor([[0.01, 5.0]])), torch.ones(1, 2))
    assert_approx(search(wells, torch.tensor([[0.3, -0.2]])), torch.tensor([[1.0, -1.0]]))


@pytest.mark.parametrize("f", [logistic, banana, wells])
def test_gradient_ends_small(f) -> None:
    """Below the tolerance, or where the value's own rounding hides any further rise."""
    u = search(f, 0.5 + torch.rand(4, 2))
    assert float(Toy(f).gradient(u, NONE)[1].abs().max()) <= 1e-6


def test_a_batch_of_rows_is_a_loop() -> None:
    u = torch.tensor([[-1.2, 1.0], [1.0, 1.0], [0.0, 3.0]])
    assert_approx(search(banana, u), torch.cat([search(banana, row.unsqueeze(0)) for row in u]))


def test_steps_never_descend_and_each_is_told() -> None:
    seen: list[Tensor] = []
    search(banana, torch.tensor([[-1.2, 1.0], [3.0, -2.0]]), seen=seen, num_steps=20)
    assert len(seen) == 20
    assert bool((torch.stack(seen).diff(dim=0) >= 0).all())


def test_a_row_at_its_mode_stays() -> None:
    u = torch.tensor([[1.0, 1.0], [0.0, 3.0]])
    assert torch.equal(search(banana, u)[0], u[0])


def test_a_row_that_cannot_rise_stays() -> None:
    u = torch.tensor([[2.0, 3.0]])
    assert torch.equal(
        search(
            lambda v, theta: torch.where(v == u, 0.0 * v, -1.0 + 0.0 * v).sum(-1) + 1e-3 * (v - v.detach()).sum(-1), u
        ),
        u,
    )


@pytest.mark.parametrize("memory", [1, 2, 10])
def test_any_memory_will_do(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lbfgs, "MEMORY", memory)
    kept = []
    direction = lbfgs._direction
    monkeypatch.setattr(lbfgs, "_direction", lambda s, h: kept.append(len(h)) or direction(s, h))
    assert_approx(search(gaussian, torch.zeros(1, 3)), MEAN.unsqueeze(0))
    assert max(kept) <= memory


def test_a_first_step_is_at_most_one_long() -> None:
    """However steep the start."""
    seen: list[Tensor] = []

    def steep(u: Tensor, theta: Tensor) -> Tensor:
        return -1e6 * (u - 3.0).square().sum(-1)

    u = torch.zeros(1, 2)
    after = search(steep, u, num_steps=1, seen=seen)
    assert 0.0 < float((after - u).norm()) <= 1.0


def test_a_step_without_curvature_is_tried_at_twice_the_length_of_the_last() -> None:
    """Along a ridge that narrows and rises without end: of steps from a unit long each took four or five trials."""
    runs = 0

    def funnel(u: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal runs
        runs += 1
        u = u.detach().requires_grad_()
        value = -2.0 * u[:, 0] - 0.5 * (u[:, 1:].square().sum(-1) * (-2.0 * u[:, 0]).exp())
        return value.detach(), torch.autograd.grad(value.sum(), u)[0]

    end = ascend(funnel, torch.tensor([[0.0, 1.0, -0.5, 0.3]]).double(), tolerance=1e-8, num_steps=60)
    assert float(funnel(end)[0]) > 5.0
    assert runs < 200
