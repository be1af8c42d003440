"""What a log joint is made of, found by derivatives at random points and verified, never by matching names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_evidence import predictors
from pyro_evidence.density import AutogradDensity, Linear, LinearDensity
from pyro_evidence.ops.derivatives import jacobian
from pyro_evidence.ops.linalg import available_bytes
from pyro_evidence.predictors import Slot
from pyro_evidence.program import LogJoint

Trace = Any


@dataclass(frozen=True)
class PrecisionGroups:
    """Hyperparameters that scale the precision of Gaussian latents or of Gaussian noise, and do nothing else.

    Coordinate ``t`` of the unconstrained hyperparameters is in a group when the log precision of its members is
    ``power[t] * theta[t]`` plus a constant: power 1 for a precision, -1 for a variance, -2 for a scale.
    """

    power: Tensor  # (T,) 0 where theta[t] is not in a group
    member: Tensor  # (D,) the group of each latent coordinate, -1 for none
    noise: dict[str, Tensor]  # observed site -> (n,) the group of each element, -1 for none
    loc: Tensor  # (D,) prior mean of the members, nan where a hyperparameter moves it
    offset: Tensor  # (D,) log precision of each member minus power * theta

    @property
    def is_weight(self) -> Tensor:
        """Which hyperparameters hold precisions of latents, shape ``(T,)`` bool."""
        found = torch.zeros_like(self.power, dtype=torch.bool)
        found[self.member[self.member >= 0]] = True
        return found

    def log_precision(self, theta: Tensor) -> Tensor:
        """Log prior precision of each latent coordinate, 0 for those in no group, shape ``(..., D)``."""
        index = self.member.clamp(min=0)  # -1 means no group
        log_precision = self.offset + (self.power * theta)[..., index]
        return torch.where(self.member >= 0, log_precision, 0.0)

    def size(self, active: Tensor) -> Tensor:
        """Number of Gaussian terms that each hyperparameter scales, pruned coordinates left out, shape ``(T,)``."""
        owners = torch.cat([self.member[active], *self.noise.values()])
        return torch.bincount(owners[owners >= 0], minlength=len(self.power)).double()


@dataclass(frozen=True)
class Structure:
    """The facts about one log joint, each None where absent."""

    groups: PrecisionGroups | None
    slots: tuple[Slot, ...] | None
    linear: LinearDensity | None
    density: AutogradDensity

    @property
    def fastest(self) -> LinearDensity | AutogradDensity:
        """The cheapest density for rows that share their hyperparameters."""
        return self.linear or self.density


def recognise(joint: LogJoint) -> Structure:
    """Everything that can be verified about ``joint``; a few runs of the model."""
    points = _points(joint)
    slots = _slots(joint, points)
    density = AutogradDensity(joint, slots)
    return Structure(_groups(joint, points), slots, _linear(joint, slots, points, density), density)


@dataclass(frozen=True)
class _Point:
    u: Tensor
    theta: Tensor
    trace: Trace


def _points(joint: LogJoint) -> list[_Point]:
    """Three runs: at the origin and the starting hyperparameters, then at random ones near."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for scale in (0.0, 0.1, 0.1):
        du = torch.randn(joint.latents.size, generator=generator, dtype=torch.float64).to(joint.device)
        dtheta = torch.randn(joint.hypers.size, generator=generator, dtype=torch.float64).to(joint.device)
        u = (scale * du / max(1.0, joint.latents.size**0.5)).requires_grad_()
        theta = (joint.initial_theta + scale * dtheta).requires_grad_()
        found.append(_Point(u, theta, joint.trace(u, theta)))
    return found


def _groups(joint: LogJoint, points: list[_Point]) -> PrecisionGroups | None:
    if not joint.hypers.size:
        return None
    weights = _exponents([_log_precision(joint, p) for p in points], points)
    noise = {n: _exponents([_log_noise(p, n) for p in points], points) for n in joint.observed}
    every = torch.cat([weights, *noise.values()])
    power = _common_power(every)
    power = torch.where(_acts_elsewhere(joint, points[1], power, weights, noise), 0.0, power)
    if not bool((power != 0).any()):
        return None
    member = _owner(weights, power)
    owners = {n: _owner(e, power) for n, e in noise.items()}
    return PrecisionGroups(power, member, owners, *_constants(joint, points[0], power, member))


def _constants(joint: LogJoint, point: _Point, power: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    """Prior mean, and log precision at ``theta = 0``, of the coordinates in groups."""
    loc, precision, _ = predictors.gaussian_prior(joint, point.trace)
    moved = jacobian(loc, point.theta).abs().amax(-1) > 0
    offset = precision.log() - (power * point.theta)[member.clamp(min=0)]  # -1 means no group
    return torch.where(moved, torch.nan, loc).detach(), torch.where(member >= 0, offset, 0.0).detach()


def _log_precision(joint: LogJoint, point: _Point) -> Tensor:
    _, precision, known = predictors.gaussian_prior(joint, point.trace)
    return torch.where(known, precision.log(), torch.nan)


def _log_noise(point: _Point, name: str) -> Tensor:
    scale = predictors.noise_scale(point.trace.nodes[name])
    return point.u.new_zeros(0) if scale is None else -2.0 * scale.reshape(-1).double().log()


def _exponents(values: list[Tensor], points: list[_Point]) -> Tensor:
    """``d log precision / d theta`` where it is the same at all points and free of ``u``, else nan; ``(n, T)``."""
    slopes = torch.stack([jacobian(v, p.theta) for v, p in zip(values, points, strict=True)])
    same = (slopes - slopes[0]).abs().amax((0, -1)) <= 1e-9 if slopes.numel() else slopes.new_zeros(slopes.shape[1]).bool()
    free = not any(predictors.depends(v, p.u) for v, p in zip(values, points, strict=True))
    known = torch.isfinite(values[0]) & same & (free | _rows_free(values, points))
    return torch.where(known.unsqueeze(-1), slopes[0], torch.nan)


def _rows_free(values: list[Tensor], points: list[_Point]) -> Tensor:
    """Which elements do not depend on the latents; none of them where asking each would be costly."""
    n, D = values[0].numel(), points[0].u.numel()
    if n * D > 10**7:
        return torch.zeros(n, dtype=torch.bool)
    return torch.stack([(jacobian(v, p.u) == 0).all(-1) for v, p in zip(values, points, strict=True)]).all(0)


def _common_power(exponents: Tensor) -> Tensor:
    """The power of each column whose members all have it and no other column, else 0; shape ``(T,)``."""
    alone = (exponents != 0).sum(-1) == 1
    used = exponents != 0
    good = (used & alone.unsqueeze(-1)).eq(used).all(0) & used.any(0)
    largest = torch.where(used, exponents, -torch.inf).amax(0)
    smallest = torch.where(used, exponents, torch.inf).amin(0)
    return torch.where(good & ((largest - smallest).abs() <= 1e-9), largest.mul(1e6).round().div(1e6), 0.0)


def _owner(exponents: Tensor, power: Tensor) -> Tensor:
    """The group of each row, -1 for none."""
    hit = (exponents == exponents) & (exponents != 0) & (power != 0)
    return torch.where(hit.any(-1), hit.float().argmax(-1), -1) if hit.numel() else torch.full((len(exponents),), -1)


def _acts_elsewhere(
    joint: LogJoint, point: _Point, power: Tensor, weights: Tensor, noise: Mapping[str, Tensor]
) -> Tensor:
    """Which hyperparameters change the log joint otherwise than through the precisions they hold, shape ``(T,)``."""
    held = _held(joint, point, _owner(weights, power), {n: _owner(e, power) for n, e in noise.items()})
    total = joint.log_joint(point.u, point.theta)
    slope = torch.autograd.grad(total, point.theta, retain_graph=True)[0]
    return (slope - held).abs() > 1e-8 * (1.0 + slope.abs() + held.abs())


def _held(joint: LogJoint, point: _Point, member: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
    """``d log joint / d theta`` that the recognised Gaussians account for, shape ``(T,)``."""
    loc, precision, _ = predictors.gaussian_prior(joint, point.trace)
    cells = 0.5 * (precision.log() - precision * (point.u - loc.detach()).square())
    total = cells[member >= 0].sum()
    for name, owner in noise.items():
        if bool((owner >= 0).any()):
            node = point.trace.nodes[name]
            base, _ = predictors.innermost(node["fn"])
            residual = (node["value"] - base.loc.detach()).reshape(-1)
            log_scale = base.scale.expand_as(node["value"] - base.loc).reshape(-1).log()
            total = total + (-log_scale - 0.5 * (residual / log_scale.exp()).square())[owner >= 0].sum()
    found = torch.autograd.grad(total, point.theta, allow_unused=True, retain_graph=True)[0] if total.requires_grad else None
    return torch.zeros_like(point.theta) if found is None else found.double()


def _slots(joint: LogJoint, points: list[_Point]) -> tuple[Slot, ...] | None:
    return predictors.slots(joint, points[0].trace, points[0].u)


def _linear(
    joint: LogJoint, slots: tuple[Slot, ...] | None, points: list[_Point], density: AutogradDensity
) -> LinearDensity | None:
    if not slots:
        return None
    found = [_linear_part(slot, points) for slot in slots]
    if any(f is None for f in found):
        return None
    _, _, known = predictors.gaussian_prior(joint, points[0].trace)
    linear = LinearDensity(joint, tuple(f for f in found if f is not None), bool(known.all()) and _prior_fixed(joint, points))
    return linear if all(_agree(linear, density, p) for p in points) else None


def _prior_fixed(joint: LogJoint, points: list[_Point]) -> bool:
    """Whether the Gaussian prior is free of the latents themselves."""
    parts = [predictors.gaussian_prior(joint, p.trace)[:2] for p in points]
    return all(not predictors.depends(x, p.u) for pair, p in zip(parts, points, strict=True) for x in pair)


def _linear_part(slot: Slot, points: list[_Point]) -> Linear | None:
    """``eta = J u + c`` under the first link for which that holds at every point."""
    first, *others = points
    for guess in predictors.candidates(slot, first.trace):
        eta = guess.layout.blocks(guess.predictor(first.trace).unsqueeze(0))[0]
        if 16 * eta.numel() * first.u.numel() > available_bytes(first.u.device):
            return None
        J = jacobian(eta.reshape(-1), first.u).reshape(*eta.shape, -1).double()
        part = Linear(guess, J, (eta.detach().double() - (J @ first.u.detach())))
        if all(_predicts(part, p) for p in others):
            return part
    return None


def _predicts(part: Linear, point: _Point) -> bool:
    actual = part.layout.blocks(part.slot.predictor(point.trace).unsqueeze(0)).detach().double()
    expected = part.eta(point.u.detach().unsqueeze(0))
    tolerance = 1e-10 if part.slot.predictor(point.trace).dtype == torch.float64 else 1e-4
    return bool(((actual - expected).abs() <= tolerance * (1.0 + expected.abs())).all())


def _agree(linear: LinearDensity, density: AutogradDensity, point: _Point) -> bool:
    """The safeguard: both densities give the same number."""
    u, theta = point.u.detach().unsqueeze(0), point.theta.detach()
    with pyro.validation_enabled(False):
        a, b = linear.log_joint(u, theta), density.log_joint(u, theta)
    tolerance = 1e-10 if linear.joint.dtype == torch.float64 else 1e-4
    return bool(((a - b).abs() <= tolerance * (1.0 + b.abs())).all())
