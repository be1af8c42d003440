"""What the pictures of a comparison draw, read back from the Axes."""

import math
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, LaplaceEvidence, compare
from pyro_evidence.compare.comparison import Comparison
from pyro_evidence.compare.sbc import Calibration
from pyro_evidence.plots import comparison as plots_comparison
from tests.evidence_check.test_evidence_check import logistic
from tests.models_for_tests.exact_models import straight, straight_data


def answering(w: Tensor) -> SimpleNamespace:
    return SimpleNamespace(run=lambda *_: SimpleNamespace(get_samples=lambda: {"w": w}))


def draws(seed: int, correlation: float = 0.0) -> Tensor:
    """Three standard normals, the first and the last correlated."""
    w = torch.randn(2000, 3, generator=torch.Generator().manual_seed(seed))
    w[:, 2] = correlation * w[:, 0] + math.sqrt(1.0 - correlation**2) * w[:, 2]
    return w


@pytest.fixture
def two() -> Comparison:
    engines = {"turned": answering(draws(0, 0.9)), "plain": answering(draws(1))}
    return compare(straight, *straight_data(), engines=engines, held_out=straight_data())


@pytest.fixture
def axes() -> Any:
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def test_marginals_are_the_densities(two: Comparison, axes: Any) -> None:
    assert plots_comparison.overlaid(axes, two, "w", 1) is axes
    (line,) = axes.get_lines()
    x, y = (torch.as_tensor(v) for v in line.get_data())
    exact = torch.distributions.Normal(0.0, 1.0).log_prob(x).exp()
    assert (y - exact).abs().max() < 0.05
    assert axes.get_xlabel() == "w[1]"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["turned", "plain (reference)"]


def test_worst_pair_is_the_one_whose_correlation_is_wrong(two: Comparison, axes: Any) -> None:
    plots_comparison.worst_pair(axes, two, "turned")
    assert {axes.get_xlabel(), axes.get_ylabel()} == {"w[0]", "w[2]"}
    first, second = axes.collections
    assert len(first.get_offsets()) == 500
    assert torch.corrcoef(torch.as_tensor(second.get_offsets().data).T)[0, 1] > 0.8


def test_calibration_of_classes(axes: Any) -> None:
    X = torch.randn(4000, 1, generator=torch.Generator().manual_seed(0)) * 2.0
    t = torch.bernoulli(torch.sigmoid(X[:, 0]), generator=torch.Generator().manual_seed(1))
    right = 1.0 + 0.001 * torch.randn(20, 1, generator=torch.Generator().manual_seed(2))
    found = compare(
        logistic, X, t, engines={"bold": answering(4.0 * right), "right": answering(right)}, held_out=(X, t)
    )
    plots_comparison.calibration(axes, found)
    diagonal, bold, right_line = axes.get_lines()
    x, y = (torch.as_tensor(v) for v in right_line.get_data())
    assert (x - y).abs().max() < 4.0 * 0.5 / math.sqrt(400)
    assert abs(bold.get_xdata()[1] - bold.get_ydata()[1]) > 0.05
    assert list(diagonal.get_xdata()) == [0.0, 1.0]
    assert axes.get_xlabel() == "predicted probability of class 1"


def test_calibration_of_numbers(axes: Any) -> None:
    found = compare(
        straight,
        *straight_data(),
        engines={"a": LaplaceEvidence(straight, maximise=()), "b": LaplaceEvidence(straight, maximise=())},
        held_out=straight_data(),
    )
    plots_comparison.calibration(axes, found)
    line = axes.get_lines()[1]
    assert len(line.get_xdata()) == 20
    assert (torch.as_tensor(line.get_xdata()).diff() >= 0).all()


def test_rank_histogram_has_a_band(axes: Any) -> None:
    ranks = torch.cat([torch.arange(100), torch.zeros(20, dtype=torch.long)]).unsqueeze(-1)
    found = Calibration(("w",), ranks, 99, 10, torch.tensor([30.0]), torch.tensor([4e-4]), ())
    plots_comparison.rank_histogram(axes, found)
    heights = [bar.get_height() for bar in axes.patches[1:]]
    assert heights == [30, *[10] * 9]
    band = axes.patches[0].get_extents().transformed(axes.transData.inverted())
    assert (band.y0 + band.y1) / 2.0 == pytest.approx(12.0)
    assert "rank of w" in axes.get_xlabel()


def test_letters(two: Comparison, axes: Any) -> None:
    with pytest.raises(BadInput, match="site 'v', element 0"):
        plots_comparison.overlaid(axes, two, "v")
    with pytest.raises(BadInput, match="site 'w', element 3: expected an element of the 3 that the reference has"):
        plots_comparison.overlaid(axes, two, "w", 3)
    with pytest.raises(BadInput, match="engine='z' has no draws"):
        plots_comparison.worst_pair(axes, two, "z")
    with pytest.raises(BadInput, match="axes is a Comparison"):
        plots_comparison.calibration(two, two)
    bare = compare(straight, *straight_data(), engines={"a": answering(draws(0)), "b": answering(draws(1))})
    with pytest.raises(BadInput, match="no predictions"):
        plots_comparison.calibration(axes, bare)
    found = Calibration(("w",), torch.zeros(50, 1).long(), 99, 10, torch.zeros(1), torch.zeros(1), ())
    with pytest.raises(BadInput, match="no quantity 'v' was ranked"):
        plots_comparison.rank_histogram(axes, found, "v")
