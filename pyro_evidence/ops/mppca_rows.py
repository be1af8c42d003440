"""Rows of a batch of mixtures of probabilistic PCA: choosing, checking."""

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from pyro_evidence.ops.mppca import Analysers


def rebuilt(at: Analysers, change: Callable[[str, Tensor], Tensor]) -> Analysers:
    """The parameters with ``change(name, value)`` in the place of each."""
    return Analysers(**{f.name: change(f.name, getattr(at, f.name)) for f in fields(Analysers)})


def row(at: Analysers, index: Tensor) -> Analysers:
    """Some rows of a batch."""
    return rebuilt(at, lambda _, x: x[index])


def chosen(take: Tensor, a: Analysers, b: Analysers) -> Analysers:
    """Rows of ``a`` where ``take`` ``(R,)``, else of ``b``."""
    return rebuilt(a, lambda f, x: torch.where(take.reshape(-1, *[1] * (x.dim() - 1)), x, getattr(b, f)))


def is_sound(at: Analysers) -> Tensor:
    """Rows whose numbers are finite and whose precisions are positive, shape ``(R,)`` bool."""
    shares = torch.where(at.active, at.log_mixing, 0.0)
    parts = (at.W, at.mu, at.beta.log(), at.alpha.log(), shares)
    return torch.stack([x.flatten(1).sum(-1) for x in parts]).sum(0).isfinite()  # finite only if every term is
