"""Distance between two sets of draws, in standard deviations of the second."""

import math

import torch
from torch import Tensor

from pyro_evidence.display import CENTRAL

QUARTILES = (0.25, 0.75)  # ends of the half in the middle
LEVELS = (0.5, *QUARTILES, *CENTRAL)  # the middle, its half and nine tenths: what tables of posteriors report
NUM_LEVELS = 200  # at which two projections are compared


def mean_difference(a: Tensor, b: Tensor) -> Tensor:
    """Difference of the means of rows ``(S, D)``, ``(T, D)``, in standard deviations of ``b``, ``(D,)``."""
    return (a.mean(0) - b.mean(0)) / b.std(0)


def sd_ratio(a: Tensor, b: Tensor) -> Tensor:
    """Standard deviations of ``a`` over those of ``b``, shape ``(D,)``."""
    return a.std(0) / b.std(0)


def quantiles(x: Tensor, levels: Tensor) -> Tensor:
    """Quantiles of each column of rows ``(S, D)`` by linear interpolation, ``(Q, D)``; any number of rows."""
    return _interpolated(x.sort(0).values, levels)


def _interpolated(ordered: Tensor, levels: Tensor) -> Tensor:
    """Quantiles of columns that are in order already."""
    place = levels.to(ordered) * (len(ordered) - 1)
    low = place.floor().long()
    share = (place - low).unsqueeze(-1)
    return ordered[low] * (1.0 - share) + ordered[(low + 1).clamp(max=len(ordered) - 1)] * share


def quantile_error(a: Tensor, b: Tensor) -> Tensor:
    """Mean absolute difference of five quantiles, in standard deviations of ``b``, shape ``(D,)``."""
    levels = torch.tensor(LEVELS)
    return (quantiles(a, levels) - quantiles(b, levels)).abs().mean(0) / b.std(0)


def sliced_wasserstein(a: Tensor, b: Tensor, directions: Tensor) -> Tensor:
    """Mean first Wasserstein distance of the projections, draws standardised by ``b``, shape ``()``.

    Bonneel, Rabin, Peyre and Pfister (2015), eq. 11, with distances instead of their squares.

    :param directions: unit rows ``(L, D)``.
    """
    p, q = _projected(a, b, directions)
    return _distances(p.sort(0).values, q.sort(0).values).mean()


def sliced_wasserstein_error(a: Tensor, b: Tensor, directions: Tensor, num_groups: int = 10) -> Tensor:
    """Standard error of :func:`sliced_wasserstein`, shape ``()``: of the draws and of the directions.

    Delete-a-group jackknife over stretches of neighbouring draws, so that autocorrelation counts as long as it is
    shorter than a stretch (Efron and Stein 1981); the spread over directions is added.  It does not know of the
    distance's bias: two samples of one distribution are never at distance 0.

    :return: nan for fewer draws than two in each stretch.
    """
    if min(len(a), len(b)) < 2 * num_groups:
        return a.new_tensor(math.nan)
    p, q = (x.sort(0) for x in _projected(a, b, directions))
    without = []  # columns in order without one stretch of draws each, for every stretch; no second sort
    for ordered in (p, q):
        sizes = torch.tensor([len(part) for part in torch.arange(len(ordered.values)).tensor_split(num_groups)])
        ends, rows = sizes.cumsum(0).to(ordered.indices.device), ordered.values.mT
        group = torch.bucketize(ordered.indices.mT.contiguous(), ends, right=True)
        without.append([rows[group != g].reshape(len(rows), -1).mT for g in range(num_groups)])
    left_out = torch.stack([_distances(x, y).mean() for x, y in zip(*without, strict=True)])
    jackknife = (left_out - left_out.mean()).square().sum() * (num_groups - 1) / num_groups
    each = _distances(p.values, q.values)
    between = each.var() / len(each) if directions.shape[1] > 1 else torch.zeros_like(jackknife)
    return (jackknife + between).sqrt()


def _projected(a: Tensor, b: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    mean, sd = b.mean(0), b.std(0)
    return ((a - mean) / sd) @ directions.mT, ((b - mean) / sd) @ directions.mT


def _distances(p: Tensor, q: Tensor) -> Tensor:
    """First Wasserstein distance of each column of ``(S, L)`` and ``(T, L)``, columns in order, shape ``(L,)``."""
    levels = (torch.arange(NUM_LEVELS, dtype=torch.float64) + 0.5) / NUM_LEVELS
    return (_interpolated(p, levels) - _interpolated(q, levels)).abs().mean(0)


def gaussian_divergence(a: Tensor, b: Tensor) -> Tensor:
    """Symmetric Kullback-Leibler divergence of the normals fitted to each pair of columns, nats, ``(D, D)``.

    The diagonal is 0.  Rows ``(S, D)`` and ``(T, D)``; which pair of coordinates differs most.
    """
    sd = b.std(0)
    centre = (a.mean(0) - b.mean(0)) / sd
    A, B = (torch.cov((x / sd).mT).reshape(len(sd), len(sd)) for x in (a, b))
    first, second = _blocks(A), _blocks(B)
    shift = torch.stack([centre.unsqueeze(1).expand(-1, len(sd)), centre.expand(len(sd), -1)], -1).unsqueeze(-1)
    inverse_a, inverse_b = torch.linalg.pinv(first), torch.linalg.pinv(second)
    trace = (inverse_a @ second + inverse_b @ first).diagonal(dim1=-2, dim2=-1).sum(-1) - 4.0
    away = (shift.mT @ (inverse_a + inverse_b) @ shift)[..., 0, 0]
    return (0.5 * (trace + away)).fill_diagonal_(0.0)


def _blocks(A: Tensor) -> Tensor:
    """The covariance of each pair of columns, ``(D, D, 2, 2)``."""
    variance = A.diagonal()
    rows = torch.stack([variance.unsqueeze(1).expand_as(A), A], -1), torch.stack([A, variance.expand_as(A)], -1)
    return torch.stack(rows, -2)
