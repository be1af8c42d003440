"""Second derivatives of the log evidence in its hyperparameters, by differences of its exact slope."""

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState, laplace_state
from pyro_evidence.laplace.hyperparameters.gradient import Slope, slope

FORWARD = 0.2  # power of the rounding that a one-sided difference steps, in a hyperparameter's own measure
CENTRAL = 1.0 / 6.0  # the same for two-sided ones


def curvature(laplace: LaplaceState, found: Slope, measure: Tensor) -> Tensor:
    """Minus the Hessian of the objective by one-sided differences, shape ``(T, T)``: good to three digits.

    :param found: the slope there.
    :param measure: the unit of each hyperparameter, its standard deviation or so; those of 0 are left out.
    :raises ArithmeticError: where the mode is lost on the way.
    """
    step = measure * laplace.problem.eps**FORWARD
    rows = [(found.total - _slope(laplace, t, float(step[t]))) / step[t] for t in measure.nonzero().flatten().tolist()]
    return _symmetric(rows, measure)


def exact_curvature(laplace: LaplaceState, measure: Tensor) -> Tensor:
    """The same by two-sided differences: good to about six digits."""
    step = measure * laplace.problem.eps**CENTRAL
    rows = []
    for t in measure.nonzero().flatten().tolist():
        ahead, behind = (_slope(laplace, t, sign * float(step[t])) for sign in (1.0, -1.0))
        rows.append(0.5 * (behind - ahead) / step[t])
    return _symmetric(rows, measure)


def _slope(laplace: LaplaceState, index: int, move: float) -> Tensor:
    """The slope with one hyperparameter moved, the mode re-found, ``(T,)``."""
    theta = laplace.theta.clone()
    theta[index] += move
    return slope(laplace_state(laplace.problem, theta, laplace.u)).total


def _symmetric(rows: list[Tensor], measure: Tensor) -> Tensor:
    """The matrix of these rows, zero where there is no measure."""
    total = torch.zeros(len(measure), len(measure)).to(measure)
    on = measure.nonzero().flatten()
    if len(on):
        total[on] = torch.stack(rows).to(measure)
    total = total * (measure != 0)
    return 0.5 * (total + total.mT)
