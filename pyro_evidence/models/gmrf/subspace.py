"""Values in a subspace, such as those that sum to zero, and the isometry by which samplers move in it."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints, transform_to
from torch.distributions.transforms import Transform


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
