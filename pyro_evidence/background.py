"""Distributions of data of which a known share is spread evenly over a box."""

from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.gaps import WithGaps, Wrapped
from pyro_evidence.ops.mixture_background import Background


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
        """The same for a larger batch."""
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
