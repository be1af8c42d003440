"""Groups of weights that the data do not need: switched off where that gains, brought back where they were needed."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState, Problem, laplace_state
from pyro_evidence.numerics.evidence import well_determined
from pyro_evidence.structure.recognise import PrecisionGroups

FAR_WORSE = 10.0  # nats: a group whose removal costs as much is not tried again at once
NEAR = 1.0  # log units: moves of other hyperparameters at which a decision for good can be taken


@dataclass(frozen=True)
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
    candidates = groups.is_weight & (size > 0) & (state.gamma < 0.1 * size)
    if move is not None and float(torch.where(candidates, 0.0, move).abs().max()) > NEAR:
        return state, needed
    for t in torch.nonzero(candidates).flatten().tolist():
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


def brought_back(laplace: LaplaceState, most: int) -> Iterator[tuple[Problem, int, float]]:
    """Pruned groups brought back at precisions that leave the data their say: problem, group, its move.

    :param most: of such groups; none where there are more.
    """
    groups, problem = laplace.problem.structure.groups, laplace.problem
    if groups is None:
        return
    gone = (groups.is_weight & (groups.size(problem.active) == 0)).nonzero().flatten().tolist()
    for t in gone if len(gone) <= most else ():
        member = groups.member == t
        back = replace(problem, active=problem.active | member)
        try:
            found = laplace_state(back, laplace.theta, laplace.u)
        except ArithmeticError:
            continue
        prior = groups.log_precision(laplace.theta)[member]
        data = (found.precision.variance[0][member].reciprocal() - prior.exp()).clamp(min=1e-300).log()  # none: far off
        for share in (0.0, 2.5, 5.0):
            yield back, t, float((data - prior).amax() - share) / float(groups.power[t])
