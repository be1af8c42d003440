"""Kernels made of kernels: which a search comes by, and their log evidences, in closed form and by fits alone."""

import importlib
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, LaplaceEvidence, Stop, explore
from pyro_evidence.compare.explore import KernelExpression
from pyro_evidence.fitting.iterate import bar_of
from pyro_evidence.models.basis import LEARNED
from pyro_evidence.models.gp import gp_regression
from pyro_evidence.models.kernels import RBF, ChangePoint, Constant, Kernel, Linear, Periodic

QUIET = partial(LaplaceEvidence, stop=Stop(progress=False))


def series() -> tuple[Tensor, Tensor]:
    """A season of eight steps, with a peak, upon a line."""
    generator = torch.Generator().manual_seed(0)
    x = torch.arange(40.0, dtype=torch.float64)
    noise = 0.2 * torch.randn(40, generator=generator, dtype=torch.float64)
    return (x - 20.0).unsqueeze(-1), 0.15 * x + 1.5 * (2.0 * ((math.tau * x / 8.0).cos() - 1.0)).exp() + noise - 2.9


def test_line_and_season_are_found_and_each_evidence_is_that_of_a_fit() -> None:
    X, y = series()
    posterior = explore({"line": Linear(), "season": Periodic()}, X, y, depth=2, engine=QUIET)
    texts = posterior.labels["kernel"]
    assert texts[int(posterior.structure(0)["kernel"])] == "line + season"
    assert set(texts) >= {"season", "line * season", "change(line, season)", "change(season, line)"}
    assert len(set(texts)) == len(texts) and "season + line" not in texts
    alone = QUIET(gp_regression(Linear() + Periodic())).run(X, y)
    assert float(alone.log_evidence) <= float(posterior.member(0).log_evidence) + 1e-6
    end = posterior.member(0).hyperparameters  # in closed form
    order = int("kernel.1.period" in end)
    settings = {i: {n[9:]: v for n, v in end.items() if n.startswith(f"kernel.{i}.")} for i in (0, 1)}
    covariance = Linear(**settings[1 - order])(X) + Periodic(**settings[order])(X)
    covariance = covariance + (1e-6 + 1.0 / end["beta"]) * torch.eye(40)
    exact = torch.distributions.MultivariateNormal(torch.zeros(40).double(), covariance).log_prob(y)
    best = int(posterior.order[0])
    assert float(posterior.log_evidences[best]) == pytest.approx(float(exact), abs=1e-8)
    falls = posterior.found.log_prior - posterior.found.log_prior[texts.index("line")]
    assert float(falls[best]) == pytest.approx(-3.0)  # four settings in place of one
    assert math.isnan(posterior.unvisited) and "elsewhere is not known" in str(posterior.structures(2))
    assert "falls by a nat with each number that is maximised" in str(posterior.structures(2))
    torch.testing.assert_close(posterior.member(0).predict(X[:3]), alone.predict(X[:3]), rtol=0.0, atol=0.03)


def test_composites_are_no_lower_than_fits_from_the_settings_as_given() -> None:
    """A season alone follows a trend too, by a period that never ends: from there no season is found beside a trend."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0.0, 10.0, 60, dtype=torch.float64)
    y = 0.4 * x + (math.pi * x).sin() + 0.2 * torch.randn(60, generator=generator, dtype=torch.float64)
    X, y = x.unsqueeze(-1), y - y.mean()
    posterior = explore({"trend": RBF(), "season": Periodic()}, X, y, depth=2, engine=QUIET)
    found = dict(zip(posterior.labels["kernel"], posterior.log_evidences.tolist(), strict=True))
    for text, kernel in {
        "season + trend": RBF() + Periodic(),
        "season * trend": RBF() * Periodic(variance=1.0),
        "change(trend, season)": ChangePoint((RBF(), Periodic())),
    }.items():
        alone = QUIET(gp_regression(kernel)).run(X, y)
        assert float(alone.log_evidence) <= found[text] + 0.01, text
    assert found["season + trend"] > found["trend"] + 10.0


def test_every_part_grows_and_factors_have_one_variance() -> None:
    a, b = KernelExpression("a", RBF(2.0)), KernelExpression("b", Periodic(3.0))
    products = {e.text: e for e in a.grown([a, b])}
    assert set(products) == {"a + a", "a + b", "a * a", "a * b", "change(a, a)", "change(a, b)", "change(b, a)"}
    assert products["a * b"].kernel == RBF(2.0) * Periodic(3.0, variance=1.0)
    grown = {e.text: e for e in products["a + b"].grown([a, b])}
    assert {"a + a + b", "(a + b) * a", "a + b * b", "a * b + b", "a + change(b, a)", "change(a, a + b)"} <= set(grown)
    assert grown["a * b + b"].kernel == RBF(2.0) * Periodic(3.0, variance=1.0) + Periodic(3.0)
    assert [part.text for part in grown["a + a + b"].parts] == ["a", "b", "a"]
    changed = {e.text: e.kernel for e in products["change(a, b)"].grown([a])}
    assert changed["change(a + a, b)"] == ChangePoint((RBF(2.0) + RBF(2.0), Periodic(3.0)))
    line = KernelExpression("line", Linear() + Constant())
    assert {"a + line", "a * line"} <= {e.text for e in a.grown([line])}


@dataclass(frozen=True, eq=False)
class NoCovariance(Kernel):
    """Whose matrices have negative eigenvalues."""

    variance: Any = LEARNED

    def covariance(self, X: Tensor, Z: Tensor) -> Tensor:
        return -self.variance * (X @ Z.mT)


def test_kernels_that_fail_are_entries_of_the_table() -> None:
    X, y = series()
    posterior = explore({"line": Linear(), "none": NoCovariance()}, X / 64.0, y, depth=1, engine=QUIET)
    assert len(posterior.failures) == 1 and posterior.probabilities.tolist() == [1.0, 0.0]
    assert math.isnan(float(posterior.log_evidences[1])) and "1 structures have no posterior" in str(
        posterior.structures()
    )
    two = explore({"line": Linear()}, torch.cat([X, X.square() / 64.0], -1) / 64.0, y, depth=2, engine=QUIET)
    assert any("ChangePoint has 2 inputs" in said for said in two.failures)
    with pytest.raises(BadInput, match=r"X.*shape \(40,\)"):
        explore({"line": Linear()}, X[:, 0], y, engine=QUIET)


def test_the_progress_bar_ends_where_every_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    module, bars = importlib.import_module("pyro_evidence.compare.explore"), list[Any]()
    monkeypatch.setattr(module, "bar_of", lambda *args: bars.append(bar_of(*args)) or bars[-1])
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    X, y = series()
    with pytest.raises(BadInput):
        explore({"line": Linear()}, X[:, 0], y)
    assert bars[0].disable  # as of a bar that is closed


def test_kernels_come_alone_and_without_a_prior() -> None:
    X, y = series()
    for programs, prior in (({"line": Linear(), "own": gp_regression(RBF())}, None), ({"line": Linear()}, {"line": 1})):
        with pytest.raises(BadInput, match="expected kernels alone"):
            explore(programs, X, y, prior=prior)
    with pytest.raises(BadInput, match="depth"):
        explore({"line": Linear()}, X, y, depth=0)
