"""Steps of tempered sequential Monte Carlo: ``G`` independent groups of ``P`` particles of size ``D``."""

from collections.abc import Callable

import torch
from torch import Tensor

ValueAndGradient = Callable[[Tensor], tuple[Tensor, Tensor]]  # (R, D) -> (R,), (R, D)


def next_temperature(log_ratio: Tensor, before: float, share: float = 0.5) -> float:
    """The inverse temperature at which the pooled effective sample size has fallen to ``share``; at most 1.

    :param log_ratio: ``log p(u, D) - log reference(u)`` of all particles, any shape.
    """
    if _effective_share((1.0 - before) * log_ratio) >= share:
        return 1.0
    low, high = before, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _effective_share((middle - before) * log_ratio) >= share else (low, middle)
    return high


def _effective_share(log_weights: Tensor) -> float:
    w = (log_weights - log_weights.max()).exp()
    return float(w.sum().square() / w.square().sum() / w.numel())


def resample(log_weights: Tensor, uniform: Tensor) -> Tensor:
    """Systematic resampling inside each group: index of each particle's parent, shape ``(G, P)``.

    :param log_weights: shape ``(G, P)``.
    :param uniform: one number in ``[0, 1)`` for each group, shape ``(G, 1)``.
    """
    num = log_weights.shape[-1]
    cumulative = log_weights.softmax(-1).cumsum(-1)
    positions = (torch.arange(num).to(log_weights) + uniform) / num
    return torch.searchsorted(cumulative, positions).clamp(max=num - 1)


def leapfrog(
    density: ValueAndGradient,
    start: tuple[Tensor, Tensor, Tensor],
    scale_tril: Tensor,
    step: Tensor,
    num_steps: int,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Hamiltonian dynamics with the mass matrix of covariance ``scale_tril scale_tril'``.

    :param start: positions ``(R, D)``, log densities ``(R,)``, gradients ``(R, D)`` there.
    :param step: step sizes ``(R, 1)``; its shape also carries the momentum: pass ``(R, 1 + D)``, size first.
    :return: the same three at the end, and the change of the log joint density of position and momentum,
        ``(R,)``.
    """
    u, value, gradient = start
    size, momentum = step[:, :1], step[:, 1:]
    before = value - 0.5 * momentum.square().sum(-1)
    for _ in range(num_steps):
        momentum = momentum + 0.5 * size * (gradient @ scale_tril)
        u = u + size * (momentum @ scale_tril.mT)
        value, gradient = density(u)
        momentum = momentum + 0.5 * size * (gradient @ scale_tril)
    after = value - 0.5 * momentum.square().sum(-1)
    return (u, value, gradient), after - before
