"""The other modes of a density, and the integral over all of them.

Climbed to from the best of many draws from the prior, and from images of the modes that are found: with signs turned,
elements exchanged along an axis, or sites exchanged.  Integrated by importance sampling from normals at all modes
(Owen and Zhou, 2000: weights against the whole mixture), which counts overlap once.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.laplace.approximation import LaplaceState, search_modes, state_at
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.coordinates import is_identity
from pyro_evidence.precision.dense import Dense, Precision, precision_tril
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.simulate import affordable_draws, latents_from_prior, rows_at_once
from pyro_evidence.settings import seeded

DRAWS = 1_000  # from the prior: of two modes of equal mass, a hundredth of it finds each with probability .99995
CLIMBS = 16  # from the best of them, and from images of each mode: six components have fifteen pairs
MOST_MODES = 120  # five components have as many labellings
ROUNDS = 12  # of images of images; ten exchanges of neighbours reverse the order of five components
NEAR = 0.1  # standard deviations between two ends of climbs to one mode
FAINT = math.log(1e4)  # nats below the highest evidence: a mode that holds less than a ten thousandth is left out
WORTH = 20.0  # nats below a mode at which a climb may still end as high: half the square of six standard deviations
HIGHER = 3.0  # nats above the Gaussian at a mode, twenty times as likely: on another one, or on a skewed slope
WEIGHTED = 8_000  # draws: the log evidence is then known to .01 nats where they keep half of their weight
TAILS = ((1.0, 0.8), (3.0, 0.2))  # standard deviations of the proposal in those of a mode, and shares of its draws
LEAST_SHARE = 0.01  # of the draws of the highest mode, for each


@dataclass(frozen=True)
class NormalMixture:
    """Normals ``N(loc_m, A_m^-1)`` over the active coordinates, in proportions ``exp(log_mixing_m)``.

    :ivar log_mixing: shape ``(M,)``.
    :ivar loc: means, shape ``(M, d)``.
    :ivar precisions: of all coordinates, one on those that are not active.
    :ivar active: which of them are, bool, shape ``(D,)``.
    """

    log_mixing: Tensor
    loc: Tensor
    precisions: tuple[Precision, ...]
    active: Tensor

    def log_prob(self, u: Tensor) -> Tensor:
        """Log density of rows ``(S, d)``, shape ``(S,)``."""
        return self.by_component(u).logsumexp(0)

    def by_component(self, u: Tensor) -> Tensor:
        """Log density of rows ``(S, d)`` that each normal contributes, its share counted, ``(M, S)``."""
        away = [self._among_all(u - loc) for loc in self.loc]
        white = [p.whiten(x) for p, x in zip(self.precisions, away, strict=True)]
        return torch.stack([self._component(x, m) for m, x in enumerate(white)])

    def _component(self, white: Tensor, m: int) -> Tensor:
        log_norm = 0.5 * (self.precisions[m].log_det[0] - int(self.active.sum()) * math.log(math.tau))
        return self.log_mixing[m] + log_norm - 0.5 * white.square().sum(-1)

    def _among_all(self, x: Tensor) -> Tensor:
        """Rows ``(S, d)`` with zeros for the coordinates that are not active, ``(S, D)``."""
        return x.new_zeros(len(x), len(self.active)).index_copy(1, self.active.nonzero().squeeze(-1), x)

    def counts(self, num_samples: int) -> Tensor:
        """How many of ``num_samples`` draws each normal gives, proportional to within 1, shape ``(M,)``."""
        ends = (self.log_mixing.exp().cumsum(0) * num_samples).round().long()
        return torch.diff(ends, prepend=ends.new_zeros(1))

    def unwhiten(self, white: Tensor) -> Tensor:
        """White rows ``(S, d)`` to draws, stratified: the first ``counts[0]`` rows to the first normal."""
        return self.of_components(white, torch.arange(len(self.loc)).repeat_interleave(self.counts(len(white)).cpu()))

    def of_components(self, white: Tensor, component: Tensor) -> Tensor:
        """White rows ``(S, d)`` to draws of the normals that ``component`` ``(S,)`` names."""
        found = torch.empty_like(white)
        for m, (loc, precision) in enumerate(zip(self.loc, self.precisions, strict=True)):
            own = (component == m).nonzero().squeeze(-1).to(white.device)
            found[own] = loc + precision.unwhiten(self._among_all(white[own]))[:, self.active]
        return found

    def drawn(self, white: Tensor) -> tuple[Tensor, Tensor]:
        """Draws from white rows, and their log density, which of a single normal is that of the white rows."""
        rows = self.unwhiten(white)
        return rows, self._component(white, 0) if len(self.loc) == 1 else self.log_prob(rows)


def tour(state: LaplaceState, num_draws: int, seed: int) -> tuple[LaplaceState, ...]:
    """The modes that can be found at a state's hyperparameters, the highest evidence first; more than one or itself.

    :param num_draws: from the prior.
    """
    with without_validation():
        found = _climbed([state], _best_draws(state, num_draws, seed))
        looked = 0
        for _ in range(ROUNDS):
            before, looked = looked, len(found)
            if before == looked or looked > MOST_MODES:
                break
            images = torch.cat([_images(mode) for mode in found[before:]])
            found = _climbed(found, images)
    top = max(float(mode.log_evidence) for mode in found)
    kept = [mode for mode in found if float(mode.log_evidence) > top - FAINT]
    return tuple(sorted(kept, key=_rank))


def _rank(mode: LaplaceState) -> tuple[float, list[float]]:
    """The highest first; of equal ones that with the least coordinates, whichever rounding made higher."""
    return -round(float(mode.log_evidence), 5), [round(x, 3) for x in mode.u.tolist()]


def _heights(state: LaplaceState, rows: Tensor) -> Tensor:
    """Log joint density of rows ``(S, D)``, nats, minus infinity where there is none."""
    problem = state.problem
    with torch.no_grad():
        parts = rows.split(rows_at_once(problem.joint))
        value = torch.cat([problem.density.log_joint(part, state.theta) for part in parts])
    return value.nan_to_num(nan=-math.inf, posinf=-math.inf)


def _best_draws(state: LaplaceState, num: int, seed: int) -> Tensor:
    """The highest of ``num`` draws from the prior, each far from those before it, ``(at most CLIMBS, D)``.

    Those alone that lie higher than the Gaussian at the mode has them: the others are on its slopes.
    Of a prior that is improper, or cannot be drawn from in rows, they are uniform on (-2, 2), as NUTS starts.
    """
    joint = state.problem.joint
    try:
        values = latents_from_prior(joint, state.theta, num, seed, apart=False)
        rows = torch.cat([p.transform.inv(values[p.name]).reshape(num, -1) for p in joint.latents], -1).to(state.u)
    except (ArithmeticError, RuntimeError, NotImplementedError, ValueError, Warning):
        uniform = torch.rand(num, len(state.u), generator=seeded(seed), dtype=torch.float64)
        rows = (4.0 * uniform - 2.0).to(state.u)
    height = _heights(state, rows)
    slopes = float(state.log_joint) - 0.5 * state.precision.whiten(rows - state.u).square().sum(-1)
    order = height.argsort(descending=True)
    rows = rows[order][((height > slopes + HIGHER) & height.isfinite())[order]]
    if len(rows) < 2:
        return rows
    chosen: list[int] = []
    spread = rows.std(0).clamp(min=torch.finfo(rows.dtype).tiny)  # a coordinate that never varies sets nothing apart
    scaled = rows / spread
    for row in range(len(rows)):
        apart = all(float((scaled[row] - scaled[other]).norm()) > NEAR * len(state.u) ** 0.5 for other in chosen)
        chosen += [row] if apart else []
        if len(chosen) == CLIMBS:
            break
    return rows[chosen]


def _climbed(known: Sequence[LaplaceState], starts: Tensor) -> list[LaplaceState]:
    """The known modes and those reached elsewhere from ``starts`` ``(S, D)``; failed climbs are left out."""
    found = list(known)
    starts = starts[[not any(_is_near(mode, row) for mode in found) for row in starts]]
    if not len(starts):
        return found
    problem, theta = found[0].problem, found[0].theta
    try:
        reached = search_modes(problem, starts, theta, cold=True)
    except ArithmeticError:
        return found
    for row in range(len(starts)):
        if not bool(reached.converged[row]) or any(_is_near(mode, reached.u[row]) for mode in found):
            continue
        with suppress(ArithmeticError):
            mode = state_at(problem, theta, reached, row, log_hyperprior=found[0].log_hyperprior)
            found += [mode] if bool(mode.log_evidence.isfinite()) else []
    return found


def _is_near(mode: LaplaceState, u: Tensor) -> bool:
    """Whether ``u`` ``(D,)`` is a mode's place, by the standard deviations there."""
    return float(mode.precision.whiten((u - mode.u).unsqueeze(0)).norm()) < NEAR


def _images(mode: LaplaceState) -> Tensor:
    """The highest images of a mode that lie about as high, ``(at most CLIMBS, D)``."""
    rows = torch.stack([mode.u, *_turned(mode), *_exchanged(mode.problem.joint, mode.u)])
    height = _heights(mode, rows)
    order = height.argsort(descending=True)
    return rows[order][height[order] > height[0] - WORTH][:CLIMBS]


def _turned(mode: LaplaceState) -> Iterator[Tensor]:
    """Real coordinates with their signs turned: one, sites and pairs of sites whole, one element in all of them."""
    joint = mode.problem.joint
    real = {part.name: torch.ones(part.shape) for part in joint.latents if is_identity(part.transform)}
    masks = [_mask(mode, {n: real[n] for n in some}) for k in (1, 2) for some in itertools.combinations(real, k)]
    masks += [torch.arange(len(mode.u)) == index for index in _mask(mode, real).nonzero().flatten()]
    for size in {size for ones in real.values() for size in ones.shape if size > 1}:
        axes = {name: axis for name, axis in axes_of_length(joint, size).items() if name in real}
        for k in range(size):
            others = torch.arange(size)[torch.arange(size) != k]
            masks.append(_mask(mode, {name: real[name].index_fill(axis, others, 0.0) for name, axis in axes.items()}))
    for mask in masks:
        yield torch.where(mask.to(mode.u.device), -mode.u, mode.u)


def _mask(mode: LaplaceState, chosen: Mapping[str, Tensor]) -> Tensor:
    """The coordinates of some sites' elements, bool ``(D,)``."""
    found, latents = torch.zeros(len(mode.u), dtype=torch.bool), mode.problem.joint.latents
    for name, elements in chosen.items():
        found[latents.slices[name]] = elements.reshape(-1).bool()
    return found


def _exchanged(joint: LogJoint, u: Tensor) -> Iterator[Tensor]:
    """Two elements along an axis exchanged, in all sites with an axis of that length; and two sites of one shape."""
    values = joint.latents.constrained(u.to(joint.dtype))

    def flat(moved: dict[str, Tensor]) -> Tensor:
        return joint.latents.flat(values | moved).to(u)

    for size in {size for part in joint.latents for size in part.shape if size > 1}:
        axes = axes_of_length(joint, size)
        for pair in itertools.combinations(range(size), 2):
            order = torch.arange(size, device=u.device)
            order[list(pair)] = order[list(pair)].flip(0)
            yield flat({name: values[name].index_select(axis, order) for name, axis in axes.items()})
    for a, b in itertools.combinations(joint.latents, 2):
        if a.shape == b.shape and a.unconstrained_shape == b.unconstrained_shape:
            try:
                yield flat({a.name: values[b.name], b.name: values[a.name]})
            except ValueError:  # one's value lies outside of the other's support
                continue


def axes_of_length(joint: LogJoint, num: int) -> dict[str, int]:
    """The first axis of length ``num``, two or more, of each latent site that has one."""
    return {p.name: list(p.shape).index(num) for p in joint.latents if num > 1 and num in p.shape}


@dataclass(frozen=True)
class ModeIntegral:
    """The integral of a density over all its modes, by importance sampling.

    :ivar log_evidence: nats, ``()``.
    :ivar error: its standard error, nats.
    :ivar pareto_k: of the weights; above .7 the number is none.
    :ivar log_shares: of each mode in the integral, ``(M,)``.
    :ivar num_draws: that were weighed in the end.
    """

    log_evidence: Tensor
    error: float
    pareto_k: float
    log_shares: Tensor
    num_draws: int


def proposal(modes: Sequence[LaplaceState], tails: Sequence[tuple[float, float]] = ((1.0, 1.0),)) -> NormalMixture:
    """Normals at all modes, in proportion to their evidences but at least a hundredth of the largest.

    :param tails: widths of the normals at each mode, in its standard deviations, and their shares.
    """
    heights = torch.stack([mode.log_evidence for mode in modes])
    least = float(heights.max()) + math.log(LEAST_SHARE)
    log_mixing = heights.clamp(min=least).log_softmax(0)  # no mode without draws
    trils = [precision_tril(mode.precision, len(mode.u)) for mode in modes]
    precisions = tuple(Dense((tril / width).unsqueeze(0)) for tril in trils for width, _ in tails)
    log_shares = log_mixing.new_tensor([share for _, share in tails]).log()
    loc = torch.stack([mode.u for mode in modes]).repeat_interleave(len(tails), 0)
    mixing = (log_mixing.unsqueeze(-1) + log_shares).reshape(-1)
    return NormalMixture(mixing, loc, precisions, modes[0].problem.active)


def integral_over(modes: Sequence[LaplaceState], seed: int) -> ModeIntegral:
    """Importance sampling from two normals at each mode, the wider one for tails; weights Pareto-smoothed.

    Adapted twice: normals of the weighted draws' shares, means and covariances stand beside the first ones, after
    Cappe, Douc, Guillin, Marin and Robert (2008), eq. 15.
    """
    state, generator = modes[0], seeded(seed)
    num = affordable_draws(state.problem.joint, WEIGHTED)
    first = mixture = proposal(modes, TAILS)
    for last in (False, False, True):
        white = torch.randn(num, len(state.u), generator=generator, dtype=torch.float64).to(state.u)
        u = mixture.unwhiten(white)
        parts = mixture.by_component(u)
        with without_validation():
            found = importance.checked(_heights(state, u) - parts.logsumexp(0))
        mixture = (
            mixture if last else _adapted(first, u, (found.log_weights.log_softmax(0) + parts.log_softmax(0)).exp())
        )
    by_mode = parts.reshape(-1, len(modes), len(TAILS), num).logsumexp((0, 2))
    log_shares = (found.log_weights + by_mode.log_softmax(0)).logsumexp(-1).log_softmax(0)
    error = float(importance.standard_error(found.log_weights))
    return ModeIntegral(importance.log_mean(found.log_weights), error, found.pareto_k, log_shares, num)


def _adapted(first: NormalMixture, u: Tensor, weights: Tensor) -> NormalMixture:
    """The first normals, with half of the draws, beside such with the moments of weighted rows ``(S, d)``.

    :param weights: of each row in each normal that it was drawn from, ``(m M, S)``; a normal whose rows are too few for
        a covariance is the first one again.
    """
    weights = weights.reshape(-1, len(first.loc), len(u)).sum(0)
    weights = weights / weights.sum()
    share = weights.sum(-1)
    precisions, locs = [], []
    for own, loc, precision in zip(weights, first.loc, first.precisions, strict=True):
        own = own / own.sum().clamp(min=torch.finfo(own.dtype).tiny)  # all zero where no row of its was drawn
        mean = own @ u
        away = u - mean
        tril, info = torch.linalg.cholesky_ex(away.mT @ (own.unsqueeze(-1) * away))
        enough = int(info) == 0 and float(1.0 / own.square().sum()) > 2.0 * u.shape[-1]
        locs.append(mean if enough else loc)
        precisions.append(_of_covariance(tril) if enough else precision)
    share = share.clamp(min=LEAST_SHARE / len(share))  # none without draws
    log_mixing = torch.cat([first.log_mixing, (share / share.sum()).log()]) - math.log(2.0)
    return NormalMixture(
        log_mixing, torch.cat([first.loc, torch.stack(locs)]), (*first.precisions, *precisions), first.active
    )


def _of_covariance(tril: Tensor) -> Dense:
    """The precision of a covariance by its Cholesky factor."""
    return Dense(torch.linalg.cholesky(torch.cholesky_inverse(tril)).unsqueeze(0))
