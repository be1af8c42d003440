r"""Expectation and maximisation for mixtures of linear-Gaussian kernels, a batch of restarts in front.

.. math:: p(y_n | x_n) = \sum_k \pi_k\, N(y_n | W_k g(x_n), \Lambda_k^{-1})

A Gaussian mixture is the case ``g = 1``.  All that a datum contributes is linear in its *features*: products of its
basis functions and responses.  The E-step is one matrix product with them, the M-step's statistics another, and
restarts and components share both.  Husmeier (2000), eqs. 1.1 to 1.3, 2.14 and 2.22.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.data.ranks import Statistics
from pyro_evidence.mixture.data import FeatureLayout as Layout
from pyro_evidence.mixture.data import Mixture as Mixture
from pyro_evidence.mixture.data import MixtureData as MixtureData
from pyro_evidence.mixture.data import mixture_data as mixture_data
from pyro_evidence.mixture.data import rows_of as rows_of
from pyro_evidence.mixture.data import some

BLOCK = 2**16  # numbers in one block of responsibilities: they stay in the cache
SHARD = 2**19  # numbers in what one shard of the data makes where every datum has a number for every weight
CERTAIN = 1e-13  # what a responsibility may lack of one for the datum to count as certain of its component


@dataclass(frozen=True, eq=False)
class MixtureStatistics(Statistics):
    """Expected sufficient statistics of one shard; ``a + b`` are those of both shards."""

    moments: Tensor  # (R, K, P)  sum_n r_nk F_n, of the columns that the noise needs
    spread: Tensor  # (R, K, P)   sum_n r_nk (1 - r_nk) F_n; () unless asked for
    log_likelihood: Tensor  # (R,)  sum_n log p(y_n)

    @property
    def counts(self) -> Tensor:
        """Expected number of data of each component, ``N_k``, shape ``(R, K)``."""
        return self.moments[..., 0]


def natural_parameters(mixture: Mixture, layout: Layout) -> Tensor:
    """Coefficients of the features in ``log p(y_n, k | w)``, shape ``(R, K, P)``.

    With diagonal noise those of the first ``layout.num_diagonal`` columns only: the others are zero.
    """
    w, noise, full = mixture.w, mixture.noise, mixture.has_full_noise
    if full:
        weighted, num = noise @ w, layout.num_features
        tril, info = torch.linalg.cholesky_ex(noise)
        log_det = 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
        log_det = torch.where(info.unsqueeze(-1) == 0, log_det, torch.nan)  # one bad kernel costs its own row only
        each = log_det / w.shape[-2] - math.log(math.tau)  # shared out over the outputs
        log_norm = (0.5 * each).expand(*w.shape[:-1])
    else:
        weighted, num = noise.unsqueeze(-1) * w, layout.num_diagonal
        log_norm = 0.5 * (noise / math.tau).log()
    square = -0.5 * noise
    gram = -0.5 * w.unsqueeze(-1) * weighted.unsqueeze(-2)
    place = layout.square if full else layout.square.diagonal()
    parts = [(layout.present, log_norm), (layout.gram, gram), (layout.cross, weighted), (place, square)]
    index = torch.cat([index.flatten() for index, _ in parts])
    coefficients = w.new_zeros(*w.shape[:2], num)
    coefficients.index_add_(-1, index.to(w.device), torch.cat([value.flatten(2) for _, value in parts], -1))
    coefficients[..., 0] += mixture.log_mixing
    return coefficients


def e_step(data: MixtureData, mixture: Mixture, *, spread: bool = False) -> MixtureStatistics:
    """Responsibilities (Husmeier 2000, eq. 2.14) and the sums that the M-step needs, block by block.

    :param spread: whether to sum ``r (1 - r)`` as well, for the curvature.
    """
    natural = natural_parameters(mixture, data.layout)

    def of_rows(rows: Tensor | None) -> MixtureStatistics:
        own, these = (natural, data) if rows is None else (natural[rows], rows_of(data, rows))

        def of_block(part: MixtureData) -> MixtureStatistics:
            F = part.columns(own.shape[-1])
            resp, log_norm = responsibilities(F, own, part.floor)
            height = (log_norm * part.weight).sum(-1) + part.num_data * part.log_share
            around = _around(part, resp) if spread else torch.zeros(()).to(F)
            return MixtureStatistics(_summed(part, resp, F), around, height)

        return these.total(max(64, BLOCK // own[..., 0].numel()), of_block)

    return data.by_restarts(len(natural), of_rows)


def _around(part: MixtureData, resp: Tensor) -> Tensor:
    """``sum r (1 - r) F`` of one block, from the data that are not certain of their component, ``(R, K, P)``."""
    varied = (1.0 - resp).mul_(resp)
    if part.features is None:  # else looking for them takes longer
        index = (varied.amax((0, 1)) > CERTAIN).nonzero().flatten()
        if 2 * len(index) < resp.shape[-1]:
            part, varied = some(part, index), varied[..., index]
    return _summed(part, varied, part.columns(part.layout.num_features))


def _summed(part: MixtureData, r: Tensor, F: Tensor) -> Tensor:
    """``sum_n r_kn F_n`` over weighted data, shape ``(R, K, P)``, with the weights in the smaller of the two."""
    if part.is_unweighted:
        return r @ F
    if part.weight.numel() * F.shape[-1] < r.numel():
        return r @ (F * part.weight.unsqueeze(-1))
    return (r * part.weight.unsqueeze(-2)) @ F


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


def solve_weights(stats: MixtureStatistics, layout: Layout, mixture: Mixture) -> Tensor:
    r"""Weights that maximise the expected complete log joint, shape ``(R, K, m, B)``.

    .. math:: (\beta_{ki} G \Pi_k G^\top + \alpha)\, w_{ki} = \beta_{ki} G \Pi_k y_i + \alpha \mu

    Husmeier (2000), eqs. 2.22 and A.38; with a noise matrix the outputs of a component are solved for together.
    """
    gram, cross = stats.moments[..., layout.gram], stats.moments[..., layout.cross]
    pull = mixture.alpha * mixture.loc
    if mixture.has_full_noise:
        A = data_precision(gram, mixture.noise) + mixture.alpha.flatten(-2).diag_embed()
        rhs = (mixture.noise @ cross + pull).flatten(-2)
        return torch.linalg.solve_ex(A, rhs)[0].reshape(cross.shape)  # a singular row gives inf or nan, and fails alone
    beta = mixture.noise.unsqueeze(-1)
    if gram.shape[-1] == 1:
        return (beta * cross + pull) / (beta * gram.squeeze(-1) + mixture.alpha)
    A = beta.unsqueeze(-1) * gram + mixture.alpha.diag_embed()
    return torch.linalg.solve_ex(A, beta * cross + pull)[0]  # as above


def data_precision(gram: Tensor, noise: Tensor) -> Tensor:
    """``Lambda (x) G Pi G'`` of each component, shape ``(R, K, m B, m B)``.

    :param gram: one per output, shape ``(R, K, m, B, B)``.
    :param noise: precision matrices, shape ``(R, K, m, m)``.
    """
    num_outputs, num_basis = gram.shape[-3:-1]
    blocks = noise[..., :, None, :, None] * gram.unsqueeze(-2)  # (R, K, m, B, m, B) with gram of the row's output
    return blocks.reshape(*gram.shape[:2], num_outputs * num_basis, -1)


def residual_squares(stats: MixtureStatistics, layout: Layout, w: Tensor) -> Tensor:
    """``sum_n r_nk (y_ni - w_ki g_n)^2``, shape ``(R, K, m)``, never below zero."""
    gram, cross, square = (stats.moments[..., index] for index in (layout.gram, layout.cross, layout.square.diagonal()))
    if w.shape[-1] == 1:
        both = ((gram.squeeze(-1) * w - 2.0 * cross) * w).squeeze(-1)
    else:
        both = (((gram @ w.unsqueeze(-1)).squeeze(-1) - 2.0 * cross) * w).sum(-1)
    return (square + both).clamp(min=0.0)  # rounding may leave a tiny negative


def residual_products(stats: MixtureStatistics, layout: Layout, w: Tensor) -> Tensor:
    """``sum_n r_nk e_nk e_nk'`` of the residuals, shape ``(R, K, m, m)``; needs features with products."""
    gram, cross = stats.moments[..., layout.gram[0]], stats.moments[..., layout.cross]
    mixed = w @ cross.mT
    return stats.moments[..., layout.square] - mixed - mixed.mT + w @ gram @ w.mT
