"""Where a mode is about to merge with another, to split or to vanish, and the hyperparameters cannot go on."""

import torch
from torch import Tensor

from pyro_evidence.curvature.choices import exact_hessian, gauss_newton
from pyro_evidence.laplace.approximation import LaplaceState, Problem
from pyro_evidence.numerics.newton import Density

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
    """How many times its prior variance a latent's posterior variance may be."""
    return INFLATED if problem.structure.known is None else INFLATED_NETWORK


def vanishes(laplace: LaplaceState) -> bool:
    """Whether a network's mode is about to vanish: see :func:`vanishing`."""
    return bool(vanishing(laplace.problem, laplace.problem.density, laplace.u.unsqueeze(0), laplace.theta))


def vanishing(problem: Problem, density: Density, u: Tensor, theta: Tensor) -> Tensor:
    """Which modes ``(R, D)`` of a network with Gauss-Newton's curvature are about to vanish, ``(R,)`` bool.

    The exact curvature has less than a hundredth of Gauss-Newton's left in some direction.  A little further in the
    hyperparameters there is no mode, or a ring of them, while the log evidence by Gauss-Newton's feels nothing of it.
    """
    if problem.structure.known is None or problem.curvature is not gauss_newton:
        return torch.zeros(len(u), dtype=torch.bool, device=u.device)
    left = exact_hessian(density, u, theta) - SOFT * gauss_newton(density, u, theta)
    return torch.linalg.cholesky_ex(left.detach().double()).info != 0
