"""A mixture of Gaussians for every datum, or one for all, with a uniform background: moments, distributions, draws."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.fitting.process_state import within_memory
from pyro_evidence.program.distributions import Background

ROWS = 2**18  # numbers that the data that are looked at together may make


@within_memory
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

    def rows(self, index: slice) -> "MixtureDensity":
        """The density of some of the data."""
        return self if len(self.loc) == 1 else replace(self, loc=self.loc[index], **self._of_each(index))

    def _of_each(self, index: slice) -> dict[str, Any]:
        """Further arguments of the density that differ from datum to datum."""
        each = {name: getattr(self, name) for name in ("log_mixing", "tril")}
        return {name: x[index] for name, x in each.items() if len(x) > 1}

    def _by_rows(self, y: Tensor, of_rows: Callable[["MixtureDensity", Tensor], Tensor]) -> Tensor:
        """``of_rows`` of a few data at a time, their densities beside them: nothing of the size of all is held."""
        single = len(self.tril) == 1 and not bool(y.isnan().any())
        size = max(1, ROWS // (self.loc[0] if single else self.tril[0]).numel())
        some = range(0, max(1, len(y)), size)
        return torch.cat([of_rows(self.rows(slice(i, i + size)), y[i : i + size]) for i in some])

    def component_log_prob(self, y: Tensor) -> Tensor:
        """``log p(y_n, k)``, nats, shape ``(N, K)``; elements of ``y`` that are nan are integrated out."""
        return self._by_rows(y, lambda density, few: density._component_log_prob(few))

    def _component_log_prob(self, y: Tensor) -> Tensor:
        seen = ~y.isnan().unsqueeze(-2)
        offset = torch.where(seen, y.unsqueeze(-2) - self.loc, 0.0)
        tril = self.tril
        if not bool(seen.all()):  # of the covariances of what was seen, with the identity elsewhere
            kept = seen.to(tril)
            covariance = (tril @ tril.mT) * kept.unsqueeze(-1) * kept.unsqueeze(-2)
            tril = torch.linalg.cholesky(covariance + torch.diag_embed(1.0 - kept))
        if len(tril) > 1:
            white = torch.linalg.solve_triangular(tril, offset.unsqueeze(-1), upper=False).squeeze(-1)
        else:
            white = torch.linalg.solve_triangular(tril[0], offset.permute(1, 2, 0), upper=False).permute(2, 0, 1)
        squares, log_det = white.square().sum(-1), tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return self.log_mixing - 0.5 * squares - log_det - 0.5 * math.log(math.tau) * seen.sum(-1)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density at ``y`` ``(N, m)``, nats, shape ``(N,)``."""
        return self._by_rows(y, lambda density, few: density._component_log_prob(few).logsumexp(-1))

    def responsibilities(self, y: Tensor) -> Tensor:
        """``p(k | y_n)``, shape ``(N, K)``."""
        return self.component_log_prob(y).softmax(-1)

    def cdf(self, y: Tensor) -> Tensor:
        """Marginal distribution function of each output at ``y`` ``(..., N, m)``, same shape."""
        scale = self.tril.norm(dim=-1)
        each = torch.special.ndtr((y.unsqueeze(-2) - self.loc) / scale)
        return (self._resp * each).sum(-2)

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """Marginal quantiles of each output by bisection, to rounding, shape ``(len(q), N or 1, m)``."""
        levels = torch.as_tensor(q, dtype=self.loc.dtype, device=self.loc.device).reshape(-1, 1, 1)
        low, high = self._bracket(levels)
        for _ in range(round(-math.log2(torch.finfo(levels.dtype).eps))):  # one for each binary digit
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
        left = torch.arange(self.loc.shape[-1], device=self.loc.device)
        left = left[~torch.isin(left, given)]
        covariance = self.tril @ self.tril.mT
        known, cross = covariance[..., given[:, None], given], covariance[..., left[:, None], given]
        gain = torch.linalg.solve(known, cross.mT).mT
        offset = (values.unsqueeze(-2) - self.loc[..., given]).unsqueeze(-1)
        loc = self.loc[..., left] + (gain @ offset).squeeze(-1)
        rest = covariance[..., left[:, None], left] - gain @ cross.mT
        log_mixing = self.marginal(given.tolist()).component_log_prob(values).log_softmax(-1)
        tril = torch.linalg.cholesky(0.5 * (rest + rest.mT))
        return MixtureDensity(log_mixing, loc, tril.expand(*loc.shape, loc.shape[-1]))


@within_memory
@dataclass(frozen=True)
class MixtureWithBackground(MixtureDensity):
    """A mixture of Gaussians beside a uniform density; ``log_mixing`` is that among the kernels alone."""

    background: Background

    @property
    def kernels(self) -> MixtureDensity:
        """The mixture without its background."""
        return MixtureDensity(self.log_mixing, self.loc, self.tril)

    def _blend(self, ours: Tensor, uniform: Tensor) -> Tensor:
        """Expectations ``(..., N or 1, m)`` under the two, weighted by their shares."""
        share = self.background.share.unsqueeze(-1)
        return (1.0 - share) * ours + share * uniform

    @property
    def mean(self) -> Tensor:
        """Mean of each output, shape ``(N or 1, m)``."""
        return self._blend(super().mean, 0.5 * (self.background.low + self.background.high))

    @property
    def variance(self) -> Tensor:
        """Variance of each output, shape ``(N or 1, m)``."""
        box, mean, ours = self.background, self.mean, self.kernels
        uniform = (box.high - box.low).square() / 12.0 + (0.5 * (box.low + box.high) - mean).square()
        return self._blend(ours.variance + (ours.mean - mean).square(), uniform)

    def _of_each(self, index: slice) -> dict[str, Any]:
        """Further arguments that differ from datum to datum: the background's share may."""
        box = self.background
        share = box.share[index] if box.share.dim() else box.share
        return super()._of_each(index) | {"background": Background(share, box.low, box.high)}

    def _component_log_prob(self, y: Tensor) -> Tensor:
        """Log density of the kernels; the background has the rest of the mass."""
        return super()._component_log_prob(y) + self.background.log_rest.unsqueeze(-1)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density at ``y`` ``(N, m)``, nats, shape ``(N,)``."""
        kernels = self._by_rows(y, lambda density, few: density._component_log_prob(few).logsumexp(-1))
        return torch.logaddexp(kernels, self.background.log_prob(y))

    def responsibilities(self, y: Tensor) -> Tensor:
        """``p(k | y_n)``, shape ``(N, K)``; what the rows lack of one is the background's."""
        return (self.component_log_prob(y) - self.log_prob(y).unsqueeze(-1)).exp()

    def cdf(self, y: Tensor) -> Tensor:
        """Marginal distribution function of each output at ``y`` ``(..., N, m)``, same shape."""
        box = self.background
        return self._blend(super().cdf(y), ((y - box.low) / (box.high - box.low)).clamp(0.0, 1.0))

    def _bracket(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Values between which the quantiles are, those of the box included."""
        low, high = super()._bracket(levels)
        box = self.background
        uniform = box.low + levels * (box.high - box.low)
        return torch.minimum(low, uniform), torch.maximum(high, uniform)

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws, shape ``(S, N or 1, m)``."""
        box, ours = self.background, super().sample(num_samples, generator)
        pick = torch.rand(*ours.shape[:2], generator=generator, dtype=ours.dtype).to(ours) < box.share
        place = torch.rand(ours.shape, generator=generator, dtype=ours.dtype).to(ours)
        return torch.where(pick.unsqueeze(-1), box.low + place * (box.high - box.low), ours)

    def marginal(self, outputs: Sequence[int]) -> "MixtureWithBackground":
        """The density of some of the outputs, in the order given."""
        ours = super().marginal(outputs)
        index = torch.as_tensor(outputs, device=self.loc.device)
        return MixtureWithBackground(ours.log_mixing, ours.loc, ours.tril, self.background.of(index))

    def conditional(self, outputs: Sequence[int], values: Tensor) -> "MixtureWithBackground":
        """The density of the other outputs, given ``values`` ``(N, len(outputs))`` of these."""
        ours, known = self.kernels.conditional(outputs, values), self.marginal(outputs)
        left = [i for i in range(self.loc.shape[-1]) if i not in set(outputs)]
        box = self.background.of(torch.as_tensor(left, device=self.loc.device))
        share = (known.background.log_prob(values) - known.log_prob(values)).exp()
        return MixtureWithBackground(ours.log_mixing, ours.loc, ours.tril, Background(share, box.low, box.high))
