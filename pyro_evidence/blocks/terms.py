"""The log joint density of many rows at once, summed block by block."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.blocks.partition import Partition
from pyro_evidence.numerics import batched
from pyro_evidence.numerics.batched import CACHED_NUMBERS, Batched
from pyro_evidence.numerics.derivatives import generic_directions
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.predictors import LikelihoodTerm
from pyro_evidence.structure.density import LinearPredictors, ModelParts
from pyro_evidence.structure.factor_cells import cells


@dataclass(frozen=True, eq=False)
class Local(Batched):
    """Value, slope and curvature of each block at one point.

    :ivar value: log joint density of each block, and last what belongs to none, ``(..., G + 1)``.
    :ivar slope: in the coordinates of all blocks, ``(..., n)``.
    :ivar curvature: minus the second derivatives, ``(..., G, d, d)`` for each width.
    """

    value: Tensor
    slope: Tensor
    curvature: tuple[Tensor, ...]

    def expanded(self, p: Partition, away: Tensor) -> Tensor:
        """The quadratic of each block at distances ``(..., Q, n)`` from the point, ``(..., Q, G + 1)``."""
        pulls, parts = [], away.split([front.numel() for front in p.fronts], -1)
        for front, A, move in zip(p.fronts, self.curvature, parts, strict=True):
            pulls.append(torch.einsum("...gij,...qgj->...qgi", A, move.unflatten(-1, front.shape)).flatten(-2))
        each = (self.slope.unsqueeze(-2) - 0.5 * torch.cat(pulls, -1)) * away
        value = self.value.unsqueeze(-2).expand(*away.shape[:-1], -1)
        return value.index_add(-1, p.block, each)


@dataclass(frozen=True, eq=False)
class BlockDensity:
    """A log joint density by its blocks.

    :ivar linear: its linear predictors, where they were found: the model is then run once for all rows.
    :ivar kept: what pruned coordinates are held at, ``(H,)``.
    :ivar left_out: their log prior density there as a function of the hyperparameters, which does not count, nats.
    :ivar names: the sites whose terms count, where predictors were not found; None for all.
    :ivar likelihoods: where observed sites see the latents, linear or not.
    :ivar is_quadratic: whether the log prior density is known to be quadratic in all latents.
    """

    joint: LogJoint
    partition: Partition
    linear: LinearPredictors | None
    kept: Tensor
    left_out: Callable[[Tensor], Tensor]
    names: tuple[str, ...] | None = None
    likelihoods: tuple[LikelihoodTerm, ...] = ()
    is_quadratic: bool = False
    families: list[Any] = field(init=False, repr=False, compare=False, default_factory=list)  # of terms, once known
    evaluated: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)  # the last ones

    def terms(self, theta: Tensor) -> "Terms":
        """The density at hyperparameters ``(T,)``, with their graph if they have one."""
        if self.linear is None:
            return Terms(self, theta, None)
        trace = self.joint.trace(self.joint.initial_u, theta)
        return Terms(self, theta, self.linear.parts_at(theta, trace))

    @property
    def parts(self) -> tuple[Any, ...]:
        """The linear predictors, if they were found."""
        return () if self.linear is None else self.linear.linear

    @cached_property
    def data_owner(self) -> tuple[Tensor, ...]:
        """The block of each datum of each linear predictor, ``(N,)``."""
        return tuple(self.partition.owner[part.likelihood.site] for part in self.parts)

    @cached_property
    def designs(self) -> tuple[Tensor, ...]:
        """``J`` of the shared coordinates for predictors of one element, ``(N, P)`` each."""
        unit = torch.nn.functional.one_hot(self.partition.shared, self.partition.size).double()
        return tuple(part.product(unit).squeeze(-1).mT.contiguous() for part in self.parts)

    def whole(self, rows: Tensor, shared: Tensor) -> Tensor:
        """All coordinates, ``(Q, D)``, of blocks ``(Q, n)`` and what they share, ``(P,)``."""
        others = torch.cat([shared, self.kept]).expand(len(rows), -1)
        return torch.cat([rows, others], 1).index_select(1, self.partition.place)

    def cells(self, u: Tensor, theta: Tensor, names: tuple[str, ...] | None = None) -> dict[str, Tensor]:
        """The terms of the model run at every row ``(Q, D)``, nats, ``(Q, F)`` by name.

        :param names: the sites that count; None for :attr:`names`.
        """
        shapes: dict[str, torch.Size] = {}

        def one(row: Tensor) -> Tensor:
            found = cells(self.joint, row, theta, self.names if names is None else names)
            shapes.update({n: x.shape for n, x in found.items()})
            return torch.cat([x.reshape(-1) for x in found.values()])

        flat = self.by_rows(one, u)
        return dict(zip(shapes, flat.split([s.numel() for s in shapes.values()], 1), strict=True))

    def by_rows(self, one: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
        """Result of a run of the model for every row ``(Q, D)``, together where it takes a batch."""
        return batched.apply(one, (u,), self.joint.row_bytes, one)

    def explains(self, theta: Tensor) -> bool:
        """Whether linear predictors and terms of the model, block by block, are the same at a point without pattern."""
        p = self.partition
        draw = 0.5 * generic_directions(1, p.size, self.joint.initial_u)[0]
        rows, shared = draw[p.own].unsqueeze(0), draw[p.shared]
        with torch.no_grad():
            try:
                found = self.terms(theta)(rows, shared)
            except (RuntimeError, KeyError, ValueError):
                return False
            expected = Terms(self, theta, None)(rows, shared)
        tolerance = 10.0 * self.joint.rounding
        return bool(((found - expected).abs() <= tolerance * (1.0 + expected.abs())).all())


@dataclass(frozen=True, eq=False)
class Terms:
    """The log joint density at one setting of the hyperparameters, as a function of blocks and shared coordinates."""

    density: BlockDensity
    theta: Tensor
    read: ModelParts | None

    def __call__(self, rows: Tensor, shared: Tensor) -> Tensor:
        """The terms of each block, and last those that belong to none, nats, ``(Q, G + 1)``.

        :param rows: the coordinates of all blocks, one after the other, ``(Q, n)``.
        :param shared: the global coordinates of all rows, ``(P,)``.
        """
        if self.read is None:
            return self._summed(self.density.cells(self.density.whole(rows, shared), self.theta))
        return self.prior(rows, shared, self.read) + self.likelihood(rows, shared)

    def likelihood(self, rows: Tensor, shared: Tensor) -> Tensor:
        """The log likelihood of each block, and last that of what belongs to none, nats, ``(Q, G + 1)``."""
        density, u, read = self.density, self.density.whole(rows, shared), self.read
        assert read is not None
        total = rows.new_zeros(len(rows), density.partition.num_blocks + 1)
        for part, owner, offset in zip(density.parts, density.data_owner, read.offsets, strict=True):
            eta = (part.product(u) + offset).to(density.joint.dtype)
            each = part.likelihood.log_likelihoods(read.trace)(part.likelihood.layout.natural(eta))
            total = total.index_add(1, owner, each.double())
        return torch.cat([total[:, :-1], total[:, -1:] + torch.as_tensor(read.rest).to(total)], 1)

    def prior(self, rows: Tensor, shared: Tensor, read: ModelParts) -> Tensor:
        """The log prior density of each block, and last that of what belongs to none, nats, ``(Q, G + 1)``."""
        density = self.density
        if read.prior is None:
            return self._summed(density.cells(density.whole(rows, shared), self.theta, density.joint.latents.names))
        p, (loc, precision) = density.partition, read.prior
        log_norm = 0.5 * (precision / torch.pi / 2).log()
        own = log_norm[p.own] - 0.5 * precision[p.own] * (rows - loc[p.own]).square()
        rest = (log_norm[p.shared] - 0.5 * precision[p.shared] * (shared - loc[p.shared]).square()).sum()
        total = rows.new_zeros(len(rows), p.num_blocks + 1).index_add(1, p.block, own)
        return torch.cat([total[:, :-1], total[:, -1:] + rest], 1)

    def _summed(self, found: dict[str, Tensor]) -> Tensor:
        """Terms ``(Q, F)`` of each name, block by block."""
        p = self.density.partition
        num = len(next(iter(found.values())))
        total = torch.zeros(num, p.num_blocks + 1, dtype=torch.float64, device=self.density.joint.device)
        for name, each in found.items():
            flat = each.flatten(1)
            owner = p.owner.get(name)
            owner = torch.full_like(flat[0], p.num_blocks, dtype=torch.long) if owner is None else owner
            total = total.index_add(1, owner, flat)
        return torch.cat([total[:, :-1], total[:, -1:] - self.density.left_out(self.theta)], 1)


@dataclass(frozen=True, eq=False)
class RowTerms:
    """The same at many settings of the hyperparameters, each with blocks and shared coordinates of its own."""

    density: BlockDensity
    theta: Tensor  # (R, T)
    prior: tuple[Tensor, Local] | None = None  # where that of blocks, quadratic given what they share, is expanded

    def __getitem__(self, rows: Tensor) -> "RowTerms":
        prior = None if self.prior is None else (self.prior[0][rows], self.prior[1][rows])
        return RowTerms(self.density, self.theta[rows], prior)

    def __call__(self, rows: Tensor, shared: Tensor) -> Tensor:
        """The terms of each block, and last those that belong to none, nats, ``(R, Q, G + 1)``.

        :param rows: the coordinates of all blocks, ``(R, Q, n)``.
        :param shared: the global coordinates, ``(R, P)``.
        """
        num = len(self.theta) * (1 + sum(map(len, self.density.data_owner)))  # of what is worked on for each node
        size = max(1, CACHED_NUMBERS // num)

        def of_row(theta: Tensor, rows: Tensor, shared: Tensor) -> Tensor:
            terms = self.density.terms(theta)
            each = terms if self.prior is None else terms.likelihood
            return torch.cat([each(own, shared) for own in rows.split(size)])

        found = torch.vmap(of_row)(self.theta, rows, shared)
        if self.prior is None:
            return found
        start, prior = self.prior
        return found + prior.expanded(self.density.partition, rows - start.unsqueeze(-2))
