"""Many restarts as one batch through the hyperparameter loop: the steps of :mod:`type2`, all rows at once.

Each row has hyperparameters, pruned weights, a mode and a metric of its own.  Rows that have arrived, or that need the
care of the single loop, stand still while the others go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_evidence.infer import type2
from pyro_evidence.infer.iterate import Fit, Stop
from pyro_evidence.infer.restarts import Restarts, distinct
from pyro_evidence.infer.type2 import (
    FARTHEST,
    INFLATED,
    LARGEST_STEP,
    TypeII,
    metric_of,
    to_insignificance,
    updated,
)
from pyro_evidence.laplace import Problem, Slope, laplace_state
from pyro_evidence.laplace_rows import Points, density, measured, slopes, still_slopes
from pyro_evidence.ops import evidence, newton, trust
from pyro_evidence.ops.curvature import gauss_newton
from pyro_evidence.ops.precision import Dense

ROUNDS = 30  # of MacKay's, at most, before modes are found exactly
HALVINGS = 12  # of a step, before a row is left to the single loop


@dataclass(frozen=True)
class Batch:
    """One outer iterate of all rows."""

    points: Points
    slope: Slope  # (R, T) each
    metric: Tensor  # (R, T, T)
    moving: Tensor  # (R,) bool


def warmed(at: Problem, theta: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Hyperparameters and weights taken most of the way together, from starts ``(R, T)`` and ``(R, D)``.

    MacKay's rounds with the weights near their mode only, to a hundredth of a nat: at the first guess of the
    hyperparameters a network's mode is far from where it will be, and not worth finding.
    """
    by_rows, limits = density(at), newton.Limits(1e-2, 30)
    active = torch.ones_like(u, dtype=torch.bool)
    for _ in range(ROUNDS):
        rows = torch.cat([theta, active.to(theta)], -1)
        near = trust.ascend(by_rows, lambda v, own: gauss_newton(by_rows, v, own), u, rows, limits)
        tril, info = torch.linalg.cholesky_ex(near.precision.double())
        sound = (info == 0) & torch.isfinite(near.log_joint)
        points = Points(theta, active, near.u, torch.where(sound[:, None, None], tril, torch.nan), near.log_joint)
        found = still_slopes(replace(at, curvature=gauss_newton), points)
        move = (_natural(at, points, found) @ found.total.unsqueeze(-1)).squeeze(-1).clamp(-1.0, 1.0)
        move = torch.where(torch.isfinite(move) & ((theta + move - at.joint.initial_theta).abs() < 8.0), move, 0.0)
        theta, u = theta + move, torch.where(sound.unsqueeze(-1), near.u, u)
        if not bool((move.abs() > 0.1).any()):
            break
    return theta, u


def started(at: Problem, points: Points) -> Batch:
    """An iterate with fresh slopes, in MacKay's metric."""
    found = slopes(at, points)
    return Batch(points, found, _natural(at, points, found), torch.isfinite(found.total).all(-1))


def _natural(at: Problem, points: Points, found: Slope) -> Tensor:
    groups = at.structure.groups
    return metric_of(groups, None if groups is None else groups.size(points.active), found).diag_embed()


def step(at: Problem, batch: Batch, stop: Stop) -> Batch:
    """One outer iteration of the rows that move."""
    rows = torch.nonzero(batch.moving).squeeze(-1)
    old = batch.points.at(rows)
    slope, metric = Slope(batch.slope.total[rows], batch.slope.joint[rows]), batch.metric[rows]
    direction = (metric @ slope.total.unsqueeze(-1)).squeeze(-1)
    length = direction.abs().amax(-1, keepdim=True)
    direction = direction * (LARGEST_STEP / length.clamp(min=LARGEST_STEP))  # cap, direction kept
    new, rose = _line_search(at, old, direction, slope.total)
    new = _pruned(at, new)
    found = slopes(at, new)
    fresh = _natural(at, new, found)
    kept = rose & (new.active == old.active).all(-1) & (length.squeeze(-1) < 1.0)
    learned = updated(metric, fresh, new.theta - old.theta, slope.total, found.total)
    was_fresh = (metric == _natural(at, old, slope)).all(-1).all(-1)
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
    return lost | (torch.where(points.active & (groups.member >= 0), inflation, 0.0) > INFLATED).any(-1)


def _line_search(at: Problem, old: Points, direction: Tensor, slope: Tensor) -> tuple[Points, Tensor]:
    """The first of each row's halved steps that raises its log evidence (Armijo), and which rows found one."""
    rise = 1e-4 * (direction * slope).sum(-1)
    slack = 1e-13 * (1.0 + old.objective.abs())  # rounding of the log evidence
    left, new, scale = torch.arange(len(rise), device=rise.device), old, 1.0
    for _ in range(HALVINGS):
        trial = measured(at, old.theta[left] + scale * direction[left], old.active[left], old.u[left])
        good = trial.objective >= old.objective[left] + scale * rise[left] - slack[left]
        new = new.with_rows(left[good], trial.at(good))
        left, scale = left[~good], 0.5 * scale
        if not len(left):
            break
    rose = torch.ones_like(rise, dtype=torch.bool)
    rose[left] = False
    return new, rose


def _pruned(at: Problem, points: Points) -> Points:
    """With groups of weights switched off in the rows where that gains: as in the single loop, group by group."""
    groups = at.structure.groups
    if groups is None:
        return points
    for t in torch.nonzero(groups.is_weight).flatten().tolist():
        member = groups.member == t
        variance, prior = Dense(points.tril).variance, groups.log_precision(points.theta).exp()
        gamma = torch.where(points.active & member, evidence.well_determined(prior, variance), 0.0)
        size = (points.active & member).sum(-1)
        rows = torch.nonzero((size > 0) & (gamma.sum(-1) < 0.1 * size)).squeeze(-1)
        if len(rows) and bool(torch.isfinite(groups.loc[member]).all()):
            points = _without(at, points, rows, t, gamma[rows][:, member].amax(-1))
    return points


def _without(at: Problem, points: Points, rows: Tensor, t: int, determined: Tensor) -> Points:
    """Without group ``t`` in those of ``rows`` whose log evidence is then no lower, nor just before infinity."""
    groups = at.structure.groups
    assert groups is not None
    old, member = points.at(rows), groups.member == t
    away = to_insignificance(determined) / groups.power[t]
    theta = old.theta.clone()
    theta[:, t] += away
    start = torch.where(member, groups.loc, old.u)
    before = measured(at, theta, old.active, start)
    off = measured(at, theta, old.active & ~member, start)
    gains = (off.objective >= torch.maximum(old.objective, before.objective)) & torch.isfinite(off.objective)
    return points.with_rows(rows[gains], off.at(gains))


def search(at: Problem, starts: Tensor, theta: Tensor) -> Restarts:
    """The modes that ``starts`` ``(R, D)`` lead to, each at hyperparameters that it has warmed up to from ``theta``.

    :raises NotAMode: when every restart failed.
    """
    own, u = warmed(at, theta.expand(len(starts), -1).clone(), starts)
    points = measured(at, own, torch.ones_like(u, dtype=torch.bool), u, num_steps=500)
    return distinct([partial(laplace_state, at, own[row], points.u[row]) for row in range(len(u))])


def climb(fits: Sequence[Fit[TypeII]], stop: Stop) -> tuple[Fit[TypeII], ...]:
    """Every mode, all of one problem, moved to where its log evidence is highest, or as far as rows go together.

    A row for which no mode is found stays where it was.
    """
    states = [fit.state.laplace for fit in fits]
    at, active = states[0].problem, torch.stack([s.problem.active for s in states])
    points = measured(at, torch.stack([s.theta for s in states]), active, torch.stack([s.u for s in states]))
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
        state = type2.at(laplace_state(at, points.theta[row], points.u[row]))
    except ArithmeticError:
        return fit
    return Fit(state, fit.status, (*fit.objectives[:-1], *path, state.objective))


def _path(objectives: list[Tensor], row: int) -> tuple[float, ...]:
    """A row's objectives as long as they change, without the last."""
    values = [float(o[row]) for o in objectives]
    last = max((i for i in range(1, len(values)) if values[i] != values[i - 1]), default=0)
    return tuple(values[:last])
