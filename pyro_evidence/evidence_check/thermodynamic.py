"""The evidence by thermodynamic integration: the mean log likelihood under its own powers, integrated."""

import math

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.evidence_check.smc import (
    NUM_GROUPS,
    Particles,
    after_moves,
    doubts_of_particles,
    prior_particles,
    reweighed,
)
from pyro_evidence.evidence_check.target import EvidenceEstimate, Source, estimated
from pyro_evidence.fitting.process_state import entry_point, without_validation
from pyro_evidence.numerics.batched import along


def powers(num_temperatures: int) -> Tensor:
    """``(k / K)^5`` for ``k = 0 ... K``, shape ``(K + 1,)``: dense where the mean rises steeply.

    Friel and Pettitt (2008), section 2.2.
    """
    return (torch.arange(num_temperatures + 1, dtype=torch.float64) / num_temperatures) ** 5


def corrected_trapezoid(power: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Integral of the mean, whose slope in the power is the variance, shape ``(...)``.

    The trapezium rule minus ``h^2 / 12`` times the rise of the slope.  Friel, Hurn and Wyse (2014), eq. 14.

    :param power: shape ``(K + 1,)``, rising.
    :param mean: mean log likelihood at each power, nats, shape ``(K + 1, ...)``.
    :param variance: its variance, shape ``(K + 1, ...)``.
    """
    step = along(power.diff(), mean)
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


FEWEST = NUM_GROUPS**2  # particles, 16 in each group, below which their resampling biases the integral


@entry_point
def thermodynamic_integration(
    target: Source, *, num_temperatures: int = 40, num_particles: int = 512, num_moves: int = 3, seed: int | None = 0
) -> EvidenceEstimate:
    """Log evidence as the integral over ``b`` from 0 to 1 of the mean log likelihood under ``p(w) p(D | w)^b``.

    Particles walk from the prior to the posterior on the ladder ``b = (k / K)^5`` of Friel and Pettitt (2008),
    resampled and moved at each rung, and the integral is the trapezium rule corrected by the variances at its
    ends, Friel, Hurn and Wyse (2014), eq. 14.  Sixteen groups of particles are pooled in proportion to their own
    evidences, without which every mean is low by one over the particles of a group; value and standard error are
    the jackknife's over the groups, with the error of the ladder, read off every other rung, added.  Slow.

    :param target: a posterior, at its hyperparameters, or a ``LogJoint``, at its starting ones; proper prior needed.
    :param num_temperatures: rungs above the prior, an even number.
    :param num_particles: in all groups together.
    :param num_moves: Hamiltonian moves, of five leapfrog steps each, at every rung.
    :param seed: of everything; the caller's random state is not touched.
    :return: diagnostics ``ladder_error`` (nats) and ``acceptance`` (the smallest).
    :raises BadInput: as :func:`tempered_smc`, for an odd number of rungs, and where the mean log likelihood under
        the prior is not finite.
    """
    if num_temperatures < 4 or num_temperatures % 2 or num_moves < 1 or num_particles < FEWEST:
        raise BadInput(
            f"num_temperatures={num_temperatures}, num_moves={num_moves}, num_particles={num_particles}; expected an "
            f"even number of at least 4, at least one move, and at least {FEWEST} particles."
        )
    ladder = powers(num_temperatures)
    with without_validation():
        swarm = prior_particles(target, num_particles, seed)
        prior = swarm.places.log_likelihood
        if not bool(torch.isfinite(prior).all()):
            raise BadInput(
                f"the log likelihood is not finite at {int((~torch.isfinite(prior)).sum())} of {len(prior)} draws from "
                "the prior, so its mean there is no number; use tempered_smc, which needs none."
            )
        rungs = [_moments(swarm, [prior])]
        for power in ladder[1:].tolist():
            swarm, values = after_moves(reweighed(swarm, power), num_moves)
            rungs.append(_moments(swarm, values))
    log_weight, means, variances = torch.stack(rungs, 1)
    kept = torch.cat([torch.ones(1, NUM_GROUPS, dtype=torch.bool), ~torch.eye(NUM_GROUPS, dtype=torch.bool)])
    mean, variance = pooled_moments(log_weight, means, variances, kept)
    integrals = corrected_trapezoid(ladder, mean, variance)
    coarse = corrected_trapezoid(ladder[::2], mean[::2, 0], variance[::2, 0])
    gap = abs(float(coarse - integrals[0])) / 15.0  # the rule is of fourth order
    value, spread = jackknife(integrals[0], integrals[1:])
    error = math.hypot(float(spread), gap)
    return estimated(
        f"thermodynamic integration, {num_temperatures} powers, {len(swarm.places.x)} particles",
        value,
        error,
        {"ladder_error": gap, "acceptance": min(swarm.acceptance)},
        (gap > 0.1, f"every other power alone would move the integral ({gap:.2f} nats); raise num_temperatures."),
        *doubts_of_particles(swarm, error),
    )


def _moments(swarm: Particles, values: list[Tensor]) -> Tensor:
    """Log evidence of each group so far, and mean and variance of its log likelihoods there, ``(3, G)``."""
    rows = torch.stack(values, -1).reshape(NUM_GROUPS, -1)
    return torch.stack([swarm.log_evidences, rows.mean(-1), rows.var(-1, correction=0)]).cpu()
