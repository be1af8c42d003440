r"""Expectation and maximisation for mixtures of linear-Gaussian kernels, a batch of restarts in front.

.. math:: p(y_n | x_n) = \sum_k \pi_k\, N(y_n | W_k g(x_n), \Lambda_k^{-1})

A Gaussian mixture is the case ``g = 1``.  All that a datum contributes is linear in its *features*: products of its
basis functions and responses.  The E-step is one matrix product with them, the M-step's statistics another, and
restarts and components share both.  Husmeier (2000), eqs. 1.1 to 1.3, 2.14 and 2.22.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat

import torch
from torch import Tensor

BLOCK = 2**16  # numbers in one block of responsibilities: they stay in the cache
SHARD = 2**23  # numbers in what one shard of the data makes where every datum has a number for every weight


@dataclass(frozen=True)
class Layout:
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
    def is_plain(self) -> bool:
        """Whether the only basis function is 1 and nothing is missing."""
        return self.gram.shape[-1] == 1 and not bool(self.gram.any())

    @cached_property
    def num_diagonal(self) -> int:
        """Number of columns that a diagonal noise needs; they come first."""
        return int(self.square[-1, -1]) + 1

    @cached_property
    def _first(self) -> tuple[int, int]:
        """Where the columns of cross and of squares begin."""
        return int(self.cross[0, 0]), int(self.square[0, 0])

    def gram_of(self, sums: Tensor) -> Tensor:
        """From sums of features ``(..., P)`` those of ``g_b g_c``, shape ``(..., m, B, B)``."""
        if self.is_plain:
            return sums[..., :1, None, None].expand(*sums.shape[:-1], len(self.present), 1, 1)
        return sums[..., self.gram]

    def cross_of(self, sums: Tensor) -> Tensor:
        """Sums of ``y_i g_b``, shape ``(..., m, B)``."""
        begin, end = self._first
        return sums[..., begin:end].reshape(*sums.shape[:-1], *self.cross.shape)

    def squares_of(self, sums: Tensor) -> Tensor:
        """Sums of ``y_i`` squared, shape ``(..., m)``."""
        return sums[..., self._first[1] : self.num_diagonal]

    def presence_of(self, sums: Tensor) -> Tensor:
        """Sums over the data in which an output was observed, shape ``(..., m)``."""
        if self.is_plain:
            return sums[..., :1].expand(*sums.shape[:-1], len(self.present))
        return sums[..., self.present]


@dataclass(frozen=True)
class MixtureData:
    """Responses, basis functions, weights, and the features made of them.  Built by :func:`mixture_data`."""

    Y: Tensor  # (..., N, m)   responses, 0 where missing
    G: Tensor  # (..., N, B)   basis functions
    weight: Tensor  # (N,)     how often each datum counts
    observed: Tensor | None  # (N, m) bool, None when nothing is missing
    features: Tensor  # (..., N, P)
    layout: Layout
    floor: Tensor | None = None  # (N,) log of a density that is added to that of the kernels, relative to their share
    log_share: float = 0.0  # log of the share that the kernels have together

    @cached_property
    def num_data(self) -> Tensor:
        """Total weight of the data, shape ``()``."""
        return self.weight.sum()

    @cached_property
    def is_unweighted(self) -> bool:
        """Whether every datum counts once."""
        return bool((self.weight == 1).all())

    @cached_property
    def is_constant(self) -> bool:
        """Whether the only basis function is 1: an unconditional density."""
        return self.layout.gram.shape[-1] == 1 and bool((self.layout.gram.flatten() == self.layout.present).all())


@dataclass(frozen=True)
class Mixture:
    """One setting of weights and hyperparameters per row; a component with ``log_mixing = -inf`` is pruned."""

    w: Tensor  # (R, K, m, B)
    noise: Tensor  # (R, K, m) precisions beta, or (R, K, m, m) precision matrices
    log_mixing: Tensor  # (R, K)
    alpha: Tensor  # (R, K, m, B)  prior precision of each weight
    loc: Tensor  # (K, m, B)       prior mean of each weight

    @cached_property
    def active(self) -> Tensor:
        """Components that are not pruned, shape ``(R, K)``."""
        return self.log_mixing > -torch.inf

    @cached_property
    def on(self) -> Tensor:
        """1 for weights of components that are not pruned, else 0, shape ``(R, K, 1, 1)``."""
        return self.active[..., None, None].to(self.w)

    @cached_property
    def all_active(self) -> bool:
        """Whether no component of any row is pruned."""
        return bool(self.log_mixing.amin() > -torch.inf)

    @property
    def noise_matrix(self) -> Tensor:
        """Noise precisions as matrices, shape ``(R, K, m, m)``."""
        return self.noise if self.noise.dim() == 4 else self.noise.diag_embed()

    @property
    def noise_diagonal(self) -> Tensor:
        """Noise precision of each output, the others held, shape ``(R, K, m)``."""
        return self.noise if self.noise.dim() == 3 else self.noise.diagonal(dim1=-2, dim2=-1)

    @property
    def log_det_noise(self) -> Tensor:
        """Log determinant of the noise precision, shape ``(R, K)``."""
        if self.noise.dim() == 3:
            return self.noise.log().sum(-1)
        tril, info = torch.linalg.cholesky_ex(self.noise)
        log_det = 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return torch.where(info == 0, log_det, torch.nan)  # one bad kernel costs its own row only


@dataclass(frozen=True)
class Statistics:
    """Expected sufficient statistics of one shard; ``a + b`` are those of both shards."""

    moments: Tensor  # (R, K, P)  sum_n r_nk F_n
    spread: Tensor  # (R, K, P)   sum_n r_nk (1 - r_nk) F_n; zeros unless asked for
    log_likelihood: Tensor  # (R,)  sum_n log p(y_n)

    def __add__(self, other: "Statistics") -> "Statistics":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Statistics(*(a + b for a, b in pairs))

    @property
    def counts(self) -> Tensor:
        """Expected number of data of each component, ``N_k``, shape ``(R, K)``."""
        return self.moments[..., 0]


def shards(data: MixtureData, num_each: int) -> list[MixtureData]:
    """The data in shards, so small that ``num_each`` numbers for every datum fit into memory."""
    size = max(1, SHARD // num_each)
    if len(data.weight) <= size:
        return [data]
    axes = {"Y": -2, "G": -2, "weight": 0, "observed": 0, "features": -2, "floor": 0}
    values = {name: getattr(data, name) for name in axes}
    parts = {n: v.split(size, axes[n]) for n, v in values.items() if v is not None}
    return [replace(data, **{n: v[i] for n, v in parts.items()}) for i in range(len(parts["weight"]))]


def rows_of(data: MixtureData, rows: Tensor) -> MixtureData:
    """The data of some rows of a batch, where each row has its own."""
    if data.Y.dim() == 2 and data.G.dim() == 2:
        return data
    parts = {f: getattr(data, f) for f in ("Y", "G", "features")}
    return replace(data, **{f: v[rows] if v.dim() == 3 else v for f, v in parts.items()})


def mixture_data(
    Y: Tensor, G: Tensor | None = None, *, weight: Tensor | None = None, products: bool = False
) -> MixtureData:
    """The data of a mixture and their features.

    :param Y: responses, shape ``(..., N, m)``; nan where missing.
    :param G: basis functions, shape ``(..., N, B)``; None for the constant 1.
    :param weight: of each datum, shape ``(N,)``; None for 1.
    :param products: whether products of different outputs are needed: for full noise covariances, and for curvature
        between the outputs of a component.
    """
    missing = Y.isnan()
    observed = ~missing if bool(missing.any()) else None
    Y = torch.where(missing, 0.0, Y) if observed is not None else Y
    ones = Y.new_ones(*Y.shape[:-1], 1)
    weight = Y.new_ones(Y.shape[-2]) if weight is None else weight
    blocks = [ones, *_gram_blocks(G, observed, Y), *_response_blocks(Y, ones if G is None else G, products)]
    layout = _layout((Y.shape[-1], 1 if G is None else G.shape[-1]), G is None, observed is not None, products)
    return MixtureData(Y, ones if G is None else G, weight, observed, torch.cat(blocks, -1), layout)


def _gram_blocks(G: Tensor | None, observed: Tensor | None, Y: Tensor) -> list[Tensor]:
    """Columns of presence and of products of basis functions."""
    mask = [] if observed is None else [observed.to(Y)]
    if G is None:
        return mask
    row, column = torch.triu_indices(G.shape[-1], G.shape[-1])
    pairs = G[..., row] * G[..., column]
    return [pairs] if observed is None else [*mask, (mask[0].unsqueeze(-1) * pairs.unsqueeze(-2)).flatten(-2)]


def _response_blocks(Y: Tensor, G: Tensor, products: bool) -> list[Tensor]:
    """Columns that involve responses."""
    cross = (Y.unsqueeze(-1) * G.unsqueeze(-2)).flatten(-2)
    if not products:
        return [cross, Y.square()]
    row, column = torch.triu_indices(Y.shape[-1], Y.shape[-1], 1)
    return [cross, Y.square(), Y[..., row] * Y[..., column]]


def _layout(shape: tuple[int, int], constant: bool, missing: bool, products: bool) -> Layout:
    """The columns that :func:`mixture_data` lays out; shape is ``(m, B)``."""
    m, B = shape
    present = 1 + torch.arange(m) if missing else torch.zeros(m, dtype=torch.long)
    start = 1 + m * missing
    if constant:
        gram = present[:, None, None]
    else:
        size = B * (B + 1) // 2
        gram = (start + _symmetric(B)).expand(m, B, B) + missing * size * torch.arange(m)[:, None, None]
        start += size * (m if missing else 1)
    cross = start + torch.arange(m * B).reshape(m, B)
    start += m * B
    square = start + m + _symmetric(m, 1) if products else torch.full((m, m), -1)
    square = square.diagonal_scatter(start + torch.arange(m))
    return Layout(present, gram, cross, square, int(square.max()) + 1)


def _symmetric(size: int, offset: int = 0) -> Tensor:
    """Position of each entry of a symmetric matrix in its upper triangle from diagonal ``offset`` on."""
    row, column = torch.triu_indices(size, size, offset)
    table = torch.zeros(size, size, dtype=torch.long)
    table[row, column] = torch.arange(len(row))
    return torch.maximum(table, table.T)


def natural_parameters(mixture: Mixture, layout: Layout) -> Tensor:
    """Coefficients of the features in ``log p(y_n, k | w)``, shape ``(R, K, P)``.

    With diagonal noise those of the first ``layout.num_diagonal`` columns only: the others are zero.
    """
    w, noise = mixture.w, mixture.noise
    if noise.dim() == 4:
        return _full_parameters(mixture, layout)
    weighted = noise.unsqueeze(-1) * w
    log_norm, square = 0.5 * (noise / math.tau).log(), -0.5 * noise
    if layout.is_plain:
        constant = (log_norm - 0.5 * (w * weighted).squeeze(-1)).sum(-1) + mixture.log_mixing
        return torch.cat([constant.unsqueeze(-1), weighted.squeeze(-1), square], -1)
    gram = -0.5 * w.unsqueeze(-1) * weighted.unsqueeze(-2)
    coefficients = w.new_zeros(*w.shape[:2], layout.num_diagonal)
    parts = [(layout.present, log_norm), (layout.gram, gram), (layout.cross, weighted)]
    return _summed(coefficients, [*parts, (layout.square.diagonal(), square)], mixture.log_mixing)


def _full_parameters(mixture: Mixture, layout: Layout) -> Tensor:
    w, noise = mixture.w, mixture.noise
    weighted = noise @ w
    each = mixture.log_det_noise.unsqueeze(-1) / w.shape[-2] - math.log(math.tau)
    log_norm = (0.5 * each).expand(*w.shape[:-1])  # shared out over the outputs
    gram = -0.5 * w.unsqueeze(-1) * weighted.unsqueeze(-2)
    coefficients = w.new_zeros(*w.shape[:2], layout.num_features)
    parts = [(layout.present, log_norm), (layout.gram, gram), (layout.cross, weighted), (layout.square, -0.5 * noise)]
    return _summed(coefficients, parts, mixture.log_mixing)


def _summed(coefficients: Tensor, parts: list[tuple[Tensor, Tensor]], log_mixing: Tensor) -> Tensor:
    """Every value added in its columns, the mixing in the first."""
    index = torch.cat([index.flatten() for index, _ in parts])
    coefficients.index_add_(-1, index, torch.cat([value.flatten(2) for _, value in parts], -1))
    coefficients[..., 0] += log_mixing
    return coefficients


def e_step(data: MixtureData, mixture: Mixture, *, spread: bool = False) -> Statistics:
    """Responsibilities (Husmeier 2000, eq. 2.14) and the sums that the M-step needs, block by block.

    :param spread: whether to sum ``r (1 - r)`` as well, for the curvature.
    """
    natural = natural_parameters(mixture, data.layout)
    rows = max(64, BLOCK // natural[..., 0].numel())
    unweighted = data.is_unweighted
    if len(data.weight) <= rows:
        total = _block(data.features, None if unweighted else data.weight, natural, spread, data.floor)
        return _shared(data, total)
    floors = repeat(None) if data.floor is None else data.floor.split(rows)
    parts = zip(data.features.split(rows, -2), data.weight.split(rows), floors, strict=False)
    F, weight, floor = next(parts)
    total = _block(F, None if unweighted else weight, natural, spread, floor)
    for F, weight, floor in parts:
        total = total + _block(F, None if unweighted else weight, natural, spread, floor)
    return _shared(data, total)


def _shared(data: MixtureData, total: Statistics) -> Statistics:
    """The log likelihood with the kernels' share counted."""
    if not data.log_share:
        return total
    return replace(total, log_likelihood=total.log_likelihood + data.num_data * data.log_share)


def _block(F: Tensor, weight: Tensor | None, natural: Tensor, spread: bool, floor: Tensor | None) -> Statistics:
    """One block; weight None where every datum counts once."""
    resp, log_norm = responsibilities(F, natural, floor)
    weighted = resp if weight is None else resp * weight
    moments = weighted @ F
    around = moments - weighted.mul_(resp) @ F if spread else torch.zeros_like(moments)
    return Statistics(moments, around, log_norm.sum(-1) if weight is None else log_norm @ weight)


def responsibilities(F: Tensor, natural: Tensor, floor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``p(k | y_n)``, shape ``(R, K, n)``, and ``log p(y_n)``, shape ``(R, n)``, from features ``(..., n, P)``.

    :param floor: log of a density that is added to that of the components, ``(n,)``.
    """
    log_joint = natural @ F[..., : natural.shape[-1]].mT
    peak = log_joint.amax(-2, keepdim=True)
    peak = peak if floor is None else torch.maximum(peak, floor)
    resp = log_joint.sub_(peak).exp_()
    total = resp.sum(-2, keepdim=True)
    total = total if floor is None else total + (floor - peak).exp()
    return resp.div_(total), (total.log() + peak).squeeze(-2)


def solve_weights(stats: Statistics, layout: Layout, mixture: Mixture) -> Tensor:
    r"""Weights that maximise the expected complete log joint, shape ``(R, K, m, B)``.

    .. math:: (\beta_{ki} G \Pi_k G^\top + \alpha)\, w_{ki} = \beta_{ki} G \Pi_k y_i + \alpha \mu

    Husmeier (2000), eqs. 2.22 and A.38; with a noise matrix the outputs of a component are solved for together.
    """
    gram, cross = layout.gram_of(stats.moments), layout.cross_of(stats.moments)
    pull = mixture.alpha * mixture.loc
    if mixture.noise.dim() == 4:
        return _solve_together(gram, cross, mixture, pull)
    beta = mixture.noise.unsqueeze(-1)
    if gram.shape[-1] == 1:
        return (beta * cross + pull) / (beta * gram.squeeze(-1) + mixture.alpha)
    A = beta.unsqueeze(-1) * gram + mixture.alpha.diag_embed()
    return torch.linalg.solve_ex(A, beta * cross + pull)[0]  # a singular row gives inf or nan, and fails alone


def _solve_together(gram: Tensor, cross: Tensor, mixture: Mixture, pull: Tensor) -> Tensor:
    A = data_precision(gram, mixture.noise) + mixture.alpha.flatten(-2).diag_embed()
    rhs = (mixture.noise @ cross + pull).flatten(-2)
    return torch.linalg.solve_ex(A, rhs)[0].reshape(cross.shape)  # as above


def data_precision(gram: Tensor, noise: Tensor) -> Tensor:
    """``Lambda (x) G Pi G'`` of each component, shape ``(R, K, m B, m B)``.

    :param gram: one per output, shape ``(R, K, m, B, B)``.
    :param noise: precision matrices, shape ``(R, K, m, m)``.
    """
    num_outputs, num_basis = gram.shape[-3:-1]
    blocks = noise[..., :, None, :, None] * gram.unsqueeze(-2)  # (R, K, m, B, m, B) with gram of the row's output
    return blocks.reshape(*gram.shape[:2], num_outputs * num_basis, -1)


def residual_squares(stats: Statistics, layout: Layout, w: Tensor) -> Tensor:
    """``sum_n r_nk (y_ni - w_ki g_n)^2``, shape ``(R, K, m)``, never below zero."""
    gram, cross, square = (take(stats.moments) for take in (layout.gram_of, layout.cross_of, layout.squares_of))
    if w.shape[-1] == 1:
        both = ((gram.squeeze(-1) * w - 2.0 * cross) * w).squeeze(-1)
    else:
        both = (((gram @ w.unsqueeze(-1)).squeeze(-1) - 2.0 * cross) * w).sum(-1)
    return (square + both).clamp(min=0.0)  # rounding may leave a tiny negative


def residual_products(stats: Statistics, layout: Layout, w: Tensor) -> Tensor:
    """``sum_n r_nk e_nk e_nk'`` of the residuals, shape ``(R, K, m, m)``; needs features with products."""
    gram, cross = stats.moments[..., layout.gram[0]], layout.cross_of(stats.moments)
    mixed = w @ cross.mT
    return stats.moments[..., layout.square] - mixed - mixed.mT + w @ gram @ w.mT
