"""A uniform density beside the kernels of a mixture, for data that belong to none of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.ops.mixture import MixtureData
from pyro_evidence.ops.mixture_density import MixtureDensity


@dataclass(frozen=True)
class Background:
    r"""A share of all data that is uniform over a box; the kernels have the rest.

    .. math:: p(y) = (1 - s) \sum_k \pi_k\, p_k(y) + s \prod_i [l_i \le y_i \le h_i] / (h_i - l_i)
    """

    share: Tensor  # () or (N,) s, from 0 to below 1
    low: Tensor  # (m,)
    high: Tensor  # (m,)

    @property
    def log_rest(self) -> Tensor:
        """Log share of the kernels together, shape of ``share``."""
        return (-self.share).log1p()

    def log_prob(self, y: Tensor) -> Tensor:
        """Log of share times uniform density at ``y`` ``(..., m)``, nats, shape ``(...)``; -inf outside the box.

        Elements that are nan are integrated out.
        """
        seen = ~y.isnan()
        inside = (~seen | ((y >= self.low) & (y <= self.high))).all(-1)
        log_density = -(seen.to(y) * (self.high - self.low).log()).sum(-1)
        return torch.where(inside, log_density + self.share.log(), -math.inf)

    def double(self) -> "Background":
        """The same in float64."""
        return Background(self.share.double(), self.low.double(), self.high.double())

    def of(self, outputs: Tensor) -> "Background":
        """The marginal of some outputs."""
        return Background(self.share, self.low[outputs], self.high[outputs])


def beside(data: MixtureData, background: Background, Y: Tensor, unit: Tensor | None) -> MixtureData:
    """The data of a mixture with a background beside its kernels.

    :param Y: the responses, ``(N, m)``, in the units of the background's box; nan where missing.
    :param unit: that in which ``data`` has them, ``(m,)``; None for the same.
    """
    floor = background.log_prob(Y) - background.log_rest
    if unit is not None:
        floor = floor + (~Y.isnan()).to(Y) @ unit.log()
    return replace(data, floor=floor, log_share=float(background.log_rest))


@dataclass(frozen=True)
class MixtureWithBackground(MixtureDensity):
    """A mixture of Gaussians beside a uniform density; ``log_mixing`` is that among the kernels alone."""

    background: Background

    @property
    def kernels(self) -> MixtureDensity:
        """The kernels alone."""
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

    def component_log_prob(self, y: Tensor) -> Tensor:
        """``log p(y_n, k)`` of the kernels, nats, shape ``(N, K)``; the background is what is left of the density."""
        return super().component_log_prob(y) + self.background.log_rest.unsqueeze(-1)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density at ``y`` ``(N, m)``, nats, shape ``(N,)``."""
        return torch.logaddexp(self.component_log_prob(y).logsumexp(-1), self.background.log_prob(y))

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
