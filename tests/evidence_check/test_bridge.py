"""The bridge's equations, at draws that are quantiles: the evidence is known, and the draws have no noise."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from pyro_evidence.evidence_check.bridge import chain_error, effective_draws
from pyro_evidence.numerics.importance import bridge, bridge_terms

LOG_EVIDENCE = -3.7


def quantiles(normal: Normal, num: int) -> Tensor:
    return normal.icdf((torch.arange(num, dtype=torch.float64) + 0.5) / num)


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_the_bridge_between_two_normals_is_their_evidence(share: float) -> None:
    """Meng and Wong's fixed point, whatever the share of the posterior's draws."""
    posterior, proposal = Normal(0.3, 0.8), Normal(0.0, 1.0)

    def ratio(x: Tensor) -> Tensor:
        return LOG_EVIDENCE + posterior.log_prob(x) - proposal.log_prob(x)

    ours, theirs = ratio(quantiles(posterior, 4_000)), ratio(quantiles(proposal, 4_000))
    value, (above, below), num_steps = bridge(ours, theirs, share)
    assert float(value) == pytest.approx(LOG_EVIDENCE, abs=2e-4)
    assert 0 < num_steps < 30
    mean = above.exp().mean() / below.exp().mean()
    assert math.log(float(mean)) == pytest.approx(float(value), abs=1e-12)


def test_terms_have_one_denominator() -> None:
    """At one point of ratio r they are r / (s1 r + s2 Z) and 1 / (s1 r + s2 Z)."""
    ratio, evidence, share = torch.tensor([5.0]).log(), torch.tensor(2.0).log(), 0.3
    above, below = bridge_terms(evidence, ratio, ratio, share)
    assert float(above.exp()) == pytest.approx(5.0 / (0.3 * 5.0 + 0.7 * 2.0))
    assert float(below.exp()) == pytest.approx(1.0 / (0.3 * 5.0 + 0.7 * 2.0))


def test_a_sticky_chain_is_worth_few_draws() -> None:
    """Each draw ten times over is a tenth as many draws; a constant is its number."""
    white = torch.randn(1, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert effective_draws(white) > 250
    assert effective_draws(white.repeat_interleave(10, 1)) == pytest.approx(effective_draws(white), rel=0.3)
    assert effective_draws(torch.full((2, 50), 3.0)) == 100
    assert chain_error(white.repeat_interleave(10, 1))[0] == pytest.approx(chain_error(white)[0], rel=0.2)
