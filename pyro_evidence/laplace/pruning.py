"""Groups of weights that the data do not need: switched off where that gains, brought back where they were needed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState, Problem, laplace_state, reached
from pyro_evidence.numerics.evidence import well_determined
from pyro_evidence.numerics.linalg import relative_rounding
from pyro_evidence.structure.groups import PrecisionGroups

AWAY = (2.5, 5.0, 8.0, 12.0, 20.0, 40.0)  # log units from a precision at which it may be better, either way
MANY = 32  # weights of a group above which its covariance is not worth the matrix
GONE = 60.0  # log units above its own precision at which a weight is gone, to double precision
LEAST_RISE = -0.2  # nats: foreseen by less, a rise is believed to be none where the likelihood is not Gaussian


def either_way(moves: Sequence[float]) -> list[float]:
    """Moves down, the longest first, and up, the shortest first."""
    return [*(-move for move in reversed(moves)), *moves]


def predicted_gain(laplace: LaplaceState, index: int, moves: Tensor, least: float, below: float = 0.0) -> Tensor:
    """Which moves ``(K,)`` of a log precision may raise the log evidence by ``least`` nats, ``(K,)`` bool.

    All, for a hyperparameter that is not a precision of a few weights behind linear predictors.  Without it each move
    is a search for a mode: fifty precisions in benchmarks/releases.py.

    :param below: nats by which this state is lower than what is to be surpassed.
    """
    member = _members(laplace, index)
    if member is None:
        return torch.ones_like(moves, dtype=torch.bool)
    return rises(laplace, index, member, moves) > below + (least if is_gaussian(laplace) else LEAST_RISE)


def _members(laplace: LaplaceState, index: int) -> Tensor | None:
    """Positions of the weights behind a hyperparameter; None where they are not few behind linear predictors."""
    problem = laplace.problem
    groups = problem.structure.groups
    if groups is None or problem.structure.linear is None or problem.joint.maximised_sites:
        return None
    member = ((groups.member == index) & problem.active).nonzero().flatten()
    known = bool(groups.is_weight[index]) and bool(groups.loc[member].isfinite().all())
    return member if known and 0 < len(member) <= MANY else None


def removal(laplace: LaplaceState, index: int, move: Tensor) -> tuple[float, float] | None:
    """By how much the log evidence rises once a log precision has moved, and without its weights; None if unknown."""
    groups, member = laplace.problem.structure.groups, _members(laplace, index)
    if groups is None or member is None or not is_gaussian(laplace):
        return None
    there, gone = rises(laplace, index, member, torch.stack([move, GONE / groups.power[index]])).tolist()
    return (there, gone) if math.isfinite(there) and math.isfinite(gone) else None


def rises(laplace: LaplaceState, index: int, member: Tensor, moves: Tensor) -> Tensor:
    """By how much the log evidence rises, nats, ``(K,)``.

    :param member: the weights of hyperparameter ``index``, positions.
    """
    groups = laplace.problem.structure.groups
    assert groups is not None
    C = laplace.precision.covariance_of(member, len(laplace.u))[:, member].double()
    prior = groups.log_precision(laplace.theta)[member].exp()
    logs = groups.power[index] * moves
    more, r = prior * torch.expm1(logs).unsqueeze(-1), (laplace.u - groups.loc)[member]
    A = torch.eye(len(member)).to(C) + more.unsqueeze(-1) * C
    sign, log_det = torch.linalg.slogdet(A)
    moved, singular = torch.linalg.solve_ex(A, (more * r).unsqueeze(-1))  # where the data say nothing of the weights
    found = 0.5 * (len(member) * logs - (r * moved.squeeze(-1)).sum(-1) - log_det)
    return torch.where((sign > 0) & (singular == 0), found, torch.inf)


def is_gaussian(laplace: LaplaceState) -> bool:
    """Whether a linear density's likelihood has the same curvature half a posterior standard deviation away."""
    linear = laplace.problem.structure.linear
    assert linear is not None
    if all(part.even for part in linear.linear):
        return True
    away = laplace.u + 0.5 * laplace.precision.variance[0].sqrt()
    here, there = (linear.curvatures(u.unsqueeze(0), laplace.theta.detach()) for u in (laplace.u, away))
    most = relative_rounding(laplace.problem.joint.dtype)
    return all(bool(((a - b).abs() <= most * a.abs()).all()) for a, b in zip(here, there, strict=True))


FAR_WORSE = 10.0  # nats: a group whose removal costs as much is not tried again at once
UNDETERMINED = 0.1  # of its weights determined, on average: a group that is tried without
NOT_IDENTIFIED = 1e-6  # the same of a group on a plateau, and of a precision what rounding leaves six digits of
SHARES = (0.0, *AWAY[:2])  # log units by which a prior precision is less than the data's, on trial
SMALLER = range(0, 81, 20)  # log units of a prior precision
NEAR = 1.0  # log units: moves of hyperparameters at which a decision for good can be taken, and a metric learned


@dataclass(frozen=True, eq=False)
class PruningTried:
    """Hyperparameters at which the removal of a group cost far more than it gained, or led nowhere."""

    theta: Tensor  # (T,)
    loss: float  # nats, at least FAR_WORSE


def prune(
    state: LaplaceState, needed: Mapping[int, PruningTried], move: Tensor | None = None
) -> tuple[LaplaceState, Mapping[int, PruningTried]]:
    """Switch off every group of weights whose best precision is infinite; the state, and the groups far from that.

    :param move: of the last step: while others than such groups still move far, nothing is switched off for good.
    """
    groups = state.problem.structure.groups
    if groups is None:
        return state, {}
    size = groups.size(state.problem.active)
    candidates = groups.is_weight & (size > 0) & (state.gamma < UNDETERMINED * size)
    if move is not None and float(torch.where(candidates, 0.0, move).abs().max()) > NEAR:
        return state, needed
    together = _together(state, groups, candidates) if int(candidates.sum()) > 1 else state
    if together is not state:
        state, needed = together, {}
        candidates = candidates & (groups.size(state.problem.active) > 0)
    for t in torch.nonzero(candidates).flatten().tolist():
        tried = needed.get(t)
        if tried is not None:
            # A log precision is worth up to half a nat per unit and term that it scales; any other hyperparameter that
            # moves by one, and the group's own precision by a factor e, calls for another trial.
            moved, power = (state.theta - tried.theta).abs(), groups.power.abs()
            per_unit = torch.where(power != 0, 0.5 * size * power, tried.loss)
            if float((moved * power)[t]) < 1.0 and float(moved @ per_unit) < tried.loss:
                continue
        if bool(torch.isfinite(groups.loc[groups.member == t]).all()):
            before, (state, loss) = state, _without(state, groups, t)
            kept = {**needed, t: PruningTried(state.theta, loss)} if loss >= FAR_WORSE else needed
            needed = kept if state is before else {}
    return state, needed


def _together(state: LaplaceState, groups: PrecisionGroups, candidates: Tensor) -> LaplaceState:
    """Without all groups whose removal is foreseen to gain, where that gains; the same state where it does not.

    What another group of them would have been needed for is seen by those who bring groups back.
    """
    theta, gone, num = state.theta.clone(), torch.zeros_like(state.problem.active), 0
    for t in torch.nonzero(candidates).flatten().tolist():
        member = groups.member == t
        move = _to_insignificance(state, groups, member) / groups.power[t]
        foreseen = removal(state, t, move)
        if foreseen is not None and foreseen[1] > max(foreseen[0], 0.0):
            theta[t], gone, num = theta[t] + move, gone | member, num + 1
    if num < 2:  # one alone is tried by itself
        return state
    pruned = reached(state.problem.without(gone), theta, torch.where(gone, groups.loc, state.u))
    return state if pruned is None or not pruned.objective > state.objective else pruned


def _without(state: LaplaceState, groups: PrecisionGroups, t: int) -> tuple[LaplaceState, float]:
    """The state without group ``t``, if the log evidence is no lower there than here and than just before infinity.

    To first order in the prior variance the log evidence near infinity is linear, so the second comparison says
    whether infinity is a local maximum.

    :return: that state or the old one, and the nats that the removal costs, FAR_WORSE where it leads to no mode.
    """
    member = groups.member == t
    stand_in, move = state.theta.clone(), _to_insignificance(state, groups, member) / groups.power[t]
    stand_in[t] += move
    foreseen = removal(state, t, move)
    if foreseen is not None and foreseen[1] < max(foreseen[0], 0.0):
        return state, -foreseen[1]
    start = torch.where(member, groups.loc, state.u)
    try:
        pruned = laplace_state(state.problem.without(member), stand_in, start)
        loss = state.objective - pruned.objective
        if loss > 0 or foreseen is not None:
            return (state if loss > 0 else pruned), loss
        before = laplace_state(state.problem, stand_in, start)
    except ArithmeticError:
        return state, FAR_WORSE
    return (pruned if pruned.objective >= before.objective else state), loss


def _to_insignificance(state: LaplaceState, groups: PrecisionGroups, member: Tensor) -> Tensor:
    """Rise of a log precision after which the data move its weights by 1e-4 of their prior variance only."""
    prior = groups.log_precision(state.theta)[member].exp()
    determined = well_determined(prior, state.precision.variance[0][member]).amax()
    inside = determined.clamp(1e-12, 0.5)  # 0 < gamma < 1
    return (1e4 * inside / (1.0 - inside)).log().clamp(min=math.log(100.0))  # at least a factor of 100


def reactivated(laplace: LaplaceState, flat: Tensor, most: int, least: float) -> Iterator[tuple[Problem, Tensor]]:
    """Problems and hyperparameters at which groups that are pruned, or not felt, leave the data their say.

    :param flat: hyperparameters that are not felt, ``(T,)`` bool.
    :param most: of such groups; none where there are more.
    :param least: nats that must be foreseen.
    """
    groups, problem = laplace.problem.structure.groups, laplace.problem
    if groups is None:
        return
    size = groups.size(problem.active)
    flat = flat | (laplace.gamma < NOT_IDENTIFIED * size) | (size == 0)
    gone = (groups.is_weight & flat).nonzero().flatten().tolist()
    far = torch.tensor(either_way(AWAY), dtype=torch.float64).to(laplace.theta)
    moves = {t: far / groups.power[t] for t in gone}
    gone = [t for t in gone if not bool(size[t]) or bool(predicted_gain(laplace, t, moves[t], least).any())]
    for t in gone if len(gone) <= most else ():
        member = groups.member == t
        back = replace(problem, active=problem.active | member)
        unit = torch.zeros_like(laplace.theta)
        unit[t] = 1.0 / float(groups.power[t])
        with suppress(ArithmeticError):
            away, felt = _of_the_data(laplace, back, member, unit)
            places = laplace.theta + (away - torch.tensor(SHARES).to(unit)).unsqueeze(-1) * unit
            moves_there = (places - felt.theta)[:, t]
            for place in places[predicted_gain(felt, t, moves_there, least, laplace.objective - felt.objective)]:
                yield back, place


def _of_the_data(laplace: LaplaceState, problem: Problem, member: Tensor, unit: Tensor) -> tuple[float, LaplaceState]:
    """Log precision of the data about a group's weights, less its log prior precision; a state in which it is felt."""
    for lower in SMALLER:  # beside a larger prior the data's is lost in rounding
        theta = laplace.theta - lower * unit
        found = laplace_state(problem, theta, laplace.u)
        prior = laplace.problem.structure.groups.log_precision(theta)[member]  # type: ignore[union-attr]
        ratio = ((found.precision.variance[0][member].reciprocal() - prior.exp()) / prior.exp()).amax()
        if float(ratio) > NOT_IDENTIFIED:
            break
    seen = ratio.clamp(min=torch.finfo(ratio.dtype).tiny)  # what no datum sees stays far off
    return float(seen.log()) - lower, found
