"""A mixture of Gaussians for every datum, or one for all: moments, distribution functions, draws."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MixtureDensity:
    """``p(y_n) = sum_k mixing_k N(y_n | loc_nk, tril_nk tril_nk')``; the data axis has size 1 where all are alike."""

    log_mixing: Tensor  # (N or 1, K)
    loc: Tensor  # (N or 1, K, m)
    tril: Tensor  # (N or 1, K, m, m)

    @property
    def _resp(self) -> Tensor:
        return self.log_mixing.exp().unsqueeze(-1)

    @property
    def mean(self) -> Tensor:
        """Mean of each output, shape ``(N or 1, m)``."""
        return (self._resp * self.loc).sum(-2)

    @property
    def variance(self) -> Tensor:
        """Variance of each output, shape ``(N or 1, m)``."""
        within = self.tril.square().sum(-1)
        return (self._resp * (within + (self.loc - self.mean.unsqueeze(-2)).square())).sum(-2)

    def component_log_prob(self, y: Tensor) -> Tensor:
        """``log p(y_n, k)``, nats, shape ``(N, K)``; elements of ``y`` that are nan are integrated out."""
        seen = ~y.isnan().unsqueeze(-2)
        offset = torch.where(seen, y.unsqueeze(-2) - self.loc, 0.0).unsqueeze(-1)
        marginal = self.tril if bool(seen.all()) else _seen_tril(self.tril, seen)
        tril = marginal.expand(*offset.shape[:-2], *self.tril.shape[-2:])
        white = torch.linalg.solve_triangular(tril, offset, upper=False).squeeze(-1)
        log_det = marginal.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return self.log_mixing - 0.5 * white.square().sum(-1) - log_det - 0.5 * math.log(math.tau) * seen.sum(-1)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density at ``y`` ``(N, m)``, nats, shape ``(N,)``."""
        return self.component_log_prob(y).logsumexp(-1)

    def responsibilities(self, y: Tensor) -> Tensor:
        """``p(k | y_n)``, shape ``(N, K)``."""
        return self.component_log_prob(y).softmax(-1)

    def cdf(self, y: Tensor) -> Tensor:
        """Marginal distribution function of each output at ``y`` ``(..., N, m)``, same shape."""
        scale = self.tril.norm(dim=-1)
        each = torch.special.ndtr((y.unsqueeze(-2) - self.loc) / scale)
        return (self._resp * each).sum(-2)

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """Marginal quantiles of each output by bisection, shape ``(len(q), N or 1, m)``, to 1e-12 of the range."""
        levels = torch.as_tensor(q, dtype=self.loc.dtype, device=self.loc.device).reshape(-1, 1, 1)
        low, high = self._bracket(levels)
        for _ in range(60):
            middle = 0.5 * (low + high)
            below = self.cdf(middle) < levels
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return 0.5 * (low + high)

    def _bracket(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Values between which the quantiles are, shape ``(len(q), N or 1, m)`` each."""
        reach = torch.special.ndtri(levels).unsqueeze(-2) * self.tril.norm(dim=-1) + self.loc
        on = (self._resp > 0).expand_as(reach)
        low = torch.where(on, reach, torch.inf).amin(-2)  # each kernel's own quantile encloses the mixture's
        high = torch.where(on, reach, -torch.inf).amax(-2)
        return low, high

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws, shape ``(S, N or 1, m)``."""
        probs = self.log_mixing.exp().expand(len(self.loc), -1)
        which = torch.multinomial(probs, num_samples, replacement=True, generator=generator).T  # (S, N)
        rows = torch.arange(len(probs), device=probs.device)
        white = torch.randn(*which.shape, self.loc.shape[-1], 1, generator=generator, dtype=self.loc.dtype)
        tril = self.tril.expand(len(probs), *self.tril.shape[1:])
        return self.loc[rows, which] + (tril[rows, which] @ white.to(tril)).squeeze(-1)

    def marginal(self, outputs: Sequence[int]) -> "MixtureDensity":
        """The density of some of the outputs, in the order given."""
        index = torch.as_tensor(outputs, device=self.loc.device)
        rows = self.tril[..., index, :]
        return MixtureDensity(self.log_mixing, self.loc[..., index], torch.linalg.cholesky(rows @ rows.mT))

    def conditional(self, outputs: Sequence[int], values: Tensor) -> "MixtureDensity":
        """The density of the other outputs, given ``values`` ``(N, len(outputs))`` of these."""
        given = torch.as_tensor(outputs, device=self.loc.device)
        left = torch.tensor(
            [i for i in range(self.loc.shape[-1]) if i not in set(given.tolist())], device=self.loc.device
        )
        covariance = self.tril @ self.tril.mT
        known, cross = covariance[..., given[:, None], given], covariance[..., left[:, None], given]
        gain = torch.linalg.solve(known, cross.mT).mT
        offset = (values.unsqueeze(-2) - self.loc[..., given]).unsqueeze(-1)
        loc = self.loc[..., left] + (gain @ offset).squeeze(-1)
        rest = covariance[..., left[:, None], left] - gain @ cross.mT
        log_mixing = self.marginal(given.tolist()).component_log_prob(values).log_softmax(-1)
        tril = torch.linalg.cholesky(0.5 * (rest + rest.mT))
        return MixtureDensity(log_mixing, loc, tril.expand(*loc.shape, loc.shape[-1]))


def _seen_tril(tril: Tensor, seen: Tensor) -> Tensor:
    """Cholesky factors of the covariances of what was seen, with the identity elsewhere."""
    kept = seen.to(tril)
    covariance = (tril @ tril.mT) * kept.unsqueeze(-1) * kept.unsqueeze(-2)
    return torch.linalg.cholesky(covariance + torch.diag_embed(1.0 - kept))
