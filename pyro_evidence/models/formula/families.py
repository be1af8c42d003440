"""Families of responses: the likelihood, what it needs besides the linear predictor, and its links."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.special import log_ndtr

from pyro_evidence.errors import BadInput
from pyro_evidence.models.counts import ZeroTruncated
from pyro_evidence.models.survival import Censored, CoxPartialLikelihood, Gompertz, LogLogistic

Link = tuple[Callable[[Tensor], Tensor], str]  # from the linear predictor, and the same in the program for reading


def _itself(eta: Tensor) -> Tensor:
    return eta


def _probit(eta: Tensor) -> Tensor:
    return log_ndtr(eta) - log_ndtr(-eta)


def _cloglog(eta: Tensor) -> Tensor:
    return eta.exp() + (-(-eta.exp()).expm1()).log()


# What a distribution is written in, from the linear predictor by each link; the first is the default.
MEAN: dict[str, Link] = {
    "identity": (_itself, "eta"),
    "log": (torch.exp, "eta.exp()"),
    "inverse": (torch.reciprocal, "(1.0 / eta)"),
}
LOG_MEAN: dict[str, Link] = {"log": (_itself, "eta"), "identity": (torch.log, "eta.log()")}
LOG_ODDS: dict[str, Link] = {
    "logit": (_itself, "eta"),
    "probit": (_probit, "(torch.special.log_ndtr(eta) - torch.special.log_ndtr(-eta))"),
    "cloglog": (_cloglog, "(eta.exp() + (-(-eta.exp()).expm1()).log())"),
}


@dataclass(frozen=True)
class GLMFamily:
    """Distribution of a response given its linear predictor, with its links.

    :ivar distribution: of the response, from what the link makes of the linear predictor, the number of trials where
        there are trials, and the family's parameters in their order; of times also what is known of them, by name:
        ``event``, ``entry``.
    :ivar text: the same as it stands in the program that is written for reading, ``{m}`` for the linear predictor.
    :ivar parameters: the names of its positive parameters, or :data:`CUTPOINTS`.
    :ivar response: what the response may be: ``real``, ``positive``, ``share`` (between 0 and 1), ``binary``,
        ``counts``, ``trials``, ``classes``, ``times``, ordered ``grades`` or the ``order`` of times alone, both of
        which know no intercept.
    :ivar links: by name; the first is the default.
    :ivar link: the name of the link that is taken.
    """

    distribution: Callable[..., Any]
    text: str
    parameters: tuple[str, ...]
    response: str
    links: Mapping[str, Link]
    link: str

    @property
    def words(self) -> str:
        """The distribution in the program for reading."""
        return self.text.replace("{m}", self.links[self.link][1])

    def of(self, eta: Tensor, *given: Any, **known: Any) -> Any:
        """The distribution of the response at a linear predictor."""
        return self.distribution(self.links[self.link][0](eta), *given, **known)


def _row(
    distribution: Callable[..., Any], text: str, parameters: str, response: str, links: Mapping[str, Link], link: str
) -> GLMFamily:
    return GLMFamily(distribution, text, tuple(parameters.split()), response, links, link)


def _times(distribution: Callable[..., Any], text: str, parameters: str, link: str = "log") -> GLMFamily:
    """Times until an event, of which some are known in part."""

    def censored(eta: Tensor, *given: Any, **known: Any) -> Censored:
        return Censored(distribution(eta, *given), **known)

    return _row(censored, f"Censored({text}, {{known}})", parameters, "times", {link: (_itself, "eta")}, link)


def _order(efron: bool) -> GLMFamily:
    """The order of times alone."""

    def partial_likelihood(eta: Tensor, **known: Any) -> CoxPartialLikelihood:
        return CoxPartialLikelihood(eta, **known, efron=efron)

    text = f"CoxPartialLikelihood({{m}}, {{known}}, efron={efron})"
    return _row(partial_likelihood, text, "", "order", {"log hazard": (_itself, "eta")}, "log hazard")


def _truncated(family: GLMFamily) -> GLMFamily:
    """The family given that the count is not zero."""

    def truncated(*given: Any) -> ZeroTruncated:
        return ZeroTruncated(family.distribution(*given))

    return replace(family, distribution=truncated, text=f"ZeroTruncated({family.text})", response="counts above zero")


def _bernoulli(log_odds: Tensor) -> Any:
    return dist.Bernoulli(logits=log_odds)


def _binomial(log_odds: Tensor, trials: Tensor) -> Any:
    return dist.Binomial(trials, logits=log_odds)


def _beta(log_odds: Tensor, phi: Tensor) -> Any:
    return dist.Beta(phi * log_odds.sigmoid(), phi * (-log_odds).sigmoid())


def _beta_binomial(log_odds: Tensor, trials: Tensor, phi: Tensor) -> Any:
    return dist.BetaBinomial(phi * log_odds.sigmoid(), phi * (-log_odds).sigmoid(), trials)


def _negative_binomial(log_mean: Tensor, shape: Tensor) -> Any:
    return dist.NegativeBinomial(shape, logits=log_mean - shape.log())


def _negative_binomial_1(log_mean: Tensor, phi: Tensor) -> Any:
    return dist.NegativeBinomial(log_mean.exp() / phi, logits=phi.log())


def _gamma(mean: Tensor, shape: Tensor) -> Any:
    return dist.Gamma(shape, shape / mean)


def _student(mean: Tensor, sigma: Tensor, df: Tensor) -> Any:
    return dist.StudentT(df, mean, sigma)


def _categorical(log_odds: Tensor) -> Any:
    return dist.Categorical(logits=log_odds)


def _ordinal(log_odds: Tensor, cutpoints: Tensor) -> Any:
    return dist.OrderedLogistic(log_odds, cutpoints)


def _exponential(eta: Tensor) -> Any:
    return dist.Exponential((-eta).exp())


def _weibull(eta: Tensor, shape: Tensor) -> Any:
    return dist.Weibull(eta.exp(), shape)


def _log_logistic(eta: Tensor, shape: Tensor) -> Any:
    return LogLogistic(eta.exp(), shape)


def _gompertz(eta: Tensor, growth: Tensor) -> Any:
    return Gompertz(eta.exp(), growth)


CUTPOINTS = "cutpoints"  # between grades, in ascending order: the one parameter that is no positive number
BETA = "{m}.sigmoid(), phi * (-{m}).sigmoid()"
POISSON = _row(dist.Poisson, "dist.Poisson({m})", "", "counts", MEAN, "log")
NEGATIVE_BINOMIAL, NEGATIVE_BINOMIAL_1 = (
    _row(distribution, f"dist.NegativeBinomial({text})", parameter, "counts", LOG_MEAN, "log")
    for distribution, text, parameter in (
        (_negative_binomial, "shape, logits={m} - shape.log()", "shape"),
        (_negative_binomial_1, "{m}.exp() / phi, logits=phi.log()", "phi"),
    )
)
FAMILIES: Mapping[str, GLMFamily] = MappingProxyType(
    {
        "gaussian": _row(dist.Normal, "dist.Normal({m}, sigma)", "sigma", "real", MEAN, "identity"),
        "student": _row(_student, "dist.StudentT(df, {m}, sigma)", "sigma df", "real", MEAN, "identity"),
        "gamma": _row(_gamma, "dist.Gamma(shape, shape / {m})", "shape", "positive", MEAN, "log"),
        "beta": _row(_beta, f"dist.Beta(phi * {BETA})", "phi", "share", LOG_ODDS, "logit"),
        "bernoulli": _row(_bernoulli, "dist.Bernoulli(logits={m})", "", "binary", LOG_ODDS, "logit"),
        "binomial": _row(_binomial, "dist.Binomial(trials, logits={m})", "", "trials", LOG_ODDS, "logit"),
        "beta binomial": _row(
            _beta_binomial, f"dist.BetaBinomial(phi * {BETA}, trials)", "phi", "trials", LOG_ODDS, "logit"
        ),
        "poisson": POISSON,
        "negative binomial": NEGATIVE_BINOMIAL,
        "negative binomial 1": NEGATIVE_BINOMIAL_1,
        "truncated poisson": _truncated(POISSON),
        "truncated negative binomial": _truncated(NEGATIVE_BINOMIAL),
        "categorical": _row(
            _categorical, "dist.Categorical(logits={m})", "", "classes", {"softmax": (_itself, "eta")}, "softmax"
        ),
        "ordinal": _row(
            _ordinal, "dist.OrderedLogistic({m}, cutpoints)", CUTPOINTS, "grades", {"logit": (_itself, "eta")}, "logit"
        ),
        "exponential": _times(_exponential, "dist.Exponential((-{m}).exp())", ""),
        "weibull": _times(_weibull, "dist.Weibull({m}.exp(), shape)", "shape"),
        "lognormal": _times(dist.LogNormal, "dist.LogNormal({m}, sigma)", "sigma"),
        "loglogistic": _times(_log_logistic, "LogLogistic({m}.exp(), shape)", "shape"),
        "gompertz": _times(_gompertz, "Gompertz({m}.exp(), growth)", "growth", "log hazard"),
        "cox": _order(efron=True),
        "cox breslow": _order(efron=False),
    }
)
OTHER_NAMES = {
    "normal": "gaussian",
    "cumulative": "ordinal",
    "t": "student",
    "studentt": "student",
    "nbinom2": "negative binomial",
    "negbinomial": "negative binomial",
    "nbinom1": "negative binomial 1",
    "betabinomial": "beta binomial",
    "truncated nbinom2": "truncated negative binomial",
}


def chosen_family(name: str, link: str | None = None) -> tuple[str, GLMFamily]:
    """A family by its name in any case, or by that which R has for it, with one of its links; its own name first.

    :raises BadInput: for a name or a link that there is not.
    """
    own = " ".join(str(name).lower().replace("_", " ").split())
    own = OTHER_NAMES.get(own, own)
    if own not in FAMILIES:
        raise BadInput(f"family={name!r}; expected one of {list(FAMILIES)}.")
    found = FAMILIES[own]
    if link is not None and link not in found.links:
        raise BadInput(f"link={link!r} of family={name!r}; expected one of {list(found.links)}.")
    return own, found if link is None else replace(found, link=link)
