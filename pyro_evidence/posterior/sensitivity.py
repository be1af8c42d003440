"""Prior sensitivity: slopes of the log evidence and of posterior means in the constants of the priors."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.display import Axes, Shown, Table, axes_or_own, with_labels
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.fitting.iterate import Status, Stop, iterate
from pyro_evidence.fitting.process_state import own_random_numbers, without_validation
from pyro_evidence.laplace import type2
from pyro_evidence.laplace.approximation import LaplaceState, Problem, laplace_state
from pyro_evidence.laplace.evidence_error import in_blocks
from pyro_evidence.laplace.gradient import evidence_slope, slope, slope_falls, slopes_of_rows
from pyro_evidence.laplace.metric import inverted, measures, natural_metric, response
from pyro_evidence.nested.integration import by_lattice
from pyro_evidence.numerics.batched import apply
from pyro_evidence.numerics.derivatives import pullback, pullbacks
from pyro_evidence.precision.dense import Dense
from pyro_evidence.program.constants import STEPS, MovedConstants, PriorConstant, Stepped, prior_constants
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.settings import check_count, check_number, seeded
from pyro_evidence.structure.symmetries import reordered

HEAVY = 1e-9  # share of the mass below which a node moves no digit that is shown
SPREAD_DRAWS = 500  # for the posterior standard deviations that means are measured by
FIXED = 1e-12  # of its size, rounding: the standard deviation of an element that is the same in all draws
POINTS = 9  # of a curve
INSIDE = 15  # nodes in each block, where Laplace is not exact
APART, CELLS = 0.45, 24  # standard deviations between nodes of an axis, and how many on a side
FEW_KNOWN = 0.05  # of the draws' worth: so many moments are corrected at no price in noise
DEGREE = 10  # of polynomials: means of higher powers are those of the outermost draws
FAR = 3.0  # standard errors, which chance alone hardly moves one of many slopes by
Values = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Sensitivity(Shown):
    """Slopes in the constants of the priors, where a step is a doubling; of a location, one scale of its prior.

    :ivar log_evidence: constant -> slope of the log evidence, nats a step, the largest first.
    :ivar means: constant -> site -> slopes of the posterior means of its elements, in the site's own units a step; of
        Laplace's posterior, of the values at its mode.
    :ivar constants: that these are the slopes in.
    :ivar left_out: constants that cannot be moved: bounds of a support, arguments of distributions that cannot be made
        again from their attributes.
    """

    log_evidence: Mapping[str, float]
    means: Mapping[str, Values]
    constants: Mapping[str, PriorConstant]
    left_out: tuple[str, ...]
    posterior: Any = field(repr=False)

    def table(self) -> Table:
        """A row for each constant: its value, the slope of the log evidence, and that of the mean that moves most."""
        draws = self.posterior.get_samples(SPREAD_DRAWS, seed=0)
        sds, rows, said = dict[str, Tensor](), {}, []
        for site in draws:  # zeros above a diagonal, and the like, do not vary, nor does what moves them
            x = draws[site].double()
            sds[site] = torch.where(x.std(0) > FIXED * x.abs().amax(0), x.std(0), torch.inf)
        for name, nats in self.log_evidence.items():
            moves = {site: (m / sds[site]).abs().max() for site, m in self.means[name].items()}
            most = max(moves, key=lambda site: float(moves[site]))
            value = self.constants[name].value.double()
            rows[name] = {"value": float(value.mean()), "log evidence": nats, "mean": float(moves[most])}
            said += [f"{name} moves {most} most"] if float(moves[most]) > WORTH_SAYING else []
        columns = {
            "value": "of the constant, the mean of its elements",
            "log evidence": "its slope, nats for each doubling of the constant, or for a scale's move of a location",
            "mean": "slope of the mean that moves most, posterior standard deviations a step",
        }
        notes = [f"not moved: {', '.join(self.left_out)}"] if self.left_out else []
        return Table(rows, columns, [*said, *notes], "constant")

    def curve(self, constant: str, low: float, high: float, num: int = POINTS) -> "EvidenceCurve":
        """The log evidence with a constant at other values, by refits that begin at the present one.

        :param constant: its name, one of :attr:`log_evidence`.
        :param low: the smallest value, and ``high`` the largest, evenly spaced in the logarithm; of a location
            evenly.  Constants of several elements are moved together, and these are values of their mean.
        :param num: of values.
        :raises BadInput: for other names, and values that are none.
        """
        if constant not in self.constants:
            raise BadInput(f"constant={constant!r}; expected one of {list(self.constants)}.")
        one, num = self.constants[constant], check_count("num", num, at_least=2)
        check_number("low", low)
        check_number("high", high)
        middle = float(one.value.double().mean())
        if one.unit is None and not 0.0 < low < high:
            raise BadInput(f"low={low}, high={high}; expected 0 < low < high for {constant}, which is {middle:.4g}.")
        if one.unit is None:
            values = torch.linspace(math.log(low), math.log(high), num, dtype=torch.float64).exp()
            steps = (values / middle).log2()
        else:
            values = torch.linspace(low, high, num, dtype=torch.float64)
            steps = (values - middle) / float(one.unit.double().mean())
        found = torch.tensor(
            [log_evidence_after(self.posterior, one, float(step)) for step in steps], dtype=torch.float64
        )
        return EvidenceCurve(one, values, found, float(self.posterior.log_evidence))


WORTH_SAYING = 0.1  # posterior standard deviations a doubling


@dataclass(frozen=True, eq=False)
class EvidenceCurve:
    """The log evidence as a function of one constant of a prior.

    :ivar constant: which.
    :ivar values: of it, ``(P,)``.
    :ivar log_evidence: with each, nats, nan where the fit failed, ``(P,)``.
    :ivar here: with the constant as it stands in the model, nats.
    """

    constant: PriorConstant
    values: Tensor
    log_evidence: Tensor
    here: float

    def plot(self, axes: Axes | None = None) -> Axes:
        """Log evidence against the constant, and a point where the model has it.

        :raises ImportError: without matplotlib.
        """
        axes = axes_or_own(axes)
        axes.plot(self.values, self.log_evidence, marker=".")
        axes.plot(float(self.constant.value.double().mean()), self.here, "o", label="as in the model")
        if self.constant.unit is None:
            axes.set_xscale("log")
        return with_labels(axes, f"log evidence / nats, by {self.constant.name}")


@dataclass(frozen=True, eq=False)
class WeightedPoints:
    """Points of the space of latents that stand for the posterior, and what moves at them a step of each constant.

    :ivar weights: adding up to one, ``(K,)``.
    :ivar slopes: of the log mass at each point, nats a step, ``(K, C)``.
    :ivar u: unconstrained latents, ``(K, D)``.
    :ivar moves: of ``u``, ``(K, C, D)``; None where points stay.
    :ivar error: standard error of the slope of the log evidence that is known worst, where points are draws.
    """

    weights: Tensor
    slopes: Tensor
    u: Tensor
    moves: Tensor | None
    error: float = 0.0

    @property
    def log_evidence(self) -> Tensor:
        """Slopes of the log of the mass of all, ``(C,)``."""
        return self.weights @ self.slopes

    def means(self, joint: LogJoint, constant: int) -> dict[str, Tensor]:
        """Slopes of the mean of every site in one constant, each in the site's shape."""
        dtype, shift = joint.dtype, self.weights * (self.slopes[:, constant] - self.log_evidence[constant])
        u = self.u.detach().to(dtype, copy=True)
        move = torch.zeros_like(u) if self.moves is None else self.moves[:, constant].to(dtype)
        found, u = {}, u.requires_grad_()
        for site, value in joint.latents.constrained(u).items():
            one = torch.zeros_like(value).requires_grad_()
            change = pullback(pullback(value, u, one, create_graph=True), one, move)  # forward, by two backward
            parts = (self.weights, change), (shift, value)
            found[site] = sum(torch.tensordot(w, x.detach().double(), 1) for w, x in parts)
        return found


def sensitivity(posterior: Any) -> Sensitivity:
    """Slopes of the log evidence and of the means of a posterior in every constant of every prior.

    :raises UnsupportedModel: without any constant that can be moved.
    """
    posterior._needs_data("sensitivity()")
    with own_random_numbers(), without_validation():
        every, left_out = prior_constants(posterior._joint, *posterior._mode_at)
        pruned = {site for site, cells in posterior.pruned.items() if bool(cells.any())}  # about means that would move
        constants = tuple(each for each in every if each.site not in pruned)
        left_out += tuple(each.name for each in every if each.site in pruned)
        if not constants:
            raise UnsupportedModel(
                "the priors of this model have no constant that can be moved. Expected a latent site whose prior has "
                "an argument that depends on no other site, such as the 1.0 of HalfNormal(1.0)."
                + (f" Left out: {', '.join(left_out)}." if left_out else "")
            )
        found: WeightedPoints = posterior._points_along(constants)
        order = found.log_evidence.abs().argsort(descending=True).tolist()
        names = [constants[c].name for c in order]
        return Sensitivity(
            dict(zip(names, found.log_evidence[order].tolist(), strict=True)),
            {name: found.means(posterior._joint, c) for name, c in zip(names, order, strict=True)},
            {name: constants[c] for name, c in zip(names, order, strict=True)},
            left_out,
            posterior,
        )


def _problem_around(posterior: Any, wrap: Callable[[Model], Model]) -> Problem:
    """The problem of the posterior with a model around its own; with the hyperparameters put in where none is free."""
    joint = posterior._joint
    given = {"maximise": joint.maximised_sites or None, "values": joint.values}
    model = joint.model if joint.hypers.size else joint.substituted(posterior._mode_at[1])
    return posterior._problem_of(wrap(model), given)


def _hypers(problem: Problem, before: Problem, theta: Tensor) -> Tensor:
    """Hyperparameters ``(..., T)`` of a problem in the places of one that has others too, which are zero."""
    old, new = before.joint.hypers, problem.joint.hypers
    found = theta.new_zeros(*theta.shape[:-1], new.size)
    for name in set(old.names) & set(new.names):
        found[..., new.slices[name]] = theta[..., old.slices[name]]
    return found


def at_mode(posterior: Any, constants: Sequence[PriorConstant]) -> WeightedPoints:
    """Laplace's mode, which follows the constants by itself and by the hyperparameters that follow them."""
    state = posterior.state
    problem = _problem_around(posterior, partial(Stepped, constants=constants)).without(~state.problem.active)
    here = laplace_state(problem, _hypers(problem, state.problem, state.theta), state.u)
    ways = _ways(here)
    moves = response(here, ways.to(here.u)).unsqueeze(0)
    found = evidence_slope(here)[0].double() @ ways.mT
    return WeightedPoints(found.new_ones(1), found.unsqueeze(0), here.u.unsqueeze(0), moves * problem.active)


def _ways(here: LaplaceState) -> Tensor:
    """Move of all hyperparameters per step of each constant, those that are maximised at their maximum, ``(C, T)``.

    By second derivatives of the log evidence, which are differences of exact slopes.
    """
    steps = here.problem.joint.hypers.slices[STEPS]
    ways = torch.eye(len(here.theta), dtype=torch.float64, device=here.theta.device)[steps]
    measure = measures(here.problem, natural_metric(here, slope(here)))
    measure[steps] = 0.0
    index = measure.nonzero().flatten()
    if not len(index):
        return ways
    falls = slope_falls(here, measure)  # (P, T)
    curvature = 0.5 * (falls[:, index] + falls[:, index].mT)
    ways[:, index] = -(inverted(curvature, slope(here).total[index]) @ falls[:, steps]).mT
    return ways


def at_nodes(posterior: Any, constants: Sequence[PriorConstant]) -> WeightedPoints:
    """The nodes of the marginalised sites, at each of which the inner mode follows the constants.

    They weigh as in the log evidence: with what Laplace inside leaves out, where that is added.  On one axis, and on
    two where rows are evaluated together, they are even, and go further: a slope is twenty times as far off as the log
    evidence that a few nodes have settled.  Independent blocks inside are integrated by nodes, too, where Laplace is
    not exact.
    """
    found, problem = posterior.integral, _problem_around(posterior, partial(Stepped, constants=constants))
    integral = posterior._tilting(found)
    where, together = found.standardisation, isinstance(found.nodes.precision, Dense)
    if where.num_dims == 1 or (where.num_dims == 2 and together and integral is found):
        outer = found.outer_mode
        inside = outer.state if integral is found else in_blocks(outer.state, INSIDE)
        outer, problem = replace(outer, state=inside), replace(problem, nodes=inside.problem.nodes)
        axes = [torch.arange(-CELLS, CELLS + 1)] * where.num_dims
        cells = torch.cartesian_prod(*axes).view(-1, len(axes))
        cells = cells[cells.square().sum(-1) <= CELLS**2]
        found = by_lattice(outer, where, cells, APART, found.modes(APART * cells.to(where.centre)))
        integral = posterior._tilting(found) if inside.problem.nodes == 1 else found
    weights, precision = integral.log_weights.softmax(0), integral.nodes.precision
    kept = (weights > HEAVY) & integral.nodes.log_density.isfinite()
    weights, u = weights[kept] / weights[kept].sum(), integral.nodes.u[kept]
    theta = _hypers(problem, integral.outer_mode.state.problem, integral.nodes.theta[kept])
    steps = problem.joint.hypers.slices[STEPS]
    ways = torch.eye(theta.shape[-1]).to(theta)[steps]
    if isinstance(precision, Dense):  # evaluated together
        slopes, moves = _together(problem, theta, u, precision.tril[kept], ways)
    else:
        states = [laplace_state(problem, t, place) for t, place in zip(theta, u, strict=True)]
        slopes = torch.stack([slope(state).total for state in states])
        moves = torch.stack([response(state, ways) for state in states])
    places, phi = posterior._places, integral.phi[kept]
    follow = [places.whole(torch.zeros_like(phi), move) for move in moves.unbind(1)]
    return WeightedPoints(weights, slopes[:, steps].double(), places.whole(phi, u), torch.stack(follow, 1))


def _together(problem: Problem, theta: Tensor, u: Tensor, tril: Tensor, ways: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes in all hyperparameters ``(K, T)`` at nodes, and moves of the modes ``(K, C, D)`` along ``ways``."""
    active = problem.active.expand(len(u), -1)
    total = slopes_of_rows(problem, theta, u, active, tril).total
    theta, u = theta.requires_grad_(), u.requires_grad_()
    log_joint = problem.density_by_rows.log_joint(u, torch.cat([theta, active.to(theta)], -1)).sum()
    along = pullback(log_joint, theta, create_graph=True) @ ways.mT
    mixed = torch.stack([pullback(each.sum(), u) for each in along.unbind(-1)], -1)
    log_prior = problem.joint.log_hyperprior
    total = total + pullback(apply(log_prior, (theta,), problem.joint.row_bytes, log_prior).sum(), theta)
    return total, torch.cholesky_solve(mixed.to(tril), tril).mT.to(u)


def at_draws(posterior: Any, constants: Sequence[PriorConstant]) -> WeightedPoints:
    """The draws that the log evidence is an average over, which stay where they are, by calibrated weights."""
    if not posterior.integral.is_trusted:
        raise UnsupportedModel(
            "the weights of importance sampling over the modes cannot be trusted: the sum of Laplace's log evidences "
            "has no slope to report. Expected a log evidence by its draws; try posterior.at_mode(k).sensitivity()."
        )
    integral, u = posterior.integral, posterior.integral.draws
    if integral.exchange is not None:  # drawn in one order, of which all are as probable
        order = torch.rand(len(u), integral.exchange.size, generator=seeded(0)).argsort(1)
        u = reordered(integral.exchange.joint, u, integral.exchange.axes, order)
    return at_weighted(posterior, constants, u, integral.weighed.weights)


def at_weighted(posterior: Any, constants: Sequence[PriorConstant], u: Tensor, weights: Tensor) -> WeightedPoints:
    """Draws ``(S, D)`` of all latents with importance weights ``(S,)``, which are calibrated."""
    problem = _problem_around(posterior, partial(Stepped, constants=constants))
    theta = _hypers(problem, posterior.state.problem, posterior.state.theta)
    slopes, rises = [], []
    for part in u.split(posterior._rows):
        own = [x.clone().requires_grad_() for x in (part, theta.expand(len(part), -1))]
        rise, slope = pullbacks(problem.joint.log_joint(*own), own)
        rises.append(rise[:, problem.active])
        slopes.append(slope[:, problem.joint.hypers.slices[STEPS]])
    found = torch.cat(slopes).double()
    weights, error = _calibrated(weights.double(), u[:, problem.active].double(), torch.cat(rises).double(), found)
    return WeightedPoints(weights, found, u, None, error)


def _calibrated(weights: Tensor, u: Tensor, rise: Tensor, slopes: Tensor) -> tuple[Tensor, float]:
    """Weights of draws ``(S,)`` by which functions whose means the density's gradient tells have these means.

    The Laplacian of a polynomial, plus its gradient times the slopes of the log density, has the mean zero: Mira, Solgi
    and Imparato (2013), section 3.  The degree is that which leaves the least errors, by leaving out one draw after the
    other; none beyond which a mean moves by far more than its error, as where draws have not come to the tails.

    :param u: draws ``(S, d)``, and ``rise`` the slopes of the log density at them.
    :param slopes: what is averaged, ``(S, C)``.
    """
    size, most = u.shape[-1], FEW_KNOWN * float(1.0 / weights.square().sum())
    sizes = [math.comb(size + n, n) for n in range(DEGREE + 1)]  # of all polynomials up to each degree
    sizes = [num for num in sizes if num <= max(most, sizes[1])]
    chosen = [each for n in range(1, len(sizes)) for each in combinations_with_replacement(range(size), n)]
    powers = torch.tensor([[each.count(j) for j in range(size)] for each in chosen], device=u.device)
    away = u - weights @ u
    spread = (weights @ away.square()).sqrt()
    away, rise = away / spread, (spread * rise).where((weights > 0).unsqueeze(-1), 0.0)
    table = away.unsqueeze(-1) ** torch.arange(len(sizes)).to(u)
    known = torch.zeros(len(u), 1 + len(powers)).to(u)
    known[:, 0] = 1.0
    for i in range(size):
        first, second = (
            math.prod(table[:, j, (powers[:, j] - times * (i == j)).relu()] for j in range(size)) for times in (1, 2)
        )
        known[:, 1:] += powers[:, i] * (first * rise[:, i : i + 1] + (powers[:, i] - 1) * second)
    known /= (weights @ known.square()).sqrt()
    found, least, worst, mean, error = weights, math.inf, math.inf, weights @ slopes, torch.inf
    for num in sizes:
        part, before = known[:, :num], mean
        solved = part @ torch.linalg.pinv(part.mT @ (weights.unsqueeze(-1) * part), hermitian=True)
        mean = (weights * solved[:, 0]) @ slopes
        if bool(((mean - before).abs() > FAR * error).any()):
            break
        left = slopes - solved @ (part.mT @ (weights.unsqueeze(-1) * slopes))
        leverage = weights * (solved * part).sum(-1)
        error = (weights.square() @ (left / (1.0 - leverage).unsqueeze(-1)).square()).sqrt()
        if float(error.log().sum()) < least:
            found, least, worst = weights * solved[:, 0], float(error.log().sum()), float(error.max())
    return found, worst


def log_evidence_after(posterior: Any, constant: PriorConstant, step: float) -> float:
    """The log evidence with one constant moved, nats; nan where the fit fails.

    The search begins where the posterior has ended.
    """
    before = posterior._inside
    try:
        with own_random_numbers():
            moved = MovedConstants((constant,), torch.tensor([step], dtype=torch.float64))
            problem = _problem_around(posterior, moved)
            begin = laplace_state(problem, _hypers(problem, before.problem, before.theta), before.u)
            fit = iterate(type2.step, type2.type2_state(begin), Stop(progress=False), "sensitivity")
            return float(posterior._log_evidence_of(fit)) if fit.status is Status.CONVERGED else math.nan
    except ArithmeticError:
        return math.nan
