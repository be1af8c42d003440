"""Marginals of inner coordinates as smooth maps of normal ones, their parameters smooth in the outer coordinates."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.laplace.shape.conditional import Profiles, is_normal
from pyro_evidence.laplace.shape.outer_points import follow
from pyro_evidence.numerics.quadrature import axis_map
from pyro_evidence.numerics.quadrature.axis_map import AxisMap

RISE = 0.5  # nats on the way out that a skewed density may still rise by
POINTS = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)  # standard deviations


@dataclass(frozen=True)
class Margins:
    """Maps of every inner coordinate, from standard normal to its standardised marginal.

    :ivar coefficients: of location, log scale, skew and log tail in 1, ``z`` and ``z^2`` of the outer coordinates,
        ``(B, D, 4)``; ``B`` is 1 where they do not follow them, and 1 + 2 d where they do.
    """

    coefficients: Tensor

    def axes(self, z: Tensor) -> AxisMap:
        """The maps at outer coordinates ``(S, d)``; each parameter ``(S, D)``."""
        params = torch.tensordot(follow(z, len(self.coefficients)), self.coefficients, 1)
        loc, log_scale, skew, log_tail = params.unbind(-1)
        return AxisMap(loc, log_scale.exp(), skew, log_tail.exp())


def margins(profiles: Profiles, z: Tensor) -> Margins | None:
    """The marginals' maps; None where the inner density is normal.

    :param profiles: inner modes at the outer coordinates ``z`` ``(K, d)`` of those points.
    """
    if is_normal(profiles):
        return None
    points = z.new_tensor(POINTS)
    log_density = _falling(profiles.log_marginal(points))
    axes = axis_map.fitted(points.expand(log_density[..., 0].numel(), -1), log_density.flatten(0, 1))
    params = torch.stack([axes.loc, axes.scale.log(), axes.skew, axes.tail.log()], -1).reshape(
        *log_density.shape[:2], 4
    )
    return Margins(torch.linalg.solve(follow(z, len(z)), params.flatten(1)).reshape(params.shape))


def _falling(log_density: Tensor) -> Tensor:
    """Without points behind a valley, where the others have found another hill, ``(K, D, J)``."""
    middle = log_density.shape[-1] // 2
    left, right = log_density[..., : middle + 1].flip(-1), log_density[..., middle:]
    kept = [torch.where(way <= way.cummin(-1).values + RISE, way, -torch.inf) for way in (left, right)]
    return torch.cat([kept[0].flip(-1), kept[1][..., 1:]], -1)
