"""Derivatives of rows: against torch's own, in chunks and at once, with and without a graph."""

import copy
import gc
import pickle
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_evidence.numerics import derivatives
from pyro_evidence.numerics.derivatives import (
    Forward,
    Last,
    generic_directions,
    gradient,
    hessian,
    hessian_diagonal,
    measured,
    pullback,
)

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)

W = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def coupled(u: Tensor, theta: Tensor) -> Tensor:
    """A function with a full Hessian and a mixed derivative; rows ``(R, 4)``, ``(R, 2)`` to ``(R,)``."""
    h = torch.tanh(u @ W.mT)
    return (
        (h * theta.exp()[..., :1]).sum(-1) - 0.5 * theta.exp()[..., 1] * u.square().sum(-1) + u[..., 0] * u[..., 3] ** 2
    )


def plated(u: Tensor, theta: Tensor) -> Tensor:
    """One number that all others depend on, the others in a plate; the Hessian is an arrow."""
    mean, local = u[..., :1], u[..., 1:]
    return -((local - mean).pow(4) + local.exp()).sum(-1) - 0.5 * mean.square().sum(-1) * theta[..., 0].exp()


def points(num: int, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num, size, generator=generator), 0.3 * torch.randn(num, 2, generator=generator)


def test_gradient_and_hessian_are_torchs_own() -> None:
    u, theta = points(3)
    value, slope = gradient(coupled, u, theta)
    assert_exact(value, coupled(u, theta))
    assert_exact(slope, torch.func.vmap(torch.func.grad(coupled))(u, theta))
    each = [partial(coupled, theta=p) for p in theta]
    expected = [torch.autograd.functional.hessian(f, x) for f, x in zip(each, u, strict=True)]
    assert_exact(hessian(coupled, u, theta), torch.stack(expected))
    assert not value.requires_grad and not slope.requires_grad


@pytest.mark.parametrize("at_once", [1, 3])
def test_chunks_change_nothing(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    u, theta = points(3)
    expected = hessian(coupled, u, theta), hessian_diagonal(coupled, u, theta)
    monkeypatch.setattr(derivatives, "LARGEST_CHUNK", at_once)
    assert_exact(hessian(coupled, u, theta), expected[0])
    assert_exact(hessian_diagonal(coupled, u, theta), expected[1])
    with_graph = hessian(coupled, u, theta.requires_grad_(), create_graph=True)
    assert_exact(with_graph.detach(), expected[0])


def test_a_batch_of_rows_is_a_loop() -> None:
    u, theta = points(5)
    rows = [hessian(coupled, u[i : i + 1], theta[i : i + 1])[0] for i in range(5)]
    assert_exact(hessian(coupled, u, theta), torch.stack(rows))


def test_hessian_can_be_differentiated_in_both_arguments() -> None:
    u, theta = (x.requires_grad_() for x in points(1))
    A = hessian(coupled, u, theta, create_graph=True)
    actual = torch.autograd.grad(A.square().sum(), [u, theta])

    def squared(v: Tensor, p: Tensor) -> Tensor:
        return torch.func.jacrev(torch.func.jacrev(coupled))(v, p).square().sum()

    expected = torch.func.grad(squared, argnums=(0, 1))(u[0].detach(), theta[0].detach())
    assert_exact(actual[0][0], expected[0])
    assert_exact(actual[1][0], expected[1])


@pytest.mark.parametrize("blocks", [(), (slice(0, 1), slice(1, 6))])
def test_diagonal_is_that_of_the_hessian(blocks: tuple[slice, ...]) -> None:
    for f, size in ((plated, 6), (coupled, 4)):
        u, theta = points(3, size)
        actual = hessian_diagonal(f, u, theta, blocks if size == 6 else ())
        assert_exact(actual, hessian(f, u, theta).diagonal(dim1=-2, dim2=-1))


def test_an_uncoupled_block_takes_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    u, theta = points(1, 500)
    made = []
    passes = derivatives.passes
    monkeypatch.setattr(derivatives, "passes", lambda *a: made.append(len(a[2])) or passes(*a))
    actual = hessian_diagonal(plated, u, theta, (slice(0, 1), slice(1, 500)))
    assert sum(made) == 3
    assert_exact(actual, hessian(plated, u, theta).diagonal(dim1=-2, dim2=-1))


def test_one_coupled_pair_is_enough_to_doubt_a_block() -> None:
    def f(u: Tensor, theta: Tensor) -> Tensor:
        return -u.pow(4).sum(-1) + 1e-6 * u[..., 17] * u[..., 3]

    u, theta = points(1, 40)
    assert_exact(hessian_diagonal(f, u, theta, (slice(0, 40),)), -12.0 * u.square())


def test_diagonal_can_be_differentiated() -> None:
    u, theta = (x.requires_grad_() for x in points(1, 6))
    blocks = (slice(0, 1), slice(1, 6))
    actual = torch.autograd.grad(
        hessian_diagonal(plated, u, theta, blocks, create_graph=True).square().sum(), [u, theta]
    )
    full = hessian(plated, u, theta, create_graph=True).diagonal(dim1=-2, dim2=-1)
    expected = torch.autograd.grad(full.square().sum(), [u, theta])
    assert_exact(actual, expected)


@pytest.mark.parametrize("f", [lambda u, theta: theta.sum(-1), lambda u, theta: u.sum(-1) + theta.sum(-1)])
def test_what_is_constant_or_linear_has_zero_curvature(f) -> None:
    u, theta = points(2)
    assert torch.equal(hessian(f, u, theta), torch.zeros(2, 4, 4))
    assert torch.equal(hessian_diagonal(f, u, theta), torch.zeros(2, 4))


def test_pullback_of_what_does_not_depend_is_zero() -> None:
    x, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    assert torch.equal(pullback(other.sum(), x), torch.zeros(3))
    assert torch.equal(pullback(torch.tensor(1.0), x), torch.zeros(3))
    assert torch.equal(pullback(2.0 * x, x, torch.tensor([1.0, 2.0, 3.0])), torch.tensor([2.0, 4.0, 6.0]))


@pytest.mark.parametrize("num", [3, 40])
def test_forward_is_the_jacobian(num: int) -> None:
    """More values than coordinates, and fewer."""
    A = torch.randn(num, 7)
    x = torch.randn(7, requires_grad=True)
    forward = Forward((A @ x).sin(), x, at_once=2)
    expected = torch.func.jacrev(lambda v: (A @ v).sin())(x.detach())
    v = torch.randn(2, 7)
    assert_exact(forward.matrix(), expected)
    assert_exact(forward.along(v), v @ expected.mT)
    assert_exact(forward.columns(slice(2, 5)), expected[:, 2:5])


def test_forward_can_be_differentiated() -> None:
    A, x = torch.randn(9, 3), torch.randn(3, requires_grad=True)
    J = Forward((A @ x).sin(), x, create_graph=True).matrix()
    actual = torch.autograd.grad(J.square().sum(), x)[0]
    expected = torch.func.grad(lambda v: ((A @ v).cos()[:, None] * A).square().sum())(x.detach())
    assert_exact(actual, expected)


def test_forward_of_what_does_not_depend_is_zero() -> None:
    x = torch.ones(3, requires_grad=True)
    for value in (torch.ones(5), torch.ones(5, requires_grad=True) * 2.0, torch.zeros(0)):
        forward = Forward(value, x)
        assert torch.equal(forward.matrix(), torch.zeros(len(value), 3))
        assert torch.equal(forward.along(torch.ones(1, 3)), torch.zeros(1, len(value)))


def test_a_right_guess_of_the_columns_is_taken_as_it_is() -> None:
    A, x = torch.randn(30, 4), torch.randn(6, requires_grad=True)
    with measured() as kept:
        value = A @ x[1:5] + x[0]
    found = Forward(value, x).guessed(slice(1, 5), [torch.randn(30, 4), *kept.tensors.values()])
    assert found is not None
    assert found.data_ptr() == A.data_ptr()
    assert torch.equal(found, A)


@pytest.mark.parametrize("guess", ["transposed", "scaled", "almost"])
def test_other_guesses_are_checked(guess: str) -> None:
    A, x = torch.randn(30, 4), torch.randn(4, requires_grad=True)
    scale = torch.rand(30) - 0.5
    nearly = A.clone()
    nearly[7, 2] += 1e-6
    guesses = {"transposed": A.mT.contiguous(), "scaled": A, "almost": nearly}
    expected = scale[:, None] * A if guess == "scaled" else A
    found = Forward(expected @ x, x).guessed(slice(0, 4), [guesses[guess]])
    if guess == "almost":
        assert found is None
    else:
        assert found is not None
        assert_exact(found, expected)


def test_memory_of_a_graph_is_counted_once() -> None:
    x = torch.ones(1000, requires_grad=True)
    with measured() as kept:
        y = x.exp()
        _ = (y * y).sum()
    assert kept.num_bytes == 8000
    assert kept.passes_at_once == derivatives.LARGEST_CHUNK


def test_a_measured_graph_is_let_go() -> None:
    """The second derivative of a sigmoid saves what the first has made: a cycle, were that to be saved as it is."""

    def once() -> tuple[Tensor, list[Any]]:
        x = torch.zeros(7).requires_grad_()
        with measured():
            slope = pullback(x.sigmoid().sum(), x, create_graph=True)
        curvature = pullback(slope.sum(), x, create_graph=True)
        return pullback(curvature.sum(), x), [weakref.ref(each) for each in (x, slope)]

    gc.disable()  # which would end a cycle in time
    try:
        third, left = once()
        assert [each() for each in left] == [None, None]
    finally:
        gc.enable()
    torch.testing.assert_close(third, torch.full((7,), -0.125))  # minus an eighth


def test_generic_directions_are_fixed_and_stay_away_from_zero() -> None:
    v = generic_directions(2, 1000, torch.zeros(1))
    assert torch.equal(v, generic_directions(2, 1000, torch.zeros(1)))
    assert 1.0 <= float(v.abs().min()) and float(v.abs().max()) <= 2.0
    assert 0.4 < float((v > 0).double().mean()) < 0.6


def test_leaves_that_take_part_are_those_with_a_derivative() -> None:
    a, b, c = (torch.tensor(x, requires_grad=True) for x in (1.0, 2.0, 3.0))
    value = (a * b.detach()).exp() + c * 0.0
    assert derivatives.takes_part(value, [a, b, c]) == [True, False, True]
    assert derivatives.takes_part(torch.ones(()), [a]) == [False]


def test_what_was_found_last_is_found_once_and_is_in_no_copy() -> None:
    last, met = Last[Tensor, float](), list[float]()

    def find(x: Tensor) -> float:
        met.append(float(x))
        return 2.0 * float(x)

    places = [torch.tensor(x) for x in (1.0, 1.0, 3.0, 1.0)]
    assert [last.found(x, torch.equal, find) for x in places] == [2.0, 2.0, 6.0, 2.0] and met == [1.0, 3.0, 1.0]
    for copied in (copy.deepcopy([last])[0], pickle.loads(pickle.dumps(last))):
        assert copied.pair is None and last.pair is not None
