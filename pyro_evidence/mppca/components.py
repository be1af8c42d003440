"""Components, and columns of their own precision, that are left out, one by one."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.fitting.restarts import advance, repeated
from pyro_evidence.mixture.components import choices
from pyro_evidence.mixture.mode import first_highest
from pyro_evidence.mppca import missing, rounds
from pyro_evidence.mppca.chunks import sampled
from pyro_evidence.mppca.expectation import FactorAnalysers
from pyro_evidence.mppca.rounds import MPPCARestarts, first, of_rows
from pyro_evidence.mppca.updates import SharedParameters, pruned
from pyro_evidence.numerics.linalg import fix_signs

LOOKING = 5  # rounds of candidates between one look at what is hopeless and the next
SAFETY = 2.0  # how much faster than in its last round a candidate may rise in those that remain


def greedily_deleted(batch: MPPCARestarts, num_steps: int) -> MPPCARestarts:
    """One restart without the components, and the columns of their own precision, that it is better without.

    One is left out, the rest re-fitted for ``num_steps`` rounds, and what has the highest Occam-corrected log
    evidence is kept; repeated while that rises.  All candidates are one batch.
    """
    height = float(batch.occam[0])
    while True:
        keep, columns = candidates(batch)
        if not len(keep):
            return batch
        many = of_rows(batch, torch.zeros(len(keep), dtype=torch.long, device=keep.device))
        begun = first(batch.Y, pruned(many.it.analysers, keep, columns), batch.it.ties, batch.it.variance, batch.rule)
        tried = promising(begun, height, num_steps)
        if not float(tried.occam.max()) > height:
            return batch
        height, batch = float(tried.occam.max()), of_rows(tried, first_highest(tried.occam).reshape(1))


def promising(batch: MPPCARestarts, height: float, num_steps: int) -> MPPCARestarts:
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


def candidates(batch: MPPCARestarts) -> tuple[Tensor, Tensor]:
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
        least_precise_direction = norms[some].argmin(-1)
        fewer = analysers.columns[0].expand(len(some), *columns.shape).clone()
        fewer[torch.arange(len(some)), some, least_precise_direction] = False
        rows.append((active.expand(len(some), -1), fewer))
    return torch.cat([r[0] for r in rows]), torch.cat([r[1] for r in rows])


FEW = 2**13  # data on which components are looked at
EACH = 2**10  # of one component
ROUNDS = 10  # of the small mixtures, after a warm-up of as many
PAIRS = 3  # of centres from which they begin
SURE = 0.5  # responsibility above which a datum shows what a component looks like
ALPHA = 0.01  # prior precision at the start, in units of the data
SMALL = 0.1  # size of the loadings there: zero would stay so in EM


@dataclass(frozen=True)
class SplitProposals:
    """Two components in the place of each.

    :ivar analysers: two components, a row for each component that is split, ``(K,)``.
    :ivar gain: nats; -inf where a component cannot be split.
    """

    analysers: FactorAnalysers
    gain: Tensor


def grown(batch: MPPCARestarts, num_steps: int, most: int, room: int) -> tuple[MPPCARestarts, str]:
    """One restart with components split as long as its Occam-corrected log evidence rises, and what ended that.

    :param num_steps: most rounds of re-fitting.
    :param most: times that components are split.
    :param room: most components; where the mixture has as many none is split.
    """
    if room <= batch.it.analysers.W.shape[1]:
        return batch, ""
    for _ in range(most):
        after = split(batch, num_steps, room)
        if after is batch:
            return batch, ""
        batch = after
    return batch, f"GreedyDeletion(splits={most})" if most else ""


def split(batch: MPPCARestarts, num_steps: int, room: int) -> MPPCARestarts:
    """One restart with some components split, or itself where that does not raise its evidence."""
    halves, height = find_splits(batch), float(batch.occam[0])
    order = halves.gain.argsort(descending=True, stable=True)
    num = min(int((halves.gain > 0).sum()), room - len(order))
    for which in choices(order, num):
        tried = promising(with_splits(batch, halves, which), height, num_steps)
        found = float(tried.occam.max())
        if found > height:
            return tried
    return batch


def with_splits(batch: MPPCARestarts, halves: SplitProposals, which: Tensor) -> MPPCARestarts:
    """The mixture with components ``which`` replaced by their halves; the second ones stand at the end."""
    whole, parts, it = batch.it.analysers, halves.analysers[which], batch.it
    share = whole.log_mixing[0, which].unsqueeze(-1)
    parts = replace(parts, log_mixing=parts.log_mixing + share)

    def longer(name: str) -> Tensor:
        x, pair = getattr(whole, name), getattr(parts, name)
        return torch.cat([x.index_copy(1, which, pair[:, 0].unsqueeze(0)), pair[:, 1].unsqueeze(0)], 1)

    analysers = FactorAnalysers(
        **{name: longer(name) for name in vars(parts) if name in FactorAnalysers.__dataclass_fields__}
    )
    ties = of_number(it.ties, analysers.W.shape[1])
    return rounds.first(batch.Y, analysers, ties, it.variance, batch.rule)


def find_splits(batch: MPPCARestarts) -> SplitProposals:
    """Each component's halves, the best of all starts."""
    few, analysers = sampled(batch.Y, FEW), batch.it.analysers
    resp = missing.log_joint(few, analysers)[0].softmax(-1)
    found = [_halves(batch, few, resp[:, k], k) for k in range(resp.shape[-1])]
    parts = [h.analysers for h in found]
    names = FactorAnalysers.__dataclass_fields__
    together = FactorAnalysers(**{name: torch.cat([getattr(p, name) for p in parts]) for name in names})
    return SplitProposals(together, torch.cat([h.gain for h in found]))


def _halves(batch: MPPCARestarts, few: Tensor, resp: Tensor, k: int) -> SplitProposals:
    """Of one component, ``(1,)``."""
    it, index = batch.it, (resp > SURE).nonzero().flatten()
    own = few[index[:: 1 + len(index) // EACH]]
    one = _component(it.analysers, k)
    starts = _starts(own, one, it.ties)
    if len(own) < 2 * (2 + one.W.shape[-1]) or not bool(one.active.all()):
        return SplitProposals(
            starts[torch.zeros(1, dtype=torch.long, device=own.device)], starts.W.new_full((1,), -torch.inf)
        )
    begun = [rounds.first(own, x, of_number(it.ties, n), it.variance, batch.rule) for x, n in ((one, 1), (starts, 2))]
    single, double = repeated(begun[0], ROUNDS), repeated(rounds.warmed(begun[1], ROUNDS), ROUNDS)
    height = torch.where(double.it.analysers.active.all(-1), double.occam, -torch.inf)
    best = first_highest(height).reshape(1)
    return SplitProposals(double.it.analysers[best], (height[best] - single.occam).nan_to_num(-torch.inf))


def _component(analysers: FactorAnalysers, k: int) -> FactorAnalysers:
    """One component as a mixture of its own."""
    names = FactorAnalysers.__dataclass_fields__
    found = FactorAnalysers(**{name: getattr(analysers, name)[:1, k : k + 1] for name in names})
    return replace(found, log_mixing=torch.where(found.active, 0.0, found.log_mixing))


def _starts(own: Tensor, one: FactorAnalysers, ties: SharedParameters) -> FactorAnalysers:
    """Pairs of components, ``(PAIRS, 2)``: about centres apart, without loadings."""
    m, q = one.W.shape[-2:]
    wide = {n: getattr(one, n).expand(PAIRS, 2, *getattr(one, n).shape[2:]) for n in ("beta", "alpha", "columns")}
    W = torch.randn(PAIRS, 2, m, q, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(one.W)
    mu = one.mu[0, 0] + _centres((own - one.mu[0, 0]).nan_to_num(0.0))
    if ties.alpha_free:
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


def of_number(ties: SharedParameters, num: int) -> SharedParameters:
    """The ties of ``num`` components as alike as these are, which are at least two."""

    def longer(group: Tensor) -> Tensor:
        steps = torch.arange(num).to(group).unsqueeze(-1)
        return group[0] + steps * (group[1, 0] - group[0, 0])

    return replace(ties, alpha_group=longer(ties.alpha_group), beta_group=longer(ties.beta_group))
