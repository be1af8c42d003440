"""Squared Euclidean distances that are exact to rounding, also between neighbours, with cheap derivatives."""

from typing import Any

import torch
from torch import Tensor


def squared_distance(X: Tensor, Z: Tensor) -> Tensor:
    """``|x_i - z_j|^2``, shape ``(..., N, M)``, of rows ``(..., N, D)`` and ``(..., M, D)``.

    Not through ``|x|^2 + |z|^2 - 2 x'z``, whose cancellation costs half of the digits between neighbours; its
    derivatives, which are matrix products, may be taken again.
    """
    if not (torch.is_grad_enabled() and (X.requires_grad or Z.requires_grad)):
        return _distance(X, Z).square()
    return _Squared.apply(X, Z)


def _distance(X: Tensor, Z: Tensor) -> Tensor:
    return torch.cdist(X, Z, compute_mode="donot_use_mm_for_euclid_dist")


class _Squared(torch.autograd.Function):
    """:func:`squared_distance`; the derivative is ``2 sum_j G_ij (x_i - z_j)``, made of matrix products."""

    generate_vmap_rule = True

    @staticmethod
    def forward(X: Tensor, Z: Tensor) -> Tensor:
        return _distance(X.detach(), Z.detach()).square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, Tensor]:
        (X, Z), (G,) = ctx.saved_tensors, cotangents
        return _pulled(X, Z, G), _pulled(Z, X, G.mT)


def _pulled(X: Tensor, Z: Tensor, G: Tensor) -> Tensor:
    return 2.0 * (G.sum(-1, keepdim=True) * X - G @ Z)


def root(squared: Tensor) -> Tensor:
    """Square root of numbers >= 0 whose derivative at 0 is 0 instead of infinite."""
    positive = squared > 0
    return torch.where(positive, torch.where(positive, squared, 1.0).sqrt(), 0.0)
