"""The evidence by Pareto-smoothed importance sampling, from one Laplace approximation or from all modes."""

import torch

from pyro_evidence.evidence_check.modes import Modes
from pyro_evidence.evidence_check.target import EvidenceEstimate, estimated, laplace_posterior, target_of, undefined
from pyro_evidence.fitting.process_state import entry_point
from pyro_evidence.laplace.evidence_error import by_more_nodes
from pyro_evidence.laplace.tour import integral_over, proposal, smoothed_weights
from pyro_evidence.numerics import importance
from pyro_evidence.posterior.base import Posterior
from pyro_evidence.posterior.diagnostics import MANY, check_weighted
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.multimodal import ImportancePosterior
from pyro_evidence.program.simulate import affordable_draws
from pyro_evidence.settings import seed_of, seeded

MOST = 10_000  # draws that nobody asked for


@entry_point
def importance_sampling(
    target: Posterior | Modes, *, num_samples: int | None = None, seed: int | None = 0
) -> EvidenceEstimate:
    """Log evidence by importance sampling from the Laplace posterior, weights Pareto-smoothed.

    The estimate is consistent whatever the posterior's shape, and its k-hat says whether ``num_samples`` are
    enough. From :func:`find_modes`'s result, and from a posterior whose log evidence is by importance sampling, the
    proposal is normals and t distributions at all modes that were found, adapted twice, so that symmetric and minor
    modes count.  Vehtari, Simpson, Gelman, Yao and Gabry (2024), section 2.

    :param target: a posterior, or the modes of one.
    :param num_samples: number of draws, at least 100; by default 10,000, fewer where latents and data are more than
        10,000 numbers.
    :param seed: of the draws; the caller's random state is not touched.
    :return: diagnostics ``pareto_k`` and ``effective_sample_size``; in doubt when k-hat is above
        ``min(1 - 1/log10(S), 0.7)``.
    :raises BadInput: for fewer than 100 draws.
    :raises NotAMode: when the density is zero at all of them.
    """
    density = target.target if isinstance(target, Modes) else target_of(target)
    laplace = target.posterior if isinstance(target, Modes) else laplace_posterior(target)
    num_samples = check_weighted(affordable_draws(density.joint, MOST) if num_samples is None else num_samples)
    if isinstance(target, Modes | ImportancePosterior):
        exchange = None if isinstance(target, Modes) else target.integral.exchange
        integral = integral_over(target.states, seed_of(seed), num_samples, density, exchange)
        log_joint, found, log_copies = integral.log_joint, integral.weighed, integral.log_copies
        num_modes = len(target.states)
    elif laplace._has_orbits:
        log_joint = laplace.log_weights(num_samples, seed_of(seed))
        found, log_copies, num_modes = smoothed_weights(log_joint, torch.zeros_like(log_joint)), 0.0, 1
    else:
        white = torch.randn(num_samples, density.size, generator=seeded(seed), dtype=torch.float64)
        x, log_proposal = (laplace.proposal or proposal([laplace.state])).drawn(white.to(density.centre))
        log_joint = density.log_joint_or_nan(x)
        log_joint = laplace._of_nearest(log_joint, density.embedded(x))
        found, log_copies, num_modes = smoothed_weights(log_joint, log_proposal), 0.0, 1
    k, smooth = found.pareto_k, found.log_weights
    return estimated(
        f"importance sampling from {num_modes} mode{'s' * (num_modes > 1)}, S={num_samples}",
        importance.log_mean(smooth) + log_copies,
        found.error,
        {"pareto_k": k, "effective_sample_size": float(importance.effective_sample_size(smooth))},
        (k > importance.threshold(num_samples), _heavy_tails(k, num_samples, density.size)),
        undefined(log_joint, "Laplace's normal"),
    )


def _heavy_tails(k: float, num_samples: int, size: int) -> str:
    advice = (
        "The posterior has heavier tails than its Gaussian approximation (a funnel, a ridge, separable classes, a mode "
        "that was missed), so neither the Laplace evidence nor this one can be trusted. Look for more modes with "
        "find_modes(posterior), or run NUTS on posterior.model and use bridge_sampling."
    )
    if size > MANY:
        advice = (
            f"Of draws in {size:,} dimensions that says little: weights spread with the number of coordinates, however "
            "close to normal each is. Look at posterior.log_evidence_error and posterior.blocks(site), which go block "
            "by block; compare_evidence(...) does."
        )
    expected = importance.threshold(num_samples)
    return f"k-hat is {k:.2f}; expected below {expected:.2f} with {num_samples} draws. {advice}"


FEWEST_IN_A_BLOCK = 20  # blocks: of few, nodes about a mode tell no more than joint weights
BELIEVED = 0.1  # nats for each coordinate, of the second term of Laplace's series


def by_blocks(posterior: LaplacePosterior) -> EvidenceEstimate | None:
    """The log evidence with an error that is found part by part; None where that would tell nothing.

    Independent blocks are integrated by quadrature, what they share by Laplace around that; the error is against fewer
    nodes about the mode of everything.  Where marginalised sites were integrated, and where no blocks are independent,
    it is the fit's log evidence with its own ``log_evidence_error``, in the latter case for more than 1,000
    coordinates only.
    """
    try:
        first = posterior.log_evidence_error
    except (ArithmeticError, RuntimeError):  # messages of models whose blocks or third derivatives cannot be had
        return None
    state, doubts = posterior._inside, []
    size = int(state.problem.active.sum())
    gain, error = 0.0, float(first)
    if first.num_blocks < FEWEST_IN_A_BLOCK:
        if size <= MANY:
            return None
        method = f"Laplace, its error by {first.method}"
        doubt = (
            f"the second term of Laplace's series is {first:.3g} nats for {size:,} coordinates; expected at most "
            f"{BELIEVED} for each, or the series tells nothing. Run NUTS on posterior.model on a part of the data."
        )
        doubts.append((not error <= BELIEVED * size, doubt))
    elif posterior.marginalised_sites:
        method = f"integrated outside, its error by {first.method}"
    else:
        second = by_more_nodes(state, first)
        gain = second.signed
        error = abs(gain - first.signed) if second is not first else error
        shared = f", {second.num_shared} shared coordinates by Laplace" if second.num_shared else ""
        method = f"quadrature in {second.num_blocks:,} blocks{shared}"
    return estimated(method, posterior.log_evidence + gain, error, {"above_laplace": gain}, *doubts)
