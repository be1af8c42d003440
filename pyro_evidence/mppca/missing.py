r"""Mixtures of probabilistic PCA and data with gaps: missing values are integrated out, datum by datum.

With :math:`G_n = I + W^\top \Lambda_n W`, the precisions of what is missing in datum n set to zero, the missing values
have covariance :math:`\Lambda^{-1} + W G_n^{-1} W^\top`, and with whitened coordinates z of the whole datum
:math:`W G_n^{-1} L`: the sums that an M-step needs of whole data have expectations in closed form.  Cost ``N m K q^2``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from pyro_evidence.mppca import expectation
from pyro_evidence.mppca.data import Observations, has_gaps
from pyro_evidence.mppca.expectation import FactorAnalysers, FactorStatistics

BLOCK = 2**20  # numbers in one block of latent precisions


@dataclass(frozen=True)
class LatentPosterior:
    """The posterior of the latent coordinates, given each component."""

    log_joint: Tensor  # (R, N, K)          log p(observed part of y_n, k)
    mean: Tensor  # (R, N, K, q)
    covariance: Tensor  # (R, N, K, q, q)


def latent(Y: Tensor, analysers: FactorAnalysers) -> LatentPosterior:
    """Latent coordinates, entries of ``Y`` ``(N, m)`` that are nan missing."""
    parts = [_latent(block, analysers) for block in _blocks(Y, analysers)]
    return LatentPosterior(*(torch.cat([getattr(p, n) for p in parts], 1) for n in ("log_joint", "mean", "covariance")))


def log_joint(Y: Tensor, analysers: FactorAnalysers) -> Tensor:
    """``log p(observed part of y_n, k)``, nats, shape ``(R, N, K)``."""
    return latent(Y, analysers).log_joint if has_gaps(Y) else expectation.log_joint(Y, analysers)


def e_step_of_all(Y: Observations, analysers: FactorAnalysers) -> FactorStatistics:
    """:func:`e_step` of all data, in one pass."""
    return Y.total(lambda rows: e_step(rows, analysers))


def e_step(Y: Tensor, analysers: FactorAnalysers) -> FactorStatistics:
    """The sums that the M-step needs; expected ones where data, shape ``(N, m)``, have gaps."""
    if not has_gaps(Y):
        return expectation.e_step(Y, analysers)
    return reduce(add, (_sums(block, analysers) for block in _blocks(Y, analysers)))


def _blocks(Y: Tensor, analysers: FactorAnalysers) -> Iterator[Tensor]:
    R, K, m, q = analysers.W.shape
    yield from Y.split(max(1, BLOCK // (R * K * max(m, q * q))))


def _latent(Y: Tensor, analysers: FactorAnalysers) -> LatentPosterior:
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


def _sums(Y: Tensor, analysers: FactorAnalysers) -> FactorStatistics:
    found, seen = _latent(Y, analysers), ~Y.isnan()
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
