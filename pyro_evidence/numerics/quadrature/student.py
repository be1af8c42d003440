"""The standard multivariate Student-t with five degrees of freedom, whose tails cover those of most posteriors."""

import math

import torch
from torch import Tensor

DEGREES = 5.0


def draws(num: int, num_dims: int) -> Tensor:
    """The same ones every time, ``(num, d)``."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(num, num_dims, generator=generator, dtype=torch.float64)
    chi = torch.randn(num, int(DEGREES), generator=generator, dtype=torch.float64).square().sum(-1, keepdim=True)
    return normal * (DEGREES / chi).sqrt()


def log_density(z: Tensor) -> Tensor:
    """Log density at ``z`` ``(S, d)``, nats, ``(S,)``."""
    d = z.shape[-1]
    norm = math.lgamma(0.5 * (DEGREES + d)) - math.lgamma(0.5 * DEGREES) - 0.5 * d * math.log(DEGREES * math.pi)
    return norm - 0.5 * (DEGREES + d) * torch.log1p(z.square().sum(-1) / DEGREES)
