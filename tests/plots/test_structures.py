"""Pictures of posteriors over structures, against the numbers that they show."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, LaplaceEvidence, Stop, StructurePosterior, explore

plt = pytest.importorskip("matplotlib.pyplot")
X = torch.tensor([[1.0, 1.0, 0.5], [-1.0, 1.0, 0.0], [2.0, -1.0, 0.3], [-2.0, -1.0, -1.0]])


def selection(X: Tensor, y: Tensor) -> None:
    keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([3]).to_event(1), infer={"branching": True})
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ (w * keep), 0.5), obs=y)


def drawn(posterior: StructurePosterior, most: int) -> dict[str, tuple[float, float]]:
    """Where each text stands."""
    axes = posterior.plot_nested(plt.figure().gca(), most=most)
    found = {text.get_text(): text.get_position() for text in axes.texts}
    plt.close("all")
    return found


def test_each_structure_stands_below_the_best_that_it_extends() -> None:
    posterior = LaplaceEvidence(selection).run(X, X[:, 0] + 0.2 * X[:, 1])
    keeps = map(tuple, posterior.found.values["keep"].tolist())
    evidences = dict(zip(keeps, posterior.log_evidences.tolist(), strict=True))
    found = drawn(posterior, 8)
    nodes = {text.split("\n")[0]: place for text, place in found.items() if "\n" in text}
    assert len(nodes) == 8 and nodes["keep none"][1] == 0 and nodes["keep 0, 1, 2"][1] == 3
    pairs = {(1.0, 1.0, 0.0): "keep 0, 1", (1.0, 0.0, 1.0): "keep 0, 2", (0.0, 1.0, 1.0): "keep 1, 2"}
    best = max(pairs, key=lambda keep: evidences[keep])
    middle = (nodes["keep 0, 1, 2"][0] + nodes[pairs[best]][0]) / 2
    gain = evidences[1.0, 1.0, 1.0] - evidences[best]
    assert any(text == f"{gain:+.1f}" and place == (middle, 2.5) for text, place in found.items())


def test_the_way_to_a_structure_is_shown_from_the_smallest() -> None:
    found = drawn(LaplaceEvidence(selection).run(X, X.sum(-1)), 1)
    assert len([text for text in found if "\n" in text]) == 4  # one with all three, and its way


def with_noise(sd: float) -> Callable[[Tensor], None]:
    def program(y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(m, sd).expand([len(y)]).to_event(1), obs=y)

    return program


def bars_of(posterior: StructurePosterior) -> dict[str, float]:
    """The length of each bar of a figure of its own, by its name."""
    axes = posterior.plot()
    names = [text.get_text() for text in axes.get_yticklabels()]
    found = dict(zip(names, (bar.get_width() for bar in axes.patches), strict=True))
    plt.close("all")
    return found


def test_programs_have_a_bar_each_and_no_tree() -> None:
    posterior = explore({"narrow": with_noise(1.0), "wide": with_noise(3.0), "wider": with_noise(9.0)}, torch.ones(2))
    bars = bars_of(posterior)
    assert list(bars) == ["narrow", "wide", "wider"]
    assert list(bars.values()) == pytest.approx(posterior.probabilities.tolist())
    assert len(posterior.plot().figure.axes) == 1
    plt.close("all")
    with pytest.raises(BadInput, match=r"zeros and ones.*call plot\(\)"):
        posterior.plot_nested()
    assert not plt.get_fignums()


def chosen(X: Tensor, y: Tensor) -> None:
    """Columns that are kept, of one of three scales each, and one noise of two."""
    keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([2]).to_event(1), infer={"branching": True})
    scale = pyro.sample("scale", dist.Categorical(torch.ones(3)).expand([2]).to_event(1), infer={"branching": True})
    noise = pyro.sample("noise", dist.Categorical(torch.ones(2)), infer={"branching": True})
    w = pyro.sample("w", dist.Normal(0.0, 1.0 + scale).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X[:, :2] @ (w * keep), 0.5 + noise), obs=y)


def test_choices_have_a_bar_for_each_value_beside_what_is_in_or_out() -> None:
    posterior = LaplaceEvidence(chosen, stop=Stop(progress=False)).run(X, X[:, 0])
    expected = {f"keep[{i}]": float(p) for i, p in enumerate(posterior.inclusion("keep"))}
    scales = posterior.values_of("scale")
    expected |= {f"scale[{i}] = {k}": float(scales[float(k)][i]) for i in range(2) for k in range(3)}
    expected |= {f"noise = {k}": float(posterior.values_of("noise")[float(k)]) for k in range(2)}
    bars = bars_of(posterior)
    assert list(bars) == list(expected) and bars == pytest.approx(expected)


def test_a_tree_has_edges_between_equal_choices_alone() -> None:
    posterior = LaplaceEvidence(chosen, stop=Stop(progress=False)).run(X, X[:, 0])
    values = posterior.found.values
    parents = {child: parent for child, parent in posterior._parents(72).items() if parent is not None}
    assert len(parents) == 54  # all but the smallest of each of the 18 choices
    for child, parent in parents.items():
        assert float(values["keep"][child].sum() - values["keep"][parent].sum()) == 1.0
        assert all(torch.equal(values[site][child], values[site][parent]) for site in ("scale", "noise"))


def test_a_figure_of_its_own_has_the_tree_beside_the_bars() -> None:
    bars = LaplaceEvidence(selection).run(X, X.sum(-1)).plot()
    _, tree = bars.figure.axes
    assert len(bars.patches) == 3 and any(text.get_text().startswith("keep 0, 1, 2") for text in tree.texts)
    plt.close("all")
