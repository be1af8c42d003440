"""Per-axis evidence and its optimum, against mpmath, quadrature and published numbers."""

import math

import mpmath as mp
import pytest
import torch

from pyro_evidence.relevance import axis_evidence
from tests.models_for_tests.axis_evidences import gaussian_log_evidence, laplace_log_evidence, optimal_prior_covariance

mp.mp.dps = 40


def number(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def exact_log_integral(a: float, z: float) -> float:
    """Oracle: Mills ratios in 40 digits, of both half lines."""
    a, z = mp.mpf(a), mp.mpf(z)
    halves = [mp.exp(x * x / 2) * mp.erfc(x / mp.sqrt(2)) for x in (a - z, a + z)]
    return mp.log(mp.sqrt(mp.pi / 2) * sum(halves))


GRID = [(10.0**p, z) for p in range(-8, 8) for z in (0.0, 1e-3, 0.5, 1.0, 1.01, 2.0, 8.0, 37.0, 100.0, 1e3, 1e4)]


@pytest.mark.parametrize(("a", "z"), GRID)
def test_log_integral_is_exact_over_fifteen_orders_of_magnitude(a: float, z: float) -> None:
    with mp.workdps(60):
        expected = exact_log_integral(a, z)
    near, far = (axis_evidence.half_line(number(x)).log_mass for x in (a - z, a + z))
    actual = float(torch.logaddexp(near, far))
    assert abs(actual - expected) <= 1e-13 * max(1, abs(expected))


def test_gaussian_optimum_of_hand_computed_axes() -> None:
    h, u = torch.tensor([4.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 7.0])
    torch.testing.assert_close(axis_evidence.gaussian_alpha(h, u), torch.tensor([4.0 / 3.0, math.inf, math.inf]))
    assert torch.isinf(axis_evidence.laplace_alpha(h, u)).tolist() == [False, True, True]


def test_gain_of_wald_nine() -> None:
    gain = axis_evidence.gaussian_log_gain(torch.tensor([9.0, 1.0, 0.3]))
    torch.testing.assert_close(gain, torch.tensor([2.90139, 0.0, 0.0]), rtol=0, atol=5e-6)
    h, u = torch.tensor([2.25]), torch.tensor([2.0])
    best = gaussian_log_evidence(axis_evidence.gaussian_alpha(h, u), h, u)
    never = gaussian_log_evidence(number(math.inf), h, u)
    torch.testing.assert_close(best - never, gain[:1])


@pytest.mark.parametrize(
    ("z", "expected", "digits"),
    [
        (1.01, 13.9682507841, 1e-10),
        (1.2, 2.55886596224, 1e-11),
        (1.5, 1.2869854, 1e-7),
        (2.0, 0.707231242458, 1e-12),
        (3.0, 0.38119084, 1e-8),
        (3.5, 0.313785594331, 1e-12),
        (10.0, 0.1010205144, 1e-10),
    ],
)
def test_universal_function_at_published_points(z: float, expected: float, digits: float) -> None:
    assert abs(float(axis_evidence.scaled_laplace_alpha(number(z))) - expected) <= digits * max(1.0, expected)


def exact_optimum(z: float) -> float:
    """Oracle: the zero of ``1 - a E|s|`` in 40 digits."""
    z = mp.mpf(z)

    def score(log_a: float) -> float:
        a = mp.exp(log_a)
        mills = [mp.sqrt(mp.pi / 2) * mp.exp(x * x / 2) * mp.erfc(x / mp.sqrt(2)) for x in (a - z, a + z)]
        first = [1 - x * m for x, m in zip((a - z, a + z), mills, strict=True)]
        return 1 - a * sum(first) / sum(mills)

    bracket = mp.log(1 / z), mp.log(2 / mp.sqrt(z * z - 1))
    return float(mp.exp(mp.findroot(score, bracket, solver="anderson", tol=1e-60)))


@pytest.mark.parametrize("z", [1.0001, 1.003, 1.05, 1.1, 1.149, 1.151, 1.4, 2.5, 5.0, 8.9, 9.1, 20.0])
def test_universal_function_against_forty_digits(z: float) -> None:
    conditioning = z * z / (z * z - 1.0)  # of a in z, whose own last digit is not known
    actual = float(axis_evidence.scaled_laplace_alpha(number(z)))
    assert abs(actual / exact_optimum(z) - 1.0) <= 3e-14 + 1e-15 * conditioning


def test_optimum_is_infinite_exactly_where_the_wald_statistic_is_at_most_one() -> None:
    z = torch.tensor([0.0, 0.5, 1.0, 1.0 + 1e-9, 1.0 + 1e-6, 1.3])
    assert torch.isinf(axis_evidence.scaled_laplace_alpha(z)).tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize("evidence", [gaussian_log_evidence, laplace_log_evidence])
@pytest.mark.parametrize(("h", "u"), [(4.0, 1.0), (0.3, -5.0), (25.0, 0.25)])
def test_no_alpha_on_a_grid_beats_the_optimum(evidence: object, h: float, u: float) -> None:
    optimum = axis_evidence.gaussian_alpha if evidence is gaussian_log_evidence else axis_evidence.laplace_alpha
    best = optimum(torch.tensor([h]), torch.tensor([u]))
    grid = best * torch.logspace(-3, 3, 4001, dtype=torch.float64)
    assert callable(evidence)
    assert float(evidence(grid, number(h), number(u)).max()) <= float(evidence(best, number(h), number(u))) + 1e-14


@pytest.mark.parametrize(("a", "z"), [(0.3, 0.0), (0.7, 2.0), (3.0, 1.2), (0.1, 9.5), (1e-3, 40.0), (50.0, 3.0)])
def test_moments_under_the_laplace_prior_against_quadrature(a: float, z: float) -> None:
    def density(s: float) -> float:
        return mp.exp(-((s - z) ** 2) / 2 - a * abs(s))

    knots = sorted({-40 / max(a, 1), -5 / max(a, 1), 0, 1 / max(a, 1), max(z - a, 0) + 3, max(z - a, 0) + 40})
    norm = mp.quad(density, knots)
    mean = mp.quad(lambda s: s * density(s), knots) / norm
    second = mp.quad(lambda s: s * s * density(s), knots) / norm
    moments = axis_evidence.laplace_moments(number(a), number(z))
    assert abs(float(moments.mean) - mean) <= 1e-11 * (1 + abs(mean))
    assert abs(float(moments.second) - second) <= 1e-11 * (1 + abs(second))
    assert abs(float(moments.second - moments.mean.square()) - (second - mean**2)) <= 1e-11 * (1 + second)


def test_laplace_gain_is_the_difference_of_the_evidences() -> None:
    h, u = torch.tensor([4.0, 1.0, 9.0]), torch.tensor([1.0, 0.9, -2.0])
    difference = laplace_log_evidence(axis_evidence.laplace_alpha(h, u), h, u) + 0.5 * h * u.square()
    torch.testing.assert_close(axis_evidence.laplace_log_gain(h * u.square()), difference, rtol=1e-12, atol=1e-14)


def test_group_threshold_is_on_the_mean_wald_statistic() -> None:
    h, u = torch.tensor([4.0, 1.0, 1.0, 4.0]), torch.tensor([1.0, 0.1, 1.2, 0.1])
    alpha = axis_evidence.gaussian_alpha(h, u, 2)
    scale = (4.0 + 0.01) / 2.0 - 1.0
    torch.testing.assert_close(alpha, torch.tensor([4.0 / scale, 1.0 / scale, math.inf, math.inf]))


def test_no_other_scale_of_a_groups_variances_has_more_evidence() -> None:
    h, u = torch.tensor([9.0, 5.0, 2.0, 1.0]), torch.tensor([0.1, 0.9, -0.8, 0.3])
    block = torch.tensor([0, 0, 1, 1])
    gain = axis_evidence.gaussian_log_gain(h * u.square(), 2)
    at_zero = -0.5 * h * u.square()
    for b in (0, 1):
        scales = torch.logspace(-6, 3, 20_001)
        evidence = gaussian_log_evidence((h / scales.unsqueeze(-1))[:, block == b], h[block == b], u[block == b])
        best = float((evidence - at_zero[block == b]).sum(-1).max())
        assert float(gain[block == b].sum()) == pytest.approx(best, abs=1e-5)


def test_the_last_group_may_be_smaller() -> None:
    h, u = torch.rand(9) * 5.0, torch.randn(9)
    whole, last = axis_evidence.gaussian_alpha(h, u, 4), axis_evidence.gaussian_alpha(h[8:], u[8:])
    torch.testing.assert_close(whole[8:], last)
    assert len(axis_evidence.gaussian_alpha(h[:0], u[:0], 4)) == 0


def test_no_prior_covariance_beats_the_rank_one_optimum() -> None:
    root = torch.randn(3, 3)
    A, mu = root @ root.T, torch.tensor([1.0, -2.0, 0.5])

    def log_evidence(S: torch.Tensor) -> torch.Tensor:  # up to a constant
        C = torch.eye(3) + A @ S
        return -0.5 * torch.logdet(C) - 0.5 * mu @ torch.linalg.solve(C, A.mT).mT @ mu

    q = mu @ A @ mu
    best = log_evidence(optimal_prior_covariance(A, mu))
    torch.testing.assert_close(best, -0.5 * (1.0 + q.log()))
    for _ in range(200):
        L = torch.randn(3, 3)
        assert float(log_evidence(optimal_prior_covariance(A, mu) + 0.1 * L @ L.T)) < float(best)
    assert bool((optimal_prior_covariance(A, 1e-3 * mu) == 0).all())
