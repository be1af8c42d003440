"""Components that are left out after the rounds, one by one: candidates are screened, and the best of them re-fitted.

Screening costs a few rounds on at most :data:`FEW` data, whatever their number; only candidates that could still reach
the height of the mixture they were taken from are re-fitted on all data, and only the best of these are looked at with
the exact Hessian.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pyro_evidence.fitting.restarts import advance
from pyro_evidence.mixture import evidence, mode
from pyro_evidence.mixture import rounds as mixture_rows
from pyro_evidence.mixture.data import Mixture, MixtureData, rows_of
from pyro_evidence.mixture.expectation import data_precision, natural_parameters, responsibilities
from pyro_evidence.mixture.rounds import MixtureRestarts, alone, first, rounds, settled
from pyro_evidence.mixture.updates import BoundedInflation, SharedParameters, estep, pruned
from pyro_evidence.settings import check_count

FEW_FOR_HALVES = 2**15  # data on which components are looked at
MOST = 2**22  # numbers of their weights, one set for each component and direction, and of their features
DIRECTIONS = 3  # in which each component is split
ALONE = 3  # components that are split one by one where several at once do not gain
ROUNDS = 10  # of the small mixtures
SURE = 0.5  # responsibility above which a datum shows what a component looks like
LEAST = 8  # data that show it at least


@dataclass(frozen=True)
class SplitProposals:
    """Two components in the place of each, and what that gains."""

    w: Tensor  # (K, 2, m, B)
    noise: Tensor  # (K, 2, m) or (K, 2, m, m)
    log_share: Tensor  # (K, 2)
    gain: Tensor  # (K,) nats; -inf where a component is pruned


def split(restarts: MixtureRestarts, ties: SharedParameters, num_steps: int, room: int) -> MixtureRestarts:
    """One mixture with some components split, or itself where that does not raise its evidence.

    :param restarts: one row, components that are pruned left out.
    :param ties: those of the model.
    :param num_steps: most rounds of re-fitting.
    :param room: most components.
    """
    halves = find_splits(restarts, ties)
    order = halves.gain.argsort(descending=True, stable=True)
    num = min(int((halves.gain > 0).sum()), room - len(order))
    height = _height(restarts) if num > 0 else 0.0
    for which in choices(order, num):
        tried = settled(with_splits(restarts, ties, halves, which), num_steps)
        if not bool(tried.failed) and _height(tried) > height:
            return tried
    return restarts


def choices(order: Tensor, num: int) -> list[Tensor]:
    """Which to split: all that gain, fewer and fewer of the best, and then the next best ones alone."""
    sizes = [num // 3**i for i in range(num) if num // 3**i > 0]
    return [order[:size] for size in sizes] + [order[i : i + 1] for i in range(1, min(num, ALONE))]


def _height(restarts: MixtureRestarts) -> float:
    """Occam-corrected log evidence at the mode, full Hessian, nats."""
    only = torch.zeros(1, dtype=torch.long, device=restarts.failed.device)
    return float(mode.modes(restarts.expected, only).occam)


def with_splits(
    restarts: MixtureRestarts, ties: SharedParameters, halves: SplitProposals, which: Tensor
) -> MixtureRestarts:
    """The mixture with the components ``which`` replaced by their halves; the second ones stand at the end."""
    expected, num = restarts.expected, len(halves.gain) + len(which)
    log_mixing = expected.mixture.log_mixing[0, which].unsqueeze(-1) + halves.log_share[which]
    new = {"w": halves.w[which], "noise": halves.noise[which], "log_mixing": log_mixing}

    def longer(field: str, x: Tensor) -> Tensor:
        pair = new.get(field, x[0, which].unsqueeze(1).expand(-1, 2, *x.shape[2:]))
        return torch.cat([x.index_copy(1, which, pair[:, 0].unsqueeze(0)), pair[:, 1].unsqueeze(0)], 1)

    loc = expected.mixture.loc[:1].expand(num, *expected.mixture.loc.shape[1:])
    mixture = replace(expected.mixture.rebuilt(longer), loc=loc)
    return first(expected.data, mixture, mixture_rows.grown(ties, num), expected.curvature, restarts.update)


def find_splits(restarts: MixtureRestarts, ties: SharedParameters) -> SplitProposals:
    """Each component's halves, the best of all directions."""
    mixture, data = restarts.expected.mixture, restarts.expected.data
    data = data.sampled(min(FEW_FOR_HALVES, MOST // max(DIRECTIONS * len(mixture.loc), data.layout.num_features)))
    resp = _resp(data, mixture)
    single = _small(data, resp, _alone(mixture), _held(ties, 1))
    pairs = _pairs(data, resp, mixture)
    double = _small(data, resp.repeat_interleave(DIRECTIONS, 0), pairs, _held(ties, 2))
    after = mixture_rows.padded(double.expected.mixture, pairs)  # halves that died in all of them are cut off
    height = torch.where(after.active.all(-1), double.occam, -torch.inf)
    table = height.reshape(-1, DIRECTIONS)
    best = mode.first_highest(table)  # directions often lead to the same halves, in another order
    height = table.gather(-1, best.unsqueeze(-1)).squeeze(-1)
    found = after[torch.arange(len(best)).to(best) * DIRECTIONS + best]
    gain = torch.where(mixture.active[0] & ~single.failed, height - single.occam, -torch.inf)
    return SplitProposals(found.w, found.noise, found.log_mixing, gain)


def _small(data: MixtureData, resp: Tensor, mixture: Mixture, ties: SharedParameters) -> MixtureRestarts:
    """Small mixtures, each of the data as often as ``resp`` ``(R, n)`` says, after some rounds."""
    own = replace(data, weight=data.weight * resp, floor=None, log_share=0.0)
    curvature = evidence.block if mixture.noise.dim() == 3 else evidence.coordinate
    return settled(first(own, mixture, ties, curvature, BoundedInflation()), ROUNDS)


def _resp(data: MixtureData, mixture: Mixture) -> Tensor:
    """Responsibilities, shape ``(K, n)``."""
    natural = natural_parameters(mixture, data.layout)
    return responsibilities(data.columns(natural.shape[-1]), natural, data.floor)[0][0]


def _alone(mixture: Mixture) -> Mixture:
    """Each component as a mixture of one, ``(K, 1)``."""
    found = mixture.rebuilt(lambda _, x: x[0].unsqueeze(1))
    return replace(found, log_mixing=torch.zeros_like(found.log_mixing), loc=mixture.loc[:1])


def _held(ties: SharedParameters, num: int) -> SharedParameters:
    """Those of a few components, prior precisions held."""
    few = mixture_rows.grown(ties, num)
    return replace(few, alpha_free=torch.zeros_like(few.alpha_free), mixing_free=True)


def _pairs(data: MixtureData, resp: Tensor, mixture: Mixture) -> Mixture:
    """The starts of all halves: along two directions, and one within the other, ``(K * DIRECTIONS, 2)``."""
    gram = data.layout.gram_of((resp * data.weight) @ data.columns(data.layout.num_diagonal))
    A = data_precision(gram.unsqueeze(0), mixture.noise_matrix)[0]
    scale = (resp @ data.weight).clamp(min=1e-300)[:, None, None]  # a pruned component has no data
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


def _upright(vector: Tensor) -> Tensor:
    """The vector or its negative: the sign of an eigenvector is that of its rounding errors."""
    generic = 1.0 + torch.arange(len(vector)).to(vector).sqrt()
    return torch.where(vector @ generic < 0, -vector, vector)


def _directions(data: MixtureData, resp: Tensor, A: Tensor, number: int, mixture: Mixture) -> Tensor:
    """Steps of the weights of one component: where they vary most, and where least is in the middle; ``(3, m, B)``.

    In units in which the data should pull at all weights alike: largest variance and smallest kurtosis of the pulls.
    """
    index = (resp > min(SURE, float(resp.sort().values[-min(LEAST, len(resp))]))).nonzero().flatten()
    e = data.Y[index] - data.G[index] @ mixture.w[0, number].mT
    pull = (e @ mixture.noise_matrix[0, number]).unsqueeze(-1) * data.G[index].unsqueeze(-2)
    values, vectors = torch.linalg.eigh(A)
    root = vectors * values.clamp(min=1e-12 * float(values[-1]) + 1e-300).rsqrt() @ vectors.mT  # flat directions
    z = pull.flatten(1) @ root
    most = _upright(torch.linalg.eigh(z.mT @ z)[1][:, -1])
    squares = z.square()
    flat = root[:, (squares.square().mean(0) / squares.mean(0).square()).nan_to_num(torch.inf).argmin()]
    steps = torch.stack([root @ most, flat, torch.zeros_like(flat)])
    return steps.reshape(DIRECTIONS, *mixture.w.shape[2:])


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

    def split(self, chosen: MixtureRestarts, ties: SharedParameters, room: int) -> tuple[MixtureRestarts, str]:
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

    def split(self, chosen: MixtureRestarts, ties: SharedParameters, room: int) -> tuple[MixtureRestarts, str]:
        """One restart with components split as long as its Occam-corrected log evidence rises.

        :param ties: those of the model.
        :param room: most components.
        :return: it, and what kept it from further splits, if anything did.
        """
        for _ in range(self.splits):
            after = split(chosen, ties, self.num_steps, room)
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
