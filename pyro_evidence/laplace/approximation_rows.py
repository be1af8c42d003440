"""Laplace's approximation of many rows at once, each at hyperparameters and with pruned weights of its own."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import DENSE_SEARCH, LaplaceState, Problem, laplace_state
from pyro_evidence.laplace.gradient import Slope
from pyro_evidence.numerics import evidence, newton, trust_region
from pyro_evidence.numerics.batched import Batched
from pyro_evidence.numerics.derivatives import pullback
from pyro_evidence.precision.choices import exact_hessian, gauss_newton
from pyro_evidence.precision.dense import Dense
from pyro_evidence.structure.factors import SMALL
from pyro_evidence.structure.pruned import Pruned

LIGHT = 2**13  # numbers of linear predictors' designs up to which a batch spares more than single rows' algebra


@dataclass(frozen=True)
class LaplaceRows(Batched):
    """Laplace's approximation at each row's hyperparameters."""

    theta: Tensor  # (R, T)
    active: Tensor  # (R, D) bool
    u: Tensor  # (R, D)
    tril: Tensor  # (R, D, D) Cholesky factor of the posterior precision
    objective: Tensor  # (R,) log evidence, -inf where no mode was found
    left_saddle: Tensor  # (R,) bool: whether the search left a saddle on the way


def can_batch(problem: Problem) -> bool:
    """Whether climbing the rows of this problem together, each at its own hyperparameters, is worth it."""
    return problem.structure.linear is None and can_compare(problem)


def can_compare(problem: Problem) -> bool:
    """Whether the rows of this problem can be evaluated together, each at its own hyperparameters."""
    structure, joint = problem.structure, problem.joint
    parts = () if structure.linear is None else structure.linear.linear
    return (
        joint.has_data  # else the rows are elsewhere
        and joint.latents.size <= (SMALL if structure.network is None else DENSE_SEARCH)
        and structure.factors is None
        and problem.latent is None
        and sum(part.J.numel() for part in parts) <= LIGHT
        and problem.curvature in (exact_hessian, gauss_newton)
        and joint.hypers.size > 0
        and not joint.maximised_sites
    )


def density(problem: Problem) -> Pruned:
    """The density of rows whose mask stands behind their hyperparameters."""
    return Pruned(problem.structure.by_rows, problem.structure.groups)


def laplace_rows(
    problem: Problem, theta: Tensor, active: Tensor, start: Tensor, num_steps: int | None = None
) -> LaplaceRows:
    """The modes from ``start`` and what follows from them.

    :param num_steps: of the search; by default those of the problem's limits.
    """
    rows, log_joint = torch.cat([theta, active.to(theta)], -1), density(problem)
    climb = newton.climb if problem.structure.network is None else trust_region.climb
    limits = problem.limits if num_steps is None else replace(problem.limits, num_steps=num_steps)
    mode = climb(log_joint, partial(exact_hessian, log_joint), start, rows, limits)
    known = problem.curvature is exact_hessian  # where the last step of a search that has arrived took it
    A = mode.precision if known else problem.curvature(log_joint, mode.u, rows)
    return at_modes(theta, active, mode, A, mode.converged)


def at_modes(theta: Tensor, active: Tensor, mode: newton.Mode, A: Tensor, sound: Tensor) -> LaplaceRows:
    """The rows with the log evidence of modes where the precision is ``A`` ``(R, D, D)``.

    :param sound: which are modes, as far as the search knows, ``(R,)`` bool.
    """
    tril, info = torch.linalg.cholesky_ex(A.detach().double())
    sound = sound & (info == 0) & torch.isfinite(mode.log_joint)
    tril = torch.where(sound[:, None, None], tril, torch.eye(A.shape[-1]).to(tril))
    log_evidence = evidence.log_evidence(mode.log_joint, Dense(tril).log_det, active.sum(-1))
    return LaplaceRows(theta, active, mode.u, tril, torch.where(sound, log_evidence, -torch.inf), mode.left_saddle)


def single(problem: Problem, points: LaplaceRows, row: int) -> LaplaceState:
    """The state of one row, its mode found by itself.

    :raises ArithmeticError: where there is none.
    """
    own = replace(problem, active=points.active[row])
    return replace(laplace_state(own, points.theta[row], points.u[row]), left_saddle=bool(points.left_saddle[row]))


def slopes(problem: Problem, points: LaplaceRows) -> Slope:
    """Exact derivatives of each row's log evidence in its hyperparameters.

    See :func:`pyro_evidence.laplace.gradient.slope`.
    """
    theta, u = points.theta.clone().requires_grad_(), points.u.clone().requires_grad_()
    rows, by_rows = torch.cat([theta, points.active.to(theta)], -1), density(problem)
    half_log_det = 0.5 * (torch.cholesky_inverse(points.tril) * problem.curvature(by_rows, u, rows)).sum()
    by_u, by_theta = pullback(half_log_det, u), pullback(half_log_det, theta)
    log_joint = by_rows.log_joint(u, rows).sum()
    direct = pullback(log_joint, theta)
    tril = points.tril
    if problem.curvature is not exact_hessian:  # by which modes move all the same; nan where there is none
        tril, info = torch.linalg.cholesky_ex(by_rows.precision(points.u, rows.detach()).double())
        tril = torch.where((info == 0)[:, None, None], tril, torch.nan)
    moved = torch.cholesky_solve(by_u.unsqueeze(-1), tril).squeeze(-1)
    mixed = pullback(pullback(log_joint, u, create_graph=True), theta, moved)
    return Slope((direct - by_theta - mixed).double(), direct.double())


def slopes_at_fixed_mode(problem: Problem, points: LaplaceRows) -> Slope:
    """Slopes without the modes' and the curvatures' dependence on the hyperparameters, as MacKay has them."""
    theta = points.theta.clone().requires_grad_()
    rows, by_rows = torch.cat([theta, points.active.to(theta)], -1), density(problem)
    half_log_det = 0.5 * (torch.cholesky_inverse(points.tril) * problem.curvature(by_rows, points.u, rows)).sum()
    direct = pullback(by_rows.log_joint(points.u, rows).sum(), theta)
    return Slope((direct - pullback(half_log_det, theta)).double(), direct.double())
