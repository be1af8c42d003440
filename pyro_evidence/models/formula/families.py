"""Families of responses: the likelihood, and what it needs besides the linear predictor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pyro.distributions as dist


@dataclass(frozen=True)
class GLMFamily:
    """How a response depends on its linear predictor.

    :ivar distribution: of the response, from the linear predictor ``eta`` and the family's spread, the
        number of trials, or None.
    :ivar text: the same as it stands in the program that is written for reading.
    :ivar spread: the name of its positive parameter, or nothing.
    :ivar response: what the response may be: ``real``, ``binary``, ``counts``, ``trials`` or ``classes``.
    :ivar link: of the mean, in words.
    """

    distribution: Callable[[Any, Any], Any]
    text: str
    spread: str
    response: str
    link: str


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
    }
)
