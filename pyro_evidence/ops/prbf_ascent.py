"""Ascent on the penalised likelihood of the probabilistic RBF network, eq. 22, by its exact gradient."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.ops.prbf import Network, Point, between_classes, evaluate, parts_of, tilted
from pyro_evidence.ops.prbf_updates import EMPTY, correction

SLOWEST = 0.1  # a mixing falls at most to this share of itself in one step, so it never becomes zero or negative


@dataclass(frozen=True)
class Slopes:
    """Derivatives of eq. 22 in each parameter, and the steps that are EM's where ``alpha`` is 0."""

    gradient: Network
    step: Network

    @property
    def gain(self) -> Tensor:
        """Derivative of eq. 22 along the step, not negative, shape ``(B,)``."""
        pairs = zip(parts_of(self.gradient), parts_of(self.step), strict=True)
        return torch.stack([(a * b).flatten(1).sum(-1) for a, b in pairs]).sum(0)


def slopes(point: Point) -> Slopes:
    r"""The exact gradient of eq. 22 and a step uphill.

    The subkernel means move with the parameters; :func:`~pyro_evidence.ops.prbf.tilted` responsibilities carry that,
    so that the gradient is that of an expected log likelihood plus the explicit part of the penalty.  The steps of
    centres and covariances are gradients times a positive matrix; that of the mixing is positively correlated with
    its gradient.  The gradient in the class prior is zero where it is held.
    """
    net, kind, dim = point.net, point.kind, point.data.dim
    tail = (-1, 1, *[1] * kind.event_dim)
    moments = tilted(point)
    shares, total = moments[..., 0] + correction(point, point.distance), moments.sum(1)
    weight = 0.25 * point.alpha
    draw = (net.ownership.unsqueeze(-1) * point.offset).sum(1)
    pull = total[..., 1 : dim + 1] - total[..., :1] * net.loc - weight[:, None, None] * draw
    mass = total[..., 0].reshape(*total.shape[:2], *[1] * kind.event_dim)
    excess = kind.scatter(total, net.loc) - mass * net.covariance + weight.reshape(tail) * between_classes(point)
    rate = torch.where(net.mixing > 0, shares / torch.where(net.mixing > 0, net.mixing, 1.0), 0.0)
    prior, prior_step = _prior(point, shares)
    gradient = Network(rate, kind.solve(net.covariance, pull), kind.slope(net.covariance, excess, dim), prior)
    loc, covariance = _damped(point, pull, excess)
    return Slopes(gradient, Network(_shifted(net.mixing, rate, point.counts.sum(-1)), loc, covariance, prior_step))


def _damped(point: Point, pull: Tensor, excess: Tensor) -> tuple[Tensor, Tensor]:
    """Steps of centres and covariances; none for a kernel without data."""
    mass = point.counts.sum(1)
    full = mass > EMPTY * point.data.num_data.reshape(-1, 1)
    rate = torch.where(full, 1.0 / (mass + 0.25 * point.alpha.unsqueeze(-1)).where(full, 1.0), 0.0)
    return rate.unsqueeze(-1) * pull, rate.reshape(*rate.shape, *[1] * point.kind.event_dim) * excess


def _shifted(share: Tensor, rate: Tensor, total: Tensor) -> Tensor:
    """Step of proportions towards those with the larger derivative, shape as ``share``."""
    target = share * torch.maximum(rate, SLOWEST * total.unsqueeze(-1))
    return target / target.sum(-1, keepdim=True) - share


def _prior(point: Point, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Derivative in the class prior and its step; zero without unlabelled data."""
    prior = point.net.class_prior
    if point.data.unlabelled is None:
        return torch.zeros_like(prior), torch.zeros_like(prior)
    rate = shares.sum(-1) / prior
    return rate, _shifted(prior, rate, point.counts.sum((-1, -2)))


def stepped(point: Point, step: Network, size: Tensor) -> Network:
    """The network ``size`` of the way along a step, covariances about the new centres and above the floor."""
    net, kind = point.net, point.kind
    t = size[:, None, None]
    covariance = net.covariance + t.reshape(-1, 1, *[1] * kind.event_dim) * step.covariance - kind.outer(t * step.loc)
    covariance = kind.floored(kind.guarded(covariance, net.covariance), point.data.unit)
    return Network(
        net.mixing + t * step.mixing,
        net.loc + t * step.loc,
        covariance,
        net.class_prior + size[:, None] * step.class_prior,
    )


def climb(point: Point, num_halvings: int = 20) -> Point:
    """One step uphill in every row, halved until eq. 22 rises; a row that is at its top stays there."""
    found = slopes(point)
    rising = found.gain > 1e-14 * (1.0 + point.objective.abs())
    waiting, size = rising.nonzero().squeeze(-1), 1.0
    for _ in range(num_halvings):
        if not len(waiting):
            break
        whole = len(waiting) == len(rising)
        here, step = (point, found.step) if whole else (point.rows(waiting), found.step.rows(waiting))
        trial = evaluate(here.data, stepped(here, step, torch.full_like(here.alpha, size)), here.alpha)
        better = trial.objective > here.objective
        if whole and bool(better.all()):
            return trial
        chosen = better.nonzero().squeeze(-1)
        point = point.put(waiting[chosen], trial.rows(chosen))
        waiting, size = waiting[~better], 0.5 * size
    return point


@dataclass(frozen=True)
class Ascent:
    """Steps uphill on eq. 22, each halved until it rises: monotone.

    :ivar warm_up: rounds of plain EM before; from random centres the ascent would find worse optima.
    """

    warm_up: int = 50

    def __call__(self, point: Point) -> Point:
        """The next point."""
        return climb(point)
