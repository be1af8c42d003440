r"""Variational relevance vectors: ``q(w) q(alpha)`` and a lower bound that never falls.

Bishop and Tipping (2000), "Variational relevance vector machines".
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Gamma, kl_divergence

from pyro_evidence.data.ranks import Statistics
from pyro_evidence.data.rows import Rows
from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.fitting.iterate import Status
from pyro_evidence.numerics.linalg import cholesky, require_memory
from pyro_evidence.numerics.linear_predictor import Part
from pyro_evidence.relevance.noise import vanishes
from pyro_evidence.relevance.quadratic import bound_curvature, logistic_terms
from pyro_evidence.relevance.targets import AWAY, LinearTarget
from pyro_evidence.relevance.weights import Weights

WEAK = 1e-4  # curvature of the data beside a unit precision, below which weights would never leave their prior
SHAPE = RATE = 1e-6  # of the Gamma prior on every precision: Bishop and Tipping (2000), section 5


@dataclass(frozen=True, eq=False)
class LogisticBound:
    """Jaakkola and Jordan's bound for labels in log odds; ``trials`` counts a datum's weight."""

    half: Tensor  # (N,) t - 1/2
    trials: Tensor  # (N,)
    constant: Tensor  # () what the log likelihood at eta = 0 has beyond -log 2 each

    def tightest(self, second: Tensor) -> tuple[Tensor, Tensor]:
        """Curvature and slope at ``eta = 0``, ``(N,)``, for ``second = E eta^2``.  Bishop and Tipping, eq. 24 to 26."""
        return 2.0 * self.trials * bound_curvature(second.sqrt()), self.half

    def expected(self, mean: Tensor, second: Tensor) -> Tensor:
        """Expected value, nats, ``()``: at its best ``xi^2 = E eta^2`` the quadratic term vanishes."""
        xi = second.sqrt()
        return self.constant + self.half @ mean + self.trials @ (torch.nn.functional.logsigmoid(xi) - 0.5 * xi)


@dataclass(frozen=True, eq=False)
class GaussianBound:
    """A likelihood that is quadratic: Gaussian noise."""

    curvature: Tensor  # (N,)
    slope: Tensor  # (N,) at eta = 0
    constant: Tensor  # () log likelihood at eta = 0

    def tightest(self, second: Tensor) -> tuple[Tensor, Tensor]:
        return self.curvature, self.slope

    def expected(self, mean: Tensor, second: Tensor) -> Tensor:
        return self.constant + self.slope @ mean - 0.5 * self.curvature @ second

    def squares(self, mean: Tensor, second: Tensor) -> Tensor:
        """Expected squared residuals in units of the noise, shape ``()``."""
        residual = mean - self.slope * torch.where(self.curvature > 0, 1.0 / self.curvature, 0.0)
        return self.curvature @ (residual.square() + (second - mean.square()))  # not three sums, whose digits cancel


LocalBound = LogisticBound | GaussianBound  # quadratic and below the likelihood, for given moments of eta
Piece = tuple[Part, LocalBound]  # some rows and what their likelihood allows


def local_bound(target: LinearTarget) -> Piece:
    """Local bound that the observed site's likelihood allows.

    :raises UnsupportedModel: unless it is Gaussian, or Bernoulli in log odds, of one predictor element per
        datum.
    """
    part = target.parts[0]
    if len(target.parts) != 1 or part.c.shape[1] != 1:
        raise UnsupportedModel("VRVM needs one observed site with one predictor element per datum. RVM takes softmax.")
    zero = torch.zeros_like(part.c).unsqueeze(0)
    value, slope = part.slope(zero)
    there, beyond = (part.curvature(zero + x)[0, :, 0, 0] for x in (0.0, AWAY))
    if torch.allclose(there, beyond, rtol=1e-10):
        return part, GaussianBound(there, slope[0, :, 0], value[0])
    half, trials = logistic_terms(target.parts, "Use RVM, which takes any likelihood.")
    return part, LogisticBound(half, trials, value[0] + trials.sum() * math.log(2.0))


@dataclass(frozen=True, eq=False)
class BoundSums(Statistics):
    """Sums over rows under some ``q(w)``, by the bound that is tightest there."""

    precision: Tensor  # (M, M) J'BJ
    slope: Tensor  # (M,) J'(b - B c), at weights of zero
    expected: Tensor  # () expected log likelihood, nats
    squares: Tensor  # () expected squared residuals in units of the starting noise

    @staticmethod
    def of(piece: Piece, eta: Tensor, second: Tensor) -> "BoundSums":
        """Sums over rows whose ``eta`` and ``eta^2`` are expected to be these, ``(N,)`` each."""
        part, local = piece
        J, (B, b) = part.J[:, 0], local.tightest(second)
        precision = J.mT @ (B.unsqueeze(-1) * J)
        zero = torch.zeros_like(local.constant)  # of labels, which have no noise
        squares = local.squares(eta, second) if isinstance(local, GaussianBound) else zero
        return BoundSums(precision, J.mT @ (b - B * part.c[:, 0]), local.expected(eta, second), squares)


@dataclass(frozen=True, eq=False)
class VariationalState:
    """One iterate.  Built only by :func:`start` and :func:`step`."""

    rows: Rows[Piece]
    num_data: float  # data of Gaussian noise that is free; 0 holds it
    mean: Tensor  # (M,) of q(w)
    tril: Tensor  # (M, M) Cholesky factor of q(w)'s precision
    rate: Tensor  # (M,) of q(alpha), whose shape is SHAPE + 1/2
    sums: BoundSums  # under q(w)
    log_scale: float  # log of the noise precision over the starting one
    objective: float  # lower bound on log p(t), nats
    gradient_norm: float  # its last rise, nats
    is_closed: ClassVar[bool] = False  # pieces in chunks are read by the user's model

    @property
    def alpha(self) -> Tensor:
        """Expected prior precisions, shape ``(M,)``."""
        return (SHAPE + 0.5) / self.rate

    @property
    def stop_reason(self) -> Status | None:
        """Unbounded when the noise vanishes; else a further step can always be made."""
        gone = self.num_data and vanishes(float(self.sums.squares), self.mean, self.sums.precision)
        return Status.UNBOUNDED if gone else None


def start(rows: Rows[Weights], num_data: float = 0.0) -> VariationalState:
    """The iterate from unit precisions, or where the prior weighs as a datum does, if units are far from that.

    :param num_data: data of Gaussian noise that is free; 0 holds it.
    :raises UnsupportedModel: as :func:`local_bound`.
    """
    bounds = rows.mapped(lambda weights: local_bound(weights.target))
    part, _ = bounds.example
    (N, _, M), device = part.J.shape, part.J.device
    require_memory(16 * (N + 2 * M) * M, "q(w)'s precision and its factor", device, "Take fewer basis functions.")
    sums = bounds.total(lambda piece: BoundSums.of(piece, piece[0].c[:, 0], torch.ones_like(piece[0].c[:, 0])))
    felt = sums.precision.diagonal()
    alpha = torch.where((felt > 0) & (felt < WEAK), felt / len(rows), 1.0)
    empty = VariationalState(bounds, num_data, felt, felt, (SHAPE + 0.5) / alpha, sums, 0.0, -math.inf, math.inf)
    return step(empty)


def step(state: VariationalState) -> VariationalState:
    """Update ``q(w)``, then the bound's parameters, ``q(alpha)`` and the noise, where that is free."""
    scale = math.exp(state.log_scale)
    tril = cholesky(scale * state.sums.precision + state.alpha.diag(), "the precision of q(w)")
    mean = torch.cholesky_solve(scale * state.sums.slope.unsqueeze(-1), tril).squeeze(-1)

    def of_piece(piece: Piece) -> BoundSums:
        J, c = piece[0].J[:, 0], piece[0].c[:, 0]
        eta = J @ mean + c
        white = torch.linalg.solve_triangular(tril, J.mT, upper=False)
        return BoundSums.of(piece, eta, eta.square() + white.square().sum(0))

    sums = state.rows.total(of_piece)
    variance = torch.cholesky_inverse(tril).diagonal()
    rate = RATE + 0.5 * (mean.square() + variance)
    log_scale, squares = state.log_scale, float(sums.squares)
    if state.num_data and squares > 0.0:  # else by rounding, and this is the last step
        log_scale = math.log(state.num_data / squares)
    noise = state.num_data * log_scale - math.expm1(log_scale) * squares
    bound = float(sums.expected + _weights_bound(tril, rate)) + 0.5 * noise
    rise = bound - state.objective
    return replace(
        state, mean=mean, tril=tril, rate=rate, sums=sums, log_scale=log_scale, objective=bound, gradient_norm=rise
    )


def _weights_bound(tril: Tensor, rate: Tensor) -> Tensor:
    r"""``E log p(w | alpha) - E log q(w) - KL(q(alpha) || p(alpha))`` at the optimal ``q(alpha)``, nats."""
    shape = rate.new_tensor(SHAPE + 0.5)
    log_alpha = torch.digamma(shape) - rate.log()
    second = 2.0 * (rate - RATE)
    likelihood = 0.5 * (log_alpha - shape / rate * second + 1.0)
    divergence = kl_divergence(Gamma(shape, rate), Gamma(rate.new_tensor(SHAPE), rate.new_tensor(RATE)))
    return (likelihood - divergence).sum() - tril.diagonal().log().sum()
