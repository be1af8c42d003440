"""The posterior mode of a mixture's weights at fixed hyperparameters, and an evidence that charges for these."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.ops import mixture_evidence, newton
from pyro_evidence.ops.mixture import Mixture, MixtureData, e_step, solve_weights
from pyro_evidence.ops.mixture_rows import row
from pyro_evidence.ops.mixture_updates import EStep

LOG_RANGE = math.log(10.0)  # nats: prior range of a log hyperparameter; 1 to 100 lead to the same choices
TOLERANCE = 1e-14  # nats that a Newton step may still promise


@dataclass(frozen=True)
class _Rows:
    """The log joint as a function of flat weights, hyperparameters of each row held."""

    data: MixtureData
    mixture: Mixture

    def at(self, u: Tensor) -> Mixture:
        return replace(self.mixture, w=u.reshape(self.mixture.w.shape))

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        return mixture_evidence.log_joint(self.data, self.at(u))

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        at, mixture = mixture_evidence.pulls(self.data, self.at(u)), self.at(u)
        value = at.log_density @ self.data.weight + mixture_evidence.log_prior(mixture)
        weighted = (at.resp * self.data.weight)[..., None, None, :]
        slope = (at.u * weighted).sum(-1) - mixture.alpha * (mixture.w - mixture.loc)
        return value, slope.flatten(1)

    def precision(self, u: Tensor) -> Tensor:
        mixture = self.at(u)
        A = mixture_evidence.full(self.data, mixture, e_step(self.data, mixture)).squeeze(1)
        return A + mixture.alpha.flatten(1).diag_embed()


def find_mode(data: MixtureData, mixture: Mixture, num_em: int = 10, num_newton: int = 50) -> Mixture:
    """The mixture with its weights at a posterior mode: a few EM steps, then Newton with the full Hessian.

    :param num_newton: 0 where the full Hessian would not fit into memory; then give more EM steps.
    """
    for _ in range(num_em):
        mixture = replace(mixture, w=solve_weights(e_step(data, mixture), data.layout, mixture))
    if not num_newton:
        return mixture
    each = torch.arange(len(mixture.w), device=mixture.w.device).split(1)
    return replace(mixture, w=torch.cat([_polished(data, row(mixture, index), num_newton) for index in each]))


def _polished(data: MixtureData, mixture: Mixture, num_newton: int) -> Tensor:
    """Weights of a single row at the mode, ``(1, K, m, B)``; rows differ in when they arrive."""
    density: Any = _Rows(data, mixture)
    start, limits = mixture.w.flatten(1), newton.Limits(TOLERANCE, num_newton)
    return newton.climb(density, density.precision, start, start.new_zeros(0), limits).u.reshape(mixture.w.shape)


def log_evidence_occam(at: EStep) -> Tensor:
    r"""Laplace log evidence at a mode with its hyperparameters integrated out roughly, nats, shape ``(R,)``.

    To the log evidence it adds the Occam factor :math:`\min(0, \tfrac12\log(4\pi/n) - \log 10)` of every learned
    precision, ``n`` being ``N_k - gamma`` for a noise precision and ``gamma`` for a prior one, the same for the mixing
    under a uniform prior, and :math:`\log K!` for the labels.  Only differences between fits of the same data mean
    something; it is not ``log_evidence``.  MacKay (1992), sec. 5.1.
    """
    log_joint = mixture_evidence.log_joint(at.data, at.mixture)
    evidence = mixture_evidence.log_evidence(log_joint, at.A, at.mixture.alpha)
    return evidence + _noise_factor(at) + _alpha_factor(at) + _mixing_factor(at)


def _noise_factor(at: EStep) -> Tensor:
    active = at.mixture.active.to(at.gamma)
    if at.mixture.noise.dim() == 4:
        num_outputs = at.gamma.shape[-1]
        return (_factor(at.stats.counts) * active).sum(-1) * num_outputs * (num_outputs + 1) / 2
    left = (at.stats.counts.unsqueeze(-1) - at.gamma) * active.unsqueeze(-1)
    return _summed(left, at.ties.beta_group, at.ties.beta_free)


def _alpha_factor(at: EStep) -> Tensor:
    return _summed(at.well_determined.gamma, at.ties.alpha_group, at.ties.alpha_free)


def _summed(amount: Tensor, group: Tensor, free: Tensor) -> Tensor:
    """Factors of the groups that are learned, shape ``(R,)``."""
    sums = amount.new_zeros(len(amount), int(group.max()) + 1).index_add_(1, group[free], amount[:, free])
    return _factor(sums).sum(-1)


def _factor(amount: Tensor) -> Tensor:
    """Log of posterior width over prior range of one log precision; 0 where the data say nothing."""
    width = 0.5 * (4.0 * math.pi / amount.clamp(min=1e-300)).log()  # keeps the logarithm finite
    return (width - LOG_RANGE).clamp(max=0.0)


def _mixing_factor(at: EStep) -> Tensor:
    active = at.mixture.active
    num = active.sum(-1).to(at.gamma)
    spread = 0.5 * torch.where(active, at.mixture.log_mixing, 0.0).sum(-1)
    widths = 0.5 * (num - 1.0) * torch.log(2.0 * math.pi / at.data.num_data)
    return torch.lgamma(num) + widths + spread + torch.lgamma(num + 1.0)
