"""Fixed effects, effects of groups and variances of a formula's model; predictions for a frame."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pyro_evidence import BadInput, LaplaceEvidence, LaplacePosterior, Stop, to_inference_data
from pyro_evidence.compare.to_arviz import arviz_groups

pytest.importorskip("formulae")
import pandas

from pyro_evidence.models.formula import mixed
from pyro_evidence.structure.names import as_written


def fitted(formula: str, frame: Any, **settings: Any) -> LaplacePosterior:
    model, data = mixed(formula, frame, **settings)
    return LaplaceEvidence(model, stop=Stop(progress=False)).run(*data)


@pytest.fixture(scope="module")
def sleep(data_dir: Path) -> Any:
    return pandas.read_csv(data_dir / "sleepstudy.csv")


@pytest.fixture(scope="module")
def slopes(sleep: Any) -> LaplacePosterior:
    return fitted("Reaction ~ Days + (Days | Subject)", sleep)


def test_effects_are_those_of_lme4(slopes: LaplacePosterior) -> None:
    """lme4 1.1-31, ``ranef`` of a fit by maximum likelihood with the conditional standard deviations."""
    rows = slopes.effects("Subject").rows
    assert list(rows["308"].values()) == pytest.approx([2.815789, 11.872864, 9.075507, 2.271065], abs=2e-3)
    assert len(rows) == 18 and list(rows["372"]) == ["Intercept", "Intercept, sd", "Days", "Days, sd"]


def test_fixed_effects_and_variances_share_the_table(slopes: LaplacePosterior) -> None:
    fixed, variances, every = slopes.fixed().rows, slopes.variances().rows, slopes.table().rows
    assert list(fixed) == ["b[Intercept]", "b[Days]"]
    assert list(variances) == [
        "sd_Subject[Intercept]",
        "sd_Subject[Days]",
        "cor(Intercept, Days) of Subject",
        "sigma",
    ]
    assert all(every[label]["sd"] == row["sd"] for label, row in (fixed | variances).items())
    assert {*every} - {*fixed} - {*variances} == {label for label in every if label.startswith("u_Subject[")}


def test_parameters_with_formulas_have_effects_of_their_own(sleep: Any) -> None:
    found = fitted("Reaction ~ Days + (1 | Subject); sigma ~ Days + (1 | Subject)", sleep)
    assert list(found.fixed().rows) == ["b[Intercept]", "b[Days]", "b_sigma[Intercept]", "b_sigma[Days]"]
    assert list(found.effects("Subject_sigma").rows["308"]) == ["Intercept", "Intercept, sd"]
    with pytest.raises(BadInput, match=r"expected one of \['Subject', 'Subject_sigma'\], the groupings"):
        found.effects("Days")


def test_levels_may_have_commas_and_brackets() -> None:
    frame = pandas.DataFrame({"y": [1.0, 2.0, 1.5, 4.0, 5.0, 4.5], "g": ["a, b"] * 3 + ["c[1]: d"] * 3})
    assert list(fitted("y ~ 1 + (1 | g)", frame).effects("g").rows) == ["a, b", "c[1]: d"]


def test_a_frame_is_what_the_models_arguments_are_made_of(slopes: LaplacePosterior) -> None:
    new = pandas.DataFrame({"Subject": [308, 308, 999], "Days": [0.0, 9.0, 9.0]})
    mean, sd = slopes.predict(new, return_std=True)
    expected = slopes.predict(*as_written(slopes._joint.model).arguments(new), return_std=True)
    assert torch.equal(mean, expected[0]) and torch.equal(sd, expected[1])
    assert float(mean[2]) == pytest.approx(251.405 + 9.0 * 10.467, abs=2e-2)  # a new subject: the fixed effects alone
    assert slopes.predict(new, quantiles=[0.1, 0.9]).shape == (2, 3)


def test_trials_are_found_where_the_frame_has_them(data_dir: Path) -> None:
    frame = pandas.read_csv(data_dir / "cbpp.csv")
    found = fitted("cbind(incidence, size - incidence) ~ C(period) + (1 | herd)", frame, family="binomial")
    mean = found.predict(frame)
    assert mean.shape == (len(frame),) and float(mean.sum()) == pytest.approx(float(frame.incidence.sum()), rel=0.05)
    *arguments, ones = as_written(found._joint.model).arguments(frame.drop(columns=["size", "incidence"]))
    assert torch.equal(ones, torch.ones(len(frame)))
    assert torch.equal(mean, found.predict(*arguments, torch.tensor(frame["size"].to_list()).double()))


def test_other_models_have_a_table_only() -> None:
    import pyro
    import pyro.distributions as dist

    def model(y: torch.Tensor) -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    found = LaplaceEvidence(model, stop=Stop(progress=False)).run(torch.ones(3))
    with pytest.raises(BadInput, match=r"table\(\) has the rows of any model"):
        found.fixed()


def headed(capsys: pytest.CaptureFixture[str], found: LaplacePosterior) -> list[str]:
    found.summary(check=False)
    return capsys.readouterr().out.splitlines()[:4]


def test_a_summary_says_what_was_fitted(
    sleep: Any, slopes: LaplacePosterior, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third, blank = headed(capsys, slopes)
    assert first == "Reaction ~ Days + (Days | Subject)   (gaussian, identity link; maximum likelihood)"
    assert second == "180 rows; 18 Subject" and third.startswith("fitted in ") and blank == ""
    gaps = sleep.assign(Reaction=sleep.Reaction.where(sleep.index > 2))
    restricted = fitted("Reaction ~ Days + (1 | Subject); sigma ~ 1", gaps, priors={"b": "flat"})
    first, second, *_ = headed(capsys, restricted)
    assert "restricted maximum likelihood" in first and second == "177 rows, 3 more left out; 18 Subject"
    first, *_ = headed(capsys, fitted("Reaction ~ Days", sleep, priors="weak"))
    assert first.endswith("(gaussian, identity link; Bayes)")


def test_a_picture_has_a_figure_of_its_own(slopes: LaplacePosterior) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    first, second = slopes.plot(), slopes.plot()
    assert first.figure is not second.figure
    assert slopes.plot(first) is first
    plt.close("all")


def test_fixed_effects_are_in_the_groups_for_arviz(slopes: LaplacePosterior) -> None:
    """Four chains of draws around the maximum, with the standard deviations of the table."""
    drawn = arviz_groups(slopes, num_samples=4000)["posterior"]
    assert set(drawn) == {"u_Subject", "L_Subject", "b", "sd_Subject", "sigma"}
    assert drawn["b"].shape == (4, 1000, 2)
    moments, spread = drawn["b"].reshape(4000, -1), slopes.hyperparameter_covariance().sd["b"].numpy()
    assert (abs(moments.mean(0) - slopes.hyperparameters["b"].numpy()) < 4.0 * spread / 4000**0.5).all()
    assert moments.std(0) == pytest.approx(spread, rel=0.05)
    assert (drawn["sd_Subject"] > 0.0).all()


def test_arviz_has_the_names_of_a_formula(slopes: LaplacePosterior) -> None:
    arviz = pytest.importorskip("arviz")
    if not hasattr(arviz, "InferenceData"):
        pytest.skip("ArviZ 1.x")
    found = to_inference_data(slopes, num_samples=400)
    assert list(arviz.summary(found, var_names=["b"]).index) == ["b[Intercept]", "b[Days]"]
