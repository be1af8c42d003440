"""Choices of curvature for Laplace's approximation: functions that an engine is handed.

Each maps a density, points ``(R, D)`` and hyperparameters ``(R, T)`` to a posterior precision, dense ``(R, D, D)`` or
diagonal ``(R, D)``, differentiable in both.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Density(Protocol):
    """One model's log joint density and its second derivatives, rows in front."""

    @property
    def blocks(self) -> tuple[slice, ...]:
        """The flat coordinates of each latent site."""

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(D, w | hyperparameters)``, nats, shape ``(R,)``."""

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``, detached."""

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian in ``u``, shape ``(R, D, D)``."""

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        """Its diagonal, shape ``(R, D)``."""

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        """The same without the second derivatives of the predictor, shape ``(R, D, D)``."""


Curvature = Callable[[Density, Tensor, Tensor], Tensor]


def exact_hessian(density: Density, u: Tensor, theta: Tensor) -> Tensor:
    """Minus the exact Hessian of the log joint density: the default, and the only one for an exact Laplace evidence."""
    return density.precision(u, theta)


def gauss_newton(density: Density, u: Tensor, theta: Tensor) -> Tensor:
    """Prior precision plus ``J' diag(-l'') J``; positive where prior, and likelihood in its predictor, are log-concave.

    Equal to the exact Hessian for linear predictors; for networks it leaves out the network's own curvature.
    """
    return density.gauss_newton(u, theta)


def block_diagonal(density: Density, u: Tensor, theta: Tensor) -> Tensor:
    """The exact Hessian with the coupling between different latent sites dropped."""
    A = density.precision(u, theta)
    keep = torch.zeros_like(A)
    for block in density.blocks:
        keep[..., block, block] = 1.0
    return A * keep


def diagonal(density: Density, u: Tensor, theta: Tensor) -> Tensor:
    """The diagonal of the exact Hessian, one number per coordinate, shape ``(R, D)``."""
    return density.precision_diagonal(u, theta)


def damped(curvature: Curvature, amount: float) -> Curvature:
    """``curvature`` plus ``amount`` on the diagonal: a choice the reader sees, part of the reported evidence."""

    def curvature_plus(density: Density, u: Tensor, theta: Tensor) -> Tensor:
        A = curvature(density, u, theta)
        return A + amount * (torch.eye(A.shape[-1], dtype=A.dtype, device=A.device) if A.dim() == 3 else 1.0)

    curvature_plus.__name__ = f"damped({getattr(curvature, '__name__', curvature)}, {amount:g})"
    return curvature_plus
