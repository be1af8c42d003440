r"""Rounds of EM for mixtures of probabilistic PCA: a :class:`Rule` maps an :class:`Iterate` to the next parameters.

In all, data are in units in which their mean variance is 1; :math:`\gamma_k` is the number of well-determined
parameters, N_k the expected number of data, m the number of outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_evidence.ops import mppca
from pyro_evidence.ops.mppca import Analysers, Moments, Statistics

LARGEST_NOISE = 1e12  # precision in units of the data's: a component on a subspace makes the likelihood unbounded
ALPHA_RANGE = (1e-8, 1e12)  # in units of the data's variance; beyond, the prior is flat or a point
LEAST_DETERMINED = 1e-2  # columns are out when the data determine less than this share of those of one precision


@dataclass(frozen=True)
class Ties:
    """Which columns share a prior precision, which outputs a noise precision, and what is learned."""

    alpha_group: Tensor  # (K, q) long
    beta_group: Tensor  # (K, m) long
    alpha_free: bool = True
    beta_free: bool = True
    mixing_free: bool = True
    mean_free: bool = True

    @property
    def columnwise(self) -> bool:
        """Whether columns of one component have precisions of their own."""
        return bool((self.alpha_group != self.alpha_group[:, :1]).any())


@dataclass(frozen=True)
class Iterate:
    """One iterate with all that a rule may ask of it."""

    at: Analysers
    ties: Ties
    stats: Statistics
    variance: Tensor  # (m,) scale of the noise in the gamma prior

    @cached_property
    def found(self) -> Moments:
        """Expectations about the new means."""
        found = mppca.moments(self.at, self.stats)
        return found if self.ties.mean_free else mppca.about_held_means(found, self.at)

    @cached_property
    def literal_gamma(self) -> Tensor:
        r"""Of each output and column as printed, :math:`[(A + \alpha)^{-1} A]_{jj}`, shape ``(R, K, m or 1, q)``.

        Husmeier (2000), eqs. 2.20 and A.35; size 1 where outputs share the noise.
        """
        beta = self.at.beta[..., :1] if mppca.is_isotropic(self.at.beta) else self.at.beta
        A = beta[..., None, None] * self.found.xx.unsqueeze(-3)
        inverse = torch.linalg.inv(A + self.at.alpha.unsqueeze(-2).diag_embed())
        gamma = 1.0 - self.at.alpha.unsqueeze(-2) * inverse.diagonal(dim1=-2, dim2=-1)
        on = self.at.columns & self.at.active.unsqueeze(-1)
        return torch.where(on.unsqueeze(-2), gamma, 0.0)

    @cached_property
    def gamma(self) -> Tensor:
        """The same without the directions in which the latent space only turns, of which the data say nothing."""
        norms = self.at.W.square().sum(-2)
        total = norms.unsqueeze(-1) + norms.unsqueeze(-2)
        on = (norms > 0) & self.at.columns
        pair = on.unsqueeze(-1) & on.unsqueeze(-2)
        share = torch.where(pair, norms.unsqueeze(-2) / torch.where(pair, total, 1.0), 0.0)
        lost = share.sum(-1) - torch.where(on, 0.5, 0.0)  # the pair of a column with itself is none
        return self.literal_gamma * (1.0 - lost / self.at.W.shape[-2]).unsqueeze(-2)


Gamma = Callable[[Iterate], Tensor]


def no_gamma(it: Iterate) -> Tensor:
    """Nothing is subtracted: maximum likelihood, or a prior that is held."""
    return it.at.alpha.new_zeros(*it.at.alpha.shape[:-1], 1, it.at.alpha.shape[-1])


def literal_gamma(it: Iterate) -> Tensor:
    """As printed, eq. A.35."""
    return it.literal_gamma


def orbit_gamma(it: Iterate) -> Tensor:
    """Without the rotations of the latent space."""
    return it.gamma


Preparation = Callable[[Iterate], Iterate]


def as_it_is(it: Iterate) -> Iterate:
    """Nothing is done before the round."""
    return it


@dataclass(frozen=True)
class Rule:
    r"""One round; Husmeier (2000), eqs. 3.11, 3.13, 3.16, 3.25 and 3.26.

    .. math:: 1/\beta_k = (s_k + 2\rho m \bar v) / (m N_k - \gamma_k), \qquad \alpha_j = \gamma_j / \|w_j\|^2

    :ivar gamma: what counts as well determined.
    :ivar alpha: held prior precision of W, 0 for none; None where it is learned.
    :ivar rho: strength of a gamma prior on beta, in data; 0 for none.
    :ivar prepare: what is done to the loadings first, with responsibilities held.
    """

    gamma: Gamma
    alpha: float | None = None
    rho: float = 0.0
    prepare: Preparation = as_it_is

    def __call__(self, it: Iterate) -> Analysers:
        """The next parameters."""
        it = self.prepare(it)
        at, ties = it.at, it.ties
        used = at.alpha if self.alpha is None else torch.full_like(at.alpha, self.alpha)
        W = mppca.solve_loadings(it.found, at, used) * at.columns.unsqueeze(-2)
        gamma = self.gamma(it)
        beta = self._noise(it, W, gamma) if ties.beta_free else at.beta
        alpha = self._alpha(it, W, gamma, used)
        mixing = it.stats.counts / it.stats.counts.sum(-1, keepdim=True)
        log_mixing = mixing.log() if ties.mixing_free else at.log_mixing
        new = replace(at, W=W, mu=it.found.mean, beta=beta, alpha=alpha, log_mixing=log_mixing)
        return pruned(new, self._survivors(it, gamma), self._columns(it))

    def _noise(self, it: Iterate, W: Tensor, gamma: Tensor) -> Tensor:
        """Noise precisions, ties kept, shape ``(R, K, m)``."""
        squares = mppca.residual_squares(it.found, W) + 2.0 * self.rho * it.variance
        counts = it.found.counts.unsqueeze(-1).expand_as(squares)
        left = counts - gamma.sum(-1)
        on = it.at.active.unsqueeze(-1)
        group = it.ties.beta_group
        tops = _tied(torch.stack([left * on, counts * on, squares * on]), group)
        top = torch.where(tops[0] > 0, tops[0], tops[1])  # the last component of all is kept, without correction
        some = tops[1] > 0
        ratio = top / torch.where(some, tops[2], 1.0)
        return torch.where(some, ratio.clamp(max=LARGEST_NOISE), 1.0)

    def _alpha(self, it: Iterate, W: Tensor, gamma: Tensor, used: Tensor) -> Tensor:
        if self.alpha is not None or not it.ties.alpha_free:
            return it.at.alpha if self.alpha == 0.0 else used
        outputs = W.shape[-2] / gamma.shape[-2]
        on = (it.at.columns & it.at.active.unsqueeze(-1)).to(W)
        parts = torch.stack([outputs * gamma.sum(-2) * on, W.square().sum(-2) * on])
        top, bottom = _tied(parts, it.ties.alpha_group)
        alpha = (top / bottom).clamp(*ALPHA_RANGE)
        return torch.where((bottom > 0) & (top > 0), alpha, torch.where(on > 0, ALPHA_RANGE[1], it.at.alpha))

    def _survivors(self, it: Iterate, gamma: Tensor) -> Tensor:
        """Components with more data than well-determined parameters, at least one, shape ``(R, K)`` bool."""
        margin = it.stats.counts - gamma.mean(-2).sum(-1)
        keep = it.at.active & (margin > 1e-6)  # Husmeier (2000), below eq. 3.26: N_k <= gamma_k / m is pruned
        best = torch.where(it.at.active, margin, -torch.inf).argmax(-1, keepdim=True)
        return keep.scatter(-1, best, True)

    def _columns(self, it: Iterate) -> Tensor:
        """Columns that stay: those of a precision by which the data determine something, shape ``(R, K, q)`` bool."""
        if self.alpha is not None or not it.ties.alpha_free:
            return it.at.columns
        on = (it.at.columns & it.at.active.unsqueeze(-1)).to(it.at.W)
        parts = torch.stack([it.literal_gamma.mean(-2) * on, on])
        gamma, num = _tied(parts, it.ties.alpha_group)
        return it.at.columns & ((gamma > LEAST_DETERMINED * num) | (num == 0))


def _tied(values: Tensor, group: Tensor) -> Tensor:
    """Sums over groups of the last two dims, expanded again, shape of ``values``."""
    sums = values.new_zeros(*values.shape[:-2], int(group.max()) + 1)
    return sums.index_add_(-1, group.flatten(), values.flatten(-2))[..., group]


def pruned(at: Analysers, keep: Tensor, columns: Tensor) -> Analysers:
    """Without the components where ``keep`` ``(R, K)`` is False and the columns where ``columns`` ``(R, K, q)`` is."""
    log_mixing = torch.where(keep, at.log_mixing, -torch.inf).log_softmax(-1)
    on = columns & keep.unsqueeze(-1)
    W = torch.where(on.unsqueeze(-2), at.W, 0.0)
    beta = torch.where(keep.unsqueeze(-1), at.beta, 1.0)
    alpha = torch.where(columns, at.alpha, ALPHA_RANGE[1])
    return replace(at, W=W, log_mixing=log_mixing, columns=columns, beta=beta, alpha=alpha)
