"""Distributions of data with gaps, integrated out exactly, and of data of which a share is spread over a box."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal, MixtureSameFamily, MultivariateNormal

from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.program import predictors


@dataclass(frozen=True, eq=False)
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

    def blend(self, kernels: Tensor, uniform: Tensor) -> Tensor:
        """Expectations ``(..., m)`` under the kernels and the uniform density, weighted by their shares."""
        share = self.share.unsqueeze(-1)
        return (1.0 - share) * kernels + share * uniform

    def double(self) -> "Background":
        """This background in float64."""
        return Background(self.share.double(), self.low.double(), self.high.double())

    def of(self, outputs: Tensor) -> "Background":
        """The marginal of some outputs."""
        return Background(self.share, self.low[outputs], self.high[outputs])


class Wrapped(TorchDistribution):
    """A distribution of the same kind of data as ``base_dist``, with its support and its shapes."""

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012  torch declares it so

    def __init__(self, base_dist: Any) -> None:
        self.base_dist = base_dist
        super().__init__(base_dist.batch_shape, base_dist.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        return self.base_dist.support


class OfArguments(TorchDistribution):
    """A distribution whose batch is that of its arguments."""

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """The same distribution for each element of a larger batch."""
        new, shape = self._get_checked_instance(type(self), _instance), torch.Size(batch_shape)
        new.__dict__.update(self.__dict__)
        for name, constraint in self.arg_constraints.items():
            value = getattr(self, name)
            if value is not None:
                setattr(new, name, value.expand(shape + value.shape[value.dim() - constraint.event_dim :]))
        super(OfArguments, new).__init__(shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new


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
        return WithGaps(self.base_dist.expand(batch_shape), self.seen)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self.base_dist.sample(torch.Size(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of what was seen, nats, batch shape; the value elsewhere does not matter."""
        if isinstance(self.base_dist, MixtureSameFamily):
            axis = -1 - len(self.event_shape)
            component, seen = self.base_dist.component_distribution, self.seen.unsqueeze(axis)
            each = _log_prob(component, value.unsqueeze(axis), seen)
            return (self.base_dist.mixture_distribution.logits.log_softmax(-1) + each).logsumexp(-1)
        return _log_prob(self.base_dist, value, self.seen)


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


class WithBackground(Wrapped):
    """``base_dist`` for most data, uniform over a box for the rest; the data are numbers or vectors.

    :param base_dist: the distribution of most data; gaps may be integrated out of it.
    :param background: the share of the rest, and the box.
    :raises UnsupportedModel: when a datum is more than a vector.
    """

    def __init__(self, base_dist: Any, background: Background) -> None:
        if len(base_dist.event_shape) > 1:
            raise UnsupportedModel(
                f"a background for data of shape {tuple(base_dist.event_shape)} each; expected numbers or "
                "vectors. Flatten each datum."
            )
        self.background = background
        super().__init__(base_dist)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "WithBackground":
        return WithBackground(self.base_dist.expand(batch_shape), self.background)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws, of which a share is uniform."""
        box, most = self.background, self.base_dist.sample(torch.Size(sample_shape))
        vectors = self._vectors(most)
        place = box.low + torch.rand_like(vectors) * (box.high - box.low)
        pick = torch.rand_like(vectors[..., :1]) < box.share
        return torch.where(pick, place, vectors).reshape(most.shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density, nats, batch shape.

        :raises BadInput: when the box has no volume.
        """
        flat = (~(self.background.high > self.background.low)).nonzero().flatten().tolist()
        if flat:
            raise BadInput(
                f"the background's box has no width in columns {flat}: the data are constant there, or a single one; "
                f"expected low < high. Drop these columns, or give with_background(model, low=..., high=...)."
            )
        seen = torch.where(self.base_dist.seen, value, torch.nan) if isinstance(self.base_dist, WithGaps) else value
        most = self.base_dist.log_prob(value) + self.background.log_rest
        uniform = self.background.log_prob(self._vectors(seen)).expand_as(most)
        # logaddexp has no second derivative where the two are far apart
        return torch.stack([most, uniform]).logsumexp(0)

    def _vectors(self, value: Tensor) -> Tensor:
        return value if self.event_shape else value.unsqueeze(-1)
