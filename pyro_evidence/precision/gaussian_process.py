"""A posterior precision under a dense Gaussian prior, by what the data take off the prior covariance."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from pyro_evidence.precision.dense import Precision
from pyro_evidence.precision.gaussian_process_mode import PredictorMode, scaled


@dataclass(frozen=True)
class Selection:
    """Each element of the predictor is one of the latents."""

    index: Tensor  # (n,)
    size: int  # D

    @cached_property
    def is_identity(self) -> bool:
        """Whether each predictor is the latent of its own place."""
        return torch.equal(self.index, torch.arange(self.size, device=self.index.device))

    def apply(self, M: Tensor) -> Tensor:
        """``J u``: rows of ``u`` ``(D, ...)``, one for each predictor."""
        return M if self.is_identity else M[self.index]

    def adjoint(self, v: Tensor) -> Tensor:
        """``J' v``: sums of ``v`` over the predictors that read the same element."""
        return v if self.is_identity else v.new_zeros(self.size, v.shape[-1]).index_add(0, self.index, v)


@dataclass(frozen=True)
class DesignMap:
    """A predictor with any matrix ``J``."""

    J: Tensor  # (n, D)

    is_identity: ClassVar[bool] = False

    def apply(self, M: Tensor) -> Tensor:
        """``J u``."""
        return self.J @ M

    def adjoint(self, v: Tensor) -> Tensor:
        """``J' v``."""
        return self.J.mT @ v


ObservationMap = Selection | DesignMap  # the matrix J through which predictors see the latents


def seen_by(J: Tensor) -> ObservationMap:
    """The cheapest form of ``J`` ``(n, D)``."""
    index = J.abs().argmax(-1)
    chosen = J.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    if bool((chosen == 1.0).all()) and int(torch.count_nonzero(J)) == len(J):
        return Selection(index, J.shape[-1])
    return DesignMap(J)


@dataclass(frozen=True)
class LatentPrecision(Precision):
    """The precision of latents ``u`` with prior covariance ``K`` behind the predictor ``eta = J u + c``; ``R = 1``."""

    covariance: Tensor  # (D, D) K
    tril: Tensor  # (D, D) its lower Cholesky factor
    seen: ObservationMap
    mode: PredictorMode

    @cached_property
    def cross(self) -> Tensor:
        """Prior covariance of the predictor with the latents, ``J K``, shape ``(n, D)``."""
        return self.seen.apply(self.covariance)

    @property
    def log_det(self) -> Tensor:
        """``log |A| = log |I + J K J' W| - log |K|``, shape ``(1,)``."""
        return (self.mode.factor.log_det - 2.0 * self.tril.diagonal().log().sum()).reshape(1)

    @cached_property
    def variance(self) -> Tensor:
        """Posterior variances, ``(1, D)``."""
        if self.seen.is_identity:
            return self.mode.factor.variance(self.covariance).unsqueeze(0)
        return (self.covariance.diagonal() - self.mode.factor.explained_diagonal(self.cross)).unsqueeze(0)

    @cached_property
    def adjoint(self) -> Tensor:
        """Posterior covariance, ``(1, D, D)``.  Rasmussen and Williams (2006), eq. 3.27."""
        return (self.covariance - self.mode.factor.explained(self.cross)).unsqueeze(0)

    @property
    def dual(self) -> Tensor:
        """``K^-1 (mode - prior mean)``, shape ``(D,)``."""
        return self.seen.adjoint(self.mode.dual.unsqueeze(-1)).squeeze(-1)

    def solve(self, b: Tensor) -> Tensor:
        """``A^-1 b`` for each ``b``, shape ``(S, D)``."""
        return (self.covariance @ b.mT - self.cross.mT @ self.mode.factor.apply(self.cross @ b.mT)).mT

    @cached_property
    def scale_tril(self) -> Tensor:
        """Lower Cholesky factor of the posterior covariance, which itself may be too close to singular to have one."""
        signed = torch.linalg.qr(self._root.mT, mode="r").R.mT
        return signed * signed.diagonal().sign()

    @cached_property
    def _inner(self) -> Tensor:
        """Lower Cholesky factor of ``I + L' J' W J L``, the precision of the whitened latents."""
        seen = self.seen.apply(self.tril)
        inner = seen.mT @ scaled(self.mode.factor.curvature, seen)
        inner.diagonal().add_(1.0)
        return torch.linalg.cholesky(inner)

    @cached_property
    def _root(self) -> Tensor:
        """``T`` with ``T T' = A^-1``, by whitening the prior."""
        return torch.linalg.solve_triangular(self._inner, self.tril.mT, upper=False).mT

    def unwhiten(self, white: Tensor) -> Tensor:
        """``T z`` for each ``z``."""
        return white @ self._root.mT

    def whiten(self, rows: Tensor) -> Tensor:
        """``T^-1 x`` for each ``x``."""
        return torch.linalg.solve_triangular(self.tril, rows.mT, upper=False).mT @ self._inner
