"""Type-II maximisation: quasi-Newton on the exact gradient, in MacKay's metric where precisions are recognised."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pyro_evidence.iterate import Status
from pyro_evidence.laplace.approximation import LaplaceState, Problem, Slope, laplace_state, slope
from pyro_evidence.numerics.evidence import reestimated_log_precision, well_determined
from pyro_evidence.structure.recognise import PrecisionGroups

LARGEST_STEP = 4.0  # in log units: a factor of 55 in a precision
FARTHEST = 60.0  # a precision of e^60 or e^-60 is on its way to infinity
INFLATED = 1e3  # posterior variance in units of the prior's, beyond which the curvature is becoming singular
INFLATED_NETWORK = 30.0  # the same for a network, where that is how modes merge
FAR_WORSE = 10.0  # nats: a group whose removal costs as much is not tried again at once


@dataclass(frozen=True)
class PruningTried:
    """Hyperparameters at which the removal of a group cost far more than it gained, or led nowhere."""

    theta: Tensor  # (T,)
    loss: float  # nats, at least FAR_WORSE


@dataclass(frozen=True)
class TypeII:
    """One outer iterate.  Built only by :func:`outer_state` and :func:`step`."""

    laplace: LaplaceState
    slope: Slope
    metric: Tensor  # (T, T) approximate inverse of minus the Hessian of the objective
    verdict: Status | None = None
    needed: Mapping[int, PruningTried] = field(default_factory=dict)  # by group

    @property
    def objective(self) -> float:
        """Log evidence plus log hyperprior, nats."""
        return self.laplace.objective

    @property
    def gradient_norm(self) -> float:
        """Largest derivative in the unconstrained hyperparameters, nats; 0 without hyperparameters."""
        return float(self.slope.total.abs().max()) if len(self.slope.total) else 0.0


def outer_state(laplace: LaplaceState) -> TypeII:
    """The iterate at a Laplace state, with a fresh metric."""
    if not len(laplace.theta):
        return TypeII(laplace, Slope(laplace.theta, laplace.theta), torch.zeros(0, 0))
    found = slope(laplace)
    return TypeII(laplace, found, natural_metric(laplace, found).diag())


def natural_metric(laplace: LaplaceState, found: Slope) -> Tensor:
    """The diagonal metric in which a gradient step is one round of MacKay's fixed point, shape ``(T,)``."""
    groups = laplace.problem.structure.groups
    return metric_of(groups, None if groups is None else groups.size(laplace.problem.active), found)


def metric_of(groups: PrecisionGroups | None, size: Tensor | None, found: Slope) -> Tensor:
    """The metric of :func:`natural_metric` for slopes ``(..., T)`` of groups of ``size`` ``(..., T)``.

    Hyperparameters that hold no recognised precision get a step of at most one unit.
    """
    gradient = found.total
    plain = 1.0 / gradient.abs().amax(-1, keepdim=True).clamp(min=1.0).expand_as(gradient)  # |step| <= 1
    if groups is None or size is None:
        return plain
    grouped = groups.power != 0
    power = torch.where(grouped, groups.power, 1.0)
    quadratic = size - 2.0 * found.joint / power
    move = reestimated_log_precision(gradient / power, quadratic) / power
    good = grouped & torch.isfinite(move) & (move * gradient > 0)
    ascent = torch.where(good, move / torch.where(good, gradient, 1.0), 0.0)
    stiff = grouped & ~good & (gradient != 0)  # the round would leave the positive numbers
    metric = torch.where(good, ascent, torch.where(stiff, 1.0 / gradient.abs(), plain))
    return torch.where(grouped & (size == 0), 0.0, metric)  # what only pruned weights feel stays where it is


def step(state: TypeII) -> TypeII:
    """One outer iteration: a step uphill in the hyperparameters, mode re-found, then pruning where that gains."""
    direction = state.metric @ state.slope.total
    direction = direction * (LARGEST_STEP / direction.abs().max().clamp(min=LARGEST_STEP))  # cap, direction kept
    found = _line_search(state, direction)
    if found is None:
        return _stuck(state, float(direction @ state.slope.total))
    pruned, needed = _prune(found, state.needed)
    new = replace(outer_state(replace(pruned, escaped=pruned.escaped or state.laplace.escaped)), needed=needed)
    if bool((new.laplace.theta.abs() > FARTHEST).any()):
        return replace(new, verdict=Status.UNBOUNDED)
    same_model = new.laplace.problem is state.laplace.problem
    if is_singular(new.laplace):
        return replace(new, verdict=Status.SINGULAR)
    if not same_model or float(direction.abs().max()) > 1.0 + 1e-9:  # the first step in a plain metric has length 1
        return new
    moved, before, after = new.laplace.theta - state.laplace.theta, state.slope.total, new.slope.total
    return replace(new, metric=updated(_rescaled(state, moved, before - after), new.metric, moved, before, after))


def _rescaled(old: TypeII, s: Tensor, y: Tensor) -> Tensor:
    """The metric before its first update, where nothing was known of the scale.

    Nocedal and Wright (2006), eq. 6.20, over the hyperparameters that hold no recognised precision.
    """
    fresh = natural_metric(old.laplace, old.slope).diag()
    groups = old.laplace.problem.structure.groups
    plain = torch.ones_like(s, dtype=torch.bool) if groups is None else groups.power == 0
    sy, yy = s[plain] @ y[plain], y[plain] @ y[plain]
    if not torch.equal(fresh, old.metric) or not float(sy) > 1e-12 * float(yy):
        return old.metric
    return torch.where(plain, sy / yy, fresh.diagonal()).diag()


def is_singular(laplace: LaplaceState) -> bool:
    """Whether the posterior variance of some latent exceeds its prior variance by far: a mode about to merge or split.

    There the exact Hessian becomes singular and Laplace's log evidence goes to infinity for no good reason.
    """
    groups = laplace.problem.structure.groups
    if groups is None:
        return False
    inflation = laplace.precision.variance[0] * groups.log_precision(laplace.theta).exp()
    alone = (groups.member >= 0) & torch.isfinite(groups.loc)  # elsewhere other latents add to the prior variance
    return bool((inflation[laplace.problem.active & alone] > largest_inflation(laplace.problem)).any())


def largest_inflation(problem: Problem) -> float:
    """How many times its prior variance a latent's posterior variance may be."""
    return INFLATED if problem.structure.known is None else INFLATED_NETWORK


def _stuck(state: TypeII, promised: float) -> TypeII:
    """Another try in the natural metric; when that is what failed, the end: at rounding, or for want of smoothness."""
    fresh = natural_metric(state.laplace, state.slope).diag()
    if not torch.equal(fresh, state.metric):
        return replace(state, metric=fresh)
    rounding = state.laplace.problem.tolerance * (1.0 + abs(state.objective))
    if promised <= rounding:
        return replace(state, verdict=Status.CONVERGED)
    return replace(state, verdict=Status.UNBOUNDED if _is_flat(state) else Status.STUCK)


def _is_flat(state: TypeII) -> bool:
    """Whether the objective is the same, to 1e-5 nats, with some hyperparameter a factor e smaller and larger."""
    directions = torch.eye(len(state.laplace.theta), dtype=torch.float64, device=state.laplace.theta.device)
    return any(max(_change(state, d), _change(state, -d)) < 1e-5 for d in directions)


def _change(state: TypeII, move: Tensor) -> float:
    """How much the objective changes by a move of the hyperparameters, nats; 0 where it cannot be computed."""
    try:
        moved = laplace_state(state.laplace.problem, state.laplace.theta + move, state.laplace.u)
    except ArithmeticError:
        return 0.0
    return abs(moved.objective - state.objective)


def _line_search(state: TypeII, direction: Tensor) -> LaplaceState | None:
    """The first of the ever shorter steps that raises the objective (Armijo), or None."""
    before = state.laplace
    promised = float(direction @ state.slope.total)
    slack = 1e-13 * (1.0 + abs(before.objective))  # rounding of the objective
    scale = 1.0
    while scale >= 0.5**24:  # shorter steps move nothing
        try:
            new = laplace_state(before.problem, before.theta + scale * direction, before.u)
        except ArithmeticError:
            scale = 0.5 * scale
            continue
        rise = new.objective - before.objective
        if rise >= 1e-4 * scale * promised - slack:
            return new
        scale = _shortened(scale, rise, promised)
    return None


def _shortened(scale: float, rise: float, promised: float) -> float:
    """Where the parabola through the objective here, its slope and the failed trial is highest, within bounds.

    Nocedal and Wright (2006), eq. 3.58.
    """
    best = 0.5 * promised * scale**2 / (promised * scale - rise)
    return min(max(best, 0.1 * scale), 0.5 * scale) if math.isfinite(best) else 0.5 * scale


def updated(metric: Tensor, fresh: Tensor, s: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """BFGS update of a metric after a step ``s``, or a fresh one.  Nocedal and Wright (2006), eq. 6.17.

    :param metric: approximate inverse of minus the Hessian of the objective, ``(..., T, T)``.
    :param fresh: what to fall back on where the step shows no negative curvature.
    :param s: ``(..., T)``.
    :param before: slopes before the step, and ``after`` it, ``(..., T)``.
    """
    y = before - after
    sy = (s * y).sum(-1)[..., None, None]
    bends = sy > 1e-12 * y.square().sum(-1)[..., None, None]
    safe = torch.where(bends, sy, 1.0)
    left = torch.eye(s.shape[-1]).to(s) - s.unsqueeze(-1) * y.unsqueeze(-2) / safe
    return torch.where(bends, left @ metric @ left.mT + s.unsqueeze(-1) * s.unsqueeze(-2) / safe, fresh)


def _prune(state: LaplaceState, needed: Mapping[int, PruningTried]) -> tuple[LaplaceState, Mapping[int, PruningTried]]:
    """Switch off every group of weights whose best precision is infinite; the state, and the groups far from that."""
    groups = state.problem.structure.groups
    if groups is None:
        return state, {}
    size = groups.size(state.problem.active)
    for t in torch.nonzero(groups.is_weight & (size > 0) & (state.gamma < 0.1 * size)).flatten().tolist():
        finite = bool(torch.isfinite(groups.loc[groups.member == t]).all())
        if finite and not (t in needed and _still_needed(needed[t], state.theta, groups, size, t)):
            before, (state, loss) = state, _without(state, groups, t)
            kept = {**needed, t: PruningTried(state.theta, loss)} if loss >= FAR_WORSE else needed
            needed = kept if state is before else {}
    return state, needed


def _still_needed(found: PruningTried, theta: Tensor, groups: PrecisionGroups, size: Tensor, t: int) -> bool:
    """Whether the hyperparameters have moved too little since to make up for the loss of group ``t``.

    A log precision is worth up to half a nat per unit and term that it scales; any other hyperparameter that moves by
    one, and the group's own precision by a factor e, calls for another trial.
    """
    moved = (theta - found.theta).abs()
    per_unit = torch.where(groups.power != 0, 0.5 * size * groups.power.abs(), found.loss)
    return float((moved * groups.power.abs())[t]) < 1.0 and float(moved @ per_unit) < found.loss


def _without(state: LaplaceState, groups: PrecisionGroups, t: int) -> tuple[LaplaceState, float]:
    """The state without group ``t``, if the log evidence is no lower there than here and than just before infinity.

    To first order in the prior variance the log evidence near infinity is linear, so the second comparison says
    whether infinity is a local maximum.

    :return: that state or the old one, and the nats that the removal costs, FAR_WORSE where it leads to no mode.
    """
    member = groups.member == t
    stand_in = state.theta.clone()
    stand_in[t] += _to_insignificance(state, member) / groups.power[t]
    start = torch.where(member, groups.loc, state.u)
    try:
        pruned = laplace_state(state.problem.without(member), stand_in, start)
        loss = state.objective - pruned.objective
        if loss > 0:
            return state, loss
        before = laplace_state(state.problem, stand_in, start)
    except ArithmeticError:
        return state, FAR_WORSE
    return (pruned if pruned.objective >= before.objective else state), loss


def _to_insignificance(state: LaplaceState, member: Tensor) -> Tensor:
    groups = state.problem.structure.groups
    assert groups is not None
    prior = groups.log_precision(state.theta)[member].exp()
    return to_insignificance(well_determined(prior, state.precision.variance[0][member]).amax())


def to_insignificance(determined: Tensor) -> Tensor:
    """How much a log precision must rise for the data to move a weight by 1e-4 of its prior variance only.

    :param determined: how far the data determine the weight now, 0 to 1.
    """
    inside = determined.clamp(1e-12, 0.5)  # 0 < gamma < 1
    return (1e4 * inside / (1.0 - inside)).log().clamp(min=math.log(100.0))  # at least a factor of 100
