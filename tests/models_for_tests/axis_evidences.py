"""Evidence of one axis at any prior precision, and the best prior covariance of all: Kropotov and Vetrov (2007)."""

import math

import torch
from torch import Tensor


def gaussian_log_evidence(alpha: Tensor, h: Tensor, u: Tensor) -> Tensor:
    r"""Log evidence factor :math:`\log f^G` of an axis under ``u ~ N(0, 1/alpha)``, nats.

    Kropotov and Vetrov (2007), eq. 10; for ``alpha = inf`` its limit :math:`-h u^2 / 2`.

    :param alpha: prior precision, ``(...)``, positive, possibly ``inf``.
    """
    ratio = h / alpha
    return -0.5 * (ratio.log1p() + h * u.square() / (1.0 + ratio))


def log_laplace_integral(a: Tensor, z: Tensor) -> Tensor:
    r""":math:`\log \int \exp(-\tfrac12 (s - z)^2 - a|s|)\, ds`, ``(...)``, without over- or underflow.

    Each half line is an ``erfcx`` where its mode lies at 0 and an ``erfc`` where it lies inside.

    :param a: rate of the Laplace prior in units of the likelihood's width, non-negative.
    :param z: centre, non-negative.
    """
    near, far = (a - z) / math.sqrt(2.0), (a + z) / math.sqrt(2.0)
    at_zero = -0.5 * z.square()
    beside = at_zero + torch.special.erfcx(near.clamp(min=0.0)).log()  # only where near >= 0
    inside = -a * (z - 0.5 * a) + torch.special.erfc(near.clamp(max=0.0)).log()
    halves = torch.logaddexp(torch.where(near >= 0, beside, inside), at_zero + torch.special.erfcx(far).log())
    return halves + 0.5 * math.log(math.pi / 2.0)


def laplace_log_evidence(alpha: Tensor, h: Tensor, u: Tensor) -> Tensor:
    r"""Log evidence factor :math:`\log f^L` under the density :math:`\tfrac\alpha4 e^{-\alpha|u|/2}`, nats.

    Kropotov and Vetrov (2007), eq. 12 and 13; for ``alpha = inf`` its limit :math:`-h u^2 / 2`.
    """
    z = h.sqrt() * u.abs()
    kept = torch.isfinite(alpha) & (h > 0)
    a = torch.where(kept, alpha / (2.0 * torch.where(kept, h, 1.0).sqrt()), 1.0)
    value = (0.5 * a).log() + log_laplace_integral(a, z)
    return torch.where(kept, value, -0.5 * z.square())


def optimal_prior_covariance(A: Tensor, mu: Tensor) -> Tensor:
    r"""The Gaussian prior covariance of highest evidence, :math:`S = (1 - 1/q)_+\, \mu\mu'`, ``(M, M)``.

    For the likelihood :math:`\exp(-\tfrac12 (w - \mu)' A (w - \mu))`, :math:`q = \mu' A \mu`.  Kropotov and
    Vetrov (2007), section 5, ask for it.  Proof: with :math:`z = A^{1/2}\mu` and :math:`P = (I + A^{1/2} S
    A^{1/2})^{-1}` the log evidence is :math:`\tfrac12 \log|P| - \tfrac12 z'Pz`, strictly concave on :math:`0
    < P \le I`.  Its Karush-Kuhn-Tucker conditions :math:`P^{-1} - zz' = \Lambda \ge 0,\ \Lambda (I - P) = 0`
    hold at :math:`P = I - (1 - 1/q) zz'/q`, where :math:`P^{-1} = I + (q - 1) zz'/q` and :math:`\Lambda = I -
    zz'/q`.

    Nobody should use it: the prior has rank one, along the maximum-likelihood weights themselves, so the
    posterior mean is :math:`(1 - 1/q)\mu` and every decision is the unregularised one.

    :param A: curvature, positive semidefinite, shape ``(M, M)``.
    :param mu: maximum-likelihood weights, shape ``(M,)``.
    """
    q = mu @ A @ mu
    kept = (1.0 - 1.0 / q).clamp(min=0.0)  # q <= 1: the best prior is a point at 0
    return torch.where(q > 1.0, kept, 0.0) * torch.outer(mu, mu)
