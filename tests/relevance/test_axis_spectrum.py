"""Axes of a local quadratic, against dense eigenvectors and by their laws."""

import pytest
import torch

from pyro_evidence.errors import NotPositiveDefinite
from pyro_evidence.relevance import axis_evidence


def matrix(h: list[float], seed: int = 0) -> torch.Tensor:
    Q, _ = torch.linalg.qr(torch.randn(len(h), len(h), generator=torch.Generator().manual_seed(seed)))
    return Q @ torch.tensor(h).diag() @ Q.T


def test_gram_and_rows_agree_with_the_definition() -> None:
    root, w, residual = torch.randn(9, 4), torch.randn(4), torch.randn(9)
    A = root.T @ root
    for axes in (axis_evidence.from_gram(A, w, root.T @ residual), axis_evidence.from_rows(root, w, residual)):
        V = axes.directions
        torch.testing.assert_close(V @ axes.h.diag() @ V.T, A)
        torch.testing.assert_close(V @ axes.u, w + torch.linalg.solve(A, root.T @ residual))
        assert bool((axes.u >= 0).all() and (axes.h[:-1] >= axes.h[1:]).all())


def test_null_axes_are_left_out() -> None:
    axes = axis_evidence.from_gram(matrix([3.0, 1.0, 0.0, 0.0]), torch.ones(4), torch.zeros(4))
    torch.testing.assert_close(axes.h, torch.tensor([3.0, 1.0]))


def test_repeated_eigenvalues_give_one_axis_along_the_weights() -> None:
    mu = torch.ones(3)
    axes = axis_evidence.from_gram(4.0 * torch.eye(3), mu, torch.zeros(3))
    torch.testing.assert_close(axes.u, torch.tensor([3.0**0.5, 0.0, 0.0]))
    torch.testing.assert_close(axes.directions[:, 0], mu / 3.0**0.5)
    torch.testing.assert_close(axes.directions.T @ axes.directions, torch.eye(3))


def test_only_the_cluster_is_rotated() -> None:
    A = matrix([5.0, 2.0, 2.0, 1.0])
    w = torch.randn(4)
    axes = axis_evidence.from_gram(A, w, torch.zeros(4))
    torch.testing.assert_close(A @ axes.directions, axes.directions * axes.h)
    torch.testing.assert_close(axes.directions @ axes.u, w)
    assert int((axes.u.abs() > 1e-12).sum()) == 3


def test_truncated_axes_are_all_that_can_be_kept() -> None:
    h = torch.logspace(3, -8, 120).tolist()
    A, w = matrix(h), torch.randn(120)
    whole = axis_evidence.from_gram(A, w, torch.zeros(120))
    part = axis_evidence.truncated(lambda v: A @ v, w)
    kept = whole.wald > 1.0
    assert len(part.h) < 120
    torch.testing.assert_close(part.h[part.wald > 1.0], whole.h[kept])
    torch.testing.assert_close(part.wald[part.wald > 1.0], whole.wald[kept], rtol=1e-6, atol=0)
    assert bool((whole.wald[whole.h <= 1.0 / float(w @ w)] <= 1.0).all())


def test_a_negative_eigenvalue_is_named() -> None:
    with pytest.raises(NotPositiveDefinite, match=r"shape \(2, 2\), has smallest eigenvalue -5.00e-01"):
        axis_evidence.from_gram(torch.tensor([[2.0, 0.0], [0.0, -0.5]]), torch.ones(2), torch.zeros(2))
