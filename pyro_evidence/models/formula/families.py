"""Families of responses: which likelihood stands in the program, and what it needs besides the linear predictor."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Family:
    """How a response depends on its linear predictor.

    :ivar likelihood: the distribution as it stands in the program, of ``eta``.
    :ivar spread: the name of its positive parameter, or nothing.
    :ivar response: what the response may be: ``real``, ``binary``, ``counts``, ``trials`` or ``classes``.
    :ivar link: of the mean, in words.
    """

    likelihood: str
    spread: str
    response: str
    link: str


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gaussian": Family("dist.Normal(eta, sigma)", "sigma", "real", "identity"),
        "bernoulli": Family("dist.Bernoulli(logits=eta)", "", "binary", "logit"),
        "binomial": Family("dist.Binomial(trials, logits=eta)", "", "trials", "logit"),
        "poisson": Family("dist.Poisson(eta.exp())", "", "counts", "log"),
        "negative binomial": Family("dist.NegativeBinomial(shape, logits=eta - shape.log())", "shape", "counts", "log"),
        "categorical": Family("dist.Categorical(logits=eta)", "", "classes", "softmax"),
    }
)
