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
