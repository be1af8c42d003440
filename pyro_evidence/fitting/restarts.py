"""Rounds of EM over many restarts as one batch: a restart that fails stays at its last good state, the others go on."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyro_evidence.errors import NotConverged
from pyro_evidence.fitting.iterate import Fit, Status, Stop, iterate

LONGEST = 16.0  # steps of one leap; longer ones are often refused, and cost a pass
CRAWLING = 20  # rounds after which they are taken to crawl


@dataclass(frozen=True, kw_only=True)
class Restarts(ABC):
    """One iterate of all restarts.  A family of models says what a round leads to, and what that is worth."""

    failed: Tensor  # (R,) bool: rows that stay at their last good state
    change: Tensor  # (R,) largest change of a log hyperparameter in the last round
    num_rounds: int = 0
    failures: Mapping[int, str] = field(default_factory=dict)  # what happened to the rows that failed
    update: Any = None  # the settings of a round, which a warm-up changes for a while

    @property
    @abstractmethod
    def parameters(self) -> Any:
        """What a round changes: a value with rows ``(R,)`` in front."""

    @property
    @abstractmethod
    def log_likelihood(self) -> Tensor:
        """At the parameters, nats, ``(R,)``."""

    @property
    @abstractmethod
    def log_evidence(self) -> Tensor:
        """Log evidence, responsibilities held, in the units inside, nats, ``(R,)``; -inf where there is none."""

    @abstractmethod
    def proposed(self) -> Any:
        """The parameters after one more round, sound or not."""

    @abstractmethod
    def reached(self, parameters: Any) -> Any:
        """These restarts with an E-step at other parameters."""

    @abstractmethod
    def change_to(self, parameters: Any) -> Tensor:
        """Largest change of a log hyperparameter on the way there, ``(R,)``; not finite where they are not sound."""

    @abstractmethod
    def complaint(self, parameters: Any, row: int) -> str:
        """What is wrong with one row, in words."""

    def warm_up(self, num_rounds: int, step: "Step[Any]") -> "Sequence[Phase]":
        """The phases of a warm-up of so many rounds."""
        return ()

    def ahead(self, before: Any, after: Any) -> Any:
        """Parameters to which a leap goes that begins ``before`` these, where the next round leads ``after``.

        They are had from their ``coordinates``, which have no bounds; a row whose ``present`` parts change on the way,
        ``(R, ...)`` bool, goes to the last of the three.
        """
        states = (before, self.parameters, after)
        if any(x.present.shape != after.present.shape for x in states):
            return after
        parts = [x.coordinates for x in states]
        end = leap(*(torch.cat([x.flatten(1) for x in each], -1) for each in parts))
        ends = end.split([x[0].numel() for x in parts[-1]], -1)
        found = after.placed(*(y.reshape(x.shape) for y, x in zip(ends, parts[-1], strict=True)))
        same = [(x.present == after.present).all(-1) for x in states]
        return found.where(torch.stack(same).all(0), after)

    @cached_property
    def objective(self) -> float:
        """Log evidence of the restart that has most."""
        best = float(self.log_evidence.max())
        return best if best > -torch.inf else float(self.log_likelihood.max())

    @property
    def gradient_norm(self) -> float:
        """How far the last round moved any restart, in units of log precision: zero at a fixed point."""
        return float(self.change.amax())

    @property
    def reasons(self) -> tuple[str, ...]:
        """What each restart that failed says."""
        return tuple(f"restart {row}: {text}" for row, text in self.failures.items())

    @property
    def stop_reason(self) -> Status | None:
        """No further step when every restart has failed."""
        return Status.FAILED if bool(self.failed.all()) else None


Batch = TypeVar("Batch", bound=Restarts)
Step = Callable[[Batch], Batch]


@dataclass(frozen=True)
class Phase:
    """Some rounds of a warm-up."""

    update: Any
    step: Step[Any]
    num_rounds: int


def advance(batch: Batch) -> Batch:
    """The restarts after one more round."""
    return moved_to(batch, batch.proposed())


def moved_to(batch: Batch, new: Any) -> Batch:
    """After a round that leads to ``new``; rows that become non-finite keep their last good state, and say why."""
    change = batch.change_to(new)
    if math.isfinite(float(change.sum())) and not bool(batch.failed.any()):
        after = batch.reached(new)
        if math.isfinite(float(after.log_likelihood.sum())):
            return replace(after, change=change, num_rounds=batch.num_rounds + 1)
    return _without_failures(batch, new, change)


def slowly_converging(batch: Batch) -> Batch:
    """One more round, or, where the first :data:`CRAWLING` of them were not enough, two at once with a leap."""
    return advance(batch) if batch.num_rounds < CRAWLING else extrapolated(batch)


def extrapolated(batch: Batch) -> Batch:
    """The restarts after a round and a leap, or, in the rows where that is not better, after two rounds.

    A leap is taken where the log evidence there is at least that after the round before it, and a further round would
    move less: so the log evidence never falls where rounds do not lower it, and fixed points are what they were.
    Rows that leap cost two passes over the data, if others do not three.
    """
    middle = advance(batch)
    goal = middle.proposed()
    ahead = middle.ahead(batch.parameters, goal)
    tried = middle.reached(ahead)
    left = tried.change_to(tried.proposed())
    height = torch.maximum(batch.log_evidence, middle.log_evidence)
    good = (tried.log_evidence >= height) & left.isfinite() & ~middle.failed
    if bool(good.all()):
        return replace(tried, change=left, num_rounds=middle.num_rounds + 1)
    if not bool(good.any()):
        return moved_to(middle, goal)
    after = moved_to(middle, ahead.where(good, goal))
    return replace(after, change=torch.where(good, left, after.change))


def leap(start: Tensor, first: Tensor, second: Tensor) -> Tensor:
    r"""Where a fixed-point iteration is heading, from three iterates in unconstrained coordinates.

    .. math:: x_0 + 2 a r + a^2 v, \qquad r = x_1 - x_0, \quad v = (x_2 - x_1) - r, \quad a = \|r\| / \|v\|

    With ``a = 1`` this is the second iterate; ``a`` is held between 1 and :data:`LONGEST`.  One common rate of
    contraction ``1 - 1 / a`` is left out at once.  Varadhan and Roland (2008), scheme SqS3.

    :param start: rows ``(R, P)``, as are the others.
    :return: rows ``(R, P)``.
    """
    r = first - start
    v = second - first - r
    bend = v.norm(dim=-1, keepdim=True)
    length = r.norm(dim=-1, keepdim=True) / torch.where(bend > 0, bend, 1.0)  # what stands still has neither
    length = length.clamp(1.0, LONGEST)
    return start + 2.0 * length * r + length.square() * v


def _without_failures(batch: Batch, new: Any, change: Tensor) -> Batch:
    """A round in which some rows fail, or have failed before."""
    old, sound = batch.parameters, change.isfinite() & ~batch.failed
    good = sound & batch.reached(new.where(sound, old)).log_likelihood.isfinite()
    number, lost = batch.num_rounds + 1, (~good & ~batch.failed).nonzero().flatten().tolist()
    reasons = {row: f"round {number}: {batch.complaint(new, row)}" for row in lost}
    change, failures = torch.where(good, change, 0.0), {**batch.failures, **reasons}
    after = batch.reached(new.where(good, old))
    return replace(after, failed=~good, change=change, num_rounds=number, failures=failures)


def require_any(batch: Restarts, remedy: str) -> None:
    """Complain where no restart is left.

    :param remedy: an update that may help.
    :raises NotConverged: with what each of them says.
    """
    if batch.stop_reason is Status.FAILED:
        messages = "\n".join(batch.reasons)
        raise NotConverged(f"EvidenceEM: every restart failed. Pass update={remedy}.\n{messages}")


def repeated(batch: Batch, num_rounds: int, step: Step[Batch] = advance) -> Batch:
    """A fixed number of rounds."""
    for _ in range(num_rounds):
        batch = step(batch)
    return batch


def ready(batch: Batch) -> Batch:
    """As if nothing had been done yet: the next rounds may stop when they change little."""
    return replace(batch, change=torch.full_like(batch.change, torch.inf))


def warmed(batch: Batch, num_rounds: int, step: Step[Batch] = advance) -> Batch:
    """After all rounds of the warm-up, ready for the first one of its own update."""
    after = batch
    for phase in batch.warm_up(num_rounds, step):
        after = repeated(replace(after, update=phase.update), phase.num_rounds, phase.step)
    return ready(replace(after, update=batch.update))


def run_em(batch: Batch, num_warm: int, stop: Stop, step: Step[Batch] = advance) -> Fit[Batch]:
    """The warm-up, then rounds until ``stop``."""
    after = batch
    for phase in (p for p in batch.warm_up(num_warm, step) if p.num_rounds):
        exactly = replace(stop, tolerance=-1.0, num_steps=phase.num_rounds)
        warm = iterate(phase.step, ready(replace(after, update=phase.update)), exactly, "EvidenceEM, warm-up")
        after = warm.state
        if warm.status is not Status.STEP_LIMIT:
            return Fit(ready(replace(after, update=batch.update)), warm.status, warm.objectives[-1:])
    return iterate(step, ready(replace(after, update=batch.update)), stop, "EvidenceEM")
