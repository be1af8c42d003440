"""A mode on a few axes of weight space under independent priors along them, and the Gaussian around it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.axis_priors import AxisPrior, GaussianPrior
from pyro_evidence.ops.evidence import log_evidence
from pyro_evidence.ops.linalg import cholesky
from pyro_evidence.weights import Penalised, Weights


class OnAxesState:
    """What every sparse fit says of itself; subclasses are frozen dataclasses."""

    alpha: Tensor  # (K,) of every axis, inf where pruned
    active: Tensor  # (K,) bool
    x: Tensor  # (K_active + V,) the mode: active axes, then the other coordinates

    @property
    def prior(self) -> AxisPrior:
        """Along each axis."""
        raise NotImplementedError

    @property
    def directions(self) -> Tensor:
        """Active axes, shape ``(M, K_active)``."""
        raise NotImplementedError

    def record(self) -> dict[str, Any]:
        """What a file keeps of it: tensors and numbers."""
        raise NotImplementedError

    @property
    def num_active(self) -> int:
        """How many."""
        return int(self.active.sum())

    @property
    def y(self) -> Tensor:
        """The mode: weights, then the other coordinates, shape ``(D,)``."""
        return self.embedding @ self.x

    @cached_property
    def embedding(self) -> Tensor:
        """``y = T x``, shape ``(D, K_active + V)``."""
        return torch.block_diag(self.directions, torch.eye(len(self.x) - self.num_active).to(self.x))


@dataclass(frozen=True)
class GaussianFit:
    """The Laplace approximation over ``x``."""

    precision_tril: Tensor  # (K + V, K + V)
    log_evidence: Tensor  # ()


def gaussian_fit(weights: Weights, state: OnAxesState) -> GaussianFit:
    """Curvature and Laplace log evidence at the mode, hyperparameters and axes held."""
    target, K = weights.target.along(state.embedding), state.num_active
    alpha = state.alpha[state.active]
    prior = state.prior.distribution(alpha)
    smooth = alpha if isinstance(state.prior, GaussianPrior) else torch.zeros_like(alpha)
    density = Penalised(target, torch.cat([smooth, state.x.new_zeros(len(state.x) - K)]))
    A = density.precision(state.x.unsqueeze(0), state.x.new_zeros(0))[0]
    tril = cholesky(A, "the posterior precision in the active axes") if len(A) else A
    log_joint = target.value(state.x.unsqueeze(0))[0] + prior.log_prob(state.x[:K]).sum()
    return GaussianFit(tril, log_evidence(log_joint, 2.0 * tril.diagonal().log().sum(), len(A)))
