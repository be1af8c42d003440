"""The L1 maximiser: closed form, optimality conditions, and the orthant that is not the optimum."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pyro_evidence.numerics.linear_predictor import Part
from pyro_evidence.numerics.newton import Limits
from pyro_evidence.relevance import axis_evidence, mode
from pyro_evidence.relevance.targets import LinearTarget, Penalised


@dataclass(frozen=True)
class Bowl:
    """``-(u - centre)' A (u - centre) / 2``."""

    A: Tensor
    centre: Tensor
    blocks: tuple[slice, ...] = ()

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        d = u - self.centre
        return -0.5 * ((d @ self.A) * d).sum(-1)

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_joint(u, theta), -(u - self.centre) @ self.A

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        return self.A.expand(len(u), -1, -1)

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        return self.A.diagonal().expand(len(u), -1)

    gauss_newton = precision


def test_separable_quadratic_is_soft_thresholded() -> None:
    h, centre, rate = (
        torch.tensor([4.0, 1.0, 2.0, 1.0]),
        torch.tensor([1.0, -0.3, -2.0, 0.5]),
        torch.tensor([1.0, 0.5, 2.0, 0.0]),
    )
    found = mode.maximise(Bowl(h.diag(), centre), rate, centre, None, Limits(1e-12, mode.MOST_STEPS))
    torch.testing.assert_close(found.u, centre.sign() * (centre.abs() - rate / h).clamp(min=0.0))
    assert found.converged


def test_optimality_conditions_by_hand_and_no_point_nearby_is_better() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        root = torch.randn(8, 8, generator=generator)
        bowl = Bowl(root @ root.T + 0.1 * torch.eye(8), torch.randn(8, generator=generator))
        rate = 2.0 * torch.rand(8, generator=generator)
        found = mode.maximise(bowl, rate, torch.zeros(8), None, Limits(1e-10, mode.MOST_STEPS))
        g = bowl.gradient(found.u, found.u)[1]
        assert bool(
            (torch.where(found.u == 0, (g.abs() - rate).clamp(min=0.0), (g - rate * found.u.sign()).abs()) < 1e-9).all()
        )
        near = found.u + 0.01 * torch.randn(500, 8, generator=generator)
        assert float((bowl.log_joint(near, near) - near.abs() @ rate).max()) < float(
            bowl.log_joint(found.u, found.u) - rate @ found.u.abs()
        )


def logistic_target(Phi: Tensor, t: Tensor) -> LinearTarget:
    def log_likelihood(eta: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid((2.0 * t - 1.0).unsqueeze(-1) * eta).sum((-2, -1))

    return LinearTarget.resident((Part(log_likelihood, Phi.unsqueeze(1), torch.zeros(len(Phi), 1)),))


def test_the_orthant_of_the_maximum_likelihood_point_need_not_hold_the_optimum() -> None:
    """Some of many small logistic problems with given rates have their L1 optimum across an axis."""
    crossings = 0
    for seed in range(95, 115):
        generator = torch.Generator().manual_seed(seed)
        Phi = torch.randn(8, 2, generator=generator)
        t = (torch.rand(8, generator=generator) < 0.5).double()
        target = logistic_target(Phi, t)
        w = ml(target)
        if w is None:
            continue
        axes = axis_evidence.from_gram(target.precision(w.unsqueeze(0))[0], w, torch.zeros(2))
        density = Penalised(target.along(axes.directions), torch.zeros(2))
        rate = 0.5 * 10.0 ** (2.0 * torch.rand(2, generator=generator) - 1.5)
        free = mode.maximise(density, rate, axes.u, None, Limits(1e-9, mode.MOST_STEPS))
        held = mode.maximise(density, rate, axes.u, axes.u.sign(), Limits(1e-9, mode.MOST_STEPS))
        assert free.converged and held.converged
        assert bool((held.u >= 0).all())
        values = [float(density.log_joint(f.u.unsqueeze(0), w)[0] - rate @ f.u.abs()) for f in (free, held)]
        assert values[0] >= values[1] - 1e-12
        if bool((free.u < -1e-6).any()):
            assert values[0] > values[1]
            crossings += 1
    assert crossings >= 1  # rare: about 2 % where the rates are random


EIGHT = torch.tensor([[-1, 3], [0, -1], [4, -2], [-2, 4], [-4, 3], [0, 0], [1, -2], [3, -3]], dtype=torch.float64)
LABELS = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])


def highest(density: Penalised, rate: Tensor, low: float) -> tuple[Tensor, float]:
    """Oracle: the best point of ever finer grids over ``[low, 4] x [0, 4]``."""
    centre, width = torch.tensor([0.5 * (low + 4.0), 2.0]), torch.tensor([0.5 * (4.0 - low), 2.0])
    best, value = centre, -torch.inf
    for _ in range(12):
        grid = torch.cartesian_prod(
            *(torch.linspace(float(c - w), float(c + w), 41) for c, w in zip(centre, width, strict=True))
        )
        grid = torch.cat([grid, grid * torch.tensor([0.0, 1.0])])  # the corner of the penalty is always on it
        grid = grid[(grid[:, 0] >= low) & (grid[:, 1] >= 0.0)]
        values = density.log_joint(grid, grid) - grid.abs() @ rate
        best, value = grid[int(values.argmax())], float(values.max())
        centre, width = best, 0.2 * width
    return best, value


def test_eight_points_whose_optimum_lies_across_an_axis() -> None:
    """Each axis' sign at the maximum-likelihood point does not bind the L1 optimum: two optima, the free one higher."""
    target = logistic_target(EIGHT, LABELS)
    w = ml(target)
    assert w is not None
    axes = axis_evidence.from_gram(target.precision(w.unsqueeze(0))[0], w, torch.zeros(2))
    assert bool((axes.u > 0).all())
    density, rate = Penalised(target.along(axes.directions), torch.zeros(2)), 0.5 * torch.tensor([0.1, 0.7])
    values = []
    for orthant, low in ((None, -4.0), (axes.u.sign(), 0.0)):
        found = mode.maximise(density, rate, axes.u, orthant, Limits(1e-9, mode.MOST_STEPS))
        point, value = highest(density, rate, low)
        torch.testing.assert_close(found.u, point, rtol=0, atol=1e-5)
        values.append(float(density.log_joint(found.u.unsqueeze(0), w)[0] - rate @ found.u.abs()))
        assert abs(values[-1] - value) < 1e-9
        assert float(found.u[0]) < -1e-3 if orthant is None else float(found.u[0]) == 0.0
    assert values[0] > values[1] + 1e-5


def ml(target: LinearTarget) -> Tensor | None:
    """Newton; None when the classes are separated."""
    w = torch.zeros(1, 2)
    for _ in range(60):
        A = target.precision(w)[0]
        if float(torch.linalg.eigvalsh(A)[0]) < 1e-4:
            return None
        w = w + torch.linalg.solve(A, target.gradient(w)[1][0])
    return w[0] if float(w.abs().max()) < 20.0 else None


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_coordinate_that_starts_at_zero_can_leave_it(sign: float) -> None:
    found = mode.maximise(
        Bowl(torch.eye(2), torch.tensor([3.0 * sign, 0.1])),
        torch.ones(2),
        torch.zeros(2),
        None,
        Limits(1e-12, mode.MOST_STEPS),
    )
    torch.testing.assert_close(found.u, torch.tensor([2.0 * sign, 0.0]))
