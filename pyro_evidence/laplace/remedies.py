"""Checks of the search for hyperparameters beside the plain step: a mode, a noise or a parameter that is being lost.

Where one is for a few models only, its docstring names the benchmark that pays for it.
"""

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState, Problem, laplace_state
from pyro_evidence.laplace.gradient import Slope
from pyro_evidence.laplace.metric import information, log_units
from pyro_evidence.numerics.newton import Density
from pyro_evidence.precision.choices import exact_hessian, gauss_newton

NOTHING = 1e-12  # nats by a move as large as the hyperparameter, and of the information at the start


def not_identified(state: LaplaceState) -> Tensor:
    """Which hyperparameters, not in log units, move nothing any more, though they did at the start, ``(T,)`` bool.

    A scale may be felt no longer because it is best at the end of its range; a real number has no such end.  For means
    and trends of Gaussian processes: benchmarks/gp_speed.py.
    """
    found = torch.zeros_like(state.theta, dtype=torch.bool)
    real = (~log_units(state.problem)).nonzero().flatten()
    if not len(real):
        return found
    joint, theta = state.problem.joint, state.theta
    size = torch.maximum(theta.abs(), (theta - joint.initial_theta).abs())[real]
    here = information(state, real).diagonal().abs()
    faint = here * size.square() < NOTHING
    if bool(faint.any()):
        try:
            begin = laplace_state(state.problem, joint.initial_theta, state.u, cold=True)
        except ArithmeticError:
            return found
        faint &= here < NOTHING * information(begin, real).diagonal().abs()
    found[real] = faint
    return found


EXACT = 14.0  # log units of a noise precision from the start: a standard deviation of a thousandth


def interpolates_data(laplace: LaplaceState, slope: Slope) -> bool:
    """Whether a network's noise precision is more than a million times what it began with, and the evidence rises on.

    With more weights than distinct rows there is no maximum: each factor e in the precision adds half a nat for every
    datum that the weights leave over.  The curvature's range grows as fast, until no search finds the mode.  For
    networks with as many weights as data: benchmarks/mlp_speed.py, mlp_quality.py.
    """
    if laplace.problem.structure.network is None:
        return False
    return bool((vanishing_noise(laplace.problem, laplace.theta) & (slope.total > 0)).any())


def vanishing_noise(problem: Problem, theta: Tensor) -> Tensor:
    """Which hyperparameters ``(..., T)`` of a network are noise precisions a million times what they began with."""
    return noise_precisions(problem) & (theta - problem.joint.initial_theta > EXACT)


def noise_precisions(problem: Problem) -> Tensor:
    """Which hyperparameters of a network are no prior precision of weights, ``(T,)`` bool."""
    groups, scale = problem.structure.groups, log_units(problem)
    return scale if groups is None else scale & ~groups.is_weight


INFLATED = 1e3  # posterior variance in units of the prior's, beyond which the curvature is becoming singular
INFLATED_NETWORK = 30.0  # the same for a network, where that is how modes merge
SOFT = 1e-2  # share of Gauss-Newton's curvature that the exact one has left, below which a mode is about to vanish


def is_singular(laplace: LaplaceState) -> bool:
    """Whether the posterior variance of some latent exceeds its prior variance by far: a mode about to merge or split.

    There the exact Hessian becomes singular and Laplace's log evidence goes to infinity for no good reason.
    """
    groups = laplace.problem.structure.groups
    if groups is None:
        return False
    alone = (groups.member >= 0) & torch.isfinite(groups.loc)  # elsewhere other latents add to the prior variance
    alone = alone & laplace.problem.active
    if not bool(alone.any()):
        return False
    inflation = (laplace.precision.variance[0] * groups.log_precision(laplace.theta).exp())[alone]
    return bool((inflation > largest_inflation(laplace.problem)).any())


def largest_inflation(problem: Problem) -> float:
    """The largest ratio of a latent's posterior variance to its prior variance."""
    return INFLATED if problem.structure.network is None else INFLATED_NETWORK


def near_fold(laplace: LaplaceState) -> bool:
    """Whether a network's mode is about to vanish: see :func:`near_folds`."""
    return bool(near_folds(laplace.problem, laplace.problem.density, laplace.u.unsqueeze(0), laplace.theta))


def near_folds(problem: Problem, density: Density, u: Tensor, theta: Tensor) -> Tensor:
    """Which modes ``(R, D)`` of a network with Gauss-Newton's curvature are about to vanish, ``(R,)`` bool.

    The exact curvature has less than a hundredth of Gauss-Newton's left in some direction.  A little further in the
    hyperparameters there is no mode, or a ring of them, while the log evidence by Gauss-Newton's feels nothing of it.
    For networks of more hidden units than the data ask for: benchmarks/mlp_speed.py, mlp_quality.py.
    """
    if problem.structure.network is None or problem.curvature is not gauss_newton:
        return torch.zeros(len(u), dtype=torch.bool, device=u.device)
    left = exact_hessian(density, u, theta) - SOFT * gauss_newton(density, u, theta)
    return torch.linalg.cholesky_ex(left.detach().double()).info != 0
