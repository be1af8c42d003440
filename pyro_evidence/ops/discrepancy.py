"""How far apart two sets of draws are, in standard deviations of the second."""

import torch
from torch import Tensor

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


def mean_difference(a: Tensor, b: Tensor) -> Tensor:
    """Difference of the means of rows ``(S, D)``, ``(T, D)``, in standard deviations of ``b``, ``(D,)``."""
    return (a.mean(0) - b.mean(0)) / b.std(0)


def sd_ratio(a: Tensor, b: Tensor) -> Tensor:
    """Standard deviations of ``a`` over those of ``b``, shape ``(D,)``."""
    return a.std(0) / b.std(0)


def quantile_error(a: Tensor, b: Tensor) -> Tensor:
    """Mean absolute difference of five quantiles, in standard deviations of ``b``, shape ``(D,)``."""
    levels = torch.tensor(LEVELS).to(a)
    return (a.quantile(levels, 0) - b.quantile(levels, 0)).abs().mean(0) / b.std(0)


def sliced_wasserstein(a: Tensor, b: Tensor, directions: Tensor) -> Tensor:
    """Mean first Wasserstein distance of the projections, draws standardised by ``b``, shape ``()``.

    Bonneel, Rabin, Peyre and Pfister (2015), eq. 11, with distances instead of their squares.

    :param directions: unit rows ``(L, D)``.
    """
    mean, sd = b.mean(0), b.std(0)
    levels = (torch.arange(200).to(a) + 0.5) / 200
    p = (((a - mean) / sd) @ directions.mT).quantile(levels, 0)
    q = (((b - mean) / sd) @ directions.mT).quantile(levels, 0)
    return (p - q).abs().mean()
