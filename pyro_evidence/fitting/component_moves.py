"""EM for mixtures of any family: restarts, the choice of one, and components left out or split in two.

A component is left out, or split, as long as that raises the evidence.  Candidates are one batch.  Each is re-fitted
for some rounds, but those that cannot reach the height of the restart that they were taken from are given up then.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from pyro_evidence.fitting.iterate import Fit, Status, Stop, iterate, require_convergence
from pyro_evidence.fitting.process_state import restored_global_state
from pyro_evidence.fitting.restarts import Restarts, Step, advance, require_any, run_em, slowly_converging
from pyro_evidence.numerics.batched import distinct, first_highest
from pyro_evidence.settings import Start, check_count, stacklevel

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

    @property
    @abstractmethod
    def occam(self) -> Tensor:
        """Log evidence with an Occam factor for all that is maximised, nats, ``(R,)``; -inf where there is none."""

    @abstractmethod
    def heights(self, exact: Tensor) -> Tensor:
        """As :attr:`occam`, as exactly as can be in the rows ``exact``; -inf in rows that have failed."""

    @abstractmethod
    def selected(self, index: Tensor) -> Any:
        """Some restarts, on their own."""

    @abstractmethod
    def candidates(self, alive: Tensor, deletion: Any) -> tuple[Any, Tensor]:
        """What is left when something is left out of the restarts ``alive``, and the restart of each, ``(C,)``."""

    @abstractmethod
    def split_proposals(self, ties: Any) -> SplitProposals:
        """The halves of each component of one restart.

        :param ties: those of the model.
        """

    @abstractmethod
    def begun_at(self, parameters: Any, ties: Any) -> Any:
        """The batch at parameters of another number of components."""

    def padded(self, parameters: Any) -> Any:
        """Parameters of candidates with as many components as those of this batch."""
        return parameters

    def after_splits(self, deletion: Any) -> Any:
        """What goes on after some components were split."""
        return self


Batch = TypeVar("Batch", bound=ComponentRestarts)


class Deletion(Protocol):
    """What is tried after the rounds."""

    @property
    def num_steps(self) -> int:
        """Rounds of re-fitting."""

    @property
    def after(self) -> int:
        """Most rounds before it."""

    def __call__(self, batch: Batch) -> Batch:
        """The restarts with components left out."""

    def split(self, chosen: Batch, ties: Any, room: int) -> tuple[Batch, str]:
        """One restart with components split, and what kept it from further splits, if anything did."""


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

    def __call__(self, batch: Batch) -> Batch:
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

    def split(self, chosen: Batch, ties: Any, room: int) -> tuple[Batch, str]:
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


def refitted(tried: Batch, owner: Tensor, height: Tensor, num_steps: int) -> tuple[Batch, Tensor]:
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


def settled(batch: Batch, num_steps: int) -> Batch:
    """After rounds until nothing changes much any more, ``num_steps`` at most."""
    for _ in range(num_steps):
        batch = advance(batch)
        if float(batch.change.amax()) < SETTLED:
            break
    return batch


def split(batch: Batch, ties: Any, num_steps: int, room: int) -> Batch:
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
    sizes = [num // 3**i for i in range(num) if num // 3**i > 0]
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
    """What ``move()`` returns; after Ctrl-C a warning and ``otherwise``."""
    try:
        with restored_global_state():
            return move()
    except KeyboardInterrupt:
        warnings.warn(f"EvidenceEM, deletion: {Status.INTERRUPTED.value}.", stacklevel=stacklevel())
        return otherwise


@dataclass(frozen=True)
class Chosen(Generic[Batch]):
    """The restart that a posterior is made of.

    :ivar fit: its last state, of one row, and the way there.
    :ivar number: which of the restarts it was.
    :ivar heights: log evidence of every restart in the units inside, nats, nan where it failed, ``(R,)``.
    :ivar reasons: what the restarts that failed say.
    :ivar limit: what kept it from further splits, if anything did.
    """

    fit: Fit[Batch]
    number: int
    heights: Tensor
    reasons: tuple[str, ...]
    limit: str = ""


class EMSettings(Protocol):
    """What an engine is told."""

    start: Start
    initial: Any  # what a restart begins with; its ``warm_up`` is a number of rounds
    update: Any
    curvature: Any
    deletion: Deletion | None
    stop: Stop


class ComponentFit(Protocol):
    """A recognised model with all its restarts: what a family of mixtures says of it."""

    @property
    def batch(self) -> Any:
        """All restarts, on a sample of the data where these are many."""

    @property
    def times(self) -> float:
        """How often the restarts' data would have to be had to be all."""

    def is_closed(self, settings: EMSettings) -> bool:
        """Whether rounds ask nothing of autograd."""

    def together(self, stop: Stop, deletion: Deletion) -> Stop:
        """When rounds of all restarts end, where deletions and splits of the chosen one follow."""

    def watched(self, step: Step[Any]) -> Step[Any]:
        """A round that writes down what is seen of it, if anything is."""

    def chosen(self, fit: Fit[Any], deletion: Deletion | None) -> Chosen[Any]:
        """The best restart alone, after components were left out where that is done with several restarts."""

    def whole(self, alone: Any) -> Any:
        """The chosen restart on all data."""

    def resized(self, alone: Any, deletion: Deletion) -> tuple[Any, str]:
        """It with as many components as its evidence wants, on all data, and what kept it from more."""

    def posterior(self, chosen: Chosen[Any]) -> Any:
        """The posterior in the model's units."""


def fit_mixture(task: ComponentFit, settings: EMSettings) -> Any:
    """Warm-up, rounds of all restarts, the choice of one, deletions and splits, and rounds of that one alone.

    :return: the family's posterior.
    :raises NotConverged: with ``stop.throw``, unless converged; or when every restart failed, with all reasons.
    """
    stop, deletion = settings.stop, settings.deletion
    together, step = stop, _to_the_end(stop)
    if deletion is not None:
        together, step = task.together(stop, deletion), advance
    with torch.inference_mode(task.is_closed(settings)):
        fit = run_em(task.batch, settings.initial.warm_up, together, task.watched(step))
        chosen = choose(task, fit, deletion, stop)
    posterior = task.posterior(chosen)
    require_convergence("EvidenceEM", chosen.fit.status, posterior, stop)
    return posterior


def _to_the_end(stop: Stop) -> Step[Any]:
    """Rounds that leap where they crawl, unless their number was asked for."""
    return advance if stop.counted else slowly_converging


def choose(task: ComponentFit, fit: Fit[Any], deletion: Deletion | None, stop: Stop) -> Chosen[Any]:
    """From all restarts to one, on all data, with as many components as its evidence wants, converged.

    :raises NotConverged: when every restart has failed, with all reasons.
    """
    require_any(fit.state, "BoundedInflation(rho=0.05)")
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
    rest = iterate(task.watched(_to_the_end(stop)), replace(alone, num_rounds=0), stop, "EvidenceEM")
    before = fit.objectives if task.times == 1.0 else rest.objectives[:1]
    return replace(chosen, fit=Fit(rest.state, rest.status, before + rest.objectives[1:]), limit=limit)


def posterior_by_hand(task: ComponentFit, stop: Stop) -> Any:
    """The posterior where the best restart stands."""
    fit = Fit(task.batch, Status.BY_HAND, (task.batch.objective,))
    return task.posterior(choose(task, fit, None, stop))
