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
from pyro_evidence.ops.mixture_mode import Modes
from pyro_evidence.ops.mixture_updates import EStep, Ties, Unregularised, Update, estep


@dataclass(frozen=True)
class Batch:
    """One iterate of all restarts.  Built by :func:`first` and :func:`advance`."""

    at: EStep
    update: Update
    failed: Tensor  # (R,) bool: rows that stay at their last good state
    change: Tensor  # (R,) largest change of a log hyperparameter in the last round
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
        """How far the last round moved any restart, in units of log precision: zero at a fixed point."""
        return float(self.change.amax())

    @cached_property
    def modes(self) -> Modes:
        """Every restart's mode at its hyperparameters, with the full Hessian."""
        return mixture_mode.modes(self.at)

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
    return Batch(at, update, failed, at.stats.log_likelihood.new_full((len(failed),), torch.inf))


def advance(batch: Batch) -> Batch:
    """One round; rows that would leave the finite numbers stay where they are, and say why."""
    old, new = batch.at.mixture, batch.update(batch.at)
    change = mixture_rows.change(old, new)
    if not math.isfinite(float(change.sum())) or batch.failures:
        return _without_failures(batch, new, change)
    new, ties = (new, batch.at.ties) if new.all_active else _packed(new, batch.at.ties)
    at = estep(batch.at.data, new, ties, batch.at.curvature)
    after = replace(batch, at=at, change=change, num_rounds=batch.num_rounds + 1)
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
    change = torch.where(good, change, 0.0)
    failures = {**batch.failures, **reasons}
    at = estep(at.data, mixture, at.ties, at.curvature)
    return Batch(at, batch.update, ~good, change, batch.num_rounds + 1, failures)


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


def em(batch: Batch, update: Update, warm_up: int, stop: Stop, step: Callable[[Batch], Batch] = advance) -> Fit[Batch]:
    """Unregularised warm-up, with the gamma prior of ``update`` if it has one, then ``update`` until ``stop``."""
    if warm_up:
        exactly = Stop(tolerance=-1.0, num_steps=warm_up, progress=stop.progress)
        warm = iterate(step, _ready(batch, warming(update)), exactly, "EvidenceEM, warm-up")
        batch = warm.state
        if warm.status is not Status.STEP_LIMIT:
            return Fit(_ready(batch, update), warm.status, warm.objectives[-1:])
    return iterate(step, _ready(batch, update), stop, "EvidenceEM")


def warmed(batch: Batch, update: Update, num_steps: int) -> Batch:
    """The batch after the warm-up, ready for ``update``."""
    return _ready(rounds(batch, warming(update), num_steps), update)


def warming(update: Update) -> Update:
    """The warm-up's own update: unregularised, with the gamma prior of ``update`` if it has one."""
    return Unregularised(rho=getattr(update, "rho", 0.0))


def _ready(batch: Batch, update: Update) -> Batch:
    return replace(batch, update=update, change=torch.full_like(batch.change, torch.inf))


def alone(batch: Batch, row: Tensor) -> Batch:
    """One restart ``(1,)`` of the batch, as a batch of its own."""
    mixture, ties = mixture_rows.row(batch.at.mixture, row), batch.at.ties
    if mixture_rows.is_exchangeable(ties, mixture.loc):
        mixture, ties = mixture_rows.packed(mixture, ties)
    at = estep(rows_of(batch.at.data, row), mixture, ties, batch.at.curvature)
    return replace(batch, at=at, failed=batch.failed[row], change=batch.change[row], failures={})
