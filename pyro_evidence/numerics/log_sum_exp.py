"""Sums of exponentials that keep their derivatives, and an einsum made of them.

The module has the three names (``einsum``, ``tensordot``, ``transpose``) that ``opt_einsum`` asks of a
backend.
"""

from functools import reduce
from operator import add
from string import ascii_letters

import torch
from torch import Tensor


def log_sum_exp(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """``log sum exp x`` over ``dim``; a slice that is -inf throughout gives -inf and zero derivatives."""
    possible = (x != -torch.inf).any(dim, keepdim=True)
    total = torch.where(possible, x, 0.0).logsumexp(dim, keepdim=True)
    return torch.where(possible, total, -torch.inf).squeeze(dim)


def safe_log(probability: Tensor) -> Tensor:
    """``log probability``; -inf and zero derivatives where it is exactly 0."""
    possible = probability != 0
    return torch.where(possible, torch.where(possible, probability, 1.0).log(), -torch.inf)


def transpose(a: Tensor, axes: tuple[int, ...]) -> Tensor:
    """``a`` with its axes permuted."""
    return a.permute(axes)


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """``log sum exp sum operands``: an einsum in which + is log-add-exp and * is +.

    Every operand is broadcast to all symbols before the sum, so no factor underflows on its own.
    """
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    summed = sorted(set(inputs) - {",", *output})
    symbols = "".join(summed) + output
    total = reduce(add, (aligned(t, d, symbols) for t, d in zip(operands, terms, strict=True)))
    return log_sum_exp(total, tuple(range(len(summed)))) if summed else total[...]


def aligned(term: Tensor, dims: str, symbols: str) -> Tensor:
    """``term``, whose axes are called ``dims``, with one axis per symbol, of size one where it has none."""
    if dims == symbols:
        return term
    present = [s for s in symbols if s in dims]
    term = term.permute([dims.index(s) for s in present])
    shape = iter(term.shape)
    return term.reshape([next(shape) if s in dims else 1 for s in symbols])


def tensordot(a: Tensor, b: Tensor, axes: tuple[list[int], list[int]]) -> Tensor:
    """The two-operand :func:`einsum` that contracts ``axes[0]`` of ``a`` with ``axes[1]`` of ``b``."""
    left, right = (list(x) for x in axes)
    names_a, names_b = list(ascii_letters[: a.dim()]), list(ascii_letters[a.dim() : a.dim() + b.dim()])
    for i, j in zip(left, right, strict=True):
        names_b[j] = names_a[i]
    kept_a = [s for i, s in enumerate(names_a) if i not in left]
    kept_b = [s for j, s in enumerate(names_b) if j not in right]
    return einsum(f"{''.join(names_a)},{''.join(names_b)}->{''.join(kept_a + kept_b)}", a, b)
