"""Newton's method for the posterior mode, on many rows at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_evidence.errors import NotAMode, Unbounded
from pyro_evidence.numerics.linalg import Label, expect_square, floored
from pyro_evidence.numerics.line_search import (
    Backtracking,
    Line,
    Real,
    SearchPoint,
    Watch,
    along_step,
    clear_rise,
    halved_while_clear,
    no_callback,
)

SEARCH = Backtracking(clear_rise, halved_while_clear, shortest=0.5**40)
AT_SADDLE = 2.0**20  # units of rounding that a step may at least promise where slopes do not tell
RESTING = 100.0  # units of rounding, below which twice the rise that a step promises is none
SLACK = 45.0  # units of rounding that a log joint, a sum over data, may have lost: 1e-14 in double precision
CurvatureAt = Callable[[Tensor, Tensor], Tensor]  # points (R, D), and hyperparameters of all or each, to precisions


class Sloped(Protocol):
    """A log density and its gradient, rows in front."""

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``, detached."""


class Density(Sloped, Protocol):
    """One model's log joint density and its second derivatives, rows in front."""

    @property
    def blocks(self) -> tuple[slice, ...]:
        """The flat coordinates of each latent site."""

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(D, w | hyperparameters)``, nats, shape ``(R,)``."""

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian in ``u``, shape ``(R, D, D)``."""

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        """Diagonal of :meth:`precision`, shape ``(R, D)``."""

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        """:meth:`precision` without the second derivatives of the predictor, shape ``(R, D, D)``."""


def exact_hessian(density: Density, u: Tensor, theta: Tensor) -> Tensor:
    """Minus the exact Hessian of the log joint density: the default, and the only one for an exact Laplace evidence."""
    return density.precision(u, theta)


@dataclass(frozen=True, eq=False)
class Mode:
    """Where the search stopped; one row each."""

    u: Tensor  # (R, D)
    log_joint: Tensor  # (R,)
    gradient: Tensor  # (R, D)
    precision: Tensor  # (R, D, D) or (R, D): the curvature at u
    decrement: Tensor  # (R,) squared gradient norm in the metric of the precision, nats
    converged: Tensor  # (R,) bool
    definite: Tensor  # (R,) bool: whether the precision is positive definite
    step: Tensor  # (R, D) the Newton step that was not taken any more
    lowest: Tensor  # (R, D) direction of lowest curvature where the precision is not positive definite
    left_saddle: Tensor  # (R,) bool: whether a saddle was left on the way, along its downward curvature
    found: tuple[Any, ...] = ()  # where ``precision`` is empty: each row's, factorised, or the error in its place
    make: Callable[[], Any] | None = None  # that of a single mode again; None where it takes another run of the model

    def row(self, index: int) -> "Mode":
        """One of the modes."""
        parts = {name: value[index : index + 1] for name, value in vars(self).items() if name != "make"}
        return replace(self, **parts)


@dataclass(frozen=True, eq=False)
class Direction:
    """Newton's step at some points, and the curvature that it is made of.

    :ivar precision: ``(r, D, D)`` or ``(r, D)``; ``(r, 0)`` where it is kept elsewhere.
    :ivar decrement: twice the rise that the step promises, nats, ``(r,)``.
    :ivar definite: whether the precision is positive definite, ``(r,)`` bool.
    :ivar lowest: direction of lowest curvature of points where it is not, ``(r, D)``; zero where none is followed.
    """

    precision: Tensor
    step: Tensor  # (r, D)
    decrement: Tensor
    definite: Tensor
    lowest: Tensor


ROUNDED = 1e-3  # nats, a thousand times what a step may promise at the end


def rounding(u: Tensor, A: Tensor, eps: float) -> Tensor:
    """Nats, about, by which rounding moves a log joint at modes ``(R, D)``, shape ``(R,)``; 0 if ``A`` is elsewhere.

    A coordinate and what is predicted from it are rounded alike, so it is by how many standard deviations the next
    number to a coordinate is away.  Where data are met, and noise goes to nothing, that grows without end.

    :param A: precision at the mode ``(R, D, D)``, or its diagonal ``(R, D)``; ``(R, 0)`` where it is kept elsewhere.
    """
    far = u.square() * (A.diagonal(dim1=-2, dim2=-1) if A.dim() == 3 else A) if A.shape[-1] else u * 0.0
    return eps * far.amax(-1).sqrt()


Gradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # of points (r, D) of rows (r,): log joint and gradient
DirectionAt = Callable[[Tensor, Tensor, Tensor], Direction]  # of points, rows, and the gradient there


@dataclass(frozen=True)
class Limits:
    """When to stop, and whom to tell of each step."""

    tolerance: float  # nats
    num_steps: int = 60
    watch: Watch = no_callback  # told every row's log joint
    slack: float = SLACK * torch.finfo(torch.float64).eps  # relative rounding of the log joint, a sum over data

    def is_small(self, decrement: Real, before: Real, log_joint: Real = 0.0) -> Real:
        """Whether decrements are far below the tolerance, or no longer falling for rounding.

        That is below the tolerance, or at the rounding of the log joint where they do not fall at all.
        """
        falling, still = decrement <= 0.1 * before, decrement > 0.5 * before
        rounding = RESTING / SLACK * self.slack * (1.0 + abs(log_joint))  # whatever the tolerance
        return (decrement <= self.tolerance ** (1.0 + 0.4 * falling)) | (still & (decrement <= rounding))

    def is_rounding(self, decrement: Tensor, u: Tensor, precision: Tensor) -> Tensor:
        """Whether decrements ``(R,)`` promise no more than the log joint is rounded by at places ``u``."""
        return decrement <= rounding(u, precision, self.slack / SLACK).clamp(max=ROUNDED)

    def is_resting(self, decrement: Real, log_joint: Real) -> Real:
        """Whether decrements are at the rounding of the log joint."""
        return decrement <= self.tolerance * (1.0 + abs(log_joint))


def limits_of(dtype: torch.dtype) -> Limits:
    """When to stop where numbers are of one type."""
    eps = torch.finfo(dtype).eps
    return Limits(RESTING * eps, slack=SLACK * eps)


def climb(density: Sloped, curvature: CurvatureAt, u: Tensor, theta: Tensor, limits: Limits) -> Mode:
    """Newton with backtracking; an indefinite curvature is replaced by its absolute value for the step.

    A row is done when ``A`` is positive definite and ``g' A^-1 g``, twice the rise in nats that a Newton step still
    promises, is far below ``tolerance``, or is below it and has stopped falling for rounding.  A row that has come to
    rest on a saddle leaves along its downward curvature; a row that cannot rise is given up.

    :param curvature: maps points ``(R, D)`` and their hyperparameters to precisions.
    :param theta: hyperparameters of all rows ``(T,)``, or of each ``(R, T)``.
    """

    def direction(u: Tensor, rows: Tensor, gradient: Tensor) -> Direction:
        return by_absolute_value(curvature(u, own(theta, rows)).detach(), gradient)

    return search(gradient_of(density, theta), direction, u, limits)


def own(theta: Tensor, rows: Tensor) -> Tensor:
    """The hyperparameters of ``rows`` where rows have their own; else those of all."""
    return theta[rows] if theta.dim() == 2 else theta


def gradient_of(density: Sloped, theta: Tensor) -> Gradient:
    """Log joint and gradient at points of some rows."""
    return lambda u, rows: density.gradient(u, own(theta, rows))


def by_absolute_value(A: Tensor, slope: Tensor) -> Direction:
    """The Newton step of each row, with eigenvalues in absolute value where ``A`` is not positive definite."""
    zero = torch.zeros_like(slope)
    if A.dim() == 2:
        finite = torch.isfinite(A).all(-1)
        step = torch.where(finite.unsqueeze(-1), slope / torch.where(A == 0, 1.0, A.abs()), 0.0)
        lowest = zero.scatter(-1, A.argmin(-1, keepdim=True), 1.0)
        return Direction(A, step, (slope * step).sum(-1), finite & (A > 0).all(-1), lowest)
    expect_square(A)
    tril, info = torch.linalg.cholesky_ex(A)
    finite = torch.isfinite(A).all(-1).all(-1)
    if not bool((info != 0).any()) and bool(finite.all()):
        step = torch.cholesky_solve(slope.unsqueeze(-1), tril).squeeze(-1)
        return Direction(A, step, (slope * step).sum(-1), finite, zero)
    values, vectors = torch.linalg.eigh(torch.where(finite[:, None, None], A, 0.0))
    size = floored(values.abs())
    step = (vectors @ ((vectors.mT @ slope.unsqueeze(-1)) / size.unsqueeze(-1))).squeeze(-1)
    step = torch.where(finite.unsqueeze(-1), step, 0.0)  # a row without curvature stays, and is given up
    return Direction(A, step, (slope * step).sum(-1), finite & (info == 0), vectors[..., 0] * size[..., :1].rsqrt())


def backtrack(gradient: Gradient, found: Mode, rows: Tensor, limits: Limits) -> Tensor:
    """Halve each row's step until the log joint does not fall beyond rounding; a saddle is left down its curvature.

    :return: the rows that moved; one that did not counts as converged where it is at rounding.
    """
    decrement, definite = found.decrement[rows], found.definite[rows]
    resting = limits.is_resting(decrement, found.log_joint[rows])
    small = decrement <= limits.tolerance**0.5  # what rounding inside a model may leave
    unseen = decrement <= AT_SADDLE * limits.slack * (1.0 + found.log_joint[rows].abs())
    saddle = rows[~definite & unseen & (found.lowest[rows] != 0).any(-1)]
    if len(saddle):
        way = found.lowest[saddle]
        ahead, behind = (gradient(found.u[saddle] + s * way, saddle)[0] for s in (1.0, -1.0))
        found.left_saddle[saddle] = True
        found.step[saddle] = torch.where((ahead >= behind).unsqueeze(-1), way, -way)
    here, step = SearchPoint(found.u[rows], found.log_joint[rows], found.gradient[rows]), found.step[rows]

    def trial(left: Tensor, scale: Tensor) -> SearchPoint:
        u = along_step(here.u[left], scale, step[left])
        return SearchPoint(u, *gradient(u, rows[left]))

    promised, slack = (here.gradient * step).sum(-1), limits.slack * (1.0 + here.objective.abs())
    line = Line(promised.where(definite, promised.maximum(AT_SADDLE * slack)), slack)
    new, _ = SEARCH(here, (step != 0).any(-1).nonzero().squeeze(-1), line, trial)
    found.u[rows], found.log_joint[rows], found.gradient[rows] = new.u, new.objective, new.gradient
    moved = (new.u != here.u).any(-1)
    if not bool((moved | small).all()):
        small = small | limits.is_rounding(decrement, here.u, found.precision[rows])
    found.converged[rows[~moved & definite & (resting | small)]] = True
    return rows[moved]


Move = Callable[[Gradient, Mode, Tensor, Limits], Tensor]  # moves the rows of a record in place; those that moved


def search(gradient: Gradient, direction: DirectionAt, u: Tensor, limits: Limits, move: Move = backtrack) -> Mode:
    """Steps along the directions of all rows, each until it has arrived or does not move any more.

    :param u: where the rows start, ``(R, D)``.
    :param move: takes the steps.
    """
    rows = torch.arange(len(u), device=u.device)
    value, slope = (x.clone() for x in gradient(u, rows))
    no, zero = torch.zeros_like(value, dtype=torch.bool), torch.zeros_like(slope)
    unknown = torch.full_like(value, torch.inf)
    found = Mode(
        u.detach().clone(), value, slope, torch.empty(0), unknown, no, no.clone(), zero, zero.clone(), no.clone()
    )
    for _ in range(limits.num_steps):
        here = direction(found.u[rows], rows, found.gradient[rows])
        if not found.precision.numel():
            found = replace(found, precision=here.precision.new_zeros(len(u), *here.precision.shape[1:]))
        before = found.decrement[rows]
        arrived = here.definite & limits.is_small(here.decrement, before, found.log_joint[rows])
        if bool((idle := here.definite & ~arrived & (here.decrement > 0.5 * before)).any()):
            arrived = arrived | (idle & limits.is_rounding(here.decrement, found.u[rows], here.precision))
        found.precision[rows], found.step[rows], found.decrement[rows] = here.precision, here.step, here.decrement
        found.definite[rows], found.lowest[rows], found.converged[rows] = here.definite, here.lowest, arrived
        rows = rows[~arrived]
        if len(rows):
            rows = move(gradient, found, rows, limits)
            limits.watch(found.log_joint)
        if not len(rows):
            break
    return found


FAR_OFF = 30.0  # of a log scale, 1e-13 of it: rounding of what is met exactly
RISING = 0.1  # nats a unit of a log scale, a fifth of what one datum that is met exactly gives to that of a variance


def rises_without_end(u: Tensor, slope: Tensor, curved: Tensor, label: Label, far: float = FAR_OFF) -> Unbounded | None:
    """The error message about a search that ran far off and found the density still rising; None where it did not.

    :param u: unconstrained place ``(D,)``, and ``slope`` there.
    :param curved: which coordinates have an end of their range at infinity, as logarithms have, bool ``(D,)``; others
        are in the data's unit, in which nothing is far.
    :param far: beyond which a coordinate is far off.
    """
    outward = (u.sign() * slope).masked_fill(~curved, -torch.inf)
    worst = int(outward.argmax())
    if not (float(u[worst].abs()) > far and float(outward[worst]) > RISING):
        return None
    return Unbounded(
        f"the log density still rises by {float(slope[worst].abs()):.3g} nats a unit at {label(worst)}, "
        f"{float(u[worst]):.3g}; expected a maximum. Its integral is infinite, so there is no evidence, as where noise "
        "may be zero and data are met exactly, or where differences of latents have a density each, more of them than "
        "latents. Look for targets that are a function of the inputs; give such differences the constant of their "
        "joint density, -(number of latents - 1) log(scale) on a connected graph, or take gmrf.ICAR; or hold that site "
        "at a number, or give it a prior whose density vanishes where it runs to, such as InverseGamma of a scale."
    )


def rounded_away() -> Unbounded:
    """The error message about a search that ended where the log joint is rounding."""
    return Unbounded(
        "the data are met to their last digits: noise runs to zero, and the log density rises until it is rounding. "
        "There is no evidence, or none that can be computed. Look for targets that are a function of the inputs; or "
        "hold the noise at a number, or give it a prior that vanishes at zero, such as InverseGamma on a scale."
    )


def not_a_mode(mode: Mode, row: int, curved: Tensor, label: Label, causes: Sequence[str] = ()) -> ArithmeticError:
    """The error message about a search that ended elsewhere than at a maximum.

    :param curved: as :func:`rises_without_end` has it.
    :param causes: sentences, where they are known.
    """
    endless = rises_without_end(mode.u[row], mode.gradient[row], curved, label)
    if endless is not None:
        return endless
    worst = int(mode.gradient[row].abs().argmax())
    steepest, promised = float(mode.gradient[row, worst]), 0.5 * float(mode.decrement[row])
    advice = "Standardise the data, give the site a tighter prior, or try start=Start(restarts=8)."
    return NotAMode(
        f"the search for the posterior mode stopped where the gradient is still {steepest:.2e} at {label(worst)} "
        f"(a Newton step promises {promised:.2e} nats); expected a maximum. "
        f"{' '.join(causes) or advice}"
    )
