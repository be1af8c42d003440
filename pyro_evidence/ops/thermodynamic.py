"""Thermodynamic integration: a ladder of powers of the likelihood, and the integral over it."""

import torch
from torch import Tensor


def powers(num_temperatures: int, exponent: float = 5.0) -> Tensor:
    """``(k / K)^5`` for ``k = 0 ... K``, shape ``(K + 1,)``: dense where the mean rises steeply.

    Friel and Pettitt (2008), section 2.2.
    """
    return (torch.arange(num_temperatures + 1, dtype=torch.float64) / num_temperatures) ** exponent


def corrected_trapezoid(power: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Integral of the mean, whose slope in the power is the variance, shape ``(...)``.

    The trapezium rule minus ``h^2 / 12`` times the rise of the slope.  Friel, Hurn and Wyse (2014), eq. 14.

    :param power: shape ``(K + 1,)``, rising.
    :param mean: mean log likelihood at each power, nats, shape ``(K + 1, ...)``.
    :param variance: its variance, shape ``(K + 1, ...)``.
    """
    step = power.diff().reshape(-1, *[1] * (mean.dim() - 1))
    area = 0.5 * step * (mean[1:] + mean[:-1])
    return (area - step.square() / 12.0 * variance.diff(dim=0)).sum(0)


def pooled_moments(log_weight: Tensor, mean: Tensor, variance: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over sets of groups, each group by its evidence, ``(K + 1, J)`` each.

    A group's evidence times its mean is unbiased, Del Moral (2004), theorem 7.4.2, where its mean alone is low by one
    over its particles; so the ratio of the sums over the groups errs by one over all particles only.

    :param log_weight: log evidence of each group at each power, shape ``(K + 1, G)``.
    :param mean: mean log likelihood in each group, shape ``(K + 1, G)``.
    :param variance: its variance in each group, shape ``(K + 1, G)``.
    :param kept: the groups of each set, bool, shape ``(J, G)``.
    """
    share = log_weight.unsqueeze(1).where(kept, -torch.inf).softmax(-1)
    first = (share * mean.unsqueeze(1)).sum(-1)
    between = (share * (mean.unsqueeze(1) - first.unsqueeze(-1)).square()).sum(-1)
    return first, (share * variance.unsqueeze(1)).sum(-1) + between


def jackknife(whole: Tensor, without: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate less its bias of first order, and its standard error, ``()`` each.  Efron (1982), chapters 2 and 3.

    :param whole: from all ``G`` groups, shape ``()``.
    :param without: from all but one, shape ``(G,)``.
    """
    num = len(without)
    value = num * whole - (num - 1) * without.mean()
    return value, ((num - 1) / num * (without - without.mean()).square().sum()).sqrt()
