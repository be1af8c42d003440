"""A Laplace posterior where Pyro expects a guide."""

from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from pyro_evidence.laplace import LaplaceState


class LaplaceGuide:
    """A callable with the model's arguments that samples every integrated site, as an AutoGuide does.

    For ``Predictive(posterior.model, guide=posterior.guide, num_samples=S)``, ``Importance`` or an ELBO.  One auxiliary
    site, ``_laplace_latent``, is the Gaussian in unconstrained space; the sites are transforms of it, Jacobian counted.
    The arguments are not looked at, so it can be called with new inputs.
    """

    def __init__(self, state: LaplaceState) -> None:
        joint = state.problem.joint
        self.latents = joint.latents
        nodes = joint.trace(state.u, state.theta).nodes
        self.frames = {n: [(f.name, f.size, f.dim) for f in _plates(nodes[n])] for n in self.latents.names}
        self.event_dims = {n: nodes[n]["fn"].event_dim for n in self.latents.names}
        self.u, self.active, self.dtype = state.u, state.problem.active, joint.dtype
        covariance = torch.diag_embed(state.precision.variance[0]) if state.precision.adjoint.dim() == 2 else state.precision.adjoint[0]
        self.scale_tril = torch.linalg.cholesky(covariance[self.active][:, self.active])

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """One draw of every integrated site."""
        normal = dist.MultivariateNormal(self.u[self.active], scale_tril=self.scale_tril)
        latent = pyro.sample("_laplace_latent", normal, infer={"is_auxiliary": True})
        parts = self.latents.unconstrained(self.u.masked_scatter(self.active, latent).to(self.dtype))
        with ExitStack() as stack:
            plates = self._plates(stack)
            return {p.name: self._site(p.name, p.transform, parts[p.name], plates) for p in self.latents}

    def _plates(self, stack: ExitStack) -> dict[str, Any]:
        """The model's plates around latent sites, made anew."""
        every = {frame for frames in self.frames.values() for frame in frames}
        return {name: pyro.plate(name, size, dim=dim) for name, size, dim in sorted(every)}

    def _site(self, name: str, transform: Any, unconstrained: Tensor, plates: dict[str, Any]) -> Tensor:
        value = transform(unconstrained)
        log_density = transform.inv.log_abs_det_jacobian(value, unconstrained)
        event_dim = self.event_dims[name]
        extra = log_density.dim() - (value.dim() - event_dim)
        log_density = log_density.sum(tuple(range(-extra, 0))) if extra > 0 else log_density
        if poutine.get_mask() is False:
            log_density = torch.zeros_like(log_density)
        with ExitStack() as inner:
            for frame in self.frames[name]:
                inner.enter_context(plates[frame[0]])
            delta = dist.Delta(value, log_density=log_density, event_dim=event_dim)
            return torch.as_tensor(pyro.sample(name, delta))


def _plates(node: Any) -> list[Any]:
    return [f for f in node["cond_indep_stack"] if f.vectorized]
