"""Many restarts as one batch through the hyperparameter loop: the steps of :mod:`type2`, all rows at once.

Each row has hyperparameters, pruned weights, a mode and a metric of its own.  Rows that have arrived, or that need the
care of the single loop, stand still while the others go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_evidence.infer import type2
from pyro_evidence.infer.batch_moves import line_search, natural, pruned
from pyro_evidence.infer.iterate import Fit, Stop
from pyro_evidence.infer.type2 import FARTHEST, LARGEST_STEP, TypeII, largest_inflation, updated
from pyro_evidence.laplace import Problem, Slope, laplace_state
from pyro_evidence.laplace_rows import Points, measured, slopes
from pyro_evidence.ops.precision import Dense


@dataclass(frozen=True)
class Batch:
    """One outer iterate of all rows."""

    points: Points
    slope: Slope  # (R, T) each
    metric: Tensor  # (R, T, T)
    moving: Tensor  # (R,) bool


def started(at: Problem, points: Points) -> Batch:
    """An iterate with fresh slopes, in MacKay's metric."""
    found = slopes(at, points)
    return Batch(points, found, natural(at, points, found), torch.isfinite(found.total).all(-1))


def step(at: Problem, batch: Batch, stop: Stop) -> Batch:
    """One outer iteration of the rows that move."""
    rows = torch.nonzero(batch.moving).squeeze(-1)
    old = batch.points.at(rows)
    slope, metric = Slope(batch.slope.total[rows], batch.slope.joint[rows]), batch.metric[rows]
    direction = (metric @ slope.total.unsqueeze(-1)).squeeze(-1)
    length = direction.abs().amax(-1, keepdim=True)
    direction = direction * (LARGEST_STEP / length.clamp(min=LARGEST_STEP))  # cap, direction kept
    new, rose = line_search(at, old, direction, slope.total)
    new = pruned(at, new)
    new = replace(new, escaped=old.escaped | new.escaped)
    found = slopes(at, new)
    fresh = natural(at, new, found)
    kept = rose & (new.active == old.active).all(-1) & (length.squeeze(-1) < 1.0)
    learned = updated(metric, fresh, new.theta - old.theta, slope.total, found.total)
    was_fresh = (metric == natural(at, old, slope)).all(-1).all(-1)
    moving = (rose | ~was_fresh) & ~_arrived(old, new, found, stop, rose) & ~_needs_care(at, new, found)
    return Batch(
        batch.points.with_rows(rows, new),
        Slope(batch.slope.total.index_copy(0, rows, found.total), batch.slope.joint.index_copy(0, rows, found.joint)),
        batch.metric.index_copy(0, rows, torch.where(kept[:, None, None], learned, fresh)),
        batch.moving.index_copy(0, rows, moving),
    )


def _arrived(old: Points, new: Points, found: Slope, stop: Stop, rose: Tensor) -> Tensor:
    small = (new.objective - old.objective).abs() <= stop.tolerance * (1.0 + new.objective.abs())
    return rose & small & (found.total.abs().amax(-1) <= stop.gradient_tolerance)


def _needs_care(at: Problem, points: Points, found: Slope) -> Tensor:
    """Rows on their way to infinity, or to a singular curvature, or without a derivative."""
    lost = (points.theta.abs() > FARTHEST).any(-1) | ~torch.isfinite(found.total).all(-1)
    groups = at.structure.groups
    if groups is None:
        return lost
    inflation = Dense(points.tril).variance * groups.log_precision(points.theta).exp()
    return lost | (torch.where(points.active & (groups.member >= 0), inflation, 0.0) > largest_inflation(at)).any(-1)


def climb(fits: Sequence[Fit[TypeII]], stop: Stop) -> tuple[Fit[TypeII], ...]:
    """Every mode, all of one problem, moved to where its log evidence is highest, or as far as rows go together.

    A row for which no mode is found stays where it was.
    """
    states = [fit.state.laplace for fit in fits]
    at, active = states[0].problem, torch.stack([s.problem.active for s in states])
    points = measured(at, torch.stack([s.theta for s in states]), active, torch.stack([s.u for s in states]))
    points = replace(points, escaped=points.escaped | torch.tensor([s.escaped for s in states]).to(active))
    batch, path = started(at, points), [points.objective]
    with tqdm(desc="restarts", delay=1.0, disable=not stop.progress, leave=False) as bar:
        while bool(batch.moving.any()) and len(path) <= stop.num_steps:
            batch = step(at, batch, stop)
            path.append(batch.points.objective)
            bar.set_postfix_str(f"{int(batch.moving.sum())} of {len(states)} on their way", refresh=False)
            bar.update()
    return tuple(_alone(fit, batch.points, row, _path(path, row)) for row, fit in enumerate(fits))


def _alone(fit: Fit[TypeII], points: Points, row: int, path: tuple[float, ...]) -> Fit[TypeII]:
    """One row as a fit of its own."""
    problem = fit.state.laplace.problem
    at = replace(problem, active=points.active[row])
    try:
        found = laplace_state(at, points.theta[row], points.u[row])
        state = type2.at(replace(found, escaped=bool(points.escaped[row])))
    except ArithmeticError:
        return fit
    return Fit(state, fit.status, (*fit.objectives[:-1], *path, state.objective))


def _path(objectives: list[Tensor], row: int) -> tuple[float, ...]:
    """A row's objectives as long as they change, without the last."""
    values = [float(o[row]) for o in objectives]
    last = max((i for i in range(1, len(values)) if values[i] != values[i - 1]), default=0)
    return tuple(values[:last])
