"""Sparse precisions on values that linear constraints fix in part: determinants, covariances, kriging.

A precision ``Q`` ``(n, n)`` is given by small matrices on a pattern, one for each factor of the density.  With
orthonormal columns ``U`` ``(n, m)``, values satisfy ``U' x = c``.  ``Q`` may be flat along some directions (an
intrinsic field); with as many *anchors*, single coordinates whose squares are added, it becomes proper, and what they
add is taken off again exactly.  Rue and Held (2005), section 2.3.3.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.numerics.derivatives import cached_property
from pyro_evidence.numerics.linalg import coordinate
from pyro_evidence.precision.blocks import BlockPlan, BlockPrecision, elimination
from pyro_evidence.precision.dense import DenseElements, DensePlan, Pattern, pattern_product


@dataclass(frozen=True, eq=False)
class Structure:
    """Constant structure of a field: the values that each factor takes, and directions in which values are given."""

    index: Tensor  # (F, k) long
    fixed: Tensor  # (n, m) float64, orthonormal columns U
    anchors: Tensor  # (a,) long, one coordinate for each direction along which all factors together are flat

    @classmethod
    def free(cls, index: Tensor, size: int) -> "Structure":
        """One in which nothing is fixed, and the factors determine all values."""
        fixed = torch.zeros(size, 0, dtype=torch.float64, device=index.device)
        return cls(index, fixed, index.new_zeros(0))

    @property
    def size(self) -> int:
        """Number of values."""
        return len(self.fixed)

    @property
    def rank(self) -> int:
        """Number of directions in which values may vary."""
        return self.size - self.fixed.shape[-1]

    @cached_property
    def pattern(self) -> Pattern:
        """The coordinates of factors, and of anchors."""
        return Pattern(self.size, (self.index, self.anchors.unsqueeze(-1)))

    @cached_property
    def plan(self) -> BlockPlan | DensePlan:
        """Plan by which precisions on the pattern are factorised."""
        return elimination(self.pattern)

    def on_constraint(self, elements: Tensor) -> "ConstrainedPrecision":
        """The precision of given elements ``(F, k, k)``, factorised.

        :raises NotPositiveDefinite: where it is not a precision on the constraint.
        """
        elements = elements.detach().double()
        for known, precision in self._last:
            if torch.equal(known, elements):
                return precision
        anchors = torch.ones(len(self.anchors), 1, 1, dtype=torch.float64, device=self.fixed.device)
        with torch._C.DisableTorchFunction():  # its indices are no business of a run's modes
            found = ConstrainedPrecision(self, self.plan.factorise((elements, anchors), coordinate))
        self._last[:] = (elements, found), *self._last[:2]
        return found

    @cached_property
    def _last(self) -> list[tuple[Tensor, "ConstrainedPrecision"]]:
        """The last few precisions: a value, its derivatives, and those of a row nearby take turns."""
        return []


@dataclass(frozen=True, eq=False)
class ConstrainedPrecision:
    """``Q`` on the values with ``U' x = c``, by the sparse factor of ``Q`` with anchors."""

    structure: Structure
    factor: BlockPrecision | DenseElements  # of Q_a = Q + E E', E the columns of the identity that anchors name

    @cached_property
    def border(self) -> Tensor:
        """``Q_a^-1 [U E]``, one row for each column of it, ``(m + a, n)``."""
        return self.factor.solve(self._columns) if len(self._columns) else self._columns

    @cached_property
    def _columns(self) -> Tensor:
        anchors = torch.nn.functional.one_hot(self.structure.anchors, self.structure.size)
        return torch.cat([self.structure.fixed.mT, anchors.to(self.structure.fixed)])

    @cached_property
    def capacitance(self) -> Tensor:
        """``[U E]' Q_a^-1 [U E]`` less the identity where anchors meet, ``(m + a, m + a)``."""
        is_anchor = torch.arange(len(self._columns), device=self.border.device) >= self.structure.fixed.shape[-1]
        return self._columns @ self.border.mT - is_anchor.to(self.border).diag()

    @property
    def log_det(self) -> Tensor:
        """Log determinant of ``V' Q V``, ``V`` an orthonormal basis of what varies, ``()``."""
        return self.factor.log_det.sum() + torch.linalg.slogdet(self.capacitance).logabsdet

    @property
    def covariance(self) -> Tensor:
        """``V (V' Q V)^-1 V'`` among the values of each factor, ``(F, k, k)``."""
        near = self.border[:, self.structure.index]  # (m + a, F, k)
        taken = torch.linalg.solve(self.capacitance, near.flatten(1)).view(near.shape)
        return self.factor.log_det_gradient[0] - torch.einsum("mfa,mfb->fab", near, taken)

    @property
    def variance(self) -> Tensor:
        """Variance of each value, ``(n,)``."""
        taken = torch.linalg.solve(self.capacitance, self.border)
        return self.factor.variance[0] - (self.border * taken).sum(0)

    def solve(self, rows: Tensor) -> Tensor:
        """``V (V' Q V)^-1 V' b`` for each ``b``, ``(S, n)``."""
        taken = torch.linalg.solve(self.capacitance, self.border @ rows.to(self.border).mT)
        return self.factor.solve(rows) - taken.mT @ self.border

    def krige(self, rows: Tensor, given: Tensor) -> Tensor:
        """The nearest values, in units of ``Q``, with ``U' x = c`` for each of the rows ``(S, n)``.

        Draws of the unconstrained field become draws given the constraint.  Rue and Held (2005), eq. 2.30.

        :param given: ``c``, ``(m,)``.
        """
        gap = given - rows @ self.structure.fixed
        gap = torch.nn.functional.pad(gap, (0, len(self.structure.anchors)))
        return rows + torch.linalg.solve(self.capacitance, gap.mT).mT @ self.border

    def sandwich(self, middle: Tensor) -> Tensor:
        """``S M S`` among the values of each factor, ``S`` the covariance and ``M`` of elements ``(F, k, k)``."""
        index, anchors = self.structure.index, middle.new_zeros(len(self.structure.anchors), 1, 1)
        product = pattern_product(Pattern(self.structure.size, (index,)), (middle,), self.border)
        taken = torch.linalg.solve(self.capacitance, self.border)
        inner, through = product @ self.border.mT @ taken, self.factor.solve(product)
        cross = torch.einsum("mfa,mfb->fab", (through - 0.5 * inner)[:, index], taken[:, index])
        return self.factor.sandwich((middle, anchors))[0] - cross - cross.mT


def squares(coefficients: Tensor, precision: Tensor) -> Tensor:
    """The precision of each factor ``-1/2 precision_f (c_f' x)^2`` among its values, ``(..., F, k, k)`` float64.

    :param coefficients: ``(..., F, k)``.
    :param precision: ``(..., F)``.
    """
    c = coefficients.double()
    return (precision.double().unsqueeze(-1) * c).unsqueeze(-1) * c.unsqueeze(-2)


def log_det(elements: Tensor, structure: Structure) -> Tensor:
    """Log determinant of ``V' Q V`` of elements ``(..., F, k, k)``, shape ``(...)``; its derivatives are exact."""
    flat = elements.double().reshape(-1, *elements.shape[-3:])
    return torch.stack([_LogDet.apply(row, structure) for row in flat]).view(elements.shape[:-3])


def least_square(elements: Tensor, structure: Structure, given: Tensor) -> Tensor:
    """The least ``x' Q x`` with ``U' x = c``, of elements ``(..., F, k, k)``, shape ``(...)``."""
    flat = elements.double().reshape(-1, *elements.shape[-3:])
    near = torch.stack([_Solve.apply(row, torch.zeros_like(structure.fixed[:, 0]), given, structure) for row in flat])
    near = near[:, structure.index]
    return torch.einsum("rfa,rfab,rfb->r", near, flat, near).view(elements.shape[:-3])


class OneByOne(torch.autograd.Function):
    """A function of one tensor, and of what is given beside it, which ``vmap`` calls for one after the other."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Keep both for derivatives."""
        tensor, *ctx.given = inputs
        ctx.save_for_backward(tensor)
        ctx.save_for_forward(tensor)

    @classmethod
    def vmap(cls, _info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        """The values of all rows, along the first axis."""
        count = next(arg.shape[dim] for arg, dim in zip(args, in_dims, strict=True) if dim is not None)
        rows = [
            [arg if dim is None else arg.select(dim, row) for arg, dim in zip(args, in_dims, strict=True)]
            for row in range(count)
        ]
        return torch.stack([cls.apply(*row) for row in rows]), 0


class _LogDet(OneByOne):
    """``log det V' Q V`` of elements ``(F, k, k)``."""

    @staticmethod
    def forward(elements: Tensor, structure: Structure) -> Tensor:
        return structure.on_constraint(elements).log_det

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * _Covariance.apply(ctx.saved_tensors[0], *ctx.given), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return (_Covariance.apply(ctx.saved_tensors[0], *ctx.given) * tangent).sum()


class _Covariance(OneByOne):
    """``S = V (V' Q V)^-1 V'`` on the pattern; its derivative is ``-S dQ S``."""

    @staticmethod
    def forward(elements: Tensor, structure: Structure) -> Tensor:
        return structure.on_constraint(elements).covariance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -_Sandwich.apply(ctx.saved_tensors[0], 0.5 * (gradient + gradient.mT), *ctx.given), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return -_Sandwich.apply(ctx.saved_tensors[0], tangent, *ctx.given)


class _Sandwich(OneByOne):
    """``S M S`` on the pattern; the end of the derivatives."""

    @staticmethod
    def forward(elements: Tensor, middle: Tensor, structure: Structure) -> Tensor:
        return structure.on_constraint(elements).sandwich(middle)


class _Solve(OneByOne):
    """The least ``x' Q x / 2 - b' x`` with ``U' x = c``: its derivative is ``S (db - dQ x)``."""

    @staticmethod
    def forward(elements: Tensor, b: Tensor, given: Tensor, structure: Structure) -> Tensor:
        Q = structure.on_constraint(elements)
        return Q.solve(b.unsqueeze(0))[0] + Q.krige(torch.zeros_like(b).unsqueeze(0), given)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        elements, _, given, ctx.structure = inputs
        ctx.save_for_backward(elements, given, output)
        ctx.save_for_forward(elements, given, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        elements, given, x = ctx.saved_tensors
        s, index = _Solve.apply(elements, gradient, torch.zeros_like(given), ctx.structure), ctx.structure.index
        product = s[index].unsqueeze(-1) * x[index].unsqueeze(-2)
        return -0.5 * (product + product.mT), s, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, b: Tensor | None, *_: None) -> Tensor:
        """The derivative along changes of the elements and of ``b``."""
        elements, given, x = ctx.saved_tensors
        right = torch.zeros_like(x) if b is None else b
        if tangent is not None:
            right = right - pattern_product(Pattern(len(x), (ctx.structure.index,)), (tangent,), x)
        return _Solve.apply(elements, right, torch.zeros_like(given), ctx.structure)
