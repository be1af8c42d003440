"""Mixed models from a formula: lme4's and glmmTMB's numbers, the same program by hand, other frames, messages."""

import math
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS, Predictive
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import BadInput, LaplaceEvidence, LaplacePosterior, Stop

pytest.importorskip("formulae")
import pandas

from pyro_evidence.models.formula import FAMILIES, MixedModel, mixed
from pyro_evidence.models.formula.families import OTHER_NAMES, chosen_family, cloglog_shares, probit_shares

ROWS, GROUPS = 240, 12


def fit(model: MixedModel, data: tuple[Any, ...], **settings: Any) -> LaplacePosterior:
    return LaplaceEvidence(model, stop=Stop(progress=False), **settings).run(*data)


@pytest.fixture(scope="module")
def frame() -> Any:
    """Rows of twelve groups, and a response for each family."""
    rng = np.random.default_rng(0)
    g, x, t = rng.integers(0, GROUPS, ROWS), rng.normal(size=ROWS), rng.uniform(1.0, 3.0, ROWS)
    g[:GROUPS] = np.arange(GROUPS)
    eta = 0.3 + 0.5 * x + (0.6 * rng.normal(size=GROUPS))[g]
    scores = rng.gumbel(size=(ROWS, 3)) + np.stack([0.0 * x, eta, -eta], -1)
    return pandas.DataFrame(
        {
            "g": np.char.add("g", g.astype(str)),
            "h": np.array(list("pqr"))[rng.integers(0, 3, ROWS)],
            "x": x,
            "t": t,
            "y": eta + 0.7 * rng.normal(size=ROWS),
            "yes": np.where(rng.logistic(size=ROWS) < eta, "yes", "no"),
            "hits": rng.binomial(9, 1.0 / (1.0 + np.exp(-eta))),
            "tries": 9,
            "misses": 0,
            "k": rng.poisson(np.exp(eta)),
            "over": rng.poisson(rng.gamma(2.0, np.exp(eta) / 2.0)),
            "kind": np.array(["a", "b", "c"])[scores.argmax(1)],
        }
    ).assign(misses=lambda f: 9 - f.hits)


REFERENCE = {  # file, formula, family, log likelihood by lme4 1.1-31 and glmmTMB 1.1.5, values of hyperparameters
    "sleepstudy": (
        "sleepstudy",
        "Reaction ~ Days + (Days | Subject)",
        "gaussian",
        -875.9696722,
        {"b": [251.4051, 10.4673], "sd_Subject": [23.7798, 5.7168], "sigma": [25.5919]},
    ),
    "penicillin": (
        "penicillin",
        "diameter ~ 1 + (1 | plate) + (1 | sample)",
        "gaussian",
        -166.0941743,
        {"b": [22.97222], "sd_plate": [0.84557], "sd_sample": [1.77065], "sigma": [0.54993]},
    ),
    "cbpp": (
        "cbpp",
        "prop(incidence, size) ~ C(period) + (1 | herd)",
        "binomial",
        -92.02628,
        {"b": [-1.39853, -0.99233, -1.12867, -1.58031], "sd_herd": [0.64226]},
    ),
    "verbagg": (
        "verbagg",
        "r2 ~ Anger + Gender + btype + situ + (1 | id) + (1 | item)",
        "bernoulli",
        -4075.69986,
        {"sd_id": [1.33970], "sd_item": [0.49531]},
    ),
    "insteval": (
        "insteval",
        "y ~ 1 + (1 | s) + (1 | d) + (1 | dept)",
        "gaussian",
        -118884.7862,
        {"b": [3.25193], "sd_s": [0.32642], "sd_d": [0.51730], "sd_dept": [0.07736], "sigma": [1.17774]},
    ),
}
LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("verbagg", "insteval")]


@pytest.mark.parametrize("name", ["sleepstudy", "penicillin", "cbpp", *LONG])
def test_one_line_gives_the_values_of_lme4(data_dir: Path, name: str) -> None:
    file, formula, family, log_likelihood, values = REFERENCE[name]
    model, data = mixed(formula, pandas.read_csv(data_dir / f"{file}.csv"), family=family)
    found = fit(model, data)
    assert float(found.log_evidence) == pytest.approx(log_likelihood, abs=1e-5 * max(1.0, abs(log_likelihood) / 1e4))
    for key, expected in values.items():
        torch.testing.assert_close(found.hyperparameters[key].reshape(-1), torch.tensor(expected), rtol=1e-3, atol=0.0)


@pytest.mark.slow
def test_a_large_crossed_table_of_zeros_and_ones(data_dir: Path) -> None:
    table = pandas.read_csv(data_dir / "insteval.csv").assign(high=lambda f: (f.y >= 4).astype(int))
    model, data = mixed("high ~ C(service) + (1 | s) + (1 | d)", table, family="bernoulli")
    found = fit(model, data)
    assert float(found.log_evidence) == pytest.approx(-46414.52183, abs=1e-3)
    torch.testing.assert_close(found.hyperparameters["b"], torch.tensor([-0.16013, -0.13619]), rtol=1e-3, atol=0.0)


def test_two_bars_mean_independent_effects_and_flat_priors_restricted_likelihood(data_dir: Path) -> None:
    table = pandas.read_csv(data_dir / "sleepstudy.csv")
    model, data = mixed("Reaction ~ Days + (Days || Subject)", table)
    assert float(fit(model, data).log_evidence) == pytest.approx(-876.0016, abs=1e-4)  # lme4, maximum likelihood
    model, data = mixed("Reaction ~ Days + (Days | Subject)", table, priors={"b": "flat"})
    found = fit(model, data)
    assert float(found.log_evidence) == pytest.approx(-871.8141, abs=1e-4)  # lme4, restricted maximum likelihood
    expected = torch.tensor([24.741, 5.922])
    torch.testing.assert_close(found.hyperparameters["sd_Subject"], expected, rtol=1e-3, atol=0.0)


def by_hand(X: Tensor, g: Tensor, num: int, Z: Tensor, y: Tensor) -> None:
    b = pyro.param("b", torch.zeros(2))
    sd = pyro.param("sd", torch.ones(2), constraint=constraints.positive)
    L = pyro.param("L", torch.eye(2), constraint=constraints.corr_cholesky)
    sigma = pyro.param("sigma", torch.ones(()), constraint=constraints.positive)
    with pyro.plate("groups", num):
        u = pyro.sample("u", dist.MultivariateNormal(torch.zeros(2), scale_tril=sd[:, None] * L))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(X @ b + (Z * u[g]).sum(-1), sigma), obs=y)


def test_it_is_the_program_that_one_writes(frame: Any) -> None:
    model, data = mixed("y ~ x + (x | g)", frame)
    levels, place = np.unique(frame.g, return_inverse=True)
    X = torch.stack([torch.ones(ROWS), torch.tensor(frame.x.to_numpy())], -1)
    own = (X, torch.as_tensor(place), len(levels), X, torch.tensor(frame.y.to_numpy()))
    for made, written in zip(data, own, strict=True):
        torch.testing.assert_close(torch.as_tensor(made), torch.as_tensor(written))
    expected = LaplaceEvidence(by_hand, stop=Stop(progress=False)).run(*own)
    assert float(fit(model, data).log_evidence) == pytest.approx(float(expected.log_evidence), abs=1e-6)


def test_coefficients_have_the_names_of_formulae(frame: Any) -> None:
    model, _ = mixed("y ~ x * h + (x || g)", frame)
    assert model.coords["coefficient"] == ("Intercept", "x", "h[q]", "h[r]", "x:h[q]", "x:h[r]")


RESPONSES = {
    "gaussian": "y",
    "bernoulli": "yes",
    "binomial": "cbind(hits, misses)",
    "poisson": "k",
    "negative binomial": "over",
    "categorical": "kind",
}


@pytest.mark.parametrize("family", RESPONSES)  # of times: test_formula_survival.py
def test_every_family_finds_the_slope_it_was_made_with(frame: Any, family: str) -> None:
    model, data = mixed(f"{RESPONSES[family]} ~ x + (1 | g)", frame, family=family)
    found = fit(model, data)
    slope = found.hyperparameters["b_b" if family == "categorical" else "b"][1]
    sd = found.hyperparameter_covariance().sd["b_b" if family == "categorical" else "b"][1]
    assert abs(float(slope) - 0.5) < 3.0 * float(sd) < 0.8
    assert len(found.predict(*model.arguments(frame.head(3)), *([data[-2][:3]] if family == "binomial" else []))) == 3


def test_the_two_ways_to_write_a_binomial_agree(frame: Any) -> None:
    _, one = mixed("cbind(hits, misses) ~ x + (1 | g)", frame, family="binomial")
    _, two = mixed("prop(hits, tries) ~ x + (1 | g)", frame, family="binomial")
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, two, strict=True))


def test_successes_and_failures_may_be_computed(frame: Any) -> None:
    _, one = mixed("cbind(hits, tries - hits) ~ x", frame, family="binomial")
    _, two = mixed("cbind(hits, misses) ~ x", frame, family="binomial")
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


OTHER_FAMILIES = {  # log likelihoods by glmmTMB 1.1.5
    "beta binomial": ("cbpp", "cbind(incidence, size - incidence) ~ C(period)", "betabinomial", None, -88.0416468),
    "probit": ("cbpp", "prop(incidence, size) ~ C(period) + (1 | herd)", "binomial", "probit", -92.5833377),
    "cloglog": ("cbpp", "prop(incidence, size) ~ C(period) + (1 | herd)", "Binomial", "cloglog", -91.7580020),
    "gamma": ("sleepstudy", "Reaction ~ Days + (1 | Subject)", "Gamma", None, -883.5783367),
    "beta": ("sleepstudy", "I(Reaction / 600) ~ Days + (1 | Subject)", "beta", None, 253.3616541),
    "sigma": ("sleepstudy", "Reaction ~ Days + (1 | Subject); sigma ~ Days", "gaussian", None, -891.9118793),
}


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_families_links_and_parameters_give_the_values_of_glmm_tmb(data_dir: Path, name: str) -> None:
    file, formula, family, link, log_likelihood = OTHER_FAMILIES[name]
    model, data = mixed(formula, pandas.read_csv(data_dir / f"{file}.csv"), family=family, link=link)
    assert float(fit(model, data).log_evidence) == pytest.approx(log_likelihood, abs=1e-5)


@pytest.mark.parametrize(
    ("family", "eta", "given", "mean", "variance"),
    [
        ("gamma", 0.7, (3.0,), math.exp(0.7), math.exp(1.4) / 3.0),
        ("student", 0.7, (5.0, 2.0), 0.7, 4.0 * 5.0 / 3.0),
        ("beta", 0.0, (3.0,), 0.5, 0.25 / 4.0),
        ("beta binomial", 0.0, (6.0, 3.0), 3.0, 6.0 * 0.25 * 9.0 / 4.0),
        ("negative binomial", -0.3, (2.5,), math.exp(-0.3), math.exp(-0.3) + math.exp(-0.6) / 2.5),
        ("negative binomial 1", 0.7, (3.0,), math.exp(0.7), 4.0 * math.exp(0.7)),
    ],
)
def test_a_family_has_the_moments_that_glmm_tmb_states(
    family: str, eta: float, given: tuple[float, ...], mean: float, variance: float
) -> None:
    names = (*["trials"] * (family == "beta binomial"), *FAMILIES[family].parameters)
    found = FAMILIES[family].distribution.value(
        {"eta": torch.tensor(eta)} | dict(zip(names, map(torch.tensor, given), strict=True))
    )
    assert (float(found.mean), float(found.variance)) == pytest.approx((mean, variance), rel=1e-10)


def families() -> str:
    """The table of the docs: a row for each family, with its links and what the first makes of the predictor."""
    head = ["`family=`", "distribution of a row", "links, the first by default", "`m`", "also called"]
    rows = [head, ["---"] * len(head)]
    for name, family in FAMILIES.items():
        links, first = ", ".join(family.links), f"`{family.links[family.link].text}`"
        others = ", ".join(f'`"{other}"`' for other, own in OTHER_NAMES.items() if own == name)
        rows.append([f'`"{name}"`', f"`{family.fn.text}`", links, first, others])
    return "\n".join(f"| {' | '.join(row)} |".replace("  ", " ") for row in rows)


def test_the_docs_have_the_table_of_families() -> None:
    """``python -m tests.models.test_formula`` prints it."""
    assert families() in (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")


def test_links_are_the_inverse_of_theirs() -> None:
    eta = torch.linspace(-4.0, 3.0, 12)
    chance = {name: link.value({"eta": eta}).sigmoid() for name, link in FAMILIES["bernoulli"].links.items()}
    torch.testing.assert_close(chance["probit"], torch.special.ndtr(eta), rtol=1e-10, atol=0.0)
    torch.testing.assert_close(chance["cloglog"], -(-eta.exp()).expm1(), rtol=1e-10, atol=0.0)
    assert bool((FAMILIES["poisson"].links["inverse"].value({"eta": eta}) == 1.0 / eta).all())


@pytest.mark.parametrize(
    "family", ["gaussian", "gamma", "poisson", "nbinom2", "nbinom1", "bernoulli", "binomial", "beta"]
)
def test_means_of_levels_do_not_hang_on_the_link(frame: Any, family: str) -> None:
    """One coefficient a level: the highest likelihood is that of their means, whatever the link makes of them."""
    responses = {"counts": "k", "binary": "yes", "trials": "prop(hits, tries)", "share": "share"}
    response = responses.get(FAMILIES[chosen_family(family)[0]].response, "w")
    rows = frame.assign(w=40.0 + 3.0 * frame.y, share=1.0 / (1.0 + np.exp(-frame.y)))
    values = [
        float(fit(*mixed(f"{response} ~ h", rows, family=family, link=link)).log_evidence)
        for link in chosen_family(family)[1].links
    ]
    assert values == pytest.approx([values[0]] * len(values), abs=1e-6)


@pytest.mark.parametrize("link", ["identity", "log"])
def test_priors_are_in_the_unit_of_any_link(frame: Any, link: str) -> None:
    """Weak priors of a response in other units: the same fit, and its density in the other unit."""
    found = []
    for unit in (1.0, 1000.0):
        rows = frame.assign(w=unit * (40.0 + 3.0 * frame.y))
        model, data = mixed("w ~ x + (1 | g)", rows, link=link, priors="weak")
        found.append(float(fit(model, data).log_evidence) + ROWS * math.log(unit))
    assert found[1] == pytest.approx(found[0], abs=0.1)


def test_groups_on_the_unit_of_a_mean(data_dir: Path) -> None:
    frame = pandas.read_csv(data_dir / "sleepstudy.csv")
    model, data = mixed("Reaction ~ Days + (1 | Subject)", frame, family="Gamma", link="identity")
    assert float(fit(model, data).log_evidence) == pytest.approx(-891.0196717, abs=1e-5)  # glmmTMB
    model, data = mixed("Reaction ~ Days + (1 | Subject)", frame, family="Gamma", link="inverse")
    assert float(fit(model, data).log_evidence) > -880.0  # where glmmTMB ends without a number


def test_effects_of_groups_begin_on_the_side_of_a_pole_where_the_mean_is() -> None:
    """glmmTMB(y ~ x + (1 | g), d, gaussian("inverse"), start = list(beta = c(0.7, 0))); effects at random had -209."""
    rng = np.random.default_rng(0)
    g, x = np.arange(200) % 12, rng.uniform(size=200)
    mean = 1.0 / (0.5 + 0.4 * x + 0.05 * rng.normal(size=12)[g])
    rows = pandas.DataFrame({"x": x, "g": g, "y": mean + 0.3 * rng.normal(size=200)})
    model, data = mixed("y ~ x + (1 | g)", rows, link="inverse")
    assert float(fit(model, data).log_evidence) == pytest.approx(-47.62496, abs=1e-4)


@pytest.mark.parametrize("factor", ["factor(Days)", "as.factor(Days)"])
def test_factors_of_r_are_categories(data_dir: Path, factor: str) -> None:
    rows = pandas.read_csv(data_dir / "sleepstudy.csv")
    model, data = mixed(f"Reaction ~ {factor} + (1 | factor(Subject))", rows)
    same, expected = mixed("Reaction ~ C(Days) + (1 | Subject)", rows)
    assert model.coords == same.coords and all(
        map(torch.equal, map(torch.as_tensor, data), map(torch.as_tensor, expected))
    )


@pytest.mark.parametrize(
    ("there", "said", "here"),
    [
        ("y ~ ns(x, 3)", "cr(x, df=3)", "y ~ cr(x, df=3)"),
        ("y ~ te(x, z)", "t2(x, z)", "y ~ t2(x, z)"),
        ("y ~ hsgp(x)", "gp(x, k=20)", "y ~ gp(x, k=20)"),
        ("y ~ mo(z)", "C(x)", "y ~ C(z)"),
        ("y | se(se) ~ x", "sigma ~ 0 + offset(log(se))", "y ~ x; sigma ~ 0 + offset(log(se))"),
        ("y | rate(z) ~ x", "offset(log(n))", "y ~ x + offset(log(z + 1))"),
        ("y ~ x + ar(time=z, gr=x)", "ar1(time | g)", "y ~ x + ar1(z | x)"),
        ("y ~ x + (1 | gr(z, by=x))", "(0 + f || g)", "y ~ x + (0 + C(x) || z)"),
        ("bf(y ~ x, sigma ~ z)", "y ~ x; sigma ~ x", "y ~ x; sigma ~ z"),
    ],
)
def test_functions_of_others_are_told_what_stands_for_them(there: str, said: str, here: str) -> None:
    rows = pandas.DataFrame({"y": np.sin(np.arange(40.0)), "x": np.arange(40.0) % 7, "z": np.arange(40.0) % 11})
    rows["se"] = 0.1 + rows.x
    with pytest.raises(BadInput) as refused:
        mixed(there, rows)
    message = str(refused.value)
    assert said in message.partition("expected ")[2] and len(message) < 300
    mixed(here, rows)


def test_standard_errors_that_are_known_are_no_params() -> None:  # oracle: weighted least squares
    rows = pandas.DataFrame({"y": [1.0, 3.0, 2.0, 5.0], "x": [0.0, 1.0, 2.0, 3.0], "se": [0.5, 1.0, 2.0, 1.0]})
    found = fit(*mixed("y ~ x; sigma ~ 0 + offset(log(se))", rows))
    slope, intercept = np.polyfit(rows.x, rows.y, 1, w=1.0 / rows.se)
    assert found.hyperparameters["b"].tolist() == pytest.approx([intercept, slope], rel=1e-6)


@pytest.mark.parametrize("family", ["zero_inflated_poisson", "hurdle_negbinomial"])
def test_a_family_of_zeros_is_told_its_formula(family: str) -> None:
    base, zeros = family.rpartition("_")[2], "zi ~ 1" if "inflated" in family else "hurdle ~ 1"
    rows = pandas.DataFrame({"y": [0, 0, 3, 1, 2, 0], "x": np.arange(6.0)})
    with pytest.raises(BadInput, match=f"expected family='{base}' and a formula of the zeros, 'y ~ x; {zeros}'"):
        mixed("y ~ x", rows, family=family)
    mixed(f"y ~ x; {zeros}", rows, family=base)


def test_a_natural_spline_is_that_of_r(data_dir: Path) -> None:
    """lmer(Reaction ~ splines::ns(Days, 3) + (1 | Subject), sleepstudy, REML = FALSE)."""
    model, data = mixed("Reaction ~ cr(Days, df=3) + (1 | Subject)", pandas.read_csv(data_dir / "sleepstudy.csv"))
    assert float(fit(model, data).log_evidence) == pytest.approx(-896.514846124, abs=1e-6)


@pytest.mark.parametrize("link", ["logit", "probit", "cloglog"])
def test_two_grades_are_two_classes(frame: Any, link: str) -> None:
    """Above the cutpoint is a chance; of cloglog, whose tails differ, the chance below with the signs turned."""
    graded = frame.assign(yes=pandas.Categorical(frame["yes"], ["no", "yes"], ordered=True))
    ordinal = fit(*mixed("yes ~ x", graded, family="ordinal", link=link))
    first = "['no']" if link == "cloglog" else ""
    binary = fit(*mixed(f"yes{first} ~ x", frame, family="bernoulli", link=link))
    sign = -1.0 if link == "cloglog" else 1.0
    assert float(ordinal.log_evidence) == pytest.approx(float(binary.log_evidence), abs=1e-7)
    expected = sign * float(binary.hyperparameters["b"][1])
    assert float(ordinal.hyperparameters["b"][0]) == pytest.approx(expected, abs=1e-5)


def test_shares_of_grades_are_differences_and_keep_their_digits() -> None:
    eta, cutpoints = torch.tensor([-0.5, 0.7]).double(), torch.tensor([-1.0, 0.2, 1.5]).double()
    for shares, cdf in ((probit_shares, torch.special.ndtr), (cloglog_shares, lambda z: 1.0 - (-z.exp()).exp())):
        below = torch.nn.functional.pad(cdf(cutpoints - eta[:, None]), (1, 0))
        expected = torch.nn.functional.pad(below, (0, 1), value=1.0).diff()
        torch.testing.assert_close(shares(eta, cutpoints).exp(), expected)
    far = probit_shares(torch.tensor([-12.0]).double(), cutpoints)  # log of ndtr(-13.5) - ndtr(-12.2), and beyond
    assert far[0, 2].item() == pytest.approx(math.log(0.5 * math.erfc(12.2 / 2**0.5)), abs=1e-6)


def zeros_of_counts(frame: Any, extra: str, rate: Any) -> tuple[float, Tensor]:
    model, data = mixed(f"k ~ 1; {extra} ~ 1", frame, family="poisson")
    found = fit(model, data)
    return float(found.log_evidence), rate(found.hyperparameters)


def test_a_hurdle_is_a_share_of_zeros_and_a_truncated_model(frame: Any) -> None:
    """The log likelihood of a hurdle factorises: zeros are binomial, the others a truncated fit of their own."""
    whole, share = zeros_of_counts(frame, "hurdle", lambda values: values["b_hurdle"].sigmoid())
    zero, above = (frame.k == 0).mean(), frame[frame.k > 0]
    assert float(share) == pytest.approx(zero, abs=1e-5)
    model, data = mixed("k ~ 1", above, family="truncated poisson")
    of_zeros = len(frame) * (zero * math.log(zero) + (1.0 - zero) * math.log(1.0 - zero))
    assert whole == pytest.approx(float(fit(model, data).log_evidence) + of_zeros, abs=1e-6)


def test_zero_inflation_adds_zeros(frame: Any) -> None:
    found, share = zeros_of_counts(frame, "zi", lambda values: values["b_zi"].sigmoid())
    model, data = mixed("k ~ 1", frame, family="poisson")
    assert found > float(fit(model, data).log_evidence)
    rate = frame.k.mean() / (1.0 - float(share))  # the mean is met, and so is the number of zeros
    expected = float(share) + (1.0 - float(share)) * math.exp(-rate)
    assert (frame.k == 0).mean() == pytest.approx(expected, abs=1e-5)


def test_a_negative_binomial_has_the_mean_of_its_predictor() -> None:
    eta, shape = torch.tensor([0.3, -1.0]), torch.tensor(2.5)
    made = FAMILIES["negative binomial"].distribution.value({"eta": eta, "shape": shape})
    torch.testing.assert_close(made.mean, eta.exp())
    torch.testing.assert_close(made.variance, eta.exp() + eta.exp().square() / shape)


def test_nested_groups_are_a_group_and_its_parts(frame: Any) -> None:
    nested, data = mixed("y ~ 1 + (1 | h/g)", frame)
    spelt, same = mixed("y ~ 1 + (1 | h) + (1 | h:g)", frame)
    assert nested.source.replace("h/g", "") == spelt.source.replace("(1 | h) + (1 | h:g)", "(1 | )")
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(data, same, strict=True))
    assert data[4] == len(set(zip(frame.h, frame.g, strict=True)))


def test_an_offset_has_coefficient_one(frame: Any) -> None:
    model, data = mixed("k ~ x + offset(np.log(t)) + (1 | g)", frame, family="poisson")
    np.testing.assert_allclose(data[-2].numpy(), np.log(frame.t))
    assert model.coords["coefficient"] == ("Intercept", "x")


def test_rows_with_gaps_are_left_out_and_counted(frame: Any) -> None:
    gaps = frame.copy()
    gaps.loc[[3, 7], "x"], gaps.loc[9, "y"] = np.nan, np.nan
    gaps["unused"] = np.nan
    model, data = mixed("y ~ x + (1 | g)", gaps)
    assert model.dropped == 3 and len(data[-1]) == ROWS - 3
    with pytest.raises(BadInput, match="the new rows lack values of 'x'"):
        model.arguments(gaps)


def test_groups_that_are_new_come_after_the_others(frame: Any) -> None:
    model, data = mixed("y ~ x + (1 | g)", frame)
    new = pandas.DataFrame({"x": [0.0, 0.0, 1.0], "g": ["g1", "unheard of", "g1"]})
    X, g, num = model.arguments(new)
    assert num == GROUPS + 1 and g.tolist() == [1, GROUPS, 1] and X.tolist() == [[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
    found = fit(model, data)
    mean, sd = found.predict(X, g, num, return_std=True)
    hypers = found.hyperparameters
    expected = float((hypers["sd_g"].square() + hypers["sigma"].square()).sqrt())
    assert float(sd[1]) == pytest.approx(expected, rel=0.1) and float(mean[1]) == pytest.approx(
        float(hypers["b"][0]), abs=0.1
    )


def test_the_population_has_no_groups_and_the_link_no_noise(frame: Any) -> None:
    model, data = mixed("k ~ x + (x | g)", frame, family="poisson")
    found, rows = fit(model, data), frame.head(4)
    b, u = found.hyperparameters["b"], found.predict(rows, kind="link")
    X, g, _, Z = model.arguments(rows)
    torch.testing.assert_close(found.predict(rows[["x"]], kind="population"), (X @ b).exp(), rtol=1e-9, atol=0.0)
    draws = found.get_samples(20_000, seed=0)["u_g"]
    expected = X @ b + (Z * draws[:, g]).sum(-1)
    mean, sd = found.predict(rows, kind="link", return_std=True)
    torch.testing.assert_close(mean, expected.mean(0), rtol=0.0, atol=0.01)
    torch.testing.assert_close(sd, expected.std(0), rtol=0.03, atol=0.0)
    torch.testing.assert_close(found.predict(kind="link")[:4], u, rtol=1e-9, atol=1e-9)
    low, high = found.predict(rows, kind="link", quantiles=[0.05, 0.95], num_samples=4000)
    torch.testing.assert_close(high - low, 2.0 * 1.645 * sd, rtol=0.05, atol=0.0)


def test_a_prediction_of_another_kind_is_refused(frame: Any) -> None:
    model, data = mixed("y ~ x + (1 | g)", frame)
    found = fit(model, data)
    with pytest.raises(BadInput, match=r"predict\(kind='terms'\); expected one of \('response', 'link', 'population'"):
        found.predict(frame, kind="terms")
    with pytest.raises(BadInput, match="frame has no column 'x'"):
        found.predict(frame[["g"]], kind="population")
    other = LaplaceEvidence(by_hand, stop=Stop(progress=False)).run(data[0], *data[1:3], data[0], data[-1])
    with pytest.raises(BadInput, match="expected a model that"):
        other.predict(kind="link")


def test_transformations_keep_the_centre_of_the_fit(frame: Any) -> None:
    model, data = mixed("y ~ scale(x) + (1 | g)", frame)
    X, *_ = model.arguments(frame.head(2))
    torch.testing.assert_close(X, data[0][:2])


def test_priors_stand_in_the_program_and_nuts_runs_on_it(frame: Any) -> None:
    model, data = mixed("y ~ x + (1 | g)", frame, priors={"b": "Normal(0, [10, 1])", "sd": "HalfNormal(1.0)"})
    assert (
        'pyro.sample("b", dist.Normal(X.new_tensor(0), X.new_tensor([10, 1])).expand([2]).to_event(1))' in model.source
    )
    assert 'pyro.sample("sd_g", dist.HalfNormal(X.new_tensor(1.0)))' in model.source
    assert 'pyro.param("sigma"' in model.source
    weak, data = mixed("y ~ x + (x | g)", frame, priors="weak")
    assert "pyro.param" not in weak.source
    mcmc = MCMC(NUTS(weak, max_tree_depth=3), num_samples=3, warmup_steps=3, disable_progbar=True)
    mcmc.run(*data)
    assert set(mcmc.get_samples()) == {"b", "sd_g", "L_g", "u_g", "sigma"}


def test_a_model_can_be_kept(frame: Any, tmp_path: Path) -> None:
    model, data = mixed("y ~ x + (x | g)", frame)
    again = pickle.loads(pickle.dumps(model))
    assert all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(again.arguments(frame), data, strict=False)
    )
    found = fit(again, data)
    found.save(tmp_path / "fit")
    assert float(LaplacePosterior.load(tmp_path / "fit", model).log_evidence) == float(found.log_evidence)


def test_weights_are_rows_that_stand_as_often(frame: Any) -> None:
    counts = frame.assign(n=1 + np.arange(ROWS) % 3)
    model, data = mixed("hits ~ x + (1 | g); sigma ~ x", counts, weights="n")
    again, same = mixed("hits ~ x + (1 | g); sigma ~ x", counts.loc[counts.index.repeat(counts.n)])
    found, expected = fit(model, data), fit(again, same)
    assert float(found.log_evidence) == pytest.approx(float(expected.log_evidence), abs=1e-6)
    torch.testing.assert_close(found.predict(frame.head(3)), expected.predict(frame.head(3)), rtol=1e-4, atol=0.0)


MESSAGES = [
    ({"weights": "absent"}, "frame has no column 'absent'"),
    ({"weights": "y"}, "weights='y': expected above 0"),
    ({"weights": "kind"}, "words or times"),
    ({"formula": "y - x"}, 'expected "response ~ fixed terms'),
    ({"formula": "y ~ (x | g"}, "lacks a side or a bracket"),
    ({"formula": "y ~ x | g"}, "has a bar outside of brackets"),
    ({"formula": "y ~ x + ( | g)"}, 'expected "response ~ fixed terms'),
    ({"formula": "y ~ x + (1 | log(t))"}, "expected names of columns joined by"),
    ({"formula": "y ~ x + (1 | nobody)"}, "frame has no column 'nobody'"),
    ({"formula": "absent ~ x"}, "frame has no column 'absent', expected by the formula; it has"),
    ({"formula": "y ~ nothing + (1 | g)"}, "'nothing' cannot be made into columns"),
    ({"formula": "y ~ x h"}, "'x h' cannot be read from 'h' on"),
    ({"formula": "y ~ x, h"}, "'x, h' cannot be read from ',' on"),
    ({"formula": "y ~ h + x % 2"}, "cannot be read from '%' on"),
    ({"formula": "y ~ (x h | g)"}, "'x h' cannot be read from 'h' on"),
    ({"formula": "y['a'] ~ x"}, "has 'y'; expected columns"),
    ({"formula": "y ~ x + (0 | g)"}, "has nothing that varies"),
    ({"formula": "kind ~ x + (1 | g)"}, "the response holds words"),
    ({"family": "tweedie"}, "expected one of"),
    ({"family": "Poisson", "link": "logit"}, r"link='logit' of family='Poisson'; expected one of \['log', 'identity'"),
    ({"family": "gamma"}, "expected above 0"),
    ({"family": "beta", "formula": "t ~ x"}, "expected below 1"),
    ({"family": "truncated_poisson", "formula": "k ~ x"}, "expected whole, from 1"),
    ({"formula": "y ~ x; zi ~ x"}, "a formula for zi in a model of family 'gaussian'; expected one for sigma"),
    ({"formula": "k ~ x; zi ~ x; hurdle ~ x", "family": "poisson"}, "not both of the last two"),
    ({"formula": "kind ~ x; sigma ~ x", "family": "categorical"}, "expected one for the response alone"),
    ({"formula": "y ~ x; sigma"}, 'expected "response ~ fixed terms'),
    ({"formula": "y ~ x; sigma ~ x; sigma ~ x"}, "each time another parameter"),
    ({"family": "binomial"}, r"expected prop\(successes, trials\)"),
    ({"family": "poisson"}, "expected whole, from 0"),
    ({"family": "bernoulli", "formula": "kind ~ x"}, "of two values, or named"),
    ({"family": "bernoulli", "formula": "kind['z'] ~ x"}, "has no class 'z'"),
    ({"priors": "strong"}, "'weak' or None"),
    ({"priors": {"tau": "Normal(0, 1)"}}, "has an entry 'tau'; expected one of"),
    ({"priors": {"b": "Normal(0, x)"}}, "its arguments are not numbers"),
    ({"priors": {"b": "Gauss(0, 1)"}}, "Gauss is none of the distributions"),
    ({"priors": {"b": "0"}}, 'such as "Normal'),
    ({"priors": {"sd": "flat"}}, "expected it for b only"),
]


@pytest.mark.parametrize(("settings", "said"), MESSAGES, ids=[str(s) for s, _ in MESSAGES])
def test_letters(frame: Any, settings: dict[str, Any], said: str) -> None:
    formula = settings.get("formula", "y ~ x + (1 | g)")
    with pytest.raises(BadInput, match=said):
        mixed(formula, frame, **{k: v for k, v in settings.items() if k != "formula"})


@pytest.mark.parametrize("own", [*FAMILIES, *OTHER_NAMES])
def test_names_of_families_are_those_of_whoever_writes_them(own: str) -> None:
    for written in (own, own.upper(), own.replace(" ", "_"), own.replace(" ", "-"), own.replace(" ", "")):
        assert chosen_family(written)[0] == OTHER_NAMES.get(own, own)


def test_words_of_a_family_may_stand_apart() -> None:
    assert (chosen_family("log-normal")[0], chosen_family("Log_Logistic")[0]) == ("lognormal", "loglogistic")


def test_a_class_that_is_named_is_the_one_that_counts(frame: Any) -> None:
    _, (*_, y) = mixed("kind['b'] ~ x", frame, family="bernoulli")
    np.testing.assert_array_equal(y.numpy(), frame.kind == "b")


def test_rows_without_numbers_of_trials_are_of_one(frame: Any) -> None:
    chances = []
    for response, both in (("prop(hits, tries)", ["tries"]), ("cbind(hits, tries - hits)", ["hits", "tries"])):
        model, data = mixed(f"{response} ~ x + (1 | g)", frame, family="binomial")
        posterior = LaplaceEvidence(model, stop=Stop(progress=False)).run(*data)
        chances.append(posterior.predict(frame[["x", "g"]]))
        whole = posterior.predict(frame[["x", "g", *both]])
        torch.testing.assert_close(whole, chances[-1] * torch.tensor(frame.tries.to_numpy()))
    torch.testing.assert_close(*chances)
    with pytest.raises(BadInput, match="no column 'tries'"):
        posterior.predict(frame[["x", "g", "hits"]])


def test_predictive_draws_where_coefficients_stand_outside_of_plates(frame: Any) -> None:
    """Predictive gives them a dim for the plate of the groups."""
    model, data = mixed("y ~ x + (1 | g)", frame, priors="weak")
    posterior = LaplaceEvidence(model, stop=Stop(progress=False)).run(*data)
    draws = Predictive(posterior.model, guide=posterior.guide, num_samples=60)(*data[:-1])
    away = draws["y"].mean(0) - posterior.predict(frame)
    assert draws["y"].shape == (60, len(frame)) and float(away.abs().max()) < 4.5 * 0.8 / 60**0.5


def test_what_is_no_frame_is_refused(frame: Any) -> None:
    with pytest.raises(BadInput, match=r"frame is a dict; expected a pandas\.DataFrame"):
        mixed("y ~ x", {"y": [1.0], "x": [1.0]})
    model, _ = mixed("y ~ x + h + (1 | g)", frame)
    with pytest.raises(BadInput, match="frame has no column 'g', expected by the formula"):
        model.arguments(frame[["x", "h"]])
    with pytest.raises(BadInput, match=r"frame is a list; expected a pandas\.DataFrame"):
        model.arguments([1.0, 2.0])
    with pytest.raises(BadInput, match="with levels that the fit has seen"):
        model.arguments(frame.head(1).assign(h="never seen"))
    with pytest.raises(BadInput, match="convert string to float: 'word'"):
        model.arguments(frame.head(1).assign(x="word"))


def test_columns_in_the_other_byte_order_are_the_same_columns(frame: Any) -> None:
    other = frame.assign(**{c: frame[c].to_numpy().astype(frame[c].dtype.newbyteorder("S")) for c in ("y", "x")})
    other["g"] = np.asarray(frame["g"].factorize()[0]).astype(">i4")
    assert not other["g"].dtype.isnative and not other["y"].dtype.isnative
    model, data = mixed("y ~ x + (1 | g)", other)
    _, expected = mixed("y ~ x + (1 | g)", frame.assign(g=frame["g"].factorize()[0]))
    for found, there in zip(data, expected, strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(there))
    for found, there in zip(model.arguments(other), expected, strict=False):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(there))


@pytest.mark.parametrize("column", ["y", "x", "g"])
@pytest.mark.parametrize("numbers", [np.ones(3) + 1j, np.zeros(3, [("a", float)]), np.zeros(3, "V4")], ids=str)
def test_columns_without_real_numbers_are_refused(column: str, numbers: Any) -> None:
    given = {"y": [1.0, 2.0, 4.0], "x": [0.0, 1.0, 0.0], "g": [0, 1, 1]}
    frame = pandas.DataFrame(given | {column: numbers})
    with pytest.raises(BadInput, match=f"column '{column}' of the frame holds"):
        mixed("y ~ x + (1 | g)", frame)


def test_a_name_that_two_columns_have_is_refused(frame: Any) -> None:
    with pytest.raises(BadInput, match="several columns 'x'"):
        mixed("y ~ x", pandas.concat([frame, frame[["x"]]], axis=1))


@pytest.mark.parametrize("formula", ["y ~ Intercept + (1 | g)", "y ~ x + (Intercept | g)", "Intercept ~ x + (1 | g)"])
def test_a_column_is_not_taken_for_the_constant(frame: Any, formula: str) -> None:
    with pytest.raises(BadInput, match="Rename it"):
        mixed(formula, frame.assign(Intercept=frame["x"]))


def test_times_are_no_response(frame: Any) -> None:
    with pytest.raises(BadInput, match=r"words or times \('19.*by a unit"):
        mixed("y ~ x", frame.assign(y=pandas.to_datetime(frame["y"], unit="s")))


def test_ordered_grades_have_the_cutpoints_of_cumulative_logits() -> None:
    """Without covariates the cutpoints are the logits of the cumulated shares; a shift has the score of its formula."""
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"x": rng.normal(size=400), "g": rng.integers(0, 20, 400)})
    latent = 1.2 * frame.x + (0.7 * rng.normal(size=20))[frame.g] + rng.logistic(size=400)
    frame["grade"] = np.digitize(latent, [-1.0, 0.5, 2.0])
    model, data = mixed("grade ~ 1", frame, family="ordinal")
    found = fit(model, data)
    share = torch.tensor((frame.grade.value_counts(sort=False).sort_index() / 400).to_list())
    torch.testing.assert_close(found.hyperparameters["cutpoints"], share.cumsum(0)[:-1].logit(), rtol=1e-4, atol=1e-5)
    assert float(found.log_evidence) == pytest.approx(400.0 * float((share * share.log()).sum()), abs=1e-6)
    model, data = mixed("grade ~ x + (1 | g)", frame, family="cumulative")
    found = fit(model, data)
    rows = found.table().rows
    for label, truth in {"b[x]": 1.2, "cutpoints[0|1]": -1.0, "cutpoints[1|2]": 0.5, "cutpoints[2|3]": 2.0}.items():
        row = rows[label]
        assert row["5%"] - row["sd"] < truth < row["95%"] + row["sd"]
        assert row["95%"] - row["5%"] == pytest.approx(3.29 * row["sd"], rel=1e-2)
    assert found.predict(frame.head(3)).shape == (3, 4)


def test_a_grade_that_no_row_has_is_refused() -> None:
    """Its cutpoint would be at infinity."""
    column = pandas.Categorical(list("abab"), list("abc"), ordered=True)
    with pytest.raises(BadInput, match="no row has the grade 'c'"):
        mixed("y ~ 1", pandas.DataFrame({"y": column}), family="ordinal")
    mixed("y ~ 1", pandas.DataFrame({"y": column.remove_unused_categories()}), family="ordinal")


def test_cutpoints_with_a_prior_are_integrated() -> None:
    """The first and the log of the difference are normal: the evidence of a grid."""
    counts = torch.tensor([12, 20, 8])
    model, data = mixed("y ~ 1", pandas.DataFrame({"y": np.repeat(range(3), counts)}), family="ordinal", priors="weak")
    first, difference = torch.meshgrid(torch.linspace(-8, 8, 801), torch.linspace(-8, 8, 801), indexing="ij")
    below = torch.stack([first, first + difference.exp()]).double().sigmoid()
    shares = torch.stack([below[0], below[1] - below[0], 1.0 - below[1]])
    prior = dist.Normal(0.0, 2.5).log_prob(first) + dist.Normal(0.0, 1.5).log_prob(difference)
    joint = torch.einsum("k,kij->ij", counts.double(), shares.log()) + prior
    expected = float(joint.flatten().logsumexp(0)) + 2.0 * math.log(0.02)
    assert float(fit(model, data).log_evidence) == pytest.approx(expected, abs=0.02)


if __name__ == "__main__":
    sys.stdout.write(f"{families()}\n")
