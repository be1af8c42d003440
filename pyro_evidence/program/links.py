"""Fixed links between an affine predictor and the parameter of a distribution; probabilities averaged over it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.numerics.quadrature.rules import gauss_hermite


@dataclass(frozen=True)
class Link:
    """``parameter = forward(eta)``, ``eta = inverse(parameter)``, element by element."""

    name: str
    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]

    def explains(self, parameter: Tensor, eta: Tensor, error: Tensor) -> Tensor:
        """Whether ``parameter`` lies between ``forward(eta - error)`` and ``forward(eta + error)``, up to rounding.

        Behind the link, because far out its inverse is rounding only; what is nan cannot be judged and passes.
        """
        ends = torch.stack([self.forward(eta - error), self.forward(eta + error)])
        slack = _rounding(ends.abs().amax(0))
        inside = (parameter >= ends.amin(0) - slack) & (parameter <= ends.amax(0) + slack)
        return inside | (parameter == ends[0]) | parameter.isnan()  # equal: both infinite


@dataclass(frozen=True)
class LogitsAgainstFirst(Link):
    """Logits of all classes, up to a common constant, from those of all but the first."""

    def explains(self, parameter: Tensor, eta: Tensor, error: Tensor) -> Tensor:
        """Whether the normalised logits are those of ``eta``, up to rounding."""
        expected = self.forward(eta).log_softmax(-1)
        worst = 2.0 * error.amax(-1, keepdim=True) + _rounding(expected.abs())
        return ((parameter - expected).abs() <= worst) | parameter.isnan()


@dataclass(frozen=True)
class SoftmaxAgainstFirst(Link):
    """Probabilities of all classes from the logits of all but the first."""

    def explains(self, parameter: Tensor, eta: Tensor, error: Tensor) -> Tensor:
        """Whether the probabilities are those of ``eta``, up to rounding."""
        expected = self.forward(eta)
        worst = (2.0 * error.amax(-1, keepdim=True)).expm1() * expected + _rounding(expected)
        return ((parameter - expected).abs() <= worst) | parameter.isnan()


def _rounding(size: Tensor) -> Tensor:
    """Rounding error of a few operations on numbers of this size."""
    return 16.0 * torch.finfo(size.dtype).eps * size.nan_to_num(posinf=0.0)


def _same(x: Tensor) -> Tensor:
    return x


def _against_first(logits: Tensor) -> Tensor:
    return logits[..., 1:] - logits[..., :1]


def _with_first(eta: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(eta[..., :1]), eta], -1)


def _log_odds_against_first(probs: Tensor) -> Tensor:
    return _against_first(probs.log())


def _softmax_with_first(eta: Tensor) -> Tensor:
    return _with_first(eta).softmax(-1)


def _complementary(x: Tensor) -> Tensor:
    return -torch.expm1(-x.exp())


def _complementary_inverse(p: Tensor) -> Tensor:
    return (-torch.log1p(-p)).log()


def _softplus_inverse(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


identity: Link = Link("identity", _same, _same)
log: Link = Link("log", torch.exp, torch.log)
square_root: Link = Link("square root", torch.square, torch.sqrt)
inverse_softplus: Link = Link("inverse softplus", torch.nn.functional.softplus, _softplus_inverse)
logit: Link = Link("logit", torch.sigmoid, torch.logit)
probit: Link = Link("probit", torch.special.ndtr, torch.special.ndtri)
complementary_log_log: Link = Link("complementary log-log", _complementary, _complementary_inverse)
baseline_logits: Link = LogitsAgainstFirst("logits against the first class", _with_first, _against_first)
baseline_softmax: Link = SoftmaxAgainstFirst(
    "softmax against the first class", _softmax_with_first, _log_odds_against_first
)


def candidate_links(constraint: Any, normalised_logits: bool) -> tuple[Link, ...]:
    """The links worth trying for a parameter under ``constraint``, likeliest first.

    :param normalised_logits: whether the distribution stores logits minus their logsumexp (a Categorical).
    """
    if normalised_logits:
        return (baseline_logits,)
    if isinstance(constraint, type(constraints.simplex)):
        return (baseline_softmax,)
    if constraint is constraints.unit_interval:
        return (logit, probit, complementary_log_log, identity)
    if constraint in (constraints.positive, constraints.nonnegative):
        return (log, inverse_softplus, square_root, identity)
    return (identity,)


LOGISTIC: tuple[Link, ...] = (identity, logit)  # of a Bernoulli's parameter, seen in log odds
SOFTMAX: tuple[Link, ...] = (baseline_logits, baseline_softmax)
NUMBERS = 2**22  # of predictors at all points, for the rows that are averaged at a time


def softmax_average(mean: Tensor, covariance: Tensor, points: Tensor) -> Tensor:
    """``E softmax`` of logits against the first class under normal distributions, one for each row, ``(N, C)``.

    :param mean: ``(N, C - 1)``, and covariances ``(N, C - 1, C - 1)``.
    :param points: standard normal, of equal weight, the same for all rows, ``(S, C - 1)``.
    """
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp(min=0.0).sqrt().unsqueeze(-2)) @ vectors.mT  # the symmetric one does not turn
    rows = zip(*(x.split(max(1, NUMBERS // points.numel())) for x in (mean, root)), strict=True)
    return torch.cat([_softmax_with_first(m.unsqueeze(1) + points @ r).mean(1) for m, r in rows])


def moderated_output(mean: Tensor, variance: Tensor) -> Tensor:
    r"""``E sigmoid(eta)`` by :math:`\sigma(\mu / \sqrt{1 + \pi v / 8})`.  MacKay (1992), eq. 10."""
    return torch.sigmoid(mean / (1.0 + math.pi * variance / 8.0).sqrt())


def hermite(mean: Tensor, variance: Tensor) -> Tensor:
    """``E sigmoid(eta)`` under ``N(mean, variance)`` by 40 Gauss-Hermite nodes, shape ``(...)``."""
    nodes, weights = normal_nodes(40, mean)
    return torch.sigmoid(mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * nodes) @ weights


def normal_nodes(num: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes ``(Q,)`` of Gauss and Hermite's rule, and weights of the expectation under ``N(0, 1)``."""
    rule = gauss_hermite(num)
    return rule.nodes[:, 0].to(like.device), rule.log_weights.exp().to(like.device)
