"""Operands of a round of EM: data with their features, mixtures, and the units of both.

All that a datum contributes is linear in its *features*: products of its basis functions and responses.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, reduce
from operator import add, attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions.transforms import LowerCholeskyTransform, PositiveDefiniteTransform

from pyro_evidence.data.ranks import SINGLE_PROCESS, Communicator, Sums, share
from pyro_evidence.data.rows import PLACES, Rows, column_moments, scattered
from pyro_evidence.errors import BadInput
from pyro_evidence.models.mixture import Responses
from pyro_evidence.numerics.batched import BATCH_NUMBERS, Batched
from pyro_evidence.numerics.linalg import ROUNDED, place_in_triangle
from pyro_evidence.settings import stacklevel

KEPT = BATCH_NUMBERS  # in the features of all data, which are then made once and not anew in every pass


@dataclass(frozen=True, eq=False)
class FeatureLayout:
    """In which column of the features each product stands."""

    present: Tensor  # (m,)      whether output i was observed
    gram: Tensor  # (m, B, B)    g_b g_c, where output i was observed
    cross: Tensor  # (m, B)      y_i g_b, contiguous
    square: Tensor  # (m, m)     y_i y_j, the diagonal contiguous and first; -1 where there are no such columns
    num_features: int

    @cached_property
    def has_products(self) -> bool:
        """Whether products of different outputs are among the features."""
        return bool((self.square >= 0).all())

    @cached_property
    def num_diagonal(self) -> int:
        """Number of columns that a diagonal noise needs; they come first."""
        return int(self.square[-1, -1]) + 1


@dataclass(frozen=True, eq=False)
class MixtureData:
    """Responses, basis functions, weights, and the features made of them.  Built by :func:`mixture_data`."""

    Y: Tensor  # (..., N, m)   responses, 0 where missing
    G: Tensor  # (..., N, B)   basis functions
    weight: Tensor  # (N,)     how often each datum counts; (R, N) where it differs between restarts
    observed: Tensor | None  # (N, m) bool, None when nothing is missing
    features: Tensor | None  # (..., N, P); None where they are many and made anew for each block
    layout: FeatureLayout
    floor: Tensor | None = None  # (N,) log of a density that is added to that of the kernels, relative to their share
    log_share: float = 0.0  # log of the share that the kernels have together
    communicator: Communicator = SINGLE_PROCESS  # processes that have the same data, of which each adds up its share

    @cached_property
    def num_data(self) -> Tensor:
        """Total weight of the data, shape ``()`` or ``(R,)``."""
        return self.weight.sum(-1)

    @property
    def num_rows(self) -> int:
        """Number of data, whatever their weight."""
        return self.Y.shape[-2]

    @cached_property
    def is_unweighted(self) -> bool:
        """Whether every datum counts once."""
        return bool((self.weight == 1).all())

    @cached_property
    def is_constant(self) -> bool:
        """Whether the only basis function is 1: an unconditional density."""
        return self.layout.gram.shape[-1] == 1 and bool((self.layout.gram.flatten() == self.layout.present).all())

    def columns(self, num: int) -> Tensor:
        """The first ``num`` features, shape ``(..., N, num)``."""
        if self.features is not None:
            return self.features[..., :num]
        G = None if self.is_constant else self.G
        return _features(self.Y, G, self.observed, products=num > self.layout.num_diagonal)[..., :num]

    def along_rows(self, change: Callable[..., Tensor], *args: Any) -> "MixtureData":
        """The data with ``change(tensor, axis, *args)`` in the place of every tensor, along the axis of its rows."""
        values: dict[str, Any] = {name: getattr(self, name) for name in AXES}
        changed: dict[str, Any] = {n: change(v, AXES[n] % v.dim(), *args) for n, v in values.items() if v is not None}
        return replace(self, **changed)

    def parts(self, size: int) -> Iterator["MixtureData"]:
        """The data, ``size`` rows at a time."""
        if self.Y.shape[-2] <= size:
            yield self
            return
        for start in range(0, self.Y.shape[-2], size):
            yield self.along_rows(Tensor.narrow, start, min(size, self.Y.shape[-2] - start))

    def total(self, size: int, of_part: Callable[["MixtureData"], Sums]) -> Sums:
        """One pass: the sum of ``of_part`` over all data, ``size`` rows at a time."""
        here = self
        if self.communicator.num_ranks > 1:
            mine = share(self.communicator.rank, self.communicator.num_ranks, self.num_rows)
            alone = replace(self, communicator=SINGLE_PROCESS)
            here = alone.along_rows(Tensor.narrow, mine.start, mine.stop - mine.start)
        return self.communicator.total(reduce(add, map(of_part, here.parts(size))))

    def by_restarts(self, num: int, of_rows: Callable[[Tensor | None], Sums]) -> Sums:
        """Result of ``of_rows`` for ``num`` restarts, which groups of processes share out.

        :param of_rows: is told the numbers of those that are asked for; None for all.
        """
        among = self.communicator.restarts
        if among is None or num == 1:
            return of_rows(None)
        mine = torch.arange(num)[among.rank :: among.num_ranks]
        here: Any = of_rows(mine if len(mine) else torch.arange(1))
        order = torch.cat([torch.arange(num)[i :: among.num_ranks] for i in range(among.num_ranks)]).argsort()
        each = {n: x if x.dim() == 0 else among.gathered(x[: len(mine)])[order] for n, x in vars(here).items()}
        return replace(here, **each)

    def log_jacobian(self, unit: Tensor) -> Tensor:
        """Log Jacobian of all data, from standard units to ``unit`` ``(m,)``, which the log density loses, nats."""
        if self.observed is None:
            return self.num_data * unit.log().sum()
        return (self.weight @ self.observed.to(self.Y)) @ unit.log()

    def sampled(self, most: int) -> "MixtureData":
        """About ``most`` of the data where there are more, scattered over all by the numbers of their rows."""
        if self.num_rows <= most:
            return self
        place = scattered(torch.arange(self.num_rows))
        return some(self, (place < most * PLACES // self.num_rows).nonzero().flatten().to(self.Y.device)).with_features

    @property
    def with_features(self) -> "MixtureData":
        """These data with their features made once, where they are few."""
        if self.features is not None or self.Y[..., 0].numel() * self.layout.num_features > KEPT:
            return self
        return replace(self, features=self.columns(self.layout.num_features))


@dataclass(frozen=True, eq=False)
class StreamedData(MixtureData):
    """Data that are never together: every pass reads the pieces anew, and adds up what all processes found."""

    rows: Rows[MixtureData] = field(kw_only=True)
    samples: dict[int, MixtureData] = field(default_factory=dict, compare=False, kw_only=True)

    @staticmethod
    def of(rows: Rows[MixtureData]) -> "StreamedData":
        """The data in rows, in standard units."""
        empty = some(rows.example, torch.arange(0))
        values = {f.name: getattr(empty, f.name) for f in fields(MixtureData)}
        return StreamedData(**values | {"communicator": rows.communicator}, rows=rows)

    @property
    def num_rows(self) -> int:
        """Number of data of all processes, whatever their weight."""
        return len(self.rows)

    @cached_property
    def num_data(self) -> Tensor:
        """Total weight of the data of all processes, shape ``()``."""
        return self.rows.total(lambda piece: piece.weight.sum())

    def total(self, size: int, of_part: Callable[[MixtureData], Sums]) -> Sums:
        """One pass: the sum of ``of_part`` over the data of all processes, ``size`` rows at a time."""
        return self.rows.total(lambda piece: piece.total(size, of_part))

    def sampled(self, most: int) -> MixtureData:
        """About ``most`` of the data, scattered over all by the numbers of their rows; they are kept."""
        most = min(self.num_rows, most)
        if most not in self.samples:
            columns = self.rows.sampled(most, lambda piece: (piece.Y, piece.G, piece.weight, piece.floor))
            values: dict[str, Any] = dict(zip(("Y", "G", "weight", "floor"), columns, strict=True))
            values |= {"observed": None, "features": None, "layout": self.layout, "log_share": self.log_share}
            join = self.communicator if self.communicator.num_ranks > 1 else SINGLE_PROCESS
            self.samples[most] = MixtureData(**values, communicator=join).with_features
        return self.samples[most]


AXES = {"Y": -2, "G": -2, "weight": -1, "observed": 0, "features": -2, "floor": 0}  # along which the rows lie
OF_ALL = {"Y": 2, "G": 2, "features": 2, "weight": 1}  # dims of data that rows of a batch share, one more where not
LOG_DIAGONAL = LowerCholeskyTransform()  # to a lower Cholesky factor, from one with the logs of its diagonal
PRECISION = PositiveDefiniteTransform()  # to the matrix, from the same


@dataclass(frozen=True, eq=False)
class Mixture(Batched):
    """One setting of weights and hyperparameters per row; a component with ``log_mixing = -inf`` is pruned."""

    w: Tensor  # (R, K, m, B)
    noise: Tensor  # (R, K, m) precisions beta, or (R, K, m, m) precision matrices
    log_mixing: Tensor  # (R, K)
    alpha: Tensor  # (R, K, m, B)  prior precision of each weight
    loc: Tensor  # (K, m, B)       prior mean of each weight

    common: ClassVar[frozenset[str]] = frozenset({"loc"})

    @cached_property
    def active(self) -> Tensor:
        """Components that are not pruned, shape ``(R, K)``."""
        return self.log_mixing > -torch.inf

    present = property(attrgetter("active"))  # by the name that all families have

    @property
    def coordinates(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weights, noise precisions, prior precisions and shares without bounds, rows in front."""
        full = self.has_full_noise
        noise = LOG_DIAGONAL.inv(torch.linalg.cholesky_ex(self.noise)[0]) if full else self.noise.log()
        return self.w, noise, self.alpha.log(), torch.where(self.active, self.log_mixing, 0.0)

    def placed(self, w: Tensor, noise: Tensor, log_alpha: Tensor, shares: Tensor) -> "Mixture":
        """The mixture at these :attr:`coordinates`, with the components of this one that are not pruned."""
        noise = PRECISION(noise) if self.has_full_noise else noise.exp()
        log_mixing = torch.where(self.active, shares, -torch.inf).log_softmax(-1)
        return replace(self, w=w, noise=noise, alpha=log_alpha.exp(), log_mixing=log_mixing)

    def rescaled(self, unit: Tensor, shift: Tensor) -> "Mixture":
        """Weights divided by ``unit`` ``(m,)`` and shifted by ``(m, B)``, precisions to match."""
        each = unit.unsqueeze(-1)
        noise = self.noise * unit * each if self.has_full_noise else self.noise * unit.square()
        return Mixture(
            self.w / each + shift, noise, self.log_mixing, self.alpha * each.square(), self.loc / each + shift
        )

    @cached_property
    def on(self) -> Tensor:
        """1 for weights of components that are not pruned, else 0, shape ``(R, K, 1, 1)``."""
        return self.active[..., None, None].to(self.w)

    @cached_property
    def all_active(self) -> bool:
        """Whether no component of any row is pruned."""
        return bool(self.log_mixing.amin() > -torch.inf)

    @property
    def has_full_noise(self) -> bool:
        """Whether noise precisions are matrices, not one for each output."""
        return self.noise.dim() == self.w.dim()

    @property
    def noise_matrix(self) -> Tensor:
        """Noise precisions as matrices, shape ``(R, K, m, m)``."""
        return self.noise if self.has_full_noise else self.noise.diag_embed()

    @property
    def noise_diagonal(self) -> Tensor:
        """Noise precision of each output, the others held, shape ``(R, K, m)``."""
        return self.noise if not self.has_full_noise else self.noise.diagonal(dim1=-2, dim2=-1)


def some(data: MixtureData, index: Tensor) -> MixtureData:
    """Some of the data."""
    return data.along_rows(torch.index_select, index)


def rows_of(data: MixtureData, rows: Tensor) -> MixtureData:
    """The data of some rows of a batch, where each row has its own."""
    own = {n: v[rows] for n, dims in OF_ALL.items() if (v := getattr(data, n)) is not None and v.dim() > dims}
    return replace(data, **own) if own else data


def mixture_data(
    Y: Tensor, G: Tensor | None = None, *, weight: Tensor | None = None, products: bool = True
) -> MixtureData:
    """The data of a mixture and their features.

    :param Y: responses, shape ``(..., N, m)``; nan where missing.
    :param G: basis functions, shape ``(..., N, B)``; None for the constant 1.
    :param weight: of each datum, shape ``(N,)``; None for 1.
    :param products: whether products of different outputs are needed: for full noise covariances, and for curvature
        between the outputs of a component.  Of sixty outputs they are nearly all that a pass costs.
    """
    missing = Y.isnan()
    observed = ~missing if bool(missing.any()) else None
    Y = torch.where(missing, 0.0, Y) if observed is not None else Y
    weight = Y.new_ones(1).expand(Y.shape[-2]) if weight is None else weight
    (m, B), gaps = (Y.shape[-1], 1 if G is None else G.shape[-1]), observed is not None
    present = 1 + torch.arange(m) if gaps else torch.zeros(m, dtype=torch.long)
    start = 1 + m * gaps
    if G is None:
        gram = present[:, None, None]
    else:
        size = B * (B + 1) // 2
        gram = (start + place_in_triangle(B)).expand(m, B, B) + gaps * size * torch.arange(m)[:, None, None]
        start += size * (m if gaps else 1)
    cross = start + torch.arange(m * B).reshape(m, B)
    start += m * B
    square = start + m + place_in_triangle(m, 1) if products else torch.full((m, m), -1)
    square = square.diagonal_scatter(start + torch.arange(m))
    layout = FeatureLayout(present, gram, cross, square, int(square.max()) + 1)
    ones = Y.new_ones(1).expand(*Y.shape[:-1], 1)
    return MixtureData(Y, ones if G is None else G, weight, observed, None, layout).with_features


def _features(Y: Tensor, G: Tensor | None, observed: Tensor | None, *, products: bool) -> Tensor:
    """All columns, shape ``(..., N, P)``; one column after the other in memory."""
    blocks = [Y.new_ones(*Y.shape[:-1], 1)]
    mask = None if observed is None else observed.to(Y)
    blocks += [] if mask is None else [mask]
    if G is not None:
        row, column = torch.triu_indices(G.shape[-1], G.shape[-1])
        pairs = G[..., row] * G[..., column]
        blocks.append(pairs if mask is None else (mask.unsqueeze(-1) * pairs.unsqueeze(-2)).flatten(-2))
    cross = Y if G is None else (Y.unsqueeze(-1) * G.unsqueeze(-2)).flatten(-2)
    blocks += [cross, Y.square()]
    blocks += [Y[..., i : i + 1] * Y[..., i + 1 :] for i in range(Y.shape[-1] - 1)] if products else []
    return torch.cat([x.mT for x in blocks], -2).mT


@dataclass(frozen=True, eq=False)
class Units:
    """``y = origin + unit * standardised y``; the origin is absorbed by means, or by weights of a constant function."""

    origin: Tensor  # (m,) zeros where nothing can absorb it
    unit: Tensor  # (m,); or () for all outputs
    absorbed: Tensor  # (m, B) what the origin is as weights, or (m,) as a mean

    def standard(self, parameters: Any) -> Any:
        """Parameters of the caller's units in standard ones."""
        return parameters.rescaled(self.unit, -self.absorbed / self.unit.unsqueeze(-1))

    def original(self, parameters: Any) -> Any:
        """Parameters of standard units in the caller's."""
        return parameters.rescaled(self.unit.reciprocal(), self.absorbed)


def response_units(rows: Rows[Responses], noise: Tensor, free: Tensor) -> Units:
    """Weighted mean and standard deviation of each response, missing ones left out; unit 1 where it does not vary.

    A response that does not vary is warned of where it has noise of its own to be found.

    :param noise: which responses of which components share noise, long, ``(K, m)``.
    :param free: whether that is to be found, bool, ``(K, m)``.
    :raises BadInput: where none varies, and noise is to be found.
    """
    _, mean, square = column_moments(rows.mapped(lambda r: (r.Y, r.weight)))
    spread = square.sqrt()
    varies = spread > ROUNDED * mean.abs()  # a constant column keeps rounding errors about its mean
    if bool(free.any()) and not bool(varies.any()):
        raise BadInput(
            "all rows are the same: they are met exactly, and the log evidence grows without a bound as the scale of "
            "the noise goes to 0. Expected rows that differ; or give the model noise that is held at a number."
        )
    alone = free & ~torch.isin(noise, noise[:, varies])
    if bool(alone.any()):
        warnings.warn(
            f"column(s) {alone.any(0).nonzero()[:, 0].tolist()} of the responses are one constant each, which noise of "
            f"their own meets exactly: the log evidence grows without a bound there, and says no more than where the "
            f"search stops. Leave them out, or share the noise: noise=SphericalNoise().",
            stacklevel=stacklevel(),
        )
    unit = torch.where(varies, spread, 1.0)
    if rows.example.G is None:
        return Units(mean, unit, mean.unsqueeze(-1))
    num, sums, squares, varied = rows.total(lambda r: _constancy(r.G))
    value = sums / num
    found = ((varied == 0) & (squares / num == value.square()) & (value != 0)).nonzero().flatten()
    absorbed = torch.zeros(len(mean), len(value), dtype=mean.dtype, device=mean.device)
    if not len(found):
        return Units(torch.zeros_like(mean), unit, absorbed)
    absorbed[:, found[0]] = mean / value[found[0]]
    return Units(mean, unit, absorbed)


def _constancy(G: Tensor | None) -> Tensor:
    """Sums that tell whether each basis function is constant: of 1, its value, its square, and changes, ``(4, B)``."""
    assert G is not None
    some = G if len(G) else G.new_zeros(1, G.shape[-1])
    low, num = some.amin(0), torch.full_like(some[0], float(len(G) > 0))
    return torch.stack([num, num * low, num * low.square(), num * (some.amax(0) != low)])
