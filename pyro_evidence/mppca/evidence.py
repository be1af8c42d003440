r"""The log evidence of a mixture of probabilistic PCA, W integrated by Laplace's approximation about its orbit.

Turning the latent space leaves the density as it is, so each component's mode is a whole orbit under O(q), and the
Hessian has q(q-1)/2 zero eigenvalues.  With W-hat of orthogonal columns of norms l_a,

.. math:: \log Z = \log p(D, \hat W) + \log \mathrm{Vol}\, O(q) + \sum_{a<b} \tfrac12 \log(l_a^2 + l_b^2)
    + \tfrac12\Bigl(mq - \tfrac{q(q-1)}2\Bigr)\log 2\pi - \tfrac12 {\sum}' \log \mathrm{eig}\, H

Here responsibilities are held, the curvature is written in the eigenvectors of the component's covariance, and what
the subspace leaves over is taken as isotropic: no m x m matrix, cost ``K q^3``.
"""

import math

import torch
from torch import Tensor

from pyro_evidence.mixture.mode import mixing_factor, precision_factor
from pyro_evidence.mppca import expectation
from pyro_evidence.mppca.expectation import FactorAnalysers, FactorStatistics
from pyro_evidence.mppca.updates import Iterate

LEAST = 1e-3  # share of an eigenvalue: a column that explains nothing stays finite


def log_volume(q: int) -> float:
    r"""Log volume of O(q), :math:`2^q \pi^{q^2/2} / \Gamma_q(q/2)`; O(1): log 2, O(2): log 4 pi."""
    log_gamma = q * (q - 1) / 4 * math.log(math.pi) + sum(math.lgamma(0.5 * (q - j)) for j in range(q))
    return q * math.log(2.0) + 0.5 * q * q * math.log(math.pi) - log_gamma


def log_orbit(kappa: Tensor, pairs: Tensor, num_columns: Tensor) -> Tensor:
    r"""Log of :math:`\int_{O(q)} \exp(-\tfrac12 \mathrm{tr}(D Q^\top W^\top W Q))\, dQ` above its largest value.

    Exact for columns that share a precision, whose integral is the volume; for two columns; and, to leading order, for
    precisions far apart, where it is Laplace's about the 2^q reflections.  In between a product over pairs of
    columns of Bessel functions.

    :param kappa: :math:`\tfrac12 (\alpha_a - \alpha_b)(l_b^2 - l_a^2)` >= 0 of pairs of columns, shape ``(..., q, q)``.
    :param pairs: which of them count, each once, bool.
    :param num_columns: q of each, shape ``(...)``.
    """
    table = [log_volume(q) - q * math.log(2.0) for q in range(kappa.shape[-1] + 1)]
    each = [v / max(1.0, q * (q - 1) / 2) for q, v in enumerate(table)]
    length = kappa.new_tensor(each).exp()[num_columns][..., None, None]
    scaled = kappa * length.square() / (2.0 * math.pi**2)
    found = torch.where(pairs, length.log() + torch.special.i0e(scaled).log(), 0.0)
    return found.sum((-2, -1)) + num_columns * math.log(2.0)


def log_joint(analysers: FactorAnalysers, stats: FactorStatistics) -> Tensor:
    """``log p(D, W)``, nats, shape ``(R,)``."""
    return stats.log_likelihood + expectation.log_prior(analysers)


def canonical_columns(it: Iterate) -> tuple[Tensor, Tensor, Tensor]:
    """Squared norms, data variances along, and precisions of orthogonal columns, in units of the noise, ``(R, K, q)``.

    Columns of one precision are turned until they are orthogonal; those of their own are so at a maximum.
    """
    if not it.ties.columnwise:
        norms, turn = torch.linalg.eigh(it.gram)
        return norms, (turn * (it.spread @ turn)).sum(-2), it.analysers.alpha
    return it.gram.diagonal(dim1=-2, dim2=-1), it.spread.diagonal(dim1=-2, dim2=-1), it.analysers.alpha


def relative_lengths(it: Iterate) -> tuple[Tensor, Tensor]:
    """Lengths of canonical columns over their posterior standard deviations, and which exist, ``(R, K, q)`` each.

    Below 1 a column has no orbit, and Laplace's approximation no meaning.
    """
    norms, _, _ = canonical_columns(it)
    norms = norms.clamp(min=0.0)  # rounding may leave a tiny negative
    on = it.analysers.on
    if not it.ties.columnwise:  # columns have been turned: those that are pruned are now the shortest
        num, rank = on.sum(-1, keepdim=True), torch.arange(on.shape[-1], device=on.device)
        on = rank >= on.shape[-1] - num
    return (2.0 * it.found.counts).sqrt().unsqueeze(-1) * norms / (1.0 + norms), on


def orbit_log_evidence(it: Iterate) -> Tensor:
    """Log evidence at the current parameters, nats, shape ``(R,)``: the orbit formula, one component at a time.

    A column shorter than it is uncertain counts as switched off.
    """
    analysers, m = it.analysers, it.analysers.W.shape[-2]
    norms, along, alpha = canonical_columns(it)
    lengths, there = relative_lengths(it)
    on = there & (lengths >= 1.0)
    norms = torch.where(on, norms, 1.0)
    s = torch.where(on, along / norms, 0.0)
    num = on.sum(-1)
    counts = it.counts
    rest = ((analysers.beta * it.found.scatter).sum(-1) / counts - s.sum(-1)) / (m - num)
    outside, inside = _log_curvatures(counts, norms, s, rest, on)
    pairs = pairs_of(on)
    volume = torch.where(pairs, 0.5 * (norms.unsqueeze(-1) + norms.unsqueeze(-2)).log(), 0.0).sum((-2, -1))
    kappa = held_by_prior(alpha, analysers.W.square().sum(-2) if it.ties.columnwise else torch.zeros_like(norms))
    orbit = log_orbit(kappa, pairs, num) + volume
    width = 0.5 * (m * num - num * (num - 1) // 2) * math.log(math.tau)
    jacobian = -0.5 * num * analysers.beta.log().sum(-1)
    switched_off = 0.5 * m * torch.where(there & ~on, (alpha / math.tau).log(), 0.0).sum(-1)
    each = orbit + width + jacobian - 0.5 * ((m - num) * outside + inside) - switched_off
    return log_joint(it.analysers, it.stats) + torch.where(analysers.active, each, 0.0).sum(-1)


def held_by_prior(alpha: Tensor, norms: Tensor) -> Tensor:
    """Curvature of minus the log prior as pairs of columns are turned, ``(..., q, q)``, given their squared norms."""
    apart = (alpha.unsqueeze(-1) - alpha.unsqueeze(-2)) * (norms.unsqueeze(-2) - norms.unsqueeze(-1))
    return 0.5 * apart.clamp(min=0.0)  # negative where two columns are out of order, which the prior hardly sees


def _log_curvatures(counts: Tensor, norms: Tensor, s: Tensor, rest: Tensor, on: Tensor) -> Tensor:
    """Sums of log curvatures: out of the subspace for one direction, and within it but for the orbit, ``(2, R, K)``.

    ``h = N (s_j - s_i) / c_j`` out of the subspace: positive where the column explains more than what is left over.
    """
    N, c = counts.unsqueeze(-1), 1.0 + norms
    ratio = s / c
    out = N / c * (s - rest.unsqueeze(-1)).clamp(min=LEAST)  # a column that explains nothing stays finite
    norm = 2.0 * N * norms / c.square() * (2.0 * ratio - 1.0).clamp(min=1e-2)  # negative far from a maximum
    excess = 2.0 - 2.0 * (ratio.unsqueeze(-1) + ratio.unsqueeze(-2)) + s.unsqueeze(-1) + s.unsqueeze(-2)
    pair = N.unsqueeze(-1) * excess.clamp(min=LEAST) / (c.unsqueeze(-1) * c.unsqueeze(-2))  # so do two of them
    single = torch.where(on, norm.log(), 0.0).sum(-1)
    double = torch.where(pairs_of(on), pair.log(), 0.0).sum((-2, -1))
    return torch.stack([torch.where(on, out.log(), 0.0).sum(-1), single + double])


def pairs_of(on: Tensor) -> Tensor:
    """Each pair of the columns ``on`` ``(..., q)`` once, shape ``(..., q, q)`` bool."""
    return (on.unsqueeze(-1) & on.unsqueeze(-2)).triu(1)


def log_evidence_occam(it: Iterate, gamma: Tensor) -> Tensor:
    r"""Log evidence with what is maximised integrated out roughly, nats, shape ``(R,)``: to choose among mixtures.

    Each learned log precision costs :math:`\min(0, \tfrac12\log(4\pi/n) - \log 10)`, with n the number of data, or of
    well-determined parameters, behind it; the means cost their posterior volume under a Gaussian prior of one datum's
    information; the mixing under a flat prior; relabelling gains log K!.

    :param gamma: of the rule in use, shape ``(R, K, m or 1, q)``.
    """
    analysers, ties = it.analysers, it.ties
    left = (it.stats.counts.unsqueeze(-1) - gamma.sum(-1)).expand(analysers.beta.shape)
    determined = analysers.W.shape[-2] / gamma.shape[-2] * gamma.sum(-2)
    noise = ties.beta_pool.per_group(left * analysers.active.unsqueeze(-1), ties.beta_free)
    alpha = ties.alpha_pool.per_group(determined * analysers.on, ties.alpha_free)
    mixing = mixing_factor(analysers.active, analysers.log_mixing, it.stats.counts.sum(-1)) if ties.mixing_free else 0.0
    found = orbit_log_evidence(it) + mixing + precision_factor(noise) + precision_factor(alpha)
    if not ties.mean_free:
        return found
    counts = it.stats.counts.clamp(min=1.0)  # less than one datum determines nothing
    volume = analysers.log_det - analysers.mu.shape[-1] * counts.log()  # the data's mean variance is 1
    away = analysers.mu.square().sum(-1)  # from the mean of the data
    return found + torch.where(analysers.active, 0.5 * (volume.clamp(max=0.0) - away), 0.0).sum(-1)


def loading_curvature(it: Iterate) -> Tensor:
    """Curvature of each loading at held responsibilities, others held, flat, first row, shape ``(1, D)``.

    ``beta_i N_k l^2 / (1 + l^2)`` plus the prior's precision, l the column's length in units of the noise.
    """
    analysers = it.analysers
    lengths = (analysers.beta.unsqueeze(-1) * analysers.W.square()).sum(-2)
    data = analysers.beta.unsqueeze(-1) * (it.found.counts.unsqueeze(-1) * lengths / (1.0 + lengths)).unsqueeze(-2)
    on = analysers.on.unsqueeze(-2)
    return (torch.where(on, data, 0.0) + analysers.alpha.unsqueeze(-2)).reshape(len(analysers.W), -1)
