"""Limited-memory quasi-Newton ascent on many rows at once."""

from collections.abc import Callable

import torch
from torch import Tensor

ValueAndGradient = Callable[[Tensor], tuple[Tensor, Tensor]]
Watch = Callable[[Tensor], None]  # told every row's value once per step
MEMORY = 10  # pairs of steps and changes of the gradient that are kept


def no_callback(values: Tensor) -> None:
    """Does nothing."""


def ascend(f: ValueAndGradient, u: Tensor, *, tolerance: float, num_steps: int, watch: Watch = no_callback) -> Tensor:
    """Rows moved uphill until each row's largest gradient component is below ``tolerance``, shape ``(R, D)``.

    Nocedal and Wright (2006), algorithm 7.4, with backtracking; a row that cannot rise any more stays.
    """
    value, slope = f(u)
    moving = torch.ones_like(value, dtype=torch.bool)
    history: list[tuple[Tensor, Tensor]] = []
    for _ in range(num_steps):
        moving = moving & (slope.abs().amax(-1) > tolerance)
        if not bool(moving.any()):
            break
        step = torch.where(moving.unsqueeze(-1), _direction(slope, history), 0.0)
        new, new_value, new_slope = _line_search(f, (u, value, slope), step)
        moving = moving & (new != u).any(-1)
        history = [*history, (new - u, slope - new_slope)][-MEMORY:]
        u, value, slope = new, new_value, new_slope
        watch(value)
    return u


def _direction(slope: Tensor, history: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Two-loop recursion; rows where it is not uphill fall back on the gradient."""
    q, kept = slope, []
    for s, y in reversed(history):
        sy = (s * y).sum(-1, keepdim=True)
        rho = torch.where(sy > 1e-12 * (y * y).sum(-1, keepdim=True), 1.0 / sy, 0.0)  # s'y > 0: positive curvature
        a = rho * (s * q).sum(-1, keepdim=True)
        q = q - a * y
        kept.append((s, y, rho, a))
    q = q * _scale(slope, history)
    for s, y, rho, a in reversed(kept):
        q = q + s * (a - rho * (y * q).sum(-1, keepdim=True))
    uphill = (q * slope).sum(-1, keepdim=True) > 0
    largest = slope.abs().amax(-1, keepdim=True)
    unit = slope / largest  # whose square does not overflow
    return torch.where(uphill, q, unit / (unit.norm(dim=-1, keepdim=True) + 1.0 / largest))


def _scale(slope: Tensor, history: list[tuple[Tensor, Tensor]]) -> Tensor:
    first = 1.0 / slope.norm(dim=-1, keepdim=True).clamp(min=1.0)  # |first step| <= 1
    if not history:
        return first
    s, y = history[-1]
    sy, yy = (s * y).sum(-1, keepdim=True), (y * y).sum(-1, keepdim=True)
    return torch.where(sy > 1e-12 * yy, sy / yy, first)


def _line_search(
    f: ValueAndGradient, here: tuple[Tensor, Tensor, Tensor], step: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Shorten each row's step until it rises enough (Armijo); rows that never do keep their place."""
    u, value, slope = (x.clone() for x in here)
    rise = (slope * step).sum(-1)
    scale = torch.ones_like(value)
    rows = torch.nonzero((step != 0).any(-1)).squeeze(-1)
    for _ in range(20):
        if not len(rows):
            break
        trial = here[0][rows] + scale[rows].unsqueeze(-1) * step[rows]
        trial_value, trial_slope = f(trial)
        gain = trial_value - here[1][rows]
        good = torch.isfinite(trial_value) & (gain >= 1e-4 * scale[rows] * rise[rows])
        u[rows[good]], value[rows[good]], slope[rows[good]] = (
            trial[good],
            trial_value[good],
            trial_slope[good],
        )
        scale[rows] = _shorter(scale[rows], rise[rows], gain)
        rows = rows[~good]
    return u, value, slope


def _shorter(scale: Tensor, rise: Tensor, gain: Tensor) -> Tensor:
    """Where the parabola through what is known peaks, between a tenth and a half of the step."""
    curvature = (gain - rise * scale) / scale.square()
    peak = torch.where(torch.isfinite(curvature) & (curvature < 0), -0.5 * rise / curvature, 0.0)
    return torch.minimum(torch.maximum(peak, 0.1 * scale), 0.5 * scale)
