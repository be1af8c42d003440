r"""Laplace's evidence of a mixture of linear-Gaussian kernels: Hessian, gamma, log evidence, all restarts at once.

With :math:`u_{ki}(n) = [\Lambda_k (y_n - W_k g_n)]_i\, g_n` the Hessian of minus the log joint density is

.. math:: H_{(ki),(k'j)} = \delta_{kk'}(\Lambda_{k,ij}\, G\Pi_kG^\top + \alpha\,\delta_{ij})
    - \delta_{kk'} \sum_n r_{nk}\, u_{ki} u_{kj}^\top + \sum_n r_{nk} r_{nk'}\, u_{ki} u_{k'j}^\top .

Husmeier (2000), eqs. A.25 to A.28 and A.37, where different parts of it are dropped.  Curvatures are given without the
prior, in blocks: shape ``(R, groups, d, d)``, rows and columns in the order component, output, basis function.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyro_evidence.mixture import expectation
from pyro_evidence.mixture.data import Mixture, MixtureData, some
from pyro_evidence.mixture.expectation import (
    MixtureStatistics,
    data_precision,
    natural_parameters,
    responsibilities,
)

MixtureCurvature = Callable[[MixtureData, Mixture, MixtureStatistics], Tensor]


@dataclass(frozen=True, eq=False)
class PointwiseJoint:
    """Log joint densities of every datum and component at one point; differentiable."""

    log_joint: Tensor  # (R, K, N)  log p(y_n, k | w), up to the kernels' share
    pull: Tensor  # (R, K, m, N)    its derivative in the component's outputs
    basis: Tensor  # (..., 1, B, N)  theirs in w
    floor: Tensor | None = None  # (N,) as in MixtureData
    log_share: float = 0.0

    @cached_property
    def u(self) -> Tensor:
        """Derivative of the log joint in ``w``, ``(R, K, m, B, N)``."""
        return self.pull.unsqueeze(-2) * self.basis.unsqueeze(-3)

    @property
    def by_weights(self) -> Tensor:
        """``u`` with all weights of a component in one axis, ``(R, K, m B, N)``."""
        return self.u.flatten(-3, -2)

    @property
    def _log_norm(self) -> Tensor:
        total = self.log_joint.logsumexp(-2)
        if self.floor is None:
            return total
        # logaddexp has no second derivative where the two are far apart
        return torch.stack([total, self.floor.expand_as(total)]).logsumexp(0)

    @property
    def log_density(self) -> Tensor:
        """``log p(y_n | w)``, shape ``(R, N)``."""
        return self._log_norm + self.log_share

    @cached_property
    def resp(self) -> Tensor:
        """``p(k | y_n, w)``, shape ``(R, K, N)``."""
        if self.floor is None:
            return self.log_joint.softmax(-2)
        return (self.log_joint - self._log_norm.unsqueeze(-2)).exp()


def pointwise_joint(data: MixtureData, mixture: Mixture) -> PointwiseJoint:
    """Log joint table and its derivative by residuals: no cancellation, and derivatives of every order."""
    Gt = data.G.mT[..., None, :, :]  # (..., 1, B, N)
    e = data.Y.mT[..., None, :, :] - mixture.w @ Gt
    seen = torch.ones_like(data.Y) if data.observed is None else data.observed.to(data.Y)
    e = e if data.observed is None else e * seen.mT[..., None, :, :]
    full = mixture.has_full_noise
    pull = mixture.noise @ e if full else mixture.noise.unsqueeze(-1) * e
    if full:
        log_norm = 0.5 * (mixture.noise.logdet() - e.shape[-2] * math.log(math.tau)).unsqueeze(-1)
    else:
        log_norm = (0.5 * (mixture.noise / math.tau).log()) @ seen.mT
    log_joint = log_norm + mixture.log_mixing.unsqueeze(-1) - 0.5 * (e * pull).sum(-2)
    return PointwiseJoint(log_joint, pull, Gt, data.floor, data.log_share)


def log_prior(mixture: Mixture) -> Tensor:
    """Log prior density of the weights, nats, shape ``(R,)``; pruned components included."""
    quadratic = mixture.alpha * (mixture.w - mixture.loc).square()
    return 0.5 * ((mixture.alpha / math.tau).log() - quadratic).flatten(1).sum(-1)


def log_joint(data: MixtureData, mixture: Mixture) -> Tensor:
    """``log p(D, w | hyperparameters)``, nats, shape ``(R,)``."""

    def of_part(part: MixtureData) -> Tensor:
        return (pointwise_joint(part, mixture).log_density * part.weight).sum(-1)

    return data.total(_rows(mixture), of_part) + log_prior(mixture)


def _rows(mixture: Mixture) -> int:
    """Rows of data for which a number for every weight may be held."""
    return max(1, expectation.SHARD // mixture.w.numel())


def log_joint_gradient(data: MixtureData, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """The log joint, nats, ``(R,)``, and its derivative in the weights, ``(R, K, m, B)``; by residuals."""

    def of_part(part: MixtureData) -> Tensor:
        pointwise = pointwise_joint(part, mixture)
        slope = pointwise.u @ (pointwise.resp * _each(part))[..., None, :, None]
        return torch.cat([(pointwise.log_density * part.weight).sum(-1, keepdim=True), slope.flatten(1)], -1)

    both, slope = data.total(_rows(mixture), of_part), mixture.alpha * (mixture.loc - mixture.w)
    return both[:, 0] + log_prior(mixture), both[:, 1:].reshape(slope.shape) + slope


def _each(part: MixtureData) -> Tensor:
    """Weights of the data beside ``(R, K, n)``."""
    return part.weight if part.weight.dim() == 1 else part.weight.unsqueeze(-2)


def _responsible(pointwise: PointwiseJoint, data: MixtureData) -> Tensor:
    """Part of the Hessian that is due to not knowing the component, shape ``(R, K m B, K m B)``."""
    u, weight = pointwise.by_weights, _each(data)
    own = (u * (pointwise.resp * weight).unsqueeze(-2)) @ u.mT
    v = (u * (pointwise.resp * weight.sqrt()).unsqueeze(-2)).flatten(1, 2)
    return v @ v.mT - _block_diagonal(own)


def full(data: MixtureData, mixture: Mixture, stats: MixtureStatistics) -> Tensor:
    """The exact Hessian, couplings between all components and outputs included, shape ``(R, 1, K m B, K m B)``.

    What every datum says is in the sums of the E-step; only data that are not certain of their component say more.
    """
    natural = natural_parameters(mixture, data.layout)
    own = data_precision(stats.moments[..., data.layout.gram], mixture.noise_matrix)

    def of_part(part: MixtureData) -> Tensor:
        resp, _ = responsibilities(part.columns(natural.shape[-1]), natural, part.floor)
        rest = some(part, ((resp * (1.0 - resp)).amax((0, 1)) > expectation.CERTAIN).nonzero().flatten())
        return rest.total(size, lambda piece: _responsible(pointwise_joint(piece, mixture), piece))

    size, many = _rows(mixture), expectation.SHARD // (natural.shape[-1] + natural[..., 0].numel())
    return (_block_diagonal(own) + data.total(max(size, many), of_part))[:, None]


def coordinate(data: MixtureData, mixture: Mixture, stats: MixtureStatistics) -> Tensor:
    """One block per component, couplings between its outputs included, shape ``(R, K, m B, m B)``; eq. A.37.

    For a constant basis it comes from the E-step's sums at no further cost.
    """
    if not (data.is_constant and data.layout.has_products and data.observed is None):

        def of_part(part: MixtureData) -> Tensor:
            pointwise = pointwise_joint(part, mixture)
            u, weighted = pointwise.by_weights, pointwise.resp * _each(part)
            return _expected(part, mixture, weighted) - (u * (weighted * (1.0 - pointwise.resp)).unsqueeze(-2)) @ u.mT

        return data.total(_rows(mixture), of_part)
    layout, w, noise = data.layout, mixture.w.squeeze(-1), mixture.noise
    half = stats.spread[..., layout.cross].squeeze(-1) - 0.5 * stats.spread[..., :1] * w
    mixed = w.unsqueeze(-1) * half.unsqueeze(-2)
    products = stats.spread[..., layout.square] - mixed - mixed.mT
    if mixture.has_full_noise:
        return noise * stats.counts[..., None, None] - noise @ products @ noise
    return (noise * stats.counts.unsqueeze(-1)).diag_embed() - noise.unsqueeze(-1) * noise.unsqueeze(-2) * products


def block(data: MixtureData, mixture: Mixture, stats: MixtureStatistics) -> Tensor:
    """One block per component and output, shape ``(R, K m, B, B)``; eq. A.28.

    For a constant basis with diagonal noise it comes from the E-step's sums at no further cost.
    """
    if data.is_constant and not mixture.has_full_noise:
        layout, w, beta = data.layout, mixture.w.squeeze(-1), mixture.noise
        cross, present = (stats.spread[..., index] for index in (layout.cross.squeeze(-1), layout.present))
        squares = stats.spread[..., layout.square.diagonal()] + w * (w * present - 2.0 * cross)
        return (beta * (stats.moments[..., layout.present] - beta * squares)).reshape(len(w), -1, 1, 1)

    def of_part(part: MixtureData) -> Tensor:
        pointwise = pointwise_joint(part, mixture)
        weighted = pointwise.resp * _each(part)
        sizes = pointwise.u.shape[2:4]
        expected = _expected(part, mixture, weighted).unflatten(-1, sizes).unflatten(2, sizes)
        diagonal = expected.diagonal(dim1=2, dim2=4).movedim(-1, 2)
        spread = (weighted * (1.0 - pointwise.resp))[..., None, None, :]
        return (diagonal - (pointwise.u * spread) @ pointwise.u.mT).flatten(1, 2)

    return data.total(_rows(mixture), of_part)


def _expected(data: MixtureData, mixture: Mixture, weighted: Tensor) -> Tensor:
    """``Lambda (x) G Pi G'``, shape ``(R, K, m B, m B)``, from responsibilities ``(R, K, N)``."""
    G = data.G[..., None, None, :, :]  # (..., 1, 1, N, B)
    weighted = weighted.unsqueeze(-2).expand(*weighted.shape[:2], data.Y.shape[-1], -1)
    if data.observed is not None:
        weighted = weighted * data.observed.mT
    gram = (weighted.unsqueeze(-2) * G.mT) @ G
    return data_precision(gram, mixture.noise_matrix)


def _block_diagonal(blocks: Tensor) -> Tensor:
    """Blocks ``(R, K, d, d)`` on the diagonal of ``(R, K d, K d)``."""
    num, size = blocks.shape[1], blocks.shape[2]
    eye = torch.eye(num, dtype=blocks.dtype, device=blocks.device)
    return (blocks.unsqueeze(-2) * eye[:, None, :, None]).reshape(len(blocks), num * size, num * size)


@dataclass(frozen=True, eq=False)
class WellDetermined:
    """Well-determinedness of each weight, and the log determinant that goes with it."""

    gamma: Tensor  # (R, K, m, B)  between 0 and 1
    log_det: Tensor  # (R,)  log determinant of curvature plus prior; nan where it is not positive definite
    eigenvalues: Tensor  # (R, groups, d)  of the curvature in units of the prior's; 1 where none is below 0

    @cached_property
    def num_clipped(self) -> Tensor:
        """Negative eigenvalues of the curvature that were taken as zero, beyond rounding, shape ``(R,)``."""
        least = -(torch.finfo(self.eigenvalues.dtype).eps ** 0.5) * self.eigenvalues.abs().amax(-1, keepdim=True)
        return (self.eigenvalues < least).sum((1, 2))


def well_determined(A: Tensor, alpha: Tensor) -> WellDetermined:
    r"""Well-determinedness of each weight; sums over a block are :math:`\sum_v \epsilon_v / (\alpha + \epsilon_v)`.

    At a mode the log evidences by :func:`full`, :func:`coordinate` and :func:`block` fall in this order, by Fischer's
    inequality.  A pruned component, at its prior mean, contributes nothing to them.

    Husmeier (2000), eq. 2.20, with the eigenvalues clipped at zero: away from a mode, and in blocks of the Hessian
    even there, they may be negative, and gamma with them.  Where none is, which a Cholesky factor tells, nobody asks
    for eigenvalues.  Rows that are not finite are nan throughout.

    :param A: curvature without the prior, shape ``(R, groups, d, d)``.
    :param alpha: prior precision, shape ``(R, K, m, B)``.
    """
    log_alpha = alpha.log().flatten(1).sum(-1)
    scale = alpha.reshape(A.shape[:-1]).rsqrt()
    scaled = scale.unsqueeze(-1) * A * scale.unsqueeze(-2)
    rest = (~_is_positive(scaled)).nonzero().flatten()
    found = _by_factors(scaled) if len(rest) < len(scaled) else _by_eigenvalues(scaled)
    if 0 < len(rest) < len(scaled):
        found = tuple(x.index_copy(0, rest, y) for x, y in zip(found, _by_eigenvalues(scaled[rest]), strict=True))
    gamma, log_det, eigenvalues = found
    return WellDetermined(gamma.reshape(alpha.shape), log_det + log_alpha, eigenvalues)


def _is_positive(A: Tensor) -> Tensor:
    """Rows of ``(R, groups, d, d)`` without an eigenvalue below zero; weights that no datum touches are left out."""
    tril, info = torch.linalg.cholesky_ex(A)
    if not bool(info.any()) and math.isfinite(float(tril.diagonal(dim1=-2, dim2=-1).sum())):
        return torch.ones_like(info[:, 0], dtype=torch.bool)
    untouched = A.diagonal(dim1=-2, dim2=-1) == 0
    info = torch.linalg.cholesky_ex(A + untouched.to(A).diag_embed())[1]
    return (info == 0).all(-1) & A.isfinite().flatten(1).all(-1)


def _by_factors(A: Tensor) -> tuple[Tensor, ...]:
    """Gamma of each weight, ``log |1 + A|`` and no eigenvalues, by Cholesky factors; of no use in other rows."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    tril = torch.linalg.cholesky_ex(eye + A)[0]
    log_det = 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum((1, 2))
    inverse = torch.linalg.solve_triangular(tril, eye.expand_as(A), upper=False)
    return 1.0 - inverse.square().sum(-2), log_det, torch.ones_like(A[..., 0])


def _by_eigenvalues(A: Tensor) -> tuple[Tensor, ...]:
    """Gamma of each weight, ``log |1 + A|`` and the eigenvalues; nan for rows that are not finite."""
    finite = A.isfinite().flatten(1).all(-1)[:, None, None, None]  # LAPACK refuses the whole batch for one of them
    values, vectors = torch.linalg.eigh(A if bool(finite.all()) else torch.where(finite, A, 0.0))
    values = torch.where(finite.squeeze(-1), values, torch.nan)
    kept = values.clamp(min=0.0)  # an eigenvalue of a Hessian at a mode is >= 0
    gamma = (vectors.square() @ (kept / (1.0 + kept)).unsqueeze(-1)).squeeze(-1)
    return gamma, values.log1p().sum((1, 2)), values
