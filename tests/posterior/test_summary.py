"""The numbers of a summary's row against closed forms."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributions import Normal

from pyro_evidence.posterior.summary import correlations, of_draws, of_normal

LAYOUT: Any = SimpleNamespace(levels=(0.05, 0.95), ends=("5%", "95%"))  # what is read of a table's layout


def test_correlations_are_those_of_the_covariance() -> None:
    root = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    S = root @ root.mT
    sd = S.diagonal().sqrt()
    expected = [float(S[i, j] / (sd[i] * sd[j])) for i in range(4) for j in range(i)]
    assert correlations(torch.linalg.cholesky(S) / sd[:, None]).tolist() == pytest.approx(expected)


def test_a_row_of_a_normal_has_its_quantiles() -> None:
    mean, sd = torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([0.5, 3.0], dtype=torch.float64)
    row = of_normal(mean, sd, LAYOUT)
    exact = Normal(mean, sd)
    assert list(row) == ["value", "sd", "median", "5%", "95%"]
    for column, level in (("median", 0.5), ("5%", 0.05), ("95%", 0.95)):
        torch.testing.assert_close(row[column], exact.icdf(torch.tensor(level, dtype=torch.float64)))


def test_a_row_of_draws_has_theirs() -> None:
    draws = torch.arange(101.0, dtype=torch.float64).flip(0)[:, None]
    row = {column: float(value) for column, value in of_draws(draws, LAYOUT).items()}
    assert row == pytest.approx({"value": 50.0, "sd": (101 * 102 / 12) ** 0.5, "median": 50.0, "5%": 5.0, "95%": 95.0})
