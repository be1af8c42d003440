"""Laplace-evidence type-II maximum likelihood for any Pyro model."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import torch

from pyro_evidence import posterior as results  # of which each kind is imported when a fit makes it
from pyro_evidence.blocks.marginal import NODES, NODES_OF_CURVED, all_blocks, check_nodes, no_blocks
from pyro_evidence.blocks.partition import Partition
from pyro_evidence.data.chunks import Chunks
from pyro_evidence.data.ranks import COMMUNICATOR
from pyro_evidence.errors import BadInput, NotAMode, NotConverged, UnsupportedModel
from pyro_evidence.fitting.checkpoint import NOT_FITTED, Resumable
from pyro_evidence.fitting.iterate import Fit, Status, Stop, check_stop, iterate, require_convergence
from pyro_evidence.fitting.process_state import own_random_numbers, without_validation
from pyro_evidence.laplace import restarts as laplace_restarts
from pyro_evidence.laplace import type2
from pyro_evidence.laplace.approximation import (
    LaplaceState,
    Problem,
    can_batch,
    is_certified,
    laplace_problem,
    laplace_state,
    problem_of,
    require_no_jump,
    require_proper,
    warn_of_jumps,
)
from pyro_evidence.laplace.evidence_error import numbers_of_nodes, refined, with_nodes
from pyro_evidence.laplace.grouped_chunks import GroupRows, group_rows, local_sites
from pyro_evidence.laplace.mode_checks import double_precision, require_own_slopes
from pyro_evidence.laplace.restarts import (
    LEVEL,
    MOST_COORDINATES,
    NO_MAXIMUM,
    Restarts,
    can_tour,
    rescaled_start,
    same_height,
    search,
    starts,
    thetas,
    without_repeats,
)
from pyro_evidence.laplace.tour import LEAST_SHARE, tour
from pyro_evidence.laplace.type2 import TypeII
from pyro_evidence.nested.inner import MarginalisedJoint, is_batched, marginalised_problem
from pyro_evidence.nested.joint_posterior import whole_place
from pyro_evidence.nested.roles import marginalised_sites
from pyro_evidence.numerics import lbfgs
from pyro_evidence.numerics.coordinates import is_affine
from pyro_evidence.numerics.derivatives import operations
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.precision.choices import Curvature, exact_hessian, gauss_newton
from pyro_evidence.program.branching import has_singular_matrix, has_structures
from pyro_evidence.program.checks import (
    Arguments,
    Constant,
    OutsideSupport,
    StructureSites,
    constant_targets,
    same_arguments,
)
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.parameters import with_dummy_site
from pyro_evidence.settings import Start, check_function, check_instance, check_model, seed_of
from pyro_evidence.structure.recognise import recognise, unread
from pyro_evidence.structure.streamed import first_joint, linear_rows, streamed_structure
from pyro_evidence.structure.symmetries import has_images, has_labels_beside, has_other_orders, off_orbits

GAIN = 0.05  # share of draws that one more marginalised site must save
OTHERS = (
    "given the marginalised sites there are other modes, which hold {:.2g} of the mass by Laplace and are not counted: "
    "run NUTS or tempered_smc(posterior)"
)
NUM_TRIED = 2  # numbers that are marginalised in turn where modes inside merge
FEW_OTHERS = 5  # modes, whose mass is looked at wherever marginalised sites may be
CORNERS = {"relu", "leakyrelu", "hardtanh", "prelukernel", "maximum"}  # operations of units whose slope jumps
SHOWN = 5  # hyperparameters, and elements of each, that an error message shows


@dataclass(eq=False, repr=False)
class LaplaceEvidence(Resumable):
    """Takes the place of ``SVI`` or ``MCMC(NUTS(model), ...)``: posterior, hyperparameters and log evidence by Laplace.

    The posterior mode and the curvature there give a Gaussian posterior and a log evidence; the model's params (and
    the latent sites named in ``maximise``) are set where that log evidence is highest, by its exact gradient, the mode
    re-found at every step.  MacKay (1992); exact for linear-Gaussian models.  Latent sites that set the spread of
    others, ``marginalise``, are integrated numerically around that, because the joint density of a scale and what it
    scales has no useful mode.

    :param model: any Pyro model whose discrete sites can be summed out.
    :param marginalise: latent sites to integrate numerically around Laplace.  None: those on positive or bounded
        support that set the spread of another site's prior or of the likelihood, multiply other sites on their way to
        the data, or enter a ``pyro.factor``, which does not say how; and beside these, up to three numbers, real ones
        that multiply sites of many elements, such as slopes on latent predictors, and those without which few draws of
        the others would survive their importance weights.  ``()``: none, one Gaussian over everything.
    :param maximise: None: the params are maximised; names: the params and these latent sites, whose prior counts
        (type-II MAP, in the site's own constrained space); ``()``: neither, all hyperparameters are held fixed.
    :param nodes: of quadrature, on each axis of each independent block (a group's effects given everything that groups
        share; up to three axes, spheres where there are more).  1: Laplace.  Above: the blocks are
        integrated first, and the other latent sites by Laplace around them.  ``"auto"``: as many as bring
        ``posterior.log_evidence_error`` below ``stop.quadrature_tol`` nats.  None: 1, but 7 where latents of one plate
        multiply those of another, such as the discriminations of items the abilities of persons; of two factors
        the joint mode says little, and params are then maximised with the blocks integrated from the beginning.  And 15
        where latents with an end of their range, such as the rate, frailty or scale of each row, are a block each.
    :param curvature: ``exact_hessian``, ``gauss_newton``, ``block_diagonal``, ``diagonal`` or ``damped(...)``.  None:
        the exact Hessian, but Gauss-Newton where the latents are weights of hidden units that can be exchanged: where
        two of them meet, a network's exact Hessian is singular and its log evidence infinite.
    :param stop: tolerances, the most steps, whether to raise and to show a progress bar.
    :param start: number of random starts for the mode, climbed as one batch, their seed, and values at which sites
        and params begin; by default one start where a single mode is to be expected and four where not.

    >>> import torch
    >>> from pyro_evidence import LaplaceEvidence
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> posterior = LaplaceEvidence(regression(Linear())).run(X, t)
    >>> sorted(posterior.hyperparameters), tuple(posterior.mode["w"].shape)
    (['alpha', 'alpha_bias', 'beta'], (2,))
    """

    model: Model
    _: KW_ONLY
    marginalise: Sequence[str] | None = None
    maximise: Sequence[str] | None = None
    nodes: int | str | None = None
    curvature: Curvature | None = None
    stop: Stop = Stop()
    start: Start = Start()

    def __post_init__(self) -> None:
        check_model(self.model)
        if self.curvature is not None:
            check_function("curvature", self.curvature, "exact_hessian")
        check_stop(self.stop)
        check_instance("start", self.start, Start)
        if self.nodes is not None:
            self.nodes = check_nodes(self.nodes, self.curvature)
        self._data: Arguments | None = None
        self._fits: tuple[Fit[TypeII], ...] = ()
        self._begun: tuple[Fit[TypeII], ...] = ()
        self._found: Restarts | None = None
        self._full: Problem | None = None
        self._groups: GroupRows | None = None
        self._integrated: dict[int, LaplacePosterior] = {}
        self._over: Any = None  # of a model with structure sites
        self._outside: Set[str] = frozenset()  # sites that other structures of a model have outside
        self._more: tuple[str, ...] = ()  # sites outside because few draws of the inside would be kept otherwise
        self._num_nodes: int | str = 1 if self.nodes is None else self.nodes
        self._seeks_all_modes: bool | None = False  # all latents at once; None: where modes have images
        self._has_all_modes = False  # whether they are integrated so
        self._is_second = False  # whether another fit has a posterior, so that nothing is integrated around no maximum
        self._is_small = False  # few enough latents for that
        self._in_blocks = False  # whether latents are blocks where their joint mode says little: factors, rates of rows

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Fit to data, from scratch.

        Structure sites, discrete ones with ``infer={"branching": True}`` that choose what the model is made of in plain
        Python, are summed over outside of Laplace: the posterior is then a :class:`StructurePosterior`, averaged over
        structures.  Without the annotation a discrete site is summed out inside.

        :param args: the model's arguments, as for ``MCMC.run``.
        :raises NotConverged: unless ``stop.throw`` is off; it carries the posterior that was reached.
        :raises BadInput, UnsupportedModel, NotAMode, NotPositiveDefinite, ImproperPosterior, TooLarge: see errors.
        """
        self._more, self._over = (), None
        try:
            posterior = self._all_or_nested(args, kwargs)
        except (StructureSites, BadInput) as error:  # other structures may bear what one that was drawn does not
            borne = isinstance(error, OutsideSupport) or has_singular_matrix(error)
            if not isinstance(error, StructureSites) and not (borne and has_structures(self.model, (args, kwargs))):
                raise
            fits = results.StructureFits(replace(self), (args, kwargs))
            self._over = results.over_structures(self.model, (args, kwargs), fits, self.start, self.stop)
            return self._over
        posterior = posterior if self.marginalise is not None else self._with_more_marginalised(posterior)
        # unless a form of all was verified, at places far from one another
        if self._full is None and posterior.state.problem.structure.known is None:
            warn_of_jumps(posterior.state)
        return posterior

    def _all_or_nested(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LaplacePosterior:
        """The fit of all latents by the modes of their joint density, or around marginalised sites.

        Where modes have images, as labels have in every order, sites marginalised around one mode inside would leave
        these out.  So where signs can be turned, ends of an interval meet, or labels be exchanged that have no
        marginalised site for their scale, all latents are tried first, and what is inside where that fails.  Elsewhere
        all latents are tried second: where what is inside has other modes or orders, or no integral around it can be
        had, and in small models whose latents multiply one another where importance sampling around blocks fails.
        Modes of other heights are kept where their weights cannot be trusted, but for those of a network.
        """
        automatic = self.marginalise is None and self.start.tour != 0
        fit, found = self._attempt(args, kwargs, None if automatic else False)
        is_whole = fit._has_all_modes
        is_doubtful = isinstance(found, Exception) or not found._trusts_weights
        is_unlike = getattr(found, "has_unlike_modes", False)
        if is_whole and is_doubtful and (not is_unlike or self._is_network(args, kwargs)):
            other, nested = self._attempt(args, kwargs, False, isinstance(found, LaplacePosterior))
            if isinstance(found, Exception) or not isinstance(nested, Exception):
                fit, found = other, nested
        others = fit._share_of_others(found)
        together = automatic and others > LEAST_SHARE and can_tour(found.state)
        if not is_whole and (together or fit._may_have_more_modes(found, automatic)):
            other, whole = self._attempt(args, kwargs, True, isinstance(found, LaplacePosterior))
            states = getattr(whole, "states", ())  # none of a fit that has failed
            several = len(states) > 1
            if together and len(states) == 1:  # the integral from one mode of all may hold what others do inside
                missing = float(found.log_evidence - whole.log_evidence) - math.log1p(-others)
                several = missing < whole.integral.error
            if several and whole._trusts_weights:
                fit, found, others = other, whole, 0.0
        if others > LEAST_SHARE and not (found._mirrors or fit._has_labels(found.state)):  # which are counted
            vars(found)["failures"] = (*found.failures, OTHERS.format(others))  # what it has computed is kept
        if automatic and type(found) is NotAMode:
            fit, found = self._beside_merging(fit, found, args, kwargs)
        vars(self).update(vars(fit) | {"_is_second": False})
        if isinstance(found, Exception):
            raise found
        return found

    def _beside_merging(self, fit: Any, error: Exception, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The fit with one number more marginalised, where one mode inside may be left given that; else as it was.

        Modes inside merge along the direction in which their density is flattest: the number that moves most is first.
        """
        if fit._full is None or not fit._fits:
            return fit, error
        state = without_repeats(fit._fits)[0].state.laplace
        latents, way = state.problem.joint.latents, state.precision.least_precise_direction(state.problem.active)[0]
        numbers = {part.name: float(way[latents.slices[part.name]].abs()) for part in latents if part.size == 1}
        order = sorted(numbers, key=numbers.__getitem__, reverse=True)
        for site in order[:NUM_TRIED] if len(latents.names) > 1 else ():  # else nothing would be left inside
            other, found = self._attempt(args, kwargs, False, True, {"_more": (site,)})
            if not isinstance(found, Exception):
                return other, found
        return fit, error

    def _attempt(
        self, args: Any, kwargs: Any, seeks_all_modes: bool | None, is_second: bool = False, more: Any = None
    ) -> Any:
        """A copy of this engine that has fitted, and its posterior, or why there is none.

        :param seeks_all_modes: None: where modes have images.
        :param more: other values of its attributes.
        """
        other = copy.copy(self)
        vars(other).update({"_seeks_all_modes": seeks_all_modes, "_is_second": is_second} | (more or {}))
        try:
            return other, other._fitted(args, kwargs)
        except (ArithmeticError, NotConverged) as error:
            return other, error

    def _is_network(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether what is inside, around marginalised sites, is predicted by tangents, since its draws are wild."""
        inside = copy.copy(self)
        inside._seeks_all_modes = False
        return inside._problem(args, kwargs).curvature is gauss_newton

    def _may_have_more_modes(self, found: LaplacePosterior | Exception, automatic: bool) -> bool:
        """Whether a fit of what is inside may miss modes: there are other orders, or weights are not alike."""
        if not self._is_small or isinstance(found, NotConverged):
            return False
        if isinstance(found, Exception):
            ends = {Status.CONVERGED, Status.STUCK} if type(found) is NotAMode else {Status.CONVERGED}
            lacks_integral = any(fit.status in ends for fit in self._fits)  # stuck where modes inside merge
            return (automatic and (self._in_blocks or lacks_integral)) or self._has_labels(None)
        left_out = found._left_out if self._in_blocks and self.nodes is None else None
        doubtful = left_out is not None and (left_out.is_doubtful or left_out.num_shared == len(found.state.u))
        return automatic and (self._has_labels(found.state) or doubtful)

    def _share_of_others(self, found: LaplacePosterior | Exception) -> float:
        """Share of the mass inside, by Laplace, of modes but the highest, given the marginalised sites at their own.

        Or of the heaviest of a few, at the nodes of these: it may be where they are not at their mode.  Modes are
        those of a tour, where one can be paid for; else those that restarts have reached.
        """
        if isinstance(found, Exception) or self._full is None or self._in_blocks or self.start.tour == 0:
            return 0.0
        modes = tuple(fit.state.laplace for fit in without_repeats(self._fits))
        if can_tour(modes[0]):
            modes, _ = tour(modes[0], self.start.tour, seed_of(self.start.seed))
        heights = torch.stack([mode.log_evidence for mode in modes])
        elsewhere = found.share_of(modes[:FEW_OTHERS]) if len(modes) > 1 and hasattr(found, "share_of") else 0.0
        return max(elsewhere, 1.0 - float(heights.log_softmax(0).max().exp()))

    def _has_labels(self, state: LaplaceState | None) -> bool:
        """Whether what looks alike has other orders, half a standard deviation or more from the mode.

        :param state: None: of a fit that has failed.
        """
        if self._full is None or self._in_blocks:
            return False
        joint = self._full.joint
        place, whiten = (joint.initial_u, None) if state is None else (state.u, state.precision.whiten)
        with own_random_numbers(), without_validation():
            return has_other_orders(joint, place, whiten)

    def _fitted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LaplacePosterior:
        """Modes at the first hyperparameters, hyperparameters of the highest log evidence, posterior."""
        with self._causes_named(partial(LogJoint, self.model, args, kwargs, maximise=self.maximise)):
            self._start(args, kwargs)
            best = self._maximise()
            if not is_certified(best.state.laplace):
                self._start(args, kwargs, factors=False)
                best = self._maximise()
            return self._checked(best)

    @contextmanager
    def _causes_named(self, joint: Callable[[], LogJoint] | None) -> Iterator[None]:
        """Inside, a fit that fails for constant targets says so, where a latent site sets their noise.

        And one that finds no mode says which scales ``marginalise`` has left to one, if any, or that it may be rounding
        in single precision.

        :param joint: makes the log joint of all sites; None where all have been looked at.
        """
        self._constant: Constant | None = None
        try:
            yield
        except ArithmeticError as error:
            if self._constant is not None:
                said = constant_targets(self._constant, "give it a prior that has no mass near 0, such as LogNormal")
                raise BadInput(f"{said} The fit has ended so: {error}") from error
            if joint is None:
                raise
            whole, given = joint(), list(self.marginalise or ())
            left = () if self.marginalise is None else sorted({*marginalised_sites(whole, None)} - {*given})
            value = whole.log_joint(whole.initial_u.requires_grad_(), whole.initial_theta)
            jumping = sorted(CORNERS & operations(value))
            if left:
                cause = (
                    f"marginalise={given or ()} leaves {left} to a mode of the joint density, which a scale and what "
                    "it scales may not have: the density grows without bound where both vanish. Leave marginalise "
                    "out, and they are integrated numerically."
                )
            elif jumping:
                cause = (
                    f"the model computes with torch's {', '.join(jumping)}, whose slope jumps: modes lie where it "
                    "does, or units of a network that see the same data trade their weights at no cost, so that there "
                    "is no curvature for Laplace's approximation. Take a smooth relative: softplus or tanh for relu, "
                    "torch.logaddexp for maximum."
                )
            elif not (cause := "" if "double precision" in str(error) else double_precision(whole).rstrip()):
                raise
            raise type(error)(f"{cause} The fit has ended so: {error}") from error

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, factors: bool = True) -> None:
        """The modes at the hyperparameters that the model begins with.

        :param factors: whether the precision may be assembled from the density's factors or linear predictors; at the
            first mode two products with the true Hessian say whether these factors are all.
        """
        problem = self._problem(args, kwargs)
        self._search(problem if factors else problem.made_dense)
        if factors and problem.factors is not None and not is_certified(self._fits[0].state.laplace):
            return self._start(args, kwargs, factors=False)
        self._data = (args, kwargs)

    def _require_varied(self, joint: LogJoint) -> None:
        """Refuse constant targets where their noise is a hyperparameter; keep them where a latent site sets it.

        :raises BadInput: naming the site.
        """
        if joint.constant is not None and joint.finds_noise:
            raise constant_targets(joint.constant)
        self._constant = joint.constant if joint.has_latent_noise else None

    def _problem(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Problem:
        """The density to approximate: of all latents, or of those inside, given the marginalised sites."""
        given: Any = {"maximise": self.maximise, "values": self.start.values}
        joint = LogJoint(self.model, args, kwargs, **given)
        self._require_varied(joint)
        joint.initial_theta = off_orbits(joint)
        ends = any(not is_affine(p.transform) for p in joint.latents)  # as of a scale, which is integrated
        structure = (unread if ends else recognise)(joint, factors=self.curvature in (None, exact_hessian))
        whole = problem_of(joint, structure, self.curvature or exact_hessian)
        inside = self._multipliers(whole)
        own = self._bounded_blocks(whole) if ends and not inside else ()
        linear = None if ends else structure.linear  # of weights under Gaussian priors alone, of which none multiplies
        none = self.marginalise is None and linear is not None and linear.gaussian
        sites = () if none else marginalised_sites(joint, self.marginalise, inside, own)
        inside = inside or own
        latents, others = joint.latents.slices.keys(), {*sites, *self._more}
        shared = others | (latents & self._outside)
        marginalise = tuple(sorted(shared if self.marginalise is None and latents - shared else others))
        self._is_small = joint.latents.size <= MOST_COORDINATES
        sought = self._seeks_all_modes
        together = self._is_small and (bool(sought) if inside else sought is not False and bool(marginalise))
        self._has_all_modes = together and (bool(sought) or has_images(joint) or has_labels_beside(joint, marginalise))
        if self._has_all_modes:
            marginalise = inside = ()
        self._in_blocks = bool(inside)
        if self.nodes is None:
            self._num_nodes = 1 if not inside else NODES_OF_CURVED if own else NODES
        self._full, self._integrated, self._groups = None, {}, None
        if marginalise:
            conditional = MarginalisedJoint(self.model, args, kwargs, marginalise=marginalise, **given)
            conditional.initial_theta = off_orbits(conditional)
            problem = marginalised_problem(conditional, self.curvature)
            self._full = replace(whole, curvature=problem.curvature)
        else:
            problem = problem_of(joint, structure, self.curvature)
        of = problem.joint, problem.structure
        if self._num_nodes != 1 and not isinstance(all_blocks(*of), Partition):
            raise no_blocks(*of, f"nodes={self._num_nodes!r}")
        return problem

    def _multipliers(self, problem: Problem) -> tuple[str, ...]:
        """The sites that multiply those of another plate, where one of these can be integrated block by block."""
        inside = problem.structure.multipliers if self.curvature in (None, exact_hessian) else ()
        return inside if inside and isinstance(all_blocks(problem.joint, problem.structure), Partition) else ()

    def _bounded_blocks(self, problem: Problem) -> tuple[str, ...]:
        """Sites of several elements with an end of their range, such as rates or scales, each of which is a block.

        Logs of positive latents are far from normal, and each has a Jacobian: together these move the joint mode away
        from what all blocks share.  Not where the prior of another latent has them: what is scaled has no mode beside
        an integral over its scale, and none together with it.
        """
        latents = problem.joint.latents
        has_any = any(p.size > 1 and not is_affine(p.transform) for p in latents)
        if not has_any or self.marginalise is not None or self.nodes == 1 or self.curvature is not None:
            return ()
        blocks = all_blocks(problem.joint, problem.structure)
        if not isinstance(blocks, Partition):
            return ()
        alone = torch.zeros(latents.size, dtype=torch.bool)
        for front in blocks.fronts:
            alone[front.flatten().cpu()] = front.shape[-1] == 1
        alone &= latents.curved
        for name, touched in blocks.touched.items():
            if name in latents.slices:
                own, other = latents.slices[name], touched[touched >= 0].cpu()
                alone[other[(other < own.start) | (other >= own.stop)]] = False
        return tuple(p.name for p in latents if p.size > 1 and bool(alone[latents.slices[p.name]].all()))

    def _search(self, problem: Problem) -> None:
        """The distinct modes from all starts; those of a network with hyperparameters that have warmed up."""
        num, seed = self.start.number(laplace_restarts.automatic(problem)), seed_of(self.start.seed)
        problem, places = rescaled_start(problem, starts(problem.joint, num, seed))
        theta = problem.joint.initial_theta
        if self._in_blocks and self._num_nodes != 1:  # what is highest around their joint mode is elsewhere
            integrated = replace(problem, nodes=numbers_of_nodes(self._num_nodes)[0])
            slope = partial(problem.density.gradient, theta=theta)
            places = lbfgs.from_far(slope, places, problem.limits.slack)  # whose steps are cheaper
            found = [partial(laplace_state, integrated, theta, place) for place in places]
            self._found = laplace_restarts.distinct_modes(found)
        elif problem.structure.network is not None and can_batch(problem):
            self._found = laplace_restarts.search_in_batch(problem, places, theta)
        elif num > 1 and (laplace_restarts.has_params_alone(problem.joint) or self.start.restarts is not None):
            self._found = laplace_restarts.search_apart(problem, places, thetas(problem.joint, num, seed))
        else:
            self._found = search(problem, places, theta, self.stop.progress)
        states = [type2.type2_state(state) for state in self._found.states]
        inside = isinstance(problem.joint, MarginalisedJoint) and bool(problem.joint.is_marginalised.all())
        if inside and len(states) == 1 and not (self._num_nodes == 1 and is_batched(problem)):
            states[0] = replace(states[0], enough=type2.SHARP)  # what is integrated has its curvature there anyway
        self._fits = self._begun = tuple(Fit(state, Status.BY_HAND, (state.objective,)) for state in states)

    def _maximise(self) -> Fit[TypeII]:
        """Every distinct mode to its own hyperparameters: together as far as that goes, then one by one; the best."""
        if len(self._fits) > 1 and not self._in_blocks and can_batch(self._fits[0].state.laplace.problem):
            self._fits = type2.climb(self._fits, self.stop)
        for i, fit in enumerate(self._fits):
            fit = iterate(type2.step, fit.state, self.stop, "LaplaceEvidence", before=fit.objectives)
            self._fits = (*self._fits[:i], fit, *self._fits[i + 1 :])
            if fit.status is Status.INTERRUPTED:
                break
        best = without_repeats(self._fits)[0]
        while best.status is Status.CONVERGED and (off := type2.off_saddle(best.state)) is not None:
            before = (*best.objectives, off.objective)
            left = iterate(type2.step, off, self.stop, "LaplaceEvidence", before=before)
            self._fits = tuple(left if fit is best else fit for fit in self._fits)
            best = without_repeats(self._fits)[0]
        if best.status is Status.CONVERGED and type2.has_symmetric_params(best.state):
            self._fits, self._begun = self._parted(best)
        return without_repeats(self._fits)[0]

    def _parted(self, best: Fit[TypeII]) -> tuple[tuple[Fit[TypeII], ...], tuple[Fit[TypeII], ...]]:
        """The fits and where they began, with those from params that begin apart, where one of these ends higher."""
        joint, seed = best.state.laplace.problem.joint, seed_of(self.start.seed)
        theta = laplace_restarts.thetas(joint, laplace_restarts.SEVERAL, seed)[1:]
        places = starts(joint, len(theta), seed)
        begun: tuple[Fit[TypeII], ...] = ()
        with suppress(ArithmeticError):  # none of them has a mode
            found = laplace_restarts.search_apart(self._begun[0].state.laplace.problem, places, theta).states
            states = [type2.type2_state(state) for state in found]
            begun = tuple(Fit(state, Status.BY_HAND, (state.objective,)) for state in states)
        fits = [iterate(type2.step, fit.state, self.stop, "LaplaceEvidence", before=fit.objectives) for fit in begun]
        if without_repeats([best, *fits])[0] is best:
            return self._fits, self._begun
        return (*self._fits, *fits), (*self._begun, *begun)

    def _checked(self, best: Fit[TypeII]) -> LaplacePosterior:
        """The posterior, where it is one, and the search has converged; blocks integrated where ``nodes`` asks."""
        if self._is_second and best.status is not Status.CONVERGED:
            raise NotConverged(best.status.value, None)
        ended = best.status in (Status.UNBOUNDED, Status.STUCK, Status.CONVERGED)
        if ended and self._full is not None:  # first, since far out the density is rounding
            endless = type2.endless(best.state, self._full.joint.latents.names)
            if endless is not None:
                raise endless
        moved = len(best.objectives) > 1 or best.state.laplace.problem.joint.dtype is not torch.float64
        if moved and best.status not in (Status.UNBOUNDED, Status.SINGULAR):  # else standard deviations mean nothing
            require_proper(best.state.laplace)
        if best.status is Status.STUCK and self._full is not None:
            require_no_jump(self._full.around(*whole_place(self._full.joint, best.state.laplace)))
        if self._num_nodes != 1 and not (self._in_blocks and isinstance(self._num_nodes, int)):
            pairs = zip(self._fits, self._begun, strict=True)
            self._fits = tuple(refined(fit, begun, self._num_nodes, self.stop) for fit, begun in pairs)
        posterior = self.posterior
        if self._full is not None:  # no search has climbed slopes in what is integrated numerically
            require_own_slopes(self._full.unread.around(posterior.state.u, posterior.state.theta))
        reached = {n: v.reshape(-1)[:SHOWN].tolist() for n, v in list(posterior.hyperparameters.items())[:SHOWN]}
        detail = f". Hyperparameters reached, at most {SHOWN} elements of each: {reached}"
        require_convergence("LaplaceEvidence", Status(posterior.status), posterior, self.stop, detail)
        return posterior

    def _with_more_marginalised(self, posterior: LaplacePosterior, barred: Set[str] = frozenset()) -> LaplacePosterior:
        """The fit with further sites marginalised, one at a time, as long as more draws keep their weight by that.

        Any more, where the log evidence is no number without.  The search for the mode of one more goes on from where
        those are, in no more steps than theirs took: where Laplace's evidence inside has no maximum, as where modes
        inside merge, it would climb for long.

        :param barred: sites that gain nothing, and are not tried beside others.
        """
        if self._data is None:
            return posterior
        least = 0.0 if posterior._trusts_weights is False else GAIN
        for site in (name for name in posterior.candidate_hyperparameters if name not in barred):
            begun = {n: posterior.mode[n] for n in (*posterior.marginalised_sites, site)}
            start = replace(self.start, values={**(self.start.values or {}), **begun})
            stop = replace(self.stop, num_steps=len(posterior.log_evidences)) if len(begun) > 1 else self.stop
            more = {"_more": (*self._more, site), "start": start, "stop": stop}
            fit, found = self._attempt(*self._data, False, True, more)
            if not isinstance(found, Exception) and found.relative_ess > posterior.relative_ess + least:
                vars(self).update(vars(fit) | {"start": self.start, "stop": self.stop, "_is_second": False})
                return self._with_more_marginalised(found, barred)
            barred |= {site}
        return posterior

    def run_chunks(self, chunks: Chunks, *, local: Sequence[str] | None = None) -> LaplacePosterior:
        """Fit to data of which a chunk of rows is in memory at a time: the fit that :meth:`run` makes of all rows.

        For models whose observed sites see the latents through linear predictors, such as generalised linear ones,
        whatever their priors and hyperparameters: value, slope, curvature and the evidence's exact gradient are sums
        over a pass.  A fit takes four to six passes for each step of the hyperparameters.  The prior must not depend
        on the rows; params begin where the first chunk has them.  The posterior keeps none of the data: what needs
        them asks for them, and importance sampling goes through the chunks once more.

        And for any model of independent groups of which each lies whole in one chunk: sites that a chunk has for its
        own groups alone are eliminated there, and what is summed is the Schur complement of the others.  The
        posterior has the groups of all chunks, among several processes those of one's own.

        :param chunks: tuples of the model's positional arguments, such as ``Slices(X, t, size=100_000)`` of
            :mod:`pyro_evidence.data`, a list, or a ``DataLoader`` that does not shuffle; gone through once a pass.
        :param local: the sites of groups; ``()`` for none.  None: those of which other chunks have another number.
        :raises BadInput: for what can be gone through only once, in addition to what :meth:`run` raises.
        :raises UnsupportedModel: for models of neither kind, and for sites to be integrated around Laplace.
        """
        if self.nodes not in (None, 1):
            raise UnsupportedModel(f"nodes={self.nodes} integrates blocks of rows; expected nodes=1, or run(...).")
        joining = COMMUNICATOR.get()
        make = partial(LogJoint, self.model, maximise=self.maximise, values=self.start.values)
        first = first_joint(self.model, chunks, joining, make)
        sites = local_sites(first, chunks, joining, local)
        self._full, self._integrated, self._groups = None, {}, None
        first.initial_theta = off_orbits(first)
        outside = marginalised_sites(first, self.marginalise)
        if outside:
            raise UnsupportedModel(
                f"site(s) {', '.join(outside)} set the spread of others and are integrated numerically around Laplace, "
                f"for which all rows must be at hand: pass them to run(...). Or pass maximise={list(outside)} to "
                "maximise them, or, in groups that lie whole in one chunk, marginalise=() for one Gaussian over all."
            )
        with self._causes_named(None):
            if sites:
                problem = self._of_groups(chunks, first, sites)
            else:
                rows = linear_rows(self.model, chunks, joining, make, first)
                self._require_varied(rows.joint)
                problem = problem_of(rows.joint, streamed_structure(rows), self.curvature or exact_hessian)
            self._search(problem)
            self._data = None
            return self._checked(self._maximise())

    def _of_groups(self, chunks: Chunks, first: LogJoint, own: tuple[str, ...]) -> Problem:
        """The problem of what all groups share, the groups' ``own`` sites eliminated.

        :raises UnsupportedModel: for another curvature than the exact one, and where blocks are to be integrated.
        """
        if self.curvature not in (None, exact_hessian):
            raise UnsupportedModel(f"curvature={self.curvature} beside groups in chunks; expected exact_hessian.")
        model = self.model
        if len(own) == len(first.latents.names):  # groups share hyperparameters only
            model = with_dummy_site(model, torch.zeros((), dtype=first.dtype, device=first.device))
        make = partial(LogJoint, model, maximise=self.maximise, values=self.start.values)
        first = first if model is self.model else make(first.args)
        if self.nodes is None:
            problem = laplace_problem(first, exact_hessian)
            several, bounded = self._multipliers(problem), self._bounded_blocks(problem)
            if several or bounded:
                cause = "multiply those of another plate" if several else "have an end of their range"
                raise UnsupportedModel(
                    f"site(s) {', '.join(several or bounded)} {cause}, for which run(...) takes "
                    f"nodes={NODES if several else NODES_OF_CURVED}, with all rows at hand. Pass nodes=1 for Laplace "
                    "in chunks, which run(...) with nodes=1 makes too."
                )
        self._groups = group_rows(self.model, chunks, COMMUNICATOR.get(), make, first, own)
        self._require_varied(first)
        return problem_of(self._groups.prior, self._groups.structure, exact_hessian)

    def step(self, *args: Any, **kwargs: Any) -> float:
        """One step of the hyperparameters from the best mode, as ``SVI.step``; the first call starts, other data anew.

        :return: minus the log evidence (plus log hyperprior, where sites are maximised), nats.
        """
        if self._data is None or not same_arguments(self._data, (args, kwargs)):
            self._start(args, kwargs)
            self._fits = self._fits[:1]
            if self._num_nodes != 1 and not self._in_blocks:
                self._fits = (with_nodes(self._fits[0], self._num_nodes),)
        else:
            fit = self._fits[0]
            state = type2.step(fit.state) if fit.state.gradient_norm else fit.state
            self._fits = (Fit(state, Status.BY_HAND, (*fit.objectives, state.objective)),)
        return -self._fits[0].state.objective

    @property
    def posterior(self) -> Any:
        """The posterior at the best state so far; over structures, where the model has structure sites.

        :raises BadInput: before the first ``run`` or ``step``.
        """
        if self._over is not None:
            return self._over
        return self._of(1)[0]

    @property
    def posteriors(self) -> tuple[LaplacePosterior, ...]:
        """One posterior per distinct mode, the best first: what :func:`committee` takes.

        :raises BadInput: before the first ``run`` or ``step``.
        """
        return self._of(None)

    def _of(self, most: int | None) -> tuple[LaplacePosterior, ...]:
        """Posteriors of the best modes; marginalised sites are integrated around these alone, once for each fit."""
        if self._found is None:
            raise BadInput(NOT_FITTED)
        ranked = without_repeats(self._fits)
        apart = [f.status in NO_MAXIMUM and f.status is not ranked[0].status for f in self._fits]  # no modes to count
        tops, ends = ([f.state.laplace for f in fits] for fits in (ranked, self._fits))
        modes = [next((top for top in tops if same_height(top, end, LEVEL)), end) for end in ends]
        pairs = zip(modes, apart, strict=True)
        heights = [math.nan if no_mode else float(mode.log_evidence) for mode, no_mode in pairs] + [math.nan]
        index = torch.where(self._found.reached < len(self._fits), self._found.reached, -1)
        restarts = torch.tensor(heights, dtype=torch.float64)[index]
        failures = (*self._found.failures, *(f"no maximum: {f.status.value}" for f in compress(self._fits, apart)))
        posteriors = []
        for fit in ranked[:most]:
            state = fit.state.laplace
            found = LaplacePosterior(state, fit.status.value, fit.objectives, restarts, failures)
            if self._groups is not None:
                found = results.with_groups(self._groups, found)
            looks = most == 1 and self.start.tour != 0 and fit.status is Status.CONVERGED
            if self._full is None and not (looks and can_tour(state)):
                posteriors.append(found)
                continue
            if id(fit) not in self._integrated and self._full is not None:
                self._integrated[id(fit)] = results.integrated(self._full, fit, self.stop.quadrature_tol, found)
            elif id(fit) not in self._integrated:
                self._integrated[id(fit)] = results.toured(found, self.start.tour, seed_of(self.start.seed))
            posteriors.append(self._integrated[id(fit)])
        return tuple(posteriors)
