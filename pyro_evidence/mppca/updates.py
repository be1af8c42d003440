r"""Rounds of EM for mixtures of probabilistic PCA: each maps an :class:`Iterate` to the next parameters.

In all, data are in units in which their mean variance is 1; :math:`\gamma_k` is the number of well-determined
parameters, N_k the expected number of data, m the number of outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

import torch
from torch import Tensor

from pyro_evidence.mixture.updates import ALPHA_RANGE, LARGEST_NOISE, SMALLEST, SharedParameters, survivors
from pyro_evidence.mppca import expectation
from pyro_evidence.mppca.expectation import FactorAnalysers, FactorStatistics, LatentMoments
from pyro_evidence.numerics.linalg import fix_signs

LEAST_DETERMINED = 1e-2  # columns are out when the data determine less than this share of those of one precision


@dataclass(frozen=True, eq=False)
class Iterate:
    """One iterate with all that a rule may ask of it."""

    analysers: FactorAnalysers
    ties: SharedParameters
    stats: FactorStatistics
    variance: Tensor  # (m,) scale of the noise in the gamma prior

    @cached_property
    def found(self) -> LatentMoments:
        """Expectations about the new means."""
        found = expectation.latent_moments(self.analysers, self.stats)
        return found if self.ties.mean_free else expectation.about_held_means(found, self.analysers)

    @cached_property
    def gram(self) -> Tensor:
        """``W' Lambda W``, shape ``(R, K, q, q)``."""
        tril = self.analysers.tril
        return tril @ tril.mT - torch.eye(tril.shape[-1], dtype=tril.dtype, device=tril.device)

    @cached_property
    def counts(self) -> Tensor:
        """Expected number of data of each component, shape ``(R, K)``; above 0, for quotients."""
        return self.found.counts.clamp(min=SMALLEST)  # a pruned component has none; keeps the ratio finite

    @cached_property
    def spread(self) -> Tensor:
        """``W' Lambda S Lambda W`` with the covariances ``S`` of the data, shape ``(R, K, q, q)``."""
        tril, whitener = self.analysers.tril, self.analysers.whitener
        return tril @ (whitener @ self.found.yz) @ tril.mT / self.counts[..., None, None]

    @cached_property
    def literal_gamma(self) -> Tensor:
        r"""Gamma of each output and column as printed, :math:`[(A + \alpha)^{-1} A]_{jj}`, shape ``(R, K, m or 1, q)``.

        Husmeier (2000), eqs. 2.20 and A.35; size 1 where outputs share the noise.
        """
        beta = self.analysers.beta[..., :1] if expectation.is_isotropic(self.analysers.beta) else self.analysers.beta
        A = beta[..., None, None] * self.found.xx[:, :, None]
        inverse = torch.linalg.inv(A + self.analysers.alpha.unsqueeze(-2).diag_embed())
        gamma = 1.0 - self.analysers.alpha.unsqueeze(-2) * inverse.diagonal(dim1=-2, dim2=-1)
        on = self.analysers.on
        return torch.where(on.unsqueeze(-2), gamma, 0.0)

    @cached_property
    def gamma(self) -> Tensor:
        """Well-determined parameters less the turns of the latent space, of which the data say nothing."""
        norms = self.analysers.W.square().sum(-2)
        total = norms.unsqueeze(-1) + norms.unsqueeze(-2)
        on = (norms > 0) & self.analysers.columns
        pair = on.unsqueeze(-1) & on.unsqueeze(-2)
        share = torch.where(pair, norms.unsqueeze(-2) / torch.where(pair, total, 1.0), 0.0)
        lost = share.sum(-1) - torch.where(on, 0.5, 0.0)  # the pair of a column with itself is none
        return self.literal_gamma * (1.0 - lost / self.analysers.W.shape[-2]).unsqueeze(-2)


Gamma = Callable[[Iterate], Tensor]


def no_gamma(it: Iterate) -> Tensor:
    """Nothing is subtracted: maximum likelihood, or a prior that is held."""
    return it.analysers.alpha.new_zeros(*it.analysers.alpha.shape[:-1], 1, it.analysers.alpha.shape[-1])


literal_gamma: Gamma = attrgetter("literal_gamma")  # as printed, eq. A.35
orbit_gamma: Gamma = attrgetter("gamma")  # without the rotations of the latent space


@dataclass(frozen=True, eq=False)
class MPPCAUpdate:
    r"""One round; Husmeier (2000), eqs. 3.11, 3.13, 3.16, 3.25 and 3.26.

    .. math:: 1/\beta_k = (s_k + 2\rho m \bar v) / (m N_k - \gamma_k), \qquad \alpha_j = \gamma_j / \|w_j\|^2

    :ivar gamma: what counts as well determined.
    :ivar alpha: held prior precision of W, 0 for none; None where it is learned.
    :ivar rho: strength of a gamma prior on beta, in data; 0 for none.
    :ivar prepare: what is done to the loadings first, with responsibilities held; None for nothing.
    """

    gamma: Gamma
    alpha: float | None = None
    rho: float = 0.0
    prepare: Callable[[Iterate], Iterate] | None = None

    def __call__(self, it: Iterate) -> FactorAnalysers:
        it = it if self.prepare is None else self.prepare(it)
        analysers, ties = it.analysers, it.ties
        used = analysers.alpha if self.alpha is None else torch.full_like(analysers.alpha, self.alpha)
        W = expectation.solve_loadings(it.found, analysers, used) * analysers.columns.unsqueeze(-2)
        gamma = self.gamma(it)
        beta = torch.where(ties.beta_free, self._noise(it, W, gamma), analysers.beta)
        if self.alpha is None and ties.all_free[0]:
            alpha, columns = self._alpha(it, W, gamma)
        else:
            alpha, columns = analysers.alpha if self.alpha == 0.0 else used, analysers.columns
        mixing = it.stats.counts / it.stats.counts.sum(-1, keepdim=True)
        log_mixing = mixing.log() if ties.mixing_free else analysers.log_mixing
        new = replace(analysers, W=W, mu=it.found.mean, beta=beta, alpha=alpha, log_mixing=log_mixing)
        margin = it.stats.counts - gamma.mean(-2).sum(-1)  # Husmeier (2000), below eq. 3.26
        return pruned(new, survivors(analysers.active, margin), columns)

    def _noise(self, it: Iterate, W: Tensor, gamma: Tensor) -> Tensor:
        """Noise precisions, ties kept, shape ``(R, K, m)``."""
        squares = expectation.residual_squares(it.found, W) + 2.0 * self.rho * it.variance
        on, pool = it.analysers.active.unsqueeze(-1), it.ties.beta_pool
        counts = it.found.counts.unsqueeze(-1).expand_as(squares)
        whole, left = pool(counts * on), pool((counts - gamma.sum(-1)) * on)
        top = torch.where(left > 0, left, whole)  # the last component of all is kept, without correction
        ratio = top / torch.where(whole > 0, pool(squares * on), 1.0)
        return torch.where(whole > 0, ratio.clamp(max=LARGEST_NOISE), 1.0).expand_as(squares)

    def _alpha(self, it: Iterate, W: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        """Prior precisions, and the columns that stay, shape ``(R, K, q)`` each.

        Those are of a precision by which the data determine something.
        """
        on, pool = it.analysers.on, it.ties.alpha_pool
        top = pool(W.shape[-2] / gamma.shape[-2] * gamma.sum(-2) * on)
        bottom = pool(W.square().sum(-2) * on)
        alpha = (top / bottom).clamp(*ALPHA_RANGE)
        alpha = torch.where((bottom > 0) & (top > 0), alpha, torch.where(on, ALPHA_RANGE[1], it.analysers.alpha))
        there = on.to(W)
        determined, num = pool(it.literal_gamma.mean(-2) * there), pool(there)
        return alpha, it.analysers.columns & ((determined > LEAST_DETERMINED * num) | (num == 0))


def pruned(analysers: FactorAnalysers, keep: Tensor, columns: Tensor) -> FactorAnalysers:
    """Without the components where ``keep`` ``(R, K)`` is False and the columns where ``columns`` ``(R, K, q)`` is."""
    log_mixing = torch.where(keep, analysers.log_mixing, -torch.inf).log_softmax(-1)
    on = columns & keep.unsqueeze(-1)
    W = torch.where(on.unsqueeze(-2), analysers.W, 0.0)
    beta = torch.where(keep.unsqueeze(-1), analysers.beta, 1.0)
    alpha = torch.where(columns, analysers.alpha, ALPHA_RANGE[1])
    return replace(analysers, W=W, log_mixing=log_mixing, columns=columns, beta=beta, alpha=alpha)


LEAST = 1e-6  # squared length in units of the noise that is left to a column which explains nothing


def best_within_span(it: Iterate) -> Iterate:
    """The iterate with its loadings turned and stretched; as it is where outputs have noise of their own."""
    analysers = it.analysers
    if not expectation.is_isotropic(analysers.beta) or not analysers.W.shape[-1]:
        return it
    norms, V = torch.linalg.eigh(it.gram)
    some = norms > 1e-10 * (1.0 + norms[..., -1:])  # rounding leaves pruned columns a norm
    inverse = torch.where(some, torch.where(some, norms, 1.0).rsqrt(), 0.0)
    Q = V * inverse.unsqueeze(-2)  # W Q has orthonormal columns in units of the noise, and zeros
    s, E = torch.linalg.eigh(Q.mT @ it.spread @ Q)
    s, E = s.flip(-1).clamp(min=0.0), E.flip(-1)  # rounding may leave a tiny negative
    # columns take the principal axes in this order: those held least first, pruned ones last
    place = torch.where(analysers.columns, analysers.alpha, torch.inf).sort(dim=-1, stable=True).indices
    alpha = torch.where(analysers.columns, analysers.alpha / analysers.beta[..., :1], 0.0).gather(-1, place)
    c = 2.0 * s / (1.0 + (1.0 + 4.0 * alpha * s / it.counts.unsqueeze(-1)).sqrt())
    length = (c - 1.0).clamp(min=LEAST).sqrt()  # zero would stay so in EM
    on = analysers.columns.gather(-1, place) & analysers.active.unsqueeze(-1)
    turn = fix_signs(Q @ E) * torch.where(on, length, 0.0).unsqueeze(-2)
    turn = turn.gather(-1, place.argsort(-1).unsqueeze(-2).expand(turn.shape))
    new = replace(analysers, W=analysers.W @ turn)
    change = torch.linalg.solve_triangular(new.tril, turn.mT @ analysers.tril, upper=False)  # of whitened coordinates
    return replace(it, analysers=new, stats=replace(it.stats, cross=it.stats.cross @ change.mT))
