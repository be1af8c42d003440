"""A posterior precision, dense or diagonal, factorised once, or a batch ``(R,)`` of them."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pyro_evidence.errors import NotPositiveDefinite
from pyro_evidence.numerics.linalg import Label, cholesky, coordinate, require_memory

FLOAT = torch.float64.itemsize  # bytes

Self = TypeVar("Self", bound="Triangular")


class Precision(Protocol):
    """Interface of a posterior precision ``A``, or of a batch of ``R``.

    Where ``R`` is 1, :meth:`solve`, :meth:`unwhiten` and :meth:`whiten` take any number ``S`` of vectors, else one for
    each precision, ``S = R``.
    """

    @property
    def log_det(self) -> Tensor:
        """``log |A|``, shape ``(R,)``."""

    @property
    def variance(self) -> Tensor:
        """Diagonal of the inverse of ``A``, shape ``(R, D)``."""

    @property
    def log_det_gradient(self) -> Any:
        """``d log |A| / d A``, in the layout of ``A``: a tensor, or one for each family of its elements."""

    def solve(self, b: Tensor) -> Tensor:
        """Solutions of ``A x = b``, shape ``(S, D)``."""

    def unwhiten(self, white: Tensor) -> Tensor:
        """White noise ``(S, D)`` to noise of covariance ``A^-1``."""

    def whiten(self, rows: Tensor) -> Tensor:
        """The white noise that :meth:`unwhiten` made ``rows`` ``(S, D)`` of: ``|whiten(x)|^2 = x' A x``."""

    @property
    def panels(self) -> tuple[Tensor, ...]:
        """Rows of ``L'`` in blocks of one shape, own columns first, ``(R, G, d, w)``; none of other factors."""
        return ()

    def half_solve(self, b: Tensor) -> Tensor:
        """``L^-1 b`` for each row of ``b``, where :meth:`whiten` is ``L' x``."""
        return self.whiten(self.solve(b.flatten(0, -2))).view(b.shape)

    def covariance_of(self, coordinates: Tensor, size: int) -> Tensor:
        """``A^-1`` of chosen coordinates ``(c,)`` with all ``size`` of them, ``(c, D)``, where ``R`` is 1."""
        return self.solve(torch.nn.functional.one_hot(coordinates, size).double())

    def least_precise_direction(self, active: Tensor) -> Tensor:
        """Direction of least precision among ``active`` ``(D,)``, one standard deviation long, shape ``(R, D)``.

        By a few inverse power iterations from a fixed start.
        """
        v = (1.0 + 0.1 * torch.arange(len(active), device=active.device).double()).cos() * active
        v = v.expand(len(self.log_det), -1)
        for _ in range(8):
            v = self.solve(v)
            v = v / v.norm(dim=-1, keepdim=True)
        return v * self.solve(v).norm(dim=-1, keepdim=True).sqrt()

    def row(self, index: int) -> "Precision":
        """One of the batch, with ``R = 1``; by default this one, for there is no other."""
        return self


@dataclass(frozen=True, eq=False)
class Triangular(Precision):
    """A dense precision by its lower Cholesky factor, shape ``(R, D, D)``."""

    tril: Tensor

    @property
    def log_det(self) -> Tensor:
        """``log |A|``."""
        return 2.0 * self.tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def solve(self, b: Tensor) -> Tensor:
        """``A^-1 b``."""
        return torch.cholesky_solve(self._columns(b), self.tril).mT.reshape(b.shape)

    def unwhiten(self, white: Tensor) -> Tensor:
        """``L'^-1 z`` for each ``z``."""
        return torch.linalg.solve_triangular(self.tril.mT, self._columns(white), upper=True).mT.reshape(white.shape)

    def whiten(self, rows: Tensor) -> Tensor:
        """``L' x`` for each ``x``."""
        return (self.tril.mT @ self._columns(rows)).mT.reshape(rows.shape)

    @property
    def panels(self) -> tuple[Tensor, ...]:
        """The transposed factor as one block."""
        return (self.tril.mT.unsqueeze(1),)

    def with_panels(self: Self, panels: tuple[Tensor, ...]) -> Self:
        """A batch of other factors."""
        return replace(self, tril=panels[0].squeeze(1).mT)

    def row(self: Self, index: int) -> Self:
        """One of the batch."""
        return replace(self, tril=self.tril[index : index + 1])

    def _columns(self, rows: Tensor) -> Tensor:
        """Vectors ``(S, D)`` beside the matrices that they belong to, ``(R, D, S / R)``."""
        rows = rows.to(self.tril)
        return rows.mT.unsqueeze(0) if len(self.tril) == 1 else rows.unsqueeze(-1)


class Dense(Triangular):
    """One whose inverse is wanted as a matrix."""

    @property
    def log_det_gradient(self) -> Tensor:
        """``A^-1``."""
        return torch.cholesky_inverse(self.tril)

    @cached_property
    def variance(self) -> Tensor:
        """Diagonal of ``A^-1``."""
        return self.log_det_gradient.diagonal(dim1=-2, dim2=-1).clone()  # lets the rest go


@dataclass(frozen=True, eq=False)
class Diagonal(Precision):
    """A diagonal precision, shape ``(R, D)``."""

    diagonal: Tensor

    @property
    def log_det(self) -> Tensor:
        """``log |A|``."""
        return self.diagonal.log().sum(-1)

    @property
    def log_det_gradient(self) -> Tensor:
        """The reciprocals."""
        return self.diagonal.reciprocal()

    variance = log_det_gradient

    def solve(self, b: Tensor) -> Tensor:
        """``b / A``."""
        return b / self.diagonal

    def unwhiten(self, white: Tensor) -> Tensor:
        """Each coordinate times its standard deviation."""
        return white * self.diagonal.rsqrt()

    def whiten(self, rows: Tensor) -> Tensor:
        """Each coordinate in units of its standard deviation."""
        return rows * self.diagonal.sqrt()

    def least_precise_direction(self, active: Tensor) -> Tensor:
        """The coordinate of least precision."""
        index = torch.where(active, self.diagonal, torch.inf).argmin(-1, keepdim=True)
        return torch.zeros_like(self.diagonal).scatter(-1, index, self.diagonal.gather(-1, index).rsqrt())

    def row(self, index: int) -> "Diagonal":
        """One of the batch."""
        return Diagonal(self.diagonal[index : index + 1])


@dataclass(frozen=True)
class Separate(Precision):
    """A batch of precisions of any kind, ``R = 1`` each."""

    members: tuple[Precision, ...]

    @property
    def log_det(self) -> Tensor:
        """``log |A|`` of each."""
        return torch.cat([A.log_det for A in self.members])

    @property
    def variance(self) -> Tensor:
        """Diagonals of the inverses."""
        return torch.cat([A.variance for A in self.members])

    @property
    def log_det_gradient(self) -> tuple[Any, ...]:
        """That of each, one after the other."""
        return tuple(A.log_det_gradient for A in self.members)

    def solve(self, b: Tensor) -> Tensor:
        """``A^-1 b``, each by its own."""
        return torch.cat([A.solve(x) for A, x in self._pairs(b)])

    def unwhiten(self, white: Tensor) -> Tensor:
        """Each by its own."""
        return torch.cat([A.unwhiten(x) for A, x in self._pairs(white)])

    def whiten(self, rows: Tensor) -> Tensor:
        """Each by its own."""
        return torch.cat([A.whiten(x) for A, x in self._pairs(rows)])

    def _pairs(self, rows: Tensor) -> Iterator[tuple[Precision, Tensor]]:
        return zip(self.members, rows.split(1), strict=True)

    def least_precise_direction(self, active: Tensor) -> Tensor:
        """Each by its own."""
        return torch.cat([A.least_precise_direction(active) for A in self.members])

    def row(self, index: int) -> Precision:
        """One of the batch."""
        return self.members[index]

    def kept(self, rows: Collection[int]) -> "Separate":
        """With the factors of some rows held once they are made again."""
        parts = enumerate(self.members)
        own = (replace(A, make=cache(A.make)) if isinstance(A, Remade) and i in rows else A for i, A in parts)
        return Separate(tuple(own))


@dataclass(frozen=True, eq=False)
class Remade(Precision):
    """A precision, ``R = 1``, of which the factor is not kept but made again when it is asked for."""

    make: Callable[[], Precision]
    known: Tensor  # log |A|, (1,)

    @property
    def log_det(self) -> Tensor:
        """``log |A|``."""
        return self.known

    def row(self, index: int) -> Precision:
        """The factor."""
        return self.make()

    @cached_property
    def variance(self) -> Tensor:
        """Diagonal of ``A^-1``, kept once it is known."""
        return self.make().variance

    @property
    def log_det_gradient(self) -> Any:
        """That of the factor."""
        return self.make().log_det_gradient

    def solve(self, b: Tensor) -> Tensor:
        """``A^-1 b``."""
        return self.make().solve(b)

    def unwhiten(self, white: Tensor) -> Tensor:
        """White noise to noise of covariance ``A^-1``."""
        return self.make().unwhiten(white)

    def whiten(self, rows: Tensor) -> Tensor:
        """Takes :meth:`unwhiten` back."""
        return self.make().whiten(rows)


def factorise(A: Tensor, label: Label = coordinate) -> Precision:
    """The factorised precision: dense for ``(R, D, D)``, diagonal for ``(R, D)``.

    :raises NotPositiveDefinite: when some row is not positive definite.
    """
    if A.dim() > 2:
        return Dense(cholesky(A, "posterior precision A", label))
    if not bool((torch.isfinite(A) & (A > 0)).all()):
        worst = torch.where(torch.isfinite(A), A, -torch.inf).argmin()  # what is not finite goes first
        row, column = divmod(int(worst), A.shape[-1])
        raise NotPositiveDefinite(
            f"diagonal of the posterior precision A, {tuple(A.shape)}, has smallest entry {float(A[row, column]):.2e} "
            f"at {label(column)}; expected all > 0 and finite. The point is a saddle (try start=Start(restarts=8)), "
            f"or the density is not smooth there."
        )
    return Diagonal(A.double())


Elements = tuple[Tensor, ...]  # per family of factors (F, k, k), symmetric


@dataclass(frozen=True, eq=False)
class Pattern:
    """The coordinates that each factor touches; fixed during a fit.

    The matrix is ``A = sum_f E_f' A_f E_f``, with ``E_f`` the rows of the identity that ``index`` names; a coordinate
    that occurs twice in a row of ``index`` adds up.
    """

    size: int  # D
    index: tuple[Tensor, ...]  # per family (F, k) long, flat coordinates

    @property
    def device(self) -> torch.device:
        """Where its matrices are."""
        return self.index[0].device if self.index else torch.device("cpu")


def pattern_product(pattern: Pattern, elements: Elements, v: Tensor) -> Tensor:
    """``A v`` for each row of ``v``, shape ``(..., D)``; no matrix is assembled.

    >>> pattern = Pattern(3, (torch.tensor([[0, 1], [1, 2]]),))
    >>> pattern_product(pattern, (torch.ones(2, 2, 2),), torch.tensor([1.0, 0.0, 0.0]))
    tensor([1., 1., 0.])
    """
    out = torch.zeros_like(v)
    for index, blocks in zip(pattern.index, elements, strict=True):
        terms = torch.einsum("fab,...fb->...fa", blocks.to(v), v[..., index])
        out = out.index_add(-1, index.reshape(-1), terms.flatten(-2))
    return out


def assembled(pattern: Pattern, elements: Elements) -> Tensor:
    """``A`` as a dense matrix, ``(D, D)`` float64; of elements of rows ``(R, D, D)``."""
    size, rows = pattern.size, elements[0].shape[:-3]
    flat = torch.zeros(*rows, size * size, dtype=torch.float64, device=pattern.device)
    for index, blocks in zip(pattern.index, elements, strict=True):
        place = index.unsqueeze(-1) * size + index.unsqueeze(-2)
        flat.index_add_(-1, place.reshape(-1), blocks.double().flatten(-3))
    return flat.reshape(*rows, size, size)


def on_pattern(pattern: Pattern, Z: Tensor) -> Elements:
    """The entries of a dense symmetric ``Z`` ``(D, D)`` that the factors touch, per family ``(F, k, k)``."""
    return tuple(Z[index.unsqueeze(-1), index.unsqueeze(-2)] for index in pattern.index)


class Plan(Protocol):
    """The symbolic half of a factorisation: who is eliminated when.  Made once for a pattern."""

    @property
    def sentence(self) -> str:
        """Sentence on the elimination, for the reader."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a factorisation."""

    def factorise(self, elements: Elements, label: Label) -> Precision:
        """The numerical half.

        :param elements: per family ``(F, k, k)``, symmetric.
        :param label: names a flat coordinate.
        :raises NotPositiveDefinite: naming a coordinate where the precision is not positive.
        """

    def factorise_rows(self, elements: Elements, label: Label) -> Precision:
        """The numerical half for several matrices, per family ``(R, F, k, k)``."""
        return Separate(tuple(self.factorise(each, label) for each in zip(*elements, strict=True)))


@dataclass(frozen=True, eq=False)
class DenseElements(Triangular):
    """A dense precision, seen through the factors that made it; ``R = 1``."""

    pattern: Pattern

    @cached_property
    def _inverse(self) -> Tensor:
        return torch.cholesky_inverse(self.tril[0])

    @property
    def variance(self) -> Tensor:
        """Diagonal of ``A^-1``, shape ``(1, D)``."""
        return self._inverse.diagonal().unsqueeze(0)

    @cached_property
    def log_det_gradient(self) -> Elements:
        """``A^-1`` on the pattern, per family ``(F, k, k)``."""
        return on_pattern(self.pattern, self._inverse)

    def sandwich(self, middle: Elements) -> Elements:
        """``A^-1 M A^-1`` on the pattern, of ``M`` on the pattern."""
        return on_pattern(self.pattern, self._inverse @ assembled(self.pattern, middle) @ self._inverse)


@dataclass(frozen=True, eq=False)
class DensePlan(Plan):
    """Nothing is eliminated: all coordinates in one dense matrix."""

    pattern: Pattern

    @property
    def sentence(self) -> str:
        """Sentence on the elimination."""
        return f"dense {self.pattern.size}"

    @property
    def num_bytes(self) -> int:
        """The matrix, its factor and its inverse."""
        return 3 * FLOAT * self.pattern.size**2

    def factorise(self, elements: Elements, label: Label) -> DenseElements:
        """The Cholesky factor of the assembled matrix.

        :raises NotPositiveDefinite: with the smallest eigenvalue and the coordinate it points at.
        :raises TooLarge: when the matrix and its factor do not fit into memory.
        """
        require_memory(self.num_bytes, f"A dense precision of {self.pattern.size:,} coordinates", self.pattern.device)
        A = assembled(self.pattern, elements)
        return DenseElements(cholesky(A, "posterior precision A", label).unsqueeze(0), self.pattern)


def packed_factors(precision: Precision) -> Tensor:
    """Nearly straight numbers of factors: logs of panels' diagonals, the rest of each row over these, ``(R, n)``."""
    pairs = [(panel, panel.diagonal(dim1=-2, dim2=-1)) for panel in precision.panels]
    rows = [(x / d.unsqueeze(-1)).diagonal_scatter(d.log(), dim1=-2, dim2=-1).flatten(1) for x, d in pairs]
    return torch.cat(rows, 1)


def unpacked_factors(rows: Tensor, like: Any) -> Any:
    """A batch of precisions of rows as :func:`packed_factors` gives them, in their place.

    :param like: a precision with panels.
    """
    shapes = [panel.shape[1:] for panel in like.panels]
    parts = zip(rows.split([shape.numel() for shape in shapes], 1), shapes, strict=True)
    panels = tuple(part.unflatten(1, shape) for part, shape in parts)
    for panel in panels:
        scale = panel.diagonal(dim1=-2, dim2=-1).exp().unsqueeze(-1)
        panel.mul_(scale).diagonal(dim1=-2, dim2=-1).copy_(scale.squeeze(-1))
    return like.with_panels(panels)


def precision_tril(precision: Precision, size: int) -> Tensor:
    """Lower Cholesky factor ``(D, D)`` of a precision of any kind."""
    if isinstance(precision, Triangular):
        return precision.tril[0]
    rows = precision.whiten(torch.eye(size, dtype=torch.float64, device=precision.log_det.device))
    return torch.linalg.cholesky(rows @ rows.mT)
