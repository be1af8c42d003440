"""The marginalised and inner sites in one vector, as NUTS would have them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import DENSE_SEARCH, LaplaceState, Problem
from pyro_evidence.nested.inner import ConditionalModes
from pyro_evidence.nested.integration import Integral, OuterMode
from pyro_evidence.nested.quantile_map import Calibrated
from pyro_evidence.numerics.batched import BATCH_NUMBERS
from pyro_evidence.precision.dense import Dense, Precision, precision_tril
from pyro_evidence.program.log_joint import LogJoint


@dataclass(frozen=True, eq=False)
class IndexMap:
    """Where the coordinates of marginalised and inner sites stand in the vector of all latents."""

    marginalised: Tensor  # (d,)
    inner: Tensor  # (D - d,)

    def whole(self, phi: Tensor, u: Tensor) -> Tensor:
        """Outer ``(..., d)`` and inner ``(..., D - d)`` coordinates in one vector ``(..., D)``."""
        found = u.new_empty(*u.shape[:-1], len(self.marginalised) + len(self.inner))
        found[..., self.marginalised], found[..., self.inner] = phi.to(u), u
        return found


def index_map(full: LogJoint, joint: LogJoint) -> IndexMap:
    """The places in ``full``, whose latents are the latents of ``joint`` and some of its hyperparameters."""
    label = torch.arange(full.latents.size, device=full.device)
    marginalised = [label[full.latents.slices[p.name]] for p in joint.hypers if p.name in full.latents.slices]
    inner = [label[full.latents.slices[name]] for name in joint.latents.names]
    return IndexMap(torch.cat(marginalised), torch.cat(inner))


def whole_state(full: Problem, found: OuterMode, log_evidence: Tensor) -> LaplaceState:
    """The mode of the marginalised sites with the inner mode given it, a Gaussian there, the integrated evidence."""
    joint, place = full.joint, index_map(full.joint, found.state.problem.joint)
    u, theta = whole_place(joint, found.state)
    with torch.no_grad():
        log_joint = full.structure.density.log_joint(u.unsqueeze(0), theta)[0]
    log_hyperprior = joint.log_hyperprior(theta).detach()
    numbers = (log_joint, joint_precision(found, place), 0.0, log_evidence, log_hyperprior)
    return LaplaceState(full, theta, u, *numbers, left_saddle=found.state.left_saddle)


def whole_place(full: LogJoint, state: LaplaceState) -> tuple[Tensor, Tensor]:
    """All latents ``(D,)`` and the other hyperparameters ``(T,)`` where the marginalised sites are hyperparameters."""
    joint = state.problem.joint
    parts = joint.hypers.unconstrained(state.theta)
    outside = [parts[p.name].reshape(-1) for p in joint.hypers if p.name in full.latents.slices]
    u = index_map(full, joint).whole(torch.cat(outside), state.u)
    return u, torch.cat([state.theta[:0], *(parts[name].reshape(-1) for name in full.hypers.names)])


def joint_precision(found: OuterMode, place: IndexMap) -> Precision:
    """The precision over marginalised and inner sites together: the inner one about a mode that follows the others."""
    num = len(place.marginalised) + len(place.inner)
    if num > DENSE_SEARCH:
        return NestedPrecision(found, place)
    tril = precision_tril(found.state.precision, len(place.inner))
    inside = tril @ tril.mT
    beside = -inside @ found.follows
    A = inside.new_empty(num, num)
    A[place.inner[:, None], place.inner], A[place.inner[:, None], place.marginalised] = inside, beside
    A[place.marginalised[:, None], place.inner] = beside.mT
    A[place.marginalised[:, None], place.marginalised] = found.precision - found.follows.mT @ beside
    return Dense(torch.linalg.cholesky(A).unsqueeze(0))


@dataclass(frozen=True, eq=False)
class NestedPrecision(Precision):
    """The same by its parts, the inner precision of whatever kind it is."""

    found: OuterMode
    places: IndexMap

    @property
    def _marginalised_tril(self) -> Tensor:
        return torch.linalg.cholesky(self.found.precision)

    @property
    def log_det(self) -> Tensor:
        """``log |A|``."""
        return self.found.state.precision.log_det + self.found.precision.logdet()

    @property
    def variance(self) -> Tensor:
        """Diagonal of ``A^-1``."""
        rows = torch.linalg.solve_triangular(self._marginalised_tril, self.found.follows.mT, upper=False)
        marginalised = torch.cholesky_inverse(self._marginalised_tril).diagonal()
        inner = self.found.state.precision.variance[0] + rows.square().sum(0)
        return self.places.whole(marginalised, inner).unsqueeze(0)

    @property
    def log_det_gradient(self) -> Tensor:
        """``A^-1``, dense."""
        size = len(self.places.marginalised) + len(self.places.inner)
        rows = self.unwhiten(torch.eye(size, dtype=torch.float64, device=self.places.marginalised.device))
        return (rows.mT @ rows).unsqueeze(0)

    def solve(self, b: Tensor) -> Tensor:
        """``A^-1 b`` for rows ``(R, D)``."""
        marginalised, inner = b[..., self.places.marginalised], b[..., self.places.inner]
        phi = torch.cholesky_solve((marginalised + inner @ self.found.follows).mT, self._marginalised_tril).mT
        return self.places.whole(phi, self.found.state.precision.solve(inner) + phi @ self.found.follows.mT)

    def unwhiten(self, white: Tensor) -> Tensor:
        """Outer noise, and inner noise about where the mode follows it."""
        marginalised, inner = white[:, self.places.marginalised], white[:, self.places.inner]
        phi = torch.linalg.solve_triangular(self._marginalised_tril.mT, marginalised.mT, upper=True).mT
        return self.places.whole(phi, self.found.state.precision.unwhiten(inner) + phi @ self.found.follows.mT)

    def whiten(self, rows: Tensor) -> Tensor:
        """The white noise that :meth:`unwhiten` made ``rows`` of."""
        phi, u = rows[:, self.places.marginalised], rows[:, self.places.inner]
        inner = self.found.state.precision.whiten(u - phi @ self.found.follows.mT)
        return self.places.whole(phi @ self._marginalised_tril, inner)


@dataclass(frozen=True, eq=False)
class Proposal(Calibrated):
    """The posterior over all latents: draws and their density, as importance sampling asks for them."""

    integral: Integral
    places: IndexMap

    @property
    def loc(self) -> Tensor:
        """Its mode, ``(1, D)``."""
        found = self.integral.outer_mode
        return self.places.whole(found.centre, found.state.u).unsqueeze(0)

    def _drawn(self, white: Tensor) -> tuple[Tensor, Tensor]:
        u, log_density = zip(*map(self._drawn_together, self._parts(white)), strict=True)
        return torch.cat(u), torch.cat(log_density)

    def _log_prob(self, u: Tensor) -> Tensor:
        return torch.cat([*map(self._log_prob_together, self._parts(u))])

    def _parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Few rows at a time where draws follow from nodes: memory for factors is then not taken anew each time."""
        each = 1 if self.integral.known is None else self.integral.known.packed.shape[-1]
        return rows.split(max(1, BATCH_NUMBERS // each))

    def _drawn_together(self, white: Tensor) -> tuple[Tensor, Tensor]:
        """Draws from white noise, and their log density, nats.

        Marginalised sites are drawn from their continuous density, inner ones from Laplace's approximation at each.
        """
        integral = self.integral
        z = integral.density.unwhiten(white[:, self.places.marginalised].double())
        inner, noise = integral.inner(z), white[:, self.places.inner].double()
        skewed, log_growth = integral.skewness_correction.forward(z, noise)
        u = self.places.whole(integral.standardisation.forward(z), inner.u + inner.precision.unwhiten(skewed))
        return u, self._log_density(z, inner, noise) - log_growth

    def _log_prob_together(self, u: Tensor) -> Tensor:
        z = self.integral.standardisation.inverse(u[:, self.places.marginalised].double())
        inner, skewness = self.integral.inner(z), self.integral.skewness_correction
        noise = skewness.inverse(z, inner.precision.whiten(u[:, self.places.inner].double() - inner.u))
        return self._log_density(z, inner, noise) - skewness.forward(z, noise)[1]

    def _log_density(self, z: Tensor, inner: ConditionalModes, noise: Tensor) -> Tensor:
        log_marginalised = self.integral.density.log_prob(z) - self.integral.standardisation.log_slope(z)
        log_inner = 0.5 * inner.precision.log_det - 0.5 * (noise.square() + math.log(math.tau)).sum(-1)
        return torch.where(inner.log_density == -torch.inf, torch.inf, log_marginalised + log_inner)
