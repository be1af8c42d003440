"""The density of a multilayer perceptron by back-propagation: many rows at once, each with its own hyperparameters.

It satisfies :class:`pyro_evidence.precision.choices.Density` and must agree with autograd's density of the same model,
which :func:`pyro_evidence.structure.recognise.recognise` verifies before it is used.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.numerics import derivatives
from pyro_evidence.numerics.linalg import require_memory
from pyro_evidence.numerics.linear_predictor import CLOSE, Layout, curvature_graph, slope_and_curvature
from pyro_evidence.precision.dense import FLOAT
from pyro_evidence.structure.density import JointDensity, wants_graph

Activation = Callable[[Tensor], Tensor]  # elementwise
Layer = tuple[Tensor, Tensor]


def outputs(X: Tensor, layers: Sequence[Layer], activation: Activation) -> Tensor:
    """Activations of the last layer for inputs ``(N, D)``, shape ``(..., N, C)``."""
    hidden = X
    for W, b in layers[:-1]:
        hidden = activation(hidden @ W + b.unsqueeze(-2))
    W, b = layers[-1]
    return hidden @ W + b.unsqueeze(-2)


def is_odd(activation: Activation) -> bool:
    """Whether ``f(-x) = -f(x)``, at 33 points: then a hidden unit and its negative do the same."""
    x = torch.linspace(0.0, 4.0, 33, dtype=torch.float64)
    with torch.no_grad():
        ahead, behind = activation(x), activation(-x)
    return torch.allclose(ahead, -behind, rtol=CLOSE, atol=CLOSE)


def log_symmetries(num_units: int, odd: bool) -> float:
    r"""Log number of relabellings of a hidden layer, :math:`\log (2^H H!)` for an odd activation, else :math:`\log H!`.

    Bishop (1995), sec. 4.4; MacKay (1992), "A practical Bayesian framework for backpropagation networks".
    """
    return math.lgamma(num_units + 1.0) + (num_units * math.log(2.0) if odd else 0.0)


def log_stabiliser(before: Layer, after: Tensor, odd: bool, tolerance: float) -> float:
    """Log number of relabellings of one hidden layer that leave these very weights as they are.

    Units that are copies of each other (up to sign, for an odd activation) can be exchanged, and a unit of zero weights
    can be mirrored, without any change; copies of a mode are fewer by this factor.

    :param before: the layer that feeds the units, ``(I, H)`` and ``(H,)``.
    :param after: the weights that leave them, ``(H, O)``.
    :param tolerance: largest difference of two weights that are one, in units of the largest weight.
    """
    units = torch.cat([before[0].mT, before[1].unsqueeze(-1), after], -1)
    gap = tolerance * units.abs().amax().clamp(min=torch.finfo(units.dtype).tiny)  # > 0, so that zeros are equal
    if odd:  # each unit times the sign of its first weight that is not zero
        first = (units.abs() > gap).int().argmax(-1, keepdim=True)
        units = units * torch.where(units.gather(-1, first) < 0, -1.0, 1.0).to(units)
    different = ((units.unsqueeze(0) - units.unsqueeze(1)).abs() > gap).any(-1)
    copies = torch.bincount((~different).int().argmax(-1), minlength=len(units))
    zeros = int((units.abs() <= gap).all(-1).sum()) if odd else 0
    return float(torch.lgamma(copies + 1.0).sum()) + zeros * math.log(2.0)


def activation_derivatives(f: Activation, a: Tensor, order: int) -> list[Tensor]:
    """``f(a)`` of an elementwise function and its derivatives up to ``order``, with a graph where ``a`` has one."""
    with torch.enable_grad():
        x = a if a.requires_grad else a.detach().requires_grad_()
        found = [f(x)]
        for level in range(order):
            graph = a.requires_grad or level + 1 < order
            found.append(derivatives.pullback(found[-1].sum(), x, create_graph=graph))
    return found if a.requires_grad else [value.detach() for value in found]


@dataclass(frozen=True, eq=False)
class Passed:
    """A pass of the data through a network, with the activations' derivatives.

    :ivar hidden: what enters every layer, ``(R, N, I)`` each.
    :ivar slopes: of the activations before all layers but the first, ``(R, N, I)`` each.
    :ivar curvatures: their second derivatives, where they were asked for.
    """

    layers: Sequence[Layer]
    hidden: list[Tensor]
    slopes: list[Tensor]
    curvatures: list[Tensor]

    @property
    def outputs(self) -> Tensor:
        """Activations of the last layer, ``(R, N, C)``."""
        W, b = self.layers[-1]
        return self.hidden[-1] @ W + b.unsqueeze(-2)


def forward(X: Tensor, layers: Sequence[Layer], activation: Activation, order: int = 1) -> Passed:
    """A pass of inputs ``(N, D)`` that keeps the activations' derivatives up to ``order``, 1 or 2.

    :param layers: with one batch dim in front, ``(R, I, O)`` and ``(R, O)``.
    """
    hidden, slopes, curvatures = [X.expand(len(layers[0][0]), *X.shape)], [], []
    for W, b in layers[:-1]:
        value, first, *second = activation_derivatives(activation, hidden[-1] @ W + b.unsqueeze(-2), order)
        hidden.append(value)
        slopes.append(first)
        curvatures.extend(second)
    return Passed(layers, hidden, slopes, curvatures)


def back(passed: Passed, g: Tensor) -> list[Layer]:
    r"""Derivatives of :math:`\sum_{nc} g_{nc} \eta_{nc}` in every layer.  Bishop (2006), eq. 5.53 and 5.56.

    :param g: ``(R, N, C)``.
    """
    found, delta = [], g
    for level in reversed(range(len(passed.layers))):
        found.append((passed.hidden[level].mT @ delta, delta.sum(-2)))
        if level:
            delta = (delta @ passed.layers[level][0].mT) * passed.slopes[level - 1]
    return found[::-1]


def outputs_jacobian(passed: Passed) -> list[Layer]:
    """Derivatives of every datum's outputs in every layer, ``(R, N, C, I, O)`` and ``(R, N, C, O)``.

    Back-propagation with one delta per datum and output: the cost is that of writing the result down.  Bishop (2006),
    eq. 5.74.
    """
    layers, hidden = passed.layers, passed.hidden
    num_outputs = layers[-1][1].shape[-1]
    delta = torch.eye(num_outputs).to(hidden[0]).expand(*hidden[0].shape[:2], num_outputs, num_outputs)  # (R, N, C, O)
    found = []
    for level in reversed(range(len(layers))):
        found.append((hidden[level][:, :, None, :, None] * delta.unsqueeze(-2), delta))
        if level:
            back = delta.flatten(1, 2) @ layers[level][0].mT
            delta = back.unflatten(1, delta.shape[1:3]) * passed.slopes[level - 1].unsqueeze(-2)
    return found[::-1]


def second_derivatives(passed: Passed, g: Tensor) -> tuple[Tensor, Tensor]:
    r"""Second derivatives of :math:`\sum_{nc} g_{nc} \eta_{nc}` of a network with one hidden layer.

    :param passed: to second order.
    :param g: ``(R, N, C)``.
    :return: of each unit's incoming weights, bias last, ``(R, H, I + 1, I + 1)``; between them and its outgoing ones,
        ``(R, H, I + 1, C)``.  All others are zero.  Bishop (1995), sec. 4.10.
    """
    X, V = passed.hidden[0][0], passed.layers[1][0]
    inputs = torch.cat([X, torch.ones_like(X[:, :1])], -1)
    weighted = ((g @ V.mT) * passed.curvatures[0]).mT.unsqueeze(-1) * inputs  # (R, H, N, I + 1)
    across = torch.einsum("rnh,ni,rnc->rhic", passed.slopes[0], inputs, g)
    return weighted.mT @ inputs, across


LogLikelihood = Callable[[Tensor, Mapping[str, Tensor]], Tensor]  # eta (R, N, C), precisions (R, 1, ...) -> (R,)


@dataclass(frozen=True, eq=False)
class Wiring:
    """Data, layers and precisions of a network, under the names of the model's sites and params."""

    X: Tensor  # (N, D)
    activation: Activation
    layers: tuple[tuple[str, str], ...]  # names of the weights' and the biases' sites
    alpha: Mapping[str, str]  # site -> name of its precision
    noise: Mapping[str, str]  # what the likelihood calls a precision -> its name
    fixed: Mapping[str, Tensor]  # precisions that are not hyperparameters, by name
    log_likelihood: LogLikelihood


@dataclass(frozen=True, eq=False)
class NetworkDensity(JointDensity):
    """A network with Gaussian priors on its weights, and a likelihood that couples only the outputs of one datum."""

    wiring: Wiring
    _places: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    def _layers(self, u: Tensor) -> list[Layer]:
        values = self.joint.latents.unconstrained(u.to(self.joint.dtype))
        return [(values[w], values[b]) for w, b in self.wiring.layers]

    def _precisions(self, theta: Tensor) -> dict[str, Tensor]:
        """All precisions by name, each ``(R or 1,) + shape``."""
        rows = theta if theta.dim() == 2 else theta.unsqueeze(0)
        values = self.joint.hypers.constrained(rows.to(self.joint.dtype))
        fixed = dict(self.wiring.fixed) | {n: v for n, v in self.joint.held.items()}
        return {n: v.to(self.joint.dtype).unsqueeze(0) for n, v in fixed.items()} | values

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(D, w | hyperparameters)``, nats, shape ``(R,)``."""
        precisions = self._precisions(theta)
        eta = outputs(self.wiring.X, self._layers(u), self.wiring.activation)
        return self._log_prior(u, precisions) + self._log_likelihood(eta, precisions)

    def _log_prior(self, u: Tensor, precisions: Mapping[str, Tensor]) -> Tensor:
        total = u.new_zeros(len(u))
        for name, w in self.joint.latents.unconstrained(u.to(self.joint.dtype)).items():
            alpha = _spread(precisions[self.wiring.alpha[name]], w)
            half = 0.5 * ((alpha / math.tau).log() - alpha * w.square())
            total = total + half.flatten(1).sum(-1).double()
        return total

    def _log_likelihood(self, eta: Tensor, precisions: Mapping[str, Tensor]) -> Tensor:
        noise = {k: precisions[n] for k, n in self.wiring.noise.items()}
        shaped = {k: v.reshape(len(v), 1, -1) for k, v in noise.items()}
        with without_validation():
            return self.wiring.log_likelihood(eta, shaped).double()

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``, detached, by back-propagation."""
        u, theta = u.detach(), theta.detach()
        precisions, passed = self._precisions(theta), self._passed(u)
        value, g = derivatives.gradient(lambda e, _: self._log_likelihood(e, precisions), passed.outputs, theta)
        slope = self._flat(back(passed, g), 1)
        alpha = self._prior_precision(u, precisions)
        log_prior = 0.5 * ((alpha / math.tau).log() - alpha * u.square()).sum(-1)
        return value + log_prior, slope.double() - alpha * u

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian in ``u``, shape ``(R, D, D)``.

        :raises TooLarge: when it and the Jacobian of the outputs would not fit into memory.
        """
        if len(self.wiring.layers) == 2:
            return self._curvature(u, theta, bent=True)
        return -derivatives.hessian(self.log_joint, u, theta, create_graph=wants_graph(u, theta))

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        """Prior precision plus ``J' diag(-l'') J``, shape ``(R, D, D)``.

        :raises TooLarge: when it and the Jacobian of the outputs would not fit into memory.
        """
        return self._curvature(u, theta, bent=False)

    def _curvature(self, u: Tensor, theta: Tensor, *, bent: bool) -> Tensor:
        precisions, passed = self._precisions(theta), self._passed(u, order=2 if bent else 1)
        eta = passed.outputs
        needed = FLOAT * 3 * u.shape[-1] * (len(u) * u.shape[-1] + eta.numel())
        require_memory(needed, "the dense curvature and the Jacobian of the network's outputs", u.device)

        def log_likelihood(e: Tensor) -> Tensor:
            return self._log_likelihood(e, precisions)

        layout = Layout(eta.shape[1:], (1,))
        if wants_graph(u, theta):
            _, g, B = curvature_graph(log_likelihood, layout, eta)
        else:
            _, g, blocks = slope_and_curvature(log_likelihood, layout, eta)
            B = blocks()
        J = self._flat(outputs_jacobian(passed), 3)
        weighted = (B * J if B.shape[-1] == 1 else B @ J).flatten(1, 2)
        A = (J.flatten(1, 2).mT @ weighted).double() + self._prior_precision(u, precisions).diag_embed()
        if not bent:
            return A
        within, across = second_derivatives(passed, g)
        R, D = len(u), u.shape[-1]
        values = torch.cat([within.flatten(1), across.flatten(1), across.flatten(1)], -1).double()
        return A - values.new_zeros(R, D * D).index_add(1, self._scatter(passed.layers), values).reshape(R, D, D)

    def _passed(self, u: Tensor, X: Tensor | None = None, order: int = 1) -> Passed:
        """The data, or other inputs, on their way through the network."""
        inputs = self.wiring.X if X is None else X
        return forward(inputs, self._layers(u), self.wiring.activation, order)

    def at_inputs(self, X: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs ``(R, N, C)`` at other inputs, and their Jacobian ``(R, N, C, D)``, in float64."""
        passed = self._passed(u, X.to(self.wiring.X))
        return passed.outputs.double(), self._flat(outputs_jacobian(passed), 3).double()

    def _flat(self, found: list[Layer], batch: int) -> Tensor:
        """Numbers of each layer's weights, with ``batch`` axes in front, in flat order."""
        pairs = zip(self.wiring.layers, found, strict=True)
        parts = {n: x.flatten(batch) for names, xs in pairs for n, x in zip(names, xs, strict=True)}
        return torch.cat([parts[n] for n in self.joint.latents.names], -1)

    def _prior_precision(self, u: Tensor, precisions: Mapping[str, Tensor]) -> Tensor:
        """Prior precision of each coordinate, ``(R, D)``."""
        values = self.joint.latents.unconstrained(u)
        parts = [_spread(precisions[self.wiring.alpha[n]], w).expand_as(w).flatten(1) for n, w in values.items()]
        return torch.cat(parts, -1).double()

    def _scatter(self, layers: Sequence[Layer]) -> Tensor:
        """Where each number of :func:`second_derivatives`, the second ones twice, belongs in the flattened matrix."""
        if not self._places:
            slices, D = self.joint.latents.slices, self.joint.latents.size
            (W, b), (V, _) = self.wiring.layers
            position = torch.arange(D, device=layers[0][0].device)
            H = layers[0][1].shape[-1]
            into = torch.cat([position[slices[W]].reshape(-1, H), position[slices[b]].reshape(1, H)]).mT  # (H, I + 1)
            out = position[slices[V]].reshape(H, -1)
            within = into.unsqueeze(-1) * D + into.unsqueeze(-2)
            ahead = into.unsqueeze(-1) * D + out.unsqueeze(-2)
            back = into.unsqueeze(-1) + out.unsqueeze(-2) * D
            self._places.append(torch.cat([within.flatten(), ahead.flatten(), back.flatten()]))
        return self._places[0]


def _spread(alpha: Tensor, w: Tensor) -> Tensor:
    """A precision ``(R or 1,) + shape`` so that it broadcasts with ``(R,) + site shape``; rows come before columns."""
    return alpha.reshape(*alpha.shape, *(1,) * (w.dim() - alpha.dim()))
