r"""Kinds of Gaussian kernels: spherical, diagonal, full; one small class each.

A kind says which *features* of a datum its log density is linear in: always 1 and ``x``, then its own products of
``x``.  With them log densities of all kernels are one matrix product, and sufficient statistics another.
A covariance has the shape of its kind: ``(..., 1)`` spherical, ``(..., D)`` diagonal, ``(..., D, D)`` full.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Covariance(Protocol):
    """A kind of Gaussian kernel."""

    @property
    def event_dim(self) -> int:
        """Number of dimensions of one covariance."""

    @property
    def floor(self) -> float:
        """Smallest variance in units of the data's."""

    def features(self, X: Tensor) -> Tensor:
        """1, ``x`` and products of ``x``, shape ``(..., N, P)``."""

    def natural(self, loc: Tensor, covariance: Tensor) -> Tensor:
        """Coefficients of the features in ``log N(x | loc, covariance)``, shape ``(..., P)``."""

    def scatter(self, moments: Tensor, loc: Tensor) -> Tensor:
        """``sum_n w_n (x_n - loc)(x_n - loc)'`` in the shape of the kind.

        :param moments: ``sum_n w_n F_n``, shape ``(..., P)``.
        """

    def outer(self, v: Tensor) -> Tensor:
        """``v v'`` in the shape of the kind; ``v`` has shape ``(..., D)``."""

    def solve(self, covariance: Tensor, v: Tensor) -> Tensor:
        """``covariance^{-1} v``, shape ``(..., D)``."""

    def slope(self, covariance: Tensor, excess: Tensor, dim: int) -> Tensor:
        """``covariance^{-1} excess covariance^{-1} / 2`` as derivative in the numbers of the kind.

        :param dim: number of inputs ``D``, by which a spherical kernel counts its one number.
        """

    def floored(self, covariance: Tensor, unit: Tensor) -> Tensor:
        """The likeliest covariance that is nowhere below ``unit``: eigenvalues clipped in units of it.

        :param unit: smallest variance of each input, shape ``(..., D)``.
        """

    def guarded(self, new: Tensor, old: Tensor) -> Tensor:
        """``new``, but in no direction below a tenth of ``old``."""

    def rests(self, covariance: Tensor, unit: Tensor) -> Tensor:
        """Whether the covariance lies on the floor in some direction, shape ``(...)``."""

    def matrix(self, covariance: Tensor, dim: int) -> Tensor:
        """The covariance as a matrix, shape ``(..., D, D)``."""

    def restricted(self, matrix: Tensor) -> Tensor:
        """The closest covariance of the kind in likelihood to a ``(..., D, D)`` matrix: its diagonal, or its mean."""


def quadratic(kind: Covariance, covariance: Tensor, v: Tensor) -> Tensor:
    """``v' covariance^{-1} v``, shape ``(...)``."""
    return (v * kind.solve(covariance, v)).sum(-1)


@dataclass(frozen=True)
class Spherical:
    """One variance for all inputs of a kernel.

    :ivar floor: smallest variance, in units of the data's mean variance over inputs.
    """

    floor: float = 1e-6  # keeps a kernel on repeated data finite
    event_dim: int = 1

    def features(self, X: Tensor) -> Tensor:
        """The columns 1, ``x`` and ``|x|^2``."""
        return torch.cat([torch.ones_like(X[..., :1]), X, X.square().sum(-1, keepdim=True)], -1)

    def natural(self, loc: Tensor, covariance: Tensor) -> Tensor:
        norm = loc.square().sum(-1, keepdim=True) / covariance + loc.shape[-1] * (math.tau * covariance).log()
        return torch.cat([-0.5 * norm, loc / covariance, -0.5 / covariance], -1)

    def scatter(self, moments: Tensor, loc: Tensor) -> Tensor:
        """Mean over inputs, shape ``(..., 1)``."""
        about = moments[..., :1] * loc - 2.0 * moments[..., 1:-1]
        total = moments[..., -1:] + (about * loc).sum(-1, keepdim=True)
        return total / loc.shape[-1]

    def outer(self, v: Tensor) -> Tensor:
        """Mean over inputs, shape ``(..., 1)``."""
        return v.square().mean(-1, keepdim=True)

    def solve(self, covariance: Tensor, v: Tensor) -> Tensor:
        return v / covariance

    def slope(self, covariance: Tensor, excess: Tensor, dim: int) -> Tensor:
        return 0.5 * dim * excess / covariance.square()

    def floored(self, covariance: Tensor, unit: Tensor) -> Tensor:
        return torch.maximum(covariance, unit.mean(-1, keepdim=True))

    def guarded(self, new: Tensor, old: Tensor) -> Tensor:
        return torch.maximum(new, 0.1 * old)

    def rests(self, covariance: Tensor, unit: Tensor) -> Tensor:
        return (covariance <= unit.mean(-1, keepdim=True) * (1.0 + 1e-9)).squeeze(-1)

    def matrix(self, covariance: Tensor, dim: int) -> Tensor:
        return covariance.expand(*covariance.shape[:-1], dim).diag_embed()

    def restricted(self, matrix: Tensor) -> Tensor:
        return matrix.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)


@dataclass(frozen=True)
class Diagonal:
    """One variance for each input of a kernel.

    :ivar floor: smallest variance, in units of the variance of that input in the data.
    """

    floor: float = 1e-6  # keeps a kernel on repeated data finite
    event_dim: int = 1

    def features(self, X: Tensor) -> Tensor:
        """The columns 1, ``x`` and ``x^2``."""
        return torch.cat([torch.ones_like(X[..., :1]), X, X.square()], -1)

    def natural(self, loc: Tensor, covariance: Tensor) -> Tensor:
        norm = (loc.square() / covariance + (math.tau * covariance).log()).sum(-1, keepdim=True)
        return torch.cat([-0.5 * norm, loc / covariance, -0.5 / covariance], -1)

    def scatter(self, moments: Tensor, loc: Tensor) -> Tensor:
        """One number for each input, shape ``(..., D)``."""
        D = loc.shape[-1]
        return moments[..., D + 1 :] + (moments[..., :1] * loc - 2.0 * moments[..., 1 : D + 1]) * loc

    def outer(self, v: Tensor) -> Tensor:
        """One number for each input, shape ``(..., D)``."""
        return v.square()

    def solve(self, covariance: Tensor, v: Tensor) -> Tensor:
        return v / covariance

    def slope(self, covariance: Tensor, excess: Tensor, dim: int) -> Tensor:
        return 0.5 * excess / covariance.square()

    def floored(self, covariance: Tensor, unit: Tensor) -> Tensor:
        return torch.maximum(covariance, unit)

    def guarded(self, new: Tensor, old: Tensor) -> Tensor:
        return torch.maximum(new, 0.1 * old)

    def rests(self, covariance: Tensor, unit: Tensor) -> Tensor:
        return (covariance <= unit * (1.0 + 1e-9)).any(-1)

    def matrix(self, covariance: Tensor, dim: int) -> Tensor:
        return covariance.diag_embed()

    def restricted(self, matrix: Tensor) -> Tensor:
        return matrix.diagonal(dim1=-2, dim2=-1)


@dataclass(frozen=True)
class Full:
    """A covariance matrix for each kernel.

    :ivar floor: smallest eigenvalue, inputs measured in the data's standard deviations.
    """

    floor: float = 1e-6  # keeps a kernel on fewer than D + 1 data finite
    event_dim: int = 2

    def features(self, X: Tensor) -> Tensor:
        """1, ``x``, and the products ``x_i x_j`` with ``i <= j``."""
        row, column = torch.triu_indices(X.shape[-1], X.shape[-1])
        return torch.cat([torch.ones_like(X[..., :1]), X, X[..., row] * X[..., column]], -1)

    def natural(self, loc: Tensor, covariance: Tensor) -> Tensor:
        tril = torch.linalg.cholesky(covariance)
        precision = torch.cholesky_inverse(tril)
        linear = (precision @ loc.unsqueeze(-1)).squeeze(-1)
        log_det = 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
        norm = (linear * loc).sum(-1, keepdim=True) + log_det + loc.shape[-1] * math.log(math.tau)
        row, column = torch.triu_indices(loc.shape[-1], loc.shape[-1])
        twice = torch.where(row == column, 0.5, 1.0).to(loc)
        return torch.cat([-0.5 * norm, linear, -twice * precision[..., row, column]], -1)

    def scatter(self, moments: Tensor, loc: Tensor) -> Tensor:
        """Shape ``(..., D, D)``."""
        D = loc.shape[-1]
        mixed = loc.unsqueeze(-1) * moments[..., None, 1 : D + 1]
        about = moments[..., :1, None] * loc.unsqueeze(-1) * loc.unsqueeze(-2) - mixed - mixed.mT
        return moments[..., D + 1 :][..., _symmetric(D)] + about

    def outer(self, v: Tensor) -> Tensor:
        """Shape ``(..., D, D)``."""
        return v.unsqueeze(-1) * v.unsqueeze(-2)

    def solve(self, covariance: Tensor, v: Tensor) -> Tensor:
        tril = torch.linalg.cholesky(covariance)
        batch = torch.broadcast_shapes(tril.shape[:-2], v.shape[:-1])
        v, tril = v.expand(*batch, -1), tril.expand(*batch, -1, -1)
        return torch.cholesky_solve(v.unsqueeze(-1), tril).squeeze(-1)

    def slope(self, covariance: Tensor, excess: Tensor, dim: int) -> Tensor:
        tril = torch.linalg.cholesky(covariance)
        half = torch.cholesky_solve(excess, tril)
        return 0.5 * torch.cholesky_solve(half.mT, tril)

    def floored(self, covariance: Tensor, unit: Tensor) -> Tensor:
        if not bool((unit > 0).all()):
            return covariance
        scale = unit.sqrt()
        whole = scale.unsqueeze(-1) * scale.unsqueeze(-2)
        measured = covariance / whole
        clipped, low = _clipped(measured, 1.0)
        return torch.where(low[..., None, None], clipped * whole, covariance)

    def guarded(self, new: Tensor, old: Tensor) -> Tensor:
        tril = torch.linalg.cholesky(old)
        half = torch.linalg.solve_triangular(tril, new, upper=False)
        measured = torch.linalg.solve_triangular(tril, half.mT, upper=False)
        clipped, low = _clipped(measured, 0.1)
        return torch.where(low[..., None, None], tril @ clipped @ tril.mT, new)

    def rests(self, covariance: Tensor, unit: Tensor) -> Tensor:
        if not bool((unit > 0).all()):
            return torch.zeros_like(covariance[..., 0, 0], dtype=torch.bool)
        scale = unit.sqrt()
        return torch.linalg.eigvalsh(covariance / (scale.unsqueeze(-1) * scale.unsqueeze(-2)))[..., 0] <= 1.0 + 1e-5

    def matrix(self, covariance: Tensor, dim: int) -> Tensor:
        return covariance

    def restricted(self, matrix: Tensor) -> Tensor:
        return matrix


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


def _symmetric(size: int) -> Tensor:
    """Position of each entry of a symmetric matrix in its upper triangle, shape ``(size, size)``."""
    row, column = torch.triu_indices(size, size)
    table = torch.zeros(size, size, dtype=torch.long)
    table[row, column] = torch.arange(len(row))
    return torch.maximum(table, table.T)
