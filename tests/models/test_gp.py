"""Gaussian process models: prior draws, hyperparameters of all three kinds, and error messages for bad input."""

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import BadInput, LaplaceEvidence, LaplacePosterior, Start, Stop, UnsupportedModel
from pyro_evidence.errors import NotPositiveDefinite
from pyro_evidence.models.basis import LEARNED, Learned
from pyro_evidence.models.gp import gp_classifier, gp_poisson, gp_regression
from pyro_evidence.models.kernels import RBF, ChangePoint, Constant, Linear, Periodic, Stationary
from pyro_evidence.program import LogJoint

QUIET = Stop(progress=False)


def inputs(num_data: int = 6) -> Tensor:
    return torch.linspace(-1.0, 1.0, num_data)[:, None]


def test_prior_draws_have_the_kernels_covariance() -> None:
    X, kernel = inputs(), RBF(0.7, 2.0)
    model = gp_regression(kernel, beta=4.0, mean=1.5, jitter=0.1)
    draws = torch.stack([model(X) for _ in range(4000)])
    expected = kernel(X) + 0.35 * torch.eye(6)
    error = expected.diagonal()[0] * math.sqrt(2.0 / 4000)
    assert bool(((draws.T.cov() - expected).abs() < 5.0 * error).all())
    assert bool(((draws.mean(0) - 1.5).abs() < 5.0 * math.sqrt(2.35 / 4000)).all())


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (gp_regression(RBF(torch.tensor([1.0]))), (6,)),
        (gp_classifier(RBF()), (6,)),
        (gp_classifier(RBF(), num_classes=4), (4, 6)),
        (gp_poisson(RBF() + 0.5), (6,)),
    ],
)
def test_sites_params_and_values(model: Callable[..., Any], shape: tuple[int, ...]) -> None:
    trace = poutine.trace(model).get_trace(inputs().float())
    assert trace.nodes["f"]["value"].shape == shape and trace.nodes["t"]["value"].shape == (6,)
    assert trace.nodes["f"]["value"].dtype == torch.float64  # whatever the inputs are
    assert "data" in trace.nodes and "kernel" in " ".join(trace.param_nodes)
    assert pickle.loads(pickle.dumps(model)) == model
    trace.compute_log_prob()


def test_three_kinds_of_settings() -> None:
    kernel = RBF(dist.LogNormal(0.0, 1.0), Learned(2.0)) * Constant(3.0)
    model = gp_regression(kernel, beta=dist.Gamma(2.0, 1.0), mean=Learned(0.5))
    trace = poutine.trace(model).get_trace(inputs())
    assert trace.param_nodes == ["kernel.0.variance", "mean"]
    assert {"kernel.0.lengthscale", "beta", "f", "t"} <= set(trace.stochastic_nodes)
    torch.testing.assert_close(pyro.param("kernel.0.variance").detach(), torch.tensor(2.0))
    torch.testing.assert_close(pyro.param("mean").detach(), torch.tensor(0.5))


def test_lengthscales_per_input_find_the_one_that_matters() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(60, 3, generator=generator)
    t = (6.0 * X[:, 0]).sin() + 0.1 * torch.randn(60, generator=generator)
    scale = dist.LogNormal(torch.zeros(3), 2.0).to_event(1)
    posterior = LaplaceEvidence(gp_regression(RBF(scale)), maximise=["kernel.lengthscale"], stop=QUIET).run(X, t)
    scale = posterior.hyperparameters["kernel.lengthscale"]
    assert float(scale[1:].min()) > 5.0 * float(scale[0])


def test_one_datum_and_float32_and_booleans() -> None:
    posterior = LaplaceEvidence(gp_classifier(RBF(1.0, 1.0)), maximise=(), stop=QUIET).run(
        torch.zeros(1, 1), torch.tensor([True])
    )
    assert posterior.mode["f"].shape == (1,) and float(posterior.mode["f"]) > 0
    assert -math.log(2.0) - 0.2 < float(posterior.log_evidence) < 0
    X, t = inputs(), torch.tensor([0, 0, 1, 0, 1, 1])
    single, double = (
        LaplaceEvidence(gp_classifier(RBF()), maximise=(), stop=QUIET).run(X.to(d), t.to(d)).log_evidence
        for d in (torch.float32, torch.float64)
    )
    assert float(single) == pytest.approx(float(double), abs=1e-6)


def test_labels_of_one_class_are_explained_by_a_constant_function() -> None:
    X, t = inputs(), torch.ones(6)
    posterior = LaplaceEvidence(gp_classifier(RBF()), stop=QUIET).run(X, t)
    assert float(posterior.hyperparameters["kernel.lengthscale"]) > 100.0
    assert -6.0 * math.log(2.0) < float(posterior.log_evidence) < -math.log(2.0)
    posterior = LaplaceEvidence(gp_classifier(RBF(), num_classes=3), maximise=(), stop=QUIET).run(X, t)
    assert bool((posterior.mode["f"].argmax(0) == 1).all())


def test_inputs_that_occur_twice_need_jitter() -> None:
    X = torch.cat([inputs(), inputs()[2:3]])
    t = torch.tensor([0.0, 0, 0, 1, 1, 1, 0])
    with pytest.raises(BadInput, match=r"Inputs 2 and 6 are 0 apart.*more jitter"):
        LogJoint(gp_classifier(RBF(), jitter=0.0), (X, t))
    with pytest.raises(BadInput, match=r"Inputs 2 and 6 are 0 apart"):
        LogJoint(gp_regression(RBF(), jitter=0.0), (X, t))
    assert math.isfinite(float(LaplaceEvidence(gp_classifier(RBF()), maximise=(), stop=QUIET).run(X, t).log_evidence))


BAD: list[tuple[str, Callable[[], Any]]] = [
    (r"lengthscale with the value 0; expected finite", lambda: gp_regression(RBF(0.0))),
    (r"lengthscale with the value inf", lambda: gp_regression(RBF(Learned(math.inf)))),
    (r"kernel is a float", lambda: gp_regression(1.0)),  # type: ignore[arg-type]
    (r"jitter=-1", lambda: gp_regression(RBF(), jitter=-1.0)),
    (r"jitter=nan", lambda: gp_classifier(RBF(), jitter=math.nan)),
    (r"num_classes=1; expected a whole number of at least 2", lambda: gp_classifier(RBF(), num_classes=1)),
    (r"beta has the value 0; expected finite and greater than 0", lambda: gp_regression(RBF(), beta=0.0)),
    (r"shape \(6, 0\).*no data", lambda: gp_regression(RBF())(torch.ones(6, 0), torch.ones(6))),
    (r"holds inf or nan", lambda: gp_regression(RBF())(inputs() * math.nan, torch.ones(6))),
    (r"t has shape \(6, 1\)", lambda: gp_regression(RBF())(inputs(), torch.ones(6, 1))),
    (r"label 2; expected whole numbers from 0 to 1", lambda: gp_classifier(RBF())(inputs(), 2.0 * torch.ones(6))),
    (r"label -1", lambda: gp_classifier(RBF())(inputs(), -torch.ones(6))),
    (r"label 0.5", lambda: gp_classifier(RBF(), num_classes=3)(inputs(), 0.5 * torch.ones(6))),
    (r"no counts", lambda: gp_poisson(RBF())(inputs(), -torch.ones(6))),
    (r"RBF has 2 entries in lengthscale, but X has 1", lambda: gp_poisson(RBF(torch.ones(2)))(inputs())),
]


@pytest.mark.parametrize(("message", "act"), BAD, ids=[message[:24] for message, _ in BAD])
def test_bad_input(message: str, act: Callable[[], Any]) -> None:
    with pytest.raises(BadInput, match=message):
        act()


def test_a_param_of_another_model_is_seen() -> None:
    pyro.param("kernel.lengthscale", torch.ones(3))
    with pytest.raises(BadInput, match="left over from another model"):
        gp_regression(RBF())(inputs())


def test_no_data_is_refused() -> None:
    with pytest.raises((BadInput, UnsupportedModel)):
        LogJoint(gp_regression(RBF() + Linear()), (torch.ones(0, 1), torch.ones(0)))


def test_the_kept_prior_follows_settings_and_inputs() -> None:
    X = inputs()
    model = gp_classifier(RBF(dist.LogNormal(0.0, 1.0), 1.0), jitter=1e-3)
    for scale in (0.5, 0.5, 1.0):
        given = poutine.condition(model, data={"kernel.lengthscale": torch.tensor(scale)})
        for factor in (1.0, 1.1):
            X.mul_(factor)
            found = poutine.trace(given).get_trace(X).nodes["f"]["fn"].covariance_matrix
            torch.testing.assert_close(found, RBF(scale, 1.0)(X) + 1e-3 * torch.eye(6))


SEASONS = torch.arange(40.0, dtype=torch.float64).unsqueeze(-1)
WAVE = torch.sin(2.0 * torch.pi * SEASONS[:, 0] / 8.0) + 0.1 * torch.cos(9.0 * SEASONS[:, 0].square())


def periods(period: Any, X: Tensor = SEASONS) -> tuple[Tensor, Any]:
    """Start and constraint of the period in a run of the model."""
    pyro.clear_param_store()
    nodes = poutine.trace(gp_regression(Periodic(period=period))).get_trace(X).nodes
    return nodes["kernel.period"]["value"], nodes["kernel.period"]["kwargs"]["constraint"]


def test_a_period_that_is_learned_stays_above_twice_the_mean_spacing() -> None:
    for period, start in ((LEARNED, 4.0), (Learned(8.0), 8.0)):
        value, constraint = periods(period)
        assert float(value.detach()) == pytest.approx(start) and float(constraint.lower_bound) == 2.0
    value, constraint = periods(LEARNED, torch.cat([SEASONS, SEASONS]) / 100.0)  # inputs that occur twice are one
    assert float(value.detach()) == 1.0 and float(constraint.lower_bound) == pytest.approx(0.02)


@pytest.mark.parametrize("X", [SEASONS[:1], torch.ones(5, 1, dtype=torch.float64)], ids=["one row", "one input"])
def test_inputs_without_a_spacing_bound_no_period(X: Tensor) -> None:
    assert periods(LEARNED, X)[1] is constraints.positive


def test_a_period_that_begins_below_twice_the_spacing_is_meant() -> None:
    value, constraint = periods(Learned(0.5))
    assert float(value.detach()) == 0.5 and constraint is constraints.positive


def test_each_input_bounds_its_own_period() -> None:
    X = torch.cat([SEASONS, 10.0 * SEASONS.flip(0)], -1)
    _, constraint = periods(Learned(torch.tensor([8.0, 80.0])), X)
    assert constraint.lower_bound.tolist() == [2.0, 20.0]
    assert float(periods(Learned(8.0), X)[1].lower_bound) == 2.0


@dataclass(frozen=True, eq=False)
class Wave(Stationary):
    """A kernel of a user's own, of which the inputs bound the wavelength, and not what it calls a period."""

    wavelength: Any = LEARNED
    period: Any = LEARNED

    def least(self, setting: str, X: Tensor) -> Tensor | None:
        return 3.0 * X.diff(dim=0).mean(0) if setting == "wavelength" else None

    def covariance(self, X: Tensor, Z: Tensor) -> Tensor:
        return Periodic(self.wavelength, 1.0, self.period).covariance(X, Z)


def test_a_kernel_says_which_of_its_settings_the_inputs_bound() -> None:
    pyro.clear_param_store()
    nodes = poutine.trace(gp_regression(Wave() + RBF())).get_trace(SEASONS).nodes
    bounds = {name: nodes[f"kernel.0.{name}"]["kwargs"]["constraint"] for name in ("wavelength", "period")}
    assert float(bounds["wavelength"].lower_bound) == 3.0 and bounds["period"] is constraints.positive


@pytest.mark.parametrize("shift", [0.0, -60.0])
def test_a_change_point_stays_among_the_inputs(shift: float) -> None:
    pyro.clear_param_store()
    kernel = ChangePoint((RBF(), Periodic(period=Learned(8.0))))
    nodes = poutine.trace(gp_regression(kernel)).get_trace(SEASONS + shift, WAVE).nodes
    (place, low, high), (width, least, most) = (
        (float(node["value"].detach()), float(bounds.lower_bound), float(bounds.upper_bound))
        for node in (nodes["kernel.location"], nodes["kernel.width"])
        for bounds in [node["kwargs"]["constraint"]]
    )
    assert (place, low, high) == pytest.approx((19.5 + shift, shift, 39.0 + shift))
    assert (width, least, most) == pytest.approx((0.05 * 39.0, 0.0, 6.5))
    pyro.clear_param_store()
    nodes = poutine.trace(gp_regression(ChangePoint((RBF(), RBF()), Learned(-200.0)))).get_trace(SEASONS, WAVE).nodes
    assert nodes["kernel.location"]["kwargs"]["constraint"] is constraints.real


def test_a_period_begins_where_the_targets_say_and_is_found() -> None:
    posterior = LaplaceEvidence(gp_regression(Periodic()), stop=QUIET).run(SEASONS, WAVE)
    assert float(posterior.hyperparameters["kernel.period"]) == pytest.approx(8.0, abs=0.1)


@pytest.mark.filterwarnings("ignore:LaplaceEvidence. ran out of steps:UserWarning")
def test_a_bounded_period_predicts_and_is_stored(tmp_path: Path) -> None:
    model = gp_regression(Periodic(period=Learned(7.0), lengthscale=1.0))
    posterior = LaplaceEvidence(model, stop=Stop(num_steps=3, progress=False, throw=False)).run(SEASONS, WAVE)
    new = SEASONS[:3] + 0.5
    posterior.save(tmp_path / "fit.pt")
    loaded = LaplacePosterior.load(tmp_path / "fit.pt", model)
    torch.testing.assert_close(loaded.predict(new), posterior.predict(new))
    assert posterior.predict(new[:1]).isfinite().all()


@pytest.mark.filterwarnings("ignore:LaplaceEvidence. ran out of steps:UserWarning")
def test_several_starts_of_a_kernel_under_a_prior() -> None:
    """Rows of one batch, whose derivatives go through the squared distances."""
    stop = Stop(num_steps=1, progress=False, throw=False)
    engine = LaplaceEvidence(
        gp_regression(RBF(dist.LogNormal(0.0, 0.1)), beta=10.0), marginalise=(), start=Start(restarts=2), stop=stop
    )
    assert engine.run(SEASONS[:12], WAVE[:12]).log_evidence.isfinite()


def test_a_covariance_without_a_factor_ends_in_a_message() -> None:
    """A period under a prior, one Gaussian over everything: the search comes where the kernel's settings run away."""
    generator = torch.Generator().manual_seed(0)
    X = 10.0 * torch.rand(40, 1, generator=generator)
    t = torch.sin(2.0 * X[:, 0]) + 0.1 * torch.randn(40, generator=generator)
    engine = LaplaceEvidence(gp_regression(Periodic(period=dist.LogNormal(1.0, 1.0))), marginalise=(), stop=QUIET)
    with pytest.raises(NotPositiveDefinite, match=r"has no factor.*Add more to its diagonal"):
        engine.run(X, t)
