"""The components of each class in its own colour, dashes and shape."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.axes import Axes
from torch import Tensor

from pyro_evidence import BadInput, EvidenceEM, Start, Stop, class_conditional
from pyro_evidence.display import DASHES, MARKERS
from pyro_evidence.infer import ClassConditional
from pyro_evidence.models.mixture import FullNoise, gaussian_mixture


def clouds() -> tuple[Tensor, Tensor]:
    """Class 3 is one cloud, class 7 two."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(90, 3, generator=generator) * torch.tensor([1.0, 0.3, 2.0])
    number = torch.arange(90) // 30
    return X + 9.0 * number.unsqueeze(-1), torch.where(number == 1, 3, 7)


@pytest.fixture(scope="module")
def found() -> ClassConditional:
    torch.set_default_dtype(torch.float64)
    engine = EvidenceEM(gaussian_mixture(2, noise=FullNoise()), start=Start(restarts=2), stop=Stop(progress=False))
    return class_conditional(engine, *clouds())


@pytest.fixture
def axes() -> Axes:
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def test_each_component_has_a_line_in_its_classs_colour_and_dashes(axes: Axes, found: ClassConditional) -> None:
    """Which holds nine tenths of it: there the squared distance is a chi-square quantile, -2 log .1."""
    assert found.plot(axes, inputs=(2, 0)) is axes
    lines = [line for line in axes.lines if len(line.get_xdata())]
    components = [(n, k) for n, p in enumerate(found.posteriors) for k in p.active.nonzero().flatten().tolist()]
    assert [n for n, _ in components] == [0, 1, 1]
    for line, (number, k) in zip(lines, components, strict=True):
        assert (line.get_color(), line.get_linestyle()) == (f"C{number}", DASHES[number])
        density = found.posteriors[number].density()
        covariance = (density.tril[0, k] @ density.tril[0, k].mT)[[2, 0]][:, [2, 0]]
        offset = torch.tensor(line.get_xydata()) - density.loc[0, k, [2, 0]]
        distance = (offset @ torch.linalg.inv(covariance) * offset).sum(-1)
        torch.testing.assert_close(distance, torch.full_like(distance, -2.0 * math.log(0.1)))
    assert lines[0].get_linewidth() > lines[1].get_linewidth()  # all of its class, half of its class
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("input 2", "input 0")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["class 3", "class 7"]


@pytest.mark.parametrize(
    ("classes", "names"), [((3.0, 7.5), ["class 3", "class 7.5"]), ((False, True), ["class False", "class True"])]
)
def test_labels_are_written_short(axes: Axes, found: ClassConditional, classes: Any, names: list[str]) -> None:
    replace(found, classes=torch.tensor(classes)).plot(axes)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == names


def test_data_are_points_in_colour_and_shape_of_their_class(axes: Axes, found: ClassConditional) -> None:
    X, labels = clouds()
    found.plot(axes, X=X, labels=labels)
    points = [line for line in axes.lines if line.get_linestyle() == "None"]
    for number, (line, label) in enumerate(zip(points, (3, 7), strict=True)):
        assert line.get_xydata().tolist() == X[labels == label][:, :2].tolist()
        assert (line.get_color(), line.get_marker()) == (f"C{number}", MARKERS[number])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"X": clouds()[0]}, "expected both or neither"),
        ({"labels": clouds()[1]}, "expected both or neither"),
        ({"X": clouds()[0], "labels": clouds()[1][:3]}, "a label for each row"),
        ({"X": clouds()[0], "labels": clouds()[1] + 4}, r"labels \[11\] are none of \[3, 7\]"),
        ({"inputs": (0, 3)}, "expected two different numbers from 0 to 2"),
        ({"axes": "axes"}, "expected matplotlib's Axes"),
    ],
)
def test_what_cannot_be_drawn_is_refused(found: ClassConditional, given: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        found.plot(**given)
    plt.close("all")


def test_densities_without_components_are_refused(axes: Axes, found: ClassConditional) -> None:
    other = ClassConditional(found.classes, (SimpleNamespace(),) * 2, found.log_prior)
    with pytest.raises(BadInput, match=r"a SimpleNamespace has no density\(\) of components.*Draw log_density"):
        other.plot(axes)


def test_one_column_is_no_plane(axes: Axes) -> None:
    X, labels = clouds()
    engine = EvidenceEM(gaussian_mixture(1), start=Start(restarts=1), stop=Stop(progress=False))
    with pytest.raises(BadInput, match="there is 1 column; expected two at least"):
        class_conditional(engine, X[:, :1], labels).plot(axes)
