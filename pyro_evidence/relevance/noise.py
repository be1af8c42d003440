"""The noise of a Gaussian likelihood as one precision, to be found with the precisions of the weights."""

import copy
import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pyro_evidence.data.ranks import Statistics
from pyro_evidence.data.rows import Rows
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.numerics.linalg import relative_rounding
from pyro_evidence.program.parameters import transform_of
from pyro_evidence.relevance.targets import (
    AWAY,
    LikelihoodSums,
    LinearTarget,
    QuadraticTarget,
    exact_derivatives,
    sums_of,
)
from pyro_evidence.relevance.weights import Weights

STEP = 0.1  # of the unconstrained param, to see how the noise follows


@dataclass(frozen=True, eq=False)
class Noise:
    """A Gaussian likelihood and the param that sets its precision.

    :ivar weights: as they are at the param's starting value.
    :ivar name: of the param.
    :ivar num_data: data, each as often as its plate's scale counts it.
    """

    weights: Weights
    name: str
    num_data: float
    added_up: QuadraticTarget | None = None  # the sums over all rows, where these came in chunks
    _last: dict[float, LinearTarget | QuadraticTarget] = field(default_factory=dict, compare=False, repr=False)

    def target(self, log_scale: float) -> LinearTarget | QuadraticTarget:
        """The log likelihood of all data when the noise precision is ``exp(log_scale)`` times that of the start.

        The last one is kept.
        """
        if log_scale not in self._last:
            self._last.clear()
            added_up = self.added_up and replace(self.added_up, log_scale=log_scale)
            self._last[log_scale] = added_up or self.rescaled(log_scale).target
        return self._last[log_scale]

    def weights_at(self, log_scale: float) -> Weights:
        """The weights of all data under that noise."""
        found = self.rescaled(log_scale)
        return found if self.added_up is None else replace(found, target=self.target(log_scale))

    def rescaled(self, log_scale: float) -> Weights:
        """The weights when the noise precision is ``exp(log_scale)`` times that of the start.

        The param is found by secants on the log precision, which is linear in the unconstrained value of a scale, a
        variance, a precision or the logarithm of one.

        :raises UnsupportedModel: where no value of the param has that precision.
        """
        if log_scale == 0.0:
            return self.weights
        tolerance = relative_rounding(self.weights.joint.dtype) * (1.0 + abs(log_scale))
        (before, low), (here, height) = (self.start, 0.0), (self.start + STEP, self.rise(self.start + STEP))
        for _ in range(50):
            if abs(height - log_scale) <= tolerance:
                return self.moved(here)
            if height == low or not math.isfinite(height):
                break
            before, here = here, here + (log_scale - height) * (here - before) / (height - low)
            low, height = height, self.rise(here)
        raise UnsupportedModel(
            f"no value of param '{self.name}' multiplies the noise precision by {math.exp(log_scale):.4g}; expected a "
            "scale, a variance or a precision that may take any positive value. Name the param of the noise "
            "itself, or leave noise out."
        )

    @property
    def start(self) -> float:
        """The param's unconstrained starting value."""
        joint = self.weights.joint
        return float(transform_of(joint.param_constraints[self.name]).inv(joint.held[self.name].double()))

    def moved(self, unconstrained: float) -> Weights:
        """The weights at another value of the param, which does not move their predictors."""
        weights, old = self.weights, self.weights.joint.held[self.name]
        joint = copy.copy(weights.joint)
        transform = transform_of(joint.param_constraints[self.name])
        value = transform(torch.full(old.shape, unconstrained, dtype=torch.float64)).to(old)
        joint.held = joint.held | {self.name: value}
        trace = joint.trace(joint.initial_u, joint.initial_theta)
        parts = tuple(
            likelihood.part(trace, p.J, p.c, joint.dtype)
            for likelihood, p in zip(weights.likelihoods, weights.target.parts, strict=True)
        )
        return replace(weights, joint=joint, target=LinearTarget.resident(parts, eps=weights.target.eps))

    def rise(self, unconstrained: float) -> float:
        """Log of the noise precision there over that at the start."""
        parts = (weights.target.parts[0] for weights in (self.moved(unconstrained), self.weights))
        new, old = (part.curvature(torch.zeros_like(part.c).unsqueeze(0)).sum() for part in parts)
        return float((new / old).log())


def noise_of(weights: Weights, name: str) -> Noise:
    """The noise that a param sets.

    :raises BadInput: where the model has no such param, or it has several elements.
    :raises UnsupportedModel: unless it sets the precision, and only that, of one Gaussian observed site.
    """
    held = weights.joint.held
    if not isinstance(name, str) or name not in held:
        raise BadInput(
            f"noise={name!r}: no such param; expected one of the model's: {', '.join(sorted(held)) or 'none'}."
        )
    if held[name].numel() != 1:
        raise BadInput(
            f"param '{name}' has shape {tuple(held[name].shape)}; expected one number. LaplaceEvidence takes several."
        )
    found = Noise(weights, name, 1.0)
    moved = found.moved(found.start + STEP)
    if not _only_noise(weights, moved):
        raise UnsupportedModel(
            f"expected one Gaussian observed site, one number per datum, whose precision the param '{name}' sets and "
            "nothing else; this likelihood is another. Leave noise out, or use LaplaceEvidence."
        )
    ratio, zero = found.rise(found.start + STEP), torch.zeros(1, weights.num_weights).to(weights.target.parts[0].J)
    rise = float(moved.target.value(zero) - weights.target.value(zero))
    part = weights.target.parts[0]
    residual = float(squares(*part.derivatives(part.eta(zero))))
    return replace(found, num_data=2.0 * (rise + 0.5 * math.expm1(ratio) * residual) / ratio)


@dataclass(frozen=True, eq=False)
class _Quadratic(Statistics):
    """Sums of a chunk for a quadratic log likelihood."""

    sums: LikelihoodSums
    squares: Tensor  # ()
    num_data: Tensor  # ()


def noise_of_rows(rows: Rows[Weights], name: str) -> Noise:
    """The noise that a param sets; where rows are not in memory, by the sums of one pass.

    :raises BadInput, UnsupportedModel: as :func:`noise_of`, for any chunk.
    """
    noise = noise_of(rows.example, name)
    if isinstance(rows.pieces, tuple):
        return noise
    zero = torch.zeros_like(rows.example.target.parts[0].J[0, 0])

    def of_chunk(weights: Weights) -> _Quadratic:
        here, part = noise_of(weights, name), weights.target.parts[0]
        residual = squares(*part.derivatives(part.eta(zero.unsqueeze(0))))
        return _Quadratic(sums_of(zero, exact_derivatives, (part,)), residual, zero.new_tensor(here.num_data))

    found = rows.total(of_chunk)
    added_up = QuadraticTarget(found.sums, found.squares, found.num_data, eps=rows.example.target.eps)
    return replace(noise, num_data=float(found.num_data), added_up=added_up)


def _only_noise(old: Weights, new: Weights) -> bool:
    """Whether the log likelihood is quadratic, and all precisions move in proportion about the same data."""
    part, other = old.target.parts[0], new.target.parts[0]
    if len(old.likelihoods) != 1 or part.c.shape[1] != 1:
        return False
    eta, close = torch.zeros_like(part.c).unsqueeze(0), 1e5 * torch.finfo(old.joint.dtype).eps
    (slope, A), (far, B), (tilt, C) = part.derivatives(eta), part.derivatives(eta + AWAY), other.derivatives(eta)
    ratio = (C.sum() / A.sum()).expand_as(A)
    u = torch.linspace(-1.0, 1.0, old.joint.latents.size, dtype=torch.float64, device=A.device)
    here, there = (w.likelihoods[0].blocks(w.joint.trace(u, w.joint.initial_theta)).double() for w in (old, new))
    quadratic = torch.allclose(A, B, rtol=close, atol=0) and torch.allclose(slope - AWAY * A[..., 0], far, rtol=close)
    proportional = torch.allclose(C, A * ratio, rtol=close, atol=0) and float(ratio.flatten()[0]) != 1.0
    centred = torch.allclose(tilt, slope * ratio[..., 0], rtol=close, atol=close * float(tilt.abs().max()))
    return quadratic and proportional and centred and torch.allclose(here, there, rtol=close)


def vanishes(squares: float, mean: Tensor, precision: Tensor) -> bool:
    """Whether residuals are rounding beside what the weights predict: a noise that is found goes to nothing.

    Both are sums of squares, of which a double has half of the digits left.

    :param squares: sum of squared residuals.
    :param mean: of the weights ``(M,)``, and their ``precision`` by the likelihood ``(M, M)``, in the same units.
    """
    return squares <= torch.finfo(precision.dtype).eps * float(mean @ precision @ mean)


def squares(slope: Tensor, curvature: Tensor) -> Tensor:
    """Sum of squared residuals in units of the noise, shape ``()``, from derivatives of as many elements each."""
    B = curvature.flatten()
    return (slope.flatten().square() / torch.where(B > 0, B, 1.0)).sum()  # a masked datum has no slope either
