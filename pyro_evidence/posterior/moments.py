"""Predictive means, standard deviations and class probabilities: the likelihood's own, averaged over a posterior."""

import inspect
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.fitting.process_state import own_random_numbers, without_validation_or_params
from pyro_evidence.posterior.predict import Moments
from pyro_evidence.posterior.process import LatentPrediction, predict_latent
from pyro_evidence.precision.gaussian_process import LatentPrecision
from pyro_evidence.program.links import gauss_hermite
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.parameters import NOTHING
from pyro_evidence.program.simulate import distribution_of, in_parts, rows_at_once, vectorised
from pyro_evidence.settings import check_count

Values = dict[str, Tensor]
NUM_NODES = 40  # of Gauss-Hermite quadrature over one function's value


@dataclass(frozen=True)
class PredictiveDraws:
    """How many draws of the latents a prediction is averaged over, and their seed."""

    num_samples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("num_samples", self.num_samples)


def predictive_moments(
    posterior: Any, joint: LogJoint, args: tuple[Any, ...], kwargs: Mapping[str, Any], draws: PredictiveDraws
) -> Moments:
    """Mean and variance of new data of the one observed site of a model without discrete ones, noise included.

    A Gaussian process with one function is integrated by quadrature at each input, everything else by draws.

    :param args: the model's arguments; targets may be left out.
    """
    site = joint.observed[0]
    model = _model_of(posterior, joint)
    args = _without_targets(joint.model, args, kwargs)

    def moments(values: Values) -> Values:
        mean, variance = _own(distribution_of(model, site, values, (args, kwargs)))
        return {"mean": mean.double(), "variance": variance.double()}

    with own_random_numbers(), torch.no_grad():
        parts = (
            Moments.over(weights, *vectorised(moments, values).values())
            for values, weights in _latents(posterior, joint, args, kwargs, draws)
        )
        return reduce(operator.add, parts)


def _model_of(posterior: Any, joint: LogJoint) -> Model:
    """The model that takes values of the user's own latents: with new levels, or below axes that stand for weights."""
    own = set(joint.latents.names) <= {NOTHING, *getattr(posterior, "mode", {})} and hasattr(posterior.state, "theta")
    return posterior.model if own else joint.substituted(joint.initial_theta)


def _latents(
    posterior: Any, joint: LogJoint, args: tuple[Any, ...], kwargs: Mapping[str, Any], draws: PredictiveDraws
) -> Iterator[tuple[Values, Tensor]]:
    """Values of the latents and their weights: nodes of a function, draws of a guide, or draws of the posterior."""
    names = joint.latents.names
    if not _is_process(posterior):
        parts = posterior._in_parts(joint, draws.num_samples, draws.seed)
        yield from (({n: part[n] for n in names}, _equal(part)) for part in parts)
    elif len(names) == 1 and len(joint.latents.parts[0].shape) <= 2:
        found = predict_latent(posterior, *args, site=names[0], **kwargs)
        yield from _by_input(names[0], found, draws, rows_at_once(joint))
    else:
        drawn = _from_guide(posterior, args, kwargs, draws)
        yield from ((part, _equal(part)) for part in in_parts(drawn, joint))


def _is_process(posterior: Any) -> bool:
    return isinstance(getattr(getattr(posterior, "state", None), "precision", None), LatentPrecision)


def _equal(rows: Values) -> Tensor:
    return torch.ones(len(next(iter(rows.values()))), dtype=torch.float64)


def _by_input(
    name: str, found: LatentPrediction, draws: PredictiveDraws, at_once: int
) -> Iterator[tuple[Values, Tensor]]:
    """The functions at nodes, or at Sobol points, of the normal distribution at each input by itself."""
    if found.mean.dim() == 2:
        parts = found.at_each_input(draws.num_samples, draws.seed, at_once)
        yield from (({name: part}, torch.ones(len(part), dtype=torch.float64)) for part in parts)
        return
    nodes, weights = gauss_hermite(NUM_NODES, found.mean)
    yield {name: found.mean + nodes.unsqueeze(-1) * found.variance.clamp(min=0.0).sqrt()}, weights  # rounding below 0


def _from_guide(posterior: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], draws: PredictiveDraws) -> Values:
    guide = posterior.guide
    with own_random_numbers(), without_validation_or_params(), torch.no_grad():
        torch.manual_seed(draws.seed)
        found = [guide(*args, **kwargs) for _ in range(draws.num_samples)]
    return {n: torch.stack([draw[n] for draw in found]) for n in found[0]}


def _own(fn: Any) -> tuple[Tensor, Tensor]:
    """Mean and variance of a distribution; of a categorical one its probabilities."""
    base = fn
    while hasattr(base, "base_dist") and not hasattr(type(base), "probs") and _is_shell(base):
        base = base.base_dist
    if getattr(base, "has_enumerate_support", False) and type(base).__name__ in ("Categorical", "OneHotCategorical"):
        return base.probs, base.probs * (1.0 - base.probs)
    try:
        return fn.mean, fn.variance
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"{type(base).__name__} has no mean or variance in closed form; expected a likelihood that has. Use "
            "Predictive(posterior.model, guide=posterior.guide, num_samples=1000)."
        ) from error


def _is_shell(fn: Any) -> bool:
    return type(fn).__name__ in ("Independent", "MaskedDistribution", "ExpandedDistribution")


def _without_targets(model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments, with None for those at the end that the model wants and the caller has not."""
    try:
        wanted = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        return args
    positional = [p for p in wanted if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    missing = [p for p in positional[len(args) :] if p.default is p.empty and p.name not in kwargs]
    return (*args, *[None for _ in missing])


def predicted(
    posterior: Any,
    joint: LogJoint,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    draws: PredictiveDraws,
    *,
    return_std: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """What ``posterior.predict`` returns.

    :raises BadInput: where a mean does not exist.
    """
    found = predictive_moments(posterior, joint, args, kwargs, draws)
    mean = _finite(found.mean)
    return (mean, _finite(found.variance).sqrt()) if return_std else mean


def _finite(values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise BadInput(
            f"{int((~values.isfinite()).sum())} predictive means or variances are not finite; expected a likelihood "
            "with both (a StudentT needs more than two degrees of freedom). Ask for quantiles=[0.05, 0.5, 0.95]."
        )
    return values
