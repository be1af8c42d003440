"""A Laplace posterior where Pyro expects a guide."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from pyro.distributions.util import sum_rightmost
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.fitting.process_state import own_random_numbers, without_validation
from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.laplace.tour import NormalMixture
from pyro_evidence.nested.joint_posterior import Proposal
from pyro_evidence.nested.skewness import SkewedNormal
from pyro_evidence.numerics.coordinates import Coordinates
from pyro_evidence.numerics.derivatives import Last
from pyro_evidence.precision.dense import Dense, Diagonal
from pyro_evidence.precision.gaussian_process import LatentPrecision
from pyro_evidence.program.checks import Arguments, same_arguments
from pyro_evidence.program.log_joint import Model
from pyro_evidence.program.simulate import NewLevels

Frame = tuple[str, int, int]  # a plate's name, size and dim


class LaplaceGuide:
    """A callable with the model's arguments that samples every integrated site, as an AutoGuide does.

    For ``Predictive(posterior.model, guide=posterior.guide, num_samples=S)``, ``Importance`` or an ELBO.  One
    auxiliary site, ``_laplace_latent``, is the Gaussian in unconstrained space; the sites are transforms of
    it, Jacobian counted.  It can be called with new inputs: where they ask for plates of other sizes than the fit's,
    levels that the fit has not seen are drawn from their prior, and densities are not counted.  It can be pickled;
    the copy holds tensors and transforms only, and knows the fit's plates alone.

    :param state: the Gaussian in unconstrained space.
    :param gaussian: a distribution over the coordinates that are not pruned in its place.
    """

    def __init__(self, state: LaplaceState, gaussian: Any = None) -> None:
        joint = state.problem.joint
        nodes = joint.trace(state.u, state.theta).nodes
        self.latents: Coordinates = joint.latents
        self.dtype: torch.dtype = joint.dtype
        self.frames: dict[str, tuple[Frame, ...]] = {n: frames_of(nodes[n]) for n in self.latents.names}
        self.event_dims: dict[str, int] = {n: nodes[n]["fn"].event_dim for n in self.latents.names}
        self.u: Tensor = state.u
        self.active: Tensor = state.problem.active
        self.gaussian: Any = _gaussian(state) if gaussian is None else gaussian
        self._model: Model | None = joint.substituted(state.theta)
        self._asked: Last[Arguments, bool] = Last()  # whether arguments ask for other sizes

    def __getstate__(self) -> dict[str, Any]:
        """Without the model, which may be no file's matter."""
        return vars(self) | {"_model": None}

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """One draw of every integrated site."""
        latent = pyro.sample("_laplace_latent", self.gaussian, infer={"is_auxiliary": True})
        batch = latent.shape[:-1]  # of plates around the guide, such as vectorised particles
        u = self.u.expand(*batch, -1).clone()
        u[..., self.active] = latent
        u = u.to(self.dtype)
        points = {}
        given, single = (args, kwargs), u.dim() == 1 and bool(args or kwargs)
        if self._model is not None and single and self._asked.found(given, same_arguments, self._has_grown):
            values = self.latents.constrained(u)
            with poutine.block(), without_validation(), NewLevels({p.name: p.shape for p in self.latents}):
                model = poutine.condition(self._model, data=dict(values))
                nodes: Any = poutine.trace(model).get_trace(*args, **kwargs).nodes
            points = {n: dist.Delta(nodes[n]["value"], event_dim=nodes[n]["fn"].event_dim) for n in values}
            return emitted(points, {n: frames_of(nodes[n]) for n in values})
        for part in self.latents:
            event_dim = self.event_dims[part.name]
            # dims of surrounding plates stand to the left of the site's own
            num_dims = event_dim + len(part.unconstrained_shape) - len(part.shape)
            shape = torch.broadcast_shapes(part.unconstrained_shape, batch + (1,) * num_dims)
            before = u[..., self.latents.slices[part.name]].reshape(shape)
            value = part.transform(before)
            log_density = part.transform.inv.log_abs_det_jacobian(value, before)
            log_density = sum_rightmost(log_density, log_density.dim() - value.dim() + event_dim)
            if poutine.get_mask() is False:  # nobody asks for densities, Predictive for one
                log_density = torch.zeros_like(log_density)
            points[part.name] = dist.Delta(value, log_density=log_density, event_dim=event_dim)
        return emitted(points, self.frames)

    def _has_grown(self, given: Arguments) -> bool:
        """Whether these arguments ask for plates of other sizes."""
        try:
            with own_random_numbers(), torch.no_grad(), poutine.block(), without_validation():
                nodes: Any = poutine.trace(self._model).get_trace(*given[0], **given[1]).nodes
            found = [(torch.as_tensor(nodes[p.name]["value"]), p.shape) for p in self.latents if p.name in nodes]
            return any(value.shape != shape for value, shape in found)
        except Exception:  # the guide may be called with what the model does not take
            return False


def emitted(values: Mapping[str, TorchDistribution], frames: Mapping[str, tuple[Frame, ...]]) -> dict[str, Tensor]:
    """Every site sampled from its point distribution, inside its plates."""
    every = sorted({frame for name in values for frame in frames[name]})
    plates = {frame: pyro.plate(frame[0], frame[1], dim=frame[2]) for frame in every}
    found = {}
    for name, point in values.items():
        with ExitStack() as stack:
            for frame in frames[name]:
                stack.enter_context(plates[frame])
            found[name] = pyro.sample(name, point)
    return found


def frames_of(node: Any) -> tuple[Frame, ...]:
    """The plates around a site."""
    return tuple((f.name, f.size, f.dim) for f in node["cond_indep_stack"] if f.vectorized)


def _gaussian(state: LaplaceState) -> Any:
    """The approximation over the coordinates that are not pruned."""
    precision, active = state.precision, state.problem.active
    loc = state.u[active]
    if not len(loc):  # all are pruned
        return dist.Normal(loc, 1.0).to_event(1)
    if isinstance(precision, LatentPrecision):  # its covariance may be too close to singular
        return dist.MultivariateNormal(loc, scale_tril=precision.scale_tril)
    if isinstance(precision, Dense):
        scale_tril = torch.linalg.cholesky(precision.log_det_gradient[0][active][:, active])
        return dist.MultivariateNormal(loc, scale_tril=scale_tril)
    if isinstance(precision, Diagonal):
        return dist.Normal(loc, precision.variance[0][active].sqrt()).to_event(1)
    return CoordinateDistribution(NormalMixture(loc.new_zeros(1), loc.unsqueeze(0), (precision,), active))


SCALAR = torch.Size()


class CoordinateDistribution(TorchDistribution):
    """A density over unconstrained coordinates as a distribution of Pyro's: what importance sampling draws from.

    Of normals by their precisions, of whatever kind, over the coordinates that are not pruned.  Or of marginalised
    sites by their continuous density and inner ones by Laplace's approximation given them: inner modes are solved anew
    at each draw, on the data of the fit.

    :param density: makes draws of white rows, and knows their log density.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.real_vector
    has_rsample = False

    def __init__(self, density: NormalMixture | Proposal | SkewedNormal, batch_shape: torch.Size = SCALAR) -> None:
        self.density = density
        super().__init__(batch_shape, density.loc.shape[1:], validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "CoordinateDistribution":
        """A copy for every cell of a batch."""
        return CoordinateDistribution(self.density, torch.Size(batch_shape))

    def sample(self, sample_shape: Any = SCALAR) -> Tensor:
        """Draws of the coordinates, from torch's generator."""
        shape, loc = self._extended_shape(torch.Size(sample_shape)), self.density.loc
        white = torch.randn(shape, dtype=loc.dtype).to(loc.device)
        with poutine.block():  # the runs inside are nobody else's
            return self.density.drawn(white.reshape(-1, shape[-1]))[0].reshape(shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of coordinates ``(..., d)``, nats."""
        with poutine.block():
            return self.density.log_prob(value.reshape(-1, value.shape[-1])).reshape(value.shape[:-1])
