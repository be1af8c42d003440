"""Who touches whom: a symmetric matrix as a sum of small matrices, one for each factor of a density."""

from dataclasses import dataclass

import torch
from torch import Tensor

Elements = tuple[Tensor, ...]  # per family of factors (F, k, k), symmetric


@dataclass(frozen=True)
class Pattern:
    """The coordinates that each factor touches; fixed during a fit.

    The matrix is ``A = sum_f E_f' A_f E_f``, with ``E_f`` the rows of the identity that ``index`` names; a coordinate
    that occurs twice in a row of ``index`` adds up.
    """

    size: int  # D
    index: tuple[Tensor, ...]  # per family (F, k) long, flat coordinates


def product(pattern: Pattern, elements: Elements, v: Tensor) -> Tensor:
    """``A v`` for each row of ``v``, shape ``(..., D)``; no matrix is assembled.

    >>> pattern = Pattern(3, (torch.tensor([[0, 1], [1, 2]]),))
    >>> product(pattern, (torch.ones(2, 2, 2),), torch.tensor([1.0, 0.0, 0.0]))
    tensor([1., 1., 0.])
    """
    out = torch.zeros_like(v)
    for index, blocks in zip(pattern.index, elements, strict=True):
        terms = torch.einsum("fab,...fb->...fa", blocks.to(v), v[..., index])
        out = out.index_add(-1, index.reshape(-1), terms.flatten(-2))
    return out


def assembled(pattern: Pattern, elements: Elements) -> Tensor:
    """``A`` as a dense matrix, ``(D, D)`` float64."""
    size = pattern.size
    device = pattern.index[0].device if pattern.index else torch.device("cpu")
    flat = torch.zeros(size * size, dtype=torch.float64, device=device)
    for index, blocks in zip(pattern.index, elements, strict=True):
        place = index.unsqueeze(-1) * size + index.unsqueeze(-2)
        flat.index_add_(0, place.reshape(-1), blocks.double().reshape(-1))
    return flat.reshape(size, size)


def on_pattern(pattern: Pattern, Z: Tensor) -> Elements:
    """The entries of a dense symmetric ``Z`` ``(D, D)`` that the factors touch, per family ``(F, k, k)``."""
    return tuple(Z[index.unsqueeze(-1), index.unsqueeze(-2)] for index in pattern.index)
