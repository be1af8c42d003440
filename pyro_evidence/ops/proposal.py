"""A mixture of normals, each by its mean and the Cholesky factor of its precision, to draw from."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NormalMixture:
    """Normals ``N(loc_m, (L_m L_m')^-1)`` in proportions ``exp(log_mixing_m)``."""

    log_mixing: Tensor  # (M,)
    loc: Tensor  # (M, D)
    precision_tril: Tensor  # (M, D, D)

    def log_prob(self, u: Tensor) -> Tensor:
        """Log density of rows ``(S, D)``, shape ``(S,)``."""
        parts = [self._component(u, m) for m in range(len(self.loc))]
        return torch.stack(parts).logsumexp(0)

    def _component(self, u: Tensor, m: int) -> Tensor:
        tril = self.precision_tril[m]
        white = (u - self.loc[m]) @ tril
        log_norm = tril.diagonal().log().sum() - 0.5 * len(tril) * math.log(math.tau)
        return self.log_mixing[m] + log_norm - 0.5 * white.square().sum(-1)

    def counts(self, num_samples: int) -> Tensor:
        """How many of ``num_samples`` draws each normal gives, proportional to within 1, shape ``(M,)``."""
        ends = (self.log_mixing.exp().cumsum(0) * num_samples).round().long()
        return torch.diff(ends, prepend=ends.new_zeros(1))

    def colour(self, white: Tensor) -> Tensor:
        """White rows ``(S, D)`` to draws, stratified: the first ``counts[0]`` rows to the first normal."""
        parts = white.split(self.counts(len(white)).tolist())
        rows = [
            loc + torch.linalg.solve_triangular(tril.mT, part.mT, upper=True).mT
            for part, loc, tril in zip(parts, self.loc, self.precision_tril, strict=True)
        ]
        return torch.cat(rows)


def moment_normal(draws: Tensor) -> NormalMixture:
    """The normal with the mean and covariance of rows ``(S, D)``."""
    precision = torch.linalg.inv(torch.cov(draws.mT).reshape(draws.shape[1], draws.shape[1]))
    tril = torch.linalg.cholesky(0.5 * (precision + precision.mT))
    return NormalMixture(draws.new_zeros(1), draws.mean(0).unsqueeze(0), tril.unsqueeze(0))
