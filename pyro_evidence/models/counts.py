"""Counts that are not zero."""

import math
from typing import Any, ClassVar

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

OFTEN = 0.1  # a chance of more than zero above which drawing again soon succeeds: a thousand rounds fail with 1e-46
LONGEST = 10_000.0  # a count at which the inversion stops: rounding may leave a rest that no term takes


class ZeroTruncated(TorchDistribution):
    """A distribution of counts, given that the count is not zero; with a probability of zero beside it, a hurdle model.

    Mullahy (1986).  ``dist.ZeroInflatedDistribution(ZeroTruncated(base), gate=p)`` is zero with probability ``p``.

    :param base: a distribution of counts from 0, such as ``dist.Poisson(rate)``.

    >>> import pyro.distributions as dist
    >>> import torch
    >>> from pyro_evidence.models.counts import ZeroTruncated
    >>> counts = ZeroTruncated(dist.Poisson(torch.tensor(0.5)))
    >>> round(float(counts.log_prob(torch.arange(1.0, 30.0)).exp().sum()), 4)
    1.0
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.nonnegative_integer  # of density zero at zero

    def __init__(self, base: Any, validate_args: bool | None = None) -> None:
        self.base = base
        super().__init__(base.batch_shape, base.event_shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "ZeroTruncated":
        """The same for a larger batch."""
        return ZeroTruncated(self.base.expand(batch_shape), validate_args=False)

    @property
    def _log_positive(self) -> Tensor:
        """``log P(k > 0)``: ``log(1 - exp(x))`` without cancellation on either side of ``x = -log 2``."""
        zero = self.base.log_prob(torch.zeros_like(self.base.mean))
        small = zero > -math.log(2.0)
        rare = (-torch.where(small, zero, -1.0).expm1()).log()
        return torch.where(small, rare, (-torch.where(small, -1.0, zero).exp()).log1p())

    def log_prob(self, value: Tensor) -> Tensor:
        """Nats, ``-inf`` at zero."""
        found = self.base.log_prob(value) - self._log_positive
        return torch.where(value > 0, found, -torch.inf)

    @property
    def mean(self) -> Tensor:
        """Shape of the batch."""
        return self.base.mean / self._log_positive.exp()

    @property
    def variance(self) -> Tensor:
        """Shape of the batch."""
        return (self.base.variance + self.base.mean.square()) / self._log_positive.exp() - self.mean.square()

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws of the base, those of zero drawn again; where these are most, the distribution function inverted."""
        with torch.no_grad():
            found: Tensor = self.base.sample(torch.Size(sample_shape))
            chance = self._log_positive.exp().expand(found.shape)
            missing = (chance > OFTEN) & (found == 0)
            while bool(missing.any()):
                found = torch.where(missing, self.base.sample(torch.Size(sample_shape)), found)
                missing = missing & (found == 0)
            seldom, count = chance <= OFTEN, torch.ones_like(found)
            left = torch.rand_like(found) * chance - self.base.log_prob(count).exp()
            while bool((seldom & (left > 0) & (count < LONGEST)).any()):
                count = torch.where(left > 0, count + 1.0, count)
                left = torch.where(left > 0, left - self.base.log_prob(count).exp(), left)
            return torch.where(seldom, count, found)
