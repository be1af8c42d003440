"""The evidence by bridge sampling: draws of NUTS against draws of a normal proposal."""

import math

import torch
from pyro.ops.stats import effective_sample_size
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.evidence_check.target import (
    Doubt,
    Draws,
    EvidenceEstimate,
    Source,
    check_halves,
    estimated,
    rounding,
    target_of,
    undefined,
)
from pyro_evidence.fitting.process_state import entry_point
from pyro_evidence.laplace.tour import NormalMixture
from pyro_evidence.numerics import importance
from pyro_evidence.precision.dense import Dense
from pyro_evidence.settings import seeded

FEWEST_EFFECTIVE = 50  # draws: their number is known to a fifth then, and the error of the evidence with it


@entry_point
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
    rows = first.flatten(0, 1)
    precision = torch.linalg.inv(torch.cov(rows.mT).reshape(density.size, density.size))
    tril = torch.linalg.cholesky(0.5 * (precision + precision.mT))
    active = torch.ones(density.size, dtype=torch.bool, device=rows.device)
    proposal = NormalMixture(rows.new_zeros(1), rows.mean(0).unsqueeze(0), (Dense(tril.unsqueeze(0)),), active)
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
    value, (over, under), num_steps = importance.bridge(log_ratio, above, share / (1.0 + share))
    below_error, effective = chain_error(under.reshape(second.shape[:2]))
    square = float(importance.standard_error(over).square()) + below_error**2
    return estimated(
        f"bridge sampling, {chains.shape[0]} x {chains.shape[1]} draws",
        value,
        math.sqrt(square),
        {"effective_sample_size": effective, "relative_mean_square": square, "num_steps": float(num_steps)},
        (
            num_steps == importance.MOST_STEPS,
            "the bridge iteration did not settle: draws and proposal hardly overlap. Run the chains longer, "
            "or use tempered_smc.",
        ),
        few_draws(effective),
        (
            math.sqrt(square) > 0.5,
            f"the relative error of the evidence is {math.sqrt(square):.0%}; expected below 50 %. The "
            "posterior is far from a normal. Take more draws, or tempered_smc.",
        ),
        undefined(log_joint, "the bridge's normal"),
    )


def effective_draws(chains: Tensor) -> float:
    """Effective number of independent draws in chains ``(C, T)`` of one number, never more than ``C T``.

    Geyer (1992), initial monotone sequence, with the variance between chains.
    """
    if float(chains.std()) <= rounding(float(chains.abs().max())):  # constant to rounding: no error to speak of
        return float(chains.numel())
    found = float(effective_sample_size(chains, chain_dim=0, sample_dim=1))
    return min(max(found, 1.0), float(chains.numel())) if math.isfinite(found) else 1.0


def chain_error(log_terms: Tensor) -> tuple[float, float]:
    """Standard error of the log of the mean of chains ``(C, T)`` of terms, nats, and how many draws they are worth."""
    effective = effective_draws((log_terms - log_terms.max()).exp())
    independent = float(importance.standard_error(log_terms.flatten()))
    return independent * math.sqrt(log_terms.numel() / effective), effective


def few_draws(effective: float) -> Doubt:
    """The doubt of chains that are worth few draws, of which the effective number itself is a guess."""
    return (
        effective < FEWEST_EFFECTIVE,
        f"the chains are worth only {effective:.0f} independent draws; expected at least {FEWEST_EFFECTIVE}. Run them "
        "longer, or reparametrise.",
    )
