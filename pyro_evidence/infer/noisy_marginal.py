"""Sequential maximisation of the evidence over the weights' precisions and that of Gaussian noise."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_evidence.infer import fast_marginal
from pyro_evidence.infer.fast_marginal import SETTLED, FastState
from pyro_evidence.infer.iterate import Status
from pyro_evidence.infer.noise import Noise
from pyro_evidence.weights import LinearTarget, Weights


@dataclass(frozen=True)
class NoisyState:
    """One iterate: the weights' own state under a noise precision ``exp(log_scale)`` times the starting one."""

    noise: Noise
    log_scale: float
    fast: FastState

    @property
    def alpha(self) -> Tensor:
        """Prior precision of each weight, ``(M,)``."""
        return self.fast.alpha

    @property
    def x(self) -> Tensor:
        """Mode of the active weights, ``(K,)``."""
        return self.fast.x

    @property
    def weights(self) -> Weights:
        """The weights under this noise."""
        return self.noise.at(self.log_scale)

    @property
    def objective(self) -> float:
        """Log evidence, nats."""
        return self.fast.objective

    @cached_property
    def _balance(self) -> tuple[float, float]:
        """``N - gamma`` and the sum of squared residuals in units of the noise."""
        fast = self.fast
        variance = torch.cholesky_inverse(fast.tril).diagonal() if len(fast.x) else fast.x
        gamma = float((1.0 - fast.alpha[fast.index] * variance).sum())
        slope, B = fast.mode.slopes[0].flatten(), fast.mode.curvatures[0].flatten()
        squares = (slope.square() / torch.where(B > 0, B, 1.0)).sum()  # a masked datum has no slope either
        return self.noise.num_data - gamma, float(squares)

    @cached_property
    def promise(self) -> float:
        """What the best noise promises, nats: the derivative in its logarithm times half the way."""
        free, squares = self._balance
        return 0.25 * (free - squares) * math.log(free / squares) if free > 0.0 < squares else 0.0

    @property
    def gradient_norm(self) -> float:
        """What the best single change promises, nats; 0 below the threshold."""
        return max(self.fast.gradient_norm, self.promise if self.promise > SETTLED else 0.0)

    @property
    def verdict(self) -> Status | None:
        """Converged when no single change promises anything."""
        return Status.CONVERGED if self.gradient_norm == 0.0 else None

    def with_noise(self, log_scale: float) -> "NoisyState":
        """The same weights' precisions under other noise."""
        target = self.noise.at(log_scale).target
        assert isinstance(target, LinearTarget)
        start = torch.zeros_like(self.fast.start).index_copy(0, self.fast.index, self.fast.x)
        return replace(self, log_scale=log_scale, fast=FastState(target, self.fast.alpha, start))

    def renewed(self) -> "NoisyState":
        """MacKay's update of the noise, Bishop (2006), eq. 7.88; where that falls, EM's, which cannot."""
        free, squares = self._balance
        new = self.with_noise(self.log_scale + math.log(free / squares))
        if new.objective >= self.objective:
            return new
        N = self.noise.num_data
        return self.with_noise(self.log_scale + math.log(N / (squares + N - free)))


def start(noise: Noise) -> NoisyState:
    """The model without weights."""
    assert isinstance(noise.weights.target, LinearTarget)
    return NoisyState(noise, 0.0, fast_marginal.empty(noise.weights.target))


def step(state: NoisyState) -> NoisyState:
    """Change the noise or one weight, whichever promises more."""
    if state.promise > state.fast.gradient_norm:
        return state.renewed()
    return replace(state, fast=fast_marginal.step(state.fast))
