"""Newton's method within a trust region, on many rows at once: for densities with saddles and long flat valleys."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.numerics.linalg import expect_square, floored
from pyro_evidence.numerics.line_search import Line, SearchPoint, armijo
from pyro_evidence.numerics.newton import (
    CurvatureAt,
    Density,
    Direction,
    Gradient,
    Limits,
    Mode,
    gradient_of,
    own,
    search,
)

FIRST = 1.0  # radius, in units of each coordinate's own curvature scale
LARGEST = 1e6  # radius, in the same units: beyond any mode, and its square is far from overflow in float32 as well
FOLLOWED = 20  # steps in which a mode is found again near hyperparameters where it is known, unless it is lost
LOST = 1.0  # nats, twice what a step still promises: too much to be at a mode soon
TRIALS = 15  # radii, each a quarter of the last, before a row is given up
QUARTER = 0.25  # of a promise, less of which shortens the radius, and all but which lengthens it
ENOUGH = 0.1  # of what a step promises: corrections that gain less are not worth a gradient
SECULAR = 6  # Newton steps for the shift that belongs to a radius
CORRECTIONS = 8  # of one trial, each a gradient's work, at most


def climb(density: Density, curvature: CurvatureAt, u: Tensor, theta: Tensor, limits: Limits) -> Mode:
    """Gauss-Newton until a step promises less than a hundredth of a nat, then Newton; see :func:`ascend`.

    :param curvature: what the mode is judged by, dense.
    """
    fewer = replace(limits, tolerance=1e-2, num_steps=min(50, limits.num_steps))
    near = ascend(density, density.gauss_newton, u, theta, fewer)
    if limits.num_steps <= FOLLOWED and bool((near.decrement > LOST).all()):
        return replace(near, converged=torch.zeros_like(near.converged))
    return ascend(density, curvature, near.u, theta, limits, _scale(near.precision))


def ascend(
    density: Density,
    curvature: CurvatureAt,
    u: Tensor,
    theta: Tensor,
    limits: Limits,
    scale: Tensor | None = None,
) -> Mode:
    """Modes as of :func:`pyro_evidence.numerics.newton.climb`; each step maximises the quadratic model within a ball.

    The ball is round in coordinates scaled by the root of the curvature's diagonal.  Where the curvature is indefinite
    the best step in the ball goes down its negative directions, so a saddle is left even from rest.  Nocedal and Wright
    (2006), algorithms 4.1 and 4.3, by an eigendecomposition.  Valleys of networks are bent: a trial is first brought
    back to the valley's floor with the same eigenvectors (:class:`CurvedValley`); steps may then be many times as long.

    :param curvature: dense precisions.
    :param scale: ``(R, D)``; default the root of the curvature's diagonal.
    """

    def direction(u: Tensor, rows: Tensor, gradient: Tensor) -> Direction:
        A = curvature(u, own(theta, rows)).detach()
        expect_square(A)
        tril, info = torch.linalg.cholesky_ex(A)
        definite = (info == 0) & torch.isfinite(tril).all(-1).all(-1)
        tril = torch.where(definite[:, None, None], tril, torch.eye(A.shape[-1]).to(A))
        step = torch.cholesky_solve(gradient.unsqueeze(-1), tril).squeeze(-1)
        decrement = torch.where(definite, (gradient * step).sum(-1), torch.inf)
        return Direction(A, step, decrement, definite, torch.zeros_like(step))

    ball = TrustRegion(gradient_of(density, theta), limits.slack, torch.full((len(u),), FIRST).to(u), scale)
    found = search(ball.gradient, direction, u, limits, ball.move)
    found.converged[found.definite & limits.is_resting(found.decrement, found.log_joint)] = True  # where it stands
    return found


def _scale(A: Tensor) -> Tensor:
    """Root of the diagonal's size, ``(R, D)``."""
    return floored(A.diagonal(dim1=-2, dim2=-1).abs()).sqrt()


@dataclass(frozen=True, eq=False)
class TrustRegion:
    """Where the quadratic model of each row is believed: ``|scale step| <= radius``."""

    gradient: Gradient
    slack: float  # relative rounding of the log joint
    radius: Tensor  # (R,) adapted in place
    scale: Tensor | None  # (R, D); None: the root of the curvature's diagonal

    def move(self, _gradient: Gradient, found: Mode, rows: Tensor, _limits: Limits) -> Tensor:
        """Move every row that can rise, in place; those that did."""
        scale = _scale(found.precision[rows]) if self.scale is None else self.scale[rows]
        within = (scale * found.step[rows]).norm(dim=-1) <= self.radius[rows]
        some = (found.definite[rows] & within).nonzero().squeeze(-1)
        done = some[:0]
        if len(some):
            done = some[self._take(found, rows[some], found.step[rows[some]], scale[some])]
        finite = torch.isfinite(found.precision[rows]).all(-1).all(-1)
        left = finite.index_fill(0, done, False).nonzero().squeeze(-1)
        if not len(left):
            return rows[done]
        ranks, scale = rows[left], scale[left]
        values, vectors = torch.linalg.eigh(found.precision[ranks] / scale.unsqueeze(-1) / scale.unsqueeze(-2))
        along = (vectors.mT @ (found.gradient[ranks] / scale).unsqueeze(-1)).squeeze(-1)
        moved, here = [rows[done]], torch.arange(len(left), device=left.device)
        for _ in range(TRIALS):
            best, shift = _best_within(values[here], along[here], self.radius[ranks[here]])
            step = (vectors[here] @ best.unsqueeze(-1)).squeeze(-1) / scale[here]
            stiffened = values[here].clamp(min=0.0) + shift + 1.0  # soft and downward directions stay as they are
            floor = CurvedValley(vectors[here], stiffened, scale[here], shift * best)
            good = self._take(found, ranks[here], step, scale[here], floor)
            by_curvature = -0.5 * (values[here] * best.square()).sum(-1) > (along[here] * best).sum(-1)
            found.left_saddle[ranks[here[good & by_curvature]]] = True
            moved.append(ranks[here[good]])
            here = here[~good]
            if not len(here):
                break
        return torch.cat(moved).sort().values

    def _take(
        self, found: Mode, rows: Tensor, step: Tensor, scale: Tensor, floor: "CurvedValley | None" = None
    ) -> Tensor:
        """Take the steps that raise the log joint as the model says, roughly; adapt the radii.  Which rows moved."""
        A, g, here, radius = found.precision[rows], found.gradient[rows], found.log_joint[rows], self.radius[rows]
        promised = (g * step).sum(-1) - 0.5 * (step * (A @ step.unsqueeze(-1)).squeeze(-1)).sum(-1)
        u = found.u[rows] + step
        trial = SearchPoint(u, *self.gradient(u, rows))
        if floor is not None:
            trial = _on_floor(lambda v: self.gradient(v, rows), trial, floor, ENOUGH * promised)
        gain, line = trial.objective - here, Line(promised, self.slack * (1.0 + here.abs()))
        good = finite(trial) & armijo(gain, 1.0, line) & (trial.u != found.u[rows]).any(-1)
        length = (scale * step).norm(dim=-1)
        wider = torch.maximum(radius, 2.0 * length).clamp(max=LARGEST)
        kept = torch.where(gain < QUARTER * promised, 0.5 * length, radius)
        kept = torch.where(gain > (1.0 - QUARTER) * promised, wider, kept)
        self.radius[rows] = torch.where(good, kept, QUARTER * torch.minimum(length, radius))
        moved = rows[good]
        new = trial[good]
        found.u[moved], found.log_joint[moved], found.gradient[moved] = new.u, new.objective, new.gradient
        return good


def _best_within(values: Tensor, along: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Maximiser of ``c'p - p' diag(values) p / 2`` with ``|p| <= radius``, rows ``(R, D)``.

    The shift by Newton's method on ``1 / |p|``, which is nearly a straight line in it.  Nocedal and Wright (2006),
    algorithm 4.3.

    :return: it, and the shift ``(R, 1)`` of the values by which it is a Newton step.
    """
    floor = (-values[:, :1]).clamp(min=0.0)  # shifts below it leave the model unbounded
    floor = floor + 1e-10 * values.abs().amax(-1, keepdim=True)
    shift, length = floor, radius.unsqueeze(-1)
    for _ in range(SECULAR):
        step = along / (values + shift)
        squares = step.square()
        size = squares.sum(-1, keepdim=True).sqrt()
        fall = (squares / (values + shift)).sum(-1, keepdim=True)
        shift = torch.maximum(floor, shift + (size / length - 1.0) * (size.square() / fall).nan_to_num(0.0))
    step = along / (values + shift)
    rest = (radius.square() - step.square().sum(-1)).clamp(min=0.0).sqrt()  # of the ball, for the hard case
    lowest = torch.where(step[:, 0] < 0, -rest, rest) * (values[:, 0] < 0)
    return torch.cat([step[:, :1] + lowest.unsqueeze(-1), step[:, 1:]], -1), shift


@dataclass(frozen=True, eq=False)
class CurvedValley:
    """The way back to where the gradient is what the quadratic model promised, in the eigenvectors of its curvature.

    In scaled coordinates a direction that the data determine has curvature about 1, a soft one far less; with 1 added
    to each the way back moves along the stiff ones only.
    """

    vectors: Tensor  # (r, D, D)
    values: Tensor  # (r, D)
    scale: Tensor  # (r, D)
    promised: Tensor  # (r, D) gradient after the step, in the eigenvectors

    def back(self, slope: Tensor) -> Tensor:
        """The move from a trial with gradient ``slope`` ``(r, D)``."""
        excess = (self.vectors.mT @ (slope / self.scale).unsqueeze(-1)).squeeze(-1) - self.promised
        return (self.vectors @ (excess / self.values).unsqueeze(-1)).squeeze(-1) / self.scale


def finite(points: SearchPoint) -> Tensor:
    """Which points are, with their gradient, ``(r,)`` bool."""
    return torch.isfinite(points.objective) & torch.isfinite(points.gradient).all(-1)


def higher(here: SearchPoint, other: SearchPoint, rows: Tensor) -> SearchPoint:
    """The higher of both in each of ``rows`` ``(r,)`` bool, ``here`` in the others."""
    return other.where(rows & finite(other) & (~finite(here) | (other.objective > here.objective)), here)


def _on_floor(
    gradient: Callable[[Tensor], tuple[Tensor, Tensor]], trial: SearchPoint, floor: CurvedValley, worth: Tensor
) -> SearchPoint:
    """Trials moved to the valley's floor, each while that raises it by what is ``worth`` a gradient, ``(r,)``."""
    going = torch.ones_like(worth, dtype=torch.bool)
    for _ in range(CORRECTIONS):
        before, u = trial, trial.u + floor.back(trial.gradient)
        trial = higher(before, SearchPoint(u, *gradient(u)), going)
        going = going & finite(trial) & ~(trial.objective - before.objective <= worth)
        if not bool(going.any()):
            break
    return trial
