"""Classification by one density per class."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence import display
from pyro_evidence.display import Axes
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import entry_point
from pyro_evidence.mixture.density import MixtureDensity
from pyro_evidence.numerics import lbfgs
from pyro_evidence.posterior.base import ClassProbabilities
from pyro_evidence.settings import check_tensor

NUM_STEPS = 200  # of ascent in as many dimensions as there are classes; it ends at the gradient's rounding long before


@entry_point
@dataclass(frozen=True)
class ClassConditional(ClassProbabilities):
    """``p(class | x)`` proportional to ``p(class) p(x | class)``; Husmeier (2000), eqs. 4.1 and 4.2.

    :ivar classes: the labels, ascending, shape ``(C,)``.
    :ivar posteriors: one density per class.
    :ivar log_prior: log class probabilities, shape ``(C,)``.

    >>> import torch
    >>> from pyro_evidence import EvidenceEM, class_conditional
    >>> from pyro_evidence.models.mixture import gaussian_mixture
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> found = class_conditional(EvidenceEM(gaussian_mixture(2)), Y, torch.arange(60) // 30)
    >>> found.labels(torch.tensor([[0.0, 0.0], [6.0, 6.0]])).tolist()
    [0, 1]
    """

    classes: Tensor
    posteriors: tuple[Any, ...]
    log_prior: Tensor

    def log_density(self, X: Tensor) -> Tensor:
        """``log p(x_n | class)``, nats, shape ``(N, C)``."""
        return torch.stack([p.log_prob(X) for p in self.posteriors], -1)

    def log_proba(self, X: Tensor) -> Tensor:
        """``log p(class | x_n)``, in the order of :attr:`classes`, shape ``(N, C)``."""
        return (self.log_density(X) + self.log_prior).log_softmax(-1)

    def log_prob(self, X: Tensor, labels: Tensor) -> Tensor:
        """``log p(label_n | x_n)``, nats, shape ``(N,)``.

        :raises BadInput: on a label that no density was fitted for.
        """
        place = self._places(labels)
        return self.log_proba(X).gather(-1, place.unsqueeze(-1)).squeeze(-1)

    def _places(self, labels: Tensor) -> Tensor:
        """Where the labels stand among the classes, shape ``(N,)``."""
        classes, own = (x.long() if x.dtype == torch.bool else x for x in (self.classes, labels.contiguous()))
        place = torch.searchsorted(classes, own).clamp(max=len(classes) - 1)  # which does not compare truth values
        if not bool((self.classes[place] == labels).all()):
            unknown = sorted(set(labels.tolist()) - set(self.classes.tolist()))
            raise BadInput(
                f"labels {unknown} are none of {self.classes.tolist()}, for which there are densities. Fit these "
                "classes too, or leave their rows out."
            )
        return place

    def labels(self, X: Tensor) -> Tensor:
        """The likeliest label of each datum, shape ``(N,)``."""
        return self.classes[self.log_proba(X).argmax(-1)]

    def plot(
        self,
        axes: Axes | None = None,
        *,
        X: Tensor | None = None,
        labels: Tensor | None = None,
        inputs: tuple[int, int] = (0, 1),
    ) -> Axes:
        """The components of each class over data: a line around nine tenths of each, in colour and dashes of its class.

        The wider a line, the larger the component's share of its class.

        >>> posterior.plot(X=X, labels=labels)  # doctest: +SKIP

        :param axes: to draw on; None makes a figure of its own.
        :param X: data to draw, ``(N, m)``, as points in colour and shape of their class; None for none.
        :param labels: theirs, ``(N,)``.
        :param inputs: the two columns on the axes.
        :raises BadInput: for columns that are not there, data without their labels, and densities without components.
        :raises ImportError: without matplotlib.
        """
        axes = display.axes_or_own(axes)
        given = self._by_class(X, labels)
        for number, (label, posterior) in enumerate(zip(self.classes.tolist(), self.posteriors, strict=True)):
            plane, line, points = _plane(posterior, inputs), display.line_of(number), display.points_of(number)
            if given:
                axes.plot(*given[number][:, inputs].T.tolist(), **points, markersize=display.SMALL, alpha=0.5)
            display.kernel_ellipses(
                axes, plane.log_mixing[0].exp(), plane.loc[0], plane.tril[0], mass=display.PROB, **line
            )
            name = f"{label:g}" if isinstance(label, float) else label
            axes.plot([], [], **(points | line), label=f"class {name}")
        display.with_labels(axes, f"input {inputs[0]}", f"input {inputs[1]}", legend=False)
        axes.legend(title=f"lines hold {display.percent(display.PROB)} % of each component")
        return axes

    def _by_class(self, X: Tensor | None, labels: Tensor | None) -> list[Tensor]:
        """The rows of each class; none where there are no data."""
        if X is None and labels is None:
            return []
        if X is None or labels is None or labels.shape != X.shape[:1]:
            raise BadInput("plot(X=..., labels=...): expected both or neither, and a label for each row of X.")
        place = self._places(labels)
        return [X[place == number] for number in range(len(self.classes))]


def _plane(posterior: Any, inputs: tuple[int, int]) -> MixtureDensity:
    """The components of a density in two of its columns."""
    if not hasattr(posterior, "density"):
        raise BadInput(
            f"a {type(posterior).__name__} has no density() of components in closed form; expected mixtures, as "
            f"EvidenceEM(gaussian_mixture(...)) fits them. Draw log_density(X) over a grid."
        )
    density: MixtureDensity = posterior.density()
    display.check_plane("inputs", inputs, density.loc.shape[-1])
    return density.marginal(inputs)


ClassPrior = Callable[[Tensor, Tensor], Tensor]  # log densities (N, C) and class numbers (N,) to log probabilities (C,)


def empirical_class_prior(log_density: Tensor, place: Tensor) -> Tensor:
    """Log shares of the classes among the data, shape ``(C,)``: the default."""
    counts = torch.bincount(place, minlength=log_density.shape[-1]).to(log_density)
    return counts.log() - math.log(len(place))


def fitted_class_prior(log_density: Tensor, place: Tensor) -> Tensor:
    """Log class probabilities under which the labels of the training data are likeliest given ``x``, shape ``(C,)``.

    They make good for densities that are too high or too low throughout.  The likelihood is concave in them; ascent by
    L-BFGS, from the shares.  Husmeier (2000), sec. 4.1, optimises them in this sense.
    """
    own = torch.nn.functional.one_hot(place, log_density.shape[-1]).to(log_density)

    def label_likelihood(log_prior: Tensor) -> tuple[Tensor, Tensor]:
        log_proba = (log_density + log_prior).log_softmax(-1)  # of one row of log_prior, (1, C)
        return (own * log_proba).sum().reshape(1), (own - log_proba.exp()).sum(0, keepdim=True)

    begin, level = empirical_class_prior(log_density, place), len(place) * torch.finfo(own.dtype).eps ** 0.5
    ends = lbfgs.ascend(label_likelihood, begin.unsqueeze(0), tolerance=level, num_steps=NUM_STEPS)
    return ends[0].log_softmax(-1)


@entry_point
def class_conditional(
    engine: Any, X: Tensor, labels: Tensor, log_prior: Tensor | ClassPrior = empirical_class_prior
) -> ClassConditional:
    """Fit ``engine`` to each class on its own.

    :param X: shape ``(N, m)``.
    :param labels: shape ``(N,)``.
    :param log_prior: :func:`empirical_class_prior` of the classes, :func:`fitted_class_prior` for the labels, or log
        class probabilities in ascending order of the labels, ``(C,)``.
    :raises BadInput: when labels and data do not match, or a class has fewer than two data.
    """
    check_tensor("X", X, "rows, shape (N, m)")
    names = "Write torch.as_tensor(...) for numbers, around numpy.unique(labels, return_inverse=True)[1] for names."
    check_tensor("labels", labels, "whole numbers, shape (N,)", names)
    if labels.shape != X.shape[:1]:
        raise BadInput(f"labels has shape {tuple(labels.shape)}; expected ({len(X)},), one for each row of X.")
    if not len(X) or bool(labels.isnan().any()):
        raise BadInput(
            f"X has {len(X)} rows, {int(labels.isnan().sum())} of label nan; expected data, and a label for each."
        )
    classes, place, counts = labels.unique(return_inverse=True, return_counts=True)
    if isinstance(log_prior, Tensor) and log_prior.shape != classes.shape:
        raise BadInput(f"log_prior has shape {tuple(log_prior.shape)}; expected ({len(classes)},), one for each class.")
    if bool((counts < 2).any()):
        rare = classes[counts < 2].tolist()
        raise BadInput(f"classes {rare} have a single datum; expected at least two, or no density can be fitted.")
    posteriors = tuple(engine.run(X[labels == c]) for c in classes)
    if not isinstance(log_prior, Tensor):
        log_prior = log_prior(torch.stack([p.log_prob(X) for p in posteriors], -1), place)
    return ClassConditional(classes, posteriors, log_prior)
