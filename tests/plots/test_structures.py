"""Pictures of posteriors over structures, against the numbers that they show."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, LaplaceEvidence, StructurePosterior, explore

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


def test_programs_are_not_nested() -> None:
    def one(y: Tensor) -> None:
        pyro.sample("y", dist.Normal(pyro.sample("m", dist.Normal(0.0, 1.0)), 1.0).expand([2]).to_event(1), obs=y)

    posterior = explore({"one": one}, torch.ones(2))
    with pytest.raises(BadInput, match="zeros and ones"):
        drawn(posterior, 2)


def test_a_figure_of_its_own_has_the_tree_beside_the_bars() -> None:
    bars = LaplaceEvidence(selection).run(X, X.sum(-1)).plot()
    _, tree = bars.figure.axes
    assert len(bars.patches) == 3 and any(text.get_text().startswith("keep 0, 1, 2") for text in tree.texts)
    plt.close("all")
