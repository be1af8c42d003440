"""The weight vector of a model: its log likelihood with the weights' own prior left out."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput, NotSmooth, UnsupportedModel
from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.numerics import derivatives
from pyro_evidence.numerics.coordinates import is_identity
from pyro_evidence.numerics.linalg import require_memory
from pyro_evidence.numerics.linear_predictor import gram
from pyro_evidence.program.checks import check_offset
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.predictors import LikelihoodTerm
from pyro_evidence.structure.density import LinearDensity
from pyro_evidence.structure.observed import EPS, Function, Part, in_blocks, part_of
from pyro_evidence.structure.recognise import Structure, recognise

FEWER_ROWS = "Pass some rows at a time to REVM.run_chunks, or take fewer basis functions."


@dataclass(frozen=True)
class LinearTarget:
    """Log likelihood of linear predictors, plus the log prior of coordinates that are no weights."""

    parts: tuple[Part, ...]
    rest: Function | None
    eps: float = EPS  # of the dtype in which the model is run

    def value(self, y: Tensor) -> Tensor:
        total = sum(p.log_likelihood(p.eta(y)) for p in self.parts)
        return torch.as_tensor(total if self.rest is None else total + self.rest(y))

    def gradient(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Value ``(R,)`` and gradient ``(R, D)``."""
        found = [(p, *p.slope(p.eta(y))) for p in self.parts]
        value = torch.stack([v for _, v, _ in found]).sum(0)
        slope = torch.stack([s.flatten(1) @ p.J.flatten(0, 1) for p, _, s in found]).sum(0)
        if self.rest is None:
            return value, slope
        rest, rest_slope = derivatives.gradient(_rows(self.rest), y, y)
        return value + rest, slope + rest_slope

    def precision(self, y: Tensor) -> Tensor:
        """Minus the Hessian, shape ``(R, D, D)``."""
        A = torch.stack([gram(p.J, p.curvature(p.eta(y))) for p in self.parts]).sum(0)
        return A if self.rest is None else A - derivatives.hessian(_rows(self.rest), y, y)

    def linearised(self, y: Tensor) -> tuple[Part, ...]:
        """The linear parts, which are their own tangents."""
        return self.parts

    def along(self, T: Tensor) -> "LinearTarget":
        rest = self.rest
        turned = None if rest is None else lambda x: rest(x @ T.mT)
        return LinearTarget(tuple(p.along(T) for p in self.parts), turned, self.eps)


@dataclass(frozen=True)
class AutogradTarget:
    """Log likelihood of predictors that are not linear."""

    function: Function
    linearise: Callable[[Tensor], tuple[Part, ...]]
    eps: float = EPS  # of the dtype in which the model is run

    def value(self, y: Tensor) -> Tensor:
        return self.function(y)

    def gradient(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Value ``(R,)`` and gradient ``(R, D)``."""
        return derivatives.gradient(_rows(self.function), y, y)

    def precision(self, y: Tensor) -> Tensor:
        """Minus the Hessian, shape ``(R, D, D)``."""
        return -derivatives.hessian(_rows(self.function), y, y)

    def linearised(self, y: Tensor) -> tuple[Part, ...]:
        """Parts whose predictor is the tangent at ``y`` ``(D,)``: what Gauss-Newton looks at."""
        return self.linearise(y)

    def along(self, T: Tensor) -> "AutogradTarget":
        def tangents(x: Tensor) -> tuple[Part, ...]:
            return tuple(p.along(T) for p in self.linearise(T @ x))

        return AutogradTarget(lambda x: self.function(x @ T.mT), tangents, self.eps)


class Target(Protocol):
    """A log likelihood of the weights ``y``, with what prior the other coordinates have."""

    @property
    def eps(self) -> float:
        """Relative rounding of value and derivatives: that of the dtype in which the model is run."""

    def value(self, y: Tensor) -> Tensor:
        """Nats, shape ``(R,)``, of rows ``(R, D)``."""

    def gradient(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Value ``(R,)`` and gradient ``(R, D)``."""

    def precision(self, y: Tensor) -> Tensor:
        """Minus the Hessian, shape ``(R, D, D)``."""

    def along(self, T: Tensor) -> "Target":
        """The log likelihood as a function of ``x``, ``y = T x``, ``T`` of shape ``(D, K)``."""


def _rows(f: Function) -> derivatives.Function:
    return lambda y, _: f(y)


@dataclass(frozen=True)
class Penalised:
    """A target with an independent Gaussian prior: the density that Newton climbs."""

    target: Target
    alpha: Tensor  # (D,) prior precisions, 0 for none

    @property
    def blocks(self) -> tuple[slice, ...]:
        return (slice(0, len(self.alpha)),)

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """Log likelihood minus half the penalty, ``(R,)``."""
        return self.target.value(u) - 0.5 * (self.alpha * u.square()).sum(-1)

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = self.target.gradient(u)
        return value - 0.5 * (self.alpha * u.square()).sum(-1), slope - self.alpha * u

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian, ``(R, D, D)``."""
        return self.target.precision(u) + self.alpha.diag_embed()

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        return self.precision(u, theta).diagonal(dim1=-2, dim2=-1)

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        return self.precision(u, theta)


@dataclass(frozen=True)
class Weights:
    """Which latent coordinates are the weights; the target over ``y``, the weights first, then the others."""

    joint: LogJoint
    sites: tuple[str, ...]
    order: Tensor  # (D,) flat coordinate of each element of y
    num_weights: int
    target: Target
    slots: tuple[LikelihoodTerm, ...]  # where the observed sites see them

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as model and sites, because likelihoods are functions; unpickled by reading the model again.

        :raises BadInput: where the data came in chunks and were not kept.
        """
        if not isinstance(self.target, LinearTarget | AutogradTarget):
            raise BadInput(
                "a fit to data in chunks cannot be pickled, because they were not kept: pickle its mode, alpha and "
                "hyperparameters, or fit with run(...)."
            )
        return weights_of, (self.joint, self.sites)

    @property
    def num_others(self) -> int:
        """Coordinates of latent sites that are not weights."""
        return len(self.order) - self.num_weights

    def flat(self, y: Tensor) -> Tensor:
        """``y``, shape ``(..., D)``, in the order of the model's flat vector."""
        return torch.zeros_like(y).index_copy(-1, self.order.to(y.device), y)

    def values(self, w: Tensor) -> dict[str, Tensor]:
        """Weights ``(..., M)`` by site, in the sites' shapes."""
        parts = {p.name: p for p in self.joint.latents}
        pieces = w.split([parts[n].size for n in self.sites], -1)
        return {n: v.reshape(*v.shape[:-1], *parts[n].shape) for n, v in zip(self.sites, pieces, strict=True)}

    def label(self, index: int) -> str:
        """What a reader calls element ``index`` of ``y``."""
        return self.joint.latents.label(int(self.order[index]))


def weights_of(joint: LogJoint, site: str | Sequence[str] | None) -> Weights:
    """The weight vector of a model.

    :param site: name of the latent site that holds the weights, or several names; None when there is only
        one.
    :raises BadInput: for a site that is not there, not real-valued, or of another dtype than the other sites.
    :raises UnsupportedModel: when no linear predictor and no Gauss-Newton curvature can be read off the
        model.
    """
    sites = _chosen(joint, site)
    slices = joint.latents.slices
    position = torch.arange(joint.latents.size)
    index = torch.cat([position[slices[n]] for n in sites])
    other = position[~torch.isin(position, index)]
    order = torch.cat([index, other])
    num_data, D = _num_data(joint), len(order)
    needed = 8 * (num_data + 3 * min(2 * num_data, D)) * D
    require_memory(needed, "the design matrix and its Gram matrix", joint.device, FEWER_ROWS)
    structure = recognise(joint)
    slots = structure.slots or () if structure.linear is None else tuple(p.slot for p in structure.linear.linear)
    return Weights(joint, sites, order, len(index), _target(joint, structure, sites, order), slots)


def _num_data(joint: LogJoint) -> int:
    nodes = joint.trace(
        torch.zeros(joint.latents.size, dtype=torch.float64, device=joint.device), joint.initial_theta
    ).nodes
    return sum(nodes[n]["value"].numel() for n in joint.observed if nodes[n]["value"] is not None)


def _chosen(joint: LogJoint, site: str | Sequence[str] | None) -> tuple[str, ...]:
    if not isinstance(site, Sequence | None):
        raise BadInput(
            f"site={site!r}; expected the name of a latent site, or several: {', '.join(joint.latents.names)}."
        )
    names = joint.latents.names if site is None else (site,) if isinstance(site, str) else tuple(site)
    if site is None and len(names) > 1:
        raise BadInput(f"the model has latent sites {', '.join(names)}; say which hold the weights: site='{names[0]}'.")
    unknown = [n for n in names if n not in joint.latents.names]
    if unknown or not names:
        raise BadInput(f"site={site!r}: no such latent site; expected one of {', '.join(joint.latents.names)}.")
    constrained = [p.name for p in joint.latents if p.name in names and not is_identity(p.transform)]
    if constrained:
        raise BadInput(
            f"site(s) {', '.join(constrained)} are constrained; weights must live on the whole real line. Use "
            "LaplaceEvidence, or a prior such as Normal."
        )
    return tuple(n for n in joint.latents.names if n in names)


def refuse_offsets(weights: Weights) -> None:
    """Refuse targets that are an offset and little else, where predictors are linear.

    :raises BadInput: naming the site.
    """
    if not isinstance(weights.target, LinearTarget):
        return
    nodes = weights.joint.trace(weights.joint.initial_u, weights.joint.initial_theta).nodes
    for slot, part in zip(weights.slots, weights.target.parts, strict=True):
        check_offset(slot.site, torch.as_tensor(nodes[slot.site]["value"]), part.J)


def refuse_flat(weights: Weights) -> None:
    """Refuse a likelihood without curvature at weights of zero, where relevance machines begin, but with a slope.

    :raises NotSmooth: naming the site.
    """
    assert isinstance(weights.target, LinearTarget)
    for slot, part in zip(weights.slots, weights.target.parts, strict=True):
        slope, curvature = part.derivatives(part.c.unsqueeze(0))
        if bool((slope != 0).any()) and not bool((curvature.abs() > torch.finfo(curvature.dtype).tiny).any()):
            raise NotSmooth(
                f"the likelihood of site '{slot.site}' has a slope but no curvature at weights of zero, where the "
                "search begins; expected both. Take a smooth relative (StudentT for Laplace noise), or a larger scale."
            )


def _target(joint: LogJoint, structure: Structure, sites: tuple[str, ...], order: Tensor) -> Target:
    theta, eps = joint.initial_theta, torch.finfo(joint.dtype).eps
    inverse = order.argsort()
    others = set(joint.latents.names) - set(sites)

    def log_prior(u: Tensor, names: Collection[str]) -> Tensor:
        trace = joint.trace(u, theta)
        with without_validation():
            return torch.as_tensor(trace.log_prob_sum(lambda n, _: n in names)).double()

    def rest(y: Tensor) -> Tensor:
        u = y[:, inverse]
        _, log_det = joint.latents.constrained_with_log_det(u.to(joint.dtype))
        return torch.stack([log_prior(row, others) for row in u]) + log_det.double()

    if structure.linear is not None:
        parts = linear_parts(structure.linear, order)
        return LinearTarget(parts, rest if others else None, eps if others else max(p.eps for p in parts))

    def function(y: Tensor) -> Tensor:
        u = y[:, inverse]
        return joint.log_joint(u, theta) - torch.stack([log_prior(row, sites) for row in u])

    return AutogradTarget(function, lambda y: _tangents(joint, structure, y, inverse), eps)


def linear_parts(density: LinearDensity, order: Tensor) -> tuple[Part, ...]:
    """The linear predictors of a model's observed sites, in the order of ``y``."""
    joint = density.joint
    parts = density.parts(joint.initial_theta)
    same = bool((order == torch.arange(len(order))).all())
    return tuple(
        part_of(p.slot.log_likelihood(parts.trace), p.layout, (p.J if same else p.J[..., order], offset), joint.dtype)
        for p, offset in zip(density.linear, parts.offsets, strict=True)
    )


def _tangents(joint: LogJoint, structure: Structure, y: Tensor, inverse: Tensor) -> tuple[Part, ...]:
    """Predictors of every observed site to first order around ``y`` ``(D,)``."""
    if not structure.slots:
        raise UnsupportedModel(
            f"observed site(s) {', '.join(joint.observed)} do not see the weights through one parameter, so there is "
            "no Gauss-Newton curvature. Use LaplaceEvidence, which needs none."
        )
    y = y.detach().requires_grad_()
    trace = joint.trace(y[inverse], joint.initial_theta)
    found = []
    for slot in structure.slots:
        eta = slot.layout.blocks(slot.predictor(trace).unsqueeze(0))[0]
        J = derivatives.jacobian(eta.reshape(-1), y).reshape(*eta.shape, -1).double()
        c = eta.detach().double() - J @ y.detach()
        fixed = slot.log_likelihood(joint.trace(y.detach()[inverse], joint.initial_theta))
        found.append(Part(in_blocks(fixed, slot.layout, joint.dtype), J, c, eps=torch.finfo(joint.dtype).eps))
    return tuple(found)
