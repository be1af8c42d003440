"""The posterior of single coordinates, as smooth densities."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributions.transforms import IndependentTransform

from pyro_evidence.errors import BadInput
from pyro_evidence.nested.integration import Integral
from pyro_evidence.numerics.coordinates import Coordinate, is_identity
from pyro_evidence.numerics.importance import interpolated
from pyro_evidence.numerics.quadrature.densities import CELLS
from pyro_evidence.numerics.quadrature.reparameterise import AxisMap
from pyro_evidence.numerics.quadrature.rules import quasi_normal
from pyro_evidence.settings import quantile_levels

NUM_POINTS = CELLS + 1  # the ends of as many cells as a density along an axis has
NUM_OTHERS = 256  # values of the other axes that a density is averaged over
END = 7.0  # standard deviations from each node's mode at which its density ends: beyond there is 3e-12


@dataclass(frozen=True, eq=False)
class Marginal:
    """One site's posterior, every element by itself.

    :ivar values: places in the site's own space, ``(G,) + shape``, ascending.
    :ivar density: posterior density there, ``(G,) + shape``.
    :ivar mass: probability below each place, ``(G,) + shape``.
    """

    values: Tensor
    density: Tensor
    mass: Tensor

    @property
    def mean(self) -> Tensor:
        """Posterior mean, the site's shape."""
        return self._mean_of(self.values)

    @property
    def sd(self) -> Tensor:
        """Posterior standard deviation, the site's shape."""
        return self._mean_of((self.values - self.mean).square()).sqrt()

    def _mean_of(self, what: Tensor) -> Tensor:
        share = self.mass.diff(dim=0)
        return (0.5 * (what[1:] + what[:-1]) * share).sum(0) / share.sum(0)

    def quantiles(self, q: float | Sequence[float]) -> Tensor:
        """Quantiles, ``(len(q),) + shape``; ``shape`` for a single ``q``."""
        level = quantile_levels(q).to(self.mass)
        flat, mass = (part.reshape(len(part), -1).T.contiguous() for part in (self.values, self.mass))
        wanted = level.reshape(-1).expand(len(flat), -1).contiguous() * mass[:, -1:]
        return interpolated(mass, flat, wanted).T.reshape((*level.shape, *self.values.shape[1:]))


def constrained(part: Coordinate, x: Tensor, density: Tensor) -> Marginal:
    """The marginal of one site from densities ``(G, E)`` of its unconstrained elements at ``x`` ``(G, E)``.

    :raises BadInput: where an element of the site depends on several unconstrained ones.
    """
    transform = part.transform
    elementwise = (
        is_identity(transform) or isinstance(transform, IndependentTransform) or not transform.domain.event_dim
    )
    if part.shape != part.unconstrained_shape or not elementwise:
        raise BadInput(
            f"site '{part.name}', shape {tuple(part.shape)}, has elements that depend on several unconstrained "
            f"coordinates each ({type(part.transform).__name__}), so that no single one has a density to show. Use "
            f"posterior.get_samples()['{part.name}']."
        )
    plain = unconstrained(x.reshape(-1, *part.shape), density.reshape(-1, *part.shape))
    values = part.transform(plain.values)
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    log_slope = transform.log_abs_det_jacobian(plain.values, values) + torch.zeros_like(values)
    return Marginal(values, plain.density * (-log_slope).exp(), plain.mass)


def unconstrained(x: Tensor, density: Tensor) -> Marginal:
    """The marginals of unconstrained coordinates, densities ``(G, ...)`` at ``x`` ``(G, ...)`` normalised."""
    cells = 0.5 * (density[1:] + density[:-1]) * x.diff(dim=0)
    mass = torch.cat([torch.zeros_like(x[:1]), cells.cumsum(0)])
    return Marginal(x, density / mass[-1], mass / mass[-1])


def inner_density(integral: Integral, places: Tensor) -> tuple[Tensor, Tensor]:
    """Densities of inner coordinates ``places`` ``(E,)``: a mixture over the nodes; points and densities ``(G, E)``."""
    keep = integral.log_weights > -30.0
    weights = integral.log_weights[keep].softmax(0)
    loc, sd = integral.nodes.u[keep][:, places], integral.nodes.precision.variance[keep][:, places].sqrt()
    if integral.margins is None:
        axes = AxisMap(zero := torch.zeros_like(loc), zero + 1.0, zero, zero + 1.0)
    else:
        every = integral.margins.axes(integral.standardisation.inverse(integral.phi[keep]))
        axes = AxisMap(*(part[:, places] for part in vars(every).values()))
    low, left, middle, right, high = (
        loc + sd * axes.forward(loc.new_full(loc.shape, z)) for z in (-END, -1, 0, 1, END)
    )
    near = (weights[:, None] * middle).sum(0)
    wide = (weights[:, None] * ((0.5 * (right - left)).square() + (middle - near).square())).sum(0).sqrt()
    most = 12.0 * wide  # of a mixture of far nodes
    low, high = torch.maximum(low.amin(0), near - most), torch.minimum(high.amax(0), near + most)
    x = low + (high - low) * torch.linspace(0.0, 1.0, NUM_POINTS).to(low).unsqueeze(-1)
    z = axes.inverse((x.unsqueeze(1) - loc) / sd)  # (G, K, E)
    each = torch.distributions.Normal(0.0, 1.0).log_prob(z) - axes.log_slopes(z) - sd.log()
    return x, (weights[:, None] * each.exp()).sum(1)


def marginalised_density(integral: Integral, index: int) -> tuple[Tensor, Tensor]:
    """Density of one marginalised coordinate, ``(G,)``; the axis that it leans on most by a change of variables."""
    where = integral.standardisation
    axis = int(where.basis[index].abs().argmax())
    order = (*(a for a in range(where.num_dims) if a != axis), axis)
    axes = AxisMap(*(part[list(order)] for part in vars(where.axes).values()))
    density, turned = integral.density.permuted(order), replace(where, basis=where.basis[:, list(order)], axes=axes)
    white = quasi_normal(NUM_OTHERS if where.num_dims > 1 else 2, where.num_dims).to(where.centre)
    wide = turned.forward(density.unwhiten(quasi_normal(2048, where.num_dims).to(where.centre)))[:, index]
    margin = 0.3 * (wide.max() - wide.min())
    x = torch.linspace(float(wide.min() - margin), float(wide.max() + margin), NUM_POINTS).to(wide)
    z = density.unwhiten(white)[:, :-1]
    last = density.last_given_others(z)
    rest = turned.axes.forward(torch.cat([z, z.new_zeros(len(z), 1)], -1)) * turned.basis[index]
    t = (x - where.centre[index] - rest[:, :-1].sum(-1, keepdim=True)) / turned.basis[index, -1]
    own = AxisMap(*(part[-1:] for part in vars(turned.axes).values()))
    along = own.inverse(t.unsqueeze(-1))
    slope = own.log_slope(along).exp() * turned.basis[index, -1].abs()
    return x, (last.prob(along.squeeze(-1)) / slope).mean(0)
