"""Components that are left out after the rounds, one by one."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pyro_evidence.arguments import check_count
from pyro_evidence.infer.mixture_em import Batch, first, rounds
from pyro_evidence.ops import mixture_rows
from pyro_evidence.ops.mixture import Mixture, rows_of
from pyro_evidence.ops.mixture_updates import estep, pruned


class Deletion(Protocol):
    """What is tried after the rounds."""

    @property
    def after(self) -> int:
        """Most rounds before it."""

    def __call__(self, batch: Batch) -> Batch:
        """The batch with components left out."""


@dataclass(frozen=True)
class GreedyDeletion:
    """Leave out one component, re-fit, keep the smaller mixture if its Occam-corrected log evidence is higher; repeat.

    All candidates of all restarts are one batch.  It finds the truth when the truth is a small mixture; where it is
    not, the smaller mixture has the slightly lower test density: pass ``deletion=None`` then.

    :ivar num_steps: rounds of re-fitting.
    :ivar after: rounds after which it begins, settled or not; what is chosen goes on to convergence.
    :ivar most: restarts that take part, those of highest Occam-corrected log evidence.
    """

    num_steps: int = 25
    after: int = 60
    most: int = 3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_count(f"GreedyDeletion: {name}", value)

    def __call__(self, batch: Batch) -> Batch:
        """The batch after all deletions that gain."""
        if mixture_rows.is_exchangeable(batch.at.ties, batch.at.mixture.loc):
            mixture, ties = mixture_rows.packed(batch.at.mixture, batch.at.ties)
            batch = replace(batch, at=estep(batch.at.data, mixture, ties, batch.at.curvature))
        height = batch.modes.occam
        last = height.sort(descending=True).values[min(self.most, len(height)) - 1]
        gained = ~batch.failed & (height >= last)
        while bool(gained.any()):
            batch, height, gained = self._once(batch, height, gained)
        return batch

    def _once(self, batch: Batch, height: Tensor, alive: Tensor) -> tuple[Batch, Tensor, Tensor]:
        mixture = batch.at.mixture
        able = mixture.active & alive.unsqueeze(-1) & (mixture.active.sum(-1, keepdim=True) > 1)
        rows, out = able.nonzero().unbind(-1)
        if not len(rows):
            return batch, height, torch.zeros_like(alive)
        keep = mixture.active[rows].scatter(-1, out.unsqueeze(-1), False)
        small = pruned(mixture_rows.row(mixture, rows), keep)
        begun = first(rows_of(batch.at.data, rows), small, batch.at.ties, batch.at.curvature, batch.update)
        tried = rounds(begun, batch.update, self.num_steps)
        heights = torch.where(tried.failed, -torch.inf, tried.modes.occam)
        return _adopted(batch, height, (rows, heights, tried.at.mixture))


def _adopted(batch: Batch, height: Tensor, tried: tuple[Tensor, Tensor, Mixture]) -> tuple[Batch, Tensor, Tensor]:
    """Each restart's best candidate where it is higher."""
    rows, heights, mixtures = tried
    table = torch.where(rows == torch.arange(len(height)).unsqueeze(-1), heights, -torch.inf)  # (R, candidates)
    best, which = table.max(-1)
    gained = best > height
    mixtures = mixture_rows.padded(mixtures, batch.at.mixture)
    mixture = mixture_rows.chosen(gained, mixture_rows.row(mixtures, which), batch.at.mixture)
    at = estep(batch.at.data, mixture, batch.at.ties, batch.at.curvature)
    return replace(batch, at=at), torch.where(gained, best, height), gained
