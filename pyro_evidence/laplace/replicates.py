"""One log joint on many data sets of the same shapes, and its type-II maximisation: each data set a row of a search."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from pyro.distributions.util import sum_rightmost
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import own_random_numbers, without_validation
from pyro_evidence.laplace.approximation import INFLATED, LaplaceBatch, Problem, inflation, laplace_batch
from pyro_evidence.laplace.gradient import STEP, differences, slopes_of_rows
from pyro_evidence.laplace.pruning import AWAY, either_way
from pyro_evidence.laplace.quadratics import Quadratics
from pyro_evidence.laplace.type2 import FLAT, PLATEAU
from pyro_evidence.numerics import batched, lbfgs, newton
from pyro_evidence.numerics.derivatives import gradient, pullback, sloped
from pyro_evidence.precision.dense import Dense
from pyro_evidence.program import checks
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.sites import innermost

NUM_STEPS = 100  # a bound: a search of few hyperparameters takes about ten
NEAR = 1e-4  # the largest slope from which one step of Newton's method is enough
ALMOST = newton.Limits(1e-7, slack=1e-12)  # values are sums of terms that cancel; a last step squares what is left
TRIED = (-1.0, 0.0, 1.3)  # log units at which a log hyperprior is compared
LEVEL = 1e-12  # nats, of the squared slope that counts as zero


@dataclass(frozen=True, eq=False)
class Maxima:
    """Where the log evidence (plus log hyperprior) of each data set is highest.

    :ivar theta: hyperparameters there, and last the number of the data set, ``(R, T + 1)``.
    :ivar log_evidence, log_hyperprior: nats, ``(R,)`` each.
    :ivar precision: minus the second derivatives in the hyperparameters, ``(R, T, T)``.
    :ivar found: whether each is known to be a maximum, ``(R,)`` bool.
    :ivar rows: Laplace's approximation there, and ``follows`` the derivative of the mode in the hyperparameters,
        ``(R, D, T)``; None where log joints are quadratic in the latents.
    """

    theta: Tensor
    log_evidence: Tensor
    log_hyperprior: Tensor
    precision: Tensor
    found: Tensor
    rows: LaplaceBatch | None = None
    follows: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Evidence:
    """The objective of many data sets as a function of rows of hyperparameters ``(R, T + 1)``.

    :ivar joint: that of the problem.
    :ivar places: where the search for the mode of each data set begins, ``(K, D)``; kept up to date.
    :ivar known: their log joints, where these are quadratic in the latents.
    """

    problem: Problem
    joint: "Replicates"
    places: Tensor
    known: Quadratics | None = None

    def modes(self, theta: Tensor) -> LaplaceBatch:
        """Laplace's approximation at each row."""
        if self.known is not None:
            return self.known.modes(theta)
        numbers = theta[:, -1].long()
        found = laplace_batch(self.problem, theta, self.problem.active.expand(len(theta), -1), self.places[numbers])
        good = found.objective.isfinite()
        self.places[numbers[good]] = found.u[good]
        return found

    def log_evidence(self, theta: Tensor) -> Tensor:
        """That of each row, nats, ``(R,)``."""
        if self.known is None:
            return self.modes(theta).objective
        return self.known.log_evidence(theta[:, -1], theta[:, None, :-1]).squeeze(1)

    def log_hyperprior(self, theta: Tensor) -> Tensor:
        """Log hyperprior of each row, nats, ``(R,)``."""
        return self.joint.log_hyperpriors(theta[:, -1], theta[:, None, :-1]).squeeze(1)

    def slope(self, found: LaplaceBatch) -> Tensor:
        """Exact slopes of the objective, zero for the number of the data set and where there is no mode."""
        total = slopes_of_rows(self.problem, found.theta, found.u, found.active, found.tril).total
        total = total + gradient(lambda rows, _: self.log_hyperprior(rows), found.theta, found.theta)[1]
        return torch.where(found.objective.isfinite().unsqueeze(-1), total, 0.0)

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Objective and slope of each row."""
        found = self.modes(theta)
        return found.objective + self.log_hyperprior(theta).detach(), self.slope(found)

    def orders(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Objective where log joints are known, its slope ``(r, T)`` and minus its second derivatives ``(r, T, T)``."""
        assert self.known is not None
        numbers, rows = theta[:, -1], theta[:, :-1].detach().clone().requires_grad_()
        value, slope, second = self.known.orders(numbers, rows.detach())
        log_prior = self.joint.log_hyperpriors
        prior, by_prior, seconds = sloped(lambda x, of: log_prior(of, x.unsqueeze(1)).squeeze(1), rows, numbers)
        slope = torch.where(value.isfinite().unsqueeze(-1), slope + by_prior.detach(), 0.0)
        apart = self.joint.has_priors_apart and by_prior.requires_grad
        bent = pullback(by_prior.sum(), rows).diag_embed() if apart else seconds(False)
        return value + prior.detach(), slope, -second - bent


def maxima(
    problem: Problem, reference: Problem, numbers: Tensor, known: Quadratics | None = None, start: Tensor | None = None
) -> Maxima:
    """The maxima of some data sets, and which of them are certain.

    Certain is one with a vanishing slope and a negative definite Hessian, by central differences of slopes.  What is in
    log units and known no better than to a factor e may lie on a plateau: then nothing higher may lie beyond it; of a
    precision of latents not even where it has pruned them.

    :param problem: of replicates.
    :param reference: of one of them, with what is known of its structure.
    :param known: their log joints, where these are quadratic in the latents.
    :param start: hyperparameters of which each search begins at the best, ``(P, T)``; by default those of the model.
    """
    joint = problem.joint
    assert isinstance(joint, Replicates)
    evidence = Evidence(problem, joint, joint.initial_u.repeat(joint.num, 1), known)
    theta, size = joint.rows(numbers), len(joint.initial_theta) - 1
    if start is not None and known is not None:
        places = start.expand(len(theta), -1, -1)
        height = known.log_evidence(theta[:, -1], places) + joint.log_hyperpriors(theta[:, -1], places)
        theta[:, :-1] = start[height.nan_to_num(nan=-torch.inf).argmax(-1)]
    here, follows = None, None
    if size and known is not None:
        of, seconds = theta[:, -1:], theta.new_empty(len(theta), size, size)

        def gradient_at(u: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            value, slope, seconds[rows] = evidence.orders(torch.cat([u, of[rows]], -1))
            return value, slope

        def direction(_: Tensor, rows: Tensor, slope: Tensor) -> newton.Direction:
            return newton.by_absolute_value(seconds[rows], slope)  # a row stands where its gradient was last asked for

        mode = newton.search(gradient_at, direction, theta[:, :-1], ALMOST)
        theta = torch.cat([mode.u + torch.where(mode.converged.unsqueeze(-1), mode.step, 0.0), of], -1)
        slope, H = evidence.orders(theta)[1], mode.precision
    elif size:
        theta, H, follows = _climbed(evidence, theta)
        here = evidence.modes(theta)
        slope = evidence.slope(here)[:, :size]
    else:
        slope, H = theta[:, :0], theta.new_zeros(len(theta), 0, 0)
        if known is None:
            here = evidence.modes(theta)
            follows = here.u.unsqueeze(-1)[..., :0]
    log_evidence = evidence.log_evidence(theta) if here is None else here.objective
    prior = evidence.log_hyperprior(theta).detach() if size else torch.zeros_like(log_evidence)
    tril, sound = _factors(H)
    way = torch.cholesky_solve(slope.unsqueeze(-1), tril).squeeze(-1)
    sound = sound & log_evidence.isfinite() & ((slope * way).sum(-1) < LEVEL)
    if size:
        variance = torch.cholesky_inverse(tril).diagonal(dim1=-2, dim2=-1)
        wide = (variance > FLAT) & reference.log_units
        sound = sound & ~(wide & (variance > max(PLATEAU) ** 2)).any(-1)  # on a plateau itself, as far as is looked
        groups, height = reference.structure.groups, log_evidence + prior
        grouped = torch.zeros_like(wide) if groups is None else wide & (groups.power != 0)
        for chosen, moves in ((wide & ~grouped, PLATEAU), (grouped, either_way(AWAY[:-1]))):  # the last is of a limit
            sound = sound & ~_higher_beyond(evidence, theta, chosen & sound.unsqueeze(-1), moves, height)
        if groups is not None:
            latents = Dense((here or evidence.modes(theta)).tril).variance
            sound = sound & ~(inflation(groups, theta[:, :-1], latents) > INFLATED).any(-1)
    return Maxima(theta, log_evidence, prior, H, sound, here, follows)


def _factors(H: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factors of ``(R, T, T)``, and where there is one; elsewhere the identity."""
    eye = torch.eye(H.shape[-1]).to(H)
    sound = H.isfinite().flatten(1).all(-1)
    tril, info = torch.linalg.cholesky_ex(torch.where(sound[:, None, None], H, eye))
    sound = sound & (info == 0)
    return torch.where(sound[:, None, None], tril, eye), sound


def _climbed(evidence: Evidence, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maxima by slopes alone from ``(R, T + 1)``: these, minus the Hessian there, and how inner modes follow."""
    size = theta.shape[-1] - 1
    theta = lbfgs.ascend(evidence, theta, tolerance=NEAR, num_steps=NUM_STEPS, slack=evidence.problem.slack)

    def moved(step: Tensor) -> tuple[Tensor, Tensor]:
        found = evidence.modes(theta + step)
        return evidence.slope(found)[:, :size], found.u

    falls, follows = differences(partial(map, moved), STEP * torch.eye(size, size + 1).to(theta))
    H = 0.5 * (falls.movedim(0, 1) + falls.movedim(0, 2))
    slope = moved(torch.zeros_like(theta[0]))[0].unsqueeze(-1)
    way = torch.cholesky_solve(slope, _factors(H)[0]).squeeze(-1)
    return torch.cat([theta[:, :size] + way, theta[:, size:]], -1), H, follows


def _higher_beyond(evidence: Evidence, theta: Tensor, chosen: Tensor, moves: Sequence[float], height: Tensor) -> Tensor:
    """Whether the objective is higher, or not known, some log units along a hyperparameter of each row, ``(R,)`` bool.

    :param chosen: along which hyperparameters, ``(R, T)`` bool.
    :param height: of each row, nats.
    """
    row, index = (x.repeat_interleave(len(moves)) for x in chosen.nonzero(as_tuple=True))
    if not len(row):
        return torch.zeros_like(height, dtype=torch.bool)
    places = theta[row]
    places[torch.arange(len(row)), index] += theta.new_tensor(moves).repeat(len(row) // len(moves))
    there = replace(evidence, places=evidence.places.clone()).log_evidence(places)
    there = there + evidence.log_hyperprior(places).detach()
    rounding = evidence.problem.slack * (1.0 + height[row].abs())
    higher = ~(there <= height[row] + rounding)
    return torch.zeros_like(height).index_add(0, row, higher.to(height)) > 0


Columns = Sequence[tuple[Any, bool]]  # an argument of all data sets, and whether each has its own, ``(K, ...)``


def columns_of(sets: Sequence[tuple[Any, ...]], joint: LogJoint) -> Columns:
    """Arguments of data sets, stacked.

    :param joint: that of one of them.
    :raises BadInput: where they cannot be.
    """
    first, _ = checks.as_tensors(sets[0], joint.kwargs)
    return [_stacked(*each) for each in zip(first, zip(*sets, strict=True), strict=True)]


class Replicates(LogJoint):
    """A log joint whose ``theta`` ends with the number of a data set, behind the hyperparameters, ``(T + 1,)``.

    :ivar joint: that of the first data set.
    :ivar stacked: arguments of all data sets, ``(K, ...)``; as they are where all share one.
    """

    def __init__(self, joint: LogJoint, stacked: Columns, num: int) -> None:
        """The model of ``joint`` on ``num`` sets of arguments."""
        vars(self).update(vars(joint))
        self.joint, self.num, self.stacked, self._row_bytes = joint, num, stacked, None
        self.initial_theta = torch.cat([joint.initial_theta, joint.initial_theta.new_zeros(1)])

    def of_row(self, theta: Tensor) -> tuple[LogJoint, Tensor]:
        """The log joint of the data set that ``theta`` ``(T + 1,)`` ends with, and the hyperparameters before."""
        return self.of_number(theta[-1:]), theta[:-1]

    def of_number(self, number: Tensor) -> LogJoint:
        """The log joint of the data set of a number ``(1,)``."""
        number, found = number.detach().long(), copy.copy(self.joint)
        found.args = tuple(
            x.index_select(0, number.to(x.device)).squeeze(0) if is_own else x for x, is_own in self.stacked
        )
        return found

    def at_settings(self, u: Tensor, theta: Tensor, numbers: Tensor) -> Tensor:
        """The log joint of each data set ``(K,)`` at places ``(K, J, D)`` and settings ``(J, T)``, nats, ``(K, J)``.

        What hangs on the data alone is made once for each.
        """

        def one(u: Tensor, theta: Tensor, number: Tensor) -> Tensor:
            return self.of_number(number)._one(u, theta)

        return torch.vmap(torch.vmap(one, (0, 0, None)), (0, None, 0))(u, theta, numbers.unsqueeze(-1))

    def _one(self, u: Tensor, theta: Tensor) -> Tensor:
        joint, own = self.of_row(theta)
        return joint._one(u, own)

    def log_hyperprior(self, theta: Tensor, trace: Any = None) -> Tensor:
        """Log hyperprior as of :meth:`LogJoint.log_hyperprior`, of the data set that ``theta`` ends with."""
        joint, own = self.of_row(theta)
        return joint.log_hyperprior(own, trace)

    @cached_property
    def _priors(self) -> dict[str, Any] | None:
        """The prior of each maximised or marginalised site, where these are the same whatever the others and the data.

        As a few rows tell, whose log hyperprior they must give; None where they are not.
        """
        joint, own = self.of_row(self.initial_theta)
        nodes = joint.trace(self.initial_u, own).nodes
        found = {name: nodes[name]["fn"] for name in joint.maximised_sites}
        numbers = torch.linspace(0, self.num - 1, len(TRIED)).round()
        rows = torch.stack([self.initial_theta + away for away in TRIED])
        rows[:, -1] = numbers.to(rows)
        with own_random_numbers(), torch.no_grad():
            values = torch.stack([self.log_hyperprior(row) for row in rows])
            return found if bool(self.are_level(self._by_priors(found, rows[:, :-1]), values).all()) else None

    @property
    def has_priors_apart(self) -> bool:
        """Whether each hyperparameter has a prior of its own, whatever the others: no mixed derivatives."""
        return self._priors is not None and all(part.size == 1 for part in self.hypers)

    def _by_priors(self, priors: Mapping[str, Any], theta: Tensor) -> Tensor:
        """The log hyperprior at ``(..., T)`` as these priors have it, nats, ``(...)``."""
        values, log_det = self.hypers.constrained_with_log_det(theta)
        with without_validation():
            parts = [fn.log_prob(values[name]) for name, fn in priors.items()]
        parts = [sum_rightmost(part, part.dim() - log_det.dim()) for part in parts]
        return sum(parts, log_det if getattr(self, "marginalised_sites", ()) else torch.zeros_like(log_det))

    def log_hyperpriors(self, numbers: Tensor, theta: Tensor) -> Tensor:
        """The log hyperprior of data sets ``(r,)`` at ``(r, J, T)``, nats, ``(r, J)``; by the model if not known."""
        if self._priors is not None:
            return self._by_priors(self._priors, theta)
        rows = torch.cat([theta.flatten(0, 1), numbers.repeat_interleave(theta.shape[1]).unsqueeze(-1)], -1)
        return batched.apply(self.log_hyperprior, (rows,), self.row_bytes, self.log_hyperprior).view(theta.shape[:2])

    def in_support(self) -> Tensor:
        """Whether the data of each set lie in the support of what observes them, ``(K,)`` bool."""
        differs = []

        def inside(theta: Tensor) -> Tensor:
            joint, own = self.of_row(theta)
            nodes = joint.trace(self.initial_u, own).nodes
            sites = [(innermost(nodes[n]["fn"]), nodes[n]["value"]) for n in joint.observed]
            found = torch.stack([fn.support.check(value).all().double() for fn, value in sites]).prod(0)
            differs.append(is_batchedtensor(found))
            return found

        rows = self.rows(torch.arange(self.num))
        with own_random_numbers(), torch.no_grad(), without_validation():
            few = batched.apply(inside, (rows[:2],), self.row_bytes, inside) > 0
            if not any(differs) and len(differs) == 1:  # one run for both rows, in which neither has data of its own
                return few[:1].expand(self.num)
            return batched.apply(inside, (rows,), self.row_bytes, inside) > 0

    def rows(self, numbers: Tensor) -> Tensor:
        """The hyperparameters that a search begins with, for data sets ``(R,)``, ``(R, T + 1)``."""
        begun = self.initial_theta.expand(len(numbers), -1).clone()
        begun[:, -1] = numbers.to(begun)
        return begun


def _stacked(first: Any, column: Sequence[Any]) -> tuple[Any, bool]:
    """One argument of all data sets, and whether each has its own.

    :param first: that of the first, whose numbers are a tensor.
    :raises BadInput: where it has several values that are no tensors of one shape.
    """
    if all(x is column[0] for x in column):
        return first, False
    if not all(isinstance(x, Tensor) for x in column):
        column, _ = checks.as_tensors(column, {})
    if not all(isinstance(x, Tensor) and x.shape == first.shape and x.dtype == first.dtype for x in column):
        raise BadInput("arguments differ that are no tensors of one shape; expected tensors, to be rows of a batch.")
    if all(x.data_ptr() == column[0].data_ptr() and x.stride() == column[0].stride() for x in column):
        return first, False
    return torch.stack(list(column)), True
