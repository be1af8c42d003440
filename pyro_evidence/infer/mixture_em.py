"""The loop of evidence-regularised EM over a batch of restarts: rounds, failures contained, deletion, choice."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_evidence.infer.iterate import Fit, Status, Stop, iterate
from pyro_evidence.ops import mixture_mode, mixture_rows
from pyro_evidence.ops.mixture import Mixture, MixtureData, rows_of
from pyro_evidence.ops.mixture_evidence import MixtureCurvature
from pyro_evidence.ops.mixture_updates import EStep, Ties, Unregularised, Update, estep, pruned


@dataclass(frozen=True)
class Batch:
    """One iterate of all restarts.  Built by :func:`first` and :func:`advance`."""

    at: EStep
    update: Update
    failed: Tensor  # (R,) bool: rows that stay at their last good state
    moved: float  # largest change of a log hyperparameter in the last round
    num_rounds: int = 0
    failures: Mapping[int, str] = field(default_factory=dict)  # what happened to the rows that failed

    @cached_property
    def log_evidence(self) -> Tensor:
        """Laplace log evidence at the current weights, in the engine's curvature and units, nats, ``(R,)``."""
        found = self.at.log_evidence
        return torch.where(self.failed | ~found.isfinite(), -torch.inf, found)

    @cached_property
    def objective(self) -> float:
        """Log evidence of the restart that has most."""
        best = float(self.log_evidence.max())
        return best if best > -torch.inf else float(self.at.stats.log_likelihood.max())

    @property
    def gradient_norm(self) -> float:
        """How far the last round moved, in units of log precision: zero at a fixed point."""
        return self.moved

    @property
    def reasons(self) -> tuple[str, ...]:
        """What each restart that failed says."""
        return tuple(f"restart {row}: {text}" for row, text in self.failures.items())

    @property
    def verdict(self) -> Status | None:
        """No further step when every restart has failed."""
        return Status.FAILED if len(self.failures) == len(self.failed) else None


def first(data: MixtureData, mixture: Mixture, ties: Ties, curvature: MixtureCurvature, update: Update) -> Batch:
    """The batch at its start."""
    at = estep(data, mixture, ties, curvature)
    failed = torch.zeros(len(mixture.w), dtype=torch.bool, device=mixture.w.device)
    return Batch(at, update, failed, torch.inf)


def advance(batch: Batch) -> Batch:
    """One round; rows that would leave the finite numbers stay where they are, and say why."""
    old, new = batch.at.mixture, batch.update(batch.at)
    change = mixture_rows.change(old, new)
    if not math.isfinite(float(change.sum())) or batch.failures:
        return _without_failures(batch, new, change)
    moved = float(change.amax())
    new, ties = (new, batch.at.ties) if new.all_active else _packed(new, batch.at.ties)
    at = estep(batch.at.data, new, ties, batch.at.curvature)
    after = replace(batch, at=at, moved=moved, num_rounds=batch.num_rounds + 1)
    return after if math.isfinite(float(at.stats.log_likelihood.sum())) else _without_failures(batch, new, change)


def _without_failures(batch: Batch, new: Mixture, change: Tensor) -> Batch:
    """A round in which some rows fail, or have failed before: these keep their last good state."""
    old, at = batch.at.mixture, batch.at
    sound = change.isfinite() & ~batch.failed
    tried = mixture_rows.chosen(sound, new, old)
    stats = estep(at.data, tried, at.ties, at.curvature).stats
    good = sound & stats.log_likelihood.isfinite()
    lost = (~good & ~batch.failed).nonzero().flatten().tolist()
    reasons = {row: f"round {batch.num_rounds + 1}: {mixture_rows.complaint(new, row)}" for row in lost}
    mixture = mixture_rows.chosen(good, new, old)
    moved = float(torch.where(good, change, 0.0).amax())
    failures = {**batch.failures, **reasons}
    at = estep(at.data, mixture, at.ties, at.curvature)
    return Batch(at, batch.update, ~good, moved, batch.num_rounds + 1, failures)


def _packed(mixture: Mixture, ties: Ties) -> tuple[Mixture, Ties]:
    """A component pruned in every restart?  Then go on without it."""
    if bool(mixture.active.all(-1).any()) or not mixture_rows.is_exchangeable(ties, mixture.loc):
        return mixture, ties
    return mixture_rows.packed(mixture, ties)


def rounds(batch: Batch, update: Update, num_steps: int) -> Batch:
    """A fixed number of rounds of ``update``."""
    batch = replace(batch, update=update)
    for _ in range(num_steps):
        batch = advance(batch)
    return batch


def em(batch: Batch, update: Update, warm_up: int, stop: Stop) -> Fit[Batch]:
    """Unregularised warm-up, with the gamma prior of ``update`` if it has one, then ``update`` until ``stop``."""
    return iterate(advance, warmed(batch, update, warm_up), stop, "EvidenceEM")


def warmed(batch: Batch, update: Update, num_steps: int) -> Batch:
    """The batch after the warm-up, ready for ``update``."""
    warm = rounds(batch, Unregularised(rho=getattr(update, "rho", 0.0)), num_steps)
    return replace(warm, update=update, moved=torch.inf)


Deletion = Callable[[Batch], Batch]


@dataclass(frozen=True)
class GreedyDeletion:
    """Leave out one component, re-fit, keep the smaller mixture if its Occam-corrected log evidence is higher; repeat.

    All candidates of all restarts are one batch.  It finds the truth when the truth is a small mixture; where it is
    not, the smaller mixture has the slightly lower test density: pass ``deletion=None`` then.

    :ivar num_steps: rounds of re-fitting.
    """

    num_steps: int = 25

    def __call__(self, batch: Batch) -> Batch:
        """The batch after all deletions that gain."""
        if mixture_rows.is_exchangeable(batch.at.ties, batch.at.mixture.loc):
            mixture, ties = mixture_rows.packed(batch.at.mixture, batch.at.ties)
            batch = replace(batch, at=estep(batch.at.data, mixture, ties, batch.at.curvature))
        height = mixture_mode.modes(batch.at).occam
        gained = ~batch.failed
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
        heights = torch.where(tried.failed, -torch.inf, mixture_mode.modes(tried.at).occam)
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
