"""Latent angles, whose density Pyro gives on the whole line, have one turn; the oracle is quadrature over it."""

import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence


@pytest.mark.parametrize(
    ("loc", "concentration", "of_angle", "t"),
    [
        (0.0, 0.5, lambda a: torch.cos(2.0 * a), 0.7),
        (3.0, 2.0, torch.cos, -0.95),
        (math.pi, 60.0, torch.sin, 0.1),
        (7.0, 30.0, lambda a: a, 0.7),
    ],
)
def test_an_angle_is_integrated_over_one_turn(
    loc: float, concentration: float, of_angle: Callable[[Tensor], Tensor], t: float
) -> None:
    def model() -> None:
        a = pyro.sample("a", dist.VonMises(torch.tensor(loc), concentration))
        pyro.sample("t", dist.Normal(of_angle(a), 0.2), obs=torch.tensor(t))

    posterior = LaplaceEvidence(model).run()
    grid = (torch.arange(20_000.0, dtype=torch.float64) + 0.5) / 20_000 * math.tau - math.pi
    log_joint = dist.VonMises(loc, concentration).log_prob(grid) + dist.Normal(of_angle(grid), 0.2).log_prob(
        torch.tensor(t, dtype=torch.float64)
    )
    exact = float(log_joint.logsumexp(0)) + math.log(math.tau / 20_000)
    assert float(posterior.log_evidence) == pytest.approx(exact, abs=0.02)
    assert bool((posterior.get_samples(200, seed=0)["a"].abs() <= math.pi).all())
