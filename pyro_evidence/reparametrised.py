"""A model whose weights live on a few directions, with a prior of their own there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
from pyro import poutine
from torch import Tensor

Model = Callable[..., Any]
AXES = "axes"  # the latent site that replaces the weights


@dataclass(frozen=True)
class OnAxes:
    """The user's model with ``w = directions u``: latent ``axes``, shape ``(K,)``, in place of the weights.

    The weights are recorded as ``pyro.deterministic`` under their own names; their prior is not counted.
    """

    model: Model
    directions: Tensor  # (M, K)
    prior: Any  # distribution of batch shape (K,)
    shapes: dict[str, tuple[int, ...]]  # of the sites that the weights are split into

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on one draw of the axes."""
        w = self.directions @ pyro.sample(AXES, self.prior.to_event(1)).to(self.directions)
        return _with_weights(self.model, self._split(w))(*args, **kwargs)

    def _split(self, w: Tensor) -> dict[str, Tensor]:
        sizes = [_size(shape) for shape in self.shapes.values()]
        pieces = zip(self.shapes.items(), w.split(sizes), strict=True)
        return {n: pyro.deterministic(n, piece.reshape(shape)) for (n, shape), piece in pieces}


@dataclass(frozen=True)
class WithWeights:
    """The user's model with its weights fixed: what is left when every axis is pruned."""

    model: Model
    values: dict[str, Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; the weights' prior is not counted."""
        fixed = {n: pyro.deterministic(n, v) for n, v in self.values.items()}
        return _with_weights(self.model, fixed)(*args, **kwargs)


def _with_weights(model: Model, values: dict[str, Tensor]) -> Model:
    return poutine.block(poutine.condition(model, data=values), hide=list(values))


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
