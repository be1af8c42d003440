"""Classification by one density per class."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput


class Density(Protocol):
    """A posterior that can tell the log density of new data."""

    def log_prob(self, *args: Any) -> Tensor:
        """Log density of each datum, nats, shape ``(N,)``."""


class DensityEngine(Protocol):
    """An engine that fits a density to data."""

    def run(self, *args: Any) -> Density:
        """Fit to data of shape ``(N, m)``."""


@dataclass(frozen=True)
class ClassConditional:
    """``p(class | x)`` proportional to ``p(class) p(x | class)``; Husmeier (2000), eqs. 4.1 and 4.2.

    :ivar classes: the labels, ascending, shape ``(C,)``.
    :ivar posteriors: one density per class.
    :ivar log_prior: log class probabilities, shape ``(C,)``.
    """

    classes: Tensor
    posteriors: tuple[Any, ...]
    log_prior: Tensor

    def log_density(self, X: Tensor) -> Tensor:
        """``log p(x_n | class)``, nats, shape ``(N, C)``."""
        return torch.stack([p.log_prob(X) for p in self.posteriors], -1)

    def log_proba(self, X: Tensor) -> Tensor:
        """``log p(class | x_n)``, shape ``(N, C)``."""
        return (self.log_density(X) + self.log_prior).log_softmax(-1)

    def log_prob(self, X: Tensor, labels: Tensor) -> Tensor:
        """``log p(label_n | x_n)``, nats, shape ``(N,)``.

        :raises BadInput: on a label that no density was fitted for.
        """
        place = torch.searchsorted(self.classes, labels.contiguous()).clamp(max=len(self.classes) - 1)
        if not bool((self.classes[place] == labels).all()):
            unknown = sorted(set(labels.tolist()) - set(self.classes.tolist()))
            raise BadInput(f"labels {unknown} are none of {self.classes.tolist()}, for which there are densities.")
        return self.log_proba(X).gather(-1, place.unsqueeze(-1)).squeeze(-1)

    def predict(self, X: Tensor) -> Tensor:
        """The likeliest label of each datum, shape ``(N,)``."""
        return self.classes[self.log_proba(X).argmax(-1)]


def class_conditional(
    engine: DensityEngine, X: Tensor, labels: Tensor, log_prior: Tensor | None = None
) -> ClassConditional:
    """Fit ``engine`` to each class on its own.

    :param X: shape ``(N, m)``.
    :param labels: shape ``(N,)``.
    :param log_prior: log class probabilities in ascending order of the labels; None for the classes' shares.
    :raises BadInput: when labels and data do not match, or a class has fewer than two data.
    """
    if labels.shape != X.shape[:1]:
        raise BadInput(f"labels has shape {tuple(labels.shape)}; expected ({len(X)},), one for each row of X.")
    classes, counts = labels.unique(return_counts=True)
    if log_prior is not None and log_prior.shape != classes.shape:
        raise BadInput(f"log_prior has shape {tuple(log_prior.shape)}; expected ({len(classes)},), one for each class.")
    if bool((counts < 2).any()):
        rare = classes[counts < 2].tolist()
        raise BadInput(
            f"classes {rare} have a single datum; expected at least two of each, or no density can be fitted."
        )
    posteriors = tuple(engine.run(X[labels == c]) for c in classes)
    shares = counts.to(X).log() - math.log(len(labels)) if log_prior is None else log_prior
    return ClassConditional(classes, posteriors, shares)
