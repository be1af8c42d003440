"""Structures of groups and Gaussian processes in formulas: glmmTMB's likelihoods, dense normal densities, messages."""

import pickle
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import multivariate_normal, norm, t

from pyro_evidence import BadInput, LaplaceEvidence, LaplacePosterior, Start, Stop

pytest.importorskip("formulae")
import pandas

from pyro_evidence.models.formula import mixed
from pyro_evidence.models.formula.structures import autoregressive_tril, exchangeable_tril


@pytest.fixture(scope="module")
def frame() -> Any:
    """The data of the R lines below."""
    i, part = np.arange(240), lambda a, n: (a * n) % 1.0
    group, level = i // 12, i % 3
    d = pandas.DataFrame({"g": group, "f": level.astype(str), "t": i % 6, "x": part(0.6180339887, i)})
    shared, own = norm.ppf(part(0.7548776662, group + 1)), norm.ppf(part(0.5698402910, 3 * group + level + 1))
    noise = norm.ppf(part(0.4142135624, i + 1))
    d["y"] = 0.5 * d.x + (0.8 * shared + 0.6 * own) * (1.0 + 0.5 * level) + 0.7 * noise
    return d.assign(k=np.floor(np.exp(0.4 * d.y) + part(0.7320508076, i)))


def fit(formula: str, frame: Any, family: Any = "gaussian", **settings: Any) -> LaplacePosterior:
    model, data = mixed(formula, frame, family=family)
    return LaplaceEvidence(model, stop=Stop(progress=False), **settings).run(*data)


# i <- 0:239; d <- data.frame(g = factor(i %/% 12), f = factor(i %% 3), x = (0.6180339887 * i) %% 1)
# h <- (i %/% 12); a <- qnorm((0.7548776662 * (h + 1)) %% 1); b <- qnorm((0.5698402910 * (3 * h + i %% 3 + 1)) %% 1)
# d$y <- 0.5 * d$x + (0.8 * a + 0.6 * b) * (1 + 0.5 * (i %% 3)) + 0.7 * qnorm((0.4142135624 * (i + 1)) %% 1)
# d$k <- floor(exp(0.4 * d$y) + (0.7320508076 * i) %% 1); d$t <- factor(i %% 6)
# logLik(glmmTMB(FORMULA, d, FAMILY))  # glmmTMB 1.1.5; there ar1(t + 0 | g)
GLMM_TMB = [
    ("y ~ x + us(0 + f | g)", "gaussian", -342.513120486, {"sd_g": [0.90026, 1.41969, 1.59389]}),
    ("y ~ x + cs(0 + f | g)", "gaussian", -342.920134296, {"sd_g": [0.89525, 1.43974, 1.57905], "rho_g": [0.526]}),
    ("y ~ x + ar1(t | g)", "gaussian", -385.978884646, {"sd_g": [1.29720], "rho_g": [0.579]}),
    ("k ~ x + cs(0 + f | g)", "poisson", -299.096487579, {"sd_g": [0.12840, 0.42569, 0.44324], "rho_g": [0.807]}),
]


@pytest.mark.parametrize(("formula", "family", "log_likelihood", "values"), GLMM_TMB)
def test_structures_give_the_values_of_glmm_tmb(
    frame: Any, formula: str, family: str, log_likelihood: float, values: dict[str, list[float]]
) -> None:
    found = fit(formula, frame, family)
    assert float(found.log_evidence) == pytest.approx(log_likelihood, abs=1e-5)
    for name, expected in values.items():
        torch.testing.assert_close(
            found.hyperparameters[name].reshape(-1), torch.tensor(expected), rtol=2e-3, atol=6e-4
        )


def test_levels_of_a_factor_follow_one_another(frame: Any) -> None:
    gaps = frame[frame.t != 3].assign(step=lambda d: d.t - (d.t > 3))
    found = fit("y ~ x + ar1(factor(t) + 0 | g)", gaps)  # as glmmTMB has it, which leaves out levels without rows
    assert float(found.log_evidence) == float(fit("y ~ x + ar1(step | g)", gaps).log_evidence)
    assert abs(float(found.log_evidence - fit("y ~ x + ar1(t | g)", gaps).log_evidence)) > 0.1


def test_a_series_with_gaps_has_the_normal_density_of_its_lags(frame: Any) -> None:
    gaps = frame[frame.t.isin([0, 1, 4, 5])]
    found = fit("y ~ x + ar1(t | g)", gaps)
    at = {name: value.numpy() for name, value in found.hyperparameters.items()}
    total = 0.0
    for _, rows in gaps.groupby("g"):
        lags = np.abs(rows.t.to_numpy()[:, None] - rows.t.to_numpy())
        V = at["sd_g"] ** 2 * at["rho_g"] ** lags + at["sigma"] ** 2 * np.eye(len(rows))
        total += multivariate_normal(at["b"][0] + at["b"][1] * rows.x, V).logpdf(rows.y)
    assert float(found.log_evidence) == pytest.approx(total, abs=1e-8)
    assert [name for name in found.table().rows if name.startswith("u_g[0, ")][2:4] == ["u_g[0, t[2]]", "u_g[0, t[3]]"]


def test_a_time_between_those_of_the_fit_is_predicted_from_its_neighbours(frame: Any) -> None:
    gaps = frame[frame.t != 3]
    found = fit("y ~ x + ar1(t | g)", gaps)
    rows = pandas.DataFrame({"x": 0.0, "g": 7, "t": [2, 3, 4]})
    before, between, after = found.predict(rows, kind="link") - found.hyperparameters["b"][0]
    rho = found.hyperparameters["rho_g"]
    torch.testing.assert_close(between, (before + after) * rho / (1.0 + rho.square()), rtol=1e-6, atol=1e-9)


def test_new_rows_are_predicted_where_effects_are_many_for_few_rows(frame: Any) -> None:
    """Two rows for each effect are as many as a Gaussian process has, whose prior grows with its rows."""
    few = frame[frame.index % 12 < 4]
    model, data = mixed("k ~ x + (x | g)", few, family="poisson", priors={"b": "Normal(0, 1)"})
    found = LaplaceEvidence(model, stop=Stop(progress=False)).run(*data)
    rows, (b, u) = few.iloc[[5, 6]], (found.mode[n] for n in ("b", "u_g"))
    X = torch.stack([torch.ones(2), torch.tensor(rows.x.to_numpy())], 1)
    torch.testing.assert_close(found.predict(rows, kind="link"), (X * (b + u[1])).sum(1), rtol=0.0, atol=0.1)


@pytest.mark.parametrize("rho", [-0.2, 0.0, 0.7])
def test_factors_are_those_of_their_correlations(rho: float) -> None:
    lag = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    for factor, expected in (
        (autoregressive_tril, torch.tensor(rho) ** lag),
        (exchangeable_tril, torch.where(lag == 0, 1.0, rho)),
    ):
        tril = factor(torch.tensor(rho), 5)
        torch.testing.assert_close(tril @ tril.T, expected, rtol=1e-12, atol=1e-12)
        assert bool((tril.triu(1) == 0.0).all())


@pytest.mark.parametrize("length", [0.2, 0.5, 0.9])
def test_a_gaussian_process_is_the_dense_one(frame: Any, length: float) -> None:
    """Evidence, and means between the rows; lengths in units of half the range of the values."""
    given = {"sd_gp_x": 1.3, "ell_gp_x": length * 0.5 * float(frame.x.max() - frame.x.min()), "sigma": 0.6}
    start = Start(values={name: torch.tensor(value) for name, value in (given | {"b": [0.2]}).items()})
    found = fit("y ~ gp(x)", frame, maximise=(), start=start)
    x, new = frame.x.to_numpy(), np.array([-0.1, 0.33, 0.8])

    def kernel(a: Any, b: Any) -> Any:
        return 1.3**2 * np.exp(-0.5 * ((a[:, None] - b) / given["ell_gp_x"]) ** 2)

    V = kernel(x, x) + 0.36 * np.eye(len(x))
    expected = multivariate_normal(np.full(len(x), 0.2), V).logpdf(frame.y)
    assert float(found.log_evidence) == pytest.approx(expected, abs=2e-3)
    mean = 0.2 + kernel(new, x) @ np.linalg.solve(V, frame.y - 0.2)
    np.testing.assert_allclose(found.predict(pandas.DataFrame({"x": new}), kind="link"), mean, atol=2e-3)


def test_a_length_is_found_and_may_have_a_prior(frame: Any) -> None:
    wave = frame.assign(y=np.sin(9.0 * frame.x) + 0.3 * (frame.y - frame.y.mean()))
    found = fit("y ~ gp(x)", wave)
    assert 0.1 < float(found.hyperparameters["ell_gp_x"]) < 0.4
    fast = wave.assign(y=np.sin(10.0 * frame.x) + 0.1 * frame.y)  # as fast as the last of ten sines
    half = 0.5 * float(frame.x.max() - frame.x.min())
    assert float(fit("y ~ gp(x, k=10)", fast).hyperparameters["ell_gp_x"]) >= 1.75 * 3.0 * half / 10.0
    model, data = mixed("y ~ gp(x) + ar1(t | g) + cs(0 + f | g) + (x | g)", wave, priors="weak")
    assert "pyro.param" not in model.source
    assert 'pyro.sample("rho_g_f_0", dist.Uniform(X.new_tensor(-0.5), X.new_tensor(1)))' in model.source
    assert bool(pyro.poutine.trace(model).get_trace(*data).log_prob_sum().isfinite())


def test_any_distribution_is_a_family_by_the_name_of_its_location(frame: Any) -> None:
    own, known = (
        fit("y ~ x + (1 | g); scale ~ x", frame, (dist.Normal, "loc")),
        fit("y ~ x + (1 | g); sigma ~ x", frame),
    )
    assert float(own.log_evidence) == pytest.approx(float(known.log_evidence), abs=1e-6)
    found = fit("y ~ x", frame, (dist.StudentT, "loc", {"df": 4.0}))
    assert set(found.hyperparameters) == {"b", "scale"}
    (b, scale), y = (found.hyperparameters[n].numpy() for n in ("b", "scale")), frame.y.to_numpy()
    density = t.logpdf(y, 4.0, b[0] + b[1] * frame.x, scale)
    assert float(found.log_evidence) == pytest.approx(density.sum(), abs=1e-9)
    model, data = mixed("k ~ x", frame, family=(dist.Poisson, "rate"))
    assert "dist.Poisson(rate=eta.exp())" in model.source
    again = pickle.loads(pickle.dumps(model))
    assert again.source == model.source
    assert float(LaplaceEvidence(again, stop=Stop(progress=False)).run(*data).log_evidence) == pytest.approx(
        float(fit("k ~ x", frame, "poisson").log_evidence), abs=1e-8
    )


def test_every_model_can_be_pickled_and_its_source_runs(frame: Any) -> None:
    times = frame.assign(time=np.exp(frame.y))
    for formula, family in (("surv(time) ~ x", "weibull"), ("k ~ x; hurdle ~ x", "poisson")):
        model, data = mixed(formula, times, family=family)
        space: dict[str, Any] = {}
        exec(pickle.loads(pickle.dumps(model)).source, space)
        ours, written = (pyro.poutine.trace(run).get_trace(*data).log_prob_sum() for run in (model, space["model"]))
        assert bool(ours == written)


MESSAGES: list[tuple[str, Any, str]] = [
    ("y ~ x + ar1(x:t | g)", "gaussian", r"ar1\(x:t \| g\); expected one column before the bar"),
    ("y ~ x + toep(t | g)", "gaussian", "before the brackets of a group one of us, diag, cs, ar1 or nothing"),
    ("y ~ x + ar1(t || g)", "gaussian", "before the brackets of a group"),
    ("y ~ x + ar1(seconds | g)", "gaussian", "has 8570 times from 0 to 8569; expected at most 2000"),
    ("y ~ gp(x, t)", "gaussian", r"gp\(x, t\) has 240 distinct values and .*; expected one column of several"),
    ("y ~ gp(x, k=100000000)", "gaussian", "is to have 100000000 functions; .* k= at most 2000"),
    ("y ~ gp(one)", "gaussian", "has 1 distinct values"),
    ("y ~ gp(f)", "gaussian", "'f' has words"),
    ("y ~ x", (dist.StudentT, "location"), r"with names of its arguments, \['df', 'loc', 'scale'\]"),
    ("y ~ x", (dist.GeneralizedPareto, "loc"), "'concentration' is no positive number; expected its value"),
    ("y ~ x", (torch.sin, "loc"), "family='sin'.*expected a distribution"),
    ("y ~ x", (dist.Gamma, "rate"), "expected above 0"),
]


@pytest.mark.parametrize(("formula", "family", "said"), MESSAGES)
def test_messages(frame: Any, formula: str, family: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        mixed(formula, frame.assign(one=1.0, seconds=np.arange(240) % 7 * 1428 + frame.t % 2), family=family)


def test_rows_far_from_those_of_the_fit_are_refused(frame: Any) -> None:
    model, _ = mixed("y ~ gp(x) + ar1(t | g)", frame)
    with pytest.raises(BadInput, match=r"gp\(x\) at 9 to 9; expected values from -0\.2\d+ to 1\.2"):
        model.arguments(pandas.DataFrame({"x": [9.0], "g": [1], "t": [1]}))
    with pytest.raises(BadInput, match=r"time 6 is new; expected 0 to 5, as in the fit"):
        model.arguments(pandas.DataFrame({"x": [0.0], "g": [1], "t": [6]}))


def test_times_that_are_no_whole_numbers_are_equally_far_apart(frame: Any) -> None:
    whole = float(fit("y ~ x + ar1(t | g)", frame).log_evidence)
    others = [frame.t / 10.0 + 0.1, pandas.to_datetime(frame.t, unit="D"), pandas.Categorical(frame.t.to_numpy() ** 2)]
    for times in others:
        assert float(fit("y ~ x + ar1(t | g)", frame.assign(t=times)).log_evidence) == pytest.approx(whole, abs=1e-9)
    for times in (frame.t**2 / 10.0, pandas.to_datetime(frame.t**2, unit="D")):
        with pytest.raises(BadInput, match="expected equal steps"):
            fit("y ~ x + ar1(t | g)", frame.assign(t=times))
