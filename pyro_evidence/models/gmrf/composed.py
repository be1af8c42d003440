"""Fields made of others, and of a precision that the user writes."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pyro.distributions.util import broadcast_shape
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.errors import BadInput
from pyro_evidence.models.gmrf.constrained import Structure
from pyro_evidence.models.gmrf.field import GaussianField
from pyro_evidence.models.gmrf.graphs import check_pairs
from pyro_evidence.numerics.derivatives import cached
from pyro_evidence.numerics.linalg import most_independent

ROUNDING = 1e-4  # of the largest entry of a precision: sums of entries in single precision


class Kronecker(GaussianField):
    """A separable field: precision ``Q_first x Q_second``, event ``(n_first, n_second)``.

    What either leaves out is left out: of two fields that sum to zero, every row and every column sums to zero.
    Knorr-Held (2000), interaction of type IV.  Scales multiply: fix one of them.

    :param first: a field of one dimension, along rows.
    :param second: along columns.

    >>> from pyro_evidence.models.gmrf import AR1, RandomWalk
    >>> Kronecker(AR1(1.0, 0.5, size=4), RandomWalk(0.3, size=5)).sample().shape
    torch.Size([4, 5])

    :raises BadInput: for what is no field of one dimension whose given sums are zero.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, first: GaussianField, second: GaussianField, validate_args: bool | None = None) -> None:
        for field in (first, second):
            if not isinstance(field, GaussianField) or len(field.event_shape) != 1 or field._given is not None:
                raise BadInput(
                    f"Kronecker of {type(first).__name__} and {type(second).__name__}; expected two fields of one "
                    f"dimension each, with sums of zero where sums are given."
                )
        self.first, self.second = first, second
        one, two = first.structure, second.structure
        coefficients = torch.einsum("...fa,...gb->...fgab", first._coefficients, second._coefficients)
        precision = torch.einsum("...f,...g->...fg", first._precision, second._precision)
        factors = (coefficients.flatten(-4, -3).flatten(-2), precision.flatten(-2))

        def log_det() -> Tensor:
            return two.rank * first.log_det + one.rank * second.log_det

        super().__init__(_product(one, two), factors, log_det, torch.Size([one.size, two.size]), validate_args)

    def _rows(self) -> list[GaussianField]:
        pairs = zip(
            self.first.expand(self.batch_shape)._rows(), self.second.expand(self.batch_shape)._rows(), strict=True
        )
        return [Kronecker(first, second) for first, second in pairs]

    def unwhitened(self, white: Tensor) -> Tensor:
        """Draws ``(S, n)``: those of each field, one after the other."""
        shape = (len(white), self.first.structure.size, self.second.structure.size)
        along = self.second.unwhitened(white.reshape(-1, shape[2])).view(shape).mT
        return self.first.unwhitened(along.reshape(-1, shape[1])).view(shape[0], shape[2], shape[1]).mT.flatten(1)


@cached(8)
def _product(one: Structure, two: Structure) -> Structure:
    index = (one.index[:, None, :, None] * two.size + two.index[None, :, None, :]).flatten(2).flatten(0, 1)
    every, other = (torch.eye(part.size).to(part.fixed) for part in (one, two))
    varies = torch.linalg.qr(torch.cat([one.fixed, every], -1)).Q[:, one.fixed.shape[-1] :]
    pairs = [(one.fixed, other), (varies, two.fixed)]  # what the first, or else the second, leaves out
    fixed = [torch.einsum("ia,jb->ijab", a, b).flatten(0, 1).flatten(1) for a, b in pairs]
    return Structure(index, torch.cat(fixed, -1), one.anchors[:0])


class GMRF(GaussianField):
    """A Gaussian field of a precision that the user writes, entry by entry.

    :param edges: pairs of different values, each pair once, whose entry may be other than zero, ``(E, 2)`` long.
    :param diagonal: of the precision, ``(..., n)``.
    :param off_diagonal: the entries at ``edges``, ``(..., E)``.
    :param constraint: ``(A, e)``, ``(m, n)`` and ``(m,)``: values with ``A x = e`` only.
    :param intrinsic: whether the precision is flat along the rows of ``A``, ``Q A' = 0``, as that of a random walk.

    >>> edges = torch.tensor([[0, 1], [1, 2]])
    >>> field = GMRF(edges, torch.tensor([2.0, 3.0, 2.0]), torch.tensor([-1.0, -1.0]))
    >>> field.log_prob(torch.zeros(3))
    tensor(-1.7171)

    :raises BadInput: for shapes that do not belong together, and constraints that follow from one another.
    :raises NotPositiveDefinite: where the precision is none.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "diagonal": constraints.real_vector,
        "off_diagonal": constraints.real_vector,
    }

    def __init__(
        self,
        edges: Tensor,
        diagonal: Tensor,
        off_diagonal: Tensor,
        constraint: tuple[Tensor, Tensor] | None = None,
        validate_args: bool | None = None,
        *,
        intrinsic: bool = False,
    ) -> None:
        size = diagonal.shape[-1] if diagonal.dim() else 0
        pairs = edges.dim() == 2 and edges.shape[-1] == 2 and not edges.is_floating_point()
        if not pairs or off_diagonal.shape[-1:] != edges.shape[:1]:
            raise BadInput(
                f"GMRF of edges {tuple(edges.shape)}, diagonal {tuple(diagonal.shape)} and off_diagonal "
                f"{tuple(off_diagonal.shape)}; expected E pairs of different values below n, each pair once, "
                f"(..., n) and (..., E)."
            )
        if len(edges):
            check_pairs(edges, size)
        shape = torch.Size(broadcast_shape(diagonal.shape[:-1], off_diagonal.shape[:-1]))
        self.diagonal, self.off_diagonal = diagonal.expand(*shape, size), off_diagonal.expand(*shape, len(edges))
        fixed, given = _constraint(constraint, size, diagonal)
        anchors = most_independent(fixed) if intrinsic else edges.new_zeros(0)
        node = torch.arange(size, device=edges.device).unsqueeze(-1).expand(-1, 2)
        rows = torch.zeros_like(self.diagonal)
        for column in edges.unbind(-1):
            rows = rows.index_add(-1, column, self.off_diagonal)
        # q_ij x_i x_j as a square of a difference, and what that adds to the diagonal
        difference, alone = torch.tensor([[1.0, -1.0], [1.0, 0.0]]).to(self.diagonal)
        coefficients = torch.cat([difference.expand(len(edges), 2), alone.expand(size, 2)])
        precision = torch.cat([-self.off_diagonal, self.diagonal + rows], -1)
        structure = Structure(torch.cat([edges, node]), fixed, anchors)
        super().__init__(structure, (coefficients, precision), None, torch.Size([size]), validate_args, given)
        if intrinsic and self._validate_args:
            here, there = (fixed.to(self.diagonal)[column] for column in edges.unbind(-1))
            along = self.diagonal.unsqueeze(-1) * fixed.to(self.diagonal)
            for column, other in zip(edges.unbind(-1), (there, here), strict=True):
                along = along.index_add(-2, column, self.off_diagonal.unsqueeze(-1) * other)
            if bool((along.abs() > ROUNDING * self.diagonal.abs().amax()).any()):
                raise BadInput(
                    "GMRF(intrinsic=True) of a precision that is not flat along the rows of A; expected Q A' = 0, as "
                    "of sums of squares of differences, or intrinsic=False."
                )


def _constraint(constraint: tuple[Tensor, Tensor] | None, size: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """``A x = e`` by orthonormal directions: ``U' x = c``."""
    if constraint is None:
        return torch.zeros(size, 0, dtype=torch.float64, device=like.device), None
    if not isinstance(constraint, Sequence) or len(constraint) != 2:
        raise BadInput(f"constraint is a {type(constraint).__name__}; expected a pair (A, e), for A x = e.")
    A, e = (torch.as_tensor(x).detach().double() for x in constraint)
    if A.dim() != 2 or A.shape[-1] != size or e.shape != A.shape[:1] or len(A) >= size:
        raise BadInput(
            f"constraint of A {tuple(A.shape)} and e {tuple(e.shape)}; expected (m, {size}) and (m,), m < n."
        )
    U, R = torch.linalg.qr(A.mT)
    scale = R.diagonal().abs()
    if bool((scale <= 1e-10 * scale.max()).any()):  # rounding of A itself, many times over
        raise BadInput("rows of the constraint follow from one another; expected independent ones: leave some out.")
    given = torch.linalg.solve_triangular(R.mT, e.unsqueeze(-1), upper=False).squeeze(-1)
    return U, given if bool(given.any()) else None
