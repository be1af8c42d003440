"""Modes of linear predictors: Newton under a Gaussian prior, a projected Newton method under an L1 penalty."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_evidence.numerics.line_search import KEPT, first_accepted
from pyro_evidence.numerics.linear_predictor import EPS, gram
from pyro_evidence.numerics.newton import SLACK, Limits
from pyro_evidence.relevance.targets import LinearTarget, Penalised

MOST_STEPS = 200  # of Newton's method
NEAR = 1e-4  # nats: a decrement from which Newton's steps converge quadratically


class Sparse(NamedTuple):
    """A maximiser and how nearly it is one."""

    u: Tensor  # (K,) with exact zeros
    residual: float  # largest violation of the optimality conditions, nats per unit of u
    converged: bool


def maximise(density: Penalised, rate: Tensor, start: Tensor, orthant: Tensor | None, limits: Limits) -> Sparse:
    r"""Maximise ``log_joint(u) - sum(rate |u|)``, shape ``(K,)``.

    Newton on the free coordinates, those that are not 0 or whose gradient exceeds their rate, projected on
    the orthant of the current signs, with backtracking.  Andrew and Gao (2007); Schmidt (2010), section 2.3.

    :param rate: penalty of each coordinate, 0 for none.
    :param orthant: signs that ``u`` must keep where the rate is positive, or None.
    :param limits: their tolerance is of the residual, nats per unit of ``u``.
    """
    u, theta = start.clone(), start.new_zeros(0)
    for step in range(limits.num_steps + 1):
        value, slope = (x[0] for x in density.gradient(u.unsqueeze(0), theta))
        beyond = slope.sign() * (slope.abs() - rate).clamp(min=0.0)  # at 0 the penalty holds |slope| <= rate
        if orthant is not None:
            beyond = torch.where((rate > 0) & (beyond * orthant < 0), 0.0, beyond)
        uphill = torch.where(u == 0, beyond, slope - rate * u.sign())  # 0 exactly where the optimality conditions hold
        residual = float(uphill.abs().max())
        if residual <= limits.tolerance or step == limits.num_steps:
            break
        before = value - rate @ u.abs()
        new = _step(density, (u, before - limits.slack * (1.0 + before.abs())), uphill, rate)
        if new is None:
            break
        u = new
    return Sparse(u, residual, residual <= limits.tolerance)


def _step(density: Penalised, point: tuple[Tensor, Tensor], uphill: Tensor, rate: Tensor) -> Tensor | None:
    """Newton's projected step, halved until it rises as much as its length on the orthant of the signs promises."""
    u, lowest = point  # below which a trial counts as lower
    free, theta = (u != 0) | (uphill != 0), u.new_zeros(0)
    signs = torch.where(u == 0, uphill.sign(), u.sign())
    A, newton = density.precision(u.unsqueeze(0), theta)[0], torch.zeros_like(u)
    newton[free] = torch.linalg.solve(A[free][:, free], uphill[free])

    def trial(scale: float) -> tuple[float, Tensor] | None:
        new = u + scale * newton
        new = torch.where((rate > 0) & (new * signs <= 0), 0.0, new)
        after = density.log_joint(new.unsqueeze(0), theta)[0] - rate @ new.abs()
        asked = max(KEPT * float(uphill @ (new - u)), 0.0)
        return None if torch.equal(new, u) else (float(after) - asked, new)

    return first_accepted(trial, float(lowest))


DENSE = 150  # weights up to which a fresh factor costs less than conjugate gradients
MOST_PRODUCTS = 8  # of conjugate gradients before the factor is renewed; more for many weights
SMALL = 1e-18  # decrement in nats, relative to the objective, that counts as none in double precision


class Found(NamedTuple):
    """Where Newton's method stopped."""

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
    point = _point(target, alpha, start, tuple(p.eta(start.unsqueeze(0)) for p in target.parts))
    tril: Tensor | None = None
    before, coarse = torch.inf, target.eps / EPS
    for _ in range(MOST_STEPS):
        found = [p.derivatives(e) for p, e in zip(target.parts, point.etas, strict=True)]
        g = sum(
            (s.flatten() @ p.J.flatten(0, 1) for p, (s, _) in zip(target.parts, found, strict=True)), -alpha * point.x
        )
        curvatures = [B[0] for _, B in found]
        step = None if tril is None or len(g) <= DENSE else _conjugate_gradients(target, alpha, curvatures, g, tril)
        if step is None:
            grams = (gram(p.J, B.unsqueeze(0))[0] for p, B in zip(target.parts, curvatures, strict=True))
            tril, info = torch.linalg.cholesky_ex(sum(grams, alpha.diag()))
            if int(info):
                return Found(point.x, False)
            step = torch.cholesky_solve(g.unsqueeze(-1), tril).squeeze(-1)
        decrement, limit = float(g @ step), SMALL * coarse * (1.0 + abs(point.value))
        moved = _uphill(target, alpha, point, step, decrement)
        ahead = decrement  # to be expected after this step: quadratic convergence, and what the solver left
        if decrement < NEAR:
            ahead = decrement * max((decrement / before) ** 2, _exactness(decrement))
        if moved is None or ahead <= limit:
            return Found(point.x if moved is None else moved.x, decrement <= 1e8 * limit / coarse**0.5)
        point, before = moved, decrement
    return Found(point.x, False)


def _exactness(decrement: float) -> float:
    """Share of the decrement that the solver may leave: as little as Newton's own error, never below rounding."""
    return max(min(1e-2, decrement), 0.1 * SMALL / max(decrement, SMALL))


def _point(target: LinearTarget, alpha: Tensor, x: Tensor, etas: tuple[Tensor, ...]) -> _Point:
    likelihood = sum(float(p.log_likelihood(e)[0]) for p, e in zip(target.parts, etas, strict=True))
    return _Point(x, etas, likelihood - 0.5 * float(alpha @ x.square()))


def _uphill(target: LinearTarget, alpha: Tensor, point: _Point, step: Tensor, decrement: float) -> _Point | None:
    """The first halved step that does not go down; along a line predictors move in proportion."""
    ahead = [(p.J @ step).unsqueeze(0) for p in target.parts]

    def trial(scale: float) -> tuple[float, _Point]:
        etas = tuple(e + scale * d for e, d in zip(point.etas, ahead, strict=True))
        new = _point(target, alpha, point.x + scale * step, etas)
        return new.value, new

    return first_accepted(trial, point.value, decrement, SLACK * target.eps * (1.0 + abs(point.value)))


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
