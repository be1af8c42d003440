"""Where observed sites see the latents: one parameter, behind a fixed link, found by derivative rather than by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import pyro
import torch
from pyro.distributions import MixtureSameFamily
from torch import Tensor
from torch.distributions import Independent

from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.ops import links
from pyro_evidence.ops.links import Link
from pyro_evidence.ops.predictor import Layout
from pyro_evidence.ops.reduce import log_sum_exp
from pyro_evidence.program import LogJoint

Trace = Any
Node = Mapping[str, Any]


@dataclass(frozen=True)
class Slot:
    """The parameter of one observed site that depends on the latents."""

    site: str
    parameter: str  # "loc", "logits", "rate", ...
    link: Link
    layout: Layout
    mixture: str | None  # the discrete site, "" for MixtureSameFamily, None for neither

    def predictor(self, trace: Trace) -> Tensor:
        """``eta`` of this site in a trace, shape ``layout.shape``."""
        return self.link.inverse(getattr(innermost(trace.nodes[self.site]["fn"])[0], self.parameter))

    def log_likelihood(self, trace: Trace) -> Callable[[Tensor], Tensor]:
        """Log likelihood of the site as a function of ``eta`` ``(R,) + shape``; all else is the trace's."""
        node = trace.nodes[self.site]
        base, num_event = innermost(node["fn"])
        fixed = {k: getattr(base, k) for k in _parameters(base) if k != self.parameter}
        value = node["value"].unsqueeze(-1 - num_event) if self.mixture == "" else node["value"]

        def log_likelihood(eta: Tensor) -> Tensor:
            with pyro.validation_enabled(False):
                fn = type(base)(**fixed, **{self.parameter: self.link.forward(eta)}, validate_args=False)
                cells = fn.log_prob(value)
            cells = cells.sum(tuple(range(-num_event, 0))) if num_event else cells
            return self._reduce(trace, cells).reshape(len(eta), -1).sum(-1)

        return log_likelihood

    def _reduce(self, trace: Trace, cells: Tensor) -> Tensor:
        """Mixture summed out, mask and scale applied."""
        node = trace.nodes[self.site]
        if self.mixture == "":
            cells = log_sum_exp(cells + _unwrapped(node["fn"]).mixture_distribution.logits.log_softmax(-1), -1)
        cells = cells if node["mask"] is None else torch.where(torch.as_tensor(node["mask"]), cells, 0.0)
        cells = cells * node["scale"]
        if self.mixture:
            choice = trace.nodes[self.mixture]
            prior = choice["fn"].log_prob(choice["value"])
            cells = log_sum_exp(cells + prior, choice["infer"]["_enumerate_dim"])
        return cells


def _unwrapped(fn: Any) -> Any:
    while isinstance(fn, Independent) or type(fn).__name__ == "ExpandedDistribution":
        fn = fn.base_dist
    return fn


def innermost(fn: Any) -> tuple[Any, int]:
    """The innermost distribution whose parameters matter, and how many of its batch dims are one datum's."""
    num_event = 0
    while True:
        if isinstance(fn, Independent):
            num_event += fn.reinterpreted_batch_ndims
            fn = fn.base_dist
        elif type(fn).__name__ == "ExpandedDistribution":
            fn = fn.base_dist
        elif isinstance(fn, MixtureSameFamily | torch.distributions.MixtureSameFamily):
            fn = fn.component_distribution
        else:
            return fn, num_event


def _parameters(base: Any) -> list[str]:
    """The constructor's arguments as this instance was given them."""
    given = [k for k in base.arg_constraints if k in base.__dict__]
    if "logits" in given and "probs" in given:
        given.remove("logits" if getattr(base, "_param", None) is base.__dict__["probs"] else "probs")
    return given or list(base.arg_constraints)


def slots(joint: LogJoint, trace: Trace, u: Tensor) -> tuple[Slot, ...] | None:
    """One slot per observed site that depends on ``u``; None when a site does in a way that no slot describes.

    :param trace: run at ``u``, which requires a gradient.
    """
    if len(joint.discrete) > 1:
        return None
    found = []
    for name in joint.observed:
        node = trace.nodes[name]
        base, num_event = innermost(node["fn"])
        dependent = [k for k in _parameters(base) if depends(getattr(base, k), u)]
        if len(dependent) > 1:
            return None
        if dependent:
            found.append(_slot(joint, name, (base, num_event), dependent[0], trace))
    return tuple(found)


def _slot(joint: LogJoint, name: str, base: tuple[Any, int], parameter: str, trace: Trace) -> Slot:
    fn, num_event = base
    value = getattr(fn, parameter)
    mixture = _mixture(joint, trace.nodes[name], value, trace)
    normalised = parameter == "logits" and value.dim() > len(fn.batch_shape)
    link = links.candidates(fn.arg_constraints[parameter], normalised)[0]
    shape = link.inverse(value).shape
    trailing = len(shape) - len(fn.batch_shape)
    enumerated = trace.nodes[mixture]["infer"]["_enumerate_dim"] if mixture else -1
    num_batch = len(shape) - trailing - (num_event if mixture is not None else 0)
    coupled = _coupled(num_batch, len(shape), enumerated, mixture)
    return Slot(name, parameter, link, Layout(shape, coupled), mixture)


def _coupled(num_batch: int, num_dims: int, component: int, mixture: str | None) -> tuple[int, ...]:
    """Dims of the predictor that one datum's likelihood ties together."""
    if mixture is None:
        return tuple(range(num_batch, num_dims))
    return (num_batch + component, *range(num_batch, num_dims))


def _mixture(joint: LogJoint, node: Node, value: Tensor, trace: Trace) -> str | None:
    if isinstance(_unwrapped(node["fn"]), MixtureSameFamily | torch.distributions.MixtureSameFamily):
        return ""
    return joint.discrete[0] if joint.discrete else None


def depends(value: Any, u: Tensor) -> bool:
    """Whether ``u`` takes part in the making of ``value``."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return False
    found = torch.autograd.grad(value.sum(), u, retain_graph=True, allow_unused=True)[0]
    return found is not None


def candidates(slot: Slot, trace: Trace) -> list[Slot]:
    """The same slot under every link that its parameter's constraint admits."""
    base, _ = innermost(trace.nodes[slot.site]["fn"])
    value = getattr(base, slot.parameter)
    normalised = slot.parameter == "logits" and value.dim() > len(base.batch_shape)
    every = links.candidates(base.arg_constraints[slot.parameter], normalised)
    return [Slot(slot.site, slot.parameter, link, slot.layout, slot.mixture) for link in every]


def log_prior(joint: LogJoint, u: Tensor, theta: Tensor) -> Tensor:
    """Log prior density of the integrated sites at one point, Jacobian included, shape ``()``."""
    trace = joint.trace(u, theta)
    counted = set(joint.latents.names)
    _, log_det = joint.latents.constrained_with_log_det(u.to(joint.dtype))
    with pyro.validation_enabled(False):
        return cast(Tensor, trace.log_prob_sum(lambda name, _: name in counted) + log_det).double()


def gaussian_prior(joint: LogJoint, trace: Trace) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, precision and whether it is known, of each integrated coordinate, three of shape ``(D,)``.

    Known are Normal sites and MultivariateNormal ones of diagonal precision, unscaled and unmasked.
    """
    parts = [_gaussian_site(trace.nodes[part.name], part.size) for part in joint.latents]
    loc, precision, known = (torch.cat(x) for x in zip(*parts, strict=True))
    return loc.double(), precision.double(), known


def _gaussian_site(node: Node, size: int) -> tuple[Tensor, Tensor, Tensor]:
    base, _ = innermost(node["fn"])
    value = node["value"]
    plain = node["mask"] is None and _is_one(node["scale"]) and value.numel() == size
    if plain and isinstance(base, torch.distributions.Normal):
        pair = base.loc.expand_as(value).reshape(-1), base.scale.expand_as(value).reshape(-1).pow(-2)
        return *pair, torch.ones(size, dtype=torch.bool, device=value.device)
    if plain and isinstance(base, torch.distributions.MultivariateNormal):
        return _multivariate(base, value)
    zeros = torch.zeros(size, dtype=value.dtype, device=value.device)
    return zeros, zeros + 1.0, zeros.bool()


def _multivariate(base: Any, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    matrix = base.precision_matrix
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    separate = bool((matrix - diagonal.diag_embed()).abs().max() <= 1e-12 * diagonal.abs().max())
    known = torch.full((value.numel(),), separate, device=value.device)
    return base.loc.expand_as(value).reshape(-1), diagonal.expand_as(value).reshape(-1), known


def _is_one(scale: Any) -> bool:
    return bool((torch.as_tensor(scale) == 1).all())


def noise_scale(node: Node) -> Tensor | None:
    """Standard deviation of each element of a plain Normal observation, or None."""
    base, _ = innermost(node["fn"])
    if not isinstance(base, torch.distributions.Normal) or node["mask"] is not None or not _is_one(node["scale"]):
        return None
    if isinstance(_unwrapped(node["fn"]), torch.distributions.MixtureSameFamily | MixtureSameFamily):
        return None
    return base.scale.expand((node["value"] - base.loc).shape)


def no_predictor(joint: LogJoint) -> UnsupportedModel:
    """The letter for a model that Gauss-Newton cannot treat."""
    return UnsupportedModel(
        f"Gauss-Newton needs observed sites that see the latents through one parameter; {', '.join(joint.observed)} "
        f"do not. Use curvature=exact_hessian."
    )
