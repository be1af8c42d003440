"""Back-propagation against automatic differentiation, symmetries against counting."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from pyro_evidence.numerics import derivatives
from pyro_evidence.structure import network
from pyro_evidence.structure.network import Activation, Layer

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-11)


def layers_of(u: Tensor, widths: tuple[int, ...]) -> list[Layer]:
    """Flat ``(R, D)`` to layers, weights before biases."""
    found, place = [], 0
    for rows, columns in itertools.pairwise(widths):
        W = u[:, place : place + rows * columns].reshape(-1, rows, columns)
        place += rows * columns
        found.append((W, u[:, place : place + columns]))
        place += columns
    return found


def draw(widths: tuple[int, ...], num: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = sum((a + 1) * b for a, b in itertools.pairwise(widths))
    return torch.randn(num, size, generator=generator), torch.randn(7, widths[0], generator=generator)


def test_outputs_are_those_of_a_module() -> None:  # oracle: torch's own layers
    u, X = draw((3, 5, 2), num=1)
    (W, b), (V, c) = layers_of(u, (3, 5, 2))
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    module.load_state_dict({"0.weight": W[0].mT, "0.bias": b[0], "2.weight": V[0].mT, "2.bias": c[0]})
    assert_exact(network.outputs(X, [(W, b), (V, c)], torch.tanh)[0], module(X).detach())


@pytest.mark.parametrize("widths", [(1, 1, 1), (3, 4, 1), (2, 3, 3), (2, 4, 3, 2)])
@pytest.mark.parametrize("activation", [torch.tanh, torch.nn.functional.softplus])
def test_jacobian_is_that_of_autograd(widths: tuple[int, ...], activation: Activation) -> None:
    u, X = draw(widths)
    found = network.outputs_jacobian(network.forward(X, layers_of(u, widths), activation))
    J = torch.cat([part.flatten(3) for layer in found for part in layer], -1)
    for row in range(len(u)):
        at = u[row].clone().requires_grad_()
        eta = network.outputs(X, layers_of(at.unsqueeze(0), widths), activation)[0]
        assert_exact(J[row].flatten(0, 1), derivatives.jacobian(eta.reshape(-1), at))


@pytest.mark.parametrize("activation", [torch.tanh, torch.nn.functional.softplus, lambda a: a])
def test_bend_is_the_hessian_of_a_weighted_sum_of_outputs(activation: Activation) -> None:
    widths = (3, 4, 2)
    u, X = draw(widths)
    g = torch.randn(2, 7, 2, generator=torch.Generator().manual_seed(1))
    within, across = network.second_derivatives(network.forward(X, layers_of(u, widths), activation, 2), g)
    total = derivatives.hessian(
        lambda v, _: (g * network.outputs(X, layers_of(v, widths), activation)).sum((-2, -1)), u, u
    )
    into = torch.cat([torch.arange(12).reshape(3, 4), torch.arange(12, 16).reshape(1, 4)]).mT  # (H, I + 1)
    out = torch.arange(16, 24).reshape(4, 2)
    expected = torch.zeros_like(total)
    for h in range(4):
        i, o = torch.meshgrid(into[h], into[h], indexing="ij")
        expected[:, i, o] = within[:, h]
        i, o = torch.meshgrid(into[h], out[h], indexing="ij")
        expected[:, i, o] = across[:, h]
        expected[:, o, i] = across[:, h]
    assert_exact(total, expected)


def test_slope_of_a_constant_is_zero() -> None:
    a = torch.randn(3)
    assert_exact(network.activation_derivatives(torch.ones_like, a, 1)[1], torch.zeros(3))


@pytest.mark.parametrize(
    ("activation", "odd"),
    [(torch.tanh, True), (torch.erf, True), (lambda a: a, True), (torch.relu, False), (torch.cos, False)],
)
def test_odd_activations_are_told_from_others(activation: Activation, odd: bool) -> None:
    assert network.is_odd(activation) is odd


def relabelled(W: Tensor, b: Tensor, V: Tensor, odd: bool) -> list[Tensor]:
    """Oracle: every relabelling carried out."""
    units = torch.cat([W.mT, b.unsqueeze(-1), V], -1)
    signs = itertools.product([1.0, -1.0], repeat=len(units)) if odd else [(1.0,) * len(units)]
    return [
        units[list(order)] * torch.tensor(sign).unsqueeze(-1)
        for sign in signs
        for order in itertools.permutations(range(len(units)))
    ]


@pytest.mark.parametrize("odd", [True, False])
@pytest.mark.parametrize("kind", ["all different", "two copies", "mirrored copies", "two zero", "all zero"])
def test_symmetries_are_counted(kind: str, odd: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    W, b, V = (torch.randn(*s, generator=generator) for s in [(2, 4), (4,), (4, 1)])
    if kind in ("two copies", "mirrored copies"):
        sign = 1.0 if kind == "two copies" else -1.0
        W[:, 2], b[2], V[2] = sign * W[:, 0], sign * b[0], sign * V[0]
    zero = {"two zero": [1, 3], "all zero": [0, 1, 2, 3]}.get(kind, [])
    W[:, zero], b[zero], V[zero] = 0.0, 0.0, 0.0
    all_of_them = torch.stack(relabelled(W, b, V, odd)) + 0.0  # no -0
    different = len(all_of_them.unique(dim=0))
    assert math.exp(network.log_symmetries(4, odd)) == pytest.approx(len(all_of_them))
    left = network.log_symmetries(4, odd) - network.log_stabiliser((W, b), V, odd, 1e-9)
    assert math.exp(left) == pytest.approx(different)


def test_units_that_differ_by_less_than_the_tolerance_are_copies() -> None:
    W, b, V = torch.tensor([[1.0, 1.0 + 1e-6]]), torch.zeros(2), torch.ones(2, 1)
    assert network.log_stabiliser((W, b), V, True, 1e-4) == pytest.approx(math.log(2.0))
    assert network.log_stabiliser((W, b), V, True, 1e-8) == pytest.approx(0.0)
