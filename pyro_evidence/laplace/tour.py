"""The other modes of a density, and the integral over all of them.

Climbed to from the best of many draws from the prior, and from images of the modes that are found: with signs turned,
elements exchanged along an axis, or sites exchanged.  Integrated by importance sampling from normals and t
distributions at all modes (Owen and Zhou, 2000: weights against the whole mixture), which counts overlap once.  Where
elements have many orders, one order is integrated, and multiplied by their number.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.functional import softplus

from pyro_evidence.errors import NotAMode
from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.laplace.approximation import LaplaceState, laplace_state, search_modes, state_at
from pyro_evidence.laplace.mode_checks import is_proper, no_integral, rounding
from pyro_evidence.numerics import derivatives, importance, lbfgs
from pyro_evidence.numerics.batched import CACHED_NUMBERS, Batched, OneSummand
from pyro_evidence.numerics.coordinates import is_identity
from pyro_evidence.numerics.derivatives import normal_draws
from pyro_evidence.numerics.importance import NodeWeights, Smoothed
from pyro_evidence.numerics.line_search import lead_uphill
from pyro_evidence.numerics.newton import Density
from pyro_evidence.numerics.quadrature.rules import LAST, Line, on_line, quasi_normal, student_log_density
from pyro_evidence.precision.dense import Dense, Precision, Triangular
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.simulate import latents_from_prior, rows_at_once
from pyro_evidence.settings import seeded
from pyro_evidence.structure.symmetries import (
    LOOKS,
    angles,
    axes_of_length,
    exchanged,
    lengths,
    on_intervals,
    relabelled,
    reordered,
    sign_turns,
    swaps,
    turned_by,
    without_order,
)

DRAWS = 1_000  # from the prior: of two modes of equal mass, a hundredth of it finds each with probability .99995
CLIMBS = 16  # from the best of them, and from images of each mode: six components have fifteen pairs
MOST_MODES = 120  # beyond, their normals are no longer worth their price
MOST_ORDERS = 6  # of three elements; of more, one order is integrated
ROUNDS = 12  # of images of images; ten exchanges of neighbours reverse the order of five components
NEAR = 0.1  # standard deviations between two ends of climbs to one mode
FAINT = math.log(1e6)  # nats below the highest evidence: few of the draws are where modes that are left out are
WORTH = 20.0  # nats below a mode at which a climb may still end as high: half the square of six standard deviations
HIGHER = 3.0  # nats above the Gaussian at a mode, twenty times as likely: on another one, or on a skewed slope
LITTLE = 2e7  # bytes kept by autograd for the rows of a look, a twentieth of a second: what may cost no more than that
PRICE = 4e8  # bytes for the rows of an integral over several modes, a second
FEWEST = 64  # rows, whatever they cost
WEIGHTED = 8_000  # draws: the log evidence is then known to .01 nats where they keep half of their weight
ON_A_LINE = 256  # nodes, in place of draws: panels of ten around a mode, and twice as many halves
STEEP_AT = 10.0  # standard deviations from a mode, where an exponential density is as many nats lower
OUTERMOST = 16  # draws, beyond which too few are to tell what is there
ROUNDING = 0.1  # nats, of a log joint that large terms make up
OF_EACH = 256  # of them at least, whatever they cost, at each mode: a tenth of the rows of the climbs that found it
PRECISE, MORE = 0.005, 8.0  # nats, the standard error for which more are drawn in the end, up to so many times as many
FINITE = 0.5  # k-hat below which weights have a variance: their standard error then falls as more are drawn
HEAVY = 0.2  # of the draws at each mode, from a t distribution: densities fall as slowly as Cauchy's, or exponentially
WIDE, PRIOR = 0.1, 256  # of the draws, from what is as wide as the prior, of which so many draws tell
PARTS, MOST_PARTS = 10, 20  # of the draws, that a normal at a heavy one has; and so many such normals
DEGREES = 2.0  # of freedom of these: the square of such a draw's length is a normal one's over an exponential number
POWERS = (0.1, 0.2, 0.4, 0.7, 1.0)  # of the density at which walkers move, so that valleys between them are shallow
WALKERS, MOVES, FAMILIES = 512, 16, 8  # moves at each power; normals fitted to where walkers end, in as many rounds
PARTICLES, GROUPS = 4_096, 16  # that walk to a density whose weights cannot be trusted
MOST_WALKED = 32  # coordinates, of each of which a group has eight particles; they take as many moves at each power
FURTHER = 3  # times as many moves as at one power, after which particles that miss a place have begun to reach it
STRETCHES = 4  # of such moves at most, until they no longer rise; one where these are dear
DOUBTED = 0.5  # nats of standard error, beyond which sixteen groups do not tell it
TOLD = 0.05  # nats, about what they tell it by: weights that do better are not replaced
FOR_MOMENTS = 3  # times as many draws as in a turn, of which each set of unused elements has its share
TURNS = 2  # of adaptation: the second sees what the first has left in the tails
NEARLY_ALL = 0.9  # of the draws that weights leave: a tail that looks heavy then holds next to nothing
LEAST_SHARE = 0.01  # of the draws of the highest mode, for each
NARROWER = 0.1  # of the length of the mean direction, by which a sum of angles is to vary less than one: beyond chance
TRIED = 64  # draws at which elements are exchanged, by which their numbers' standard deviations are known to a tenth
Heights = Callable[[Tensor], tuple[Tensor, Tensor]]  # of rows: the log joint density, and that which is integrated
NO_PRIOR_DRAWS = (ArithmeticError, RuntimeError, NotImplementedError, ValueError, Warning)  # improper, or not in rows


@dataclass(frozen=True, eq=False)
class NormalMixture:
    """Normals ``N(loc_m, A_m^-1)``, or such t distributions, over the active coordinates; shares ``exp(log_mixing_m)``.

    :ivar log_mixing: shape ``(M,)``.
    :ivar loc: means, shape ``(M, d)``.
    :ivar precisions: of all coordinates, one on those that are not active.
    :ivar active: which of them are, bool, shape ``(D,)``.
    :ivar heavy: which are t distributions of two degrees of freedom; all are normal where it is empty.
    """

    log_mixing: Tensor
    loc: Tensor
    precisions: tuple[Precision, ...]
    active: Tensor
    heavy: tuple[bool, ...] = ()

    def log_prob(self, u: Tensor) -> Tensor:
        """Log density of rows ``(S, d)``, shape ``(S,)``."""
        return self.by_component(u).logsumexp(0)

    def by_component(self, u: Tensor) -> Tensor:
        """Log density of rows ``(S, d)`` that each component contributes, its share counted, ``(M, S)``."""
        return self._of_squares(self._squares(u))

    def _squares(self, u: Tensor) -> Tensor:
        """Squared lengths of rows ``(S, d)`` about each mean in its metric, ``(M, S)``."""
        factors = [p.tril for p in self.precisions if isinstance(p, Triangular)]
        if len(factors) < len(self.precisions):
            pairs = zip(self.precisions, self.loc, strict=True)
            return torch.stack([p.whiten(self._among_all(u - loc)).square().sum(-1) for p, loc in pairs])
        whiten = torch.cat(factors).mT[..., self.active].to(u)  # (M, D, d): one product for all
        centres = whiten @ self.loc.unsqueeze(-1)
        parts = u.split(max(1, CACHED_NUMBERS // whiten[..., 0].numel()))
        return torch.cat([((whiten @ x.mT) - centres).square_().sum(1) for x in parts], -1)

    def _of_squares(self, squares: Tensor) -> Tensor:
        """Log density that each component contributes at such lengths ``(M, S)``."""
        size, volumes = self.loc.shape[-1], self.log_mixing + 0.5 * torch.cat([p.log_det for p in self.precisions])
        found = -0.5 * (size * math.log(math.tau) + squares)
        if any(self.heavy):
            heavy = torch.tensor(self.heavy).unsqueeze(-1).to(squares.device)
            found = torch.where(heavy, student_log_density(squares, size, DEGREES), found)
        return volumes.unsqueeze(-1) + found

    def _among_all(self, x: Tensor) -> Tensor:
        """Rows ``(S, d)`` with zeros for the coordinates that are not active, ``(S, D)``."""
        if x.shape[-1] == len(self.active):
            return x
        return x.new_zeros(len(x), len(self.active)).index_copy(1, self.active.nonzero().squeeze(-1), x)

    def counts(self, num_samples: int) -> Tensor:
        """Number of draws from each component out of ``num_samples``, proportional to within 1, shape ``(M,)``."""
        ends = (self.log_mixing.exp().cumsum(0) * num_samples).round().long()
        return torch.diff(ends, prepend=ends.new_zeros(1))

    def unwhiten(self, white: Tensor) -> Tensor:
        """White rows to draws, stratified: the first ``counts[0]`` rows to the first component.

        :param white: shape ``(S, d)``; ``(S, d + 1)`` where some are t distributions.
        """
        return self.of_components(white, torch.arange(len(self.loc)).repeat_interleave(self.counts(len(white)).cpu()))

    def of_components(self, white: Tensor, component: Tensor) -> Tensor:
        """White rows, as in :meth:`unwhiten`, to draws ``(S, d)`` of those that ``component`` ``(S,)`` names."""
        size = self.loc.shape[-1]
        found = torch.empty_like(white[:, :size])
        for m, (loc, precision) in enumerate(zip(self.loc, self.precisions, strict=True)):
            own = (component == m).nonzero().squeeze(-1).to(white.device)
            noise = white[own, :size]
            if any(self.heavy[m : m + 1]):  # over the root of an exponential number
                noise = noise * torch.special.log_ndtr(white[own, size:]).neg().rsqrt()
            found[own] = loc + precision.unwhiten(self._among_all(noise))[:, self.active]
        return found

    def unwhiten_pairs(self, white: Tensor) -> Tensor:
        """White rows ``(S, d + 1)`` to draws, and to their mirror images in the components' means, ``(2 S, d)``.

        What is odd in a log density about a mode, its skewness first, cancels in each pair.
        """
        component = torch.arange(len(self.loc)).repeat_interleave(self.counts(len(white)).cpu())
        mirrored = torch.cat([-white[:, :-1], white[:, -1:]], -1)
        return self.of_components(torch.cat([white, mirrored]), component.repeat(2))

    def drawn(self, white: Tensor) -> tuple[Tensor, Tensor]:
        """Draws from white rows, and their log density, which of a single normal is that of the white rows."""
        rows, single = self.unwhiten(white), len(self.loc) == 1
        return rows, self._of_squares(white.square().sum(-1).unsqueeze(0))[0] if single else self.log_prob(rows)


@dataclass(frozen=True, eq=False)
class ActiveDensity:
    """``log p(D, w | hyperparameters)`` of rows ``(S, d)``: the active unconstrained coordinates.

    Those on an interval may be normal scores: a density that is level at an end then has a normal one's tail, which in
    log odds is exponential.  Angles, or their sums with others, are counted from a cut: where they close, an
    unconstrained one is infinite.
    """

    joint: LogJoint
    density: Density
    theta: Tensor  # (T,)
    active: Tensor  # (D,) bool
    centre: Tensor  # (D,) where the inactive coordinates stay
    cut: Tensor | None = None  # (d,) turns, 0 where an interval does not close, nan where there is none; None: nowhere
    sums: Tensor | None = None  # (d, d) what is added to each angle: one, or minus one, times another that stays

    @property
    def size(self) -> int:
        """Number of active coordinates."""
        return int(self.active.sum())

    def reduced(self, u: Tensor) -> Tensor:
        """Rows ``(S, D)`` of all coordinates as rows ``(S, d)``."""
        x = u[..., self.active]
        if self.cut is None:
            return x
        odds = self._turned(x, back=False)
        return x.where(self.cut.isnan(), -odds.sign() * torch.special.ndtri(torch.sigmoid(-odds.abs())))

    def embedded(self, x: Tensor) -> Tensor:
        """Rows ``(S, d)`` as rows ``(S, D)`` of all coordinates."""
        if self.cut is not None:
            odds = torch.special.log_ndtr(x) - torch.special.log_ndtr(-x)
            x = x.where(self.cut.isnan(), self._turned(odds, back=True))
        if self.size == len(self.active):
            return x
        u = self.centre.expand(len(x), -1).clone()
        u[:, self.active] = x
        return u

    def log_joint(self, x: Tensor) -> Tensor:
        """Log joint density, nats, Jacobian included, shape ``(S,)``; -inf outside the support, and where it is nan."""
        value = self.log_joint_or_nan(x)
        return torch.where(value.isnan(), -torch.inf, value)

    def log_joint_or_nan(self, x: Tensor) -> Tensor:
        """Log joint density with nan where the model computes nan."""
        with torch.no_grad(), without_validation():
            u = self.embedded(x)
            value = torch.cat([self.density.log_joint(part, self.theta) for part in u.split(rows_at_once(self.joint))])
        if self.cut is None:
            return value
        odds = u[:, self.active]
        log_slopes = -0.5 * (x.square() + math.log(math.tau)) + softplus(odds) + softplus(-odds)  # of u in x
        return value + log_slopes.where(~self.cut.isnan(), 0.0).sum(-1)

    def is_resolved(self, x: Tensor) -> Tensor:
        """Which rows have values that differ in floating point from those a unit away, ``(S,)``: others saturate."""
        latents, resolved = self.joint.latents, torch.ones(len(x), dtype=torch.bool, device=x.device)
        u = self.embedded(x).to(self.joint.dtype)
        before, here, after = (latents.constrained(u + step * self.active) for step in (-1.0, 0.0, 1.0))
        bounded = [p.name for p in latents if not is_identity(p.transform)]
        for name in (n for n in bounded if bool(self.active[latents.slices[n]].any())):
            differs = (before[name] != here[name]) & (here[name] != after[name]) & here[name].isfinite()
            resolved &= differs.reshape(len(x), -1).any(-1)
        return resolved

    def _turned(self, log_odds: Tensor, *, back: bool) -> Tensor:
        """Log odds of angles, as of these from their cuts, or of their sums; ``back`` to the angles themselves."""
        assert self.cut is not None and self.sums is not None
        turns = log_odds.sigmoid() + (self.cut.nan_to_num() if back else 0.0)
        others = turns @ self.sums.mT
        turns = turns - others if back else turns + others - self.cut
        return log_odds.where(~(self.cut.abs() > 0), turns.remainder(1.0).logit())

    def with_scores(self, modes: Sequence[LaplaceState]) -> "ActiveDensity":
        """This density with normal scores for coordinates on an interval; it closes where both ends have one density.

        Each that does is cut in the middle of the widest arc without a mode, so that what is near an end is not in a
        tail.  In place of an angle stands its sum with another, or the difference, where that varies less.
        """
        inside = on_intervals(self.joint).to(self.active.device)[self.active]
        if not bool(inside.any()):
            return self
        white = normal_draws(LOOKS, len(self.active)).to(self.centre)
        closed = angles(self.joint, modes[0].u + modes[0].precision.unwhiten(white), self.theta)[self.active]
        drawn = proposal(modes).unwhiten(quasi_normal(PRIOR, self.size, 0).to(self.centre)).sigmoid()
        sums = _narrow_sums(drawn, closed)
        turns = torch.stack([mode.u[self.active] for mode in modes]).sigmoid()
        turns = (turns + turns @ sums.mT).remainder(1.0).sort(0).values
        gaps = torch.cat([turns[1:], turns[:1] + 1.0]) - turns
        widest, start = gaps.max(0).values, turns.gather(0, gaps.argmax(0, keepdim=True))[0]
        cut = (start + 0.5 * widest).remainder(1.0).where(closed, 0.0)
        return replace(self, cut=cut.masked_fill(~inside, math.nan), sums=sums)


def _narrow_sums(turns: Tensor, closed: Tensor) -> Tensor:
    """Sums in which each angle varies less, ``(d, d)``: one, or minus one, times another that stays.

    :param turns: draws of all coordinates ``(S, d)``.
    :param closed: which are angles.
    """
    sums = torch.zeros(len(closed), len(closed)).to(turns)
    there = torch.polar(torch.ones_like(turns), math.tau * turns)
    pairs = [((there.mT @ other) / len(turns)).abs() for other in (there, there.conj())]  # of sums, of differences
    alone = there.mean(0).abs()
    gains = torch.stack([p - alone.unsqueeze(-1) for p in pairs])
    gains = gains.where(closed & closed.unsqueeze(-1) & ~torch.eye(len(closed)).to(closed).bool(), 0.0)
    while float(gains.max()) > NARROWER:
        kind, of, other = (int(x) for x in torch.unravel_index(gains.argmax(), gains.shape))
        sums[of, other] = (1.0, -1.0)[kind]
        gains[:, of], gains[:, :, of], gains[:, other] = 0.0, 0.0, 0.0
    return sums


def density_of(state: LaplaceState) -> ActiveDensity:
    """The density that a state approximates."""
    problem = state.problem
    return ActiveDensity(problem.joint, problem.density, state.theta, problem.active, state.u)


def tour(state: LaplaceState, num_draws: int | None, seed: int) -> tuple[tuple[LaplaceState, ...], "Exchange | None"]:
    """The modes that can be found at a state's hyperparameters, the highest evidence first; more than one or itself.

    Where elements have more orders than modes are looked for, those in which the exchange that is returned has them.

    :param num_draws: from the prior; None: a thousand, fewer of many data.
    """
    num_draws = within(LITTLE, state.problem.joint, DRAWS) if num_draws is None else num_draws
    with without_validation():
        exchange = exchange_of(state)
        if exchange is not None:
            ordered = laplace_state(state.problem, state.theta, exchange.in_order(state.u.unsqueeze(0))[0])
            state = replace(ordered, log_hyperprior=state.log_hyperprior, left_saddle=state.left_saddle)
        tops = _tops_of_summands(state)
        starts = torch.cat([_best_draws(state, num_draws, seed), tops])
        found = all_modes(state, starts, partial(_images, exchange=exchange, tops=tops), exchange)
    modes = in_ranks(found)
    return modes, exchange if modes[0] is state else exchange_of(modes[0])


def all_modes(
    state: LaplaceState,
    starts: Tensor,
    images: Callable[[LaplaceState], Tensor],
    exchange: "Exchange | None" = None,
) -> list[LaplaceState]:
    """A mode, those that ``starts`` ``(S, D)`` lead to, and those that images of all of them lead to.

    :param images: rows ``(I, D)`` for a mode.
    """
    found, looked = climbed([state], starts, exchange), 0
    for _ in range(ROUNDS):
        before, looked = looked, len(found)
        if before == looked or looked > MOST_MODES:
            break
        found = climbed(found, torch.cat([images(mode) for mode in found[before:]]), exchange)
    return found


def in_ranks(modes: Sequence[LaplaceState]) -> tuple[LaplaceState, ...]:
    """The highest evidence first, without faint ones; of equal ones that with the least coordinates.

    Rounding decides otherwise which of them is higher.
    """
    top = max(float(mode.log_evidence) for mode in modes)
    kept = [mode for mode in modes if float(mode.log_evidence) > top - FAINT]
    ranks = [(-round(float(mode.log_evidence), 5), [round(x, 3) for x in mode.u.tolist()]) for mode in kept]
    return tuple(kept[k] for k in sorted(range(len(kept)), key=ranks.__getitem__))


def _best_draws(state: LaplaceState, num: int, seed: int) -> Tensor:
    """The highest of ``num`` draws from the prior, each far from those before it, ``(at most CLIMBS, D)``.

    Those alone that lie higher than the Gaussian at the mode has them: the others are on its slopes.
    Of a prior that is improper, or cannot be drawn from in rows, they are uniform on (-2, 2), as NUTS starts.
    """
    try:
        rows = _from_prior(state, num, seed, apart=False)
    except NO_PRIOR_DRAWS:
        uniform = torch.rand(num, len(state.u), generator=seeded(seed), dtype=torch.float64)
        rows = (4.0 * uniform - 2.0).to(state.u)
    height = density_of(state).log_joint(rows)
    slopes = float(state.log_joint) - 0.5 * state.precision.whiten(rows - state.u).square().sum(-1)
    order = height.argsort(descending=True)
    rows = rows[order][((height > slopes + HIGHER) & height.isfinite())[order]]
    if len(rows) < 2:
        return rows
    chosen: list[int] = []
    spread = rows.std(0).clamp(min=torch.finfo(rows.dtype).tiny)  # a coordinate that never varies sets nothing apart
    scaled = rows / spread
    apart = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    while len(chosen) < CLIMBS and bool(apart.any()):
        chosen.append(int(apart.int().argmax()))
        apart &= (scaled - scaled[chosen[-1]]).norm(dim=-1) > NEAR * len(state.u) ** 0.5
    return rows[chosen]


def _tops_of_summands(state: LaplaceState) -> Tensor:
    """Where each summand of the model's log sums of exponentials is highest, ``(at most CLIMBS, D)``.

    No draw may fall on a narrow one, and no slope leads there: a little further off it is nothing beside the others.
    A sum is higher than each of its summands; where it is not, as where it normalises, there are none.  Nor are there
    of sums for each of more rows than there are latents, which data have, nor where there are more than ``CLIMBS`` to
    choose from, as in chains of states.
    """
    joint, u, found = state.problem.joint, state.u.unsqueeze(0), [state.u.new_empty(0, len(state.u))]
    count = 1

    def alone(u: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """The log joint and its slope with one summand of each sum."""
        nonlocal count
        with OneSummand(number, u.numel()) as summand:
            value = derivatives.gradient(joint.log_joint, u, state.theta)
        count = summand.count
        return value

    alone(u, 0)
    for number in range(count if 1 < count <= CLIMBS else 0):
        if bool(alone(u, number)[0] < state.log_joint):
            found.append(lbfgs.from_far(partial(alone, number=number), u, state.problem.slack))
    rows = torch.cat(found)
    return rows[rows.isfinite().all(-1)]


def _from_prior(state: LaplaceState, num: int, seed: int, *, apart: bool) -> Tensor:
    """Unconstrained draws from the prior, ``(num, D)``; ``apart`` and errors are those of the constrained ones."""
    joint = state.problem.joint
    values = latents_from_prior(joint, state.theta, num, seed, apart=apart)
    return torch.cat([p.transform.inv(values[p.name]).reshape(num, -1) for p in joint.latents], -1).to(state.u)


def climbed(known: Sequence[LaplaceState], starts: Tensor, exchange: "Exchange | None") -> list[LaplaceState]:
    """The known modes and those reached elsewhere from ``starts`` ``(S, D)``; failed climbs are left out."""
    found = list(known)
    problem, theta, density = found[0].problem, found[0].theta, density_of(found[0])
    if not len(starts):
        return found
    height = density.log_joint(starts[:, density.active])
    starts = starts[~torch.stack([_is_near(mode, starts, height) for mode in found]).any(0)]
    if not len(starts):
        return found
    if exchange is None:  # none is climbed where the density rises from each to the nearest known mode
        away = torch.stack([mode.precision.whiten(starts - mode.u).norm(dim=-1) for mode in found])
        nearest = torch.stack([mode.u for mode in found])[away.argmin(0)]
        if bool(lead_uphill(density.log_joint, starts[:, density.active], nearest[:, density.active]).all()):
            return found
    try:
        reached = search_modes(problem, starts, theta, cold=True, to_the_end=False)  # scales may run to zero for ever
        if exchange is not None:
            reached = search_modes(problem, exchange.in_order(reached.u), theta, cold=False, to_the_end=False)
    except ArithmeticError:
        return found
    new = reached.converged & ~torch.stack([_is_near(mode, reached.u, reached.log_joint) for mode in found]).any(0)
    for row in range(len(new)):
        if bool(new[row]):
            with suppress(ArithmeticError):
                mode = state_at(problem, theta, reached, row, log_hyperprior=found[0].log_hyperprior)
                if bool(mode.log_evidence.isfinite()):
                    found.append(mode)
                    new &= ~_is_near(mode, reached.u, reached.log_joint)
    return found


def _is_near(mode: LaplaceState, rows: Tensor, height: Tensor) -> Tensor:
    """Which of ``rows`` ``(S, D)`` are at a mode's place, by the standard deviations there, bool ``(S,)``.

    :param height: log joint density of the rows: one that is far higher is on a narrower mode, perhaps inside this one.
    """
    return (mode.precision.whiten(rows - mode.u).norm(dim=-1) < NEAR) & (height < mode.log_joint + HIGHER)


def _images(mode: LaplaceState, exchange: "Exchange | None", tops: Tensor) -> Tensor:
    """The highest images of a mode that lie about as high, ``(at most CLIMBS, D)``.

    :param exchange: whose elements are left as they are.
    :param tops: places ``(T, D)``, of which one coordinate, or one site, is exchanged for the mode's.
    """
    joint, u, size = mode.problem.joint, mode.u, len(mode.u)
    # real coordinates with their signs turned: one, sites and pairs of sites whole, one element in all of them
    masks = torch.stack([torch.zeros(size).bool(), *(turned_by(joint, turn) for turn in sign_turns(joint, size))])
    masks = torch.cat([masks, torch.eye(size).bool()[masks.any(0)]]).to(u.device)
    found = [torch.where(masks, -u, u)]
    # two elements along an axis exchanged, in all sites with an axis of that length; and sites that look alike
    for length in lengths(joint) - (set() if exchange is None else {exchange.size}):
        found.append(relabelled(joint, u.unsqueeze(0), axes_of_length(joint, length), swaps(length))[1:, 0])
    sites = torch.block_diag(*(torch.ones(1, p.size) for p in mode.problem.joint.latents)).bool()
    found += [torch.where(torch.cat([sites, torch.eye(size).bool()]).to(u.device), top, u) for top in tops]
    rows = torch.cat([*found, torch.stack([u, *exchanged(joint, u)])[1:]])
    height = density_of(mode).log_joint(rows)
    order = height.argsort(descending=True)
    return rows[order][height[order] > height[0] - WORTH][:CLIMBS]


@dataclass(frozen=True)
class Exchange:
    """Elements along axes of one length, such as components, that can be exchanged while the density stays the same.

    Of all their orders one is integrated: that in which one number of each rises.

    :ivar axes: latent site -> which axis of its value.
    :ivar size: how many elements there are.
    :ivar key: place of that number among those of an element.
    """

    joint: LogJoint
    axes: Mapping[str, int]
    size: int
    key: int

    def elements(self, u: Tensor) -> Tensor:
        """The numbers of each element at rows ``(S, D)``, constrained, ``(S, size, numbers)``."""
        values = self.joint.latents.constrained(u.to(self.joint.dtype))
        parts = [values[n].movedim(axis + 1, 1).reshape(len(u), self.size, -1) for n, axis in self.axes.items()]
        return torch.cat(parts, -1)

    @property
    def coordinates(self) -> Tensor:
        """Unconstrained coordinates of each element, of sites with one for each number, ``(size, numbers)``."""
        latents = self.joint.latents
        places = {p.name: torch.arange(latents.size)[latents.slices[p.name]] for p in latents}
        parts = [
            places[p.name].reshape(p.shape).movedim(self.axes[p.name], 0).reshape(self.size, -1)
            for p in latents
            if p.name in self.axes and p.unconstrained_shape == p.shape  # not of a simplex
        ]
        return torch.cat([torch.zeros(self.size, 0, dtype=torch.long), *parts], -1)

    def in_order(self, u: Tensor) -> Tensor:
        """Rows ``(S, D)`` with their elements in order."""
        return reordered(self.joint, u, self.axes, self.elements(u)[..., self.key].argsort(1))


def exchange_of(state: LaplaceState) -> Exchange | None:
    """Elements with more orders than modes are looked for, where the density stays the same when two are exchanged.

    None, too, where a mode stays where it is: all orders are then one.  The number that tells them apart is that in
    which neighbours are most standard deviations apart, up to six.
    """
    joint = state.problem.joint
    white = normal_draws(TRIED, len(state.u)).to(state.u)
    for size in (size for size in lengths(joint) if math.factorial(size) > MOST_ORDERS):
        rows = torch.cat([state.u + state.precision.unwhiten(white), state.u.unsqueeze(0)])
        images = without_order(joint, rows, size, state.theta)
        if images is None or bool(_is_near(state, images[:, -1], state.log_joint).all()):
            continue
        axes = axes_of_length(joint, size)
        numbers = Exchange(joint, axes, size, 0).elements(rows)
        gaps = numbers[-1].sort(0).values.diff(dim=0) / numbers[:-1].std(0).amax(0)
        return Exchange(joint, axes, size, int(gaps.clamp(max=6.0).sum(0).argmax()))
    return None


@dataclass(frozen=True, eq=False)
class ModeIntegral:
    """The integral of a density over all its modes, by importance sampling; of one coordinate by quadrature.

    :ivar log_joint: the log joint density at the draws, nats, ``(S,)``; nan where the model computes nan.
    :ivar weighed: their weights, Pareto-smoothed.
    :ivar x: the draws, or nodes, in the coordinates of ``density``, ``(S, d)``.
    :ivar mixture: of which they are, if they have not walked; ``at_modes`` are its parts at modes, twice for each.
    :ivar exchange: elements of which one order has been integrated; None where all have been.
    :ivar walked: standard error of the log evidence, nats, where draws have walked to the density, all of one weight;
        inf where these do not tell it, and the draws are still those of the mixture.
    :ivar walks_by: seed by which draws may do so, and in how many stretches; None where weights tell the integral, or
        the density is too dear or of too many coordinates.
    """

    log_joint: Tensor
    weighed: Smoothed
    x: Tensor
    density: ActiveDensity
    mixture: NormalMixture
    at_modes: NormalMixture
    exchange: Exchange | None
    walked: float | None = None
    walks_by: tuple[int, int] | None = None

    @cached_property
    def draws(self) -> Tensor:
        """Unconstrained, ``(S, D)``."""
        return self.density.embedded(self.x)

    @cached_property
    def _by_mode(self) -> Tensor:
        """Log probability that each draw is of each mode, ``(M, S)``."""
        return self.at_modes.by_component(self.x).reshape(2, -1, len(self.x)).logsumexp(0).log_softmax(0)

    @cached_property
    def log_shares(self) -> Tensor:
        """Log share of each mode in the integral, ``(M,)``."""
        return (self.weighed.log_weights + self._by_mode).logsumexp(-1).log_softmax(0)

    @cached_property
    def pareto_ks(self) -> tuple[float, ...]:
        """k-hat of importance sampling of each mode's part of the density, from the normal and the t there alone.

        ``-inf`` where no weight stands out, ``inf`` of too few.
        """
        num, found = within(LITTLE, self.density.joint, OF_EACH), list[float]()
        white, is_heavy = quasi_normal(num, self.density.size + 1).to(self.x), torch.arange(num) >= (1.0 - HEAVY) * num
        for k in range(len(self._by_mode)):
            x = self.at_modes.of_components(white, k + len(self._by_mode) * is_heavy)
            parts = self.at_modes.by_component(x).reshape(2, -1, num).logsumexp(0)
            own = _heights(self.density, self.exchange, x)[1] + parts.log_softmax(0)[k]
            found.append(smoothed_weights(own, parts[k]).pareto_k)
        return tuple(found)

    @property
    def after_walk(self) -> "ModeIntegral":
        """The integral by draws that have walked to the density; itself where they may not; in doubt if they fail."""
        if self.walks_by is None:
            return self
        heights = partial(_heights, self.density, self.exchange)
        x, log_joint, value, error = _walked(self.mixture, heights, self.density.size, *self.walks_by)
        if error > DOUBTED:
            return replace(self, walked=math.inf)
        return replace(self, log_joint=log_joint, weighed=Smoothed(value.expand(len(x)), -math.inf), x=x, walked=error)

    @property
    def heaviest(self) -> Tensor:
        """The draws of largest weight, ``(at most CLIMBS, D)``: another mode is near where there is one."""
        weights = self.weighed.log_weights
        return self.draws[weights.topk(min(CLIMBS, len(weights))).indices]

    @property
    def log_copies(self) -> float:
        """Log of the number of orders, each with as much mass."""
        return 0.0 if self.exchange is None else math.lgamma(self.exchange.size + 1.0)

    @property
    def log_evidence(self) -> Tensor:
        """Nats, all orders counted, ``()``."""
        return importance.log_mean(self.weighed.log_weights) + self.log_copies

    @property
    def error(self) -> float:
        """Standard error of :attr:`log_evidence`, nats."""
        return self.walked or self.weighed.error

    @property
    def method(self) -> str:
        """The kind of integration, in the words of a summary."""
        walked = self.walked not in (None, math.inf)
        return "quadrature" if self.is_quadrature else "bridge sampling" if walked else "importance sampling"

    @property
    def is_quadrature(self) -> bool:
        """Whether draws are nodes."""
        return isinstance(self.weighed, NodeWeights)

    @property
    def is_crowded(self) -> bool:
        """Whether there are more modes than are integrated over: what others hold is not known."""
        return len(self.at_modes.loc) > 2 * MOST_MODES

    @property
    def is_trusted(self) -> bool:
        """Whether the weights, and particles that have walked, say that the integral is a number."""
        log_weights, k = self.weighed.log_weights, self.weighed.pareto_k
        share = float(importance.effective_sample_size(log_weights)) / len(log_weights)
        enough = k <= importance.threshold(len(log_weights)) or (k < 1.0 and share > NEARLY_ALL)
        return enough and bool(self.log_evidence.isfinite()) and self.error < math.inf and not self.is_crowded


def proposal(modes: Sequence[LaplaceState], heavy: float = 0.0, density: ActiveDensity | None = None) -> NormalMixture:
    """Normals at all modes, in proportion to their evidences but at least a hundredth of the largest.

    :param heavy: share of the draws at each mode that are of a t distribution there.
    :param density: in whose coordinates; None: unconstrained ones.
    """
    heights, active = torch.stack([mode.log_evidence for mode in modes]), modes[0].problem.active
    least = float(heights.max()) + math.log(LEAST_SHARE)
    mixing = heights.clamp(min=least).log_softmax(0)  # no mode without draws
    loc, precisions = torch.stack([mode.u[active] for mode in modes]), tuple(mode.precision for mode in modes)
    if density is not None and density.cut is not None:
        loc = torch.stack([density.reduced(mode.u) for mode in modes])
        precisions = tuple(_in_coordinates(mode, density) for mode in modes)
    if not heavy:
        return NormalMixture(mixing, loc, precisions, active)
    mixing = torch.cat([mixing + math.log1p(-heavy), mixing + math.log(heavy)])
    kinds = (False,) * len(modes) + (True,) * len(modes)
    return NormalMixture(mixing, loc.repeat(2, 1), precisions * 2, active, kinds)


def _in_coordinates(mode: LaplaceState, density: ActiveDensity) -> Dense:
    """The precision at a mode in a density's coordinates."""
    active, cut, slope = density.active, density.cut, torch.eye(len(mode.u)).to(mode.u)
    assert cut is not None and density.sums is not None
    x, turns = density.reduced(mode.u), mode.u[active].sigmoid()
    place = active.nonzero().squeeze(-1)
    score = (0.5 * (x.square() + math.log(math.tau))).exp().unsqueeze(-1)  # one over the normal density
    turned = score * (torch.eye(density.size).to(x) + density.sums) * (turns * (1.0 - turns))
    slope[place.unsqueeze(-1), place] = turned.where(~cut.isnan().unsqueeze(-1), torch.eye(density.size).to(x))
    covariance = slope @ mode.precision.solve(torch.eye(len(slope)).to(slope)) @ slope.mT
    return Dense(torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(covariance))).unsqueeze(0))


def _with_prior(first: NormalMixture, mode: LaplaceState, density: ActiveDensity) -> NormalMixture:
    """A mixture with a tenth of its draws from a t distribution as wide as the prior, for mass far from all modes."""
    try:
        prior = density.reduced(_from_prior(mode, PRIOR, seed=0, apart=False))
    except NO_PRIOR_DRAWS:
        return first
    prior = prior[prior.isfinite().all(-1)]
    wide = _fitted(prior, torch.ones_like(prior[:, 0]), first.active, heavy=True)
    return first if wide is None else _beside(first, [wide], WIDE)


def _with_unused(
    first: NormalMixture, modes: Sequence[LaplaceState], exchange: Exchange, num: int, density: ActiveDensity
) -> NormalMixture:
    """A mixture with half of the draws, beside t distributions where some elements are as under their prior.

    No datum may be of such an element, as of a component with a small share, and it is then far from all modes.  The
    others are as under the normal at a mode.  Moments are of such draws, for each set of places that those elements
    take in the order; shares go with estimates of the integral.  The mixture alone where all of these are low.

    :param num: of draws for the moments.
    """
    generator, size = seeded(0), exchange.size
    try:
        prior = _from_prior(modes[0], TRIED, seed=0, apart=True)[:, exchange.coordinates].flatten(0, 1)
    except NO_PRIOR_DRAWS:
        return first
    white = torch.randn(num, len(density.active), generator=generator, dtype=torch.float64).to(prior)
    u = torch.cat(
        [m.u + m.precision.unwhiten(part) for m, part in zip(modes, white.tensor_split(len(modes)), strict=True)]
    )
    ranks = torch.rand(num, size, generator=generator).argsort(1)
    unused = ranks < torch.randint(1, size, (num, 1), generator=generator)
    row, element = unused.nonzero(as_tuple=True)
    u[row.unsqueeze(-1), exchange.coordinates[element]] = prior[torch.arange(len(row)) % len(prior)]
    order = exchange.elements(u)[..., exchange.key].argsort(1)
    places, x = unused.gather(1, order.cpu()), density.reduced(exchange.in_order(u))
    log_joint = density.log_joint(x)
    least = max(float(mode.log_evidence) for mode in modes) + math.log(LEAST_SHARE)
    found: list[NormalMixture] = []
    sets, counts = places.unique(dim=0, return_counts=True)
    for some in sets[counts > 2 * density.size]:  # enough for a covariance
        own = (places == some).all(1).to(x.device)
        own = own & (log_joint > log_joint[own].max() - FAINT)
        one = _fitted(x, own.to(x), first.active, heavy=True)
        if one is not None:
            height = importance.log_mean(log_joint[own] - one.log_prob(x[own]))
            found += [replace(one, log_mixing=height.unsqueeze(0))] if float(height) > least else []
    return _beside(first, found) if found else first


def _with_walkers(first: NormalMixture, at_modes: NormalMixture, density: ActiveDensity, seed: int) -> NormalMixture:
    """A mixture with half of the draws, beside normals and t distributions fitted to draws that walk from the modes.

    What holds mass far from all modes, such as where a size is near zero and what it multiplies is as under its prior,
    is reached at low powers of the density.  From power to power walkers are resampled; the fit is by EM.
    """
    generator = seeded(seed)
    swarm = Swarm(partial(_heights, density, None), None, 1, MOVES, generator)
    x = at_modes.unwhiten(quasi_normal(WALKERS, density.size + 1, seed).to(density.centre))
    x = swarm.at_density(swarm.looked_at(x), iter(POWERS))[0].x
    narrow = _fitted(0.5 * x, torch.ones_like(x[:, 0]), first.active)
    if narrow is None:
        return first
    centres, shares = x[torch.randperm(WALKERS, generator=generator)[:FAMILIES]], torch.zeros(FAMILIES).to(x)
    found = NormalMixture(shares, centres, narrow.precisions * FAMILIES, first.active, (False,) * FAMILIES)
    for _ in range(FAMILIES):
        found = _with_moments(found, x, found.by_component(x).softmax(0))
    tails = replace(found, log_mixing=found.log_mixing + math.log(HEAVY / (1.0 - HEAVY)), heavy=(True,) * FAMILIES)
    return _beside(first, [found, tails])


def _beside(first: NormalMixture, others: Sequence[NormalMixture], share: float = 0.5) -> NormalMixture:
    """One mixture beside others, which have a share of the draws, in proportion to what they sum to."""
    log_mixing = torch.cat([one.log_mixing for one in others]).log_softmax(0)
    return NormalMixture(
        torch.cat([first.log_mixing + math.log1p(-share), log_mixing + math.log(share)]),
        torch.cat([first.loc, *(one.loc for one in others)]),
        (*first.precisions, *(p for one in others for p in one.precisions)),
        first.active,
        (*first.heavy, *(heavy for one in others for heavy in one.heavy)),
    )


def integral_over(
    modes: Sequence[LaplaceState],
    seed: int,
    num: int | None = None,
    density: ActiveDensity | None = None,
    exchange: Exchange | None = None,
    price: float = PRICE,
    unused: bool = False,
) -> ModeIntegral:
    """Importance sampling from a normal and a t distribution at each mode; weights Pareto-smoothed.

    Of one coordinate quadrature, where that can be afforded and no number of draws is given.
    Where elements can be exchanged, and that is not precise, from t distributions where some are as under their prior.
    Adapted twice: normals of the weighted draws' shares, means and covariances stand beside the first ones, after
    Cappe, Douc, Guillin, Marin and Robert (2008), eq. 15; then, where that is not precise, a normal at a time is added
    where weights are largest.  Where it is far from precise, all begins anew with what walkers from the modes reach;
    where weights do not tell it in the end, draws of all those may walk to the density.  Draws are quasi-random, so
    that the standard error is an upper bound in few dimensions.

    :param num: of draws, each time; None: 8,000, fewer of many data, more in the end where the error asks for them.
    :param price: bytes that these draws may cost where ``num`` is None, but for 256 at each mode.
    :param density: at whose draws; None: that of which the modes are.
    :param exchange: elements of which one order is integrated, and all are counted.
    :param unused: whether draws from elements as under their prior, or from where walkers end, are there at first.
    :raises NotAMode: when the density is zero at all draws.
    :raises ImproperPosterior: where that of one coordinate has no integral.
    """
    given = num
    density = (density_of(modes[0]) if density is None else density).with_scores(modes)
    affordable = within(price / (TURNS + MORE), density.joint, WEIGHTED)
    most, num = (1.0, num) if num else (MORE, max(affordable, min(OF_EACH * len(modes), WEIGHTED)))
    spared = num < WEIGHTED
    at_modes = proposal(modes, HEAVY, density)
    if exchange is None or not unused:
        first = _with_prior(at_modes, modes[0], density)
    else:
        first = _with_unused(at_modes, modes, exchange, FOR_MOMENTS * num, density)
    if density.size == 1 and exchange is None and given is None and affordable >= ON_A_LINE:
        return _by_quadrature(modes[0], first, density, at_modes, affordable)
    walks = exchange is None and within(price, density.joint, WALKERS) == WALKERS
    if walks and unused:
        first, num = _with_walkers(first, at_modes, density, seed), given or max(num, FAMILIES * OF_EACH)
    mixture, heights = first, partial(_heights, density, exchange)
    piece = max(1, num // PARTS)
    for turn in range(TURNS + 3):
        x = mixture.unwhiten(quasi_normal(num, density.size + 1, seed + turn).to(density.centre))
        (log_joint, inside), parts = heights(x), mixture.by_component(x)
        found = smoothed_weights(inside, parts.logsumexp(0))
        if turn < TURNS:
            mixture = adapted(first, x, (found.log_weights.log_softmax(0) + parts.log_softmax(0)).exp())
            continue
        if turn == TURNS + 2 or _are_good(found, PRECISE if turn == TURNS else math.inf):
            break
        more_do = walks and found.pareto_k < FINITE and _are_good(found, PRECISE * MORE**0.5)
        if not unused and not more_do and (walks or exchange is not None):
            return integral_over(modes, seed, given, density, exchange, price, unused=True)
        mixture, all_together = _where_heavy(mixture, x, inside, heights, piece, seed + TURNS + 3)
        if turn == TURNS and not importance.is_beyond(all_together.pareto_k, len(all_together.log_weights)):
            error = float(importance.standard_error(all_together.log_weights))
            num = math.ceil(num * min(most, max(1.0, (error / PRECISE) ** 2)))

    made = ModeIntegral(log_joint, found, x, density, mixture, at_modes, exchange)
    mode, small = modes[0], modes[0].problem.is_dense and density.size <= MOST_WALKED
    if given is None and exchange is None and small and not is_proper(mode.around):
        tails = [_beyond_draws(mode, made.draws, i) for i in density.active.nonzero().flatten().tolist()]
        made = replace(made, weighed=replace(found, missed=found.missed + sum(tails)))
    is_told = made.is_trusted and (found.pareto_k < FINITE or made.error < TOLD or spared)
    may_walk = given is None and walks and density.size <= MOST_WALKED and not (is_told or made.is_crowded)
    walks_by = seed + TURNS + 3 + MOST_PARTS, 1 if spared else STRETCHES
    return replace(made, walks_by=walks_by if may_walk else None)


def _by_quadrature(
    mode: LaplaceState, first: NormalMixture, density: ActiveDensity, at_modes: NormalMixture, num: int
) -> ModeIntegral:
    """The integral over one coordinate, by about ``num`` nodes around all components of the ``first`` mixture.

    :raises ImproperPosterior: where it is infinite.
    """
    sd = torch.cat([p.variance for p in first.precisions])[:, first.active].squeeze(-1).sqrt()
    line = _on_line(mode, density, partial(torch.unsqueeze, dim=-1), density.log_joint, first.loc.squeeze(-1), sd, num)
    log_weights = line.log_density + line.log_length + math.log(len(line.x))
    weighed = NodeWeights(log_weights, -math.inf, line.error)
    return ModeIntegral(line.log_density, weighed, line.x.unsqueeze(-1), density, first, at_modes, None)


def _on_line(
    mode: LaplaceState,
    density: ActiveDensity,
    rows: Callable[[Tensor], Tensor],
    log_height: Callable[[Tensor], Tensor],
    loc: Tensor,
    sd: Tensor,
    num: int,
) -> Line:
    """The integral of a height along a line of places, as far as numbers tell it, as :func:`on_line`.

    :param rows: places ``(K, d)`` of numbers ``(K,)``.
    :raises ImproperPosterior: where it is infinite, unless all that makes up the density is proper.
    """
    ends = [-math.inf, math.inf]

    def height(x: Tensor) -> Tensor:
        places = rows(x)
        return log_height(places).where(density.is_resolved(places) & (x > ends[0]) & (x < ends[1]), math.nan)

    line = on_line(height, loc, sd, num, density.joint.dtype)
    if line.error == math.inf:  # beyond, large numbers may cancel, and be level but for rounding
        for side, sign in enumerate((-1.0, 1.0)):
            x = loc[0] + sign * sd[0] * torch.arange(1.0, LAST, 0.25).to(sd).sinh()
            told = [rounding(mode.around, row) < ROUNDING for row in density.embedded(rows(x))]
            ends[side] = float(x[max(0, [*told, False].index(False) - 1)])
        line = on_line(height, loc, sd, num, density.joint.dtype)
    if line.error == math.inf and not is_proper(mode.around):
        most = int((rows(loc[:1] + sd[:1]) - rows(loc[:1])).abs().argmax())
        owner = mode.problem.joint.latents.by_part.to(sd.device)[:, density.active][:, most].int().argmax()
        raise no_integral("the log joint falls too slowly", density.joint.latents.names[int(owner)])
    return line


def _beyond_draws(mode: LaplaceState, draws: Tensor, i: int) -> float:
    """Nats by which the tails of a coordinate beyond almost all of the draws ``(S, D)`` may raise the log integral.

    By Laplace's approximation to its marginal density along the line of the others' conditional means: these are taken
    for normal there.  Nothing where that is as low ten standard deviations from the mode as an exponential density.

    :raises ImproperPosterior: where that has no integral.
    """
    density, others = density_of(mode), mode.problem.active.clone()
    others[i] = False
    way = mode.precision.solve(torch.eye(len(mode.u)).to(mode.u)[i : i + 1])[0]
    sd, way = way[i].sqrt(), way / way[i]

    def rows(x: Tensor) -> Tensor:
        return density.reduced(mode.u + x.unsqueeze(-1) * way)

    def height(places: Tensor) -> Tensor:
        A = mode.problem.density.precision(density.embedded(places), mode.theta).detach()
        tril, failed = torch.linalg.cholesky_ex(A[:, others][:, :, others])
        volume = tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return (density.log_joint(places) - volume).masked_fill(failed > 0, -math.inf)

    top, *ends = height(rows(sd * sd.new_tensor([0.0, -STEEP_AT, STEEP_AT]))).tolist()
    if max(ends) < top - STEEP_AT or not top > -math.inf:  # others have no normal density
        return 0.0
    line = _on_line(mode, density, rows, height, torch.zeros_like(sd).unsqueeze(0), sd.unsqueeze(0), ON_A_LINE)
    own, log_mass = (draws[:, i] - mode.u[i]).sort().values, line.log_density + line.log_length
    inside = (line.x > own[OUTERMOST]) & (line.x < own[-1 - OUTERMOST])
    return float(log_mass.logsumexp(0) - log_mass[inside].logsumexp(0)) + line.error


def _heights(density: ActiveDensity, exchange: Exchange | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """The log joint density at draws, and the same with nothing in other orders."""
    value = density.log_joint_or_nan(x)
    if exchange is None:
        return value, value
    keys = exchange.elements(density.embedded(x))[..., exchange.key]
    return value, value.where((keys.diff(dim=1) >= 0).all(1), -math.inf)


@dataclass(frozen=True, eq=False)
class Walkers(Batched):
    """Where particles are, and log densities there, nats: the joint, what is integrated, and the mixture's."""

    x: Tensor  # (S, d)
    log_joint: Tensor  # (S,)
    height: Tensor  # (S,), -inf where it is nan
    log_base: Tensor  # (S,)

    @property
    def log_ratio(self) -> Tensor:
        """Log ratio of what is integrated to the mixture, ``(S,)``."""
        return self.height - self.log_base


@dataclass(frozen=True, eq=False)
class Swarm:
    """Particles in groups that walk by powers of the ratio of a density to a mixture, or to one where there is none."""

    heights: Heights
    mixture: NormalMixture | None
    groups: int
    num_moves: int  # at each power
    generator: torch.Generator

    def looked_at(self, x: Tensor) -> Walkers:
        """Particles at rows ``(S, d)``."""
        log_joint, inside = self.heights(x)
        height = inside.nan_to_num(nan=-math.inf, neginf=-math.inf, posinf=-math.inf)
        return Walkers(x, log_joint, height, self.mixture.log_prob(x) if self.mixture else torch.zeros_like(height))

    def drawn(self, num: int) -> Walkers:
        """Particles at draws of the mixture."""
        assert self.mixture is not None
        white = torch.randn(num, self.mixture.loc.shape[-1] + 1, generator=self.generator, dtype=torch.float64)
        x = self.mixture.unwhiten(white.to(self.mixture.loc))
        return self.looked_at(x[torch.randperm(num, generator=self.generator)])

    def moved(self, here: Walkers, power: float, num_moves: int) -> tuple[Walkers, list[Tensor]]:
        """Particles after Metropolis moves at a power; and the log ratios at draws of the mixture, each ``(S,)``.

        Moves are along the difference of two particles of another group, ter Braak (2006), eq. 2, of random length;
        every fourth is to a draw of the mixture.
        """
        generator, (num, size), found = self.generator, here.x.shape, []
        each = num // self.groups
        for move in range(num_moves):
            if self.mixture and move % 4 == 3:
                there = self.drawn(num)
                found.append(there.log_ratio)
                gain = power * (there.log_ratio - here.log_ratio)
            else:
                others = torch.arange(num) // each + torch.randint(1, max(2, self.groups), (num,), generator=generator)
                a, b = torch.randint(each, (2, num), generator=generator) + others % self.groups * each
                length = torch.rand(num, 1, generator=generator, dtype=torch.float64).to(here.x)
                there = self.looked_at(here.x + 2.38 / (2 * size) ** 0.5 * length * (here.x[a] - here.x[b]))
                gain = power * (there.height - here.height) + (1.0 - power) * (there.log_base - here.log_base)
            level = torch.rand(num, generator=generator, dtype=torch.float64).log().to(gain)
            here = there.where(level < gain, here)
        return here, found

    def at_density(self, here: Walkers, powers: Iterator[float] | None = None) -> tuple[Walkers, Tensor]:
        """Particles that have walked to the density, and the log of each group's mean weight, nats, ``(groups,)``.

        From power to power, each of which leaves half of them if none are given, they are resampled inside a group.
        """
        power, log_evidences = 0.0, here.height.new_zeros(self.groups)
        while power < 1.0 and bool((log_evidences > -math.inf).any()):  # some are where there is a density
            log_ratio, before = here.log_ratio, power
            power = next(powers) if powers else importance.next_temperature(log_ratio, before)
            log_weights = ((power - before) * log_ratio).view(self.groups, -1)
            parent, gained = importance.survivors(log_weights, self.generator)
            log_evidences = log_evidences + gained
            here, _ = self.moved(here[parent], power, self.num_moves)
        return here, log_evidences


def _walked(
    mixture: NormalMixture, heights: Heights, size: int, seed: int, stretches: int = STRETCHES
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Draws of a density to which particles have walked from a mixture, ``(S, d)``.

    In groups, whose mean weights are unbiased estimates of the integral, Del Moral, Doucet and Jasra (2006), section
    3.3.  It is told by the bridge from draws of the mixture to the particles of all groups, by these weights, Meng and
    Wong (1996), which varies far less.  Where hardly any draws of the mixture are in some place of much mass, all
    groups miss it alike; but particles that walk on reach it, and their mean log ratio rises: they walk until it stays.

    :param heights: the log joint density at rows, and that which is integrated.
    :return: also the log joint density there, ``(S,)``; the log of the integral, nats, and its standard error, with
        twice that of the rise; infinite where the log ratio rises by more.
    """
    swarm = Swarm(heights, mixture, GROUPS, max(MOVES, size), seeded(seed))
    here, log_evidences = swarm.at_density(swarm.drawn(PARTICLES))
    drawn: list[Tensor] = []
    for _ in range(stretches):
        before = here.log_ratio
        here, more = swarm.moved(here, 1.0, FURTHER * swarm.num_moves)
        drawn += more
        rises = (here.log_ratio - before).view(GROUPS, -1).mean(-1)
        noise = 2.0 * float(rises.std()) / GROUPS**0.5
        if float(rises.mean()) <= noise:
            break
    shares, others = log_evidences.softmax(0), torch.cat(drawn)
    chosen = importance.resampled(shares.repeat_interleave(PARTICLES // GROUPS), PARTICLES, swarm.generator)
    share = PARTICLES / (PARTICLES + len(others))
    log_evidence, (over, _), _ = importance.bridge(here.log_ratio[chosen], others, share)
    under = importance.bridge_terms(log_evidence, here.log_ratio, others, share)[1].view(GROUPS, -1).logsumexp(-1)
    apart = shares * torch.expm1(under - (under + shares.log()).logsumexp(0))
    errors = noise, float(importance.standard_error(over)), float(apart.norm()) * (GROUPS / (GROUPS - 1)) ** 0.5
    error = math.hypot(*errors) if float(rises.mean()) <= noise else math.inf
    return here.x[chosen], here.log_joint[chosen], log_evidence, error


def _are_good(weighed: Smoothed, error: float) -> bool:
    """Whether weights can be trusted, and their standard error is small enough."""
    log_weights = weighed.log_weights
    trusted = weighed.pareto_k <= importance.threshold(len(log_weights))
    return trusted and float(importance.standard_error(log_weights)) <= error


def _where_heavy(
    mixture: NormalMixture, x: Tensor, log_joint: Tensor, heights: Heights, num: int, seed: int
) -> tuple[NormalMixture, Smoothed]:
    """A mixture with one more normal where the weight of a draw is largest, and so on until the weights are good.

    Incremental mixture importance sampling, Raftery and Bao (2010), section 2: the covariance is that of the nearest
    draws, half by their weights.  Shares are then half by the weights, too.  And the weights of all draws together.

    :param x: draws of the mixture, ``(S, d)``.
    :param heights: the log joint density of rows, and that which is integrated.
    :param num: of draws from each, and of neighbours.
    """
    log_q = mixture.log_prob(x)
    for turn in range(MOST_PARTS):
        weights = smoothed_weights(log_joint, log_q).weights
        top, every = x[weights.argmax()], torch.ones_like(weights)
        spread = _fitted(x, weights, mixture.active) or _fitted(x, every, mixture.active)
        assert spread is not None  # of all draws
        away = spread.precisions[0].whiten(mixture._among_all(x - top)).norm(dim=-1)
        near = away.topk(num, largest=False).indices
        own = weights[near] / weights[near].sum()
        fitted = _fitted(x[near], 0.5 * own + 0.5 / num, mixture.active)
        if fitted is None:
            break
        one = replace(fitted, loc=top.unsqueeze(0))
        new, share = one.unwhiten(quasi_normal(num, x.shape[-1] + 1, seed + turn).to(x)), num / (len(x) + num)
        mixture = _beside(mixture, [one], share)
        log_q = torch.logaddexp(log_q + math.log1p(-share), one.log_prob(x) + math.log(share))
        x, log_q = torch.cat([x, new]), torch.cat([log_q, mixture.log_prob(new)])
        log_joint = torch.cat([log_joint, heights(new)[1]])
        if _are_good(smoothed_weights(log_joint, log_q), PRECISE):
            break
    found, parts = smoothed_weights(log_joint, log_q), mixture.by_component(x).log_softmax(0)
    shares = (found.log_weights.log_softmax(0) + parts).exp().sum(-1)
    log_mixing = (0.5 * mixture.log_mixing.exp() + 0.5 * shares).log()
    return replace(mixture, log_mixing=log_mixing), found


def within(price: float, joint: LogJoint, most: int) -> int:
    """Number of rows of a density that a price in bytes pays for: their time goes with what autograd keeps of them.

    A power of four, so that it is the same for data that differ in their dtype alone.
    """
    num = price / max(1, joint.row_bytes or 1)
    return most if num >= most else max(FEWEST, int(4 ** (math.log(num, 4) // 1.0)))


def smoothed_weights(log_joint: Tensor, log_proposal: Tensor) -> Smoothed:
    """The weights of draws, Pareto-smoothed; a density that is nan counts as zero.

    :raises NotAMode: when it is zero at all draws.
    """
    log_weights = log_joint.nan_to_num(nan=-math.inf, neginf=-math.inf, posinf=-math.inf) - log_proposal
    if not bool((log_weights > -math.inf).any()):
        raise NotAMode(
            f"the log joint density is -inf or nan at all {len(log_weights)} draws; expected a density that is "
            "finite around its mode."
        )
    return importance.checked(log_weights)


def adapted(first: NormalMixture, x: Tensor, weights: Tensor) -> NormalMixture:
    """The first components, with half of the draws, beside normals with the moments of weighted rows ``(S, d)``.

    :param weights: of each row in each component that it was drawn from, ``(m M, S)``.
    """
    return _beside(first, [_with_moments(first, x, weights.reshape(-1, len(first.loc), len(x)).sum(0))])


def _with_moments(before: NormalMixture, x: Tensor, weights: Tensor) -> NormalMixture:
    """Normals with the moments of rows ``(S, d)`` by weights ``(M, S)``; where they are too few, those of before."""
    share = (weights.sum(-1) / weights.sum()).clamp(min=LEAST_SHARE / len(weights))  # none without draws
    found = [_fitted(x, own, before.active) for own in weights]
    locs = [loc if own is None else own.loc[0] for own, loc in zip(found, before.loc, strict=True)]
    precisions = [p if own is None else own.precisions[0] for own, p in zip(found, before.precisions, strict=True)]
    return NormalMixture(share.log(), torch.stack(locs), tuple(precisions), before.active, (False,) * len(locs))


def _fitted(x: Tensor, weights: Tensor, active: Tensor, *, heavy: bool = False) -> NormalMixture | None:
    """A normal, or t distribution, with the mean and covariance of rows ``(S, d)`` by weights ``(S,)``.

    None where they are too few for a covariance.
    """
    own = weights / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)  # all zero where no row has any
    if not float(1.0 / own.square().sum()) > 2.0 * x.shape[-1]:
        return None
    mean = own @ x
    away = x - mean
    tril, info = torch.linalg.cholesky_ex(away.mT @ (own.unsqueeze(-1) * away))
    inverse, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(tril)) if not int(info) else (tril, info)
    if int(info) or int(failed):
        return None
    found, inside = torch.eye(len(active)).to(tril), active.nonzero().squeeze(-1)  # one on those that are not active
    found[inside.unsqueeze(-1), inside] = inverse
    return NormalMixture(x.new_zeros(1), mean.unsqueeze(0), (Dense(found.unsqueeze(0)),), active, (heavy,))
