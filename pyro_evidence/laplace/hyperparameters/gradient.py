"""Exact derivatives of Laplace's log evidence in the hyperparameters."""

from dataclasses import dataclass

from torch import Tensor

from pyro_evidence.curvature.choices import exact_hessian
from pyro_evidence.curvature.dense import factorise
from pyro_evidence.curvature.gaussian_process import LatentPrecision
from pyro_evidence.laplace.approximation import LaplaceState, Problem
from pyro_evidence.laplace.blocks import marginal as blocks
from pyro_evidence.numerics.derivatives import Orders, pullback, pullbacks
from pyro_evidence.structure.density import AutogradDensity, LinearDensity


@dataclass(frozen=True)
class Slope:
    """First derivatives in the unconstrained hyperparameters, nats, shape ``(T,)``."""

    total: Tensor  # of log evidence + log hyperprior, the mode's dependence included
    joint: Tensor  # of the log joint at the fixed mode


def slope(state: LaplaceState) -> Slope:
    r"""Exact derivatives of the Laplace log evidence.

    .. math:: \frac{d}{d\theta}\Bigl[\log p(D, \hat w) - \tfrac12\log|A|\Bigr] =
        \partial_\theta \log p - \tfrac12 \partial_\theta \log|A|
        - \tfrac12 (\partial_w \log|A|)\, A^{-1} \partial_w \partial_\theta \log p

    The last term is the implicit function theorem at the mode; with a curvature that is not the exact Hessian its
    ``A`` is the exact one all the same.
    """
    theta = state.theta.clone().requires_grad_()
    prior = pullback(state.problem.joint.log_hyperprior(theta), theta)
    total, joint = evidence_slope(state)
    return Slope((total + prior).double(), joint.double())


def evidence_slope(state: LaplaceState) -> tuple[Tensor, Tensor]:
    """Derivatives of the log evidence alone, and of the log joint at the fixed mode."""
    if state.place is not None and state.problem.marginal is not None:
        return blocks.slope(state.problem.marginal, state.place, state.theta)
    if state.problem.latent is not None:
        assert isinstance(state.precision, LatentPrecision)
        return state.problem.latent.slope(state.precision, state.theta)
    if state.problem.factors is not None:
        return state.problem.factors.slope(state.precision, state.u, state.theta)
    theta, u = state.theta.clone().requires_grad_(), state.u.unsqueeze(0).requires_grad_()
    found = _orders(state.problem, u, theta)
    log_joint = found.log_joint.sum()
    half_log_det = 0.5 * (state.precision.adjoint.detach() * found.precision).sum() - state.problem.eliminated(u, theta)
    by_u, by_theta = pullbacks(half_log_det, u, theta)
    moved = _solve(state, by_u).detach()
    return pullback(log_joint - (found.gradient * moved).sum(), theta) - by_theta, pullback(log_joint, theta)


def _orders(problem: Problem, u: Tensor, theta: Tensor) -> Orders:
    """The log joint, its gradient and the curvature that was asked for, all to be differentiated."""
    density, curvature = problem.density, problem.curvature
    if curvature is exact_hessian and isinstance(density, AutogradDensity | LinearDensity):
        return density.orders(u, theta)
    log_joint = density.log_joint(u, theta)
    return Orders(log_joint, pullback(log_joint.sum(), u, create_graph=True), curvature(density, u, theta))


def _solve(state: LaplaceState, b: Tensor) -> Tensor:
    """``A^-1 b`` with the exact Hessian."""
    if state.problem.curvature is exact_hessian:
        return state.precision.solve(b)
    A = exact_hessian(state.problem.density, state.u.unsqueeze(0), state.theta)
    return factorise(A, state.problem.joint.latents.label).solve(b)
