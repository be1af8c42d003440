"""Families of responses: the likelihood, what it needs besides the linear predictor, and its links."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.errors import BadInput
from pyro_evidence.models.counts import ZeroTruncated
from pyro_evidence.models.formula.expressions import Expression, call
from pyro_evidence.models.survival import Censored, CoxPartialLikelihood, Gompertz, LogLogistic
from pyro_evidence.numerics.batched import log_ndtr

ETA, M = Expression("eta"), Expression("m")  # the linear predictor, and what the link makes of it
SIGMA, DF, SHAPE, PHI, GROWTH, TRIALS = map(Expression, ("sigma", "df", "shape", "phi", "growth", "trials"))
CUTPOINTS = "cutpoints"  # between grades, in ascending order: the one parameter that is no positive number

# What a distribution is written in, from the linear predictor by each link; the first is the default.
ITSELF: Mapping[str, Expression] = {"identity": ETA, "log": ETA.exp(), "inverse": 1.0 / ETA}
MEAN: Mapping[str, Expression] = {"log": ETA.exp(), "identity": ETA, "inverse": 1.0 / ETA}
LOG_MEAN: Mapping[str, Expression] = {"log": ETA, "identity": ETA.log()}
LOG_ODDS: Mapping[str, Expression] = {
    "logit": ETA,
    "probit": call(log_ndtr, ETA) - call(log_ndtr, -ETA),
    "cloglog": ETA.exp() + (-(-ETA.exp()).expm1()).log(),
    "log": ETA - (-ETA.expm1()).log(),
    "identity": ETA.log() - (-ETA).log1p(),
}
BACK: Mapping[str, Callable[[Tensor], Tensor]] = {  # the predictor of a mean
    "identity": torch.clone,
    "log": torch.log,
    "inverse": torch.reciprocal,
}


@dataclass(frozen=True)
class GLMFamily:
    """Distribution of a response given its linear predictor, with its links.

    :ivar fn: the distribution, from ``m``, what the link makes of the linear predictor, ``trials`` where there are
        some, and the family's parameters, each a positive number or :data:`CUTPOINTS`; of times also what is known of
        them, by keyword: ``event``, ``entry``.
    :ivar response: what the response may be: ``real``, ``positive``, ``share`` (between 0 and 1), ``binary``,
        ``counts``, ``trials``, ``classes``, ``times``, ordered ``grades`` or the ``order`` of times alone, both of
        which know no intercept.
    :ivar links: by name; the first is the default.
    :ivar link: the name of the link that is taken.
    """

    fn: Expression
    response: str
    links: Mapping[str, Expression]
    link: str

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the family's parameters."""
        return tuple(name for name in self.distribution.names if name not in ("eta", "trials"))

    @property
    def begins_at_zero(self) -> bool:
        """Whether a predictor of zero is an ordinary one; not where it is a mean that the family has no zero of."""
        return self.link not in BACK or self.link == next(iter(self.links))

    @property
    def distribution(self) -> Expression:
        """The distribution from the linear predictor ``eta``."""
        return self.fn.with_names(m=self.links[self.link])

    def moments(self, response: Tensor) -> tuple[float, float]:
        """Mean and standard deviation of a response in the predictor's unit; 0 and 1 of log odds and most logarithms.

        The second by the slope of the link at the mean.
        """
        if self.begins_at_zero and self.response != "real":
            return 0.0, 1.0
        link, mean = BACK[self.link], response.double().mean()
        sd = response.double().std() if len(response) > 1 else torch.ones(())
        return float(link(mean)), float(sd * torch.func.grad(link)(mean).abs())


def _row(fn: Expression, response: str, links: Mapping[str, Expression]) -> GLMFamily:
    return GLMFamily(fn, response, links, next(iter(links)))


def _times(fn: Expression, link: str = "log") -> GLMFamily:
    """Times until an event, of which some are known in part."""
    return _row(call(Censored, fn), "times", {link: ETA})


def probit_shares(eta: Tensor, cutpoints: Tensor) -> Tensor:
    """Log probabilities of grades, ``(N, C)``: a normal variable with mean ``eta`` lies between two cutpoints."""
    z = cutpoints - eta.unsqueeze(-1)
    return _log_shares(log_ndtr(z), log_ndtr(-z))


def cloglog_shares(eta: Tensor, cutpoints: Tensor) -> Tensor:
    """Log probabilities of grades, ``(N, C)``: at each cutpoint the log hazard is the distance to ``eta``."""
    hazard = (cutpoints - eta.unsqueeze(-1)).exp()
    return _log_shares((-(-hazard).expm1()).log(), -hazard)


def _log_shares(below: Tensor, above: Tensor) -> Tensor:
    """Log probabilities between cutpoints, from those to be below and above each; differences of the smaller tails."""
    upper = below[..., :-1] > math.log(0.5)
    more = torch.where(upper, above[..., :-1], below[..., 1:])
    less = torch.where(upper, above[..., 1:], below[..., :-1])
    return torch.cat([below[..., :1], more + (-(less - more).expm1()).log(), above[..., -1:]], -1)


CUT = Expression(CUTPOINTS)
GRADES: Mapping[str, Expression] = {
    "logit": call(dist.OrderedLogistic, ETA, CUT),
    "probit": call(dist.Categorical, logits=call(probit_shares, ETA, CUT)),
    "cloglog": call(dist.Categorical, logits=call(cloglog_shares, ETA, CUT)),
}


ABOVE_ZERO = "counts above zero"
SHARES = PHI * M.sigmoid(), PHI * (-M).sigmoid()
POISSON = _row(call(dist.Poisson, M), "counts", MEAN)
NEGATIVE_BINOMIAL = _row(call(dist.NegativeBinomial, SHAPE, logits=M - SHAPE.log()), "counts", LOG_MEAN)
FAMILIES: Mapping[str, GLMFamily] = MappingProxyType(
    {
        "gaussian": _row(call(dist.Normal, M, SIGMA), "real", ITSELF),
        "student": _row(call(dist.StudentT, DF, M, SIGMA), "real", ITSELF),
        "gamma": _row(call(dist.Gamma, SHAPE, SHAPE / M), "positive", MEAN),
        "beta": _row(call(dist.Beta, *SHARES), "share", LOG_ODDS),
        "bernoulli": _row(call(dist.Bernoulli, logits=M), "binary", LOG_ODDS),
        "binomial": _row(call(dist.Binomial, TRIALS, logits=M), "trials", LOG_ODDS),
        "beta binomial": _row(call(dist.BetaBinomial, *SHARES, TRIALS), "trials", LOG_ODDS),
        "poisson": POISSON,
        "negative binomial": NEGATIVE_BINOMIAL,
        "negative binomial 1": _row(call(dist.NegativeBinomial, M.exp() / PHI, logits=PHI.log()), "counts", LOG_MEAN),
        "truncated poisson": _row(call(ZeroTruncated, POISSON.fn), ABOVE_ZERO, MEAN),
        "truncated negative binomial": _row(call(ZeroTruncated, NEGATIVE_BINOMIAL.fn), ABOVE_ZERO, LOG_MEAN),
        "categorical": _row(call(dist.Categorical, logits=M), "classes", {"softmax": ETA}),
        "ordinal": _row(M, "grades", GRADES),
        "exponential": _times(call(dist.Exponential, (-M).exp())),
        "weibull": _times(call(dist.Weibull, M.exp(), SHAPE)),
        "lognormal": _times(call(dist.LogNormal, M, SIGMA)),
        "loglogistic": _times(call(LogLogistic, M.exp(), SHAPE)),
        "gompertz": _times(call(Gompertz, M.exp(), GROWTH), "log hazard"),
        "cox": _row(call(CoxPartialLikelihood, M, efron=True), "order", {"log hazard": ETA}),
        "cox breslow": _row(call(CoxPartialLikelihood, M, efron=False), "order", {"log hazard": ETA}),
    }
)
OTHER_NAMES = {
    "normal": "gaussian",
    **dict.fromkeys(("cumulative", "ocat"), "ordinal"),
    **dict.fromkeys(("t", "t family", "student t", "scat"), "student"),
    **dict.fromkeys(("beta family", "betar"), "beta"),
    **dict.fromkeys(("nbinom2", "negbinomial", "nb"), "negative binomial"),
    "nbinom1": "negative binomial 1",
    "truncated nbinom2": "truncated negative binomial",
}


KINDS = {constraints.boolean: "binary", constraints.nonnegative_integer: "counts", constraints.unit_interval: "share"}
POSITIVE = (constraints.positive, constraints.nonnegative)
SHARE: Mapping[str, Expression] = {"logit": ETA.sigmoid(), "cloglog": -(-ETA.exp()).expm1(), "identity": ETA}
Family = str | tuple[Any, ...]
EXAMPLE = '(dist.Laplace, "loc") or (dist.StudentT, "loc", {"df": 4.0})'


def of_location(fn: Any, location: str, values: Mapping[str, float] = MappingProxyType({})) -> GLMFamily:
    """The family of a distribution, one of whose arguments has the linear predictor; the others are parameters.

    :param values: of arguments that are known.
    :raises BadInput: for what is no distribution with such an argument, and for other arguments that are not positive.
    """
    limits = getattr(fn, "arg_constraints", None)
    limits = limits if isinstance(limits, dict) else {}  # not those that depend on the arguments
    if location not in limits or not set(values) <= set(limits):
        raise BadInput(
            f"family={getattr(fn, '__name__', fn)!r}, {location!r}, {dict(values)}; expected a distribution with names "
            f"of its arguments, {list(limits)}, such as {EXAMPLE}."
        )
    others = {n: g.default for n, g in signature(fn).parameters.items() if n in limits and n not in (location, *values)}
    positive = {n for n in others if getattr(limits[n], "lower_bound", None) == 0}
    parameters = [n for n, given in others.items() if given is not None and n in positive]
    if lacking := [n for n, given in others.items() if given is Parameter.empty and n not in parameters]:
        raise BadInput(
            f"family={fn.__name__}: '{lacking[0]}' is no positive number; expected its value, such as {EXAMPLE}."
        )
    links = MEAN if limits[location] in POSITIVE else SHARE if limits[location] == constraints.unit_interval else ITSELF
    kind = "positive" if fn.support in POSITIVE else KINDS.get(fn.support, "real")
    return _row(call(fn, **{location: M}, **values, **{name: Expression(name) for name in parameters}), kind, links)


def chosen_family(name: Family, link: str | None = None) -> tuple[str, GLMFamily]:
    """A family by its name, by that which R has for it, or by its distribution; its own name first.

    :raises BadInput: for a name or a link that there is not.
    """
    written = re.sub(r"[\s_-]+", " ", str(name).lower()).strip()
    names = {own.replace(" ", ""): own for own in FAMILIES} | {n.replace(" ", ""): o for n, o in OTHER_NAMES.items()}
    own = name[0].__name__ if isinstance(name, tuple) else names.get(written.replace(" ", ""), written)
    if not isinstance(name, tuple) and own not in FAMILIES:
        kind, _, base = own.removeprefix("zero ").partition(" ")
        zeros = {"inflated": "zi ~ 1", "hurdle": "hurdle ~ 1"}.get(kind, "") if base.replace(" ", "") in names else ""
        said = f"family={base!r} and a formula of the zeros, 'y ~ x; {zeros}', or " if zeros else ""
        raise BadInput(f"family={name!r}; expected {said}one of {list(FAMILIES)}, or {EXAMPLE}.")
    found = of_location(*name) if isinstance(name, tuple) else FAMILIES[own]
    if link is not None and link not in found.links:
        raise BadInput(f"link={link!r} of family={name!r}; expected one of {list(found.links)}.")
    return own, found if link is None else replace(found, link=link)
