"""The posterior mode of the loadings of a mixture of probabilistic PCA, all else held."""

from dataclasses import replace

import torch
from torch import Tensor

from pyro_evidence.ops import lbfgs, mppca, mppca_curvature, mppca_missing
from pyro_evidence.ops.mppca import Analysers, Statistics

NEWTON_SIZE = 1200  # loadings up to which Newton's method finishes what L-BFGS began
SLOPE = 1e-4  # nats per standard deviation of a loading, at which L-BFGS stops
TOLERANCE = 1e-9  # nats that a Newton step may still promise


def log_joint(at: Analysers, stats: Statistics) -> Tensor:
    """``log p(D, W)``, nats, shape ``(R,)``."""
    return stats.log_likelihood + mppca.log_prior(at)


def find_mode(Y: Tensor, at: Analysers, num_steps: int = 100) -> Analysers:
    """One row at a mode: quasi-Newton from where it stands, then Newton with the exact curvature across the orbit."""
    shape = at.W.shape
    scale = (at.beta * at.log_mixing.exp().unsqueeze(-1) * len(Y)).clamp(min=1e-8).rsqrt().unsqueeze(-1)  # pruned: any

    def f(u: Tensor) -> tuple[Tensor, Tensor]:
        there = replace(at, W=u.reshape(shape) * scale)
        stats = mppca_missing.e_step(Y, there)
        return log_joint(there, stats), (mppca_curvature.slope(there, stats) * scale).flatten(1)

    u = lbfgs.ascend(f, (at.W / scale).flatten(1), tolerance=SLOPE, num_steps=num_steps)
    at = replace(at, W=u.reshape(shape) * scale)
    return _newton(Y, at) if at.W.numel() <= min(NEWTON_SIZE, mppca_curvature.full_size(Y)) else at


def _newton(Y: Tensor, at: Analysers, num_steps: int = 10) -> Analysers:
    for _ in range(num_steps):
        stats = mppca_missing.e_step(Y, at)
        slope, before = mppca_curvature.slope(at, stats), float(log_joint(at, stats))
        try:
            split = mppca_curvature.gauge(mppca_curvature.precision(Y, at), at)
        except ArithmeticError:
            return at  # a saddle, or a column about to vanish: the caller looks at the curvature again
        step = torch.cholesky_solve(slope.reshape(-1, 1), split.tril).reshape(at.W.shape)
        new = replace(at, W=at.W + step)
        after = float(log_joint(new, mppca_missing.e_step(Y, new)))
        if not after > before - 1e-9 * abs(before):
            return at
        at = new
        if float((slope * step).sum()) < TOLERANCE:
            break
    return at


def canonical(at: Analysers) -> Analysers:
    """The same density with orthogonal columns, longest first, in every component whose columns share a precision.

    Others, whose columns the prior tells apart, stay as they are.
    """
    shared = (at.alpha == at.alpha[..., :1]).all(-1) & at.columns.all(-1)
    _, turn = torch.linalg.eigh(at.W.mT @ at.W)
    turned = (at.W @ turn).flip(-1)
    return replace(at, W=torch.where(shared[..., None, None], turned, at.W))
