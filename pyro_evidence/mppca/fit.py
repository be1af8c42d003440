"""One recognised mixture of probabilistic PCA on its way: from the Pyro model to restarts, round by round, and back.

What one round leads to, the warm-up, what is left out or split; at the end the posterior.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.chunks import Chunks
from pyro_evidence.data.rows import Rows, column_moments, with_ones
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.em import (
    Chosen,
    ComponentFit,
    ComponentRestarts,
    EMSettings,
    GreedyDeletion,
    Phase,
    SplitProposals,
    Step,
    moved_to,
    repeated,
    warmed,
)
from pyro_evidence.fitting.iterate import Stop
from pyro_evidence.mixture import updates as mixture_updates
from pyro_evidence.mixture.data import Units
from pyro_evidence.mixture.fit import AUTOMATIC, ROUNDS, SURE, RandomWeights
from pyro_evidence.mixture.recognise import enlarged, most_components, recognised, rows_of_chunks
from pyro_evidence.mixture.updates import SharedParameters
from pyro_evidence.models.covariances import FLOOR
from pyro_evidence.mppca import evidence, expectation
from pyro_evidence.mppca import start as mppca_start
from pyro_evidence.mppca.data import Observations
from pyro_evidence.mppca.expectation import FactorAnalysers, FactorStatistics
from pyro_evidence.mppca.orbit import laplace_state
from pyro_evidence.mppca.posterior import MPPCAPosterior
from pyro_evidence.mppca.recognise import MPPCAStructure, recognise_mppca
from pyro_evidence.mppca.updates import (
    Iterate,
    MPPCAUpdate,
    best_within_span,
    literal_gamma,
    no_gamma,
    orbit_gamma,
    pruned,
)
from pyro_evidence.numerics.batched import first_highest
from pyro_evidence.numerics.linalg import fix_signs
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.settings import Start, seeded

DIRECT = 5  # rounds of the warm-up that take loadings straight from covariances; Husmeier (2000), footnote 14


def rule_of(update: object) -> MPPCAUpdate:
    """Update of a mixture of probabilistic PCA that belongs to an update of a mixture.

    :raises BadInput: for an update that has no such meaning.
    """
    match update:
        case MPPCAUpdate():
            return update
        case mixture_updates.husmeier2000_update:
            return MPPCAUpdate(literal_gamma)
        case mixture_updates.corrected:
            return MPPCAUpdate(orbit_gamma)
        case mixture_updates.BoundedInflation(rho=rho):
            return MPPCAUpdate(orbit_gamma, rho=rho, prepare=best_within_span)
        case mixture_updates.Unregularised(rho=rho):
            return MPPCAUpdate(no_gamma, alpha=0.0, rho=rho)
        case mixture_updates.WeightDecay(alpha=alpha, rho=rho):
            return MPPCAUpdate(no_gamma, alpha=alpha, rho=rho)
    raise BadInput(
        f"update={update!r} has no form for a mixture of probabilistic PCA; expected BoundedInflation(), "
        f"husmeier2000_update, corrected, Unregularised(), WeightDecay(alpha), or a "
        f"pyro_evidence.mppca.updates.MPPCAUpdate."
    )


FEW = 2**13  # data on which components are looked at
EACH = 2**10  # of one component
PAIRS = 3  # of centres from which they begin
ALPHA = RandomWeights.alpha  # prior precision at the start, in units of the data
SMALL = 0.1  # size of the loadings there: zero would stay so in EM


@dataclass(frozen=True, eq=False)
class MPPCARestarts(ComponentRestarts):
    """One iterate of all restarts.  Built by :func:`first` and :func:`~pyro_evidence.fitting.em.advance`."""

    data: Observations  # (N, m) in standard units, nan where missing
    it: Iterate

    parameters = property(attrgetter("it.analysers"))
    log_likelihood = property(attrgetter("it.stats.log_likelihood"))

    @cached_property
    def log_evidence(self) -> Tensor:
        """Log evidence at the current loadings, responsibilities held, standard units, nats, ``(R,)``."""
        return self.defined(evidence.orbit_log_evidence(self.it))

    @cached_property
    def occam(self) -> Tensor:
        """Log evidence with an Occam factor for all that is maximised, nats, ``(R,)``; -inf where there is none."""
        return self.defined(evidence.log_evidence_occam(self.it, self.update.gamma(self.it)))

    def proposed(self) -> FactorAnalysers:
        return self.update(self.it)

    def reached(self, parameters: FactorAnalysers) -> "MPPCARestarts":
        return self.on(self.data, parameters)

    def on(self, Y: Observations, parameters: FactorAnalysers) -> "MPPCARestarts":
        """The restarts with other data and parameters."""
        stats = expectation.e_step_of_all(Y, parameters)
        return replace(self, data=Y, it=Iterate(parameters, self.it.ties, stats, self.it.variance))

    def change_to(self, parameters: FactorAnalysers) -> Tensor:
        """Largest change of a log precision or of a share, ``(R,)``; nan where a coordinate is not finite."""
        old, new = self.parameters, parameters
        on, active = new.on, new.active.unsqueeze(-1)
        parts = [torch.where(on, (new.alpha / old.alpha).log(), 0.0), new.log_mixing.exp() - old.log_mixing.exp()]
        parts.append(torch.where(active, (new.beta / old.beta).log(), 0.0))
        sound = torch.stack([x.flatten(1).sum(-1) for x in new.coordinates]).sum(0).isfinite()
        return torch.where(sound, torch.cat([p.abs().flatten(1) for p in parts], -1).amax(-1), torch.nan)

    def complaint(self, parameters: FactorAnalysers, row: int) -> str:
        return "its numbers left the finite ones, or its precisions the positive ones"

    def warm_up(self, num_rounds: int, step: Step["MPPCARestarts"]) -> list[Phase]:
        """Rounds without a prior on the loadings, with the rule's gamma prior if it has one: direct ones, then EM."""
        free = self.it.ties.all_free[1] and not self.data.has_gaps  # whose covariances are not known
        num_direct = min(DIRECT, num_rounds) if free else 0
        plain = MPPCAUpdate(no_gamma, alpha=0.0, rho=self.update.rho)
        return [(self.update, directly, num_direct), (plain, step, num_rounds - num_direct)]

    def selected(self, index: Tensor) -> "MPPCARestarts":
        stats = FactorStatistics(*(x[index] for x in vars(self.it.stats).values()))
        own = Iterate(self.parameters[index], self.it.ties, stats, self.it.variance)
        return replace(self, it=own, failed=self.failed[index], change=self.change[index], failures={})

    def candidates(self, alive: Tensor, deletion: object) -> tuple["MPPCARestarts", Tensor]:
        """Candidates of one restart without a component, or without a column of its own precision."""
        analysers, ties = self.parameters, self.it.ties
        active, columns = analysers.active[0], analysers.columns[0] & analysers.active[0].unsqueeze(-1)
        places = active.nonzero().flatten()
        out = places if len(places) > 1 and ties.mixing_free else places[:0]
        keep = active.expand(len(out), -1).scatter(-1, out.unsqueeze(-1), False)
        kept = analysers.columns[0].expand(len(out), *columns.shape)
        if ties.columnwise and ties.all_free[0]:
            norms = torch.where(columns, analysers.W[0].square().sum(-2), torch.inf)
            some = columns.any(-1).nonzero().flatten()
            shortest = norms[some].argmin(-1)
            fewer = analysers.columns[0].expand(len(some), *columns.shape).clone()
            fewer[torch.arange(len(some)), some, shortest] = False
            keep, kept = torch.cat([keep, active.expand(len(some), -1)]), torch.cat([kept, fewer])
        owner = torch.zeros(len(keep), dtype=torch.long, device=keep.device)
        if not len(owner):
            return self, owner
        return first(self.data, pruned(analysers[owner], keep, kept), ties, self.it.variance, self.update), owner

    def split_proposals(self, ties: SharedParameters) -> SplitProposals:
        """Each component's halves, the best of all starts: as small mixtures of the data that are surely its own."""
        few, variance = self.data.sampled(FEW), self.it.variance
        resp = expectation.log_joint(few, self.parameters)[0].softmax(-1)
        halves, gains = [], []
        for k in range(resp.shape[-1]):
            index = (resp[:, k] > SURE).nonzero().flatten()
            own = few[index[:: 1 + len(index) // EACH]]
            one = self.parameters.rebuilt(lambda _, x, k=k: x[:1, k : k + 1])
            one = replace(one, log_mixing=torch.where(one.active, 0.0, one.log_mixing))
            if len(own) < 2 * (2 + one.W.shape[-1]) or not bool(one.active.all()):
                halves.append(one.rebuilt(lambda _, x: x.expand(1, 2, *x.shape[2:])))
                gains.append(variance.new_full((1,), -torch.inf))
                continue
            starts, its = _starts(own, one, ties), Observations.resident(own)
            single, double = (first(its, x, ties.resized(n), variance, self.update) for x, n in ((one, 1), (starts, 2)))
            single, double = repeated(single, ROUNDS), repeated(warmed(double, ROUNDS), ROUNDS)
            height = torch.where(double.parameters.active.all(-1), double.occam, -torch.inf)
            best = first_highest(height).reshape(1)
            halves.append(double.parameters[best])
            gains.append((height[best] - single.occam).nan_to_num(-torch.inf))
        together = halves[0].rebuilt(lambda name, _: torch.cat([getattr(half, name) for half in halves]))
        return SplitProposals(together, torch.cat(gains))

    def begun_at(self, parameters: FactorAnalysers, ties: SharedParameters) -> "MPPCARestarts":
        return first(self.data, parameters, ties.resized(parameters.W.shape[1]), self.it.variance, self.update)


def first(
    Y: Observations, analysers: FactorAnalysers, ties: SharedParameters, variance: Tensor, rule: MPPCAUpdate
) -> MPPCARestarts:
    """The batch at its start."""
    it = Iterate(analysers, ties, expectation.e_step_of_all(Y, analysers), variance)
    return MPPCARestarts.begun(it.stats.log_likelihood, data=Y, it=it, update=rule)


def directly(batch: MPPCARestarts) -> MPPCARestarts:
    """A round that takes loadings straight from covariances."""
    held, ties = batch.it.analysers, batch.it.ties
    new = mppca_start.direct(batch.data, held, 2.0 * batch.update.rho * batch.it.variance.mean())
    new = new if ties.mean_free else replace(new, mu=held.mu)
    return moved_to(batch, new if ties.mixing_free else replace(new, log_mixing=held.log_mixing))


def _starts(own: Tensor, one: FactorAnalysers, ties: SharedParameters) -> FactorAnalysers:
    """Pairs of components, ``(PAIRS, 2)``, without loadings: along directions of large variance, and at far data."""
    m, q = one.W.shape[-2:]
    W = torch.randn(PAIRS, 2, m, q, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(one.W)
    wide = one.rebuilt(lambda _, x: x.expand(PAIRS, 2, *x.shape[2:]))
    if ties.mean_free:
        away = (own - one.mu[0, 0]).nan_to_num(0.0)
        _, sizes, V = torch.linalg.svd(away, full_matrices=False)
        along = (sizes[:, None] * fix_signs(V.mT).mT / len(away) ** 0.5)[: PAIRS - 1]
        first = away[away.square().sum(-1).argmax()]
        second = away[(away - first).square().sum(-1).argmax()]
        pairs = torch.cat([torch.stack([along, -along], 1), torch.stack([first, second]).unsqueeze(0)])
        wide = replace(wide, mu=one.mu[0, 0] + pairs)
    if ties.all_free[0]:
        wide = replace(wide, alpha=torch.full_like(wide.alpha, ALPHA), columns=torch.ones_like(wide.columns))
    even = torch.full_like(wide.log_mixing, 0.5).log()
    return replace(wide, W=SMALL * W * wide.columns.unsqueeze(-2), log_mixing=even)


LEAST_NOISE = FLOOR  # of the data's variance
SAMPLE = FEW  # data on which restarts run where there are more; the chosen one goes on with all
CANDIDATES = 4096  # data among which centres are drawn


@dataclass(frozen=True)
class NormalCentres(RandomWeights):
    """Centres drawn from a Normal about the mean of the data, of the data's variance; Husmeier (2000), footnote 14.

    >>> import torch
    >>> from pyro_evidence import EvidenceEM, Start
    >>> from pyro_evidence.models.mppca import mppca
    >>> from pyro_evidence.mppca import NormalCentres
    >>> Y = torch.randn(60, 1) @ torch.randn(1, 4) + 0.1 * torch.randn(60, 4)
    >>> EvidenceEM(mppca(1, 2), start=Start(restarts=2), initial=NormalCentres()).run(Y).restarts.shape
    torch.Size([2])
    """

    def centres(self, Y: Tensor, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Shape ``(R, K, m)``, in standard units."""
        return torch.randn(*shape, Y.shape[1], generator=generator, dtype=torch.float64).to(Y)


@dataclass(frozen=True, eq=False)
class MPPCAFit(ComponentFit[MPPCARestarts]):
    """A recognised model, the units inside, and all restarts."""

    structure: MPPCAStructure
    units: Units
    data: Observations

    def together(self, stop: Stop, deletion: GreedyDeletion) -> Stop:
        """Restarts are compared where they converge, for they overtake one another late; on a sample, before."""
        return stop if self.times == 1.0 else replace(stop, num_steps=min(stop.num_steps, deletion.after))

    def whole(self, alone: MPPCARestarts) -> MPPCARestarts:
        """The chosen restart on all data."""
        return alone if self.times == 1.0 else alone.on(self.data, alone.parameters)

    def resized(self, alone: MPPCARestarts, deletion: GreedyDeletion) -> tuple[MPPCARestarts, str]:
        """The chosen restart with components left out and split, on the restarts' data and then on all."""
        few = alone if self.times == 1.0 else alone.on(self.batch.data, alone.parameters)
        after, limit = deletion(few), ""
        if bool(after.parameters.active.all()):
            before, ties, num = after, self.structure.ties, self.structure.start.W.shape[1]
            room = most_components(self.structure.joint.model, num, len(self.data), alike=ties.mixing_free)
            after, limit = deletion.split(before, ties, room)
            after = after if after is before else deletion(after)
        return (after if self.times == 1.0 else deletion(self.whole(after))), limit

    def posterior(self, chosen: Chosen[MPPCARestarts]) -> MPPCAPosterior:
        """The chosen restart at its mode, in the model's units."""
        batch = chosen.fit.state
        structure = enlarged(self.structure, batch.parameters.W.shape[1], recognise_mppca)
        state, analysers, refusal = laplace_state(structure, self.units, batch.data, batch.it)
        return MPPCAPosterior(
            state,
            *chosen.history(self.jacobian),
            recognised=structure,
            analysers=analysers,
            refusal=refusal,
            log_evidence_occam=float(batch.occam[0]) - self.jacobian,
            limit=chosen.limit,
        )


def begin(joint: LogJoint, settings: EMSettings, *, sampled: bool = False) -> MPPCAFit:
    """All restarts before the first round.

    :param sampled: whether restarts run on a sample where data are more than :data:`SAMPLE`.
    :raises UnsupportedModel: when it is one that the engine cannot read.
    """
    rule_of(settings.update)  # which refuses others before the model is read
    structure = recognised(joint, recognise_mppca)
    return _begun(structure, Observations.resident(structure.Y), settings, sampled)


def _begun(structure: MPPCAStructure, raw: Observations, settings: EMSettings, sampled: bool) -> MPPCAFit:
    """All restarts before the first round.

    :param raw: data in the caller's units.
    :raises BadInput: for too few rows or columns.
    """
    (N, m), q = raw.shape, structure.start.W.shape[-1]
    if q >= m:
        raise BadInput(f"the loadings have {q} columns and the data {m}; expected fewer columns than the data have.")
    if N < 2:
        raise BadInput(f"Y has {N} row; expected at least two, or nothing varies.")
    units = raw.units
    Y = replace(raw, rows=raw.rows.mapped(lambda y: (y - units.origin).div_(units.unit)))
    whole = Observations(Y.rows.mapped(lambda y: y.nan_to_num(0.0)), False) if Y.has_gaps else Y
    variance = _noise_scale(whole, structure.ties, structure.start)
    analysers = _start(whole, units.standard(structure.start), structure.ties, settings.start, settings.initial)
    few = Y
    if sampled and len(Y) > SAMPLE:  # of which each process adds up a part
        few = replace(Y, rows=Rows.shared(Y.sampled(SAMPLE), Y.rows.communicator))
    batch = first(few, analysers, structure.ties, variance, rule_of(settings.update))
    return MPPCAFit(structure, units, Y, batch)


def begin_chunks(model: Any, chunks: Chunks, settings: EMSettings) -> MPPCAFit:
    """All restarts before the first round of a model of ours, which a few rows tell, on data in chunks.

    :raises BadInput: for chunks that can be gone through only once, hold no rows, or cannot be used.
    """
    rule_of(settings.update)  # which refuses others before the data are read
    rows, joint = rows_of_chunks(model, chunks)
    structure = recognise_mppca(joint).on(joint, rows.example[:0])
    return _begun(structure, Observations.of(rows.mapped(attrgetter("Y"))), settings, sampled=True)


def _noise_scale(Y: Observations, ties: SharedParameters, analysers: FactorAnalysers) -> Tensor:
    """Variances to which the gamma prior of the noise refers: what one component with all latents leaves over.

    Shared out by the outputs' variances if each has its own noise.
    """
    one = analysers.rebuilt(lambda _, x: x[:, :1])
    one = replace(one, log_mixing=torch.zeros_like(one.log_mixing))
    rest = mppca_start.direct(Y, one).beta[0, 0, 0].reciprocal()
    rest = torch.maximum(rest, rest.new_tensor(LEAST_NOISE))  # data of low rank leave nothing over
    if not bool((ties.beta_group != ties.beta_group[:, :1]).any()):
        return rest.expand(Y.shape[1])
    variances = column_moments(Y.rows.mapped(with_ones))[2]
    return rest * variances.clamp(min=1e-3)  # a constant output has no scale


def _start(
    Y: Observations, model: FactorAnalysers, ties: SharedParameters, start: Start, initial: RandomWeights
) -> FactorAnalysers:
    """All restarts: centres, no loadings, one width; what the model holds fixed is kept."""
    R, (K, m, q) = start.number(AUTOMATIC), model.W.shape[1:]
    generator = seeded(start.seed)
    if isinstance(initial, NormalCentres):
        mu = initial.centres(model.mu[:, 0], (R, K), generator)
    else:
        few = Y.sampled(CANDIDATES)
        place = torch.randperm(len(few), generator=generator).to(few.device)
        uniform = torch.rand(R, K, generator=generator, dtype=torch.float64).to(few)
        mu = mppca_start.spread_centres(few[place], uniform)
    mu = mu if ties.mean_free else model.mu.expand(R, K, m)
    beta = torch.full_like(model.beta, initial.width**-2) if ties.all_free[1] else model.beta
    alpha = torch.full_like(model.alpha, initial.alpha) if ties.all_free[0] else model.alpha
    flat = torch.zeros_like(model.log_mixing).log_softmax(-1) if ties.mixing_free else model.log_mixing
    W = torch.randn(R, K, m, q, generator=generator, dtype=torch.float64).to(model.W)
    analysers = replace(model, W=SMALL * W, mu=mu, beta=beta, alpha=alpha, log_mixing=flat)
    return analysers.rebuilt(lambda _, x: x.expand(R, *x.shape[1:]))
