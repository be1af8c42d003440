"""The structure of a log joint, found by derivatives, verified near and far, never by matching names."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.numerics.batched import CACHED_NUMBERS, HELD_NUMBERS
from pyro_evidence.numerics.derivatives import Forward, are_equal, generic_directions, normal_draws
from pyro_evidence.numerics.linalg import has_room
from pyro_evidence.numerics.linear_predictor import NormalTargets, is_separable
from pyro_evidence.precision.dense import FLOAT
from pyro_evidence.program import parameters, predictors
from pyro_evidence.program.checks import tensors
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.predictors import LikelihoodTerm, Sites
from pyro_evidence.program.sites import log_prob_sum
from pyro_evidence.structure import factors, gaussian_process, groups, probes
from pyro_evidence.structure.density import (
    AutogradDensity,
    DenseLinear,
    LinearDensity,
    LinearPredictors,
)
from pyro_evidence.structure.factor_density import Structured
from pyro_evidence.structure.factor_linear import SparseLinear, SparsePredictors
from pyro_evidence.structure.factor_terms import SITES, terms_of_steps
from pyro_evidence.structure.factors import SMALL, Followed, FollowedSums, NotSparse, multipliers
from pyro_evidence.structure.gaussian_process import GaussianLatent
from pyro_evidence.structure.groups import PrecisionGroups
from pyro_evidence.structure.network import NetworkDensity
from pyro_evidence.structure.probes import NearbyPoints, TestPoint

Pair = tuple[TestPoint, TestPoint]  # a run at u = 0 and one elsewhere, at the same hyperparameters

FEW_PASSES = 32  # that are as fast as looking for the model's own design matrix
HEAVY_HESSIAN = 2**23  # bytes that one reverse pass for each coordinate writes
MANY_SITES = 16  # that observe something: where the prior is no diagonal Gaussian, one run of the model is faster
SUMS = 4  # coordinates for each sum, at least, where a dense matrix is small: a sum is a dense column
SMALL_JACOBIAN = HELD_NUMBERS  # that are never too many
MANY_COUPLED = 64  # elements of one datum that a discrete site or an event ties together
DENSER_THAN_DATA = 4  # times as many numbers as the data have: beyond that a Jacobian is mostly zeros


Known = Structured | LinearDensity | NetworkDensity  # of linear predictors also the one with a dense Gaussian prior


@dataclass(frozen=True, eq=False)
class Structure:
    """The facts about one log joint, each None where absent."""

    groups: PrecisionGroups | None  # hyperparameters that are the precision of Gaussian latents or of Gaussian noise
    likelihoods: tuple[LikelihoodTerm, ...] | None  # where observed sites see the latents, for Gauss-Newton
    known: Known | None  # the density in the cheapest form that was verified
    density: AutogradDensity  # the same by autograd, for any model
    coupled: NotSparse | None = None  # why there are no factors of few coordinates, where they were looked for
    eliminated: Callable[[Tensor, Tensor], Tensor] | None = None  # what the integral over groups elsewhere adds, (R,)

    @property
    def fastest(self) -> Known | AutogradDensity:
        """The cheapest density for rows that share their hyperparameters."""
        return self.known or self.density

    @property
    def by_rows(self) -> NetworkDensity | AutogradDensity:
        """The cheapest density for rows with hyperparameters of their own."""
        return self.network or self.density

    @property
    def linear(self) -> LinearDensity | None:
        """The density by dense linear algebra, where all predictors are linear."""
        return self.known if isinstance(self.known, LinearDensity) else None

    @property
    def latent(self) -> GaussianLatent | None:
        """The density of linear predictors whose latents have a dense Gaussian prior."""
        return self.known if isinstance(self.known, GaussianLatent) else None

    @cached_property
    def multipliers(self) -> tuple[str, ...]:
        """The sites that multiply those of another plate, such as the discriminations of items the abilities."""
        several = sum(part.size > 1 for part in self.density.joint.latents) > 1
        found = multipliers(self.density.joint) if several else ()
        return () if found and (self.predictors or self.network) else found

    @property
    def predictors(self) -> LinearPredictors | None:
        """The linear predictors, dense or sparse, where all sites are observed through these."""
        return self.factors.linear if self.factors is not None else self.linear

    @property
    def factors(self) -> Structured | None:
        """The density by factors of few coordinates, where that spares a dense matrix."""
        return self.known if isinstance(self.known, Structured) else None

    @property
    def network(self) -> NetworkDensity | None:
        """The density that a network of the model's states of itself, where that is true."""
        return self.known if isinstance(self.known, NetworkDensity) else None

    def agrees(self, u: Tensor, theta: Tensor) -> bool:
        """Whether both densities have one value and one gradient at ``(R, D)``, as they must."""
        joint = self.density.joint
        if self.known is None or not len(u) or not joint.has_data:
            return True
        (value, slope), (other, exact) = self.known.gradient(u, theta), self.density.gradient(u, theta)
        if not bool(((value - other).abs() <= joint.rounding * (1.0 + other.abs().amax())).all()):
            return False
        apart, allowed = float((slope - exact).abs().amax()), joint.rounding * (1.0 + float(exact.abs().amax()))
        if apart <= allowed:
            return True
        # rounding of the point: under a stiff prior it makes more of the gradient than a mode leaves of it
        signs = 1.0 - 2.0 * (torch.arange(u.shape[-1], device=u.device) % 2)
        step = 1e-4
        moved = (self.density.gradient(u + step * u * signs, theta)[1] - exact).abs().amax() / step
        return apart <= allowed + 64.0 * torch.finfo(joint.dtype).eps * float(moved)


class Unread(Structure):
    """The facts about a log joint, looked for when one of them is first asked for; its plain density is there."""

    def __getattr__(self, name: str) -> Any:
        """An attribute that is not there yet."""
        if name not in ("groups", "likelihoods", "known"):
            raise AttributeError(name)
        with torch.enable_grad():  # whoever asks may have switched it off
            vars(self).update(vars(recognise(self.density.joint, factors=self.look_for_factors)))
        return vars(self)[name]


def unread(joint: LogJoint, *, factors: bool) -> Structure:
    """:func:`recognise`, later."""
    found = object.__new__(Unread)
    vars(found).update(density=AutogradDensity(joint, None), look_for_factors=factors)
    return found


def recognition_error(joint: LogJoint) -> BaseException | None:
    """The error that the model raised at one of the test points; None where it ran at all of them."""
    try:
        _recognised(joint, look_for_factors=False)
    except probes.Unreadable as error:
        return error.__cause__
    return None


def recognise(joint: LogJoint, *, factors: bool = False, few: float = math.inf) -> Structure:
    """Everything that can be verified about ``joint``; a few runs of the model.

    :param factors: whether to look, in a model of many coordinates, for factors of few coordinates each.
    :param few: coordinates beyond which they are looked for, too, where rows are searched together for less by these.
    """
    try:
        return _recognised(joint, factors, few)
    except probes.Unreadable:
        return Structure(None, None, None, AutogradDensity(joint, None))


def _recognised(joint: LogJoint, look_for_factors: bool, few: float = math.inf) -> Structure:
    """The groups, where observed sites see the latents, and the cheapest density."""
    found = probes.near(joint)
    if found is None:
        return Structure(None, None, None, AutogradDensity(joint, None))
    origin, typical = found.origin, found.typical
    zeros = [n for n in joint.observed if not bool(torch.as_tensor(origin.trace.nodes[n]["value"]).any())]
    if zeros:
        factors.refuse_edges(origin, zeros)
    theta = origin.theta.detach()
    guess = groups.propose(found) if len(theta) else None
    wide: list[TestPoint | None] = [origin, origin]
    if len(theta):  # the hyperparameters far up and far down, those outside groups a little
        step = torch.ones_like(theta) if guess is None else guess.step(origin)
        wide = [probes.point_at(joint, joint.initial_u, theta + s * step) for s in (1.0, -1.0)]
    pairs = zip(wide * 2, probes.far(origin, wide), strict=True)
    far = [(base, probe) for base, probe in pairs if base is not None and probe is not None]
    settled = None if guess is None or not far else groups.settle(guess, found, far)
    read = predictors.read_sites(joint, origin.trace, origin.u)
    sites = read if read is not None and _holds(read, typical) else None

    known, coupled = _cheapest(sites, found, far, look_for_factors, few)
    linear = known.linear if isinstance(known, Structured) else known
    seen = linear or sites  # predictors may have other links than those that were read first
    likelihoods = None if seen is None else seen.likelihoods
    at_once = terms_of_steps(joint, (), typical.u, typical.theta) if look_for_factors and known is None else None
    structure = Structure(settled, likelihoods, known, AutogradDensity(joint, likelihoods, at_once), coupled)
    return structure if known is not None else _with_network(structure)


def _cheapest(
    sites: Sites | None, found: NearbyPoints, far: list[Pair], look_for_factors: bool, few: float
) -> tuple[Structured | LinearDensity | None, NotSparse | None]:
    """The density in its cheapest form that holds, and why it has no factors, where they were looked for.

    In turn: factors of few coordinates, a Gaussian process, factors of which some are wide, linear predictors.
    """
    origin, joint = found.origin, found.origin.joint
    size = joint.latents.size
    # where most latents have one dense covariance there are no factors, as a rule
    dense = predictors.covariance_sizes(joint, origin.trace)
    process = 2 * max(dense, default=0) > size
    large = look_for_factors and (size > (SMALL if process else min(few, SMALL)) or len(joint.latents.names) >= SITES)
    sparse = _factors(sites, found, far, few) if large and not process else None
    if isinstance(sparse, Structured) and not sparse.wide:
        return sparse, None
    linear = None if sites is None or not far else _linear(sites, found, far, None)
    assert linear is None or isinstance(linear, LinearDensity)
    if linear is not None and dense and not linear.gaussian:
        latent = gaussian_process.with_dense_prior(linear, origin, far)
        if latent is not None:
            return latent, sparse if isinstance(sparse, NotSparse) else None
    if large and process:
        sparse = _factors(sites, found, far, few)
    elif large and sparse is None and linear is not None and not linear.gaussian and linear.W is None:
        # a prior without a closed form, as of fields that sum to zero, takes a dense Hessian at each step
        summed = _factors_of_sums(sites, found, far)
        sparse = summed if summed is not None and SUMS * len(summed.B) <= size else None
    elif look_for_factors and sparse is None and linear is None and size * origin.kept.num_bytes > HEAVY_HESSIAN:
        narrow = _followed(sites, found, [])
        sparse = narrow if isinstance(narrow, Structured) and not narrow.wide else None
    return (sparse, None) if isinstance(sparse, Structured) else (linear, sparse)


def _factors(sites: Sites | None, found: NearbyPoints, far: list[Pair], few: float) -> Structured | NotSparse | None:
    """The density by its factors, those of linear predictors joined where there are any; or why not.

    Wide terms that see their coordinates through a few sums only are factors of these sums.
    """
    joint, typical, size = found.origin.joint, found.typical, found.origin.joint.latents.size
    factors.require_room(joint, found.origin.kept.num_bytes)
    density = _followed(sites, found, far)
    if size <= SMALL:
        known = density if isinstance(density, Structured) else None
        if known is None or known.terms is not None:
            return known
        if known.linear is not None:
            light = known.linear.is_light and known.linear.is_quadratic(typical.trace)
        else:  # a dense Hessian takes one pass for each coordinate, which is fast where those of some nodes are cached
            light = size * found.origin.kept.num_bytes <= CACHED_NUMBERS
            light = light or 2 * known.second_of(known.differentiated).num_passes > size
        return known if size > few and known.takes_rows and not light else None
    if isinstance(density, Structured) and not density.wide:
        return density
    return _factors_of_sums(sites, found, far) or density


def _factors_of_sums(sites: Sites | None, found: NearbyPoints, far: list[Pair]) -> Structured | None:
    """The density by factors of coordinates and of a few sums of them."""
    joint, typical = found.origin.joint, found.typical
    summed = factors.followed_sums(joint, typical.u, typical.theta.detach())
    if summed is None:
        return None
    linear = None if sites is None or not far or joint.discrete else _linear(sites, found, far, summed)
    assert linear is None or isinstance(linear, SparsePredictors)
    return factors.with_sums(summed, linear)


def _followed(sites: Sites | None, found: NearbyPoints, far: list[Pair]) -> Structured | NotSparse:
    """The density by the factors that two derivatives find, or why not.

    :param far: where linear predictors are verified, so that their factors are joined; empty for none.
    """
    typical = found.typical
    followed = factors.followed_terms(
        found.origin.joint, typical.u, typical.theta, () if sites is None else sites.likelihoods
    )
    if not isinstance(followed, Followed):
        return followed
    linear = None if sites is None or not far else _linear(sites, found, far, followed)
    assert linear is None or isinstance(linear, SparsePredictors)
    return factors.structured(followed, linear)


def _with_network(structure: Structure) -> Structure:
    """With what a network within the model's reach says of itself, if it says the truth at three random places."""
    joint = structure.density.joint
    sizes = [joint.latents.size, joint.hypers.size]
    u, move = normal_draws(3, sum(sizes)).to(joint.device).split(sizes, -1)
    for network in parameters.submodules(joint.model):
        tell: Callable[[LogJoint], NetworkDensity | None] | None = getattr(network, "known_density", None)
        known = None if tell is None else tell(joint)  # the density that a network believes ``joint`` to be
        if known is not None:
            found = replace(structure, known=known)
            if found.agrees(u, joint.initial_theta + move):
                return found
    return structure


def _holds(sites: Sites, probe: TestPoint) -> bool:
    """Whether prior, likelihoods and the rest add up to the log joint, and the layouts say what couples."""
    joint, trace = probe.joint, probe.trace
    if any(likelihood.layout.num_coupled > max(MANY_COUPLED, joint.latents.size) for likelihood in sites.likelihoods):
        return False  # each takes a pass, and the density itself has fewer second derivatives
    try:
        etas = [likelihood.predictor(trace).detach().unsqueeze(0) for likelihood in sites.likelihoods]
        values = [
            likelihood.log_likelihood(trace)(eta)[0] for likelihood, eta in zip(sites.likelihoods, etas, strict=True)
        ]
        if any(predictors.depends(value, probe.u) for value in values):  # the likelihood sees eta alone
            return False
        _, log_det = joint.latents.constrained_with_log_det(probe.u.detach().to(joint.dtype))
        prior = log_prob_sum(trace, (*joint.latents.names, *sites.free)) + log_det
        return bool(joint.are_level(prior + sum(values), probe.log_joint)) and all(
            is_separable(
                likelihood.log_likelihood(trace), likelihood.layout, likelihood.blocks(trace)[None], joint.rounding
            )
            for likelihood in sites.likelihoods
        )
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False  # a distribution that cannot be rebuilt from its parameters


def _linear(
    sites: Sites, found: NearbyPoints, far: list[Pair], followed: Followed | FollowedSums | None
) -> LinearPredictors | None:
    """The density made of linear predictors, if every likelihood has one at every probe.

    :param followed: where given, the predictors are sparse; else they are dense, and the density a LinearDensity.
    """
    origin, typical = found.origin, found.typical
    if len(sites.likelihoods) > MANY_SITES and not _gaussian(origin, [typical, *(p for pair in far for p in pair)]):
        return None
    base = probes.point_at(origin.joint, origin.joint.initial_u, typical.theta) if len(typical.theta) else origin
    parts = [
        None if base is None else _linear_part(likelihood, found, base, followed) for likelihood in sites.likelihoods
    ]
    if not parts or None in parts:
        return None
    runs = [*far, (base, typical)] if base is not None else far
    gaussian = _gaussian(origin, [p for pair in runs for p in pair])
    dense = tuple(p for p in parts if isinstance(p, DenseLinear))
    sparse = tuple(p for p in parts if isinstance(p, SparseLinear))
    linear = (
        LinearDensity(origin.joint, dense, sites.free, gaussian, None if gaussian else _deviations(origin, runs))
        if followed is None
        else SparsePredictors(origin.joint, sparse, sites.free, gaussian)
    )
    return linear if all(_explains(linear, *pair) for pair in runs) else None


def _gaussian(origin: TestPoint, others: list[TestPoint]) -> bool:
    """Whether the prior of all latents is Gaussian and free of the latents themselves."""
    if any(predictors.depends(x, origin.u) for x in origin.prior[:2]):
        return False
    return all(bool(p.prior[2].all()) for p in (origin, *others))


def _deviations(origin: TestPoint, runs: list[Pair]) -> Tensor | None:
    """``W`` of latents whose deviations ``W u - c`` from linear prior means are normal and independent, or None.

    ``c`` and the precisions hang on hyperparameters alone, ``W`` on nothing, in every run.
    """
    rounding, (loc, precision, known) = origin.joint.rounding, origin.prior
    forward = Forward(loc, origin.u, at_once=origin.kept.passes_at_once, create_graph=True)
    slope = forward.along(generic_directions(1, len(loc), origin.u))
    curved = predictors.depends(slope, origin.u) or predictors.depends(slope, origin.theta)  # beyond where runs are
    if not bool(known.all()) or predictors.depends(precision, origin.u) or curved:
        return None
    J = Forward(loc, origin.u, at_once=origin.kept.passes_at_once).matrix().double()
    with torch.no_grad():
        for base, probe in runs:
            moved, (loc, precision, _), (there, also, known) = probe.u - base.u, base.prior, probe.prior
            size = 1.0 + loc.abs() + J.abs() @ moved.abs()
            linear = bool(((there - loc - J @ moved).abs() <= rounding * size).all())
            if not (linear and bool(known.all()) and are_equal([precision], [also], rounding)):
                return None
        return torch.eye(len(J)).to(J) - J


def _linear_part(
    likelihood: LikelihoodTerm, found: NearbyPoints, base: TestPoint, followed: Followed | FollowedSums | None
) -> DenseLinear | SparseLinear | None:
    """``eta = J u + c`` under the first link for which that holds from ``base`` to ``typical``.

    None where it holds under none, or where ``J`` would be too large.
    """
    origin, typical, num_coupled = found.origin, found.typical, likelihood.layout.num_coupled
    for link in predictors.links_of(likelihood, origin.trace):
        part = replace(likelihood, link=link)
        slope = Forward(part.blocks(origin.trace).reshape(-1), origin.u, at_once=origin.kept.passes_at_once)
        moved = slope.along(typical.u.detach().unsqueeze(0)).reshape(-1, num_coupled)
        offset = part.blocks(base.trace).detach()
        if not _matches(part, typical, offset + moved, offset.abs() + moved.abs().amax()):
            continue
        if followed is not None:
            rows = followed.rows(part, slope)
            return None if rows is None else SparseLinear(part, rows)
        if not _affordable(part, origin):
            return None
        J = _jacobian(slope, origin).reshape(-1, num_coupled, slope.x.numel())
        known = [part.closed(point.trace) for point in (origin, typical)]
        even = [isinstance(x, NormalTargets) and bool((x.size == x.size[:1]).all()) for x in known]
        return DenseLinear(part, J, all(even))
    return None


def read_again(joint: LogJoint, likelihoods: Sequence[LikelihoodTerm]) -> LinearDensity:
    """Linear predictors that :func:`recognise` has verified, read off once more in one run: nothing is checked."""
    origin = probes.point_at(joint, joint.initial_u, joint.initial_theta, graph=True)
    assert origin is not None  # it was readable when it was recognised
    linear = []
    for likelihood in likelihoods:
        eta = likelihood.blocks(origin.trace)
        slope = Forward(eta.reshape(-1), origin.u, at_once=origin.kept.passes_at_once)
        linear.append(DenseLinear(likelihood, _jacobian(slope, origin).reshape(*eta.shape, -1)))
    return LinearDensity(joint, tuple(linear), (), gaussian=False)


def _jacobian(slope: Forward, origin: TestPoint) -> Tensor:
    """``J``, shape ``(N C, D)``; the model's own design matrix, where it has one, without a pass or a copy."""
    n, guesses = slope.value.numel(), origin.kept.tensors.values()
    if min(n, slope.x.numel()) <= FEW_PASSES:
        return slope.matrix()
    found = [(block, slope.guessed(block, guesses)) for block in origin.joint.latents.slices.values()]
    if n < sum(block.stop - block.start for block, part in found if part is None):
        return slope.matrix()
    parts = [slope.columns(block) if part is None else part for block, part in found]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _affordable(likelihood: LikelihoodTerm, origin: TestPoint) -> bool:
    """Whether a dense ``J`` is worth its memory."""
    joint = origin.joint
    size = likelihood.layout.shape.numel() * joint.latents.size
    if not has_room(2 * FLOAT * size, joint.device):
        return False
    data = sum(t.numel() for _, t in tensors(joint.args, joint.kwargs))
    if size <= max(SMALL_JACOBIAN, DENSER_THAN_DATA * data):
        return True
    # a J is no larger than what the model has already, where the prior has a dense covariance
    return size <= joint.latents.size**2 and bool(predictors.covariance_sizes(joint, origin.trace))


def _matches(likelihood: LikelihoodTerm, probe: TestPoint, eta: Tensor, size: Tensor) -> bool:
    """Whether the likelihood's parameter is the link of ``eta``, which was summed from numbers as large as ``size``."""
    value = likelihood.value(probe.trace).detach()
    error = probe.joint.rounding * (1.0 + size)
    natural = likelihood.layout.natural(torch.stack([eta, error]).to(value.dtype))
    return bool(likelihood.link.explains(value, *natural).all())


def _explains(linear: LinearPredictors, base: TestPoint, probe: TestPoint) -> bool:
    """Whether the linear density, its parts read at ``base``, has the prior, predictors and likelihoods of a run."""
    rounding = linear.joint.rounding
    with torch.no_grad():
        before, after = ([log_prob_sum(p.trace, linear.free)] for p in (base, probe))
        if linear.gaussian and not are_equal(base.prior[:2], probe.prior[:2], rounding):
            return False
        if not are_equal(before, after, rounding):
            return False
        for part in linear.linear:  # each site sees the latents through its predictor alone, and that as expected
            if not are_equal(part.likelihood.others(base.trace), part.likelihood.others(probe.trace), rounding):
                return False
            u, offset = probe.u, part.likelihood.blocks(base.trace).double()
            if not _matches(part.likelihood, probe, part.eta(u.unsqueeze(0), offset)[0], part.reach(u) + offset.abs()):
                return False
    return True
