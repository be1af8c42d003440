"""The rounds of evidence-regularised EM over a batch of restarts: errors of each, failures contained, deletion."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_evidence.iterate import Fit, Status, Stop, iterate
from pyro_evidence.mixture import mode, rows
from pyro_evidence.mixture.data import ResponseUnits
from pyro_evidence.mixture.evidence import MixtureCurvature
from pyro_evidence.mixture.expectation import Mixture, MixtureData, e_step, rows_of
from pyro_evidence.mixture.mode import Modes
from pyro_evidence.mixture.updates import EStep, Ties, Unregularised, Update, estep

SETTLED = 1e-3  # change of every log precision and share in one round, below which rounds that only compare end


@dataclass(frozen=True)
class MixtureRestarts:
    """One iterate of all restarts.  Built by :func:`first` and :func:`advance`."""

    expected: EStep
    update: Update
    failed: Tensor  # (R,) bool: rows that stay at their last good state
    change: Tensor  # (R,) largest change of a log hyperparameter in the last round
    num_rounds: int = 0
    failures: Mapping[int, str] = field(default_factory=dict)  # what happened to the rows that failed

    @cached_property
    def log_evidence(self) -> Tensor:
        """Laplace log evidence at the current weights, in the engine's curvature and units, nats, ``(R,)``."""
        found = self.expected.log_evidence
        return torch.where(self.failed | ~found.isfinite(), -torch.inf, found)

    @cached_property
    def objective(self) -> float:
        """Log evidence of the restart that has most."""
        best = float(self.log_evidence.max())
        return best if best > -torch.inf else float(self.expected.stats.log_likelihood.max())

    @property
    def gradient_norm(self) -> float:
        """How far the last round moved any restart, in units of log precision: zero at a fixed point."""
        return float(self.change.amax())

    @cached_property
    def occam(self) -> Tensor:
        """Log evidence with what integrating the hyperparameters out takes from it; ``(R,)``."""
        found = self.log_evidence + mode.occam_factor(self.expected)
        return torch.where(found.isfinite(), found, -torch.inf)

    @cached_property
    def modes(self) -> Modes:
        """Every restart's mode at its hyperparameters, with the full Hessian where it may be the highest."""
        return mode.modes(self.expected)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What each restart that failed says."""
        return tuple(f"restart {row}: {text}" for row, text in self.failures.items())

    @property
    def verdict(self) -> Status | None:
        """No further step when every restart has failed."""
        return Status.FAILED if len(self.failures) == len(self.failed) else None


def first(
    data: MixtureData, mixture: Mixture, ties: Ties, curvature: MixtureCurvature, update: Update
) -> MixtureRestarts:
    """The batch at its start."""
    expected = estep(data, mixture, ties, curvature)
    failed = torch.zeros(len(mixture.w), dtype=torch.bool, device=mixture.w.device)
    return MixtureRestarts(expected, update, failed, expected.stats.log_likelihood.new_full((len(failed),), torch.inf))


def advance(batch: MixtureRestarts) -> MixtureRestarts:
    """One round; rows that become non-finite keep their last good state, and say why."""
    old, new = batch.expected.mixture, batch.update(batch.expected)
    change = rows.change(old, new)
    if not math.isfinite(float(change.sum())) or batch.failures:
        return _without_failures(batch, new, change)
    new, ties = (new, batch.expected.ties) if new.all_active else _packed(new, batch.expected.ties)
    expected = estep(batch.expected.data, new, ties, batch.expected.curvature)
    after = replace(batch, expected=expected, change=change, num_rounds=batch.num_rounds + 1)
    return after if math.isfinite(float(expected.stats.log_likelihood.sum())) else _without_failures(batch, new, change)


def _without_failures(batch: MixtureRestarts, new: Mixture, change: Tensor) -> MixtureRestarts:
    """A round in which some rows fail, or have failed before: these keep their last good state."""
    old, expected = batch.expected.mixture, batch.expected
    sound = change.isfinite() & ~batch.failed
    tried = new.where(sound, old)
    stats = estep(expected.data, tried, expected.ties, expected.curvature).stats
    good = sound & stats.log_likelihood.isfinite()
    lost = (~good & ~batch.failed).nonzero().flatten().tolist()
    reasons = {row: f"round {batch.num_rounds + 1}: {rows.complaint(new, row)}" for row in lost}
    mixture = new.where(good, old)
    change = torch.where(good, change, 0.0)
    failures = {**batch.failures, **reasons}
    expected = estep(expected.data, mixture, expected.ties, expected.curvature)
    return MixtureRestarts(expected, batch.update, ~good, change, batch.num_rounds + 1, failures)


def _packed(mixture: Mixture, ties: Ties) -> tuple[Mixture, Ties]:
    """A component pruned in every restart?  Then go on without it."""
    if bool(mixture.active.all(-1).any()) or not rows.is_exchangeable(ties, mixture.loc):
        return mixture, ties
    return rows.packed(mixture, ties)


def rounds(batch: MixtureRestarts, update: Update, num_steps: int) -> MixtureRestarts:
    """A fixed number of rounds of ``update``."""
    batch = replace(batch, update=update)
    for _ in range(num_steps):
        batch = advance(batch)
    return batch


def settled(batch: MixtureRestarts, num_steps: int) -> MixtureRestarts:
    """After rounds until nothing changes much any more, ``num_steps`` at most."""
    for _ in range(num_steps):
        batch = advance(batch)
        if float(batch.change.amax()) < SETTLED:
            break
    return batch


def em(
    batch: MixtureRestarts,
    update: Update,
    warm_up: int,
    stop: Stop,
    step: Callable[[MixtureRestarts], MixtureRestarts] = advance,
) -> Fit[MixtureRestarts]:
    """Unregularised warm-up, with the gamma prior of ``update`` if it has one, then ``update`` until ``stop``."""
    if warm_up:
        exactly = replace(stop, tolerance=-1.0, num_steps=warm_up)
        warm = iterate(step, _ready(batch, warming(update)), exactly, "EvidenceEM, warm-up")
        batch = warm.state
        if warm.status is not Status.STEP_LIMIT:
            return Fit(_ready(batch, update), warm.status, warm.objectives[-1:])
    return iterate(step, _ready(batch, update), stop, "EvidenceEM")


def warmed(batch: MixtureRestarts, update: Update, num_steps: int) -> MixtureRestarts:
    """The batch after the warm-up, ready for ``update``."""
    return _ready(rounds(batch, warming(update), num_steps), update)


def warming(update: Update) -> Update:
    """The warm-up's own update: unregularised, with the gamma prior of ``update`` if it has one."""
    return Unregularised(rho=getattr(update, "rho", 0.0))


def _ready(batch: MixtureRestarts, update: Update) -> MixtureRestarts:
    return replace(batch, update=update, change=torch.full_like(batch.change, torch.inf))


def alone(batch: MixtureRestarts, row: Tensor) -> MixtureRestarts:
    """One restart ``(1,)`` of the batch, as a batch of its own."""
    mixture, ties = batch.expected.mixture[row], batch.expected.ties
    if rows.is_exchangeable(ties, mixture.loc):
        mixture, ties = rows.packed(mixture, ties)
    expected = estep(rows_of(batch.expected.data, row), mixture, ties, batch.expected.curvature)
    return replace(batch, expected=expected, failed=batch.failed[row], change=batch.change[row], failures={})


@dataclass(frozen=True)
class Journal:
    """Rounds that write down how well they predict, from the start on.

    :ivar units: of the model.
    :ivar unseen: data that are not fitted, in the units inside.
    :ivar rounds: minus the mean log density after each round of the data that are fitted, and of these, ``(R,)`` each.
    """

    units: ResponseUnits
    unseen: tuple[MixtureData, ...]
    rounds: list[tuple[Tensor, ...]] = field(default_factory=list)

    def __call__(self, batch: MixtureRestarts) -> MixtureRestarts:
        after = advance(batch)
        self.look(after)
        return after

    def look(self, batch: MixtureRestarts) -> None:
        """An entry for the batch as it stands; what it says of the data that are fitted costs nothing."""
        expected = batch.expected
        unseen = (self._nll(data, e_step(data, expected.mixture).log_likelihood) for data in self.unseen)
        self.rounds.append((self._nll(expected.data, expected.stats.log_likelihood), *unseen))

    def _nll(self, data: MixtureData, log_likelihood: Tensor) -> Tensor:
        """Nats per datum, the model's units."""
        return (self.units.log_jacobian(data) - log_likelihood) / data.num_data

    def path(self, row: int) -> tuple[Tensor, ...]:
        """Minus mean log density after each round, nats per datum, the model's units, ``(S,)`` for each of the data.

        :param row: the restart; where the batch has shrunk to one row, that one is meant.
        """
        columns = zip(*self.rounds, strict=True)
        return tuple(torch.stack([x[min(row, len(x) - 1)] for x in column]) for column in columns)
