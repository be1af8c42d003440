"""Laplace's log evidence with the numbers that come with it; the evidence by Pareto-smoothed importance sampling."""

import math

import torch
from torch import Tensor


def log_evidence(log_joint: Tensor, log_det_A: Tensor, num_weights: Tensor | int) -> Tensor:
    r"""Laplace's approximation to the log evidence, in nats, constants included, shape ``(...)``.

    .. math:: \log p(D) \approx \log p(D, \hat w) + \tfrac M2 \log 2\pi - \tfrac12 \log |A|

    Exact when the joint density is Gaussian in ``w``.  MacKay (1992), eq. 2.4; Bishop (2006), eq. 4.137.

    :param log_joint: ``log p(D, w)`` at its mode, shape ``(...)``.
    :param log_det_A: log determinant of the posterior precision ``A``, shape ``(...)``.
    :param num_weights: number ``M`` of integrated coordinates, pruned ones not counted.
    """
    return log_joint + 0.5 * num_weights * math.log(2.0 * math.pi) - 0.5 * log_det_A


def well_determined(precision: Tensor, variance: Tensor) -> Tensor:
    r"""How far the data determine each coordinate, :math:`\gamma_i = 1 - \alpha_i \Sigma_{ii}`, shape ``(..., M)``.

    Between 0 and 1 for a log-concave likelihood.  MacKay (1992), eq. 4.9; Bishop (2006), eq. 7.89.

    :param precision: prior precision of each coordinate.
    :param variance: posterior variance of each coordinate.
    """
    return 1.0 - precision * variance


def reestimated_log_precision(gradient: Tensor, quadratic: Tensor) -> Tensor:
    r"""Change of the log precision in one round of MacKay's fixed point, exact for any likelihood.

    With :math:`g = \tfrac12 (n - d - q)` the total derivative of the log evidence in :math:`\log\alpha`,
    :math:`q = \alpha \sum_i (w_i - m_i)^2` and :math:`d` the total derivative of :math:`\log|A|`, the round
    :math:`\alpha \leftarrow (n - d) / \sum_i (w_i - m_i)^2` moves :math:`\log\alpha` by :math:`\log(1 + 2g/q)`.
    For a Gaussian likelihood :math:`n - d = \gamma`: Bishop (2006), eq. 7.87 and, for a noise precision, 7.88.
    Otherwise :math:`n - d` has the mode's dependence on the precision in it, which MacKay's rule leaves out and
    without which the fixed point is not where the log evidence is stationary.

    :param gradient: ``g``, nats per unit of the log precision.
    :param quadratic: ``q``, the group's squared deviations in units of its precision.
    :return: same shape; ``-inf`` or nan where ``n - d`` is not positive.
    """
    return (2.0 * gradient / quadratic).log1p()


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
