"""Exact derivatives of Laplace's log evidence in the hyperparameters."""

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pyro_evidence.blocks import marginal as blocks
from pyro_evidence.errors import NotAMode, NotSmooth
from pyro_evidence.fitting.process_state import own_warnings
from pyro_evidence.laplace.approximation import LaplaceState, Problem, laplace_state, log_priors, near_states
from pyro_evidence.numerics.batched import Batched
from pyro_evidence.numerics.derivatives import Orders, generic_directions, pullback, pullbacks
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.precision.dense import factorise, precision_tril
from pyro_evidence.precision.gaussian_process import LatentPrecision
from pyro_evidence.structure.density import AutogradDensity, LinearDensity
from pyro_evidence.structure.groups import Pruned


@dataclass(frozen=True, eq=False)
class Slope(Batched):
    """First derivatives in the unconstrained hyperparameters, nats, shape ``(T,)``; of many rows ``(R, T)``."""

    total: Tensor  # of log evidence + log hyperprior, the mode's dependence included
    joint: Tensor  # of the log joint at the fixed mode


def slope(state: LaplaceState) -> Slope:
    r"""Exact derivatives of the Laplace log evidence.

    .. math:: \frac{d}{d\theta}\Bigl[\log p(D, \hat w) - \tfrac12\log|A|\Bigr] =
        \partial_\theta \log p - \tfrac12 \partial_\theta \log|A|
        - \tfrac12 (\partial_w \log|A|)\, A^{-1} \partial_w \partial_\theta \log p

    The last term is the implicit function theorem at the mode; with a curvature that is not the exact Hessian its
    ``A`` is the exact one all the same.
    """
    theta = state.problem.leaf(state.theta)
    prior = pullback(state.problem.log_hyperprior(theta), theta)
    total, joint = evidence_slope(state)
    return Slope((total + prior).double(), joint.double())


def finite_slope(state: LaplaceState) -> Slope:
    """:func:`slope`, where all of it is finite.

    :raises NotSmooth: where it is not, with the operation whose derivative is nan.
    """
    found = slope(state)
    if bool(found.total.isfinite().all()):
        return found
    operation = _failing_operation(state)
    by = f"torch's third derivative of {operation} is nan" if operation else "a third derivative is not finite"
    raise NotSmooth(
        f"the slope of the log evidence is not finite where the log evidence is: {by}. Expected a model that can be "
        f"differentiated three times. Write it with other operations (a logcumsumexp as eta.exp().cumsum(0).log(), of "
        f"numbers that do not overflow), or hold the hyperparameters: maximise=() needs two derivatives only."
    )


def _failing_operation(state: LaplaceState) -> str | None:
    """The name of the operation of the model whose first, second or third derivative is nan; None where none is."""
    joint, leaves = state.problem.joint, (state.u.clone().requires_grad_(), state.theta.clone().requires_grad_())
    ways = [generic_directions(1, len(leaf), leaf)[0] for leaf in leaves]
    try:
        with own_warnings("ignore"), torch.autograd.detect_anomaly(check_nan=True):
            value = joint.log_joint(*leaves)
            for _ in range(3):
                slopes = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
                value = sum((s @ way for s, way in zip(slopes, ways, strict=True)), value.new_zeros(()))
    except RuntimeError as error:
        named = re.search(r"Function '(\w+?)Backward\d*'", str(error))
        return named.group(1).lower() if named else None
    return None


def evidence_slope(state: LaplaceState) -> tuple[Tensor, Tensor]:
    """Derivatives of the log evidence alone, and of the log joint at the fixed mode."""
    if state.place is not None and state.problem.marginal is not None:
        return blocks.slope(state.problem.marginal, state.place, state.theta)
    if state.problem.latent is not None:
        assert isinstance(state.precision, LatentPrecision)
        return state.problem.latent.slope(state.precision, state.theta)
    if state.problem.factors is not None:
        return state.problem.factors.slope(state.precision, state.u, state.theta)
    problem, precision = state.problem, state.precision
    theta, u = problem.leaf(state.theta), state.u.unsqueeze(0).requires_grad_()
    found = orders_of(problem, u, theta)
    log_joint = found.log_joint.sum()
    half_log_det = 0.5 * (precision.log_det_gradient.detach() * found.precision).sum() - problem.eliminated(u, theta)
    by_u, by_theta = pullbacks(half_log_det, (u, theta))
    direct = pullback(log_joint, theta)
    if not bool(by_u.any()):  # under a Gaussian likelihood the curvature is the same wherever the mode moves
        return direct - by_theta, direct
    if problem.curvature is not exact_hessian:  # by which the mode moves all the same
        A = exact_hessian(problem.density, state.u.unsqueeze(0), state.theta)
        precision = factorise(A, problem.joint.latents.label)
    moved = precision.solve(by_u).detach()
    return pullback(log_joint - (found.gradient * moved).sum(), theta) - by_theta, direct


def orders_of(problem: Problem, u: Tensor, theta: Tensor) -> Orders:
    """The log joint, its gradient and the curvature that was asked for, all to be differentiated."""
    density, curvature, fastest = problem.density, problem.curvature, problem.structure.fastest
    if curvature is exact_hessian and isinstance(fastest, AutogradDensity | LinearDensity):
        assert isinstance(density, AutogradDensity | LinearDensity | Pruned)
        return density.orders(u, theta)
    log_joint = density.log_joint(u, theta)
    return Orders(log_joint, pullback(log_joint.sum(), u, create_graph=True), curvature(density, u, theta))


def slopes(problem: Problem, states: Sequence[LaplaceState]) -> Slope:
    """Exact derivatives of the log evidence of each state of one problem, as :func:`slope` has them, ``(R, T)``.

    :param states: with dense precisions, without maximised sites.
    """
    theta, u, active = (torch.stack(x) for x in zip(*((s.theta, s.u, s.problem.active) for s in states), strict=True))
    tril = torch.stack([precision_tril(s.precision, len(s.u)) for s in states])
    return slopes_of_rows(problem, theta, u, active, tril)


def slopes_of_rows(
    problem: Problem, theta: Tensor, u: Tensor, active: Tensor, tril: Tensor, *, fixed_modes: bool = False
) -> Slope:
    """:func:`slopes` at hyperparameters ``(R, T)`` and modes ``(R, D)`` with the Cholesky factors of the precisions.

    :param active: which coordinates are not pruned, ``(R, D)``.
    :param fixed_modes: whether modes count as fixed when the hyperparameters move, as MacKay has them.
    """
    theta, u, by_rows = theta.detach().requires_grad_(), u.detach().requires_grad_(), problem.density_by_rows
    rows = torch.cat([theta, active.to(theta)], -1)
    half_log_det = 0.5 * (torch.cholesky_inverse(tril) * problem.curvature(by_rows, u, rows)).sum()
    by_theta, *by_u = pullbacks(half_log_det, (theta,) if fixed_modes else (theta, u))
    log_joint = by_rows.log_joint(u, rows).sum()
    direct = pullback(log_joint, theta)
    if fixed_modes:
        return Slope((direct - by_theta).double(), direct.double())
    if problem.curvature is not exact_hessian:  # by which modes move all the same; nan where there is none
        tril, info = torch.linalg.cholesky_ex(by_rows.precision(u.detach(), rows.detach()).double())
        tril = torch.where((info == 0)[:, None, None], tril, torch.nan)
    moved = torch.cholesky_solve(by_u[0].unsqueeze(-1), tril).squeeze(-1)
    mixed = pullback(pullback(log_joint, u, create_graph=True), theta, moved)
    return Slope((direct - by_theta - mixed).double(), direct.double())


FORWARD = 0.2  # power of the rounding that a one-sided difference steps, in a hyperparameter's own measure
CENTRAL = 1.0 / 6.0  # the same for two-sided ones
STEP = 1e-3  # of two-sided ones around integrals over marginalised sites, in unconstrained units


class ModeAt(NamedTuple):
    """A request for Laplace's approximation at ``theta``, its mode searched from ``start`` ``(D,)``."""

    problem: Problem
    theta: Tensor
    start: Tensor


Out = TypeVar("Out")
Asking = Generator[ModeAt | LaplaceState, Any, Out]  # what a state asks for is its slope


def curvature(laplace: LaplaceState, found: Slope, measure: Tensor) -> Asking[Tensor]:
    """Minus the Hessian of the objective by one-sided differences, shape ``(T, T)``: good to three digits.

    :param found: the slope there.
    :param measure: the unit of each hyperparameter, its standard deviation or so; those of 0 are left out.
    :raises NotAMode: where the mode is lost on the way.
    """
    step = measure * torch.finfo(laplace.problem.joint.dtype).eps ** FORWARD
    rows = []
    for t in measure.nonzero().flatten().tolist():
        theta = laplace.theta.clone()
        theta[t] += float(step[t])
        there = yield ModeAt(laplace.problem, theta, laplace.u)
        if there is None:
            raise NotAMode("the mode is lost within a difference; expected one there")
        rows.append((found.total - (yield there[1]).total) / step[t])
    return _symmetric(rows, measure)


def exact_curvature(laplace: LaplaceState, measure: Tensor) -> Tensor:
    """The same by two-sided differences: good to about six digits."""
    return _symmetric([*slope_falls(laplace, measure)] if bool(measure.any()) else [], measure)


def slope_falls(laplace: LaplaceState, measure: Tensor) -> Tensor:
    """The fall of the slope with each hyperparameter that has a measure, by two-sided differences, ``(P, T)``."""
    step = measure * torch.finfo(laplace.problem.joint.dtype).eps ** CENTRAL
    return differences(partial(slopes_and_modes, laplace), step.diag()[measure.nonzero().flatten()])[0]


def slopes_and_modes(laplace: LaplaceState, steps: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The slope ``(T,)`` each of a few steps of the hyperparameters away, and the mode ``(D,)``, found again."""
    problem, ends = laplace.problem, laplace.theta + steps
    near = near_states(problem, ends, laplace.u.expand(len(ends), -1), log_priors(problem, ends)) or [None] * len(ends)
    there = [state or laplace_state(problem, end, laplace.u) for state, end in zip(near, ends, strict=True)]
    return [(slope(state).total, state.u) for state in there]


def differences(moved: Callable[[Tensor], Iterable[tuple[Tensor, Tensor]]], steps: Tensor) -> tuple[Tensor, Tensor]:
    """Central differences of slopes, of which they fall, and of modes: ``(P, ..., T)`` and ``(..., D, P)``.

    :param moved: the slopes ``(..., T)`` and modes ``(..., D)`` each of two steps away.
    :param steps: of one hyperparameter each, ``(P, T)``.
    """
    falls, moves = [], []
    for step in steps:
        (slope_ahead, ahead), (slope_behind, behind) = moved(torch.stack([step, -step]))
        falls.append((slope_behind - slope_ahead) / (2.0 * step.sum()))
        moves.append((ahead - behind) / (2.0 * step.sum()))
    return torch.stack(falls), torch.stack(moves, -1)


def _symmetric(rows: list[Tensor], measure: Tensor) -> Tensor:
    """The matrix of these rows, zero where there is no measure."""
    total = torch.zeros(len(measure), len(measure)).to(measure)
    on = measure.nonzero().flatten()
    if len(on):
        total[on] = torch.stack(rows).to(measure)
    total = total * (measure != 0)
    return 0.5 * (total + total.mT)
