"""One recognised mixture on its way: from the Pyro model to a batch of restarts, and back to a posterior."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.iterate import Fit, Status, Stop, iterate, require_convergence
from pyro_evidence.fitting.process_state import restored_global_state
from pyro_evidence.fitting.restarts import advance, require_any, slowly_converging
from pyro_evidence.mixture import evidence, mode, rounds
from pyro_evidence.mixture.components import Deletion, GreedyDeletion
from pyro_evidence.mixture.data import ResponseUnits, response_units
from pyro_evidence.mixture.evidence import MixtureCurvature
from pyro_evidence.mixture.expectation import Mixture, MixtureData
from pyro_evidence.mixture.posterior import AtMode, MixturePosterior
from pyro_evidence.mixture.recognise import MixtureStructure, enlarged, most_components, recognised
from pyro_evidence.mixture.rounds import Errors, Journal, MixtureRestarts, path_of
from pyro_evidence.mixture.updates import (
    BoundedInflation,
    SharedParameters,
    Unregularised,
    Update,
    WeightDecay,
    corrected,
    husmeier2000_update,
)
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.settings import Start, check_count, check_positive, seeded, stacklevel

ErrorJournal = Journal[tuple[Tensor, ...]]
Starting = Callable[[MixtureData, Mixture, SharedParameters], Mixture]

AUTOMATIC = 5  # starts of a mixture


@dataclass(frozen=True)
class RandomWeights:
    """Random weights about their prior mean, equal mixing, one width for all kernels; in standardised units.

    Wide kernels find clusters that overlap, narrow ones find small clusters: restarts take turns.

    :ivar width: standard deviation of the noise in every other restart, from the first on.
    :ivar narrow_width_ratio: the same in the other restarts, as a share of ``width``.
    :ivar spread: standard deviation of the weights.
    :ivar alpha: prior precision, where it is learned.
    :ivar warm_up: unregularised rounds before the first regularised one.

    >>> import torch
    >>> from pyro_evidence import EvidenceEM, Start
    >>> from pyro_evidence.mixture import RandomWeights
    >>> from pyro_evidence.models.mixture import gaussian_mixture
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> engine = EvidenceEM(gaussian_mixture(3), start=Start(restarts=2, seed=1), initial=RandomWeights(width=0.5))
    >>> engine.run(Y).restarts.shape
    torch.Size([2])
    """

    width: float = 1.0
    narrow_width_ratio: float = 0.3
    spread: float = 1.0
    alpha: float = 0.01
    warm_up: int = 10

    def __post_init__(self) -> None:
        check_count("RandomWeights: warm_up", self.warm_up, 0)
        for name in ("width", "narrow_width_ratio", "alpha"):
            check_positive(f"RandomWeights: {name}", getattr(self, name))

    def __call__(self, start: Start, data: MixtureData, model: Mixture, ties: SharedParameters) -> Mixture:
        """All restarts.

        :param start: how many, and the seed of the weights.
        :param model: one row, the model's own hyperparameters; those that are fixed are kept.
        """
        restarts, generator = start.number(AUTOMATIC), seeded(start.seed)
        noise = torch.randn(restarts, *model.loc.shape, generator=generator, dtype=torch.float64).to(model.loc)
        alpha = torch.where(ties.alpha_free, self.alpha * ties.alpha_ratio, model.alpha[0])
        flat = torch.zeros_like(model.log_mixing) if ties.mixing_free else model.log_mixing
        own = self._noise(restarts, model, ties)
        found = replace(model, alpha=alpha, log_mixing=flat.log_softmax(-1), noise=own, w=noise)
        wide = [v.expand(restarts, *v.shape[-d:]) for v, d in ((found.alpha, 3), (found.log_mixing, 1))]
        return replace(found, w=model.loc + self.spread * noise, alpha=wide[0], log_mixing=wide[1])

    def _noise(self, restarts: int, model: Mixture, ties: SharedParameters) -> Tensor:
        narrow = torch.arange(restarts, device=model.w.device) % 2
        width = torch.where(narrow > 0, self.width * self.narrow_width_ratio, self.width).to(model.w)[:, None, None]
        diagonal = torch.where(ties.beta_free, width**-2 * ties.beta_ratio, model.noise_diagonal[0])
        return diagonal if model.noise.dim() == 3 else diagonal.diag_embed()


SAMPLE = 2**14  # data on which restarts run where there are more; the chosen one goes on with all
SAMPLE_EACH = 2**8  # the same for each component


@dataclass(frozen=True)
class MixtureFit:
    """A recognised model, the units inside, and all restarts."""

    structure: MixtureStructure
    units: ResponseUnits
    data: MixtureData  # all of it; the restarts may be on a sample
    ties: SharedParameters
    batch: MixtureRestarts

    @property
    def jacobian(self) -> Tensor:
        """What the log evidence loses by going to the model's units, nats."""
        return self.units.log_jacobian(self.data)

    @property
    def times(self) -> float:
        """How often the restarts' data would have to be had to be all."""
        return float(self.data.num_data / self.batch.expected.data.num_data)

    def whole(self, batch: MixtureRestarts) -> MixtureRestarts:
        """The restarts on all data."""
        expected = batch.expected
        if expected.data.num_rows == self.data.num_rows:
            return batch
        return rounds.first(self.data, expected.mixture, expected.ties, expected.curvature, batch.update)

    def unseen(self, joint: LogJoint) -> MixtureData:
        """Other data of the same model, in the units inside.

        :raises BadInput: when they are not of the same kind.
        """
        found = recognised(joint)
        ours, theirs = ((x.Y.shape[-1], 1 if x.G is None else x.G.shape[-1]) for x in (self.structure, found))
        if ours != theirs:
            raise BadInput(
                f"the unseen data have {_outputs(theirs)}, the fitted ones {_outputs(ours)}: expected the same."
            )
        products = self.data.layout.has_products
        data = self.units.data(found.Y, found.G, found.weight, products=products)
        return found.spread(data, self.structure.background, self.units.unit)

    def journal(self, unseen: LogJoint | None = None) -> ErrorJournal:
        """A journal of the errors of every round."""
        return Journal(Errors(self.units, () if unseen is None else (self.unseen(unseen),)))

    def warmed(self, update: Update, num_steps: int) -> "MixtureFit":
        """After the warm-up, ready for ``update``."""
        return replace(self, batch=rounds.warmed(self.batch, update, num_steps))

    def advanced(self) -> "MixtureFit":
        return replace(self, batch=advance(self.batch))


def _outputs(shape: tuple[int, int]) -> str:
    return f"{shape[0]} responses and {shape[1]} basis functions"


def begin(
    joint: LogJoint, start: Starting, update: Update, curvature: MixtureCurvature, most: int | None = None
) -> MixtureFit:
    """The mixture recognised, and all restarts before the first round.

    :param most: data on which the restarts run where there are more, and more than so many for each component.
    :raises UnsupportedModel: when it is no mixture of linear-Gaussian kernels.
    """
    structure = recognised(joint)
    units = response_units(structure.Y, structure.G, structure.weight)
    products = curvature is not evidence.block or structure.correlation is not None
    data = units.data(structure.Y, structure.G, structure.weight, products=products)
    data = structure.spread(data, structure.background, units.unit)
    ties, own = rounds.in_units(structure.ties, units.unit), units.standard(structure.start)
    few = data if most is None else data.sampled(max(most, SAMPLE_EACH * len(own.loc)))
    batch = rounds.first(few, start(few, own, ties), ties, curvature, update)
    return MixtureFit(structure, units, data, ties, batch)


@dataclass(frozen=True)
class Chosen:
    """The restart that a posterior is made of."""

    fit: Fit[MixtureRestarts]
    at_mode: Mixture  # one row, its weights at a mode
    number: int
    heights: Tensor  # (R,) log evidence of every restart in the engine's units, nan where it failed
    reasons: tuple[str, ...]  # what those that failed said
    limit: str  # what kept it from further splits


def choose(
    task: MixtureFit, fit: Fit[MixtureRestarts], deletion: Deletion | None, stop: Stop, journal: ErrorJournal
) -> Chosen:
    """From all restarts to one: deletion, choice, and, if anything was deleted, rounds of the chosen one alone.

    :raises NotConverged: when every restart has failed, with all reasons.
    """
    require_any(fit.state, "BoundedInflation(rho=0.05)")
    fit = _deleted(fit, deletion) if deletion else fit
    batch, modes = fit.state, fit.state.modes
    best = mode.first_highest(torch.where(batch.failed, -torch.inf, modes.occam)).reshape(1)
    at_mode, limit = modes.mixture[best], ""
    heights = torch.where(batch.failed, torch.nan, task.times * modes.log_evidence)
    if (deletion or task.times > 1.0) and fit.status is not Status.INTERRUPTED:
        fit, limit = _alone(task, fit, best, (deletion, stop, journal))
        at_mode = mode.find_mode(task.data, fit.state.expected.mixture)
    elif fit.status is Status.STEP_LIMIT and float(batch.change[best]) <= stop.gradient_tolerance:
        fit = Fit(batch, Status.CONVERGED, fit.objectives)  # the others are not
    return Chosen(fit, at_mode, int(best), heights, batch.reasons, limit)


def _alone(
    task: MixtureFit, fit: Fit[MixtureRestarts], best: Tensor, how: tuple[Deletion | None, Stop, ErrorJournal]
) -> tuple[Fit[MixtureRestarts], str]:
    """The chosen restart alone, on all data: components split as long as that gains, then rounds to convergence."""
    deletion, stop, journal = how
    chosen, limit = task.whole(rounds.alone(fit.state, best)), ""
    if deletion is not None:
        chosen, limit = _grown(task, chosen, deletion)
    rest = iterate(_leaping(journal, stop), replace(chosen, num_rounds=0), stop, "EvidenceEM")
    before = fit.objectives if task.times == 1.0 else rest.objectives[:1]
    return Fit(rest.state, rest.status, before + rest.objectives[1:]), limit


def _leaping(journal: ErrorJournal, stop: Stop) -> ErrorJournal:
    """The same journal of rounds that leap where they crawl, unless their number was asked for."""
    return journal if stop.counted else replace(journal, step=slowly_converging)


def _grown(task: MixtureFit, chosen: MixtureRestarts, deletion: Deletion) -> tuple[MixtureRestarts, str]:
    """The chosen restart with components split, and what kept it from further splits."""
    chosen = chosen if task.times == 1.0 else rounds.settled(chosen, deletion.after)
    room = most_components(task.structure, task.data.num_rows) if _may_grow(task) else len(chosen.expected.mixture.loc)
    try:
        with restored_global_state():
            return deletion.split(chosen, task.ties, room)
    except KeyboardInterrupt:
        warnings.warn(f"EvidenceEM, deletion: {Status.INTERRUPTED.value}.", stacklevel=6)
        return chosen, "interrupted"


def _may_grow(task: MixtureFit) -> bool:
    """Whether another component would be as good as any: more than one, and all alike."""
    return len(task.structure.loc) > 1 and rounds.is_exchangeable(task.ties, task.structure.loc)


def current_posterior(task: MixtureFit, stop: Stop) -> MixturePosterior:
    """The posterior where the best restart stands."""
    journal, fit = task.journal(), Fit(task.batch, Status.BY_HAND, (task.batch.objective,))
    journal.note(task.batch)
    return posterior_of(task, choose(task, fit, None, stop, journal), journal)


def _deleted(fit: Fit[MixtureRestarts], deletion: Deletion) -> Fit[MixtureRestarts]:
    if fit.status is Status.INTERRUPTED:
        return fit
    try:
        with restored_global_state():
            return Fit(deletion(fit.state), fit.status, fit.objectives)
    except KeyboardInterrupt:
        warnings.warn(f"EvidenceEM, deletion: {Status.INTERRUPTED.value}.", stacklevel=stacklevel())
        return Fit(fit.state, Status.INTERRUPTED, fit.objectives)


def posterior_of(task: MixtureFit, chosen: Chosen, journal: ErrorJournal) -> MixturePosterior:
    """One mixture in the model's units."""
    structure, fit = enlarged(task.structure, len(chosen.at_mode.loc)), chosen.fit
    found = AtMode(structure, task.units, task.data, _fit_for_derivatives(chosen.at_mode))
    return MixturePosterior(
        found.laplace_state(),
        fit.status.value,
        tuple(v - float(task.jacobian) for v in fit.objectives),
        chosen.heights - task.jacobian,
        chosen.reasons,
        recognised=structure,
        mixture=found.mixture,
        num_clipped=int(fit.state.expected.well_determined.num_clipped.max()),
        paths=path_of(journal.entries, chosen.number),
        limit=chosen.limit,
    )


def _fit_for_derivatives(mixture: Mixture) -> Mixture:
    """A copy, of what inference mode has made perhaps."""
    return replace(mixture.rebuilt(lambda _, x: x.clone()), loc=mixture.loc.clone())


Found = TypeVar("Found", bound=LaplacePosterior)


class Settings(Protocol):
    """The settings of one run of an engine."""

    update: Update
    initial: RandomWeights
    deletion: Deletion | None
    stop: Stop


def run(task: MixtureFit, settings: Settings, journal: ErrorJournal) -> MixturePosterior:
    """Warm-up, rounds of all restarts, deletion, rounds of the chosen one.

    :raises NotConverged: with ``stop.throw``, unless converged; or when every restart failed, with all reasons.
    """
    stop, deletion = settings.stop, settings.deletion
    together = stop if deletion is None else replace(stop, num_steps=min(stop.num_steps, deletion.after))
    _ = task.data.num_data  # is kept with the data, where autograd may use it later
    with torch.inference_mode(is_closed(task, settings)):
        journal.note(task.batch)
        step = journal if deletion is not None else _leaping(journal, stop)
        fit = rounds.em(task.batch, settings.update, settings.initial.warm_up, together, step)
        chosen = choose(task, fit, deletion, stop, journal)
    return warn_unless_converged(posterior_of(task, chosen, journal), stop)


FORMULAS = (husmeier2000_update, corrected, evidence.full, evidence.coordinate, evidence.block)
KINDS = (BoundedInflation, Unregularised, WeightDecay, GreedyDeletion, type(None))


def is_closed(task: MixtureFit, settings: Settings) -> bool:
    """Whether rounds are formulas of ours on data in memory, which ask nothing of autograd."""
    given = settings.update, settings.deletion, task.batch.expected.curvature
    return type(task.data) is MixtureData and all(x in FORMULAS or type(x) in KINDS for x in given)


def warn_unless_converged(posterior: Found, stop: Stop) -> Found:
    """The posterior; where it is not converged, though that was asked for, a warning or an error before.

    :raises NotConverged: with ``stop.throw``.
    """
    require_convergence("EvidenceEM", Status(posterior.status), posterior, stop)
    return posterior
