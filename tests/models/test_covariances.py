"""Kinds of kernels against densities and sums written out."""

import pyro.distributions as dist
import pytest
import torch

from pyro_evidence.models.covariances import Covariance, Diagonal, Full, Spherical, mahalanobis
from tests.models_for_tests.prbf_cases import random_network

KINDS = [Spherical(), Diagonal(), Full()]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)


@each_kind
def test_features_times_coefficients_are_log_densities(kind: Covariance) -> None:
    net, X = random_network(kind), torch.randn(7, 3)
    found = kind.natural(net.loc, net.covariance) @ kind.features(X).mT
    expected = dist.MultivariateNormal(net.loc, kind.matrix(net.covariance, 3)).log_prob(X[:, None, None])
    torch.testing.assert_close(found, expected.movedim(0, -1), rtol=1e-12, atol=1e-12)


@each_kind
def test_scatter_is_the_weighted_sum_of_outer_products(kind: Covariance) -> None:
    X, weight, loc = torch.randn(9, 3), torch.rand(9), torch.randn(3)
    offset = X - loc
    expected = kind.restricted((weight[:, None, None] * offset[:, :, None] * offset[:, None, :]).sum(0))
    found = kind.scatter(weight @ kind.features(X), loc)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    one = kind.restricted(offset[0, :, None] * offset[0])
    torch.testing.assert_close(kind.outer(offset[0]), one, rtol=1e-12, atol=1e-12)


@each_kind
def test_quadratic_form_and_slope_are_those_of_the_matrix(kind: Covariance) -> None:
    net, v = random_network(kind), torch.randn(2, 4, 3)
    inverse = torch.linalg.inv(kind.matrix(net.covariance, 3))
    expected = torch.einsum("bmi,bmij,bmj->bm", v, inverse, v)
    torch.testing.assert_close(mahalanobis(kind, net.covariance, v), expected, rtol=1e-12, atol=1e-12)
    covariance = net.covariance.clone().requires_grad_()
    (-0.5 * mahalanobis(kind, covariance, v)).sum().backward()
    torch.testing.assert_close(kind.slope(net.covariance, kind.outer(v), 3), covariance.grad, rtol=1e-12, atol=1e-12)


@each_kind
def test_floor_lifts_what_is_below_it_and_nothing_else(kind: Covariance) -> None:
    unit = torch.tensor([1.0, 2.0, 3.0]) * 1e-3
    matrix = torch.diag(torch.tensor([4.0, 5.0, 6.0]))
    sound, flat = kind.restricted(matrix), kind.restricted(matrix * 1e-9)
    torch.testing.assert_close(kind.floored(sound, unit), sound, rtol=0, atol=0)
    lifted = kind.floored(flat[None], unit)
    torch.testing.assert_close(lifted[0], kind.restricted(torch.diag(unit)), rtol=1e-9, atol=0)
    assert bool(kind.rests(lifted, unit)) and not bool(kind.rests(sound[None], unit))


def test_full_floor_is_the_likeliest_covariance_above_it() -> None:
    """A singular direction across the inputs: eigenvalues are clipped, directions are kept."""
    v = torch.tensor([1.0, -1.0, 0.0]) / 2**0.5
    singular = torch.eye(3) - v[:, None] * v
    found = Full().floored(singular[None], torch.full((3,), 0.01))[0]
    torch.testing.assert_close(found, singular + 0.01 * v[:, None] * v, rtol=0, atol=1e-12)


@each_kind
def test_guard_keeps_a_tenth_of_the_old_covariance(kind: Covariance) -> None:
    net = random_network(kind)
    negative = kind.guarded(-net.covariance, net.covariance)
    torch.testing.assert_close(negative, 0.1 * net.covariance, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(kind.guarded(0.5 * net.covariance, net.covariance), 0.5 * net.covariance)
