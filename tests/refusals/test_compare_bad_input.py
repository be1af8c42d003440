"""Engines that fail, lie or answer another question: a row that says so, or a refusal."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from pyro_evidence import REVM, RVM, BadInput, EvidenceEM, LaplaceEvidence, compare
from pyro_evidence.compare import NUTSRun, SVIRun
from pyro_evidence.models.mixture import gaussian_mixture
from tests.evidence_check.test_evidence_check import logistic
from tests.models_for_tests.exact_models import straight, straight_data, straight_posterior

SHORT = {"num_samples": 20, "warmup_steps": 20}


def answering(draws: Any, **more: Any) -> SimpleNamespace:
    """An engine whose fit has these draws."""
    return SimpleNamespace(run=lambda *_, **__: SimpleNamespace(get_samples=lambda: draws, **more))


def exact(num: int = 400) -> Tensor:
    mean, covariance = straight_posterior(*straight_data())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return dist.MultivariateNormal(mean, covariance).sample((num,))


def beside(other: Any, **settings: Any) -> Any:
    """A comparison of ``other`` with the exact posterior."""
    return compare(straight, *straight_data(), engines={"other": other, "exact": answering({"w": exact()})}, **settings)


@pytest.mark.parametrize(
    ("draws", "message"),
    [
        ({"w": torch.zeros(0, 3)}, "expected one number of them, at least 1"),
        ({}, "expected one number of them, at least 1"),
        ({"w": torch.full((10, 3), math.nan)}, r"nan or infinite, by site: {'w': 30}"),
        ({"w": exact(), "v": torch.zeros(7)}, r"'w': \(1, 400\), 'v': \(1, 7\)"),
        (None, "AttributeError"),
    ],
)
def test_draws_that_are_none(draws: Any, message: str) -> None:
    found = beside(answering(draws))
    assert found.runs["other"].failure
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(str(found))
    assert math.isnan(found.rows["other"]["mean"])


def test_one_draw_is_shown_without_numbers() -> None:
    found = beside(answering({"w": exact(1)}), held_out=straight_data())
    assert not found.runs["other"].failure
    assert math.isnan(found.rows["other"]["mean"])
    assert math.isfinite(found.rows["other"]["density"])
    with pytest.raises(BadInput, match="the reference 'one' gave 1 draws"):
        compare(straight, *straight_data(), engines={"a": answering({"w": exact()}), "one": answering({"w": exact(1)})})


def test_constant_draws_of_the_reference_are_not_compared() -> None:
    engines = {"a": answering({"w": exact()}), "stuck": answering({"w": torch.ones(50, 3)})}
    found = compare(straight, *straight_data(), engines=engines)
    assert "site(s) ['w'] do not vary in the reference" in str(found)
    assert math.isnan(found.rows["a"]["mean"])


def test_an_element_that_is_constant_is_left_out() -> None:
    fixed = exact()
    fixed[:, 1] = 0.0  # as the zeros of a triangular matrix are
    engines = {"a": answering({"w": exact()}), "b": answering({"w": fixed})}
    assert compare(straight, *straight_data(), engines=engines).rows["a"]["mean"] < 1e-9


def test_numpy_draws_and_no_model_are_enough() -> None:
    found = beside(answering({"w": np.asarray(exact())}), held_out=straight_data())
    assert found.rows["other"]["mean"] == 0.0
    assert found.rows["other"]["held_out"] == pytest.approx(0.0, abs=1e-12)


def other_sites(X: Tensor, y: Tensor) -> None:
    v = pyro.sample("v", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(v, 1.0), obs=y)


def other_data(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=2.0 * y)


def other_shape(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 1]).to_event(2))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal((X @ w).squeeze(-1), 0.5), obs=y)


def test_sites_that_differ_are_said() -> None:
    found = beside(LaplaceEvidence(other_sites))
    assert "other: site(s) ['v', 'w'] are not in both posteriors" in str(found)
    assert "site(s) ['w'] have another shape" in str(beside(LaplaceEvidence(other_shape)))


def test_other_data_are_a_failure() -> None:
    found = beside(LaplaceEvidence(other_data))
    assert "other: did not run. BadInput: its model observes other data than the model compared: ['y']" in str(found)
    assert not found.runs["other"].draws
    with pytest.raises(BadInput, match=r"the reference 'b' cannot be one\. BadInput: its model observes other data"):
        compare(straight, *straight_data(), engines={"a": LaplaceEvidence(straight), "b": LaplaceEvidence(other_data)})


def counted(y: Tensor) -> None:
    """A latent count, which no engine here can sum."""
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    count = pyro.sample("count", dist.Poisson(rate))
    pyro.sample("y", dist.Normal(count, 1.0), obs=y)


def test_a_discrete_site_that_cannot_be_summed() -> None:
    own = answering({"rate": torch.rand(50) + 1.0})
    engines = {"laplace": LaplaceEvidence(counted), "nuts": NUTSRun(**SHORT), "own": own}
    found = compare(counted, torch.tensor(2.0), engines=engines, held_out=(torch.tensor(2.0),))
    assert "laplace: did not run. UnsupportedModel: site 'count' is a discrete latent, Poisson" in str(found)
    assert found.runs["nuts"].failure
    assert "own: its model cannot be read (UnsupportedModel" in str(found)
    with pytest.raises(BadInput, match="the reference 'nuts' gave 0 draws"):
        compare(counted, torch.tensor(2.0), engines={"own": own, "nuts": NUTSRun(**SHORT)})


def half_defined(y: Tensor) -> None:
    """Not a number for negative ``a``."""
    a = pyro.sample("a", dist.Normal(3.0, 1.0))
    pyro.sample("y", dist.Normal(a.sqrt(), 1.0, validate_args=False), obs=y)


def test_nan_densities_are_said_and_stay_nan() -> None:
    engines = {
        "odd": answering({"a": torch.linspace(-1.0, 4.0, 50)}),
        "fine": answering({"a": torch.linspace(1.0, 4.0, 50)}),
    }
    y = torch.tensor([1.5])
    found = compare(half_defined, y, engines=engines, held_out=(y,))
    assert "odd: the log predictive density of 1 of the held-out data is nan at some draws" in str(found)
    assert math.isnan(found.rows["odd"]["density"])
    assert math.isnan(found.rows["odd"]["held_out"])
    assert math.isfinite(found.rows["fine"]["density"])


def funnel(y: Tensor) -> None:
    v = pyro.sample("v", dist.Normal(0.0, 3.0))
    x = pyro.sample("x", dist.Normal(0.0, (v / 2).exp()).expand([9]).to_event(1))
    pyro.sample("y", dist.Normal(x.sum(), 1.0), obs=y)


def vague(X: Tensor, y: Tensor) -> None:
    """A param to lift."""
    alpha = pyro.param("alpha", torch.tensor(1.0), constraint=torch.distributions.constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, alpha.rsqrt()).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def test_hyperpriors_that_would_be_ignored_are_refused() -> None:
    prior = {"alfa": dist.Gamma(1.0, 1.0)}
    engines = {
        "laplace": LaplaceEvidence(vague),
        "typo": NUTSRun(hyperpriors=prior, **SHORT),
        "both": NUTSRun(posterior="laplace", hyperpriors={"alpha": dist.Gamma(1.0, 1.0)}, **SHORT),
        "exact": answering({"w": exact()}),
    }
    said = str(compare(vague, *straight_data(), engines=engines))
    assert (
        "typo: did not run. BadInput: hyperpriors name ['alfa']; expected params of the model, which are ['alpha']"
        in said
    )
    assert "both: did not run. BadInput: posterior='laplace' holds that fit's hyperparameters" in said


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("laplace", "engine 'other' is a str; expected an object with run"),
        (LaplaceEvidence, "engine 'other' is the class LaplaceEvidence; expected an object with run"),
        (SimpleNamespace(get_samples=dict), "engine 'other' is a SimpleNamespace; expected an object with run"),
        (
            SVI(straight, AutoNormal(straight), pyro.optim.Adam({"lr": 0.1}), Trace_ELBO()),
            "engine 'other' is Pyro's SVI; expected pyro_evidence.compare.SVIRun",
        ),
    ],
    ids=["string", "class", "posterior", "svi"],
)
def test_what_is_no_engine_is_a_row_that_says_so(engine: Any, message: str) -> None:
    assert f"other: did not run. BadInput: {message}" in str(beside(engine))


def test_chains_of_a_single_draw_run() -> None:
    mcmc = MCMC(NUTS(straight), num_samples=1, warmup_steps=5, disable_progbar=True)
    engines = {"nuts": NUTSRun(num_samples=1, warmup_steps=5), "mcmc": mcmc, "exact": answering({"w": exact()})}
    found = compare(straight, *straight_data(), engines=engines)
    assert [found.runs[n].num_draws for n in engines] == [1, 1, 400]
    assert not any(run.failure for run in found.runs.values()), found.notes


def test_arguments_of_another_kind_are_refused_at_once() -> None:
    X, y = straight_data()
    with pytest.raises(BadInput, match="engines is a list; expected a dict"):
        compare(straight, X, y, engines=[LaplaceEvidence(straight)])  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="held_out is a Tensor; expected the model's arguments"):
        beside(answering({"w": exact()}), held_out=X)
    with pytest.raises(BadInput, match="loss=3; expected a function of a Prediction"):
        beside(answering({"w": exact()}), held_out=(X, y), loss=3)


def optional(X: Tensor, y: Tensor | None = None) -> None:
    """Draws its targets when it is given none."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def test_held_out_data_without_targets_are_no_data() -> None:
    X, y = straight_data()
    engines = {"a": answering({"w": exact()}), "b": answering({"w": exact()})}
    found = compare(optional, X, y, engines=engines, held_out=(X,))
    assert "a: held-out data: BadInput: site(s) ['y'] have no data in these arguments; pass the targets" in str(found)
    assert math.isnan(found.rows["b"]["density"])


def test_divergences_are_counted_and_said() -> None:
    engines = {"own": answering({"v": torch.randn(50), "x": torch.randn(50, 9)}), "nuts": NUTSRun(seed=3, **SHORT)}
    found = compare(funnel, torch.tensor(0.0), engines=engines)
    assert found.rows["nuts"]["divergences"] >= 1
    assert f"nuts: {found.runs['nuts'].divergences} divergent transitions; its draws are biased." in str(found)


def test_held_out_data_that_do_not_fit_are_a_note() -> None:
    X, y = straight_data()
    found = beside(LaplaceEvidence(straight), held_out=(X[:, :2], y))
    assert "other: held-out data: " in str(found)
    assert math.isnan(found.rows["other"]["density"])


def test_a_diverged_svi_is_a_failure() -> None:
    steep = SVIRun(AutoNormal, pyro.optim.SGD({"lr": 1e6}), num_steps=20)
    assert beside(steep).runs["other"].failure


def class_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(60, 3, generator=generator)
    return X, torch.bernoulli(torch.sigmoid(X @ torch.tensor([2.0, -1.0, 0.0])), generator=generator)


def test_relevance_machines_are_engines_and_nuts_runs_on_their_axes() -> None:
    X, t = class_data()
    engines = {
        "laplace": LaplaceEvidence(logistic, maximise=()),
        "revm": REVM(logistic),
        "rvm": RVM(logistic),
        "svi": SVIRun(AutoNormal, pyro.optim.Adam({"lr": 0.05}), num_steps=30, posterior="laplace"),
        "on axes": NUTSRun(posterior="revm", **SHORT),
    }
    found = compare(logistic, X, t, engines=engines, reference="laplace", held_out=(X, t))
    assert not [r.failure for r in found.runs.values() if r.failure]
    assert set(found.runs["on axes"].draws) == {"axes", "w"}
    directions = engines["revm"].posterior.state.directions
    axes, w = (found.runs["on axes"].draws[n][0] for n in ("axes", "w"))
    torch.testing.assert_close(w, axes @ directions.T)
    assert all(math.isfinite(row["density"]) and math.isfinite(row["error"]) for row in found.rows.values())


def test_mixtures_are_engines() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(50, 1, generator=generator) + 4.0 * ((torch.arange(50) % 2) * 2.0 - 1.0).unsqueeze(-1)
    model = gaussian_mixture(num_components=2)
    engines = {"em": EvidenceEM(model), "nuts": NUTSRun(posterior="em", **SHORT)}
    found = compare(model, y, engines=engines, reference="em", held_out=(y[:10],))
    assert not found.runs["nuts"].failure
    assert found.rows["nuts"]["mean"] < 1.5  # twenty draws, labels matched
    assert math.isfinite(found.rows["nuts"]["density"])


def test_error_on_held_out_classes_and_numbers() -> None:
    X, t = class_data()
    w = torch.tensor([2.0, -1.0, 0.0])
    draws = w + 0.01 * torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    engines = {"a": answering({"w": -draws}), "b": answering({"w": draws})}
    found = compare(logistic, X, t, engines=engines, held_out=(X, t))
    wrong = ((X @ w > 0) != (t > 0.5)).double()
    assert found.rows["b"]["error"] == pytest.approx(float(wrong.mean()), abs=0.02)
    assert found.rows["a"]["error"] == pytest.approx(1.0 - float(wrong.mean()), abs=0.02)
    gap = 1.0 - 2.0 * wrong
    assert found.rows["a"]["error_gap"] == pytest.approx(float(gap.mean()), abs=0.02)
    assert found.rows["a"]["error_se"] == pytest.approx(float(gap.std()) / math.sqrt(60), rel=0.1)
    X, y = straight_data()
    mean, _ = straight_posterior(X, y)
    numbers = beside(answering({"w": exact()}), held_out=(X, y)).rows["other"]
    assert numbers["error"] == pytest.approx(float((X @ mean - y).square().mean()), rel=0.05)


def test_named_held_out_data() -> None:
    X, y = straight_data()
    engines = {"a": LaplaceEvidence(straight, maximise=()), "b": answering({"w": exact()})}
    positional = compare(straight, X, y, engines=engines, held_out=(X[:7], y[:7]))
    named = compare(straight, X=X, y=y, engines=engines, held_out={"X": X[:7], "y": y[:7]})
    assert named.rows["b"]["density"] == positional.rows["b"]["density"]
    assert len(named.held_out["b"].pit) == 7


def test_own_loss() -> None:
    found = beside(
        LaplaceEvidence(straight), held_out=straight_data(), loss=lambda p: (p.mean - p.observed).abs() * 0.0 + 3.0
    )
    assert found.rows["other"]["error"] == 3.0


def test_predictions_are_calibrated() -> None:
    X, y = straight_data()
    pit = beside(LaplaceEvidence(straight), held_out=(X, y)).held_out["exact"].pit
    mean, covariance = straight_posterior(X, y)
    sd = (0.25 + (X @ covariance * X).sum(-1)).sqrt()
    expected = dist.Normal(X @ mean, sd).cdf(y)
    assert (pit - expected).abs().max() < 4.0 * 0.5 / math.sqrt(400)
