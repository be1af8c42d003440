"""White coordinates of a posterior and the exact volumes of what they stand for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from pyro_evidence.fitting.process_state import own_warnings
from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.nested.joint_posterior import IndexMap, Proposal
from pyro_evidence.numerics.linear_predictor import CLOSE
from pyro_evidence.numerics.quadrature.densities import Interpolated, spline, straight_beyond
from pyro_evidence.numerics.quadrature.reparameterise import Standardisation
from pyro_evidence.numerics.recorded import Made, Picked, listed, record
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.precision.dense import precision_tril
from pyro_evidence.structure.factors import SMALL

NEGLIGIBLE = -25.0  # log weight of a node that says nothing about how inner sites follow
NEGLIGIBLE_NODE = -14.0  # the same of a node on one axis
SATURATED = 3.0  # standard deviations beyond which a polynomial is not to be trusted


Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class AffineWhitening:
    """``mode + A^-1/2 z``, by the posterior's own precision of whatever kind; pruned coordinates stay."""

    state: LaplaceState

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Unconstrained coordinates ``(D,)``, and the log by which volumes grow ``()``, a constant."""
        white = (z * self.state.problem.active).unsqueeze(0)
        return (self.state.u + self.state.precision.unwhiten(white))[0], z.new_zeros(())

    def inverse(self, u: Tensor) -> Tensor:
        """The reverse of :meth:`forward`."""
        return self.state.precision.whiten((u - self.state.u).unsqueeze(0))[0] * self.state.problem.active


@dataclass(frozen=True, eq=False)
class ConditionalWhitening:
    """Marginalised coordinates standardised on their own, inner ones white by the precision at the marginalised value.

    Inner modes and factors are smooth interpolants of those at the nodes, so that the transform and its volume are
    exact for one another, however rough the interpolation is.

    :ivar basis: of the interpolants.
    :ivar mode: ``(B, D)``, ``log_diagonal`` ``(B, D)`` and ``unit`` ``(B, D, D)``, the factor over its diagonal.
    """

    standardisation: Standardisation
    places: IndexMap
    basis: Function
    mode: Tensor
    log_diagonal: Tensor
    unit: Tensor

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """``u = mode(z) + L(z)^-T z``."""
        marginalised, mode, log_diagonal, tril = self._at(z[self.places.marginalised])
        away = torch.linalg.solve_triangular(tril.mT, z[self.places.inner].unsqueeze(-1), upper=True)[:, 0]
        u = self.places.whole(marginalised, mode + away)
        return u, self.standardisation.log_slope(z[self.places.marginalised]) - log_diagonal.sum()

    def _at(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weights = self.basis(z)
        log_diagonal = weights @ self.log_diagonal
        tril = torch.tensordot(weights, self.unit, 1) * log_diagonal.exp()
        return self.standardisation.forward(z), weights @ self.mode, log_diagonal, tril

    def inverse(self, u: Tensor) -> Tensor:
        """Outer ones by the standardisation, inner ones by the factor there."""
        z = self.standardisation.inverse(u[self.places.marginalised].unsqueeze(0))[0]
        _, mode, _, tril = self._at(z)
        return self.places.whole(z, tril.mT @ (u[self.places.inner] - mode))


Whitening = AffineWhitening | ConditionalWhitening


def splines(nodes: Tensor, z: Tensor) -> Tensor:
    """Weights at ``z`` ``(d,)`` of the values at a product of nodes, ``(k^d,)``, the last axis fastest.

    Natural cubic splines on each axis, straight lines beyond.

    :param nodes: ascending, ``(k,)``.
    """
    found = torch.ones_like(z[:1])
    for axis in straight_beyond(nodes, z, spline):  # (k,)
        found = (found.unsqueeze(-1) * axis).flatten()
    return found


def polynomials(z: Tensor) -> Tensor:
    """One, saturated coordinates ``(d,)``, their products and their third powers, ``(B,)``."""
    near = SATURATED * (z / SATURATED).tanh()
    first, second = torch.triu_indices(len(z), len(z))
    return torch.cat([torch.ones_like(near[:1]), near, near[first] * near[second], near**3])


def round_coordinates(posterior: LaplacePosterior) -> Whitening:
    """Coordinates in which ``posterior`` is nearly a standard normal density.

    They follow the marginalised sites, but where inner factors are not dense, or nodes too few.
    """
    proposal, inside = posterior.proposal, posterior._inside.problem
    dense = inside.nodes == 1 and inside.joint.latents.size <= SMALL
    if not isinstance(proposal, Proposal) or not dense:
        return AffineWhitening(posterior.state)
    integral, nodes, density = proposal.integral, proposal.integral.nodes, proposal.integral.density
    known, fit = torch.isfinite(nodes.log_density), None
    keep, basis = known & (integral.log_weights > NEGLIGIBLE), polynomials
    if isinstance(density, Interpolated) and len(known) == len(density.rule.nodes) ** integral.standardisation.num_dims:
        axis = density.rule.log_weights > NEGLIGIBLE_NODE
        product = torch.cartesian_prod(*[axis] * integral.standardisation.num_dims).reshape(len(known), -1).all(-1)
        if bool(known[product].all()):
            keep, basis = product, partial(splines, density.rule.nodes[axis, 0])
    if basis is polynomials:
        fit = _least_squares(integral.standardisation.inverse(integral.phi[keep]), integral.log_weights[keep])
        if fit is None:
            return AffineWhitening(posterior.state)
    rows = keep.nonzero().flatten().tolist()
    tril = torch.stack([precision_tril(nodes.precision.row(row), nodes.u.shape[-1]) for row in rows])
    diagonal = tril.diagonal(dim1=-2, dim2=-1)
    values = (nodes.u[keep], diagonal.log(), tril / diagonal.unsqueeze(-2))
    parts = values if fit is None else tuple(torch.tensordot(fit, v, 1) for v in values)
    return ConditionalWhitening(integral.standardisation, proposal.places, basis, *parts)


def _least_squares(z: Tensor, log_weights: Tensor) -> Tensor | None:
    """Map to coefficients of :func:`polynomials` from values at nodes ``z`` ``(K, d)``, ``(B, K)``.

    Far nodes count less; None for too few nodes.
    """
    if not len(z) or len(z) < len(polynomials(z[0])):
        return None
    rows = torch.stack([polynomials(each) for each in z])
    weight = (0.25 * (log_weights - log_weights.max())).exp().unsqueeze(-1)
    return torch.linalg.pinv(weight * rows, rcond=1e-10) * weight.T


WithGradient = Callable[[Tensor], tuple[Tensor, Tensor]]
Listed = Callable[[Tensor], tuple[Tensor, ...]]  # value, gradient, and whether each factorisation failed
INFO = {  # operations that say by a number whether they have failed, and which of their results that is
    torch.ops.aten.linalg_cholesky_ex: 1,
    torch.ops.aten.linalg_inv_ex: 1,
    torch.ops.aten.linalg_lu_factor_ex: 2,
    torch.ops.aten._linalg_solve_ex: 3,
}


def with_gradient(f: Function) -> WithGradient:
    """Values ``()`` and gradients ``(D,)`` by autograd."""

    def found(z: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            value = f(z)
            return value.detach(), torch.autograd.grad(value, z)[0]

    return found


def fused(f: Function, places: Tensor) -> WithGradient:
    """Values and gradients by the tensor operations that one run makes, in the order in which it makes them.

    A run whose Python depends on numbers cannot be written down so, and stays as it is; and so does one whose list
    gives other values than ``f`` at any of ``places``.

    :param places: ``(S, D)``, at the first of which the run is made.
    """
    plain = with_gradient(f)
    try:
        with own_warnings("ignore"):
            listed = _listed(plain, places[0])
        pairs = [pair for z in places for pair in zip(listed(z)[:2], plain(z), strict=True)]
        same = all(torch.allclose(x, y, rtol=CLOSE, atol=CLOSE * (1.0 + float(y.abs().max()))) for x, y in pairs)
    except Exception:  # whatever it is that Python does here: the plain way is always right
        return plain

    def found(z: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            value, gradient, *infos = listed(z.detach())
        return plain(z) if any(bool(info.any()) for info in infos) else (value, gradient)  # as of a singular matrix

    return found if same else plain


def _listed(plain: WithGradient, place: Tensor) -> Listed:
    """The operations of one run, put together by torch's own interpreter, and the failures of its factorisations.

    Nothing in the run looks at these.
    """
    operations, results = record(plain, [place], in_order=True)

    def run(z: Tensor) -> tuple[Tensor, ...]:
        found, infos = dict[int, list[Tensor]](), list[Tensor]()

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Picked):
                return z[leaf.index]
            return found[id(leaf.operation)][leaf.number] if isinstance(leaf, Made) else leaf

        for operation in operations:
            args, kwargs = tree_unflatten([value(leaf) for leaf in operation.leaves], operation.form)
            found[id(operation)] = made = listed(operation.func(*args, **kwargs))
            infos += [made[i] for packet, i in INFO.items() if operation.func.overloadpacket is packet]
        return *map(value, results), *infos

    with torch.no_grad():
        return torch.jit.trace(run, (place.clone(),), check_trace=False)
