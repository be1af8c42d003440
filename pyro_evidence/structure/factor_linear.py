"""Data that linear predictors join to sparse coordinates: value, slope and curvature from one evaluation each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_evidence.numerics import derivatives
from pyro_evidence.numerics.linear_predictor import CHUNK, curvature_graph
from pyro_evidence.precision.elimination import first_of_each, row_numbers
from pyro_evidence.program import predictors
from pyro_evidence.structure.density import LinearPart, LinearPredictors


@dataclass(frozen=True, eq=False)
class SparseRows:
    """``J`` of ``eta = J u + c``: ``N`` data of ``C`` elements that see ``k`` coordinates, or sums ``B u`` of them."""

    index: Tensor  # (N, k) different coordinates; from D on sums
    value: Tensor  # (N, C, k)
    size: int  # D
    B: Tensor | None = None  # (r, D) of the sums

    @cached_property
    def _columns(self) -> tuple[Tensor, Tensor]:
        """Which columns hold one coordinate for all data, and which do not."""
        same = (self.index == self.index[:1]).all(0)
        return same.nonzero().squeeze(-1), (~same).nonzero().squeeze(-1)

    def product(self, u: Tensor) -> Tensor:
        """``J u`` of rows ``(R, D)``, shape ``(R, N, C)``."""
        shared, own = self._columns
        u = u if self.B is None else torch.cat([u, u @ self.B.mT], -1)
        total = torch.einsum("rk,nck->rnc", u.index_select(1, self.index[0, shared]), self.value[..., shared])
        for j in own.tolist():
            total = torch.addcmul(total, u.index_select(1, self.index[:, j]).unsqueeze(-1), self.value[..., j])
        return total

    def back(self, slope: Tensor) -> Tensor:
        """``J' s`` for ``s`` ``(N, C)``, shape ``(D,)``."""
        shared, own = self._columns
        each = torch.einsum("nc,nck->nk", slope, self.value) if self.value.shape[1] > 1 else slope * self.value[:, 0]
        total = slope.new_zeros(self._seen)
        total.index_add_(0, self.index[0, shared], each[:, shared].sum(0))
        for j in own.tolist():
            total.index_add_(0, self.index[:, j], each[:, j])
        return total if self.B is None else total[: self.size] + total[self.size :] @ self.B

    @property
    def _seen(self) -> int:
        """Coordinates and sums."""
        return self.size + (0 if self.B is None else len(self.B))

    @cached_property
    def _unique(self) -> tuple[Tensor, Tensor]:
        """The different rows of ``index``, and which of them each datum has."""
        owner = row_numbers(self.index[:, self._columns[1]], self._seen)
        return self.index[first_of_each(owner)], owner

    @property
    def distinct(self) -> Tensor:
        """The coordinates of each sum of data that see the same, ``(F, k)``."""
        return self._unique[0]

    def elements(self, B: Tensor) -> Tensor:
        """``sum J_n' B_n J_n`` over the data that see the same coordinates, ``(R, F, k, k)``.

        :param B: ``(R, N, C, C)``.
        """
        index, owner = self._unique
        total = self.value.new_zeros(len(B), *index.shape, index.shape[-1], dtype=torch.float64)
        for rows in self._chunks():
            J = self.value[rows]
            for sums, own in zip(total, B[:, rows], strict=True):  # torch's product of single rows takes thrice as long
                sums.index_add_(0, owner[rows], (J.mT * (own * J) if J.shape[1] == 1 else J.mT @ (own @ J)).double())
        return total

    def sandwiched(self, weights: Tensor) -> Tensor:
        """``J_n W_f J_n'``, with ``f`` the sum that datum ``n`` is in, ``(N, C, C)``.

        :param weights: ``(F, k, k)``.
        """
        owner = self._unique[1]
        return torch.cat([self.value[r] @ weights[owner[r]] @ self.value[r].mT for r in self._chunks()])

    def _chunks(self) -> Iterator[slice]:
        size = max(1, CHUNK // max(1, self.index.shape[-1] ** 2))
        return (slice(start, start + size) for start in range(0, len(self.index), size))


@dataclass(frozen=True)
class SparseLinear(LinearPart):
    """A linear part with a sparse ``J``."""

    rows: SparseRows

    def product(self, u: Tensor) -> Tensor:
        return self.rows.product(u)

    def back(self, slope: Tensor) -> Tensor:
        return torch.stack([self.rows.back(own) for own in slope.double()])

    def reach(self, u: Tensor) -> Tensor:
        B = None if self.rows.B is None else self.rows.B.abs()
        return replace(self.rows, value=self.rows.value.abs(), B=B).product(u.abs().unsqueeze(0))[0]


@dataclass(frozen=True, eq=False)
class SparsePredictors(LinearPredictors):
    """Linear predictors of a few coordinates each, and the priors beside them."""

    linear: tuple[SparseLinear, ...]

    def slopes(
        self, diagonal: Tensor, log_det_gradient: Sequence[Tensor], u: Tensor, theta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Derivatives of ``log |A|`` in ``u`` and ``theta`` through predictors and Gaussian priors, and more.

        Third are the derivatives of the log joint at fixed latents, ``(T,)``; last is its gradient in ``u`` ``(D,)``,
        with a graph to the :meth:`leaf` of ``theta``.

        :param diagonal: of the inverse of ``A``, ``(D,)``.
        :param log_det_gradient: the inverse of ``A`` on the parts' patterns.
        """
        u = u.detach().clone().requires_grad_()
        with torch.enable_grad():
            theta = self.leaf(theta)
            read = self.parts(theta)
            value, spread = torch.as_tensor(read.rest).double(), u.new_zeros(())
            for part, offset, weights in zip(self.linear, read.offsets, log_det_gradient, strict=True):
                eta = part.eta(u.unsqueeze(0), offset).to(self.joint.dtype)
                found, _, B = curvature_graph(part.likelihood.log_likelihood(read.trace), part.likelihood.layout, eta)
                value = value + found.sum().double()
                spread = spread + (part.rows.sandwiched(weights) * B[0].double()).sum()
            if read.normal is not None:
                spread, value = spread + diagonal @ read.normal.precision, value + read.normal.log_prob(u)
            else:
                value = value + predictors.log_prior_rows(self.joint, u.unsqueeze(0), theta)[0]
            rise = derivatives.pullback(value, u, create_graph=True)
        by_u, by_theta, partial = (
            derivatives.pullback(x, y) for x, y in ((spread, u), (spread, theta), (value, theta))
        )
        return by_u, by_theta, partial, rise
