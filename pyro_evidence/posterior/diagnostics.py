"""Diagnostics of a posterior: by importance ratios and by Newton's steps, and the lines of text that say them."""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.blocks.local import placed, spread
from pyro_evidence.blocks.marginal import Marginal, SharedIterate, no_blocks
from pyro_evidence.blocks.terms import Terms
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.laplace.evidence_error import COMPARED, by_laplace, element_names
from pyro_evidence.laplace.restarts import LEVEL as SAME_MODE
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.batched import HELD_NUMBERS
from pyro_evidence.numerics.importance import Smoothed, pareto_shapes
from pyro_evidence.posterior.base import NUM_DRAWS, SHARED, TOGETHER, varies
from pyro_evidence.program.checks import require_kept
from pyro_evidence.settings import check_count, check_seed, seeded
from pyro_evidence.structure.names import names_of

# Shifts of a mean, in standard deviations, and ratios of two standard deviations: what nobody need hear of, what is
# said once it is known, and what must not be passed over in silence.
HARMLESS, NOTABLE, HARMFUL = 0.1, 0.15, 0.3
LEVEL = 0.01  # probability of a wrong sentence among all elements
MOST_NOISE = 256  # samples of errors: of a thousand independent ones they say that these are no fewer than hundreds
WEIGHED = "take draws from posterior.importance_resampled(...)"


@dataclass(frozen=True, eq=False)
class Elements:
    """Draws of all elements that vary, standardised by an approximation's moments.

    :ivar names: site and place of each, ``(K,)``, and ``kept`` which of all elements these are.
    """

    names: tuple[tuple[str, tuple[int, ...]], ...]
    kept: Tensor
    mean: Tensor
    sd: Tensor

    @classmethod
    def of(cls, draws: Mapping[str, Tensor]) -> "Elements":
        """The elements of draws ``(S,) + site shape`` of an approximation."""
        x = columns(draws)
        kept = torch.isfinite(x.std(0)) & varies(x)
        names = [(n, place) for n, v in draws.items() for place in itertools.product(*map(range, v.shape[1:]))]
        own = tuple(name for name, keep in zip(names, kept.tolist(), strict=True) if keep)
        mean = x[:, kept].mean(0)
        return cls(own, kept, mean, (x[:, kept] - mean).square().mean(0).sqrt())

    def standardised(self, draws: Mapping[str, Tensor]) -> Tensor:
        """Other draws in units of these moments, ``(S, K)``."""
        return (columns(draws)[:, self.kept] - self.mean) / self.sd


def columns(draws: Mapping[str, Tensor]) -> Tensor:
    """Draws of all sites side by side, ``(S, K)``."""
    return torch.cat([v.reshape(len(v), -1).double() for v in draws.values()], 1)


def beyond(num: int) -> float:
    """Standard errors that none of so many normal numbers exceeds on one side, but for :data:`LEVEL`."""
    return -float(torch.special.ndtri(torch.tensor(LEVEL / max(1, num), dtype=torch.float64)))


@dataclass(frozen=True, eq=False)
class Shifts:
    """Corrections of an approximation's moments by the exact density.

    :ivar value: change of each mean in standard deviations, and log ratio of standard deviations, ``(2, K)``, and
        ``error`` the standard errors of these.
    :ivar noise: samples of the errors of the means, ``(M, K)``: elements whose errors go together are worth fewer.
    :ivar method: how it was found, and ``remedy`` what to do where they are off.
    """

    names: tuple[tuple[str, tuple[int, ...]], ...]
    value: Tensor
    error: Tensor
    noise: Tensor
    method: str
    remedy: str

    @property
    def reach(self) -> float:
        """Standard errors within which all of these numbers are at once, but for :data:`LEVEL`."""
        return beyond(4 * len(self.names))

    @property
    def scaled(self) -> tuple[Tensor, Tensor]:
        """Sizes of shifts of means, and of ratios of deviations as if they were such, and their errors, ``(2, K)``."""
        mean, away = self.value.abs()
        return torch.stack([mean, away.expm1()]), self.error * torch.stack([torch.ones_like(away), away.exp()])

    @property
    def alarms(self) -> Tensor:
        """Which means, and which standard deviations, are off for certain, bool ``(2, K)``."""
        value, error = self.scaled
        return (value > NOTABLE) & (value - self.reach * error > HARMLESS)

    def unknown(self, most: float = HARMFUL) -> Tensor:
        """Which may be off by more than that, bool ``(2, K)``."""
        value, error = self.pooled.scaled
        return ~(value + self.reach * error < most)

    @property
    def pooled(self) -> "Shifts":
        """The same where shifts of a site's elements are exchangeable: a sample from a normal distribution about zero.

        Its variance is the highest that the elements leave possible, but for :data:`LEVEL`.  Efron and Morris (1975);
        what stands out from its site stays as it is.
        """
        value, error = self.value.clone(), self.error.clone()
        unit = self.noise - self.noise.mean(0)
        sd = unit.square().mean(0).sqrt()
        unit = unit / sd.where(sd > 0.0, 1.0)  # errors that are all zero go together with none
        above = beyond(1)
        sites = [name for name, _ in self.names]
        for site in dict.fromkeys(sites):
            index = torch.tensor([i for i, name in enumerate(sites) if name == site])
            size, part = len(index), unit[:, index]
            squares = float((part @ part.mT).square().sum()) / len(part) ** 2 - size**2 / len(part)  # of correlations
            spread = (2.0 * max(squares, size)) ** 0.5 / size  # of a mean of squares of such errors
            v, e = value[:, index], error[:, index]
            most = (v.square() + (above * spread - 1.0) * e.square()).mean(1, keepdim=True)
            variance = most.clamp(min=0.0)  # less than errors alone make is no shift
            total = variance + e.square()
            share = torch.where((v.abs() > self.reach * total.sqrt()) | (e == 0.0), 1.0, variance / total)
            value[:, index], error[:, index] = share * v, share.sqrt() * e
        return replace(self, value=value, error=error)

    def is_settled(self, most: float = HARMFUL) -> bool:
        """Whether something is off for certain, or nothing by more than that."""
        return bool(self.alarms.any()) or not bool(self.unknown(most).any())


def by_weights(
    elements: Elements, draws: Mapping[str, Tensor], judged: Mapping[str, Tensor], smoothed: Smoothed
) -> Shifts:
    """By self-normalised importance weights; errors by the delta method.

    :param draws: that were weighed.
    :param judged: those of the approximation, of the same noise.
    """
    z, beside, weights = elements.standardised(draws), elements.standardised(judged), smoothed.weights.double()
    mean, own, weight = weights @ z, 1.0 / len(z), weights.unsqueeze(-1)
    away = (z - mean).square()
    variance = weights @ away
    noise = weight * (z - mean) - own * beside
    noise_of_sd = 0.5 * (weight * (away / variance - 1.0) - own * (beside.square() - 1.0))
    value, error = torch.stack([mean, 0.5 * variance.log()]), torch.stack([noise, noise_of_sd]).square().sum(1).sqrt()
    method = f"importance weights of {len(z):,} draws"
    return Shifts(elements.names, value, error, noise[:MOST_NOISE], method, WEIGHED)


def by_steps(posterior: Any, white: Tensor, until: float) -> Shifts:
    """By Newton's steps ``A^-1 g`` along slopes of the log density at draws, by as many as it takes or has time for.

    Of draws of that density they are zero in the mean, and minus ``A^-1`` their products with what draws are off their
    mean: Stein's identity, whatever ``A``.  Draws that are nearly that are off, to first order, by what these lack, and
    by how far the line through a coordinate's steps is zero from their mean.  Each step has that of the Gaussian at the
    mode from the same noise as its control variate: errors are those of what is not normal in each coordinate, of
    however many.  In unconstrained coordinates.
    """
    parts, state = list[Tensor](), posterior.state
    A, size = state.precision, max(1, posterior._rows // 8)  # rows, of which autograd keeps several tensors
    sites = [(p.name, p.unconstrained_shape) for p in posterior._joint.latents if p.size]
    every = ((name, place) for name, shape in sites for place in itertools.product(*map(range, shape)))
    judged, left_out = posterior._judged
    names = tuple(itertools.compress(every, judged.tolist()))
    begun = time.process_time()
    together, until = TOGETHER if begun < until else 2 * SHARED, max(until, begun + AFTERWARDS)
    for count, rows in enumerate(white.split(together), 1):
        u, beside = posterior._unwhitened(rows).double(), posterior._beside(rows).double()
        with torch.enable_grad(), without_validation():
            slopes = [state.problem.density.gradient(x, state.theta)[1].detach() for x in u.to(state.u).split(size)]
        parts.append(torch.stack([u, beside, A.solve(torch.cat(slopes).double() + left_out)]))
        u, beside, step = torch.cat(parts, 1)[..., judged]
        away, square, num = u - u.mean(0), (beside - beside.mean(0)).square(), len(u)
        spread, fall, own = away.square().mean(0), -(away * step).mean(0), square.mean(0)
        noise = (step * spread / fall + beside) / (A.variance[0][judged] * spread / own).sqrt()
        noise_of_sd = 0.5 * (square / own + away * (step - step.mean(0)) / fall)
        value = torch.stack([noise.mean(0), -0.5 * (fall / own).log()])
        error = torch.stack([noise, noise_of_sd]).std(1) / num**0.5
        method = f"Newton's steps from {num:,} draws"
        apart = (noise - noise.mean(0))[:MOST_NOISE]
        found = Shifts(names, value, error, apart, method, "run NUTS on posterior.model")
        now = time.process_time()
        if found.is_settled() or now + (now - begun) / count > until:
            break
    return found


def moments(found: Shifts, label: Callable[[str, tuple[int, ...]], str]) -> tuple[bool, list[str]]:
    """Whether means or standard deviations are off for certain, with the surest error of each; else what is unknown."""
    rows = zip(*found.scaled, *found.pooled.scaled, found.alarms, found.unknown(), strict=True)
    off, doubtful = list[str](), list[str]()
    for (value, error, shrunk, rest, alarms, unknown), what in zip(rows, ("mean", "standard deviation"), strict=True):
        low, high = value - found.reach * error, shrunk + found.reach * rest
        unit = "standard deviations" if what == "mean" else "of it"
        if bool(alarms.any()):
            i = int(torch.where(alarms, low, -math.inf).argmax())
            off.append(f"the {what} of {label(*found.names[i])} is off by {value[i]:.2f} +- {error[i]:.2f} {unit}")
        elif bool(unknown.any()):
            i = int(torch.where(unknown, high.nan_to_num(nan=math.inf), -math.inf).argmax())
            how = f"may be off by up to {high[i]:.2f} {unit}" if high[i] < math.inf else "is not known"
            doubtful.append(f"the {what} of {label(*found.names[i])} {how}")
    if off:
        return True, [f"by {found.method} {', '.join(off)}: {found.remedy}"]
    if doubtful:
        return False, [f"by {found.method}, too few to know, {', '.join(doubtful)}"]
    return False, []


TRUSTED = 0.7  # k-hat up to which importance weights are believed
MANY = 1_000  # coordinates beyond which weights of joint draws spread by their number alone
NUM_WEIGHTED = 4_000  # draws to be weighted, where nobody says how many
FEWEST_WEIGHTED = 100  # to whose largest a tail can be fitted
NOTABLE_GAP = 0.1  # nats
ENOUGH = 1_000  # draws whose k-hat is known to about a tenth, beyond which only what is not settled asks for more
PRECISE = 0.02  # nats, a fifth of what is said of a log evidence: its standard error where no more draws are taken
AFTERWARDS = 0.1  # seconds for slopes at draws that have been made
OTHERWISE = {
    "gauss_newton": ", the default of networks: their predictors' own curvature is left out of this evidence, so weigh "
    "it against other Gauss-Newton evidences"
}

Draws = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]  # those that were weighed, and those that are judged


def importance_check(found: Smoothed, draws: Draws | None = None, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """The log evidence by importance sampling, how reliable that is, and what the weights change.

    :param found: weights by log ratios of the exact density to the approximation ``(S,)``, Pareto-smoothed, as in
        :func:`~pyro_evidence.importance_sampling`: one far out in the tail would else be all of their mean.
    :param draws: at which they were taken, and beside these what is judged, constrained, each ``(S,) + site shape``.
    :param dtype: in which the density was computed.
    """
    return {
        "pareto_k": found.pareto_k,
        "exact": importance.is_constant(found.log_weights, dtype),
        "log_evidence_importance": float(importance.log_mean(found.log_weights)),
        "log_evidence_importance_se": found.standard_error,
        "effective_sample_size": float(importance.effective_sample_size(found.log_weights)),
        **shifts(draws or ({}, {}), found),
    }


def check_weighted(num_samples: int) -> int:
    """The number of draws to be weighted.

    :raises BadInput: for too few of them.
    """
    remedy = "The weights' tail is fitted to the largest of them."
    return check_count("num_samples", num_samples, FEWEST_WEIGHTED, remedy)


def shifts(draws: Draws, smoothed: Smoothed) -> dict[str, float | str]:
    """Largest shift of a mean by the weights, in standard deviations, and largest ratio of standard deviations.

    A ratio of two standard deviations counts as the larger of itself and its reciprocal.

    :param draws: those that were weighed and what is judged, constrained, each ``(S,) + site shape``.
    """
    found = by_weights(Elements.of(draws[1]), *draws, smoothed) if draws[1] else None
    numbers, sites = [0.0, 0.0], ["", ""]
    if found is not None and found.names:
        numbers, places = (x.tolist() for x in found.value.abs().max(1))
        sites = [found.names[place][0] for place in places]
    return {
        "largest_mean_shift": numbers[0],
        "largest_mean_shift_site": sites[0],
        "largest_sd_ratio": math.exp(numbers[1]),
        "largest_sd_ratio_site": sites[1],
    }


# the entries of :func:`importance_check` where nothing can be drawn and weighed
NOT_CHECKED: dict[str, Any] = {
    **dict.fromkeys(
        ("pareto_k", "log_evidence_importance", "log_evidence_importance_se", "effective_sample_size"), math.nan
    ),
    "exact": False,
    **shifts(({}, {}), Smoothed(torch.zeros(1), math.nan)),
}


def lines(found: Mapping[str, Any], said: Sequence[str] = (), *, added: bool = False) -> list[str]:
    """Lines of text below the table of ``summary()``.

    :param found: the posterior's diagnostics.
    :param said: what there is to say of hyperparameters.
    :param added: whether the log evidence holds what importance sampling has found beside Laplace inside.
    """
    integration = []
    if found.get("marginalised_sites"):
        failures = f"; no inner mode at {found['inner_failures']} nodes" if found["inner_failures"] else ""
        integration.append(
            f"integrated numerically around Laplace: {', '.join(found['marginalised_sites'])}   "
            f"({found['integration']}, error {found['integration_error']:.2g} nats{failures})"
        )
    search, starts = list[str](), found.get("log_evidence_per_restart", ())
    curvature = found.get("curvature", "exact_hessian")
    heights = sorted((h for h in starts if not math.isnan(h)), reverse=True)
    if len(starts) > 1 and heights:
        agreed = sum(h > heights[0] - SAME_MODE for h in heights)
        search.append(f"{len(starts)} starts, {agreed} of which ended in the best mode")
    if heights and heights[0] - heights[-1] > SAME_MODE:
        levels = list(dict.fromkeys(round(h, 3) for h in heights))
        search.append(f"restarts reached different modes: log evidences {levels}")
    if curvature != "exact_hessian":
        search.append(f"curvature: {curvature}, not the exact Hessian{OTHERWISE.get(curvature, '')}")
    more = [*search, f"status: {found['status']}", *found.get("failed_restarts", ()), *found.get("notes", ())]
    return [*said, _evidence(found), *integration, *_doubts(found, added), *more]


def _evidence(found: Mapping[str, Any]) -> str:
    said = f"log evidence = {found['log_evidence']:.4f} nats"
    if "log_evidence_by" in found:  # whatever is known of the draws
        return f"{said}   ({found['log_evidence_by']})"
    if found.get("exact"):
        return f"{said}   (exact: given the hyperparameters the posterior is Gaussian)"
    if _unchecked(found):
        return f"{said}   (no importance sampling: the data were not kept, or there is no curvature of all weights)"
    check = f"{found['log_evidence_importance']:.4f} +- {found['log_evidence_importance_se']:.4f}"
    return f"{said}   (importance sampling {check}, {importance.tail_words(found['pareto_k'])})"


def _unchecked(found: Mapping[str, Any]) -> bool:
    """Whether there was nothing to draw from, or to weigh by."""
    return math.isnan(found["log_evidence_importance"]) and math.isnan(found["effective_sample_size"])


def _doubts(found: Mapping[str, Any], added: bool) -> list[str]:
    """Doubts by importance weights: in the log evidence, whatever k-hat, and in the draws, where it is low."""
    said = []
    gap, error = found["log_evidence_importance"] - found["log_evidence"], found["log_evidence_importance_se"]
    agrees = found.get("moments") == (False, []) and abs(gap) + 3.0 * error < NOTABLE_GAP  # whatever tails weights have
    reliable = found["pareto_k"] <= TRUSTED or agrees  # not nan
    if "log_evidence_by" in found:
        pass  # the weights are of the draws alone, of which their moments say more
    elif found.get("num_blocks"):
        if found["blocks_above"] and found.get("moments") != (False, []):  # else draws are known to be right
            said.append(
                f"k-hat of {found['blocks_above']:,} of {found['num_blocks']:,} blocks is above 0.7: their draws "
                "are not to be trusted, nor a log evidence by nodes=1; posterior.blocks(site) has means by quadrature."
            )
    elif not reliable and not _unchecked(found):
        many = found.get("num_coordinates", 0) > MANY  # weights of joint draws spread with their number
        is_off = found["moments"][0] if "moments" in found else not many
        why = "k-hat is above 0.7" if math.isfinite(found["pareto_k"]) else importance.tail_words(found["pareto_k"])
        said.append(
            f"{why}: importance sampling says little of the log evidence."
            if not is_off
            else f"{why}: the posterior is far from Gaussian; trust neither number, run NUTS on posterior.model."
        )
    elif not _unchecked(found):
        missed = added and gap < 0  # by draws of the whole, fewer and not adapted as those inside are
        if abs(gap) > max(NOTABLE_GAP, 3.0 * error) and not missed:
            said.append(
                f"Laplace's log evidence is {abs(gap):.2f} nats too {'low' if gap > 0 else 'high'} by importance "
                f"sampling ({error:.2g} is its standard error): compare models by importance_sampling(posterior)."
            )
    return said + (found["moments"][1] if "moments" in found else [])


def check_until(posterior: Any, until: float) -> dict[str, Any]:
    """The entries of :func:`importance_check`, and ``moments``, by a given time.

    Importance weights of ever more draws, until they say enough; where they degenerate, or their errors are too large,
    by Newton's steps from the draws, unless these say no more and weights have a mean, though of too few draws to tell.

    :param until: by ``time.process_time()``; half of the time is for importance weights.
    """
    generator, now = seeded(0), time.process_time()
    most = max(SHARED, min(posterior._num_checked, HELD_NUMBERS // max(1, len(posterior.state.u)) // SHARED * SHARED))
    rows, parts, noise = list[Tensor](), list[Tensor](), list[Tensor]()

    def draw(num: int) -> None:
        noise.append(posterior._white(num, generator))
        drawn, log_weights = posterior._weighed_rows(noise[-1])
        rows.extend(drawn)
        parts.append(log_weights)

    for num in posterior._looks(draw, most, 0.5 * (now + until)):
        u, log_weights = torch.cat(rows), torch.cat(parts)
        draws = posterior._constrained(u), posterior._reported(u)
        found = importance_check(importance.checked(log_weights), draws, posterior._joint.dtype)
        elements = Elements.of(draws[1])
        moved = by_weights(elements, *draws, importance.checked(log_weights))
        is_reliable = found["pareto_k"] <= importance.threshold(num)
        is_known = moved.is_settled(NOTABLE) and found["log_evidence_importance_se"] < PRECISE
        error = moved.pooled.scaled[1]
        is_hopeless = not is_reliable or bool((moved.reach * error * (num / most) ** 0.5 > HARMFUL).any())
        if found["pareto_k"] == -math.inf or (num >= ENOUGH and (is_known or is_hopeless)):
            break
    if posterior._is_by_blocks:
        check = partial(check_by_blocks, posterior._inside, float(posterior.log_evidence), seed=0)
        found |= most_until(check, most, 0.5 * (time.process_time() + until))
    best = moved
    if not (is_reliable and moved.is_settled()):
        steps = by_steps(posterior, torch.cat(noise), until)
        best = steps if steps.is_settled() or found["pareto_k"] > 1.0 else moved  # whose weights have no mean
    return found | {"moments": moments(best, names_of(posterior._joint).label)}


def most_until(check: Callable[[int], dict[str, Any]], most: int, until: float) -> dict[str, Any]:
    """A check of three times as many draws, ``most`` of them at the end, as long as there is time for these."""
    num = FEWEST_WEIGHTED
    while True:
        begun = time.process_time()
        found = check(min(num, most))
        now = time.process_time()
        if num >= most or now + 3.0 * (now - begun) > until:
            return found
        num *= 3


MOST = 2**27  # of log densities of a check


@dataclass(frozen=True, eq=False)
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
    marginal, here, affordable = _blocks_at_mode(state, NUM_DRAWS)
    num_samples = check_weighted(affordable if num_samples is None else num_samples)
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
        terms = marginal.density.terms(state.theta)
        nodes = placed(p, here.modes.own, here.modes.tril, marginal.num)
        log_terms = _valued(terms, nodes.rows, here) + nodes.log_weights
        k_hat = pareto_shapes(log_weights_of(terms, here, num_samples, seed))
    log_integral, weights = log_terms.logsumexp(0), log_terms.softmax(0)[:, p.block]
    mean = (weights * nodes.rows).sum(0)
    sd = (weights * (nodes.rows - mean).square()).sum(0).sqrt()
    chosen = p.block[position].unique()
    place = torch.arange(len(p.own), device=p.block.device)
    first = p.block.new_full((p.num_blocks,), p.size).scatter_reduce_(0, p.block, place, "amin")
    names = element_names(joint, p.own[first[chosen]])
    numbers = (k_hat, log_integral, log_integral - by_laplace(here))
    moments = (x[position].reshape(part.unconstrained_shape) for x in (mean, sd))
    return Blocks(names, *(x[chosen] for x in numbers), *moments)


def check_by_blocks(state: LaplaceState, log_evidence: float, num_samples: int, seed: int) -> dict[str, Any]:
    """The entries of :func:`importance_check`, of each block by itself given what blocks share at its mode.

    :param log_evidence: by Laplace, nats; importance sampling of the blocks' integrals is added to it.
    """
    marginal, place, num = _blocks_at_mode(state, num_samples)
    with without_validation(), torch.no_grad():
        log_weights = log_weights_of(marginal.density.terms(state.theta), place, num, seed)
    shapes, weights = pareto_shapes(log_weights), (log_weights - log_weights.amax(0)).exp()
    # fewer draws know the shape of each block so badly that the largest of many says nothing
    unsure = 0.0 if num >= ENOUGH else beyond(len(shapes)) * (1.0 + shapes) / importance.tail_size(num) ** 0.5
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
        "blocks_above": int((shapes > TRUSTED + unsure).sum()),
    }


def _blocks_at_mode(state: LaplaceState, most: int) -> tuple[Marginal, SharedIterate, int]:
    """Independent blocks, what they are at the mode, and the number of draws whose log densities are not too many."""
    problem = state.problem
    marginal = problem.marginal or problem.by_quadrature(COMPARED)
    if marginal is None:
        raise no_blocks(problem.joint, problem.structure, "blocks(...)")
    p, place = marginal.partition, state.place
    if place is None:
        with torch.enable_grad(), without_validation():
            place = marginal.place(marginal.density.terms(state.theta), state.u[p.own], state.u[p.shared])
    data = sum(len(owner) for owner in p.owner.values())
    return marginal, place, max(FEWEST_WEIGHTED, min(most, MOST // max(1, data)))


def log_weights_of(terms: Terms, here: SharedIterate, num_samples: int, seed: int) -> Tensor:
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


def _valued(terms: Terms, rows: Tensor, here: SharedIterate) -> Tensor:
    """The log joint density of each block at many rows, ``(Q, G)``, a few rows at a time."""
    data = sum(len(owner) for owner in terms.density.partition.owner.values())
    size = max(1, HELD_NUMBERS // max(1, data))
    return torch.cat([terms(part, here.shared)[:, :-1] for part in rows.split(size)])
