"""A mixture of Gaussians for every datum, or one for all, with a uniform background: moments, distributions, draws."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.fitting.process_state import entry_point
from pyro_evidence.numerics.batched import CACHED_NUMBERS, bisected
from pyro_evidence.program.distributions import Background


@entry_point
@dataclass(frozen=True, eq=False)
class MixtureDensity:
    """``p(y_n) = sum_k mixing_k N(y_n | loc_nk, tril_nk tril_nk')``; the data axis has size 1 where all are alike.

    :ivar background: a uniform density beside the Gaussians, which has its share of all data; None for none.
        ``log_mixing`` is that among the Gaussians alone.
    """

    log_mixing: Tensor  # (N or 1, K)
    loc: Tensor  # (N or 1, K, m)
    tril: Tensor  # (N or 1, K, m, m)
    background: Background | None = None

    @property
    def _resp(self) -> Tensor:
        return self.log_mixing.exp().unsqueeze(-1)

    @property
    def mean(self) -> Tensor:
        """Mean of each output, shape ``(N or 1, m)``."""
        ours, box = (self._resp * self.loc).sum(-2), self.background
        return ours if box is None else box.blend(ours, 0.5 * (box.low + box.high))

    @property
    def variance(self) -> Tensor:
        """Variance of each output, shape ``(N or 1, m)``."""
        within, mean, box = self.tril.square().sum(-1), self.mean, self.background
        ours = (self._resp * (within + (self.loc - mean.unsqueeze(-2)).square())).sum(-2)
        if box is None:
            return ours
        return box.blend(ours, (box.high - box.low).square() / 12.0 + (0.5 * (box.low + box.high) - mean).square())

    def rows(self, index: slice) -> "MixtureDensity":
        """The density of some of the data."""
        if len(self.loc) == 1:
            return self
        box, own = self.background, {n: x[index] for n in ("log_mixing", "tril") if len(x := getattr(self, n)) > 1}
        if box is not None and box.share.dim():
            box = replace(box, share=box.share[index])
        return replace(self, loc=self.loc[index], background=box, **own)

    def _by_rows(self, y: Tensor, of_rows: Callable[["MixtureDensity", Tensor], Tensor]) -> Tensor:
        """``of_rows`` of a few data at a time, their densities beside them: nothing of the size of all is held."""
        single = len(self.tril) == 1 and not bool(y.isnan().any())
        size = max(1, CACHED_NUMBERS // (self.loc[0] if single else self.tril[0]).numel())
        some = range(0, max(1, len(y)), size)
        return torch.cat([of_rows(self.rows(slice(i, i + size)), y[i : i + size]) for i in some])

    def component_log_prob(self, y: Tensor) -> Tensor:
        """``log p(y_n, k)``, nats, shape ``(N, K)``; elements of ``y`` that are nan are integrated out.

        A background has the rest of the mass.
        """
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
        found = self.log_mixing - 0.5 * squares - log_det - 0.5 * math.log(math.tau) * seen.sum(-1)
        return found if self.background is None else found + self.background.log_rest.unsqueeze(-1)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density at ``y`` ``(N, m)``, nats, shape ``(N,)``."""
        ours = self._by_rows(y, lambda density, few: density._component_log_prob(few).logsumexp(-1))
        return ours if self.background is None else torch.logaddexp(ours, self.background.log_prob(y))

    def responsibilities(self, y: Tensor) -> Tensor:
        """``p(k | y_n)``, shape ``(N, K)``; what the rows lack of one is a background's."""
        ours = self.component_log_prob(y)
        return ours.softmax(-1) if self.background is None else (ours - self.log_prob(y).unsqueeze(-1)).exp()

    def cdf(self, y: Tensor) -> Tensor:
        """Marginal distribution function of each output at ``y`` ``(..., N, m)``, same shape."""
        scale = self.tril.norm(dim=-1)
        ours = (self._resp * torch.special.ndtr((y.unsqueeze(-2) - self.loc) / scale)).sum(-2)
        box = self.background
        return ours if box is None else box.blend(ours, ((y - box.low) / (box.high - box.low)).clamp(0.0, 1.0))

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """Marginal quantiles of each output by bisection, to rounding, shape ``(len(q), N or 1, m)``."""
        levels = torch.as_tensor(q, dtype=self.loc.dtype, device=self.loc.device).reshape(-1, 1, 1)
        reach = torch.special.ndtri(levels).unsqueeze(-2) * self.tril.norm(dim=-1) + self.loc
        on = (self._resp > 0).expand_as(reach)
        low = torch.where(on, reach, torch.inf).amin(-2)  # each kernel's own quantile encloses the mixture's
        high = torch.where(on, reach, -torch.inf).amax(-2)
        if self.background is not None:
            uniform = self.background.low + levels * (self.background.high - self.background.low)
            low, high = torch.minimum(low, uniform), torch.maximum(high, uniform)
        return bisected(lambda y: self.cdf(y) < levels, low, high)

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws, shape ``(S, N or 1, m)``."""
        probs = self.log_mixing.exp().expand(len(self.loc), -1)
        which = torch.multinomial(probs, num_samples, replacement=True, generator=generator).T  # (S, N)
        rows = torch.arange(len(probs), device=probs.device)
        white = torch.randn(*which.shape, self.loc.shape[-1], 1, generator=generator, dtype=self.loc.dtype)
        tril = self.tril.expand(len(probs), *self.tril.shape[1:])
        ours, box = self.loc[rows, which] + (tril[rows, which] @ white.to(tril)).squeeze(-1), self.background
        if box is None:
            return ours
        pick = torch.rand(*ours.shape[:2], generator=generator, dtype=ours.dtype).to(ours) < box.share
        place = torch.rand(ours.shape, generator=generator, dtype=ours.dtype).to(ours)
        return torch.where(pick.unsqueeze(-1), box.low + place * (box.high - box.low), ours)

    def marginal(self, outputs: Sequence[int]) -> "MixtureDensity":
        """The density of some of the outputs, in the order given."""
        index = torch.as_tensor(outputs, device=self.loc.device)
        rows, box = self.tril[..., index, :], self.background
        tril = torch.linalg.cholesky(rows @ rows.mT)
        return MixtureDensity(self.log_mixing, self.loc[..., index], tril, None if box is None else box.of(index))

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
        seen, box = self.marginal(given.tolist()), self.background
        log_mixing = seen.component_log_prob(values).log_softmax(-1)
        tril = torch.linalg.cholesky(0.5 * (rest + rest.mT))
        if box is not None and seen.background is not None:
            share = (seen.background.log_prob(values) - seen.log_prob(values)).exp()
            box = replace(box.of(left), share=share)
        return MixtureDensity(log_mixing, loc, tril.expand(*loc.shape, loc.shape[-1]), box)
