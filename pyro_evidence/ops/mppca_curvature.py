r"""The exact curvature of a mixture of probabilistic PCA in its loadings, and Laplace's evidence over its orbits.

One row of parameters.  With :math:`P = C_k^{-1}`, :math:`E = P S_k P` and :math:`e = P(y - \mu_k)`, component k has the
slope :math:`g_{nk} = e\,(W^\top e)^\top - P W` per datum, and the Hessian of minus the log likelihood is that at held
responsibilities less the spread of the slopes over components.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.ops import mppca, mppca_evidence, mppca_missing
from pyro_evidence.ops.linalg import cholesky
from pyro_evidence.ops.mppca import Analysers

ROWS = 1024  # data whose slopes are held at once
FULL_SIZE, FULL_SIZE_GAPS = 4000, 600  # loadings up to which the exact curvature is formed; with gaps in the data
DIRECTIONS = 32  # in which the slope of data with gaps is differentiated at once


def slope(at: Analysers, stats: mppca.Statistics) -> Tensor:
    """Derivative of ``log p(D, W)`` in W, shape ``(R, K, m, q)``; zero in pruned columns."""
    found = mppca.about_held_means(mppca.moments(at, stats), at)
    pull = at.beta.unsqueeze(-1) * (found.yx - at.W @ found.xx)
    return (pull - at.alpha.unsqueeze(-2) * at.W) * (at.columns & at.active.unsqueeze(-1)).unsqueeze(-2)


def precision(Y: Tensor, at: Analysers) -> Tensor:
    """Minus the Hessian of ``log p(D, W)`` in W, flat in the order of ``W``, shape ``(K m q, K m q)``.

    Rows and columns of pruned components and columns hold the prior's precision alone.
    """
    if mppca_missing.has_gaps(Y):
        return _masked(_of_gaps(Y, at), at)
    K, m, q = at.W.shape[1:]
    held = torch.zeros(K, m * q, K, m * q, dtype=at.W.dtype, device=at.W.device)
    labels = torch.zeros(K * m * q, K * m * q, dtype=at.W.dtype, device=at.W.device)
    P, scatter, counts = _inverse(at), at.W.new_zeros(K, m, m), at.W.new_zeros(K)
    for block in Y.split(ROWS):
        resp, e, g = _slopes(block, at, P)
        weighted = resp.unsqueeze(-1) * g
        flat = weighted.reshape(len(block), -1)
        root = resp.sqrt().unsqueeze(-1) * g
        for k in range(K):  # the held part needs one product per component only
            held[k, :, k] -= root[:, k].mT @ root[:, k]
        labels += flat.mT @ flat
        scatter = scatter + torch.einsum("nk,nki,nkj->kij", resp, e, e)
        counts = counts + resp.sum(0)
    for k in range(K):
        held[k, :, k] += _held(at.W[0, k], P[k], scatter[k], counts[k])
    found = held.reshape(K * m * q, K * m * q) + labels
    return _masked(found, at)


def full_size(Y: Tensor) -> int:
    """Number of loadings up to which :func:`precision` is worth its cost."""
    return FULL_SIZE_GAPS if mppca_missing.has_gaps(Y) else FULL_SIZE


def _of_gaps(Y: Tensor, at: Analysers) -> Tensor:
    """Minus the Hessian of the log likelihood of data with gaps, by differentiation twice, block by block."""
    eye = torch.eye(at.W.numel(), dtype=at.W.dtype, device=at.W.device)
    found = torch.zeros_like(eye)
    for block in Y.split(ROWS // DIRECTIONS):
        with torch.enable_grad():
            w = at.W.detach().reshape(-1).requires_grad_()
            log_joint = mppca_missing.latent(block, replace(at, W=w.reshape(at.W.shape))).log_joint
            (slope,) = torch.autograd.grad(log_joint.logsumexp(-1).sum(), w, create_graph=True)
        for i in range(0, len(eye), DIRECTIONS):
            part = torch.autograd.grad(slope, w, eye[i : i + DIRECTIONS], retain_graph=True, is_grads_batched=True)[0]
            found[i : i + DIRECTIONS] -= part
    return found


def _masked(A: Tensor, at: Analysers) -> Tensor:
    on = (at.columns & at.active.unsqueeze(-1)).unsqueeze(-2).expand(at.W.shape).reshape(-1)
    A = torch.where(on.unsqueeze(-1) & on, A, 0.0)
    prior = at.alpha.unsqueeze(-2).expand(at.W.shape).reshape(-1)
    A.diagonal().add_(prior)
    return 0.5 * (A + A.mT)


def _inverse(at: Analysers) -> Tensor:
    """``C_k^-1`` of the first row, shape ``(K, m, m)``."""
    B = at.whitener[0]
    return at.beta[0].diag_embed() - B.mT @ B


def _slopes(Y: Tensor, at: Analysers, P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Responsibilities ``(n, K)``, ``P (y - mu)``, ``(n, K, m)``, and slopes, flat, ``(n, K, m q)``."""
    resp = mppca.responsibilities(Y, at)[0]
    e = torch.einsum("kij,nkj->nki", P, Y.unsqueeze(1) - at.mu[0])
    x = torch.einsum("kij,nki->nkj", at.W[0], e)
    return resp, e, (e.unsqueeze(-1) * x.unsqueeze(-2) - P @ at.W[0]).flatten(-2)


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


def turns(at: Analysers) -> Tensor:
    """Directions in which turning the latent space moves W, by unit angle, shape ``(K m q, P)``.

    One for each pair of columns that are not pruned, component by component.
    """
    K, m, q = at.W.shape[1:]
    found = [torch.zeros(K, m, q, 0, dtype=at.W.dtype, device=at.W.device)]
    for k, on in enumerate((at.columns & at.active.unsqueeze(-1))[0]):
        a, b = torch.combinations(on.nonzero().flatten(), 2).unbind(-1)
        each = at.W.new_zeros(K, m, q, len(a))
        place = torch.arange(len(a), device=at.W.device)
        each[k, :, a, place] = at.W[0, k][:, b]
        each[k, :, b, place] = -at.W[0, k][:, a]
        found.append(each)
    return torch.cat(found, -1).reshape(K * m * q, -1)


@dataclass(frozen=True)
class Gauge:
    """The curvature with the orbit taken out.  Built by :func:`gauge`.

    Loadings are ``(mode + d) Q`` with ``d`` orthogonal to the turns and ``Q`` a rotation.
    """

    tril: Tensor  # (D, D)   of the curvature across the orbit; along it a stand-in, for inversion
    basis: Tensor  # (D, P)  orthonormal, spans the turns
    log_gram: Tensor  # ()   log determinant of the turns' inner products
    log_det: Tensor  # ()    of the curvature across the orbit
    kappa: Tensor  # (P,)    how strongly the prior holds each pair in place


def gauge(A: Tensor, at: Analysers) -> Gauge:
    """Split the curvature ``A`` at a mode into orbit and the rest.

    :raises NotPositiveDefinite: when the rest is not positive definite: no mode, or a column about to vanish.
    """
    T = turns(at)
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
    log_det = 2.0 * tril.diagonal().log().sum() - stand_in.log().sum() + _coupling(tril, across, along)
    return Gauge(tril, basis, 2.0 * torch.linalg.cholesky(gram).diagonal().log().sum(), log_det, kappa)


def _coupling(tril: Tensor, across: Tensor, along: Tensor) -> Tensor:
    """What the determinant of the rest loses to motion along the orbit, where the prior holds it."""
    values, vectors = torch.linalg.eigh(0.5 * (along + along.mT))
    held = values > 1e-6 * tril.diagonal().square().mean()  # below, the orbit is free and nothing couples to it
    move = across @ vectors[:, held] * values[held].rsqrt()
    back = torch.linalg.solve_triangular(tril, move, upper=False)
    return torch.linalg.slogdet(torch.eye(int(held.sum())).to(tril) - back.mT @ back).logabsdet


def log_evidence(log_joint: Tensor, split: Gauge, at: Analysers) -> Tensor:
    """Laplace's log evidence over the orbits, all labels' information included, nats, shape ``()``."""
    on, m = (at.columns & at.active.unsqueeze(-1))[0], at.W.shape[-2]
    kappa, pairs = _spread_out(split.kappa, on)
    orbit = mppca_evidence.log_orbit(kappa, pairs, on.sum(-1)).sum() + 0.5 * split.log_gram
    left_out = m * torch.where(on, 0.0, at.alpha[0].log()).sum()
    width = 0.5 * (m * on.sum() - len(split.kappa)) * math.log(math.tau)
    return log_joint + orbit + width - 0.5 * (split.log_det - left_out)


def _spread_out(kappa: Tensor, on: Tensor) -> tuple[Tensor, Tensor]:
    """``kappa`` of the pairs of columns ``on`` as ``(K, q, q)``, and where they stand."""
    found = kappa.new_zeros(*on.shape, on.shape[-1])
    pairs, start = torch.zeros_like(found, dtype=torch.bool), 0
    for k, columns in enumerate(on):
        a, b = torch.combinations(columns.nonzero().flatten(), 2).unbind(-1)
        found[k, a, b], pairs[k, a, b] = kappa[start : start + len(a)], True
        start += len(a)
    return found, pairs
