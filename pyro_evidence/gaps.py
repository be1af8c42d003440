"""Distributions of data with gaps: elements that were not observed are integrated out, exactly."""

import math
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal, MixtureSameFamily, MultivariateNormal

from pyro_evidence import predictors
from pyro_evidence.errors import UnsupportedModel


class Wrapped(TorchDistribution):
    """A distribution of the same kind of data as ``base_dist``, with its support and its shapes."""

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012  torch declares it so

    def __init__(self, base_dist: Any) -> None:
        self.base_dist = base_dist
        super().__init__(base_dist.batch_shape, base_dist.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """That of ``base_dist``."""
        return self.base_dist.support


class WithGaps(Wrapped):
    """The distribution of the elements that were ``seen``; the others are integrated out.

    Exact for independent elements, ``Normal(...).to_event(1)`` and the like, for ``MultivariateNormal``, of low
    rank too, and for ``MixtureSameFamily`` of these.

    :param base_dist: the distribution of whole data.
    :param seen: which elements were observed, bool, shape ``(N,)`` + event shape.
    """

    def __init__(self, base_dist: Any, seen: Tensor) -> None:
        self.seen = seen
        super().__init__(base_dist)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "WithGaps":
        """The same for a larger batch."""
        return WithGaps(self.base_dist.expand(batch_shape), self.seen)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Whole data."""
        return self.base_dist.sample(torch.Size(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of what was seen, nats, batch shape; the value elsewhere does not matter."""
        if isinstance(self.base_dist, MixtureSameFamily):
            each = _log_prob(self.base_dist.component_distribution, value.unsqueeze(self._axis), self._seen_by_each)
            return (self.base_dist.mixture_distribution.logits.log_softmax(-1) + each).logsumexp(-1)
        return _log_prob(self.base_dist, value, self.seen)

    @property
    def _axis(self) -> int:
        return -1 - len(self.event_shape)

    @property
    def _seen_by_each(self) -> Tensor:
        return self.seen.unsqueeze(self._axis)


def _log_prob(fn: Any, value: Tensor, seen: Tensor) -> Tensor:
    parts = predictors.unwrapped(fn)
    if isinstance(parts.base, MultivariateNormal | LowRankMultivariateNormal) and not parts.inner:
        return _normal(parts.base, value, seen)
    if parts.mixing is not None or parts.base.event_shape or not parts.base.support.event_dim == 0:
        raise UnsupportedModel(
            f"{type(parts.base).__name__} with missing elements; expected independent elements (.to_event(1)), "
            f"MultivariateNormal or LowRankMultivariateNormal, or a MixtureSameFamily of these: others cannot be "
            f"integrated over in closed form."
        )
    each = torch.where(seen, parts.base.log_prob(torch.where(seen, value, 0.0)), 0.0)
    return each.sum(list(range(-parts.inner, 0))) if parts.inner else each


def _normal(fn: Any, value: Tensor, seen: Tensor) -> Tensor:
    """The marginal of what was seen: elsewhere the covariance is made the identity and the offset zero."""
    kept = seen.to(fn.loc)
    both = kept.unsqueeze(-1) * kept.unsqueeze(-2)
    covariance = torch.where(both > 0, fn.covariance_matrix, torch.diag_embed(1.0 - kept))
    offset = torch.where(seen, value - fn.loc, 0.0)
    tril = torch.linalg.cholesky(covariance)
    tril = tril.expand(*offset.shape[:-1], *tril.shape[-2:])
    white = torch.linalg.solve_triangular(tril, offset.unsqueeze(-1), upper=False).squeeze(-1)
    log_det = tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * white.square().sum(-1) - log_det - 0.5 * math.log(math.tau) * kept.sum(-1)
