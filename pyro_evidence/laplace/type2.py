"""Type-II maximisation: quasi-Newton on the exact gradient, in MacKay's metric where precisions are recognised."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import ImproperPosterior
from pyro_evidence.fitting.iterate import Fit, Status, Stop, bar_of
from pyro_evidence.laplace.approximation import (
    LaplaceState,
    Problem,
    can_compare,
    is_rounding,
    is_singular,
    laplace_batch,
    laplace_state,
    log_priors,
    modes_of_rows,
    near_states,
    reached,
    state_of_row,
)
from pyro_evidence.laplace.gradient import Asking, ModeAt, Slope, curvature, finite_slope, slopes
from pyro_evidence.laplace.metric import (
    inverted,
    measures,
    natural_metric,
    not_identified,
    rescaled,
    round_of_all,
    updated,
)
from pyro_evidence.laplace.pruning import AWAY, NEAR, PruningTried, either_way, predicted_gain, prune, reactivated
from pyro_evidence.laplace.remedies import A_MILLION, interpolates_data, near_fold
from pyro_evidence.numerics import trust_region
from pyro_evidence.numerics.derivatives import generic_directions
from pyro_evidence.numerics.line_search import (
    Backtracking,
    Line,
    accepted,
    alone,
    to_peak_or_quarter,
    together,
)
from pyro_evidence.numerics.newton import rises_without_end

LARGEST_STEP = 4.0  # log units: a factor 55 in a precision; for starts far off: tests/laplace/test_rescaled_starts.py
FARTHEST = 120.0  # log units from the start, of one on its way to infinity
TINY = 1e-6  # log units, by which nothing but rounding should change the objective
SCALES_FIRST = 5  # rounds of the scales alone, where a fit begins again
FEW = 12  # hyperparameters up to which their curvature is taken by differences, once they are near
SHARP = 1e-3  # nats that a step promises, above which their curvature is taken anew where it is not to be trusted
BROAD, HIGH = 1.0, 5.0  # nats above which it does not hold as far as a step; for processes (benchmarks/releases.py)
DIFFERENCES = 1e-2  # curvature per squared unit that one-sided differences, good to three digits, tell from none
KEPT = 0.75  # share of its promise that a step must keep, for the metric to go on without a look
FLAT = 1.0  # squared log units: a hyperparameter known no better than to a factor e may lie on a plateau
PLATEAU = either_way(AWAY[:3])  # log units away from it
WORTH = 0.05  # nats: less is no reason to leave it
HIGHER = 1.0  # nats that must be promised, and gained, by going over to another mode
LONGER = 4.0  # times the share of the last step; for Friedman 2 in benchmarks/mlp_quality.py
CUT = 0.1  # share of a step, less of which means that modes cannot be followed; for clusters met by few hidden units
SEARCH = Backtracking(shorter=to_peak_or_quarter, shortest=0.5**24)


@dataclass(frozen=True, eq=False)
class TypeII:
    """One iterate of the hyperparameters.  Built only by :func:`type2_state` and :func:`step`."""

    laplace: LaplaceState
    slope: Slope
    learned: Tensor | None = None  # (T, T) the metric that steps or differences have taught, if they have
    trusted: bool = False  # whether the last step has gained about what it promised, or more
    concave: bool = False  # whether a curvature by differences, on the way or here, was that of a maximum
    stop_reason: Status | None = None
    needed: Mapping[int, PruningTried] = field(default_factory=dict)  # by group
    scanned: bool = False  # whether plateaus have been looked across
    restarted: bool = False  # whether the fit has left a plateau by beginning again
    share: float = 1.0  # of the last step that was taken
    way: tuple[float, ...] = ()  # objectives before the last steps, as many as there are hyperparameters
    rested: "TypeII | None" = None  # where the fit has come to rest at an edge, before it began there again
    places: tuple[Tensor, ...] = ()  # hyperparameters (T,) before each step
    enough: float = 0.0  # nats that a step may promise where the fit ends: a last one is Newton's, of whoever goes on

    @cached_property
    def metric(self) -> Tensor:
        """An approximate inverse of minus the Hessian of the objective, ``(T, T)``: as learned, or the natural one."""
        return natural_metric(self.laplace, self.slope) if self.learned is None else self.learned

    @property
    def objective(self) -> float:
        """Log evidence plus log hyperprior, nats."""
        return self.laplace.objective

    @property
    def away(self) -> Tensor:
        """Distances of the hyperparameters from where they began, log units; of those that have them."""
        problem = self.laplace.problem
        return (self.laplace.theta - problem.joint.initial_theta)[problem.log_units].abs()

    @property
    def promised(self) -> float:
        """The expected gain of a step, nats: half the squared slope in the metric, Newton's decrement."""
        return 0.5 * float(self.slope.total @ self.metric @ self.slope.total)

    @property
    def gradient_norm(self) -> float:
        """The slope per standard deviation of the hyperparameters, as far as it is known, nats; 0 without any.

        What is in log units and known no better than to a factor e counts by its slope per log unit: at an end of its
        range the log evidence is flat, and it would go on for ever.
        """
        if not len(self.slope.total):
            return 0.0
        if self.stop_reason is Status.PLATEAU:
            return math.inf
        wide = self.laplace.problem.log_units & (self.metric.diagonal() > FLAT)
        capped = torch.where(wide, self.slope.total * self.metric.diagonal().abs().rsqrt(), self.slope.total)
        return math.sqrt(max(float(capped @ self.metric @ capped), 0.0))


def endless(state: TypeII, sites: Collection[str]) -> ImproperPosterior | None:
    """The error message about one of ``sites`` among the hyperparameters that runs to infinity, if any does."""
    hypers, logs = state.laplace.problem.joint.hypers, state.laplace.problem.log_units
    member = torch.cat([torch.full((part.size,), part.name in sites) for part in hypers.parts]).to(logs.device)
    return rises_without_end(state.laplace.theta, state.slope.total, logs & member, hypers.label, A_MILLION)


def type2_state(laplace: LaplaceState, found: Slope | None = None) -> TypeII:
    """The iterate at a Laplace state, in the natural metric.

    :param found: the slope there, where it is known.
    """
    if not len(laplace.theta):
        return TypeII(laplace, Slope(laplace.theta, laplace.theta))
    if found is None or not bool(found.total.isfinite().all()):
        found = finite_slope(laplace)
    return TypeII(laplace, found)


def step(state: TypeII) -> TypeII:
    """One iteration: a step uphill in the hyperparameters, mode re-found, then pruning where that gains.

    A fit that behaves well takes a natural step or two, has its curvature refreshed, goes on in the metric that it has
    learned, and looks once beyond plateaus.  The other branches are for networks whose mode is about to vanish, for
    rounding, and for steps that lead nowhere.
    """
    try:
        return alone(steps(state), answer)
    except ArithmeticError:
        if not interpolates_data(state.laplace, state.slope):
            raise
        return replace(state, stop_reason=Status.INTERPOLATING)


def answer(request: ModeAt | LaplaceState) -> Any:
    """The slope of a state; for hyperparameters the objective and the state there, or None where there is no mode."""
    if isinstance(request, LaplaceState):
        return finite_slope(request)
    found = reached(*request)
    return None if found is None else (found.objective, found)


def steps(state: TypeII) -> Asking[TypeII]:
    """:func:`step`, asking for the modes of its line search and the slope where that ends, so that fits share them."""
    new = _begun_again_at_edge((yield from _stepped(state)))
    before = new.rested
    if new.stop_reason is None or before is None:
        return new
    lower = new.stop_reason is not Status.CONVERGED or new.objective < before.objective
    return replace(before, stop_reason=Status.CONVERGED) if lower else new


def _stepped(state: TypeII) -> Asking[TypeII]:
    """:func:`steps`, at an edge or not."""
    network = state.laplace.problem.structure.network is not None
    if network and not state.trusted and near_fold(state.laplace):
        return _at_higher_mode(state)
    logs = state.laplace.problem.log_units
    direction = _direction(state, logs)
    if not state.trusted and not _goes_far(state, direction, logs):
        state = yield from _with_refreshed_curvature(state)
        direction = direction if state.learned is None else capped(state.metric, state.slope.total, logs)
    if state.learned is not None and state.promised <= _rounding(state):
        return (yield from _with_refined_gradient(state, direction))
    found = yield from _line_search(state, direction)
    if found is None:
        return _stuck(state, float(direction @ state.slope.total))
    share = float((found.theta - state.laplace.theta) @ direction / (direction @ direction))
    new = replace((yield from _arriving(state, found, direction * logs)), share=share)
    if new.stop_reason is None and share < CUT and interpolates_data(state.laplace, state.slope):
        new = replace(new, stop_reason=Status.INTERPOLATING)
    near = not _goes_far(state, new.laplace.theta - state.laplace.theta, logs)
    if new.stop_reason is None and new.laplace.problem is state.laplace.problem and near:
        new = _learned(state, new)
    way = (*state.way, state.objective)[-len(new.laplace.theta) :]
    new = replace(new, way=way)
    if new.stop_reason is None and not new.scanned and new.promised < SHARP:
        new = replace(_off_plateaus(new), way=way)
    least = max(new.laplace.problem.slack, new.enough * new.scanned)
    done = new.learned is not None and 0.5 * new.gradient_norm**2 <= least
    return replace(new, stop_reason=Status.CONVERGED) if done else new


def _goes_far(state: TypeII, move: Tensor, logs: Tensor) -> bool:
    """Whether a move is too long for the curvature at its ends to be the same: it teaches the metric nothing."""
    if float((move * logs).abs().max()) > NEAR + 1e-9:  # the first step in a plain metric has length 1
        return True
    return state.learned is None and 0.5 * float((move * ~logs) @ state.slope.total) > BROAD


def _begun_again_at_edge(state: TypeII) -> TypeII:
    """The iterate with hyperparameters at an edge begun once more, where a fit of many of them rests there.

    It rests where one step for each of them has gained nothing, as where covariances of random slopes are singular: the
    maximum is at infinity in several log units, on a curved way along which the objective is level.  By as many steps
    its curvature is learned, so nothing better will come.  A spread near zero has little slope, and so have the
    correlations of its effects, whatever they are: as in polar coordinates at the origin, the fit comes to rest there
    though effects of other correlations would rise.  The end where beginning again has gained nothing.
    """
    if state.stop_reason is not None:
        return state
    size, problem = len(state.laplace.theta), state.laplace.problem
    flat = problem.log_units & (state.metric.diagonal() > FLAT)
    back = state.rested is not None and bool(state.way) and state.objective - state.way[-1] < SHARP
    back = back and abs(state.objective - state.rested.objective) < SHARP * size  # type: ignore[union-attr]
    many = size > FEW and len(state.way) == size
    level = many and state.objective - state.way[0] < SHARP * size and bool(flat.any())
    if not (back or level):
        return state
    theta = torch.where(flat, problem.joint.initial_theta, state.laplace.theta)
    gained = state.rested is None or state.objective > state.rested.objective + WORTH
    found = reached(problem, theta, state.laplace.u) if gained else None
    if found is None:
        return replace(state, stop_reason=Status.CONVERGED)
    return replace(_arrived(replace(state, scanned=False), found), rested=state)


def _at_higher_mode(state: TypeII) -> TypeII:
    """Over to the mode that a search begun a step further on finds, where that is higher by a nat; else the end.

    For networks of more hidden units than the data ask for: benchmarks/mlp_speed.py, mlp_quality.py.
    """
    gone, laplace = replace(state, stop_reason=Status.VANISHING), state.laplace
    if state.promised <= HIGHER:
        return gone
    logs = laplace.problem.log_units
    move = torch.where(logs, _direction(replace(state, learned=None), logs).clamp(-NEAR, NEAR), 0.0)
    found = reached(laplace.problem, laplace.theta + move, laplace.u, cold=True)
    return gone if found is None or not found.objective > state.objective + HIGHER else _arrived(state, found, move)


def off_saddle(state: TypeII) -> TypeII | None:
    """An iterate higher than a stationary point that is no maximum, along its least curvature; None at a maximum.

    Params that begin alike and mean alike, such as two factors of a product, have no slope apart.  Looked at once a
    fit, by differences, unless the metric has shown it on the way, or the way went along every direction: an ascent
    comes to a saddle only from where nothing leads it along the least curvature.  Up to FEW params, recognised
    precisions left out.
    """
    laplace, free = state.laplace, _free(state)
    measure = torch.where(free, measures(laplace.problem, state.metric), 0.0)
    few = laplace.problem.structure.network is None and 0 < int(free.sum()) <= FEW
    if state.concave or not few:
        return None
    # Beside a saddle the part along the least curvature grows with every step, so that a fit which ends there had less
    # of it than halfway, in digits, between the distance at which a fit has converged and a standard deviation.
    places = torch.stack([*state.places, laplace.theta])[:, measure > 0]
    moved = (places - laplace.theta[measure > 0]) / measure[measure > 0]
    if float(torch.linalg.eigvalsh(moved.mT @ moved)[0]) > laplace.problem.slack**0.5:
        return None
    try:
        found = alone(curvature(laplace, state.slope, measure), answer)
    except ArithmeticError:
        return None
    on, unit = free.nonzero().flatten(), measure[free]
    values, vectors = torch.linalg.eigh(found[on.unsqueeze(-1), on] * unit * unit.unsqueeze(-1))
    if float(values[0]) >= -DIFFERENCES:
        return None
    half_a_nat = vectors[:, 0] * unit / math.sqrt(-float(values[0]))
    for length, sign in itertools.product((2.0, 0.5, 0.125), (1.0, -1.0)):
        higher = reached(laplace.problem, laplace.theta.index_add(0, on, sign * length * half_a_nat), laplace.u)
        if higher is not None and higher.objective > state.objective + _rounding(state):
            return _arrived(state, higher)
    return None


def has_symmetric_params(state: TypeII) -> bool:
    """Whether params that began at one value are still alike, as if they were one: their slopes never told them apart.

    Components of a mixture that begin alike, or of a sum of kernels, are the best pair of twins at such an end, which
    need be no maximum though every small step apart leads down.  Their distance counts by its fourth power: rounding
    parts them, by little of the standard deviation that the metric has learned.  Not what the objective does not feel.
    """
    laplace, begun = state.laplace, state.laplace.problem.joint.initial_theta
    measure = measures(laplace.problem, state.metric)
    free = _free(state).nonzero().flatten()
    move = (laplace.theta - begun)[free]
    little = TINY * (move.abs() + measure[free])
    alike = (begun[free] == begun[free].unsqueeze(-1)) & ((move - move.unsqueeze(-1)).abs() <= little)
    twins = free[alike.fill_diagonal_(False).any(-1)]
    if not len(twins):
        return False
    apart = measure[twins] * generic_directions(1, len(twins), laplace.theta)[0]
    there = reached(laplace.problem, laplace.theta.index_add(0, twins, apart), laplace.u)
    return there is None or abs(there.objective - state.objective) > _rounding(state)


def _free(state: TypeII) -> Tensor:
    """Which hyperparameters are no precisions that are recognised, bool ``(T,)``."""
    groups = state.laplace.problem.structure.groups
    return (state.metric.diagonal() > 0) & (True if groups is None else groups.power == 0)


def _rounding(state: TypeII) -> float:
    """Rounding of the objective, nats."""
    return state.laplace.problem.slack * (1.0 + abs(state.objective))


def _with_refined_gradient(state: TypeII, direction: Tensor) -> Asking[TypeII]:
    """Where steps promise less than the objective's rounding: as far as they still level the slope, which sees more."""
    there = yield ModeAt(state.laplace.problem, state.laplace.theta + direction, state.laplace.u)
    if there is None:
        return replace(state, stop_reason=Status.CONVERGED)
    new = yield from _arriving(state, there[1])
    if new.laplace.problem is not state.laplace.problem or new.stop_reason is not None:
        return new
    new = _learned(state, new)
    if not new.gradient_norm < 0.5 * state.gradient_norm:
        return replace(state, stop_reason=Status.CONVERGED)
    return new


def _off_plateaus(state: TypeII) -> TypeII:
    """Where the objective no longer feels a hyperparameter, somewhere higher along it, if there is.

    Looked for once, and again after each time that something was found.
    """
    state, best = replace(state, scanned=True), state.laplace
    if state.laplace.problem.structure.network is not None:
        return state
    if bool(not_identified(state.laplace).any()):
        return _restarted(state)
    laplace, flat = state.laplace, state.laplace.problem.log_units & (state.metric.diagonal() > FLAT)
    places = list(reactivated(laplace, flat, FEW, 0.5 * WORTH))  # first those of pruned groups
    moves = torch.tensor(PLATEAU, dtype=torch.float64).to(laplace.theta)
    for t in flat.nonzero().flatten().tolist():
        for move in moves[predicted_gain(laplace, t, moves, 0.5 * WORTH)]:
            unit = torch.zeros_like(laplace.theta)
            unit[t] = 1.0
            places.append((laplace.problem, laplace.theta + move * unit))
    if not places:
        return state
    theta, u, own, near = torch.stack([t for _, t in places]), laplace.u.expand(len(places), -1), laplace.problem, None
    if own.factors is not None:
        near = near_states(own, theta, u, log_priors(own, theta))
    elif can_compare(own) and len(places) > 1:  # of a batch the highest, and those where it found no mode
        height = laplace_batch(own, theta, torch.stack([p.active for p, _ in places]), u).objective
        top = int(height.argmax()) if bool(height.amax() > laplace.objective + 0.5 * WORTH) else -1
        places = [p for i, p in enumerate(places) if i == top or not bool(height[i].isfinite())]
    for (problem, there), known in zip(places, near or [None] * len(places), strict=True):
        found = known if known is not None and problem is own else reached(problem, there, laplace.u)
        best = found if found is not None and found.objective > best.objective + WORTH else best
    return state if best is laplace else _arrived(replace(state, scanned=False), best)


def _restarted(state: TypeII) -> TypeII:
    """From the start, scales first, the real numbers held; once per fit: the second time it is the end.

    For the real-valued hyperparameters of processes: benchmarks/gp_speed.py.
    """
    problem = state.laplace.problem
    whole = replace(problem, active=torch.ones_like(problem.active))
    if state.restarted:
        return replace(state, stop_reason=Status.PLATEAU)
    new = type2_state(laplace_state(whole, problem.joint.initial_theta, problem.joint.initial_u, cold=True))
    logs = problem.log_units
    for _ in range(SCALES_FIRST):
        move = torch.where(logs, _rounds(new, logs, torch.zeros_like(new.laplace.theta)), 0.0)
        found = alone(_line_search(new, move), answer)
        if found is None:
            break
        new = type2_state(found)
    return replace(new, restarted=True)


def _arrived(state: TypeII, found: LaplaceState, move: Tensor | None = None) -> TypeII:
    """:func:`_arriving`, by itself."""
    return alone(_arriving(state, found, move), answer)


def _arriving(state: TypeII, found: LaplaceState, move: Tensor | None = None) -> Asking[TypeII]:
    """The iterate there, with a fresh metric, after pruning.

    :param move: that led there, in log units.
    """
    pruned, needed = prune(found, state.needed, move)
    pruned = replace(pruned, left_saddle=pruned.left_saddle or state.laplace.left_saddle)
    new = type2_state(pruned, (yield pruned))
    new = replace(new, needed=needed, scanned=state.scanned, restarted=state.restarted, rested=state.rested)
    new = replace(new, places=(*state.places, state.laplace.theta), enough=state.enough)
    if bool((new.away > FARTHEST).any()) or (bool((new.away > A_MILLION).any()) and is_rounding(found)):
        return replace(new, stop_reason=Status.UNBOUNDED)
    return replace(new, stop_reason=Status.SINGULAR) if is_singular(new.laplace) else new


def capped(metric: Tensor, gradient: Tensor, logs: Tensor) -> Tensor:
    """The step that a metric suggests, no longer than LARGEST_STEP in any log unit."""
    direction = metric @ gradient
    short = torch.where(logs, direction.clamp(-LARGEST_STEP, LARGEST_STEP), direction)
    if float(short @ gradient) > 0.0:
        return short
    return direction * (LARGEST_STEP / (direction * logs).abs().max().clamp(min=LARGEST_STEP))  # direction kept


def _direction(state: TypeII, logs: Tensor) -> Tensor:
    """The step of the learned metric, or Newton's of the real numbers with MacKay's rounds of the others."""
    move = capped(state.metric, state.slope.total, logs)
    if state.learned is not None:
        return move
    real = torch.where(logs, 0.0, move)
    return real + _rounds(state, logs, real)


def _rounds(state: TypeII, logs: Tensor, real: Tensor) -> Tensor:
    """The step of what is in log units after a step of the real numbers; MacKay's own where all are recognised."""
    natural = torch.where(logs, capped(state.metric, state.slope.total, logs), 0.0)
    on, structure = (logs & (state.metric.diagonal() > 0)).nonzero().flatten(), state.laplace.problem.structure
    known = structure.groups is not None and bool((structure.groups.power[on] != 0).all())
    dear = state.laplace.problem.latent or structure.eliminated
    if (known and not bool(real.any())) or dear or not len(on):
        return natural
    move = round_of_all(state.laplace, state.slope, on, real, LARGEST_STEP)
    together = torch.zeros_like(real).index_add(0, on, move)
    return together if float((together + real) @ state.slope.total) > 0.0 else natural


def _with_refreshed_curvature(state: TypeII) -> Asking[TypeII]:
    """With the curvature by differences for its metric, where that is cheap, and the end is near."""
    measure = measures(state.laplace.problem, state.metric)
    most = BROAD if state.laplace.problem.latent is None else HIGH
    if int((measure > 0).sum()) > FEW or not SHARP <= state.promised <= most:
        return state
    try:
        found = yield from curvature(state.laplace, state.slope, measure)
    except ArithmeticError:
        return state
    on, metric = measure.nonzero().flatten(), torch.zeros_like(state.metric)
    metric[on.unsqueeze(-1), on] = inverted(found[on.unsqueeze(-1), on], state.slope.total[on])
    scaled = found[on.unsqueeze(-1), on] * measure[on] * measure[on].unsqueeze(-1)
    concave = bool(torch.linalg.eigvalsh(scaled)[0] > DIFFERENCES)
    return replace(state, learned=metric, trusted=True, concave=concave)


def _learned(old: TypeII, new: TypeII) -> TypeII:
    """With the old metric, and what the step has taught."""
    moved, before, after = new.laplace.theta - old.laplace.theta, old.slope.total, new.slope.total
    start = rescaled(old.laplace.problem, old.metric, moved, before - after) if old.learned is None else old.learned
    metric = updated(start, moved, before - after)
    trusted = new.objective - old.objective > KEPT * old.promised
    return replace(new, learned=new.metric if metric is None else metric, trusted=trusted, concave=old.concave)


def _stuck(state: TypeII, promised: float) -> TypeII:
    """Another try in the natural metric; when that is what failed, the end.

    That is at rounding, for a noise that vanishes, for a flat objective, or for want of smoothness.  A hyperparameter
    so far off that moves of a millionth change the objective 100 times too much counts as unbounded.
    """
    eps = torch.finfo(state.laplace.problem.joint.dtype).eps
    if promised <= eps**0.5 * (1.0 + abs(state.objective)):  # and cannot be had: noise
        return replace(state, stop_reason=Status.CONVERGED)
    if state.learned is not None:
        return replace(state, learned=None)
    if interpolates_data(state.laplace, state.slope):
        return replace(state, stop_reason=Status.INTERPOLATING)
    if _is_flat(state):
        return replace(state, stop_reason=Status.UNBOUNDED)
    moves = TINY * generic_directions(6, len(state.laplace.theta), state.slope.total)
    allowed = 100.0 * (TINY * float(state.slope.total.abs().sum()) + _rounding(state))
    lost = bool((state.away > A_MILLION).any()) and max(_change(state, move) for move in moves) > allowed
    return replace(state, stop_reason=Status.UNBOUNDED if lost else Status.STUCK)


def _is_flat(state: TypeII) -> bool:
    """Whether the objective is the same, to 1e-5 nats, with some hyperparameter a factor e smaller and larger."""
    on = state.laplace.problem.log_units & (state.metric.diagonal() > 0)  # the others are pruned
    return any(max(_change(state, d), _change(state, -d)) < 1e-5 for d in torch.eye(len(on)).to(state.slope.total)[on])


def _change(state: TypeII, move: Tensor) -> float:
    """Absolute change of the objective by a move of the hyperparameters, nats; 0 where it cannot be computed."""
    moved = reached(state.laplace.problem, state.laplace.theta + move, state.laplace.u)
    return 0.0 if moved is None else abs(moved.objective - state.objective)


def _line_search(state: TypeII, direction: Tensor) -> Asking[LaplaceState | None]:
    """The first of the ever shorter steps that raises the objective (Armijo), or None.

    A network whose mode could be followed a part of the last step only is not asked for much more at once.
    """
    before = state.laplace
    if before.problem.structure.network is not None and state.promised > SHARP:
        direction = direction * min(1.0, LONGER * state.share)
    line = Line(float(direction @ state.slope.total), _rounding(state))
    asking: Asking[LaplaceState | None] = accepted(
        lambda scale: ModeAt(before.problem, before.theta + scale * direction, before.u), before.objective, line, SEARCH
    )
    return (yield from asking)


def climb(fits: Sequence[Fit[TypeII]], stop: Stop) -> tuple[Fit[TypeII], ...]:
    """Every mode, all of one problem, moved to where its log evidence is highest, or as far as no step fails."""
    problem = fits[0].state.laplace.problem
    with bar_of("restarts", stop.progress) as bar:

        def answers(waiting: Mapping[int, ModeAt | LaplaceState]) -> Mapping[int, Any]:
            bar.set_postfix_str(f"{len(waiting)} of {len(fits)} on their way", refresh=False)
            bar.update()
            places = {row: asked for row, asked in waiting.items() if isinstance(asked, ModeAt)}
            if places:  # rows that ask for slopes wait, so that they go on together
                return dict(zip(places, _modes(problem, [*places.values()]), strict=True))
            states = {row: asked for row, asked in waiting.items() if isinstance(asked, LaplaceState)}
            if len(states) == 1:
                return {row: answer(state) for row, state in states.items()}
            found = slopes(problem, [*states.values()])
            return {row: found[i] for i, row in enumerate(states)}

        return together([_climbing(fit, stop) for fit in fits], answers)


def _climbing(fit: Fit[TypeII], stop: Stop) -> Asking[Fit[TypeII]]:
    """One fit, until there is a reason to stop, or a step fails: that it does is said by the loop of one fit."""
    state, path, reason = fit.state, [*fit.objectives], None
    while reason is None:
        try:
            state = yield from steps(state)
        except ArithmeticError:
            break
        path.append(state.objective)
        reason = stop(path[-2], state, len(path) - 1)
    return Fit(state, fit.status, tuple(path))


def _modes(problem: Problem, asked: Sequence[ModeAt]) -> list[tuple[float, LaplaceState] | None]:
    """Answer of :func:`answer` to each, the modes found in one batch."""
    if len(asked) == 1:
        return [answer(asked[0])]
    theta, start = torch.stack([a.theta for a in asked]), torch.stack([a.start for a in asked])
    active = torch.stack([a.problem.active for a in asked])
    num_steps = None if problem.structure.network is None else trust_region.FOLLOWED
    mode = modes_of_rows(problem, theta, active, start, num_steps)
    found: list[tuple[float, LaplaceState] | None] = []
    for row, place in enumerate(asked):
        try:
            state = state_of_row(place.problem, place.theta, place.start, mode, row)
            found.append((state.objective, state))
        except ArithmeticError:
            found.append(None)
    return found
