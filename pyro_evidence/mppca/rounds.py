"""The restarts of a mixture of probabilistic PCA: what one round leads to, the warm-up, what is left out or split."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.component_moves import ComponentRestarts, SplitProposals
from pyro_evidence.fitting.restarts import Phase, Step, moved_to, repeated, warmed
from pyro_evidence.mixture import updates as mixture_updates
from pyro_evidence.mixture.updates import SharedParameters
from pyro_evidence.mppca import evidence, missing, start
from pyro_evidence.mppca.data import Observations
from pyro_evidence.mppca.expectation import FactorAnalysers, FactorStatistics
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

DIRECT = 5  # rounds of the warm-up that take loadings straight from covariances; Husmeier (2000), footnote 14


RULES: dict[object, MPPCAUpdate] = {
    mixture_updates.husmeier2000_update: MPPCAUpdate(literal_gamma),
    mixture_updates.corrected: MPPCAUpdate(orbit_gamma),
}
RULES_WITH_SETTINGS: dict[type, Callable[[Any], MPPCAUpdate]] = {
    mixture_updates.BoundedInflation: lambda update: MPPCAUpdate(orbit_gamma, rho=update.rho, prepare=best_within_span),
    mixture_updates.Unregularised: lambda update: MPPCAUpdate(no_gamma, alpha=0.0, rho=update.rho),
    mixture_updates.WeightDecay: lambda update: MPPCAUpdate(no_gamma, alpha=update.alpha, rho=update.rho),
    MPPCAUpdate: lambda rule: rule,
}


def rule_of(update: object) -> MPPCAUpdate:
    """What an update of a mixture means for the loadings of a mixture of probabilistic PCA.

    :raises BadInput: for an update that has no such meaning.
    """
    if isinstance(update, Hashable) and (rule := RULES.get(update)) is not None:
        return rule
    for kind, rule_with in RULES_WITH_SETTINGS.items():
        if isinstance(update, kind):
            return rule_with(update)
    raise BadInput(
        f"update={update!r} has no form for a mixture of probabilistic PCA; expected BoundedInflation(), "
        f"husmeier2000_update, corrected, Unregularised(), WeightDecay(alpha), or a "
        f"pyro_evidence.mppca.updates.MPPCAUpdate."
    )


FEW = 2**13  # data on which components are looked at
EACH = 2**10  # of one component
ROUNDS = 10  # of the small mixtures, after a warm-up of as many
PAIRS = 3  # of centres from which they begin
SURE = 0.5  # responsibility above which a datum shows what a component looks like
ALPHA = 0.01  # prior precision at the start, in units of the data
SMALL = 0.1  # size of the loadings there: zero would stay so in EM


@dataclass(frozen=True)
class MPPCARestarts(ComponentRestarts):
    """One iterate of all restarts.  Built by :func:`first` and :func:`~pyro_evidence.fitting.restarts.advance`."""

    Y: Observations  # (N, m) in standard units, nan where missing
    it: Iterate

    @property
    def parameters(self) -> FactorAnalysers:
        return self.it.analysers

    @property
    def log_likelihood(self) -> Tensor:
        return self.it.stats.log_likelihood

    @cached_property
    def log_evidence(self) -> Tensor:
        """Log evidence at the current loadings, responsibilities held, standard units, nats, ``(R,)``."""
        found = evidence.orbit_log_evidence(self.it)
        return torch.where(self.failed | ~found.isfinite(), -torch.inf, found)

    @cached_property
    def occam(self) -> Tensor:
        """Log evidence with an Occam factor for all that is maximised, nats, ``(R,)``; -inf where there is none."""
        found = evidence.log_evidence_occam(self.it, self.update.gamma(self.it))
        return torch.where(self.failed | ~found.isfinite(), -torch.inf, found)

    def heights(self, exact: Tensor) -> Tensor:
        """As :attr:`occam`, which is as exact as is known here."""
        return self.occam

    def proposed(self) -> FactorAnalysers:
        new: FactorAnalysers = self.update(self.it)
        return new

    def reached(self, parameters: FactorAnalysers) -> "MPPCARestarts":
        return self.on(self.Y, parameters)

    def on(self, Y: Observations, parameters: FactorAnalysers) -> "MPPCARestarts":
        """The restarts with other data and parameters."""
        stats = missing.e_step_of_all(Y, parameters)
        return replace(self, Y=Y, it=Iterate(parameters, self.it.ties, stats, self.it.variance))

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
        free = self.it.ties.all_free[1] and not self.Y.has_gaps  # whose covariances are not known
        num_direct = min(DIRECT, num_rounds) if free else 0
        plain = MPPCAUpdate(no_gamma, alpha=0.0, rho=self.update.rho)
        return [Phase(self.update, directly, num_direct), Phase(plain, step, num_rounds - num_direct)]

    def selected(self, index: Tensor) -> "MPPCARestarts":
        stats = FactorStatistics(*(x[index] for x in vars(self.it.stats).values()))
        own = Iterate(self.parameters[index], self.it.ties, stats, self.it.variance)
        return replace(self, it=own, failed=self.failed[index], change=self.change[index], failures={})

    def candidates(self, alive: Tensor, deletion: object) -> tuple["MPPCARestarts", Tensor]:
        """What is left of one restart when a component, or a column of its own precision, is left out."""
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
        return first(self.Y, pruned(analysers[owner], keep, kept), ties, self.it.variance, self.update), owner

    def split_proposals(self, ties: SharedParameters) -> SplitProposals:
        """Each component's halves, the best of all starts: as small mixtures of the data that are surely its own."""
        few, variance = self.Y.sampled(FEW), self.it.variance
        resp = missing.log_joint(few, self.parameters)[0].softmax(-1)
        halves, gains = [], []
        for k in range(resp.shape[-1]):
            index = (resp[:, k] > SURE).nonzero().flatten()
            own = few[index[:: 1 + len(index) // EACH]]
            one = self.parameters.rebuilt(lambda _, x, k=k: x[:1, k : k + 1])  # type: ignore[misc]
            one = replace(one, log_mixing=torch.where(one.active, 0.0, one.log_mixing))
            starts, its = _starts(own, one, ties), Observations.resident(own)
            if len(own) < 2 * (2 + one.W.shape[-1]) or not bool(one.active.all()):
                halves.append(starts.rebuilt(lambda _, x: x[:1]))
                gains.append(variance.new_full((1,), -torch.inf))
                continue
            single, double = (first(its, x, ties.resized(n), variance, self.update) for x, n in ((one, 1), (starts, 2)))
            single, double = repeated(single, ROUNDS), repeated(warmed(double, ROUNDS), ROUNDS)
            height = torch.where(double.parameters.active.all(-1), double.occam, -torch.inf)
            best = first_highest(height).reshape(1)
            halves.append(double.parameters[best])
            gains.append((height[best] - single.occam).nan_to_num(-torch.inf))
        together = halves[0].rebuilt(lambda name, _: torch.cat([getattr(half, name) for half in halves]))
        return SplitProposals(together, torch.cat(gains))

    def begun_at(self, parameters: FactorAnalysers, ties: SharedParameters) -> "MPPCARestarts":
        return first(self.Y, parameters, ties.resized(parameters.W.shape[1]), self.it.variance, self.update)


def first(
    Y: Observations, analysers: FactorAnalysers, ties: SharedParameters, variance: Tensor, rule: MPPCAUpdate
) -> MPPCARestarts:
    """The batch at its start."""
    failed = torch.zeros(len(analysers.W), dtype=torch.bool, device=variance.device)
    it = Iterate(analysers, ties, missing.e_step_of_all(Y, analysers), variance)
    return MPPCARestarts(Y, it, update=rule, failed=failed, change=variance.new_full(failed.shape, torch.inf))


def directly(batch: MPPCARestarts) -> MPPCARestarts:
    """A round that takes loadings straight from covariances."""
    held, ties = batch.it.analysers, batch.it.ties
    new = start.direct(batch.Y, held, 2.0 * batch.update.rho * batch.it.variance.mean())
    new = new if ties.mean_free else replace(new, mu=held.mu)
    return moved_to(batch, new if ties.mixing_free else replace(new, log_mixing=held.log_mixing))


def _starts(own: Tensor, one: FactorAnalysers, ties: SharedParameters) -> FactorAnalysers:
    """Pairs of components, ``(PAIRS, 2)``: about centres apart, without loadings."""
    m, q = one.W.shape[-2:]
    wide = {n: getattr(one, n).expand(PAIRS, 2, *getattr(one, n).shape[2:]) for n in ("beta", "alpha", "columns")}
    W = torch.randn(PAIRS, 2, m, q, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(one.W)
    mu = one.mu[0, 0] + _centres((own - one.mu[0, 0]).nan_to_num(0.0))
    if ties.all_free[0]:
        wide |= {"alpha": torch.full_like(wide["alpha"], ALPHA), "columns": torch.ones_like(wide["columns"])}
    W = SMALL * W * wide["columns"].unsqueeze(-2)
    mu = mu if ties.mean_free else one.mu.expand(PAIRS, 2, m)
    return FactorAnalysers(W, mu, wide["beta"], torch.full((PAIRS, 2), 0.5).to(W).log(), wide["alpha"], wide["columns"])


def _centres(away: Tensor) -> Tensor:
    """Pairs of centres about zero: along the two directions of largest variance, and two data far apart."""
    if len(away) < 2:
        return away.new_zeros(PAIRS, 2, away.shape[-1])
    _, sizes, V = torch.linalg.svd(away, full_matrices=False)
    along = (sizes[:, None] * fix_signs(V.mT).mT / len(away) ** 0.5)[: PAIRS - 1]
    along = along[torch.arange(PAIRS - 1).clamp(max=len(along) - 1)]
    first = away[away.square().sum(-1).argmax()]
    second = away[(away - first).square().sum(-1).argmax()]
    return torch.cat([torch.stack([along, -along], 1), torch.stack([first, second]).unsqueeze(0)])
