r"""Error of Laplace inside a nested log evidence, by importance sampling at the nodes of the marginalised sites.

With weights :math:`w_k` of the nodes :math:`\phi_k` and Laplace's evidence :math:`Z_k` at each, what is left out is

.. math:: \log \sum_k w_k\, E_{s \sim q_k}\!\left[\frac{p(s \mid \phi_k)
    \prod_g \int p(D_g, b_g \mid s, \phi_k)\, db_g}{q_k(s)\, Z_k}\right]

where ``s`` is what independent blocks ``b_g`` share, ``q_k`` a normal and a t distribution with its moments under the
Gaussian at the node, and the integrals are by adaptive Gauss-Hermite quadrature (Liu and Pierce, 1994).  Weights of the
few coordinates that are shared stay alike where those of all coordinates do not.  Without blocks ``s`` is all of them.
Where ``s`` multiplies others, ``q_k`` is of its common size, and of what is across that (see :func:`_fanned`).
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from pyro_evidence.blocks.marginal import Marginal
from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.laplace import tour
from pyro_evidence.laplace.approximation import LaplaceState, Problem, log_priors
from pyro_evidence.laplace.tour import FEWEST, HEAVY, LITTLE, PRICE, NormalMixture
from pyro_evidence.nested.integration import Integral
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.batched import BATCH_BYTES, HELD_NUMBERS
from pyro_evidence.numerics.quadrature.rules import PRODUCT_DIMS, quasi_normal
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.precision.dense import Diagonal, Precision, Separate
from pyro_evidence.settings import seeded
from pyro_evidence.structure.symmetries import are_nearest

KINDS = 2  # a normal and a t distribution, from which draws are at first
MORE = 4  # times as many draws are next where these leave more than PRECISE
PRECISE = 0.015  # nats that are left by either error: three of them are a twentieth
NODES, NODES_OF_WIDE = 5, 9  # on each axis of a block; beyond three axes, where fewer have but one set of directions
FEWER = 2  # nodes, whose number is compared; and as many more are next where that differs by more than PRECISE
LEAST = 1e-4  # nats: less is rounding, or no matter
PARTS = 16  # in which as many draws are evaluated as others are together: in the same time, in less memory
LOST = 0.01  # of the draws, at which a block may have no mode
ROUNDS = 4  # of sizes along a ray, each in the light of the one before
COMPARED = 8  # every eighth draw tells what fewer nodes would say


@dataclass(frozen=True, eq=False)
class LaplaceNodes:
    """Where Laplace stands for an integral: at a mode, or at the nodes of marginalised sites.

    :ivar theta, u: hyperparameters ``(K, T)`` and modes ``(K, D)``.
    :ivar precision: of the Gaussian at each.
    :ivar laplace: Laplace's log evidence at each, nats, ``(K,)``.
    :ivar weights: share of each in the integral, ``(K,)``.
    :ivar z: of the marginalised sites, in standard deviations, ``(K, d)``.
    :ivar turned: which coordinates change their signs in each image of a mode but itself, bool ``(I, D)``: of all
        images the mass that is nearest to the mode is integrated.
    """

    problem: Problem
    theta: Tensor
    u: Tensor
    precision: Precision
    laplace: Tensor
    weights: Tensor
    z: Tensor
    turned: Tensor

    @classmethod
    def of_state(cls, state: LaplaceState, turned: Tensor) -> "LaplaceNodes":
        """A mode at one set of hyperparameters."""
        theta, u, laplace = state.theta.unsqueeze(0), state.u.unsqueeze(0), state.log_evidence.reshape(1)
        one = torch.ones_like(laplace)
        return cls(state.problem, theta, u, state.precision, laplace, one, one.unsqueeze(0), turned)

    @classmethod
    def of_integral(cls, integral: Integral, turned: Tensor) -> "LaplaceNodes":
        """The nodes of marginalised sites."""
        problem, nodes = integral.outer_mode.state.problem, integral.nodes
        weights = integral.log_weights.exp().where(nodes.log_density.isfinite(), 0.0)
        laplace, z = (
            nodes.log_density - log_priors(problem, nodes.theta),
            integral.standardisation.inverse(integral.phi),
        )
        return cls(problem, nodes.theta, nodes.u, nodes.precision, laplace, weights, z, turned)


@dataclass(frozen=True, eq=False)
class InsideCorrection:
    """Error of Laplace inside, as importance sampling estimates it.

    :ivar gain: of the log evidence, nats.
    :ivar standard_error: of the gain, nats.
    :ivar by_nodes: what two nodes fewer in each block change, nats.
    :ivar pareto_k: of the weights, ``-inf`` where all are alike.
    :ivar num_draws: how many there are.
    :ivar num_shared: coordinates that were drawn; the others were integrated block by block.
    :ivar slope: of the gain, nats for each standard deviation of the marginalised sites, ``(d,)``: Laplace inside errs
        more at some.  Zero where that is not known.
    """

    gain: float
    standard_error: float
    by_nodes: float
    pareto_k: float
    num_draws: int
    num_shared: int
    slope: Tensor

    @property
    def error(self) -> float:
        """Standard error of the gain, nats."""
        return self.standard_error + self.by_nodes

    @property
    def is_doubtful(self) -> bool:
        """Whether the weights say that the gain is no number."""
        return self.pareto_k > importance.threshold(self.num_draws)

    @property
    def is_trusted(self) -> bool:
        """Whether the gain is a number, and one that is larger than its error."""
        return not self.is_doubtful and abs(self.gain) > max(self.error, LEAST)


def inside_correction(places: LaplaceNodes) -> InsideCorrection | None:
    """By ever more draws or nodes, whichever leave the larger error, until both are small, cost a second or are no use.

    More draws are from normals, too, that are fitted to those before, as in :func:`pyro_evidence.laplace.tour.adapted`.

    :return: None where the first cost more, data were not kept, rows of the model cannot be evaluated together, or
        the density is zero at all draws.
    """
    problem = places.problem
    joint, row_bytes = problem.joint, problem.joint.row_bytes
    if row_bytes is None or not joint.has_data or not bool(problem.active.all()) or FEWEST * row_bytes > PRICE:
        return None
    marginal = problem.by_quadrature(max(NODES, problem.nodes)) if problem.curvature is exact_hessian else None
    if marginal is not None and marginal.partition.width > PRODUCT_DIMS:
        marginal = replace(marginal, num=NODES_OF_WIDE)
        alone = marginal.partition.width == places.u.shape[-1]  # nothing is gained by a rule that only spheres are for
        if alone or FEWEST * row_bytes * marginal.nodes_of_each > PRICE:  # few nodes of quadrature can be paid
            marginal = None  # all are drawn
    if isinstance(places.precision, Separate) and problem.factors is not None:  # which each round asks for
        order = places.weights.argsort(descending=True).tolist()
        each = sum(panel.numel() for panel in places.precision.row(order[0]).row(0).panels)
        kept = places.precision.kept(order[: HELD_NUMBERS // (2 * each) if each else 0])
        places = replace(places, precision=kept)
    found, num, mixture = None, FEWEST, _around_mode(places, marginal)
    with without_validation(), suppress(RuntimeError):  # a model that takes no batch of rows
        shared = torch.arange(places.u.shape[-1]) if marginal is None else marginal.partition.shared
        held = HELD_NUMBERS // max(1, len(shared) * places.u.shape[-1])  # covariances, each solved for once
        covariance = lru_cache(held)(partial(_covariance, places, shared))
        sizes = places.u.new_ones(0) if marginal is None else _common_sizes(places, marginal, covariance)
        while num * (each := row_bytes * (1 if marginal is None else marginal.rows_of_each)) <= PRICE:
            found, adapted = _by_draws(places, marginal, num, mixture, sizes, covariance)
            precise = not found.is_doubtful and max(found.standard_error, found.by_nodes) <= PRECISE
            few = num <= 2 * mixture.loc.shape[-1]  # for a covariance that draws could adapt to
            # a shape told by so few as the first, thirteen weights, is known to half of itself
            last = few or MORE * num * each > (LITTLE if num > FEWEST else PRICE / MORE)
            if precise or (last and importance.is_beyond(found.pareto_k, num)):
                break
            if marginal is not None and not found.is_doubtful and found.by_nodes > found.standard_error:
                marginal = replace(marginal, num=marginal.num + FEWER)
            else:
                num, mixture = MORE * num, adapted
    return found if found is not None and math.isfinite(found.gain) else None


def _around_mode(places: LaplaceNodes, marginal: Marginal | None) -> NormalMixture:
    """A normal and a t distribution, in the coordinates in which Laplace's Gaussian of what is shared is standard."""
    size = places.u.shape[-1] if marginal is None else len(marginal.partition.shared)
    kinds = torch.tensor([1.0 - HEAVY, HEAVY], dtype=torch.float64, device=places.u.device)
    one, every = Diagonal(torch.ones(1, size).to(kinds)), torch.ones(size).to(kinds).bool()
    return NormalMixture(kinds.log(), kinds.new_zeros(KINDS, size), (one, one), every, (False, True))


def _by_draws(
    places: LaplaceNodes,
    marginal: Marginal | None,
    num: int,
    mixture: NormalMixture,
    sizes: Tensor,
    covariance_at: Callable[[int], Tensor],
) -> tuple[InsideCorrection, NormalMixture]:
    """By so many draws, as many at each node as its weight says, to within one; and what to draw from next."""
    problem = places.problem
    shared = torch.arange(places.u.shape[-1]) if marginal is None else marginal.partition.shared
    index = importance.resampled(places.weights, num, generator := seeded(0)).sort().values.view(-1, 2)
    index = index[torch.randperm(num // 2, generator=generator)].mT.flatten()  # of both in a pair, nearly always
    quasi = quasi_normal(num // 2, len(shared) + 1, num - FEWEST)  # others than a mixture has adapted to
    white = mixture.unwhiten_pairs(quasi.to(mixture.loc))
    by_component = mixture.by_component(white)
    u, log_slope = _at_nodes(places, index, shared, white, sizes, covariance_at)
    log_proposal = by_component.logsumexp(0) - log_slope
    log_normal = by_component[0] - mixture.log_mixing[0] - log_slope
    theta, beside = places.theta[index], log_proposal + places.laplace[index]
    if marginal is None:
        rows, by_node = torch.cat([theta, problem.active.expand(num, -1).to(theta)], -1), index.argsort()
        size, coarse = max(1, BATCH_BYTES // (PARTS * (problem.joint.row_bytes or 1))), 0.0
        parts = zip(u[by_node].split(size), rows[by_node].split(size), strict=True)
        with torch.no_grad():  # one node after the other: what hangs on its hyperparameters alone is made once
            log_weights = torch.cat([problem.density_by_rows.log_joint(*part) for part in parts])
        log_weights = log_weights[by_node.argsort()] - beside
    else:
        log_weights, every = marginal.integrated(theta, u) - beside, slice(None, None, COMPARED)
        fewer = replace(marginal, num=marginal.num - FEWER)
        few = fewer.integrated(theta[every], u[every]) - beside[every]
        coarse = abs(float(importance.log_mean(few) - importance.log_mean(log_weights[every])))
    lost = float(log_weights.isnan().double().mean())  # blocks without a mode there
    log_weights = log_weights.nan_to_num(nan=-math.inf)
    if len(places.turned):  # of what is shared: the others are integrated
        modes, variances = (x[index][:, shared] for x in (places.u, places.precision.variance))
        near = are_nearest(u[:, shared], modes, variances, places.turned[:, shared])
        log_weights = log_weights.where(near, -math.inf)
    smoothed = importance.checked(log_weights)
    k = smoothed.pareto_k if lost <= LOST else math.inf
    gain, spread, ratios = _controlled(smoothed.log_weights, (log_normal - log_proposal).exp())
    drawn = places.z[index]
    slope = torch.linalg.lstsq(drawn - drawn.mean(0), ratios.unsqueeze(-1)).solution.squeeze(-1)
    slope = slope.where(slope.abs() > 2.0 * spread, 0.0)  # nodes are standard: its errors are those of the gain
    shares = (smoothed.log_weights.log_softmax(0) + by_component.log_softmax(0)).exp()
    adapted = tour.adapted(_around_mode(places, marginal), white, shares)
    return InsideCorrection(gain, spread, coarse, k, num, len(shared), slope), adapted


def _controlled(log_weights: Tensor, normal: Tensor) -> tuple[float, float, Tensor]:
    """Log mean of weights and its standard error, nats, with weights of the normal for a control variate.

    And the weights less that variate, of mean one, ``(S,)``.

    Their mean is one: where the density is normal, nothing is left to chance.  Owen and Zhou (2000), section 4.

    :param log_weights: of pairs, the second half those of the mirror images of the first, ``(S,)``.
    :param normal: of the normal against the proposal, ``(S,)``.
    """
    weights, away = (log_weights - log_weights.max()).exp(), normal - normal.mean()
    slope = (away @ weights) / away.square().sum().clamp(min=torch.finfo(away.dtype).tiny)  # none is shared: all one
    mean = weights.mean() - slope * (normal.mean() - 1.0)
    ratios = (weights - slope * (normal - 1.0)) / mean
    of_pairs = ratios.unflatten(0, (2, -1)).mean(0)
    return float(mean.log() + log_weights.max()), float(of_pairs.std()) / len(of_pairs) ** 0.5, ratios


def _at_nodes(
    places: LaplaceNodes,
    index: Tensor,
    shared: Tensor,
    white: Tensor,
    sizes: Tensor,
    covariance_at: Callable[[int], Tensor],
) -> tuple[Tensor, Tensor]:
    """White rows ``(S, P)`` as draws of shared coordinates, the others at their means given these, ``(S, D)``.

    And the log of how much volume a white row has there, ``(S,)``.

    :param index: the node of each, ``(S,)``.
    :param sizes: see :func:`_common_sizes`.
    """
    u = places.u[index].double()
    log_slope, groups = u.new_zeros(len(u)), _groups(places, shared)
    for node in index.unique().tolist():
        rows, precision = index == node, places.precision.row(node)
        if len(shared) == u.shape[-1]:  # all coordinates are shared
            u[rows] += precision.unwhiten(white[rows])
            log_slope[rows] = -0.5 * precision.log_det
            continue
        covariance = covariance_at(node)
        tril = torch.linalg.cholesky(covariance[:, shared])
        x, mode = white[rows] @ tril.mT, places.u[node, shared]
        log_slope[rows] = tril.diagonal().log().sum()
        for group, (mean, deviation) in zip(groups, sizes[node], strict=True):
            own, log_growth = _fanned(x[:, group], mode[group], covariance[:, shared][group][:, group], mean, deviation)
            x[:, group], log_slope[rows] = own, log_slope[rows] + log_growth
        u[rows] += x @ torch.cholesky_solve(covariance, tril)
    return u, log_slope


def _covariance(places: LaplaceNodes, shared: Tensor, node: int) -> Tensor:
    """Covariance of shared coordinates with all at a node, ``(P, D)``."""
    return places.precision.row(node).covariance_of(shared.to(places.u.device), places.u.shape[-1])


def _groups(places: LaplaceNodes, shared: Tensor) -> Tensor:
    """Shared coordinates that turn their signs together, of which no other such group is a part, bool ``(G, P)``."""
    own = places.turned[:, shared]
    if not bool(own.any()):
        return own[:0]
    own = own[own.any(-1)].unique(dim=0)
    contains = (own.double() @ (~own).double().mT) == 0.0
    return own[contains.sum(0) == 1]


def _growth(size: Tensor, variance: Tensor) -> Tensor:
    """The factor by which distances across a mode are longer at a common size."""
    larger = size.clamp(min=1.0)  # none is shorter: draws that are wider than the density have small weights
    return ((larger.square() + variance) / (1.0 + variance)).sqrt()


def _fanned(x: Tensor, mode: Tensor, covariance: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Displacements ``(S, k)`` from a mode, those across it as much longer as it is, and the log of the volume.

    Latents of a group multiply others, which take up their common size: data tell directions, so that a distance across
    the mode is as uncertain as its size is large, and most volume is where that is larger than at the mode.  Where the
    mode is within a deviation of its own image, draws are left as they are.

    :param mean, deviation: of the common size, which is one at the mode.
    """
    along = torch.linalg.solve(covariance, mode)
    if not float(along @ mode) > 1.0:
        return x, x.new_zeros(len(x))
    variance = 1.0 / (along @ mode)
    away = variance * (x @ along)  # of the size, from one
    size = mean + deviation * away / variance.sqrt()
    growth = _growth(size, variance)
    across = growth.unsqueeze(-1) * (x - away.unsqueeze(-1) * mode)
    log_growth = (deviation / variance.sqrt()).log() + (len(mode) - 1) * growth.log()
    return (size - 1.0).unsqueeze(-1) * mode + across, log_growth


def _common_sizes(places: LaplaceNodes, marginal: Marginal, covariance_at: Callable[[int], Tensor]) -> Tensor:
    """Mean and standard deviation of the common size of each group at each node, one at the mode, ``(K, G, 2)``.

    By the density along the ray through the mode and the volume across it, at nine sizes four deviations to both sides
    of what the nine before have said.
    """
    shared, num = marginal.partition.shared, len(places.u)
    groups, steps = _groups(places, shared), torch.linspace(-4.0, 4.0, 9).to(places.u)
    found = places.u.new_ones(num, len(groups), 2)
    for g, group in enumerate(groups):
        own = shared[group]
        covariances = torch.stack([covariance_at(node)[group][:, own] for node in range(num)])
        along = torch.linalg.solve(covariances, places.u[:, own])
        precision = (along * places.u[:, own]).sum(-1, keepdim=True)
        variance = 1.0 / precision.clamp(min=1.0)  # below, draws are left as they are
        mean, deviation = torch.ones_like(variance), variance.sqrt()
        for _ in range(ROUNDS):
            size = mean + deviation * steps
            u = places.u.unsqueeze(1).repeat(1, len(steps), 1)
            u[..., own] *= size.unsqueeze(-1)
            theta = places.theta.repeat_interleave(len(steps), 0)
            height = marginal.integrated(theta, u.flatten(0, 1)).view_as(size)
            height = height + (len(own) - 1) * _growth(size, variance).log()
            share = height.nan_to_num(nan=-math.inf).where(size > 0.0, -math.inf).softmax(-1)
            mean = (share * size).sum(-1, keepdim=True)
            spread = (share * (size - mean).square()).sum(-1, keepdim=True).sqrt()
            deviation = torch.maximum(spread, 0.5 * deviation)  # nine sizes tell no less
        found[:, g] = torch.cat([mean, deviation], -1)
    return found
