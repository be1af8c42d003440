"""How many draws are weighed before a further site is marginalised; oracle: the share that many draws keep."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, NotConverged, Stop
from pyro_evidence.nested import inner, skewness
from pyro_evidence.posterior.nested import ENOUGH, FIRST_LOOK, NestedPosterior
from pyro_evidence.precision.dense import Dense, Separate
from pyro_evidence.structure import density


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
    monkeypatch.setattr(density, "LIGHT", 0)
    alone = found.inner(phi)
    assert isinstance(together.precision, Dense) and isinstance(alone.precision, Separate)
    for a, b in ((together.u, alone.u), (together.log_density, alone.log_density)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def slopes(x: Tensor, g: Tensor, y: Tensor, normal: bool) -> None:
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(2, dtype=torch.float64)).to_event(1))
    b = pyro.sample("b", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
    with pyro.plate("groups", 10):
        u = pyro.sample("u", dist.Normal(torch.zeros(2, dtype=torch.float64), scale).to_event(1))
    eta = b[0] + b[1] * x + u[g, 0] + u[g, 1] * x
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(eta, 1.0) if normal else dist.Poisson(eta.exp()), obs=y)


def test_a_few_groups_of_slopes_are_integrated_by_factors_where_dense_rows_take_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of a quadratic density take one step each, those of a small one are one batch."""
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(50, generator=generator, dtype=torch.float64), torch.arange(50) % 10
    y = torch.poisson((0.5 + 0.3 * x + 0.5 * torch.randn(10, generator=generator, dtype=torch.float64)[g]).exp())
    fit = LaplaceEvidence(slopes, stop=Stop(progress=False)).run
    by_factors, normal = fit(x, g, y, False), fit(x, g, y, True)
    monkeypatch.setattr(inner, "FEW", 22)
    dense = fit(x, g, y, False)
    fits = by_factors, normal, dense
    kinds = [posterior.integral.outer_mode.state.problem.factors is not None for posterior in fits]
    assert kinds == [True, False, False]
    assert float(by_factors.integral.log_evidence) == pytest.approx(float(dense.integral.log_evidence), abs=0.02)
    assert len(by_factors.integral.phi) < len(dense.integral.phi)
    means = [posterior.marginal("scale").mean for posterior in (by_factors, dense)]
    torch.testing.assert_close(*means, atol=0.01, rtol=0.0)


def test_means_stand_for_shapes_where_weights_do_not_tell_these(monkeypatch: pytest.MonkeyPatch) -> None:
    x, g, y = torch.zeros(20, dtype=torch.float64), torch.arange(20) % 10, torch.arange(20).double() % 3
    posterior = LaplaceEvidence(slopes, stop=Stop(progress=False)).run(x, g, y, False)
    monkeypatch.setattr(skewness, "skewness_correction", lambda *_: None)
    found = replace(posterior.integral).skewness_correction
    assert isinstance(found, skewness.Shift) and bool((found.loc != 0.0).any())
