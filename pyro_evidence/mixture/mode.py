"""The posterior mode of a mixture's weights at fixed hyperparameters, and an evidence that charges for these."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyro_evidence.laplace.approximation import LaplaceState, Problem
from pyro_evidence.mixture import evidence as mixture_evidence
from pyro_evidence.mixture import expectation
from pyro_evidence.mixture.data import Units
from pyro_evidence.mixture.expectation import Mixture, MixtureData, MixtureStatistics, e_step, rows_of, solve_weights
from pyro_evidence.mixture.recognise import MixtureStructure, held_at
from pyro_evidence.mixture.updates import SMALLEST, EStep, estep, padded
from pyro_evidence.numerics import newton
from pyro_evidence.numerics.batched import Batched, distinct
from pyro_evidence.numerics.evidence import log_evidence as laplace
from pyro_evidence.numerics.linalg import cholesky
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.precision.dense import Dense
from pyro_evidence.structure.density import AutogradDensity
from pyro_evidence.structure.recognise import Structure

LOG_RANGE = math.log(10.0)  # nats: prior range of a log hyperparameter; 1 to 100 lead to the same choices
TOLERANCE = 1e-14  # nats that a Newton step may still promise
MANY = 2**21  # numbers, one for each datum and weight, up to which every row is looked at exactly
NEAR = 10.0  # nats below the highest row, by the curvature of the engine, where another may be highest by the exact one


@dataclass(frozen=True, eq=False)
class LogJointOfWeights:
    """The log joint as a function of flat weights; each row carries its number along as a last coordinate.

    Its slope is one of sums of the E-step, in the place of residuals.
    """

    data: MixtureData
    mixture: Mixture

    def unpacked(self, u: Tensor) -> tuple[MixtureData, Mixture, MixtureStatistics]:
        """The data and the mixtures that flat rows ``u`` stand for, with an E-step there."""
        rows = u[:, -1].long()
        mixture, data = self.mixture[rows], rows_of(self.data, rows)
        mixture = replace(mixture, w=u[:, :-1].reshape(mixture.w.shape))
        return data, mixture, e_step(data, mixture)

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        data, mixture, stats = self.unpacked(u)
        gram, cross = stats.moments[..., data.layout.gram], stats.moments[..., data.layout.cross]
        residual = cross - (gram @ mixture.w.unsqueeze(-1)).squeeze(-1)
        pull = mixture.noise @ residual if mixture.has_full_noise else mixture.noise.unsqueeze(-1) * residual
        slope = pull + mixture.alpha * (mixture.loc - mixture.w)
        return stats.log_likelihood + mixture_evidence.log_prior(mixture), pad(slope.flatten(1), (0, 1))

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        data, mixture, stats = self.unpacked(u)
        curvature = mixture_evidence.full(data, mixture, stats).squeeze(1)
        A = pad(curvature + mixture.alpha.flatten(1).diag_embed(), (0, 1, 0, 1))
        A[:, -1, -1] = 1.0
        return A


@torch.no_grad()
def find_mode(data: MixtureData, mixture: Mixture) -> Mixture:
    """The mixture with its weights at a posterior mode: a few EM steps, then Newton with the full Hessian."""
    for _ in range(4):
        mixture = replace(mixture, w=solve_weights(e_step(data, mixture), data.layout, mixture))
    polished, limits = [], newton.Limits(TOLERANCE, 50)
    for rows in chunks(data, mixture):
        some, some_data = mixture[rows], rows_of(data, rows)
        density: Any = LogJointOfWeights(some_data, some)
        number = torch.arange(len(rows)).to(some.w).unsqueeze(-1)
        start = torch.cat([some.w.flatten(1), number], -1)
        found = newton.climb(density, density.precision, start, start.new_zeros(0), limits)
        polished.append(found.u[:, :-1].reshape(some.w.shape))
    return replace(mixture, w=torch.cat(polished))


def chunks(data: MixtureData, mixture: Mixture) -> tuple[Tensor, ...]:
    """Numbers of rows that fit into memory together, with a number for every datum and weight of each."""
    size = max(1, expectation.SHARD // (mixture.w[0].numel() * data.num_rows))
    return torch.arange(len(mixture.w), device=mixture.w.device).split(size)


@dataclass(frozen=True, eq=False)
class RestartModes(Batched):
    """Heights of the modes of the rows of a batch, nats; -inf where there is no mode."""

    log_evidence: Tensor  # (R,) with the full Hessian
    occam: Tensor  # (R,) with :func:`occam_factor` added


@torch.no_grad()
def modes(expected: EStep, exact: Tensor | None = None) -> RestartModes:
    """The mode of each row with its evidences, a few rows at a time.

    Where data and weights are many, rows are compared in the curvature of the engine and at weights as they are; only
    those that may be highest are looked at exactly.

    :param exact: numbers of the rows that are looked at exactly in any case; None for those near the highest.
    """
    evidence = expected.log_evidence
    if expected.mixture.w.numel() * expected.data.num_rows <= MANY:
        exact = torch.arange(len(evidence), device=evidence.device)
    found = _heights(evidence, expected)
    chosen = distinct(found.occam, expected.mixture.active.sum(-1), NEAR) if exact is None else exact
    if not len(chosen):
        return found
    own = rows_of(expected.data, chosen)
    mode = find_mode(own, expected.mixture[chosen])
    for rows in chunks(own, mode):
        here = estep(rows_of(own, rows), mode[rows], expected.ties, mixture_evidence.full)
        found = found.with_rows(chosen[rows], _heights(exact_log_evidence(here), here))
    return found


def _heights(evidence: Tensor, expected: EStep) -> RestartModes:
    pair = evidence, evidence + occam_factor(expected)
    return RestartModes(*(torch.where(x.isfinite(), x, -torch.inf) for x in pair))


def exact_log_evidence(expected: EStep) -> Tensor:
    """Laplace log evidence at a mode, nats, shape ``(R,)``, by residuals: exact where sums of squares cancel."""
    log_joint = mixture_evidence.log_joint(expected.data, expected.mixture)
    return laplace(log_joint, expected.well_determined.log_det, expected.mixture.alpha[0].numel())


def occam_factor(expected: EStep) -> Tensor:
    r"""Rough Occam factor of hyperparameters, by which integrating them out lowers the log evidence, nats, ``(R,)``.

    The sum of the Occam factor :math:`\min(0, \tfrac12\log(4\pi/n) - \log 10)` of every learned precision, ``n`` being
    ``N_k - gamma`` for a noise precision and ``gamma`` for a prior one, the same for the mixing under a uniform prior,
    and :math:`\log K!` for the labels.  Only differences between fits of the same data mean something; with it the
    evidence is not ``log_evidence``.  MacKay (1992), sec. 5.1.
    """
    active = expected.mixture.active
    if expected.mixture.has_full_noise:
        m = expected.gamma.shape[-1]
        noise = m * (m + 1) / 2 * precision_factor(expected.stats.counts * active)  # a pruned component has no data
    else:
        left = (expected.stats.counts.unsqueeze(-1) - expected.gamma) * active.unsqueeze(-1)
        noise = precision_factor(expected.ties.beta_pool.per_group(left, expected.ties.beta_free))
    ties = expected.ties
    alpha = precision_factor(ties.alpha_pool.per_group(expected.well_determined.gamma, ties.alpha_free))
    return noise + alpha + mixing_factor(expected.mixture.active, expected.mixture.log_mixing, expected.data.num_data)


def precision_factor(amount: Tensor) -> Tensor:
    """Sum of the logs of posterior width over prior range of log precisions, nats, shape ``(R,)``.

    :param amount: of data or parameters that tell each, shape ``(R, groups)``; 0 where they say nothing.
    """
    width = 0.5 * (4.0 * math.pi / amount.clamp(min=SMALLEST)).log()  # keeps the logarithm finite
    return (width - LOG_RANGE).clamp(max=0.0).sum(-1)


def mixing_factor(active: Tensor, log_mixing: Tensor, num_data: Tensor) -> Tensor:
    """Log of the posterior width of the mixing under a uniform prior, and ``log K!`` for the labels, ``(R,)``.

    :param active: components that are not pruned, ``(R, K)`` bool.
    """
    num = active.sum(-1).to(log_mixing)
    spread = 0.5 * torch.where(active, log_mixing, 0.0).sum(-1)
    widths = 0.5 * (num - 1.0) * torch.log(2.0 * math.pi / num_data)
    return torch.lgamma(num) + widths + spread + torch.lgamma(num + 1.0)


def laplace_state(
    structure: MixtureStructure, units: Units, data: MixtureData, inside: Mixture
) -> tuple[LaplaceState, Mixture]:
    """Laplace's approximation at a mode, full Hessian in closed form, and the mixture, both in the model's units.

    :param data: in the standard units that ``units`` describes, as is ``inside``, one row.
    :return: the mixture has pruned components in their place.
    :raises NotPositiveDefinite: when the weights are not at a mode.
    """
    whole = padded(inside, units.standard(structure.start))
    mixture = structure.consistent(units.original(whole))
    joint = held_at(structure.joint, structure.params(mixture))
    u, place = structure.flat(mixture.w[0]), structure.index.flatten().argsort()
    small = mixture_evidence.full(data, inside, e_step(data, inside))[0, 0]
    unit = units.unit.unsqueeze(-1).expand(inside.w.shape[1:]).flatten()  # of each weight inside
    A, num = mixture.alpha.flatten().diag(), len(small)
    A[:num, :num] += small / (unit * unit.unsqueeze(-1))
    A = A[place][:, place]  # in the order of the flat latents
    precision = Dense(cholesky(A, "posterior precision A", joint.latents.label).unsqueeze(0))
    value, slope = (x[0] for x in mixture_evidence.log_joint_gradient(data, inside))
    priors = [mixture_evidence.log_prior(x)[0] for x in (mixture, inside)]
    log_joint = value - data.log_jacobian(units.unit) + priors[0] - priors[1]
    slopes = torch.zeros_like(mixture.w[0])
    slopes[: len(slope)] = slope / units.unit.unsqueeze(-1)
    gradient = structure.flat(slopes)
    evidence = laplace(log_joint, precision.log_det[0], len(u))
    density = Structure(None, None, None, AutogradDensity(joint, None))
    problem = Problem(joint, density, exact_hessian, torch.ones_like(u, dtype=torch.bool))
    decrement = float(gradient @ precision.solve(gradient.unsqueeze(0))[0])
    parts = (log_joint, precision, decrement, evidence, torch.zeros_like(evidence))
    return LaplaceState(problem, joint.initial_theta, u, *parts), mixture
