"""Named, constrained tensors as one flat unconstrained vector, and back."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Transform

from pyro_evidence.numerics.derivatives import generic_directions


@dataclass(frozen=True)
class Coordinate:
    """One named tensor: where it lives in the flat vector and how it is constrained."""

    name: str
    transform: Transform  # unconstrained -> constrained
    shape: torch.Size  # of the constrained value
    unconstrained_shape: torch.Size

    @property
    def size(self) -> int:
        """Number of unconstrained coordinates."""
        return self.unconstrained_shape.numel()


class Coordinates:
    """The flat unconstrained vector of several named tensors, sorted by name as MCMC sorts them."""

    def __init__(self, parts: Mapping[str, tuple[Transform, torch.Size]]) -> None:
        self.parts: tuple[Coordinate, ...] = tuple(
            Coordinate(name, t, torch.Size(shape), unconstrained_shape(t, shape))
            for name, (t, shape) in sorted(parts.items())
        )
        ends = torch.tensor([0] + [p.size for p in self.parts]).cumsum(0).tolist()
        borders = zip(self.parts, ends[:-1], ends[1:], strict=True)
        self.slices: dict[str, slice] = {p.name: slice(a, b) for p, a, b in borders}
        self.size: int = ends[-1]

    def __iter__(self) -> Iterator[Coordinate]:
        return iter(self.parts)

    @property
    def names(self) -> tuple[str, ...]:
        """The names in flat order."""
        return tuple(p.name for p in self.parts)

    @cached_property
    def curved(self) -> Tensor:
        """Which unconstrained elements their transform does not treat as a straight line, bool, shape ``(D,)``."""
        found = [torch.zeros(0, dtype=torch.bool)]
        for part in self:
            if not part.size:  # a simplex of one
                continue
            places = 0.5 * generic_directions(3, part.size, torch.zeros((), dtype=torch.float64)).unsqueeze(1)
            alone = _is_elementwise(part.transform)
            rows = torch.cat([places, places + 0.5 * (torch.ones(1, part.size) if alone else torch.eye(part.size))], 1)
            value = part.transform(rows.reshape(-1, *part.unconstrained_shape))
            value = value.reshape(*rows.shape[:2], -1)
            slope = value[:, 1:] - value[:, :1]  # the same everywhere along a straight line
            bent = ((slope - slope[0]).abs() > 1e-9 * slope.abs().amax()).any(0)
            found.append(bent[0] if alone else bent.any(-1))
        return torch.cat(found)

    @cached_property
    def by_part(self) -> Tensor:
        """Which coordinates belong to each part, bool, shape ``(P, D)``."""
        owner = torch.cat([torch.full((part.size,), row) for row, part in enumerate(self)])
        return owner == torch.arange(len(self.parts)).unsqueeze(-1)

    def label(self, index: int) -> str:
        """Name of flat coordinate ``index`` for the reader."""
        name = next(n for n, s in self.slices.items() if s.start <= index < s.stop)
        return f"site '{name}', unconstrained element {index - self.slices[name].start}"

    def unconstrained(self, u: Tensor) -> dict[str, Tensor]:
        """Flat ``(..., D)`` to unconstrained tensors ``(...) + unconstrained_shape``."""
        batch = u.shape[:-1]
        return {p.name: u[..., self.slices[p.name]].reshape(batch + p.unconstrained_shape) for p in self}

    def constrained(self, u: Tensor) -> dict[str, Tensor]:
        """Flat ``(..., D)`` to constrained tensors ``(...) + shape``."""
        parts = self.unconstrained(u)
        return {p.name: p.transform(parts[p.name]) for p in self}

    def constrained_with_log_det(self, u: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Constrained tensors and ``log |d value / d u|`` summed over all of them, shape ``(...)``."""
        log_det = u.new_zeros(u.shape[:-1])
        values = self.unconstrained(u)
        for part in self:
            before = values[part.name]
            values[part.name] = part.transform(before)
            if not is_identity(part.transform):
                log_jacobian = part.transform.log_abs_det_jacobian(before, values[part.name])
                within = log_jacobian.dim() - log_det.dim()  # sums over no axis take long
                log_det = log_det + (log_jacobian.flatten(-within).sum(-1) if within else log_jacobian)
        return values, log_det

    def flat(self, values: Mapping[str, Tensor]) -> Tensor:
        """Constrained tensors ``(...) + shape`` to flat ``(..., D)``."""
        parts = [(p.transform.inv(values[p.name]), p) for p in self]
        rows = [v.reshape(*v.shape[: v.dim() - len(p.unconstrained_shape)], p.size) for v, p in parts]
        return torch.cat(rows, -1) if rows else torch.zeros(0)


def unconstrained_shape(transform: Transform, shape: torch.Size) -> torch.Size:
    """Shape of what is transformed to a value of ``shape``; torch's own imports a great deal at its first call."""
    return torch.Size(shape if _is_elementwise(transform) else transform.inverse_shape(shape))


def transform_steps(transform: Any) -> Sequence[Transform]:
    """The transforms that are carried out one after the other; nothing for the identity."""
    while hasattr(transform, "base_transform"):
        transform = transform.base_transform
    return transform.parts if isinstance(transform, torch.distributions.ComposeTransform) else [transform]


def is_identity(transform: Transform) -> bool:
    """Whether the transform leaves its argument alone (a real site)."""
    return not transform_steps(transform)


def is_affine(transform: Transform) -> bool:
    """Whether values are a straight line in their coordinates: of a real site, or of one with given sums."""
    return is_identity(transform) or getattr(transform, "is_affine", False)


def _is_elementwise(transform: Transform) -> bool:
    while isinstance(transform, torch.distributions.IndependentTransform):
        transform = transform.base_transform
    return int(transform.domain.event_dim) == int(transform.codomain.event_dim) == 0
