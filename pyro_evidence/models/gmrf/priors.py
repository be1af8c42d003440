"""Penalised-complexity priors: exponential in the distance to the simpler model; Simpson et al. (2017)."""

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all

from pyro_evidence.errors import BadInput
from pyro_evidence.numerics.batched import bisected
from pyro_evidence.program.distributions import OfArguments


def _check(name: str, upper: Any, probability: Any, highest: float) -> None:
    u, a = torch.as_tensor(upper), torch.as_tensor(probability)
    if not bool(((u > 0) & (u < highest)).all() & ((a > 0) & (a < 1)).all()):
        raise BadInput(
            f"{name}({upper}, {probability}); expected a value above 0{'' if highest == math.inf else ' and below 1'}, "
            f"then the probability, between 0 and 1, that it is passed."
        )


def PCScale(upper: Any, probability: Any) -> dist.Exponential:
    """A prior of a scale that is above ``upper`` with a given probability: it shrinks towards no effect at all.

    :param upper: above 0, the batch's shape.
    :param probability: that the scale is larger, between 0 and 1.
    :return: an exponential distribution.  Simpson et al. (2017), section 3.3.

    >>> round(float(1.0 - PCScale(2.0, 0.01).cdf(torch.tensor(2.0))), 4)
    0.01

    :raises BadInput: for a probability that is none, or the two in the wrong order.
    """
    _check("PCScale", upper, probability, math.inf)
    upper, probability = broadcast_all(upper, probability)
    return dist.Exponential(-probability.log() / upper)


def PCRange(lower: Any, probability: Any) -> dist.InverseGamma:
    """A prior of the range of a field in the plane that is below ``lower`` with a given probability.

    It shrinks towards an infinite range, a plane without variation.

    :param lower: above 0, the batch's shape.
    :param probability: that the range is smaller, between 0 and 1.
    :return: an inverse gamma distribution of concentration 1.  Fuglstad, Simpson, Lindgren and Rue (2019), theorem 2.6.

    >>> draws = PCRange(10.0, 0.05).sample((100_000,))
    >>> bool(((draws < 10.0).double().mean() - 0.05).abs() < 0.005)
    True

    :raises BadInput: for a probability that is none, or the two in the wrong order.
    """
    _check("PCRange", lower, probability, math.inf)
    lower, probability = broadcast_all(lower, probability)
    return dist.InverseGamma(torch.ones_like(lower), -probability.log() * lower)


class PCCorrelation(OfArguments):
    """A prior of a correlation, exponential in its distance to none, or to one; Sorbye and Rue (2017).

    :param bound: strictly between 0 and 1 towards none; between -1 and 1 towards one.
    :param probability: towards none, that the correlation is larger in size than ``bound``; towards one, that it is
        larger.
    :param towards: 0, no correlation; or 1, a random walk.

    >>> draws = PCCorrelation(0.5, 0.3).sample((100_000,))
    >>> bool(((draws.abs() > 0.5).double().mean() - 0.3).abs() < 0.01)
    True

    :raises BadInput: for a bound or a probability outside of its range; towards one, for a probability that no prior of
        the family has: ``sqrt((1 - bound) / 2)`` and below.
    """

    arg_constraints = {"rate": constraints.positive}  # noqa: RUF012
    support = constraints.interval(-1.0, 1.0)
    has_rsample = False

    def __init__(self, bound: Any, probability: Any, towards: int = 0, validate_args: bool | None = None) -> None:
        bound, probability = broadcast_all(bound, probability)
        if towards not in (0, 1):
            raise BadInput(f"PCCorrelation(towards={towards}); expected 0 or 1.")
        self.towards = towards
        if towards == 0:
            _check("PCCorrelation", bound, probability, 1.0)
            rate = -probability.log() / (-torch.log1p(-bound.square())).sqrt()
        else:
            rate = _rate_towards_one(bound, probability)
        self.rate = rate
        super().__init__(rate.shape, validate_args=validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density, nats."""
        if self._validate_args:
            self._validate_sample(value)
        if self.towards == 1:
            distance = (1.0 - value).sqrt()
            normaliser = torch.log(-torch.expm1(-math.sqrt(2.0) * self.rate))
            return self.rate.log() - self.rate * distance - (2.0 * distance).log() - normaliser
        # the distance is about |value| near 0, where |value| / distance is 1
        square = value.square()
        near = square < torch.finfo(value.dtype).eps ** 0.5
        safe = torch.where(near, torch.full_like(square, 0.25), square)
        ratio = torch.where(near, 1.0 + 0.5 * square, safe / -torch.log1p(-safe))  # (value / distance)^2
        distance = value.abs() / ratio.sqrt()
        ratio = torch.where(near, 1.0 - 0.5 * square, ratio)
        return (0.5 * self.rate).log() - self.rate * distance + 0.5 * ratio.log() - torch.log1p(-square)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws: of the distance, then of the sign."""
        shape = self._extended_shape(sample_shape)
        with torch.no_grad():
            u = torch.rand(shape, dtype=self.rate.dtype, device=self.rate.device)
            if self.towards == 1:
                distance = -torch.log1p(u * torch.expm1(-math.sqrt(2.0) * self.rate)) / self.rate
                return 1.0 - distance.square()
            distance = -torch.log1p(-u) / self.rate
            sign = 2.0 * (torch.rand_like(u) < 0.5).to(u) - 1.0
            return sign * (-torch.expm1(-distance.square())).sqrt()


def _rate_towards_one(bound: Tensor, probability: Tensor) -> Tensor:
    """The rate at which the correlation is above ``bound`` with the given probability, by bisection."""
    distance, widest = (1.0 - bound).sqrt().double(), math.sqrt(2.0)
    if not bool(((bound > -1) & (bound < 1) & (probability < 1) & (probability > distance / widest)).all()):
        raise BadInput(
            f"PCCorrelation({bound.tolist()}, {probability.tolist()}, towards=1); expected a bound between -1 and 1, "
            f"and a probability between sqrt((1 - bound) / 2) = {(distance / widest).tolist()} and 1."
        )

    def is_before(log_rate: Tensor) -> Tensor:
        rate = log_rate.exp()
        return torch.expm1(-rate * distance) / torch.expm1(-rate * widest) <= probability

    most = torch.full_like(distance, 30.0)
    return bisected(is_before, -most, most).exp().to(bound)
