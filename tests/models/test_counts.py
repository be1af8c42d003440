"""Counts that are not zero: sums over all counts, derivatives on both sides of the switch, draws."""

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.models.counts import ZeroTruncated

RATES = torch.tensor([1e-8, 1e-3, 0.3, 0.68, 0.7, 0.72, 5.0, 40.0])


@pytest.mark.parametrize("base", [dist.Poisson(RATES), dist.NegativeBinomial(torch.tensor(2.5), logits=RATES.log())])
def test_chances_add_up_and_have_the_moments(base: dist.TorchDistribution) -> None:
    found, counts = ZeroTruncated(base), torch.arange(0.0, 6000.0).unsqueeze(-1)
    chance = found.log_prob(counts).exp()
    assert bool((chance[0] == 0.0).all())
    torch.testing.assert_close(chance.sum(0), torch.ones_like(RATES), rtol=1e-9, atol=0.0)
    torch.testing.assert_close(found.mean, (chance * counts).sum(0), rtol=1e-7, atol=0.0)
    torch.testing.assert_close(found.variance, (chance * (counts - found.mean).square()).sum(0), rtol=1e-5, atol=1e-7)


def test_derivatives_are_those_of_the_formula() -> None:
    """``d/d rate`` of ``k log rate - rate - log k! - log(1 - exp(-rate))``: ``k / rate - 1 - 1 / (exp(rate) - 1)``."""
    rate, k = RATES.clone().requires_grad_(), torch.tensor(3.0)
    (slope,) = torch.autograd.grad(ZeroTruncated(dist.Poisson(rate)).log_prob(k).sum(), rate, create_graph=True)
    torch.testing.assert_close(slope, k / rate - 1.0 - 1.0 / rate.expm1(), rtol=1e-9, atol=1e-9)
    (second,) = torch.autograd.grad(slope.sum(), rate)
    assert bool(second.isfinite().all())
    hurdle = dist.ZeroInflatedDistribution(ZeroTruncated(dist.Poisson(rate)), gate=torch.tensor(0.25))
    (none,) = torch.autograd.grad(hurdle.log_prob(torch.tensor(0.0)).sum(), rate)
    assert torch.equal(none, torch.zeros_like(none))


@pytest.mark.parametrize("rate", [1e-12, 0.05, 0.5, 7.0])
def test_draws_have_the_mean_and_no_zeros(rate: float) -> None:
    torch.manual_seed(0)
    found = ZeroTruncated(dist.Poisson(torch.tensor(rate).expand(2)))
    drawn: Tensor = found.sample((4000,))
    assert drawn.shape == (4000, 2) and float(drawn.min()) >= 1.0
    error = (found.variance / drawn.numel()).sqrt().clamp(min=1e-6)
    assert bool(((drawn.mean() - found.mean).abs() < 4.0 * error).all())
