"""Uncertainty of maximised hyperparameters: covariances, and intervals for those at an end of their range."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pyro_evidence.errors import NotAMode
from pyro_evidence.laplace.approximation import LaplaceState, laplace_state, reached
from pyro_evidence.laplace.gradient import exact_curvature, slope
from pyro_evidence.laplace.metric import measures, natural_metric, updated
from pyro_evidence.laplace.type2 import WORTH, capped
from pyro_evidence.numerics.line_search import Backtracking, first_accepted

FALL = 1.96  # standard deviations by 1.92 nats: the root of the 95 % quantile of chi squared, one degree of freedom
CLOSE = 0.01  # of them, to which an end of an interval is known
UNSURE = 0.5  # log units: a standard deviation above which a hyperparameter may sit at an end of its range
BEYOND = (2.0, 5.0)  # log units that are tried further out
PROFILE_STEPS = 12  # of the other hyperparameters
BOUNDLESS = 1e3  # log units, as far as any hyperparameter goes
ROUNDING = 1e-3  # part by which values of a hyperparameter differ that are the same
MOST_DOUBLINGS = 12  # of a step in search of the other end of an interval


@dataclass(frozen=True)
class Edge:
    """A hyperparameter at an end of its range, where it has an interval and no standard deviation.

    :ivar name: of the hyperparameter, and ``index`` of the element in it, flat.
    :ivar value: where the search stopped.
    :ivar end: the end that it is at, such as 0 for a scale.
    :ivar interval: values whose profile log evidence is within 1.92 nats of the highest: 95 % by likelihood ratio.
    """

    name: str
    index: int
    value: float
    end: float
    interval: tuple[float, float]


@dataclass(frozen=True, eq=False)
class HyperparameterCovariance:
    """Inverse of minus the Hessian of the log evidence (plus log hyperprior) in the maximised hyperparameters.

    What is pruned or at an end of its range has nan in its rows and columns; the others are given where it is.

    :ivar unconstrained: in the coordinates of the search, shape ``(T, T)``.
    :ivar constrained: of the values themselves, to first order, shape ``(C, C)``, elements in the order of ``labels``.
    :ivar labels: of the constrained elements: name and flat index.
    :ivar sd: standard deviations by name, in each hyperparameter's shape.
    :ivar edges: hyperparameters at an end of their range.
    """

    unconstrained: Tensor
    constrained: Tensor
    labels: tuple[tuple[str, int], ...]
    sd: Mapping[str, Tensor]
    edges: tuple[Edge, ...]


def hyperparameter_covariance(state: LaplaceState) -> HyperparameterCovariance:
    """The covariance at a maximum, by differences of the exact slope.

    :raises NotAMode: where the log evidence has no maximum there.
    """
    theta, hypers = state.theta, state.problem.joint.hypers
    # the unit of each hyperparameter, zero where only pruned weights feel it
    measure = measures(state.problem, natural_metric(state, slope(state))) if len(theta) else theta
    curvature = exact_curvature(state, measure)
    ends = _ends(state, measure, curvature)
    inside = (measure > 0) & (ends == 0)
    unconstrained = torch.full_like(curvature, torch.nan)
    index = inside.nonzero().flatten()
    A = curvature[index.unsqueeze(-1), index]
    tril, info = torch.linalg.cholesky_ex(A)
    if int(info):
        worst = hypers.label(int(index[int(A.diagonal().argmin())]))
        raise NotAMode(
            f"minus the Hessian of the log evidence in the hyperparameters is not positive definite (look at {worst}); "
            f"expected a maximum. Run the fit until it has converged, or give that hyperparameter a prior."
        )
    unconstrained[index.unsqueeze(-1), index] = torch.cholesky_inverse(tril)

    def flat(theta: Tensor) -> Tensor:
        return torch.cat([v.reshape(-1) for v in hypers.constrained(theta).values()])

    jacobian = torch.autograd.functional.jacobian(flat, theta) if len(theta) else curvature
    constrained = jacobian @ unconstrained.nan_to_num(0.0) @ jacobian.mT
    touched = (jacobian[:, ~inside] != 0).any(-1)
    constrained[touched], constrained[:, touched] = torch.nan, torch.nan
    shapes = {part.name: part.shape for part in hypers}
    labels = tuple((name, i) for name, shape in shapes.items() for i in range(shape.numel()))
    parts = constrained.diagonal().sqrt().split([s.numel() for s in shapes.values()])
    sd = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=False)}
    metric = unconstrained.where(unconstrained.isfinite(), torch.eye(len(theta)).to(theta))  # at an end, a log unit
    return HyperparameterCovariance(unconstrained, constrained, labels, sd, _edges(state, ends, measure, metric))


def _ends(state: LaplaceState, measure: Tensor, curvature: Tensor) -> Tensor:
    """For each hyperparameter 1 or -1 where the log evidence does not fall on that side, 0 elsewhere, ``(T,)``."""
    found = torch.zeros_like(state.theta)
    unsure = state.problem.log_units & (measure > 0) & (curvature.diagonal() < UNSURE**-2)
    for t in unsure.nonzero().flatten():
        falls = []  # nats, on either side; 0 so far out that the objective cannot be computed
        for sign in (1.0, -1.0):
            steps = (sign * move * torch.zeros_like(state.theta).index_fill(0, t, 1.0) for move in BEYOND)
            places = [reached(state.problem, state.theta + step, state.u) for step in steps]
            falls.append(max(0.0 if there is None else state.objective - there.objective for there in places))
        if min(falls) < WORTH:
            found[t] = 1.0 if falls[0] < falls[1] else -1.0
    return found


def _edges(state: LaplaceState, ends: Tensor, measure: Tensor, metric: Tensor) -> tuple[Edge, ...]:
    joint, hypers, every = state.problem.joint, state.problem.joint.hypers, torch.arange(len(ends), device=ends.device)
    found = []
    for t in ends.nonzero().flatten().tolist():
        free = ((measure > 0) & (every != t)).nonzero().flatten()
        # others at an end, where they have no slope, begin anew where that makes no difference: further on they matter
        begun = reached(state.problem, joint.initial_theta.where((ends != 0) & (every != t), state.theta), state.u)
        begun = state if begun is None or begun.objective < state.objective - WORTH else begun
        name = next(n for n, s in hypers.slices.items() if s.start <= t < s.stop)
        profile = ProfileState(begun, name, t, free, metric[free.unsqueeze(-1), free])
        inwards = -float(ends[t])
        other = profile.values(profile.crossing(inwards, state.objective)).tolist()
        here, limit = profile.values(float(state.theta[t])).tolist(), profile.values(-inwards * BOUNDLESS).tolist()
        index = moved(limit, other)
        low, high = sorted((limit[index], other[index]))
        found.append(Edge(name, index, here[index], limit[index], (low, high)))
    return tuple(found)


def moved(limit: list[float], other: list[float]) -> int:
    """The element that one unconstrained coordinate moves, of a simplex the probability that ends at 0."""
    moves = [abs(a - b) for a, b in zip(limit, other, strict=True)]
    alike = [i for i, move in enumerate(moves) if move >= (1.0 - ROUNDING) * max(moves)]
    return min(alike, key=lambda i: abs(limit[i]))


@dataclass(frozen=True, eq=False)
class ProfileState:
    """The highest objective at a value of one hyperparameter, the ``free`` others maximised.

    :ivar metric: of their steps: inverse of minus their second derivatives at the maximum, and what steps teach.
    """

    state: LaplaceState
    name: str
    index: int
    free: Tensor
    metric: Tensor

    def values(self, value: float) -> Tensor:
        """The elements of the hyperparameter where the one unconstrained coordinate is moved, flat."""
        theta = self.state.theta.clone()
        theta[self.index] = value
        return self.state.problem.joint.hypers.constrained(theta)[self.name].reshape(-1)

    def crossing(self, sign: float, best: float) -> float:
        """Where it is lower than ``best`` by :data:`FALL` on the way inwards; the other end where it never is.

        Doubled steps, then false position in standard deviations, to which the end that stays comes nearer by half
        (Dowell and Jarratt, 1971).
        """
        inside, length, low, high, last = self, 0.5, -FALL, -FALL, 0.0
        near = far = float(self.state.theta[self.index])
        for _ in range(MOST_DOUBLINGS):
            far = near + sign * length
            found = inside.highest(far)
            high = _beyond(found, best)
            if found is None or high > 0.0:
                break
            inside, near, low, length = found, far, high, 2.0 * length
            if self._is_end(near, sign):
                return sign * BOUNDLESS
        for _ in range(10 if high > 0.0 else 0):
            share = low / (low - high) if high < math.inf else 0.5
            middle = near + min(max(share, 0.1), 0.9) * (far - near)
            found = inside.highest(middle)
            miss = _beyond(found, best)
            if abs(miss) < CLOSE:
                return middle
            if found is None or miss > 0.0:
                far, high, low = middle, miss, low * (0.5 if last > 0.0 else 1.0)
            else:
                inside, near, low, high = found, middle, miss, high * (0.5 if last < 0.0 else 1.0)
            last = miss
        return near

    def _is_end(self, value: float, sign: float) -> bool:
        """Whether values further on are the same, as those of a correlation are where it is all but one."""
        here, begin, end = self.values(value), *(self.values(s * BOUNDLESS) for s in (-sign, sign))
        left, whole = (float((x - end).abs().amax()) for x in (here, begin))
        return left <= ROUNDING * whole < math.inf

    def highest(self, value: float) -> "ProfileState | None":
        """The state at another value, begun at this; None where the mode is lost."""
        theta, metric, logs = self.state.theta.clone(), self.metric, self.state.problem.log_units[self.free]
        theta[self.index] = value
        try:
            found = laplace_state(self.state.problem, theta, self.state.u)
            gradient = slope(found).total[self.free]
            for _ in range(PROFILE_STEPS if len(self.free) else 0):
                step = capped(metric, gradient, logs)
                if float(gradient @ step) < 1e-3:
                    break
                higher = first_accepted(
                    partial(self._along, found, step), found.objective, search=Backtracking(num_trials=6)
                )
                if higher is None:  # nor would the same step be, once more
                    break
                before, gradient = gradient, slope(higher).total[self.free]
                taught = updated(metric, (higher.theta - found.theta)[self.free], before - gradient)
                found, metric = higher, metric if taught is None else taught
        except ArithmeticError:
            return None
        return replace(self, state=found, metric=metric)

    def _along(self, state: LaplaceState, step: Tensor, scale: float) -> tuple[float, LaplaceState] | None:
        """The objective a share of a step of the others away, and the state there."""
        found = reached(state.problem, state.theta.index_add(0, self.free, scale * step), state.u)
        return None if found is None else (found.objective, found)


def _beyond(found: ProfileState | None, best: float) -> float:
    """Standard deviations by which a place is beyond the end of an interval, infinity where there is no mode."""
    return math.inf if found is None else (2.0 * max(0.0, best - found.state.objective)) ** 0.5 - FALL


def message(edge: Edge) -> str:
    """The message for a hyperparameter at an end of its range: what that means, and what to do."""
    low, high = edge.interval
    return (
        f"{edge.name}[{edge.index}] = {edge.value:.3g} is at an end of its range, {edge.end:.3g}: the log evidence "
        f"does not fall on the way there; 95 % by its profile: {low:.3g} to {high:.3g}. A scale of 0 pools its group "
        f"completely: standard deviations, log evidence and k-hat are given that value, and so too sure. Integrate it "
        f"(a site with a prior, not in maximise=), or fix it on purpose."
    )
