"""Walks in time: differences of first or second order, and a stationary autoregression."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all

from pyro_evidence.errors import BadInput
from pyro_evidence.models.gmrf.field import (
    LOG_TWO_PI,
    GaussianField,
    Skeleton,
    anchor_precision,
    log_normaliser_at,
    only_first,
    parameters,
)


class RandomWalk(GaussianField):
    """Differences of first or second order are independent normals.

    :param scale: standard deviation of a difference, the batch's shape.
    :param size: number of values.
    :param order: 1, differences of neighbours; 2, differences of differences.
    :param level: standard deviation of the first ``order`` values; None takes away level (and slope) instead.

    >>> RandomWalk(scale=1.0, size=3, level=1.0).log_prob(torch.tensor([0.0, 1.0, 3.0]))  # Normal(0, 1) at 0, 1 and 2
    tensor(-5.2568)
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive}

    def __init__(
        self, scale: Any, size: int, order: int = 1, level: Any = None, validate_args: bool | None = None
    ) -> None:
        if order not in (1, 2) or size <= order:
            raise BadInput(f"RandomWalk(size={size}, order={order}); expected order 1 or 2, and more values than that.")
        self.scale: Any
        self.level: Any
        self.scale, self.level = parameters(scale, level)
        skeleton, steps = _walk(size, order, self.scale.device), size - order
        weights = torch.tensor([[-1.0, 1.0], [1.0, -2.0, 1.0]][order - 1], device=self.scale.device)
        coefficients = torch.cat([weights.expand(steps, -1), only_first(order, order + 1, weights)]).to(self.scale)
        of_steps = (self.scale**-2).unsqueeze(-1).expand(*self.scale.shape, steps)
        anchors = anchor_precision(self.level, self.scale).unsqueeze(-1).expand(*self.scale.shape, order)
        spread = 0.5 * math.log((size**3 - size) / 12.0) if order == 2 else 0.0
        unit = log_normaliser_at(steps, size, 0.0, -0.5 * math.log(size) - spread, self.level)
        super().__init__(
            skeleton,
            (coefficients, torch.cat([of_steps, anchors], -1)),
            unit - steps * self.scale.log(),
            torch.Size([size]),
            validate_args,
        )


def _walk(size: int, order: int, device: torch.device) -> Skeleton:
    first = torch.arange(size - order, device=device).unsqueeze(-1)
    steps = first + torch.arange(order + 1, device=device)
    anchors = torch.arange(order, device=device).unsqueeze(-1).expand(order, order + 1)
    time = torch.arange(size, dtype=torch.float64, device=device) - 0.5 * (size - 1)
    null = torch.stack([torch.full_like(time, size**-0.5), time / time.norm()][:order], -1)
    return Skeleton(torch.cat([steps, anchors]), null)


class AR1(GaussianField):
    """A stationary autoregression ``x_t = coefficient x_{t-1} + Normal(0, scale)``.

    :param scale: standard deviation of an innovation, the batch's shape.
    :param coefficient: between -1 and 1.
    :param size: number of values.

    >>> AR1(scale=1.0, coefficient=0.5, size=1000).sample().shape
    torch.Size([1000])
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "scale": constraints.positive,
        "coefficient": constraints.interval(-1.0, 1.0),
    }

    def __init__(self, scale: Any, coefficient: Any, size: int, validate_args: bool | None = None) -> None:
        if size < 2:
            raise BadInput(f"AR1(size={size}); expected at least 2 values.")
        self.scale: Tensor
        self.coefficient: Tensor
        self.scale, self.coefficient = broadcast_all(scale, coefficient)
        device, shape = self.scale.device, self.scale.shape
        first = torch.arange(size - 1, device=device).unsqueeze(-1)
        index = torch.cat([first + torch.arange(2, device=device), torch.zeros_like(first[:1]).expand(1, 2)])
        skeleton = Skeleton(index, torch.zeros(size, 0, dtype=torch.float64, device=device))
        one = torch.ones_like(self.scale)
        steps = torch.stack([-self.coefficient, one], -1).unsqueeze(-2).expand(*shape, size - 1, 2)
        start = torch.stack([one, 0.0 * one], -1).unsqueeze(-2)
        shrunk = 1.0 - self.coefficient.square()
        precision = torch.cat([one.unsqueeze(-1).expand(*shape, size - 1), shrunk.unsqueeze(-1)], -1)
        precision = precision * self.scale.unsqueeze(-1) ** -2
        normaliser = 0.5 * shrunk.log() - size * (self.scale.log() + 0.5 * LOG_TWO_PI)
        factors = (torch.cat([steps, start], -2), precision)
        super().__init__(skeleton, factors, normaliser, torch.Size([size]), validate_args)
