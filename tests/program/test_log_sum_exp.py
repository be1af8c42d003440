"""Sums of exponentials against plain torch where that is defined, and by hand where it is not."""

import math
from functools import partial

import pytest
import torch
from opt_einsum import contract
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

from pyro_evidence.program import enumeration
from pyro_evidence.program.enumeration import aligned, einsum, log_sum_exp, safe_log, tensordot, transpose

INF = math.inf
assert_exact = partial(torch.testing.assert_close, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dim", [0, 1, -1, (0, 1), (1, 2), (0, 1, 2)])
def test_log_sum_exp_is_the_log_of_a_sum(dim: int | tuple[int, ...]) -> None:
    x = torch.randn(2, 3, 4)
    assert_exact(log_sum_exp(x, dim), x.exp().sum(dim).log())


def test_log_sum_exp_of_large_and_small_numbers() -> None:
    x = torch.tensor([1000.0, 1000.0, -1000.0])
    assert_exact(log_sum_exp(x, 0), torch.tensor(1000.0 + math.log(2.0)))
    assert_exact(log_sum_exp(-x, 0), torch.tensor(1000.0))


def test_log_sum_exp_of_an_impossible_row_has_zero_derivatives() -> None:
    x = torch.tensor([[-INF, -INF], [0.5, -INF], [0.5, 1.5]])
    assert log_sum_exp(x, -1)[0] == -INF
    slopes = jacobian(lambda v: log_sum_exp(v, -1), x).sum(0)
    assert_exact(slopes, torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0 / (1.0 + math.e), math.e / (1.0 + math.e)]]))
    curvature = hessian(lambda v: log_sum_exp(v, -1)[1:].sum(), x)
    p = math.e / (1.0 + math.e) ** 2
    expected = torch.zeros(3, 2, 3, 2)
    expected[2, :, 2, :] = torch.tensor([[p, -p], [-p, p]])
    assert_exact(curvature, expected)


def test_log_sum_exp_keeps_nan_and_inf() -> None:
    assert log_sum_exp(torch.tensor([math.nan, -INF]), 0).isnan()
    assert log_sum_exp(torch.tensor([INF, 0.0]), 0) == INF


def test_safe_log_has_zero_derivatives_at_zero() -> None:
    p = torch.tensor([0.0, 1e-30, 0.5], requires_grad=True)
    value = safe_log(p)
    assert value.tolist() == [-INF, math.log(1e-30), math.log(0.5)]
    slope = torch.autograd.grad(value[1:].sum() + value[:1].exp().sum(), p, create_graph=True)[0]
    assert_exact(slope.detach(), torch.tensor([0.0, 1e30, 2.0]))
    assert_exact(torch.autograd.grad(slope.sum(), p)[0], torch.tensor([0.0, -1e60, -4.0]))


EQUATIONS = [
    "a->",
    "ab->b",
    "ab->a",
    "ab,bc->ac",
    "ab,b,a->",
    "a,b->ab",
    "abc,cd,d->ab",
    "ab->ba",
    "ab->ab",
    ",a->a",
]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum_is_torchs_in_log_space(equation: str) -> None:
    inputs = equation.split("->")[0].split(",")
    operands = [torch.randn([2 + ord(s) - 97 for s in dims]) for dims in inputs]
    expected = torch.einsum(equation, *(x.exp() for x in operands)).log()
    assert_exact(einsum(equation, *operands), expected)


def test_einsum_does_not_underflow_factor_by_factor() -> None:
    a, b = torch.tensor([-800.0, 800.0]), torch.tensor([800.0, -800.0])
    assert_exact(einsum("a,a->", a, b), torch.tensor(math.log(2.0)))


def test_einsum_gives_a_tensor_of_its_own() -> None:
    x = torch.randn(3)
    assert einsum("a->a", x) is not x


@pytest.mark.parametrize("axes", [([1], [0]), ([0, 1], [1, 0]), ([], []), ([0], [1])])
def test_tensordot_is_torchs_in_log_space(axes: tuple[list[int], list[int]]) -> None:
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    expected = torch.tensordot(a.exp(), b.exp(), dims=axes).log()
    assert_exact(tensordot(a, b, axes), expected)


def test_transpose_and_aligned() -> None:
    x = torch.randn(2, 3, 4)
    assert_exact(transpose(x, (2, 0, 1)), x.permute(2, 0, 1))
    assert_exact(aligned(x, "abc", "cdab"), x.permute(2, 0, 1).unsqueeze(1))


def test_module_is_a_backend_of_opt_einsum() -> None:
    a, b, c = torch.randn(2, 3), torch.randn(3, 4), torch.randn(4, 2)
    expected = torch.einsum("ab,bc,cd->ad", a.exp(), b.exp(), c.exp()).log()
    found = contract("ab,bc,cd->ad", a, b, c, backend=enumeration.__name__)
    assert isinstance(found, Tensor)
    assert_exact(found, expected)


def test_vmap_of_log_sum_exp() -> None:
    x = torch.randn(5, 3, 2)
    x[1, 0] = -INF
    assert_exact(torch.vmap(lambda v: log_sum_exp(v, -1))(x), log_sum_exp(x, -1))
