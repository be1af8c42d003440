"""Checks of the search for a network's hyperparameters beside the plain step: a mode or a noise that is being lost.

The docstring of each names the benchmark that pays for it.
"""

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState, Problem
from pyro_evidence.laplace.gradient import Slope
from pyro_evidence.precision.choices import exact_hessian, gauss_newton

A_MILLION = 14.0  # log units from the start: of a noise precision, a thousandth of the standard deviation


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
    groups, far = problem.structure.groups, problem.log_units & (theta - problem.joint.initial_theta > A_MILLION)
    return far if groups is None else far & ~groups.is_weight  # which are prior precisions


SOFT = 1e-2  # share of Gauss-Newton's curvature that the exact one has left, below which a mode is about to vanish


def near_fold(laplace: LaplaceState) -> bool:
    """Whether the mode of a network with Gauss-Newton's curvature is about to vanish.

    The exact curvature has less than a hundredth of Gauss-Newton's left in some direction.  A little further in the
    hyperparameters there is no mode, or a ring of them, while the log evidence by Gauss-Newton's feels nothing of it.
    For networks of more hidden units than the data ask for: benchmarks/mlp_speed.py, mlp_quality.py.
    """
    problem, place = laplace.problem, (laplace.u.unsqueeze(0), laplace.theta)
    if problem.structure.network is None or problem.curvature is not gauss_newton:
        return False
    left = exact_hessian(problem.density, *place) - SOFT * gauss_newton(problem.density, *place)
    return bool(torch.linalg.cholesky_ex(left.detach().double()).info)
