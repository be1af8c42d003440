"""Newton's method for the posterior mode, on many rows at once."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.ops.curvature import Density

CurvatureAt = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Mode:
    """Where the search stopped; one row each."""

    u: Tensor  # (R, D)
    log_joint: Tensor  # (R,)
    gradient: Tensor  # (R, D)
    precision: Tensor  # (R, D, D) or (R, D): the curvature at u
    decrement: Tensor  # (R,) squared gradient norm in the metric of the precision, nats
    converged: Tensor  # (R,) bool


def climb(density: Density, curvature: CurvatureAt, u: Tensor, theta: Tensor, *, tolerance: float, num_steps: int) -> Mode:
    """Newton with backtracking; an indefinite curvature is replaced by its absolute value for the step.

    A row is done when ``A`` is positive definite and ``g' A^-1 g``, twice the rise in nats that a Newton step still
    promises, is far below ``tolerance``, or is below it and has stopped falling for rounding.  A row that has come to
    rest on a saddle leaves along its downward curvature.

    :param curvature: maps points ``(R, D)`` to precisions.
    """
    value, slope = density.gradient(u, theta)
    before = torch.full_like(value, torch.inf)
    for _ in range(num_steps):
        A = curvature(u).detach()
        step, definite, lowest = _step(A, slope)
        decrement = (slope * step).sum(-1)
        done = definite & (decrement <= torch.where(decrement > 0.1 * before, tolerance, tolerance**1.4))
        if bool(done.all()):
            break
        before = decrement
        step = torch.where((~definite & (decrement <= tolerance)).unsqueeze(-1), _escape(density, u, theta, lowest), step)
        moved = _backtrack(density, (u, value, slope), theta, torch.where(done.unsqueeze(-1), 0.0, step))
        if bool((moved[0] == u).all()):
            done = definite & (decrement <= 1e4 * tolerance * (1.0 + value.abs()))
            break
        u, value, slope = moved
    return Mode(u, value, slope, A, decrement, done)


def _step(A: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Newton step per row, which rows are positive definite, and each row's direction of lowest curvature."""
    if A.dim() == 2:
        step = slope / torch.where(A == 0, 1.0, A.abs())
        return step, (A > 0).all(-1), torch.zeros_like(slope).scatter(-1, A.argmin(-1, keepdim=True), 1.0)
    tril, info = torch.linalg.cholesky_ex(A)
    if not bool(info.any()):
        return torch.cholesky_solve(slope.unsqueeze(-1), tril).squeeze(-1), info == 0, torch.zeros_like(slope)
    values, vectors = torch.linalg.eigh(A)
    size = values.abs()
    size = torch.maximum(size, 1e-12 * size.amax(-1, keepdim=True) + torch.finfo(A.dtype).tiny)
    step = (vectors @ ((vectors.mT @ slope.unsqueeze(-1)) / size.unsqueeze(-1))).squeeze(-1)
    return step, info == 0, vectors[..., 0] * size[..., :1].rsqrt()


def _escape(density: Density, u: Tensor, theta: Tensor, direction: Tensor) -> Tensor:
    """The better of the two ways off a saddle."""
    ahead, behind = (density.log_joint(u + s * direction, theta).detach() for s in (1.0, -1.0))
    return torch.where((ahead >= behind).unsqueeze(-1), direction, -direction)


def _backtrack(
    density: Density, at: tuple[Tensor, Tensor, Tensor], theta: Tensor, step: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Halve each row's step until the log joint does not fall beyond rounding."""
    u, value, slope = at
    slack = 1e-14 * (1.0 + value.abs())  # rounding of the sum over data
    rise = 1e-4 * (slope * step).sum(-1)
    scale = torch.ones_like(value)
    for _ in range(40):
        trial = u + scale.unsqueeze(-1) * step
        trial_value, trial_slope = density.gradient(trial, theta)
        good = torch.isfinite(trial_value) & (trial_value >= value + scale * rise - slack)
        if bool(good.all()):
            return trial, trial_value, trial_slope
        scale = torch.where(good, scale, 0.5 * scale)
    keep = good.unsqueeze(-1)
    return torch.where(keep, trial, u), torch.where(good, trial_value, value), torch.where(keep, trial_slope, slope)
