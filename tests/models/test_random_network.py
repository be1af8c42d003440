"""Random networks against the closed form of their covariance, and against the Gaussian that they become."""

import math

import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput
from pyro_evidence.models.random_network import PriorScales, random_functions

SCALES = PriorScales(sigma_in=2.0, sigma_bias=1.0, sigma_out=0.3)
X = torch.tensor([[-1.0], [-0.2], [0.3], [1.5]])


def arcsine(scales: PriorScales, num_units: int) -> Tensor:
    """Oracle: units erf(.), Williams (1998), eq. 11."""
    S = scales.sigma_bias**2 + scales.sigma_in**2 * X @ X.T
    one = 1.0 + 2.0 * S.diagonal()
    return num_units * scales.sigma_out**2 * (2.0 / math.pi) * (2.0 * S / torch.outer(one, one).sqrt()).asin()


def test_covariance_of_1e5_networks_is_the_closed_form() -> None:
    f = random_functions(X, 10, SCALES, activation=torch.erf, num_samples=100_000, seed=1)
    products = f.unsqueeze(-1) * f.unsqueeze(-2)
    error = products.std(0) / math.sqrt(len(f))
    assert bool(((products.mean(0) - arcsine(SCALES, 10)).abs() < 4.0 * error).all())
    assert bool((f.mean(0).abs() < 4.0 * f.std(0) / math.sqrt(len(f))).all())


def test_the_kernel_says_the_same() -> None:
    K = SCALES.kernel(10, torch.erf).covariance(X, X)
    torch.testing.assert_close(K, arcsine(SCALES, 10), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("num_units", [2, 20])
def test_functions_become_gaussian_as_one_over_the_number_of_units(num_units: int) -> None:
    """Oracle: the excess kurtosis of a sum of H independent terms v h(a), by quadrature over a."""
    f = random_functions(X[3:], num_units, SCALES, num_samples=100_000, seed=2)[:, 0]
    grid = torch.linspace(-9.0, 9.0, 2001)
    weight = (-0.5 * grid.square()).softmax(0)
    h = torch.tanh(grid * math.sqrt(1.0 + 4.0 * 1.5**2))
    expected = 3.0 * ((weight @ h**4) / (weight @ h**2) ** 2 - 1.0) / num_units
    found = f.pow(4).mean() / f.square().mean().square() - 3.0
    assert abs(float(found - expected)) < 0.1


def test_draws_are_those_of_the_seed_in_the_dtype_of_the_inputs() -> None:
    before = torch.get_rng_state()
    a, b = (random_functions(X.float(), 3, SCALES, seed=5) for _ in range(2))
    assert torch.equal(a, b) and a.dtype == torch.float32 and a.shape == (10, 4)
    assert torch.equal(before, torch.get_rng_state())


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(BadInput, match="sigma_in=-1"):
        PriorScales(-1.0, 1.0, 1.0)
    with pytest.raises(BadInput, match="num_units=0"):
        random_functions(X, 0, SCALES)
    with pytest.raises(BadInput, match=r"X has shape \(4,\)"):
        random_functions(X[:, 0], 3, SCALES)
