"""Many restarts as one batch through the hyperparameter loop: the steps of :mod:`type2`, all rows at once.

Each row has hyperparameters, pruned weights, a mode and a metric of its own.  Rows that have arrived, or that need the
care of the single loop, stand still while the others go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.fitting.iterate import Fit, Stop, bar_of
from pyro_evidence.laplace import type2
from pyro_evidence.laplace.approximation import LaplaceRows, Problem, laplace_rows, largest_inflation, single
from pyro_evidence.laplace.gradient import Slope, slopes
from pyro_evidence.laplace.metric import metric_of, updated
from pyro_evidence.laplace.pruning import UNDETERMINED, to_insignificance
from pyro_evidence.laplace.remedies import near_folds
from pyro_evidence.laplace.type2 import FARTHEST, LARGEST_STEP, LONGER, SHARP, TypeII
from pyro_evidence.numerics import evidence, trust_region
from pyro_evidence.numerics.batched import Batched
from pyro_evidence.numerics.line_search import Backtracking, Line, along_step, to_peak_or_quarter
from pyro_evidence.precision.dense import Dense

SEARCH = Backtracking(shorter=to_peak_or_quarter, num_trials=6)  # then a row is left to the single loop


def natural_metrics(problem: Problem, points: LaplaceRows, found: Slope) -> Tensor:
    """MacKay's metric of each row, ``(R, T, T)``: see :mod:`pyro_evidence.laplace.metric`."""
    groups = problem.structure.groups
    return metric_of(groups, None if groups is None else groups.size(points.active), found).diag_embed()


def line_search(problem: Problem, old: LaplaceRows, direction: Tensor, slope: Tensor) -> tuple[LaplaceRows, Tensor]:
    """The first of each row's halved steps that raises its log evidence (Armijo), and which rows found one."""

    def trial(rows: Tensor, scale: Tensor) -> LaplaceRows:
        theta = along_step(old.theta[rows], scale, direction[rows])
        return laplace_rows(problem, theta, old.active[rows], old.u[rows], trust_region.FOLLOWED)

    rise = (direction * slope).sum(-1)
    line = Line(rise, problem.slack * (1.0 + old.objective.abs()))
    new, left = SEARCH(old, torch.arange(len(rise), device=rise.device), line, trial)
    return new, torch.ones_like(rise, dtype=torch.bool).index_fill(0, left, False)


def pruned(problem: Problem, points: LaplaceRows) -> LaplaceRows:
    """With groups of weights switched off in the rows where that gains: as in the single loop, group by group."""
    groups = problem.structure.groups
    if groups is None:
        return points
    for t in torch.nonzero(groups.is_weight).flatten().tolist():
        member = groups.member == t
        variance, prior = Dense(points.tril).variance, groups.log_precision(points.theta).exp()
        gamma = torch.where(points.active & member, evidence.well_determined(prior, variance), 0.0)
        size = (points.active & member).sum(-1)
        rows = torch.nonzero((size > 0) & (gamma.sum(-1) < UNDETERMINED * size)).squeeze(-1)
        if len(rows) and bool(torch.isfinite(groups.loc[member]).all()):
            points = _without(problem, points, rows, t, gamma[rows][:, member].amax(-1))
    return points


def _without(problem: Problem, points: LaplaceRows, rows: Tensor, t: int, determined: Tensor) -> LaplaceRows:
    """Without group ``t`` in those of ``rows`` whose log evidence is then no lower, nor just before infinity."""
    groups = problem.structure.groups
    assert groups is not None
    old, member = points[rows], groups.member == t
    away = to_insignificance(determined) / groups.power[t]
    theta = old.theta.clone()
    theta[:, t] += away
    start = torch.where(member, groups.loc, old.u)
    off = laplace_rows(problem, theta, old.active & ~member, start)
    gains = torch.nonzero((off.objective >= old.objective) & torch.isfinite(off.objective)).squeeze(-1)
    if not len(gains):
        return points
    before = laplace_rows(problem, theta[gains], old.active[gains], start[gains])
    gains = gains[off.objective[gains] >= before.objective]
    return points.with_rows(rows[gains], off[gains])


@dataclass(frozen=True)
class TypeIIBatch(Batched):
    """One iterate of the hyperparameters of all rows."""

    points: LaplaceRows
    slope: Slope
    metric: Tensor  # (R, T, T)
    moving: Tensor  # (R,) bool
    share: Tensor  # (R,) of the last step that was taken


def started(problem: Problem, points: LaplaceRows) -> TypeIIBatch:
    """An iterate with fresh slopes, in MacKay's metric."""
    found = slopes(problem, points)
    metric, moving = natural_metrics(problem, points, found), torch.isfinite(found.total).all(-1)
    return TypeIIBatch(points, found, metric, moving, torch.ones_like(points.objective))


def step(problem: Problem, batch: TypeIIBatch, stop: Stop) -> TypeIIBatch:
    """One iteration of the hyperparameters of the rows that move."""
    rows = torch.nonzero(batch.moving).squeeze(-1)
    here = batch[rows]
    old, slope, metric = here.points, here.slope, here.metric
    direction = (metric @ slope.total.unsqueeze(-1)).squeeze(-1)
    length = direction.abs().amax(-1, keepdim=True)
    direction = direction * (LARGEST_STEP / length.clamp(min=LARGEST_STEP))  # cap, direction kept
    promised = 0.5 * (direction * slope.total).sum(-1)
    first = torch.where(promised > SHARP, LONGER * here.share, 1.0).clamp(max=1.0)  # modes were followed so far
    new, rose = line_search(problem, old, direction * first.unsqueeze(-1), slope.total)
    along = ((new.theta - old.theta) * direction).sum(-1) / direction.square().sum(-1)
    share = torch.where(along > 0, along, 1.0)
    new = pruned(problem, new)
    new = replace(new, left_saddle=old.left_saddle | new.left_saddle)
    found = slopes(problem, new)
    fresh = natural_metrics(problem, new, found)
    kept = rose & (new.active == old.active).all(-1) & (length.squeeze(-1) < 1.0)
    learned = updated(metric, fresh, new.theta - old.theta, slope.total, found.total)
    was_fresh = (metric == natural_metrics(problem, old, slope)).all(-1).all(-1)
    gain = new.objective - old.objective
    noise = rose & (gain <= problem.slack * (1.0 + old.objective.abs()))
    small = gain.abs() <= stop.tolerance * (1.0 + new.objective.abs())
    arrived = rose & small & (found.total.abs().amax(-1) <= stop.gradient_tolerance)
    moving = (rose | ~was_fresh) & ~noise & ~arrived & ~_needs_care(problem, new, found)
    metric = torch.where(kept[:, None, None], learned, fresh)
    return batch.with_rows(rows, TypeIIBatch(new, found, metric, moving, share))


def _needs_care(problem: Problem, points: LaplaceRows, found: Slope) -> Tensor:
    """Rows on their way to infinity, to a singular curvature or to where there is no mode, or without a derivative."""
    far = ((points.theta - problem.joint.initial_theta).abs() > FARTHEST).any(-1)
    rows = torch.cat([points.theta, points.active.to(points.theta)], -1)
    lost = far | ~torch.isfinite(found.total).all(-1) | near_folds(problem, problem.density_by_rows, points.u, rows)
    groups = problem.structure.groups
    if groups is None:
        return lost
    inflation = Dense(points.tril).variance * groups.log_precision(points.theta).exp()
    inflation = torch.where(points.active & (groups.member >= 0), inflation, 0.0)
    return lost | (inflation > largest_inflation(problem)).any(-1)


def climb(fits: Sequence[Fit[TypeII]], stop: Stop) -> tuple[Fit[TypeII], ...]:
    """Every mode, all of one problem, moved to where its log evidence is highest, or as far as rows go together.

    A row for which no mode is found, or another one than its own, stays where it was.
    """
    states = [fit.state.laplace for fit in fits]
    problem, active = states[0].problem, torch.stack([s.problem.active for s in states])
    points = laplace_rows(problem, torch.stack([s.theta for s in states]), active, torch.stack([s.u for s in states]))
    points = replace(points, left_saddle=points.left_saddle | torch.tensor([s.left_saddle for s in states]).to(active))
    before = torch.tensor([s.objective for s in states]).to(points.objective)
    own = points.objective >= before - problem.limits.tolerance**0.5 * (1.0 + before.abs())  # searched for once more
    batch, path = started(problem, points), [points.objective]
    batch = replace(batch, moving=batch.moving & own)
    with bar_of("restarts", stop.progress) as bar:
        while bool(batch.moving.any()) and len(path) <= stop.num_steps:
            batch = step(problem, batch, stop)
            path.append(batch.points.objective)
            bar.set_postfix_str(f"{int(batch.moving.sum())} of {len(states)} on their way", refresh=False)
            bar.update()
    paths = torch.stack(path, -1).tolist()
    rows = enumerate(zip(fits, own.tolist(), strict=True))
    return tuple(_alone(fit, batch.points, row, paths[row]) if same else fit for row, (fit, same) in rows)


def _alone(fit: Fit[TypeII], points: LaplaceRows, row: int, path: Sequence[float]) -> Fit[TypeII]:
    """One row as a fit of its own.

    :param path: its objectives, of which those count that are before the last change.
    """
    try:
        state = type2.type2_state(single(fit.state.laplace.problem, points, row))
    except ArithmeticError:
        return fit
    last = max((i for i in range(1, len(path)) if path[i] != path[i - 1]), default=0)
    return Fit(state, fit.status, (*fit.objectives[:-1], *path[:last], state.objective))
