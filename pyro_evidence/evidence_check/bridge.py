"""The evidence by bridge sampling: draws of NUTS against draws of a normal proposal."""

import math
from dataclasses import dataclass, replace

import torch
from pyro.ops.stats import effective_sample_size
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.evidence_check.target import (
    Draws,
    EvidenceEstimate,
    Source,
    check_halves,
    moment_normal,
    rounding,
    sentences,
    target_of,
    undefined,
)
from pyro_evidence.fitting.process_state import within_memory
from pyro_evidence.settings import seeded


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


@within_memory
def bridge_sampling(target: Source, draws: Draws, *, seed: int | None = 0) -> EvidenceEstimate:
    """Log evidence by the optimal bridge between posterior draws and a normal, Meng and Wong (1996), eq. 4.1.

    The normal has the mean and covariance of the first half of each chain; the bridge is built from the
    second half and as many draws of the normal.  The standard error is the root of the relative mean squared
    error of Frühwirth-Schnatter (2004), eq. 19, the posterior draws counted at their effective number, so
    that a sticky chain has a large one.  It cannot know of modes the chains never visited.

    :param target: the posterior whose model the chains ran on, or a ``LogJoint``, at its starting
        hyperparameters.
    :param draws: ``MCMC(NUTS(posterior.model), ...).get_samples(group_by_chain=True)``.
    :param seed: of the draws from the normal.
    :return: diagnostics ``effective_sample_size`` (of the second halves), ``relative_mean_square`` and
        ``num_steps``.
    :raises BadInput: for draws of another model, fewer than four per dimension, or constant ones.
    """
    density = target_of(target)
    chains = density.coordinates(draws)
    first, second = check_halves(density, chains)
    proposal = moment_normal(first.flatten(0, 1))
    x = second.flatten(0, 1)
    log_ratio = density.log_joint(x) - proposal.log_prob(x)
    if not bool(torch.isfinite(log_ratio).all()):
        raise BadInput(
            f"the log joint density is not finite at {int((~torch.isfinite(log_ratio)).sum())} of {len(x)} of the "
            "draws; they cannot be draws of this posterior. Pass draws made with the same data and hyperparameters: "
            "those of NUTS(posterior.model)."
        )
    share = effective_draws(log_ratio.reshape(second.shape[:2])) / len(log_ratio)
    white = torch.randn(len(log_ratio), density.size, generator=seeded(seed), dtype=torch.float64)
    new = proposal.unwhiten(white.to(log_ratio))
    log_joint = density.log_joint_or_nan(new)
    above = torch.where(log_joint.isnan(), -math.inf, log_joint) - proposal.log_prob(new)
    found = _estimate(bridge(log_ratio, above, share / (1.0 + share)), chains.shape[:2], second.shape[:2])
    return replace(found, doubts=(*found.doubts, *undefined(log_joint, "the bridge's normal")))


def effective_draws(chains: Tensor) -> float:
    """How many independent draws chains ``(C, T)`` of one number are worth, never more than ``C T``.

    Geyer (1992), initial monotone sequence, with the variance between chains.
    """
    if float(chains.std()) <= 1e-12 * (1.0 + float(chains.abs().max())):  # constant to rounding: no error to speak of
        return float(chains.numel())
    found = float(effective_sample_size(chains, chain_dim=0, sample_dim=1))
    return min(max(found, 1.0), float(chains.numel())) if math.isfinite(found) else 1.0


def _estimate(found: Bridge, draws: torch.Size, used: torch.Size) -> EvidenceEstimate:
    effective = effective_draws((found.below - found.below.max()).exp().reshape(used))
    value, square = float(found.log_evidence), float(found.relative_mean_square(effective))
    numbers = {"effective_sample_size": effective, "relative_mean_square": square, "num_steps": float(found.num_steps)}
    doubts = sentences(
        (
            not found.converged,
            "the bridge iteration did not settle: draws and proposal hardly overlap. Run the chains longer, "
            "or use tempered_smc.",
        ),
        (
            effective < 50.0,
            f"the chains are worth only {effective:.0f} independent draws; expected at least 50. Run them "
            "longer, or reparametrise.",
        ),
        (
            square > 0.25,
            f"the relative error of the evidence is {math.sqrt(square):.0%}; expected below 50 %. The "
            "posterior is far from a normal. Take more draws, or tempered_smc.",
        ),
    )
    error = math.hypot(math.sqrt(square), rounding(value))
    return EvidenceEstimate(f"bridge sampling, {draws[0]} x {draws[1]} draws", value, error, numbers, doubts)
