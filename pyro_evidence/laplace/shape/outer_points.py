"""Where the shape of inner densities is looked at, and how it follows the outer coordinates from there."""

import torch
from torch import Tensor

REACH = 1.6  # standard deviations of the outer coordinates at which shapes are looked at
FARTHEST = 2.4  # beyond which they are taken as here
FOLLOWED = 3  # outer coordinates up to which shapes may change with them


def outer_points(num_dims: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Outer coordinates at which inner modes are wanted: centre and axes, ``(K, d)``, or the centre alone."""
    axes = REACH * torch.eye(num_dims).to(like)
    centre = torch.zeros_like(axes[:1])
    return (torch.cat([centre, axes, -axes]) if num_dims <= FOLLOWED else centre), centre


def follow(z: Tensor, num: int) -> Tensor:
    """The first ``num`` of 1, ``z`` and ``z^2`` at outer coordinates ``(S, d)``, ``(S, num)``."""
    near = z.clamp(-FARTHEST, FARTHEST)
    return torch.cat([z.new_ones(len(z), 1), near, near.square()], -1)[:, :num]
