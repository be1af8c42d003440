"""A program of other people: a model, its data, the settings, what a fit must come to and what its summary says."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=random(seed), dtype=torch.float64)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=random(seed), dtype=torch.float64)


def coin(p: Tensor, seed: int = 0) -> Tensor:
    return torch.bernoulli(p, generator=random(seed))


def poisson(rate: Tensor, seed: int = 0) -> Tensor:
    return torch.poisson(rate, generator=random(seed))


def ordered_logistic(predictor: Tensor, cuts: Tensor, y: Tensor) -> Tensor:
    """Log probabilities of ordered labels, without the writes into tensors that ``vmap`` does not take."""
    below = (cuts - predictor.unsqueeze(-1)).sigmoid()
    one = torch.ones_like(below[..., :1])
    p = torch.cat([below, one], -1) - torch.cat([0.0 * one, below], -1)
    return p.gather(-1, y.unsqueeze(-1)).squeeze(-1).log()


@dataclass(frozen=True)
class Program:
    """A script with one line changed: the engine.

    :ivar model: as its author wrote it, in our words.
    :ivar data: makes the arguments of ``run``, from fixed seeds.
    :ivar settings: of the engine.
    :ivar engine: which takes the model and the settings.
    :ivar says: words that the summary must hold.
    :ivar refused: words of the error that the fit must end in; none: it ends in a posterior.
    :ivar summed: the same density with its discrete sites summed on paper, for references; None: the model itself.
    :ivar compared: whether its moments have a reference, in tests/oracles/gallery.json.
    :ivar closed_form: log evidence at its maximum, from the data, where everything is a param.
    :ivar heavy: sites whose posterior has no second moment; they are not compared.
    :ivar slow: more than a few seconds.
    :ivar pending: why the entry fails today.
    """

    model: Callable[..., Any]
    data: Callable[[], tuple[Any, ...]]
    settings: dict[str, Any] = field(default_factory=dict)
    engine: Callable[..., Any] = LaplaceEvidence
    says: tuple[str, ...] = ()
    refused: str = ""
    summed: Callable[..., Any] | None = None
    compared: bool = True
    closed_form: Callable[..., float] | None = None
    heavy: tuple[str, ...] = ()
    slow: bool = False
    pending: str = ""
