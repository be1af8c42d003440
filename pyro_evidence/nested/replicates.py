"""The integral over marginalised sites for many data sets of one model at once.

The steps of :func:`pyro_evidence.nested.integration.integrate` where nothing is in their way: one mode, and products of
nodes that settle.  Data sets of which that is not so are told, and are for that function.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import Problem
from pyro_evidence.laplace.replicates import Maxima
from pyro_evidence.nested.hyperparameter_modes import ENDLESS, WORTH
from pyro_evidence.nested.inner import solve_inner
from pyro_evidence.nested.integration import BETWEEN, MOST_NODES, MOVES, NODES, SD_PER_NAT, followed, log_volume_of
from pyro_evidence.numerics.quadrature import rules
from pyro_evidence.numerics.quadrature.densities import HILL, Interpolated, beyond_valleys
from pyro_evidence.numerics.quadrature.reparameterise import PROBES, Standardisation, fitted, map_of


@dataclass(frozen=True)
class ReplicateIntegrals:
    """The integrals of many data sets.

    :ivar where: their charts, rows in front.
    :ivar log_evidence: nats, ``(R,)``.
    :ivar error: how much it moved when the nodes were last made more, nats, ``(R,)``.
    :ivar num_nodes: on each axis, ``(R,)``.
    :ivar found: whether each has settled, around the one mode that counts, ``(R,)`` bool.
    """

    where: Standardisation
    log_evidence: Tensor
    error: Tensor
    num_nodes: Tensor
    found: Tensor

    def where_of(self, row: int) -> Standardisation:
        """The chart of one data set."""
        axes = map_of(self.where.axes.params[row, 0])
        return Standardisation(self.where.centre[row, 0], self.where.basis[row], axes)


@dataclass(frozen=True)
class ProductIntegrals:
    """The integrals by one product of nodes; rows in front."""

    log_evidence: Tensor  # (R,)
    mean: Tensor  # (R, d)
    sd: Tensor  # (R, d)
    log_ratio: Tensor  # (R, K)


def replicate_integrals(problem: Problem, modes: Maxima, drawn: Tensor, tolerance: float) -> ReplicateIntegrals:
    """The integrals around the modes of the marginalised sites, which are all that is outside.

    :param problem: of replicates.
    :param drawn: places at which other modes are looked for, ``(S, d)``, those of the prior.
    :param tolerance: of the log evidence, nats.
    """
    d, theta = modes.precision.shape[-1], modes.rows.theta
    centre, eye = theta[:, None, :-1], torch.eye(modes.precision.shape[-1]).to(theta)
    values, vectors = torch.linalg.eigh(torch.where(modes.found[:, None, None], modes.precision, eye))
    basis = vectors * values.rsqrt().unsqueeze(-2)

    def log_density(rows: Tensor, phi: Tensor) -> Tensor:
        """Of marginalised coordinates ``(r, K, d)`` of some data sets, minus infinity where no mode is found."""
        numbers = theta[rows, None, -1:].expand(-1, phi.shape[1], 1)
        start = followed(modes.rows.u[rows, None], modes.follows[rows], phi - centre[rows])
        places = (torch.cat([phi, numbers], -1).flatten(0, 1), start.flatten(0, 1))
        return solve_inner(problem, *places, thorough=False).log_density.reshape(phi.shape[:2])

    every, steps = torch.arange(len(theta), device=theta.device), theta.new_tensor(PROBES)
    probes = (eye.unsqueeze(1) * steps[None, :, None]).reshape(-1, d)
    profile = log_density(every, centre + probes @ basis.mT).nan_to_num(nan=-torch.inf)
    axes = profile.reshape(-1, len(PROBES))
    params = fitted(steps.expand(len(axes), -1), axes).params.reshape(len(theta), 1, d, -1)
    where = Standardisation(centre, basis, map_of(params))
    elsewhere = is_elsewhere(where, profile, drawn, log_density(every, drawn.expand(len(theta), -1, -1)))
    sound = modes.found & ~elsewhere & (basis.norm(dim=1).amax(-1) <= ENDLESS)

    def product(rows: Tensor, axis: rules.Rule) -> ProductIntegrals:
        rule = rules.product(axis, d)
        here = Standardisation(centre[rows], basis[rows], map_of(params[rows]))
        phi = here.forward(rule.nodes)
        log_slope = here.axes.log_slope(rule.nodes) + torch.linalg.slogdet(here.basis).logabsdet.unsqueeze(-1)
        log_mass = log_density(rows, phi) + log_slope + log_volume_of(rule)
        weights = log_mass.softmax(-1).unsqueeze(-1)
        mean = (weights * phi).sum(1)
        sd = (weights * (phi - mean.unsqueeze(1)).square()).sum(1).sqrt()
        return ProductIntegrals(log_mass.logsumexp(-1), mean, sd, log_mass - rule.log_weights)

    log_evidence, error = torch.full_like(theta[:, 0], torch.nan), torch.full_like(theta[:, 0], torch.inf)
    num_nodes, settled = torch.zeros_like(every), torch.zeros_like(sound)
    left, before = sound.nonzero().squeeze(-1), None
    counts = [num for num in NODES if num**d <= MOST_NODES]
    for num in counts:
        if not len(left):
            break
        axis = rules.gauss_hermite(num)
        now = product(left, axis)
        arrived = settled[left]  # on one axis, with fewer nodes: these are for its tails
        if before is not None:
            apart = (now.log_evidence - before.log_evidence).abs()
            moved = torch.maximum((now.mean - before.mean).abs() / now.sd, (before.sd / now.sd).log().abs()).amax(-1)
            good = (apart <= tolerance / MOVES) & (moved <= SD_PER_NAT * tolerance / MOVES)
            error[left] = torch.where(arrived, error[left], apart)
            settled[left] = arrived | good
            arrived = arrived | good & (d > 1 or num == counts[-1])
        finite = now.log_ratio.isfinite().all(-1)
        settled[left[~finite]] = False
        done = left[arrived & finite]
        if len(done):
            table = now.log_ratio[arrived & finite] - now.log_evidence[arrived & finite].unsqueeze(-1)
            grid = table.reshape(-1, *[num] * d)
            settled[done] = Interpolated(axis, grid[0]).mass_errors(grid) <= BETWEEN
            log_evidence[done], num_nodes[done] = now.log_evidence[arrived & finite], num
        on = finite & ~arrived
        left, before = left[on], ProductIntegrals(*(x[on] for x in vars(now).values()))
    return ReplicateIntegrals(where, log_evidence, error, num_nodes, settled & (num_nodes > 0))


def is_elsewhere(where: Standardisation, profile: Tensor, drawn: Tensor, height: Tensor) -> Tensor:
    """Whether there may be modes elsewhere, as :mod:`~pyro_evidence.nested.hyperparameter_modes` asks, ``(R,)`` bool.

    :param profile: log density along the axes, ``(R, d * J)``.
    :param height: at places ``drawn`` ``(S, d)``, ``(R, S)``.
    """
    axes, top = profile.unflatten(-1, (-1, len(PROBES))), profile.amax(-1, keepdim=True)
    away = drawn - where.centre
    apart = torch.linalg.solve(where.basis, away.mT).norm(dim=1)
    fallen = torch.maximum(axes[..., 0], axes[..., -1]).amax(-1, keepdim=True) + HILL
    counted = (away.abs() < ENDLESS).all(-1) & (height > top - WORTH)
    far = (counted & (apart > -PROBES[0]) & (height > fallen)).any(-1)
    return far | (beyond_valleys(axes).flatten(1) & (profile > top - WORTH)).any(-1)
