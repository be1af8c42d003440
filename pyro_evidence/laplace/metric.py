"""Metrics in which a slope in the hyperparameters becomes a step that is the same in every unit.

What can be infinite (a precision, a scale, a probability) is measured in log units, whatever the data are measured in;
a real number, such as a fixed effect, is measured by what the log joint says about it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState, Problem, reached
from pyro_evidence.laplace.gradient import Slope
from pyro_evidence.numerics.derivatives import passes, pullback
from pyro_evidence.numerics.evidence import reestimated_log_precision
from pyro_evidence.numerics.line_search import Backtracking, any_rise, curves, first_accepted
from pyro_evidence.precision.gaussian_process import LatentPrecision
from pyro_evidence.structure.groups import PrecisionGroups

LEAST_EIGENVALUE = 1e-10  # of a curvature whose diagonal is one, below which a direction counts as undetermined
NEGLIGIBLE = 1e-12  # nats by a move as large as the hyperparameter, and of the information at the start
ROUNDS = 20  # Newton steps towards the end of one round of all log units
LONGEST_ROUND = 1.5  # of one such step, in log units


def natural_metric(laplace: LaplaceState, found: Slope) -> Tensor:
    """The metric in which a gradient step is MacKay's round, and Newton's step for real numbers, shape ``(T, T)``."""
    groups = laplace.problem.structure.groups
    metric = metric_of(groups, None if groups is None else groups.size(laplace.problem.active), found).diag()
    real = (~laplace.problem.log_units).nonzero().flatten()
    if len(real):
        metric[real.unsqueeze(-1), real] = inverted(information(laplace, real), found.total[real])
    return metric


def metric_of(groups: PrecisionGroups | None, size: Tensor | None, found: Slope) -> Tensor:
    """The diagonal metric of slopes ``(..., T)`` in log units and groups of ``size`` ``(..., T)``.

    Hyperparameters that hold no recognised precision get a step of at most one unit.
    """
    gradient = found.total
    plain = 1.0 / gradient.abs().clamp(min=1.0)  # |step| <= 1
    if groups is None or size is None:
        return plain
    grouped = groups.power != 0
    power = torch.where(grouped, groups.power, 1.0)
    quadratic = size - 2.0 * found.joint / power
    move = reestimated_log_precision(gradient / power, quadratic) / power
    good = grouped & torch.isfinite(move) & (move * gradient > 0)
    ascent = torch.where(good, move / torch.where(good, gradient, 1.0), 0.0)
    stiff = grouped & ~good & (gradient != 0)  # the round would leave the positive numbers
    metric = torch.where(good, ascent, torch.where(stiff, 1.0 / gradient.abs(), plain))
    return torch.where(grouped & (size == 0), 0.0, metric)  # what only pruned weights feel stays where it is


def information(laplace: LaplaceState, index: Tensor) -> Tensor:
    r"""Minus the second derivatives of the log joint along its mode, in some hyperparameters, shape ``(P, P)``.

    .. math:: -\partial^2_{\theta\theta} \log p - (\partial_\theta \partial_w \log p)\, A^{-1}\,
        (\partial_w \partial_\theta \log p)

    Exact for the log evidence where ``|A|`` does not depend on them: fixed effects under Gaussian noise, which it
    profiles out.
    """
    process, precision = laplace.problem.latent, laplace.precision
    if process is not None and isinstance(precision, LatentPrecision):
        found = process.information(precision, laplace.theta, index)
        if found is not None:
            return found
    theta, u = laplace.theta.clone().requires_grad_(), laplace.u.unsqueeze(0).requires_grad_()
    log_joint = laplace.problem.density.log_joint(u, theta).sum()
    first = pullback(log_joint, theta, create_graph=True)[index]
    eye = torch.eye(len(index)).to(first)
    held, mixed = passes(first, theta, eye, False)[:, index], passes(first, u, eye, False)[:, 0]
    moved = torch.cat([laplace.precision.solve(row.unsqueeze(0)) for row in mixed.to(laplace.u)])
    return -(held + mixed @ moved.to(mixed).mT).double()


def not_identified(state: LaplaceState) -> Tensor:
    """Which hyperparameters, not in log units, move nothing any more, though they did at the start, ``(T,)`` bool.

    A scale may be felt no longer because it is best at the end of its range; a real number has no such end.  For means
    and trends of Gaussian processes: benchmarks/gp_speed.py.
    """
    found = torch.zeros_like(state.theta, dtype=torch.bool)
    real = (~state.problem.log_units).nonzero().flatten()
    if not len(real):
        return found
    joint, theta = state.problem.joint, state.theta
    size = torch.maximum(theta.abs(), (theta - joint.initial_theta).abs())[real]
    here = information(state, real).diagonal().abs()
    faint = here * size.square() < NEGLIGIBLE
    if bool(faint.any()):
        begin = reached(state.problem, joint.initial_theta, state.u, cold=True)
        if begin is None:
            return found
        faint &= here < NEGLIGIBLE * information(begin, real).diagonal().abs()
    found[real] = faint
    return found


def measures(problem: Problem, metric: Tensor) -> Tensor:
    """The unit of each hyperparameter, its standard deviation by the metric, at most one in log units, ``(T,)``."""
    measure = metric.diagonal().sqrt()
    return torch.where(problem.log_units, measure.clamp(max=1.0), measure)  # beyond a factor e it is not normal


def inverted(curvature: Tensor, gradient: Tensor) -> Tensor:
    """A positive inverse of a symmetric matrix, ``(P, P)``: a gradient step in it is Newton's, or away from a saddle.

    The same in all units: eigenvalues are those of the matrix scaled to a unit diagonal, in absolute value.

    :param curvature: entries that are not finite, second derivatives that overflow, count as not known.  A step in the
        inverse is taken only where the objective, which is finite, rises.
    :param gradient: measures what the matrix says nothing about.
    """
    curvature = torch.where(curvature.isfinite(), curvature, 0.0)
    size = curvature.diagonal().abs()
    size = torch.where(size > 0, size, gradient.square())
    unit = torch.where(size > 0, size, 1.0).rsqrt()
    values, vectors = torch.linalg.eigh(curvature * unit * unit.unsqueeze(-1))
    positive = values.abs().clamp(min=LEAST_EIGENVALUE)  # collinear: a step, not one without end
    return (vectors / positive) @ vectors.mT * unit * unit.unsqueeze(-1)


def response(laplace: LaplaceState, moves: Tensor) -> Tensor:
    """Moves of the mode that follow those of the hyperparameters ``(W, T)``, to first order, shape ``(W, D)``."""
    if not bool(moves.any()):
        return torch.zeros_like(laplace.u).expand(len(moves), -1)
    theta, u = laplace.theta.clone().requires_grad_(), laplace.u.unsqueeze(0).requires_grad_()
    log_joint = laplace.problem.density.log_joint(u, theta).sum()
    along = moves @ pullback(log_joint, theta, create_graph=True)
    return laplace.precision.solve(torch.cat([pullback(each, u) for each in along]).to(laplace.u))


def round_of_all(laplace: LaplaceState, found: Slope, index: Tensor, others: Tensor, farthest: float) -> Tensor:
    """The move ``(P,)`` of hyperparameters in log units to where one round of MacKay's, of all of them, leads.

    That is where the log joint at the fixed mode plus the rest of the objective, ``-log|A| / 2`` above all, taken as
    linear in log units, is highest: for a recognised precision MacKay's re-estimate itself, and the same for scales and
    correlations of any other parametrisation.

    :param others: a move of all ``(T,)`` that comes before, and that the mode follows.
    :param farthest: the longest move of one of them.
    """
    u, rest = laplace.u + response(laplace, others.unsqueeze(0)), (found.total - found.joint)[index]
    density, origin = laplace.problem.density, laplace.theta + others

    def surrogate(move: Tensor) -> Tensor:
        return density.log_joint(u, origin.index_add(0, index, move)).sum() + rest @ move

    move = torch.zeros(len(index)).to(origin).requires_grad_()
    height = surrogate(move)
    for _ in range(ROUNDS):
        new, height = _newton(surrogate, move, height, farthest)
        settled = bool(((new - move).abs() < 0.01).all())
        move = new
        if settled:
            break
    return move.detach()


def _newton(f: Callable[[Tensor], Tensor], x: Tensor, height: Tensor, farthest: float) -> tuple[Tensor, Tensor]:
    """One Newton step uphill from where ``f`` is ``height``, halved until it goes up, and ``f`` there, with graphs.

    ``x`` itself where none does.
    """
    first = pullback(height, x, create_graph=True)
    second = passes(first, x, torch.eye(len(x)).to(x), False)
    step = inverted(-second, first.detach()) @ first.detach()
    step = step.clamp(-LONGEST_ROUND, LONGEST_ROUND)

    def trial(scale: float) -> tuple[float, tuple[Tensor, Tensor]]:
        new = (x.detach() + scale * step).clamp(-farthest, farthest).requires_grad_()
        value = f(new)
        return float(value.detach()), (new, value)

    found = first_accepted(trial, float(height.detach()), search=Backtracking(any_rise, num_trials=6))
    return (x, height) if found is None else found


def rescaled(problem: Problem, metric: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """A natural metric before its first update by a step ``s`` that fell the slope by ``y``, ``(T,)`` both.

    Nocedal and Wright (2006), eq. 6.20, over the hyperparameters that hold no recognised precision, of which the
    natural metric does not know the scale.
    """
    groups = problem.structure.groups
    plain = problem.log_units & (True if groups is None else groups.power == 0)
    s, y = s[plain], y[plain]
    return torch.where(plain.diag(), (s @ y) / (y @ y), metric) if bool(curves(s, y)) else metric


def updated(metric: Tensor, s: Tensor, y: Tensor) -> Tensor | None:
    """BFGS update of a metric after a step ``s`` that fell the slope by ``y``, ``(T,)`` both; None without curvature.

    Nocedal and Wright (2006), eq. 6.17.

    :param metric: approximate inverse of minus the Hessian of the objective, ``(T, T)``.
    """
    if not bool(curves(s, y)):
        return None
    left = torch.eye(len(s)).to(s) - torch.outer(s, y) / (s @ y)
    return left @ metric @ left.mT + torch.outer(s, s) / (s @ y)
