"""Pareto-smoothed importance sampling: the largest weights replaced by the quantiles of their fitted tail."""

import math

import torch
from torch import Tensor


def tail_size(num_samples: int) -> int:
    """Number of weights in the tail, ``min(S/5, 3 sqrt S)``.  Vehtari et al. (2024), section 2."""
    return int(min(0.2 * num_samples, 3.0 * math.sqrt(num_samples)))


def threshold(num_samples: int) -> float:
    """The largest k-hat at which ``num_samples`` draws are enough.  Vehtari et al. (2024), section 3.2.4."""
    return min(1.0 - 1.0 / math.log10(max(num_samples, 11)), 0.7)


def smooth(log_weights: Tensor, pareto_k: float, pareto_scale: float) -> Tensor:
    """Log weights whose tail is quantiles of a generalised Pareto distribution, order kept, shape ``(S,)``.

    Quantiles at ``(z - 1/2) / M``, never above the largest raw weight.  Vehtari et al. (2024), section 2.

    :param log_weights: shape ``(S,)``.
    :param pareto_k: shape of the tail of the weights divided by their largest.
    :param pareto_scale: its scale, in the same units.
    """
    num_tail = tail_size(len(log_weights))
    order = log_weights.argsort()
    cutoff = (log_weights[order[-num_tail - 1]] - log_weights.max()).exp()
    p = (torch.arange(num_tail).to(log_weights) + 0.5) / num_tail
    quantile = cutoff + pareto_scale * pareto_quantile(p, pareto_k)
    smoothed = quantile.log().clamp(max=0.0) + log_weights.max()
    return log_weights.scatter(0, order[-num_tail:], smoothed)


def pareto_quantile(p: Tensor, pareto_k: float) -> Tensor:
    """Quantile of the generalised Pareto distribution of scale 1: ``((1 - p)^-k - 1) / k``."""
    if pareto_k == 0.0:
        return -torch.log1p(-p)
    return torch.expm1(-pareto_k * torch.log1p(-p)) / pareto_k
