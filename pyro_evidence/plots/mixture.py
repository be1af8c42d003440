"""Pictures of mixtures: each function draws on the Axes that it is given, and returns them.

matplotlib is an extra and is imported when something is drawn.  Ticks, titles and the rest stay the caller's.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module

import torch
from torch import Tensor

from pyro_evidence import display
from pyro_evidence.compare.learning_curve import LearningCurve
from pyro_evidence.display import PROB, Axes, check_axes, with_labels
from pyro_evidence.errors import BadInput
from pyro_evidence.mixture.density import MixtureDensity
from pyro_evidence.mixture.posterior import MixturePosterior

LogDensity = Callable[[Tensor, Tensor], Tensor]


def ellipses(axes: Axes, density: MixtureDensity, *, mass: float = PROB, outputs: tuple[int, int] = (0, 1)) -> Axes:
    """One ellipse per component, which holds ``mass`` of it; the wider its line, the larger its share.

    :param density: of all data alike, from ``posterior.density()`` or ``curve.density(step)``; components of mixing 0
        are left out.
    :param outputs: the two outputs on the axes; over the others it is integrated.
    :raises BadInput: when the density depends on the datum, or has not these outputs.
    """
    check_axes(axes)
    _check_plane(density, outputs)
    plane = density.marginal(outputs)
    display.kernel_ellipses(axes, plane.log_mixing[0].exp(), plane.loc[0], plane.tril[0], mass=mass, color="black")
    return with_labels(axes, f"output {outputs[0]}", f"output {outputs[1]}", legend=False)


def _check_plane(density: MixtureDensity, outputs: tuple[int, int]) -> None:
    if len(density.loc) != 1:
        raise BadInput(
            f"the density is another one for each of {len(density.loc)} data; expected one for all. For p(y | x) draw "
            f"density_strips."
        )
    display.check_plane("outputs", outputs, density.loc.shape[-1])


def scatter(axes: Axes, posterior: MixturePosterior, Y: Tensor, *, outputs: tuple[int, int] = (0, 1)) -> Axes:
    """Data ``(N, m)`` in the colour and shape of their most responsible component, and the ellipses of all."""
    check_axes(axes)
    _check_plane(posterior.density(), outputs)
    return posterior.plot(axes, Y=Y, outputs=outputs)


def component_path(axes: Iterable[Axes], curve: LearningCurve, Y: Tensor, *, steps: Sequence[int]) -> list[Axes]:
    """The ellipses after each of ``steps`` rounds of the first restart over the data, one picture each.

    :param axes: as many as ``steps``, in any shape that can be run through, such as ``figure.subplots(1, 4)``.
    :param Y: data of shape ``(N, 2)`` or more outputs, of which the first two are drawn.
    :raises BadInput: when there are fewer or more axes than steps, or a step that the curve does not have.
    """
    places = list(axes)
    last = len(curve.mixtures) - 1
    if len(places) != len(steps) or not all(0 <= step <= last for step in steps):
        raise BadInput(f"{len(places)} axes for steps={tuple(steps)}; expected one each, steps from 0 to {last}.")
    low, high = Y[:, :2].amin(0), Y[:, :2].amax(0)
    margin = 0.5 * (high - low)  # beyond the data; kernels that are about to go may be far wider
    (left, bottom), (right, top) = (low - margin).tolist(), (high + margin).tolist()
    for place, step in zip(places, steps, strict=True):
        check_axes(place)
        place.plot(*Y[:, :2].T.tolist(), ".", color="grey", markersize=display.SMALL)
        place.set(xlim=(left, right), ylim=(bottom, top))
        ellipses(place, curve.density(step))
        place.set_title(f"round {step}: {int(curve.num_components[step, 0])} components")
    return places


def learning_curves(axes: Axes, curves: Mapping[str, LearningCurve]) -> Axes:
    """Minus the mean log density per datum after each round: training data dashed, test data solid.

    All restarts are drawn, one colour for each engine.

    :param curves: from a name for the legend to the way of an engine.
    """
    check_axes(axes)
    if not curves:
        raise BadInput("curves is empty; expected at least one name with its LearningCurve.")
    for number, (name, curve) in enumerate(curves.items()):
        color = f"C{number}"
        rounds = range(len(curve.test))
        axes.plot(rounds, curve.train_nll.tolist(), "--", color=color, linewidth=display.THIN)
        lines = axes.plot(rounds, curve.test_nll.tolist(), "-", color=color)
        lines[0].set_label(name)
    return with_labels(axes, "round", "mean NLL / nats; training dashed")


def density_strips(axes: Axes, log_density: LogDensity, x: Tensor, y: Tensor) -> Axes:
    """A conditional density ``p(y | x)`` in shades of grey, one strip for each input, the darker the likelier.

    :param log_density: ``(x, y)``, shape ``(n,)`` each, to ``log p(y | x)``, nats; for a posterior
        ``lambda x, y: posterior.log_prob(x[:, None], y[:, None])``.
    :param x: inputs, ascending.
    :param y: responses, ascending.
    :raises BadInput: when ``log_density`` returns another shape than ``(n,)``.
    """
    check_axes(axes)
    pairs = torch.cartesian_prod(x, y)
    found = log_density(pairs[:, 0], pairs[:, 1]).detach()
    if found.shape != (len(pairs),):
        raise BadInput(
            f"log_density returned shape {tuple(found.shape)} for {len(pairs)} pairs of x and y; expected one "
            "number each."
        )
    density = found.exp().reshape(len(x), len(y)).T
    axes.pcolormesh(x.tolist(), y.tolist(), density.tolist(), cmap="Greys", shading="nearest")
    return with_labels(axes, "x", "y", legend=False)


def evidence_over_components(axes: Axes, evidences: Mapping[int, Sequence[float]], *, label: str | None = None) -> Axes:
    """Log evidence against the number of components: median of several fits as a line, their range as a band.

    The largest median is marked.

    :param evidences: from ``K`` to the log evidence of each fit, nats.
    :param label: for the legend.
    """
    check_axes(axes)
    if not evidences or not all(len(values) for values in evidences.values()):
        raise BadInput("evidences is empty, or has a K without fits; expected at least one value for each.")
    numbers = sorted(evidences)
    values = [torch.as_tensor(evidences[k], dtype=torch.float64) for k in numbers]
    median = [float(v.quantile(0.5)) for v in values]
    (line,) = axes.plot(numbers, median, marker=".", label=label)
    axes.fill_between(numbers, [float(v.min()) for v in values], [float(v.max()) for v in values], alpha=display.SHADE)
    best = max(range(len(numbers)), key=lambda i: median[i])
    axes.plot(numbers[best], median[best], "o", color=line.get_color(), markersize=2 * display.SMALL, fillstyle="none")
    axes.xaxis.set_major_locator(import_module("matplotlib.ticker").MaxNLocator(integer=True))
    return with_labels(axes, "number of components", "log evidence / nats", legend=False)


def matched_pairs(axes: Axes, pairs: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Axes:
    """One symbol for each pair of runs from the same start; below the dashed diagonal the second is smaller.

    :param pairs: from a name for the legend to the results of the first way (abscissa) and of the second (ordinate).
    :raises BadInput: when there is nothing to draw, or the two do not have the same number of results.
    """
    check_axes(axes)
    counts = {name: (len(first), len(second)) for name, (first, second) in pairs.items()}
    if not counts or any(a != b or not a for a, b in counts.values()):
        raise BadInput(f"pairs has numbers of results {counts}; expected at least one name, and as many of both ways.")
    for name, marker in zip(pairs, "xo+DsDv^" * len(pairs), strict=False):
        axes.plot(*pairs[name], marker, label=name, fillstyle="none")
    values = [v for first, second in pairs.values() for v in (*first, *second) if math.isfinite(v)]
    axes.plot([min(values), max(values)], [min(values), max(values)], "--", color="grey")
    return with_labels(axes, "first of the pair", "second of the pair")
