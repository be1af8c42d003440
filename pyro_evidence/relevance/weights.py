"""The weight vector of a model: its log likelihood with the weights' own prior left out."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.chunks import Chunks
from pyro_evidence.data.ranks import SINGLE_PROCESS, Communicator
from pyro_evidence.data.rows import Rows
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.numerics import derivatives
from pyro_evidence.numerics.coordinates import is_identity
from pyro_evidence.numerics.linalg import require_memory
from pyro_evidence.numerics.linear_predictor import Part, in_blocks
from pyro_evidence.precision.dense import FLOAT
from pyro_evidence.program.checks import check_offset
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.predictors import LikelihoodTerm
from pyro_evidence.program.sites import log_prob_sum
from pyro_evidence.relevance.targets import AutogradTarget, LinearTarget, Target
from pyro_evidence.structure.density import LinearDensity
from pyro_evidence.structure.recognise import Structure, recognise
from pyro_evidence.structure.streamed import first_joint, linear_rows

FEWER_ROWS = "Pass some rows at a time to REVM.run_chunks, or take fewer basis functions."


@dataclass(frozen=True, eq=False)
class Weights:
    """Which latent coordinates are the weights; the target over ``y``, the weights first, then the others."""

    joint: LogJoint
    sites: tuple[str, ...]
    order: Tensor  # (D,) flat coordinate of each element of y
    num_weights: int
    target: Any  # a Target; one of linear predictors wherever an engine asks for that
    likelihoods: tuple[LikelihoodTerm, ...]  # where the observed sites see them

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as model and sites, because likelihoods are functions; unpickled by reading the model again.

        :raises BadInput: where the data came in chunks and were not kept.
        """
        if not self.target.is_resident:
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
    zero = torch.zeros(joint.latents.size, dtype=torch.float64, device=joint.device)
    nodes = joint.trace(zero, joint.initial_theta).nodes
    num_data = sum(nodes[n]["value"].numel() for n in joint.observed if nodes[n]["value"] is not None)
    D = len(order)
    needed = FLOAT * (num_data + 3 * min(2 * num_data, D)) * D
    require_memory(needed, "the design matrix and its Gram matrix", joint.device, FEWER_ROWS)
    structure = recognise(joint)
    likelihoods = (
        structure.likelihoods or ()
        if structure.linear is None
        else tuple(p.likelihood for p in structure.linear.linear)
    )
    return Weights(joint, sites, order, len(index), _target(joint, structure, sites, order), likelihoods)


def weights_in_chunks(
    model: Model, site: str | Sequence[str] | None, chunks: Chunks, communicator: Communicator = SINGLE_PROCESS
) -> Rows[Weights]:
    """The weights of each chunk alone, the example those of the first few rows; one pass, in which all is checked.

    Every chunk of every pass is read and dropped again.

    :raises BadInput: for no chunks, for those that can be gone through only once, or whose weights differ.
    :raises UnsupportedModel: for a predictor that is not linear, or latent sites besides the weights.
    """
    make = partial(LogJoint, model, maximise=())
    rows = linear_rows(model, chunks, communicator, make, first_joint(model, chunks, communicator, make))
    first = weights_of(rows.joint, site)
    if not isinstance(first.target, LinearTarget) or first.num_others:
        raise UnsupportedModel(
            "chunks of rows need linear predictors and no latent sites besides the weights. Pass all data to run(...)."
        )
    eps = first.target.eps

    def of_chunk(density: LinearDensity) -> Weights:
        target = LinearTarget.resident(linear_parts(density, first.order), eps=eps)
        return replace(first, joint=density.joint, target=target, likelihoods=density.likelihoods)

    return rows.mapped(of_chunk)


def of_all_rows(rows: Rows[Weights]) -> Weights:
    """The weights with a target that is a sum over all rows."""
    target = LinearTarget(rows.mapped(attrgetter("target.parts")), eps=rows.example.target.eps)
    return replace(rows.example, target=target)


def _chosen(joint: LogJoint, site: str | Sequence[str] | None) -> tuple[str, ...]:
    if not isinstance(site, Sequence | None):
        raise BadInput(f"site={site!r}; expected a latent site's name, or several: {', '.join(joint.latents.names)}.")
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
    for likelihood, part in zip(weights.likelihoods, weights.target.parts, strict=True):
        check_offset(likelihood.site, torch.as_tensor(nodes[likelihood.site]["value"]), part.J)


def _target(joint: LogJoint, structure: Structure, sites: tuple[str, ...], order: Tensor) -> Target:
    theta, eps = joint.initial_theta, torch.finfo(joint.dtype).eps
    inverse = order.argsort()
    others = set(joint.latents.names) - set(sites)

    def log_prior(u: Tensor, names: Collection[str]) -> Tensor:
        return log_prob_sum(joint.trace(u, theta), names).double()

    def rest(y: Tensor) -> Tensor:
        u = y[:, inverse]
        _, log_det = joint.latents.constrained_with_log_det(u.to(joint.dtype))
        return torch.stack([log_prior(row, others) for row in u]) + log_det.double()

    if structure.linear is not None:
        parts = linear_parts(structure.linear, order)
        return LinearTarget.resident(parts, rest if others else None, eps if others else max(p.eps for p in parts))

    def function(y: Tensor) -> Tensor:
        u = y[:, inverse]
        return joint.log_joint(u, theta) - torch.stack([log_prior(row, sites) for row in u])

    return AutogradTarget(function, lambda y: _tangents(joint, structure, y, inverse), eps)


def linear_parts(density: LinearDensity, order: Tensor) -> tuple[Part, ...]:
    """The linear predictors of a model's observed sites, in the order of ``y``."""
    joint = density.joint
    parts = density.parts(joint.initial_theta)
    same = bool((order == torch.arange(len(order))).all())
    found = []
    for p, offset in zip(density.linear, parts.offsets, strict=True):
        J = p.J if same else p.J[..., order]
        found.append(p.likelihood.part(parts.trace, J, offset, joint.dtype))
    return tuple(found)


def _tangents(joint: LogJoint, structure: Structure, y: Tensor, inverse: Tensor) -> tuple[Part, ...]:
    """Predictors of every observed site to first order around ``y`` ``(D,)``."""
    if not structure.likelihoods:
        raise UnsupportedModel(
            f"observed site(s) {', '.join(joint.observed)} do not see the weights through one parameter, so there is "
            "no Gauss-Newton curvature. Use LaplaceEvidence, which needs none."
        )
    y = y.detach().requires_grad_()
    trace = joint.trace(y[inverse], joint.initial_theta)
    found = []
    for likelihood in structure.likelihoods:
        eta = likelihood.layout.blocks(likelihood.predictor(trace).unsqueeze(0))[0]
        J = derivatives.jacobian(eta.reshape(-1), y).reshape(*eta.shape, -1).double()
        c = eta.detach().double() - J @ y.detach()
        fixed = likelihood.log_likelihood(joint.trace(y.detach()[inverse], joint.initial_theta))
        found.append(Part(in_blocks(fixed, likelihood.layout, joint.dtype), J, c, eps=torch.finfo(joint.dtype).eps))
    return tuple(found)
