"""Factorised precisions, against dense algebra; a diagonal one is the dense one of a diagonal matrix."""

from functools import partial

import pytest
import torch
from torch import Tensor

from pyro_evidence.errors import NotPositiveDefinite
from pyro_evidence.precision.dense import Dense, Diagonal, Precision, Remade, Separate, factorise

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def matrices(num: int = 2) -> Tensor:
    B = torch.randn(num, 4, 6, generator=torch.Generator().manual_seed(0))
    return B @ B.mT + 0.1 * torch.eye(4)


def test_dense_numbers_are_those_of_the_inverse() -> None:
    A, b = matrices(), torch.randn(2, 4)
    precision, inverse = factorise(A), torch.linalg.inv(A)
    assert isinstance(precision, Dense)
    assert_exact(precision.log_det, torch.logdet(A))
    assert_exact(precision.log_det_gradient, inverse)
    assert_exact(precision.variance, inverse.diagonal(dim1=-2, dim2=-1))
    assert_exact(precision.solve(b), (inverse @ b.unsqueeze(-1)).squeeze(-1))


def test_adjoint_is_the_derivative_of_the_log_determinant() -> None:
    A = matrices().requires_grad_()
    assert_exact(factorise(A.detach()).log_det_gradient, torch.autograd.grad(torch.logdet(A).sum(), A)[0])
    d = (torch.rand(2, 4) + 0.1).requires_grad_()
    assert_exact(factorise(d.detach()).log_det_gradient, torch.autograd.grad(d.log().sum(), d)[0])


def test_coloured_noise_has_the_covariance() -> None:
    """Exactly: the rows that unit vectors become, squared, add up to the covariance."""
    A = matrices()
    rows = factorise(A).row(0).unwhiten(torch.eye(4))
    assert_exact(rows.mT @ rows, torch.linalg.inv(A[0]))


def test_weakest_direction_is_the_last_axis_of_the_ellipsoid() -> None:
    A = matrices(3)
    values, vectors = torch.linalg.eigh(A)
    found = factorise(A).least_precise_direction(torch.ones(4, dtype=torch.bool))
    expected = vectors[..., 0] * values[..., :1].rsqrt()
    cosine = (found * expected).sum(-1) / found.norm(dim=-1) / expected.norm(dim=-1)
    assert float(cosine.abs().min()) > 0.99
    torch.testing.assert_close(found.norm(dim=-1), expected.norm(dim=-1), rtol=1e-2, atol=0.0)


def test_weakest_direction_leaves_pruned_coordinates_out() -> None:
    active = torch.tensor([True, True, False, True])
    A = torch.tensor([30.0, 2.0, 1.0, 50.0]).diag().unsqueeze(0)
    expected = torch.tensor([[0.0, 2.0**-0.5, 0.0, 0.0]])
    torch.testing.assert_close(factorise(A).least_precise_direction(active).abs(), expected, rtol=1e-2, atol=1e-2)
    assert_exact(factorise(A.diagonal(dim1=-2, dim2=-1)).least_precise_direction(active), expected)


def test_diagonal_is_dense_of_a_diagonal_matrix() -> None:
    d, b, white = torch.rand(2, 4) + 0.1, torch.randn(2, 4), torch.randn(7, 4)
    thin, thick = factorise(d), factorise(d.diag_embed())
    assert isinstance(thin, Diagonal)
    assert_exact(thin.log_det, thick.log_det)
    assert_exact(thin.variance, thick.variance)
    assert_exact(thin.log_det_gradient.diag_embed(), thick.log_det_gradient)
    assert_exact(thin.solve(b), thick.solve(b))
    assert_exact(thin.row(0).unwhiten(white), thick.row(0).unwhiten(white))


def test_coordinates_may_come_in_any_order() -> None:
    A, order = matrices(), torch.tensor([2, 0, 3, 1])
    moved = factorise(A[:, order][:, :, order])
    assert_exact(moved.log_det, factorise(A).log_det)
    assert_exact(moved.variance, factorise(A).variance[:, order])


@pytest.mark.parametrize(("value", "text"), [(-2.0, "-2.00e"), (0.0, "0.00e"), (torch.nan, "nan"), (torch.inf, "inf")])
def test_a_diagonal_that_is_not_positive_is_refused(value: float, text: str) -> None:
    d = torch.ones(2, 4)
    d[1, 2] = value
    with pytest.raises(NotPositiveDefinite, match=rf"\(2, 4\), has smallest entry {text}.*at w\[2\]; expected"):
        factorise(d, lambda i: f"w[{i}]")


def test_a_dense_one_is_refused_by_name() -> None:
    with pytest.raises(NotPositiveDefinite, match=r"posterior precision A, shape .*smallest eigenvalue -1.00e"):
        factorise(-torch.eye(3).unsqueeze(0))


def test_single_precision_is_factorised_in_double() -> None:
    A = matrices().float()
    assert factorise(A).log_det.dtype == factorise(A.diagonal(dim1=-2, dim2=-1)).log_det.dtype == torch.float64


def test_factors_that_are_kept_are_made_again_once() -> None:
    made: list[int] = []

    def member(number: int) -> Remade:
        def make() -> Precision:
            made.append(number)
            return Diagonal(torch.tensor([[2.0 + number]]))

        return Remade(make, torch.zeros(1))

    kept = Separate((member(0), member(1))).kept([1])
    for _ in range(3):
        assert kept.solve(torch.ones(2, 1)).tolist() == [[1.0 / 2.0], [1.0 / 3.0]]
    assert sorted(made) == [0, 0, 0, 1]
