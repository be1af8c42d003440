"""EM for mixtures of any family: rounds of many restarts as one batch, the choice of one, components left out or split.

A restart that fails stays at its last good state, the others go on.  A component is left out, or split, as long as that
raises the evidence.  Candidates are one batch.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from pyro_evidence.errors import NotConverged
from pyro_evidence.fitting.iterate import Fit, Status, Stop, iterate, require_convergence
from pyro_evidence.fitting.process_state import restored_global_state
from pyro_evidence.numerics.batched import distinct, first_highest
from pyro_evidence.settings import check_count, stacklevel

LONGEST = 16.0  # steps of one leap; longer ones are often refused, and cost a pass
PLAIN_ROUNDS = 20  # rounds after which they are extrapolated


Batch = TypeVar("Batch", bound="Restarts")


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """One iterate of all restarts.  A family of models says what a round leads to, and what that is worth."""

    parameters: ClassVar[Any]  # that a round changes: a value with rows (R,) in front
    log_likelihood: ClassVar[Any]  # at the parameters, nats, (R,)
    log_evidence: ClassVar[Any]  # responsibilities held, in the units inside, nats, (R,); -inf where there is none
    proposed: ClassVar[Callable[..., Any]]  # the parameters after one more round, sound or not
    reached: ClassVar[Callable[..., Any]]  # these restarts with an E-step at other parameters
    # largest change of a log hyperparameter on the way to parameters, (R,); not finite where they are not sound
    change_to: ClassVar[Callable[..., Tensor]]
    complaint: ClassVar[Callable[..., str]]  # of parameters and a row: reason in words why it has failed

    failed: Tensor  # (R,) bool: rows that stay at their last good state
    change: Tensor  # (R,) largest change of a log hyperparameter in the last round
    num_rounds: int = 0
    failures: Mapping[int, str] = field(default_factory=dict)  # what happened to the rows that failed
    update: Any = None  # the settings of a round, which a warm-up changes for a while

    def defined(self, heights: Tensor) -> Tensor:
        """Heights of the restarts, -inf where there is none."""
        return torch.where(self.failed | ~heights.isfinite(), -torch.inf, heights)

    def warm_up(self, num_rounds: int, step: "Step[Any]") -> "Sequence[Phase]":
        """The phases of a warm-up of so many rounds: an update, a round, and the number of these."""
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

    @classmethod
    def begun(cls: type[Batch], like: Tensor, **parts: Any) -> Batch:
        """A batch at its start.

        :param like: a number for each restart, ``(R,)``.
        :param parts: what a family adds to the fields of all.
        """
        return cls(failed=torch.zeros_like(like, dtype=torch.bool), change=torch.full_like(like, torch.inf), **parts)

    @cached_property
    def objective(self) -> float:
        """Log evidence of the restart that has most."""
        best = float(self.log_evidence.max())
        return best if best > -torch.inf else float(self.log_likelihood.max())

    @property
    def gradient_norm(self) -> float:
        """Largest move of any restart in the last round, in units of log precision: zero at a fixed point."""
        return float(self.change.amax())

    @property
    def reasons(self) -> tuple[str, ...]:
        """Error message of each restart that failed."""
        return tuple(f"restart {row}: {text}" for row, text in self.failures.items())

    @property
    def stop_reason(self) -> Status | None:
        """No further step when every restart has failed."""
        return Status.FAILED if bool(self.failed.all()) else None


Step = Callable[[Batch], Batch]
Phase = tuple[Any, Step[Any], int]


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
    old, sound = batch.parameters, change.isfinite() & ~batch.failed
    good = sound & batch.reached(new.where(sound, old)).log_likelihood.isfinite()
    number, lost = batch.num_rounds + 1, (~good & ~batch.failed).nonzero().flatten().tolist()
    reasons = {row: f"round {number}: {batch.complaint(new, row)}" for row in lost}
    change, failures = torch.where(good, change, 0.0), {**batch.failures, **reasons}
    after = batch.reached(new.where(good, old))
    return replace(after, failed=~good, change=change, num_rounds=number, failures=failures)


def slowly_converging(batch: Batch) -> Batch:
    """One more round, or, after :data:`PLAIN_ROUNDS`, two at once and an extrapolated step."""
    return advance(batch) if batch.num_rounds < PLAIN_ROUNDS else extrapolated(batch)


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


def repeated(batch: Batch, num_rounds: int, step: Step[Batch] = advance) -> Batch:
    """A fixed number of rounds."""
    for _ in range(num_rounds):
        batch = step(batch)
    return batch


def ready(batch: Batch) -> Batch:
    """The batch with its stopping rule begun anew: the next rounds may stop when they change little."""
    return replace(batch, change=torch.full_like(batch.change, torch.inf))


def warmed(batch: Batch, num_rounds: int, step: Step[Batch] = advance) -> Batch:
    """After all rounds of the warm-up, ready for the first one of its own update."""
    after = batch
    for update, each, num in batch.warm_up(num_rounds, step):
        after = repeated(replace(after, update=update), num, each)
    return ready(replace(after, update=batch.update))


def run_em(batch: Batch, num_warm: int, stop: Stop, step: Step[Batch] = advance) -> Fit[Batch]:
    """The warm-up, then rounds until ``stop``."""
    after = batch
    for update, each, num in (phase for phase in batch.warm_up(num_warm, step) if phase[-1]):
        exactly = replace(stop, tolerance=-1.0, num_steps=num)
        warm = iterate(each, ready(replace(after, update=update)), exactly, "EvidenceEM, warm-up")
        after = warm.state
        if warm.status is not Status.STEP_LIMIT:
            return Fit(ready(replace(after, update=batch.update)), warm.status, warm.objectives[-1:])
    return iterate(step, ready(replace(after, update=batch.update)), stop, "EvidenceEM")


LOOKING = 5  # rounds of candidates between one look at what is hopeless and the next
SAFETY = 2.0  # how much faster than in its last round a candidate may rise in those that remain
SETTLED = 1e-3  # change of every log precision and share in one round, below which rounds that only compare end
ALONE = 3  # components that are split one by one where several at once do not gain


@dataclass(frozen=True)
class SplitProposals:
    """Two components in the place of each.

    :ivar parameters: two components in each row, one row for each component that may be split, ``(K,)``.
    :ivar gain: of log evidence, nats; -inf where a component cannot be split, ``(K,)``.
    """

    parameters: Any
    gain: Tensor


class ComponentRestarts(Restarts):
    """Restarts of a mixture.  A family says what its candidates are; its ``parameters`` have ``log_mixing``."""

    data: Any  # on which the restarts run, with their number ``num_data``
    # log evidence with an Occam factor for all that is maximised, nats, (R,); -inf where there is none
    occam: ClassVar[Any]
    selected: ClassVar[Callable[..., Any]]  # some restarts, by their numbers, on their own
    # what is left with something left out of the restarts ``alive``, and the restart of each candidate, (C,)
    candidates: ClassVar[Callable[..., tuple[Any, Tensor]]]
    split_proposals: ClassVar[Callable[..., SplitProposals]]  # halves of each component of one restart, by model's ties
    begun_at: ClassVar[Callable[..., Any]]  # the batch at parameters of another number of components, and their ties

    @property
    def modes(self) -> Any:
        """Modes by which restarts are compared, with ``occam`` and ``log_evidence``."""
        return self

    def heights(self, exact: Tensor) -> Tensor:
        """Log evidence by :attr:`occam`, the full one in the rows ``exact``; -inf in rows that have failed."""
        return self.occam

    def padded(self, parameters: Any) -> Any:
        """Parameters of candidates with as many components as those of this batch."""
        return parameters

    def after_splits(self, deletion: Any) -> Any:
        """The family in the state in which rounds go on after some components were split."""
        return self


Mixtures = TypeVar("Mixtures", bound=ComponentRestarts)


@dataclass(frozen=True)
class GreedyDeletion:
    """Leave out one component, re-fit, keep the smaller mixture if its Occam-corrected log evidence is higher; repeat.

    It finds the truth when the truth is a small mixture; where it is not, the smaller mixture has the slightly lower
    test density: pass ``deletion=None`` then.

    :ivar num_steps: rounds of re-fitting.
    :ivar after: rounds after which it begins, settled or not; what is chosen goes on to convergence.
    :ivar most: restarts that take part, those of highest Occam-corrected log evidence.
    :ivar finalists: candidates of each restart that are re-fitted on all data.
    :ivar splits: most times that the chosen one has components split; 0 for never.

    >>> import torch
    >>> from pyro_evidence import EvidenceEM
    >>> from pyro_evidence.mixture import GreedyDeletion
    >>> from pyro_evidence.models.mixture import gaussian_mixture
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> EvidenceEM(gaussian_mixture(3), deletion=GreedyDeletion(num_steps=10)).run(Y).num_components
    2
    """

    num_steps: int = 25
    after: int = 60
    most: int = 3
    finalists: int = 3
    splits: int = 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_count(f"GreedyDeletion: {name}", value, int(name != "splits"))

    def __call__(self, batch: Mixtures) -> Mixtures:
        """The restarts after all deletions that gain."""
        occam = torch.where(batch.failed, -torch.inf, batch.occam)
        best = distinct(occam, batch.parameters.active.sum(-1), torch.inf)[: self.most]
        best = best if len(best) else (~batch.failed).nonzero().flatten()[:1]  # one without an evidence may gain one
        height = batch.heights(best)
        alive = torch.zeros_like(batch.failed).index_fill(0, best, True)
        while bool(alive.any()):
            tried, owner = refitted(*batch.candidates(alive, self), height, self.num_steps)
            if not len(owner):
                break
            highest = [torch.where(owner == row, tried.occam, -torch.inf).argmax() for row in owner.unique()]
            found = tried.heights(torch.stack(highest))
            rows = torch.arange(len(height), device=owner.device)
            table = torch.where(owner == rows.unsqueeze(-1), found, -torch.inf)  # (R, candidates)
            which = first_highest(table)
            found = table[rows, which]
            alive = found > height
            if bool(alive.any()):
                smaller = batch.padded(tried.parameters)[which]
                batch = batch.reached(smaller.where(alive, batch.parameters))
                height = torch.where(alive, found, height)
        return batch

    def split(self, chosen: Mixtures, ties: Any, room: int) -> tuple[Mixtures, str]:
        """One restart with components split as long as its Occam-corrected log evidence rises.

        :param ties: those of the model.
        :param room: most components.
        :return: it, and what kept it from further splits, if anything did.
        """
        for _ in range(self.splits):
            after = split(chosen, ties, self.num_steps, room)
            if after is chosen:
                num = int(chosen.parameters.active.sum())
                return chosen, f"every one of the model's {num} components is used" if num >= room else ""
            chosen = after.after_splits(self)
        return chosen, f"GreedyDeletion(splits={self.splits})" if self.splits else ""


def refitted(tried: Mixtures, owner: Tensor, height: Tensor, num_steps: int) -> tuple[Mixtures, Tensor]:
    """Candidates after all rounds, but those that cannot reach the height of their restart any more.

    :param owner: restart of each candidate, ``(C,)``.
    :param height: log evidence of the restarts, nats, ``(R,)``.
    :param num_steps: most rounds, those that the candidates have behind them among them.
    """
    for left in range(num_steps - tried.num_rounds - 1, -1, -1):
        if not len(owner):
            break
        before, tried = tried, advance(tried)
        if left % LOOKING == 0:
            rise = (tried.occam - before.occam).clamp(min=0.0)  # the Occam factor may fall
            hopeful = (tried.occam + SAFETY * (left + 1) * rise >= height[owner]).nonzero().flatten()
            tried = tried.selected(hopeful) if 0 < len(hopeful) < len(owner) else tried
            owner = owner[hopeful]
    return tried, owner


def settled(batch: Mixtures, num_steps: int) -> Mixtures:
    """After rounds until nothing changes much any more, ``num_steps`` at most."""
    for _ in range(num_steps):
        batch = advance(batch)
        if float(batch.change.amax()) < SETTLED:
            break
    return batch


def split(batch: Mixtures, ties: Any, num_steps: int, room: int) -> Mixtures:
    """One restart with some components split, or itself where that does not raise its evidence.

    All that gain are split together, then fewer and fewer of the best, and then the next best ones alone.

    :param ties: those of the model.
    :param num_steps: most rounds of re-fitting.
    :param room: most components.
    """
    num_places = batch.parameters.log_mixing.shape[1]
    if room <= num_places:
        return batch
    proposals, only = batch.split_proposals(ties), torch.zeros(1, dtype=torch.long, device=batch.failed.device)
    order = proposals.gain.argsort(descending=True, stable=True)
    num = min(int((proposals.gain > 0).sum()), room - num_places)
    sizes = [size for i in range(num) if (size := num // 3**i) > 0]
    together, alone = [order[:size] for size in sizes], [order[i : i + 1] for i in range(1, min(num, ALONE))]
    height = float(batch.heights(only)) if num > 0 else 0.0
    for which in together + alone:
        tried = settled(batch.begun_at(with_splits(batch.parameters, proposals, which), ties), num_steps)
        if float(tried.heights(only)) > height:
            return tried
    return batch


def with_splits(parameters: Any, proposals: SplitProposals, which: Tensor) -> Any:
    """One row with the components ``which`` replaced by their halves; the second ones stand at the end."""
    parts = proposals.parameters[which]
    parts = replace(parts, log_mixing=parts.log_mixing + parameters.log_mixing[0, which].unsqueeze(-1))

    def longer(name: str, x: Tensor) -> Tensor:
        pair = getattr(parts, name)
        return torch.cat([x.index_copy(1, which, pair[:, 0].unsqueeze(0)), pair[:, 1].unsqueeze(0)], 1)

    return parameters.rebuilt(longer)


Result = TypeVar("Result")


def unless_interrupted(move: Callable[[], Result], otherwise: Result) -> Result:
    """Result of ``move()``; after Ctrl-C a warning and ``otherwise``."""
    try:
        with restored_global_state():
            return move()
    except KeyboardInterrupt:
        warnings.warn(f"EvidenceEM, deletion: {Status.INTERRUPTED.value}.", stacklevel=stacklevel())
        return otherwise


@dataclass(frozen=True)
class Chosen(Generic[Mixtures]):
    """The restart that a posterior is made of.

    :ivar fit: its last state, of one row, and the way there.
    :ivar number: which of the restarts it was.
    :ivar heights: log evidence of every restart in the units inside, nats, nan where it failed, ``(R,)``.
    :ivar reasons: what the restarts that failed say.
    :ivar limit: what kept it from further splits, if anything did.
    """

    fit: Fit[Mixtures]
    number: int
    heights: Tensor
    reasons: tuple[str, ...]
    limit: str = ""

    def history(self, jacobian: Any) -> tuple[Any, ...]:
        """Status, log evidences of the rounds and of the restarts, in the model's units, and reasons of failures."""
        objectives = tuple(v - float(jacobian) for v in self.fit.objectives)
        return self.fit.status.value, objectives, self.heights - jacobian, self.reasons


EMSettings = Any  # an engine for EM, of which start, initial, update, curvature, deletion and stop are read


@dataclass(frozen=True)
class ComponentFit(Generic[Mixtures]):
    """A recognised model, the units inside, and all restarts: what a family of mixtures says of it."""

    together: ClassVar[Callable[..., Stop]]  # when all restarts end, where deletions and splits of one follow
    whole: ClassVar[Callable[..., Any]]  # the chosen restart on all data
    resized: ClassVar[Callable[..., Any]]  # it with as many components as its evidence wants, and why no more
    posterior: ClassVar[Callable[..., Any]]  # of what was chosen, in the model's units

    structure: Any
    units: Any
    data: Any  # all, in the units inside
    batch: Mixtures  # on a sample of the data where these are many

    @property
    def jacobian(self) -> Any:
        """Log Jacobian of going to the model's units, which the log evidence loses, nats."""
        return self.data.log_jacobian(self.units.unit)

    @property
    def times(self) -> float:
        """Number of all data per datum that the restarts see."""
        return float(self.data.num_data / self.batch.data.num_data)

    def watched(self, step: Step[Any]) -> Step[Any]:
        """A round that writes down what is seen of it, if anything is."""
        return step

    def chosen(self, fit: Fit[Mixtures], deletion: GreedyDeletion | None) -> Chosen[Mixtures]:
        """The best restart alone, after components were left out where that is done with several restarts."""
        batch = fit.state
        modes = batch.modes
        best = first_highest(torch.where(batch.failed, -torch.inf, modes.occam)).reshape(1)
        heights = torch.where(batch.failed, torch.nan, self.times * modes.log_evidence)
        return Chosen(replace(fit, state=batch.selected(best)), int(best), heights, batch.reasons)


def fit_mixture(task: ComponentFit[Any], settings: EMSettings) -> Any:
    """Warm-up, rounds of all restarts, the choice of one, deletions and splits, and rounds of that one alone.

    :return: the family's posterior.
    :raises NotConverged: with ``stop.throw``, unless converged; or when every restart failed, with all reasons.
    """
    stop, deletion = settings.stop, settings.deletion
    together: Stop = stop
    step: Step[Any] = advance if stop.counted else slowly_converging
    if deletion is not None:
        together, step = task.together(stop, deletion), advance
    fit = run_em(task.batch, settings.initial.warm_up, together, task.watched(step))
    chosen = choose(task, fit, deletion, stop)
    posterior = task.posterior(chosen)
    require_convergence("EvidenceEM", chosen.fit.status, posterior, stop)
    return posterior


def choose(task: ComponentFit[Any], fit: Fit[Any], deletion: GreedyDeletion | None, stop: Stop) -> Chosen[Any]:
    """From all restarts to one, on all data, with as many components as its evidence wants, converged.

    :raises NotConverged: when every restart has failed, with all reasons.
    """
    if fit.state.stop_reason is Status.FAILED:
        said = "\n".join(fit.state.reasons)
        raise NotConverged(f"EvidenceEM: every restart failed. Pass update=BoundedInflation(rho=0.05).\n{said}")
    if fit.status is Status.INTERRUPTED:
        return task.chosen(fit, None)
    chosen = unless_interrupted(lambda: task.chosen(fit, deletion), None)
    if chosen is None:
        return task.chosen(replace(fit, status=Status.INTERRUPTED), None)
    if deletion is None and task.times == 1.0:
        settled = fit.status is Status.STEP_LIMIT and float(chosen.fit.state.change) <= stop.gradient_tolerance
        return replace(chosen, fit=replace(chosen.fit, status=Status.CONVERGED)) if settled else chosen
    alone, limit = task.whole(chosen.fit.state), ""
    if deletion is not None:
        alone, limit = unless_interrupted(lambda: task.resized(alone, deletion), (alone, "interrupted"))
    step: Step[Any] = advance if stop.counted else slowly_converging
    rest = iterate(task.watched(step), replace(alone, num_rounds=0), stop, "EvidenceEM")
    before = fit.objectives if task.times == 1.0 else rest.objectives[:1]
    return replace(chosen, fit=Fit(rest.state, rest.status, before + rest.objectives[1:]), limit=limit)
