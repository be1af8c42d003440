r"""Sequential maximisation of the evidence, one weight's precision at a time.

Tipping and Faul (2003), "Fast marginal likelihood maximisation for sparse Bayesian models", for any
likelihood with a linear predictor: with :math:`B` the curvature and :math:`g` the slope in ``eta`` at the
mode, column ``m`` has

.. math:: S_m = \phi_m' B \phi_m - \phi_m' B \Phi \Sigma \Phi' B \phi_m, \qquad Q_m = \phi_m' g .
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_evidence.axis_priors import climbed
from pyro_evidence.infer.iterate import Status
from pyro_evidence.ops.evidence import log_evidence
from pyro_evidence.ops.linalg import cholesky
from pyro_evidence.ops.predictor import gram, gram_diagonal
from pyro_evidence.weights import LinearTarget

SETTLED = 1e-6  # nats that the best single change must promise, or the fit has converged


class Factors(NamedTuple):
    """Sparsity and quality of every column, its own part left out (``s``, ``q``) or not; ``(M,)`` each."""

    s: Tensor
    q: Tensor
    S: Tensor
    Q: Tensor

    @property
    def theta(self) -> Tensor:
        """``q^2 - s``: relevant iff positive.  Tipping and Faul (2003), eq. 20 and 21."""
        return self.q.square() - self.s


@dataclass(frozen=True)
class FastState:
    """One iterate; its parts are computed from ``alpha`` and a warm start alone."""

    target: LinearTarget
    alpha: Tensor  # (M,)
    start: Tensor  # (M,) where the mode is searched from

    @property
    def active(self) -> Tensor:
        """Weights in the model, bool, shape ``(M,)``."""
        return torch.isfinite(self.alpha)

    @cached_property
    def sub(self) -> LinearTarget:
        """The target of the active weights."""
        return columns(self.target, self.active)

    @cached_property
    def mode(self) -> "Mode":
        """Newton from the warm start; the careful one where that does not go straight up."""
        alpha, x = self.alpha[self.active], self.start[self.active]
        for _ in range(12):
            found = mode_at(self.sub, alpha, x)
            slope = sum(
                (s.flatten() @ p.J.flatten(0, 1) for p, s in zip(self.sub.parts, found.slopes, strict=True)),
                -alpha * x,
            )
            move = torch.cholesky_solve(slope.unsqueeze(-1), found.tril).squeeze(-1) if len(x) else slope
            if float(slope @ move) <= 1e-15:
                return found
            x = x + move
        return mode_at(self.sub, alpha, climbed(self.sub, alpha, torch.zeros_like(x)))

    @property
    def x(self) -> Tensor:
        """Mode of the active weights, shape ``(K,)``."""
        return self.mode.x

    @property
    def tril(self) -> Tensor:
        """Cholesky factor of the posterior precision, ``(K, K)``."""
        return self.mode.tril

    @cached_property
    def objective(self) -> float:
        """Laplace log evidence, nats."""
        alpha = self.alpha[self.active]
        prior = 0.5 * ((alpha / math.tau).log() - alpha * self.x.square()).sum()
        log_joint = self.sub.value(self.x.unsqueeze(0))[0] + prior
        return float(log_evidence(log_joint, 2.0 * self.tril.diagonal().log().sum(), len(alpha)))

    @cached_property
    def factors(self) -> Factors:
        """``s, q, S, Q`` of every column.  Tipping and Faul (2003), eq. 22 to 25."""
        S, Q = torch.zeros_like(self.alpha), torch.zeros_like(self.alpha)
        cross = self.alpha.new_zeros(len(self.x), len(self.alpha))  # Phi_active' B Phi
        found = self.mode
        for part, own, B, slope in zip(self.target.parts, self.sub.parts, found.curvatures, found.slopes, strict=True):
            S = S + gram_diagonal(part.J, B.unsqueeze(0))[0]
            Q = Q + slope.flatten() @ part.J.flatten(0, 1)
            cross = cross + (B @ own.J).flatten(0, 1).mT @ part.J.flatten(0, 1)
        S = S - torch.linalg.solve_triangular(self.tril, cross, upper=False).square().sum(0)
        ratio = torch.where(self.active, self.alpha / (self.alpha - S), 1.0)
        return Factors(ratio * S, ratio * Q, S, Q)

    @cached_property
    def changes(self) -> tuple[Tensor, Tensor]:
        """Best new ``alpha`` of every column and what it gains, nats, ``(M,)`` each."""
        s, _, S, Q = self.factors
        theta, quality = self.factors.theta, Q.square()
        usable = S > torch.finfo(S.dtype).tiny
        best = torch.where((theta > 0) & usable, s.square() / torch.where(theta > 0, theta, 1.0), torch.inf)
        move = torch.where(self.active, 1.0 / best - 1.0 / self.alpha, 0.0)
        ratio = torch.where(usable, quality / S, 1.0)
        add = 0.5 * (ratio - 1.0 - torch.where(ratio > 1.0, ratio, 1.0).log())
        stay = 0.5 * (quality * move / (1.0 + S * move) - (S * move).log1p())
        gain = torch.where(self.active, stay, torch.where(torch.isfinite(best), add, 0.0))
        last = self.active & ~torch.isfinite(best) & (self.active.sum() == 1)  # an empty model is not a step
        return best, torch.where(last | gain.isnan(), 0.0, gain)

    @property
    def gradient_norm(self) -> float:
        """What the best single change promises, nats; 0 below the threshold."""
        gain = float(self.changes[1].max())
        return gain if gain > SETTLED else 0.0

    @property
    def verdict(self) -> Status | None:
        """Converged when no single change promises anything."""
        return Status.CONVERGED if self.gradient_norm == 0.0 else None


class Mode(NamedTuple):
    """The local quadratic at ``x``."""

    x: Tensor  # (K,)
    curvatures: tuple[Tensor, ...]  # (N, C, C) each
    slopes: tuple[Tensor, ...]  # (N, C) each
    tril: Tensor  # (K, K) of the posterior precision


def mode_at(sub: LinearTarget, alpha: Tensor, x: Tensor) -> Mode:
    """Derivatives at ``x``."""
    etas = [p.eta(x.unsqueeze(0)) for p in sub.parts]
    curvatures = tuple(p.curvature(e)[0] for p, e in zip(sub.parts, etas, strict=True))
    slopes = tuple(p.slope(e)[1][0] for p, e in zip(sub.parts, etas, strict=True))
    A = sum((gram(p.J, B.unsqueeze(0))[0] for p, B in zip(sub.parts, curvatures, strict=True)), alpha.diag())
    return Mode(x, curvatures, slopes, cholesky(A, "the posterior precision of the relevant weights") if len(x) else A)


def columns(target: LinearTarget, chosen: Tensor) -> LinearTarget:
    """The target as a function of some weights, the others 0."""
    index = torch.nonzero(chosen).flatten()
    parts = [replace(p, J=p.J.index_select(-1, index)) for p in target.parts]
    return LinearTarget(tuple(parts), None)


def empty(target: LinearTarget) -> FastState:
    """The model without weights."""
    like = target.parts[0].J[0, 0]
    return FastState(target, torch.full_like(like, torch.inf), torch.zeros_like(like))


def step(state: FastState) -> FastState:
    """Add, re-estimate or delete the weight that gains most; of equals within rounding the first.

    Choosing the first within 1e-9 keeps the path from hanging on the order in which a library adds numbers.
    """
    best, gain = state.changes
    chosen = int(torch.nonzero(gain >= gain.max() * (1.0 - 1e-9)).flatten()[0])
    alpha = state.alpha.clone()
    alpha[chosen] = best[chosen]
    start = torch.zeros_like(state.start)
    start[state.active] = state.x
    return FastState(state.target, alpha, start)
