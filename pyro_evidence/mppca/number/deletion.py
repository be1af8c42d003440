"""Components, and columns of their own precision, that are left out, one by one."""

import torch
from torch import Tensor

from pyro_evidence.mixture.mode import first_highest
from pyro_evidence.mppca.rounds import MPPCARestarts, first, of_rows
from pyro_evidence.mppca.updates import pruned
from pyro_evidence.restarts import advance

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
        tried = hopeful(begun, height, num_steps)
        if not float(tried.occam.max()) > height:
            return batch
        height, batch = float(tried.occam.max()), of_rows(tried, first_highest(tried.occam).reshape(1))


def hopeful(batch: MPPCARestarts, height: float, num_steps: int) -> MPPCARestarts:
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
        weakest = norms[some].argmin(-1)
        fewer = analysers.columns[0].expand(len(some), *columns.shape).clone()
        fewer[torch.arange(len(some)), some, weakest] = False
        rows.append((active.expand(len(some), -1), fewer))
    return torch.cat([r[0] for r in rows]), torch.cat([r[1] for r in rows])
