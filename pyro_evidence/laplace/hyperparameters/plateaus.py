"""Real-valued hyperparameters that the data have stopped to feel, on a plateau far from where the search began."""

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState, laplace_state
from pyro_evidence.laplace.hyperparameters.metric import information, log_units

NOTHING = 1e-12  # nats by a move as large as the hyperparameter, and of the information at the start


def unfelt(state: LaplaceState) -> Tensor:
    """Which hyperparameters, not in log units, move nothing any more, though they did at the start, ``(T,)`` bool.

    A scale may be felt no longer because it is best at the end of its range; a real number has no such end.
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
        faint &= here < NOTHING * _at_the_start(state, real)
    found[real] = faint
    return found


def _at_the_start(state: LaplaceState, real: Tensor) -> Tensor:
    """The information where the search began, nothing pruned; zero where that cannot be computed."""
    problem, joint = state.problem, state.problem.joint
    try:
        begin = laplace_state(problem, joint.initial_theta, state.u, cold=True)
    except ArithmeticError:
        return torch.zeros(len(real)).to(state.theta)
    return information(begin, real).diagonal().abs()
