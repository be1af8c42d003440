"""Limited-memory quasi-Newton ascent on many rows at once."""

from collections.abc import Callable

import torch
from torch import Tensor

ValueAndGradient = Callable[[Tensor], tuple[Tensor, Tensor]]


def ascend(f: ValueAndGradient, u: Tensor, *, tolerance: float, num_steps: int, memory: int = 10) -> Tensor:
    """Rows moved uphill until each row's largest gradient component is below ``tolerance``, shape ``(R, D)``.

    Nocedal and Wright (2006), algorithm 7.4, with backtracking; a row that cannot rise any more stays.
    """
    value, slope = f(u)
    history: list[tuple[Tensor, Tensor]] = []
    for _ in range(num_steps):
        if not bool((slope.abs().amax(-1) > tolerance).any()):
            break
        step = _direction(slope, history)
        new, new_value, new_slope = _line_search(f, (u, value, slope), step)
        if bool((new == u).all()):
            break
        history = [*history[1 - memory :], (new - u, slope - new_slope)]
        u, value, slope = new, new_value, new_slope
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
    return torch.where(uphill, q, slope / slope.norm(dim=-1, keepdim=True).add(1.0))


def _scale(slope: Tensor, history: list[tuple[Tensor, Tensor]]) -> Tensor:
    first = 1.0 / slope.norm(dim=-1, keepdim=True).clamp(min=1.0)  # |first step| <= 1
    if not history:
        return first
    s, y = history[-1]
    sy, yy = (s * y).sum(-1, keepdim=True), (y * y).sum(-1, keepdim=True)
    return torch.where(sy > 1e-12 * yy, sy / yy, first)


def _line_search(f: ValueAndGradient, at: tuple[Tensor, Tensor, Tensor], step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Halve each row's step until it rises enough (Armijo); rows that never do keep their place."""
    u, value, slope = at
    scale = torch.ones_like(value)
    rise = 1e-4 * (slope * step).sum(-1)
    for _ in range(30):
        trial = u + scale.unsqueeze(-1) * step
        trial_value, trial_slope = f(trial)
        good = torch.isfinite(trial_value) & (trial_value >= value + scale * rise)
        if bool(good.all()):
            return trial, trial_value, trial_slope
        scale = torch.where(good, scale, 0.5 * scale)
    keep = good.unsqueeze(-1)
    return torch.where(keep, trial, u), torch.where(good, trial_value, value), torch.where(keep, trial_slope, slope)
