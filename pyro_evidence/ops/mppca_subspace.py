"""Principal subspaces in one form only: orthogonal columns, longest first, largest entry positive."""

from dataclasses import dataclass

import torch
from torch import Tensor

APART = 1e-6  # relative difference of variances below which axes can turn into one another


@dataclass(frozen=True)
class PrincipalSubspace:
    """The principal axes of one component.

    :ivar axes: orthonormal columns, the largest entry of each positive, shape ``(m, q)``.
    :ivar variances: of the data along each axis, noise included, descending, shape ``(q,)``.
    :ivar noise_variance: of the directions that are left over, mean over outputs, shape ``()``.
    :ivar groups: axes with one number have equal variances: only their span is determined, shape ``(q,)``.
    """

    axes: Tensor
    variances: Tensor
    noise_variance: Tensor
    groups: Tensor

    @property
    def is_determined(self) -> bool:
        """Whether every axis is, up to its sign; otherwise only the spans of the groups are."""
        return len(self.groups.unique()) == len(self.groups)

    def __str__(self) -> str:
        found = [f"axis {i}: variance {float(v):.4g}" for i, v in enumerate(self.variances)]
        tied = [int(g) for g, n in zip(*self.groups.unique(return_counts=True), strict=True) if n > 1]
        names = [str((self.groups == g).nonzero().flatten().tolist()) for g in tied]
        said = [f"axes {n} have equal variances: their rotation is undetermined, only their span is" for n in names]
        return "\n".join(found + said)


def principal_subspace(W: Tensor, beta: Tensor) -> PrincipalSubspace:
    """Canonical form of loadings ``(m, q)`` with noise precisions ``(m,)``; columns of zeros are left out."""
    U, lengths, _ = torch.linalg.svd(W, full_matrices=False)
    kept = lengths > 1e-12 * lengths.amax() if len(lengths) else lengths > 0  # rounding leaves zeros a length
    U, lengths = U[:, kept], lengths[kept]
    sign = U.gather(0, U.abs().argmax(0, keepdim=True)).sign() if U.shape[1] else U[:1]
    noise = beta.reciprocal().mean()
    squares = lengths.square()
    new = torch.ones_like(squares, dtype=torch.bool)
    if len(squares) > 1:
        new[1:] = squares[:-1] - squares[1:] > APART * squares[:-1]
    return PrincipalSubspace(U * sign, squares + noise, noise, new.long().cumsum(0) - 1)
