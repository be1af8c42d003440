"""Many marginalised scales, by draws that adapt to where the mass is: of an orthogonal design, one by one exactly."""

import math
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from pyro import plate, sample
from torch import Tensor

from pyro_evidence import LaplaceEvidence, NestedPosterior, NotAMode, Stop
from pyro_evidence.nested import integration

WEIGHTS = torch.tensor([2.0, -1.5, 1.0, 0.3, 0.25, 0.1, -0.1, 0.05, -0.04, 0.02, 0.01, 0.0], dtype=torch.float64)
NOISE, NUM = 3.0, 32  # standard deviation, and rows


def design() -> Tensor:
    """Orthogonal columns of length one a row, ``(32, 12)``."""
    one = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(5):
        one = torch.cat([torch.cat([one, one], 1), torch.cat([one, -one], 1)])
    return one[:, 1 : 1 + len(WEIGHTS)]


def horseshoe(X: Tensor, y: Tensor) -> None:
    """With weights away from their scales, as samplers want them."""
    common = sample("common", dist.HalfCauchy(y.new_ones(())))
    with plate("weights", X.shape[1]):
        spread = sample("spread", dist.HalfCauchy(y.new_ones(())))
        z = sample("z", dist.Normal(y.new_zeros(()), 1.0))
    with plate("data", len(y)):
        sample("y", dist.Normal(X @ (z * spread * common), NOISE), obs=y)


def exact(estimates: Tensor) -> float:
    """Log density of the weights' least-squares estimates, nats: the common scale and each one's on grids of logs."""
    x = torch.linspace(-25.0, 25.0, 1001, dtype=torch.float64)
    prior = math.log(2.0 / math.pi) - torch.log1p((2.0 * x).exp()) + x
    spread = (x.unsqueeze(-1) + x).exp()  # common and own
    around = dist.Normal(0.0, (NOISE**2 / NUM + spread.square()).sqrt())
    each = [torch.trapezoid((around.log_prob(w) + prior).exp(), x).log() for w in estimates]
    return float(torch.trapezoid((torch.stack(each).sum(0) + prior).exp(), x).log())


def test_the_evidence_of_a_horseshoe_is_that_of_each_weight_by_itself(tmp_path: Path) -> None:
    """The rest of the data is orthogonal to all columns, and normal."""
    X = design()
    y = X @ WEIGHTS + 0.5
    posterior = LaplaceEvidence(horseshoe, marginalise=["common", "spread"], stop=Stop(progress=False)).run(X, y)
    assert isinstance(posterior, NestedPosterior)
    rest = y - X @ WEIGHTS
    beside = dist.Normal(0.0, NOISE).log_prob(rest).sum() + 0.5 * len(WEIGHTS) * math.log(math.tau * NOISE**2 / NUM)
    assert posterior.integration_error < 0.04
    assert abs(float(posterior.integral.log_evidence - beside) - exact(WEIGHTS)) < 0.1
    posterior.save(tmp_path / "horseshoe.posterior")
    again = NestedPosterior.load(tmp_path / "horseshoe.posterior", horseshoe)
    torch.testing.assert_close(again.log_evidence, posterior.log_evidence)


@pytest.mark.parametrize("num", [0, 1])
def test_where_few_draws_carry_all_the_weight_the_refusal_says_so(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no draw, or of one, there is no covariance."""
    drawn = integration._drawn

    def lost(*given: Any) -> Any:
        nodes, log_mass = drawn(*given)
        return nodes, log_mass.where(torch.arange(len(log_mass)) < num, -math.inf)

    monkeypatch.setattr(integration, "_drawn", lost)
    X = design()
    with pytest.raises(NotAMode, match="cannot be integrated from their mode"):
        LaplaceEvidence(horseshoe, marginalise=["common", "spread"], stop=Stop(progress=False)).run(X, X @ WEIGHTS)
