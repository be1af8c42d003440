"""Single equations of tempered SMC, each against itself written out without logarithms or batches."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.evidence_check import tempered_smc
from pyro_evidence.evidence_check.smc import NUM_GROUPS, DensityRows, Particles, reweighed
from pyro_evidence.numerics.importance import next_temperature
from pyro_evidence.program import LogJoint

NORMAL = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(("spread", "before"), [(4.0, 0.0), (20.0, 0.25)])
def test_the_next_temperature_halves_the_effective_sample_size(spread: float, before: float) -> None:
    log_ratio = spread * NORMAL
    power = next_temperature(log_ratio, before)
    w = [math.exp((power - before) * (x - float(log_ratio.max()))) for x in log_ratio.tolist()]
    assert before < power < 1.0
    assert sum(w) ** 2 / sum(x * x for x in w) == pytest.approx(0.5 * len(w), rel=1e-9)


def test_weights_that_are_nearly_equal_lead_to_the_posterior_at_once() -> None:
    assert next_temperature(0.1 * NORMAL, 0.5) == 1.0


def test_particles_survive_by_their_weights_in_their_group_and_the_mean_weight_is_the_evidence() -> None:
    """Systematic resampling: of P particles of a group one of weight w has P w children, rounded up or down."""
    size, before, power = 400 // NUM_GROUPS, 0.2, 0.6
    x, log_prior = torch.arange(400.0, dtype=torch.float64)[:, None], NORMAL.flip(0)
    target: Any = None  # the density is not asked
    seeds = torch.Generator().manual_seed(1)
    log_evidences = torch.linspace(-3.0, 0.0, NUM_GROUPS, dtype=torch.float64)
    rows = DensityRows(x, log_prior, log_prior + 3.0 * NORMAL, x, x)
    swarm = Particles(target, seeds, rows, before, log_evidences, 0.5)
    after = reweighed(swarm, power)
    survivors = after.places.x[:, 0].long()
    torch.testing.assert_close(after.places.log_prior, log_prior[survivors])
    torch.testing.assert_close(after.places.log_likelihood, 3.0 * NORMAL[survivors])
    assert after.power == power
    for group in range(NUM_GROUPS):
        own = range(group * size, (group + 1) * size)
        w = [math.exp((power - before) * 3.0 * float(NORMAL[i])) for i in own]
        children = [int((survivors[group * size : (group + 1) * size] == i).sum()) for i in own]
        assert sum(children) == size
        assert all(abs(c - size * each / sum(w)) < 1.0 for c, each in zip(children, w, strict=True))
        gained = float(after.log_evidences[group] - log_evidences[group])
        assert gained == pytest.approx(math.log(sum(w) / size), abs=1e-12)


@pytest.mark.parametrize(
    ("size", "num_particles"), [(5, 1024), pytest.param(20, 512, marks=pytest.mark.slow), (50, 256)]
)
def test_the_bias_is_inside_the_error_in_many_dimensions(size: int, num_particles: int) -> None:
    """Conjugate regression on two data for each weight: a multivariate normal density of the targets."""
    generator = torch.Generator().manual_seed(0)
    X, w = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2 * size, size), (size,)))
    y = X @ w + torch.randn(len(X), generator=generator, dtype=torch.float64)

    def line(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(size).double(), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(X @ w, 1.0).to_event(1), obs=y)

    exact = float(dist.MultivariateNormal(torch.zeros_like(y), X @ X.mT + torch.eye(len(y))).log_prob(y))
    joint = LogJoint(line, (y,), maximise=())
    found = [tempered_smc(joint, num_particles=num_particles, seed=seed) for seed in (1, 2)]
    errors = torch.tensor([each.standard_error for each in found])
    off = torch.tensor([each.log_evidence for each in found]) - exact
    assert bool((off.abs() < 3.0 * errors).all())
    assert abs(float(off.sum())) < 3.0 * float(errors.norm())
