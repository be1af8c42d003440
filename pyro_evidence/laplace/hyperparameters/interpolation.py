"""Where a network meets its data so nearly that its noise goes to nothing, and the mode can no longer be followed."""

from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState, Problem
from pyro_evidence.laplace.hyperparameters.gradient import Slope
from pyro_evidence.laplace.hyperparameters.metric import log_units

EXACT = 14.0  # log units of a noise precision from the start: a standard deviation of a thousandth


def met_nearly_exactly(laplace: LaplaceState, slope: Slope) -> bool:
    """Whether a network's noise precision is more than a million times what it began with, and the evidence rises on.

    With more weights than distinct rows there is no maximum: each factor e in the precision adds half a nat for every
    datum that the weights leave over.  The curvature's range grows as fast, until no search finds the mode.
    """
    if laplace.problem.structure.known is None:
        return False
    return bool((far_noise(laplace.problem, laplace.theta) & (slope.total > 0)).any())


def far_noise(problem: Problem, theta: Tensor) -> Tensor:
    """Which hyperparameters ``(..., T)`` of a network are noise precisions a million times what they began with."""
    return noise_precisions(problem) & (theta - problem.joint.initial_theta > EXACT)


def noise_precisions(problem: Problem) -> Tensor:
    """Which hyperparameters of a network are no prior precision of weights, ``(T,)`` bool."""
    groups, scale = problem.structure.groups, log_units(problem)
    return scale if groups is None else scale & ~groups.is_weight
