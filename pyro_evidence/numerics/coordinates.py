"""Named, constrained tensors as one flat unconstrained vector, and back."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Transform


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
        self.parts = tuple(
            Coordinate(name, t, torch.Size(shape), torch.Size(t.inverse_shape(shape)))
            for name, (t, shape) in sorted(parts.items())
        )
        ends = torch.tensor([0] + [p.size for p in self.parts]).cumsum(0).tolist()
        self.slices = {p.name: slice(a, b) for p, a, b in zip(self.parts, ends[:-1], ends[1:], strict=True)}
        self.size: int = ends[-1]

    def __iter__(self) -> Iterator[Coordinate]:
        return iter(self.parts)

    @property
    def names(self) -> tuple[str, ...]:
        """The names in flat order."""
        return tuple(p.name for p in self.parts)

    def label(self, index: int) -> str:
        """What a reader calls flat coordinate ``index``."""
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
                log_det = log_det + log_jacobian.reshape((*u.shape[:-1], -1)).sum(-1)
        return values, log_det

    def flat(self, values: Mapping[str, Tensor]) -> Tensor:
        """Constrained tensors to the flat vector, shape ``(D,)``."""
        parts = [p.transform.inv(values[p.name]).reshape(-1) for p in self]
        return torch.cat(parts) if parts else torch.zeros(0)


def is_identity(transform: Transform) -> bool:
    """Whether the transform leaves its argument alone (a real site)."""
    while hasattr(transform, "base_transform"):
        transform = transform.base_transform
    parts = getattr(transform, "parts", None)
    return isinstance(transform, torch.distributions.ComposeTransform) and not parts
