"""What is drawn are the mixture's numbers; what cannot be drawn is refused in words."""

import math
import sys

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.axes import Axes
from torch import Tensor

from pyro_evidence import BadInput, EvidenceEM, Start
from pyro_evidence.compare.learning_curve import LearningCurve, learning_curve
from pyro_evidence.display import MARKERS
from pyro_evidence.mixture import MixturePosterior, RandomWeights, Unregularised
from pyro_evidence.mixture.density import MixtureDensity
from pyro_evidence.models.mixture import FullNoise, gaussian_mixture
from pyro_evidence.plots import mixture as plots_mixture


@pytest.fixture
def axes() -> Axes:
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def data() -> Tensor:
    torch.manual_seed(0)
    return torch.cat([torch.randn(30, 2), torch.tensor([8.0, 3.0]) + 0.5 * torch.randn(20, 2)])


@pytest.fixture
def posterior() -> MixturePosterior:
    found = EvidenceEM(gaussian_mixture(4, noise=FullNoise())).run(data())
    assert isinstance(found, MixturePosterior)
    return found


@pytest.fixture
def curve() -> LearningCurve:
    engine = EvidenceEM(
        gaussian_mixture(3), update=Unregularised(), start=Start(restarts=2), initial=RandomWeights(warm_up=0)
    )
    return learning_curve(engine, (data(),), (data() + 0.1,), num_steps=6)


def three_outputs() -> MixtureDensity:
    """Components of mixing 0.75, 0.25 and 0."""
    loc = torch.tensor([[[0.0, 9.0, 1.0], [5.0, 9.0, -1.0], [0.0, 0.0, 0.0]]])
    tril = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 3.0]]).expand(1, 3, 3, 3)
    return MixtureDensity(torch.tensor([[0.75, 0.25, 0.0]]).log(), loc, tril)


def test_an_ellipse_is_where_the_mass_inside_is_reached(axes: Axes) -> None:
    """On it the squared Mahalanobis distance is the chi-square quantile, which for two outputs is -2 log(1 - mass)."""
    density = three_outputs()
    assert plots_mixture.ellipses(axes, density, mass=0.5, outputs=(2, 0)) is axes
    covariance = (density.tril[0, 0] @ density.tril[0, 0].T)[[2, 0]][:, [2, 0]]
    first, second = axes.lines  # the component without data is left out
    for line, centre in ((first, [1.0, 0.0]), (second, [-1.0, 5.0])):
        offset = torch.tensor(line.get_xydata()) - torch.tensor(centre)
        distance = (offset @ torch.linalg.inv(covariance) * offset).sum(-1)
        torch.testing.assert_close(distance, torch.full_like(distance, 2.0 * math.log(2.0)))
    assert first.get_linewidth() > second.get_linewidth()


@pytest.mark.parametrize("outputs", [(0, 3), (1, 1), (-1, 0)])
def test_outputs_that_are_not_there(axes: Axes, outputs: tuple[int, int]) -> None:
    with pytest.raises(BadInput, match="expected two different numbers from 0 to 2"):
        plots_mixture.ellipses(axes, three_outputs(), outputs=outputs)


def test_a_conditional_density_has_no_ellipses(axes: Axes) -> None:
    density = three_outputs()
    many = MixtureDensity(density.log_mixing, density.loc.expand(7, 3, 3), density.tril)
    with pytest.raises(BadInput, match="another one for each of 7 data"):
        plots_mixture.ellipses(axes, many)


def test_every_datum_is_in_its_components_colour(axes: Axes, posterior: MixturePosterior) -> None:
    assert plots_mixture.scatter(axes, posterior, data()) is axes
    owner = posterior.responsibilities(data()).argmax(-1)
    groups = [line for line in axes.lines if line.get_marker() in MARKERS]
    for line, component in zip(groups, owner.unique(), strict=True):
        assert line.get_xydata().tolist() == data()[owner == component].tolist()
    assert len({line.get_color() for line in groups}) == len(groups) == posterior.num_components
    assert len({line.get_marker() for line in groups}) == len(groups)
    assert len(axes.lines) == len(groups) + posterior.num_components


def test_of_one_output_the_density_and_its_parts_are_drawn(axes: Axes) -> None:  # oracle: torch's own mixture
    y = torch.cat([torch.linspace(-1.0, 1.0, 30), torch.linspace(4.0, 5.0, 20)])
    found = EvidenceEM(gaussian_mixture(2), start=Start(seed=0)).run(y[:, None])
    assert found.plot(axes) is axes and sum(
        bar.get_height() * bar.get_width() for bar in axes.patches
    ) == pytest.approx(1.0)
    whole, *parts = axes.lines
    density = found.density()
    kernels = torch.distributions.Normal(density.loc[0, :, 0], density.tril[0, :, 0, 0])
    expected = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(density.log_mixing[0].exp()), kernels
    )
    x, heights = torch.tensor(whole.get_xdata()), torch.tensor(whole.get_ydata())
    assert torch.allclose(heights, expected.log_prob(x).exp()) and (x[0], x[-1]) == (y[0], y[-1])
    assert torch.allclose(sum(torch.tensor(part.get_ydata()) for part in parts), heights)
    assert sorted(part.get_label() for part in parts) == ["40% of the data", "60% of the data"]


def test_path_has_one_picture_for_each_round(curve: LearningCurve) -> None:
    figure, axes = plt.subplots(1, 2)
    first, last = plots_mixture.component_path(axes, curve, data(), steps=[0, 6])
    assert [first, last] == list(axes)
    assert [a.get_title() for a in axes] == ["round 0: 3 components", "round 6: 3 components"]
    centres = torch.stack([torch.tensor(line.get_xydata())[:-1].mean(0) for line in last.lines[1:]])
    torch.testing.assert_close(centres, curve.density(6).loc[0])
    assert first.get_xlim() == last.get_xlim()
    for steps in ([0], [0, 7], [-1, 6]):
        with pytest.raises(BadInput, match="expected one each, steps from 0 to 6"):
            plots_mixture.component_path(axes, curve, data(), steps=steps)
    plt.close(figure)


def test_learning_curves_draw_training_and_test(axes: Axes, curve: LearningCurve) -> None:
    assert plots_mixture.learning_curves(axes, {"plain": curve, "again": curve}) is axes
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    solid = [line for line in axes.lines if line.get_linestyle() == "-"]
    assert [line.get_ydata().tolist() for line in dashed] == 2 * curve.train_nll.T.tolist()
    assert [line.get_ydata().tolist() for line in solid] == 2 * curve.test_nll.T.tolist()
    assert dashed[0].get_xdata().tolist() == list(range(7))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["plain", "again"]
    with pytest.raises(BadInput, match="curves is empty"):
        plots_mixture.learning_curves(axes, {})


def test_strips_are_the_density_at_every_pair(axes: Axes) -> None:
    x, y = torch.tensor([0.0, 1.0, 2.0]), torch.linspace(-1.0, 1.0, 4)

    def log_density(x: Tensor, y: Tensor) -> Tensor:
        return -(y - x).square()

    assert plots_mixture.density_strips(axes, log_density, x, y) is axes
    (mesh,) = axes.collections
    drawn = torch.as_tensor(mesh.get_array().reshape(4, 3))
    torch.testing.assert_close(drawn, torch.exp(-(y.unsqueeze(-1) - x).square()))
    with pytest.raises(BadInput, match=r"shape \(12, 1\) for 12 pairs"):
        plots_mixture.density_strips(axes, lambda x, y: log_density(x, y).unsqueeze(-1), x, y)


def test_largest_median_is_marked(axes: Axes) -> None:
    evidences = {3: [4.0, 2.0, 9.0], 1: [1.0, 0.0, 2.0], 2: [5.0, 5.0, 3.0]}
    assert plots_mixture.evidence_over_components(axes, evidences, label="ours") is axes
    line, mark = axes.lines
    assert line.get_xydata().tolist() == [[1.0, 1.0], [2.0, 5.0], [3.0, 4.0]]
    assert mark.get_xydata().tolist() == [[2.0, 5.0]]
    (band,) = axes.collections
    vertices = band.get_paths()[0].vertices.tolist()
    assert all([k, v] in vertices for k, v in ((1, 0), (1, 2), (2, 3), (2, 5), (3, 2), (3, 9)))
    for empty in ({}, {1: [0.0], 2: []}):
        with pytest.raises(BadInput, match="evidences is empty, or has a K without fits"):
            plots_mixture.evidence_over_components(axes, empty)


def test_pairs_have_a_diagonal(axes: Axes) -> None:
    pairs = {"K = 5": ([1.0, 2.0], [1.5, 0.5]), "K = 10": ([4.0], [math.inf])}
    assert plots_mixture.matched_pairs(axes, pairs) is axes
    first, second, diagonal = axes.lines
    assert first.get_xydata().tolist() == [[1.0, 1.5], [2.0, 0.5]]
    assert first.get_marker() != second.get_marker()
    assert diagonal.get_xydata().tolist() == [[0.5, 0.5], [4.0, 4.0]]
    for wrong in ({}, {"a": ([], [])}, {"a": ([1.0], [1.0, 2.0])}):
        with pytest.raises(BadInput, match="pairs has numbers of results"):
            plots_mixture.matched_pairs(axes, wrong)


@pytest.mark.parametrize("name", ["ellipses", "learning_curves", "evidence_over_components", "matched_pairs"])
def test_forgotten_axes_are_asked_for(name: str) -> None:
    with pytest.raises(BadInput, match="expected matplotlib's Axes first"):
        getattr(plots_mixture, name)({}, {})


def test_without_matplotlib_the_letter_names_the_extra(axes: Axes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    with pytest.raises(ImportError, match=r"pip install 'pyro-evidence\[plots\]'"):
        plots_mixture.matched_pairs(axes, {})
