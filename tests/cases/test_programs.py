"""Programs that other people write: shapes, jumps, constants, starts, mirror modes, kernels, labels without a mean."""

import math
from functools import partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions.transforms import OrderedTransform
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import RVM, VRVM, LaplaceEvidence, Start, Stop, find_modes, to_inference_data
from pyro_evidence.errors import ImproperPosterior
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.gp import gp_regression
from pyro_evidence.models.kernels import RBF, Periodic
from pyro_evidence.models.regression import regression
from pyro_evidence.program import LogJoint
from pyro_evidence.structure.recognise import recognise
from tests.cases.expect import reached, refusal, says, within

QUIET = Stop(progress=False)
T = torch.tensor


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fit(model: Any, *args: Any, **settings: Any) -> Any:
    return LaplaceEvidence(model, stop=QUIET, **settings).run(*args)


# --- shapes and types ---


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_design_is_a_dense_one(layout: str) -> None:  # oracle: the same model with its dense matrix
    X = draws(30, 3)
    y = X.sum(-1) + 0.3 * draws(30, seed=1)

    def linear(design: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with pyro.plate("rows", 30):
            pyro.sample("y", dist.Normal(design @ b, s), obs=y)

    sparse = getattr(X, layout)()
    expected = fit(linear, X, y).log_evidence
    torch.testing.assert_close(fit(lambda y: linear(sparse, y), y).log_evidence, expected, rtol=0.0, atol=1e-6)


def test_a_column_against_a_vector_in_a_plate_is_refused() -> None:
    """The predictor is (N, 1), the data are (N,): they broadcast to N times N."""

    def column(X: Tensor, t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 1), 1.0).to_event(2))
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Normal(X @ w, 0.5), obs=t)

    says(refusal(lambda: fit(column, draws(60, 3), draws(60, seed=1))), "site 't'", "(60,)", "(60, 60)", "squeeze(-1)")


def test_a_column_against_a_vector_without_a_plate_is_refused() -> None:
    def column(t: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 2.0))
        pyro.sample("t", dist.Normal(m * torch.ones(8, 1), 1.0), obs=t)

    says(refusal(lambda: fit(column, draws(8))), "site 't'", "(8,)", "(8, 1)", "(8, 8)")


@pytest.mark.parametrize("way", ["to_event", "vector"])
def test_an_event_as_long_as_its_plate_is_refused(way: str) -> None:
    """Eight data that a plate of eight would count eight times each; Pyro accepts it."""

    def model(t: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 2.0))
        likelihood = dist.Normal(m * torch.ones(8), 1.0).to_event(1)
        if way == "vector":
            likelihood = dist.MultivariateNormal(m * torch.ones(8), torch.eye(8))
        with pyro.plate("data", 8):
            pyro.sample("t", likelihood, obs=t)

    says(refusal(lambda: fit(model, draws(8))), "site 't'", "shape (8,)", "plate 'data' of size 8", "8 times")
    assert fit(model, draws(8, 8)).log_evidence.isfinite()  # eight data of eight numbers
    assert fit(model, draws(8).expand(8, 8)).log_evidence.isfinite()  # as the message advises, where it is meant


def test_a_deterministic_site_in_a_plate_counts_nothing() -> None:
    """Of a scale and location apart from their standard normals, as eight schools are written most often."""

    def model(t: Tensor, named: bool) -> None:
        m, s = pyro.sample("m", dist.Normal(0.0, 2.0)), pyro.sample("s", dist.HalfNormal(2.0))
        with pyro.plate("data", 8):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            mean = pyro.deterministic("mean", m + s * z) if named else m + s * z
            pyro.sample("t", dist.Normal(mean, 1.0), obs=t)

    found, without = fit(model, draws(8), True), fit(model, draws(8), False)
    assert float(found.log_evidence) == pytest.approx(float(without.log_evidence), abs=1e-6)
    torch.testing.assert_close(found.predict(draws(8), True), without.predict(draws(8), False))


def test_a_factor_of_one_number_in_a_plate_is_refused() -> None:
    """Pyro counts it as often as the plate has cells."""

    def model(t: Tensor, expanded: bool) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 2.0))
        of_each = dist.Normal(m, 1.0).log_prob(t)
        with pyro.plate("data", 8):
            pyro.factor("t", of_each if expanded else of_each.sum())

    says(refusal(lambda: fit(model, draws(8), False)), "factor 't'", "plate 'data' of size 8", "8 times")
    oracle = dist.MultivariateNormal(torch.zeros(8).double(), torch.eye(8).double() + 4.0).log_prob(draws(8))
    assert float(fit(model, draws(8), True).log_evidence) == pytest.approx(float(oracle), abs=1e-6)


def test_complex_targets_of_a_process_are_refused() -> None:
    X, t = draws(20, 3), draws(20, seed=1)
    says(refusal(lambda: fit(gp_regression(RBF()), X, t + 5j * t)), "complex")


def test_complex_targets_of_a_regression_are_refused() -> None:
    X, t = draws(20, 3), draws(20, seed=1)
    says(refusal(lambda: fit(regression(Linear()), X, t + 5j * t)), "complex")


# --- what has no slope, no density or no data ---


@pytest.mark.parametrize("function", [torch.heaviside, torch.igamma])
def test_a_function_without_a_derivative_is_named(function: Any) -> None:
    def model(y: Tensor) -> None:
        a = pyro.sample("a", dist.LogNormal(0.0, 1.0))
        pyro.sample("y", dist.Normal(function(a, T(1.5)), 1.0).expand([8]).to_event(1), obs=y)

    said = refusal(lambda: fit(model, draws(8)))
    says(said, function.__name__, "is not implemented", "functions that have derivatives")
    assert "broadcast" not in said


def test_a_mode_on_a_jump_is_no_kink() -> None:
    """The prior is highest at zero, where the branch changes."""

    def model(x: Tensor, y: Tensor) -> None:
        a, w = (pyro.sample(name, dist.Normal(0.0, 2.0)) for name in "aw")
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(w * x if a > 0.0 else -w * x, 0.5), obs=y)

    x = draws(40)
    says(refusal(lambda: fit(model, x, x + 0.3 * draws(40, seed=1))), "jumps by", "site 'a'", "at the posterior mode")


def flat(name: str, support: constraints.Constraint = constraints.real) -> Tensor:
    return pyro.sample(name, dist.ImproperUniform(support, (), ()))


def test_a_flat_prior_of_a_precision_is_named() -> None:
    """The likelihood is that of one mean for all where effects do not vary, so the integral towards there diverges."""
    group = torch.arange(8).repeat_interleave(5)
    y = draws(8, seed=3)[group] + draws(40, seed=53)

    def model(y: Tensor) -> None:
        mu, s = flat("mu"), flat("s", constraints.positive)
        precision = flat("precision", constraints.positive)
        with pyro.plate("groups", 8):
            a = pyro.sample("a", dist.Normal(mu, precision.rsqrt()))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(a[group], s), obs=y)

    with pytest.raises(ImproperPosterior) as error:
        fit(model, y)
    says(str(error.value), "no integral", "mu, precision, s are flat")


def test_a_flat_prior_of_a_dispersion_that_counts_do_not_bound_is_named() -> None:
    """Counts that vary less than a Poisson's are met best by none: the likelihood goes to a Poisson's, not to 0."""

    def model(y: Tensor) -> None:
        mean, dispersion = flat("mean", constraints.positive), flat("dispersion", constraints.positive)
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.GammaPoisson(dispersion, dispersion / mean), obs=y)

    with pytest.raises(ImproperPosterior) as error:
        fit(model, T([3.0, 1.0, 4.0, 2.0, 2.0, 0.0, 5.0, 3.0]))
    says(str(error.value), "site 'dispersion'", "integral is infinite")


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
def test_a_latent_that_is_read_by_item_is_named() -> None:
    def without_slope(t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("t", dist.Normal(float(w), 0.5), obs=t)

    says(refusal(lambda: fit(without_slope, T(1.0))), "'w'", ".item()")


def test_a_delta_site_is_named() -> None:
    def with_delta(t: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        x = pyro.sample("m", dist.Delta(2 * z))
        pyro.sample("t", dist.Normal(x, 1.0), obs=t)

    says(refusal(lambda: fit(with_delta, T(0.3))), "'m'", "Delta", "deterministic")


def test_a_model_that_is_masked_altogether_is_named() -> None:
    def masked(t: Tensor) -> None:
        with poutine.mask(mask=False):
            m = pyro.sample("m", dist.Normal(0.0, 2.0))
        with pyro.plate("data", 8), poutine.mask(mask=False):
            pyro.sample("t", dist.Normal(m, 1.0), obs=t)

    says(refusal(lambda: fit(masked, torch.ones(8))), "mask", "'t'")


def test_constant_targets_are_named_soon() -> None:
    with within(1.5):
        message = refusal(lambda: fit(regression(Linear()), torch.full((24, 2), 3.0), torch.full((24,), 3.0)))
    says(message, "constant")


def level(prior: Any) -> Any:
    """One level, and a scale of the noise about it."""

    def model(t: Tensor) -> None:
        mean, sd = pyro.sample("mean", dist.Normal(0.0, 10.0)), pyro.sample("sd", prior)
        with pyro.plate("n", len(t)):
            pyro.sample("t", dist.Normal(mean, sd), obs=t)

    return model


def test_constant_targets_are_named_where_a_latent_scale_has_no_mode() -> None:
    targets = torch.full((12,), 2.0)
    message = refusal(lambda: LaplaceEvidence(level(dist.HalfNormal(2.0)), stop=QUIET).run(targets))
    says(message, "site 't' observes one constant, 2, 12 times", "such as LogNormal", "The fit has ended so")
    found = LaplaceEvidence(level(dist.LogNormal(0.0, 1.0)), stop=QUIET).run(targets)  # as the message says
    assert found.status == "converged" and float(found.mode["mean"]) == pytest.approx(2.0, abs=1e-4)


@pytest.mark.parametrize("targets", [0.0, 3.0])
@pytest.mark.parametrize("engine", [LaplaceEvidence, partial(RVM, noise="beta"), partial(VRVM, noise="beta")])
def test_constant_targets_are_named_by_each_engine_that_finds_the_noise(engine: Any, targets: float) -> None:
    attempt = engine(regression(Linear()), stop=QUIET)
    says(refusal(lambda: attempt.run(draws(24, 2), torch.full((24,), targets))), "site 't'", "constant", "24 times")
    held = LaplaceEvidence(regression(Linear(), beta=1.0), stop=QUIET).run(draws(24, 2), torch.full((24,), targets))
    assert held.log_evidence.isfinite()


def test_a_message_of_all_starts_is_said_once() -> None:
    def kink() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.factor("kink", -100.0 * (w - 1.0).abs())

    message = refusal(lambda: fit(kink, start=Start(restarts=4)))
    says(message, "restarts 0, 1, 2, 3: ")
    assert message.count("kink where") == 1


def test_terms_of_a_sum_that_are_far_apart_have_their_integral() -> None:
    """Where torch's second derivatives of logaddexp are nan."""

    def model() -> None:
        m = pyro.sample("m", dist.Normal(0.0, 10.0))
        narrow, wide = dist.Normal(5.0, 0.01).log_prob(m), dist.Normal(0.0, 2.0).log_prob(m)
        pyro.factor("modes", torch.logaddexp(narrow - 3.0, wide))

    places = dist.Normal(torch.tensor([5.0, 0.0]), torch.tensor([100.0001, 104.0]).sqrt()).log_prob(torch.zeros(2))
    truth = torch.logaddexp(places[0] - 3.0, places[1])
    assert float(fit(model).log_evidence) == pytest.approx(float(truth), abs=1e-3)


@pytest.mark.parametrize("masked", ["by to_event", "by expand"])
def test_a_delta_inside_another_distribution_is_named(masked: str) -> None:
    def with_delta(t: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        delta = dist.Delta(z)
        x = pyro.sample("m", delta.expand([2]).to_event(1) if masked == "by to_event" else delta.expand([2]))
        pyro.sample("t", dist.Normal(x.sum(), 1.0), obs=t)

    says(refusal(lambda: fit(with_delta, T(0.3))), "'m'", "Delta", "deterministic")


def test_a_density_that_jumps_is_said_to_jump() -> None:
    def stepping(t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.factor("step", torch.where(w > 0.5, 3.0, 0.0))
        pyro.sample("t", dist.Normal(w, 0.5), obs=t)

    says(refusal(lambda: fit(stepping, T(0.4))), "jump", "'w'")


DISASTERS = (
    "4 5 4 0 1 4 3 4 0 6 3 3 4 0 2 6 3 3 5 4 5 3 1 4 4 1 5 5 3 4 2 5 2 2 3 4 2 1 3 2 2 1 1 1 1 3 0 0 1 0 1 1 0 0 3 1 "
    "0 3 2 2 0 1 1 1 0 1 0 1 0 0 0 2 1 0 0 0 1 1 0 2 3 3 1 1 2 1 1 1 1 2 4 2 0 0 1 4 0 0 0 1 0 0 0 0 0 1 0 0 1 0 1"
)


@pytest.mark.slow
def test_a_continuous_switchpoint_is_said_to_jump() -> None:
    """Coal mining disasters: the rate changes in a year that is given a Uniform in place of a Categorical."""
    counts = T([float(x) for x in DISASTERS.split()])
    years = torch.arange(len(counts))

    def disasters(y: Tensor) -> None:
        early = pyro.sample("early", dist.Exponential(1.0))
        late = pyro.sample("late", dist.Exponential(1.0))
        switch = pyro.sample("switch", dist.Uniform(0.0, float(len(y))))
        with pyro.plate("years", len(y)):
            pyro.sample("y", dist.Poisson(torch.where(switch >= years, early, late)), obs=y)

    message = refusal(lambda: fit(disasters, counts))
    says(message, "jump", "'switch'", "Categorical")
    assert "restart 1" not in message  # one message, not one for each of four starts


# --- hyperparameters and starts ---


def test_params_do_not_stay_at_a_saddle() -> None:
    """Two clusters of three: at means 1 and 30 the log likelihood is -18.36, at equal means it is -25.0."""
    torch.set_default_dtype(torch.float32)  # where rounding does not help to leave the saddle
    t = T([0.0, 1.0, 2.0, 20.0, 30.0, 40.0])

    def two_clusters(t: Tensor) -> None:
        shares = pyro.param("shares", torch.ones(2) / 2, constraint=constraints.simplex)
        means = pyro.param("means", torch.zeros(2))
        scales = pyro.param("scales", torch.ones(2), constraint=constraints.positive)
        with pyro.plate("data", len(t)):
            k = pyro.sample("k", dist.Categorical(shares), infer={"enumerate": "parallel"})
            pyro.sample("t", dist.Normal(means[k], scales[k]), obs=t)

    means, scales = T([1.0, 30.0]), T([2 / 3, 200 / 3]).sqrt()
    components = dist.Normal(means, scales).log_prob(t[:, None]) - math.log(2)
    near_the_maximum = float(components.logsumexp(-1).sum())
    reached(abs(near_the_maximum + 18.36) < 0.01, f"the clusters have log likelihood {near_the_maximum}")
    posterior = fit(two_clusters, t)
    reached(posterior.log_evidence.isfinite().item(), "no evidence")
    assert float(posterior.log_evidence) >= near_the_maximum - 0.01


def test_a_simplex_may_start_off_the_simplex() -> None:
    """As in pyro.param.  Two of six are 0: the maximum is at 1/3, where the log likelihood is -3.819."""

    def shares(t: Tensor) -> None:
        p = pyro.param("p", lambda: T([1.45, 0.33]), constraint=constraints.simplex)
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Categorical(p), obs=t)

    posterior = fit(shares, T([0, 1, 1, 1, 0, 1]))
    torch.testing.assert_close(posterior.hyperparameters["p"], T([1 / 3, 2 / 3]), rtol=0.0, atol=1e-5)
    assert float(posterior.log_evidence) == pytest.approx(2 * math.log(1 / 3) + 4 * math.log(2 / 3), abs=1e-6)


def feasible_above_forty(y: Tensor) -> None:
    rate = pyro.sample("rate", dist.LogNormal(0.0, 3.0))
    pyro.factor("feasible", torch.where(rate > 40.0, 0.0, -torch.inf))
    pyro.sample("y", dist.Normal(rate, 3.0), obs=y)


def test_a_model_that_needs_a_start_says_how_to_give_one() -> None:
    says(refusal(lambda: fit(feasible_above_forty, T(60.0))), "'feasible'", "Start(values=")


def test_a_start_may_be_given() -> None:
    """The mode of log rate under N(0, 3) and Normal(60 | rate, 3): a zero of the slope, found by bisection."""

    def slope(z: float) -> float:
        return -z / 9 + (60.0 - math.exp(z)) * math.exp(z) / 9

    low, high = math.log(50.0), math.log(70.0)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    posterior = fit(feasible_above_forty, T(60.0), start=Start(values={"rate": T(50.0)}))
    assert float(posterior.mode["rate"]) == pytest.approx(math.exp(low), rel=1e-5)


# --- modes that mirror one another ---


def test_mirror_modes_are_both_counted() -> None:
    """z is seen through z squared: the log evidence is that of quadrature, half of the mass is at -2."""
    t = 4 + 0.1 * draws(100)

    def squared(t: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 5.0))
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Normal(z.square(), 0.1), obs=t)

    grid = torch.linspace(-2.2, 2.2, 200_001)
    rows = sum(dist.Normal(grid.square(), 0.1).log_prob(x) for x in t)
    truth = float((dist.Normal(0.0, 5.0).log_prob(grid) + rows).logsumexp(0)) + math.log(4.4 / 200_000)
    posterior = fit(squared, t)
    reached(abs(float(posterior.mode["z"].abs()) - 2) < 0.01, "the fit is at neither of the modes")
    reached(abs(float(find_modes(posterior).log_evidence) - truth) < 0.05, "the quadrature is not of this model")
    assert float(posterior.log_evidence) == pytest.approx(truth, abs=0.02)
    assert abs(float(posterior.get_samples(400, seed=0)["z"].mean())) < 0.5


# --- single precision, kernels, heavy tails ---


@pytest.mark.parametrize("latents", [torch.float32, torch.float64])
def test_what_single_precision_does_not_tell_says_so(latents: torch.dtype) -> None:
    """Targets of a million, which vary by two, rounded to a sixteenth: single numbers take the precision of columns."""
    torch.set_default_dtype(latents)

    def model(x: Tensor, y: Tensor) -> None:
        a, b = pyro.sample("a", dist.Normal(1e6, 20.0)), pyro.sample("b", dist.Normal(0.0, 20.0))
        s = pyro.sample("s", dist.HalfNormal(20.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(a + b * x, s), obs=y)

    x, noise = draws(60, seed=1), draws(60, seed=2)
    says(refusal(lambda: fit(model, x.float(), (1e6 + 1.6 * x + noise).float())), "double precision first")


def test_a_regression_in_raw_units_and_single_precision_fits() -> None:
    """Deaths a month, about 43,000.  At a given noise the evidence is that of a Gaussian: within its rounding."""
    torch.set_default_dtype(torch.float32)
    n = 100
    time, month = torch.arange(float(n)) / 50, torch.arange(n) % 12
    noise = torch.randn(2, n, generator=torch.Generator().manual_seed(0))
    heat = 10 + 8 * torch.sin(2 * math.pi * torch.arange(n) / 12) + noise[0]
    deaths = 43000 + 1500 * time - 600 * (heat - 10) + 1200 * noise[1]

    def raw_units(y: Tensor) -> None:
        level = pyro.sample("level", dist.Normal(40000.0, 10000.0))
        slopes = pyro.sample("slopes", dist.Normal(torch.zeros(2), 1000.0).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(2000.0))
        with pyro.plate("months", 12):
            m = pyro.sample("month", dist.Normal(0.0, 2000.0))
        loc = level + slopes[0] * time + slopes[1] * heat + (m - m.mean(-1, keepdim=True))[month]
        with pyro.plate("rows", n):
            pyro.sample("y", dist.Normal(loc, sigma), obs=y)

    columns = torch.eye(12)[month].double()
    columns = 2000.0 * (columns - columns.mean(1, keepdim=True))
    design = torch.cat([10000.0 * torch.ones(n, 1), 1000.0 * torch.stack([time, heat], 1), columns], 1).double()
    log_sigma = torch.linspace(math.log(700.0), math.log(2500.0), 200).double()
    sigma = log_sigma.exp()
    covariance = design @ design.T + sigma[:, None, None].square() * torch.eye(n, dtype=torch.float64)
    given = dist.MultivariateNormal(torch.full((n,), 40000.0).double(), covariance).log_prob(deaths.double())
    weighted = given + dist.HalfNormal(T(2000.0).double()).log_prob(sigma) + log_sigma
    truth = float(weighted.logsumexp(0) + (log_sigma[1] - log_sigma[0]).log())
    assert float(fit(raw_units, deaths).log_evidence) == pytest.approx(truth, abs=0.5)


def squared_exponential(d: Tensor, length: Tensor) -> Tensor:
    return torch.exp(-0.5 * (d / length) ** 2)


# torch's own error, which is a RuntimeError; the package's are none or NotConverged
def test_a_process_with_nine_settings_ends_in_a_fit_or_in_its_own_error() -> None:
    """Pyro's NUTS takes a failed factor for a rejected step, so the model runs there."""
    torch.set_default_dtype(torch.float32)
    t = torch.linspace(0, 10, 60)
    noise = 0.05 * torch.randn(60, generator=torch.Generator().manual_seed(0))
    y = 0.1 * t + 0.05 * t**1.5 + 0.3 * torch.sin(2 * math.pi * t) + noise

    def trend_and_season(y: Tensor) -> None:
        season = pyro.sample("season", dist.HalfCauchy(2.0))
        decay = pyro.sample("decay", dist.Gamma(10.0, 0.075))
        period = pyro.sample("period", dist.Normal(1.0, 0.05))
        smooth = pyro.sample("smooth", dist.Gamma(4.0, 3.0))
        medium = pyro.sample("medium", dist.HalfCauchy(0.5))
        of_medium = pyro.sample("of_medium", dist.Gamma(2.0, 0.75))
        trend = pyro.sample("trend", dist.HalfCauchy(3.0))
        of_trend = pyro.sample("of_trend", dist.Gamma(4.0, 0.1))
        sigma = pyro.sample("sigma", dist.HalfNormal(0.25))
        d = (t[:, None] - t).abs()
        wave = torch.exp(-2 * torch.sin(math.pi * d / period) ** 2 / smooth**2)
        K = season**2 * wave * squared_exponential(d, decay) + medium**2 * squared_exponential(d, of_medium)
        K = K + trend**2 * squared_exponential(d, of_trend) + (sigma**2 + 1e-5) * torch.eye(60)
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(60), K), obs=y)

    pyro.set_rng_seed(1)
    try:
        assert fit(trend_and_season, y - y.mean()).log_evidence.isfinite()
    except (ArithmeticError, ValueError) as error:
        says(str(error), "float32", "double precision")


def test_vague_priors_can_be_exported() -> None:
    """Draws of LogNormal(0, 10) make covariances without a factor; they are left out, and the rest is exported."""
    pytest.importorskip("arviz")
    torch.set_default_dtype(torch.float32)
    x = torch.linspace(-1, 1, 30)
    noise = 0.15 * torch.randn(30, generator=torch.Generator().manual_seed(0))
    y = x + 0.2 * x**3 + 0.5 * (0.5 + x) ** 2 * torch.sin(4 * x) + noise

    def vague(y: Tensor) -> None:
        variance = pyro.sample("variance", dist.LogNormal(0.0, 10.0))
        noise = pyro.sample("noise", dist.LogNormal(0.0, 10.0))
        length = pyro.sample("length", dist.LogNormal(0.0, 10.0))
        K = variance * squared_exponential(x[:, None] - x, length) + (noise + 1e-6) * torch.eye(30)
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(30), K), obs=y)

    pyro.set_rng_seed(1)
    posterior = fit(vague, (y - y.mean()) / y.std(), start=Start(tour=0))
    reached(posterior.log_evidence.isfinite().item(), "there is no fit to export")
    found = to_inference_data(posterior, num_samples=200)
    assert "posterior" in found.groups() and found.prior.sizes["draw"] < 200


def test_a_period_is_not_below_twice_the_spacing() -> None:
    """Eighty irregular points of sin 2x: mean spacing .125; the true period is 3.14."""
    random = np.random.default_rng(0)
    x = torch.as_tensor(np.sort(random.uniform(0, 10, 80)))
    t = torch.sin(2 * x) + 0.1 * x + 0.2 * torch.as_tensor(random.normal(size=80))
    reached(float(x.diff().min()) < 0.005, "no two points are near one another")
    found = fit(gp_regression(Periodic() + RBF()), x.unsqueeze(-1), t)
    assert float(found.hyperparameters["kernel.0.period"]) > 2 * 10 / 80


def horseshoe(X: Tensor, y: Tensor) -> None:
    local = pyro.sample("local", dist.HalfCauchy(torch.ones(6)).to_event(1))
    tau = pyro.sample("tau", dist.HalfCauchy(torch.ones(1)).to_event(1))
    unscaled = pyro.sample("unscaled", dist.Normal(0.0, torch.ones(6)).to_event(1))
    precision = pyro.sample("precision", dist.Gamma(3.0, 1.0))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ (tau * local * unscaled), precision.rsqrt()), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="by default"),
        pytest.param({"marginalise": ["tau", "precision"]}, id="scale and noise marginalised"),
    ],
)
def test_a_horseshoe_fits(settings: dict[str, Any]) -> None:
    """Slopes 1, 2, .5 and three of 0, fifty rows: importance weights bear the fit out."""
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator()
    X = torch.randn(50, 6, generator=generator.manual_seed(0))
    noise = 0.3 * torch.randn(50, generator=generator.manual_seed(1))
    pyro.set_rng_seed(1)
    posterior = fit(horseshoe, X, X @ T([1.0, 2.0, 0.5, 0.0, 0.0, 0.0]) + noise, **settings)
    assert posterior.diagnostics()["pareto_k"] < 0.7


# --- predictions of what has no mean ---


def test_a_prediction_of_ordered_classes_is_their_probabilities() -> None:
    """At the mode: differences of sigmoids between the cuts; over the posterior they are near."""
    x = draws(200)
    y = torch.bucketize(x + draws(200, seed=1), T([-2.0, -1.0, -0.5, 0.0, 0.7, 1.5]))

    def trolley(x: Tensor, y: Tensor | None = None) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        base = dist.Normal(0.0, 1.5).expand([6]).to_event(1)
        cuts = pyro.sample("cuts", dist.TransformedDistribution(base, [OrderedTransform()]))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.OrderedLogistic(b * x, cuts), obs=y)

    posterior = fit(trolley, x, y)
    below = torch.sigmoid(posterior.mode["cuts"] - (posterior.mode["b"] * x[:3])[:, None])
    ends = torch.zeros(3, 1), torch.ones(3, 1)
    at_the_mode = torch.cat([ends[0], below, ends[1]], 1).diff(dim=1)
    torch.testing.assert_close(posterior.predict(x[:3]), at_the_mode, rtol=0.0, atol=0.03)


# --- time ---


@pytest.mark.slow
def test_logistic_growth_in_ten_regions_takes_seconds() -> None:
    """Forty-two latents, two scales, 14 times: Pyro's tutorial on logistic growth, with simulated counts."""
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(0)
    time = torch.arange(14.0) * 14 / 5.5
    start = torch.randn(10, 2, generator=generator)
    rates = T([0.1, 0.35]) + 0.02 * torch.randn(10, 2, generator=generator)
    p = torch.softmax(start + rates * time[:, None, None], -1)
    picked = torch.multinomial(p.reshape(-1, 2), 60, True, generator=generator).reshape(14, 10, 60)
    counts = torch.stack([(picked == k).sum(-1) for k in range(2)], -1).float()

    def growth(counts: Tensor) -> None:
        lineages, regions = pyro.plate("lineages", 2, dim=-1), pyro.plate("regions", 10, dim=-2)
        of_rates = pyro.sample("of_rates", dist.LogNormal(-4.0, 2.0))
        of_starts = pyro.sample("of_starts", dist.LogNormal(0.0, 2.0))
        with lineages:
            mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with regions, lineages:
            rate = pyro.sample("rate", dist.Normal(mean, of_rates))
            begin = pyro.sample("begin", dist.Normal(0.0, of_starts))
        logits = (begin + rate * time[:, None, None]).unsqueeze(-2)
        with pyro.plate("times", 14, dim=-3), regions:
            pyro.sample("y", dist.Multinomial(logits=logits, validate_args=False), obs=counts.unsqueeze(-2))

    with within(15.0):
        posterior = fit(growth, counts)
    assert float(posterior.log_evidence) == pytest.approx(-237.7839, abs=1e-3)  # in double precision


# --- values that derivatives do not follow ---

DESIGN = torch.randn(24, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def around(f: Any) -> Any:
    """A mean that is some function of a latent."""

    def model(t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        pyro.sample("t", dist.Normal(f(w), 0.5), obs=t)

    return model


@pytest.mark.parametrize(
    "f", [lambda w: w + w.detach(), lambda w: w + w.item(), lambda w: w * w.data, lambda w: w + float(w.detach().exp())]
)
def test_a_latent_half_of_which_no_derivative_follows_is_refused_by_that_reason(f: Any) -> None:
    """It was called a kink, and a smooth relative was advised."""
    said = refusal(lambda: fit(around(f), torch.tensor(1.0, dtype=torch.float64)))
    says(said, "along site 'w', and by its slope by", "w.item()", "detach()")


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # once a process
@pytest.mark.parametrize("f", [lambda w: w + int(w), lambda w: w + round(w.item()), lambda w: w + 0.5 * (w > 1.2)])
def test_a_density_that_jumps_as_a_latent_becomes_a_plain_number_is_said_to_jump(f: Any) -> None:
    """Off by .37, .39 and .14 nats, in silence."""
    plain = around(lambda w: (f(w), float(w))[0])
    with pytest.warns(UserWarning, match=r"density jumps by .* along site 'w', within four"):
        fit(plain, torch.tensor(2.6, dtype=torch.float64))
    fit(around(lambda w: (w, float(w))[0]), torch.tensor(2.6, dtype=torch.float64))  # right, and nothing is said


def in_groups(scale: Any, mean: Any) -> Any:
    """A mean around a function of a latent, and a scale by a function of another, which is integrated numerically."""

    def model(t: Tensor) -> None:
        s = pyro.sample("s", dist.HalfNormal(torch.ones((), dtype=torch.float64)))
        w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        with pyro.plate("groups", len(t)):
            a = pyro.sample("a", dist.Normal(0.0, scale(s)))
            pyro.sample("t", dist.Normal(a + mean(w), 0.5), obs=t)

    return model


SIX = torch.tensor([1.1, 0.4, 2.0, 1.3, -0.2, 0.9], dtype=torch.float64)


def test_plain_numbers_of_latents_are_said_where_scales_are_integrated() -> None:
    """Nothing was said: jumps were looked for in models alone whose latents are all inside, and slopes by searches."""
    with pytest.warns(UserWarning, match=r"density jumps by .* along site 's', within four"):
        fit(in_groups(lambda s: 0.9 * s + 0.1 * int(4.0 * s) / 4.0, lambda w: w), SIX)
    half = in_groups(lambda s: 0.5 * s + 0.5 * s.detach(), lambda w: w)
    says(refusal(lambda: fit(half, SIX)), "along site 's', and by its slope by", "s.detach()")


def with_noise(scale: Any) -> Any:
    """A mean, and its noise by a function of a latent, which is integrated numerically."""

    def model(t: Tensor) -> None:
        s = pyro.sample("s", dist.HalfNormal(torch.ones((), dtype=torch.float64)))
        w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Normal(w, scale(s)), obs=t)

    return model


def test_jumps_are_told_before_an_integral_that_takes_long() -> None:
    """The warning came after 50 s, when the log density had been integrated over a lattice."""
    with within(8.0), pytest.raises(UserWarning, match=r"density jumps by .* along site 'w', within four"):
        fit(in_groups(lambda s: s, lambda w: w + int(10.0 * w) / 10.0), SIX)


def test_jumps_of_models_that_take_rows_are_told_where_scales_are_integrated() -> None:
    """Off by .06 nats, in silence."""
    with pytest.raises(UserWarning, match=r"density jumps by .* along site 'w', within four"):
        fit(in_groups(lambda s: s, lambda w: w + (10.0 * w).floor() / 10.0), SIX)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_a_search_that_ends_at_a_jump_in_a_scale_names_it() -> None:
    """It was told that no step uphill raises the log evidence."""
    says(refusal(lambda: fit(with_noise(lambda s: s + round(float(s), 1)), SIX)), "jumps by", "along site 's'")


def test_plain_numbers_that_are_out_of_range_far_from_the_data_are_told() -> None:
    """A bare OverflowError."""
    said = refusal(lambda: fit(in_groups(lambda s: (1 + int(10.0 * s)) / 10.0, lambda w: w), SIX))
    says(said, "plain numbers", "int(...)")


def test_no_curve_through_values_that_jump_is_no_fault_of_the_model() -> None:
    """It was told that its matrix has no factor, where it has no matrix."""

    def model(t: Tensor) -> None:
        s = pyro.sample("s", dist.HalfNormal(torch.ones((), dtype=torch.float64)))
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=torch.float64), s + int(s)).to_event(1))
        n = pyro.sample("n", dist.HalfNormal(torch.ones((), dtype=torch.float64)))
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Normal(DESIGN @ w, n), obs=t)

    noise = torch.randn(24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"density jumps by .* along site 's', within four"):
        fit(model, DESIGN @ T([1.0, -0.5]).double() + 0.3 * noise)


def test_a_twentieth_of_a_mean_that_no_derivative_follows_is_refused_by_that_reason() -> None:
    """It was told to standardise its data."""
    with_item = in_groups(lambda s: s, lambda w: w + 0.05 * w.item())
    says(refusal(lambda: fit(with_item, SIX)), "along site 'w', and by its slope by", "w.item()")


def test_single_precision_far_from_zero_is_no_plain_number() -> None:
    """Differences of one length for all latents were ten of a log scale's units beside a mean of 1,000."""

    def model(t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(t.new_zeros(2), 10.0).to_event(1))
        s = pyro.sample("s", dist.HalfNormal(t.new_ones(())))
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Normal(w[0] + w[1] * t.new_tensor(DESIGN[: len(t), 0].tolist()), s), obs=t)

    data = 1000.0 + torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).sin()
    assert float(fit(model, data.float()).log_evidence) == pytest.approx(float(fit(model, data).log_evidence), rel=1e-5)


def test_zeros_under_sampled_noise_are_refused_soon() -> None:
    """A scale and what it multiplies shrink together: the search rose by 1e-10 nats a step, in 5,100 runs."""
    runs: list[None] = []

    def model(t: Tensor) -> None:
        runs.append(None)
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
        s = pyro.sample("s", dist.HalfNormal(torch.ones((), dtype=torch.float64)))
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Normal(DESIGN @ w, s), obs=t)

    says(refusal(lambda: fit(model, torch.zeros(24, dtype=torch.float64))), "observes one constant, 0", "LogNormal")
    assert len(runs) < 2_500, len(runs)


def test_a_mean_and_its_noise_are_no_edge_of_a_graph() -> None:
    """Targets that are all zero were taken for differences of neighbours that close 19 cycles."""

    def model(t: Tensor) -> None:
        s = pyro.sample("s", dist.HalfNormal(torch.ones((), dtype=torch.float64)))
        w = pyro.sample("w", dist.Normal(torch.zeros_like(s), 1.0))
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Normal(w, s), obs=t)

    joint = LogJoint(model, (torch.zeros(20, dtype=torch.float64),))
    assert recognise(joint).density.joint is joint
