"""One recognised mixture on its way: from the Pyro model to a batch of restarts, and back to a posterior."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.chunks import Chunks, arguments, looked_through, with_rows
from pyro_evidence.data.ranks import COMMUNICATOR, Communicator
from pyro_evidence.data.rows import Repeated, Rows
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.fitting.component_moves import Chosen, Deletion, EMSettings, GreedyDeletion, settled
from pyro_evidence.fitting.iterate import Fit, Status, Stop
from pyro_evidence.fitting.restarts import Step
from pyro_evidence.mixture import evidence, mode, rounds
from pyro_evidence.mixture.data import ResponseUnits, StreamedData, in_pieces, response_units
from pyro_evidence.mixture.expectation import Mixture, MixtureData
from pyro_evidence.mixture.posterior import MixturePosterior, without_data
from pyro_evidence.mixture.recognise import (
    FEW,
    MixtureStructure,
    enlarged,
    most_components,
    recognise_mixture,
    recognised,
)
from pyro_evidence.mixture.rounds import Errors, Journal, MixtureRestarts, path_of
from pyro_evidence.mixture.updates import (
    BoundedInflation,
    SharedParameters,
    Unregularised,
    WeightDecay,
    corrected,
    husmeier2000_update,
)
from pyro_evidence.models.mixture import Responses
from pyro_evidence.numerics.batched import first_highest
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.settings import Start, check_count, check_positive, seeded

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
        R, generator = start.number(AUTOMATIC), seeded(start.seed)
        white = torch.randn(R, *model.loc.shape, generator=generator, dtype=torch.float64)
        w = model.loc + self.spread * white.to(model.loc)
        alpha = torch.where(ties.alpha_free, self.alpha * ties.alpha_ratio, model.alpha[0])
        flat = torch.zeros_like(model.log_mixing) if ties.mixing_free else model.log_mixing
        narrow = torch.arange(R, device=w.device) % 2
        width = torch.where(narrow > 0, self.width * self.narrow_width_ratio, self.width).to(w)[:, None, None]
        noise = torch.where(ties.beta_free, width**-2 * ties.beta_ratio, model.noise_diagonal[0])
        noise = noise if not model.has_full_noise else noise.diag_embed()
        return Mixture(w, noise, flat.log_softmax(-1).expand(R, -1), alpha.expand(R, -1, -1, -1), model.loc)


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
    journal: Journal[tuple[Tensor, ...]]

    @property
    def jacobian(self) -> Tensor:
        """What the log evidence loses by going to the model's units, nats."""
        return self.units.log_jacobian(self.data)

    @property
    def times(self) -> float:
        """How often the restarts' data would have to be had to be all."""
        return float(self.data.num_data / self.batch.expected.data.num_data)

    def is_closed(self, settings: EMSettings) -> bool:
        """Whether rounds are formulas of ours on data in memory, which ask nothing of autograd."""
        given = settings.update, settings.deletion, settings.curvature
        return self.data.in_one_piece and all(x in FORMULAS or type(x) in KINDS for x in given)

    def together(self, stop: Stop, deletion: Deletion) -> Stop:
        """Restarts are compared at their modes, settled or not."""
        return replace(stop, num_steps=min(stop.num_steps, deletion.after))

    def watched(self, step: Step[MixtureRestarts]) -> Journal[tuple[Tensor, ...]]:
        """A round after which the errors are written down."""
        self.journal.step = step
        return self.journal

    def chosen(self, fit: Fit[MixtureRestarts], deletion: Deletion | None) -> Chosen[MixtureRestarts]:
        """The restart that is highest at its mode after deletions in the best ones."""
        batch = fit.state if deletion is None else deletion(fit.state)
        modes = batch.modes
        best = first_highest(torch.where(batch.failed, -torch.inf, modes.occam)).reshape(1)
        heights = torch.where(batch.failed, torch.nan, self.times * modes.log_evidence)
        return Chosen(replace(fit, state=batch.selected(best)), int(best), heights, batch.reasons)

    def whole(self, alone: MixtureRestarts) -> MixtureRestarts:
        """The chosen restart on all data, without its pruned components."""
        alone = alone.reached(alone.parameters)
        expected = alone.expected
        if expected.data.num_rows == self.data.num_rows:
            return alone
        return rounds.first(self.data, expected.mixture, expected.ties, expected.curvature, alone.update)

    def resized(self, alone: MixtureRestarts, deletion: Deletion) -> tuple[MixtureRestarts, str]:
        """The chosen restart with components split, and what kept it from further splits."""
        alone = alone if self.times == 1.0 else settled(alone, deletion.after)
        loc = self.structure.loc
        alike = rounds.is_exchangeable(self.ties, loc)
        room = most_components(self.structure.joint.model, len(loc), self.data.num_rows, alike=alike)
        return deletion.split(alone, self.ties, room)

    def posterior(self, chosen: Chosen[MixtureRestarts]) -> MixturePosterior:
        """One mixture in the model's units; without data where these came in chunks."""
        structure, fit = enlarged(self.structure, chosen.fit.state.parameters.w.shape[1]), chosen.fit
        with torch.inference_mode(self.data.in_one_piece):
            at_mode = mode.find_mode(self.data, fit.state.parameters)
        at_mode = at_mode.rebuilt(lambda _, x: x.clone())  # inference mode may have made it: no derivatives then
        by_hand = fit.status is Status.BY_HAND  # rounds that nobody watched: their end alone is known
        entries = [self.journal.look(fit.state)] if by_hand else self.journal.entries
        state, mixture = mode.laplace_state(structure, self.units, self.data, replace(at_mode, loc=at_mode.loc.clone()))
        found = MixturePosterior(
            state,
            fit.status.value,
            tuple(v - float(self.jacobian) for v in fit.objectives),
            chosen.heights - self.jacobian,
            chosen.reasons,
            recognised=structure,
            mixture=mixture,
            num_clipped=int(fit.state.expected.well_determined.num_clipped.max()),
            paths=path_of(entries, chosen.number),
            limit=chosen.limit,
        )
        return found if self.data.in_one_piece else without_data(found)

    def watching(self, joint: LogJoint) -> "MixtureFit":
        """The fit, whose journal has the errors of other data as well."""
        journal = Journal(Errors(self.units, (self.unseen(joint),)))
        journal.note(self.batch)
        return replace(self, journal=journal)

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


def _outputs(shape: tuple[int, int]) -> str:
    return f"{shape[0]} responses and {shape[1]} basis functions"


FORMULAS = (husmeier2000_update, corrected, evidence.full, evidence.coordinate, evidence.block)
KINDS = (BoundedInflation, Unregularised, WeightDecay, GreedyDeletion, type(None))


def begin(joint: LogJoint, settings: EMSettings, *, sampled: bool = False) -> MixtureFit:
    """The mixture recognised, and all restarts before the first round.

    :param sampled: whether restarts run on a sample where data are more than :data:`SAMPLE`, and more than
        :data:`SAMPLE_EACH` for each component.
    :raises UnsupportedModel: when it is no mixture of linear-Gaussian kernels.
    """
    structure = recognised(joint)
    units = response_units(in_pieces(structure.Y, structure.G, structure.weight))
    products = settings.curvature is not evidence.block or structure.correlation is not None
    data = units.data(structure.Y, structure.G, structure.weight, products=products)
    return _begun(structure, units, structure.spread(data, structure.background, units.unit), settings, sampled)


def _begun(
    structure: MixtureStructure, units: ResponseUnits, data: MixtureData, settings: EMSettings, sampled: bool
) -> MixtureFit:
    """All restarts before the first round, as :func:`begin`."""
    ties, own = rounds.in_units(structure.ties, units.unit), units.standard(structure.start)
    few = data.sampled(max(SAMPLE, SAMPLE_EACH * len(own.loc))) if sampled else data
    start = settings.initial(settings.start, few, own, ties)
    batch, journal = rounds.first(few, start, ties, settings.curvature, settings.update), Journal(Errors(units))
    journal.note(batch)
    _ = data.num_data  # is kept with the data, where autograd may use it later
    return MixtureFit(structure, units, data, ties, batch, journal)


def begin_chunks(model: Any, chunks: Chunks, settings: EMSettings) -> MixtureFit:
    """The mixture recognised by a few rows, and all restarts before the first round, on a sample.

    :raises BadInput: for chunks that can be gone through only once, hold no rows, or differ in more than their rows.
    :raises UnsupportedModel: for models that do not say what their rows are.
    """
    if not hasattr(model, "settled_over"):
        raise UnsupportedModel(
            "run_chunks needs a model that says what its rows are: gaussian_mixture or linear_mixture, alone or in "
            "with_background. Pass all data of other models to run(...)."
        )
    communicator = COMMUNICATOR.get()

    def read(number: int, args: tuple[Any, ...]) -> Responses:
        found = model.rows(*args)
        G = None if found.G is None else found.G.detach().double()
        return Responses(found.Y.detach().double(), G, found.weight.detach().double())

    def check(number: int, args: tuple[Any, ...]) -> None:
        Y = model.rows(*args).Y
        if bool(Y.isnan().any()):
            row, column = Y.isnan().nonzero()[0].tolist()
            raise BadInput(
                f"chunk {number} holds nan, first in row {row}, column {column} of it; expected numbers. Rows with "
                f"gaps are for EvidenceEM(marginalised(model)).run(Y), all at once."
            )

    counts = looked_through(model, chunks, communicator, check)
    if communicator.restarts is not None:
        communicator.restarts.check_equal("numbers of rows where shards(restarts=...) wants the same", str(counts))
    first = _first(chunks, communicator)
    pieces = Repeated(lambda: (read(number, args) for number, args in with_rows(chunks)))
    rows = Rows(pieces, read(0, first), counts, communicator)
    settled_model = model.settled_over(rows)
    structure = recognise_mixture(LogJoint(settled_model, settled_model.few(1, *first)))
    units = response_units(rows)
    products = settings.curvature is not evidence.block or structure.correlation is not None

    def standard(found: Responses) -> MixtureData:
        part = units.data(found.Y, found.G, found.weight, products=products)
        here = replace(structure, Y=found.Y, offset=structure.offset[:1])
        return here.spread(part, structure.background, units.unit)

    return _begun(structure, units, StreamedData.of(rows.mapped(standard)), settings, sampled=True)


def _first(chunks: Chunks, communicator: Communicator) -> tuple[Tensor, ...]:
    """The arguments of the first few rows of all."""
    columns: list[list[Tensor]] = [[x[:0]] for x in arguments(0, next(iter(chunks)))]
    for _, args in with_rows(chunks):
        for column, x in zip(columns, args, strict=True):
            column.append(x[:FEW])
        if sum(len(x) for x in columns[0]) >= FEW:
            break
    return tuple(communicator.gathered(torch.cat(x)[:FEW])[:FEW] for x in columns)
