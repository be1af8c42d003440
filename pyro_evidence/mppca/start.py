"""Where EM for mixtures of probabilistic PCA begins: centres among the data, and loadings straight from covariances."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.data.ranks import Statistics
from pyro_evidence.mixture.updates import LARGEST_NOISE, SMALLEST
from pyro_evidence.mppca import expectation
from pyro_evidence.mppca.data import Observations
from pyro_evidence.mppca.expectation import FactorAnalysers
from pyro_evidence.numerics.derivatives import generic_directions
from pyro_evidence.numerics.linalg import fix_signs

DENSE = 512  # outputs up to which covariances are formed
PASSES = 4  # of subspace iteration above
LEAST = 1e-3  # variance of a column in units of the noise: one of exactly zero would stay so in EM


def spread_centres(Y: Tensor, uniform: Tensor) -> Tensor:
    """Data drawn one after the other in proportion to their squared distance from those drawn, ``(R, K, m)``.

    Arthur and Vassilvitskii (2007), k-means++.

    :param uniform: random numbers on (0, 1), shape ``(R, K)``.
    """
    squares = Y.square().sum(-1)
    nearest = torch.ones(len(uniform), len(Y)).to(Y)
    found: list[Tensor] = []
    for draw in uniform.unbind(-1):
        total = nearest.cumsum(-1)
        place = torch.searchsorted(total, (draw * total[:, -1]).unsqueeze(-1)).clamp(max=len(Y) - 1).squeeze(-1)
        centre = Y[place]
        away = (squares + centre.square().sum(-1, keepdim=True) - 2.0 * centre @ Y.mT).clamp(min=0.0)  # rounding
        nearest = torch.minimum(nearest, away) if found else away
        nearest = torch.where(nearest.sum(-1, keepdim=True) > 0, nearest, 1.0)  # all data drawn: any will do
        found.append(centre)
    return torch.stack(found, 1)


def direct(Y: Observations, analysers: FactorAnalysers, added: Tensor | float = 0.0) -> FactorAnalysers:
    """The maximum likelihood solution at the current responsibilities; Tipping and Bishop (1999), eqs. 8 and 9.

    Covariances are formed up to 512 outputs; above, their leading eigenvectors come from subspace iteration, to
    which ``m x m`` matrices are strangers.

    :param added: what a gamma prior on the noise precision adds to each component's sum of squares, per output.
    """
    R, K, m, q = analysers.W.shape
    if m <= DENSE:
        counts, mean, trace, S = _times_covariance(Y, analysers, None)
        values, vectors = torch.linalg.eigh(0.5 * (S + S.mT))
        vectors = fix_signs(vectors)
        values, vectors = values[..., m - q :].flip(-1), vectors[..., m - q :].flip(-1)  # (R, K, q) and (R, K, m, q)
    else:
        basis = torch.linalg.qr(generic_directions(R * K, m * q, analysers.W).reshape(R, K, m, q)).Q
        for _ in range(PASSES):
            counts, mean, trace, image = _times_covariance(Y, analysers, basis)
            basis = torch.linalg.qr(image).Q
        counts, mean, trace, image = _times_covariance(Y, analysers, basis)
        values, turn = torch.linalg.eigh(0.5 * (basis.mT @ image + image.mT @ basis))
        values, vectors = values.flip(-1), fix_signs(basis @ turn).flip(-1)
    rest = ((trace - values.sum(-1)) / (m - q)).clamp(min=0.0)  # rounding may leave a tiny negative
    weight = counts.clamp(min=SMALLEST)  # a component without data gets the largest noise there is: the data's variance
    v = (rest + added / weight).clamp(min=1.0 / LARGEST_NOISE, max=1.0)  # zero for data of low rank
    gain = torch.maximum(values - v.unsqueeze(-1), LEAST * v.unsqueeze(-1))
    W = vectors * gain.sqrt().unsqueeze(-2) * analysers.on.unsqueeze(-2)
    beta = v.reciprocal().unsqueeze(-1).expand(analysers.beta.shape)
    log_mixing = torch.where(analysers.active, (counts / counts.sum(-1, keepdim=True)).log(), -torch.inf)
    return replace(analysers, W=W, mu=mean, beta=beta, log_mixing=log_mixing)


@dataclass(frozen=True, eq=False)
class _Products(Statistics):
    """Products that a pass sums at some responsibilities; ``a + b`` are those of both parts."""

    counts: Tensor  # (R K,)
    sums: Tensor  # (R K, m)
    products: Tensor  # (m, R K d) of data, and their d products with a basis
    squares: Tensor  # (R K,)


def _image(Y: Tensor, analysers: FactorAnalysers, basis: Tensor | None) -> _Products:
    R, K, m, q = analysers.W.shape
    width = m if basis is None else q
    rows = max(expectation.SMALLEST_BLOCK, min(8 * expectation.BLOCK // (R * K * width), 4 * expectation.BLOCK // m))
    counts, sums, squares = analysers.W.new_zeros(R * K), analysers.W.new_zeros(R * K, m), analysers.W.new_zeros(R * K)
    cross = analysers.W.new_zeros(m, R * K * width)
    laid_out = None if basis is None else basis.permute(2, 0, 1, 3).reshape(m, -1)
    for block in Y.split(rows):
        resp = expectation.responsibilities(block, analysers).permute(1, 0, 2).reshape(len(block), R * K)
        counts, sums = counts + resp.sum(0), sums + resp.mT @ block
        squares = squares + resp.mT @ block.square().sum(-1)
        seen = block.unsqueeze(1) if laid_out is None else (block @ laid_out).reshape(len(block), R * K, q)
        cross += block.mT @ (seen * resp.unsqueeze(-1)).flatten(1)
    return _Products(counts, sums, cross, squares)


def _times_covariance(
    Y: Observations, analysers: FactorAnalysers, basis: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts, means, traces of the covariances, and the covariances times ``basis``, in one pass.

    :param basis: ``(R, K, m, q)``; None for the covariances themselves.
    """
    R, K, m, _ = analysers.W.shape
    found = Y.rows.total(lambda rows: _image(rows, analysers, basis))
    counts, sums = found.counts.reshape(R, K), found.sums.reshape(R, K, m)
    seen, weight = (counts > 0).unsqueeze(-1), counts.clamp(min=SMALLEST)  # no data: zero
    mean = torch.where(seen, sums / weight.unsqueeze(-1), analysers.mu)
    along = mean.unsqueeze(-2) if basis is None else mean.unsqueeze(-2) @ basis
    image = found.products.reshape(m, R, K, -1).permute(1, 2, 0, 3) / weight[..., None, None]
    image = image - seen.unsqueeze(-1) * mean.unsqueeze(-1) * along
    trace = found.squares.reshape(R, K) / weight - (seen * mean.square()).sum(-1)
    return counts, mean, trace, image
