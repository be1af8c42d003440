r"""Error of Laplace inside a nested log evidence, by importance sampling at the nodes of the marginalised sites.

With weights :math:`w_k` of the nodes :math:`\phi_k` and Laplace's evidence :math:`Z_k` at each, what is left out is

.. math:: \log \sum_k w_k\, E_{s \sim q_k}\!\left[\frac{p(s \mid \phi_k)
    \prod_g \int p(D_g, b_g \mid s, \phi_k)\, db_g}{q_k(s)\, Z_k}\right]

where ``s`` is what independent blocks ``b_g`` share, ``q_k`` a normal and a t distribution with its moments under the
Gaussian at the node, and the integrals are by adaptive Gauss-Hermite quadrature (Liu and Pierce, 1994).  Weights of the
few coordinates that are shared stay alike where those of all coordinates do not.  Without blocks ``s`` is all of them.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from pyro_evidence.blocks.marginal import Marginal
from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.laplace.evidence_error import MORE, PRECISE
from pyro_evidence.laplace.tour import FEWEST, HEAVY, PRICE, NormalMixture
from pyro_evidence.nested.inner import log_priors
from pyro_evidence.nested.integration import Integral
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.quadrature.rules import PRODUCT_DIMS, quasi_normal
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.precision.dense import Diagonal
from pyro_evidence.settings import seeded

NODES, NODES_OF_WIDE = 5, 9  # on each axis of a block; beyond three axes, where fewer have but one set of directions
FEWER = 2  # nodes, whose number is compared; and as many more are next where that differs by more than PRECISE
LEAST = 1e-4  # nats: less is rounding, or no matter
LOST = 0.01  # of the draws, at which a block may have no mode
COMPARED = 8  # every eighth draw tells what fewer nodes would say


@dataclass(frozen=True)
class InsideCorrection:
    """Error of Laplace inside, as importance sampling estimates it.

    :ivar gain: of the log evidence, nats.
    :ivar standard_error: of the gain, nats.
    :ivar by_nodes: what two nodes fewer in each block change, nats.
    :ivar pareto_k: of the weights, ``-inf`` where all are alike.
    :ivar num_draws: how many there are.
    :ivar num_shared: coordinates that were drawn; the others were integrated block by block.
    :ivar trend: of the gain over the nodes, less a constant, nats, ``(K,)``: Laplace inside errs more at some.
    """

    gain: float
    standard_error: float
    by_nodes: float
    pareto_k: float
    num_draws: int
    num_shared: int
    trend: Tensor

    @property
    def error(self) -> float:
        """Standard error of the gain, nats."""
        return self.standard_error + self.by_nodes

    @property
    def is_trusted(self) -> bool:
        """Whether the weights say that the gain is a number, and one that is larger than its error."""
        return self.pareto_k <= importance.threshold(self.num_draws) and abs(self.gain) > max(self.error, LEAST)


def inside_correction(integral: Integral) -> InsideCorrection | None:
    """By ever more draws or nodes, whichever leave the larger error, until both are small, cost a second or are no use.

    :return: None where the first cost more, data were not kept, rows of the model cannot be evaluated together, or
        the density is zero at all draws.
    """
    problem = integral.outer_mode.state.problem
    joint, row_bytes = problem.joint, problem.joint.row_bytes
    if row_bytes is None or not joint.has_data or not bool(problem.active.all()) or FEWEST * row_bytes > PRICE:
        return None
    marginal = problem.by_quadrature(NODES) if problem.curvature is exact_hessian else None
    if marginal is not None and marginal.partition.width > PRODUCT_DIMS:
        marginal = replace(marginal, num=NODES_OF_WIDE)
    found, num = None, FEWEST
    with without_validation(), suppress(RuntimeError):  # a model that takes no batch of rows
        can_draw = marginal is not None or joint.latents.size < SobolEngine.MAXDIM
        while can_draw and num * row_bytes * (1 if marginal is None else marginal.nodes_of_each) <= PRICE:
            found = _by_draws(integral, marginal, num)
            doubtful = found.pareto_k > importance.threshold(num)
            precise = not doubtful and max(found.standard_error, found.by_nodes) <= PRECISE
            if precise or importance.is_beyond(found.pareto_k, num):
                break
            if marginal is not None and not doubtful and found.by_nodes > found.standard_error:
                marginal = replace(marginal, num=marginal.num + FEWER)
            else:
                num *= MORE
    return found if found is not None and math.isfinite(found.gain) else None


def _by_draws(integral: Integral, marginal: Marginal | None, num: int) -> InsideCorrection:
    """By so many draws, as many at each node as its weight says, to within one."""
    problem, nodes = integral.outer_mode.state.problem, integral.nodes
    shared = torch.arange(nodes.u.shape[-1]) if marginal is None else marginal.partition.shared
    weights = integral.log_weights.exp().where(nodes.log_density.isfinite(), 0.0)
    index = importance.resampled(weights, num, seeded(0))
    u, log_proposal, log_normal = _drawn(integral, index, shared)
    theta, laplace = nodes.theta[index], nodes.log_density - log_priors(problem, nodes.theta)
    beside = log_proposal + laplace[index]
    if marginal is None:
        rows = torch.cat([theta, problem.active.expand(num, -1).to(theta)], -1)
        with torch.no_grad():
            log_weights, coarse = problem.density_by_rows.log_joint(u, rows) - beside, 0.0
    else:
        log_weights, every = marginal.integrated(theta, u) - beside, slice(None, None, COMPARED)
        fewer = replace(marginal, num=marginal.num - FEWER)
        few = fewer.integrated(theta[every], u[every]) - beside[every]
        coarse = abs(float(importance.log_mean(few) - importance.log_mean(log_weights[every])))
    lost = float(log_weights.isnan().double().mean())  # blocks without a mode there
    smoothed = importance.checked(log_weights.nan_to_num(nan=-math.inf))
    k = smoothed.pareto_k if lost <= LOST else math.inf
    gain, spread, ratios = _controlled(smoothed.log_weights, (log_normal - log_proposal).exp())
    z = integral.chart.inverse(integral.phi)
    drawn = z[index]
    ways = torch.linalg.lstsq(drawn - drawn.mean(0), ratios.unsqueeze(-1)).solution
    trend = (z.clamp(drawn.amin(0), drawn.amax(0)) @ ways).squeeze(-1)
    return InsideCorrection(gain, spread, coarse, k, num, len(shared), trend)


def gain_of(found: InsideCorrection | None) -> float:
    """What is added to a log evidence: the gain, where it is trusted."""
    return found.gain if found is not None and found.is_trusted else 0.0


def _controlled(log_weights: Tensor, normal: Tensor) -> tuple[float, float, Tensor]:
    """Log mean of weights and its standard error, nats, with weights of the normal for a control variate.

    And the weights less that variate, of mean one, ``(S,)``.

    Their mean is one: where the density is normal, nothing is left to chance.  Owen and Zhou (2000), section 4.

    :param normal: of the normal against the proposal, ``(S,)``.
    """
    weights, away = (log_weights - log_weights.max()).exp(), normal - normal.mean()
    slope = (away @ weights) / away.square().sum().clamp(min=torch.finfo(away.dtype).tiny)  # none is shared: all one
    mean = weights.mean() - slope * (normal.mean() - 1.0)
    ratios = (weights - slope * (normal - 1.0)) / mean
    return float(mean.log() + log_weights.max()), float(ratios.std()) / len(weights) ** 0.5, ratios


def _drawn(integral: Integral, index: Tensor, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draws of shared coordinates, the others at their means given these, ``(S, D)``; and log densities, ``(S,)`` each.

    These are that of the draws, and that of the normal alone.

    :param index: the node of each, ``(S,)``.
    """
    size, nodes = len(shared), integral.nodes
    kinds = torch.tensor([1.0 - HEAVY, HEAVY], dtype=torch.float64, device=nodes.u.device)
    one, every = Diagonal(torch.ones(1, size).to(kinds)), torch.ones(size, dtype=torch.bool)
    mixture = NormalMixture(kinds.log(), kinds.new_zeros(2, size), (one, one), every, (False, True))
    white = mixture.unwhiten(quasi_normal(len(index), size + 1).to(kinds))
    u, by_component = nodes.u[index].double(), mixture.by_component(white)
    log_slope = torch.zeros_like(by_component[0])
    unit = None if size == u.shape[-1] else torch.nn.functional.one_hot(shared, u.shape[-1]).to(u)
    for node in index.unique().tolist():
        rows, precision = index == node, nodes.precision.row(node)
        if unit is None:  # all coordinates are shared
            u[rows] += precision.unwhiten(white[rows])
            log_slope[rows] = -0.5 * precision.log_det
            continue
        covariance = precision.solve(unit)  # of shared coordinates with all
        tril = torch.linalg.cholesky(covariance[:, shared])
        u[rows] += white[rows] @ torch.linalg.solve_triangular(tril, covariance, upper=False)
        log_slope[rows] = tril.diagonal().log().sum()
    return u, by_component.logsumexp(0) - log_slope, by_component[0] - kinds[0].log() - log_slope
