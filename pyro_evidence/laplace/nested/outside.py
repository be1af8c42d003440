"""Hyperparameters that are maximised around the integral over the outer sites."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState, Problem, laplace_state, slope
from pyro_evidence.laplace.nested.integration import PRODUCT_DIMS, Around, around
from pyro_evidence.numerics import lbfgs
from pyro_evidence.numerics.quadrature import nodes as quadrature
from pyro_evidence.numerics.quadrature.chart import chart
from pyro_evidence.numerics.quadrature.nodes import Rule

ROUNDS = 8
SETTLED = 1e-4  # a move of the hyperparameters, unconstrained, that counts as none
NUM_NODES = 5
ARRIVED = 1e-6  # nats
HIGHER = 1e-3  # nats above a mode at which a place leads to another
FLAT = 1e-6  # the largest derivative that counts as zero, nats


@dataclass(frozen=True)
class FixedNodes:
    """``log sum_k exp(constant_k + F(phi_k, psi))``: the integral as a function of the maximised ``psi``."""

    found: Around
    phi: Tensor  # (K, d)
    constant: Tensor  # (K,)
    inside: Tensor  # positions of psi in theta, (P,)

    def value_and_slope(self, psi: Tensor) -> tuple[Tensor, Tensor]:
        """Nats ``(1,)`` and their derivatives ``(1, P)``, exact for these nodes.

        :param psi: ``(1, P)``.
        """
        theta = self.found.theta(self.phi)
        theta[:, self.inside] = psi
        rows = [_value_and_slope(self.found.state.problem, t, self.found.state.u) for t in theta]
        log_terms = self.constant + torch.stack([value for value, _ in rows])
        slopes = torch.stack([each for _, each in rows])[:, self.inside]
        weights = log_terms.softmax(0).nan_to_num(0.0)
        return log_terms.logsumexp(0).unsqueeze(0), (weights @ slopes).unsqueeze(0)


def _value_and_slope(problem: Problem, theta: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Log evidence plus log hyperprior and its exact derivatives; minus infinity where there is no mode."""
    try:
        state = laplace_state(problem, theta, start)
        return theta.new_tensor(state.objective), slope(state).total
    except ArithmeticError:
        return theta.new_tensor(-torch.inf), torch.zeros_like(theta)


def maximised(state: LaplaceState, outer: Tensor) -> Around:
    """The outer mode at hyperparameters where the integral over the outer sites is highest.

    :param state: at the maximum over outer sites and hyperparameters together.
    :param outer: positions of the outer coordinates in ``theta``.
    """
    found = around(state, outer)
    inside = torch.tensor([i for i in range(len(state.theta)) if i not in outer.tolist()], device=outer.device)
    for _ in range(ROUNDS if len(inside) else 0):
        before = found.state.theta[inside]
        nodes = _nodes(found, inside)
        psi = lbfgs.ascend(nodes.value_and_slope, before.unsqueeze(0), tolerance=FLAT, num_steps=200)[0]
        theta = found.state.theta.clone()
        theta[inside] = psi
        found = around(_outer_mode(found, theta), outer)
        if float((psi - before).abs().max()) <= SETTLED:
            break
    return found


def _nodes(found: Around, inside: Tensor) -> FixedNodes:
    where = chart(found.centre, found.precision)
    rule = _rule(where.num_dims)
    z = rule.nodes.to(where.centre)
    constant = rule.log_weights.to(z) + where.log_slope(z) + 0.5 * z.square().sum(-1)
    return FixedNodes(found, where.forward(z), constant, inside)


def _rule(num_dims: int) -> Rule:
    """Nodes that are the same while the hyperparameters move; beyond eight dimensions the mode alone."""
    if num_dims <= PRODUCT_DIMS:
        return quadrature.product(quadrature.gauss_hermite(NUM_NODES), num_dims)
    if num_dims <= quadrature.LARGEST_DESIGN:
        return quadrature.central_composite(num_dims)
    return Rule(torch.zeros(1, num_dims, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))


def _outer_mode(found: Around, theta: Tensor) -> LaplaceState:
    """The outer mode at new hyperparameters, searched from the old one."""
    problem, outer = found.state.problem, found.outer

    def value_and_slope(phi: Tensor) -> tuple[Tensor, Tensor]:
        value, each = _value_and_slope(problem, theta.index_copy(0, outer, phi[0]), found.state.u)
        return value.unsqueeze(0), each[outer].unsqueeze(0)

    phi = lbfgs.ascend(value_and_slope, found.centre.unsqueeze(0), tolerance=FLAT, num_steps=100)[0]
    return laplace_state(problem, theta.index_copy(0, outer, phi), found.state.u)


def from_the_highest(found: Around) -> Around:
    """The outer mode to which the highest places along its axes lead; the same, polished, where it is the highest."""
    if not has_arrived(found):
        found = around(_outer_mode(found, found.state.theta), found.outer)
    for _ in range(ROUNDS):
        places = chart(found.centre, found.precision).probes()
        height = found.inner(torch.cat([found.centre.unsqueeze(0), places]), thorough=False).log_density
        best = int(height[1:].nan_to_num(nan=-torch.inf).argmax())
        if not bool(height[1 + best] > height[0] + HIGHER):
            break
        state = found.state
        begun = laplace_state(state.problem, state.theta.index_copy(0, found.outer, places[best]), state.u)
        found = around(_outer_mode(replace(found, state=begun), begun.theta), found.outer)
    return found


def has_arrived(found: Around) -> bool:
    """Whether a Newton step of the outer sites promises nothing that counts."""
    left = slope(found.state).total[found.outer]
    return float(left @ torch.linalg.solve(found.precision, left)) < ARRIVED
