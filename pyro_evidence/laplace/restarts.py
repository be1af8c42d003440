"""Many starts climbed as one batch, the distinct modes among them, and the hyperparameters taken most of the way."""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pyro_evidence.errors import ImproperPosterior, NotAMode
from pyro_evidence.fitting.iterate import Fit, Status, bar_of
from pyro_evidence.laplace.approximation import (
    LaplaceBatch,
    LaplaceState,
    Problem,
    at_modes,
    modes_of_rows,
    require_proper,
    search_modes,
    state_at,
    state_of_row,
)
from pyro_evidence.laplace.gradient import slopes_of_rows
from pyro_evidence.laplace.metric import metric_of
from pyro_evidence.laplace.remedies import vanishing_noise
from pyro_evidence.laplace.type2 import TypeII
from pyro_evidence.numerics import derivatives, lbfgs, trust_region
from pyro_evidence.numerics.derivatives import generic_directions
from pyro_evidence.numerics.linear_predictor import gram_diagonal
from pyro_evidence.precision.choices import exact_hessian, gauss_newton
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.parameters import DUMMY_SITE, submodules
from pyro_evidence.settings import seeded
from pyro_evidence.structure.density import LinearDensity
from pyro_evidence.structure.factors import SMALL

SEVERAL = 4  # starts where there may be several modes
MOST_COORDINATES = 50  # beyond, few draws from the prior lie near any mode, and joint weights say little
BUDGET = 2**26  # bytes that autograd may keep for their rows


def starts(joint: LogJoint, num: int, seed: int) -> Tensor:
    """Random starts, ``(num, D)``: as NUTS draws them, or where a network within the model's reach wants to start."""
    values = joint.latents.unconstrained(joint.initial(num, seed))
    for network in submodules(joint.model):
        tell: Callable[[int, int], dict[str, Tensor]] | None = getattr(network, "starts", None)
        found = {} if tell is None else tell(num, seed)  # of real-valued sites by name, (num,) + shape each
        for name in values.keys() & found.keys() - joint.values.keys():
            if found[name].shape == values[name].shape:
                values[name] = found[name].to(values[name])
    return torch.cat([v.reshape(num, -1) for v in values.values()], -1)


def has_params_alone(joint: LogJoint) -> bool:
    """Whether a model has no latent site of its own that is integrated, so that starts can differ in params only."""
    return DUMMY_SITE in joint.latents.names


def thetas(joint: LogJoint, num: int, seed: int) -> Tensor:
    """Hyperparameters that each start begins with, ``(num, T)``: first the model's own, then at random around them.

    Random ones are up to 2 away in unconstrained units, which is how NUTS starts latents: alike locations of a
    mixture's components part.  Those with a value of their own, and maximised sites, begin there in every start.
    """
    found = joint.initial_theta.expand(num, -1).clone()
    free = [p for p in joint.hypers if p.name not in joint.values and p.name not in joint.maximised_sites]
    generator = seeded(seed)
    for part in free:
        draw = 2.0 * (2.0 * torch.rand(num - 1, part.size, generator=generator, dtype=torch.float64) - 1.0)
        found[1:, joint.hypers.slices[part.name]] += draw.to(found)
    return found


def automatic(problem: Problem) -> int:
    """Number of starts that a search is worth: one where a single mode is to be expected, or rows are dear.

    Linear predictors under Gaussian priors, and Gaussian processes, have one as a rule; sites that are summed out,
    networks and whatever multiplies latents with one another may have many.
    """
    structure, joint = problem.structure, problem.joint
    if has_params_alone(joint):
        return SEVERAL if joint.discrete else 1
    if joint.values.keys() >= set(joint.latents.names):  # all begin at one place
        return 1
    parts = structure.predictors.linear if structure.predictors is not None else ()
    simple = bool(parts) and all(part.likelihood.mixture is None for part in parts)
    if joint.latents.size > SMALL or (simple and not joint.discrete) or structure.eliminated is not None:
        return 1
    return SEVERAL if _are_cheap(joint) else 1


def _are_cheap(joint: LogJoint) -> bool:
    """Whether several rows of the density cost little memory."""
    return joint.row_bytes is not None and SEVERAL * joint.row_bytes <= BUDGET


def has_one_mode(problem: Problem, u: Tensor, theta: Tensor) -> bool:
    """Whether the density's structure proves that it has one mode: Gaussian priors, log-concave likelihoods.

    A Gaussian prior over several sites is told by its curvature, which is the same at ``u`` ``(D,)`` and far from it.
    """
    linear = problem.structure.predictors
    if linear is None or problem.joint.discrete:
        return False
    if not linear.gaussian and linear.W is None:
        rows = torch.stack([u, *(u + generic_directions(2, len(u), u))])
        here, *there = derivatives.hessian(linear.log_prior, rows, theta).detach()
        scale = 1e-9 * float(here.abs().max())
        if not all(float((H - here).abs().max()) <= scale for H in there):
            return False
    return linear.is_log_concave(problem.joint.trace(u, theta))


def can_tour(state: LaplaceState) -> bool:
    """Whether other modes can be looked for: a small density by the exact Hessian, and not known to have one mode."""
    problem = state.problem
    small = 0 < len(state.u) <= MOST_COORDINATES and bool(problem.active.all()) and problem.joint.has_data
    plain = problem.form is None and problem.structure.network is None
    exact = problem.curvature is exact_hessian
    return small and plain and exact and not has_one_mode(problem, state.u, state.theta) and _are_cheap(problem.joint)


@dataclass(frozen=True, eq=False)
class Restarts:
    """The distinct modes that were found, best first, and which of them each restart reached."""

    states: tuple[LaplaceState, ...]
    reached: Tensor  # (R,) index into states, -1 where a restart failed
    failures: tuple[str, ...]


def search(problem: Problem, starts: Tensor, theta: Tensor, progress: bool = False) -> Restarts:
    """Climb from ``starts`` ``(R, D)`` at hyperparameters ``theta``; modes of one height are one mode.

    Relabelled mixture components and mirrored hidden units give modes of equal height, of which one is kept.

    :raises NotAMode: when every restart failed, with what each said.
    """
    with bar_of("posterior mode", progress) as bar:

        def show(log_joint: Tensor) -> None:
            bar.set_postfix_str(f"log joint {float(log_joint.max()):.4f}", refresh=False)
            bar.update()

        mode = search_modes(problem, starts, theta, cold=True, watch=show)
    if not problem.structure.agrees(mode.u[mode.converged], theta):  # linear predictors that are not the model's
        return search(problem.by_autograd, starts, theta, progress)
    return distinct_modes([partial(state_at, problem, theta, mode, row) for row in range(len(starts))])


def search_apart(problem: Problem, starts: Tensor, theta: Tensor) -> Restarts:
    """The modes that ``starts`` ``(R, D)`` lead to, each at hyperparameters of its own, ``theta`` ``(R, T)``.

    :raises NotAMode: when every restart failed.
    """

    def found(row: int) -> LaplaceState:
        return search(problem, starts[row : row + 1], theta[row]).states[0]

    return distinct_modes([partial(found, row) for row in range(len(starts))])


def distinct_modes(found: Sequence[Callable[[], LaplaceState]]) -> Restarts:
    """The distinct modes among those that are found when asked for.

    :raises NotAMode: when none is found, with what each said; of a single one its own error.
    """
    states: list[LaplaceState] = []
    reached, failures = [], {}
    for row, find in enumerate(found):
        try:
            state = find()
            index = next((i for i, known in enumerate(states) if same_height(known, state)), len(states))
            if index == len(states):
                require_proper(state, last=False)
                states.append(state)
            reached.append(index)
        except ArithmeticError as error:
            reached.append(-1)
            failures[row] = error
    messages = tuple(f"restart {row}: {error}" for row, error in failures.items())
    if not states and len(failures) == 1:
        raise failures[0]
    if not states:
        alike: dict[str, list[int]] = {}  # each message once; those that differ in numbers only are one
        for row, message in failures.items():
            alike.setdefault(re.sub(r"-?\d[\d.e+-]*", "#", str(message)), []).append(row)
        lines = [
            f"restart{'s' * (len(rows) > 1)} {', '.join(map(str, rows))}: {failures[rows[0]]}"
            for rows in alike.values()
        ]
        kind = ImproperPosterior if all(isinstance(e, ImproperPosterior) for e in failures.values()) else NotAMode
        raise kind("\n".join(["all restarts failed.", *lines]))
    order = sorted(range(len(states)), key=lambda i: -states[i].objective)
    rank = torch.tensor([order.index(i) for i in range(len(states))] + [-1])
    return Restarts(tuple(states[i] for i in order), rank[torch.tensor(reached)], messages)


def same_height(a: LaplaceState, b: LaplaceState, level: float = 0.0) -> bool:
    """Whether log evidence and log joint of two modes are equal, which counts as one mode.

    :param level: nats up to which the log joint may differ, if that is more than rounding: it goes with the
        hyperparameters, which are where the slope is small, not zero.
    """
    tolerance = a.problem.limits.tolerance**0.5 * (1.0 + abs(a.objective))
    gap = abs(float(a.log_joint - b.log_joint))
    return abs(a.objective - b.objective) <= tolerance and gap <= max(tolerance, level)


LEVEL = 1e-3  # nats, by which log joints at one maximum of the log evidence may differ
NO_MAXIMUM = (Status.VANISHING, Status.SINGULAR, Status.UNBOUNDED, Status.STUCK)


def without_repeats(fits: Sequence[Fit[TypeII]]) -> list[Fit[TypeII]]:
    """The best first, of several at one height one; those that are no maximum last, however high they ended.

    A likelihood may have no bound - one component of a mixture on one datum - and still a maximum beside that.
    """
    ordered = sorted(fits, key=lambda f: (f.status in NO_MAXIMUM, f.status is Status.SINGULAR, -f.state.objective))
    found: list[Fit[TypeII]] = []
    for fit in ordered:
        if not any(same_height(fit.state.laplace, other.state.laplace, LEVEL) for other in found):
            found.append(fit)
    return found


ROUNDS = 30  # of MacKay's, at most, before modes are found exactly, and steps towards the mode in each
PATIENCE = 2  # of them, without a higher log evidence, after which a row is at its end


def warm_up(problem: Problem, theta: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Hyperparameters and weights taken most of the way together, from starts ``(R, T)`` and ``(R, D)``.

    MacKay's rounds, until some in turn have not raised a row's log evidence, with the weights near their mode only, to
    a hundredth of a nat: at the first guess of the hyperparameters a network's mode is far from where it will be, and
    not worth finding (benchmarks/mlp_speed.py).
    """
    points = best = near_mode(problem, theta, u)
    groups = problem.structure.groups
    size = None if groups is None else groups.size(points.active)
    fallen = torch.zeros_like(theta[:, 0])  # rounds since the highest
    for _ in range(ROUNDS):
        place = points.theta, points.u, points.active, points.tril
        slope = slopes_of_rows(replace(problem, curvature=gauss_newton), *place, fixed_modes=True)
        move = (metric_of(groups, size, slope) * slope.total).clamp(-1.0, 1.0)
        move = torch.where(torch.isfinite(move), move, 0.0)
        exact = vanishing_noise(problem, points.theta).any(-1)
        rows = ((fallen < PATIENCE) & ~exact & (move.abs() > 0.1).any(-1)).nonzero().squeeze(-1)
        if not len(rows):
            break
        points = points.with_rows(rows, near_mode(problem, (points.theta + move)[rows], points.u[rows]))
        higher = rows[points.objective[rows] > best.objective[rows]]
        best, fallen[rows] = best.with_rows(higher, points[higher]), fallen[rows] + 1.0
        fallen[higher] = 0.0
    return best.theta, best.u


def near_mode(problem: Problem, theta: Tensor, u: Tensor) -> LaplaceBatch:
    """Rows with their weights near the mode, and the log evidence there, by Gauss-Newton."""
    by_rows, limits = problem.density_by_rows, replace(problem.limits, tolerance=1e-2, num_steps=ROUNDS)
    active = torch.ones_like(u, dtype=torch.bool)
    rows = torch.cat([theta, active.to(theta)], -1)
    near = trust_region.ascend(by_rows, partial(gauss_newton, by_rows), u, rows, limits)
    return at_modes(theta, active, near, torch.ones_like(active[:, 0]))


def search_in_batch(problem: Problem, starts: Tensor, theta: Tensor) -> Restarts:
    """The modes that ``starts`` ``(R, D)`` lead to, each at hyperparameters that it has warmed up to from ``theta``.

    :raises NotAMode: when every restart failed.
    """
    own, u = warm_up(problem, theta.expand(len(starts), -1).clone(), starts)
    mode = modes_of_rows(problem, own, torch.ones_like(u, dtype=torch.bool), u, num_steps=lbfgs.FAR_STEPS)
    return distinct_modes([partial(state_of_row, problem, own[row], mode.u[row], mode, row) for row in range(len(u))])


WEAK, OVERWHELMED = 1e-4, 1e9  # curvature of the data over that of the prior, beyond: units


def rescaled_start(problem: Problem, places: Tensor) -> tuple[Problem, Tensor]:
    """Starts at which priors and data are of a size, whatever the units of the columns; ordinary ones as they are.

    Beside a prior of unit precision a column in units of 1e-6 is not felt: the log evidence is flat there, and weights
    look as if no datum needed them.  Beside one of 1e12 the search for the mode would begin where every class is sure.
    So precisions that are hyperparameters begin where the prior weighs as one datum does, and weights at random in the
    posterior's units.  Neither changes what is maximised.

    :param places: starts for the mode, ``(R, D)``.
    """
    density = problem.structure.linear
    if not isinstance(density, LinearDensity) or problem.latent is not None:
        return problem, places
    theta = problem.joint.initial_theta
    parts = density.parts(theta)
    if parts.prior is None:
        return problem, places
    loc, precision = (x.detach() for x in parts.prior)
    of_the_data = torch.zeros_like(precision)  # however small beside the prior's
    for part, offset in zip(density.linear, parts.offsets, strict=True):
        eta = part.eta(loc.unsqueeze(0), offset).to(density.joint.dtype)
        B = part.derivatives(parts.trace, eta)[2]()
        of_the_data = of_the_data + gram_diagonal(part.J.double(), B.double())[0].detach()
    felt = (of_the_data / precision).nan_to_num(0.0)
    extreme = (felt > 0) & ((felt < WEAK) | (felt > OVERWHELMED))
    if not bool(extreme.any()):
        return problem, places
    ratio = felt / max(1, sum(p.likelihood.layout.shape.numel() for p in density.linear))  # of one datum
    joint, groups, moved = copy.copy(problem.joint), problem.structure.groups, torch.zeros_like(extreme)
    joint.initial_theta = theta = theta.clone()
    if groups is not None:
        for t in groups.is_weight.nonzero().flatten().tolist():
            member = groups.member == t
            if bool((extreme | (ratio == 0))[member].all()) and bool(extreme[member].any()):
                theta[t] += float(ratio[member].amax().log() / groups.power[t])
                moved |= member  # whose prior is another now
    spread = torch.where(extreme, moved | (ratio > 1.0), False)
    unit = torch.where(spread, ratio * precision, 1.0).rsqrt()  # the posterior's, if all data were one
    return replace(problem, joint=joint), torch.where(spread, loc + (places - loc) * unit, places)
