r"""Sequential maximisation of the evidence, one weight's precision at a time, or that of the noise.

Tipping and Faul (2003), "Fast marginal likelihood maximisation for sparse Bayesian models", for any
likelihood with a linear predictor: with :math:`B` the curvature and :math:`g` the slope in ``eta`` at the
mode, column ``m`` has

.. math:: S_m = \phi_m' B \phi_m - \phi_m' B \Phi \Sigma \Phi' B \phi_m, \qquad Q_m = \phi_m' g .
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_evidence.fitting.iterate import Status
from pyro_evidence.numerics.evidence import log_evidence
from pyro_evidence.numerics.linalg import cholesky
from pyro_evidence.relevance.axis_priors import climbed
from pyro_evidence.relevance.noise import Noise, squares, vanishes
from pyro_evidence.relevance.targets import LinearTarget, Parts, QuadraticTarget

SETTLED = 1e-6  # nats that the best single change must promise, or the fit has converged


class Factors(NamedTuple):
    """Sparsity and quality of every column beside those in the model, and what the model leaves of them."""

    S: Tensor  # (M,)
    Q: Tensor  # (M,)
    white: Tensor  # (K, M): L^-1 Phi_active' B Phi, A = L L'


@dataclass(frozen=True, eq=False)
class FastState:
    """One iterate; its parts are computed from ``alpha``, the noise and a warm start alone."""

    source: LinearTarget | QuadraticTarget | Noise  # the log likelihood, or what gives one of any noise
    alpha: Tensor  # (M,)
    start: Tensor  # (M,) where the mode is searched from
    settled: bool = False  # no change of a weight that is promised raises the log evidence
    log_scale: float = 0.0  # of the noise precision, over the starting one

    @cached_property
    def target(self) -> LinearTarget | QuadraticTarget:
        """The log likelihood."""
        return self.source.target(self.log_scale) if isinstance(self.source, Noise) else self.source

    @property
    def is_closed(self) -> bool:
        """Whether steps are formulas, which ask nothing of autograd; noise is found in the user's model."""
        return not isinstance(self.source, Noise) and bool(self._parts) and all(p.closed for p in self._parts)

    @property
    def _parts(self) -> Parts:
        """The observed sites of rows in memory, none where rows were not kept."""
        return self.target.parts if isinstance(self.target, LinearTarget) and self.target.is_resident else ()

    @cached_property
    def active(self) -> Tensor:
        """Weights in the model, bool, shape ``(M,)``."""
        return self.alpha < torch.inf

    @cached_property
    def index(self) -> Tensor:
        """Their positions, shape ``(K,)``."""
        return self.active.nonzero().flatten()

    @cached_property
    def _active_parts(self) -> Parts:
        """The observed sites as functions of the active weights, the others 0."""
        return tuple(part.some(self.index) for part in self._parts)

    @cached_property
    def mode(self) -> "ActiveMode":
        """Newton from the warm start; the careful one where that does not go straight up."""
        alpha, x = self.alpha[self.index], self.start[self.index]
        for _ in range(12):
            found = self._at(alpha, x)
            slope = found.local.gradient - alpha * x
            move = torch.cholesky_solve(slope.unsqueeze(-1), found.tril).squeeze(-1)
            if float(slope @ move) <= 1e-15:
                return found
            x = x + move
        T = torch.eye(len(self.start)).to(x)[:, self.index]
        active = LinearTarget.resident(self._active_parts, eps=self.target.eps) if self._parts else self.target.along(T)
        return self._at(alpha, climbed(active, alpha, torch.zeros_like(x)))

    def _at(self, alpha: Tensor, x: Tensor) -> "ActiveMode":
        """The relevant weights at ``x`` with the local quadratic and the posterior precision there."""
        if self._parts:
            local = by_rows(self._parts, self._active_parts, x)
        else:
            local = by_sums(self.target, self.index, torch.zeros_like(self.start).index_copy(0, self.index, x))
        A = local.precision + alpha.diag()
        return ActiveMode(x, local, cholesky(A, "the posterior precision of the relevant weights"))

    @property
    def whole(self) -> Tensor:
        """Mode of all weights, those that are pruned at 0, shape ``(M,)``."""
        return torch.zeros_like(self.start).index_copy(0, self.index, self.mode.x)

    @cached_property
    def objective(self) -> float:
        """Laplace log evidence, nats."""
        alpha, x = self.alpha[self.index], self.mode.x
        log_joint = self.mode.local.value() + 0.5 * ((alpha / math.tau).log().sum() - alpha @ x.square())
        return float(log_evidence(log_joint, 2.0 * self.mode.tril.diagonal().log().sum(), len(alpha)))

    @cached_property
    def factors(self) -> Factors:
        """``S``, ``Q`` of every column.  Tipping and Faul (2003), eq. 24 and 25."""
        S, Q, cross = self.mode.local.columns()
        white = torch.linalg.solve_triangular(self.mode.tril, cross, upper=False)
        return Factors(S - white.square().sum(0), Q, white)

    @cached_property
    def changes(self) -> tuple[Tensor, Tensor]:
        """Best new prior variance ``1/alpha`` of every column, and what it gains, nats; ``(M,)`` each.

        ``(q^2 - s) / s^2`` where that is positive, 0 elsewhere: Tipping and Faul (2003), eq. 20 to 23.
        """
        S, Q, _ = self.factors
        variance = self.alpha.reciprocal()
        rest = 1.0 - variance * S
        usable = S > torch.finfo(S.dtype).tiny
        square = Q.square()
        best = ((square - rest * S) / S.square()).where(usable, 0.0).clamp(min=0.0)  # a variance is >= 0
        move = best - variance
        grown = S * move
        gain = 0.5 * (square * move / (1.0 + grown) - grown.log1p())
        gain = gain.where(usable & ~gain.isnan(), 0.0)
        if len(self.index) == 1 and float(best[self.index]) == 0.0:
            gain[self.index] = 0.0  # an empty model is not a step
        return best, gain

    @cached_property
    def gain(self) -> float:
        """Expected gain of the best change of a single weight, nats; 0 below the threshold."""
        gain = 0.0 if self.settled else float(self.changes[1].max())
        return gain if gain > SETTLED else 0.0

    @cached_property
    def _balance(self) -> tuple[float, float]:
        """``N - gamma`` and the sum of squared residuals in units of the noise; ``N`` counts as 0 where it is held."""
        mode = self.mode
        variance = torch.cholesky_inverse(mode.tril).diagonal() if len(mode.x) else mode.x
        gamma = float((1.0 - self.alpha[self.index] * variance).sum())
        num_data = self.source.num_data if isinstance(self.source, Noise) else 0.0
        return num_data - gamma, float(self.mode.local.squares())

    @cached_property
    def noise_gain(self) -> float:
        """Expected gain of the best noise, nats: the derivative in its logarithm times half the way."""
        if not isinstance(self.source, Noise):
            return 0.0
        free, squares = self._balance
        return 0.25 * (free - squares) * math.log(free / squares) if free > 0.0 < squares else 0.0

    @property
    def gradient_norm(self) -> float:
        """Expected gain of the best single change, nats; 0 below the threshold."""
        return max(self.gain, self.noise_gain if self.noise_gain > SETTLED else 0.0)

    @property
    def stop_reason(self) -> Status | None:
        """Unbounded when the noise vanishes; converged when no single change promises anything."""
        if isinstance(self.source, Noise) and vanishes(self._balance[1], self.mode.x, self.mode.local.precision):
            return Status.UNBOUNDED
        return Status.CONVERGED if self.gradient_norm == 0.0 else None


class Expansion(NamedTuple):
    """The log likelihood around some values of the relevant weights; what only some states need is a function."""

    value: Callable[[], Tensor]  # () nats
    gradient: Tensor  # (K,)
    precision: Tensor  # (K, K) minus the Hessian
    columns: Callable[[], tuple[Tensor, Tensor, Tensor]]  # see :func:`by_rows`
    squares: Callable[[], Tensor]  # () sum of squared residuals in units of Gaussian noise


def by_rows(parts: Parts, active: Parts, x: Tensor) -> Expansion:
    """By the predictors of all rows.

    :param active: the parts as functions of the relevant weights ``x`` ``(K,)``.
    """
    etas = [p.predictor(x) for p in active]
    found = [p.derivatives(eta) for p, eta in zip(active, etas, strict=True)]
    slopes, curvatures = [slope.flatten() for slope, _ in found], [B[0] for _, B in found]
    weighted = [p.weighted(B) for p, B in zip(active, curvatures, strict=True)]

    def columns() -> tuple[Tensor, Tensor, Tensor]:
        S = [p.precision_diagonal(B) for p, B in zip(parts, curvatures, strict=True)]
        Q = [p.columns @ slope for p, slope in zip(parts, slopes, strict=True)]
        cross = [w @ p.columns.mT for p, w in zip(parts, weighted, strict=True)]
        return reduce(add, S), reduce(add, Q), reduce(add, cross)

    return Expansion(
        lambda: reduce(add, [p.log_likelihood(eta)[0] for p, eta in zip(active, etas, strict=True)]),
        reduce(add, [p.columns @ slope for p, slope in zip(active, slopes, strict=True)]),
        reduce(add, [w @ p.columns.mT for p, w in zip(active, weighted, strict=True)]),
        columns,
        partial(squares, slopes[0], curvatures[0]),
    )


def by_sums(target: LinearTarget | QuadraticTarget, index: Tensor, y: Tensor) -> Expansion:
    """By the sums of one pass over rows that were not kept, at all weights ``y`` ``(M,)``.

    :param index: of the relevant weights, ``(K,)``.
    """
    found = target.sums(y)
    A = found.precision

    def squared() -> Tensor:
        assert isinstance(target, QuadraticTarget)  # only Gaussian noise has residuals
        rise = y @ target.origin.precision @ y - 2.0 * y @ target.origin.gradient
        return math.exp(target.log_scale) * (target.squares + rise)

    return Expansion(
        lambda: found.value,
        found.gradient[index],
        A[index][:, index],
        lambda: (A.diagonal(), found.gradient, A[index]),
        squared,
    )


class ActiveMode(NamedTuple):
    """The relevant weights where the posterior is highest."""

    x: Tensor  # (K,)
    local: Expansion
    tril: Tensor  # (K, K) of the posterior precision


def empty(source: LinearTarget | QuadraticTarget | Noise) -> FastState:
    """The model without weights."""
    target = source.target(0.0) if isinstance(source, Noise) else source
    like = target.parts[0].J[0, 0] if isinstance(target, LinearTarget) else target.origin.gradient
    return FastState(source, torch.full_like(like, torch.inf), torch.zeros_like(like))


def step(state: FastState) -> FastState:
    """Change the noise where that promises most; else the weight that does, or the next that raises the log evidence.

    For Gaussian noise what is promised is kept.  Laplace's approximation moves with the mode, so that a promise may
    fail; were such a change made, the search could go round in circles.
    """
    if state.noise_gain > state.gain:
        return with_best_noise(state)
    gain = state.changes[1].clone()
    while float(gain.max()) > SETTLED:
        chosen = first_of_best(gain)
        new = changed(state, chosen)
        if new.objective > state.objective:
            break
        gain[chosen] = 0.0
    else:
        return replace(state, settled=True)
    if len(state.index) < 2 or not torch.equal(new.active, state.active):
        return new
    # one weight was only re-estimated: all of them at once if that gains more, for columns that are alike
    best = state.changes[0]
    alpha = torch.where(state.active & (best > 0), 1.0 / best, state.alpha)
    together = replace(state, alpha=alpha, start=state.whole, settled=False)
    return together if together.objective > new.objective else new


def with_best_noise(state: FastState) -> FastState:
    """MacKay's update of the noise, Bishop (2006), eq. 7.88; where that lowers the log evidence, EM's, which cannot."""
    assert isinstance(state.source, Noise)
    (free, squares), num_data = state._balance, state.source.num_data
    for ratio in (free / squares, num_data / (squares + num_data - free)):
        log_scale = state.log_scale + math.log(ratio)
        new = replace(state, start=state.whole, settled=False, log_scale=log_scale)
        if new.objective >= state.objective:
            break
    return new


def first_of_best(gain: Tensor) -> int:
    """First of equals within 1e-9, so that the path does not depend on the order in which a library adds numbers."""
    return int((gain >= gain.max() * (1.0 - 1e-9)).nonzero()[0])


def changed(state: FastState, chosen: int) -> FastState:
    """Add, re-estimate or delete one weight; Newton starts where the mode has moved to, to first order."""
    variance, (S, Q, white) = float(state.changes[0][chosen]), state.factors
    move = variance - 1.0 / float(state.alpha[chosen])
    shift = Q[chosen] * move / (1.0 + S[chosen] * move)
    side = torch.linalg.solve_triangular(state.mode.tril.mT, white[:, chosen].unsqueeze(-1), upper=True).squeeze(-1)
    start = state.whole.index_add(0, state.index, -shift * side)
    start[chosen] += shift
    alpha = state.alpha.clone()
    alpha[chosen] = 1.0 / variance if variance else torch.inf
    return replace(state, alpha=alpha, start=start, settled=False)
