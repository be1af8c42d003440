"""Laplace's approximation of one log joint: at one setting of its hyperparameters, and at many as a batch of rows."""

import math
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from pyro_evidence.blocks import marginal as blocks
from pyro_evidence.blocks.marginal import marginal_of
from pyro_evidence.errors import NotPositiveDefinite, NotSmooth, TooLarge
from pyro_evidence.laplace import mode_checks
from pyro_evidence.laplace.mode_checks import rounded_inside
from pyro_evidence.numerics import evidence, lbfgs, newton, trust_region
from pyro_evidence.numerics.batched import BATCH_BYTES, Batched, apply
from pyro_evidence.numerics.derivatives import generic_directions
from pyro_evidence.numerics.line_search import Watch, no_callback
from pyro_evidence.numerics.newton import Density
from pyro_evidence.precision.choices import Curvature, asked_for, block_diagonal, diagonal, exact_hessian, gauss_newton
from pyro_evidence.precision.dense import Dense, Precision, Remade, factorise
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.settings import stacklevel
from pyro_evidence.structure.density import AutogradDensity, LinearPredictors, climbing
from pyro_evidence.structure.factor_density import Structured
from pyro_evidence.structure.factor_mode import StructuredProblem
from pyro_evidence.structure.factors import SMALL, NotSparse
from pyro_evidence.structure.gaussian_process import GaussianLatent
from pyro_evidence.structure.groups import PrecisionGroups, Pruned
from pyro_evidence.structure.recognise import Structure, recognise
from pyro_evidence.structure.symmetries import has_hidden_units

PLAIN = (exact_hessian, gauss_newton, block_diagonal, diagonal)  # curvatures that add nothing of their own
NEARLY = 1e-3  # nats, twice what a step promises to a row that is nearly there
ROUGH = 1e-4  # nats that steps may promise before the last, where a thousandth of a nat is enough
NEAR = 1e-3  # of a coordinate: how far from where a search has stopped a jump is looked for
DENSE_SEARCH = 1000  # coordinates up to which the mode is searched with the exact Hessian, whatever the curvature


@dataclass(frozen=True, eq=False)
class Problem:
    """A log joint, what is known of its structure, and the curvature to use; coordinates not active are pruned."""

    joint: LogJoint
    structure: Structure
    curvature: Curvature
    active: Tensor  # (D,) bool
    nodes: int = 1  # of quadrature on each axis of an independent block; 1 is Laplace

    @cached_property
    def form(self) -> blocks.Marginal | GaussianLatent | StructuredProblem | None:
        """The form of the density that finds mode, curvature and slope by itself; the one place that decides it.

        Independent blocks where quadrature is asked for; the dense prior of a Gaussian process, or factors of few
        coordinates, where the curvature is the exact one.  None: dense or diagonal matrices of :attr:`density`.
        """
        marginal = None if self.nodes == 1 else self.by_quadrature(self.nodes)
        if marginal is not None:
            return marginal
        known, whole = self.structure.known, bool(self.active.all())
        if isinstance(known, GaussianLatent) and whole and self.curvature in (exact_hessian, gauss_newton):
            return known
        # sums are of all coordinates
        if isinstance(known, Structured) and self.curvature is exact_hessian and (whole or not len(known.B)):
            value = self.density
            assert isinstance(value, Structured | Pruned)
            return StructuredProblem(known, self.active, value, self.joint.latents.label)
        return None

    @property
    def marginal(self) -> blocks.Marginal | None:
        """The density of what independent blocks share; None where there are none, or Laplace is asked for."""
        return self.form if isinstance(self.form, blocks.Marginal) else None

    @property
    def latent(self) -> GaussianLatent | None:
        """The dense Gaussian prior behind linear predictors, where there is one and the exact curvature is wanted."""
        return self.form if isinstance(self.form, GaussianLatent) else None

    @property
    def factors(self) -> StructuredProblem | None:
        """The density by its factors, where there are any and the exact curvature is wanted."""
        return self.form if isinstance(self.form, StructuredProblem) else None

    def by_quadrature(self, num: int) -> blocks.Marginal | None:
        """The density of what blocks share, these integrated by ``num`` nodes on each axis; None without blocks."""
        return marginal_of(self.joint, self.structure, self.active, num, replace(self.limits, slack=self.slack))

    @property
    def density(self) -> Density:
        """The cheapest density, without the pruned coordinates."""
        fastest, groups = self.structure.fastest, self.structure.groups
        if groups is None or bool(self.active.all()):
            return fastest
        return Pruned(fastest, groups, self.active)

    @property
    def density_by_rows(self) -> Pruned:
        """The density of rows whose mask stands behind their hyperparameters."""
        return Pruned(self.structure.by_rows, self.structure.groups)

    @cached_property
    def log_units(self) -> Tensor:
        """Which unconstrained hyperparameters stand for something that can be infinite or at an edge, ``(T,)`` bool.

        All but those that their constraint leaves as they are, or shifts and stretches by constants; of the latter
        those that are recognised as log precisions.
        """
        curved, groups = self.joint.hypers.curved.to(self.joint.device), self.structure.groups
        return curved if groups is None else curved | (groups.power != 0)

    @property
    def slack(self) -> float:
        """Relative rounding of the log evidence, ten times that of a log joint: 1e-13 in float64."""
        return 10.0 * self.limits.slack

    @property
    def limits(self) -> newton.Limits:
        """When a search for the mode ends."""
        return newton.limits_of(self.joint.dtype)

    @property
    def sentence(self) -> str:
        """A sentence for the reader: the parts of the precision, and their treatment."""
        if self.marginal is not None:
            return self.marginal.partition.sentence
        if self.factors is not None:
            return self.factors.density.sentence
        size, coupled = f"{self.joint.latents.size:,} coordinates", self.structure.coupled
        if self.latent is not None:
            return f"{size} under a dense Gaussian prior"
        if self.curvature in (diagonal, block_diagonal):
            return f"{size}, {getattr(self.curvature, '__name__', '')}"
        return f"{size}, dense" + (f": {coupled.reason}" if coupled is not None else "")

    @property
    def is_dense(self) -> bool:
        """Whether the precision is of all latents at once, with neither factors nor blocks."""
        return self.factors is None and self.nodes == 1

    @property
    def made_dense(self) -> "Problem":
        """This problem with a dense precision, where a product has shown that factors were overlooked.

        By autograd, where its density is one of linear predictors that no longer is the model's.
        """
        if self.factors is None:
            return self.by_autograd
        found = recognise(self.joint)
        reason = NotSparse("two products with the true Hessian differ from those with the factors found")
        return replace(self, structure=replace(found, coupled=reason))

    @property
    def by_autograd(self) -> "Problem":
        """This problem by the density that needs nothing to be recognised."""
        return replace(self, structure=replace(self.structure, known=None))

    @property
    def unread(self) -> "Problem":
        """This problem by its plain density, for a few points of one whose structure was not needed."""
        return replace(self, structure=Structure(None, None, None, self.structure.density))

    @property
    def shared(self) -> LinearPredictors | None:
        """The linear predictors whose one run at some hyperparameters is for mode, slope and prior; None for others."""
        if self.structure.latent is not None or not self.joint.has_data:
            return None
        if self.factors is not None:
            return self.factors.density.linear
        return self.structure.linear if self.form is None else None

    def leaf(self, theta: Tensor) -> Tensor:
        """A copy of the hyperparameters to differentiate in."""
        return theta.detach().clone().requires_grad_() if self.shared is None else self.shared.leaf(theta)

    def log_hyperprior(self, theta: Tensor) -> Tensor:
        """Log prior density of the maximised latent sites, nats, ``()``."""
        shared = self.shared if self.joint.maximised_sites else None
        return self.joint.log_hyperprior(theta, None if shared is None else shared.parts(theta).trace)

    def eliminated(self, u: Tensor, theta: Tensor) -> Tensor:
        """The part of the log joint that is integrated over groups elsewhere, nats, ``()``; u ``(1, D)``."""
        found = self.structure.eliminated
        return u.new_zeros(()) if found is None else found(u, theta).sum()

    def around(self, u: Tensor, theta: Tensor) -> mode_checks.ModeNeighbourhood:
        """A mode ``(D,)``, or where a search for it has stopped, and the density around it."""
        return mode_checks.ModeNeighbourhood(self.joint, self.density, u, theta, self.active)

    def without(self, member: Tensor) -> "Problem":
        """This problem with more coordinates pruned."""
        return replace(self, active=self.active & ~member)


def problem_of(joint: LogJoint, structure: Structure, curvature: Curvature | None = None) -> Problem:
    """The problem before anything is pruned.

    :param curvature: None for Gauss-Newton where the latents are the weights of a network, else the exact Hessian.
    """
    if curvature is None:
        curvature = gauss_newton if structure.linear is None and has_hidden_units(structure) else exact_hessian
    return Problem(joint, structure, curvature, torch.ones(joint.latents.size, dtype=torch.bool, device=joint.device))


def laplace_problem(joint: LogJoint, curvature: Curvature | None = None, few: float = math.inf) -> Problem:
    """The problem of a model, whose structure is looked for; factors beyond so few coordinates."""
    return problem_of(joint, recognise(joint, factors=curvature in (None, exact_hessian), few=few), curvature)


@dataclass(frozen=True, eq=False)
class LaplaceState:
    """One iterate.  Built only by :func:`laplace_state`, so its parts always agree."""

    problem: Problem
    theta: Tensor  # (T,)   unconstrained hyperparameters
    u: Tensor  # (D,)       posterior mode, unconstrained; pruned coordinates at their prior mean
    log_joint: Tensor  # ()  log p(D, mode | theta)
    precision: Precision  # R = 1; identity on pruned coordinates
    decrement: float  # squared gradient norm at the mode in units of the posterior precision, nats
    log_evidence: Tensor  # () log p(D | theta)
    log_hyperprior: Tensor  # () log prior density of the maximised latent sites
    left_saddle: bool = False  # whether the search left a saddle on the way
    place: blocks.SharedIterate | None = None  # the mode of what blocks share, where these are integrated

    @property
    def objective(self) -> float:
        """Log evidence plus log hyperprior: what the hyperparameters maximise, nats."""
        return float(self.log_evidence + self.log_hyperprior)

    @property
    def around(self) -> mode_checks.ModeNeighbourhood:
        """The mode, and the density around it."""
        return self.problem.around(self.u, self.theta)

    @property
    def gamma(self) -> Tensor:
        """Number of well-determined parameters per hyperparameter, nan for those that hold no precision, ``(T,)``."""
        groups = self.problem.structure.groups
        total = torch.full_like(self.theta, torch.nan)
        if groups is None or not bool(groups.is_weight.any()):
            return total
        each = evidence.well_determined(groups.log_precision(self.theta).exp(), self.precision.variance[0])
        each = torch.where(self.problem.active, each, 0.0)[groups.member >= 0]
        sums = torch.zeros_like(self.theta).index_add(0, groups.member[groups.member >= 0], each)
        return torch.where(groups.is_weight, sums, total)


def search_modes(
    problem: Problem, u: Tensor, theta: Tensor, *, cold: bool, watch: Watch = no_callback, to_the_end: bool = True
) -> newton.Mode:
    """Modes reached from rows ``(R, D)``: Newton, after L-BFGS where the start is far or the curvature indefinite.

    :param cold: whether the start may be far from a mode.
    :param watch: told every row's log joint once per step.
    :param to_the_end: whether rows go on however long a valley is; else for as many steps of either method as Newton's.
    """
    if problem.latent is not None:
        return problem.latent.find_modes(u, theta, problem.limits.tolerance, watch)
    if problem.factors is not None:
        limits = replace(problem.limits, watch=watch, slack=problem.slack)
        return problem.factors.find_modes(u, theta, limits, cold=cold)
    try:
        return _dense_modes(problem, u, theta, cold, watch, to_the_end)
    except TooLarge as error:
        coupled = problem.structure.coupled
        if coupled is None or problem.curvature is not exact_hessian:
            raise
        raise TooLarge(f"{error} {coupled.message(problem.joint.latents.label)}") from error


def _dense_modes(problem: Problem, u: Tensor, theta: Tensor, cold: bool, watch: Watch, to_the_end: bool) -> newton.Mode:
    """Modes by dense matrices, or by diagonal ones; those of a network, along curved valleys, by a trust region.

    The search is with the exact Hessian where that is affordable; where it ends at a singular one it goes on with the
    problem's own curvature.

    :raises TooLarge: where a curvature has no room in memory, before the long way to where it is needed.
    """
    density, network = problem.density, problem.structure.network is not None
    exact = exact_hessian if u.shape[-1] <= DENSE_SEARCH else problem.curvature
    limits, slope = replace(problem.limits, watch=watch), partial(density.gradient, theta=theta)
    if network:
        limits = replace(limits, num_steps=lbfgs.FAR_STEPS if cold else trust_region.FOLLOWED)

    def climb(u: Tensor, curvature: Curvature, before: newton.Mode | None = None) -> newton.Mode:
        of = climbing(density)
        method = trust_region.climb if network else newton.climb
        mode = method(of, partial(curvature, of), u, theta, limits)
        return mode if before is None else replace(mode, left_saddle=before.left_saddle | mode.left_saddle)

    if cold and problem.structure.linear is None:
        if exact is exact_hessian and isinstance(density, AutogradDensity):
            density.require_dense(u[:1].detach())
        else:
            exact(density, u[:1].detach(), theta)
        u = lbfgs.from_far(slope, u, limits.slack, watch, lbfgs.FAR_STEPS if to_the_end else limits.num_steps)
    mode = climb(u, exact)
    if network and bool((~mode.converged & (mode.decrement < NEARLY)).any()):
        mode = climb(mode.u, exact, mode)
    elif not network and to_the_end and not bool(mode.converged.all()):
        mode = climb(lbfgs.onwards(slope, mode.u, limits.tolerance, limits.slack, watch), exact, mode)
    if exact is problem.curvature:
        return mode
    if bool(mode.converged.all()):
        return replace(mode, precision=asked_for(problem.curvature, density, mode.u, theta).detach())
    if network and not cold:  # only where a step by that curvature promises next to nothing in some row
        tril, info = torch.linalg.cholesky_ex(problem.curvature(density, mode.u, theta).detach())
        white = torch.linalg.solve_triangular(tril, mode.gradient.unsqueeze(-1), upper=False).squeeze(-1)
        if not bool(((info == 0) & (white.square().sum(-1) < NEARLY)).any()):
            return mode
    return climb(mode.u, problem.curvature, mode)


def laplace_state(
    problem: Problem, theta: Tensor, start: Tensor, *, cold: bool = False, exact: bool = True
) -> LaplaceState:
    """Laplace's approximation at ``theta``, its mode searched from ``start`` ``(D,)``.

    :param exact: whether slopes are meant, for which few nodes of blocks take longer than for the log evidence.
    :raises NotAMode: when the search ends elsewhere than at a maximum.
    :raises NotPositiveDefinite: when the curvature that was asked for is not positive definite there.
    """
    if problem.marginal is not None:
        start = laplace_state(replace(problem, nodes=1), theta, start, cold=True).u if cold else start
        place = problem.marginal.find(theta, start.detach(), exact=exact)
        return state_of_blocks(problem, theta, place, problem.joint.log_hyperprior(theta).detach())
    mode = search_modes(problem, start.detach().unsqueeze(0), theta, cold=cold)
    return state_at(problem, theta, mode, 0)


def reached(problem: Problem, theta: Tensor, start: Tensor, **how: bool) -> LaplaceState | None:
    """:func:`laplace_state`; None where there is no mode."""
    try:
        return laplace_state(problem, theta, start, **how)
    except ArithmeticError:
        return None


def state_of_blocks(
    problem: Problem, theta: Tensor, place: blocks.SharedIterate, log_hyperprior: Tensor
) -> LaplaceState:
    """The state with blocks integrated, and Laplace's approximation around that of what they share, at its mode."""
    marginal, log_joint = problem.marginal, place.modes.here.value.sum()
    assert marginal is not None
    found = (marginal.precision(theta, place), float(place.decrement), marginal.log_evidence(place), log_hyperprior)
    return LaplaceState(problem, theta.detach(), marginal.whole(place), log_joint, *found, place=place)


def state_at(
    problem: Problem, theta: Tensor, mode: newton.Mode, row: int, *, log_hyperprior: Tensor | None = None
) -> LaplaceState:
    """The state of one row of a finished search.

    :param log_hyperprior: where it is known, or does not matter.
    :raises ImproperPosterior: when the mode has run away over a plateau, or noise to where the log joint is rounding.
    :raises NotSmooth: when the search stopped on a corner or a jump of the density, with the site.
    :raises NotPositiveDefinite, NotAMode: when the search ends at no maximum for another reason.
    """
    latents, u = problem.joint.latents, mode.u[row].detach()  # data of the caller's may have a graph
    neighbourhood = problem.around(u, theta)
    if not bool(mode.converged[row]):
        eps = torch.finfo(problem.joint.dtype).eps
        if bool(newton.rounding(mode.u, mode.precision, eps)[row] > newton.ROUNDED):
            raise newton.rounded_away()
        mode_checks.require_fall_on_rays(neighbourhood)  # far out a plateau's steep edge looks like a jump
        require_no_jump(neighbourhood)
        mode_checks.require_own_slopes(neighbourhood)
        mode_checks.require_no_corner(neighbourhood, mode.gradient[row])
    try:
        precision = mode.found[row] if mode.found else factorise(mode.precision[row : row + 1], latents.label)
        if isinstance(precision, NotPositiveDefinite):
            raise precision
    except NotPositiveDefinite:
        if bool(neighbourhood.fall(2.0 * torch.finfo(u.dtype).eps * u.unsqueeze(0)) > 1.0):
            raise newton.rounded_away() from None
        mode_checks.require_fall_on_rays(neighbourhood)
        raise
    if not bool(mode.converged[row]):
        curved, causes = latents.curved.to(u.device), rounded_inside(problem.joint, u, theta)
        raise newton.not_a_mode(mode, row, curved, latents.label, causes)
    log_evidence = evidence.log_evidence(mode.log_joint[row], precision.log_det[0], int(problem.active.sum()))
    log_evidence = log_evidence + problem.eliminated(mode.u[row : row + 1].detach(), theta.detach())
    log_hyperprior = problem.log_hyperprior(theta).detach() if log_hyperprior is None else log_hyperprior
    numbers = (mode.log_joint[row], precision, float(mode.decrement[row]), log_evidence, log_hyperprior)
    return LaplaceState(problem, theta.detach(), u, *numbers, bool(mode.left_saddle[row]))


def log_priors(problem: Problem, theta: Tensor) -> Tensor:
    """Log prior density of the marginalised and maximised sites at each row ``(R, T)``, nats, ``(R,)``."""
    f = problem.joint.log_hyperprior
    with torch.no_grad():
        return apply(f, (theta,), problem.joint.row_bytes, f)


def near_states(
    problem: Problem, theta: Tensor, start: Tensor, prior: Tensor, *, light: bool = False, rough: bool = False
) -> list[LaplaceState | None] | None:
    """The states to which a few steps lead that all rows take together; None where they cannot be taken together.

    :param prior: of :func:`log_priors`.
    :param light: whether sparse factors are let go, and made again when they are asked for.
    :param rough: whether a thousandth of a nat is enough, where searches are dear.
    """
    found: list[LaplaceState | None] = [None] * len(theta)
    if problem.marginal is not None:
        limits = replace(problem.marginal.limits, tolerance=ROUGH) if rough else problem.marginal.limits
        for row, place in enumerate(blocks.near_places(replace(problem.marginal, limits=limits), theta, start)):
            if place is not None:
                with suppress(ArithmeticError):  # its curvature may be no mode's
                    found[row] = state_of_blocks(problem, theta[row], place, prior[row])
    elif problem.factors is not None and problem.nodes == 1 and problem.factors.takes_rows:
        limits = replace(problem.limits, slack=problem.slack)
        limits = replace(limits, tolerance=ROUGH) if rough else limits
        size = max(1, BATCH_BYTES // (problem.joint.row_bytes or BATCH_BYTES))
        parts = zip(start.split(size), theta.split(size), strict=True)
        modes = [mode for part in parts for mode in problem.factors.near_modes(*part, limits)]
        for row, mode in enumerate(modes):
            if mode is not None:
                found[row] = state = state_at(problem, theta[row], mode, 0, log_hyperprior=prior[row])
                if light and mode.make is not None:
                    found[row] = replace(state, precision=Remade(mode.make, state.precision.log_det))
    else:
        return None
    return found


def is_certified(state: LaplaceState) -> bool:
    """Whether a density that was recognised at the first hyperparameters is the model's at a state, too.

    Of factors two products with vectors scaled by the diagonal's root are compared with the true Hessian's; of linear
    predictors value and gradient, as they were at the first hyperparameters where the search for modes ended.
    """
    problem = state.problem
    if problem.factors is not None:
        return problem.factors.is_certified(state.u, state.theta)
    linear, pruned = problem.structure.linear, not bool(problem.active.all())
    if linear is None or pruned or not len(state.theta):  # what is pruned has hyperparameters at extreme values
        return True
    return problem.structure.agrees(state.u.unsqueeze(0), state.theta)


def require_proper(state: LaplaceState, *, last: bool = True) -> None:
    """Look around a mode: the curvature must be that of the density, and the density must fall on all sides.

    :param last: whether the hyperparameters are those of the result.
    :raises NotSmooth: when second derivatives are not those of the slope, with the site.
    :raises ImproperPosterior: when the log joint stays up in some direction, with the site.
    """
    problem = state.problem
    if problem.curvature not in PLAIN or not bool(problem.active.any()) or state.place is not None:
        return  # damping was asked for, so a flat direction is intended; or it is the mode of an integral
    if problem.joint.dtype is torch.float64 and is_rounding(state):
        raise newton.rounded_away()
    mode_checks.require_proper_mode(state.around, state.precision)
    if problem.curvature is exact_hessian:
        products = mode_checks.of_precision(state.precision, problem.active)
        mode_checks.certify(state.around, products, last=last)


def is_rounding(state: LaplaceState) -> bool:
    """Whether rounding moves the log joint at a mode by more than counts: noise goes to nothing, the data are met."""
    eps, variance = torch.finfo(state.problem.joint.dtype).eps, state.precision.variance
    return bool(newton.rounding(state.u.unsqueeze(0), variance.reciprocal(), eps) > newton.ROUNDED)


def require_no_jump(stopped: mode_checks.ModeNeighbourhood) -> None:
    """Refuse a density that jumps near where a search has stopped.

    :raises NotSmooth: naming the site.
    """
    way = NEAR * (1.0 + stopped.u.abs()) * generic_directions(1, len(stopped.u), stopped.u)[0]
    said = mode_checks.jump_message(stopped, way, "where the search for the posterior mode stopped")
    if said is not None:
        raise NotSmooth(said)


def warn_of_jumps(state: LaplaceState) -> None:
    """Warn where the density jumps near the mode."""
    u = state.u
    if state.problem.joint.has_data and len(u) and not is_rounding(state):
        white = 2.0 * generic_directions(1, len(u), u)
        way, reach = state.precision.unwhiten(white)[0], float(white.abs().mean())
        where = "within four posterior standard deviations of its mode"
        said = mode_checks.jump_message(state.around, way, where, reach)
        if said is not None:
            off = "The log evidence and draws may be off: importance_sampling(posterior) has the log evidence."
            warnings.warn(f"{said} {off}", stacklevel=stacklevel())


INFLATED = 1e3  # posterior variance in units of the prior's, beyond which the curvature is becoming singular
INFLATED_NETWORK = 30.0  # the same for a network, where that is how modes merge


def is_singular(laplace: LaplaceState) -> bool:
    """Whether the posterior variance of some latent exceeds its prior variance by far: a mode about to merge or split.

    There the exact Hessian becomes singular and Laplace's log evidence goes to infinity for no good reason.
    """
    groups, active = laplace.problem.structure.groups, laplace.problem.active
    if groups is None or not bool((active & (groups.member >= 0)).any()):
        return False
    most = INFLATED if laplace.problem.structure.network is None else INFLATED_NETWORK
    return bool((inflation(groups, laplace.theta, laplace.precision.variance[0])[active] > most).any())


def inflation(groups: PrecisionGroups, theta: Tensor, variance: Tensor) -> Tensor:
    """Posterior variance ``(..., D)`` of latents in units of the prior's; zero where that is not known."""
    alone = (groups.member >= 0) & torch.isfinite(groups.loc)  # elsewhere other latents add to the prior variance
    return torch.where(alone, variance * groups.log_precision(theta).exp(), 0.0)


@dataclass(frozen=True, eq=False)
class LaplaceBatch(Batched):
    """Laplace's approximation of many rows at once, each at hyperparameters and with pruned weights of its own."""

    theta: Tensor  # (R, T)
    active: Tensor  # (R, D) bool
    u: Tensor  # (R, D)
    tril: Tensor  # (R, D, D) Cholesky factor of the posterior precision
    objective: Tensor  # (R,) log evidence, -inf where no mode was found
    left_saddle: Tensor  # (R,) bool: whether the search left a saddle on the way


def can_batch(problem: Problem) -> bool:
    """Whether climbing the rows of this problem together, each at its own hyperparameters, is worth it."""
    return problem.structure.linear is None and can_compare(problem)


def can_compare(problem: Problem) -> bool:
    """Whether the rows of this problem can be evaluated together, each at its own hyperparameters."""
    structure, joint = problem.structure, problem.joint
    return (
        joint.has_data  # else the rows are elsewhere
        and joint.latents.size <= (SMALL if structure.network is None else DENSE_SEARCH)
        and structure.factors is None
        and problem.latent is None
        and (structure.linear is None or structure.linear.is_light)
        and problem.curvature in (exact_hessian, gauss_newton)
        and joint.hypers.size > 0
        and not joint.maximised_sites
    )


def laplace_batch(problem: Problem, theta: Tensor, active: Tensor, start: Tensor) -> LaplaceBatch:
    """The modes from ``start`` and what follows from them."""
    mode = modes_of_rows(problem, theta, active, start)
    return at_modes(theta, active, mode, mode.converged)


def modes_of_rows(
    problem: Problem, theta: Tensor, active: Tensor, start: Tensor, num_steps: int | None = None
) -> newton.Mode:
    """The modes of rows at hyperparameters ``(R, T)`` and with coordinates ``(R, D)`` of their own.

    :return: with the curvature that was asked for.
    """
    rows = torch.cat([theta, active.to(theta)], -1)
    log_joint = replace(problem.density_by_rows, density=climbing(problem.structure.by_rows))
    climb = newton.climb if problem.structure.network is None else trust_region.climb
    limits = problem.limits if num_steps is None else replace(problem.limits, num_steps=num_steps)
    mode = climb(log_joint, partial(exact_hessian, log_joint), start, rows, limits)
    if problem.curvature is exact_hessian:  # where the last step of a search that has arrived took it
        return mode
    return replace(mode, precision=problem.curvature(log_joint, mode.u, rows).detach())


def at_modes(theta: Tensor, active: Tensor, mode: newton.Mode, sound: Tensor) -> LaplaceBatch:
    """The rows with the log evidence of modes.

    :param sound: which are modes, as far as the search knows, ``(R,)`` bool.
    """
    A = mode.precision.detach().double()
    tril, info = torch.linalg.cholesky_ex(A)
    sound = sound & (info == 0) & torch.isfinite(mode.log_joint)
    tril = torch.where(sound[:, None, None], tril, torch.eye(A.shape[-1]).to(tril))
    log_evidence = evidence.log_evidence(mode.log_joint, Dense(tril).log_det, active.to(A).sum(-1))
    return LaplaceBatch(theta, active, mode.u, tril, torch.where(sound, log_evidence, -torch.inf), mode.left_saddle)


def state_of_row(problem: Problem, theta: Tensor, start: Tensor, mode: newton.Mode, row: int) -> LaplaceState:
    """The state of one row of :func:`modes_of_rows`, searched for by itself where the batch has found no mode.

    :raises ArithmeticError: where there is none.
    """
    if bool(mode.converged[row]):
        return state_at(problem, theta, mode, row)
    return laplace_state(problem, theta, start)
