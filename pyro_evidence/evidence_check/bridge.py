"""The evidence by bridge sampling from draws of NUTS."""

import math
from dataclasses import replace

import torch
from pyro.ops.stats import effective_sample_size
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.evidence_check.estimate import EvidenceEstimate, rounding
from pyro_evidence.evidence_check.target import Draws, Source, check_halves, target, undefined
from pyro_evidence.ops import bridge
from pyro_evidence.ops.proposal import moment_normal


def bridge_sampling(of: Source, draws: Draws, *, seed: int = 0) -> EvidenceEstimate:
    """Log evidence by the optimal bridge between posterior draws and a normal, Meng and Wong (1996), eq. 4.1.

    The normal has the mean and covariance of the first half of each chain; the bridge is built from the
    second half and as many draws of the normal.  The standard error is the root of the relative mean squared
    error of Frühwirth-Schnatter (2004), eq. 19, the posterior draws counted at their effective number, so
    that a sticky chain has a large one.  It cannot know of modes the chains never visited.

    :param of: the posterior whose model the chains ran on, or a ``LogJoint``, at its starting
        hyperparameters.
    :param draws: ``MCMC(NUTS(posterior.model), ...).get_samples(group_by_chain=True)``.
    :param seed: of the draws from the normal.
    :return: diagnostics ``effective_sample_size`` (of the second halves), ``relative_mean_square`` and
        ``num_steps``.
    :raises BadInput: for draws of another model, fewer than four per dimension, or constant ones.
    """
    at = target(of)
    chains = at.coordinates(draws)
    first, second = check_halves(at, chains)
    proposal = moment_normal(first.flatten(0, 1))
    x = second.flatten(0, 1)
    log_ratio = at.log_joint(x) - proposal.log_prob(x)
    if not bool(torch.isfinite(log_ratio).all()):
        raise BadInput(
            f"the log joint density is not finite at {int((~torch.isfinite(log_ratio)).sum())} of {len(x)} of the "
            "draws; they cannot be draws of this posterior. Pass draws made with the same data and hyperparameters: "
            "those of NUTS(posterior.model)."
        )
    share = effective_draws(log_ratio.reshape(second.shape[:2])) / len(log_ratio)
    white = torch.randn(len(log_ratio), at.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    new = proposal.colour(white.to(log_ratio))
    log_joint = at.log_joint_or_nan(new)
    above = torch.where(log_joint.isnan(), -math.inf, log_joint) - proposal.log_prob(new)
    found = _estimate(bridge.bridge(log_ratio, above, share / (1.0 + share)), chains.shape[:2], second.shape[:2])
    return replace(found, doubts=(*found.doubts, *undefined(log_joint, "the bridge's normal")))


def effective_draws(chains: Tensor) -> float:
    """How many independent draws chains ``(C, T)`` of one number are worth, never more than ``C T``.

    Geyer (1992), initial monotone sequence, with the variance between chains.
    """
    if float(chains.std()) <= 1e-12 * (1.0 + float(chains.abs().max())):  # constant to rounding: no error to speak of
        return float(chains.numel())
    found = float(effective_sample_size(chains, chain_dim=0, sample_dim=1))
    return min(max(found, 1.0), float(chains.numel())) if math.isfinite(found) else 1.0


def _estimate(found: bridge.Bridge, draws: torch.Size, used: torch.Size) -> EvidenceEstimate:
    terms = (found.below - found.below.max()).exp().reshape(used)
    effective = effective_draws(terms)
    value, square = float(found.log_evidence), float(found.relative_mean_square(effective))
    numbers = {
        "effective_sample_size": effective,
        "relative_mean_square": square,
        "num_steps": float(found.num_steps),
    }
    error = math.hypot(math.sqrt(square), rounding(value))
    method = f"bridge sampling, {draws[0]} x {draws[1]} draws"
    return EvidenceEstimate(method, value, error, numbers, _doubts(found.converged, effective, square))


def _doubts(converged: bool, effective: float, square: float) -> tuple[str, ...]:
    letters = [
        (
            not converged,
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
    ]
    return tuple(text for wrong, text in letters if wrong)
