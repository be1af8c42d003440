"""The evidence by bridge sampling, from log densities of draws of a posterior and of a normal proposal."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bridge:
    """The fixed point of the bridge iteration and how well it is determined."""

    log_evidence: Tensor  # () nats
    above: Tensor  # (N2,) log of the terms averaged over proposal draws
    below: Tensor  # (N1,) log of the terms averaged over posterior draws
    num_steps: int
    converged: bool

    def relative_mean_square(self, effective: float) -> Tensor:
        """Squared coefficient of variation of the evidence itself, shape ``()``.

        Frühwirth-Schnatter (2004), eq. 19, with ``effective`` independent draws worth of ``below``.
        """
        return relative_variance(self.above) / len(self.above) + relative_variance(self.below) / effective


def log_bridge(log_ratio: Tensor, log_evidence: Tensor, posterior_share: float) -> Tensor:
    """``log [s1 p(u, D)/q(u) + s2 p(D)]``: the optimal bridge's denominator over ``q``, ``s1 + s2 = 1``.

    Meng and Wong (1996), eq. 3.5.  Shapes: ``log_ratio`` any.
    """
    return torch.logaddexp(log_ratio + math.log(posterior_share), log_evidence + math.log1p(-posterior_share))


def bridge_step(log_evidence: Tensor, posterior: Tensor, proposal: Tensor, posterior_share: float) -> Tensor:
    """One step of the iteration: log of the ratio of two means.  Meng and Wong (1996), eq. 4.1.

    :param posterior: ``log p(u, D) - log q(u)`` at posterior draws, shape ``(N1,)``.
    :param proposal: the same at draws from ``q``, shape ``(N2,)``.
    """
    above = (proposal - log_bridge(proposal, log_evidence, posterior_share)).logsumexp(0) - math.log(len(proposal))
    below = (-log_bridge(posterior, log_evidence, posterior_share)).logsumexp(0) - math.log(len(posterior))
    return above - below


def relative_variance(log_f: Tensor) -> Tensor:
    """``var f / mean(f)^2`` from ``log f``, shape ``()``."""
    f = (log_f - log_f.max()).exp()
    return f.var() / f.mean().square()


def bridge(posterior: Tensor, proposal: Tensor, posterior_share: float, *, num_steps: int = 1000) -> Bridge:
    """The fixed point of :func:`bridge_step`, from the median ratio of the posterior draws.

    :param posterior: log ratios at posterior draws, shape ``(N1,)``.
    :param proposal: log ratios at proposal draws, shape ``(N2,)``.
    :param posterior_share: the posterior's share of all independent draws; affects the variance only.
    """
    value, step, change = posterior.median(), 0, math.inf
    while step < num_steps and change > 1e-12 * (1.0 + abs(float(value))):
        after = bridge_step(value, posterior, proposal, posterior_share)
        value, change, step = after, abs(float(after - value)), step + 1
    above = proposal - log_bridge(proposal, value, posterior_share)
    below = -log_bridge(posterior, value, posterior_share)
    return Bridge(value, above, below, step, step < num_steps)
