"""A density without the coordinates whose prior precision has run to infinity: a mask, never a big number."""

import math
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
    """

    density: Density
    groups: PrecisionGroups
    active: Tensor  # (D,) or (R, D) bool

    @property
    def blocks(self) -> tuple[slice, ...]:
        """The flat coordinates of each latent site."""
        return self.density.blocks

    def _held(self, u: Tensor) -> Tensor:
        return torch.where(self.active, u, torch.where(self.active, 0.0, self.groups.loc))

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(D, active w | hyperparameters)``, nats, shape ``(R,)``."""
        return self.density.log_joint(self._held(u), theta) - self.left_out(theta)

    def left_out(self, theta: Tensor) -> Tensor:
        """The log prior density of the inactive coordinates at their mean, nats."""
        at_mean = 0.5 * (self.groups.log_precision(theta) - math.log(math.tau))
        return torch.where(self.active, 0.0, at_mean).sum(-1)

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``, zero on pruned coordinates."""
        value, slope = self.density.gradient(self._held(u.detach()), theta)
        return value - self.left_out(theta).detach(), torch.where(self.active, slope, 0.0)

    def _masked(self, A: Tensor) -> Tensor:
        keep = self.active.to(A.dtype)
        if A.dim() == 2:
            return A * keep + (1.0 - keep)
        return A * keep.unsqueeze(-2) * keep.unsqueeze(-1) + (1.0 - keep).diag_embed()

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian in the active coordinates, shape ``(R, D, D)``."""
        return self._masked(self.density.precision(self._held(u), theta))

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        return self._masked(self.density.precision_diagonal(self._held(u), theta))

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        """Gauss-Newton in the active coordinates, shape ``(R, D, D)``."""
        return self._masked(self.density.gauss_newton(self._held(u), theta))


@dataclass(frozen=True)
class PrunedRows:
    """A pruned density for rows that have hyperparameters of their own, and pruned coordinates of their own.

    What is handed over as ``theta``, ``(R, T + D)``, is each row's hyperparameters, then its mask of what is active.
    """

    density: Density
    groups: PrecisionGroups | None
    num_hypers: int

    @property
    def blocks(self) -> tuple[slice, ...]:
        """The flat coordinates of each latent site."""
        return self.density.blocks

    def _split(self, rows: Tensor) -> tuple[Density, Tensor]:
        theta, active = rows[:, : self.num_hypers], rows[:, self.num_hypers :].detach() != 0
        if self.groups is None or bool(active.all()):
            return self.density, theta
        return Pruned(self.density, self.groups, active), theta

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(D, active w | hyperparameters)``, nats, shape ``(R,)``."""
        density, own = self._split(theta)
        return density.log_joint(u, own)

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``, zero on pruned coordinates."""
        density, own = self._split(theta)
        return density.gradient(u, own)

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian in the active coordinates, shape ``(R, D, D)``."""
        density, own = self._split(theta)
        return density.precision(u, own)

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        density, own = self._split(theta)
        return density.precision_diagonal(u, own)

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        """Gauss-Newton in the active coordinates, shape ``(R, D, D)``."""
        density, own = self._split(theta)
        return density.gauss_newton(u, own)
