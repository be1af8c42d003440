"""Whether a predictor has hidden units: parts that can be exchanged without any change, behind a bent function.

Where two such units meet, the exact Hessian of the log joint becomes singular and Laplace's log evidence with it goes
to infinity (MacKay, 1992), so networks take another curvature.  Units are found by derivatives, never by names.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure.density import AutogradDensity
from pyro_evidence.structure.recognise import Structure

Axis = tuple[str, int]  # a site, and one of its dims


def has_hidden_units(structure: Structure) -> bool:
    """Whether observed sites see the latents through a network of at least two hidden units."""
    if structure.known is not None:
        return True
    density = structure.density
    if not structure.slots or structure.linear is not None or structure.factors is not None:
        return False
    try:
        axes = _alike(density)
        return any(_are_units(density, found) for found in _by_size(density.joint, axes).values())
    except (RuntimeError, ValueError):
        return False  # the model does not run there


def _predictor(density: AutogradDensity, u: Tensor) -> Tensor:
    """All predictors at one point, weighted by fixed random numbers: one number that tells points apart, ``()``."""
    trace = density.joint.trace(u, density.joint.initial_theta)
    etas = torch.cat([slot.blocks(trace).reshape(-1).double() for slot in density.slots or ()])
    draw = torch.randn(len(etas), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return etas @ draw.to(etas)


def _point(joint: LogJoint, seed: int) -> Tensor:
    draw = torch.randn(joint.latents.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return draw.to(joint.device)


def _alike(density: AutogradDensity) -> list[Axis]:
    """Dims along which all elements move the predictors alike where each site's elements are equal."""
    joint = density.joint
    values = joint.latents.unconstrained(_point(joint, 2))
    equal = torch.cat([v.reshape(-1)[:1].expand(v.numel()) for v in values.values()]).requires_grad_()
    slope = torch.autograd.grad(_predictor(density, equal), equal)[0]
    found = []
    for name, own in joint.latents.unconstrained(slope).items():
        rounding = _rounding(joint) * float(own.abs().amax()) if own.numel() else 0.0
        for dim in range(own.dim() if rounding > 0.0 else 0):
            if own.shape[dim] > 1 and bool(((own - own.roll(1, dim)).abs() <= rounding).all()):
                found.append((name, dim))
    return found


def _rounding(joint: LogJoint) -> float:
    return float(torch.finfo(joint.dtype).eps ** 0.55)


def _by_size(joint: LogJoint, axes: list[Axis]) -> Mapping[int, list[Axis]]:
    """The dims of each length: units of one layer, or of several layers as wide."""
    shapes = {p.name: p.unconstrained_shape for p in joint.latents}
    sizes = sorted({shapes[name][dim] for name, dim in axes})
    return {size: [(n, d) for n, d in axes if shapes[n][d] == size] for size in sizes}


def _are_units(density: AutogradDensity, axes: list[Axis]) -> bool:
    """Whether exchanging along all of these dims changes nothing, and predictors are bent along one of the sites."""
    joint, u = density.joint, _point(density.joint, 3)
    if len({name for name, _ in axes}) < 2:
        return False
    before, after = joint.log_joint(torch.stack([u, _exchanged(joint, axes, u)]), joint.initial_theta).detach()
    same = bool((after - before).abs() <= _rounding(joint) * (1.0 + before.abs()))
    return same and any(_is_bent(density, name, u) for name, _ in axes)


def _exchanged(joint: LogJoint, axes: list[Axis], u: Tensor) -> Tensor:
    """``u`` with all units in the next one's place."""
    values = joint.latents.unconstrained(u)
    for name, dim in axes:
        values[name] = values[name].roll(1, dim)
    return torch.cat([v.reshape(-1) for v in values.values()])


def _is_bent(density: AutogradDensity, name: str, u: Tensor) -> bool:
    """Whether the predictors are not linear in one site, the others held."""
    step = torch.zeros_like(u)
    step[density.joint.latents.slices[name]] = 0.5
    with torch.no_grad():
        behind, here, ahead = (_predictor(density, u + move) for move in (-step, torch.zeros_like(u), step))
    size = max(abs(float(x)) for x in (behind, here, ahead))
    return abs(float(ahead - 2.0 * here + behind)) > _rounding(density.joint) ** 0.5 * size
