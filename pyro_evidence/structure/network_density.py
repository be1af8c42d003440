"""The density of a multilayer perceptron by back-propagation: many rows at once, each with its own hyperparameters.

It satisfies :class:`pyro_evidence.curvature.choices.Density` and must agree with autograd's density of the same model,
which :func:`pyro_evidence.structure.recognise.recognise` verifies before it is used.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_evidence.numerics import derivatives
from pyro_evidence.numerics.linalg import require_memory
from pyro_evidence.numerics.linear_predictor import Layout, curvature_graph, slope_and_curvature
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure import network_layers
from pyro_evidence.structure.network_layers import Activation, Layer, Passed
from pyro_evidence.threads import without_validation

FLOAT = 8  # bytes
TANGENT: ContextVar[Mapping[str, Tensor] | None] = ContextVar("tangent", default=None)  # see tangent_at

LogLikelihood = Callable[[Tensor, Mapping[str, Tensor]], Tensor]  # eta (R, N, C), precisions (R, 1, ...) -> (R,)


@contextmanager
def tangent_at(weights: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Let a network that runs within be its own tangent at these weights; None leaves it as it is.

    :param weights: values of its sites, as ``posterior.mode`` has them.
    """
    token = TANGENT.set(weights)
    try:
        yield
    finally:
        TANGENT.reset(token)


@dataclass(frozen=True)
class Wiring:
    """What a network is made of, under the names of the model's sites and params."""

    X: Tensor  # (N, D)
    activation: Activation
    layers: tuple[tuple[str, str], ...]  # names of the weights' and the biases' sites
    alpha: Mapping[str, str]  # site -> name of its precision
    noise: Mapping[str, str]  # what the likelihood calls a precision -> its name
    fixed: Mapping[str, Tensor]  # precisions that are not hyperparameters, by name
    log_likelihood: LogLikelihood


@dataclass(frozen=True)
class NetworkDensity:
    """A network with Gaussian priors on its weights, and a likelihood that couples only the outputs of one datum."""

    joint: LogJoint
    wiring: Wiring
    _places: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    @property
    def blocks(self) -> tuple[slice, ...]:
        """The flat coordinates of each latent site."""
        return tuple(self.joint.latents.slices.values())

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
        eta = network_layers.outputs(self.wiring.X, self._layers(u), self.wiring.activation)
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
        slope = self._flat(network_layers.back(passed, g), 1)
        alpha = self._prior_precision(u, precisions)
        log_prior = 0.5 * ((alpha / math.tau).log() - alpha * u.square()).sum(-1)
        return value + log_prior, slope.double() - alpha * u

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian in ``u``, shape ``(R, D, D)``.

        :raises TooLarge: when it and the Jacobian of the outputs would not fit into memory.
        """
        if len(self.wiring.layers) == 2:
            return self._curvature(u, theta, bent=True)
        graph = u.requires_grad or theta.requires_grad
        return -derivatives.hessian(self.log_joint, u, theta, create_graph=graph)

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        graph = u.requires_grad or theta.requires_grad
        return -derivatives.hessian_diagonal(self.log_joint, u, theta, self.blocks, create_graph=graph)

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        """Prior precision plus ``J' diag(-l'') J``, shape ``(R, D, D)``.

        :raises TooLarge: when it and the Jacobian of the outputs would not fit into memory.
        """
        return self._curvature(u, theta, bent=False)

    def _curvature(self, u: Tensor, theta: Tensor, *, bent: bool) -> Tensor:
        precisions, passed = self._precisions(theta), self._passed(u, order=2 if bent else 1)
        eta = passed.outputs
        self._require_memory(u, eta)

        def log_likelihood(e: Tensor) -> Tensor:
            return self._log_likelihood(e, precisions)

        layout = Layout(eta.shape[1:], (1,))
        if u.requires_grad or theta.requires_grad:
            _, g, B = curvature_graph(log_likelihood, layout, eta)
        else:
            _, g, blocks = slope_and_curvature(log_likelihood, layout, eta)
            B = blocks()
        J = self._jacobian(passed)
        weighted = (B * J if B.shape[-1] == 1 else B @ J).flatten(1, 2)
        A = (J.flatten(1, 2).mT @ weighted).double() + self._prior_precision(u, precisions).diag_embed()
        return A - self._bend(passed, g) if bent else A

    def _passed(self, u: Tensor, X: Tensor | None = None, order: int = 1) -> Passed:
        """The data, or other inputs, on their way through the network."""
        inputs = self.wiring.X if X is None else X
        return network_layers.forward(inputs, self._layers(u), self.wiring.activation, order)

    def at_inputs(self, X: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs ``(R, N, C)`` at other inputs, and their Jacobian ``(R, N, C, D)``, in float64."""
        passed = self._passed(u, X.to(self.wiring.X))
        return passed.outputs.double(), self._jacobian(passed).double()

    def _require_memory(self, u: Tensor, eta: Tensor) -> None:
        needed = FLOAT * (3 * len(u) * u.shape[-1] ** 2 + 3 * eta.numel() * u.shape[-1])
        require_memory(needed, "the dense curvature and the Jacobian of the network's outputs", u.device)

    def _jacobian(self, passed: Passed) -> Tensor:
        """``(R, N, C, D)`` in flat order."""
        return self._flat(network_layers.jacobian(passed), 3)

    def _flat(self, found: list[Layer], batch: int) -> Tensor:
        """What belongs to the weights, with ``batch`` axes in front, in flat order."""
        pairs = zip(self.wiring.layers, found, strict=True)
        parts = {n: x.flatten(batch) for names, xs in pairs for n, x in zip(names, xs, strict=True)}
        return torch.cat([parts[n] for n in self.joint.latents.names], -1)

    def _prior_precision(self, u: Tensor, precisions: Mapping[str, Tensor]) -> Tensor:
        """Of each coordinate, ``(R, D)``."""
        values = self.joint.latents.unconstrained(u)
        parts = [_spread(precisions[self.wiring.alpha[n]], w).expand_as(w).flatten(1) for n, w in values.items()]
        return torch.cat(parts, -1).double()

    def _bend(self, passed: Passed, g: Tensor) -> Tensor:
        """Second derivatives of the outputs weighted by ``g``, ``(R, D, D)``."""
        within, across = network_layers.bend(passed, g)
        R, D = len(g), self.joint.latents.size
        values = torch.cat([within.flatten(1), across.flatten(1), across.flatten(1)], -1).double()
        return values.new_zeros(R, D * D).index_add(1, self._scatter(passed.layers), values).reshape(R, D, D)

    def _scatter(self, layers: Sequence[Layer]) -> Tensor:
        """Where each number of :meth:`_bend` belongs in the flattened matrix."""
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
