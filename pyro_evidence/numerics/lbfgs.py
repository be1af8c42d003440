"""Limited-memory quasi-Newton ascent on many rows at once."""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_evidence.numerics.line_search import (
    Backtracking,
    Line,
    SearchPoint,
    Watch,
    along_step,
    curves,
    no_callback,
    to_peak,
)

ValueAndGradient = Callable[[Tensor], tuple[Tensor, Tensor]]
MEMORY = 10  # pairs of steps and changes of the gradient that are kept
# Of a step of about one: what is left at the end is rounding.
SEARCH = Backtracking(shorter=to_peak, num_trials=20, shortest=1e-12)
FAR_STEPS = 300  # of a search from far away
STUCK = 1e-8  # nats a step of such a search, below which Newton's method gets further
STEPS_ON = 1000  # of one that goes on where Newton's method cannot
STUCK_ON = 1e-9  # nats a step of that one, of which all its steps would make a millionth


def ascend(
    f: ValueAndGradient,
    u: Tensor,
    *,
    tolerance: float,
    num_steps: int,
    slack: float = 0.0,
    least: float = 0.0,
    watch: Watch = no_callback,
) -> Tensor:
    """Rows moved uphill until each row's largest gradient component is below ``tolerance``, shape ``(R, D)``.

    Nocedal and Wright (2006), algorithm 7.4, with backtracking; a row that cannot rise any more stays.

    :param slack: relative rounding of the value; a row whose step rises by less, or by less than ``least``, and does
        not halve its gradient, stays as well.
    """
    here = SearchPoint(u, *f(u))
    moving = torch.ones_like(here.objective, dtype=torch.bool)
    history: list[tuple[Tensor, Tensor]] = []
    for _ in range(num_steps):
        moving = moving & (here.gradient.abs().amax(-1) > tolerance)
        if not bool(moving.any()):
            break
        step = torch.where(moving.unsqueeze(-1), _direction(here.gradient, history), 0.0)
        new = _moved(f, here, step)
        rose = new.objective - here.objective > least + slack * (1.0 + here.objective.abs())
        flatter = new.gradient.abs().amax(-1) <= 0.5 * here.gradient.abs().amax(-1)
        moving = moving & (new.u != here.u).any(-1) & (rose | flatter)
        history = [*history, (new.u - here.u, here.gradient - new.gradient)][-MEMORY:]
        here = new
        watch(here.objective)
    return here.u


def from_far(
    f: ValueAndGradient, u: Tensor, slack: float, watch: Watch = no_callback, num_steps: int = FAR_STEPS
) -> Tensor:
    """Rows as near to a mode as Newton's method wants them: to slopes of a thousandth, ``(R, D)``."""
    level = 1e-3 * (1.0 + u.shape[-1] ** 0.5)
    return ascend(f, u, tolerance=level, num_steps=num_steps, slack=slack, least=STUCK, watch=watch)


def onwards(f: ValueAndGradient, u: Tensor, tolerance: float, slack: float, watch: Watch = no_callback) -> Tensor:
    """Rows from where Newton's method has not arrived; its ``tolerance`` is a squared slope, ``(R, D)``."""
    return ascend(f, u, tolerance=tolerance**0.5, num_steps=STEPS_ON, slack=slack, least=STUCK_ON, watch=watch)


def _moved(f: ValueAndGradient, here: SearchPoint, step: Tensor) -> SearchPoint:
    """After the first step of each row that rises enough; rows where none does keep their place."""

    def trial(rows: Tensor, scale: Tensor) -> SearchPoint:
        u = along_step(here.u[rows], scale, step[rows])
        return SearchPoint(u, *f(u))

    rise = (here.gradient * step).sum(-1)
    rows = torch.nonzero((step != 0).any(-1)).squeeze(-1)
    return SEARCH(here, rows, Line(rise, torch.zeros_like(rise)), trial)[0]


def _direction(slope: Tensor, history: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Two-loop recursion; rows where it is not uphill fall back on the gradient."""
    q, kept = slope, []
    for s, y in reversed(history):
        rho = torch.where(curves(s, y), 1.0 / (s * y).sum(-1, keepdim=True), 0.0)
        a = rho * (s * q).sum(-1, keepdim=True)
        q = q - a * y
        kept.append((s, y, rho, a))
    scale = 1.0 / slope.norm(dim=-1, keepdim=True).clamp(min=1.0)  # |first step| <= 1
    if history:
        s, y = history[-1]
        again = 2.0 * s.norm(dim=-1, keepdim=True) / slope.norm(dim=-1, keepdim=True)  # where that step was too long
        scale = torch.where(again > 0, torch.minimum(again, scale), scale)
        scale = torch.where(curves(s, y), (s * y).sum(-1, keepdim=True) / (y * y).sum(-1, keepdim=True), scale)
    q = q * scale
    for s, y, rho, a in reversed(kept):
        q = q + s * (a - rho * (y * q).sum(-1, keepdim=True))
    uphill = (q * slope).sum(-1, keepdim=True) > 0
    largest = slope.abs().amax(-1, keepdim=True)
    unit = slope / largest  # whose square does not overflow
    return torch.where(uphill, q, unit / (unit.norm(dim=-1, keepdim=True) + 1.0 / largest))
