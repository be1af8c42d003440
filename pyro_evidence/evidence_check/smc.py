"""The evidence by tempered sequential Monte Carlo from the prior: slow, and independent of any Gaussian."""

import math
from dataclasses import dataclass, replace

import pyro
import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.evidence_check.estimate import EvidenceEstimate, rounding
from pyro_evidence.evidence_check.target import ROWS, Target, target
from pyro_evidence.ops import derivatives, importance, tempering
from pyro_evidence.posterior import LaplacePosterior
from pyro_evidence.program import LogJoint
from pyro_evidence.simulate import latents_from_prior, log_prior_rows

NUM_GROUPS = 16  # independent runs, whose spread is the standard error
LEAPFROGS = 5
MOST_TEMPERATURES = 500


def tempered_smc(
    of: LaplacePosterior | LogJoint, *, num_particles: int = 1024, num_moves: int = 3, seed: int = 0
) -> EvidenceEstimate:
    """Log evidence by particles that walk from the prior to the posterior by powers of the likelihood.

    Sixteen groups of particles share the powers (chosen so that half of the particles survive each step) and
    the Hamiltonian moves' mass matrix and step size; each group gives an unbiased evidence but for that
    sharing, and their spread is the standard error.  Del Moral, Doucet and Jasra (2006), section 3.3.

    :param of: a posterior, at its hyperparameters, or a ``LogJoint``, at its starting ones; proper prior
        needed.
    :param num_particles: in all groups together.
    :param num_moves: Hamiltonian moves, of five leapfrog steps each, at every power.
    :param seed: of everything; the caller's random state is not touched.
    :return: diagnostics ``num_temperatures`` and ``acceptance`` (the smallest).
    :raises BadInput: when there are fewer particles than four per dimension and group, when hyperparameters
        are pruned, or when the likelihood is zero at all draws from the prior.
    """
    at = target(of)
    if num_particles < 4 * NUM_GROUPS or num_particles < 4 * at.size:
        raise BadInput(
            f"num_particles={num_particles}; expected at least {max(4 * NUM_GROUPS, 4 * at.size)} for "
            f"{at.size} unconstrained coordinates."
        )
    if at.size < len(at.active):
        raise BadInput(
            f"{len(at.active) - at.size} coordinates are pruned and have no proper prior left to start "
            "from; use importance_sampling or bridge_sampling."
        )
    with pyro.validation_enabled(False):
        swarm = _start(at, num_particles // NUM_GROUPS * NUM_GROUPS, seed)
        while swarm.power < 1.0 and swarm.num_steps < MOST_TEMPERATURES:
            swarm = _reweigh(swarm)
            swarm = swarm if swarm.power == 1.0 else _wander(swarm, num_moves)
    return _estimate(swarm)


@dataclass(frozen=True)
class _Swarm:
    """All particles at one power of the likelihood; ``seeds`` is the one generator of the run."""

    at: Target
    seeds: torch.Generator
    x: Tensor  # (G * P, D)
    log_prior: Tensor  # (G * P,)
    log_joint: Tensor  # (G * P,)
    power: float
    log_evidences: Tensor  # (G,) of the likelihood to that power
    step: float
    num_steps: int = 0
    acceptance: tuple[float, ...] = ()  # at each power

    @property
    def log_likelihood(self) -> Tensor:
        """Of each particle, nats; -inf where the joint density is zero."""
        value = self.log_joint - self.log_prior
        return torch.where(value.isnan(), -torch.inf, value)

    def tempered(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``log p(w) + power log p(D | w)`` and its gradient."""
        prior, prior_slope = _prior(self.at, x)
        joint, joint_slope = self.at.gradient(x)
        return _mix(prior, joint, self.power), _mix(prior_slope, joint_slope, self.power)


def _mix(prior: Tensor, joint: Tensor, power: float) -> Tensor:
    return (1.0 - power) * prior + power * joint


def _prior(at: Target, x: Tensor) -> tuple[Tensor, Tensor]:
    parts = [
        derivatives.gradient(lambda v, theta: log_prior_rows(at.joint, v, theta), part, at.theta)
        for part in x.split(ROWS)
    ]
    value, slope = (torch.cat(p) for p in zip(*parts, strict=True))
    return value, slope


def _start(at: Target, num: int, seed: int) -> _Swarm:
    x = at.coordinates(latents_from_prior(at.joint, at.theta, num, seed))[0]
    prior, joint = _prior(at, x)[0], at.log_joint(x)
    if not bool((joint > -math.inf).any()):
        raise BadInput(
            f"the likelihood is zero at all {num} draws from the prior; expected data that the prior can produce."
        )
    return _Swarm(at, torch.Generator().manual_seed(seed), x, prior, joint, 0.0, x.new_zeros(NUM_GROUPS), 0.5)


def _reweigh(swarm: _Swarm) -> _Swarm:
    """The next power, the evidence it takes, and the survivors."""
    log_likelihood = swarm.log_likelihood.reshape(NUM_GROUPS, -1)
    power = tempering.next_temperature(log_likelihood, swarm.power)
    log_weights = (power - swarm.power) * log_likelihood
    size = log_weights.shape[-1]
    gained = log_weights.logsumexp(-1) - math.log(size)
    uniform = torch.rand(NUM_GROUPS, 1, generator=swarm.seeds, dtype=torch.float64).to(log_weights)
    first = size * torch.arange(NUM_GROUPS, device=log_weights.device).unsqueeze(-1)
    parent = (first + tempering.resample(log_weights, uniform)).reshape(-1)
    kept = {name: getattr(swarm, name)[parent] for name in ("x", "log_prior", "log_joint")}
    return replace(
        swarm, **kept, power=power, log_evidences=swarm.log_evidences + gained, num_steps=swarm.num_steps + 1
    )


def _wander(swarm: _Swarm, num_moves: int) -> _Swarm:
    """Some moves at one power, with the share of them that was accepted."""
    shares = []
    for _ in range(num_moves):
        swarm, share = _move(swarm)
        shares.append(share)
    return replace(swarm, acceptance=(*swarm.acceptance, sum(shares) / num_moves))


def _move(swarm: _Swarm) -> tuple[_Swarm, float]:
    """One Hamiltonian move of every particle, and a step size nearer to accepting 7 of 10."""
    num, size = swarm.x.shape
    momentum = torch.randn(num, size, generator=swarm.seeds, dtype=torch.float64)
    lengths = swarm.step * (0.7 + 0.6 * torch.rand(num, 1, generator=swarm.seeds, dtype=torch.float64))
    threshold = torch.rand(num, generator=swarm.seeds, dtype=torch.float64).log().to(swarm.x)
    start = (swarm.x, *swarm.tempered(swarm.x))
    kicks = torch.cat([lengths, momentum], -1).to(swarm.x)
    (x, _, _), gain = tempering.leapfrog(swarm.tempered, start, _spread(swarm.x), kicks, LEAPFROGS)
    accept = (threshold < gain) & torch.isfinite(x).all(-1)
    x = torch.where(accept.unsqueeze(-1), x, swarm.x)
    share = float(accept.double().mean())
    step = swarm.step * math.exp(2.0 * (share - 0.7))
    moved = replace(swarm, x=x, log_prior=_prior(swarm.at, x)[0], log_joint=swarm.at.log_joint(x), step=step)
    return moved, share


def _spread(x: Tensor) -> Tensor:
    """Cholesky factor of the particles' covariance; of its diagonal where that is singular."""
    covariance = torch.cov(x.mT).reshape(x.shape[1], x.shape[1])
    tril, info = torch.linalg.cholesky_ex(covariance)
    return tril if not bool(info.any()) else covariance.diagonal().sqrt().diag_embed()


def _estimate(swarm: _Swarm) -> EvidenceEstimate:
    value = float(importance.log_mean(swarm.log_evidences))
    error = math.hypot(float(importance.standard_error(swarm.log_evidences)), rounding(value))
    acceptance = min(swarm.acceptance, default=1.0)
    letters = [
        (
            swarm.power < 1.0,
            f"the likelihood reached power {swarm.power:.2g} only after {MOST_TEMPERATURES} steps; use more particles.",
        ),
        (
            acceptance < 0.2,
            f"only {acceptance:.0%} of the moves were accepted at one power; expected at least 20 %. Use "
            "more particles or moves.",
        ),
        (
            error > 0.5,
            f"groups differ by much (standard error {error:.2f} nats); expected below 0.5. Use more "
            "particles or moves.",
        ),
    ]
    numbers = {"num_temperatures": float(swarm.num_steps), "acceptance": acceptance}
    method = f"tempered SMC, {len(swarm.x)} particles"
    return EvidenceEstimate(method, value, error, numbers, tuple(text for wrong, text in letters if wrong))
