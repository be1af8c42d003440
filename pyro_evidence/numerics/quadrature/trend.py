"""What is expected between nodes of something smooth that is known at them."""

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement

import torch
from torch import Tensor

HIGHEST = 4  # degree
NODES_PER_TERM = 2


@dataclass(frozen=True)
class Trend:
    """Values at nodes and the polynomial of least squares through them, of as high a degree as the nodes bear.

    :ivar z: nodes, ``(K, d)``.
    :ivar values: at these, ``(K, D)``.
    """

    z: Tensor
    values: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        """The value at the nearest node and the polynomial's way from there, at rows ``(R, d)``; ``(R, D)``.

        Beyond the outermost nodes the polynomial stays where it was.
        """
        nearest = torch.cdist(z, self.z).argmin(-1)
        inside = torch.minimum(torch.maximum(z, self.z.amin(0)), self.z.amax(0))
        way = self._terms(inside) - self._terms(self.z[nearest])
        return self.values[nearest] + (way @ self._coefficients).to(self.values)

    @cached_property
    def _products(self) -> list[tuple[int, ...]]:
        """Which axes each term multiplies, a constant first."""
        axes = range(self.z.shape[-1])
        found: list[tuple[int, ...]] = [()]
        for degree in range(1, HIGHEST + 1):
            more = list(combinations_with_replacement(axes, degree))
            if NODES_PER_TERM * (len(found) + len(more)) > len(self.z):
                break
            found += more
        return found

    def _terms(self, z: Tensor) -> Tensor:
        """``(R, P)``."""
        x = (z - self._place) / self._spread
        return torch.stack([x[:, list(own)].prod(-1) for own in self._products], -1)

    @property
    def _place(self) -> Tensor:
        return self.z.mean(0)

    @property
    def _spread(self) -> Tensor:
        spread = (self.z - self._place).square().mean(0).sqrt()
        return torch.where(spread > 0, spread, 1.0)

    @cached_property
    def _coefficients(self) -> Tensor:
        """``(P, D)``."""
        return torch.linalg.lstsq(self._terms(self.z), self.values.to(self.z)).solution
