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
    noise = noise_precisions(laplace.problem)
    return bool((noise & (slope.total > 0) & is_far(laplace.problem, laplace.theta)).any())


def is_far(problem: Problem, theta: Tensor) -> Tensor:
    """Which hyperparameters ``(..., T)`` in log units are a factor of a million above where they began."""
    return log_units(problem) & (theta - problem.joint.initial_theta > EXACT)


def noise_precisions(problem: Problem) -> Tensor:
    """Which hyperparameters of a network are no prior precision of weights, ``(T,)`` bool."""
    groups = problem.structure.groups
    return log_units(problem) if groups is None else log_units(problem) & ~groups.is_weight
