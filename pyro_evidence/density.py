"""One log joint density with its derivatives: by autograd for any model, by linear algebra where predictors are linear.

Both satisfy :class:`pyro_evidence.ops.curvature.Density`, and must agree: the second is only a faster way.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_evidence import predictors
from pyro_evidence.ops import derivatives
from pyro_evidence.ops.predictor import Layout, curvature_blocks, gram, gram_diagonal
from pyro_evidence.predictors import Slot
from pyro_evidence.program import LogJoint


@dataclass(frozen=True)
class AutogradDensity:
    """Any model, by reverse-mode derivatives of its log joint."""

    joint: LogJoint
    slots: tuple[Slot, ...] | None  # where observed sites see the latents, for Gauss-Newton

    @property
    def blocks(self) -> tuple[slice, ...]:
        """The flat coordinates of each latent site."""
        return tuple(self.joint.latents.slices.values())

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(D, w | hyperparameters)``, nats, shape ``(R,)``."""
        return self.joint.log_joint(u, theta)

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``."""
        return derivatives.gradient(self.log_joint, u, theta)

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian in ``u``, shape ``(R, D, D)``."""
        return -derivatives.hessian(self.log_joint, u, theta, create_graph=_wants_graph(u, theta))

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        """Its diagonal, shape ``(R, D)``."""
        return -derivatives.hessian_diagonal(self.log_joint, u, theta, create_graph=_wants_graph(u, theta))

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        """Prior precision plus ``J' diag(-l'') J`` at each row, shape ``(R, D, D)``.

        :raises UnsupportedModel: when no observed site's parameter can be read as a predictor.
        """
        if not self.slots:
            raise predictors.no_predictor(self.joint)
        theta = theta.expand(len(u), -1)
        return torch.stack([self._gauss_newton(*row) for row in zip(u, theta, strict=True)])

    def _gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        graph = _wants_graph(u, theta)
        u = u if u.requires_grad else u.detach().requires_grad_()
        trace = self.joint.trace(u, theta)

        def prior(rows: Tensor, _: Tensor) -> Tensor:
            return predictors.log_prior(self.joint, rows[0], theta).unsqueeze(0)

        A = -derivatives.hessian(prior, u.unsqueeze(0), theta.unsqueeze(0), create_graph=graph)[0]
        for slot in self.slots or ():
            eta = slot.layout.blocks(slot.predictor(trace).unsqueeze(0))
            J = derivatives.jacobian(eta.reshape(-1), u, create_graph=graph).reshape(*eta.shape[1:], -1).double()
            at = eta if graph else eta.detach().requires_grad_()
            B = curvature_blocks(slot.log_likelihood(trace), slot.layout, at, create_graph=graph).double()
            A = A + gram(J, B)[0]
        return A


@dataclass(frozen=True)
class Linear:
    """One observed site that sees the latents only through ``eta = J u + c``."""

    slot: Slot
    J: Tensor  # (N, C, D)
    c: Tensor  # (N, C)

    @property
    def layout(self) -> Layout:
        """How the elements of ``eta`` couple."""
        return self.slot.layout

    def eta(self, u: Tensor) -> Tensor:
        """Predictors of rows ``(R, D)``, blocks ``(R, N, C)``."""
        flat = u @ self.J.flatten(0, 1).mT
        return flat.reshape(len(u), *self.c.shape) + self.c


@dataclass
class _Parts:
    """What the model says at one setting of the hyperparameters."""

    theta: Tensor
    trace: object
    prior: tuple[Tensor, Tensor] | None  # loc (D,), precision (D,) of an all-Gaussian prior


@dataclass(frozen=True)
class LinearDensity:
    """A model whose observed sites have linear predictors; all rows share their hyperparameters."""

    joint: LogJoint
    linear: tuple[Linear, ...]
    gaussian: bool  # every integrated site has a Gaussian prior that depends on hyperparameters alone
    _cache: list[_Parts] = field(default_factory=list, repr=False, compare=False)

    @property
    def blocks(self) -> tuple[slice, ...]:
        """The flat coordinates of each latent site."""
        return tuple(self.joint.latents.slices.values())

    def _at(self, theta: Tensor) -> _Parts:
        """The model's parts at ``theta``, run once per tensor."""
        if self._cache and self._cache[0].theta is theta:
            return self._cache[0]
        row = theta[0] if theta.dim() == 2 else theta
        trace = self.joint.trace(self.joint.initial_u, row)
        prior = predictors.gaussian_prior(self.joint, trace)[:2] if self.gaussian else None
        self._cache[:] = [_Parts(theta, trace, prior)]
        return self._cache[0]

    def _log_prior(self, u: Tensor, theta: Tensor) -> Tensor:
        prior = self._at(theta).prior
        if prior is not None:
            loc, precision = prior
            return 0.5 * ((precision / torch.pi / 2).log() - precision * (u - loc).square()).sum(-1)
        row = theta[0] if theta.dim() == 2 else theta
        return torch.stack([predictors.log_prior(self.joint, v, row) for v in u])

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(D, w | hyperparameters)``, nats, shape ``(R,)``."""
        trace = self._at(theta).trace
        total = self._log_prior(u, theta)
        for part in self.linear:
            eta = part.layout.natural(part.eta(u).to(self.joint.dtype))
            total = total + part.slot.log_likelihood(trace)(eta).double()
        return total

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``."""
        return derivatives.gradient(self.log_joint, u, theta)

    def _curvatures(self, u: Tensor, theta: Tensor) -> list[Tensor]:
        graph = _wants_graph(u, theta)
        trace = self._at(theta).trace
        etas = [p.eta(u).to(self.joint.dtype) for p in self.linear]
        etas = etas if u.requires_grad else [e.detach().requires_grad_() for e in etas]
        return [
            curvature_blocks(p.slot.log_likelihood(trace), p.layout, eta, create_graph=graph).double()
            for p, eta in zip(self.linear, etas, strict=True)
        ]

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Prior precision plus ``J' diag(-l'') J``, shape ``(R, D, D)``."""
        grams = [gram(p.J, B) for p, B in zip(self.linear, self._curvatures(u, theta), strict=True)]
        prior = self._at(theta).prior
        if prior is not None:
            return sum(grams, prior[1].diag_embed())
        return sum(grams, -derivatives.hessian(self._log_prior, u, theta, create_graph=_wants_graph(u, theta)))

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        """Its diagonal, shape ``(R, D)``."""
        parts = [gram_diagonal(p.J, B) for p, B in zip(self.linear, self._curvatures(u, theta), strict=True)]
        prior = self._at(theta).prior
        if prior is not None:
            return sum(parts, prior[1])
        return sum(parts, -derivatives.hessian_diagonal(self._log_prior, u, theta, create_graph=_wants_graph(u, theta)))

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        """The exact precision: a linear predictor has no curvature of its own."""
        return self.precision(u, theta)


def _wants_graph(u: Tensor, theta: Tensor) -> bool:
    return u.requires_grad or theta.requires_grad
