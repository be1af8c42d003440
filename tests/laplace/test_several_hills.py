"""Scales whose log density has several hills are integrated from the highest that is known."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.laplace.approximation import laplace_state
from pyro_evidence.laplace.nested.integration import around
from pyro_evidence.laplace.nested.outside import from_the_highest, has_arrived

NUM = 4


def horseshoe(X: Tensor, y: Tensor) -> None:
    tau = pyro.sample("tau", dist.HalfCauchy(torch.ones(())))
    lam = pyro.sample("lam", dist.HalfCauchy(torch.ones(NUM)).to_event(1))
    b = pyro.sample("b", dist.Normal(torch.zeros(NUM), tau * lam).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ b, 0.5), obs=y)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X, noise = torch.randn(60, NUM, generator=generator), torch.randn(60, generator=generator)
    return X, 2.0 * X[:, 0] - X[:, 1] + 0.5 * noise


@pytest.mark.slow
def test_a_horseshoe_is_integrated_and_agrees_with_importance_sampling() -> None:
    posterior = LaplaceEvidence(horseshoe, stop=Stop(progress=False)).run(*data())
    found = posterior.diagnostics()
    assert found["status"] == "converged" and found["pareto_k"] < 0.7
    assert abs(found["log_evidence"] - found["log_evidence_importance"]) < 0.2


def two_hills(y: Tensor) -> None:
    """A scale whose prior has two hills, the lower one at -0.5."""
    low, high = (dist.Normal(m, 0.15) for m in (-0.5, 0.3))
    s = pyro.sample("s", dist.Normal(torch.zeros(()), 10.0))
    pyro.factor("hills", torch.logaddexp(low.log_prob(s) - 3.0, high.log_prob(s)))
    m = pyro.sample("m", dist.Normal(torch.zeros(()), 1.0))
    pyro.sample("y", dist.Normal(m, s.exp()).expand([len(y)]).to_event(1), obs=y)


def test_the_search_goes_on_from_the_highest_place_that_is_seen() -> None:
    engine = LaplaceEvidence(two_hills, outer=["s"], stop=Stop(progress=False))
    engine.run(torch.tensor([0.5, -0.5, 1.0]))
    state = engine._fits[0].state.laplace
    lower = around(laplace_state(state.problem, torch.tensor([-0.5]), state.u), torch.tensor([0]))
    found = from_the_highest(lower)
    assert has_arrived(found) and not has_arrived(lower)
    assert float(found.centre[0]) > 0.0 and found.state.objective > lower.state.objective + 1.0
