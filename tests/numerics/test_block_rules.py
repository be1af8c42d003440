"""Nodes for blocks: moments of the normal density by paper, and binary rows against a product of axes."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pyro_evidence.numerics.quadrature.rules import Rule, block_rule, central_composite, gauss_hermite, product


@pytest.mark.parametrize("num_dims", range(4, 11))
@pytest.mark.parametrize("num", [7, 9])
def test_moments_to_degree_five_and_of_the_radius(num: int, num_dims: int) -> None:
    rule = block_rule(num, num_dims)
    z, share = rule.nodes, rule.log_weights.exp()
    second = torch.einsum("q,qi,qj->ij", share, z, z)
    fourth = torch.einsum("q,qi,qj,qk,ql->ijkl", share, z, z, z, z)
    one = torch.eye(num_dims).double()
    pairs = [torch.einsum(e, one, one) for e in ("ij,kl->ijkl", "ik,jl->ijkl", "il,jk->ijkl")]
    torch.testing.assert_close(second, one, rtol=0, atol=1e-12)
    torch.testing.assert_close(fourth, sum(pairs), rtol=0, atol=1e-11)
    for odd in (z[:, 0], z[:, :3].prod(-1), z[:, :5].prod(-1), z[:, 0] ** 3 * z[:, -1] ** 2):
        assert float(share @ odd) == pytest.approx(0.0, abs=1e-11)
    radius = math.prod(num_dims + 2 * k for k in range(6))  # E |z|^12
    assert float(share @ z.norm(dim=-1) ** 12) == pytest.approx(radius, rel=1e-11)


def log_integral(rule: Rule, X: Tensor, scale: float) -> float:
    """Of binary rows all of which are ones, about their mode and in units of its curvature."""
    u = torch.zeros(X.shape[1]).double()
    for _ in range(30):
        p = (X @ u).sigmoid()
        A = (X.mT * (p * (1.0 - p))) @ X + torch.eye(len(u)).double() / scale**2
        u = u + torch.linalg.solve(A, X.mT @ (1.0 - p) - u / scale**2)
    tril = torch.linalg.cholesky(A)
    b = u + torch.linalg.solve_triangular(tril.mT, rule.nodes.mT, upper=True).mT
    log_joint = torch.nn.functional.logsigmoid(b @ X.mT).sum(-1) - 0.5 * (b / scale).square().sum(-1)
    total = rule.log_mean(log_joint + 0.5 * rule.nodes.square().sum(-1))
    return float(total - tril.diagonal().log().sum() - len(u) * math.log(scale))


def test_binary_rows_in_four_dimensions() -> None:
    generator = torch.Generator().manual_seed(1)
    axis, errors = product(gauss_hermite(11), 4), {1: [], 7: [], 11: []}
    for _ in range(6):
        X = torch.randn(10, 4, generator=generator).double()
        exact = log_integral(axis, X, 1.5)
        for num, found in errors.items():
            found.append(abs(log_integral(block_rule(num, 4), X, 1.5) - exact))
    assert max(errors[7]) < 0.03 and max(errors[11]) < 0.015 < 0.1 < min(errors[1])


@pytest.fixture
def single_precision() -> Iterator[None]:
    """The default dtype of most programs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("single_precision")
@pytest.mark.parametrize("num_dims", range(1, 11))
def test_weights_have_all_digits_whatever_the_default_dtype(num_dims: int) -> None:
    for rule in (block_rule.__wrapped__(7, num_dims), central_composite(num_dims)):
        assert rule.nodes.dtype == rule.log_weights.dtype == torch.float64
        second = (rule.log_weights.exp().unsqueeze(-1) * rule.nodes.square()).sum(0)
        torch.testing.assert_close(second, torch.ones_like(second), rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("shape", [0.2, 0.5])
@pytest.mark.parametrize("num_dims", [1, 2])
def test_stretched_nodes_integrate_logs_of_gamma_variables(shape: float, num_dims: int) -> None:
    """In units of the curvature at the mode; their tails to the left are exponential."""
    off = []
    for curved in (False, True):
        rule = block_rule(15, num_dims, curved)
        x = math.log(shape) + rule.nodes / shape**0.5
        height = (shape * x - x.exp()).sum(-1) + 0.5 * rule.nodes.square().sum(-1)
        constant = 0.5 * num_dims * math.log(math.tau / shape)
        off.append(abs(float(rule.log_mean(height)) + constant - num_dims * math.lgamma(shape)))
    assert off[1] < 0.3 * off[0]
