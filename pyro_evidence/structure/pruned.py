"""A density without the coordinates whose prior precision has run to infinity: a mask, never a big number."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.numerics.newton import Density
from pyro_evidence.structure.recognise import PrecisionGroups


@dataclass(frozen=True)
class Pruned:
    """The limit of a density as the precisions of the inactive coordinates go to infinity.

    Those coordinates stay at their prior mean, their prior density is left out, and the precision is the identity on
    them, so that they add nothing to a log determinant.

    :ivar groups: whose coordinates can be inactive; None where all are active.
    :ivar active: ``(D,)`` bool.  None: rows have hyperparameters and masks of their own, handed over as ``theta``,
        ``(R, T + D)``.
    """

    density: Density
    groups: PrecisionGroups | None
    active: Tensor | None = None

    @property
    def blocks(self) -> tuple[slice, ...]:
        """The flat coordinates of each latent site."""
        return self.density.blocks

    def read(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Which coordinates are active, and the hyperparameters."""
        if self.active is not None:
            return self.active, theta
        size = self.blocks[-1].stop
        return theta[:, -size:].detach() != 0, theta[:, :-size]

    def held(self, u: Tensor, theta: Tensor) -> Tensor:
        """The rows ``(R, D)`` with inactive coordinates at their prior mean."""
        active, _ = self.read(theta)
        if self.groups is None or bool(active.all()):
            return u
        return torch.where(active, u, torch.where(active, 0.0, self.groups.loc))

    def left_out(self, theta: Tensor) -> Tensor:
        """The log prior density of the inactive coordinates at their mean, nats."""
        active, own = self.read(theta)
        if self.groups is None or bool(active.all()):
            return own.new_zeros(())
        at_mean = 0.5 * (self.groups.log_precision(own) - math.log(math.tau))
        return torch.where(active, 0.0, at_mean).sum(-1)

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(D, active w | hyperparameters)``, nats, shape ``(R,)``."""
        return self.density.log_joint(self.held(u, theta), self.read(theta)[1]) - self.left_out(theta)

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``, zero on pruned coordinates."""
        active, own = self.read(theta)
        value, slope = self.density.gradient(self.held(u.detach(), theta), own)
        return value - self.left_out(theta).detach(), torch.where(active, slope, 0.0)

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian in the active coordinates, shape ``(R, D, D)``."""
        return self._masked(self.density.precision, u, theta)

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        """Diagonal of that, shape ``(R, D)``."""
        return self._masked(self.density.precision_diagonal, u, theta)

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        """Gauss-Newton in the active coordinates, shape ``(R, D, D)``."""
        return self._masked(self.density.gauss_newton, u, theta)

    def _masked(self, curvature: Callable[[Tensor, Tensor], Tensor], u: Tensor, theta: Tensor) -> Tensor:
        active, own = self.read(theta)
        A = curvature(self.held(u, theta), own)
        if bool(active.all()):
            return A
        keep = active.to(A.dtype)
        if A.dim() == 2:
            return A * keep + (1.0 - keep)
        return A * keep.unsqueeze(-2) * keep.unsqueeze(-1) + (1.0 - keep).diag_embed()
