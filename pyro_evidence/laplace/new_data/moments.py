"""Predictive means, standard deviations and class probabilities: the likelihood's own, averaged over a posterior."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.curvature.gaussian_process import LatentPrecision
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.laplace.process_prediction import HasState, functions_of, predict_latent
from pyro_evidence.program.links import gauss_hermite
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.simulate import distribution_of, rows_at_once, vectorised
from pyro_evidence.settings import check_count
from pyro_evidence.threads import own_random_numbers, quiet

Values = dict[str, Tensor]
NUM_NODES = 40  # of Gauss-Hermite quadrature over one function's value


@dataclass(frozen=True)
class PredictiveDraws:
    """How many draws of the latents a prediction is averaged over, and their seed."""

    num_samples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("num_samples", self.num_samples)


@dataclass(frozen=True)
class Moments:
    """Of one observed site given the latents, or averaged over them."""

    mean: Tensor  # (N,), or class probabilities (N, C)
    variance: Tensor  # of the same shape

    def averaged(self, weights: Tensor) -> "Moments":
        """Over rows in front, by the laws of total expectation and variance.

        :param weights: of the rows, ``(S,)``, adding up to one.
        """
        mean = torch.tensordot(weights, self.mean, 1)
        spread = torch.tensordot(weights, (self.mean - mean).square(), 1)
        return Moments(mean, torch.tensordot(weights, self.variance, 1) + spread)


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
    latents, weights = _latents(posterior, joint, args, kwargs, draws)

    def moments(values: Values) -> Values:
        mean, variance = _own(distribution_of(model, site, values, (args, kwargs)))
        return {"mean": mean.double(), "variance": variance.double()}

    size = rows_at_once(joint)
    parts = zip(*(latents[n].split(size) for n in latents), strict=True)
    with own_random_numbers(), torch.no_grad():
        found = [
            _averaged(vectorised(moments, dict(zip(latents, part, strict=True))), share)
            for part, share in zip(parts, weights.split(size), strict=True)
        ]
    total = torch.stack([share.sum() for share in weights.split(size)])
    return found[0] if len(found) == 1 else _stacked(found).averaged(total.to(found[0].mean))


def _averaged(rows: Values, weights: Tensor) -> Moments:
    """Over a part of the rows, whose weights need not add up to one."""
    return Moments(rows["mean"], rows["variance"]).averaged((weights / weights.sum()).to(rows["mean"]))


def _stacked(parts: list[Moments]) -> Moments:
    return Moments(torch.stack([m.mean for m in parts]), torch.stack([m.variance for m in parts]))


def _model_of(posterior: Any, joint: LogJoint) -> Model:
    """The model that takes values of the user's own latents: with new levels, or below axes that stand for weights."""
    own = set(joint.latents.names) <= set(getattr(posterior, "mode", {})) and hasattr(posterior.state, "theta")
    return posterior.model if own else joint.substituted(joint.initial_theta)


def _latents(
    posterior: Any, joint: LogJoint, args: tuple[Any, ...], kwargs: Mapping[str, Any], draws: PredictiveDraws
) -> tuple[Values, Tensor]:
    """Values of the latents and their weights: nodes of a function, draws of a guide, or draws of the posterior."""
    if _is_process(posterior):
        functions = functions_of(posterior.state)
        if len(joint.latents.names) == 1 and len(joint.latents.parts[0].shape) == 1:
            return _nodes(posterior, functions[0], args, kwargs)
        return _from_guide(posterior, args, kwargs, draws), _equal(draws.num_samples)
    found = posterior.in_pairs(draws.num_samples, draws.seed)
    return {n: found[n] for n in joint.latents.names}, _equal(len(found[joint.latents.names[0]]))


def _is_process(posterior: Any) -> bool:
    return isinstance(getattr(getattr(posterior, "state", None), "precision", None), LatentPrecision)


def _equal(num: int) -> Tensor:
    return torch.full((num,), 1.0 / num, dtype=torch.float64)


def _nodes(posterior: HasState, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Values, Tensor]:
    """The function at the nodes of each of its values' own normal distribution."""
    found = predict_latent(posterior, *args, site=name, **kwargs)
    nodes, weights = gauss_hermite(NUM_NODES, found.mean)
    return {name: found.mean + nodes.unsqueeze(-1) * found.variance.clamp(min=0.0).sqrt()}, weights  # rounding below 0


def _from_guide(posterior: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], draws: PredictiveDraws) -> Values:
    guide = posterior.guide
    with own_random_numbers(), quiet(), torch.no_grad():
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
            "with both (a StudentT needs more than two degrees of freedom). Use quantiles of draws: Predictive(...)."
        )
    return values
