"""Curvature of likelihoods through predictors, against loops over data and against plain matrix products."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from pyro_evidence.numerics import linear_predictor
from pyro_evidence.numerics.linear_predictor import (
    Layout,
    curvature_graph,
    gram,
    gram_diagonal,
    is_separable,
    slope_and_curvature,
)
from pyro_evidence.structure.density import DenseLinear
from tests.oracles import linear_predictor as oracle

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)

LAYOUTS = [
    Layout(torch.Size([5]), ()),
    Layout(torch.Size([]), ()),
    Layout(torch.Size([4, 3]), (1,)),
    Layout(torch.Size([3, 1, 4]), (0,)),
    Layout(torch.Size([2, 4, 3]), (0, 2)),
    Layout(torch.Size([2, 3]), (0, 1)),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_goes_there_and_back(layout: Layout) -> None:
    eta = torch.randn(7, *layout.shape)
    blocks = layout.blocks(eta)
    assert blocks.shape == (7, layout.shape.numel() // layout.num_coupled, layout.num_coupled)
    assert torch.equal(layout.natural(blocks), eta)


def test_layout_puts_the_elements_of_a_datum_together() -> None:
    eta = torch.arange(24.0).reshape(1, 2, 4, 3)
    blocks = Layout(torch.Size([2, 4, 3]), (0, 2)).blocks(eta)
    assert torch.equal(blocks[0, 2], eta[0, :, 2, :].reshape(-1))


def logistic(t: Tensor):
    return lambda eta: (t * eta - torch.nn.functional.softplus(eta)).sum(-1)


def softmax(t: Tensor):
    """Logits against the first class, which has none, shape ``(N, C - 1)``."""

    def log_likelihood(eta: Tensor) -> Tensor:
        logits = torch.cat([torch.zeros_like(eta[..., :1]), eta], -1).log_softmax(-1)
        return logits.gather(-1, t.expand(len(eta), -1).unsqueeze(-1)).sum((-2, -1))

    return log_likelihood


def problem(num_rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(9, 4, generator=generator)
    return X, (torch.rand(9, generator=generator) < 0.5).double(), torch.randn(num_rows, 4, generator=generator)


def test_logistic_hessian_is_the_sum_over_data() -> None:
    X, t, w = problem(3)
    layout = Layout(torch.Size([9]), ())
    eta = layout.blocks(w @ X.mT).requires_grad_()
    A = gram(X.unsqueeze(1), slope_and_curvature(logistic(t), layout, eta)[2]())
    for row in range(3):
        expected = -oracle.logistic(X.numpy(), t.numpy(), w[row].numpy())[2]
        np.testing.assert_allclose(A[row].numpy(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("at_once", [1, 256])
def test_softmax_hessian_is_the_sum_over_data(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_evidence.numerics.derivatives.LARGEST_CHUNK", at_once)
    X, _, _ = problem()
    t, W = torch.tensor([0, 1, 2, 2, 1, 0, 0, 1, 2]), torch.randn(3, 4)
    layout = Layout(torch.Size([9, 2]), (1,))
    logits = X @ W.mT
    eta = layout.blocks((logits[:, 1:] - logits[:, :1]).unsqueeze(0)).requires_grad_()
    J = torch.zeros(9, 2, 3, 4)
    for c in range(2):
        J[:, c, c + 1], J[:, c, 0] = X, -X
    J = J.reshape(9, 2, 12)
    B = slope_and_curvature(softmax(t), layout, eta)[2]()
    expected = -oracle.softmax(X.numpy(), t.numpy(), W.numpy())[2]
    np.testing.assert_allclose(gram(J, B)[0].numpy(), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(gram_diagonal(J, B)[0].numpy(), expected.diagonal(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("C", [1, 3])
@pytest.mark.parametrize("chunk", [1, 20, 2**21])
def test_gram_is_the_plain_sum_in_any_chunks(C: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_predictor, "CHUNK", chunk)
    J, B = torch.randn(11, C, 4), torch.randn(2, 11, C, C)
    expected = torch.einsum("ncd,rnce,nef->rdf", J, B, J)
    assert_exact(gram(J, B), expected)
    assert_exact(gram_diagonal(J, B), expected.diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize("C", [1, 3])
def test_gram_has_the_derivatives_of_the_plain_sum(C: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_predictor, "CHUNK", 30)
    J, B, G = torch.randn(11, C, 4), torch.randn(2, 11, C, C, requires_grad=True), torch.randn(2, 4, 4)
    expected = torch.autograd.grad((torch.einsum("ncd,rnce,nef->rdf", J, B, J) * G).sum(), B)[0]
    assert_exact(torch.autograd.grad((gram(J, B) * G).sum(), B)[0], expected)
    assert torch.autograd.gradcheck(lambda b: gram(J, b), B)
    assert torch.autograd.gradgradcheck(lambda b: gram(J, b).exp(), 0.1 * B.detach().requires_grad_())


def test_gram_of_a_jacobian_with_a_graph_is_differentiable_in_both() -> None:
    J, B = torch.randn(5, 2, 3, requires_grad=True), torch.randn(1, 5, 2, 2, requires_grad=True)
    actual = torch.autograd.grad(gram(J, B).square().sum(), [J, B])
    expected = torch.autograd.grad(torch.einsum("ncd,rnce,nef->rdf", J, B, J).square().sum(), [J, B])
    assert_exact(actual, expected)


def test_data_may_come_in_any_order() -> None:
    J, B, order = torch.randn(11, 2, 4), torch.randn(1, 11, 2, 2), torch.randperm(11)
    assert_exact(gram(J[order], B[:, order]), gram(J, B))


def test_a_likelihood_linear_in_its_predictor_has_no_curvature() -> None:
    layout, eta = Layout(torch.Size([3]), ()), torch.randn(1, 3, 1, requires_grad=True)
    scale = torch.ones((), requires_grad=True)
    for f in (lambda e: e.sum(-1), lambda e: (scale * e.abs()).sum(-1)):
        assert torch.equal(slope_and_curvature(f, layout, eta)[2](), torch.zeros(1, 3, 1, 1))


def test_blocks_can_be_differentiated() -> None:
    """The third derivative of a Poisson likelihood is minus its rate."""
    layout, eta = Layout(torch.Size([3]), ()), torch.randn(1, 3, 1, requires_grad=True)
    B = curvature_graph(lambda e: (-e.exp()).sum(-1), layout, eta)[2]
    assert_exact(torch.autograd.grad(B.sum(), eta)[0], eta.detach().exp())


@pytest.mark.parametrize(("coupled", "expected"), [((), False), ((0,), False), ((1,), True), ((0, 1), True)])
def test_a_wrong_layout_is_seen(coupled: tuple[int, ...], expected: bool) -> None:
    t = torch.tensor([0, 1, 2, 2])
    layout = Layout(torch.Size([4, 2]), coupled)
    eta = layout.blocks(torch.randn(1, 4, 2))
    assert is_separable(softmax(t), layout, eta, 1e-10) is expected
    assert not eta.requires_grad


def test_gram_of_even_noise_has_the_derivatives_of_the_plain_one_in_what_sets_it() -> None:
    J, log_beta = torch.randn(7, 1, 3, generator=torch.Generator().manual_seed(0)), torch.tensor(0.3)
    G = torch.randn(1, 3, 3, generator=torch.Generator().manual_seed(1))

    def value(gram_of, log_beta: Tensor) -> Tensor:
        return (gram_of(log_beta.exp().expand(1, 7, 1, 1)) * G).sum()

    for order in (1, 2):
        derivatives = []
        for gram_of in (DenseLinear(None, J, True).gram, partial(gram, J)):
            leaf = log_beta.clone().requires_grad_()
            found = value(gram_of, leaf)
            for _ in range(order):
                found = torch.autograd.grad(found, leaf, create_graph=True)[0]
            derivatives.append(found.detach())
        assert_exact(*derivatives)
