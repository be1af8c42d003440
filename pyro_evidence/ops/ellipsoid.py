"""Ellipsoids for truncated harmonic means: volume, membership, uniform points."""

import math

import torch
from torch import Tensor


def log_volume(tril: Tensor, radius: float) -> Tensor:
    """Log volume of ``{y : |L^-1 (y - m)| <= radius}``, shape ``()``."""
    d = len(tril)
    log_ball = 0.5 * d * math.log(math.pi) - math.lgamma(0.5 * d + 1.0)
    return log_ball + d * math.log(radius) + tril.diagonal().log().sum()


def squared_distance(y: Tensor, mean: Tensor, tril: Tensor) -> Tensor:
    """``|L^-1 (y - m)|^2`` of rows ``(..., D)``, shape ``(...)``."""
    white = torch.linalg.solve_triangular(tril, (y - mean).reshape(-1, len(mean)).mT, upper=False)
    return white.square().sum(0).reshape(y.shape[:-1])


def uniform_points(white: Tensor, uniform: Tensor, mean: Tensor, tril: Tensor, radius: float) -> Tensor:
    """Uniform points of the ellipsoid ``(S, D)`` from normal ``(S, D)`` and uniform ``(S,)`` numbers."""
    direction = white / white.norm(dim=-1, keepdim=True)
    return mean + radius * (uniform ** (1.0 / len(mean))).unsqueeze(-1) * direction @ tril.mT
