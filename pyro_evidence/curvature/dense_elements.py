"""A precision of elements as one dense matrix."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from pyro_evidence.curvature.dense import Dense
from pyro_evidence.curvature.pattern import Elements, Pattern, assembled, on_pattern
from pyro_evidence.numerics.linalg import Label, cholesky, require_memory


class Solves(Protocol):
    """What :func:`weakest` asks of a precision."""

    def solve(self, b: Tensor) -> Tensor:
        """``A^-1 b``, shape ``(R, D)``."""


def weakest(precision: Solves, active: Tensor) -> Tensor:
    """Direction of least precision among ``active`` ``(D,)``, one standard deviation long, ``(1, D)``.

    By a few inverse power iterations from a fixed start.
    """
    v = ((1.0 + 0.1 * torch.arange(len(active), device=active.device).double()).cos() * active).unsqueeze(0)
    for _ in range(8):
        v = precision.solve(v)
        v = v / v.norm(dim=-1, keepdim=True)
    return v * precision.solve(v).norm(dim=-1, keepdim=True).sqrt()


@dataclass(frozen=True)
class DenseElements:
    """A dense precision, seen through the factors that made it; one row."""

    pattern: Pattern
    dense: Dense

    @cached_property
    def _inverse(self) -> Tensor:
        return self.dense.adjoint[0]

    @property
    def log_det(self) -> Tensor:
        """``log |A|``, shape ``(1,)``."""
        return self.dense.log_det

    @property
    def variance(self) -> Tensor:
        """Diagonal of ``A^-1``, shape ``(1, D)``."""
        return self._inverse.diagonal().unsqueeze(0)

    @cached_property
    def adjoint(self) -> Elements:
        """``A^-1`` on the pattern, per family ``(F, k, k)``."""
        return on_pattern(self.pattern, self._inverse)

    def covariance(self, coordinates: Tensor) -> Tensor:
        """``A^-1`` among chosen coordinates, ``(c, c)``."""
        return self._inverse[coordinates.unsqueeze(-1), coordinates]

    def solve(self, b: Tensor) -> Tensor:
        """``A^-1 b`` for each row of ``b``, ``(R, D)``."""
        return torch.cholesky_solve(b.double().mT, self.dense.tril[0]).mT

    def colour(self, white: Tensor) -> Tensor:
        """White noise ``(S, D)`` to noise of covariance ``A^-1``."""
        return self.dense.colour(white)

    def whiten(self, rows: Tensor) -> Tensor:
        """``L' x`` for each ``x``, ``(S, D)``: takes :meth:`colour` back."""
        return rows.double() @ self.dense.tril[0]

    def weakest(self, active: Tensor) -> Tensor:
        """By a few inverse power iterations from a fixed start."""
        return weakest(self, active)

    def row(self, index: int) -> "DenseElements":
        """This precision: it has one row."""
        return self


@dataclass(frozen=True)
class DensePlan:
    """Nothing is eliminated: all coordinates in one dense matrix."""

    pattern: Pattern

    @property
    def sentence(self) -> str:
        """What is eliminated and how."""
        return f"dense {self.pattern.size}"

    def factorise(self, elements: Elements, label: Label) -> DenseElements:
        """The Cholesky factor of the assembled matrix.

        :raises NotPositiveDefinite: with the smallest eigenvalue and the coordinate it points at.
        :raises TooLarge: when the matrix and its factor do not fit into memory.
        """
        device = self.pattern.index[0].device if self.pattern.index else torch.device("cpu")
        require_memory(3 * 8 * self.pattern.size**2, f"A dense precision of {self.pattern.size:,} coordinates", device)
        A = assembled(self.pattern, elements)
        return DenseElements(self.pattern, Dense(cholesky(A, "posterior precision A", label).unsqueeze(0)))
