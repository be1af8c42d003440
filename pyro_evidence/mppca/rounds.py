"""The loop of EM for mixtures of probabilistic PCA over a batch of restarts: rounds, warm-up, deletion, choice."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.fitting import restarts
from pyro_evidence.fitting.iterate import Fit, Stop, iterate
from pyro_evidence.fitting.restarts import (
    Phase,
    Restarts,
    advance,
    leap_together,
    moved_to,
    repeated,
    slowly_converging,
)
from pyro_evidence.mixture import updates as mixture_updates
from pyro_evidence.mixture.mode import first_highest
from pyro_evidence.mppca import evidence, expectation, missing, start
from pyro_evidence.mppca.chunks import Rows, has_gaps
from pyro_evidence.mppca.expectation import FactorAnalysers
from pyro_evidence.mppca.updates import (
    Iterate,
    Rule,
    SharedParameters,
    best_within_span,
    literal_gamma,
    no_gamma,
    orbit_gamma,
)

DIRECT = 5  # rounds of the warm-up that take loadings straight from covariances; Husmeier (2000), footnote 14


RULES: dict[object, Rule] = {
    mixture_updates.husmeier2000_update: Rule(literal_gamma),
    mixture_updates.corrected: Rule(orbit_gamma),
}
RULES_WITH_SETTINGS: dict[type, Callable[[Any], Rule]] = {
    mixture_updates.BoundedInflation: lambda update: Rule(orbit_gamma, rho=update.rho, prepare=best_within_span),
    mixture_updates.Unregularised: lambda update: Rule(no_gamma, alpha=0.0, rho=update.rho),
    mixture_updates.WeightDecay: lambda update: Rule(no_gamma, alpha=update.alpha, rho=update.rho),
    Rule: lambda rule: rule,
}


def rule_of(update: object) -> Rule:
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
        f"husmeier2000_update, corrected, Unregularised(), WeightDecay(alpha), or a pyro_evidence.mppca.updates.Rule."
    )


@dataclass(frozen=True)
class MPPCARestarts(Restarts):
    """One iterate of all restarts.  Built by :func:`first` and :func:`~pyro_evidence.fitting.restarts.advance`."""

    Y: Rows  # (N, m) in standard units, nan where missing
    it: Iterate
    rule: Rule

    @property
    def parameters(self) -> FactorAnalysers:
        return self.it.analysers

    @property
    def log_likelihood(self) -> Tensor:
        return self.it.stats.log_likelihood

    @cached_property
    def log_evidence(self) -> Tensor:
        """Log evidence at the current loadings, responsibilities held, standard units, nats, ``(R,)``."""
        found = evidence.block(self.it)
        return torch.where(self.failed | ~found.isfinite(), -torch.inf, found)

    @property
    def occam(self) -> Tensor:
        """Log evidence with an Occam factor for all that is maximised, nats, ``(R,)``; -inf where there is none."""
        found = evidence.log_evidence_occam(self.it, self.rule.gamma(self.it))
        return torch.where(self.failed | ~found.isfinite(), -torch.inf, found)

    def proposed(self) -> FactorAnalysers:
        return self.rule(self.it)

    def reached(self, parameters: FactorAnalysers) -> "MPPCARestarts":
        stats = missing.e_step(self.Y, parameters)
        return replace(self, it=Iterate(parameters, self.it.ties, stats, self.it.variance))

    def change_to(self, parameters: FactorAnalysers) -> Tensor:
        sound = expectation.is_sound(parameters)
        return torch.where(sound, _distance(self.parameters, parameters), torch.nan)

    def ahead(self, before: FactorAnalysers, after: FactorAnalysers) -> FactorAnalysers:
        """Where three rounds lead; rows in which something was pruned on the way stay at the last of them."""
        return _ahead(before, self.parameters, after)

    def complaint(self, parameters: FactorAnalysers, row: int) -> str:
        return "its numbers left the finite ones, or its precisions the positive ones"


def first(Y: Rows, analysers: FactorAnalysers, ties: SharedParameters, variance: Tensor, rule: Rule) -> MPPCARestarts:
    """The batch at its start."""
    failed = torch.zeros(len(analysers.W), dtype=torch.bool, device=Y.device)
    it = Iterate(analysers, ties, missing.e_step(Y, analysers), variance)
    return MPPCARestarts(Y, it, rule, failed=failed, change=variance.new_full(failed.shape, torch.inf))


def _distance(old: FactorAnalysers, new: FactorAnalysers) -> Tensor:
    """Largest change of a log precision or of a share, ``(R,)``."""
    on = new.columns & new.active.unsqueeze(-1)
    parts = [torch.where(on, (new.alpha / old.alpha).log(), 0.0), new.log_mixing.exp() - old.log_mixing.exp()]
    parts.append(torch.where(new.active.unsqueeze(-1), (new.beta / old.beta).log(), 0.0))
    return torch.cat([p.abs().flatten(1) for p in parts], -1).amax(-1)


def _ahead(before: FactorAnalysers, here: FactorAnalysers, after: FactorAnalysers) -> FactorAnalysers:
    """Where three iterates lead; rows in which a component or a column was put out on the way are the last of them."""
    states = (before, here, after)
    same = [(x.active == after.active).all(-1) & (x.columns == after.columns).flatten(1).all(-1) for x in states]
    found = _placed(after, *leap_together(*map(_coordinates, states)))
    return found.where(torch.stack(same).all(0), after)


def _coordinates(analysers: FactorAnalysers) -> tuple[Tensor, ...]:
    """Loadings, means, precisions and shares without bounds, rows in front."""
    shares = torch.where(analysers.active, analysers.log_mixing, 0.0)
    return analysers.W, analysers.mu, analysers.beta.log(), analysers.alpha.log(), shares


def _placed(
    like: FactorAnalysers, W: Tensor, mu: Tensor, log_beta: Tensor, log_alpha: Tensor, shares: Tensor
) -> FactorAnalysers:
    """The analysers at these coordinates, with the components and columns of ``like`` that are not pruned."""
    log_mixing = torch.where(like.active, shares, -torch.inf).log_softmax(-1)
    return replace(like, W=W, mu=mu, beta=log_beta.exp(), alpha=log_alpha.exp(), log_mixing=log_mixing)


def rounds(batch: MPPCARestarts, rule: Rule, num_steps: int) -> MPPCARestarts:
    """A fixed number of rounds of ``rule``."""
    return repeated(replace(batch, rule=rule), num_steps)


def warm_up(batch: MPPCARestarts, num_rounds: int) -> list[Phase[MPPCARestarts]]:
    """Rounds without a prior on the loadings: direct ones, then EM."""
    free = batch.it.ties.beta_free and not has_gaps(batch.Y)  # whose covariances are not known
    num_direct = min(DIRECT, num_rounds) if free else 0
    plain = Rule(no_gamma, alpha=0.0, rho=batch.rule.rho)
    return [
        Phase(lambda now: now, directly, num_direct),
        Phase(lambda now: replace(now, rule=plain), advance, num_rounds - num_direct),
    ]


def directly(batch: MPPCARestarts) -> MPPCARestarts:
    """A round that takes loadings straight from covariances."""
    held, ties = batch.it.analysers, batch.it.ties
    new = start.direct(batch.Y, held, 2.0 * batch.rule.rho * batch.it.variance.mean())
    new = new if ties.mean_free else replace(new, mu=held.mu)
    return moved_to(batch, new if ties.mixing_free else replace(new, log_mixing=held.log_mixing))


def warmed(batch: MPPCARestarts, num_steps: int) -> MPPCARestarts:
    """The batch after the warm-up, ready for its rule."""
    after = restarts.warmed(batch, warm_up(batch, num_steps))
    return restarts.ready(replace(after, rule=batch.rule))


def em(batch: MPPCARestarts, num_warm: int, stop: Stop) -> Fit[MPPCARestarts]:
    """The warm-up, with the rule's gamma prior if it has one, then the rule until ``stop``."""
    rule = batch.rule
    return restarts.em(batch, warm_up(batch, num_warm), lambda now: replace(now, rule=rule), stop, advance)


def best(batch: MPPCARestarts) -> MPPCARestarts:
    """The restart of the highest Occam-corrected log evidence, alone."""
    return of_rows(batch, first_highest(batch.occam).reshape(1))


def on(batch: MPPCARestarts, Y: Rows) -> MPPCARestarts:
    """The restarts on other data."""
    begun = first(Y, batch.it.analysers, batch.it.ties, batch.it.variance, batch.rule)
    return replace(begun, failed=batch.failed)


def of_rows(batch: MPPCARestarts, index: Tensor) -> MPPCARestarts:
    """Some restarts, on their own."""
    begun = first(batch.Y, batch.it.analysers[index], batch.it.ties, batch.it.variance, batch.rule)
    return replace(begun, failed=batch.failed[index], change=batch.change[index])


def finished(fit: Fit[MPPCARestarts], stop: Stop) -> Fit[MPPCARestarts]:
    """The best restart, run until ``stop`` on its own."""
    batch = restarts.ready(fit.state)
    step = advance if stop.counted else slowly_converging
    last = iterate(step, replace(batch, num_rounds=0), stop, "EvidenceEM, best restart")
    return Fit(last.state, last.status, (*fit.objectives, *last.objectives))
