"""Groups in order, partial dependence against a formula, new data beside old; every axis has its label."""

import math

import matplotlib.pyplot as plt
import numpy as np
import pandas
import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib.axes import Axes
from torch import Tensor

from pyro_evidence import REVM, RVM, BadInput, LaplaceEvidence, LaplacePosterior, Stop
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.formula import mixed
from pyro_evidence.models.regression import regression
from pyro_evidence.plots import fitted

QUIET = Stop(progress=False)


def groups(group: Tensor, num: int, y: Tensor | None = None) -> None:
    with pyro.plate("groups", num):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(group)):
        pyro.sample("y", dist.Normal(a[group], 0.5), obs=y)


def line(X: Tensor, t: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[1]), 10.0).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Normal(X @ w + X[:, 0] * X[:, 1], 0.1), obs=t)


@pytest.fixture(scope="module")
def grouped() -> LaplacePosterior:
    torch.set_default_dtype(torch.float64)
    group = torch.arange(5).repeat_interleave(4)
    y = torch.tensor([2.0, -1.0, 0.0, 1.0, -2.0])[group] + 0.1 * torch.sin(torch.arange(20.0))
    return LaplaceEvidence(groups, stop=QUIET).run(group, 5, y)


@pytest.fixture
def axes() -> Axes:
    figure, axes = plt.subplots()
    yield axes
    assert axes.get_xlabel()
    plt.close(figure)


def labels(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def test_groups_stand_in_the_order_of_their_means(axes: Axes, grouped: LaplacePosterior) -> None:
    fitted.caterpillar(axes, grouped, site="a")
    assert labels(axes) == ["a[4]", "a[1]", "a[2]", "a[3]", "a[0]"]
    points = axes.lines[0].get_xdata()
    assert list(points) == pytest.approx(sorted(grouped.mode["a"].tolist()))
    ends = axes.collections[0].get_segments()[0][:, 0]
    sd = (1.0 / (1.0 + 4.0 / 0.25)) ** 0.5  # closed form
    assert ends[1] - ends[0] == pytest.approx(2.0 * 1.6448536 * sd)


def test_of_many_groups_the_ends_are_drawn(axes: Axes, grouped: LaplacePosterior) -> None:
    fitted.caterpillar(axes, grouped, site="a", most=2)
    assert labels(axes) == ["a[4]", "a[0]"]


def test_a_site_that_is_none_is_named(axes: Axes, grouped: LaplacePosterior) -> None:
    axes.set_xlabel("nothing drawn")
    with pytest.raises(BadInput, match="site='b'; expected a latent site"):
        fitted.caterpillar(axes, grouped, site="b")
    with pytest.raises(BadInput, match="site='b'; expected one of the observed sites: y"):
        fitted.predictive_check(axes, grouped, site="b")


def test_pictures_of_a_formula_know_its_columns_and_effects(axes: Axes) -> None:
    x, g = np.tile(np.arange(4.0), 6), np.repeat(np.arange(6), 4)
    frame = pandas.DataFrame(
        {"x": x, "g": g, "y": 1.0 + 2.0 * x + np.sin(7.0 * g) * x + np.cos(5.0 * g) + np.sin(9.0 * x * g)}
    )
    model, data = mixed("y ~ x + (x | g)", frame)
    posterior = LaplaceEvidence(model, stop=QUIET).run(*data)
    fitted.partial_dependence(axes, posterior, frame, column="x", num_points=2)
    ends = [float(posterior.predict(frame.assign(x=end)).mean()) for end in (0.0, 3.0)]
    assert list(axes.lines[-1].get_ydata()) == pytest.approx(ends) and axes.get_xlabel() == "x"
    fitted.caterpillar(axes, posterior, site="u_g", effect="x")
    order = posterior.mode["u_g"][:, 1].argsort().tolist()
    assert labels(axes) == [f"u_g[{group}, x]" for group in order]
    with pytest.raises(BadInput, match=r"effect='z' of 'u_g'; expected one of \['Intercept', 'x'\]"):
        fitted.caterpillar(axes, posterior, site="u_g", effect="z")


def test_partial_dependence_is_the_formula_averaged_over_rows(axes: Axes) -> None:
    X = torch.stack([torch.linspace(-1.0, 1.0, 30), torch.cos(torch.arange(30.0))], -1)
    w = torch.tensor([1.0, -2.0])
    posterior = LaplaceEvidence(line, stop=QUIET).run(X, X @ w + X[:, 0] * X[:, 1])
    fitted.partial_dependence(axes, posterior, X, column=0, num_points=3)
    x, y = axes.lines[0].get_data()
    expected = [v * 1.0 + float((-2.0 * X[:, 1] + v * X[:, 1]).mean()) for v in (-1.0, 0.0, 1.0)]
    assert list(x) == [-1.0, 0.0, 1.0] and list(y) == pytest.approx(expected, abs=0.02)
    assert axes.get_ylabel() and axes.get_xlabel() == "input 0"
    with pytest.raises(BadInput, match=r"column=2; expected one of \[0, 1\]"):
        fitted.partial_dependence(axes, posterior, X, column=2)


def test_average_predictions_are_the_regression_line_and_its_band(axes: Axes) -> None:  # oracle: least squares
    x = np.linspace(1.0, 3.0, 12)
    frame = pandas.DataFrame({"x": x, "g": list("ab") * 6, "y": 2.0 * x + np.cos(5.0 * x)})
    model, data = mixed("y ~ x + g", frame, priors={"b": "flat"})
    posterior = LaplaceEvidence(model, stop=QUIET).run(*data)
    fitted.average_predictions(axes, posterior, column="x", by="g")
    X = np.stack([np.ones(12), x, frame.g == "b"], 1)
    b, (squares,), *_ = np.linalg.lstsq(X, frame.y, rcond=None)
    at = np.array([1.0, 3.0, 1.0])  # the last point of group b's line
    sd = (squares / 9.0 * at @ np.linalg.inv(X.T @ X) @ at) ** 0.5
    assert [line.get_label() for line in axes.lines] == ["g[a]", "g[b]"] and axes.get_xlabel() == "x"
    assert axes.lines[1].get_xdata()[-1] == 3.0 and axes.lines[1].get_ydata()[-1] == pytest.approx(at @ b)
    top = axes.collections[1].get_datalim(axes.transData).y1
    assert top == pytest.approx(at @ b + 1.6448536 * sd, rel=1e-4)
    with pytest.raises(BadInput, match="'z' is no column of"):
        fitted.average_predictions(axes, posterior, column="z")


def test_average_predictions_of_a_factor_are_intervals(axes: Axes) -> None:
    frame = pandas.DataFrame({"g": list("abc") * 5, "y": np.arange(15.0) % 7.0})
    model, data = mixed("y ~ g", frame, priors={"b": "flat"})
    fitted.average_predictions(axes, LaplaceEvidence(model, stop=QUIET).run(*data), column="g")
    assert labels(axes) == ["g[a]", "g[b]", "g[c]"]
    assert list(axes.lines[-1].get_xdata()) == pytest.approx(list(frame.groupby("g").y.mean()))


def test_data_that_the_model_can_make_lie_in_the_band(axes: Axes, grouped: LaplacePosterior) -> None:
    fitted.predictive_check(axes, grouped)
    seen = axes.lines[0].get_ydata()
    assert sum(seen) == 20.0 and axes.get_ylabel() == "number of data"


def test_every_posterior_draws_its_table(axes: Axes, grouped: LaplacePosterior) -> None:
    assert grouped.plot(axes) is axes
    assert labels(axes) == [f"a[{i}]" for i in range(5)]
    with pytest.raises(BadInput, match="axes is a str; expected matplotlib's Axes first"):
        grouped.plot("axes")
    corrected = grouped.importance_resampled(500).plot(axes)
    assert not math.isnan(corrected.lines[-1].get_xdata()[0])


def test_weights_that_are_kept_have_intervals(axes: Axes) -> None:  # oracle: one weight, conjugate
    X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    found = RVM(regression(Linear(bias=False), beta=4.0)).run(X, 2.0 * X[:, 0] + 0.1 * torch.cos(40.0 * X[:, 0]))
    found.plot(axes, prob=0.95)
    precision = float(found.alpha[0]) + 4.0 * float(X.square().sum())
    (low, high), middle = axes.collections[0].get_segments()[0][:, 0], axes.lines[-1].get_xdata()[0]
    assert (high - low) / 2.0 == pytest.approx(1.959964 / precision**0.5)
    assert middle == pytest.approx((low + high) / 2.0) == pytest.approx(float(found.weights["w"]))
    assert labels(axes) == ["w[0]"] and axes.get_xlabel() == "weight, 95 % interval"


def test_nothing_is_drawn_of_axes_that_are_pruned() -> None:
    wave = torch.linspace(-1.0, 1.0, 40)
    found = REVM(regression(Linear(bias=False), beta=1.0)).run(wave[:, None], 0.01 * wave.square())
    with pytest.raises(BadInput, match="every axis was pruned, so there is nothing to draw"):
        found.plot(plt.gca())
    plt.close("all")
