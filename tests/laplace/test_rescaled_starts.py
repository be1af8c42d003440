"""Laws: what the data are measured in changes nothing, and a start far off costs few steps."""

import math
from collections.abc import Callable
from functools import cache, partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions.constraints import softplus_positive
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import LaplaceEvidence, LaplacePosterior, NotConverged, Stop
from pyro_evidence.laplace import type2
from pyro_evidence.laplace.gradient import Asking
from tests.models_for_tests.engine_models import logistic_ard, positive

QUIET = Stop(progress=False)
NUM = 60
X = torch.linspace(-2.0, 2.0, NUM, dtype=torch.float64)
GROUP = torch.arange(NUM) % 10


def targets(kind: str = "straight") -> Tensor:
    """Ten groups about a straight line, or about a curve that levels off."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(NUM, generator=generator, dtype=torch.float64)
    a = torch.randn(10, 2, generator=generator, dtype=torch.float64)[GROUP]
    if kind == "curved":
        return (5.0 + a[:, 0]) * torch.sigmoid(2.0 * (X - 0.3)) + 0.2 * noise
    return 3.0 + 2.0 * X + a[:, 0] + 0.5 * a[:, 1] * X + 0.4 * noise


def real(name: str, *start: float) -> Tensor:
    return pyro.param(name, lambda: torch.tensor(start).squeeze())


def observe(y: Tensor, distribution: type, *parameters: Tensor | float) -> None:
    pyro.sample("y", distribution(*parameters).to_event(1), obs=y)


def independent(y: Tensor, scale: float) -> None:
    """Intercepts and slopes of groups, a standard deviation each."""
    b, sd, sigma = real("b", 0.0, 0.0), positive("sd", torch.full((2,), scale)), positive("sigma", scale)
    a = pyro.sample("a", dist.Normal(torch.zeros(10, 2), sd).to_event(2))
    observe(y, dist.Normal, b[0] + a[GROUP, 0] + (b[1] + a[GROUP, 1]) * X, sigma)


def correlated(y: Tensor, scale: float) -> None:
    """The same with a covariance, by its Cholesky factor."""
    b, sigma = real("b", 0.0, 0.0), positive("sigma", scale)
    tril = pyro.param("tril", lambda: scale * torch.eye(2), constraint=constraints.lower_cholesky)
    with pyro.plate("groups", 10):
        a = pyro.sample("a", dist.MultivariateNormal(torch.zeros(2), scale_tril=tril))
    observe(y, dist.Normal, b[0] + a[GROUP, 0] + (b[1] + a[GROUP, 1]) * X, sigma)


def heavy_tailed(y: Tensor, scale: float) -> None:
    b, sd, sigma = real("b", 0.0, 0.0), positive("sd", scale), positive("sigma", scale)
    a = pyro.sample("a", dist.Normal(torch.zeros(10), sd).to_event(1))
    observe(y, dist.StudentT, 4.0, b[0] + b[1] * X + a[GROUP], sigma)


def skewed(y: Tensor, scale: float) -> None:
    """The mean of the groups is a param of their prior; the noise's scale is held positive by a softplus."""
    b, sd = real("b", 0.0, 0.0), positive("sd", scale)
    sigma = pyro.param("sigma", lambda: torch.tensor(scale), constraint=softplus_positive)
    a = pyro.sample("a", dist.Normal(b[0], sd).expand([10]).to_event(1))
    observe(y, dist.Gumbel, b[1] * X + a[GROUP], sigma)


def polynomial(y: Tensor, scale: float) -> None:
    alpha, beta = positive("alpha", scale**-2.0), positive("beta", scale**-2.0)
    w = pyro.sample("w", dist.Normal(torch.zeros(4), alpha.rsqrt()).to_event(1))
    observe(y, dist.Normal, torch.stack([X**k for k in range(4)], -1) @ w, beta.rsqrt())


def process(y: Tensor, scale: float) -> None:
    mean, a, length, sigma = real("mean", 0.0), positive("a", scale), positive("length", 1.0), positive("sigma", scale)
    K = a**2 * (torch.exp(-0.5 * ((X[:, None] - X) / length).square()) + 1e-8 * torch.eye(NUM))
    f = pyro.sample("f", dist.MultivariateNormal(mean.expand(NUM), K))
    observe(y, dist.Normal, f, sigma)


def levelling_off(y: Tensor, scale: float) -> None:
    """Params of a curve that is no straight line in them."""
    top, rate, mid = real("top", scale), positive("rate", 1.0), real("mid", 0.0)
    sd, sigma = positive("sd", scale), positive("sigma", scale)
    a = pyro.sample("a", dist.Normal(torch.zeros(10), sd).to_event(1))
    observe(y, dist.Normal, (top + a[GROUP]) * torch.sigmoid(rate * (X - mid)), sigma)


MODELS = [independent, correlated, heavy_tailed, skewed, polynomial, process]


@cache
def fit(model: Callable[..., None], unit: float, start: float = 1.0) -> tuple[LaplacePosterior, int]:
    pyro.clear_param_store()
    y = targets("curved" if model is levelling_off else "straight")
    found = LaplaceEvidence(model, stop=QUIET).run(unit * y, unit * start)
    return found, len(found.log_evidences) - 1


@pytest.mark.parametrize("model", [*MODELS, levelling_off])
def test_another_unit_changes_no_step_and_no_number(model: Callable[..., None]) -> None:
    one, steps = fit(model, 1.0)
    assert one.status == "converged"
    for unit in (1e3, 1e-3):
        other, as_many = fit(model, unit)
        assert (other.status, as_many) == (one.status, steps)
        heights = [value + NUM * math.log(unit) for value in other.log_evidences]
        assert heights == pytest.approx(list(one.log_evidences), rel=1e-8)


@pytest.mark.parametrize(
    ("model", "start"),
    [
        (m, s)
        for m in [*MODELS, levelling_off]
        for s in (1e-3, 1e3)
        if (m, s) != (skewed, 1e-3)  # Gumbel's density is 0 so far out
    ],
)
def test_a_start_a_thousandfold_off_costs_at_most_five_more_steps(model: Callable[..., None], start: float) -> None:
    """Eight for a process, whose three scales go together."""
    near, steps = fit(model, 1.0)
    far, more = fit(model, 1.0, start)
    assert more <= steps + (8 if model is process else 5)
    assert float(far.log_evidence) == pytest.approx(float(near.log_evidence), abs=1e-6)


def test_other_inputs_change_no_step_either() -> None:
    """A slope per second or per millisecond."""

    def model(x: Tensor, y: Tensor) -> None:
        b, sd, sigma = real("b", 0.0, 0.0), positive("sd", 1.0), positive("sigma", 1.0)
        a = pyro.sample("a", dist.Normal(torch.zeros(10), sd).to_event(1))
        observe(y, dist.Normal, b[0] + a[GROUP] + b[1] * x, sigma)

    found = []
    for unit in (1.0, 1e3, 1e-3):
        pyro.clear_param_store()
        found.append(LaplaceEvidence(model, stop=QUIET).run(unit * X, targets()))
    for other, unit in zip(found[1:], (1e3, 1e-3), strict=True):
        assert len(other.log_evidences) == len(found[0].log_evidences)
        assert float(other.log_evidence) == pytest.approx(float(found[0].log_evidence), rel=1e-10)
        slope = [p.hyperparameters["b"][1] for p in (other, found[0])]
        torch.testing.assert_close(unit * slope[0], slope[1], rtol=1e-5, atol=0.0)


def test_a_curve_that_starts_on_a_plateau_is_fitted_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step from scales a thousandfold off leads to where the curve is zero at all data, whatever its params."""
    there, _ = fit(levelling_off, 1.0, 1e3)
    assert float(there.log_evidence) == pytest.approx(float(fit(levelling_off, 1.0)[0].log_evidence), abs=1e-6)
    monkeypatch.setattr(type2, "SCALES_FIRST", 0)  # without the way out
    with pytest.raises(NotConverged, match=r"no longer feels a real-valued hyperparameter"):
        fit.__wrapped__(levelling_off, 1.0, 1e3)


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_inputs_a_millionfold_smaller_prune_nothing_that_is_needed(unit: float) -> None:
    """Far from the data's scale no precision is felt; one that is pruned there comes back when the others stand."""
    generator = torch.Generator().manual_seed(0)
    Z = torch.randn(200, 3, generator=generator)
    label = (torch.rand(200, generator=generator) < torch.sigmoid(Z @ torch.tensor([1.0, -2.0, 0.3]))).double()
    found = []
    for c in (1.0, unit):
        pyro.clear_param_store()
        found.append(LaplaceEvidence(logistic_ard, stop=QUIET).run(c * Z, label))
    assert float(found[1].log_evidence) == pytest.approx(float(found[0].log_evidence), abs=1e-6)
    assert found[0].diagnostics(100)["num_pruned"] == found[1].diagnostics(100)["num_pruned"]


@pytest.mark.parametrize("scale", [1e-4, 1e-3, 1e3])
def test_counts_whose_effects_begin_at_another_scale(scale: float) -> None:
    """Where the rate is an exponential, a start in the wrong unit has no density."""
    y = targets().clamp(min=0.0).round()
    found, plain = (LaplaceEvidence(partial(counts_from, sd), stop=QUIET).run(y) for sd in (scale, 1.0))
    assert float(found.log_evidence) == pytest.approx(float(plain.log_evidence), abs=1e-6)


def counts_from(scale: float, y: Tensor) -> None:
    level, sd = real("level", 0.0), positive("sd", scale)
    with pyro.plate("groups", 10):
        a = pyro.sample("a", dist.Normal(torch.zeros(()), sd))
    observe(y, dist.Poisson, (level + a[GROUP]).exp())


def test_the_curvature_is_taken_by_differences_near_the_end_only(monkeypatch: pytest.MonkeyPatch) -> None:
    promised: list[float] = []
    sharpened = type2._with_refreshed_curvature

    def watched(state: type2.TypeII) -> Asking[type2.TypeII]:
        new = yield from sharpened(state)
        promised.extend([state.promised] if new is not state else [])
        return new

    monkeypatch.setattr(type2, "_with_refreshed_curvature", watched)
    LaplaceEvidence(partial(counts_from, 1.0), stop=QUIET).run(targets().clamp(min=0.0).round())
    LaplaceEvidence(partial(heavy_tailed, scale=1.0), stop=QUIET).run(targets())
    assert promised and all(type2.SHARP <= p <= type2.BROAD for p in promised)
