"""Fixed links between an affine predictor and the parameter of a distribution."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints


@dataclass(frozen=True)
class Link:
    """``parameter = forward(eta)``, ``eta = inverse(parameter)``."""

    name: str
    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]


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


identity = Link("identity", _same, _same)
log = Link("log", torch.exp, torch.log)
square_root = Link("square root", torch.square, torch.sqrt)
inverse_softplus = Link("inverse softplus", torch.nn.functional.softplus, lambda x: x + torch.log(-torch.expm1(-x)))
logit = Link("logit", torch.sigmoid, torch.logit)
probit = Link("probit", torch.special.ndtr, torch.special.ndtri)
complementary_log_log = Link("complementary log-log", _complementary, _complementary_inverse)
baseline_logits = Link("logits against the first class", _with_first, _against_first)
baseline_softmax = Link("softmax against the first class", _softmax_with_first, _log_odds_against_first)


def candidates(constraint: Any, normalised_logits: bool) -> tuple[Link, ...]:
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
