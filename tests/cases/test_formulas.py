"""Data frames and formulas of other people: names and levels that look like code, that collide, or that are new."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pytest
import torch

from pyro_evidence import BadInput, LaplaceEvidence, Stop, compare_evidence
from pyro_evidence.models.formula import mixed
from pyro_evidence.program.log_joint import LogJoint
from tests.cases.expect import reached, refusal, says

QUIET = Stop(progress=False)
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, generator=GENERATOR, dtype=torch.float64)
Y = X + 0.3 * torch.randn(60, generator=GENERATOR, dtype=torch.float64)
KINDS = torch.randint(0, 4, (60,), generator=GENERATOR).tolist()


def table(**columns: object) -> pd.DataFrame:
    """Sixty rows: a response y, a covariate x, six groups g, and further columns."""
    return pd.DataFrame({"y": Y.numpy(), "x": X.numpy(), "g": [f"g{i % 6}" for i in range(60)]} | columns)


def evidence(formula: str, frame: pd.DataFrame, **settings: object) -> float:
    model, args = mixed(formula, frame, **settings)  # type: ignore[arg-type]
    return float(LaplaceEvidence(model, stop=QUIET).run(*args).log_evidence)


@cache
def usual() -> float:
    return evidence("y ~ x + (1 | g)", table())


# --- what looks like code ---


def test_a_level_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    levels = ["a", "b\n    __import__('os').mkdir('executed')#"] * 30
    model, args = mixed("y ~ c", table(c=levels))
    model(*args)
    reached(args[0].shape == (60, 2), "the level has no column of its own")
    assert not list(tmp_path.iterdir())


def test_the_name_of_a_column_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "x\n    __import__('os').mkdir('executed')#"
    try:
        model, args = mixed(f"y ~ `{name}`", table(**{name: X.numpy()}))
        model(*args)
        reached(args[0].shape == (60, 2), "the column is not in the design")
    except BadInput as error:  # or the name is refused, and said
        reached("mkdir('executed')" in str(error), "refused for another reason")
    assert not list(tmp_path.iterdir())


def test_a_line_break_inside_a_term_is_a_blank() -> None:
    """The same latents, and the same density at a place that is no other's."""
    joints = [LogJoint(*mixed(f"y ~ x + (1 +{blank}x | g)", table())) for blank in ("\n ", " ")]
    assert joints[0].latents.names == joints[1].latents.names
    u = torch.linspace(-0.5, 0.7, joints[0].latents.size)
    assert float(joints[0].log_joint(u, joints[0].initial_theta)) == float(
        joints[1].log_joint(u, joints[1].initial_theta)
    )


# --- names that collide: the evidence does not depend on what things are called ---


def test_classes_may_have_numbers_for_names() -> None:
    numbers, words = (
        evidence("k ~ x", table(k=[names[i] for i in KINDS]), family="categorical")
        for names in ([-2, -1, 1, 2], ["a", "b", "c", "d"])
    )
    assert numbers == pytest.approx(words, abs=1e-6)


@pytest.mark.parametrize(
    "names",
    [
        ["", " ", "a", "b"],
        ["\u00e9", "\u00e8", "\u65e5", "e"],
        ["\ufb01", "fi", "x", "y"],  # equal to Python's names, once they are normalised
        ["1", "01", "1.0", "a"],
        ["a b", "a_b", "a.b", "a-b"],
        ["None", "nan", "NaN", "none"],
        [0.5, 1.5, -1.5, 2.5],
        [True, False, 2, 3],
    ],
)
def test_classes_may_have_any_names(names: list[object]) -> None:
    found = evidence("k ~ x", table(k=[names[i] for i in KINDS]), family="categorical")
    assert found == pytest.approx(evidence("k ~ x", table(k=KINDS), family="categorical"), abs=1e-6)
    levels = mixed("y ~ x + (1 | k)", table(k=[str(names[i]) for i in KINDS]))[1][2]
    assert levels == 4


@pytest.mark.parametrize("formula", ["y ~ x + (1 | k)", "k ~ x"])
def test_numbers_beside_the_same_as_words_are_refused(formula: str) -> None:
    frame, family = table(k=[1, "1"] * 30), "categorical" if formula[0] == "k" else "gaussian"
    says(refusal(lambda: mixed(formula, frame, family=family)), "several types", "astype(str)")
    mixed(formula, frame.assign(k=["one", "two"] * 30), family=family)


def test_levels_may_hold_a_colon() -> None:
    """Two groups of thirty rows, whose joined names are equal: 'a:b' with 'c', and 'a' with 'b:c'."""
    ambiguous = table(p=["a:b", "a"] * 30, q=["c", "b:c"] * 30)
    plain = table(p=["a", "b"] * 30, q=["c", "d"] * 30)
    assert mixed("y ~ x + (1 | p:q)", plain)[1][2] == 2
    assert mixed("y ~ x + (1 | p:q)", ambiguous)[1][2] == 2


@pytest.mark.parametrize(
    "name",
    [
        "u",
        "sd_g",
        "len",
        "scale",
        "sigma",
        "dist",
        "torch",
    ],
)
def test_a_response_may_have_any_name(name: str) -> None:
    found = evidence(f"{name} ~ x + (1 | g)", table().rename(columns={"y": name}))
    assert found == pytest.approx(usual(), abs=1e-8)


@pytest.mark.parametrize("name", ["u", "len", "scale"])
def test_a_group_may_have_any_name(name: str) -> None:
    found = evidence(f"y ~ x + (1 | {name})", table().rename(columns={"g": name}))
    assert found == pytest.approx(usual(), abs=1e-8)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("coefficient", "y ~ x + (1 | {})"),
        ("threshold", "y ~ x + (1 | {})"),
        ("coefficient_sigma", "y ~ x + (1 | {}); sigma ~ x"),
        ("X", "y ~ x + (1 | {0}); sigma ~ x + (1 | {0})"),
        ("h_effect", "y ~ x + (x | h) + (1 | {})"),
    ],
)
def test_a_group_leaves_the_names_of_others_alone(name: str, formula: str) -> None:
    """What the elements of params and sites are called, in the order of the program, is as beside a group called g."""
    frame = table(h=[f"h{i % 5}" for i in range(60)])
    found, expected = (mixed(formula.format(n), frame.rename(columns={"g": n}))[0] for n in (name, "g"))
    assert [*found.coords.values()] == [*expected.coords.values()]
    assert len(found.__signature__.parameters) == len(expected.__signature__.parameters)


def test_a_column_called_true_is_no_constant() -> None:
    frame = table().rename(columns={"x": "True"})
    says(refusal(lambda: mixed("y ~ True + (1 | g)", frame)), "no name in a formula", "`True`")
    assert evidence("y ~ `True` + (1 | g)", frame) == pytest.approx(usual(), abs=1e-8)


def test_groups_are_known_where_a_gap_has_made_their_numbers_floats() -> None:
    frame = table(g=[i % 6 for i in range(60)])
    model, _ = mixed("y ~ x + (1 | g)", frame)
    _, here, num = model.arguments(frame.astype({"g": float}))
    assert num == 6 and here.tolist() == [i % 6 for i in range(60)]


def test_whole_numbers_that_doubles_would_round_are_refused_but_as_labels() -> None:
    """They were rounded, in silence."""
    frame = table(x=2**53 + np.arange(1, 61))
    says(refusal(lambda: mixed("y ~ x", frame)), "column 'x'", "would round", "astype(str)")
    assert len(mixed("y ~ 1 + (1 | x)", frame)[0].coords["x"]) == 60
    long = np.arange(1.0, 61.0).astype(np.longdouble)
    assert mixed("y ~ x", table(x=long))[0] is not None
    if np.longdouble(1) / 3 != np.float64(1) / 3:  # where it is longer than a double
        says(refusal(lambda: mixed("y ~ x", table(x=long / 3))), "float64 would change")


def test_a_response_called_u_with_a_group_for_each_row() -> None:
    """Effects and response have one shape, so that the collision is no error of shapes; the density is another."""
    frame = table(g=[str(i) for i in range(60)])
    densities = []
    for name in ("w", "u"):
        model, args = mixed(f"{name} ~ x + (1 | g)", frame.rename(columns={"y": name}), priors="weak")
        pyro.set_rng_seed(0)
        densities.append(float(pyro.poutine.trace(model).get_trace(*args).log_prob_sum()))
    assert densities[0] == pytest.approx(densities[1])


# --- a group that was not in the fit ---


@pytest.fixture(scope="module")
def sleep(data_dir) -> tuple[object, object, object]:
    """A fit of reaction times, its model, and the arguments of two rows of a new subject, of days 0 and 9."""
    torch.set_default_dtype(torch.float64)
    frame = pd.read_csv(data_dir / "sleepstudy.csv")
    model, args = mixed("Reaction ~ Days + (Days | Subject)", frame)
    posterior = LaplaceEvidence(model, stop=QUIET).run(*args)
    new = pd.DataFrame({"Days": [0.0, 9.0], "Subject": ["somebody", "somebody"]})
    return posterior, model, model.arguments(new)


def test_the_mean_of_a_new_group_is_that_of_the_fixed_effects(sleep) -> None:
    """Their effects have mean zero: 251.405 + 10.467 days, the coefficients of lme4 for this table."""
    posterior, _, new = sleep
    mean = posterior.predict(*new, seed=0)
    torch.testing.assert_close(mean, torch.tensor([251.405, 251.405 + 9 * 10.467]), rtol=0, atol=0.01)


def test_a_prediction_for_a_new_group_depends_on_the_seed_alone(sleep) -> None:
    posterior, _, new = sleep
    means = []
    for state in (1, 5):
        torch.manual_seed(state)
        means.append(posterior.predict(*new, seed=0))
    assert torch.equal(*means)


def test_quantiles_of_a_new_group_are_those_of_the_normal(sleep) -> None:
    """At given params Reaction is Normal: its variance is the noise's and z' S z, z = (1, days), S of lme4.

    S has standard deviations 23.781 and 5.717 and correlation .081, the noise 25.592 (maximum likelihood); the
    estimated fixed effects add to it: standard errors 6.632 and 1.502, correlation -.138.
    """
    posterior, _, new = sleep
    low, high = posterior.predict(*new, quantiles=[0.05, 0.95])
    z = torch.tensor([[1.0, 0.0], [1.0, 9.0]])
    of_groups = torch.tensor([[23.781**2, 0.081 * 23.781 * 5.717], [0.081 * 23.781 * 5.717, 5.717**2]])
    of_means = torch.tensor([[6.632**2, -0.138 * 6.632 * 1.502], [-0.138 * 6.632 * 1.502, 1.502**2]])
    variance = 25.592**2 + ((z @ (of_groups + of_means)) * z).sum(-1)
    torch.testing.assert_close((high - low) / 2, 1.6449 * variance.sqrt(), rtol=0.05, atol=0.0)


@cache
def of_few_steps(random: str) -> tuple[Any, Any]:
    model, args = mixed(f"y ~ x + {random}", table())
    return model, LaplaceEvidence(model, stop=Stop(num_steps=5, throw=False, progress=False)).run(*args)


@pytest.mark.filterwarnings("ignore:LaplaceEvidence. ran out of steps:UserWarning")
@pytest.mark.parametrize("random", ["(1 | g)", "(x || g)", "(x | g)"])
@pytest.mark.parametrize("num_samples", [1, 999, 1000])
def test_means_of_known_and_new_groups_in_one_table(random: str, num_samples: int) -> None:
    """Linear predictors: whatever is drawn for the new groups, the means are those of the fixed effects."""
    model, posterior = of_few_steps(random)
    new = model.arguments(pd.DataFrame({"x": [0.0, 1.0, 2.0], "g": ["g0", "new", "newer"]}))
    b, sigma = posterior.hyperparameters["b"], posterior.hyperparameters["sigma"]
    mean, sd = posterior.predict(*new, num_samples=num_samples, return_std=True)
    torch.testing.assert_close(mean[1:], b[0] + b[1] * torch.tensor([1.0, 2.0]), rtol=0.0, atol=1e-9)
    assert bool((sd > 0.999 * sigma).all())


def test_variances_of_new_groups_are_those_of_their_effects() -> None:
    """At maximised params the variance of a new row is that of the noise and of z' u, z = (1, x)."""
    frame = table(y=Y.numpy() + np.repeat(np.arange(6.0), 10), g=np.repeat([f"g{i}" for i in range(6)], 10))
    model, args = mixed("y ~ x + (1 | g)", frame)
    posterior = LaplaceEvidence(model, stop=QUIET).run(*args)
    h = posterior.hyperparameters
    _, sd = posterior.predict(*model.arguments(frame[:1].assign(g="new")), num_samples=20_000, return_std=True)
    variance = h["sd_g"] ** 2 + h["sigma"] ** 2
    reached(float(h["sd_g"]) > 1.0, "the groups do not differ")
    torch.testing.assert_close(sd[0] ** 2, variance.reshape(()), rtol=0.05, atol=0.0)


# --- evidences that cannot be compared ---


def test_maximised_params_are_not_weighed_against_integrated_sites(data_dir) -> None:
    """One formula, once with params and once with priors: their difference says nothing about models."""
    frame = pd.read_csv(data_dir / "sleepstudy.csv")
    fits = {}
    for name, settings in {"maximised": {}, "integrated": {"priors": "weak"}}.items():
        model, args = mixed("Reaction ~ Days + (1 | Subject)", frame, **settings)
        fits[name] = LaplaceEvidence(model, stop=QUIET).run(*args)
    reached(float(fits["maximised"].log_evidence) > float(fits["integrated"].log_evidence), "the fits are not those")
    says(refusal(lambda: compare_evidence(**fits)), "maximised", "integrated", "throw=False")


def test_evidences_under_flat_priors_are_not_compared(data_dir) -> None:
    """REML in days and in hours is one model, and differs by log 24 = 3.178 nats."""
    frame = pd.read_csv(data_dir / "sleepstudy.csv").assign(Hours=lambda f: 24.0 * f["Days"])
    fits = {}
    for unit in ("Days", "Hours"):
        model, args = mixed(f"Reaction ~ {unit} + (1 | Subject)", frame, priors={"b": "flat"})
        fits[unit] = LaplaceEvidence(model, stop=QUIET).run(*args)
    difference = float(fits["Days"].log_evidence - fits["Hours"].log_evidence)
    reached(abs(difference - 3.178) < 0.01, f"the evidences differ by {difference}")
    says(refusal(lambda: compare_evidence(**fits)), "flat", "throw=False")
