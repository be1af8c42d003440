"""Distances of draws against their formulas for normals."""

import math

import torch

from pyro_evidence.ops.discrepancy import mean_difference, quantile_error, sd_ratio, sliced_wasserstein

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
