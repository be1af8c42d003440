"""What a mixture of probabilistic PCA says of data with gaps: missing values are integrated out, datum by datum."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.ops.mppca import Analysers

BLOCK = 2**20  # numbers in one block of latent precisions


@dataclass(frozen=True)
class Latent:
    """The posterior of the latent coordinates, given each component."""

    log_joint: Tensor  # (N, K)          log p(observed part of y_n, k)
    mean: Tensor  # (N, K, q)
    covariance: Tensor  # (N, K, q, q)


def latent(Y: Tensor, at: Analysers) -> Latent:
    """First row of parameters; entries of ``Y`` ``(N, m)`` that are nan are missing."""
    K, q = at.W.shape[1], at.W.shape[-1]
    rows = max(1, BLOCK // (K * max(1, q * q)))
    parts = [_latent(block, at) for block in Y.split(rows)]
    return Latent(*(torch.cat([getattr(p, n) for p in parts]) for n in ("log_joint", "mean", "covariance")))


def _latent(Y: Tensor, at: Analysers) -> Latent:
    W, beta, mu = at.W[0], at.beta[0], at.mu[0]
    seen = ~Y.isnan()
    on = seen.to(W)
    pairs = W.unsqueeze(-1) * W.unsqueeze(-2)
    G = torch.einsum("ni,ki,kiab->nkab", on, beta, pairs) + torch.eye(W.shape[-1]).to(W)
    tril = torch.linalg.cholesky(G)
    away = torch.where(seen, Y, 0.0).unsqueeze(1) - mu * on.unsqueeze(1)
    pull = torch.einsum("nki,ki,kia->nka", away, beta, W).unsqueeze(-1)
    mean = torch.cholesky_solve(pull, tril)
    log_det = 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1) - on @ beta.log().mT
    quadratic = (beta * away.square()).sum(-1) - (pull * mean).sum((-2, -1))
    log_norm = on.sum(-1, keepdim=True) * math.log(math.tau)
    log_joint = at.log_mixing[0] - 0.5 * (log_norm + log_det + quadratic)
    return Latent(log_joint, mean.squeeze(-1), torch.cholesky_inverse(tril))
