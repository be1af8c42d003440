r"""Laplace's approximation under a Gaussian prior with dense covariance, without ever inverting that covariance.

A predictor :math:`\eta`, ``N`` data of ``C`` coupled elements, ``n = N C`` in all, has the prior :math:`N(\mu, K)` and
a likelihood that factorises over the data, so that :math:`W = -\nabla\nabla \log p(D|\eta)` is block-diagonal.  All
work is done on :math:`B = I + W^{1/2} K W^{1/2}`, whose eigenvalues are at least 1 however close to singular ``K`` is.
At the end the posterior precision of the latents, by what the data take off the prior covariance.

Rasmussen and Williams (2006), sec. 3.4 and 5.5.1: algorithms 3.1 and 5.1, here for any such likelihood.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from pyro_evidence.numerics import derivatives
from pyro_evidence.numerics.linalg import expect_square
from pyro_evidence.numerics.line_search import Watch, first_accepted, no_callback
from pyro_evidence.numerics.linear_predictor import Layout, LogLikelihood, curvature_graph, slope_and_curvature
from pyro_evidence.numerics.newton import RESTING, SLACK, Limits
from pyro_evidence.precision.dense import Precision

Sloped = Callable[[Tensor], tuple[Tensor, Tensor, Callable[[], Tensor]]]  # as of slope_and_curvature
LEAST_SHARE = 1e-3  # W times a posterior variance, below which one minus it has lost three digits


@dataclass(frozen=True, eq=False)
class LatentPredictor:
    """A predictor with a Gaussian prior, and the log likelihood that sees it."""

    mean: Tensor  # (N, C)
    covariance: Tensor  # (n, n)
    log_likelihood: LogLikelihood  # blocks (R, N, C) -> (R,)
    root: Callable[[], Tensor]  # (n, r) with covariance = root root'; asked for only where W has a negative eigenvalue
    formula: Sloped | None = None  # value, slope and curvature of the log likelihood at blocks; None: by autograd

    @property
    def layout(self) -> Layout:
        """Data, and the elements of one datum."""
        return Layout(self.mean.shape, (1,))

    def slope(self, eta: Tensor) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        """Log likelihood, nats ``()``, its gradient ``(n,)`` at ``eta`` ``(N, C)``, and what gives its curvature."""
        if self.formula is None:
            value, slope, curvature = slope_and_curvature(self.log_likelihood, self.layout, eta.unsqueeze(0))
        else:
            value, slope, curvature = self.formula(eta.unsqueeze(0))
        return value[0].double(), slope.reshape(-1).double(), curvature


class Factor:
    """``I + K W``, factorised; ``R = (K + W^-1)^-1`` is what it leaves of ``W``."""

    curvature: Tensor  # (N, C, C) W
    tril: Tensor  # a lower Cholesky factor with the determinant of I + K W
    matrix: Callable[[], Tensor]  # R, shape (n, n), made anew at each call
    apply: Callable[[Tensor], Tensor]  # R v, shape (n, k)

    @property
    def log_det(self) -> Tensor:
        """``log |I + K W|``, shape ``()``."""
        return 2.0 * self.tril.diagonal().log().sum()

    def explained(self, cross: Tensor) -> Tensor:
        """``cross' R cross``, shape ``(m, m)``, for covariances ``(n, m)`` of the predictor with something else."""
        return cross.mT @ self.apply(cross)

    def explained_diagonal(self, cross: Tensor) -> Tensor:
        """Diagonal of :meth:`explained`, shape ``(m,)``."""
        return (cross * self.apply(cross)).sum(0)

    def variance(self, K: Tensor) -> Tensor:
        """The predictor's own posterior variances, the diagonal of ``K - K R K``, shape ``(n,)``."""
        return K.diagonal() - self.explained_diagonal(K)

    def covariance(self, K: Tensor, v: Tensor) -> Tensor:
        """The predictor's own posterior covariance times vectors, ``(K - K R K) v``, shape ``(n, k)``."""
        return K @ (v - self.apply(K @ v))


@dataclass(frozen=True, eq=False)
class RootFactor(Factor):
    """By ``B = I + S K S``, ``W = S S``: for ``W`` without negative eigenvalues."""

    S: Tensor  # (N, C, C) symmetric
    tril: Tensor  # (n, n) lower Cholesky factor of B

    @property
    def curvature(self) -> Tensor:  # type: ignore[override]
        """``S S``."""
        return self.S @ self.S

    @cached_property
    def _inverse(self) -> Tensor:
        """``B^-1``."""
        return torch.cholesky_inverse(self.tril)

    def matrix(self) -> Tensor:
        """``S B^-1 S``."""
        return sandwiched(self.S, self._inverse)

    def apply(self, v: Tensor) -> Tensor:
        """``S B^-1 S v``."""
        # One solver of both triangles would copy the factor.
        return scaled(self.S, torch.linalg.solve_triangular(self.tril.mT, self._half(v), upper=True))

    def _half(self, cross: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.tril, scaled(self.S, cross), upper=False)

    def explained(self, cross: Tensor) -> Tensor:
        """By a triangular half, so that it is positive semi-definite to rounding."""
        half = self._half(cross)
        return half.mT @ half

    def explained_diagonal(self, cross: Tensor) -> Tensor:
        """Squared columns of that half."""
        return self._half(cross).square().sum(0)

    @cached_property
    def _lost(self) -> Tensor:
        """Which data have next to no share, ``1 - diag B^-1 = W variance``, ``(n,)``."""
        return ~(1.0 - self._inverse.diagonal() > LEAST_SHARE)

    def variance(self, K: Tensor) -> Tensor:
        """From ``B^-1``, whose diagonal is ``1 - W variance``; by columns where a datum's share is lost in that."""
        if self.S.shape[-1] > 1:
            return super().variance(K)
        found, lost = (1.0 - self._inverse.diagonal()) / self.S[:, 0, 0].square(), self._lost.nonzero().flatten()
        if len(lost):
            found[lost] = K.diagonal()[lost] - self.explained_diagonal(K[:, lost])
        return found

    def covariance(self, K: Tensor, v: Tensor) -> Tensor:
        """By ``1 - B^-1 = S covariance S``, which little noise leaves exact, where no datum's share is lost in that."""
        if self.S.shape[-1] > 1 or bool(self._lost.any()):
            return super().covariance(K, v)
        half = v / self.S[:, 0]
        return (half - self._inverse @ half) / self.S[:, 0]


@dataclass(frozen=True, eq=False)
class WhitenedFactor(Factor):
    """By ``I + L' W L``, ``K = L L'``: for any ``W`` that leaves the posterior precision positive definite."""

    curvature: Tensor  # (N, C, C) W
    L: Tensor  # (n, r)
    tril: Tensor  # (r, r)

    @cached_property
    def _half(self) -> Tensor:
        """``H`` with ``W Sigma W = H' H``."""
        return torch.linalg.solve_triangular(self.tril, scaled(self.curvature, self.L).mT, upper=False)

    def matrix(self) -> Tensor:
        """``W - W Sigma W``."""
        return scaled(self.curvature, torch.eye(len(self.L)).to(self.L)) - self._half.mT @ self._half

    def apply(self, v: Tensor) -> Tensor:
        """``W v - W Sigma W v``."""
        return scaled(self.curvature, v) - self._half.mT @ (self._half @ v)


def scaled(blocks: Tensor, v: Tensor) -> Tensor:
    """Block-diagonal ``(N, C, C)`` times ``v`` ``(n, k)``."""
    if blocks.shape[-1] == 1:
        return blocks[:, 0] * v
    return (blocks @ v.reshape(len(blocks), blocks.shape[-1], -1)).reshape(v.shape)


def sandwiched(blocks: Tensor, K: Tensor) -> Tensor:
    """Symmetric blocks on both sides of ``K`` ``(n, n)``, which has no graph."""
    if blocks.shape[-1] == 1:
        return (blocks[:, 0] * K).mul_(blocks[:, 0].mT)
    return scaled(blocks, scaled(blocks, K).mT)


def diagonal_blocks(K: Tensor, num_coupled: int) -> Tensor:
    """The blocks ``(N, C, C)`` on the diagonal of ``K`` ``(n, n)``."""
    return K.unflatten(0, (-1, num_coupled)).unflatten(2, (-1, num_coupled)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def root_of(W: Tensor) -> tuple[Tensor, bool]:
    """Symmetric square root of the positive part of ``W`` ``(N, C, C)``, and whether that is all of it."""
    if W.shape[-1] == 1:
        return W.clamp(min=0.0).sqrt(), bool((W >= 0).all())  # >= 0 is the positive part
    values, vectors = torch.linalg.eigh(W)
    rounding = 1e-14 * values.abs().amax(-1, keepdim=True)
    positive = torch.where(values > rounding, values, 0.0).sqrt()  # a root would blow rounding up
    return (vectors * positive.unsqueeze(-2)) @ vectors.mT, bool((values >= -rounding).all())


def factorise_predictor(latent: LatentPredictor, W: Tensor) -> tuple[Factor, bool]:
    """The factor, and whether it is of ``W``: where the posterior precision is indefinite, of its positive part."""
    expect_square(latent.covariance)
    S, complete = root_of(W)
    if not complete:
        L = latent.root()
        A = L.mT @ scaled(W, L)
        A.diagonal().add_(1.0)
        tril, info = torch.linalg.cholesky_ex(A)
        if not int(info):
            return WhitenedFactor(W, L, tril), True
    B = sandwiched(S, latent.covariance)
    B.diagonal().add_(1.0)
    tril, info = torch.linalg.cholesky_ex(B)
    finite = not int(info) and bool(tril.diagonal().isfinite().all())
    return RootFactor(S, tril), complete and finite


@dataclass(frozen=True, eq=False)
class PredictorMode:
    """Where Newton's method stopped, and what was known there."""

    eta: Tensor  # (N, C)
    dual: Tensor  # (n,) K^-1 (eta - mean): the gradient of the log likelihood at the mode
    log_likelihood: Tensor  # ()
    slope: Tensor  # (n,) gradient of the log likelihood, which is the dual but for rounding
    factor: Factor
    decrement: float  # squared gradient norm in units of the posterior precision, nats
    converged: bool
    definite: bool  # whether the posterior precision is positive definite

    def log_evidence(self, latent: LatentPredictor) -> Tensor:
        """Laplace's log evidence, nats, shape ``()``.  Rasmussen and Williams (2006), eq. 3.32."""
        return self.log_likelihood - 0.5 * (quadratic(self, latent) + self.factor.log_det)


def quadratic(mode: PredictorMode, latent: LatentPredictor) -> Tensor:
    """``(eta - mean)' K^-1 (eta - mean)``, shape ``()``."""
    return (mode.eta - latent.mean).reshape(-1) @ mode.dual


@dataclass(frozen=True, eq=False)
class _Point:
    dual: Tensor  # (n,)
    away: Tensor  # (n,) K dual
    value: float  # log likelihood minus half the quadratic
    log_likelihood: Tensor
    slope: Tensor  # (n,) of the log likelihood
    curvature: Callable[[], Tensor]  # W there, blocks (N, C, C), from the graph of the slope


def _point(latent: LatentPredictor, dual: Tensor, away: Tensor) -> _Point:
    eta = latent.mean + away.reshape(latent.mean.shape)
    log_likelihood, slope, curvature = latent.slope(eta)
    return _Point(dual, away, float(log_likelihood - 0.5 * dual @ away), log_likelihood, slope, curvature)


def predictor_mode(
    latent: LatentPredictor, start: Tensor, tolerance: float, watch: Watch = no_callback
) -> PredictorMode:
    """Newton on ``B``, with backtracking.  Rasmussen and Williams (2006), algorithm 3.1, in steps of ``a``.

    :param start: an ``eta`` ``(N, C)`` near the mode; any will do, the prior mean is tried as well.
    :param tolerance: twice the rise, nats, that counts as none.
    """
    limits, point, before = Limits(tolerance, 100), _start(latent, start), float("inf")
    W: Tensor | None = None
    for _ in range(limits.num_steps):
        new_W = point.curvature()[0].double()
        if W is None or not torch.equal(new_W, W):  # else the same everywhere, as of Gaussian noise
            W = new_W
            factor, definite = factorise_predictor(latent, W)
        rise = point.slope - point.dual
        step = rise - factor.apply((latent.covariance @ rise).unsqueeze(-1)).squeeze(-1)  # (I + W K)^-1 rise
        away = latent.covariance @ step
        decrement = float(rise @ away)
        small = limits.is_small(decrement, before)
        moved = None if small else _moved(latent, point, (step, away), decrement, tolerance)
        if moved is None:
            resting = limits.is_resting(abs(decrement), point.value)
            break
        point, before, resting = moved, decrement, False
        watch(torch.tensor([point.value]))
    eta = latent.mean + point.away.reshape(latent.mean.shape)
    done = definite and (small or resting)
    return PredictorMode(eta, point.dual, point.log_likelihood, point.slope, factor, decrement, done, definite)


def _start(latent: LatentPredictor, start: Tensor) -> _Point:
    """The better of the prior mean and of what the slope at ``start`` says."""
    if not torch.equal(start, latent.mean):
        _, dual, _ = latent.slope(start)
        if bool(dual.isfinite().all()):
            warm = _point(latent, dual, latent.covariance @ dual)
            with torch.no_grad():
                at_mean = float(latent.log_likelihood(latent.mean.unsqueeze(0))[0])
            if warm.value > at_mean:
                return warm
    zero = torch.zeros_like(latent.mean).reshape(-1)
    return _point(latent, zero, zero)


def _moved(
    latent: LatentPredictor, point: _Point, step: tuple[Tensor, Tensor], decrement: float, tolerance: float
) -> _Point | None:
    """The first halved step that rises (Armijo), or a whole one that rounding hides; None where none does."""

    def trial(scale: float) -> tuple[float, _Point]:
        new = _point(latent, point.dual + scale * step[0], point.away + scale * step[1])
        return new.value, new

    slack = SLACK / RESTING * tolerance * (1.0 + abs(point.value))  # rounding of the sum over data
    return first_accepted(trial, point.value, decrement, slack)


@dataclass(frozen=True, eq=False)
class Cotangents:
    """The derivative of the log evidence, the mode's dependence included: ``<covariance, dK> + mean' dmu + ...``."""

    covariance: Tensor  # (n, n) symmetric
    mean: Tensor  # (n,)
    blocks: Tensor  # (N, C, C) posterior covariance of each datum's elements
    moved: Tensor  # (n,) Sigma s: what a change of the log likelihood's slope is worth

    def likelihood(self, here: "Likelihood") -> Tensor:
        """A number whose derivative in what the log likelihood holds is that of the log evidence, ``()``."""
        return here.value - 0.5 * (self.blocks * here.curvature).sum() + self.moved @ here.slope


@dataclass(frozen=True, eq=False)
class Likelihood:
    """The log likelihood at a predictor and two derivatives, in one graph of the predictor and of what it holds."""

    eta: Tensor  # (1, N, C)
    value: Tensor  # ()
    slope: Tensor  # (n,)
    curvature: Tensor  # (N, C, C)


def likelihood_at(latent: LatentPredictor, eta: Tensor) -> Likelihood:
    """At ``eta`` ``(N, C)``."""
    leaf = eta.detach().unsqueeze(0).requires_grad_()
    with torch.enable_grad():
        value, slope, W = curvature_graph(latent.log_likelihood, latent.layout, leaf)
    return Likelihood(leaf, value.sum(), slope.reshape(-1).double(), W[0].double())


def cotangents(K: Tensor, mode: PredictorMode, here: Likelihood) -> Cotangents:
    r"""The exact gradient.  Rasmussen and Williams (2006), algorithm 5.1, eqs. 5.22 to 5.24, for blocks as well.

    With :math:`s = \tfrac12 \mathrm{tr}(\Sigma\, \partial W / \partial\eta)` taken negative, the mode's dependence adds
    :math:`v a^\top`, :math:`v = (I + W K)^{-1} s`.  (Equation 5.23 as printed lacks a sign.)

    :param K: covariance of the predictor, without a graph.
    :param here: the likelihood at the mode.
    """
    num_coupled = here.eta.shape[-1]
    if num_coupled == 1:
        blocks = mode.factor.variance(K)[:, None, None]
    else:
        blocks = diagonal_blocks(K - mode.factor.explained(K), num_coupled)
    s = derivatives.pullback(-0.5 * (blocks * here.curvature).sum(), here.eta).reshape(-1, 1).double()
    v = (s - mode.factor.apply(K @ s)).squeeze(-1)
    half = 0.25 * mode.dual + 0.5 * v
    G = mode.factor.matrix().mul_(-0.5).addr_(mode.dual, half).addr_(half, mode.dual)
    return Cotangents(G, mode.dual + v, blocks, K @ v)


@dataclass(frozen=True, eq=False)
class Selection:
    """Each element of the predictor is one of the latents."""

    index: Tensor  # (n,)
    size: int  # D

    @cached_property
    def is_identity(self) -> bool:
        """Whether each predictor is the latent of its own place."""
        return torch.equal(self.index, torch.arange(self.size, device=self.index.device))

    def apply(self, M: Tensor) -> Tensor:
        """``J u``: rows of ``u`` ``(D, ...)``, one for each predictor."""
        return M if self.is_identity else M[self.index]

    def adjoint(self, v: Tensor) -> Tensor:
        """``J' v``: sums of ``v`` over the predictors that read the same element."""
        return v if self.is_identity else v.new_zeros(self.size, v.shape[-1]).index_add(0, self.index, v)


@dataclass(frozen=True, eq=False)
class DesignMap:
    """A predictor with any matrix ``J``."""

    J: Tensor  # (n, D)

    is_identity: ClassVar[bool] = False

    def apply(self, M: Tensor) -> Tensor:
        """``J u``."""
        return self.J @ M

    def adjoint(self, v: Tensor) -> Tensor:
        """``J' v``."""
        return self.J.mT @ v


ObservationMap = Selection | DesignMap  # the matrix J through which predictors see the latents


def seen_by(J: Tensor) -> ObservationMap:
    """The cheapest form of ``J`` ``(n, D)``."""
    index = J.abs().argmax(-1)
    chosen = J.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    if bool((chosen == 1.0).all()) and int(torch.count_nonzero(J)) == len(J):
        return Selection(index, J.shape[-1])
    return DesignMap(J)


@dataclass(frozen=True, eq=False)
class LatentPrecision(Precision):
    """The precision of latents ``u`` with prior covariance ``K`` behind the predictor ``eta = J u + c``; ``R = 1``."""

    covariance: Tensor  # (D, D) K
    tril: Tensor  # (D, D) its lower Cholesky factor
    seen: ObservationMap
    mode: PredictorMode

    @cached_property
    def cross(self) -> Tensor:
        """Prior covariance of the predictor with the latents, ``J K``, shape ``(n, D)``."""
        return self.seen.apply(self.covariance)

    @property
    def log_det(self) -> Tensor:
        """``log |A| = log |I + J K J' W| - log |K|``, shape ``(1,)``."""
        return (self.mode.factor.log_det - 2.0 * self.tril.diagonal().log().sum()).reshape(1)

    @cached_property
    def variance(self) -> Tensor:
        """Posterior variances, ``(1, D)``."""
        if self.seen.is_identity:
            return self.mode.factor.variance(self.covariance).unsqueeze(0)
        return (self.covariance.diagonal() - self.mode.factor.explained_diagonal(self.cross)).unsqueeze(0)

    @cached_property
    def log_det_gradient(self) -> Tensor:
        """Posterior covariance, ``(1, D, D)``.  Rasmussen and Williams (2006), eq. 3.27."""
        return (self.covariance - self.mode.factor.explained(self.cross)).unsqueeze(0)

    @property
    def dual(self) -> Tensor:
        """``K^-1 (mode - prior mean)``, shape ``(D,)``."""
        return self.seen.adjoint(self.mode.dual.unsqueeze(-1)).squeeze(-1)

    def solve(self, b: Tensor) -> Tensor:
        """``A^-1 b`` for each ``b``, shape ``(S, D)``."""
        if self.seen.is_identity:
            return self.mode.factor.covariance(self.covariance, b.mT).mT
        return (self.covariance @ b.mT - self.cross.mT @ self.mode.factor.apply(self.cross @ b.mT)).mT

    @cached_property
    def scale_tril(self) -> Tensor:
        """Lower Cholesky factor of the posterior covariance, which itself may be too close to singular to have one."""
        signed = torch.linalg.qr(self._root.mT, mode="r").R.mT
        return signed * signed.diagonal().sign()

    @cached_property
    def _inner(self) -> Tensor:
        """Lower Cholesky factor of ``I + L' J' W J L``, the precision of the whitened latents."""
        seen = self.seen.apply(self.tril)
        inner = seen.mT @ scaled(self.mode.factor.curvature, seen)
        inner.diagonal().add_(1.0)
        return torch.linalg.cholesky(inner)

    @cached_property
    def _root(self) -> Tensor:
        """``T`` with ``T T' = A^-1``, by whitening the prior."""
        return torch.linalg.solve_triangular(self._inner, self.tril.mT, upper=False).mT

    def unwhiten(self, white: Tensor) -> Tensor:
        """``T z`` for each ``z``."""
        return white @ self._root.mT

    def whiten(self, rows: Tensor) -> Tensor:
        """``T^-1 x`` for each ``x``."""
        return torch.linalg.solve_triangular(self.tril, rows.mT, upper=False).mT @ self._inner
