"""Fields along a line: random walks, seasons, autoregressions, at equal or unequal distances."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pyro.distributions.util import broadcast_shape
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all

from pyro_evidence.errors import BadInput
from pyro_evidence.models.gmrf.constrained import Structure
from pyro_evidence.models.gmrf.field import Between, GaussianField, Unit, parameters
from pyro_evidence.numerics.derivatives import cached
from pyro_evidence.settings import check_count


class RandomWalk(GaussianField):
    """Differences of first or second order are independent normals; Rue and Held (2005), sections 3.3 and 3.4.

    At unequal distances ``d`` a difference of first order has the variance ``scale^2 d``; second order is the
    approximation of Lindgren and Rue (2008) to an integrated Wiener process.

    :param scale: standard deviation of a difference at distance one, the batch's shape; with ``scaled``, the field's
        typical standard deviation.
    :param size: number of values at distance one; or where they lie, increasing, ``(n,)``.
    :param order: 1, differences of neighbours; 2, differences of differences.
    :param level: standard deviation of the first ``order`` values (of one, if cyclic); None takes away the level
        (and the slope) instead: such values sum to zero.
    :param cyclic: whether the last value is a neighbour of the first, as the days of a year are.
    :param scaled: whether ``scale`` is made free of size and distances (Sorbye and Rue, 2014).

    >>> RandomWalk(scale=1.0, size=3, level=1.0).log_prob(torch.tensor([0.0, 1.0, 3.0]))  # Normal(0, 1) at 0, 1 and 2
    tensor(-5.2568)

    :raises BadInput: for too few values, and for locations that do not increase.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive}

    def __init__(
        self,
        scale: Any,
        size: int | Tensor,
        order: int = 1,
        level: Any = None,
        validate_args: bool | None = None,
        *,
        cyclic: bool = False,
        scaled: bool = False,
    ) -> None:
        self.scale, self.level = parameters(scale, level)
        unit = _walk(size, order, cyclic, self.scale.device)
        unit = unit.standardised if scaled else unit
        self.in_order = not (cyclic or scaled)
        super().__init__(*unit.factors(self.scale, self.level), torch.Size([unit.structure.size]), validate_args)


def _walk(size: Any, order: int, cyclic: bool, device: torch.device) -> Unit:
    places = torch.as_tensor(size) if isinstance(size, Sequence | Tensor | np.ndarray) else None
    if places is None or not places.dim():
        places, count = None, check_count("size", size, 1, "RandomWalk(scale, size, order) has the scale first.")
    else:
        count = len(places)
    least = 3 if cyclic else order + 1
    if order not in (1, 2) or count < least:
        raise BadInput(
            f"RandomWalk of {count} values, order={order}, cyclic={cyclic}; expected order 1 or 2, and {least} values "
            f"at least."
        )
    if places is None:
        return _regular_cycle(count, order, device) if cyclic else _open_walk(range(count), order, device)
    if cyclic:
        raise BadInput("RandomWalk(cyclic=True) at locations; expected their number: a circle has equal distances.")
    _check_increase(places)
    return _open_walk(tuple(places.detach().double().tolist()), order, device)


def _check_increase(locations: Tensor) -> None:
    if locations.dim() != 1 or len(locations) < 2 or not bool((locations.diff() > 0).all()):
        raise BadInput(
            f"locations of shape {tuple(locations.shape)} that do not increase; expected two or more in ascending "
            f"order: locations, place = torch.unique(x, return_inverse=True), and field[place] in the model."
        )


@cached(32)
def _open_walk(places: range | tuple[float, ...], order: int, device: torch.device) -> Unit:
    t = torch.tensor(places, dtype=torch.float64, device=device)
    size, d = len(t), t.diff()
    if order == 1:
        coefficients, weights = torch.tensor([-1.0, 1.0]).to(t).expand(size - 1, 2), 1.0 / d
    else:
        before, after = 1.0 / d[:-1], 1.0 / d[1:]
        coefficients, weights = torch.stack([before, -before - after, after], -1), 2.0 / (d[:-1] + d[1:])
    time = t - t.mean()
    fixed = torch.stack([torch.full_like(t, size**-0.5), time / time.norm()][:order], -1)
    # factors and anchors together are a triangle: its diagonal is the last coefficient of each factor
    with_anchors = float(weights.log().sum() + 2.0 * coefficients[:, -1].log().sum())
    log_det = with_anchors - 2.0 * float(torch.linalg.slogdet(fixed[:order]).logabsdet)
    index = torch.arange(size - order, device=t.device).unsqueeze(-1) + torch.arange(order + 1, device=t.device)
    anchors = torch.arange(order, device=t.device)
    part = torch.zeros(size, dtype=torch.long, device=t.device)
    return Unit(Structure(index, fixed, anchors), coefficients, weights, part, log_det)


@cached(32)
def _regular_cycle(size: int, order: int, device: torch.device) -> Unit:
    node = torch.arange(size, device=device)
    index = (node.unsqueeze(-1) + torch.arange(order + 1, device=device)) % size
    coefficients = torch.tensor([[-1.0, 1.0], [1.0, -2.0, 1.0]][order - 1], dtype=torch.float64, device=device)
    fixed = torch.full((size, 1), size**-0.5, dtype=torch.float64, device=device)
    log_det = 2.0 * order * math.log(size)  # of a circle, size^2 by its spanning trees
    structure = Structure(index, fixed, node[:1])
    return Unit(structure, coefficients.expand(size, -1), torch.ones_like(fixed[:, 0]), 0 * node, log_det)


class Seasonal(GaussianField):
    """Sums of ``period`` neighbours are independent normals; Rue and Held (2005), section 3.4.3.

    A pattern that repeats and sums to zero over a period is free: ``level`` says how large it may be.

    :param scale: standard deviation of a sum, the batch's shape.
    :param size: number of values.
    :param period: values that sum to about zero.
    :param level: standard deviation of the first ``period - 1`` values.

    >>> Seasonal(scale=0.1, size=24, period=12, level=1.0).sample().shape
    torch.Size([24])

    :raises BadInput: for a period below 2 or above the size.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive, "level": constraints.positive}
    in_order = True

    def __init__(self, scale: Any, size: int, period: int, level: Any = 1.0, validate_args: bool | None = None) -> None:
        size, period = check_count("size", size), check_count("period", period)
        if not 2 <= period <= size:
            raise BadInput(f"Seasonal(size={size}, period={period}); expected a period from 2 on and that many values.")
        self.scale, self.level = broadcast_all(scale, level)
        sums, start = size - period + 1, period - 1
        coefficients = torch.ones(size, period).to(self.scale)
        coefficients[:start, 1:] = 0.0
        precision = torch.cat([_repeated(self.level**-2, start), _repeated(self.scale**-2, sums)], -1)
        log_det = -2.0 * (sums * self.scale.log() + start * self.level.log())
        structure = _lags(size, start, self.scale.device)
        super().__init__(structure, (coefficients, precision), log_det, torch.Size([size]), validate_args)


class AR(GaussianField):
    """A stationary autoregression ``x_t = sum_j phi_j x_{t-j} + Normal(0, scale)``, by its partial autocorrelations.

    Every ``partial`` between -1 and 1 is a stationary series, and every such series has one; the coefficients ``phi``
    follow by the recursion of Durbin and Levinson, and the first values have their exact distribution.

    :param scale: standard deviation of an innovation, the batch's shape.
    :param partial: partial autocorrelations, ``(..., p)``.
    :param size: number of values.

    >>> AR(scale=1.0, partial=torch.tensor([0.5, -0.3]), size=1000).sample().shape
    torch.Size([1000])

    :raises BadInput: for no partial autocorrelation, and for fewer values than one more than those.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "scale": constraints.positive,
        "partial": constraints.independent(Between(-1.0, 1.0), 1),
    }
    in_order = True

    def __init__(self, scale: Any, partial: Tensor, size: int, validate_args: bool | None = None) -> None:
        partial, size = torch.as_tensor(partial), check_count("size", size)
        if not partial.dim() or not partial.shape[-1] or size <= partial.shape[-1]:
            raise BadInput(
                f"{type(self).__name__}(partial of shape {tuple(partial.shape)}, size={size}); expected (..., p) with "
                f"p >= 1, and more than p values."
            )
        scale = torch.as_tensor(scale).to(partial)
        shape = torch.Size(broadcast_shape(scale.shape, partial.shape[:-1]))
        self.scale, self.partial = scale.expand(shape), partial.expand(*shape, partial.shape[-1])
        p = partial.shape[-1]
        rows, log_variances = _levinson(self.partial)
        # row t < p predicts from the t values there are, all later rows from the last p
        coefficients = torch.cat([rows, rows[..., -1:, :].expand(*shape, size - p - 1, p + 1)], -2)
        log_variance = torch.cat([log_variances, _repeated(log_variances[..., -1], size - p - 1)], -1)
        log_variance = log_variance + 2.0 * self.scale.log().unsqueeze(-1)
        structure, factors = _lags(size, p, partial.device), (coefficients, (-log_variance).exp())
        super().__init__(structure, factors, -log_variance.sum(-1), torch.Size([size]), validate_args)

    @property
    def coefficients(self) -> Tensor:
        """``phi``, ``(..., p)``."""
        return -_levinson(self.partial)[0][..., -1, 1:]


@cached(32)
def _lags(size: int, most: int, device: torch.device) -> Structure:
    """Each value and as many before it; before the first value, where coefficients are zero, the first."""
    back = torch.arange(size, device=device).unsqueeze(-1) - torch.arange(most + 1, device=device)
    return Structure.free(back.relu(), size)


def _levinson(partial: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``x_t - sum_j phi_j x_{t-j}``, ``(..., p + 1, p + 1)``, and their log variances over the innovation's.

    Row ``t`` predicts from ``t`` values; Brockwell and Davis (1991), section 5.2.
    """
    p = partial.shape[-1]
    phi, rows = partial[..., :0], []
    for order in range(p + 1):
        pad = torch.zeros_like(partial[..., :1]).expand(*partial.shape[:-1], p - order)
        rows.append(torch.cat([torch.ones_like(partial[..., :1]), -phi, pad], -1))
        if order < p:
            last = partial[..., order : order + 1]
            phi = torch.cat([phi - last * phi.flip(-1), last], -1)
    log_shrunk = torch.log1p(-partial.square())
    log_variances = torch.nn.functional.pad(-log_shrunk.flip(-1).cumsum(-1).flip(-1), (0, 1))
    return torch.stack(rows, -2), log_variances


class AR1(AR):
    """A stationary autoregression ``x_t = coefficient x_{t-1} + Normal(0, scale)``.

    :param scale: standard deviation of an innovation, the batch's shape.
    :param coefficient: between -1 and 1.
    :param size: number of values.

    >>> AR1(scale=1.0, coefficient=0.5, size=1000).sample().shape
    torch.Size([1000])
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive, "coefficient": Between(-1.0, 1.0)}

    def __init__(self, scale: Any, coefficient: Any, size: int, validate_args: bool | None = None) -> None:
        self.scale, self.coefficient = broadcast_all(scale, coefficient)
        super().__init__(self.scale, self.coefficient.unsqueeze(-1), size, validate_args)


class OrnsteinUhlenbeck(GaussianField):
    """The continuous autoregression: covariance ``scale^2 exp(-|t - t'| / range)`` at any locations.

    :param scale: standard deviation of each value, the batch's shape.
    :param range: distance over which the correlation falls to ``1/e``.
    :param locations: increasing, ``(size,)``.

    >>> OrnsteinUhlenbeck(scale=1.0, range=2.0, locations=torch.tensor([0.0, 0.5, 3.0])).sample().shape
    torch.Size([3])

    :raises BadInput: for locations that do not increase.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive, "range": constraints.positive}
    in_order = True

    def __init__(self, scale: Any, range: Any, locations: Tensor, validate_args: bool | None = None) -> None:
        locations = torch.as_tensor(locations)
        _check_increase(locations)
        self.scale, self.range = broadcast_all(scale, range)
        size, step = len(locations), locations.diff().to(self.scale) / self.range.unsqueeze(-1)
        log_variance = torch.cat([torch.zeros_like(step[..., :1]), (-torch.expm1(-2.0 * step)).log()], -1)
        log_variance = log_variance + 2.0 * self.scale.log().unsqueeze(-1)
        past = torch.nn.functional.pad(-(-step).exp(), (1, 0))
        factors = (torch.stack([torch.ones_like(past), past], -1), (-log_variance).exp())
        super().__init__(
            _lags(size, 1, locations.device), factors, -log_variance.sum(-1), torch.Size([size]), validate_args
        )


def _repeated(x: Tensor, count: int) -> Tensor:
    """``x`` for each of ``count`` factors, ``(..., count)``."""
    return x.unsqueeze(-1).expand(*x.shape, count)
