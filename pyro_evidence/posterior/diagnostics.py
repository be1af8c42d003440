"""Diagnostics of a posterior: numbers from importance ratios, and the lines of text that say them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.blocks.block_density import no_blocks
from pyro_evidence.blocks.local import placed, spread
from pyro_evidence.blocks.marginal import Marginal, Place
from pyro_evidence.blocks.terms import Terms
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.laplace.evidence_error import COMPARED, by_laplace, element_names
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.importance import pareto_shapes
from pyro_evidence.posterior.base import NUM_DRAWS, varies
from pyro_evidence.program.checks import require_kept
from pyro_evidence.settings import check_count, check_seed, seeded

TRUSTED = 0.7  # k-hat up to which importance weights are believed
MANY = 1_000  # coordinates beyond which weights of joint draws spread by their number alone
NUM_WEIGHTED = 4_000  # draws to be weighted, where nobody says how many
FEWEST_WEIGHTED = 100  # to whose largest a tail can be fitted
SAME_MODE = 1e-3  # nats between log evidences of one mode
NOTABLE_GAP = 0.1  # nats
NOTABLE_SHIFT = 0.2  # standard deviations
NOTABLE_RATIO = 1.2  # of two standard deviations
OTHERWISE = {
    "gauss_newton": ", the default of networks: their predictors' own curvature is left out of this evidence, so weigh "
    "it against other Gauss-Newton evidences"
}


def importance_check(
    log_weights: Tensor, draws: Mapping[str, Tensor] | None = None, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """The log evidence by importance sampling, how reliable that is, and what the weights change.

    The weights are Pareto-smoothed, as in :func:`~pyro_evidence.importance_sampling`: one weight far out in the tail
    would else be all of their mean.

    :param log_weights: log ratios of the exact density to the approximation, nats, shape ``(S,)``.
    :param draws: at which they were taken, constrained, each ``(S,) + site shape``.
    :param dtype: in which the density was computed.
    """
    found = importance.checked(log_weights)
    return {
        "pareto_k": found.pareto_k,
        "exact": importance.is_constant(log_weights, dtype),
        "log_evidence_importance": float(importance.log_mean(found.log_weights)),
        "log_evidence_importance_se": float(importance.standard_error(found.log_weights)),
        "effective_sample_size": float(importance.effective_sample_size(found.log_weights)),
        **shifts(draws or {}, found.weights),
    }


def check_weighted(num_samples: int) -> int:
    """The number of draws to be weighted.

    :raises BadInput: for too few of them.
    """
    remedy = "The weights' tail is fitted to the largest of them."
    return check_count("num_samples", num_samples, FEWEST_WEIGHTED, remedy)


def not_checked() -> dict[str, Any]:
    """The entries of :func:`importance_check` where nothing can be drawn and weighed: nan."""
    names = ("pareto_k", "log_evidence_importance", "log_evidence_importance_se", "effective_sample_size")
    return dict.fromkeys(names, math.nan) | {"exact": False} | shifts({}, torch.ones(1))


def shifts(draws: Mapping[str, Tensor], weights: Tensor) -> dict[str, float | str]:
    """Largest shift of a mean by the weights, in standard deviations, and largest ratio of standard deviations.

    A ratio of two standard deviations counts as the larger of itself and its reciprocal.

    :param draws: constrained, each ``(S,) + site shape``.
    :param weights: normalised, shape ``(S,)``.
    """
    moved = {n: _moved(v.reshape(len(v), -1).double(), weights.double()) for n, v in draws.items() if v.numel()}
    mean = max(moved, key=lambda n: moved[n][0], default="")
    sd = max(moved, key=lambda n: moved[n][1], default="")
    return {
        "largest_mean_shift": moved[mean][0] if mean else 0.0,
        "largest_mean_shift_site": mean,
        "largest_sd_ratio": moved[sd][1] if sd else 1.0,
        "largest_sd_ratio_site": sd,
    }


def _moved(x: Tensor, weights: Tensor) -> tuple[float, float]:
    """Largest shift of a mean and ratio of standard deviations among columns of ``x`` ``(S, K)``, constants aside."""
    before, sd = x.mean(0), x.std(0, correction=0)
    kept = torch.isfinite(sd) & varies(x)
    if not bool(kept.any()):
        return 0.0, 1.0
    away = (x - before)[:, kept] / sd[kept]
    shift = weights @ away
    ratio = (weights @ (away - shift).square()).sqrt()
    return float(shift.abs().max()), float(torch.maximum(ratio, 1.0 / ratio).max())


def lines(found: Mapping[str, Any], said: Sequence[str] = ()) -> list[str]:
    """Lines of text below the table of ``summary()``.

    :param found: the posterior's diagnostics.
    :param said: what there is to say of hyperparameters.
    """
    integration = []
    if found.get("marginalised_sites"):
        failures = f"; no inner mode at {found['inner_failures']} nodes" if found["inner_failures"] else ""
        integration.append(
            f"integrated numerically around Laplace: {', '.join(found['marginalised_sites'])}   "
            f"({found['integration']}, error {found['integration_error']:.2g} nats{failures})"
        )
    return [
        *said,
        _evidence(found),
        *integration,
        *_doubts(found),
        *_restarts(found),
        f"status: {found['status']}",
        *found["failed_restarts"],
        *found.get("notes", ()),
    ]


def _evidence(found: Mapping[str, Any]) -> str:
    said = f"log evidence = {found['log_evidence']:.4f} nats"
    if found.get("exact"):
        return f"{said}   (exact: given the hyperparameters the posterior is Gaussian)"
    if _unchecked(found):
        return f"{said}   (no importance sampling: the data were not kept, or there is no curvature of all weights)"
    check = f"{found['log_evidence_importance']:.4f} +- {found['log_evidence_importance_se']:.4f}"
    k = found["pareto_k"]
    tail = "no weight stands out" if k == -math.inf else f"k-hat {k:.2f}"
    return f"{said}   (importance sampling {check}, {tail})"


def _unchecked(found: Mapping[str, Any]) -> bool:
    """Whether there was nothing to draw from, or to weigh by."""
    return math.isnan(found["log_evidence_importance"]) and math.isnan(found["effective_sample_size"])


def _doubts(found: Mapping[str, Any]) -> list[str]:
    """Doubts by importance weights: in the log evidence, whatever k-hat, and in the draws, where it is low."""
    said = []
    reliable = found["pareto_k"] <= TRUSTED  # not nan
    if found.get("num_blocks"):
        if found["blocks_above"]:
            said.append(
                f"k-hat of {found['blocks_above']:,} of {found['num_blocks']:,} blocks is above 0.7: their draws, and "
                "integrals that are Laplace's (nodes=1), are not to be trusted; posterior.blocks(site) has both by "
                "quadrature."
            )
    elif found["pareto_k"] > TRUSTED and found.get("num_coordinates", 0) > MANY and not _unchecked(found):
        said.append(
            f"k-hat is above 0.7, which in {found['num_coordinates']:,} dimensions says little: weights of joint draws "
            "spread with the number of coordinates; go by posterior.log_evidence_error."
        )
    elif not _unchecked(found):
        if not reliable:
            said.append(
                "k-hat is above 0.7: the posterior is far from Gaussian; trust neither number, run NUTS on "
                "posterior.model."
            )
        gap, error = found["log_evidence_importance"] - found["log_evidence"], found["log_evidence_importance_se"]
        if abs(gap) > max(NOTABLE_GAP, 3.0 * error):
            said.append(
                f"Laplace's log evidence is {abs(gap):.2f} nats too {'low' if gap > 0 else 'high'} by importance "
                f"sampling ({error:.2g} is its standard error): compare models by importance_sampling(posterior)."
            )
    shift, ratio = found.get("largest_mean_shift", 0.0), found.get("largest_sd_ratio", 1.0)
    moved = []
    if reliable and shift > NOTABLE_SHIFT:
        moved.append(f"the mean of {found['largest_mean_shift_site']} is off by up to {shift:.2f} standard deviations")
    if reliable and ratio > NOTABLE_RATIO:
        percent = 100.0 * (ratio - 1.0)
        moved.append(f"the standard deviation of {found['largest_sd_ratio_site']} by up to {percent:.0f} %")
    if moved:
        said.append(f"by importance weights {', '.join(moved)}: take draws from posterior.importance_resampled(...)")
    return said


def _restarts(found: Mapping[str, Any]) -> list[str]:
    """Lines on modes that the restarts reached, and on a curvature that is not the exact one."""
    said = []
    heights = [h for h in found["log_evidence_per_restart"] if not math.isnan(h)]
    if len(found["log_evidence_per_restart"]) > 1 and heights:
        agreed = sum(h > max(heights) - SAME_MODE for h in heights)
        said.append(f"{len(found['log_evidence_per_restart'])} starts, {agreed} of which ended in the best mode")
    if heights and max(heights) - min(heights) > SAME_MODE:
        levels = sorted({round(h, 3) for h in heights}, reverse=True)
        said.append(f"restarts reached different modes: log evidences {levels}")
    if found["curvature"] != "exact_hessian":
        said.append(f"curvature: {found['curvature']}, not the exact Hessian{OTHERWISE.get(found['curvature'], '')}")
    return said


MOST = 2**27  # of log densities of a check
NUMBERS = 2**23  # of a tensor of log densities that is held at a time


@dataclass(frozen=True)
class Blocks:
    """The independent blocks that hold a site's elements, given what blocks share at its mode; in their order.

    :ivar names: the first coordinate of each block.
    :ivar k_hat: Pareto shape of each block's importance weights, the exact density over Laplace's, ``(G,)``: above 0.7
        that block's draws are not to be trusted.
    :ivar log_integral: of each block by quadrature, nats, ``(G,)``, and ``laplace_error`` what Laplace's approximation
        of it lacks.
    :ivar mean: of the site's unconstrained coordinates by quadrature, and ``sd``, in its unconstrained shape.

    >>> worst = posterior.blocks("a").k_hat.argmax()  # doctest: +SKIP
    """

    names: tuple[str, ...]
    k_hat: Tensor
    log_integral: Tensor
    laplace_error: Tensor
    mean: Tensor
    sd: Tensor


def blocks(state: LaplaceState, site: str, num_samples: int | None, seed: int) -> Blocks:
    """The independent blocks that hold the elements of a latent site, each with a check of its own.

    :raises BadInput: for a name that is no latent site, or one that blocks share.
    :raises UnsupportedModel: where no blocks are independent.
    """
    check_seed(seed)
    joint = state.problem.joint
    require_kept(joint, "blocks(...)")
    marginal = _marginal(state)
    num_samples = _affordable(marginal, NUM_DRAWS) if num_samples is None else num_samples
    num_samples = check_weighted(num_samples)
    if not isinstance(site, str) or site not in joint.latents.slices:
        raise BadInput(f"blocks({site!r}): expected a latent site in blocks, one of {list(joint.latents.names)}.")
    p, part = marginal.partition, next(x for x in joint.latents if x.name == site)
    position = p.place[joint.latents.slices[site]]
    if not bool((position < len(p.own)).all()):
        own = [n for n, s in joint.latents.slices.items() if bool((p.place[s] < len(p.own)).all())]
        raise BadInput(
            f"blocks({site!r}): the blocks share site '{site}'; expected one of which each block has elements of "
            f"its own: {own}."
        )
    with without_validation(), torch.no_grad():
        terms, here = marginal.density.terms(state.theta), _place(marginal, state)
        nodes = placed(p, here.modes.own, here.modes.tril, marginal.num)
        log_terms = _valued(terms, nodes.rows, here) + nodes.log_weights
        k_hat = pareto_shapes(log_weights_of(terms, here, num_samples, seed))
    log_integral, weights = log_terms.logsumexp(0), log_terms.softmax(0)[:, p.block]
    mean = (weights * nodes.rows).sum(0)
    sd = (weights * (nodes.rows - mean).square()).sum(0).sqrt()
    chosen = p.block[position].unique()
    first = torch.full((p.num_blocks,), p.size).scatter_reduce_(0, p.block, torch.arange(len(p.own)), "amin")
    names = element_names(joint, p.own[first[chosen]])
    numbers = (k_hat, log_integral, log_integral - by_laplace(here))
    moments = (x[position].reshape(part.unconstrained_shape) for x in (mean, sd))
    return Blocks(names, *(x[chosen] for x in numbers), *moments)


def check_by_blocks(state: LaplaceState, log_evidence: float, num_samples: int, seed: int) -> dict[str, Any]:
    """The entries of :func:`importance_check`, of each block by itself given what blocks share at its mode.

    :param log_evidence: by Laplace, nats; importance sampling of the blocks' integrals is added to it.
    """
    marginal = _marginal(state)
    num, place = _affordable(marginal, num_samples), _place(marginal, state)
    with without_validation(), torch.no_grad():
        log_weights = log_weights_of(marginal.density.terms(state.theta), place, num, seed)
    shapes, weights = pareto_shapes(log_weights), (log_weights - log_weights.amax(0)).exp()
    error = weights.std(0) / weights.mean(0) / num**0.5
    # the logarithm of a mean of few weights is low by half its squared error
    gain = log_weights.logsumexp(0) - math.log(num) + 0.5 * error.square()
    gain -= by_laplace(place) if state.place is None else place.each[:-1]
    return {
        "pareto_k": float(shapes.max()),
        "exact": bool((log_weights.amax(0) - log_weights.amin(0) < 1e-8).all()) and not len(place.shared),
        "log_evidence_importance": float(log_evidence + gain.sum()),
        "log_evidence_importance_se": float(error.square().sum().sqrt()),
        "effective_sample_size": float((weights.sum(0).square() / weights.square().sum(0)).min()),
        "num_blocks": len(shapes),
        "blocks_above": int((shapes > TRUSTED).sum()),
    }


def _affordable(marginal: Marginal, most: int) -> int:
    """Draws of each block whose log densities are not too many."""
    data = sum(len(owner) for owner in marginal.partition.owner.values())
    return max(FEWEST_WEIGHTED, min(most, MOST // max(1, data)))


def _place(marginal: Marginal, state: LaplaceState) -> Place:
    """The blocks at the mode of everything."""
    if state.place is not None:
        return state.place
    p = marginal.partition
    with torch.enable_grad(), without_validation():
        return marginal.place(marginal.density.terms(state.theta), state.u[p.own], state.u[p.shared])


def _marginal(state: LaplaceState) -> Marginal:
    problem = state.problem
    found = problem.marginal or problem.by_quadrature(COMPARED)
    if found is None:
        raise no_blocks(problem.joint, problem.structure, "blocks(...)")
    return found


def log_weights_of(terms: Terms, here: Place, num_samples: int, seed: int) -> Tensor:
    """Log ratios of each block's density to Laplace's at draws of the latter, nats, ``(S, G)``."""
    p = terms.density.partition
    generator, rows, log_norm = seeded(seed), [], []
    means = here.modes.own.split([front.numel() for front in p.fronts])
    for front, L, mean in zip(p.fronts, here.modes.tril, means, strict=True):
        white = torch.randn(num_samples, *front.shape, generator=generator, dtype=torch.float64).to(here.shared)
        away = (spread(L) @ white.unsqueeze(-1)).squeeze(-1)
        rows.append((mean.reshape(front.shape) + away).flatten(1))
        square = white.square().sum(-1)
        log_det = L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_norm.append(log_det - 0.5 * square - 0.5 * front.shape[-1] * math.log(math.tau))
    return _valued(terms, torch.cat(rows, 1), here) - torch.cat(log_norm, 1)


def _valued(terms: Terms, rows: Tensor, here: Place) -> Tensor:
    """The log joint density of each block at many rows, ``(Q, G)``, a few rows at a time."""
    data = sum(len(owner) for owner in terms.density.partition.owner.values())
    size = max(1, NUMBERS // max(1, data))
    return torch.cat([terms(part, here.shared)[:, :-1] for part in rows.split(size)])
