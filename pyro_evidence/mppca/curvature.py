r"""The exact curvature of a mixture of probabilistic PCA in its loadings, and Laplace's evidence over its orbits.

One row of parameters.  With :math:`P = C_k^{-1}`, :math:`E = P S_k P` and :math:`e = P(y - \mu_k)`, component k has the
slope :math:`g_{nk} = e\,(W^\top e)^\top - P W` per datum, and the Hessian of minus the log likelihood is that at held
responsibilities less the spread of the slopes over components.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.data.ranks import Statistics
from pyro_evidence.mppca import evidence, expectation
from pyro_evidence.mppca.data import Observations
from pyro_evidence.mppca.evidence import log_joint
from pyro_evidence.mppca.expectation import FactorAnalysers
from pyro_evidence.numerics import lbfgs, newton
from pyro_evidence.numerics.linalg import cholesky, fix_signs

NEWTON_SIZE = 1200  # loadings up to which Newton's method finishes what L-BFGS began
MOST_STEPS, MOST_NEWTON_STEPS = 100, 10  # a bound each, no target
SLOPE = 1e-4  # nats per standard deviation of a loading, at which L-BFGS stops
TOLERANCE = 1e-9  # nats that a Newton step may still promise


def find_mode(Y: Observations, analysers: FactorAnalysers) -> FactorAnalysers:
    """One row at a mode: quasi-Newton from where it stands, then Newton with the exact curvature across the orbit."""
    shape = analysers.W.shape
    information = analysers.beta * analysers.log_mixing.exp().unsqueeze(-1) * len(Y)
    scale = information.clamp(min=1e-8).rsqrt().unsqueeze(-1)  # pruned: any
    units = scale.expand(shape).reshape(1, -1)

    def placed(u: Tensor) -> FactorAnalysers:
        return replace(analysers, W=u.reshape(shape) * scale)

    def f(u: Tensor) -> tuple[Tensor, Tensor]:
        there = placed(u)
        stats = expectation.e_step_of_all(Y, there)
        return log_joint(there, stats), (loading_slope(there, stats) * scale).flatten(1)

    def direction(u: Tensor, rows: Tensor, slope: Tensor) -> newton.Direction:
        there, nothing = placed(u), torch.zeros_like(slope)
        try:
            tril = gauge(loading_precision(Y, there), there).tril
        except ArithmeticError:  # a saddle, or a column about to vanish: the caller looks at the curvature again
            return newton.Direction(u[:, :0], nothing, slope.new_full((1,), torch.inf), rows < 0, nothing)
        step = torch.cholesky_solve((slope / units).mT, tril).mT / units
        return newton.Direction(u[:, :0], step, (slope * step).sum(-1), rows >= 0, nothing)

    u = lbfgs.ascend(f, (analysers.W / scale).flatten(1), tolerance=SLOPE, num_steps=MOST_STEPS)
    if analysers.W.numel() <= min(NEWTON_SIZE, full_size(Y)):
        u = newton.search(lambda v, _: f(v), direction, u, newton.Limits(TOLERANCE, MOST_NEWTON_STEPS)).u
    return placed(u)


def shares_precision(analysers: FactorAnalysers) -> Tensor:
    """Components all of whose columns have one precision, which any rotation leaves alone, shape ``(R, K)`` bool."""
    return ((analysers.alpha == analysers.alpha[..., :1]) & analysers.columns).all(-1)


def canonical(analysers: FactorAnalysers) -> FactorAnalysers:
    """Components with orthogonal columns, longest first, where all columns share a precision; the density stays.

    Components whose columns the prior tells apart stay as they are.
    """
    _, turn = torch.linalg.eigh(analysers.W.mT @ analysers.W)
    turned = fix_signs(analysers.W @ turn).flip(-1)
    return replace(analysers, W=torch.where(shares_precision(analysers)[..., None, None], turned, analysers.W))


ROWS = 1024  # data whose slopes are held at once
FULL_SIZE, FULL_SIZE_GAPS = 4000, 600  # loadings up to which the exact curvature is formed; with gaps in the data
DIRECTIONS = 32  # in which the slope of data with gaps is differentiated at once


def loading_slope(analysers: FactorAnalysers, stats: expectation.FactorStatistics) -> Tensor:
    """Derivative of ``log p(D, W)`` in W, shape ``(R, K, m, q)``; zero in pruned columns."""
    found = expectation.about_held_means(expectation.latent_moments(analysers, stats), analysers)
    pull = analysers.beta.unsqueeze(-1) * (found.yx - analysers.W @ found.xx)
    return (pull - analysers.alpha.unsqueeze(-2) * analysers.W) * analysers.on.unsqueeze(-2)


def loading_precision(Y: Observations, analysers: FactorAnalysers) -> Tensor:
    """Minus the Hessian of ``log p(D, W)`` in W, flat in the order of ``W``, shape ``(K m q, K m q)``.

    Rows and columns of pruned components and columns hold the prior's precision alone.
    """
    if Y.has_gaps:
        return _masked(Y.rows.total(lambda rows: _of_gaps(rows, analysers)), analysers)
    B = analysers.whitener[0]
    P = analysers.beta[0].diag_embed() - B.mT @ B  # C_k^-1, (K, m, m)
    found = Y.rows.total(lambda rows: _spread(rows, analysers, P))
    held = [_held(*each) for each in zip(analysers.W[0], P, found.scatter, found.counts, strict=True)]
    return _masked(found.labels + torch.block_diag(*(a - b for a, b in zip(held, found.own, strict=True))), analysers)


@dataclass(frozen=True, eq=False)
class _Spread(Statistics):
    """Sums of a pass for the curvature; ``a + b`` is that of both parts."""

    own: Tensor  # (K, m q, m q)  squares of the slopes of each component
    labels: Tensor  # (K m q, K m q)  those of their means over components
    scatter: Tensor  # (K, m, m)
    counts: Tensor  # (K,)


def _spread(Y: Tensor, analysers: FactorAnalysers, P: Tensor) -> _Spread:
    K, m, q = analysers.W.shape[1:]
    own, labels = analysers.W.new_zeros(K, m * q, m * q), analysers.W.new_zeros(K * m * q, K * m * q)
    scatter, counts = analysers.W.new_zeros(K, m, m), analysers.W.new_zeros(K)
    for block in Y.split(ROWS):
        resp = expectation.responsibilities(block, analysers)[0]
        e = torch.einsum("kij,nkj->nki", P, block.unsqueeze(1) - analysers.mu[0])
        x = torch.einsum("kij,nki->nkj", analysers.W[0], e)
        g = (e.unsqueeze(-1) * x.unsqueeze(-2) - P @ analysers.W[0]).flatten(-2)  # (n, K, m q)
        weighted = resp.unsqueeze(-1) * g
        flat = weighted.flatten(1)
        own += weighted.permute(1, 2, 0) @ g.movedim(1, 0)
        labels += flat.mT @ flat
        scatter = scatter + torch.einsum("nk,nki,nkj->kij", resp, e, e)
        counts = counts + resp.sum(0)
    return _Spread(own, labels, scatter, counts)


def full_size(Y: Observations) -> int:
    """Number of loadings up to which :func:`loading_precision` is worth its cost."""
    return FULL_SIZE_GAPS if Y.has_gaps else FULL_SIZE


def _of_gaps(Y: Tensor, analysers: FactorAnalysers) -> Tensor:
    """Minus the Hessian of the log likelihood of data with gaps, by differentiation twice, block by block."""
    eye = torch.eye(analysers.W.numel(), dtype=analysers.W.dtype, device=analysers.W.device)
    found = torch.zeros_like(eye)
    for block in Y.split(ROWS // DIRECTIONS):
        with torch.enable_grad():
            w = analysers.W.detach().reshape(-1).requires_grad_()
            log_joint = expectation.latent_given_seen(
                block, replace(analysers, W=w.reshape(analysers.W.shape))
            ).log_joint
            (slope,) = torch.autograd.grad(log_joint.logsumexp(-1).sum(), w, create_graph=True)
        for i in range(0, len(eye), DIRECTIONS):
            part = torch.autograd.grad(slope, w, eye[i : i + DIRECTIONS], retain_graph=True, is_grads_batched=True)[0]
            found[i : i + DIRECTIONS] -= part
    return found


def _masked(A: Tensor, analysers: FactorAnalysers) -> Tensor:
    on = analysers.on.unsqueeze(-2).expand(analysers.W.shape).reshape(-1)
    A = torch.where(on.unsqueeze(-1) & on, A, 0.0)
    prior = analysers.alpha.unsqueeze(-2).expand(analysers.W.shape).reshape(-1)
    A.diagonal().add_(prior)
    return 0.5 * (A + A.mT)


def _held(W: Tensor, P: Tensor, E: Tensor, count: Tensor) -> Tensor:
    """Minus the Hessian of one component's log likelihood at held responsibilities, ``(m q, m q)``.

    :param E: ``N_k P S P``.
    """
    m, q = W.shape
    P = count * P
    PW, EW = P @ W / count, E @ W
    inner, outer = W.mT @ PW, W.mT @ EW
    eye = torch.eye(q, dtype=W.dtype, device=W.device)
    same = torch.einsum("ab,ij->aibj", P - E, eye)
    same = same + torch.einsum("ab,ij->aibj", P / count, outer - count * inner) + torch.einsum("ab,ij->aibj", E, inner)
    crossed = torch.einsum("aj,bi->aibj", EW - count * PW, PW) + torch.einsum("aj,bi->aibj", PW, EW)
    return (same + crossed).reshape(m * q, m * q)


def turns(analysers: FactorAnalysers) -> Tensor:
    """Directions in which turning the latent space moves W, by unit angle, shape ``(K m q, P)``.

    One for each pair of columns that are not pruned, component by component.
    """
    K, m, q = analysers.W.shape[1:]
    k, a, b = evidence.pairs_of(analysers.on[0]).nonzero().unbind(-1)
    found, place = analysers.W.new_zeros(K, m, q, len(k)), torch.arange(len(k), device=k.device)
    found[k, :, a, place] = analysers.W[0, k, :, b]
    found[k, :, b, place] = -analysers.W[0, k, :, a]
    return found.reshape(K * m * q, -1)


@dataclass(frozen=True, eq=False)
class Gauge:
    """The curvature with the orbit taken out.  Built by :func:`gauge`.

    Loadings are ``(mode + d) Q`` with ``d`` orthogonal to the turns and ``Q`` a rotation.
    """

    tril: Tensor  # (D, D)   of the curvature across the orbit; along it a stand-in, for inversion
    basis: Tensor  # (D, P)  orthonormal, spans the turns
    log_gram: Tensor  # ()   log determinant of the turns' inner products
    log_det: Tensor  # ()    of the curvature across the orbit
    kappa: Tensor  # (P,)    how strongly the prior holds each pair in place


def gauge(A: Tensor, analysers: FactorAnalysers) -> Gauge:
    """Split the curvature ``A`` at a mode into orbit and the rest.

    :raises NotPositiveDefinite: when the rest is not positive definite: no mode, or a column about to vanish.
    """
    T = turns(analysers)
    if not T.shape[1]:
        tril = cholesky(A, "posterior precision A")
        return Gauge(tril, T, A.new_zeros(()), 2.0 * tril.diagonal().log().sum(), A.new_zeros(0))
    gram = T.mT @ T
    basis = torch.linalg.solve_triangular(cholesky(gram, "inner products of the turns"), T.mT, upper=False).mT
    AB = A @ basis
    along = basis.mT @ AB
    across = AB - basis @ along
    kappa = 0.5 * (T * (A @ T)).sum(0).clamp(min=0.0)  # zero for columns that share a precision, but for rounding
    stand_in = (12.0 / math.pi**2 + 2.0 * kappa) / gram.diagonal()  # angles uniform on a half circle have that variance
    rest = A - across @ basis.mT - basis @ across.mT - basis @ (along - stand_in.diag()) @ basis.mT
    tril = cholesky(0.5 * (rest + rest.mT), "posterior precision A across the orbit")
    # what the log determinant of the rest loses to motion along the orbit, where the prior holds it
    values, vectors = torch.linalg.eigh(0.5 * (along + along.mT))
    held = values > 1e-6 * tril.diagonal().square().mean()  # below, the orbit is free and nothing couples to it
    move = across @ vectors[:, held] * values[held].rsqrt()
    back = torch.linalg.solve_triangular(tril, move, upper=False)
    coupling = torch.linalg.slogdet(torch.eye(int(held.sum())).to(tril) - back.mT @ back).logabsdet
    log_det = 2.0 * tril.diagonal().log().sum() - stand_in.log().sum() + coupling
    return Gauge(tril, basis, 2.0 * torch.linalg.cholesky(gram).diagonal().log().sum(), log_det, kappa)


def orbit_laplace(log_joint: Tensor, split: Gauge, analysers: FactorAnalysers) -> Tensor:
    """Laplace's log evidence over the orbits, all labels' information included, nats, shape ``()``."""
    on, m = analysers.on[0], analysers.W.shape[-2]
    pairs = evidence.pairs_of(on)
    kappa = split.kappa.new_zeros(pairs.shape).masked_scatter(pairs, split.kappa)
    orbit = evidence.log_orbit(kappa, pairs, on.sum(-1)).sum() + 0.5 * split.log_gram
    left_out = m * torch.where(on, 0.0, analysers.alpha[0].log()).sum()
    width = 0.5 * (m * on.sum() - len(split.kappa)) * math.log(math.tau)
    return log_joint + orbit + width - 0.5 * (split.log_det - left_out)
