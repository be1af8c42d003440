"""The integral over marginalised sites for many data sets of one model at once.

The steps of :func:`pyro_evidence.nested.integration.integrate` where nothing is in their way: one mode, and products of
nodes that settle.  Data sets of which that is not so are for that function.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import Problem
from pyro_evidence.laplace.replicates import Maxima
from pyro_evidence.nested.hyperparameter_modes import ENDLESS, other_places
from pyro_evidence.nested.inner import solve_inner
from pyro_evidence.nested.integration import NodeProducts, Settled, followed, log_volume_of, settled
from pyro_evidence.numerics.quadrature import rules
from pyro_evidence.numerics.quadrature.reparameterise import Standardisation, chart


@dataclass(frozen=True)
class ReplicateIntegrals:
    """The integrals of many data sets.

    :ivar where: their charts, rows in front.
    :ivar settled: by how many nodes they have settled, around the one mode that counts.
    """

    where: Standardisation
    settled: Settled


def replicate_integrals(problem: Problem, modes: Maxima, drawn: Tensor, tolerance: float) -> ReplicateIntegrals:
    """The integrals around the modes of the marginalised sites, which are all that is outside.

    :param problem: of replicates.
    :param drawn: places at which other modes are looked for, ``(S, d)``, those of the prior.
    :param tolerance: of the log evidence, nats.
    """
    theta, d = modes.rows.theta, modes.precision.shape[-1]

    def log_density(rows: Tensor, phi: Tensor) -> Tensor:
        """Log density of marginalised coordinates ``(r, K, d)`` of some data sets, -inf where no mode is found."""
        numbers = theta[rows, None, -1:].expand(-1, phi.shape[1], 1)
        start = followed(modes.rows.u[rows, None], modes.follows[rows], phi - straight.centre[rows])
        places = (torch.cat([phi, numbers], -1).flatten(0, 1), start.flatten(0, 1))
        return solve_inner(problem, *places, searches=1).log_density.reshape(phi.shape[:2])

    eye = torch.eye(d).to(theta)
    straight = chart(theta[:, None, :-1], torch.where(modes.found[:, None, None], modes.precision, eye))
    every = torch.arange(len(theta), device=theta.device)
    profile = log_density(every, straight.probes()).nan_to_num(nan=-torch.inf)
    elsewhere = other_places(straight, profile, drawn, log_density(every, drawn.expand(len(theta), -1, -1)))
    sound = modes.found & ~elsewhere.any(-1) & (straight.basis.norm(dim=1).amax(-1) <= ENDLESS)
    where = straight.bent(profile)

    def product(rows: Tensor, num: int) -> NodeProducts:
        rule, here = rules.product(rules.gauss_hermite(num), d), where.rows(rows)
        phi = here.forward(rule.nodes)
        log_mass = log_density(rows, phi) + here.log_slope(rule.nodes) + log_volume_of(rule)
        log_evidence, weights = log_mass.logsumexp(-1), log_mass.softmax(-1).unsqueeze(-1)
        mean = (weights * phi).sum(1)
        sd = (weights * (phi - mean.unsqueeze(1)).square()).sum(1).sqrt()
        log_ratio = (log_mass - rule.log_weights - log_evidence.unsqueeze(-1)).reshape(-1, *[num] * d)
        return NodeProducts(log_evidence, mean, sd, log_ratio)

    return ReplicateIntegrals(where, settled(product, sound, d, tolerance))
