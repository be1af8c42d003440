"""Derivatives of ``f(u, theta)`` with rows ``(R, D)``, ``(R, T)`` in and ``(R,)`` out, by plain reverse mode."""

from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[Tensor, Tensor], Tensor]


def gradient(f: Function, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Values ``(R,)`` and gradients in ``u`` ``(R, D)``, detached."""
    u = u.detach().requires_grad_()
    value = f(u, theta)
    return value.detach(), pullback(value.sum(), u)


def hessian(f: Function, u: Tensor, theta: Tensor, *, create_graph: bool = False) -> Tensor:
    """Second derivatives in ``u``, shape ``(R, D, D)``; differentiable in ``u`` and ``theta`` on request.

    Batched double backward, in chunks that keep about 2**25 numbers of a row's graph alive.
    """
    u = u if u.requires_grad else u.detach().requires_grad_()
    slope = pullback(f(u, theta).sum(), u, create_graph=True)
    basis = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device).unsqueeze(1).expand(-1, *u.shape)
    if not slope.requires_grad:
        return u.new_zeros(*u.shape, u.shape[-1])
    rows = [_passes(slope, u, part, create_graph) for part in basis.split(max(1, min(256, 2**25 // u.numel())))]
    return torch.cat(rows).transpose(0, 1)


def hessian_diagonal(f: Function, u: Tensor, theta: Tensor, *, create_graph: bool = False) -> Tensor:
    """Diagonal of the second derivatives, shape ``(R, D)``, never more than a chunk of rows in memory."""
    u = u if u.requires_grad else u.detach().requires_grad_()
    slope = pullback(f(u, theta).sum(), u, create_graph=True)
    if not slope.requires_grad:
        return torch.zeros_like(u)
    chunks = torch.arange(u.shape[-1], device=u.device).split(max(1, min(256, 2**25 // u.numel())))
    return torch.cat([_diagonal_part(slope, u, index, create_graph) for index in chunks], -1)


def _diagonal_part(slope: Tensor, u: Tensor, index: Tensor, create_graph: bool) -> Tensor:
    basis = torch.nn.functional.one_hot(index, u.shape[-1]).to(u.dtype).unsqueeze(1).expand(-1, *u.shape)
    rows = _passes(slope, u, basis, create_graph)
    return rows.gather(-1, index[:, None, None].expand(-1, len(u), 1)).squeeze(-1).T


def pullback(value: Tensor, x: Tensor, cotangent: Tensor | None = None, *, create_graph: bool = False) -> Tensor:
    """``(d value / d x)' cotangent``; zeros where ``value`` does not depend on ``x``."""
    if not value.requires_grad:
        return torch.zeros_like(x)
    found = torch.autograd.grad(value, x, cotangent, create_graph=create_graph, retain_graph=True, allow_unused=True)[0]
    return torch.zeros_like(x) if found is None else found


def jacobian(value: Tensor, x: Tensor, *, create_graph: bool = False) -> Tensor:
    """``d value / d x`` for vectors ``(n,)`` and ``(D,)``, shape ``(n, D)``, in ``min(n, D)`` passes."""
    if not value.requires_grad or not value.numel() or not x.numel():
        return x.new_zeros(value.numel(), x.numel())
    if value.numel() <= x.numel():
        return _passes(value, x, torch.eye(value.numel(), dtype=value.dtype, device=x.device), create_graph)
    return _by_columns(value, x, create_graph)


def _by_columns(value: Tensor, x: Tensor, create_graph: bool) -> Tensor:
    """Forward derivatives as the derivative of the reverse ones, which are linear in their cotangent."""
    cotangent = torch.zeros_like(value).requires_grad_()
    slope = torch.autograd.grad(value, x, cotangent, create_graph=True, allow_unused=True)[0]
    if slope is None or not slope.requires_grad:
        return x.new_zeros(value.numel(), x.numel())
    return _passes(slope, cotangent, torch.eye(x.numel(), dtype=x.dtype, device=x.device), create_graph).T


def _passes(value: Tensor, x: Tensor, cotangents: Tensor, create_graph: bool) -> Tensor:
    """One reverse pass per cotangent, shape ``(P,) + x.shape``; zeros where nothing flows."""
    found = torch.autograd.grad(
        value, x, cotangents, is_grads_batched=True, retain_graph=True, create_graph=create_graph, allow_unused=True
    )[0]
    return x.new_zeros(len(cotangents), *x.shape) if found is None else found
