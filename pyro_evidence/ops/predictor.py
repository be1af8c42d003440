"""Likelihoods that see the weights only through predictors: their curvature as dense linear algebra."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LogLikelihood = Callable[[Tensor], Tensor]  # eta (R,) + shape -> (R,)


@dataclass(frozen=True)
class Layout:
    """How the elements of a predictor of some shape couple within a datum: ``N`` data of ``C`` elements each."""

    shape: torch.Size
    coupled: tuple[int, ...]  # dims of shape that couple; the others run over data

    @property
    def num_coupled(self) -> int:
        """``C``: classes, components, coordinates of one datum."""
        return torch.Size([self.shape[d] for d in self.coupled]).numel()

    @property
    def order(self) -> Tensor:
        """Positions of the elements of ``shape``, laid out as ``(N * C,)``."""
        data = [d for d in range(len(self.shape)) if d not in self.coupled]
        return torch.arange(self.shape.numel()).reshape(self.shape).permute(*data, *self.coupled).reshape(-1)

    def blocks(self, eta: Tensor) -> Tensor:
        """``(R,) + shape`` to ``(R, N, C)``."""
        flat = eta.reshape(len(eta), -1)
        flat = flat[:, self.order] if self.coupled else flat
        return flat.reshape(len(eta), -1, self.num_coupled)

    def natural(self, blocks: Tensor) -> Tensor:
        """``(R, N, C)`` to ``(R,) + shape``."""
        flat = blocks.reshape(len(blocks), -1)
        flat = flat[:, self.order.argsort()] if self.coupled else flat
        return flat.reshape(len(blocks), *self.shape)


def curvature_blocks(log_likelihood: LogLikelihood, layout: Layout, eta: Tensor, *, create_graph: bool) -> Tensor:
    """Minus the second derivatives of the log likelihood within each datum, shape ``(R, N, C, C)``.

    :param eta: blocks ``(R, N, C)`` that require a gradient.
    """
    slope = torch.autograd.grad(log_likelihood(layout.natural(eta)).sum(), eta, create_graph=True)[0]
    if not slope.requires_grad:
        return eta.new_zeros(*eta.shape, eta.shape[-1])
    one_hot = torch.eye(eta.shape[-1], dtype=eta.dtype, device=eta.device)
    cotangents = one_hot[:, None, None, :].expand(-1, *eta.shape)
    if eta.shape[-1] == 1:
        return -torch.autograd.grad(slope.sum(), eta, create_graph=create_graph)[0].unsqueeze(-1)
    rows = torch.autograd.grad(slope, eta, cotangents, is_grads_batched=True, create_graph=create_graph)[0]
    return -rows.permute(1, 2, 0, 3)


def gram(J: Tensor, B: Tensor, *, rows_per_chunk: int = 2048) -> Tensor:
    """``sum_n J_n' B_n J_n``, shape ``(R, D, D)``, in chunks of data so that no second ``J`` is held.

    :param J: ``(N, C, D)`` or, one per row, ``(R, N, C, D)``.
    :param B: ``(R, N, C, C)``.
    """
    parts = zip(J.split(rows_per_chunk, -3), B.split(rows_per_chunk, -3), strict=True)
    total: Tensor | None = None
    for J_part, B_part in parts:
        weighted = B_part * J_part if B.shape[-1] == 1 else B_part @ J_part
        left = J_part.flatten(-3, -2)
        part = left.mT @ weighted.flatten(-3, -2)
        total = part if total is None else total + part
    assert total is not None
    return total


def gram_diagonal(J: Tensor, B: Tensor) -> Tensor:
    """Diagonal of :func:`gram`, shape ``(R, D)``."""
    weighted = B * J if B.shape[-1] == 1 else B @ J
    return (J * weighted).sum((-3, -2))
