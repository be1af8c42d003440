"""The evidence by tempered sequential Monte Carlo from the prior: slow, and independent of any Gaussian."""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.evidence_check.target import (
    PER_COORDINATE,
    Doubt,
    EvidenceEstimate,
    Source,
    Target,
    estimated,
    target_of,
    undefined,
)
from pyro_evidence.fitting.process_state import entry_point, without_validation
from pyro_evidence.numerics import derivatives, importance
from pyro_evidence.numerics.batched import Batched
from pyro_evidence.program.predictors import log_prior_rows
from pyro_evidence.program.simulate import ROWS, latents_from_prior
from pyro_evidence.settings import check_count, seed_of, seeded

NUM_GROUPS = 16  # independent runs, whose spread is the standard error
LEAPFROGS = 5  # at most .15 pi sds each, where the leapfrog is stable below 2, Neal (2011)
ACCEPTED = 0.7  # share of the moves: .65 is best in many dimensions, Beskos et al. (2013), more in few
LONGEST = 0.5 * math.pi / LEAPFROGS  # a path, in the mean, of a quarter of the normal's orbit, which forgets its start


@dataclass(frozen=True, eq=False)
class DensityRows(Batched):
    """Where particles are, with the densities and their gradients there."""

    x: Tensor  # (G * P, D)
    log_prior: Tensor  # (G * P,)
    log_joint: Tensor  # (G * P,)
    prior_slope: Tensor  # (G * P, D)
    joint_slope: Tensor  # (G * P, D)

    @property
    def log_likelihood(self) -> Tensor:
        """Log likelihood of each particle, nats; -inf where the joint density is zero."""
        value = self.log_joint - self.log_prior
        return torch.where(value.isnan(), -torch.inf, value)

    def tempered(self, power: float) -> tuple[Tensor, Tensor]:
        """``log p(w) + power log p(D | w)`` and its gradient."""
        value = (1.0 - power) * self.log_prior + power * self.log_joint
        return value, (1.0 - power) * self.prior_slope + power * self.joint_slope


def places_at(target: Target, x: Tensor) -> DensityRows:
    """Densities at points ``(S, D)``."""
    parts = [derivatives.gradient(partial(log_prior_rows, target.joint), part, target.theta) for part in x.split(ROWS)]
    prior, prior_slope = (torch.cat(p) for p in zip(*parts, strict=True))
    joint, joint_slope = target.gradient(x)
    return DensityRows(x, prior, joint, prior_slope, joint_slope)


@dataclass(frozen=True, eq=False)
class Particles:
    """All particles at one power of the likelihood; ``seeds`` is the one generator of the run."""

    target: Target
    seeds: torch.Generator
    places: DensityRows
    power: float
    log_evidences: Tensor  # (G,) of the likelihood to that power
    step: float
    num_steps: int = 0
    acceptance: tuple[float, ...] = ()  # at each power
    doubt: Doubt = (False, "")  # of the densities at the start


def prior_particles(source: Source, num_particles: int, seed: int | None) -> Particles:
    """Draws from the prior, in sixteen groups of equal size.

    :raises BadInput: when there are fewer particles than four per dimension and group, when hyperparameters are
        pruned, or when the likelihood is zero at all draws from the prior.
    """
    target, seed = target_of(source), seed_of(seed)
    advice = f"There are {NUM_GROUPS} groups of particles and {target.size} unconstrained coordinates."
    check_count("num_particles", num_particles, PER_COORDINATE * max(NUM_GROUPS, target.size), advice)
    if target.size < len(target.active):
        raise BadInput(
            f"{len(target.active) - target.size} coordinates are pruned and have no proper prior left to start "
            "from; use importance_sampling or bridge_sampling."
        )
    num = num_particles // NUM_GROUPS * NUM_GROUPS
    x = target.coordinates(latents_from_prior(target.joint, target.theta, num, seed))[0]
    doubt = undefined(target.log_joint_or_nan(x), "the prior")
    places = places_at(target, x)
    if not bool((places.log_joint > -math.inf).any()):
        raise BadInput(
            f"the likelihood is zero at all {num} draws from the prior; expected data that the prior can produce. "
            f"Bring both to the same units.{f' And {doubt[1]}' if doubt[0] else ''}"
        )
    return Particles(target, seeded(seed), places, 0.0, x.new_zeros(NUM_GROUPS), step=0.5, doubt=doubt)


def reweighed(swarm: Particles, power: float) -> Particles:
    """The particles at another power of the likelihood, the evidence it takes, and the survivors.

    Resampled systematically inside each group.
    """
    log_weights = (power - swarm.power) * swarm.places.log_likelihood.reshape(NUM_GROUPS, -1)
    parent, gained = importance.survivors(log_weights, swarm.seeds)
    total, num_steps = swarm.log_evidences + gained, swarm.num_steps + 1
    return replace(swarm, places=swarm.places[parent], power=power, log_evidences=total, num_steps=num_steps)


def after_moves(swarm: Particles, num_moves: int) -> tuple[Particles, list[Tensor]]:
    """Some moves at one power, with the share of them that was accepted; and the log likelihoods after each."""
    shares, values = [], []
    for _ in range(num_moves):
        swarm, share = hmc_step(swarm)
        shares.append(share)
        values.append(swarm.places.log_likelihood)
    return replace(swarm, acceptance=(*swarm.acceptance, sum(shares) / num_moves)), values


def covariance_tril_of_others(x: Tensor) -> Tensor:
    """Cholesky factor, for each group, of the covariance of all particles of the other groups, ``(G, D, D)``.

    :param x: particles by groups, shape ``(G, P, D)``.
    """
    x = x - x.mean((0, 1))
    own = x.mT @ x
    covariance = (own.sum(0) - own) / (x[1:, :, 0].numel() - 1)
    tril, info = torch.linalg.cholesky_ex(covariance)
    if bool(info.any()):  # singular: the coordinates on their own
        tril = covariance.diagonal(dim1=-2, dim2=-1).sqrt().diag_embed()
    return tril


def hmc_step(swarm: Particles) -> tuple[Particles, float]:
    """One Hamiltonian move of every particle, and a step size nearer to accepting :data:`ACCEPTED`.

    Leapfrog steps of random length; the mass matrix of a group is the inverse covariance of the others' particles, for
    with one that depends on where its own are the moves would not leave the density as it is.
    """
    x, there, (num, size) = swarm.places.x, swarm.places, swarm.places.x.shape
    momentum = torch.randn(num, size, generator=swarm.seeds, dtype=torch.float64).to(x)
    lengths = swarm.step * (0.5 + torch.rand(num, 1, generator=swarm.seeds, dtype=torch.float64)).to(x)
    threshold = torch.rand(num, generator=swarm.seeds, dtype=torch.float64).log().to(x)
    tril = covariance_tril_of_others(x.reshape(NUM_GROUPS, -1, size))

    def times(rows: Tensor, matrix: Tensor) -> Tensor:
        return (rows.reshape(NUM_GROUPS, -1, size) @ matrix).reshape(num, size)

    value, gradient = there.tempered(swarm.power)
    before = value - 0.5 * momentum.square().sum(-1)
    for _ in range(LEAPFROGS):
        momentum = momentum + 0.5 * lengths * times(gradient, tril)
        there = places_at(swarm.target, there.x + lengths * times(momentum, tril.mT))
        value, gradient = there.tempered(swarm.power)
        momentum = momentum + 0.5 * lengths * times(gradient, tril)
    gain = value - 0.5 * momentum.square().sum(-1) - before
    accept = (threshold < gain) & torch.isfinite(there.x).all(-1)
    share = float(accept.double().mean())
    step = min(swarm.step * math.exp(2.0 * (share - ACCEPTED)), LONGEST)
    return replace(swarm, places=there.where(accept, swarm.places), step=step), share


MOST_TEMPERATURES = 500  # each keeps half of the particles that count: enough for 2^-500 of the prior


@entry_point
def tempered_smc(
    target: Source, *, num_particles: int = 1024, num_moves: int = 3, seed: int | None = 0
) -> EvidenceEstimate:
    """Log evidence by particles that walk from the prior to the posterior by powers of the likelihood.

    Sixteen groups of particles share the powers (chosen so that half of the particles survive each step) and
    the Hamiltonian moves' step size, and each takes its mass matrix from the others; each gives an unbiased
    evidence but for that, and the spread of its log is the standard error.  Del Moral, Doucet and
    Jasra (2006), section 3.3.

    :param target: a posterior, at its hyperparameters, or a ``LogJoint``, at its starting ones; proper prior
        needed.
    :param num_particles: in all groups together.
    :param num_moves: Hamiltonian moves, of five leapfrog steps each, at every power.
    :param seed: of everything; the caller's random state is not touched.
    :return: diagnostics ``num_temperatures`` and ``acceptance`` (the smallest).
    :raises BadInput: when there are fewer particles than four per dimension and group, when hyperparameters
        are pruned, or when the likelihood is zero at all draws from the prior.
    """
    with without_validation():
        swarm = prior_particles(target, num_particles, seed)
        while swarm.power < 1.0 and swarm.num_steps < MOST_TEMPERATURES:
            power = importance.next_temperature(swarm.places.log_likelihood, swarm.power)
            swarm, _ = after_moves(swarm, num_moves)  # a power that the weighted particles chose would bias their mean
            swarm = reweighed(swarm, power)
    error = importance.error_of_groups(swarm.log_evidences)
    return estimated(
        f"tempered SMC, {len(swarm.places.x)} particles",
        importance.log_mean(swarm.log_evidences),
        error,
        {"num_temperatures": float(swarm.num_steps), "acceptance": min(swarm.acceptance, default=1.0)},
        (
            swarm.power < 1.0,
            f"the likelihood reached power {swarm.power:.2g} only after {MOST_TEMPERATURES} steps; use more particles.",
        ),
        *doubts_of_particles(swarm, error),
    )


def doubts_of_particles(swarm: Particles, error: float | Tensor) -> list[Doubt]:
    """The doubts of moves that are hardly ever accepted, of a large error, and of densities that are nan.

    :param error: of the log evidence, nats.
    """
    acceptance = min(swarm.acceptance, default=1.0)
    return [
        (
            acceptance < 0.2,
            f"only {acceptance:.0%} of the moves were accepted at one power; expected at least 20 %. Use more "
            "particles or moves.",
        ),
        (
            bool(error > 0.5),
            f"the standard error, of groups of particles, is {error:.2f} nats; expected below 0.5. Use more particles "
            "or moves.",
        ),
        swarm.doubt,
    ]
