"""Choices of curvature for Laplace's approximation: functions that an engine is handed.

Each maps a density, points ``(R, D)`` and hyperparameters ``(R, T)`` to a posterior precision, dense ``(R, D, D)`` or
diagonal ``(R, D)``, differentiable in both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.numerics.newton import Density
from pyro_evidence.numerics.newton import exact_hessian as exact_hessian

Curvature = Callable[[Density, Tensor, Tensor], Tensor]


def asked_for(curvature: Curvature, density: Density, u: Tensor, theta: Tensor) -> Tensor:
    """Curvature by a choice that may be the user's own.

    :raises BadInput: where it is no precision.
    """
    A, dense = curvature(density, u, theta), (*u.shape, u.shape[-1])
    if not isinstance(A, Tensor) or tuple(A.shape) not in (dense, tuple(u.shape)):
        given = f"shape {tuple(A.shape)}" if isinstance(A, Tensor) else repr(A)
        raise BadInput(f"curvature gave {given}; expected a precision, dense {dense} or diagonal {tuple(u.shape)}.")
    return A


def gauss_newton(density: Density, u: Tensor, theta: Tensor) -> Tensor:
    """Prior precision plus ``J' diag(-l'') J``; positive where prior, and likelihood in its predictor, are log-concave.

    Equal to the exact Hessian for linear predictors; for networks it leaves out the network's own curvature.
    """
    return density.gauss_newton(u, theta)


def block_diagonal(density: Density, u: Tensor, theta: Tensor) -> Tensor:
    """The exact Hessian with the coupling between different latent sites dropped."""
    A = density.precision(u, theta)
    sizes = (block.stop - block.start for block in density.blocks)
    return A * torch.block_diag(*(A.new_ones(size, size) for size in sizes))


def diagonal(density: Density, u: Tensor, theta: Tensor) -> Tensor:
    """The diagonal of the exact Hessian, one number per coordinate, shape ``(R, D)``."""
    return density.precision_diagonal(u, theta)


@dataclass(frozen=True)
class Damped:
    """A curvature plus ``amount`` on its diagonal; made by :func:`damped`."""

    curvature: Curvature
    amount: float

    @property
    def __name__(self) -> str:
        return f"damped({getattr(self.curvature, '__name__', self.curvature)}, {self.amount:g})"

    def __call__(self, density: Density, u: Tensor, theta: Tensor) -> Tensor:
        """Posterior precision, ``(R, D, D)`` or ``(R, D)`` as the curvature has it."""
        A = self.curvature(density, u, theta)
        return A + self.amount * (torch.eye(A.shape[-1], dtype=A.dtype, device=A.device) if A.dim() > 2 else 1.0)


def damped(curvature: Curvature, amount: float) -> Damped:
    """``curvature`` plus ``amount`` on the diagonal: a choice the reader sees, part of the reported evidence.

    :param amount: a precision in unconstrained space, at least 0.
    :raises BadInput: for another amount.
    """
    if not callable(curvature):
        raise BadInput(f"damped({curvature!r}, ...); expected a curvature, such as damped(exact_hessian, {amount!r}).")
    if not isinstance(amount, int | float) or not 0.0 <= amount < math.inf:
        raise BadInput(f"damped(..., amount={amount!r}); expected a finite precision of at least 0.")
    return Damped(curvature, float(amount))
