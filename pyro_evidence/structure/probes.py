"""The points at which a model's structure is looked at: near and far, in antithetic pairs.

A model may look affine or Gaussian around one point and be neither elsewhere (``clamp``, ``relu``, ``where``), so
what is found at the origin is verified at the scale of the prior and far beyond it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from pyro_evidence.numerics.derivatives import Kept, generic_directions, measured
from pyro_evidence.program import predictors
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.sites import Trace

TYPICAL = 0.5  # prior standard deviations, but at most that many units; times 1 to 2
FAR = 20.0  # prior standard deviations, but at least that many units; times 1 to 2
FAR_UNKNOWN = 2.0  # unconstrained units of a site whose prior is not Gaussian; times 1 to 2


@dataclass(frozen=True, eq=False)
class Cells:
    """Gaussian terms: all latent coordinates, then the elements of each observed site that is Gaussian noise."""

    deviation: Tensor  # (n,) from the mean
    log_precision: Tensor  # (n,)
    known: Tensor  # (n,) whether the term is Gaussian at all

    @property
    def log_density(self) -> Tensor:
        """Each term's log density at a given deviation, but for a constant, shape ``(n,)``."""
        return 0.5 * (self.log_precision - self.log_precision.exp() * self.deviation.detach().square())


@dataclass(frozen=True, eq=False)
class TestPoint:
    """One run of the model."""

    joint: LogJoint
    u: Tensor
    theta: Tensor
    trace: Trace
    kept: Kept  # what autograd keeps of the run

    @cached_property
    def prior(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, precision and whether it is known, of each latent coordinate."""
        return predictors.gaussian_prior(self.joint, self.trace)

    @property
    def centre_and_spread(self) -> tuple[Tensor, Tensor]:
        """Prior mean and standard deviation of each latent coordinate where they are known, else zero and one."""
        loc, precision, known = (x.detach() for x in self.prior)
        centre = torch.where(known & torch.isfinite(loc), loc, 0.0)
        return centre, torch.where(known & torch.isfinite(precision), precision, 1.0).rsqrt()

    @cached_property
    def log_joint(self) -> Tensor:
        """The log joint density of this run, nats, shape ``()``."""
        _, log_det = self.joint.latents.constrained_with_log_det(self.u.to(self.joint.dtype))
        return (self.joint.total(self.trace) + log_det).double()

    @cached_property
    def cells(self) -> "Cells":
        """The Gaussian terms of this run."""
        loc, precision, known = self.prior
        parts = [(self.u - loc, torch.where(known, precision, 1.0).log(), known)]
        for noise in self.noise.values():
            parts += [] if noise is None else [(*noise, torch.ones_like(noise[0], dtype=torch.bool))]
        return Cells(*(torch.cat(x) for x in zip(*parts, strict=True)))

    @cached_property
    def noise(self) -> dict[str, tuple[Tensor, Tensor] | None]:
        """Residuals and log precisions of each observed site that is plain Gaussian noise."""
        return {n: predictors.gaussian_noise(self.joint, self.trace, n) for n in self.joint.observed}


class Unreadable(Exception):
    """The model cannot be run at a probe; so nothing can be said about its structure."""


def point_at(joint: LogJoint, u: Tensor, theta: Tensor, *, graph: bool = False) -> TestPoint | None:
    """The model at one point; None where a matrix of the model's is singular.

    :param graph: whether the trace is to carry derivatives in both.
    :raises Unreadable: when the model fails otherwise.
    """
    u, theta = (x.detach().clone().requires_grad_(graph) for x in (u, theta))
    try:
        with torch.set_grad_enabled(graph), measured() as kept:
            return TestPoint(joint, u, theta, joint.trace(u, theta), kept)
    except LinAlgError:
        return None
    except MemoryError:  # no fact about the model
        raise
    except Exception as error:  # whatever the user's own Python may raise far from where it was tried
        raise Unreadable from error


@dataclass(frozen=True, eq=False)
class NearbyPoints:
    """Runs where the model is expected to be well behaved, with derivatives."""

    origin: TestPoint  # at u = 0 and the starting hyperparameters
    typical: TestPoint  # at a point that the prior calls typical, other hyperparameters


def near(joint: LogJoint) -> NearbyPoints | None:
    """The runs near the origin; None when the density is not finite there."""
    origin = point_at(joint, joint.initial_u, joint.initial_theta, graph=True)
    if origin is None:
        return None
    direction, turn = (generic_directions(1, len(x), x)[0] for x in (origin.u, origin.theta))
    centre, spread = origin.centre_and_spread
    step = TYPICAL * direction * spread.clamp(max=1.0)  # at most TYPICAL units
    for shrink in (1.0, 0.1, 0.01):
        typical = point_at(joint, centre + shrink * step, joint.initial_theta + 0.2 * shrink * turn, graph=True)
        if typical is not None and bool(typical.log_joint.isfinite()):
            return NearbyPoints(origin, typical)
    return None


def far(origin: TestPoint, bases: Sequence[TestPoint | None]) -> list[TestPoint | None]:
    """Four runs far out, with the hyperparameters of two other runs in turn.

    Two antithetic pairs, which among them give any two neighbouring coordinates all four combinations of signs.
    """
    known, (centre, spread) = origin.prior[2], origin.centre_and_spread
    step = torch.where(known, FAR * spread.clamp(min=1.0), FAR_UNKNOWN)  # at least FAR units
    step = step * generic_directions(2, len(spread), spread)[1]
    other = step * (-1.0) ** torch.arange(len(spread), device=step.device)
    steps = (step, -step, -other, other)
    found: list[TestPoint | None] = [None] * len(steps)
    for i in (1, 3, 0, 2):  # first those of the last run, whose covariance a model may have kept
        base = bases[i % 2]
        found[i] = None if base is None else point_at(origin.joint, centre + steps[i], base.theta)
    return found
