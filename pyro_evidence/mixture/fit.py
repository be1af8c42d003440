"""One recognised mixture on its way: from the Pyro model to a batch of restarts, round by round, and to a posterior.

What one round leads to, the warm-up, components left out or split, errors round by round.  Candidates are screened for
a few rounds on at most :data:`FEW_FOR_SCREENING` data, whatever their number.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.chunks import Chunks
from pyro_evidence.data.rows import Rows
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.fitting.em import (
    Chosen,
    ComponentFit,
    ComponentRestarts,
    EMSettings,
    GreedyDeletion,
    Phase,
    SplitProposals,
    Step,
    repeated,
    settled,
)
from pyro_evidence.fitting.iterate import Fit, Status, Stop
from pyro_evidence.mixture import evidence, mode
from pyro_evidence.mixture.data import StreamedData, Units, response_units
from pyro_evidence.mixture.evidence import MixtureCurvature
from pyro_evidence.mixture.expectation import (
    Mixture,
    MixtureData,
    MixtureStatistics,
    data_precision,
    e_step,
    natural_parameters,
    responsibilities,
    rows_of,
)
from pyro_evidence.mixture.mode import RestartModes
from pyro_evidence.mixture.posterior import MixturePosterior
from pyro_evidence.mixture.recognise import (
    MixtureStructure,
    enlarged,
    most_components,
    recognise_mixture,
    recognised,
    rows_of_chunks,
)
from pyro_evidence.mixture.updates import (
    SMALLEST,
    BoundedInflation,
    EStep,
    SharedParameters,
    Unregularised,
    Update,
    estep,
    padded,
    pruned,
)
from pyro_evidence.models.mixture import Responses
from pyro_evidence.models.wrappers import Marginalised
from pyro_evidence.numerics.batched import BATCH_NUMBERS, first_highest
from pyro_evidence.numerics.linalg import floored
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.settings import ABOVE_ZERO, FINITE, Start, check_count, check_number, check_result, seeded

ALIKE = 1e-5  # relative: what counts as the same prior mean or ratio, those of models in float32 included


def change(old: Mixture, new: Mixture) -> Tensor:
    """Largest change of a log precision or of a share, shape ``(R,)``; not finite where ``new`` is no mixture."""
    ratio = torch.cat([(new.alpha / old.alpha).flatten(1), (new.noise_diagonal / old.noise_diagonal).flatten(1)], -1)
    shares = (new.log_mixing.exp() - old.log_mixing.exp()).abs().amax(-1)
    nothing = 0.0 * new.w.flatten(1).sum(-1)  # nan where a weight is not finite
    return torch.maximum(ratio.log().abs().amax(-1), shares) + nothing


def is_exchangeable(ties: SharedParameters, loc: Tensor) -> bool:
    """Whether components differ in nothing but their number, so that any order of them is as good."""
    same = (loc, ties.alpha_ratio, ties.beta_ratio, ties.alpha_free, ties.beta_free)
    alike = all(bool(((x - x[:1]).abs() <= ALIKE * (1.0 + x[:1].abs())).all()) for x in (y.double() for y in same))
    return alike and _same_pattern(ties.alpha_group) and _same_pattern(ties.beta_group)


def _same_pattern(group: Tensor) -> bool:
    """Groups shared by all components in the same way, or each component's own in the same way."""
    own = group - group.flatten(1)[:, :1].reshape(-1, *[1] * (group.dim() - 1))
    apart = len(group.unique()) == len(group) * len(group[0].unique())
    return bool((group == group[:1]).all()) or (apart and bool((own == own[:1]).all()))


def packed(mixture: Mixture, ties: SharedParameters) -> tuple[Mixture, SharedParameters]:
    """Components that are not pruned moved to the front and the rest cut off; for exchangeable components."""
    num = int(mixture.active.sum(-1).max())
    order = mixture.active.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :num]
    rows = torch.arange(len(order), device=order.device).unsqueeze(-1)
    smaller = mixture.rebuilt(lambda _, x: x[rows, order])
    return replace(smaller, loc=mixture.loc[:num]), ties.resized(num)


def _centred(ratio: Tensor, group: Tensor) -> Tensor:
    """Ratios, of geometric mean 1 within each group."""
    logs, size = ratio.log(), int(group.max()) + 1
    sums = logs.new_zeros(2, size).index_add(1, group.flatten(), torch.stack([logs, torch.ones_like(logs)]).flatten(1))
    return (logs - (sums[0] / sums[1])[group]).exp()


FEW_FOR_SCREENING = 2048  # data on which candidates are screened
SCREENING = 5  # rounds of it
FEW_FOR_HALVES = 2**15  # data on which components are looked at
MOST = BATCH_NUMBERS  # of their weights, one set for each component and direction, and of their features
DIRECTIONS = 3  # in which each component is split
ROUNDS = 10  # of the small mixtures; those of planes have a warm-up of as many
SURE = 0.5  # responsibility above which a datum shows what a component looks like
LEAST = 8  # data that show it at least


@dataclass(frozen=True, eq=False)
class MixtureRestarts(ComponentRestarts):
    """One iterate of all restarts.  Built by :func:`first` and :func:`~pyro_evidence.fitting.em.advance`."""

    expected: EStep
    seen: tuple[Any, ...] = ()  # of every round that was watched, the start first

    parameters = property(attrgetter("expected.mixture"))
    data = property(attrgetter("expected.data"))
    log_likelihood = property(attrgetter("expected.stats.log_likelihood"))

    @cached_property
    def log_evidence(self) -> Tensor:
        """Laplace log evidence at the current weights, in the engine's curvature and units, nats, ``(R,)``."""
        return self.defined(self.expected.log_evidence)

    @cached_property
    def occam(self) -> Tensor:
        """Log evidence with what integrating the hyperparameters out takes from it; ``(R,)``."""
        return self.defined(self.log_evidence + mode.occam_factor(self.expected))

    @cached_property
    def modes(self) -> RestartModes:
        """Every restart's mode at its hyperparameters, with the full Hessian where it may be the highest."""
        return mode.modes(self.expected)

    def heights(self, exact: Tensor) -> Tensor:
        """Occam-corrected log evidence at the modes, full Hessian in the rows ``exact``, nats, ``(R,)``."""
        return torch.where(self.failed, -torch.inf, mode.modes(self.expected, exact).occam)

    def proposed(self) -> Mixture:
        return check_result(
            "update", self.update(self.expected), Mixture, "a Mixture, such as husmeier2000_update gives"
        )

    def reached(self, parameters: Mixture) -> "MixtureRestarts":
        """With an E-step there, without the components that are pruned in every restart."""
        old, ties = self.expected, self.expected.ties
        whole = parameters.all_active or bool(parameters.active.all(-1).any())
        if not whole and is_exchangeable(ties, parameters.loc):
            parameters, ties = packed(parameters, ties)
        return replace(self, expected=estep(old.data, parameters, ties, old.curvature))

    def change_to(self, parameters: Mixture) -> Tensor:
        return change(self.parameters, parameters)

    def complaint(self, parameters: Mixture, row: int) -> str:
        """Reason in words why one row has failed: what is no longer finite, and of which component."""
        logs = (parameters.noise_diagonal.log(), parameters.alpha.log(), parameters.log_mixing.unsqueeze(-1))
        names = ("weights", "noise precisions", "prior precisions", "mixing")
        on = parameters.log_mixing[row] != -torch.inf  # nan is no pruned component
        wrong = [on & ~x[row].flatten(1).isfinite().all(-1) for x in (parameters.w, *logs)]
        bad = [f"{name} of component {int(w.int().argmax())}" for name, w in zip(names, wrong, strict=True) if w.any()]
        return f"{', '.join(bad) or 'the log likelihood'} left the finite numbers, or the positive ones"

    def warm_up(self, num_rounds: int, step: Step["MixtureRestarts"]) -> list[Phase]:
        """Unregularised rounds, with the gamma prior of the update if it has one."""
        return [(Unregularised(rho=getattr(self.update, "rho", 0.0)), step, num_rounds)]

    def selected(self, index: Tensor) -> "MixtureRestarts":
        old = self.expected
        stats = MixtureStatistics(*(x[index] if x.dim() else x for x in vars(old.stats).values()))
        own = replace(old, data=rows_of(old.data, index), mixture=old.mixture[index], stats=stats)
        return replace(self, expected=own, failed=self.failed[index], change=self.change[index], failures={})

    def candidates(self, alive: Tensor, deletion: GreedyDeletion) -> tuple["MixtureRestarts", Tensor]:
        """The best that are left when one component is left out, after a few rounds, and whose they are."""
        mixture, old = self.parameters, self.expected
        able = mixture.active & alive.unsqueeze(-1) & (mixture.active.sum(-1, keepdim=True) > 1)
        owner, out = able.nonzero().unbind(-1)
        if not len(owner):
            return self, owner
        keep = mixture.active[owner].scatter(-1, out.unsqueeze(-1), False)
        data = rows_of(old.data, owner)
        few = data.sampled(FEW_FOR_SCREENING)
        if few is not data:  # each counts for those between
            few = replace(few, weight=few.weight * (data.num_data / few.num_data).unsqueeze(-1))
        begun = first(few, pruned(mixture[owner], keep), old.ties, old.curvature, self.update)
        tried = repeated(begun, min(SCREENING, deletion.num_steps))
        order = tried.occam.argsort(descending=True, stable=True)
        best = torch.cat([order[owner[order] == row][: deletion.finalists] for row in owner.unique()])
        found, owner = tried.parameters[best], owner[best]
        on_all = first(rows_of(old.data, owner), found, tried.expected.ties, old.curvature, self.update)
        return replace(on_all, num_rounds=tried.num_rounds), owner

    def padded(self, parameters: Mixture) -> Mixture:
        return padded(parameters, self.parameters)

    def split_proposals(self, ties: SharedParameters) -> SplitProposals:
        """Each component's halves, the best of all directions: as small mixtures of its own data."""
        mixture, data = self.parameters, self.expected.data
        data = data.sampled(min(FEW_FOR_HALVES, MOST // max(DIRECTIONS * len(mixture.loc), data.layout.num_features)))
        natural = natural_parameters(mixture, data.layout)
        resp = responsibilities(data.columns(natural.shape[-1]), natural, data.floor)[0][0]  # (K, n)
        curvature = evidence.block if not mixture.has_full_noise else evidence.coordinate

        def small(resp: Tensor, begun: Mixture) -> MixtureRestarts:
            few = ties.resized(len(begun.loc))
            few = replace(few, alpha_free=torch.zeros_like(few.alpha_free), mixing_free=True)
            own = replace(data, weight=data.weight * resp, floor=None, log_share=0.0)
            return settled(first(own, begun, few, curvature, BoundedInflation()), ROUNDS)

        whole = mixture.rebuilt(lambda _, x: x[0].unsqueeze(1))  # each component as a mixture of one, (K, 1)
        whole = replace(whole, log_mixing=torch.zeros_like(whole.log_mixing), loc=mixture.loc[:1])
        single, pairs = small(resp, whole), _pairs(data, resp, mixture)
        double = small(resp.repeat_interleave(DIRECTIONS, 0), pairs)
        after = padded(double.parameters, pairs)  # halves that died in all of them are cut off
        height = torch.where(after.active.all(-1), double.occam, -torch.inf).reshape(-1, DIRECTIONS)
        best = first_highest(height)  # directions often lead to the same halves, in another order
        number = torch.arange(len(best)).to(best)
        gain = torch.where(mixture.active[0] & ~single.failed, height[number, best] - single.occam, -torch.inf)
        return SplitProposals(after[number * DIRECTIONS + best], gain)

    def begun_at(self, parameters: Mixture, ties: SharedParameters) -> "MixtureRestarts":
        """The batch at parameters of another number of components, with the ties of the model."""
        num = parameters.w.shape[1]
        mixture = replace(parameters, loc=parameters.loc[:1].expand(num, *parameters.loc.shape[1:]))
        begun = first(self.expected.data, mixture, ties.resized(num), self.expected.curvature, self.update)
        return replace(begun, seen=self.seen)

    def after_splits(self, deletion: GreedyDeletion) -> "MixtureRestarts":
        """Without what is superfluous beside the new components."""
        return deletion(self)


def first(
    data: MixtureData, mixture: Mixture, ties: SharedParameters, curvature: MixtureCurvature, update: Update
) -> MixtureRestarts:
    """The batch at its start."""
    expected = estep(data, mixture, ties, curvature)
    return MixtureRestarts.begun(expected.stats.log_likelihood, expected=expected, update=update)


def _pairs(data: MixtureData, resp: Tensor, mixture: Mixture) -> Mixture:
    """The starts of all halves: along two directions, and one within the other, ``(K * DIRECTIONS, 2)``."""
    gram = ((resp * data.weight) @ data.columns(data.layout.num_diagonal))[..., data.layout.gram]
    A = data_precision(gram.unsqueeze(0), mixture.noise_matrix)[0]
    scale = (resp @ data.weight).clamp(min=SMALLEST)[:, None, None]  # a pruned component has no data
    each = enumerate(zip(resp, A / scale, strict=True))
    along = torch.stack([_directions(data, r, a, k, mixture) for k, (r, a) in each])
    step = torch.stack([along, -along], 2).flatten(0, 1)  # (K * DIRECTIONS, 2, m, B)
    wide = mixture.rebuilt(lambda _, x: x[0].repeat_interleave(DIRECTIONS, 0).unsqueeze(1))
    both = wide.rebuilt(lambda _, x: x.expand(-1, 2, *x.shape[2:]).contiguous())
    factor = torch.ones(DIRECTIONS, 2).to(both.w)
    factor[-1] = factor.new_tensor([2.0, 0.5])  # one within the other
    factor = factor.repeat(len(resp), 1).reshape(-1, 2, *[1] * (both.noise.dim() - 2))
    even = torch.full_like(both.log_mixing, 0.5).log()
    loc = mixture.loc[:1].expand(2, *mixture.loc.shape[1:])
    return replace(both, w=both.w + step, noise=both.noise * factor, log_mixing=even, loc=loc)


def _directions(data: MixtureData, resp: Tensor, A: Tensor, number: int, mixture: Mixture) -> Tensor:
    """Steps of the weights of one component: where they vary most, and where least is in the middle; ``(3, m, B)``.

    In units in which the data should pull at all weights alike: largest variance and smallest kurtosis of the pulls.
    """
    index = (resp > min(SURE, float(resp.sort().values[-min(LEAST, len(resp))]))).nonzero().flatten()
    e = data.Y[index] - data.G[index] @ mixture.w[0, number].mT
    pull = (e @ mixture.noise_matrix[0, number]).unsqueeze(-1) * data.G[index].unsqueeze(-2)
    values, vectors = torch.linalg.eigh(A)
    root = vectors * floored(values).rsqrt() @ vectors.mT
    z = pull.flatten(1) @ root
    most = torch.linalg.eigh(z.mT @ z)[1][:, -1]
    generic = 1.0 + torch.arange(len(most)).to(most).sqrt()
    most = most * (1.0 - 2.0 * (most @ generic < 0))  # the sign of an eigenvector is that of its rounding errors
    squares = z.square()
    flat = root[:, (squares.square().mean(0) / squares.mean(0).square()).nan_to_num(torch.inf).argmin()]
    steps = torch.stack([root @ most, flat, torch.zeros_like(flat)])
    return steps.reshape(DIRECTIONS, *mixture.w.shape[2:])


def watched(step: Step[MixtureRestarts], look: Callable[[MixtureRestarts], Any]) -> Step[MixtureRestarts]:
    """A round after which the restarts keep what ``look`` sees of them."""

    def watched_step(batch: MixtureRestarts) -> MixtureRestarts:
        after = step(batch)
        return replace(after, seen=(*after.seen, look(after)))

    return watched_step


@dataclass(frozen=True, eq=False)
class Errors:
    """Minus the mean log density of the data that are fitted, and of others: nats per datum, the model's units.

    What it says of the data that are fitted costs nothing.

    :ivar units: of the model.
    :ivar unseen: data that are not fitted, in the units inside.
    """

    units: Units
    unseen: tuple[MixtureData, ...] = ()

    def __call__(self, batch: MixtureRestarts) -> tuple[Tensor, ...]:
        """``(R,)`` for each of the data."""
        expected = batch.expected
        found = [(expected.data, expected.stats.log_likelihood)]
        found += [(data, e_step(data, expected.mixture).log_likelihood) for data in self.unseen]
        return tuple((data.log_jacobian(self.units.unit) - height) / data.num_data for data, height in found)


AUTOMATIC = 5  # starts of a mixture


@dataclass(frozen=True)
class RandomWeights:
    """Weights of unit variance about their prior mean, equal mixing, one width for all kernels; in standardised units.

    Wide kernels find clusters that overlap, narrow ones find small clusters: restarts take turns.

    :ivar width: standard deviation of the noise in every other restart, from the first on.
    :ivar narrow_width_ratio: the same in the other restarts, as a share of ``width``.
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
    alpha: float = 0.01
    warm_up: int = 10

    def __post_init__(self) -> None:
        check_count("RandomWeights: warm_up", self.warm_up, 0)
        for name in ("width", "narrow_width_ratio", "alpha"):
            check_number(f"RandomWeights: {name}", getattr(self, name), "a positive number", ABOVE_ZERO, FINITE)

    def __call__(self, start: Start, data: MixtureData, model: Mixture, ties: SharedParameters) -> Mixture:
        """All restarts.

        :param start: how many, and the seed of the weights.
        :param model: one row, the model's own hyperparameters; those that are fixed are kept.
        """
        R, generator = start.number(AUTOMATIC), seeded(start.seed)
        white = torch.randn(R, *model.loc.shape, generator=generator, dtype=torch.float64)
        w = model.loc + white.to(model.loc)
        alpha = torch.where(ties.alpha_free, self.alpha * ties.alpha_ratio, model.alpha[0])
        flat = torch.zeros_like(model.log_mixing) if ties.mixing_free else model.log_mixing
        narrow = torch.arange(R, device=w.device) % 2
        width = torch.where(narrow > 0, self.width * self.narrow_width_ratio, self.width).to(w)[:, None, None]
        noise = torch.where(ties.beta_free, width**-2 * ties.beta_ratio, model.noise_diagonal[0])
        noise = noise if not model.has_full_noise else noise.diag_embed()
        return Mixture(w, noise, flat.log_softmax(-1).expand(R, -1), alpha.expand(R, -1, -1, -1), model.loc)


SAMPLE = 2**14  # data on which restarts run where there are more; the chosen one goes on with all
SAMPLE_EACH = 2**8  # the same for each component


@dataclass(frozen=True, eq=False)
class MixtureFit(ComponentFit[MixtureRestarts]):
    """A recognised model, the units inside, and all restarts."""

    structure: MixtureStructure
    units: Units
    data: MixtureData
    ties: SharedParameters
    errors: Errors

    def together(self, stop: Stop, deletion: GreedyDeletion) -> Stop:
        """Restarts are compared at their modes, settled or not."""
        return replace(stop, num_steps=min(stop.num_steps, deletion.after))

    def watched(self, step: Step[MixtureRestarts]) -> Step[MixtureRestarts]:
        """A round of which the errors are kept."""
        return watched(step, self.errors)

    def chosen(self, fit: Fit[MixtureRestarts], deletion: GreedyDeletion | None) -> Chosen[MixtureRestarts]:
        """The restart that is highest at its mode after deletions in the best ones."""
        return super().chosen(fit if deletion is None else replace(fit, state=deletion(fit.state)), deletion)

    def whole(self, alone: MixtureRestarts) -> MixtureRestarts:
        """The chosen restart on all data, without its pruned components."""
        alone = alone.reached(alone.parameters)
        expected = alone.expected
        if expected.data.num_rows == self.data.num_rows:
            return alone
        on_all = first(self.data, expected.mixture, expected.ties, expected.curvature, alone.update)
        return replace(on_all, seen=alone.seen)

    def resized(self, alone: MixtureRestarts, deletion: GreedyDeletion) -> tuple[MixtureRestarts, str]:
        """The chosen restart with components split, and what kept it from further splits."""
        alone = alone if self.times == 1.0 else settled(alone, deletion.after)
        loc = self.structure.loc
        alike = is_exchangeable(self.ties, loc)
        room = most_components(self.structure.joint.model, len(loc), self.data.num_rows, alike=alike)
        return deletion.split(alone, self.ties, room)

    def posterior(self, chosen: Chosen[MixtureRestarts]) -> MixturePosterior:
        """One mixture in the model's units; without data where these came in chunks."""
        fit = chosen.fit
        structure = enlarged(self.structure, fit.state.parameters.w.shape[1], recognise_mixture)
        at_mode = mode.find_mode(self.data, fit.state.parameters)
        by_hand = fit.status is Status.BY_HAND  # rounds that nobody watched: their end alone is known
        seen = [self.errors(fit.state)] if by_hand else fit.state.seen
        rounds = zip(*([x[min(chosen.number, len(x) - 1)] for x in each] for each in seen), strict=True)
        state, mixture = mode.laplace_state(structure, self.units, self.data, at_mode)
        return MixturePosterior(
            state,
            *chosen.history(self.jacobian),
            recognised=structure,
            mixture=mixture,
            num_clipped=int(fit.state.expected.well_determined.num_clipped.max()),
            paths=tuple(map(torch.stack, rounds)),
            limit=chosen.limit,
        )

    def watching(self, joint: LogJoint) -> "MixtureFit":
        """The fit, which keeps the errors of other data as well."""
        errors = Errors(self.units, (self.unseen(joint),))
        return replace(self, errors=errors, batch=replace(self.batch, seen=(errors(self.batch),)))

    def unseen(self, joint: LogJoint) -> MixtureData:
        """Other data of the same model, in the units inside.

        :raises BadInput: when they are not of the same kind.
        """
        found = recognised(joint, recognise_mixture)
        kinds = (x.start.w.shape[2:] for x in (self.structure, found))
        ours, theirs = (f"{responses} responses and {functions} basis functions" for responses, functions in kinds)
        if ours != theirs:
            raise BadInput(f"the unseen data have {theirs}, the fitted ones {ours}: expected the same.")
        return found.data(self.units, self.structure.background, products=self.data.layout.has_products)


def begin(joint: LogJoint, settings: EMSettings, *, sampled: bool = False) -> MixtureFit:
    """The mixture recognised, and all restarts before the first round.

    :param sampled: whether restarts run on a sample where data are more than :data:`SAMPLE`, and more than
        :data:`SAMPLE_EACH` for each component.
    :raises UnsupportedModel: when it is no mixture of linear-Gaussian kernels.
    """
    structure = recognised(joint, recognise_mixture)
    rows = Rows.resident(Responses(structure.Y, structure.G, structure.weight), len(structure.Y))
    return _begun(structure, rows, settings, sampled)


def _begun(structure: MixtureStructure, rows: Rows[Responses], settings: EMSettings, sampled: bool) -> MixtureFit:
    """All restarts before the first round, as :func:`begin`."""
    ties, products = structure.ties, settings.curvature is not evidence.block or structure.correlation is not None
    units = response_units(rows, ties.beta_group, ties.beta_free)

    def standard(found: MixtureStructure) -> MixtureData:
        return found.data(units, found.background, products=products)

    if structure.joint.has_data:
        data = standard(structure)
    else:
        data = StreamedData.of(rows.mapped(lambda found: standard(structure.on(structure.joint, found))))
    unit, own = units.unit, units.standard(structure.start)
    alpha = _centred(ties.alpha_ratio * unit.square().unsqueeze(-1), ties.alpha_group)
    ties = replace(ties, alpha_ratio=alpha, beta_ratio=_centred(ties.beta_ratio * unit.square(), ties.beta_group))
    few = data.sampled(max(SAMPLE, SAMPLE_EACH * len(own.loc))) if sampled else data
    start = settings.initial(settings.start, few, own, ties)
    batch = first(few, start, ties, settings.curvature, settings.update)
    errors = Errors(units)
    return MixtureFit(structure, units, data, replace(batch, seen=(errors(batch),)), ties, errors)


def begin_chunks(model: Any, chunks: Chunks, settings: EMSettings) -> MixtureFit:
    """The mixture recognised by a few rows, and all restarts before the first round, on a sample.

    :raises BadInput: for chunks that can be gone through only once, hold no rows, or differ in more than their rows.
    :raises UnsupportedModel: for models that do not say what their rows are.
    """
    if isinstance(model, Marginalised) or not hasattr(model, "settled"):
        raise UnsupportedModel(
            "run_chunks needs a model that says what its rows are: gaussian_mixture or linear_mixture, alone or in "
            "with_background. Pass all data of other models to run(...)."
        )
    rows, joint = rows_of_chunks(model, chunks)
    if rows.communicator.restarts is not None:
        counts = str(rows.counts)
        rows.communicator.restarts.check_equal("numbers of rows where shards(restarts=...) wants the same", counts)
    return _begun(recognise_mixture(joint).on(joint, rows.example[:0]), rows, settings, sampled=True)
