"""Distributions whose log density, or a derivative of it, torch or Pyro has wrong at a point; here it is right.

Torch takes logarithms of clamped probabilities.  And a formula that is put together
from two branches has the right value where they meet, but not the right derivatives: the second derivative of a
``Binomial`` is zero at a logit of exactly 0, where it is ``-n / 4``.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro.ops.special import log_binomial
from pyro.params.param_store import user_param_name
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_evidence.numerics.batched import log_add_exp
from pyro_evidence.program.enumeration import log_sum_exp, safe_log
from pyro_evidence.program.sites import innermost

INSIDE = ("base_dist", "base", "observation_dist", "component0", "component1")  # where wrappers keep what they wrap
INSIDE_MIXTURES = ("_mixture_distribution", "_component_distribution", "_categorical")
COUNTED = tuple(
    getattr(torch.distributions, name)
    for name in ("Bernoulli", "Binomial", "Geometric", "Multinomial", "NegativeBinomial", "Poisson")
)
SMALL, TERMS = 0.03, 10  # below which a series of ten terms is exact to rounding


def exact(fn: Any) -> Any:
    """``fn`` with the right log density and derivatives; itself where there is nothing to mend.

    :param fn: a distribution, perhaps wrapped.
    """
    given: dict[str, Any] = getattr(fn, "__dict__", {})
    inner = {n: exact(given[n]) for n in (*INSIDE, *INSIDE_MIXTURES) if n in given}
    changed = {n: v for n, v in inner.items() if v is not given[n]}
    fn = _with(fn, changed) if changed else fn
    if "probs" in given and isinstance(fn, torch.distributions.Categorical):
        logits = safe_log(fn.probs)  # which torch makes of clamped probabilities: never below the clamp's logarithm
        if fn._param is not fn.probs:
            clamp = math.log(torch.finfo(fn.probs.dtype).eps)
            logits = torch.where(fn.logits < clamp - 0.01, fn.logits, logits)
        fn = _with(fn, {"logits": logits})
    elif "probs" in given and isinstance(fn, torch.distributions.Bernoulli) and given["_param"] is given["probs"]:
        fn = _Bernoulli(probs=fn.probs, validate_args=False)

    # the right derivatives where a formula changes branches, and some that torch can batch
    if isinstance(fn, dist.SineBivariateVonMises):
        return _with(fn, {"correlation": off_zero(fn.correlation)})
    for ours in REWRITTEN:
        family = ours.__mro__[1]
        if isinstance(fn, family) and type(fn).log_prob is family.log_prob:
            fn = copy.copy(fn)
            fn.__class__ = ours  # adds no attribute
            return fn
    if isinstance(fn, torch.distributions.Binomial):
        return _with(fn, {"logits": off_zero(fn.logits)})
    return fn


class Given(Messenger):
    """Sites and params at given values, as by Pyro's ``condition`` and ``substitute``, in a third of their calls.

    Observed labels and counts of integers, or of truth values, get the precision of their distribution: torch refuses
    integers for a ``Bernoulli``, and takes them for counts in its own default precision.

    :param sites: values by name, and ``params`` by the names that the user gave them.
    """

    def __init__(self, sites: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.sites, self.params = sites, params

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.sites:
            msg["value"], msg["is_observed"] = self.sites[msg["name"]], True
        value = msg["value"]
        if not msg["is_observed"] or not isinstance(value, Tensor) or value.is_floating_point():
            return
        base = innermost(msg["fn"])
        if isinstance(base, COUNTED):
            msg["value"] = value.to(base.mean.dtype)

    def _pyro_param(self, msg: Any) -> None:
        name = user_param_name(msg["name"])
        if name in self.params:
            msg["value"] = self.params[name]


def off_zero(x: Tensor) -> Tensor:
    """``x``, and a little more where it is exactly zero: a number that no sum can tell from zero, but a branch can.

    >>> float(off_zero(torch.zeros(())) + 1.0)
    1.0
    """
    least = 1e3 * math.sqrt(torch.finfo(x.dtype).tiny)  # whose square is a number
    return x + least * (x.detach() == 0).to(x.dtype)


def _with(fn: Any, values: dict[str, Any]) -> Any:
    fn = copy.copy(fn)
    fn.__dict__.update(values)
    return fn


class _Bernoulli(dist.Bernoulli):
    """Log probabilities of ``probs`` as they are, where torch's are of clamped ones."""

    def log_prob(self, value: Tensor) -> Tensor:
        return safe_log(torch.where(value == 1.0, self.probs, 1.0 - self.probs))


_Pareto: Any = getattr(dist, "GeneralizedPareto", object)  # torch has it since 2.8


class _GeneralizedPareto(_Pareto):
    """Smooth in a concentration of zero, where torch's does not depend on it."""

    def log_prob(self, value: Tensor) -> Tensor:
        z = (value - self.loc) / self.scale
        x = self.concentration * z
        small = x.abs() < SMALL
        far = torch.where(small, 1.0, x)
        near = torch.where(small, x, 0.0)
        series = torch.zeros_like(x)  # of log(1 + x) / x, which has derivatives at 0
        for power in range(TERMS, -1, -1):
            series = 1.0 / (power + 1) - near * series
        excess = (1.0 + self.concentration) * z * torch.where(small, series, torch.log1p(far) / far)
        return -torch.where(self.concentration == -1.0, 0.0, excess) - self.scale.log()


class _InverseGamma(dist.InverseGamma):
    """Without the absolute value of what is positive, for whose second derivative torch first imports its compiler."""

    def log_prob(self, value: Tensor) -> Tensor:
        return self.base_dist.log_prob(value.reciprocal()) - 2.0 * value.log()


class _Weibull(dist.Weibull):
    """Without absolute values of what is positive, as of an inverse Gamma, and without powers, which take long."""

    def log_prob(self, value: Tensor) -> Tensor:
        log_ratio, k = value.log() - self.scale.log(), self.concentration
        return (k / self.scale).log() + (k - 1.0) * log_ratio - (k * log_ratio).exp()


class _SoftLaplace(dist.SoftLaplace):
    """With second derivatives far out, where the exponentials of Pyro's formula overflow."""

    def log_prob(self, value: Tensor) -> Tensor:
        z = (value - self.loc) / self.scale
        return math.log(2.0 / math.pi) - self.scale.log() - z + torch.nn.functional.logsigmoid(2.0 * z)


class _SoftAsymmetricLaplace(dist.SoftAsymmetricLaplace):
    """With second derivatives far out, where Pyro's asymptotic series and sums of exponentials have none."""

    def log_prob(self, value: Tensor) -> Tensor:
        x, L = (value - self.loc) / self.scale, self.asymmetry
        left, right = _soft_tail(x, L, self.softness), _soft_tail(-x, 1.0 / L, self.softness)
        return log_add_exp(left, right) - math.log(2.0) - (L + 1.0 / L).log() - self.scale.log()


def _soft_tail(x: Tensor, length: Tensor, softness: Tensor) -> Tensor:
    """Log of twice an exponential tail to the left, of a ``length``, convolved with a normal density."""
    variance = softness.square()
    a = (variance + length * x) / (length * softness * math.sqrt(2.0))
    ahead = a.detach() > 0.0  # in the normal tail
    beyond = -0.5 * x.square() / variance + torch.special.erfcx(torch.where(ahead, a, 1.0)).log()
    within = torch.special.erfc(torch.where(ahead, 0.0, a).clamp(min=-6.0))  # which is 2 to rounding from there
    return torch.where(ahead, beyond, (0.5 * variance + length * x) / length.square() + within.log())


class _VonMises3D(dist.VonMises3D):
    """Smooth in a concentration of zero, which has no direction."""

    def log_prob(self, value: Tensor) -> Tensor:
        square = self.concentration.square().sum(-1)
        small = square < SMALL
        near = torch.where(small, square, 0.0)
        term, series = torch.ones_like(near), torch.zeros_like(near)
        for n in range(1, TERMS):  # sinh k / k = sum of k^2n / (2n + 1)!, a function of k^2 with derivatives at 0
            term = term * near / (2 * n * (2 * n + 1))
            series = series + term
        k = torch.where(small, 1.0, square).sqrt()
        log_ratio = torch.where(small, series.log1p(), k + torch.log1p(-torch.exp(-2.0 * k)) - (2.0 * k).log())
        return (self.concentration * value).sum(-1) - math.log(2.0 * math.tau) - log_ratio


class _Binomial(dist.Binomial):
    """By logarithms of probabilities, which have no branch; of torch's branch at a logit of 0 the slope is wrong.

    Nor are there absolute values, at whose second derivative torch loads its compiler, for a second.
    """

    def log_prob(self, value: Tensor) -> Tensor:
        log_sigmoid, n = torch.nn.functional.logsigmoid, self.total_count
        powers = value * log_sigmoid(self.logits) + (n - value) * log_sigmoid(-self.logits)
        return powers + log_binomial(n, value, tol=self.approx_log_prob_tol)


class _Multinomial(dist.Multinomial):
    """Without writing into a tensor, which cannot be batched."""

    def log_prob(self, value: Tensor) -> Tensor:
        absent = (value == 0) & (self.logits == -math.inf)
        powers = (torch.where(absent, 0.0, self.logits) * value).sum(-1)
        return powers + (value.sum(-1) + 1.0).lgamma() - (value + 1.0).lgamma().sum(-1)


class _DiscreteHMM(dist.DiscreteHMM):
    """By sums of exponentials that can be batched and differentiated twice."""

    def log_prob(self, value: Tensor) -> Tensor:
        value = value.unsqueeze(-1 - self.observation_dist.event_dim)
        steps = self.transition_logits + self.observation_dist.log_prob(value).unsqueeze(-2)
        steps = steps.movedim(-3, 0)
        while len(steps) > 1:  # the product of matrices (T, ..., S, S), neighbours first, by their logarithms
            even = len(steps) // 2 * 2
            left, right = steps[0:even:2], steps[1:even:2]
            pairs = log_sum_exp(left.unsqueeze(-1) + right.unsqueeze(-3), -2)
            steps = torch.cat([pairs, steps[even:]])
        return log_sum_exp(self.initial_logits + log_sum_exp(steps.squeeze(0), -1), -1)


SUCCESSES_OR_NOT = (dist.Bernoulli, _Bernoulli, _Binomial)  # as they stand in a run of a model
REWRITTEN: tuple[Any, ...] = (
    *(_Binomial, _InverseGamma, _Weibull, _SoftLaplace, _SoftAsymmetricLaplace, _VonMises3D),
    *(_Multinomial, _DiscreteHMM),
    *(() if _Pareto is object else (_GeneralizedPareto,)),
)
