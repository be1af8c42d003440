"""How many draws are weighed before a further site is marginalised; oracle: the share that many draws keep."""

import copy
from types import SimpleNamespace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, NotConverged, Stop
from pyro_evidence.laplace import approximation
from pyro_evidence.posterior.nested import ENOUGH, FIRST_LOOK, NestedPosterior
from pyro_evidence.precision.dense import Dense, Separate


def times(y: Tensor, group: Tensor) -> None:
    scale, shape = pyro.sample("scale", dist.HalfNormal(1.0)), pyro.sample("shape", dist.LogNormal(0.0, 1.0))
    with pyro.plate("groups", 4):
        a = pyro.sample("a", dist.Normal(0.0, scale))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Weibull(a[group].exp(), shape), obs=y)


@pytest.mark.parametrize(("num", "end", "looks"), [(400, 0.02, [FIRST_LOOK]), (8, 0.3, [FIRST_LOOK, 500])])
def test_few_draws_settle_it_where_they_keep_their_weight(
    num: int, end: float, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, y = torch.arange(num) % 4, torch.linspace(end, 1.0 - end, num).log().neg()
    asked, weighed = list[int](), NestedPosterior._weighed

    def noted(self: NestedPosterior, num_samples: int, seed: int, kept: bool = True) -> tuple[Tensor, Tensor]:
        asked.append(num_samples)
        return weighed(self, num_samples, seed, kept)

    posterior = LaplaceEvidence(times, marginalise=["scale"], stop=Stop(progress=False)).run(y.double(), group)
    assert posterior.relative_ess > ENOUGH
    monkeypatch.setattr(NestedPosterior, "_weighed", noted)
    del vars(posterior)["relative_ess"]
    assert posterior.candidate_hyperparameters == ()
    assert asked == looks


def test_one_more_site_is_searched_from_the_fit_and_in_no_more_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what has gained nothing tried beside others."""
    asked = list[tuple[tuple[str, ...], int, dict[str, float]]]()

    def found(*candidates: str, ess: float) -> Any:
        values = {"scale": 1.0, "a": 2.0, "b": 3.0, "c": 4.0}
        known: Any = {"mode": values, "marginalised_sites": ("scale",), "_trusts_weights": True, "relative_ess": ess}
        return SimpleNamespace(**known, candidate_hyperparameters=candidates, log_evidences=(0.0,) * 6)

    def attempt(self: LaplaceEvidence, args: Any, kwargs: Any, modes: Any, is_second: bool, more: Any) -> Any:
        assert is_second  # a search that has not converged is no fit
        asked.append((more["_more"], more["stop"].num_steps, dict(more["start"].values)))
        other = copy.copy(self)
        vars(other).update(more)
        return other, found("c", "a", ess=0.6) if more["_more"] == ("b",) else NotConverged("no maximum", None)

    monkeypatch.setattr(LaplaceEvidence, "_attempt", attempt)
    engine = LaplaceEvidence(times)
    engine._data = ((), {})
    assert engine._with_more_marginalised(found("a", "b", "c", ess=0.4)).relative_ess == 0.6
    assert [names for names, _, _ in asked] == [("a",), ("b",), ("b", "c")]
    assert all(num == 6 for _, num, _ in asked)
    assert asked[0][2] == {"scale": 1.0, "a": 2.0}
    assert engine.stop.num_steps == Stop().num_steps and engine.start.values is None


def test_wide_designs_are_searched_by_their_algebra_with_the_same_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By autograd a row of a batch asks for a pass through all data for each coordinate."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    y = (X[:, 0] + torch.randn(200, generator=generator, dtype=torch.float64) > 0).double()

    def shrunk(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.HalfNormal(torch.ones((), dtype=torch.float64)))
        with pyro.plate("columns", 4):
            w = pyro.sample("w", dist.Normal(0.0, scale))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    posterior = LaplaceEvidence(shrunk, stop=Stop(progress=False)).run(y)
    found, phi = posterior.integral.outer_mode, posterior.integral.phi[::3]
    together = found.inner(phi)
    monkeypatch.setattr(approximation, "LIGHT", 0)
    alone = found.inner(phi)
    assert isinstance(together.precision, Dense) and isinstance(alone.precision, Separate)
    for a, b in ((together.u, alone.u), (together.log_density, alone.log_density)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
