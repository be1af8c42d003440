"""Which latent sites multiply others on their way to the data: a scale that is not centred, a discrimination."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.numerics import batched as rows
from pyro_evidence.numerics.coordinates import Coordinate, is_identity
from pyro_evidence.program import enumeration
from pyro_evidence.program.log_joint import LogJoint, Trace
from pyro_evidence.settings import seeded
from pyro_evidence.threads import without_validation

EXACT = 1e-12  # share of squares that rounding leaves in float64


def multiplies(joint: LogJoint, site: Coordinate, theta: Tensor, seed: int) -> bool:
    """Whether the likelihood sees ``site`` as a factor of other, real-valued sites.

    Either exactly, ``s dL/ds = sum_j c_j w_j dL/dw_j`` with constants ``c`` (the likelihood depends on the product), or
    through them alone: where all sites whose prior is symmetric about zero are zero, ``dL/ds`` is zero, in every state
    of the discrete sites.
    """
    real = [p for p in joint.latents if is_identity(p.transform)]
    if not real:
        return False
    u = _points(joint, 2 * len(real) + 6, seed)
    slope = _slopes(joint, u, theta, _log_likelihood)
    own = _scaling(joint, site, u, slope)
    if not bool(torch.isfinite(slope).all()) or not bool((own.abs() > 0).any()):
        return False
    return _is_product(own, [_scaling(joint, p, u, slope) for p in real]) or _vanishes(joint, site, real, u[:2], theta)


def _points(joint: LogJoint, num: int, seed: int) -> Tensor:
    generator = seeded(seed)
    u = torch.randn(num, joint.latents.size, generator=generator, dtype=torch.float64)
    return u.to(joint.device)


def _slopes(joint: LogJoint, u: Tensor, theta: Tensor, value_of: Callable[[LogJoint, Trace], Tensor]) -> Tensor:
    """Gradient of a number of the model's run in every latent, ``(R, D)``."""

    def one(u: Tensor, theta: Tensor) -> Tensor:
        trace = joint.trace(u, theta)
        with without_validation():
            return value_of(joint, trace).double()

    u = u.clone().requires_grad_()
    value = rows.apply(one, (u, theta.expand(len(u), -1)), 2**22, one)
    found = torch.autograd.grad(value.sum(), u, allow_unused=True)[0] if value.requires_grad else None
    return torch.zeros_like(u) if found is None else found.detach()


def _log_likelihood(joint: LogJoint, trace: Trace) -> Tensor:
    """Of the data, the discrete sites summed out."""
    if joint.discrete:
        return enumeration.total(trace, (*joint.discrete, *joint.observed))
    return torch.as_tensor(trace.log_prob_sum(lambda name, _: name in joint.observed))


def _every_state(joint: LogJoint, trace: Trace) -> Tensor:
    """The log densities of data and discrete sites in all states of the latter, added with weights of no pattern."""
    names = (*joint.discrete, *joint.observed)
    trace.compute_log_prob(lambda name, _: name in names)
    return torch.stack([_mixed(trace.nodes[name]["log_prob"].double()) for name in names]).sum()


def _mixed(cells: Tensor) -> Tensor:
    """Sum of possible cells, each with its own weight."""
    weight = 1.5 + torch.arange(1.0, cells.numel() + 1.0, device=cells.device).sin().reshape(cells.shape)
    return (weight * torch.where(torch.isfinite(cells), cells, 0.0)).sum()


def _scaling(joint: LogJoint, site: Coordinate, u: Tensor, slope: Tensor) -> Tensor:
    """``sum_i x_i dL/dx_i`` over the elements of a site in its own space, shape ``(R,)``."""
    block = joint.latents.slices[site.name]
    if not site.size:
        return u.new_zeros(len(u))
    before = u[:, block].reshape(len(u), *site.unconstrained_shape).requires_grad_()
    x = site.transform(before)
    if x.shape != before.shape:
        return u.new_zeros(len(u))
    rate = torch.autograd.grad(x.sum(), before)[0]
    move = torch.where(rate != 0, x.detach() / rate, 0.0)  # of u, where x is multiplied by 1 + e
    return (move.reshape(len(u), -1) * slope[:, block]).sum(-1)


def _is_product(own: Tensor, others: Sequence[Tensor]) -> bool:
    X = torch.stack([other / other.norm() for other in others if bool((other.abs() > 0).any())] or [0.0 * own], -1)
    found = torch.linalg.pinv(X) @ own
    return bool((own - X @ found).square().sum() <= EXACT * own.square().sum())


def _vanishes(joint: LogJoint, site: Coordinate, real: Sequence[Coordinate], u: Tensor, theta: Tensor) -> bool:
    nodes = joint.trace(u[0], theta).nodes
    u = u.clone()
    for part in real:
        if _is_symmetric(nodes[part.name]["fn"]):
            u[:, joint.latents.slices[part.name]] = 0.0
    slope = _slopes(joint, u, theta, _every_state)
    return not bool((slope[:, joint.latents.slices[site.name]].abs() > EXACT * slope.abs().max()).any())


def _is_symmetric(fn: Any) -> bool:
    """Whether a prior has one density at ``x`` and ``-x``."""
    shape = fn.shape()
    x = (torch.arange(1.0, shape.numel() + 1, dtype=torch.float64).cos() + 0.3).reshape(shape)
    pairs = [(fn.log_prob(p).double(), fn.log_prob(-p).double()) for p in (x, 1.7 * x)]
    return all(bool(torch.isclose(p, q, rtol=1e-9, atol=1e-9).all()) for p, q in pairs)
