"""Pictures of posteriors over structures: each function draws on the Axes that it is given, and returns them.

matplotlib is an extra and is imported when something is drawn.  Ticks, titles and the rest stay the caller's.
"""

import torch

from pyro_evidence.display import Axes, check_axes
from pyro_evidence.errors import BadInput
from pyro_evidence.posterior.structures import StructurePosterior, label_of
from pyro_evidence.settings import check_count


def nested_models(axes: Axes, posterior: StructurePosterior, *, most: int = 8) -> Axes:
    """A tree of structures, each below the best one that it has one element more than; nats gained on the edges.

    Shown are the most probable structures, with their probabilities, and the way to each from the smallest.  From top
    to bottom the number of elements that are not zero grows; on each edge stands the difference of the log evidences.

    :param most: number of the most probable structures.
    :raises BadInput: where none of them extends another that was looked at, as of links or whole programs.
    """
    check_axes(axes)
    height = posterior.log_evidences.nan_to_num(nan=-torch.inf)
    size = (posterior.found.elements() != 0).sum(-1)
    parents = _parents(posterior, check_count("most", most))
    if all(parent is None for parent in parents.values()):
        raise BadInput(
            "none of these structures has one element more than another; expected a site of zeros and ones, such as "
            'dist.Bernoulli(0.5).expand([3]). Draw probabilities of other sites by posterior.values_of("site").'
        )
    across = _across(parents)
    for place, x in across.items():
        parent, y = parents[place], int(size[place])
        if parent is not None:
            axes.plot([across[parent], x], [y - 1, y], color="0.7", zorder=1)
            gain = float(height[place] - height[parent])
            axes.annotate(
                f"{gain:+.1f}", ((across[parent] + x) / 2, y - 0.5), ha="center", va="center", backgroundcolor="white"
            )
        text = f"{label_of(posterior.found.of(place), posterior.labels)}\n{float(posterior.probabilities[place]):.2g}"
        axes.annotate(text, (x, y), ha="center", va="center", bbox={"boxstyle": "round", "fc": "white", "ec": "0.4"})
    axes.set(xlim=(min(across.values()) - 0.6, max(across.values()) + 0.6), xticks=[], ylabel="elements in the model")
    axes.set_ylim(int(size[list(parents)].max()) + 0.5, int(size[list(parents)].min()) - 0.5)
    axes.yaxis.get_major_locator().set_params(integer=True)
    return axes


def _parents(posterior: StructurePosterior, most: int) -> dict[int, int | None]:
    """The best structure with one element less, of the most probable structures and of all on their ways; or None."""
    height, elements = posterior.log_evidences.nan_to_num(nan=-torch.inf), posterior.found.elements()
    size = (elements != 0).sum(-1)
    parents: dict[int, int | None] = {}
    for first in posterior.order[:most].tolist():
        place: int | None = first
        while place is not None and place not in parents:
            smaller = ((elements != elements[place]).sum(-1) == 1) & (size == size[place] - 1) & height.isfinite()
            parents[place] = int(torch.where(smaller, height, -torch.inf).argmax()) if bool(smaller.any()) else None
            place = parents[place]
    return parents


def _across(parents: dict[int, int | None]) -> dict[int, float]:
    """Horizontal places of a tree's nodes: leaves side by side, others above the middle of what is below them."""
    children = {place: [child for child, parent in parents.items() if parent == place] for place in parents}
    across: dict[int, float] = {}
    num_leaves = 0

    def put(place: int) -> None:
        nonlocal num_leaves
        for child in children[place]:
            put(child)
        below = [across[child] for child in children[place]]
        across[place] = sum(below) / len(below) if below else float(num_leaves)
        num_leaves += not below

    for place, parent in parents.items():
        if parent is None:
            put(place)
    return across
