"""Fully connected layers as tensors: outputs, and the symmetries of the hidden units.

A layer is a pair ``W`` ``(..., I, O)``, ``b`` ``(..., O)``; the activation stands between layers, not after the last.
"""

import math
from collections.abc import Callable, Sequence

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
    with torch.enable_grad():
        x = a if a.requires_grad else a.detach().requires_grad_()
        value = f(x).sum()
        if not value.requires_grad:
            return torch.zeros_like(a)
        found = torch.autograd.grad(value, x, create_graph=True)[0]
    return found if a.requires_grad else found.detach()


def forward(X: Tensor, layers: Sequence[Layer], activation: Activation) -> tuple[list[Tensor], list[Tensor]]:
    """What enters every layer, ``(R, N, I)`` each, and the slopes of the activations before all layers but the first.

    :param layers: with one batch dim in front, ``(R, I, O)`` and ``(R, O)``.
    """
    hidden, slopes = [X.expand(len(layers[0][0]), *X.shape)], []
    for W, b in layers[:-1]:
        a = hidden[-1] @ W + b.unsqueeze(-2)
        hidden.append(activation(a))
        slopes.append(slope(activation, a))
    return hidden, slopes


def back(hidden: Sequence[Tensor], slopes: Sequence[Tensor], layers: Sequence[Layer], g: Tensor) -> list[Layer]:
    r"""Derivatives of :math:`\sum_{nc} g_{nc} \eta_{nc}` in every layer.  Bishop (2006), eq. 5.53 and 5.56.

    :param hidden: of :func:`forward`, and ``slopes``.
    :param g: ``(R, N, C)``.
    """
    found, delta = [], g
    for level in reversed(range(len(layers))):
        found.append((hidden[level].mT @ delta, delta.sum(-2)))
        if level:
            delta = (delta @ layers[level][0].mT) * slopes[level - 1]
    return found[::-1]


def jacobian(X: Tensor, layers: Sequence[Layer], activation: Activation) -> list[Layer]:
    """Derivatives of every datum's outputs in every layer, ``(R, N, C, I, O)`` and ``(R, N, C, O)``.

    Back-propagation with one delta per datum and output: the cost is that of writing the result down.  Bishop (2006),
    eq. 5.74.

    :param layers: with one batch dim in front, ``(R, I, O)`` and ``(R, O)``.
    """
    hidden, slopes = forward(X, layers, activation)
    num_outputs = layers[-1][1].shape[-1]
    eye = torch.eye(num_outputs, dtype=X.dtype, device=X.device)
    delta = eye.expand(*hidden[0].shape[:2], num_outputs, num_outputs)  # (R, N, C, O)
    found = []
    for level in reversed(range(len(layers))):
        found.append((hidden[level][:, :, None, :, None] * delta.unsqueeze(-2), delta))
        if level:
            back = delta.flatten(1, 2) @ layers[level][0].mT
            delta = back.unflatten(1, delta.shape[1:3]) * slopes[level - 1].unsqueeze(-2)
    return found[::-1]


def bend(X: Tensor, layers: Sequence[Layer], activation: Activation, g: Tensor) -> tuple[Tensor, Tensor]:
    r"""Second derivatives of :math:`\sum_{nc} g_{nc} \eta_{nc}` of a network with one hidden layer.

    :param g: ``(R, N, C)``.
    :return: of each unit's incoming weights, bias last, ``(R, H, I + 1, I + 1)``; between them and its outgoing ones,
        ``(R, H, I + 1, C)``.  All others are zero.  Bishop (1995), sec. 4.10.
    """
    (W, b), (V, _) = layers
    a = X @ W + b.unsqueeze(-2)
    first = slope(activation, a)
    second = slope(lambda x: slope(activation, x), a)
    inputs = torch.cat([X, torch.ones_like(X[:, :1])], -1)
    weighted = ((g @ V.mT) * second).mT.unsqueeze(-1) * inputs  # (R, H, N, I + 1)
    across = torch.einsum("rnh,ni,rnc->rhic", first, inputs, g)
    return weighted.mT @ inputs, across
