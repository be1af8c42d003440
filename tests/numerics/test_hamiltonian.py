"""Hamiltonian Monte Carlo of many chains against closed forms."""

import itertools

import pytest
import torch
from torch import Tensor

from pyro_evidence.numerics.hamiltonian import Chains, draws, trajectory
from pyro_evidence.precision.dense import Dense

TRIL = torch.tensor([[2.0, 0.0], [1.5, 0.5]], dtype=torch.float64)


def log_gammas(u: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of two Gamma(4, 1) numbers, whose means are digamma(4) and variances trigamma(4)."""
    return (4.0 * u - u.exp()).sum(-1), 4.0 - u.exp()


def normal(u: Tensor) -> tuple[Tensor, Tensor]:
    slope = -u @ TRIL @ TRIL.mT
    return 0.5 * (u * slope).sum(-1), slope


def test_chains_come_to_the_moments_of_a_skewed_density() -> None:
    """Whatever the metric, and from a start that is far off."""
    start = torch.full((64, 2), 3.0, dtype=torch.float64)
    metric, active = Dense(TRIL.unsqueeze(0)), torch.ones(2, dtype=torch.bool)
    found = itertools.islice(draws(log_gammas, metric, start, active, torch.Generator().manual_seed(0)), 240)
    u = torch.stack([drawn[0] for drawn in found if drawn is not None][40:])
    four = torch.tensor(4.0, dtype=torch.float64)
    error = u.mean(0).std(0) / 8.0
    assert bool((((u.mean((0, 1)) - torch.digamma(four)).abs() / error) < 4.0).all()) and float(error.max()) < 0.05
    assert u.reshape(-1, 2).var(0).tolist() == pytest.approx([float(torch.polygamma(1, four))] * 2, rel=0.1)


def test_the_energy_is_kept_to_second_order() -> None:
    """Velocities carry the kinetic energy: halved steps leave a quarter of the error."""
    generator = torch.Generator().manual_seed(0)
    u, white = (torch.randn(400, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    metric = Dense(torch.tensor([[[1.7, 0.0], [0.9, 0.8]]], dtype=torch.float64))
    errors = []
    for step in (0.1, 0.05):
        _, acceptance = trajectory(normal, metric, Chains(u, *normal(u)), white, step)
        errors.append(float((1.0 - acceptance).mean()))
    assert 0.0 < errors[0] < 0.05 and errors[1] == pytest.approx(errors[0] / 4.0, rel=0.2)


def test_coordinates_that_are_not_active_stay() -> None:
    start = torch.zeros(16, 2, dtype=torch.float64)
    active = torch.tensor([True, False])
    metric = Dense(torch.eye(2, dtype=torch.float64).unsqueeze(0))
    *_, last = itertools.islice(draws(log_gammas, metric, start, active, torch.Generator().manual_seed(0)), 5)
    assert last is not None and not bool(last[0][:, 1].any()) and bool(last[0][:, 0].all())
