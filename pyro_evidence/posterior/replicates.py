"""Fits of :class:`~pyro_evidence.infer.laplace_evidence.LaplaceEvidence` to many data sets as one batch."""

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.fitting.iterate import Status
from pyro_evidence.laplace.approximation import LaplaceState, Problem
from pyro_evidence.laplace.mode_checks import is_proper
from pyro_evidence.laplace.quadratics import NUM_SAMPLES, LogJoints, QuadraticDensity, Quadratics, power_sums
from pyro_evidence.laplace.replicates import Columns, Maxima, Replicates, maxima
from pyro_evidence.laplace.restarts import can_tour
from pyro_evidence.nested.hyperparameter_modes import ENDLESS, all_prior_draws, other_places
from pyro_evidence.nested.inner import MarginalisedJoint, solve_inner
from pyro_evidence.nested.integration import (
    NodeProducts,
    OuterMode,
    Settled,
    by_product,
    followed,
    log_volume_of,
    settled,
)
from pyro_evidence.nested.joint_posterior import whole_state
from pyro_evidence.numerics.batched import BATCH_BYTES, SingularIsNan
from pyro_evidence.numerics.coordinates import is_identity
from pyro_evidence.numerics.derivatives import are_equal
from pyro_evidence.numerics.line_search import lead_uphill
from pyro_evidence.numerics.quadrature import rules
from pyro_evidence.numerics.quadrature.reparameterise import Standardisation, standardising
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.nested import NestedPosterior
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.precision.dense import Dense
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.settings import Start
from pyro_evidence.structure.density import AutogradDensity
from pyro_evidence.structure.factors import SMALL
from pyro_evidence.structure.recognise import Structure


def replicate_integrals(
    problem: Problem, modes: Maxima, drawn: Tensor, tolerance: float, known: Quadratics | None
) -> tuple[Standardisation, Settled]:
    """The integrals of many data sets around the modes of the marginalised sites, which are all that is outside.

    :param problem: of replicates.
    :param known: their log joints, where these are quadratic in the latents.
    :param drawn: places at which other modes are looked for, ``(S, d)``, those of the prior.
    :param tolerance: of the log evidence, nats.
    :return: their charts, rows in front; and by how many nodes they have settled, around the one mode that counts.
    """
    theta, d, joint = modes.theta, modes.precision.shape[-1], problem.joint
    assert isinstance(joint, Replicates)

    def log_density(rows: Tensor, phi: Tensor) -> Tensor:
        """Log density of marginalised coordinates ``(r, K, d)`` of some data sets, -inf where no mode is found."""
        numbers = theta[rows, -1]
        if known is not None:
            return known.log_evidence(numbers, phi) + joint.log_hyperpriors(numbers, phi)
        places = torch.cat([phi, numbers[:, None, None].expand(-1, phi.shape[1], 1)], -1)
        assert modes.rows is not None and modes.follows is not None
        start = followed(modes.rows.u[rows, None], modes.follows[rows], phi - gaussian.centre[rows]).flatten(0, 1)
        return solve_inner(problem, places.flatten(0, 1), start, searches=1).log_density.reshape(phi.shape[:2])

    eye = torch.eye(d).to(theta)
    gaussian = standardising(theta[:, None, :-1], torch.where(modes.found[:, None, None], modes.precision, eye))
    every = torch.arange(len(theta), device=theta.device)
    profile = log_density(every, gaussian.probes()).nan_to_num(nan=-torch.inf)
    drawn = drawn.expand(len(theta), -1, -1)
    elsewhere = other_places(gaussian, profile, drawn, log_density(every, drawn))
    if d > 1 and bool(elsewhere.any()):
        row, place = elsewhere.nonzero(as_tuple=True)
        far, top = torch.cat([gaussian.probes(), drawn], 1)[row, place], gaussian.centre[row, 0]

        def height(way: Tensor) -> Tensor:
            return log_density(row.repeat(len(way) // len(row)), way.unsqueeze(1)).squeeze(1)

        elsewhere[row, place] = ~lead_uphill(height, far, top)
    sound = modes.found & ~elsewhere.any(-1) & (gaussian.basis.norm(dim=1).amax(-1) <= ENDLESS)
    where = gaussian.skewed(profile)

    def product(rows: Tensor, num: int) -> NodeProducts:
        axis = rules.gauss_hermite(num, rows.device)
        rule, (phi, log_slope) = rules.product(axis, d), where.rows(rows).on_product(axis.nodes)
        log_mass = log_density(rows, phi) + log_slope + log_volume_of(rule)
        log_evidence, weights = log_mass.logsumexp(-1), log_mass.softmax(-1).unsqueeze(-1)
        mean = (weights * phi).sum(1)
        sd = (weights * (phi - mean.unsqueeze(1)).square()).sum(1).sqrt()
        log_ratio = (log_mass - rule.log_weights - log_evidence.unsqueeze(-1)).reshape(-1, *[num] * d)
        return NodeProducts(log_evidence, mean, sd, log_ratio)

    return where, settled(product, sound, d, tolerance)


REFUSALS = (ArithmeticError, ValueError, RuntimeError, TypeError, IndexError, NotImplementedError)  # of a batch
FEWEST = 8  # data sets, of which up to three are fitted by themselves: fewer are no batch
FEWEST_AT_ONCE = 16  # data sets in one run of the model: fewer gain less by that than by their structure, alone
TOGETHER = 2  # times as many of known log joints, whose searches run no model
SAME = 1e-8  # relative difference between a log evidence by itself and in the batch: rounding, and how a search ends


def examples(num: int) -> list[int]:
    """Which of some data sets are looked at by themselves."""
    return sorted({0, num // 2, num - 1})


@dataclass(frozen=True, eq=False)
class Batch:
    """Fits that were made together.

    :ivar log_evidences: nats, by the numbers of the data sets.
    :ivar posterior: of one of these.
    """

    log_evidences: Mapping[int, float]
    posterior: Callable[[int], LaplacePosterior]


EMPTY = Batch({}, dict[int, LaplacePosterior]().__getitem__)


def together(
    columns: Callable[[LogJoint], Columns],
    num: int,
    alone: Callable[[int], LaplacePosterior | None],
    start: Start,
    tolerance: float,
    program: Model | None = None,
) -> Batch:
    """Fits of those data sets, of one shape, which a batch has found without doubt.

    The model is recognised once.  What is left out is to be fitted by itself.

    :param columns: makes the arguments of all ``num`` of them, each stacked, from the log joint of one.
    :param alone: the fit of one of them by itself, None where there is none.  It says how a batch is made, which must
        agree with it; two that are alike say so where log joints are not quadratic in the latents, of which each data
        set's is checked against the model.
    :param start: of the engine that has fitted these.
    :param tolerance: of integrals over marginalised sites, nats.
    :param program: of the data sets' arguments, where it is not that of these fits; of log evidences alone.
    """
    plain = dict[int, LaplacePosterior]()
    for k in reversed(examples(num)) if num >= FEWEST else ():
        posterior = alone(k)
        if posterior is None or not can_be_batched(posterior, start):
            continue
        plain[k] = posterior
        agreeing = {i: other for i, other in plain.items() if _alike(posterior, other)}
        inside = posterior._inside.problem.joint
        try:
            joint = Replicates(inside.inside(lambda model: SingularIsNan()(program or model)), columns(inside), num)
            found = _in_chunks(agreeing, joint, tolerance)
        except REFUSALS:
            return EMPTY  # a model need not bear that its data are rows of a batch
        both = [
            (found.log_evidences[i], float(agreeing[i].log_evidence)) for i in agreeing & found.log_evidences.keys()
        ]
        if both:
            return found if all(agreed(*pair) for pair in both) else EMPTY
    return EMPTY


def agreed(log_evidence: float, alone: float) -> bool:
    """Whether a log evidence is that of a fit by itself, but for rounding and how a search ends."""
    return abs(log_evidence - alone) <= SAME * (1.0 + abs(alone))


def can_be_batched(posterior: LaplacePosterior, start: Start) -> bool:
    """Whether a fit is one that a batch can make: of one mode, dense, by Laplace alone, its search at a maximum.

    Under proper priors, by which each data set has a mode.  Sites may be marginalised where these are all that is
    outside, by products of nodes around one mode.
    """
    if type(posterior) not in (LaplacePosterior, NestedPosterior):
        return False
    starts = posterior.restarts
    if len(starts) > 1 and not (type(posterior) is NestedPosterior and torch.allclose(starts, starts[:1], SAME, SAME)):
        return False  # whose batch looks for other modes, as no other does
    if posterior.flat_sites or posterior.status != Status.CONVERGED.value:
        return False
    problem = posterior._inside.problem
    joint = problem.joint
    if type(posterior) is NestedPosterior:
        assert isinstance(joint, MarginalisedJoint)
        found, sites = posterior.integral, [p for p in joint.latents if p.size == 1]
        ours = bool(joint.is_marginalised.all()) and not joint.discrete and found.rule == "by_product"
        if not ours or not is_proper(found.outer_mode.state.around) or not all(is_identity(p.transform) for p in sites):
            return False  # sites that more draws may want outside
    elif start.tour != 0 and can_tour(posterior.state):
        return False  # single fits look for other modes
    return (
        problem.form is None
        and problem.structure.network is None
        and problem.curvature is exact_hessian
        and bool(problem.active.all())
        and joint.latents.size <= SMALL
        and joint.dtype is torch.float64
        and joint.row_bytes is not None
        and not joint.left_out
        and not joint.homes
    )


def _alike(one: LaplacePosterior, other: LaplacePosterior) -> bool:
    """Whether two data sets begin alike and are of one structure, whose priors do not hang on the data."""
    first, second = one._inside.problem, other._inside.problem
    if isinstance(one, NestedPosterior) and isinstance(other, NestedPosterior):
        if not torch.equal(*(all_prior_draws(each.integral.outer_mode) for each in (one, other))):
            return False
    known = ({} if p.structure.groups is None else vars(p.structure.groups) for p in (first, second))
    own, others = ([x for v in of.values() for x in (v.values() if isinstance(v, dict) else [v])] for of in known)
    own, others = ([x.nan_to_num() if isinstance(x, Tensor) else x for x in of] for of in (own, others))  # no mean: nan
    begun = torch.equal(first.joint.initial_theta, second.joint.initial_theta)
    return type(one) is type(other) and begun and are_equal(own, others)


def _in_chunks(alone: Mapping[int, LaplacePosterior], joint: Replicates, tolerance: float) -> Batch:
    """Fits whose result is certain, as many data sets at a time as derivatives of their densities leave room for."""
    reference, found = next(iter(alone.values())), dict[int, float]()
    inside = reference._inside.problem
    if joint.row_bytes is None:
        return EMPTY
    density = AutogradDensity(joint, inside.structure.likelihoods)
    problem = replace(inside, joint=joint, structure=Structure(None, inside.structure.likelihoods, None, density))
    runs = BATCH_BYTES // joint.row_bytes
    at_once = runs // joint.latents.size
    origin, told = torch.zeros_like(joint.initial_u), torch.tensor(examples(joint.num))
    made_of, drawn, start = None, None, None
    with suppress(*REFUSALS):  # a model need not bear that settings are rows beside those of data
        if runs >= NUM_SAMPLES:
            made_of = power_sums(LogJoints(joint.at_settings, at_once), reference._inside.theta, told, origin)
    if made_of is None and (len(alone) < 2 or at_once < FEWEST_AT_ONCE):
        return EMPTY
    valid = joint.in_support()
    if isinstance(reference, NestedPosterior):  # whose batch looks for other modes
        drawn = all_prior_draws(reference.integral.outer_mode)
        start = torch.stack([joint.initial_theta[:-1], *(posterior._inside.theta for posterior in alone.values())])
    chunks = list[tuple[Maxima, tuple[Standardisation, Settled] | None]]()
    num = max(at_once if made_of is None else TOGETHER * at_once, FEWEST_AT_ONCE)
    parts = torch.arange(joint.num).split(num)

    @lru_cache(maxsize=1)  # more than one would hold as much as all
    def quadratics(part: int) -> tuple[Quadratics | None, Tensor]:
        return (None, torch.ones_like(parts[part]) > 0) if made_of is None else made_of.of(parts[part])

    for part, numbers in enumerate(parts):
        known, right = quadratics(part)
        chunk, outside = maxima(problem, inside, numbers, known, start), None
        certain, values = chunk.found, chunk.log_evidence
        if drawn is not None:
            outside = replicate_integrals(problem, chunk, drawn, tolerance, known)
            certain, values = outside[1].found, outside[1].log_evidence
        sure = (certain & valid[numbers] & right).nonzero().squeeze(-1)
        found |= zip(numbers[sure].tolist(), values[sure].tolist(), strict=True)
        chunks.append((chunk, outside))
        if start is not None and len(sure):
            start[-1] = chunk.theta[sure, :-1].mean(0)

    def posterior(k: int) -> LaplacePosterior:
        known, _ = quadratics(k // num)
        return _posterior(reference, joint, *chunks[k // num], k % num, known and known.row(k % num))

    return Batch(found, posterior)


def _with_data(problem: Problem, joint: LogJoint, known: Quadratics | None = None) -> Problem:
    """The problem of another data set, whose log joint may be known."""
    likelihoods = problem.structure.likelihoods
    density = (
        AutogradDensity(joint, likelihoods) if known is None else QuadraticDensity(joint, likelihoods, known=known)
    )
    return replace(problem, joint=joint, structure=replace(problem.structure, known=None, density=density))


def _posterior(
    reference: LaplacePosterior,
    replicates: Replicates,
    chunk: Maxima,
    outside: tuple[Standardisation, Settled] | None,
    row: int,
    known: Quadratics | None,
) -> LaplacePosterior:
    """The posterior of one row of a batch, with its own data; marginalised sites by the nodes of the batch.

    :param known: its log joint, where that is quadratic in the latents.
    """
    if known is None:
        assert chunk.rows is not None and chunk.follows is not None
        rows, follows = chunk.rows[torch.tensor([row])], chunk.follows[row]
    else:
        rows = known.modes(chunk.theta[row : row + 1])
        follows = known.follows(rows)[0]
    joint, theta = replicates.of_row(rows.theta[0])
    with torch.no_grad():
        log_joint = joint.log_joint(rows.u[0], theta)
    numbers = (log_joint, Dense(rows.tril), 0.0, rows.objective[0], chunk.log_hyperprior[row], bool(rows.left_saddle))
    state = LaplaceState(_with_data(reference._inside.problem, joint, known), theta, rows.u[0], *numbers)
    ended: Any = (Status.CONVERGED.value, (state.objective,), state.log_evidence.reshape(1))
    if outside is None or not isinstance(reference, NestedPosterior):
        return LaplacePosterior(state, *ended)
    found = OuterMode(state, reference.integral.outer_mode.marginalised, chunk.precision[row], follows)
    where, nodes = outside
    integral = by_product(found, where.row(row), int(nodes.num_nodes[row]))
    integral = replace(integral, error=float(nodes.error[row]))
    full, own = reference.state.problem, copy.copy(reference.state.problem.joint)
    own.args = joint.args
    whole = whole_state(_with_data(full, own), found, integral.log_evidence)
    return NestedPosterior(whole, *ended, integral=integral)
