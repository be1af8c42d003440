"""The marginal density of one coordinate by Laplace's approximation of all others given it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.numerics.newton import Density

NUMBERS = 2**22  # of all Hessians in one batch


@dataclass(frozen=True)
class Profiles:
    """Modes with their covariances, one for each row of hyperparameters.

    :ivar theta: what the density takes beside ``u``, ``(K, T)``.
    """

    density: Density
    theta: Tensor
    u: Tensor  # (K, D)
    colour: Tensor  # (K, D, D) white noise to noise of the covariance

    @property
    def covariance(self) -> Tensor:
        """``(K, D, D)``."""
        return self.colour @ self.colour.mT

    def row(self, index: int) -> "Profile":
        """One mode."""
        return Profile(self.density, self.theta[index], self.u[index], self.colour[index])

    def log_marginal(self, points: Tensor) -> Tensor:
        r"""Log marginal density of every coordinate at ``points`` standard deviations off its mode, ``(K, D, J)``.

        .. math:: \log p(u_i) \approx \log p(u_i, \hat u_{-i}(u_i)) - \tfrac12 \log |A_{-i,-i}|

        up to a constant; minus infinity where the others have no mode.  Tierney and Kadane (1986), eq. 4.1.
        """
        num, size = self.u.shape
        covariance = self.covariance
        sd = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        along = (covariance / sd.unsqueeze(-1)).unsqueeze(2)  # how all follow coordinate i, (K, D, 1, D)
        start = self.u[:, None, None] + points.reshape(-1, 1) * along
        index = torch.arange(size, device=self.u.device)[:, None].expand(num, -1, len(points))
        theta = self.theta[:, None, None].expand(-1, size, len(points), -1)
        rows = (start.flatten(0, 2), theta.flatten(0, 2), index.flatten())
        parts = zip(*(part.split(max(1, NUMBERS // size**2)) for part in rows), strict=True)
        return torch.cat([self._given(*part) for part in parts]).reshape(num, size, len(points))

    def _given(self, u: Tensor, theta: Tensor, index: Tensor) -> Tensor:
        """One Newton step in the other coordinates, and what a second one promises."""
        first = _bowl(self.density, u, theta, index)
        moved = u + first.step
        better = (self.density.log_joint(moved, theta) > first.log_joint).unsqueeze(-1)
        second = _bowl(self.density, torch.where(better, moved, u), theta, index)
        value = second.log_joint + 0.5 * second.decrement - 0.5 * second.log_det
        return torch.where(torch.isfinite(value), value, -torch.inf).detach()


@dataclass(frozen=True)
class Profile:
    """One mode: a row of :class:`Profiles`."""

    density: Density
    theta: Tensor  # (T,)
    u: Tensor  # (D,)
    colour: Tensor  # (D, D)

    def log_joint(self, u: Tensor) -> Tensor:
        """At rows ``(S, D)``, nats, ``(S,)``."""
        return self.density.log_joint(u, self.theta.expand(len(u), -1)).detach()

    def precision(self, u: Tensor) -> Tensor:
        """Minus the Hessians at rows ``(S, D)``, ``(S, D, D)``."""
        return self.density.precision(u, self.theta.expand(len(u), -1)).detach().double()


@dataclass(frozen=True)
class Bowl:
    """Second order around a point in all coordinates but one, which is held; nan where there is no maximum."""

    log_joint: Tensor  # (R,)
    step: Tensor  # (R, D) Newton's, zero in the coordinate that is held
    decrement: Tensor  # (R,) twice what it promises, nats
    log_det: Tensor  # (R,) of the precision of the others


def _bowl(density: Density, u: Tensor, theta: Tensor, index: Tensor) -> Bowl:
    """By one factor of the whole precision: what a constraint costs is a correction of rank one."""
    log_joint, gradient = density.gradient(u, theta)
    tril, info = torch.linalg.cholesky_ex(density.precision(u, theta).detach().double())
    held = torch.nn.functional.one_hot(index, u.shape[-1]).to(u)
    solved = torch.cholesky_solve(torch.stack([gradient.double(), held], -1), tril)
    variance = (solved[..., 1] * held).sum(-1, keepdim=True)
    pull = (solved[..., 0] * held).sum(-1, keepdim=True) / variance
    step = solved[..., 0] - pull * solved[..., 1]
    log_det = 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1) + variance.squeeze(-1).log()
    sound = torch.where(info == 0, 0.0, torch.nan)
    return Bowl(log_joint, step.nan_to_num(0.0), (gradient * step).sum(-1), log_det + sound)


def is_normal(profiles: Profiles) -> bool:
    """Whether the curvature two standard deviations off, on either side, is that at the mode."""
    one = profiles.row(0)
    away = 2.0 * one.colour.sum(-1) / len(one.u) ** 0.5
    gap = one.colour.mT @ one.precision(torch.stack([one.u + away, one.u - away])) @ one.colour
    return bool((gap - torch.eye(len(one.u)).to(gap)).abs().max() < 1e-5)
