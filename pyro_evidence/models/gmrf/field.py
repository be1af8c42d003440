"""A Gaussian field as a sum of squared differences of a few values each; Rue and Held (2005), chapters 2 and 3."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import biject_to, constraints, transform_to
from torch.distributions.transforms import Transform
from torch.distributions.utils import broadcast_all

from pyro_evidence.numerics.linalg import coordinate
from pyro_evidence.precision.blocks import elimination
from pyro_evidence.precision.dense import Pattern, Plan, StructuredPrecision


class OrthogonalTo(constraints.Constraint):
    """Values whose inner products with given directions vanish.

    :param directions: orthonormal columns ``(n, m)``.
    :param shape: event shape of a value, ``n`` elements.
    """

    is_discrete = False

    def __init__(self, directions: Tensor, shape: torch.Size) -> None:
        self.directions = directions
        self.shape = shape

    @property
    def event_dim(self) -> int:  # type: ignore[override]
        """Number of dimensions of one value."""
        return len(self.shape)

    def __repr__(self) -> str:
        size, count = self.directions.shape
        return f"OrthogonalTo({count} directions of {size})"

    def check(self, value: Tensor) -> Tensor:
        """Whether each value lies in the subspace, up to rounding of its sums."""
        flat = value.flatten(value.dim() - len(self.shape))
        off = (flat @ self.directions.to(flat)).abs().amax(-1)
        rounding = torch.finfo(flat.dtype).eps * flat.shape[-1] ** 0.5
        return off <= 100.0 * rounding * (1.0 + flat.norm(dim=-1))


class Isometry(Transform):
    """Coordinates ``(..., n - m)`` to values of an :class:`OrthogonalTo`, lengths kept, by Householder reflections."""

    domain = constraints.real_vector
    bijective = True

    def __init__(self, codomain: OrthogonalTo) -> None:
        super().__init__()
        self.codomain, self._shape = codomain, codomain.shape
        packed, self._tau = torch.geqrf(codomain.directions)
        count = self._tau.shape[-1]
        self._vectors = packed.tril(-1) + torch.eye(*packed.shape, dtype=packed.dtype, device=packed.device)[:, :count]

    def _reflected(self, x: Tensor, order: list[int]) -> Tensor:
        for column in order:
            v = self._vectors[:, column].to(x)
            x = x - self._tau[column].to(x) * (x @ v).unsqueeze(-1) * v
        return x

    def _call(self, x: Tensor) -> Tensor:
        count = self._vectors.shape[-1]
        padded = torch.nn.functional.pad(x, (count, 0))
        value = self._reflected(padded, list(range(count))[::-1])
        return value.reshape(*x.shape[:-1], *self._shape)

    def _inverse(self, y: Tensor) -> Tensor:
        count = self._vectors.shape[-1]
        flat = y.reshape(*y.shape[: y.dim() - len(self._shape)], -1)
        return self._reflected(flat, list(range(count)))[..., count:]

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Zero: lengths are kept."""
        return x.new_zeros(x.shape[:-1])

    def forward_shape(self, shape: Any) -> torch.Size:
        """Shape of values."""
        return torch.Size([*shape[:-1], *self._shape])

    def inverse_shape(self, shape: Any) -> torch.Size:
        """Shape of coordinates."""
        batch = shape[: len(shape) - len(self._shape)]
        return torch.Size([*batch, self._shape.numel() - self._vectors.shape[-1]])


for _registry in (biject_to, transform_to):
    _registry.register(OrthogonalTo, Isometry)


LOG_TWO_PI = math.log(2.0 * math.pi)  # twice what each dimension takes from the log density of a normal


@dataclass(frozen=True)
class Skeleton:
    """What is fixed in a field: which values each difference takes, and what differences cannot see."""

    index: Tensor  # (F, k) long; the last m rows are the anchors, one value each
    null: Tensor  # (n, m) float64, orthonormal: the directions that differences do not see

    @property
    def size(self) -> int:
        """Number of values."""
        return len(self.null)

    @cached_property
    def plan(self) -> Plan:
        """How its precision is factorised."""
        return elimination(Pattern(self.size, (self.index,)))

    def factorised(self, coefficients: Tensor, precision: Tensor) -> StructuredPrecision:
        """The field's precision, anchors included."""
        scaled = precision[:, None] * coefficients
        return self.plan.factorise(((scaled[:, :, None] * coefficients[:, None, :]).double(),), coordinate)


class GaussianField(TorchDistribution):
    """A zero-mean Gaussian field; see :mod:`pyro_evidence.models.gmrf` for those that can be asked for.

    :ivar element_index: the values that each factor of the density touches, ``(F, k)`` long, within the flat event.
    """

    has_rsample = False

    def __init__(
        self,
        skeleton: Skeleton,
        factors: tuple[Tensor, Tensor],
        log_normaliser: Tensor,
        event_shape: torch.Size,
        validate_args: bool | None = None,
    ) -> None:
        """The density of given factors.

        :param factors: coefficients ``(..., F, k)`` and precisions ``(..., F)``; those of unused anchors are zero.
        """
        self._skeleton, (self._coefficients, self._precision) = skeleton, factors
        self._log_normaliser = log_normaliser
        super().__init__(log_normaliser.shape, event_shape, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> Any:
        """The values that the field may take: all, or those that sum to zero."""
        dim = len(self.event_shape)
        if self._is_proper:
            return constraints.independent(constraints.real, dim)
        return OrthogonalTo(self._skeleton.null, self.event_shape)

    @property
    def _is_proper(self) -> bool:
        return self._skeleton.null.shape[-1] == 0 or getattr(self, "level", None) is not None

    @property
    def element_index(self) -> Tensor:
        """The values that each factor touches, ``(F, k)``, within the flat event."""
        return self._skeleton.index

    def element_log_prob(self, values: Tensor) -> Tensor:
        """Each factor's part of the log density, of its values ``(..., F, k)``, shape ``(..., F)``."""
        return -0.5 * self._precision * (self._coefficients * values).sum(-1).square()

    def log_normaliser(self) -> Tensor:
        """Log density where the field is zero, nats, of the batch's shape."""
        return self._log_normaliser

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density, nats; without a level, with respect to lengths in the subspace of values that sum to zero."""
        if self._validate_args:
            self._validate_sample(value)
        flat = value.flatten(value.dim() - len(self.event_shape))
        return self.element_log_prob(flat[..., self.element_index]).sum(-1) + self._log_normaliser

    def sample(self, sample_shape: Iterable[int] = ()) -> Tensor:
        """Draws, by the sparse factor of the field's precision."""
        shape, size = torch.Size(sample_shape), self._skeleton.size
        with torch.no_grad():
            white = torch.randn(self.batch_shape.numel(), shape.numel(), size, dtype=torch.float64)
            coefficients = self._coefficients.expand(*self.batch_shape, *self.element_index.shape)
            precision = self._precision.expand(*self.batch_shape, len(self.element_index))
            rows = (
                coefficients.reshape(-1, *self.element_index.shape),
                precision.reshape(-1, len(self.element_index)),
                white.to(precision.device),
            )
            draws = [self._unwhitened(*row) for row in zip(*rows, strict=True)]
        return torch.stack(draws, 1).view(*shape, *self.batch_shape, *self.event_shape).to(self._precision.dtype)

    def _unwhitened(self, coefficients: Tensor, precision: Tensor, white: Tensor) -> Tensor:
        if self._is_proper:
            return self._skeleton.factorised(coefficients, precision).unwhiten(white)
        pinned, away = precision.clone(), self._skeleton.null
        pinned[len(pinned) - away.shape[-1] :] = 1.0  # any anchor: what it adds is taken off again
        x = self._skeleton.factorised(coefficients, pinned).unwhiten(white)
        unseen = self._unseen(coefficients.double())
        return x - (x @ away) @ torch.linalg.solve(away.mT @ unseen, unseen.mT)

    def _unseen(self, coefficients: Tensor) -> Tensor:
        """Directions along which the density is flat, ``(n, m)``."""
        return self._skeleton.null

    def expand(self, batch_shape: Iterable[int], _instance: Any = None) -> "GaussianField":
        """The same field for each element of a larger batch."""
        new = self._get_checked_instance(type(self), _instance)
        shape = torch.Size(batch_shape)
        new.__dict__.update(self.__dict__)
        for name in self.arg_constraints:
            if getattr(self, name) is not None:
                setattr(new, name, getattr(self, name).expand(shape))
        new._coefficients = self._coefficients.expand(*shape, *self._coefficients.shape[-2:])
        new._precision = self._precision.expand(*shape, self._precision.shape[-1])
        new._log_normaliser = self._log_normaliser.expand(shape)
        super(GaussianField, new).__init__(shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new


def log_normaliser_at(
    rank: int, size: int, unit_log_det: Tensor | float, null_log_det: Tensor | float, level: Any
) -> Any:
    """Log normaliser of a field of unit scale: at a level, or in the subspace that differences see."""
    if level is None:
        return 0.5 * (unit_log_det - 2.0 * null_log_det) - 0.5 * rank * LOG_TWO_PI
    return 0.5 * unit_log_det - (size - rank) * level.log() - 0.5 * size * LOG_TWO_PI


def repeated(x: Tensor, count: int) -> Tensor:
    """``x`` for each of ``count`` factors, ``(..., count)``."""
    return x.unsqueeze(-1).expand(*x.shape, count)


def anchor_precision(level: Tensor | None, like: Tensor, count: int) -> Tensor:
    """Precision of the ``count`` values that fix the level, ``(..., count)``; zero where nothing fixes it."""
    return repeated(torch.zeros_like(like) if level is None else level.to(like) ** -2, count)


def parameters(*values: Any) -> tuple[Any, ...]:
    """Numbers and tensors of one shape; None stays."""
    given = iter(broadcast_all(*(value for value in values if value is not None)))
    return tuple(None if value is None else next(given) for value in values)


def only_first(count: int, width: int, like: Tensor) -> Tensor:
    """Rows that take the first of their values alone."""
    return torch.nn.functional.one_hot(torch.zeros(count, dtype=torch.long, device=like.device), width).to(like)
