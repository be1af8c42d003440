"""Fully connected layers as tensors: outputs, and the symmetries of the hidden units.

A layer is a pair ``W`` ``(..., I, O)``, ``b`` ``(..., O)``; the activation stands between layers, not after the last.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Activation = Callable[[Tensor], Tensor]  # elementwise
Layer = tuple[Tensor, Tensor]


def outputs(X: Tensor, layers: Sequence[Layer], activation: Activation) -> Tensor:
    """Activations of the last layer for inputs ``(N, D)``, shape ``(..., N, C)``."""
    hidden = X
    for W, b in layers[:-1]:
        hidden = activation(hidden @ W + b.unsqueeze(-2))
    W, b = layers[-1]
    return hidden @ W + b.unsqueeze(-2)


def tangent(X: Tensor, layers: Sequence[Layer], touched: Sequence[Layer], activation: Activation) -> Tensor:
    """Outputs of the tangent at the weights ``touched``, linear in those of ``layers``, shape ``(..., N, C)``.

    Bishop (2006), eq. 5.169.
    """
    hidden, move = X, torch.zeros_like(X)
    for (W, b), (V, c) in zip(touched[:-1], layers[:-1], strict=True):
        along = move @ W + hidden @ (V - W) + (c - b).unsqueeze(-2)
        reached = hidden @ W + b.unsqueeze(-2)
        bend = torch.func.grad(lambda x: activation(x).sum())(reached)  # also within a batch of rows, unlike autograd
        hidden, move = activation(reached), bend * along
    (W, b), (V, c) = touched[-1], layers[-1]
    return move @ W + hidden @ V + c.unsqueeze(-2)


def is_odd(activation: Activation) -> bool:
    """Whether ``f(-x) = -f(x)``, at 33 points: then a hidden unit and its negative do the same."""
    x = torch.linspace(0.0, 4.0, 33, dtype=torch.float64)
    with torch.no_grad():
        ahead, behind = activation(x), activation(-x)
    return torch.allclose(ahead, -behind, rtol=1e-9, atol=1e-9)


def log_symmetries(num_units: int, odd: bool) -> float:
    r"""Log number of relabellings of a hidden layer, :math:`\log (2^H H!)` for an odd activation, else :math:`\log H!`.

    Bishop (1995), sec. 4.4; MacKay (1992), "A practical Bayesian framework for backpropagation networks".
    """
    return math.lgamma(num_units + 1.0) + (num_units * math.log(2.0) if odd else 0.0)


def log_stabiliser(before: Layer, after: Tensor, odd: bool, tolerance: float) -> float:
    """Log number of relabellings of one hidden layer that leave these very weights as they are.

    Units that are copies of each other (up to sign, for an odd activation) can be exchanged, and a unit of zero weights
    can be mirrored, without any change; copies of a mode are fewer by this factor.

    :param before: the layer that feeds the units, ``(I, H)`` and ``(H,)``.
    :param after: the weights that leave them, ``(H, O)``.
    :param tolerance: largest difference of two weights that are one, in units of the largest weight.
    """
    units = torch.cat([before[0].mT, before[1].unsqueeze(-1), after], -1)
    gap = tolerance * units.abs().amax().clamp(min=torch.finfo(units.dtype).tiny)  # > 0, so that zeros are equal
    if odd:
        units = _same_sign(units, gap)
    different = ((units.unsqueeze(0) - units.unsqueeze(1)).abs() > gap).any(-1)
    first = (~different).int().argmax(-1)  # of each unit's copies
    copies = torch.bincount(first, minlength=len(units))
    zeros = int((units.abs() <= gap).all(-1).sum()) if odd else 0
    return float(torch.lgamma(copies + 1.0).sum()) + zeros * math.log(2.0)


def _same_sign(units: Tensor, gap: Tensor) -> Tensor:
    """Each row times the sign of its first entry that is not zero."""
    first = (units.abs() > gap).int().argmax(-1, keepdim=True)
    return units * torch.where(units.gather(-1, first) < 0, -1.0, 1.0).to(units)


def slope(f: Activation, a: Tensor) -> Tensor:
    """``f'(a)`` of an elementwise function, with a graph where ``a`` has one."""
    return with_derivatives(f, a, 1)[1]


def with_derivatives(f: Activation, a: Tensor, order: int) -> list[Tensor]:
    """``f(a)`` of an elementwise function and its derivatives up to ``order``, with a graph where ``a`` has one."""
    with torch.enable_grad():
        x = a if a.requires_grad else a.detach().requires_grad_()
        found = [f(x)]
        for level in range(order):
            graph = a.requires_grad or level + 1 < order
            last = found[-1]
            bends = last.requires_grad
            found.append(torch.autograd.grad(last.sum(), x, create_graph=graph)[0] if bends else torch.zeros_like(a))
    return found if a.requires_grad else [value.detach() for value in found]


@dataclass(frozen=True)
class Passed:
    """What a pass of the data through a network has met.

    :ivar hidden: what enters every layer, ``(R, N, I)`` each.
    :ivar slopes: of the activations before all layers but the first, ``(R, N, I)`` each.
    :ivar bends: their second derivatives, where they were asked for.
    """

    layers: Sequence[Layer]
    hidden: list[Tensor]
    slopes: list[Tensor]
    bends: list[Tensor]

    @property
    def outputs(self) -> Tensor:
        """Activations of the last layer, ``(R, N, C)``."""
        W, b = self.layers[-1]
        return self.hidden[-1] @ W + b.unsqueeze(-2)


def forward(X: Tensor, layers: Sequence[Layer], activation: Activation, order: int = 1) -> Passed:
    """A pass of inputs ``(N, D)`` that keeps the activations' derivatives up to ``order``, 1 or 2.

    :param layers: with one batch dim in front, ``(R, I, O)`` and ``(R, O)``.
    """
    hidden, slopes, bends = [X.expand(len(layers[0][0]), *X.shape)], [], []
    for W, b in layers[:-1]:
        value, first, *second = with_derivatives(activation, hidden[-1] @ W + b.unsqueeze(-2), order)
        hidden.append(value)
        slopes.append(first)
        bends.extend(second)
    return Passed(layers, hidden, slopes, bends)


def back(passed: Passed, g: Tensor) -> list[Layer]:
    r"""Derivatives of :math:`\sum_{nc} g_{nc} \eta_{nc}` in every layer.  Bishop (2006), eq. 5.53 and 5.56.

    :param g: ``(R, N, C)``.
    """
    found, delta = [], g
    for level in reversed(range(len(passed.layers))):
        found.append((passed.hidden[level].mT @ delta, delta.sum(-2)))
        if level:
            delta = (delta @ passed.layers[level][0].mT) * passed.slopes[level - 1]
    return found[::-1]


def jacobian(passed: Passed) -> list[Layer]:
    """Derivatives of every datum's outputs in every layer, ``(R, N, C, I, O)`` and ``(R, N, C, O)``.

    Back-propagation with one delta per datum and output: the cost is that of writing the result down.  Bishop (2006),
    eq. 5.74.
    """
    layers, hidden = passed.layers, passed.hidden
    num_outputs = layers[-1][1].shape[-1]
    delta = torch.eye(num_outputs).to(hidden[0]).expand(*hidden[0].shape[:2], num_outputs, num_outputs)  # (R, N, C, O)
    found = []
    for level in reversed(range(len(layers))):
        found.append((hidden[level][:, :, None, :, None] * delta.unsqueeze(-2), delta))
        if level:
            back = delta.flatten(1, 2) @ layers[level][0].mT
            delta = back.unflatten(1, delta.shape[1:3]) * passed.slopes[level - 1].unsqueeze(-2)
    return found[::-1]


def bend(passed: Passed, g: Tensor) -> tuple[Tensor, Tensor]:
    r"""Second derivatives of :math:`\sum_{nc} g_{nc} \eta_{nc}` of a network with one hidden layer.

    :param passed: to second order.
    :param g: ``(R, N, C)``.
    :return: of each unit's incoming weights, bias last, ``(R, H, I + 1, I + 1)``; between them and its outgoing ones,
        ``(R, H, I + 1, C)``.  All others are zero.  Bishop (1995), sec. 4.10.
    """
    X, V = passed.hidden[0][0], passed.layers[1][0]
    inputs = torch.cat([X, torch.ones_like(X[:, :1])], -1)
    weighted = ((g @ V.mT) * passed.bends[0]).mT.unsqueeze(-1) * inputs  # (R, H, N, I + 1)
    across = torch.einsum("rnh,ni,rnc->rhic", passed.slopes[0], inputs, g)
    return weighted.mT @ inputs, across
