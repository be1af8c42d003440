r"""Mixtures of probabilistic PCA in latent space, a batch of restarts in front; no m x m matrix is ever formed.

.. math:: p(y_n) = \sum_k \pi_k\, N(y_n | \mu_k, W_k W_k^\top + \Lambda_k^{-1}), \qquad
    G_k = I + W_k^\top \Lambda_k W_k = L_k L_k^\top

with diagonal noise precisions :math:`\Lambda_k` (all equal: probabilistic PCA; otherwise factor analysers).  For
equal ones :math:`G_k = \beta_k M_k` of the paper.  Whitened coordinates :math:`z = L^{-1} W^\top\Lambda(y - \mu)` are
one matrix product for all restarts, components and data.  Husmeier (2000), sec. 3; Tipping and Bishop (1999).

Missing values, nan, are integrated out, datum by datum.  With :math:`G_n = I + W^\top \Lambda_n W`, the precisions of
what is missing in datum n set to zero, they have covariance :math:`\Lambda^{-1} + W G_n^{-1} W^\top`, and with the
whitened coordinates of the whole datum :math:`W G_n^{-1} L`: the sums of an M-step have expectations in closed form.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add

import torch
from torch import Tensor

from pyro_evidence.data.ranks import Statistics
from pyro_evidence.mppca.data import Observations, has_gaps
from pyro_evidence.numerics.batched import Batched

LEAST_LOG_RESP = -230.0  # below 1e-100 a responsibility adds nothing to a sum, and its products may be subnormal: slow
SMALLEST_BLOCK = 16  # data that are looked at together at least: fewer are slower than what they save
BLOCK = 2**17  # numbers in one block of whitened coordinates: they stay in the cache
LATENT_BLOCK = 2**20  # numbers in one block of latent precisions, of data with gaps


@dataclass(frozen=True, eq=False)
class FactorAnalysers(Batched):
    """One setting of all parameters per row; a component with ``log_mixing = -inf`` is pruned."""

    W: Tensor  # (R, K, m, q)     zero in columns that are pruned
    mu: Tensor  # (R, K, m)
    beta: Tensor  # (R, K, m)     noise precision of each output; all equal where the noise is isotropic
    log_mixing: Tensor  # (R, K)
    alpha: Tensor  # (R, K, q)    prior precision of each column of W
    columns: Tensor  # (R, K, q) bool, False where pruned

    @property
    def active(self) -> Tensor:
        """Components that are not pruned, shape ``(R, K)`` bool."""
        return self.log_mixing > -torch.inf

    @cached_property
    def on(self) -> Tensor:
        """Columns that are not pruned, of components that are not, shape ``(R, K, q)`` bool."""
        return self.columns & self.active.unsqueeze(-1)

    @property
    def present(self) -> Tensor:
        """Components and columns that are not pruned, shape ``(R, K + K q)`` bool."""
        return torch.cat([self.active, self.columns.flatten(1)], -1)

    @property
    def coordinates(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Loadings, means, precisions and shares without bounds, rows in front."""
        return self.W, self.mu, self.beta.log(), self.alpha.log(), torch.where(self.active, self.log_mixing, 0.0)

    def placed(self, W: Tensor, mu: Tensor, log_beta: Tensor, log_alpha: Tensor, shares: Tensor) -> "FactorAnalysers":
        """The analysers at these :attr:`coordinates`, with the components and columns of these that are not pruned."""
        log_mixing = torch.where(self.active, shares, -torch.inf).log_softmax(-1)
        return replace(self, W=W, mu=mu, beta=log_beta.exp(), alpha=log_alpha.exp(), log_mixing=log_mixing)

    def rescaled(self, unit: Tensor, shift: Tensor) -> "FactorAnalysers":
        """Loadings and means divided by ``unit`` ``()``, means shifted by ``(m,)``, precisions to match."""
        mu, square = self.mu / unit + shift, unit.square()
        return replace(self, W=self.W / unit, mu=mu, beta=self.beta * square, alpha=self.alpha * square)

    @cached_property
    def tril(self) -> Tensor:
        """Lower Cholesky factor of ``G = I + W' Lambda W``, whose eigenvalues are >= 1, shape ``(R, K, q, q)``."""
        W = self.W
        eye = torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)
        return torch.linalg.cholesky_ex(eye + W.mT @ (self.beta.unsqueeze(-1) * W))[0]

    @cached_property
    def whitener(self) -> Tensor:
        """``B = L^-1 W' Lambda``, shape ``(R, K, q, m)``."""
        return torch.linalg.solve_triangular(self.tril, (self.beta.unsqueeze(-1) * self.W).mT, upper=False)

    @cached_property
    def log_det(self) -> Tensor:
        """``log |W W' + Lambda^-1|``, shape ``(R, K)``."""
        return 2.0 * self.tril.diagonal(dim1=-2, dim2=-1).log().sum(-1) - self.beta.log().sum(-1)


@dataclass(frozen=True, eq=False)
class FactorStatistics(Statistics):
    """Sums over data that an M-step needs; those of two shards at the same parameters add up."""

    counts: Tensor  # (R, K)         sum_n r_nk
    sums: Tensor  # (R, K, m)        sum_n r_nk y_n
    squares: Tensor  # (R, K, m)     sum_n r_nk y_n^2
    cross: Tensor  # (R, K, m, q)    sum_n r_nk y_n z_nk'
    log_likelihood: Tensor  # (R,)


@dataclass(frozen=True, eq=False)
class _Natural:
    """Natural parameters, laid out for products with a block of data."""

    features: Tensor  # (2m, R K)   coefficients of y and y^2
    constant: Tensor  # (R K,)
    whitener: Tensor  # (m, q R K)
    shift: Tensor  # (q R K,)
    shape: torch.Size  # (R, K, m, q)

    @staticmethod
    def of(analysers: FactorAnalysers) -> "_Natural":
        R, K, m, q = analysers.W.shape
        linear = analysers.beta * analysers.mu
        quadratic = (linear * analysers.mu).sum(-1)
        constant = analysers.log_mixing - 0.5 * (m * math.log(math.tau) + analysers.log_det + quadratic)
        B = analysers.whitener
        shift = (B @ analysers.mu.unsqueeze(-1)).squeeze(-1)
        features = torch.cat([linear, -0.5 * analysers.beta], -1).reshape(R * K, 2 * m).mT
        laid_out = B.permute(3, 2, 0, 1).reshape(m, q * R * K)
        return _Natural(
            features.contiguous(), constant.reshape(-1), laid_out, shift.movedim(-1, 0).reshape(-1), B.mT.shape
        )

    def log_joint(self, Y: Tensor, F: Tensor) -> tuple[Tensor, Tensor]:
        """``log p(y_n, k)``, ``(n, R K)``, and whitened coordinates, ``(n, q, R K)``; ``F`` are features of ``Y``."""
        z = torch.addmm(self.shift, Y, self.whitener, beta=-1.0).unflatten(1, (self.shape[-1], -1))
        log_joint = torch.addmm(self.constant, F, self.features)
        return log_joint.add_(z.square().sum(1), alpha=0.5), z


def _featured(Y: Tensor, num: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of ``num`` data with their features, y and y^2, ``(n, 2m)``: memory that the next block overwrites."""
    m = Y.shape[1]
    held = Y.new_empty(min(num, len(Y)), 2 * m)
    for block in Y.split(num):
        F = held[: len(block)]
        F[:, :m] = block
        torch.mul(block, block, out=F[:, m:])
        yield block, F


def rows_at_once(analysers: FactorAnalysers) -> int:
    """Data that are looked at together."""
    R, K, m, q = analysers.W.shape
    return max(SMALLEST_BLOCK, min(BLOCK // (R * K * max(q, 1)), 4 * BLOCK // m))  # features are kept apart: 4 fit


def e_step_of_all(Y: Observations, analysers: FactorAnalysers) -> FactorStatistics:
    """:func:`e_step` of all data, in one pass."""
    return Y.rows.total(lambda rows: e_step(rows, analysers))


def e_step(Y: Tensor, analysers: FactorAnalysers) -> FactorStatistics:
    """Responsibilities and the sums that the M-step needs, block by block; expected ones where data have gaps.

    :param Y: data, shape ``(N, m)``.  Without gaps the cost is ``N m K q``, the memory ``K m q``.
    """
    if has_gaps(Y):
        return reduce(add, (_expected_sums(block, analysers) for block in _latent_blocks(Y, analysers)))
    natural = _Natural.of(analysers)
    R, K, m, q = natural.shape
    counts, moments = Y.new_zeros(R * K), Y.new_zeros(R * K, 2 * m)
    cross, log_likelihood = Y.new_zeros(m, q * R * K), Y.new_zeros(R)
    for block, F in _featured(Y, rows_at_once(analysers)):
        log_joint, z = natural.log_joint(block, F)
        table = log_joint.unflatten(1, (R, K))
        log_norm = table.logsumexp(-1, keepdim=True)
        log_resp = table.sub_(log_norm)
        resp = log_resp.exp().masked_fill_(log_resp < LEAST_LOG_RESP, 0.0).flatten(1)
        counts += resp.sum(0)
        moments.addmm_(resp.mT, F)
        cross.addmm_(block.mT, z.mul_(resp.unsqueeze(1)).flatten(1))
        log_likelihood += log_norm.sum((0, 2))
    found = moments.reshape(R, K, 2 * m)
    laid_out = cross.reshape(m, q, R, K).permute(2, 3, 0, 1)
    return FactorStatistics(counts.reshape(R, K), found[..., :m], found[..., m:], laid_out, log_likelihood)


def log_joint(Y: Tensor, analysers: FactorAnalysers) -> Tensor:
    """``log p(observed part of y_n, k)``, nats, shape ``(R, N, K)``."""
    if has_gaps(Y):
        return latent(Y, analysers).log_joint
    natural = _Natural.of(analysers)
    parts = [natural.log_joint(block, F)[0] for block, F in _featured(Y, rows_at_once(analysers))]
    return torch.cat(parts).reshape(len(Y), *natural.shape[:2]).movedim(0, 1)


def responsibilities(Y: Tensor, analysers: FactorAnalysers) -> Tensor:
    """``p(k | y_n)``, shape ``(R, N, K)``; zero below 1e-100."""
    resp = log_joint(Y, analysers).softmax(-1)
    return resp.masked_fill_(resp < math.exp(LEAST_LOG_RESP), 0.0)


@dataclass(frozen=True, eq=False)
class LatentMoments:
    """Expectations about the new means; Husmeier (2000), eqs. 3.11 and 3.19 to 3.23."""

    counts: Tensor  # (R, K)         N_k
    mean: Tensor  # (R, K, m)        new mu, eq. 3.11
    scatter: Tensor  # (R, K, m)     N_k times the diagonal of S_k, eq. 3.22
    yx: Tensor  # (R, K, m, q)       sum_n r (y - mu) <x>', eq. 3.21
    xx: Tensor  # (R, K, q, q)       sum_n r <x x'>, eq. 3.23
    yz: Tensor  # (R, K, m, q)       sum_n r (y - mu) z', in whitened coordinates


def latent_moments(analysers: FactorAnalysers, stats: FactorStatistics) -> LatentMoments:
    """The expectations that the M-step is made of; those of a pruned component are zero, its mean stays."""
    seen = (stats.counts > 0).unsqueeze(-1)
    counts = stats.counts.unsqueeze(-1)
    mean = torch.where(seen, stats.sums / torch.where(seen, counts, 1.0), analysers.mu)
    B, tril = analysers.whitener, analysers.tril
    z_sums = counts * (B @ (mean - analysers.mu).unsqueeze(-1)).squeeze(-1)
    yz = stats.cross - mean.unsqueeze(-1) * z_sums.unsqueeze(-2)
    yx = torch.linalg.solve_triangular(tril, yz, upper=False, left=False)
    inverse = torch.cholesky_inverse(tril)
    right = torch.linalg.solve_triangular(tril, B @ yz, upper=False, left=False)
    xx = counts.unsqueeze(-1) * inverse + torch.linalg.solve_triangular(tril.mT, right, upper=True)
    scatter = (stats.squares - counts * mean.square()).clamp(min=0.0)  # rounding may leave a tiny negative
    return LatentMoments(stats.counts, mean, scatter, yx, 0.5 * (xx + xx.mT), yz)


def about_held_means(found: LatentMoments, analysers: FactorAnalysers) -> LatentMoments:
    """Expectations about the means as they are, where these are held."""
    away = found.mean - analysers.mu
    x = torch.linalg.solve_triangular(analysers.tril.mT, analysers.whitener @ away.unsqueeze(-1), upper=True)
    counts = found.counts[..., None, None]
    yx = found.yx + counts * away.unsqueeze(-1) * x.mT
    scatter = found.scatter + found.counts.unsqueeze(-1) * away.square()
    return replace(found, mean=analysers.mu, yx=yx, xx=found.xx + counts * x * x.mT, scatter=scatter)


def solve_loadings(found: LatentMoments, analysers: FactorAnalysers, alpha: Tensor) -> Tensor:
    """New ``W``, shape ``(R, K, m, q)``; Husmeier (2000), eqs. 3.14 and 3.25, one alpha per column.

    :param alpha: prior precisions, shape ``(R, K, q)``; 0 for none.
    """
    eye = torch.eye(found.xx.shape[-1], dtype=found.xx.dtype, device=found.xx.device)
    safe = torch.where((found.counts <= 0)[..., None, None], eye, found.xx)
    if is_isotropic(analysers.beta):
        A = safe + (alpha / analysers.beta[..., :1]).diag_embed()
        return torch.cholesky_solve(found.yx.mT, torch.linalg.cholesky_ex(A)[0]).mT
    ridge = (alpha.unsqueeze(-2) / analysers.beta.unsqueeze(-1)).diag_embed()
    tril = torch.linalg.cholesky_ex(safe[:, :, None] + ridge)[0]
    return torch.cholesky_solve(found.yx.unsqueeze(-1), tril).squeeze(-1)


def is_isotropic(beta: Tensor) -> bool:
    """Whether all outputs of each component have the same noise precision."""
    return bool((beta == beta[..., :1]).all())


def residual_squares(found: LatentMoments, W: Tensor) -> Tensor:
    """``sum_n r <(y - W x - mu)^2>`` of each output, shape ``(R, K, m)``; Husmeier (2000), below eq. 3.26."""
    fitted = W @ found.xx
    return (found.scatter + (W * (fitted - 2.0 * found.yx)).sum(-1)).clamp(min=0.0)  # rounding may go below


def log_prior(analysers: FactorAnalysers) -> Tensor:
    """``log p(W | alpha)`` of the columns that are not pruned, nats, shape ``(R,)``."""
    norm = analysers.W.shape[-2] * (analysers.alpha / math.tau).log()
    each = 0.5 * (norm - analysers.alpha * analysers.W.square().sum(-2))
    return torch.where(analysers.on, each, 0.0).sum((-2, -1))


@dataclass(frozen=True, eq=False)
class LatentPosterior:
    """The posterior of the latent coordinates, given each component."""

    log_joint: Tensor  # (R, N, K)          log p(observed part of y_n, k)
    mean: Tensor  # (R, N, K, q)
    covariance: Tensor  # (R, N, K, q, q)


def latent(Y: Tensor, analysers: FactorAnalysers) -> LatentPosterior:
    """Latent coordinates of data ``(N, m)``, nan where missing; Husmeier (2000), eqs. 3.17 and 3.18."""
    if has_gaps(Y):
        parts = [vars(latent_given_seen(block, analysers)) for block in _latent_blocks(Y, analysers)]
        return LatentPosterior(*(torch.cat([part[name] for part in parts], 1) for name in parts[0]))
    shift = (analysers.whitener @ analysers.mu.unsqueeze(-1)).squeeze(-1)
    z = torch.einsum("rkqm,nm->rnkq", analysers.whitener, Y) - shift.unsqueeze(1)
    x = torch.linalg.solve_triangular(analysers.tril.mT.unsqueeze(1), z.unsqueeze(-1), upper=True).squeeze(-1)
    covariance = torch.cholesky_inverse(analysers.tril).unsqueeze(1).expand(-1, len(Y), -1, -1, -1)
    return LatentPosterior(log_joint(Y, analysers), x, covariance)


def _latent_blocks(Y: Tensor, analysers: FactorAnalysers) -> tuple[Tensor, ...]:
    R, K, m, q = analysers.W.shape
    return Y.split(max(1, LATENT_BLOCK // (R * K * max(m, q * q))))


def latent_given_seen(Y: Tensor, analysers: FactorAnalysers) -> LatentPosterior:
    """:func:`latent` with a factor for each datum, of those values that are not nan."""
    seen = ~Y.isnan()
    on, pull = seen.to(analysers.W), analysers.beta.unsqueeze(-1) * analysers.W
    pairs = pull.unsqueeze(-1) * analysers.W.unsqueeze(-2)
    G = torch.einsum("ni,rkiab->rnkab", on, pairs) + torch.eye(analysers.W.shape[-1]).to(analysers.W)
    tril = torch.linalg.cholesky(G)
    away = torch.where(seen, Y, 0.0).unsqueeze(1) - analysers.mu.unsqueeze(1) * on.unsqueeze(1)  # (R, n, K, m)
    force = torch.einsum("rnki,rkia->rnka", away, pull).unsqueeze(-1)
    mean = torch.cholesky_solve(force, tril)
    log_det = 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1) - on @ analysers.beta.log().mT
    quadratic = (analysers.beta.unsqueeze(1) * away.square()).sum(-1) - (force * mean).sum((-2, -1))
    log_norm = on.sum(-1, keepdim=True) * math.log(math.tau)
    table = analysers.log_mixing.unsqueeze(1) - 0.5 * (log_norm + log_det + quadratic)
    return LatentPosterior(table, mean.squeeze(-1), torch.cholesky_inverse(tril))


def _expected_sums(Y: Tensor, analysers: FactorAnalysers) -> FactorStatistics:
    """The sums of :func:`e_step`, expected given what was seen."""
    found, seen = latent_given_seen(Y, analysers), ~Y.isnan()
    log_norm = found.log_joint.logsumexp(-1, keepdim=True)
    resp = (found.log_joint - log_norm).exp()
    filled = torch.einsum("rkia,rnka->rnki", analysers.W, found.mean) + analysers.mu.unsqueeze(1)
    filled = torch.where(seen.unsqueeze(1), Y.unsqueeze(1), filled)
    gone = (~seen).to(Y)
    spread = torch.einsum("ni,rnkab->rkiab", gone, resp[..., None, None] * found.covariance)
    within = torch.einsum("rkia,rkiab->rkib", analysers.W, spread)
    weighted = resp.unsqueeze(-1) * filled
    left = (gone.mT @ resp).mT / analysers.beta + (within * analysers.W).sum(-1)
    z = torch.einsum("rkai,rnki->rnka", analysers.whitener, filled - analysers.mu.unsqueeze(1))
    cross = torch.einsum("rnki,rnka->rkia", weighted, z) + within @ analysers.tril
    squares = (weighted * filled).sum(1) + left
    return FactorStatistics(resp.sum(1), weighted.sum(1), squares, cross, log_norm.sum((1, 2)))
