r"""The next term of Laplace's series, by draws: an estimate of its error where no blocks are independent.

.. math:: \log p(D) - \text{Laplace} \approx E[T_4] + \tfrac12 \mathrm{Var}[T_3]

with ``T_3`` and ``T_4`` the third and fourth order terms of the log joint along a draw of the Gaussian.  That is what
Shun and McCullagh (1995), eq. 7, write as contractions of third and fourth derivatives with the covariance.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.threads import without_validation

NUM_DRAWS = 400
STEPS = (0.15, 0.3)  # of a draw, at which differences are taken

Error = TypeVar("Error")


def second_order(state: LaplaceState, made: Callable[[float, str, float, float, str], Error]) -> Error:
    """The estimate, made into what stands for an error.

    :param made: from nats, block, its share, that of shared coordinates, and the method.
    """
    third, fourth = _terms(state)
    signed = float(fourth.mean() + 0.5 * third.square().mean())
    return made(signed, "", 0.0, 0.0, f"the second-order term of Laplace's series, by {NUM_DRAWS} draws")


def _terms(state: LaplaceState) -> tuple[Tensor, Tensor]:
    """Third and fourth order terms along each draw, ``(S,)`` each."""
    generator = torch.Generator().manual_seed(0)
    white = torch.randn(NUM_DRAWS, len(state.u), generator=generator, dtype=torch.float64).to(state.u)
    white = white * state.problem.active
    away = state.precision.colour(white)
    odd, even = zip(*(_differences(state, away, white, h) for h in STEPS), strict=True)
    return _extrapolated(*odd), _extrapolated(*even)


def _differences(state: LaplaceState, away: Tensor, white: Tensor, h: float) -> tuple[Tensor, Tensor]:
    """``T_3`` and ``T_4`` to second order in ``h``."""
    with torch.no_grad(), without_validation():
        ahead, behind = (_log_joint(state, sign * h * away) for sign in (1.0, -1.0))
        here = _log_joint(state, 0.0 * away[:1])
    third = (ahead - behind) / (2.0 * h**3)
    fourth = (ahead + behind - 2.0 * here + (h * white).square().sum(-1)) / (2.0 * h**4)
    return third, fourth


def _log_joint(state: LaplaceState, away: Tensor) -> Tensor:
    rows = max(1, 2**22 // max(1, len(state.u)))
    density, theta = state.problem.density, state.theta
    return torch.cat([density.log_joint(state.u + part, theta) for part in away.split(min(rows, 64))])


def _extrapolated(near: Tensor, far: Tensor) -> Tensor:
    """Richardson's: the second order in the step taken out."""
    ratio = (STEPS[1] / STEPS[0]) ** 2
    return (ratio * near - far) / (ratio - 1.0)
