"""Engines on models whose posterior is known; failures, labels, tables."""

import math
import warnings
from types import SimpleNamespace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from torch import Tensor

from pyro_evidence import BadInput, LaplaceEvidence, Start, compare
from pyro_evidence.compare import Comparison, NUTSRun, SVIRun
from pyro_evidence.compare.labels import matched
from pyro_evidence.program import LogJoint
from tests.models_for_tests.engine_models import linear, targets
from tests.models_for_tests.exact_models import (
    straight,
    straight_data,
    straight_posterior,
    two_normals,
    two_normals_data,
)

QUICK = {"num_samples": 400, "warmup_steps": 200}


class Exact:
    """An engine that draws from the posterior on paper, its sd inflated on request."""

    def __init__(self, inflation: float = 1.0, shift: float = 0.0, num: int = 4000) -> None:
        self.inflation, self.shift, self.num = inflation, shift, num

    def run(self, X: Tensor, y: Tensor) -> SimpleNamespace:
        mean, covariance = straight_posterior(X, y)
        draws = dist.MultivariateNormal(mean, self.inflation**2 * covariance).sample((self.num,))
        draws = draws + self.shift * covariance.diagonal().sqrt()
        return SimpleNamespace(get_samples=lambda _=None: {"w": draws}, model=straight)


@pytest.fixture(scope="module")
def four() -> Comparison:
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    X, y = straight_data()
    engines = {
        "laplace": LaplaceEvidence(straight, maximise=()),
        "svi": SVIRun(AutoNormal, pyro.optim.Adam({"lr": 0.02}), num_steps=600),
        "wide": Exact(1.3, 0.5),
        "broken": SimpleNamespace(run=lambda *_: 1.0),
        "nuts": NUTSRun(posterior="laplace", **QUICK),
        "exact": Exact(),
    }
    new = torch.randn(50, 3, generator=torch.Generator().manual_seed(5))
    return compare(straight, X, y, engines=engines, held_out=(new, new @ torch.tensor([1.0, -0.5, 0.3])))


def test_exact_engines_agree_within_monte_carlo_error(four: Comparison) -> None:
    for name in ("laplace", "nuts"):
        assert four.rows[name]["mean"] < 4.0 * math.sqrt(1 / 300 + 1 / 4000)
        assert abs(four.rows[name]["sd"] - 1.0) < 4.0 / math.sqrt(2 * 300)
        assert four.rows[name]["wasserstein"] < 3.0 * four.rows["laplace"]["noise"] + 0.1
        assert abs(four.rows[name]["held_out"]) < 0.01


def test_wrong_posteriors_are_seen(four: Comparison) -> None:
    assert four.rows["wide"]["mean"] == pytest.approx(0.5, abs=0.1)
    assert four.rows["wide"]["sd"] == pytest.approx(1.3, abs=0.06)
    assert four.sites["wide"]["w"]["sd"] == four.rows["wide"]["sd"]
    assert four.rows["wide"]["wasserstein"] > 3.0 * four.rows["wide"]["noise"]


def test_a_row_that_could_not_run_says_why(four: Comparison) -> None:
    assert math.isnan(four.rows["broken"]["mean"])
    assert any(n.startswith("broken: did not run. BadInput: run(...) returned a float") for n in four.notes)


def test_tables(four: Comparison) -> None:
    assert str(four).splitlines()[0].split()[:2] == ["engine", "mean"]
    assert four.to_markdown().splitlines()[1].startswith("| --- |")
    assert "<td>exact (reference)</td>" in four._repr_html_()
    assert four.to_pandas().loc["wide", "sd"] == four.rows["wide"]["sd"]


def test_held_out_density_against_the_formula() -> None:
    X, y = straight_data()
    new = torch.randn(30, 3, generator=torch.Generator().manual_seed(5))
    t = new @ torch.tensor([1.0, -0.5, 0.3])
    found = compare(straight, X, y, engines={"a": Exact(1.5), "b": Exact()}, held_out=(new, t))
    mean, covariance = straight_posterior(X, y)
    densities = [
        dist.Normal(new @ mean, (0.25 + scale * ((new @ covariance) * new).sum(-1)).sqrt()).log_prob(t)
        for scale in (2.25, 1.0)
    ]
    assert found.rows["a"]["held_out"] == pytest.approx(float((densities[0] - densities[1]).mean()), abs=0.01)


@pytest.mark.slow
def test_lifted_nuts_integrates_the_hyperparameters_and_fitted_nuts_does_not() -> None:
    X, y = targets(num=30)
    priors = {"alpha": dist.Gamma(2.0, 2.0), "beta": dist.Gamma(2.0, 0.5)}
    short = {"num_samples": 150, "warmup_steps": 100}
    engines = {
        "laplace": LaplaceEvidence(linear),
        "fixed": NUTSRun(posterior="laplace", **short),
        "lifted": NUTSRun(hyperpriors=priors, **short),
    }
    found = compare(linear, X, y, engines=engines, reference="fixed")
    assert set(found.runs["lifted"].draws) == {"alpha", "beta", "w"}
    assert set(found.runs["fixed"].draws) == {"w"}
    assert any("lifted: site(s) ['alpha', 'beta'] are not in both" in note for note in found.notes)
    assert found.rows["laplace"]["mean"] < 0.5  # 150 draws
    assert not list(pyro.get_param_store().keys())


def plated(x: Tensor) -> None:
    """A scalar, a positive plate of three and a correlation matrix: every shape that draws can take."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    tril = pyro.sample("tril", dist.LKJCholesky(2, torch.tensor(2.0)))
    with pyro.plate("columns", 3):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        with pyro.plate("rows", len(x)):
            pyro.sample("x", dist.Normal(mean + tril[1, 0], scale), obs=x)


FEW = SimpleNamespace(get_samples=lambda: {"mean": torch.randn(10)})


def by_hand(x: Tensor) -> None:
    """A guide that takes a single draw only, and leaves ``tril`` to the model's prior."""
    mean = pyro.sample("mean", dist.Normal(0.5, 0.1))
    assert mean.dim() == 0
    with pyro.plate("columns", 3):
        pyro.sample("scale", dist.LogNormal(torch.tensor([-1.0, 0.0, 1.0]), 0.1))


@pytest.mark.parametrize("guide", [AutoNormal, AutoMultivariateNormal])
def test_svi_draws_from_the_guide(guide: Any) -> None:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    made: list[Any] = []
    kept = SVIRun(lambda m: made.append(guide(m)) or made[-1], pyro.optim.Adam({"lr": 0.01}), num_steps=30)
    run = compare(plated, x, engines={"svi": kept, "one": SimpleNamespace(run=lambda *_: FEW)}).runs["svi"]
    assert {n: v.shape for n, v in run.draws.items()} == {
        "mean": (1, 1000),
        "scale": (1, 1000, 3),
        "tril": (1, 1000, 2, 2),
    }
    quantiles = made[0].quantiles([0.16, 0.5, 0.84])
    for name in ("mean", "scale"):
        low, middle, high = (q.reshape(-1) for q in quantiles[name])
        draws = run.draws[name][0].reshape(1000, -1)
        assert ((draws.median(0).values - middle).abs() < 0.15 * (high - low)).all()
        assert (((draws > low) & (draws < high)).double().mean(0) - 0.68).abs().max() < 0.06


def test_svi_with_a_guide_by_hand() -> None:
    engines = {
        "svi": SVIRun(lambda _: by_hand, pyro.optim.Adam({"lr": 0.01}), num_steps=1, num_samples=300),
        "few": SimpleNamespace(run=lambda *_: FEW),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of Pyro: the guide lacks a site
        draws = compare(plated, torch.zeros(4, 3), engines=engines).runs["svi"].draws
    assert float(draws["mean"].std()) == pytest.approx(0.1, rel=0.2)
    assert draws["scale"].log().mean((0, 1)).tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=0.03)
    assert draws["tril"].shape == (1, 300, 2, 2)


def test_labels_are_matched_before_anything_is_compared() -> None:
    x = two_normals_data(6.0)
    joint = LogJoint(two_normals, (x,), maximise=())
    draws = (
        LaplaceEvidence(two_normals, maximise=(), start=Start(restarts=2, tour=0))
        .run(x)
        .get_samples(200, seed=0)["centre"]
        .reshape(1, 200, 2)
    )
    switched = draws.clone()
    switched[0, 50:120] = switched[0, 50:120].flip(-1)
    _, owners, none = matched(joint, {"centre": draws})
    renamed, _, switches = matched(joint, {"centre": switched}, owners)
    assert none == 0
    assert switches == 2
    torch.testing.assert_close(renamed["centre"], draws)


def test_mixture_engines_stuck_in_different_labellings_agree() -> None:
    x = two_normals_data(6.0)
    flipped = LaplaceEvidence(two_normals, maximise=(), start=Start(restarts=2, tour=0)).run(x)
    other = SimpleNamespace(
        run=lambda *_: SimpleNamespace(
            model=two_normals,
            get_samples=lambda _: {"centre": flipped.get_samples(1000, seed=1)["centre"].flip(-1)},
        )
    )
    found = compare(
        two_normals,
        x,
        engines={"other": other, "laplace": LaplaceEvidence(two_normals, maximise=(), start=Start(restarts=2, tour=0))},
    )
    assert found.rows["other"]["mean"] < 0.2
    assert found.rows["other"]["switches"] == 0


def test_random_state_and_store_are_left_alone() -> None:
    X, y = straight_data()
    pyro.get_param_store().setdefault("mine", torch.ones(1))
    before = torch.random.get_rng_state()
    compare(
        straight,
        X,
        y,
        engines={"a": LaplaceEvidence(straight, maximise=()), "b": NUTSRun(num_samples=20, warmup_steps=20)},
    )
    assert torch.equal(before, torch.random.get_rng_state())
    assert list(pyro.get_param_store().keys()) == ["mine"]


def test_letters() -> None:
    X, y = straight_data()
    exact = Exact()
    with pytest.raises(BadInput, match="expected two engines or more"):
        compare(straight, X, y, engines={"a": exact})
    with pytest.raises(BadInput, match="reference 'c'"):
        compare(straight, X, y, engines={"a": exact, "b": exact}, reference="c")
    with pytest.raises(BadInput, match="the reference 'b' gave 1 draws"):
        compare(straight, X, y, engines={"a": exact, "b": Exact(num=1)})
    found = compare(straight, X, y, engines={"a": NUTSRun(posterior="zzz"), "one": Exact(num=1), "b": exact})
    assert any("needs that engine's fit; expected one listed before it" in note for note in found.notes)
    assert math.isnan(found.rows["one"]["mean"])


def test_engine_that_needs_other_data_is_a_row() -> None:
    X, y = straight_data()
    other = LaplaceEvidence(two_normals)
    found = compare(straight, X, y, engines={"other": other, "exact": Exact()})
    assert "other: did not run" in str(found)
