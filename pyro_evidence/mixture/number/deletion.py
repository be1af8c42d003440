"""Components that are left out after the rounds, one by one: candidates are screened, and the best of them re-fitted.

Screening costs a few rounds on at most :data:`FEW` data, whatever their number; only candidates that could still reach
the height of the mixture they were taken from are re-fitted on all data, and only the best of these are looked at with
the exact Hessian.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pyro_evidence.mixture import mode
from pyro_evidence.mixture import rows as mixture_rows
from pyro_evidence.mixture.data import Mixture, MixtureData, rows_of
from pyro_evidence.mixture.number import splits
from pyro_evidence.mixture.rounds import MixtureRestarts, alone, first, rounds
from pyro_evidence.mixture.updates import Ties, estep, pruned
from pyro_evidence.restarts import advance
from pyro_evidence.settings import check_count

FEW = 2048  # data on which candidates are screened
SCREENING = 5  # rounds of it, and between one look at what is hopeless and the next
SAFETY = 2.0  # how much faster than in its last round a candidate may rise in those that remain


class Deletion(Protocol):
    """What is tried after the rounds."""

    @property
    def num_steps(self) -> int:
        """Rounds of re-fitting."""

    @property
    def after(self) -> int:
        """Most rounds before it."""

    def __call__(self, restarts: MixtureRestarts) -> MixtureRestarts:
        """The restarts with components left out."""

    def split(self, chosen: MixtureRestarts, ties: Ties, room: int) -> tuple[MixtureRestarts, str]:
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

    def __call__(self, restarts: MixtureRestarts) -> MixtureRestarts:
        """The restarts after all deletions that gain."""
        restarts = _packed(restarts)
        cheap = torch.where(restarts.failed, -torch.inf, restarts.occam)
        best = mode.distinct(cheap, restarts.expected.mixture, torch.inf)
        height = mode.modes(restarts.expected, best[: self.most]).occam
        gained = torch.zeros_like(restarts.failed).index_fill(0, best[: self.most], True)
        while bool(gained.any()):
            restarts, height, gained = self._once(restarts, height, gained)
        return restarts

    def split(self, chosen: MixtureRestarts, ties: Ties, room: int) -> tuple[MixtureRestarts, str]:
        """One restart with components split as long as its Occam-corrected log evidence rises.

        :param ties: those of the model.
        :param room: most components.
        :return: it, and what kept it from further splits, if anything did.
        """
        for _ in range(self.splits):
            after = splits.split(chosen, ties, self.num_steps, room)
            if after is chosen:
                return chosen, _full(chosen, room)
            chosen = alone(self(after), torch.zeros(1, dtype=torch.long, device=after.failed.device))
        return chosen, f"GreedyDeletion(splits={self.splits})" if self.splits else ""

    def _once(self, restarts: MixtureRestarts, height: Tensor, alive: Tensor) -> tuple[MixtureRestarts, Tensor, Tensor]:
        screened, rows = self._screened(restarts, alive)
        if not len(rows):
            return restarts, height, torch.zeros_like(alive)
        tried, rows = self._refitted(screened, rows, height)
        if not len(rows):
            return restarts, height, torch.zeros_like(alive)
        found = mode.modes(tried.expected, _best_of_each(tried.occam, rows))
        heights = torch.where(tried.failed, -torch.inf, found.occam)
        return _adopted(restarts, height, (rows, heights, tried.expected.mixture))

    def _screened(self, restarts: MixtureRestarts, alive: Tensor) -> tuple[MixtureRestarts, Tensor]:
        """The best candidates of each restart after a few rounds, and whose they are."""
        mixture, expected = restarts.expected.mixture, restarts.expected
        able = mixture.active & alive.unsqueeze(-1) & (mixture.active.sum(-1, keepdim=True) > 1)
        rows, out = able.nonzero().unbind(-1)
        if not len(rows):
            return restarts, rows
        keep = mixture.active[rows].scatter(-1, out.unsqueeze(-1), False)
        small = pruned(mixture[rows], keep)
        begun = first(few(rows_of(expected.data, rows)), small, expected.ties, expected.curvature, restarts.update)
        tried = rounds(begun, restarts.update, min(SCREENING, self.num_steps))
        best = torch.cat([_highest(tried.occam, rows == row, self.finalists) for row in rows.unique()])
        return _on(tried, expected.data, best, rows[best]), rows[best]

    def _refitted(self, restarts: MixtureRestarts, rows: Tensor, height: Tensor) -> tuple[MixtureRestarts, Tensor]:
        """Candidates after all rounds, but those that cannot reach the height of their restart any more."""
        for left in range(self.num_steps - SCREENING, 0, -1):
            before, restarts = restarts, advance(restarts)
            if left % SCREENING == 1:
                rise = (restarts.occam - before.occam).clamp(min=0.0)  # the Occam factor may fall
                hopeful = (restarts.occam + SAFETY * left * rise >= height[rows]).nonzero().flatten()
                if len(hopeful) < len(rows):
                    restarts, rows = _on(restarts, restarts.expected.data, hopeful, hopeful), rows[hopeful]
                if not len(rows):
                    break
        return restarts, rows


def _full(chosen: MixtureRestarts, room: int) -> str:
    num = int(chosen.expected.mixture.active.sum())
    return f"every one of the model's {num} components is used" if num >= room else ""


def _packed(restarts: MixtureRestarts) -> MixtureRestarts:
    """Without the places of components that are pruned everywhere."""
    expected = restarts.expected
    if not mixture_rows.is_exchangeable(expected.ties, expected.mixture.loc):
        return restarts
    mixture, ties = mixture_rows.packed(expected.mixture, expected.ties)
    return replace(restarts, expected=estep(expected.data, mixture, ties, expected.curvature))


def few(data: MixtureData) -> MixtureData:
    """At most about :data:`FEW` of the data, each counting for those between."""
    chosen = data.sampled(FEW)
    if chosen is data:
        return data
    return replace(chosen, weight=chosen.weight * (data.num_data / chosen.num_data).unsqueeze(-1))


def _on(restarts: MixtureRestarts, data: MixtureData, index: Tensor, rows: Tensor) -> MixtureRestarts:
    """Some of the restarts, on the data of ``rows``."""
    expected = restarts.expected
    mixture = expected.mixture[index]
    if not len(index):
        return restarts
    return first(rows_of(data, rows), mixture, expected.ties, expected.curvature, restarts.update)


def _highest(height: Tensor, among: Tensor, num: int) -> Tensor:
    """Numbers of the highest ``num`` rows ``among`` all."""
    return torch.where(among, height, -torch.inf).argsort(descending=True, stable=True)[: min(num, int(among.sum()))]


def _best_of_each(height: Tensor, rows: Tensor) -> Tensor:
    """Number of the highest candidate of each restart."""
    return torch.cat([_highest(height, rows == row, 1) for row in rows.unique()])


def _adopted(
    restarts: MixtureRestarts, height: Tensor, tried: tuple[Tensor, Tensor, Mixture]
) -> tuple[MixtureRestarts, Tensor, Tensor]:
    """Each restart's best candidate where it is higher."""
    rows, heights, mixtures = tried
    expected = restarts.expected
    table = torch.where(rows == torch.arange(len(height)).unsqueeze(-1), heights, -torch.inf)  # (R, candidates)
    which = mode.first_highest(table)
    best = table.gather(-1, which.unsqueeze(-1)).squeeze(-1)
    gained = best > height
    mixtures = mixture_rows.padded(mixtures, expected.mixture)
    mixture = mixtures[which].where(gained, expected.mixture)
    after = estep(expected.data, mixture, expected.ties, expected.curvature)
    return replace(restarts, expected=after), torch.where(gained, best, height), gained
