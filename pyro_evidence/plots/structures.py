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
    found, height = posterior.found, posterior.log_evidences.nan_to_num(nan=-torch.inf)
    elements = found.elements()
    size = (elements != 0).sum(-1)
    parents: dict[int, int | None] = {}
    queue = posterior.order[: check_count("most", most)].tolist()
    while queue:
        place = queue.pop(0)
        if place not in parents:
            smaller = ((elements != elements[place]).sum(-1) == 1) & (size == size[place] - 1) & height.isfinite()
            parents[place] = int(torch.where(smaller, height, -torch.inf).argmax()) if bool(smaller.any()) else None
            queue += [p for p in [parents[place]] if p is not None]
    if all(parent is None for parent in parents.values()):
        raise BadInput(
            "none of these structures has one element more than another; expected a site of zeros and ones, such as "
            'dist.Bernoulli(0.5).expand([3]). Draw probabilities of other sites by posterior.values_of("site").'
        )
    across: dict[int, float] = {}  # leaves side by side in the order of a walk down the tree, others above their middle
    for place in _leaves_first(parents):
        below = [across[child] for child, parent in parents.items() if parent == place]
        across[place] = sum(below) / len(below) if below else float(sum(c not in parents.values() for c in across))
    for place, x in across.items():
        parent, y = parents[place], int(size[place])
        if parent is not None:
            axes.plot([across[parent], x], [y - 1, y], color="0.7", zorder=1)
            gain = float(height[place] - height[parent])
            axes.annotate(
                f"{gain:+.1f}", ((across[parent] + x) / 2, y - 0.5), ha="center", va="center", backgroundcolor="white"
            )
        text = f"{label_of(found.of(place), posterior.labels)}\n{float(posterior.probabilities[place]):.2g}"
        axes.annotate(text, (x, y), ha="center", va="center", bbox={"boxstyle": "round", "fc": "white", "ec": "0.4"})
    axes.set(xlim=(min(across.values()) - 0.6, max(across.values()) + 0.6), xticks=[], ylabel="elements in the model")
    axes.set_ylim(int(size[list(parents)].max()) + 0.5, int(size[list(parents)].min()) - 0.5)
    axes.yaxis.get_major_locator().set_params(integer=True)
    return axes


def _leaves_first(parents: dict[int, int | None]) -> list[int]:
    """The places of a tree so that each comes after all below it, those below one another's side by side."""
    order: list[int] = []
    stack = [place for place, parent in parents.items() if parent is None]
    while stack:
        order.append(stack.pop())
        stack += [child for child, parent in parents.items() if parent == order[-1]]
    return order[::-1]
