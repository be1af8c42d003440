"""The outer and the inner sites in one vector, as NUTS would have them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState, Problem
from pyro_evidence.nested.inner import Inner, precision_tril
from pyro_evidence.nested.integration import Around, Integral
from pyro_evidence.precision.dense import Dense, Precision
from pyro_evidence.program.log_joint import LogJoint


@dataclass(frozen=True)
class Places:
    """Where the coordinates of outer and inner sites stand in the vector of all latents."""

    outer: Tensor  # (d,)
    inner: Tensor  # (D - d,)

    def whole(self, phi: Tensor, u: Tensor) -> Tensor:
        """Outer ``(..., d)`` and inner ``(..., D - d)`` coordinates in one vector ``(..., D)``."""
        found = u.new_empty(*u.shape[:-1], len(self.outer) + len(self.inner))
        found[..., self.outer], found[..., self.inner] = phi.to(u), u
        return found


def places(full: LogJoint, found: Around) -> Places:
    """The places in ``full``, whose latents are all of these sites."""
    joint = found.state.problem.joint
    label = torch.arange(full.latents.size, device=full.device)
    outer = [label[full.latents.slices[p.name]] for p in joint.hypers if p.name in full.latents.slices]
    inner = [label[full.latents.slices[name]] for name in joint.latents.names]
    return Places(torch.cat(outer), torch.cat(inner))


def hyperparameters(full: LogJoint, found: Around) -> Tensor:
    """The unconstrained hyperparameters of ``full``, which are those of the inner problem that are not outer."""
    parts = found.state.problem.joint.hypers.unconstrained(found.state.theta)
    flat = [parts[name].reshape(-1) for name in full.hypers.names]
    return torch.cat(flat) if flat else found.state.theta[:0]


def whole_state(full: Problem, integral: Integral) -> LaplaceState:
    """The outer mode with the inner mode given it, one Gaussian there over all sites, and the integrated evidence."""
    found, joint = integral.around, full.joint
    place, theta = places(joint, found), hyperparameters(joint, found)
    u = place.whole(found.centre, found.state.u)
    with torch.no_grad():
        log_joint = full.density.log_joint(u.unsqueeze(0), theta)[0]
    return LaplaceState(
        full,
        theta,
        u,
        log_joint,
        joined(found, place),
        0.0,
        integral.log_evidence,
        joint.log_hyperprior(theta).detach(),
        found.state.escaped,
    )


DENSE = 1000  # coordinates up to which the precision over all sites is a matrix


def joined(found: Around, place: Places) -> Precision:
    """The precision over outer and inner sites together."""
    if len(place.outer) + len(place.inner) <= DENSE:
        return Dense(_precision_tril(found, place).unsqueeze(0))
    return Joined(found, place)


@dataclass(frozen=True)
class Joined:
    """The same by its parts, the inner precision of whatever kind it is."""

    found: Around
    places: Places

    @property
    def _outer_tril(self) -> Tensor:
        return torch.linalg.cholesky(self.found.precision)

    @property
    def log_det(self) -> Tensor:
        """``log |A|``."""
        return self.found.state.precision.log_det + self.found.precision.logdet()

    @property
    def variance(self) -> Tensor:
        """Diagonal of ``A^-1``."""
        rows = torch.linalg.solve_triangular(self._outer_tril, self.found.follows.mT, upper=False)
        outer = torch.cholesky_inverse(self._outer_tril).diagonal()
        inner = self.found.state.precision.variance[0] + rows.square().sum(0)
        return self.places.whole(outer, inner).unsqueeze(0)

    @property
    def adjoint(self) -> Tensor:
        """``A^-1``, dense."""
        size = len(self.places.outer) + len(self.places.inner)
        rows = self.colour(torch.eye(size, dtype=torch.float64, device=self.places.outer.device))
        return (rows.mT @ rows).unsqueeze(0)

    def solve(self, b: Tensor) -> Tensor:
        """``A^-1 b`` for rows ``(R, D)``."""
        outer, inner = b[..., self.places.outer], b[..., self.places.inner]
        phi = torch.cholesky_solve((outer + inner @ self.found.follows).mT, self._outer_tril).mT
        solved = torch.cat([self.found.state.precision.solve(row.unsqueeze(0)) for row in inner])
        return self.places.whole(phi, solved + phi @ self.found.follows.mT)

    def colour(self, white: Tensor) -> Tensor:
        """Outer noise, and inner noise about where the mode follows it."""
        outer, inner = white[:, self.places.outer], white[:, self.places.inner]
        phi = torch.linalg.solve_triangular(self._outer_tril.mT, outer.mT, upper=True).mT
        return self.places.whole(phi, self.found.state.precision.colour(inner) + phi @ self.found.follows.mT)

    def whiten(self, rows: Tensor) -> Tensor:
        """The white noise that :meth:`colour` made ``rows`` of."""
        phi, u = rows[:, self.places.outer], rows[:, self.places.inner]
        inner = self.found.state.precision.whiten(u - phi @ self.found.follows.mT)
        return self.places.whole(phi @ self._outer_tril, inner)

    def weakest(self, active: Tensor) -> Tensor:
        """By a few inverse power iterations from a fixed start."""
        v = (1.0 + 0.1 * torch.arange(len(active)).to(self.found.follows)).cos().unsqueeze(0) * active
        for _ in range(8):
            v = self.solve(v)
            v = v / v.norm(dim=-1, keepdim=True)
        return v * self.solve(v).norm(dim=-1, keepdim=True).sqrt()

    def row(self, index: int) -> "Joined":
        """This one, for there is no other."""
        return self


def _precision_tril(found: Around, place: Places) -> Tensor:
    """Cholesky factor of the joint precision: the inner one about a mode that follows the outer coordinates."""
    tril = precision_tril(found.state.precision, len(place.inner))
    inside = tril @ tril.mT
    beside = -inside @ found.follows
    A = inside.new_empty(len(place.outer) + len(place.inner), len(place.outer) + len(place.inner))
    A[place.inner[:, None], place.inner], A[place.inner[:, None], place.outer] = inside, beside
    A[place.outer[:, None], place.inner] = beside.mT
    A[place.outer[:, None], place.outer] = found.precision - found.follows.mT @ beside
    return torch.linalg.cholesky(A)


@dataclass(frozen=True)
class Proposal:
    """The posterior over all latents as a proposal for importance sampling."""

    integral: Integral
    places: Places
    loc: Tensor  # (1, D) its mode

    def drawn(self, white: Tensor) -> tuple[Tensor, Tensor]:
        """Draws ``(S, D)`` from white rows, and their log density, nats, ``(S,)``."""
        found = drawn(self.integral, self.places, white)
        return found.u, found.log_density

    def log_prob(self, u: Tensor) -> Tensor:
        """Log density of rows ``(S, D)``, nats, ``(S,)``."""
        return log_density(self.integral, self.places, u)


@dataclass(frozen=True)
class Drawn:
    """Draws of all latents and the log density that they were drawn from, nats; plus infinity where that is unknown."""

    u: Tensor  # (S, D)
    log_density: Tensor  # (S,)


def drawn(integral: Integral, place: Places, white: Tensor) -> Drawn:
    """Outer sites from their continuous density, inner ones from Laplace's approximation solved anew at each.

    :param white: standard normal numbers, ``(S, D)``.
    """
    z = integral.density.colour(white[:, place.outer].double())
    phi = integral.chart.forward(z)
    inner, noise = integral.inner(z), white[:, place.inner].double()
    bent, log_growth = (noise, 0.0) if integral.bend is None else integral.bend.forward(z, noise)
    u = inner.u + inner.factors.colour(bent)
    return Drawn(place.whole(phi, u), _log_density(integral, z, inner, noise) - log_growth)


def log_density(integral: Integral, place: Places, u: Tensor) -> Tensor:
    """Log density of unconstrained coordinates ``(S, D)`` of all sites, nats, ``(S,)``."""
    phi = u[:, place.outer].double()
    z = integral.chart.inverse(phi)
    inner = integral.inner(z)
    noise = inner.factors.whiten(u[:, place.inner].double() - inner.u)
    if integral.bend is None:
        return _log_density(integral, z, inner, noise)
    noise = integral.bend.inverse(z, noise)
    return _log_density(integral, z, inner, noise) - integral.bend.forward(z, noise)[1]


def _log_density(integral: Integral, z: Tensor, inner: Inner, noise: Tensor) -> Tensor:
    log_outer = integral.density.log_prob(z) - integral.chart.log_slope(z)
    log_inner = 0.5 * inner.factors.log_det - 0.5 * (noise.square() + math.log(math.tau)).sum(-1)
    return torch.where(inner.log_density == -torch.inf, torch.inf, log_outer + log_inner)
