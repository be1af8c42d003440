r"""Automatic relevance determination along the eigenvectors of a likelihood's curvature, axis by axis.

Along axis ``i`` the likelihood is :math:`\exp(-\tfrac12 h_i (u - u_i)^2)` times its maximum: ``h`` is the
curvature (an eigenvalue, a precision), ``u`` the centre, and :math:`z = \sqrt{h}\,|u|` the Wald statistic.
Each axis has one hyperparameter ``alpha``, chosen where its evidence is highest; ``inf`` means that the axis
is pruned. Kropotov and Vetrov (2007), "On one method of non-diagonal regularization in sparse Bayesian
learning", ICML.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_evidence.errors import NotPositiveDefinite

SAME = 1e-8  # relative gap below which eigenvalues count as one, and beside the largest as none
EVERY = 10  # steps of Lanczos between looks at the eigenvalues


class EigenAxes(NamedTuple):
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


def from_gram(A: Tensor, w: Tensor, score: Tensor) -> EigenAxes:
    """Axes of the curvature ``A``, shape ``(M, M)``, centred at ``u + g / h``.

    :param w: where the curvature was taken, shape ``(M,)``.
    :param score: gradient there to be followed to the centre, shape ``(M,)``; zeros to stay at ``w``.
    :raises NotPositiveDefinite: when an eigenvalue is below ``-1e-8`` of the largest.
    """
    h, V = torch.linalg.eigh(A)
    if float(h[0]) < -SAME * float(h.abs().max()):
        raise NotPositiveDefinite(
            f"the curvature of the log likelihood, shape {tuple(A.shape)}, has smallest eigenvalue {float(h[0]):.2e}; "
            f"expected none below zero (largest {float(h[-1]):.2e}), or no quadratic is centred there. The likelihood "
            "is not log-concave: pass approximation=empirical_fisher, a Gauss-Newton curvature that is never negative. "
            "(Of single-precision data it may be rounding: pass them in double precision.)"
        )
    kept = h > torch.finfo(h.dtype).eps * len(h) * h[-1]
    h, V = h[kept].flip(0), V[:, kept].flip(1)
    return aligned_axes(h, V, V.mT @ w + (V.mT @ score) / h)


def from_rows(root: Tensor, w: Tensor, residual: Tensor) -> EigenAxes:
    """Axes of ``A = root' root`` by the singular values of the factor: small eigenvalues keep their digits.

    :param root: shape ``(n, M)``.
    :param residual: ``score = root' residual``, shape ``(n,)``; zeros to stay at ``w``.
    """
    U, s, Vh = torch.linalg.svd(root, full_matrices=False)
    kept = s.square() > torch.finfo(s.dtype).eps * root.shape[1] * s[0].square() if len(s) else s > 0
    s, V = s[kept], Vh[kept].mT
    return aligned_axes(s.square(), V, V.mT @ w + (U[:, kept].mT @ residual) / s)


def aligned_axes(h: Tensor, V: Tensor, u: Tensor) -> EigenAxes:
    """Clusters rotated, signs fixed."""
    V = V * torch.where(u < 0, -1.0, 1.0)
    u = u.abs()
    breaks = torch.nonzero(h[:-1] - h[1:] > SAME * h[:-1]).flatten() + 1
    edges = [0, *breaks.tolist(), len(h)]
    if len(edges) <= len(h):
        for a, b in pairwise(edges):
            if b - a > 1:  # a Householder reflection carries u onto its first coordinate
                u, V = u.clone(), V.clone()
                target = torch.zeros_like(u[a:b])
                target[0] = u[a:b].norm()
                v = u[a:b] - target
                u[a:b], size = target, v @ v
                if float(size) > 0.0:
                    V[:, a:b] -= 2.0 / size * torch.outer(V[:, a:b] @ v, v)
    return EigenAxes(h, V, u)


def truncated(product: Callable[[Tensor], Tensor], w: Tensor) -> EigenAxes:
    r"""The axes that can be kept, without the others: Lanczos started at ``w``, for large ``M``.

    Every axis with :math:`h \le 1/|w|^2` is pruned for certain, and an axis orthogonal to ``w`` has ``u =
    0``.  So the Krylov space of ``w`` holds all axes that matter, and it is grown until each Ritz value above
    the bound has converged and one below it has appeared.  For the centre at ``w`` only.

    :param product: multiplies a vector ``(M,)`` by the curvature.
    """
    if float(w @ w) == 0.0:
        return EigenAxes(w[:0], w.new_zeros(len(w), 0), w[:0])
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
            side = w.new_tensor(beside[:-1])
            T = w.new_tensor(diagonal).diag() + torch.diag(side, 1) + torch.diag(side, -1)
            h, S = torch.linalg.eigh(T)
            beyond, residual = h > 1.0 / float(w @ w), beside[-1] * S[-1].abs()
            if stopped or (bool((residual <= 1e-10 * h)[beyond].all()) and not bool(beyond.all())):
                break
        if k + 1 == len(basis):
            basis = torch.cat([basis, w.new_zeros(len(basis) // 2 + 1, len(w))])
        basis[k + 1] = r / beside[-1]
    kept = h > torch.finfo(h.dtype).eps * len(w) * h[-1]
    h, V = h[kept].flip(0), (basis[: k + 1].mT @ S[:, kept]).flip(1)
    return aligned_axes(h, V, V.mT @ w)


STIFF = 1.15  # below this z the best a exceeds 3, where the closed form of the score loses a^2 units of rounding
NUM_NODES = 96  # of Gauss-Laguerre: exact to rounding for a >= 2.5


def gaussian_alpha(h: Tensor, u: Tensor, size: int = 1) -> Tensor:
    r"""The prior precision of highest evidence, :math:`h / (h u^2 - 1)`; ``inf`` iff :math:`h u^2 \le 1`.

    Kropotov and Vetrov (2007), eq. 11.  Where the axes of a block share one scaled prior variance,
    :math:`\alpha_i = h_i / s_B`, the best :math:`1 + s_B` is the mean of :math:`z^2` over the block where that exceeds
    1; otherwise the whole block is pruned.  A block of ``b`` axes of noise survives with probability
    :math:`P(\chi^2_b > b)`, which rises with ``b``, from 0.32 towards 0.5.

    :param size: axes in a block, neighbours in ``h`` and ``u`` ``(M,)``; the last block may have fewer.
    """
    mean = _block_mean(h * u.square(), size)
    kept = mean > 1.0
    return torch.where(kept, h / torch.where(kept, mean - 1.0, 1.0), torch.inf)


def gaussian_log_gain(wald: Tensor, size: int = 1) -> Tensor:
    r"""Gain of the best ``alpha`` over ``inf``, nats, by axis; with ``m`` the block's mean of ``z^2``.

    :math:`(z^2 (1 - 1/m) - \log m)/2` where :math:`m > 1`, 0 in pruned blocks; a single axis' share may be negative,
    that of a block is not.

    :param wald: :math:`z^2 = h u^2`.
    :param size: as for :func:`gaussian_alpha`.
    """
    mean = _block_mean(wald, size).clamp(min=1.0)  # a mean below 1 is pruned and gains nothing
    return 0.5 * (wald * (1.0 - 1.0 / mean) - mean.log())


def _block_mean(wald: Tensor, size: int) -> Tensor:
    """Mean over each axis' block, ``(M,)``."""
    block = torch.arange(len(wald), device=wald.device) // size
    return (torch.zeros_like(wald).index_add(0, block, wald) / torch.bincount(block, minlength=len(wald)))[block]


def laplace_log_gain(wald: Tensor) -> Tensor:
    r"""Gain of the best Laplace ``alpha`` over ``inf``, nats; 0 for pruned axes, ``(...)``.

    :math:`\log \tfrac a2 \int e^{-s^2/2 + zs - a|s|} ds`.  Kropotov and Vetrov (2007), eq. 13 and appendix A.

    :param wald: :math:`z^2 = h u^2`.
    """
    z = wald.sqrt()
    a = scaled_laplace_alpha(z)
    kept = torch.isfinite(a)
    a = torch.where(kept, a, 1.0)
    log_integral = torch.logaddexp(half_line(a - z).log_mass, half_line(a + z).log_mass)
    return torch.where(kept, (0.5 * a).log() + log_integral, 0.0)


def laplace_alpha(h: Tensor, u: Tensor) -> Tensor:
    r"""The Laplace ``alpha`` of highest evidence, :math:`2\sqrt h\, a^*(\sqrt h |u|)`; ``inf`` iff pruned.

    The threshold :math:`h u^2 > 1` is the Gaussian's: to second order in its scale, every symmetric prior of
    finite variance gains :math:`(z^2 - 1)/2` times that variance.
    """
    a = scaled_laplace_alpha(h.sqrt() * u.abs())
    return torch.where(torch.isfinite(a), 2.0 * h.sqrt() * a, torch.inf)


def scaled_laplace_alpha(z: Tensor) -> Tensor:
    r"""The universal :math:`a^*(z)`, where :math:`\tfrac a2 \int e^{-(s-z)^2/2 - a|s|} ds` is highest.

    ``inf`` for :math:`z \le 1`.  Unique: with :math:`k(s) = \cosh(zs) e^{-s^2/2}` and :math:`\beta = 1/a` the
    integral is :math:`\int \beta^{-1} e^{-s/\beta} k(s) ds`, a scale mixture with a totally positive kernel,
    so that its derivative changes sign no oftener than :math:`k'`: never for :math:`z \le 1`, once for
    :math:`z > 1`.  Near 1 it goes as :math:`2/\sqrt{z^2 - 1}`, far out as :math:`2/(z + \sqrt{z^2 - 4})`.
    """
    z = z.double()
    found = torch.full_like(z, torch.inf)
    for chosen, moments in (((z > 1.0) & (z < STIFF), _stiff), (z >= STIFF, _soft)):
        found = found.masked_scatter(chosen, _root(z[chosen], moments))
    return found


def _soft(a: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """``d log f / d log a``, which is ``1 - a E|s|``, from the closed moments, and its derivative in ``log a``."""
    moments = laplace_moments(a, z)
    value = 1.0 - a * moments.absolute
    return value, value - 1.0 + a.square() * (moments.second - moments.absolute.square())


def _stiff(a: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """That of :func:`_soft` by Gauss-Laguerre in ``x = a s``, without the leading 1 of ``k``, which adds nothing.

    Nodes and weights: Golub and Welsch (1969).
    """
    k = torch.arange(NUM_NODES, dtype=torch.float64, device=a.device)
    x, vectors = torch.linalg.eigh(torch.diag(2.0 * k + 1.0) + torch.diag(k[1:], 1) + torch.diag(k[1:], -1))
    weights = vectors[0].square()
    s = x / a.unsqueeze(-1)
    zs = z.unsqueeze(-1) * s
    log_cosh = torch.where(
        zs < 0.1, (2.0 * (0.5 * zs).sinh().square()).log1p(), zs + (-2.0 * zs).exp().log1p() - math.log(2.0)
    )
    excess = torch.expm1(log_cosh - 0.5 * s.square()) * weights
    norm = 1.0 + excess.sum(-1)
    value = ((1.0 - x) * excess).sum(-1) / norm
    second = (2.0 + (x.square() * excess).sum(-1)) / norm
    return value, value - 1.0 + second - (1.0 - value).square()


def _root(z: Tensor, score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Newton in ``log a`` inside the bracket ``1/z < a < 2 / sqrt(z^2 - 1)``, bisecting when it leaves."""
    low, high = -z.log(), math.log(2.0) - 0.5 * ((z - 1.0) * (z + 1.0)).log()
    log_a = low.lerp(high, 0.75)
    for _ in range(60):
        value, slope = score(log_a.exp(), z)
        low, high = torch.where(value > 0, log_a, low), torch.where(value > 0, high, log_a)
        newton = log_a - value / slope
        new = torch.where((newton > low) & (newton < high), newton, 0.5 * (low + high))
        if bool(((new - log_a).abs() <= 2.0 * torch.finfo(log_a.dtype).eps * (1.0 + log_a.abs())).all()):
            break
        log_a = new
    return log_a.exp()


class AxisMoments(NamedTuple):
    """Moments of ``s`` under the density proportional to ``exp(-(s - z)^2/2 - a|s|)``."""

    mean: Tensor
    absolute: Tensor  # E|s|
    second: Tensor  # E s^2


def laplace_moments(a: Tensor, z: Tensor) -> AxisMoments:
    """Posterior moments of an axis under the Laplace prior, in closed form, in units of ``h**-0.5``.

    A mixture of two normals, each truncated at 0; relative errors grow as ``a**2`` units of rounding.

    :param z: centre, non-negative (the mean of a negative centre is minus this one).
    """
    near, far = half_line(a - z), half_line(a + z)
    log_share = near.log_mass - torch.logaddexp(near.log_mass, far.log_mass)
    share = log_share.exp()
    other = -torch.expm1(log_share)
    absolute = share * near.first + other * far.first
    return AxisMoments(share * near.first - other * far.first, absolute, share * near.second + other * far.second)


class _Half(NamedTuple):
    """Moments of the density on s > 0 proportional to ``exp(-s^2/2 - x s)``."""

    log_mass: Tensor
    first: Tensor
    second: Tensor


def half_line(x: Tensor) -> _Half:
    """That of rate ``x``, ``(...)``: an ``erfcx`` where its mode lies at 0, a distribution function where inside."""
    inside = x < 0
    right, left = x.clamp(min=0.0), (-x).clamp(min=0.0)  # the two sides of x = 0
    scaled = 0.5 * math.log(math.pi / 2.0) + torch.special.erfcx(right / math.sqrt(2.0)).log()
    grown = 0.5 * left.square() + 0.5 * math.log(math.tau) + torch.special.log_ndtr(left)
    log_mass = torch.where(inside, grown, scaled)
    first = (-log_mass).exp() - x  # integration by parts: E s = 1/mass - x
    return _Half(log_mass, first, 1.0 - x * first)
