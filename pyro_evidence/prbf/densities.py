r"""The probabilistic RBF network, a batch of rows (folds, seeds, restarts) in front: densities, sums, overlap.

.. math:: p(x | C_k) = \sum_j \pi_{jk}\, N(x | \mu_j, S_j)

All classes share the kernels.  Data are laid out class by class, so that each datum meets the mixing of its own class
alone; rows without a label meet all of them.  Constantinopoulos, Titsias and Likas (2001), eqs. 2 to 5, 11 to 16, 22.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from pyro_evidence.data.rows import Rows
from pyro_evidence.mixture.expectation import responsibilities
from pyro_evidence.models.covariances import Covariance, mahalanobis
from pyro_evidence.numerics.batched import CACHED_NUMBERS, Batched

SMALLEST_BLOCK = 64  # data that are looked at together at least
BHATTACHARYYA = 1.0 / 8.0  # of the squared distance of two Gaussians of one covariance, eq. 14
ROUNDED = 1e-20  # of a mean square: the variance that rounding leaves of a constant
TINY = 1e-290  # a count below it is a sum of subnormal numbers, and a mean over it means nothing


Piece = tuple[tuple[int, Tensor], ...]  # features (n, P) of data with their class; -1 without a label


@dataclass(frozen=True, eq=False)
class ClassData:
    """Labelled data by class, and those without a label, in memory or read anew in every pass."""

    source: Rows[Piece]
    kind: Covariance
    unit: Tensor  # (D,)  smallest variance of each input
    per_class: Tensor  # (1 + K,)  number of data without a label, then of each class
    size: int = 4096  # most data in one block

    @property
    def keeps(self) -> bool:
        """Whether the responsibilities of a point are kept beside the data."""
        return isinstance(self.source.pieces, tuple)

    def sized(self, num_kernels: int, num_rows: int) -> "ClassData":
        """These data, cut so that the responsibilities of one block fit the cache."""
        return replace(self, size=max(SMALLEST_BLOCK, CACHED_NUMBERS // (num_kernels * num_rows)))

    @property
    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Features of the data that are here with their class, -1 without a label, a block at a time."""
        hidden = max(SMALLEST_BLOCK, self.size // self.num_classes)  # which meet the mixing of every class
        for piece in self.source.pieces:
            for k, features in piece:
                yield from ((k, part) for part in features.split(self.size if k >= 0 else hidden))

    @property
    def num_classes(self) -> int:
        """Number of classes ``K``."""
        return self.per_class.shape[-1] - 1

    @cached_property
    def num_data(self) -> Tensor:
        """All data, labelled or not, shape ``()``."""
        return self.per_class.sum()

    @cached_property
    def is_labelled(self) -> bool:
        """Whether every datum has a label."""
        return not bool(self.per_class[0] > 0)

    @property
    def dim(self) -> int:
        """Number of inputs ``D``."""
        return self.unit.shape[-1]


def class_data(X: Tensor, labels: Tensor, num_classes: int, kind: Covariance) -> ClassData:
    """The data of a network.

    :param X: inputs, shape ``(N, D)``.
    :param labels: whole numbers from 0 to ``num_classes - 1``, -1 where unknown, shape ``(N,)``.
    """
    per_class = torch.bincount(labels + 1, minlength=num_classes + 1).to(X)
    rows = Rows.resident(by_class(kind.features(X), labels, num_classes), len(X))
    return ClassData(rows, kind, kind.floor * column_variance(X), per_class)


def by_class(features: Tensor, labels: Tensor, num_classes: int) -> Piece:
    """The data of each class, and those without a label where there are any."""
    there = [*range(num_classes), *([-1] if bool((labels == -1).any()) else [])]
    return tuple((k, features[labels == k]) for k in there)


def column_variance(X: Tensor) -> Tensor:
    """Variance of each input, shape ``(..., D)``; a constant input gets the mean of the others."""
    return varied(X.var(-2, correction=0), X.square().mean(-2))


def varied(variance: Tensor, squares: Tensor) -> Tensor:
    """Variances ``(..., D)``, with the mean of the others for inputs that are constant.

    :param squares: mean square of each input, shape ``(..., D)``.
    """
    flat = variance <= ROUNDED * squares
    spread = torch.where(flat, 0.0, variance)
    number = (~flat).sum(-1, keepdim=True).clamp(min=1)  # 1 where all are constant, so that 0 / 1 is left
    return torch.where(flat, spread.sum(-1, keepdim=True) / number, variance)


@dataclass(frozen=True, eq=False)
class Network(Batched):
    """One setting of the parameters in each row."""

    mixing: Tensor  # (B, K, M)  pi_jk = p(kernel j | class k); rows sum to 1
    loc: Tensor  # (B, M, D)
    covariance: Tensor  # (B, M, ...) in the shape of its kind
    class_prior: Tensor  # (B, K)

    @cached_property
    def ownership(self) -> Tensor:
        """``P(C_k | j)``, eq. 15, shape ``(B, K, M)``; 0 for a kernel that no class uses."""
        joint = self.mixing * self.class_prior.unsqueeze(-1)
        total = joint.sum(-2, keepdim=True)
        return torch.where(total > 0, joint / torch.where(total > 0, total, 1.0), 0.0)


def log_density(net: Network, kind: Covariance, features: Tensor) -> Tensor:
    """``log p(x_n | C_k)``, nats, shape ``(B, N, K)``, from features ``(N, P)`` or ``(B, N, P)``."""
    kernels = kind.natural(net.loc, net.covariance) @ features.mT  # (B, M, N)
    peak = kernels.amax(-2, keepdim=True)
    dense = net.mixing @ (kernels - peak).exp()
    found = dense.log() + peak
    if not bool((dense > 0).all()):  # a class whose kernels are all far from the nearest one
        found = (net.mixing.log().unsqueeze(-1) + kernels.unsqueeze(1)).logsumexp(-2)
    return found.mT


@dataclass(frozen=True, eq=False)
class Point(Batched):
    """A network on data, with its E-step.  Built only by :func:`evaluate`, so its parts always agree."""

    common: ClassVar[frozenset[str]] = frozenset({"data"})

    data: ClassData
    net: Network
    alpha: Tensor  # (B,)  weight of the overlap, nats
    moments: Tensor  # (B, K, M, P)  sum over the class of r_nj F_n
    log_likelihood: Tensor  # (B,)  of the inputs given their labels
    resp: tuple[Tensor, ...]  # of each piece of the data: (B, M, n), or (B, K M, n) without labels
    lag: Tensor  # (B, K, M)  distances that the literal update carries from one round to the next, or 0
    gone: Tensor  # (B, M) bool, kernels that the round which led here left without data

    @property
    def kind(self) -> Covariance:
        """The kind of kernels."""
        return self.data.kind

    @property
    def counts(self) -> Tensor:
        """``R_jk``: expected number of data of class k in kernel j, shape ``(B, K, M)``."""
        return self.moments[..., 0]

    @cached_property
    def centres(self) -> Tensor:
        """Subkernel means ``mu_jk``, eq. 11, shape ``(B, K, M, D)``; the kernel's own where class k has no data."""
        counts = self.counts.unsqueeze(-1)
        present = counts > TINY
        mean = self.moments[..., 1 : self.data.dim + 1] / torch.where(present, counts, 1.0)
        return torch.where(present, mean, self.net.loc.unsqueeze(1))

    @cached_property
    def offset(self) -> Tensor:
        """``mu_j - mu_jk``, shape ``(B, K, M, D)``."""
        return self.net.loc.unsqueeze(1) - self.centres

    @cached_property
    def distance(self) -> Tensor:
        """``(mu_j - mu_jk)' S_j^{-1} (mu_j - mu_jk)``, eq. 30 without time lags, shape ``(B, K, M)``."""
        return mahalanobis(self.kind, self.net.covariance.unsqueeze(1), self.offset)

    @cached_property
    def overlap(self) -> Tensor:
        """``delta_j``: expected Bhattacharyya distance of kernel and subkernels, eq. 16 with equal covariances.

        Nats, shape ``(B, M)``.
        """
        return BHATTACHARYYA * (self.net.ownership * self.distance).sum(-2)

    @cached_property
    def objective(self) -> Tensor:
        """Eq. 22, nats, shape ``(B,)``; with unlabelled rows plus ``sum_k N_k log P(C_k)``."""
        total = self.log_likelihood
        if not self.data.is_labelled:
            total = total + torch.xlogy(self.data.per_class[1:], self.net.class_prior).sum(-1)
        return total - self.alpha * self.overlap.sum(-1)

    @property
    def shared_out(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The data piece by piece with their class and responsibilities, which are found anew where none are kept."""
        if self.data.keeps:
            for (k, part), resp in zip(self.data.blocks, self.resp, strict=True):
                yield k, part, resp
            return
        base, log_mixing = self.kind.natural(self.net.loc, self.net.covariance), self.net.mixing.log()
        for k, part in self.data.blocks:
            joint = _joint(base, log_mixing, self.net.class_prior, k)
            yield k, part, responsibilities(part, joint)[0]


def parts_of(net: Network) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mixing, centres, covariances, class prior."""
    return net.mixing, net.loc, net.covariance, net.class_prior


def evaluate(data: ClassData, net: Network, alpha: Tensor, lag: Tensor | None = None) -> Point:
    """The E-step, eq. 24, and the sums that every update needs."""
    B, K, _ = net.mixing.shape
    base, log_mixing = data.kind.natural(net.loc, net.covariance), net.mixing.log()
    moments = base.new_zeros(B, K, *base.shape[1:])
    log_likelihood, kept = base.new_zeros(B), []
    for k, part in data.blocks:
        resp, log_norm = responsibilities(part, _joint(base, log_mixing, net.class_prior, k))
        _of_class(moments, k).add_(resp @ part)
        log_likelihood += log_norm.sum(-1)
        if data.keeps:
            kept.append(resp)
    moments, log_likelihood = map(data.source.communicator.total, (moments, log_likelihood))
    lag = torch.zeros_like(net.mixing) if lag is None else lag
    gone = torch.zeros_like(net.mixing[:, 0], dtype=torch.bool)
    return Point(data, net, alpha, moments, log_likelihood, tuple(kept), lag, gone)


def _joint(base: Tensor, log_mixing: Tensor, class_prior: Tensor, k: int) -> Tensor:
    """Coefficients of the features in the log joint density of datum and kernel, or kernel and class."""
    if k >= 0:
        return torch.cat([base[..., :1] + log_mixing[:, k].unsqueeze(-1), base[..., 1:]], -1)
    constant = base[:, None, :, 0] + log_mixing + class_prior.log().unsqueeze(-1)
    rest = base[:, None, :, 1:].expand(*constant.shape, -1)
    return torch.cat([constant.unsqueeze(-1), rest], -1).flatten(1, 2)


def _of_class(moments: Tensor, k: int) -> Tensor:
    """A view of the moments of one class, ``(B, M, P)``, or of all side by side, ``(B, K M, P)``."""
    return moments.view(len(moments), -1, moments.shape[-1]) if k < 0 else moments[:, k]


def tilted(point: Point) -> Tensor:
    r"""Moments of the responsibilities that carry the gradient of eq. 22 through the subkernel means.

    .. math:: \tilde r_{nj} = r_{nj}\bigl[1 - \alpha\,(w_{nj} - \textstyle\sum_i r_{ni} w_{ni})\bigr], \qquad
              w_{nj} = -\tfrac14 \frac{P_{jk}}{R_{jk}} (\mu_j - \mu_{jk})^\top S_j^{-1} (x_n - \mu_{jk})

    :return: shape ``(B, K, M, P)``.
    """
    net, kind, dim = point.net, point.kind, point.data.dim
    present = point.counts > TINY
    rate = torch.where(present, net.ownership / torch.where(present, point.counts, 1.0), 0.0)
    pull = kind.solve(net.covariance.unsqueeze(1), point.offset)
    slope = (-2.0 * BHATTACHARYYA * point.alpha[:, None, None] * rate).unsqueeze(-1) * pull
    plane = torch.cat([-(slope * point.centres).sum(-1, keepdim=True), slope], -1)  # (B, K, M, 1 + D): alpha w
    total = torch.zeros_like(point.moments)
    for k, part, resp in point.shared_out:
        coefficients = plane.flatten(1, 2) if k < 0 else plane[:, k]
        w = coefficients @ part[:, : dim + 1].mT
        mean = (resp * w).sum(-2, keepdim=True)
        tilt = w.sub_(mean + 1.0).mul_(resp)  # with the other sign
        _of_class(total, k).sub_(tilt @ part)
    return point.data.source.communicator.total(total)


def between_classes(point: Point) -> Tensor:
    """``sum_k P(C_k | j) (mu_jk - mu_j)(mu_jk - mu_j)'``: what eq. 14 leaves out, shape ``(B, M, ...)`` of the kind."""
    shape = (*point.net.ownership.shape, *[1] * point.kind.event_dim)
    return (point.net.ownership.reshape(shape) * point.kind.outer(point.offset)).sum(1)


def moved(old: Network, new: Network) -> Tensor:
    """Largest change of a mixing or, in standard deviations, of a centre of a kernel in use, shape ``(B,)``."""
    mixing = (new.mixing - old.mixing).abs().amax((-1, -2))
    size = old.covariance if old.covariance.dim() == 3 else old.covariance.diagonal(dim1=-2, dim2=-1)
    used = (old.mixing.amax(-2) > 1e-12).unsqueeze(-1)  # a kernel without mass moves nothing that is seen
    centre = torch.where(used, (new.loc - old.loc).abs() / size.sqrt(), 0.0).amax((-1, -2))
    return torch.maximum(mixing, centre)
