"""Moves of the rows of a batch: halved steps uphill, and pruning.  Each row decides for itself."""

import torch
from torch import Tensor

from pyro_evidence.infer.type2 import metric_of, to_insignificance
from pyro_evidence.laplace import Problem, Slope
from pyro_evidence.laplace_rows import Points, measured
from pyro_evidence.ops import evidence
from pyro_evidence.ops.precision import Dense

HALVINGS = 12  # of a step, before a row is left to the single loop


def natural(at: Problem, points: Points, found: Slope) -> Tensor:
    """MacKay's metric of each row, ``(R, T, T)``: see :func:`~pyro_evidence.infer.type2.natural_metric`."""
    groups = at.structure.groups
    return metric_of(groups, None if groups is None else groups.size(points.active), found).diag_embed()


def line_search(at: Problem, old: Points, direction: Tensor, slope: Tensor) -> tuple[Points, Tensor]:
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


def pruned(at: Problem, points: Points) -> Points:
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
    off = measured(at, theta, old.active & ~member, start)
    gains = torch.nonzero((off.objective >= old.objective) & torch.isfinite(off.objective)).squeeze(-1)
    if not len(gains):
        return points
    before = measured(at, theta[gains], old.active[gains], start[gains])
    gains = gains[off.objective[gains] >= before.objective]
    return points.with_rows(rows[gains], off.at(gains))
