"""Second derivatives of a few terms that touch many coordinates each: a Gaussian process, a global block."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_evidence.numerics.derivatives import passes, pullback

AT_ONCE = 64  # reverse passes


def hessians(values: Tensor, index: Tensor, u: Tensor) -> Tensor:
    """Minus the second derivatives of each of ``values`` ``(F,)`` in its coordinates, ``(F, k, k)``.

    :param index: the coordinates, ``(F, k)``.
    :param u: ``(D,)``, of which the values are made.
    """
    found = []
    for value, own in zip(values, index, strict=True):
        slope = pullback(value, u, create_graph=True)[own]
        one_hot = torch.eye(len(own), dtype=slope.dtype, device=slope.device)
        rows = [_rows(slope, u, chunk)[:, own] for chunk in one_hot.split(AT_ONCE)]
        found.append(-torch.cat(rows))
    return torch.stack(found)


def _rows(slope: Tensor, u: Tensor, cotangents: Tensor) -> Tensor:
    return passes(slope, u, cotangents, False) if slope.requires_grad else u.new_zeros(len(cotangents), len(u))


def slopes(values: Tensor, index: Tensor, weights: Tensor, u: Tensor, wrt: Sequence[Tensor]) -> list[Tensor]:
    """Derivatives in ``wrt`` of ``sum(weights * hessians)``.

    :param weights: symmetric, ``(F, k, k)``.
    """
    totals = [torch.zeros_like(x) for x in wrt]
    for value, own, weight in zip(values, index, weights, strict=True):
        slope = pullback(value, u, create_graph=True)
        if not slope.requires_grad:
            continue
        for i, row in enumerate(weight):
            product = pullback(slope[own[i]], u, create_graph=True)[own] @ row
            if product.requires_grad:
                parts = torch.autograd.grad(-product, list(wrt), allow_unused=True, retain_graph=True)
                totals = [t if p is None else t + p for t, p in zip(totals, parts, strict=True)]
    return totals
