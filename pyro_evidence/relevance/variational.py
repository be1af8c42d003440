r"""Variational relevance vectors: ``q(w) q(alpha)`` and a lower bound that never falls.

Bishop and Tipping (2000), "Variational relevance vector machines".
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.fitting.iterate import Status
from pyro_evidence.numerics.linalg import cholesky, require_memory
from pyro_evidence.relevance.quadratic import bound_curvature, logistic_parts
from pyro_evidence.relevance.weights import LinearTarget
from pyro_evidence.structure.observed import Part

UNFELT = 1e-4  # curvature of the data beside a unit precision, below which weights would never leave their prior
SHAPE = RATE = 1e-6  # of the Gamma prior on every precision: Bishop and Tipping (2000), section 5


class LocalBound(Protocol):
    """A likelihood's quadratic lower bound for given moments of ``eta``."""

    def tightest(self, mean: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Curvature and slope at ``eta = 0``, ``(N,)``, of the tightest bound; ``second`` is ``E eta^2``."""

    def expected(self, mean: Tensor, second: Tensor) -> Tensor:
        """The tightest bound's expected value, nats, shape ``()``."""

    def renewed(self, mean: Tensor, second: Tensor) -> "LocalBound":
        """The bound under the noise that raises :meth:`expected` most, where noise is free."""


@dataclass(frozen=True)
class Logistic:
    """Jaakkola and Jordan's bound for labels in log odds; ``trials`` counts a datum's weight."""

    half: Tensor  # (N,) t - 1/2
    trials: Tensor  # (N,)
    constant: Tensor  # () what the log likelihood at eta = 0 has beyond -log 2 each

    def tightest(self, mean: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Bishop and Tipping (2000), eq. 24 to 26."""
        return 2.0 * self.trials * bound_curvature(second.sqrt()), self.half

    def expected(self, mean: Tensor, second: Tensor) -> Tensor:
        """At its best ``xi^2 = E eta^2`` the quadratic term vanishes."""
        xi = second.sqrt()
        return self.constant + self.half @ mean + self.trials @ (torch.nn.functional.logsigmoid(xi) - 0.5 * xi)

    def renewed(self, mean: Tensor, second: Tensor) -> LocalBound:
        """There is no noise."""
        return self


@dataclass(frozen=True)
class Quadratic:
    """A likelihood that is quadratic: Gaussian noise, held, or free where ``num_data`` says of how many data."""

    curvature: Tensor  # (N,)
    slope: Tensor  # (N,) at eta = 0
    constant: Tensor  # () log likelihood at eta = 0
    num_data: float = 0.0
    log_scale: float = 0.0  # log of the noise precision over the starting one

    def tightest(self, mean: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return self.curvature, self.slope

    def expected(self, mean: Tensor, second: Tensor) -> Tensor:
        """Expected log likelihood under the posterior, nats, shape ``()``."""
        return self.constant + self.slope @ mean - 0.5 * self.curvature @ second

    def renewed(self, mean: Tensor, second: Tensor) -> LocalBound:
        """The noise precision ``N`` over the expected squares, relative to now; the noise itself where it is held."""
        if not self.num_data:
            return self
        at_zero = self.slope.square() @ torch.where(self.curvature > 0, 1.0 / self.curvature, 0.0)
        ratio = self.num_data / float(self.curvature @ second - 2.0 * self.slope @ mean + at_zero)
        constant = self.constant + 0.5 * (self.num_data * math.log(ratio) - (ratio - 1.0) * at_zero)
        moved = (ratio * self.curvature, ratio * self.slope, constant)
        return Quadratic(*moved, self.num_data, self.log_scale + math.log(ratio))


def local_bound(target: LinearTarget) -> tuple[Part, LocalBound]:
    """What the observed site's likelihood allows.

    :raises UnsupportedModel: unless it is Gaussian, or Bernoulli in log odds, of one predictor element per
        datum.
    """
    part = target.parts[0]
    if len(target.parts) != 1 or part.c.shape[1] != 1:
        raise UnsupportedModel("VRVM needs one observed site with one predictor element per datum. RVM takes softmax.")
    zero = torch.zeros_like(part.c).unsqueeze(0)
    value, slope = part.slope(zero)
    there, beyond = (part.curvature(zero + x)[0, :, 0, 0] for x in (0.0, 3.0))
    if torch.allclose(there, beyond, rtol=1e-10):
        return part, Quadratic(there, slope[0, :, 0], value[0])
    logistic_parts(target, part.J.new_zeros(part.J.shape[-1]), "Use RVM, which takes any likelihood.")
    return part, Logistic(slope[0, :, 0], 4.0 * there, value[0] + 4.0 * there.sum() * math.log(2.0))


@dataclass(frozen=True)
class VariationalState:
    """One iterate.  Built only by :func:`start` and :func:`step`."""

    part: Part
    local: LocalBound
    mean: Tensor  # (M,) of q(w)
    tril: Tensor  # (M, M) Cholesky factor of q(w)'s precision
    rate: Tensor  # (M,) of q(alpha), whose shape is SHAPE + 1/2
    second: Tensor  # (N,) E eta^2
    objective: float  # lower bound on log p(t), nats
    gradient_norm: float  # its last rise, nats

    @property
    def alpha(self) -> Tensor:
        """Expected prior precisions, shape ``(M,)``."""
        return (SHAPE + 0.5) / self.rate

    @property
    def stop_reason(self) -> Status | None:
        """None: a further step can always be made."""
        return None


def start(target: LinearTarget, num_data: float = 0.0) -> VariationalState:
    """The iterate from unit precisions, or where the prior weighs as a datum does, if units are far from that.

    :param num_data: data of Gaussian noise that is free; 0 holds it.
    """
    part, local = local_bound(target)
    (N, _, M), device = part.J.shape, part.J.device
    require_memory(16 * (N + 2 * M) * M, "q(w)'s precision and its factor", device, "Take fewer basis functions.")
    if num_data and isinstance(local, Quadratic):
        local = replace(local, num_data=num_data)
    second = torch.ones_like(part.c[:, 0])
    felt = local.tightest(part.c[:, 0], second)[0] @ part.J[:, 0].square()
    alpha = torch.where((felt > 0) & (felt < UNFELT), felt / N, 1.0)
    return _state((part, local), (SHAPE + 0.5) / alpha, second, -math.inf)


def step(state: VariationalState) -> VariationalState:
    """Update ``q(w)``, then the bound's parameters and ``q(alpha)``."""
    return _state((state.part, state.local), state.rate, state.second, state.objective)


def _state(model: tuple[Part, LocalBound], rate: Tensor, second: Tensor, before: float) -> VariationalState:
    part, local = model
    J, c = part.J[:, 0], part.c[:, 0]
    B, b = local.tightest(c, second)
    A = J.mT @ (B.unsqueeze(-1) * J) + ((SHAPE + 0.5) / rate).diag()
    tril = cholesky(A, "the precision of q(w)")
    white = torch.linalg.solve_triangular(tril, torch.cat([J.mT, torch.eye(len(rate)).to(J)], 1), upper=False)
    mean = torch.cholesky_solve((J.mT @ (b - B * c)).unsqueeze(-1), tril).squeeze(-1)
    variance, marginal = white[:, len(c) :].square().sum(0), white[:, : len(c)].square().sum(0)
    rate = RATE + 0.5 * (mean.square() + variance)
    eta = J @ mean + c
    second = eta.square() + marginal
    local = local.renewed(eta, second)
    bound = float(local.expected(eta, second) + _weights_bound(tril, rate))
    return VariationalState(part, local, mean, tril, rate, second, bound, bound - before)


def _weights_bound(tril: Tensor, rate: Tensor) -> Tensor:
    r"""``E log p(w | alpha) - E log q(w) - KL(q(alpha) || p(alpha))`` at the optimal ``q(alpha)``, nats."""
    shape = torch.tensor(SHAPE + 0.5, dtype=rate.dtype)
    prior = torch.tensor(SHAPE, dtype=rate.dtype)
    log_alpha = torch.digamma(shape) - rate.log()
    second = 2.0 * (rate - RATE)
    likelihood = 0.5 * (log_alpha - shape / rate * second + 1.0)
    divergence = (
        (shape - prior) * torch.digamma(shape)
        - torch.lgamma(shape)
        + torch.lgamma(prior)
        + prior * (rate.log() - math.log(RATE))
        + shape * (RATE - rate) / rate
    )
    return (likelihood - divergence).sum() - tril.diagonal().log().sum()
