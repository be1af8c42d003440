"""What is drawn are the posterior's numbers; what cannot be drawn is refused in words."""

import sys

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import BadInput, LaplaceEvidence, LaplacePosterior
from pyro_evidence.display import MARKERS
from pyro_evidence.plots import posterior as plots_posterior


def linear(X: Tensor, t: Tensor) -> None:
    """Linear regression on four inputs; the first two weights share a precision, and so do the others."""
    alpha = pyro.param("alpha", torch.ones(2), constraint=constraints.positive)
    beta = pyro.param("beta", torch.tensor(1.0), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, alpha.repeat_interleave(2).rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, beta.rsqrt()), obs=t)


@pytest.fixture
def posterior() -> LaplacePosterior:
    X = torch.randn(50, 4)
    return LaplaceEvidence(linear).run(X, X @ torch.tensor([1.0, -2.0, 0.1, 0.3]) + 0.5 * torch.randn(50))


@pytest.fixture
def axes() -> Axes:
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def texts(labels: list) -> list[str]:
    return [label.get_text() for label in labels]


def test_bars_are_as_long_as_gamma(axes: Axes, posterior: LaplacePosterior) -> None:
    assert plots_posterior.well_determined(axes, posterior) is axes
    assert [bar.get_width() for bar in axes.patches] == posterior.gamma["alpha"].tolist()
    assert [bar.get_y() + bar.get_height() / 2 for bar in axes.patches] == pytest.approx([0, 1])
    first, second = posterior.hyperparameters["alpha"].tolist()
    assert texts(axes.get_yticklabels()) == [f"alpha[0] = {first:.3g}", f"alpha[1] = {second:.3g}"]
    assert axes.yaxis_inverted()


def test_a_pruned_precision_is_infinite_and_has_an_empty_bar(axes: Axes) -> None:
    X = torch.randn(50, 4)
    X[:, 2:] = 1e-9 * X[:, 2:]
    plots_posterior.well_determined(axes, LaplaceEvidence(linear).run(X, X.sum(-1) + 0.5 * torch.randn(50)))
    assert axes.patches[1].get_width() == 0.0
    assert axes.get_yticklabels()[1].get_text() == "alpha[1] = inf"


def test_no_precision_no_bars(axes: Axes, posterior: LaplacePosterior) -> None:
    fixed = LaplaceEvidence(posterior.model, maximise=()).run(torch.randn(50, 4), torch.randn(50))
    with pytest.raises(BadInput, match="no gamma to draw"):
        plots_posterior.well_determined(axes, fixed)


def test_path_is_the_log_evidence_of_each_step(axes: Axes, posterior: LaplacePosterior) -> None:
    assert plots_posterior.evidence_path(axes, posterior) is axes
    (line,) = axes.lines
    assert line.get_ydata().tolist() == list(posterior.log_evidences)
    assert line.get_xdata().tolist() == list(range(len(posterior.log_evidences)))
    assert axes.get_ylabel() == "log evidence / nats"


def test_a_hyperprior_in_the_path_is_named(axes: Axes) -> None:
    def model(t: Tensor) -> None:
        alpha = pyro.sample("alpha", dist.Gamma(2.0, 1.0))
        w = pyro.sample("w", dist.Normal(0.0, alpha.rsqrt()).expand([5]).to_event(1))
        pyro.sample("t", dist.Normal(w, 0.1).to_event(1), obs=t)

    plots_posterior.evidence_path(axes, LaplaceEvidence(model, maximise=["alpha"]).run(torch.randn(5)))
    assert axes.get_ylabel() == "log evidence + log hyperprior / nats"


def test_intervals_are_quantiles_of_the_draws(axes: Axes) -> None:
    skew = torch.linspace(0.0, 1.0, 101).square()  # quantiles 0.0025, 0.25 and 0.9025
    first = torch.stack([skew, 10.0 * skew, -skew, 2.0 - skew], 1).reshape(101, 2, 2)
    assert plots_posterior.marginals(axes, {"ours": {"w": first}, "theirs": {"w": first + 1.0}}, site="w") is axes
    centres = [line for line in axes.lines if line.get_marker() in MARKERS]
    for line, shift in zip(centres, [0.0, 1.0], strict=True):
        assert line.get_xdata() == pytest.approx([0.25 + shift, 2.5 + shift, -0.25 + shift, 1.75 + shift])
    low, high = zip(*[segment[:, 0] for segment in axes.collections[0].get_segments()], strict=True)
    assert low == pytest.approx([0.0025, 0.025, -0.9025, 1.0975])
    assert high == pytest.approx([0.9025, 9.025, -0.0025, 1.9975])
    assert texts(axes.get_yticklabels()) == ["w[0, 0]", "w[0, 1]", "w[1, 0]", "w[1, 1]"]
    assert texts(axes.get_legend().get_texts()) == ["ours", "theirs"]


def test_posteriors_of_one_element_share_its_row(axes: Axes) -> None:
    plots_posterior.marginals(axes, {name: {"w": torch.randn(9)} for name in "abc"}, site="w")
    heights = [line.get_ydata()[0] for line in axes.lines if line.get_marker() in MARKERS]
    assert heights == pytest.approx([-0.25, 0.0, 0.25])
    assert texts(axes.get_yticklabels()) == ["w"]


def test_draws_of_a_fit_go_in_as_they_are(axes: Axes, posterior: LaplacePosterior) -> None:
    samples = posterior.get_samples(400, seed=0)
    plots_posterior.marginals(axes, {"Laplace": samples}, site="w")
    assert axes.lines[0].get_xdata().tolist() == pytest.approx(samples["w"].quantile(0.5, dim=0).tolist())


@pytest.mark.parametrize(
    ("posteriors", "match"),
    [
        ({}, "posteriors is empty"),
        ({"a": {"w": torch.ones(9, 2)}, "b": {"v": torch.ones(9, 2)}}, r"No site 'w' .*'b': \['v'\]"),
        ({"a": {"w": torch.ones(9, 2)}, "b": {"w": torch.ones(9, 1)}}, r"shapes .*'a': \(2,\), 'b': \(1,\)"),
    ],
)
def test_draws_that_do_not_belong_together_are_refused(axes: Axes, posteriors, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        plots_posterior.marginals(axes, posteriors, site="w")


def test_forgotten_axes_are_asked_for(posterior: LaplacePosterior) -> None:
    with pytest.raises(BadInput, match="axes is a LaplacePosterior; expected matplotlib's Axes first"):
        plots_posterior.evidence_path(posterior, posterior)


def test_without_matplotlib_the_letter_names_the_extra(axes: Axes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    with pytest.raises(ImportError, match=r"pip install 'pyro-evidence\[plots\]'"):
        plots_posterior.marginals(axes, {}, site="w")
