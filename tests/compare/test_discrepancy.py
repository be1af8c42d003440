"""Distances of draws against their formulas for normals."""

import math

import torch
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_evidence.compare.discrepancy import (
    gaussian_divergence,
    mean_difference,
    quantile_error,
    quantiles,
    sd_ratio,
    sliced_wasserstein,
    sliced_wasserstein_error,
)

GRID = torch.special.ndtri((torch.arange(4000, dtype=torch.float64) + 0.5) / 4000).unsqueeze(-1)


def test_moments_in_units_of_the_reference() -> None:
    a, b = 2.0 + 3.0 * GRID, 1.0 + 2.0 * GRID
    torch.testing.assert_close(mean_difference(a, b), torch.tensor([0.5]), rtol=1e-3, atol=0.0)
    torch.testing.assert_close(sd_ratio(a, b), torch.tensor([1.5]))
    torch.testing.assert_close(quantile_error(1.0 + GRID, GRID), torch.tensor([1.0]), rtol=1e-3, atol=0.0)


def test_wasserstein_of_a_shift_and_of_a_stretch() -> None:
    direction = torch.ones(1, 1)
    shifted = sliced_wasserstein(0.3 + GRID, GRID, direction)
    torch.testing.assert_close(shifted, torch.tensor(0.3), rtol=2e-3, atol=0.0)
    stretched = sliced_wasserstein(1.5 * GRID, GRID, direction)  # 0.5 E|Z|
    torch.testing.assert_close(stretched, torch.tensor(0.5 * math.sqrt(2.0 / math.pi)), rtol=1e-2, atol=0.0)


def test_quantiles_are_those_of_torch() -> None:  # oracle: torch, which takes no more than 16 million numbers
    x = torch.randn(101, 3)
    levels = torch.tensor([0.0, 0.123, 0.5, 1.0])
    torch.testing.assert_close(quantiles(x, levels), x.quantile(levels, 0))


def test_error_of_the_sliced_distance_is_that_of_repeated_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(200, 400, 3, generator=generator) for _ in range(2))
    a = a + torch.tensor([1.0, 0.0, -0.5])
    random = torch.randn(200, 50, 3, generator=generator)
    directions = random / random.norm(dim=-1, keepdim=True)
    repeats = list(zip(a, b, directions, strict=True))
    spread = torch.stack([sliced_wasserstein(*r) for r in repeats]).std()
    typical = torch.stack([sliced_wasserstein_error(*r) for r in repeats[:40]]).mean()
    assert 0.7 < float(typical / spread) < 1.4


def test_error_of_the_sliced_distance_knows_of_autocorrelation() -> None:
    generator = torch.Generator().manual_seed(0)
    white = torch.randn(2, 2000, 1, generator=generator)
    slow = white.clone()
    for i in range(1, 2000):
        slow[:, i] = 0.95 * slow[:, i - 1] + math.sqrt(1.0 - 0.95**2) * white[:, i]
    direction = torch.ones(1, 1)
    independent = sliced_wasserstein_error(1.0 + white[0], white[1], direction)
    assert float(sliced_wasserstein_error(1.0 + slow[0], slow[1], direction)) > 2.0 * float(independent)
    assert math.isnan(float(sliced_wasserstein_error(white[0, :5], white[1], direction)))


def test_divergence_of_pairs_against_torch() -> None:  # oracle: Kullback-Leibler of torch's distributions
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(500, 3, generator=generator)
    b = torch.randn(400, 3, generator=generator) @ torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.3, 2.0]])
    found = gaussian_divergence(a, b)
    pair = [0, 2]
    p, q = (MultivariateNormal(x[:, pair].mean(0), torch.cov(x[:, pair].T)) for x in (a, b))
    expected = kl_divergence(p, q) + kl_divergence(q, p)
    torch.testing.assert_close(found[0, 2], expected)
    torch.testing.assert_close(found, found.T)
    assert (found.diagonal() == 0).all()
