"""Newton for linear predictors under a Gaussian prior, with few Gram matrices."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_evidence.ops.parts import EPS
from pyro_evidence.ops.predictor import gram
from pyro_evidence.weights import LinearTarget

DENSE = 150  # weights up to which a fresh factor costs less than conjugate gradients
MOST_PRODUCTS = 8  # of conjugate gradients before the factor is renewed; more for many weights
SMALL = 1e-18  # decrement in nats, relative to the objective, that counts as none in double precision


class Found(NamedTuple):
    """Where Newton stopped."""

    x: Tensor  # (D,)
    converged: bool


class _Point(NamedTuple):
    x: Tensor
    etas: tuple[Tensor, ...]  # (1, N, C) each
    value: float


def mode(target: LinearTarget, alpha: Tensor, start: Tensor) -> Found:
    """Mode of the target, which has no other coordinates, under ``N(0, 1/alpha)``, shape ``(D,)``.

    Each step solves with the last Cholesky factor as preconditioner of conjugate gradients, and renews the
    factor when that takes long.  Not converged where the curvature is not positive definite or no step goes
    up.  A model in a shorter dtype is climbed to that dtype's rounding.
    """
    at = _point(target, alpha, start, tuple(p.eta(start.unsqueeze(0)) for p in target.parts))
    tril: Tensor | None = None
    before, coarse = torch.inf, target.eps / EPS
    for _ in range(100):
        found = [p.derivatives(e) for p, e in zip(target.parts, at.etas, strict=True)]
        g = sum((s.flatten() @ p.J.flatten(0, 1) for p, (s, _) in zip(target.parts, found, strict=True)), -alpha * at.x)
        step, tril = _solved(target, alpha, [B[0] for _, B in found], g, tril)
        if step is None:
            return Found(at.x, False)
        decrement, limit = float(g @ step), SMALL * coarse * (1.0 + abs(at.value))
        moved = _uphill(target, alpha, at, step, decrement)
        if moved is None or _next(decrement, before) <= limit:
            return Found(at.x if moved is None else moved.x, decrement <= 1e8 * limit / coarse**0.5)
        at, before = moved, decrement
    return Found(at.x, False)


def _next(decrement: float, before: float) -> float:
    """The decrement to expect after this step: quadratic convergence, and what the solver left."""
    return decrement * max((decrement / before) ** 2, _exactness(decrement)) if decrement < 1e-4 else decrement


def _exactness(decrement: float) -> float:
    """Share of the decrement that the solver may leave: as little as Newton's own error, never below rounding."""
    return max(min(1e-2, decrement), 0.1 * SMALL / max(decrement, SMALL))


def _point(target: LinearTarget, alpha: Tensor, x: Tensor, etas: tuple[Tensor, ...]) -> _Point:
    likelihood = sum(float(p.log_likelihood(e)[0]) for p, e in zip(target.parts, etas, strict=True))
    return _Point(x, etas, likelihood - 0.5 * float(alpha @ x.square()))


def _uphill(target: LinearTarget, alpha: Tensor, at: _Point, step: Tensor, decrement: float) -> _Point | None:
    """The first halved step that does not go down; along a line predictors move in proportion."""
    ahead = [(p.J @ step).unsqueeze(0) for p in target.parts]
    slack = 45.0 * target.eps * (1.0 + abs(at.value))
    for halvings in range(40):
        scale = 0.5**halvings
        etas = tuple(e + scale * d for e, d in zip(at.etas, ahead, strict=True))
        new = _point(target, alpha, at.x + scale * step, etas)
        if new.value >= at.value + 1e-4 * scale * decrement - slack:
            return new
    return None


def _solved(
    target: LinearTarget, alpha: Tensor, curvatures: list[Tensor], g: Tensor, tril: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The Newton step and the factor in use."""
    if tril is not None and len(g) > DENSE:
        step = _conjugate_gradients(target, alpha, curvatures, g, tril)
        if step is not None:
            return step, tril
    grams = (gram(p.J, B.unsqueeze(0))[0] for p, B in zip(target.parts, curvatures, strict=True))
    tril, info = torch.linalg.cholesky_ex(sum(grams, alpha.diag()))
    if int(info):
        return None, None
    return torch.cholesky_solve(g.unsqueeze(-1), tril).squeeze(-1), tril


def _conjugate_gradients(
    target: LinearTarget, alpha: Tensor, curvatures: list[Tensor], g: Tensor, tril: Tensor
) -> Tensor | None:
    """``A^-1 g``, as exactly as Newton's quadratic convergence needs, or None after too many products."""
    x, r = torch.zeros_like(g), g
    z = torch.cholesky_solve(r.unsqueeze(-1), tril).squeeze(-1)
    p, rz = z, r @ z
    first = float(rz)
    for _ in range(max(MOST_PRODUCTS, len(g) // 100)):
        q = alpha * p
        for part, B in zip(target.parts, curvatures, strict=True):
            q = q + (B @ (part.J @ p).unsqueeze(-1)).flatten() @ part.J.flatten(0, 1)
        step = rz / (p @ q)
        x, r = x + step * p, r - step * q
        z = torch.cholesky_solve(r.unsqueeze(-1), tril).squeeze(-1)
        new = r @ z
        if float(new) <= first * _exactness(first):
            return x
        p, rz = z + new / rz * p, new
    return None
