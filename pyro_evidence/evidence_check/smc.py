"""The evidence by tempered sequential Monte Carlo from the prior: slow, and independent of any Gaussian."""

import math

from pyro_evidence.evidence_check import particles
from pyro_evidence.evidence_check.particles import NUM_GROUPS, Particles, after_moves, reweighed, start
from pyro_evidence.evidence_check.target import EvidenceEstimate, Source, rounding
from pyro_evidence.memory import within_memory
from pyro_evidence.numerics import importance
from pyro_evidence.threads import without_validation

MOST_TEMPERATURES = 500


@within_memory
def tempered_smc(of: Source, *, num_particles: int = 1024, num_moves: int = 3, seed: int = 0) -> EvidenceEstimate:
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
    with without_validation():
        swarm = start(of, num_particles, seed)
        while swarm.power < 1.0 and swarm.num_steps < MOST_TEMPERATURES:
            log_likelihood = swarm.log_likelihood.reshape(NUM_GROUPS, -1)
            swarm = reweighed(swarm, particles.next_temperature(log_likelihood, swarm.power))
            swarm = swarm if swarm.power == 1.0 else after_moves(swarm, num_moves)
    return _estimate(swarm)


def _estimate(swarm: Particles) -> EvidenceEstimate:
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
    doubts = (*(text for wrong, text in letters if wrong), *swarm.doubts)
    return EvidenceEstimate(method, value, error, numbers, doubts)
