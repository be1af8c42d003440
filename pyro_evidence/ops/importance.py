"""The evidence by importance sampling, from log weights."""

import math

import torch
from torch import Tensor


def log_mean(log_weights: Tensor) -> Tensor:
    """``log mean exp`` of log weights ``(S,)``: the importance-sampled log evidence in nats, shape ``()``."""
    return log_weights.logsumexp(0) - math.log(len(log_weights))


def standard_error(log_weights: Tensor) -> Tensor:
    """Standard error of :func:`log_mean` in nats, by the delta method, shape ``()``."""
    weights = (log_weights - log_weights.max()).exp()
    return weights.std() / (weights.mean() * math.sqrt(len(weights)))


def effective_sample_size(log_weights: Tensor) -> Tensor:
    """Kish's effective number of independent draws, between 1 and ``S``, shape ``()``."""
    weights = (log_weights - log_weights.max()).exp()
    return weights.sum().square() / weights.square().sum()


def tail(log_weights: Tensor) -> Tensor:
    """Excesses of the largest ratios over their threshold, for the generalised Pareto fit of PSIS.

    The largest ``min(S/5, 3 sqrt S)`` of them; Vehtari, Simpson, Gelman, Yao and Gabry (2024), section 2.
    """
    num_tail = math.ceil(min(0.2 * len(log_weights), 3.0 * math.sqrt(len(log_weights))))
    ordered = (log_weights - log_weights.max()).sort().values.exp()
    excess = ordered[-num_tail:] - ordered[-num_tail - 1]
    return excess[excess > torch.finfo(excess.dtype).tiny]
