"""The loop of EM for mixtures of probabilistic PCA over a batch of restarts: rounds, warm-up, deletion, choice."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.iterate import Fit, Status, Stop, iterate
from pyro_evidence.mixture import updates as mixture_updates
from pyro_evidence.mppca import evidence, expectation, missing, start
from pyro_evidence.mppca.expectation import Analysers
from pyro_evidence.mppca.updates import (
    Iterate,
    Rule,
    Ties,
    best_within_span,
    literal_gamma,
    no_gamma,
    orbit_gamma,
    pruned,
)

LOOKING = 5  # rounds of candidates between one look at what is hopeless and the next
SAFETY = 2.0  # how much faster than in its last round a candidate may rise in those that remain
DIRECT = 5  # rounds of the warm-up that take loadings straight from covariances; Husmeier (2000), footnote 14


def rule_of(update: object) -> Rule:
    """What an update of a mixture means for the loadings of a mixture of probabilistic PCA.

    :raises BadInput: for an update that has no such meaning.
    """
    if isinstance(update, Rule):
        return update
    if update is mixture_updates.as_published:
        return Rule(literal_gamma)
    if update is mixture_updates.corrected:
        return Rule(orbit_gamma)
    if isinstance(update, mixture_updates.BoundedInflation):
        return Rule(orbit_gamma, rho=update.rho, prepare=best_within_span)
    if isinstance(update, mixture_updates.Unregularised):
        return Rule(no_gamma, alpha=0.0, rho=update.rho)
    if isinstance(update, mixture_updates.WeightDecay):
        return Rule(no_gamma, alpha=update.alpha, rho=update.rho)
    raise BadInput(
        f"update={update!r} has no form for a mixture of probabilistic PCA; expected BoundedInflation(), as_published, "
        f"corrected, Unregularised(), WeightDecay(alpha), or a pyro_evidence.mppca.updates.Rule."
    )


@dataclass(frozen=True)
class MPPCARestarts:
    """One iterate of all restarts.  Built by :func:`first` and :func:`advance`."""

    Y: Tensor  # (N, m) in standard units, nan where missing
    it: Iterate
    rule: Rule
    failed: Tensor  # (R,) bool: rows that stay at their last good state
    moved: float  # largest change of a log hyperparameter in the last round

    @cached_property
    def log_evidence(self) -> Tensor:
        """Log evidence at the current loadings, responsibilities held, standard units, nats, ``(R,)``."""
        found = evidence.block(self.it)
        return torch.where(self.failed | ~found.isfinite(), -torch.inf, found)

    @property
    def objective(self) -> float:
        """Log evidence of the restart that has most."""
        best = float(self.log_evidence.max())
        return best if best > -torch.inf else float(self.it.stats.log_likelihood.max())

    @property
    def gradient_norm(self) -> float:
        """How far the last round moved, in units of log precision: zero at a fixed point."""
        return self.moved

    @property
    def verdict(self) -> Status | None:
        """No further step when every restart has failed."""
        return Status.FAILED if bool(self.failed.all()) else None

    @property
    def occam(self) -> Tensor:
        """Log evidence with an Occam factor for all that is maximised, nats, ``(R,)``; -inf where there is none."""
        found = evidence.log_evidence_occam(self.it, self.rule.gamma(self.it))
        return torch.where(self.failed | ~found.isfinite(), -torch.inf, found)


def first(Y: Tensor, analysers: Analysers, ties: Ties, variance: Tensor, rule: Rule) -> MPPCARestarts:
    """The batch at its start."""
    failed = torch.zeros(len(analysers.W), dtype=torch.bool, device=Y.device)
    return MPPCARestarts(Y, Iterate(analysers, ties, missing.e_step(Y, analysers), variance), rule, failed, torch.inf)


def _moved_to(batch: MPPCARestarts, new: Analysers) -> MPPCARestarts:
    """The batch at other parameters; rows that become non-finite keep their last good state."""
    old = batch.it.analysers
    failed = batch.failed | ~expectation.is_sound(new)
    new = old.where(failed, new) if bool(failed.any()) else new
    it = Iterate(new, batch.it.ties, missing.e_step(batch.Y, new), batch.it.variance)
    lost = ~it.stats.log_likelihood.isfinite() & ~failed
    if bool(lost.any()):
        return _moved_to(replace(batch, failed=failed | lost), old.where(lost, new))
    return replace(batch, it=it, failed=failed, moved=_distance(old, new))


def _distance(old: Analysers, new: Analysers) -> float:
    on = (new.columns & new.active.unsqueeze(-1)).to(new.alpha)
    parts = [(new.alpha / old.alpha).log() * on, new.log_mixing.exp() - old.log_mixing.exp()]
    parts.append((new.beta / old.beta).log() * new.active.unsqueeze(-1))
    return max(float(p.abs().max()) if p.numel() else 0.0 for p in parts)


def advance(batch: MPPCARestarts) -> MPPCARestarts:
    """The restarts after one more round."""
    return _moved_to(batch, batch.rule(batch.it))


def rounds(batch: MPPCARestarts, rule: Rule, num_steps: int) -> MPPCARestarts:
    """A fixed number of rounds of ``rule``."""
    batch = replace(batch, rule=rule)
    for _ in range(num_steps):
        batch = advance(batch)
    return batch


def warmed(batch: MPPCARestarts, num_steps: int) -> MPPCARestarts:
    """The batch after rounds without a prior on the loadings: direct ones, then EM; ready for its rule."""
    rule = batch.rule
    direct = batch.it.ties.beta_free and not missing.has_gaps(batch.Y)  # whose covariances are not known
    num_direct = min(DIRECT, num_steps) if direct else 0
    for _ in range(num_direct):
        new = start.direct(batch.Y, batch.it.analysers, 2.0 * rule.rho * batch.it.variance.mean())
        held = batch.it.analysers
        new = new if batch.it.ties.mean_free else replace(new, mu=held.mu)
        batch = _moved_to(batch, new if batch.it.ties.mixing_free else replace(new, log_mixing=held.log_mixing))
    plain = Rule(no_gamma, alpha=0.0, rho=rule.rho)
    return replace(rounds(batch, plain, num_steps - num_direct), rule=rule, moved=torch.inf)


def em(batch: MPPCARestarts, warm_up: int, stop: Stop) -> Fit[MPPCARestarts]:
    """Unregularised warm-up, with the rule's gamma prior if it has one, then the rule until ``stop``."""
    return iterate(advance, warmed(batch, warm_up), stop, "EvidenceEM")


def best(batch: MPPCARestarts) -> MPPCARestarts:
    """The restart of the highest Occam-corrected log evidence, alone."""
    return of_rows(batch, batch.occam.argmax().reshape(1))


def on(batch: MPPCARestarts, Y: Tensor) -> MPPCARestarts:
    """The restarts on other data."""
    begun = first(Y, batch.it.analysers, batch.it.ties, batch.it.variance, batch.rule)
    return replace(begun, failed=batch.failed)


def of_rows(batch: MPPCARestarts, index: Tensor) -> MPPCARestarts:
    """Some restarts, on their own."""
    begun = first(batch.Y, batch.it.analysers[index], batch.it.ties, batch.it.variance, batch.rule)
    return replace(begun, failed=batch.failed[index], moved=batch.moved)


def finished(fit: Fit[MPPCARestarts], num_steps: int, stop: Stop) -> Fit[MPPCARestarts]:
    """The best restart after deletion, and run until ``stop`` on its own."""
    batch = replace(greedily_deleted(fit.state, num_steps), moved=torch.inf)
    last = iterate(advance, batch, stop, "EvidenceEM, best restart")
    return Fit(last.state, last.status, (*fit.objectives, *last.objectives))


def greedily_deleted(batch: MPPCARestarts, num_steps: int) -> MPPCARestarts:
    """One restart without the components, and the columns of their own precision, that it is better without.

    One is left out, the rest re-fitted for ``num_steps`` rounds, and what has the highest Occam-corrected log
    evidence is kept; repeated while that rises.  All candidates are one batch.
    """
    height = float(batch.occam[0])
    while True:
        keep, columns = _candidates(batch)
        if not len(keep):
            return batch
        many = of_rows(batch, torch.zeros(len(keep), dtype=torch.long, device=keep.device))
        begun = first(batch.Y, pruned(many.it.analysers, keep, columns), batch.it.ties, batch.it.variance, batch.rule)
        tried = _hopeful(begun, height, num_steps)
        if not float(tried.occam.max()) > height:
            return batch
        height, batch = float(tried.occam.max()), of_rows(tried, tried.occam.argmax().reshape(1))


def _hopeful(batch: MPPCARestarts, height: float, num_steps: int) -> MPPCARestarts:
    """Candidates after ``num_steps`` rounds; those that cannot reach ``height`` any more are left out on the way."""
    for left in range(num_steps - 1, -1, -1):
        before, batch = batch, advance(batch)
        if left and left % LOOKING == 0:
            rise = (batch.occam - before.occam).clamp(min=0.0)  # the Occam factor may fall
            index = (batch.occam + SAFETY * left * rise >= height).nonzero().flatten()
            if len(index) == 0:
                return batch
            batch = batch if len(index) == len(rise) else of_rows(batch, index)
    return batch


def _candidates(batch: MPPCARestarts) -> tuple[Tensor, Tensor]:
    """Components and columns that stay, one row for each that might go: ``(C, K)`` and ``(C, K, q)`` bool."""
    analysers, ties = batch.it.analysers, batch.it.ties
    active, columns = analysers.active[0], analysers.columns[0] & analysers.active[0].unsqueeze(-1)
    places = active.nonzero().flatten()
    out = places if len(places) > 1 and ties.mixing_free else places[:0]
    keep = active.expand(len(out), -1).scatter(-1, out.unsqueeze(-1), False)
    rows = [(keep, analysers.columns[0].expand(len(out), *columns.shape))]
    if ties.columnwise and ties.alpha_free:
        norms = torch.where(columns, analysers.W[0].square().sum(-2), torch.inf)
        some = columns.any(-1).nonzero().flatten()
        weakest = norms[some].argmin(-1)
        fewer = analysers.columns[0].expand(len(some), *columns.shape).clone()
        fewer[torch.arange(len(some)), some, weakest] = False
        rows.append((active.expand(len(some), -1), fewer))
    return torch.cat([r[0] for r in rows]), torch.cat([r[1] for r in rows])
