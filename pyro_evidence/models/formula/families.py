"""Families of responses: the likelihood, and what it needs besides the linear predictor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pyro.distributions as dist

from pyro_evidence.models.survival import Censored, CoxPartialLikelihood, Gompertz, LogLogistic


@dataclass(frozen=True)
class GLMFamily:
    """How a response depends on its linear predictor.

    :ivar distribution: of the response, from the linear predictor ``eta`` and the family's spread, the
        number of trials, or None; of times also what is known of them, by name: ``event``, ``entry``.
    :ivar text: the same as it stands in the program that is written for reading.
    :ivar spread: the name of its positive parameter, or nothing.
    :ivar response: what the response may be: ``real``, ``binary``, ``counts``, ``trials``, ``classes``, ``times``, or
        the ``order`` of times alone, which knows no intercept.
    :ivar link: of the mean, in words.
    """

    distribution: Callable[..., Any]
    text: str
    spread: str
    response: str
    link: str


def _times(distribution: Callable[[Any, Any], Any], text: str, spread: str, link: str = "log") -> GLMFamily:
    """Times until an event, of which some are known in part."""
    return GLMFamily(
        lambda eta, extra, **known: Censored(distribution(eta, extra), **known),
        f"Censored({text}, {{known}})",
        spread,
        "times",
        link,
    )


def _order(efron: bool) -> GLMFamily:
    """The order of times alone."""
    return GLMFamily(
        lambda eta, _, **known: CoxPartialLikelihood(eta, **known, efron=efron),
        f"CoxPartialLikelihood(eta, {{known}}, efron={efron})",
        "",
        "order",
        "log hazard",
    )


FAMILIES: Mapping[str, GLMFamily] = MappingProxyType(
    {
        "gaussian": GLMFamily(dist.Normal, "dist.Normal(eta, sigma)", "sigma", "real", "identity"),
        "bernoulli": GLMFamily(
            lambda eta, _: dist.Bernoulli(logits=eta), "dist.Bernoulli(logits=eta)", "", "binary", "logit"
        ),
        "binomial": GLMFamily(
            lambda eta, trials: dist.Binomial(trials, logits=eta),
            "dist.Binomial(trials, logits=eta)",
            "",
            "trials",
            "logit",
        ),
        "poisson": GLMFamily(lambda eta, _: dist.Poisson(eta.exp()), "dist.Poisson(eta.exp())", "", "counts", "log"),
        "negative binomial": GLMFamily(
            lambda eta, shape: dist.NegativeBinomial(shape, logits=eta - shape.log()),
            "dist.NegativeBinomial(shape, logits=eta - shape.log())",
            "shape",
            "counts",
            "log",
        ),
        "categorical": GLMFamily(
            lambda eta, _: dist.Categorical(logits=eta), "dist.Categorical(logits=eta)", "", "classes", "softmax"
        ),
        "exponential": _times(lambda eta, _: dist.Exponential((-eta).exp()), "dist.Exponential((-eta).exp())", ""),
        "weibull": _times(lambda eta, shape: dist.Weibull(eta.exp(), shape), "dist.Weibull(eta.exp(), shape)", "shape"),
        "lognormal": _times(dist.LogNormal, "dist.LogNormal(eta, sigma)", "sigma"),
        "loglogistic": _times(
            lambda eta, shape: LogLogistic(eta.exp(), shape), "LogLogistic(eta.exp(), shape)", "shape"
        ),
        "gompertz": _times(
            lambda eta, growth: Gompertz(eta.exp(), growth), "Gompertz(eta.exp(), growth)", "growth", "log hazard"
        ),
        "cox": _order(efron=True),
        "cox breslow": _order(efron=False),
    }
)
