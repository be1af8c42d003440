"""Priors of a mixed model: none, weak ones in the data's units, or the user's own.  Their text is parsed, never run."""

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.models.formula.expressions import Expression, call
from pyro_evidence.models.formula.families import CUTPOINTS, GLMFamily

WEAK = "weak"
FLAT = "flat"
Priors = Mapping[str, str]
EXAMPLE = 'a distribution with its numbers, such as "Normal(0, 2.5)", or "flat"'
CORRELATIONS = ("LKJ", "LKJCholesky")
DISTRIBUTIONS = (  # of one real number, in pyro.distributions
    *("AffineBeta", "AsymmetricLaplace", "Beta", "Cauchy", "Chi2", "Exponential", "FisherSnedecor", "Gamma"),
    *("GeneralizedPareto", "Gumbel", "HalfCauchy", "HalfNormal", "InverseGamma", "Kumaraswamy", "Laplace"),
    *("LogNormal", "Logistic", "Normal", "Pareto", "SkewLogistic", "SoftLaplace", "StableWithLogProb", "StudentT"),
    *("Uniform", "VonMises", "Weibull"),
)


@dataclass(frozen=True)
class Prior:
    """A prior of one param, independent for each of its elements unless it is one of correlations.

    :ivar name: one of :data:`DISTRIBUTIONS`, ``LKJCholesky``, or ``flat``: a density of one everywhere.
    :ivar arguments: numbers, or lists with a number for each element.
    :ivar keywords: the same, by name.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()

    def distribution(self, shape: tuple[int, ...]) -> Expression:
        """The distribution of a value of that shape, its numbers in the precision of ``X``."""
        X = Expression("X")
        if self.name == FLAT:
            return call(dist.Normal, X.new_zeros(shape[0]), 1.0).mask(False).to_event(1)
        size = shape[:1] if self.name == "LKJCholesky" else ()
        numbers, named = [X.new_tensor(a) for a in self.arguments], {k: X.new_tensor(a) for k, a in self.keywords}
        made = call(getattr(dist, self.name), *size, *numbers, **named)
        return made.expand(list(shape)).to_event(1) if shape and not size else made


def stated_prior(name: str, shape: tuple[int, ...], priors: Priors) -> Prior | None:
    """The prior that was stated for a param of that name and shape, or for all of its kind.

    :raises BadInput: for what is no distribution in the list with literal numbers, or does not fit the shape.
    """
    text = priors.get(name, priors.get(general(name)))
    if text is None:
        return None
    prior = _parsed(name, text)
    if (name[:2] == "L_") != (prior.name == "LKJCholesky"):
        raise BadInput(f"priors[{name!r}]={text!r}; expected LKJ(1) or the like for correlations L, and for them only.")
    try:
        made = prior.distribution(shape).value({"X": torch.zeros(1, dtype=torch.float64)})
        if made.batch_shape + made.event_shape != shape:
            raise ValueError(f"it is of shape {tuple(made.batch_shape + made.event_shape)}")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadInput(
            f"priors[{name!r}]={text!r} cannot be made for a value of shape {shape} ({error}); expected {EXAMPLE}, "
            f"with one number for all elements or one for each."
        ) from error
    return prior


def _parsed(name: str, text: str) -> Prior:
    if text == FLAT:
        return Prior(FLAT)
    try:
        parsed = ast.parse(text, mode="eval").body
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        parsed = None
    if not isinstance(parsed, ast.Call) or not isinstance(parsed.func, ast.Name):
        raise BadInput(f"priors[{name!r}]={text!r}; expected {EXAMPLE}.")
    arguments = tuple(_number(a, name, text) for a in parsed.args)
    keywords = tuple((k.arg or "", _number(k.value, name, text)) for k in parsed.keywords)
    if parsed.func.id in CORRELATIONS:
        return Prior("LKJCholesky", (*arguments, *(value for _, value in keywords))[-1:])
    if parsed.func.id not in DISTRIBUTIONS:
        raise BadInput(
            f"priors[{name!r}]={text!r}: {parsed.func.id} is none of the distributions that a prior can have, "
            f"{', '.join(DISTRIBUTIONS)}, LKJ; expected {EXAMPLE}."
        )
    return Prior(parsed.func.id, arguments, keywords)


def _number(node: ast.AST, name: str, text: str) -> Any:
    """A literal number, or a list of them."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        value = None
    elements = value if isinstance(value, list | tuple) else [value]
    if not all(type(e) in (int, float) and -math.inf < e < math.inf for e in elements):
        raise BadInput(f"priors[{name!r}]={text!r}: its arguments are not numbers; expected {EXAMPLE}.")
    return value


def weak_priors(X: Tensor, names: tuple[str, ...], family: GLMFamily, response: Tensor) -> dict[str, str]:
    """Priors that say the units and little more.

    For one standard deviation of a column, two and a half of the response, in the predictor's unit, or of the log of
    times.  Exponential priors, one standard deviation on average, hold spreads down.
    """
    centre, unit = family.moments(response)
    if not unit > 0.0:
        raise BadInput(
            f"priors='weak' are in units of the response, which is one constant, {float(response[0]):g}; expected data "
            "that vary. Or write priors of your own, a dict in place of 'weak'."
        )
    hazard = "growth" in family.parameters
    if family.response == "times":
        centre = float(response.mean().log()) * (-1.0 if hazard else 1.0)  # of a hazard: per time
    locs = [centre if name == "Intercept" else 0.0 for name in names]
    found = {"sd": f"Exponential({1.0 / unit:.3g})"}
    if names:
        found["b"] = weak_coefficients(X, unit, locs)
    rates = {"df": 0.1}
    if family.response == "real" and len(response) > 1:
        rates |= dict.fromkeys(("sigma", "scale"), 1.0 / float(response.std()))
    for name in family.parameters:
        rate = float(response.mean()) if hazard else rates.get(name, 1.0)
        found[name] = f"Exponential({rate:.3g})"
    if CUTPOINTS in found:  # of the first, and of logarithms of differences
        found[CUTPOINTS] = f"Normal(0, {[2.5 * unit] + [1.5] * (int(response.max()) - 1)})"
    return found


def weak_coefficients(X: Tensor, unit: float = 1.0, locs: list[float] | None = None) -> str:
    """The prior of a linear predictor's coefficients: for a column's standard deviation, two and a half units.

    :param unit: of the predictor, one for log odds and logarithms.
    :param locs: None for zeros.
    """
    spread = X.std(0) if len(X) > 1 else X.new_ones(X.shape[1])
    scales = [2.5 * unit / (float(s) if float(s) > 0 else 1.0) for s in spread]
    loc, scale = (", ".join(f"{v:.3g}" for v in values) for values in (locs or [0.0] * len(scales), scales))
    return f"Normal([{loc}], [{scale}])"


def general(name: str) -> str:
    """Under which name a prior of all its kind stands: ``sd`` for ``sd_subject``."""
    return re.split("_", name, maxsplit=1)[0]
