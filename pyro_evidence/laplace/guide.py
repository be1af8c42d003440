"""A Laplace posterior where Pyro expects a guide."""

from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import sum_rightmost
from torch import Tensor

from pyro_evidence.curvature.dense import Precision
from pyro_evidence.curvature.gaussian_process import LatentPrecision
from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.numerics.coordinates import Coordinate

Frame = tuple[str, int, int]  # a plate's name, size and dim


class LaplaceGuide:
    """A callable with the model's arguments that samples every integrated site, as an AutoGuide does.

    For ``Predictive(posterior.model, guide=posterior.guide, num_samples=S)``, ``Importance`` or an ELBO.  One
    auxiliary site, ``_laplace_latent``, is the Gaussian in unconstrained space; the sites are transforms of
    it, Jacobian counted.  The arguments are not looked at, so it can be called with new inputs.  It holds
    tensors and transforms only, and can be pickled.
    """

    def __init__(self, state: LaplaceState) -> None:
        joint = state.problem.joint
        nodes = joint.trace(state.u, state.theta).nodes
        self.latents, self.dtype = joint.latents, joint.dtype
        self.frames = {n: _plates(nodes[n]) for n in self.latents.names}
        self.event_dims = {n: nodes[n]["fn"].event_dim for n in self.latents.names}
        self.u, self.active = state.u, state.problem.active
        self.scale = _scale(state.precision, self.active)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """One draw of every integrated site."""
        latent = pyro.sample("_laplace_latent", self._gaussian(), infer={"is_auxiliary": True})
        batch = latent.shape[:-1]  # of plates around the guide, such as vectorised particles
        u = self.u.expand(*batch, -1).clone()
        u[..., self.active] = latent
        u = u.to(self.dtype)
        plates = {name: pyro.plate(name, size, dim=dim) for name, size, dim in self._every_plate()}
        return {p.name: self._site(p, u[..., self.latents.slices[p.name]], plates) for p in self.latents}

    def _gaussian(self) -> Any:
        """The approximation over the coordinates that are not pruned."""
        loc = self.u[self.active]
        if self.scale.dim() == 2:
            return dist.MultivariateNormal(loc, scale_tril=self.scale)
        return dist.Normal(loc, self.scale).to_event(1)

    def _every_plate(self) -> list[Frame]:
        return sorted({frame for frames in self.frames.values() for frame in frames})

    def _site(self, part: Coordinate, flat: Tensor, plates: dict[str, Any]) -> Tensor:
        """Emit one site, its density that of the transformed Gaussian."""
        event_dim = self.event_dims[part.name]
        before = flat.reshape(_shape(part, flat.shape[:-1], event_dim))
        value = part.transform(before)
        log_density = part.transform.inv.log_abs_det_jacobian(value, before)
        log_density = sum_rightmost(log_density, log_density.dim() - value.dim() + event_dim)
        if poutine.get_mask() is False:  # nobody asks for densities, Predictive for one
            log_density = torch.zeros_like(log_density)
        delta = dist.Delta(value, log_density=log_density, event_dim=event_dim)
        with ExitStack() as stack:
            for name, _, _ in self.frames[part.name]:
                stack.enter_context(plates[name])
            return pyro.sample(part.name, delta)


def _plates(node: Any) -> tuple[Frame, ...]:
    return tuple((f.name, f.size, f.dim) for f in node["cond_indep_stack"] if f.vectorized)


def _scale(precision: Precision, active: Tensor) -> Tensor:
    """Lower Cholesky factor of the covariance ``(A, A)``, or standard deviations ``(A,)``."""
    if isinstance(precision, LatentPrecision):  # its covariance may be too close to singular
        return precision.scale_tril
    adjoint = precision.adjoint[0]
    if adjoint.dim() == 1:
        return adjoint[active].sqrt()
    return torch.linalg.cholesky(adjoint[active][:, active])


def _shape(part: Coordinate, batch: torch.Size, event_dim: int) -> torch.Size:
    """Unconstrained shape with the dims of surrounding plates to the left of the site's own."""
    event_dim = event_dim + len(part.unconstrained_shape) - len(part.shape)
    return torch.broadcast_shapes(part.unconstrained_shape, batch + (1,) * event_dim)
