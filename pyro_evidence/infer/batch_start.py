"""Where the rows of a batch start: hyperparameters and weights taken most of the way together."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pyro_evidence.infer.batch_moves import natural
from pyro_evidence.infer.restarts import Restarts, distinct
from pyro_evidence.laplace import LaplaceState, Problem, laplace_state
from pyro_evidence.laplace_rows import Points, density, measured, still_slopes
from pyro_evidence.ops import newton, trust
from pyro_evidence.ops.curvature import gauss_newton

ROUNDS = 30  # of MacKay's, at most, before modes are found exactly


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
        points = Points(
            theta, active, near.u, torch.where(sound[:, None, None], tril, torch.nan), near.log_joint, near.escaped
        )
        found = still_slopes(replace(at, curvature=gauss_newton), points)
        move = (natural(at, points, found) @ found.total.unsqueeze(-1)).squeeze(-1).clamp(-1.0, 1.0)
        move = torch.where(torch.isfinite(move) & ((theta + move - at.joint.initial_theta).abs() < 8.0), move, 0.0)
        theta, u = theta + move, torch.where(sound.unsqueeze(-1), near.u, u)
        if not bool((move.abs() > 0.1).any()):
            break
    return theta, u


def search(at: Problem, starts: Tensor, theta: Tensor) -> Restarts:
    """The modes that ``starts`` ``(R, D)`` lead to, each at hyperparameters that it has warmed up to from ``theta``.

    :raises NotAMode: when every restart failed.
    """
    own, u = warmed(at, theta.expand(len(starts), -1).clone(), starts)
    points = measured(at, own, torch.ones_like(u, dtype=torch.bool), u, num_steps=500)
    return distinct([partial(_alone, at, points, row) for row in range(len(u))])


def _alone(at: Problem, points: Points, row: int) -> LaplaceState:
    return replace(laplace_state(at, points.theta[row], points.u[row]), escaped=bool(points.escaped[row]))
