"""Data of a mixture of probabilistic PCA: in memory, in chunks or on several processes, nan where missing."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.data.rows import Rows, column_moments, with_ones
from pyro_evidence.mixture.data import Units
from pyro_evidence.numerics.linalg import ROUNDED


def has_gaps(Y: Tensor) -> bool:
    """Whether some of the data, which are finite otherwise, are nan; needs no memory."""
    return bool(Y.sum().isnan())


@dataclass(frozen=True, eq=False)
class Observations:
    """Data ``(N, m)`` of all processes.

    :ivar rows: pieces ``(n, m)``.
    :ivar has_gaps: whether some of the data are missing.
    """

    rows: Rows[Tensor]
    has_gaps: bool

    @staticmethod
    def of(rows: Rows[Tensor]) -> "Observations":
        """The data in rows; one pass."""
        return Observations(rows, bool(rows.total(lambda y: y.sum()).isnan()))

    @staticmethod
    def resident(Y: Tensor) -> "Observations":
        """Data that are all in memory."""
        return Observations.of(Rows.resident(Y, len(Y)))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_data(self) -> int:
        """``N``."""
        return len(self)

    @property
    def shape(self) -> torch.Size:
        """``(N, m)``."""
        return torch.Size((len(self), self.rows.example.shape[1]))

    @property
    def units(self) -> Units:
        """Mean, and root mean variance, of what is not nan; 1 where nothing varies.

        One unit for all outputs leaves isotropic noise isotropic.
        """
        _, origin, square = column_moments(self.rows.mapped(with_ones))
        unit, size = square.mean().sqrt(), origin.abs().max()
        return Units(origin, torch.where(unit > ROUNDED * torch.maximum(size, unit), unit, 1.0), origin)

    def log_jacobian(self, unit: Tensor) -> float:
        """Log Jacobian of all data from standard units to ``unit`` ``()``, which the log density loses, nats."""
        num = int(self.rows.total(lambda y: (~y.isnan()).sum())) if self.has_gaps else self.shape.numel()
        return num * math.log(float(unit))

    def sampled(self, most: int) -> Tensor:
        """About ``most`` of the data where there are more, scattered over all by the numbers of their rows."""
        found: Tensor
        (found,) = self.rows.sampled(most, lambda y: (y,))
        return found
