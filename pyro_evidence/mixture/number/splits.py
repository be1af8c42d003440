"""Components that are split in two, as long as the evidence rises.

A component may be split where two fit the data better for which it is responsible: a small mixture of its own, begun
in a few directions at once, all components as one batch, on at most :data:`FEW` data.  Those that gain there are split
in the whole mixture, which is kept if its Occam-corrected log evidence is higher after re-fitting.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.mixture import evidence, mode
from pyro_evidence.mixture import rows as mixture_rows
from pyro_evidence.mixture.data import Mixture, MixtureData
from pyro_evidence.mixture.expectation import data_precision, natural_parameters, responsibilities
from pyro_evidence.mixture.rounds import MixtureRestarts, first, settled
from pyro_evidence.mixture.updates import BoundedInflation, Ties

FEW = 2**15  # data on which components are looked at
MOST = 2**22  # numbers of their weights, one set for each component and direction, and of their features
DIRECTIONS = 3  # in which each component is split
ALONE = 3  # components that are split one by one where several at once do not gain
ROUNDS = 10  # of the small mixtures
SURE = 0.5  # responsibility above which a datum shows what a component looks like
LEAST = 8  # data that show it at least


@dataclass(frozen=True)
class Halves:
    """Two components in the place of each, and what that gains."""

    w: Tensor  # (K, 2, m, B)
    noise: Tensor  # (K, 2, m) or (K, 2, m, m)
    log_share: Tensor  # (K, 2)
    gain: Tensor  # (K,) nats; -inf where a component is pruned


def split(restarts: MixtureRestarts, ties: Ties, num_steps: int, room: int) -> MixtureRestarts:
    """One mixture with some components split, or itself where that does not raise its evidence.

    :param restarts: one row, components that are pruned left out.
    :param ties: those of the model.
    :param num_steps: most rounds of re-fitting.
    :param room: most components.
    """
    halves = find_halves(restarts, ties)
    order = halves.gain.argsort(descending=True, stable=True)
    num = min(int((halves.gain > 0).sum()), room - len(order))
    height = _height(restarts) if num > 0 else 0.0
    for which in choices(order, num):
        tried = settled(with_halves(restarts, ties, halves, which), num_steps)
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


def with_halves(restarts: MixtureRestarts, ties: Ties, halves: Halves, which: Tensor) -> MixtureRestarts:
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


def find_halves(restarts: MixtureRestarts, ties: Ties) -> Halves:
    """Each component's halves, the best of all directions."""
    mixture, data = restarts.expected.mixture, restarts.expected.data
    data = data.sampled(min(FEW, MOST // max(DIRECTIONS * len(mixture.loc), data.layout.num_features)))
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
    return Halves(found.w, found.noise, found.log_mixing, gain)


def _small(data: MixtureData, resp: Tensor, mixture: Mixture, ties: Ties) -> MixtureRestarts:
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


def _held(ties: Ties, num: int) -> Ties:
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
