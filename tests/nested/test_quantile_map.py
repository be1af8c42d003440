"""Marginals by importance weights, beside densities in closed form."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Gamma, Normal

from pyro_evidence.nested.quantile_map import Calibrated, QuantileMap, levels, quantile_map
from pyro_evidence.numerics.quadrature.rules import quasi_normal


@dataclass(frozen=True)
class Normals(Calibrated):
    """Independent normal numbers."""

    sd: Tensor

    @property
    def loc(self) -> Tensor:
        return torch.zeros(1, len(self.sd), dtype=torch.float64)

    def _drawn(self, white: Tensor) -> tuple[Tensor, Tensor]:
        return self.sd * white, self._log_prob(self.sd * white)

    def _log_prob(self, u: Tensor) -> Tensor:
        return Normal(0.0, self.sd).log_prob(u).sum(-1)


RATES = Gamma(torch.tensor([2.0, 5.0], dtype=torch.float64), torch.tensor([2.0, 5.0], dtype=torch.float64))
LOGS = Normals(torch.tensor([1.0, 0.6], dtype=torch.float64))  # near those of the rates


def of_logs(u: Tensor) -> Tensor:
    """Log density of logs of the rates."""
    return (RATES.log_prob(u.exp()) + u).sum(-1)


FOUND = LOGS.calibrated(1024, lambda u, log_density: of_logs(u) - log_density)


def test_draws_have_the_moments_of_gamma_distributions() -> None:
    for rows in (FOUND.points.exp(), FOUND.drawn(quasi_normal(1024, 2, seed=1))[0].exp()):
        assert bool(((rows.mean(0) - RATES.mean) / RATES.stddev).abs().amax() < 0.03)
        assert bool((rows.std(0) / RATES.stddev - 1.0).abs().amax() < 0.05)


def test_their_log_density_is_the_derivative_of_their_mass() -> None:
    """And its integral is one, over a grid; the inverse takes draws back."""
    white = quasi_normal(64, 2, seed=2) * 1.5  # beyond the last knots too
    u, log_density = FOUND.drawn(white)
    torch.testing.assert_close(FOUND.log_prob(u), log_density)
    torch.testing.assert_close(FOUND.map.inverse(u), LOGS.sd * white)
    axis = torch.linspace(-14.0, 6.0, 801, dtype=torch.float64)
    cells = FOUND.log_prob(torch.cartesian_prod(axis, axis)).exp().sum() * (axis[1] - axis[0]) ** 2
    assert abs(float(cells) - 1.0) < 2e-3


def test_nothing_is_moved_where_weights_are_alike_or_say_nothing() -> None:
    u = quasi_normal(512, 2)
    assert quantile_map(u, torch.zeros(512, dtype=torch.float64)) is None
    assert quantile_map(u, u.square().sum(-1) ** 2) is None  # a few draws have all the weight
    assert quantile_map(u, torch.full((512,), -math.inf, dtype=torch.float64)) is None


def test_quantiles_are_where_they_are_asked_to_be() -> None:
    normal = Normal(torch.zeros((), dtype=torch.float64), 1.0).icdf(levels(RATES.mean)).expand(2, -1).contiguous()
    moved = 2.0 * normal + 1.0
    values, log_slope = QuantileMap(normal, moved).forward(quasi_normal(100, 2))
    torch.testing.assert_close(values, 2.0 * quasi_normal(100, 2) + 1.0)
    torch.testing.assert_close(log_slope, torch.full_like(values, math.log(2.0)))
