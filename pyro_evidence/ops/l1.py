"""Maximum of a smooth concave function minus an L1 penalty, to rounding: a projected Newton method."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_evidence.ops.curvature import Density


class Sparse(NamedTuple):
    """A maximiser and how nearly it is one."""

    u: Tensor  # (K,) with exact zeros
    residual: float  # largest violation of the optimality conditions, nats per unit of u
    converged: bool


def maximise(
    density: Density, rate: Tensor, start: Tensor, orthant: Tensor | None, *, tolerance: float, slack: float = 1e-14
) -> Sparse:
    r"""Maximise ``log_joint(u) - sum(rate |u|)``, shape ``(K,)``.

    Newton on the free coordinates, those that are not 0 or whose gradient exceeds their rate, projected on
    the orthant of the current signs, with backtracking.  Andrew and Gao (2007); Schmidt (2010), section 2.3.

    :param rate: penalty of each coordinate, 0 for none.
    :param orthant: signs that ``u`` must keep where the rate is positive, or None.
    :param tolerance: of the residual, nats per unit of ``u``.
    :param slack: relative rounding of the log joint, a sum over data.
    """
    u, theta = start.clone(), start.new_zeros(0)
    value, gradient = _at(density, u, theta)
    for _ in range(200):
        uphill = _uphill(u, gradient, rate, orthant)
        if float(uphill.abs().max()) <= tolerance:
            break
        before = value - rate @ u.abs()
        new = _step(density, (u, before - slack * (1.0 + before.abs())), uphill, rate)
        if new is None:
            break
        u = new
        value, gradient = _at(density, u, theta)
    residual = float(_uphill(u, gradient, rate, orthant).abs().max())
    return Sparse(u, residual, residual <= tolerance)


def _at(density: Density, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    value, gradient = density.gradient(u.unsqueeze(0), theta)
    return value[0], gradient[0]


def _uphill(u: Tensor, gradient: Tensor, rate: Tensor, orthant: Tensor | None) -> Tensor:
    """The steepest way up; 0 exactly where the optimality conditions hold."""
    beyond = gradient.sign() * (gradient.abs() - rate).clamp(min=0.0)  # at 0 the penalty holds |gradient| <= rate
    if orthant is not None:
        beyond = torch.where((rate > 0) & (beyond * orthant < 0), 0.0, beyond)
    return torch.where(u == 0, beyond, gradient - rate * u.sign())


def _step(density: Density, at: tuple[Tensor, Tensor], uphill: Tensor, rate: Tensor) -> Tensor | None:
    """The first projected step that raises the objective: Newton's, then the gradient's."""
    u, lowest = at  # below which a trial counts as lower
    theta = u.new_zeros(0)
    free = (u != 0) | (uphill != 0)
    A = density.precision(u.unsqueeze(0), theta)[0]
    signs = torch.where(u == 0, uphill.sign(), u.sign())
    newton = torch.zeros_like(u)
    newton[free] = torch.linalg.solve(A[free][:, free], uphill[free])
    for direction in (newton, uphill / A.diagonal().max()):
        for halvings in range(40):
            trial = u + 0.5**halvings * direction
            trial = torch.where((rate > 0) & (trial * signs <= 0), 0.0, trial)
            after = density.log_joint(trial.unsqueeze(0), theta)[0] - rate @ trial.abs()
            rise = 1e-4 * float(uphill @ (trial - u))
            if float(after - lowest) >= max(rise, 0.0) and not torch.equal(trial, u):
                return trial
    return None
