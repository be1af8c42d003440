"""Basis functions against naive loops over data and functions."""

import math
import pickle
import statistics
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.models.basis import (
    GaussianRBF,
    Linear,
    Polynomial,
    RandomVectorFunctionalLink,
    Standardised,
    class_predictor,
    has_bias,
    linear_predictor,
    mean_and_scale,
)
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import linear_mixture
from pyro_evidence.models.regression import regression

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def inputs(num_data: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_data, 2, generator=generator, dtype=torch.float64)


def rbf(bias: bool = True) -> GaussianRBF:
    return GaussianRBF(torch.tensor([[0.0, 0.0], [1.0, -1.0], [0.5, 2.0]]), torch.tensor([0.5, 1.0, 2.0]), bias)


def rvfl(bias: bool = True) -> RandomVectorFunctionalLink:
    weights = torch.tensor([[0.3, -1.0, 2.0, 0.1], [1.5, 0.7, -0.2, 0.0]])
    return RandomVectorFunctionalLink(weights, torch.tensor([0.1, -0.2, 0.0, 3.0]), bias=bias)


def standardised(bias: bool = True) -> Standardised:
    return Standardised(Polynomial(2, bias), torch.tensor([1.0, -2.0]), torch.tensor([0.5, 4.0]))


BASES = [Linear, partial(Polynomial, 3), rbf, rvfl, standardised]


def naive_linear(x: list[float]) -> list[float]:
    return x


def naive_polynomial(x: list[float]) -> list[float]:
    return [x[0], x[1], x[0] ** 2, x[1] ** 2, x[0] ** 3, x[1] ** 3]


def naive_rbf(x: list[float]) -> list[float]:
    centres, scales = [(0.0, 0.0), (1.0, -1.0), (0.5, 2.0)], [0.5, 1.0, 2.0]
    return [math.exp(-(math.dist(x, c) ** 2) / (2 * s**2)) for c, s in zip(centres, scales, strict=True)]


def naive_rvfl(x: list[float]) -> list[float]:
    fan_in = [(0.3, 1.5, 0.1), (-1.0, 0.7, -0.2), (2.0, -0.2, 0.0), (0.1, 0.0, 3.0)]
    return [*x, *(math.tanh(a * x[0] + b * x[1] + c) for a, b, c in fan_in)]


def naive_standardised(x: list[float]) -> list[float]:
    u, v = (x[0] - 1.0) / 0.5, (x[1] + 2.0) / 4.0
    return [u, v, u * u, v * v]


NAIVE = [naive_linear, naive_polynomial, naive_rbf, naive_rvfl, naive_standardised]


@pytest.mark.parametrize(("basis", "naive"), list(zip(BASES, NAIVE, strict=True)))
def test_design_matrix_equals_a_loop_with_the_bias_last(basis, naive) -> None:
    X = inputs()
    expected = torch.tensor([naive(x) for x in X.tolist()])
    assert_exact(basis(bias=False)(X), expected)
    assert_exact(basis(bias=True)(X), torch.cat([expected, torch.ones(7, 1)], -1))


@pytest.mark.parametrize("basis", BASES)
def test_dtype_follows_the_inputs(basis) -> None:
    X = inputs()
    single = basis()(X.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), basis()(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("basis", "given"), [(Linear, "Linear is a class"), (None, "None"), ("rbf", "'rbf'")])
def test_a_basis_that_makes_no_design_matrix(basis: Any, given: str) -> None:
    for model in (regression, classifier, lambda basis: linear_mixture(2, basis)):
        with pytest.raises(BadInput, match=f"basis={given}; expected an? "):
            model(basis)


def test_python_scale_is_not_rounded_to_single_precision() -> None:
    actual = GaussianRBF(torch.zeros(1, 1), 0.1, bias=False)(torch.full((1, 1), 0.3))
    assert_exact(actual, torch.tensor([[math.exp(-4.5)]]))


@pytest.mark.parametrize("basis", BASES)
def test_a_batch_of_inputs_equals_a_loop(basis) -> None:
    X = inputs(12).reshape(3, 4, 2)
    assert_exact(basis()(X), torch.stack([basis()(x) for x in X]))


@pytest.mark.parametrize("basis", BASES)
def test_pickles_and_compares_by_content(basis) -> None:
    one = basis()
    other = pickle.loads(pickle.dumps(one))
    assert one == other
    assert hash(one) == hash(other)
    assert one != basis(bias=False)
    assert_exact(one(inputs()), other(inputs()))


def test_other_content_compares_unequal() -> None:
    centres = torch.zeros(1, 2)
    assert GaussianRBF(centres, 1.0) != GaussianRBF(centres + 1e-9, 1.0)
    assert GaussianRBF(centres, 1.0) != GaussianRBF(centres, torch.tensor(1.0))
    assert GaussianRBF(centres, 1.0) != GaussianRBF(centres.float(), 1.0)
    assert Linear() != Polynomial(1)


def test_bumps_far_from_the_origin_keep_their_digits() -> None:
    far = 1e6 + inputs(40)  # more than 25 rows, where cdist would change to the inexact way
    actual = GaussianRBF(far, 0.5, bias=False)(far)
    difference = far[:, None, :] - far[None, :, :]
    assert_exact(actual, (-2.0 * difference.square().sum(-1)).exp())


def test_bias_is_told_by_the_attribute() -> None:
    assert has_bias(Linear()) and has_bias(standardised())
    assert not has_bias(Linear(bias=False)) and not has_bias(standardised(bias=False))
    assert not has_bias(torch.nn.Linear(2, 3))  # its bias is a parameter, not a column
    assert not has_bias(lambda X: X)


def test_mean_and_scale_are_those_of_the_population() -> None:
    X = inputs()
    mean, scale = mean_and_scale(X)
    columns = X.T.tolist()
    assert_exact(mean, torch.tensor([statistics.fmean(column) for column in columns]))
    assert_exact(scale, torch.tensor([statistics.pstdev(column) for column in columns]))
    Z = Standardised(Linear(bias=False), mean, scale)(X)
    assert_exact(Z.square().mean(0), torch.ones(2))


def test_constant_columns_are_named() -> None:
    X = torch.cat([inputs(), torch.full((7, 1), 0.1), inputs(), torch.zeros(7, 1)], -1)
    with pytest.raises(BadInput, match=r"Columns \[2, 5\] of X are constant"):
        mean_and_scale(X)
    mean_and_scale(X[:, X.amax(0) > X.amin(0)])  # the remedy in the error message


def test_missing_values_are_named() -> None:
    X = inputs()
    X[3, 1] = math.nan
    with pytest.raises(BadInput, match=r"Columns \[1\] of X hold inf or nan"):
        mean_and_scale(X)


def test_one_row_has_no_scale() -> None:
    with pytest.raises(BadInput, match=r"Columns \[0, 1\] of X are constant"):
        mean_and_scale(inputs(1))


def test_no_rows_are_refused() -> None:
    with pytest.raises(BadInput, match=r"shape \(0, 2\): no data"):
        mean_and_scale(torch.zeros(0, 2))


@pytest.mark.parametrize("basis", BASES)
def test_a_vector_of_inputs_is_refused(basis) -> None:
    with pytest.raises(BadInput, match=r"shape \(7,\).*Write X\[:, None\]"):
        basis()(inputs()[:, 0])


@pytest.mark.parametrize("basis", BASES)
def test_whole_numbers_as_inputs_are_refused(basis) -> None:
    with pytest.raises(BadInput, match=r"dtype torch\.int64; expected floats"):
        basis()(torch.zeros(7, 2, dtype=torch.int64))


@pytest.mark.parametrize("basis", [rbf, rvfl, standardised])
def test_another_number_of_inputs_is_refused(basis) -> None:
    with pytest.raises(BadInput, match=r"X has 3 columns, but .* 2 inputs"):
        basis()(torch.zeros(7, 3))


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Polynomial(0), "degree=0; expected a whole number of at least 1"),
        (lambda: GaussianRBF(torch.zeros(3), 1.0), r"centres of shape \(3,\); expected \(M, D\)"),
        (lambda: GaussianRBF(torch.zeros(3, 2), torch.ones(2)), r"scale of shape \(2,\) for 3 centres"),
        (lambda: GaussianRBF(torch.zeros(3, 2), -2.0), "scale -2; expected a length greater than 0"),
        (lambda: GaussianRBF(torch.zeros(3, 2), math.nan), "scale nan"),
        (
            lambda: RandomVectorFunctionalLink(torch.zeros(2, 4), torch.zeros(3)),
            r"weights of shape \(2, 4\) and biases of shape \(3,\)",
        ),
    ],
)
def test_impossible_settings_are_refused(build, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        build()


def test_linear_predictor_of_a_batch_equals_a_loop() -> None:
    Phi, w = rbf()(inputs()), torch.arange(12.0).reshape(3, 4).sin()
    expected = torch.stack([torch.stack([phi.dot(one) for phi in Phi]) for one in w])
    assert_exact(linear_predictor(Phi, w[0]), expected[0])
    assert_exact(linear_predictor(Phi, w), expected)
    assert_exact(linear_predictor(Phi, w.unsqueeze(-2)), expected)  # inside a plate at dim -2
    assert_exact(torch.func.vmap(linear_predictor, (None, 0))(Phi, w), expected)


def test_class_predictor_of_a_batch_equals_a_loop() -> None:
    Phi, w = rbf()(inputs()), torch.arange(60.0).reshape(3, 5, 4).sin()
    expected = torch.stack([torch.stack([linear_predictor(Phi, row) for row in one], -1) for one in w])
    assert expected.shape == (3, 7, 5)
    assert_exact(class_predictor(Phi, w[0]), expected[0])
    assert_exact(class_predictor(Phi, w), expected)
    assert_exact(class_predictor(Phi, w.unsqueeze(-3)), expected)
    assert_exact(torch.func.vmap(class_predictor, (None, 0))(Phi, w), expected)


@pytest.mark.parametrize("basis", [Linear(), Polynomial(2)])
def test_a_basis_is_made_once_for_the_same_inputs(basis: Any) -> None:
    X = inputs()
    first = basis(X)
    assert basis(X) is first
    X[0, 0] = 9.0
    assert float(basis(X)[0, 0]) == 9.0  # the same tensor, with other numbers in it
    basis(X)[0, 1] = -5.0
    assert float(basis(X)[0, 1]) == float(X[0, 1])  # somebody wrote into the last one
    assert basis == type(basis)(**{k: v for k, v in vars(basis).items() if k != "last"})
    assert pickle.loads(pickle.dumps(basis)).last.pair is None


def test_what_is_made_inside_a_transform_of_torch_stays_there() -> None:
    X, basis, zero = inputs(), Linear(), torch.zeros(3, dtype=torch.float64)

    def slope(w: Tensor) -> Tensor:
        return torch.func.grad(lambda v: (basis(X) @ v).sin().sum())(w)

    torch.func.grad(lambda w: slope(w)[2])(zero)
    assert float(slope(zero)[2]) == 7.0
    assert not torch._C._functorch.is_functorch_wrapped_tensor(basis(X))
