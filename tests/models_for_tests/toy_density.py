"""Densities on paper, for the tests of the searches for a mode."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.numerics import derivatives


@dataclass(frozen=True)
class Toy:
    """Any function of rows ``(R, D)``, ``(R, T)``, with derivatives by autograd."""

    f: Callable[[Tensor, Tensor], Tensor]

    @property
    def blocks(self) -> tuple[slice, ...]:
        return ()

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        return self.f(u, theta)

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return derivatives.gradient(self.f, u, theta)

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        return -derivatives.hessian(self.f, u, theta)

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        return -derivatives.hessian_diagonal(self.f, u, theta)

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        raise NotImplementedError


A = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.3], [0.0, 0.3, 4.0]], dtype=torch.float64)
MEAN = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def gaussian(u: Tensor, theta: Tensor) -> Tensor:
    """Mode at MEAN, precision A."""
    d = u - MEAN
    return -0.5 * (d * (d @ A)).sum(-1) + 0.0 * theta.sum(-1)


def logistic(u: Tensor, theta: Tensor) -> Tensor:
    """Log-concave, far from quadratic: saturates linearly."""
    return -torch.nn.functional.softplus(5.0 * u - 3.0).sum(-1) + 2.0 * u.sum(-1) - 0.01 * u.square().sum(-1)


def banana(u: Tensor, theta: Tensor) -> Tensor:
    """Rosenbrock's function upside down: mode at (1, 1)."""
    return -(1.0 - u[..., 0]).square() - 100.0 * (u[..., 1] - u[..., 0].square()).square()


def wells(u: Tensor, theta: Tensor) -> Tensor:
    """Modes at u_i = -1 and 1, a saddle or minimum wherever some u_i = 0."""
    return (0.5 * u.square() - 0.25 * u.pow(4)).sum(-1)


def cliff(u: Tensor, theta: Tensor) -> Tensor:
    """Minus infinity below zero; mode at 1."""
    inside = u > 0
    safe = torch.where(inside, u, 1.0)
    return torch.where(inside, safe.log() - safe, -torch.inf).sum(-1)
