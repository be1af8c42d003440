r"""Kinds of Gaussian kernels, spherical, diagonal or full: one class each with its sites and its arithmetic.

A kind says which *features* of a datum its log density is linear in: always 1 and ``x``, then its own products of
``x``.  With them log densities of all kernels are one matrix product, and sufficient statistics another.
A covariance has the shape of its kind: ``(..., 1)`` spherical, ``(..., D)`` diagonal, ``(..., D, D)`` full.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence.numerics.linalg import place_in_triangle

FLOOR = 1e-6  # of the data's variance: keeps a kernel on repeated data finite, at a thousandth of their sd
SLOWEST = 0.1  # a step takes a variance, or a mixing, to no less than this share of what it was
REST = 1e-5  # relative distance from the floor at which a covariance lies on it: rounding of eigenvalues and of updates
Components = Callable[[Tensor], Any]  # centres (..., M, D) to the distributions of the kernels


class _Variances:
    """Kinds without correlations: one variance for each input, or one for all of them."""

    pooled: Callable[[Tensor], Tensor]  # numbers of each input (..., D) in the shape of the kind

    def features(self, X: Tensor) -> Tensor:
        """The columns 1, ``x`` and ``x^2``, summed over inputs that share a variance, shape ``(..., N, P)``."""
        squares = self.pooled(X.square())
        return torch.cat([torch.ones_like(X[..., :1]), X, squares * (X.shape[-1] // squares.shape[-1])], -1)

    def natural(self, loc: Tensor, covariance: Tensor) -> Tensor:
        """Coefficients of the features in ``log N(x | loc, covariance)``, shape ``(..., P)``."""
        norm = (loc.square() / covariance + (math.tau * covariance).log()).sum(-1, keepdim=True)
        return torch.cat([-0.5 * norm, loc / covariance, -0.5 / covariance], -1)

    def scatter(self, moments: Tensor, loc: Tensor) -> Tensor:
        """``sum_n w_n (x_n - loc)^2``, in the shape of the kind, from ``sum_n w_n F_n``, shape ``(..., P)``."""
        D = loc.shape[-1]
        squares = moments[..., D + 1 :]
        about = moments[..., :1] * loc - 2.0 * moments[..., 1 : D + 1]
        return squares / (D // squares.shape[-1]) + self.pooled(about * loc)

    def slope(self, covariance: Tensor, excess: Tensor, dim: int) -> Tensor:
        """``excess / 2 covariance^2`` as derivative in each variance, which may count for all ``dim`` inputs."""
        return 0.5 * (dim // covariance.shape[-1]) * excess / covariance.square()

    def outer(self, v: Tensor) -> Tensor:
        """``v v'`` in the shape of the kind; ``v`` has shape ``(..., D)``."""
        return self.pooled(v.square())

    def solve(self, covariance: Tensor, v: Tensor) -> Tensor:
        """``covariance^{-1} v``, shape ``(..., D)``."""
        return v / covariance

    def floored(self, covariance: Tensor, unit: Tensor) -> Tensor:
        """The likeliest covariance that is nowhere below ``unit``, the smallest variance of each input ``(..., D)``."""
        return torch.maximum(covariance, self.pooled(unit))

    def guarded(self, new: Tensor, old: Tensor) -> Tensor:
        """``new``, but in no direction below a tenth of ``old``."""
        return torch.maximum(new, SLOWEST * old)

    def rests(self, covariance: Tensor, unit: Tensor) -> Tensor:
        """Whether the covariance lies on the floor in some direction, shape ``(...)``."""
        return (covariance <= self.pooled(unit) * (1.0 + REST)).any(-1)

    def matrix(self, covariance: Tensor, dim: int) -> Tensor:
        """The covariance as a matrix, shape ``(..., D, D)``."""
        return covariance.expand(*covariance.shape[:-1], dim).diag_embed()

    def restricted(self, matrix: Tensor) -> Tensor:
        """The closest covariance of the kind in likelihood to a ``(..., D, D)`` matrix: its diagonal, or its mean."""
        return self.pooled(matrix.diagonal(dim1=-2, dim2=-1))


@dataclass(frozen=True)
class Spherical(_Variances):
    """One variance for all inputs: site ``scale``, ``(M,)``, log-normal about the data's root mean variance.

    :ivar floor: smallest variance that an engine may reach, in units of the data's mean variance over inputs.
    """

    floor: float = FLOOR
    event_dim: ClassVar[int] = 1

    def __call__(self, num_kernels: int, unit: Tensor) -> Components:
        """Declares ``scale``: one for each kernel; ``unit`` is the standard deviation of each input, shape ``(D,)``."""
        middle = unit.square().mean().sqrt().log().expand(num_kernels)
        scale = pyro.sample("scale", dist.LogNormal(middle, torch.ones_like(middle)).to_event(1))
        return lambda loc: dist.Normal(loc, scale.unsqueeze(-1)).to_event(1)

    def sites(self, covariance: Tensor) -> dict[str, Tensor]:
        """Values of the sites for covariances ``(M, 1)``."""
        return {"scale": covariance.squeeze(-1).sqrt()}

    def pooled(self, x: Tensor) -> Tensor:
        """The mean over inputs, shape ``(..., 1)``."""
        return x.mean(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Diagonal(_Variances):
    """One variance for each input: site ``scale``, ``(M, D)``, log-normal about the data's standard deviation.

    :ivar floor: smallest variance that an engine may reach, in units of the variance of that input in the data.
    """

    floor: float = FLOOR
    event_dim: ClassVar[int] = 1

    def __call__(self, num_kernels: int, unit: Tensor) -> Components:
        """Declares ``scale``: one for each kernel and input; ``unit`` is the standard deviation of each, ``(D,)``."""
        scale = _scales(num_kernels, unit)
        return lambda loc: dist.Normal(loc, scale).to_event(1)

    def sites(self, covariance: Tensor) -> dict[str, Tensor]:
        """Values of the sites for covariances ``(M, D)``."""
        return {"scale": covariance.sqrt()}

    def pooled(self, x: Tensor) -> Tensor:
        """One number for each input, shape ``(..., D)``."""
        return x


@dataclass(frozen=True)
class Full:
    """A covariance matrix: sites ``scale``, ``(M, D)``, and ``correlation_tril``, ``(M, D, D)``, LKJ of shape 1.

    :ivar floor: smallest eigenvalue that an engine may reach, inputs measured in their standard deviations.
    """

    floor: float = FLOOR
    event_dim: ClassVar[int] = 2

    def __call__(self, num_kernels: int, unit: Tensor) -> Components:
        """Declares ``scale`` and, for more than one input, ``correlation_tril``; ``unit`` as for :class:`Diagonal`."""
        scale = _scales(num_kernels, unit)
        if len(unit) == 1:
            return lambda loc: dist.Normal(loc, scale).to_event(1)
        shape = dist.LKJCholesky(len(unit), torch.ones_like(unit[0])).expand([num_kernels]).to_event(1)
        tril = scale.unsqueeze(-1) * pyro.sample("correlation_tril", shape)
        return lambda loc: dist.MultivariateNormal(loc, scale_tril=tril)

    def sites(self, covariance: Tensor) -> dict[str, Tensor]:
        """Values of the sites for covariances ``(M, D, D)``."""
        scale = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        tril = torch.linalg.cholesky(covariance) / scale.unsqueeze(-1)
        return {"scale": scale} if scale.shape[-1] == 1 else {"scale": scale, "correlation_tril": tril}

    def features(self, X: Tensor) -> Tensor:
        """1, ``x``, and the products ``x_i x_j`` with ``i <= j``, shape ``(..., N, P)``."""
        row, column = torch.triu_indices(X.shape[-1], X.shape[-1])
        return torch.cat([torch.ones_like(X[..., :1]), X, X[..., row] * X[..., column]], -1)

    def natural(self, loc: Tensor, covariance: Tensor) -> Tensor:
        """Coefficients of the features in ``log N(x | loc, covariance)``, shape ``(..., P)``."""
        tril = torch.linalg.cholesky(covariance)
        precision = torch.cholesky_inverse(tril)
        linear = (precision @ loc.unsqueeze(-1)).squeeze(-1)
        log_det = 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
        norm = (linear * loc).sum(-1, keepdim=True) + log_det + loc.shape[-1] * math.log(math.tau)
        row, column = torch.triu_indices(loc.shape[-1], loc.shape[-1])
        twice = torch.where(row == column, 0.5, 1.0).to(loc)
        return torch.cat([-0.5 * norm, linear, -twice * precision[..., row, column]], -1)

    def scatter(self, moments: Tensor, loc: Tensor) -> Tensor:
        """``sum_n w_n (x_n - loc)(x_n - loc)'``, shape ``(..., D, D)``, from ``sum_n w_n F_n``, shape ``(..., P)``."""
        D = loc.shape[-1]
        mixed = loc.unsqueeze(-1) * moments[..., None, 1 : D + 1]
        about = moments[..., :1, None] * self.outer(loc) - mixed - mixed.mT
        return moments[..., D + 1 :][..., place_in_triangle(D)] + about

    def outer(self, v: Tensor) -> Tensor:
        """``v v'``, shape ``(..., D, D)``."""
        return v.unsqueeze(-1) * v.unsqueeze(-2)

    def solve(self, covariance: Tensor, v: Tensor) -> Tensor:
        """``covariance^{-1} v``, shape ``(..., D)``."""
        tril = torch.linalg.cholesky(covariance)
        batch = torch.broadcast_shapes(tril.shape[:-2], v.shape[:-1])
        v, tril = v.expand(*batch, -1), tril.expand(*batch, -1, -1)
        return torch.cholesky_solve(v.unsqueeze(-1), tril).squeeze(-1)

    def slope(self, covariance: Tensor, excess: Tensor, dim: int) -> Tensor:
        """``covariance^{-1} excess covariance^{-1} / 2``."""
        tril = torch.linalg.cholesky(covariance)
        half = torch.cholesky_solve(excess, tril)
        return 0.5 * torch.cholesky_solve(half.mT, tril)

    def floored(self, covariance: Tensor, unit: Tensor) -> Tensor:
        """The likeliest covariance that is nowhere below ``unit``: eigenvalues clipped in units of it.

        :param unit: smallest variance of each input, shape ``(..., D)``.
        """
        if not bool((unit > 0).all()):
            return covariance
        whole = self.outer(unit.sqrt())
        clipped, low = _clipped(covariance / whole, 1.0)
        return torch.where(low[..., None, None], clipped * whole, covariance)

    def guarded(self, new: Tensor, old: Tensor) -> Tensor:
        """``new``, but in no direction below a tenth of ``old``."""
        tril = torch.linalg.cholesky(old)
        half = torch.linalg.solve_triangular(tril, new, upper=False)
        measured = torch.linalg.solve_triangular(tril, half.mT, upper=False)
        clipped, low = _clipped(measured, SLOWEST)
        return torch.where(low[..., None, None], tril @ clipped @ tril.mT, new)

    def rests(self, covariance: Tensor, unit: Tensor) -> Tensor:
        """Whether the covariance lies on the floor in some direction, shape ``(...)``."""
        if not bool((unit > 0).all()):
            return torch.zeros_like(covariance[..., 0, 0], dtype=torch.bool)
        return torch.linalg.eigvalsh(covariance / self.outer(unit.sqrt()))[..., 0] <= 1.0 + REST

    def matrix(self, covariance: Tensor, dim: int) -> Tensor:
        """The covariance itself."""
        return covariance

    def restricted(self, matrix: Tensor) -> Tensor:
        """The matrix itself."""
        return matrix


Covariance = Spherical | Diagonal | Full


def mahalanobis(kind: Covariance, covariance: Tensor, v: Tensor) -> Tensor:
    """``v' covariance^{-1} v``, shape ``(...)``."""
    return (v * kind.solve(covariance, v)).sum(-1)


def _scales(num_kernels: int, unit: Tensor) -> Tensor:
    middle = unit.log().expand(num_kernels, -1)
    return torch.as_tensor(pyro.sample("scale", dist.LogNormal(middle, torch.ones_like(middle)).to_event(2)))


def _clipped(A: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
    """Symmetric matrices with eigenvalues clipped from below, and which ones had to be."""
    one = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    low = torch.linalg.cholesky_ex(A - smallest * one).info > 0
    if not bool(low.any()):
        return A, low
    values, vectors = torch.linalg.eigh(A[low])
    values = values.clamp(min=smallest)  # the floor itself
    clipped = (vectors * values.unsqueeze(-2)) @ vectors.mT
    result = A.clone()
    result[low] = 0.5 * (clipped + clipped.mT)
    return result, low
