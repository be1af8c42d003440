"""The sites of a trace: which of them are latent, discrete, data or mere bookkeeping."""

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from pyro.distributions import ImproperUniform, SineBivariateVonMises, SineSkewed, Unit, VonMises
from torch import Tensor
from torch.distributions import Transform, TransformedDistribution, biject_to, constraints

from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.numerics.coordinates import unconstrained_shape

Trace = Any  # pyro.poutine.Trace
Node = Mapping[str, Any]
Values = dict[str, Tensor]


def is_plate(node: Node) -> bool:
    """Whether a trace node is the bookkeeping of a plate."""
    return hasattr(node["fn"], "subsample_size")


def sample_nodes(trace: Trace) -> dict[str, Node]:
    """The sample sites of a trace, without the bookkeeping of plates."""
    return {n: s for n, s in trace.nodes.items() if s["type"] == "sample" and not is_plate(s)}


def is_observation(node: Node) -> bool:
    """Whether a site carries data: observed, and not a ``pyro.deterministic``."""
    return bool(node["is_observed"]) and not node["infer"].get("_deterministic", False)


def is_structure(node: Node) -> bool:
    """Whether a site chooses what the model is made of, by its annotation, and is not fixed."""
    return bool(node["infer"].get("branching")) and not node["is_observed"]


def is_discrete(node: Node) -> bool:
    """Whether a latent site is to be summed rather than integrated."""
    fn = node["fn"]
    return bool(fn.has_enumerate_support or getattr(fn.support, "is_discrete", False))


def is_masked(node: Node, how_many: Callable[[Tensor], Tensor] = torch.any) -> bool:
    """Whether the log density of a site is left out by a mask, the site's own or one around it.

    :param how_many: ``torch.any``: of some of its elements; ``torch.all``: of all.
    """
    masks, fn = [node["mask"]], node["fn"]
    while fn is not None:
        masks.append(getattr(fn, "_mask", None))
        fn = getattr(fn, "base_dist", None)
    return any(bool(how_many(~torch.as_tensor(mask, dtype=torch.bool))) for mask in masks if mask is not None)


def is_improper(node: Node) -> bool:
    """Whether the prior of a latent site is flat, in some of its elements at least: a density without an integral."""
    return isinstance(innermost(node["fn"]), ImproperUniform) or is_masked(node)


def log_prob_sum(trace: Trace, names: Collection[str]) -> Tensor:
    """Log density of the named sites, as they stand in a trace; nats, shape ``()``."""
    if not names:
        return torch.zeros(())
    with without_validation():
        return torch.as_tensor(trace.log_prob_sum(lambda name, _: name in names))


def innermost(fn: Any) -> Any:
    """A distribution without ``mask``, ``expand`` and ``to_event`` around it."""
    while hasattr(fn, "base_dist") and not isinstance(fn, TransformedDistribution):
        fn = fn.base_dist
    return fn


def given_arguments(prior: Any) -> Mapping[str, Any]:
    """The arguments that a distribution was made with, and their constraints."""
    own = vars(prior)
    given = {n: c for n, c in prior.arg_constraints.items() if n in own} or dict(prior.arg_constraints)
    if "logits" in given and "probs" in given:
        by_probs = "probs" in own and getattr(prior, "_param", None) is own["probs"]
        del given["logits" if by_probs else "probs"]
    return given


def is_empty(node: Node) -> bool:
    """Whether an observed site has no data; the value of a ``pyro.factor`` is always empty, its batch is not."""
    fn, value = node["fn"], torch.as_tensor(node["value"])
    return bool((fn.batch_shape if isinstance(fn, Unit) else value.shape).numel() == 0)


CIRCLE = constraints.interval(-math.pi, math.pi)


def support_of(fn: Any) -> Any:
    """Where a latent site's density has integral one: of an angle a single turn, for which Pyro says the whole line."""
    if isinstance(innermost(fn), VonMises | SineBivariateVonMises | SineSkewed):
        return constraints.independent(CIRCLE, fn.event_dim)
    return fn.support


def bijection(name: str, fn: Any) -> Transform:
    """From the real line to the support of a latent site.

    :raises UnsupportedModel: where torch knows none.
    """
    try:
        return biject_to(support_of(fn))
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"site '{name}', {type(fn).__name__}, has support {fn.support}, for which torch knows no change "
            f"of variables to the real line; neither NUTS nor Laplace can use it. Draw it from sites that "
            f"have one, or register the transform with torch.distributions.biject_to."
        ) from error


def central_value(fn: Any, width: float = 2.0) -> Tensor | None:
    """A value well inside the support of a latent site: uniform in unconstrained space, as NUTS starts.

    :param width: how far from the origin at most.
    :return: None where torch knows no change of variables.
    """
    try:
        transform = biject_to(support_of(fn))
    except NotImplementedError:
        return None
    like = torch.zeros(())
    with suppress(NotImplementedError):  # improper; NUTS cannot start it by itself
        # only its type matters, and a draw of a field asks for a factor that its density may not need
        like = fn.mean if hasattr(fn, "element_log_prob") else fn.sample()
    shape = unconstrained_shape(transform, fn.shape())
    uniform = torch.rand(shape, dtype=like.dtype, device=like.device)
    return cast(Tensor, transform(width * (2.0 * uniform - 1.0))).detach()
