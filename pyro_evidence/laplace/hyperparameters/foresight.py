r"""What the log evidence will be at other prior precisions of one group, from the quadratic around the mode.

With :math:`C` the posterior covariance of the group's weights, :math:`r` their mode's distance from the prior mean, and
:math:`\Delta` the diagonal by which their prior precisions rise, times :math:`\rho` each, the log evidence rises by

.. math:: -\tfrac12 r^\top (I + \Delta C)^{-1} \Delta r - \tfrac12 \log|I + \Delta C| + \tfrac12 \sum \log \rho,

exactly where the likelihood is Gaussian (MacKay, 1992), else as far as it looks Gaussian.
"""

import math

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.structure.density import LinearDensity

ELSEWHERE = (-40.0, -20.0, -12.0, -8.0, -5.0, -2.5, 2.5, 5.0, 8.0, 12.0, 20.0, 40.0)  # log units of a precision
MANY = 32  # weights of a group above which its covariance is not worth the matrix
GONE = 60.0  # log units above its own precision at which a weight is gone, to double precision
LEAST_RISE = -0.2  # nats: foreseen by less, a rise is believed to be none where the likelihood is not Gaussian


def worth_trying(laplace: LaplaceState, index: int, moves: Tensor, least: float) -> Tensor:
    """Which moves ``(K,)`` of a log precision may raise the log evidence by ``least`` nats, ``(K,)`` bool.

    All, for a hyperparameter that is not a precision of a few weights behind linear predictors.
    """
    member, linear = _members(laplace, index), laplace.problem.structure.linear
    if member is None or linear is None:
        return torch.ones_like(moves, dtype=torch.bool)
    return rises(laplace, index, member, moves) > (least if is_gaussian(laplace, linear) else LEAST_RISE)


def _members(laplace: LaplaceState, index: int) -> Tensor | None:
    """Positions of the weights behind a hyperparameter; None where they are not few behind linear predictors."""
    problem = laplace.problem
    groups = problem.structure.groups
    if groups is None or problem.structure.linear is None or problem.joint.hyper_sites:
        return None
    member = ((groups.member == index) & problem.active).nonzero().flatten()
    known = bool(groups.is_weight[index]) and bool(groups.loc[member].isfinite().all())
    return member if known and 0 < len(member) <= MANY else None


def removal(laplace: LaplaceState, index: int, move: Tensor) -> tuple[float, float] | None:
    """By how much the log evidence rises once a log precision has moved, and without its weights; None if unknown."""
    member, linear, groups = (
        _members(laplace, index),
        laplace.problem.structure.linear,
        laplace.problem.structure.groups,
    )
    if member is None or linear is None or groups is None or not is_gaussian(laplace, linear):
        return None
    there, gone = rises(laplace, index, member, torch.stack([move, GONE / groups.power[index]])).tolist()
    return (there, gone) if math.isfinite(there) and math.isfinite(gone) else None


def may_lie_elsewhere(laplace: LaplaceState, index: int, least: float) -> bool:
    """Whether a group of weights may be worth ``least`` nats more at another prior precision, however far."""
    groups = laplace.problem.structure.groups
    assert groups is not None
    moves = torch.tensor(ELSEWHERE, dtype=torch.float64).to(laplace.theta) / groups.power[index]
    return bool(worth_trying(laplace, index, moves, least).any())


def rises(laplace: LaplaceState, index: int, member: Tensor, moves: Tensor) -> Tensor:
    """By how much the log evidence rises, nats, ``(K,)``.

    :param member: the weights of hyperparameter ``index``, positions.
    """
    groups = laplace.problem.structure.groups
    assert groups is not None
    unit = torch.zeros(len(member), len(laplace.u)).to(laplace.u)
    unit[torch.arange(len(member)), member] = 1.0
    C = torch.cat([laplace.precision.solve(row.unsqueeze(0)) for row in unit])[:, member].double()
    prior = groups.log_precision(laplace.theta)[member].exp()
    logs = groups.power[index] * moves
    more, r = prior * torch.expm1(logs).unsqueeze(-1), (laplace.u - groups.loc)[member]
    A = torch.eye(len(member)).to(C) + more.unsqueeze(-1) * C
    sign, log_det = torch.linalg.slogdet(A)
    moved, singular = torch.linalg.solve_ex(A, (more * r).unsqueeze(-1))  # where the data say nothing of the weights
    found = 0.5 * (len(member) * logs - (r * moved.squeeze(-1)).sum(-1) - log_det)
    return torch.where((sign > 0) & (singular == 0), found, torch.inf)


def is_gaussian(laplace: LaplaceState, linear: LinearDensity) -> bool:
    """Whether the likelihood's curvature is the same elsewhere, half a posterior standard deviation away."""
    if all(part.even for part in linear.linear):
        return True
    away = laplace.u + 0.5 * laplace.precision.variance[0].sqrt()
    here, there = (linear.curvatures(u.unsqueeze(0), laplace.theta.detach()) for u in (laplace.u, away))
    rounding = 1e3 * laplace.problem.eps
    return all(bool(((a - b).abs() <= rounding * a.abs()).all()) for a, b in zip(here, there, strict=True))
