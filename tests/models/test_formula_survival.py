"""Times until an event in formulas: the numbers of R's survival 3.5-3, frailty against quadrature, messages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import fisk, lognorm, weibull_min

from pyro_evidence import BadInput, LaplaceEvidence, Stop, UnsupportedModel

pytest.importorskip("formulae")
import pandas

from pyro_evidence.models.formula import mixed
from pyro_evidence.models.survival import concordance

Numbers = dict[str, list[float]]
SURVREG: dict[str, tuple[float, Numbers]] = {  # of surv(time, event) ~ age + sex, by survreg; shape = 1 / scale
    "weibull": (-336.554156479, {"b": [4.2830515213, -0.00403419864572, 0.965483637155], "shape": [0.90635583]}),
    "exponential": (-337.132050004, {"b": [4.39415969845, -0.00443922289971, 0.884997982587]}),
    "lognormal": (-331.979812513, {"b": [3.44433031774, -0.00528556952912, 1.3766901657], "sigma": [1.18482366516]}),
    "loglogistic": (-332.71747796, {"b": [3.40287692729, -0.00720987855875, 1.55292414965], "shape": [1.47199572]}),
}
COXPH = {  # by coxph, the second flag: at risk from 10 on where the time is above 20
    ("cox", False): (-184.34456814, [0.00203188295714, -0.829313832436]),
    ("cox breslow", False): (-184.657093709, [0.00218151645287, -0.82099531457]),
    ("cox", True): (-176.358029058, [0.00286698760037, -0.646352553821]),
    ("cox breslow", True): (-176.751350089, [0.00302139658202, -0.639603731338]),
}


@pytest.fixture(scope="module")
def kidney(data_dir: Path) -> Any:
    frame = pandas.read_csv(data_dir / "kidney.csv")
    return frame.assign(start=10.0 * (frame.time > 20))


def fit(formula: str, frame: Any, family: str, **settings: Any) -> Any:
    model, data = mixed(formula, frame, family=family)
    return LaplaceEvidence(model, stop=Stop(progress=False), **settings).run(*data)


@pytest.mark.parametrize("family", SURVREG)
def test_a_regression_is_that_of_survreg(kidney: Any, family: str) -> None:
    found, (log_likelihood, values) = fit("surv(time, event) ~ age + sex", kidney, family), SURVREG[family]
    assert float(found.log_evidence) == pytest.approx(log_likelihood, abs=1e-8)
    for name, expected in values.items():
        assert found.hyperparameters[name].reshape(-1).tolist() == pytest.approx(expected, abs=1e-5)


def test_the_known_log_likelihood_of_the_kidneys(kidney: Any) -> None:
    found = fit("surv(time, event) ~ age + sex + C(disease)", kidney, "weibull")
    assert float(found.log_evidence) == pytest.approx(-330.363471521, abs=1e-8)


@pytest.mark.parametrize(("family", "delayed"), COXPH)
def test_ratios_of_hazards_are_those_of_coxph(kidney: Any, family: str, delayed: bool) -> None:
    times = "start, time, event" if delayed else "time, event"
    found, (log_likelihood, b) = fit(f"surv({times}) ~ age + sex", kidney, family), COXPH[family, delayed]
    assert float(found.log_evidence) == pytest.approx(log_likelihood, abs=1e-8)
    assert found.hyperparameters["b"].tolist() == pytest.approx(b, abs=1e-6)


def test_concordance_is_that_of_r(kidney: Any) -> None:
    time, event = (torch.tensor(kidney[name].to_numpy()) for name in ("time", "event"))
    risk = torch.tensor(kidney[["age", "sex"]].to_numpy()).double() @ torch.tensor(COXPH["cox", False][1]).double()
    assert concordance(time, event, risk) == pytest.approx(0.662182741117, abs=1e-10)
    with pytest.raises(BadInput, match="no event is before"):
        concordance(time, 0 * event, risk)


def test_an_early_time_is_divided_by_the_survival_to_entry(kidney: Any) -> None:
    found = fit("surv(start, time, event) ~ age + sex", kidney, "weibull")
    (b, shape), X = (found.hyperparameters[n].numpy() for n in ("b", "shape")), kidney[["age", "sex"]].to_numpy()
    law = weibull_min(float(shape), scale=np.exp(b[0] + X @ b[1:]))
    seen = np.where(kidney.event == 1, law.logpdf(kidney.time), law.logsf(kidney.time)) - law.logsf(kidney.start)
    assert float(found.log_evidence) == pytest.approx(seen.sum(), abs=1e-9)


def test_a_hazard_that_grows_is_found() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=2000)
    time = np.log1p(0.1 * rng.exponential(size=2000) / np.exp(-4.0 + 0.5 * x)) / 0.1
    frame = pandas.DataFrame({"x": x, "time": np.minimum(time, 60.0), "event": time < 60.0})
    found = fit("surv(time, event) ~ x", frame, "gompertz")
    assert found.hyperparameters["b"].tolist() == pytest.approx([-4.0, 0.5], abs=0.1)
    assert float(found.hyperparameters["growth"]) == pytest.approx(0.1, abs=0.005)
    assert fit("surv(time, event) ~ x", frame, "cox").hyperparameters["b"].tolist() == pytest.approx([0.5], abs=0.05)


def test_times_that_were_all_seen_need_no_event(kidney: Any) -> None:
    plain, named = fit("time ~ age", kidney, "lognormal"), fit("Surv(time) ~ age", kidney, "lognormal")
    log_time = fit("np.log(time) ~ age", kidney, "gaussian")
    of_log = float(log_time.log_evidence) - float(np.log(kidney.time).sum())
    assert float(plain.log_evidence) == float(named.log_evidence) == pytest.approx(of_log, abs=1e-8)


def test_frailty_is_integrated_patient_by_patient(kidney: Any) -> None:
    found = fit("surv(time, event) ~ sex + (1 | ID)", kidney, "lognormal", nodes=15)
    values = {n: v.numpy() for n, v in found.hyperparameters.items()}
    sd, sigma = float(values["sd_ID"]), float(values["sigma"])
    assert sd > 0.3
    total = 0.0
    for _, rows in kidney.groupby("ID"):
        eta = values["b"][0] + values["b"][1] * rows.sex.to_numpy()

        def density(u: float, rows: Any = rows, eta: Any = eta) -> float:
            law = torch.distributions.Normal(torch.as_tensor(eta) + u, sigma)
            log_time = torch.tensor(np.log(rows.time.to_numpy()))
            log_survival = torch.special.log_ndtr((law.loc - log_time) / sigma)
            seen = torch.where(
                torch.tensor(rows.event.to_numpy() == 1), law.log_prob(log_time) - log_time, log_survival
            )
            return float((seen.sum() - 0.5 * (u / sd) ** 2).exp()) / (sd * np.sqrt(2.0 * np.pi))

        total += np.log(quad(density, -9.0 * sd, 9.0 * sd, epsabs=1e-14, points=[0.0])[0])
    assert float(found.log_evidence) == pytest.approx(total, abs=1e-6)


def test_predictions_are_of_times_without_censoring(kidney: Any) -> None:
    model, data = mixed("surv(time, event) ~ age + sex", kidney, family="weibull", priors="weak")
    found = LaplaceEvidence(model).run(*data)
    frame = pandas.DataFrame({"age": [30, 60], "sex": [0, 1]})
    mean = found.predict(*model.arguments(frame))
    assert mean.shape == (2,)
    b, shape = found.mode["b"].numpy(), float(found.mode["shape"])
    near = weibull_min(shape, scale=np.exp(b[0] + frame.to_numpy() @ b[1:])).mean()
    assert mean.numpy() == pytest.approx(near, rel=0.2)


def test_averages_are_of_times_too_and_a_step_of_zero_and_one_is_that_between_them(kidney: Any) -> None:
    fit = {}
    for family in ("weibull", "cox"):
        model, data = mixed("surv(time, event) ~ age + sex", kidney, family=family)
        fit[family] = LaplaceEvidence(model).run(*data)
    row = fit["weibull"].comparisons("sex").rows["sex[1] - sex[0]"]
    b, shape = (fit["weibull"].hyperparameters[name].numpy() for name in ("b", "shape"))
    women, men = (
        weibull_min(float(shape), scale=np.exp(b[0] + b[1] * kidney.age + b[2] * sex)).mean() for sex in (1, 0)
    )
    assert row["value"] == pytest.approx((women - men).mean(), rel=1e-9)
    rows = kidney[["age", "sex"]]
    assert fit["cox"].predict(rows, kind="link").numpy() == pytest.approx(
        rows.to_numpy() @ fit["cox"].hyperparameters["b"].numpy(), rel=1e-9
    )


FAMILY_LAWS: dict[str, Any] = {
    "weibull": lambda eta, h: weibull_min(h["shape"], scale=np.exp(eta)),
    "lognormal": lambda eta, h: lognorm(h["sigma"], scale=np.exp(eta)),
    "loglogistic": lambda eta, h: fisk(h["shape"], scale=np.exp(eta)),
}


@pytest.mark.parametrize("family", FAMILY_LAWS)
def test_survival_curves_and_restricted_means(kidney: Any, family: str) -> None:
    found = fit("surv(time, event) ~ age + sex", kidney, family)
    frame, times = pandas.DataFrame({"age": [30.0, 60.0], "sex": [0, 1]}), [0.0, *range(5, 405, 5)]
    h = {n: v.numpy() for n, v in found.hyperparameters.items()}
    law = FAMILY_LAWS[family](h["b"][0] + frame.to_numpy() @ h["b"][1:], h)
    curve, sd = found.survival(times, frame, return_std=True)
    assert curve.numpy() == pytest.approx(np.array([law.sf(t) for t in times]), rel=1e-9)
    assert float(sd.max()) < 1e-9  # nothing is uncertain: params alone
    if family != "loglogistic":  # which has no mean at these shapes
        assert found.predict(frame).numpy() == pytest.approx(law.mean(), rel=1e-9)
    exact = [quad(lambda t, i=i: law.sf(t)[i], 0.0, 400.0)[0] for i in (0, 1)]
    assert found.survival(times, frame, restricted_mean=True).numpy() == pytest.approx(exact, rel=2e-3)


def test_survival_is_averaged_over_the_posterior(kidney: Any) -> None:
    model, data = mixed("surv(time, event) ~ sex + (1 | ID)", kidney, family="weibull", priors="weak")
    found = LaplaceEvidence(model).run(*data)
    frame, times = pandas.DataFrame({"sex": [0, 1], "ID": [3, 4]}), torch.tensor([10.0, 100.0])
    drawn = found.get_samples(4000, seed=1)
    eta = drawn["b"][:, :1] + drawn["b"][:, 1:] * torch.tensor([0.0, 1.0]) + drawn["u_ID"].reshape(4000, -1)[:, 2:4]
    each = (-((times.reshape(1, 2, 1) / eta.exp().unsqueeze(1)) ** drawn["shape"].reshape(-1, 1, 1))).exp()
    curve, sd = found.survival(times, frame, return_std=True, num_samples=4000)
    torch.testing.assert_close(curve, each.mean(0), rtol=0.0, atol=0.02)
    torch.testing.assert_close(sd, each.std(0), rtol=0.1, atol=0.0)
    band = found.survival(times, frame, quantiles=[0.1, 0.9], num_samples=4000)
    torch.testing.assert_close(band, each.quantile(torch.tensor([0.1, 0.9]).to(each), 0), rtol=0.0, atol=0.03)


def test_what_has_no_survival_is_refused(kidney: Any) -> None:
    found = fit("surv(time, event) ~ age", kidney, "cox")
    with pytest.raises(UnsupportedModel, match="CoxPartialLikelihood has no survival function"):
        found.survival([1.0], kidney[["age"]])
    for times in ([2.0, 1.0], []):
        with pytest.raises(BadInput, match="in ascending order"):
            found.survival(times, kidney[["age"]], restricted_mean=True)


MESSAGES = [
    ("surv(time, event, age, sex) ~ age", "weibull", r"expected surv\(time, event\)"),
    ("surv(time, age) ~ sex", "weibull", "1 where the event was seen"),
    ("surv(time, time, event) ~ sex", "cox", "below the time of exit"),
    ("surv(sex, event) ~ age", "lognormal", "times: expected above 0"),
]


@pytest.mark.parametrize(("formula", "family", "said"), MESSAGES)
def test_what_are_no_times_is_refused(kidney: Any, formula: str, family: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        mixed(formula, kidney, family=family)
