"""Eigenvectors of a likelihood's curvature and where the likelihood is centred along them."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_evidence.errors import NotPositiveDefinite

SAME = 1e-8  # relative gap below which eigenvalues count as one
EVERY = 10  # steps of Lanczos between looks at the eigenvalues


class Axes(NamedTuple):
    """The axes of a local quadratic, largest curvature first, null directions left out.

    Each points the way of the weights (``u >= 0``).  Axes whose eigenvalues agree to 1e-8 are rotated among
    themselves so that at most one has ``u > 0``: the choice of highest evidence, and one that does not depend
    on the library.
    """

    h: Tensor  # (K,) eigenvalues
    directions: Tensor  # (M, K) unit eigenvectors
    u: Tensor  # (K,) centre of the likelihood along each

    @property
    def wald(self) -> Tensor:
        """``z^2 = h u^2`` of each axis, shape ``(K,)``."""
        return self.h * self.u.square()


def from_gram(A: Tensor, w: Tensor, score: Tensor) -> Axes:
    """Axes of the curvature ``A``, shape ``(M, M)``, centred at ``u + g / h``.

    :param w: where the curvature was taken, shape ``(M,)``.
    :param score: gradient there to be followed to the centre, shape ``(M,)``; zeros to stay at ``w``.
    :raises NotPositiveDefinite: when an eigenvalue is below ``-1e-8`` of the largest.
    """
    h, V = torch.linalg.eigh(A)
    if float(h[0]) < -1e-8 * float(h.abs().max()):
        raise NotPositiveDefinite(
            f"the curvature of the log likelihood, shape {tuple(A.shape)}, has smallest eigenvalue "
            f"{float(h[0]):.2e}; "
            f"expected none below zero (largest {float(h[-1]):.2e}), or no quadratic is centred there. The "
            "likelihood "
            f"is not log-concave: pass approximation=empirical_fisher, a Gauss-Newton curvature that is "
            "never negative. (Of single-precision data it may be rounding: pass them in double precision.)"
        )
    kept = h > torch.finfo(h.dtype).eps * len(h) * h[-1]
    h, V = h[kept].flip(0), V[:, kept].flip(1)
    return aligned(h, V, V.mT @ w + (V.mT @ score) / h)


def from_rows(root: Tensor, w: Tensor, residual: Tensor) -> Axes:
    """The same from a factor, ``A = root' root``, by singular values: small eigenvalues keep their digits.

    :param root: shape ``(n, M)``.
    :param residual: ``score = root' residual``, shape ``(n,)``; zeros to stay at ``w``.
    """
    U, s, Vh = torch.linalg.svd(root, full_matrices=False)
    kept = s.square() > torch.finfo(s.dtype).eps * root.shape[1] * s[0].square() if len(s) else s > 0
    s, V = s[kept], Vh[kept].mT
    return aligned(s.square(), V, V.mT @ w + (U[:, kept].mT @ residual) / s)


def aligned(h: Tensor, V: Tensor, u: Tensor) -> Axes:
    """Clusters rotated, signs fixed."""
    V = V * torch.where(u < 0, -1.0, 1.0)
    u = u.abs()
    breaks = torch.nonzero(h[:-1] - h[1:] > SAME * h[:-1]).flatten() + 1
    edges = [0, *breaks.tolist(), len(h)]
    if len(edges) <= len(h):
        for a, b in pairwise(edges):
            if b - a > 1:
                u, V = u.clone(), V.clone()
                u[a:b], V[:, a:b] = _onto_first(u[a:b], V[:, a:b])
    return Axes(h, V, u)


def _onto_first(u: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Householder reflection that carries ``u`` onto its first coordinate."""
    target = torch.zeros_like(u)
    target[0] = u.norm()
    v = u - target
    size = v @ v
    if float(size) == 0.0:
        return target, V
    return target, V - 2.0 / size * torch.outer(V @ v, v)


def truncated(product: Callable[[Tensor], Tensor], w: Tensor) -> Axes:
    r"""The axes that can be kept, without the others: Lanczos started at ``w``, for large ``M``.

    Every axis with :math:`h \le 1/|w|^2` is pruned for certain, and an axis orthogonal to ``w`` has ``u =
    0``.  So the Krylov space of ``w`` holds all axes that matter, and it is grown until each Ritz value above
    the bound has converged and one below it has appeared.  For the centre at ``w`` only.

    :param product: multiplies a vector ``(M,)`` by the curvature.
    """
    if float(w @ w) == 0.0:
        return Axes(w[:0], w.new_zeros(len(w), 0), w[:0])
    basis = w.new_zeros(EVERY, len(w))  # rows are orthonormal; grown by halves
    basis[0] = w / w.norm()
    diagonal: list[float] = []
    beside: list[float] = []
    for k in range(len(w)):
        r = product(basis[k])
        diagonal.append(float(r @ basis[k]))
        for _ in range(2):  # twice is enough
            r = r - basis[: k + 1].mT @ (basis[: k + 1] @ r)
        beside.append(float(r.norm()))
        stopped = beside[-1] <= 1e-14 * max(diagonal) or k + 1 == len(w)
        if stopped or (k + 1) % EVERY == 0:
            h, S = _tridiagonal(diagonal, beside[:-1], w)
            if stopped or _finished(h, S, beside[-1], 1.0 / float(w @ w)):
                break
        if k + 1 == len(basis):
            basis = torch.cat([basis, w.new_zeros(len(basis) // 2 + 1, len(w))])
        basis[k + 1] = r / beside[-1]
    kept = h > torch.finfo(h.dtype).eps * len(w) * h[-1]
    h, V = h[kept].flip(0), (basis[: k + 1].mT @ S[:, kept]).flip(1)
    return aligned(h, V, V.mT @ w)


def _tridiagonal(diagonal: list[float], beside: list[float], like: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors of Lanczos' matrix."""
    T, side = like.new_tensor(diagonal).diag(), like.new_tensor(beside)
    return torch.linalg.eigh(T + torch.diag(side, 1) + torch.diag(side, -1)) if len(side) else torch.linalg.eigh(T)


def _finished(h: Tensor, S: Tensor, beside: float, bound: float) -> bool:
    residual = beside * S[-1].abs()
    return bool((residual[h > bound] <= 1e-10 * h[h > bound]).all()) and bool((h <= bound).any())
