"""Newton's method for the posterior mode, on many rows at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pyro_evidence.errors import NotAMode
from pyro_evidence.numerics.lbfgs import Watch, no_callback
from pyro_evidence.numerics.linalg import Label
from pyro_evidence.numerics.line_search import Backtracking, Line, SearchPoint, along_step, clear_rise

SEARCH = Backtracking(clear_rise)
CurvatureAt = Callable[..., Tensor]  # points (R, D), and their hyperparameters if each has its own, to precisions


class Density(Protocol):
    """One model's log joint density and its second derivatives, rows in front."""

    @property
    def blocks(self) -> tuple[slice, ...]:
        """The flat coordinates of each latent site."""

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(D, w | hyperparameters)``, nats, shape ``(R,)``."""

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``, detached."""

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian in ``u``, shape ``(R, D, D)``."""

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        """Diagonal of :meth:`precision`, shape ``(R, D)``."""

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        """:meth:`precision` without the second derivatives of the predictor, shape ``(R, D, D)``."""


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Limits:
    """When to stop, and whom to tell of each step."""

    tolerance: float  # nats
    num_steps: int
    watch: Watch = no_callback  # told every row's log joint
    slack: float = 1e-14  # relative rounding of the log joint, a sum over data


def climb(density: Density, curvature: CurvatureAt, u: Tensor, theta: Tensor, limits: Limits) -> Mode:
    """Newton with backtracking; an indefinite curvature is replaced by its absolute value for the step.

    A row is done when ``A`` is positive definite and ``g' A^-1 g``, twice the rise in nats that a Newton step still
    promises, is far below ``tolerance``, or is below it and has stopped falling for rounding.  A row that has come to
    rest on a saddle leaves along its downward curvature; a row that cannot rise is given up.

    :param curvature: maps points ``(R, D)`` to precisions; of points and ``theta`` where rows have their own.
    :param theta: hyperparameters of all rows ``(T,)``, or of each ``(R, T)``.
    """
    found, tolerance = start(density, u, theta), limits.tolerance
    rows = torch.arange(len(u), device=u.device)
    for _ in range(limits.num_steps):
        before, found = found.decrement[rows], _measure(found, rows, curvature, theta)
        after = found.decrement[rows]
        small = after <= torch.where(after > 0.1 * before, tolerance, tolerance**1.4)
        found.converged[rows] = found.definite[rows] & small
        rows = rows[~found.converged[rows]]
        if len(rows):
            rows = _move(density, found, rows, theta, limits)
            limits.watch(found.log_joint)
        if not len(rows):
            break
    return found


def start(density: Density, u: Tensor, theta: Tensor) -> Mode:
    """A record with room for every row, its precision not measured yet."""
    value, slope = density.gradient(u, theta)
    unknown = torch.full_like(value, torch.inf)
    no = torch.zeros_like(value, dtype=torch.bool)
    return Mode(
        u.detach().clone(),
        value,
        slope,
        torch.empty(0),
        unknown,
        no,
        no.clone(),
        torch.zeros_like(slope),
        torch.zeros_like(slope),
        no.clone(),
    )


def of_rows(theta: Tensor, rows: Tensor) -> Tensor:
    """The hyperparameters of ``rows``."""
    return theta[rows] if theta.dim() == 2 else theta


def _measure(found: Mode, rows: Tensor, curvature: CurvatureAt, theta: Tensor) -> Mode:
    """The record with the curvature, Newton step and decrement of ``rows`` brought up to date."""
    own = (theta[rows],) if theta.dim() == 2 else ()
    A = curvature(found.u[rows], *own).detach()
    if not found.precision.numel():
        found = replace(found, precision=A.new_zeros(len(found.u), *A.shape[1:]))
    step, definite, lowest = _step(A, found.gradient[rows])
    found.precision[rows], found.definite[rows], found.step[rows], found.lowest[rows] = (
        A,
        definite,
        step,
        lowest,
    )
    found.decrement[rows] = (found.gradient[rows] * step).sum(-1)
    return found


def _move(density: Density, found: Mode, rows: Tensor, theta: Tensor, limits: Limits) -> Tensor:
    """Take the steps of ``rows``; the rows that moved.  One at rounding counts as converged, where it stands."""
    resting = found.decrement[rows] <= limits.tolerance * (1.0 + found.log_joint[rows].abs())
    small = found.decrement[rows] <= limits.tolerance**0.5  # what rounding inside a model may leave
    _escape(density, found, rows[~found.definite[rows] & resting], theta)
    moved = _backtrack(density, found, rows, theta, limits.slack * (1.0 + found.log_joint.abs()))
    found.converged[rows[~moved & found.definite[rows] & (resting | small)]] = True
    return rows[moved]


def _step(A: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Newton step per row, which rows are positive definite, and each row's direction of lowest curvature."""
    if A.dim() == 2:
        step = slope / torch.where(A == 0, 1.0, A.abs())
        finite = torch.isfinite(A).all(-1)
        step = torch.where(finite.unsqueeze(-1), step, 0.0)
        return step, finite & (A > 0).all(-1), torch.zeros_like(slope).scatter(-1, A.argmin(-1, keepdim=True), 1.0)
    tril, info = torch.linalg.cholesky_ex(A)
    finite = torch.isfinite(A).all(-1).all(-1)
    if not bool((info != 0).any()) and bool(finite.all()):
        return torch.cholesky_solve(slope.unsqueeze(-1), tril).squeeze(-1), finite, torch.zeros_like(slope)
    values, vectors = torch.linalg.eigh(torch.where(finite[:, None, None], A, 0.0))
    size = values.abs()
    size = torch.maximum(size, 1e-12 * size.amax(-1, keepdim=True) + torch.finfo(A.dtype).tiny)
    step = (vectors @ ((vectors.mT @ slope.unsqueeze(-1)) / size.unsqueeze(-1))).squeeze(-1)
    step = torch.where(finite.unsqueeze(-1), step, 0.0)  # a row without curvature stays, and is given up
    return step, finite & (info == 0), vectors[..., 0] * size[..., :1].rsqrt()


def _escape(density: Density, found: Mode, rows: Tensor, theta: Tensor) -> None:
    """Point the steps of rows on a saddle the better of the two ways down its curvature."""
    if len(rows):
        way = found.lowest[rows]
        ahead, behind = (density.log_joint(found.u[rows] + s * way, of_rows(theta, rows)).detach() for s in (1.0, -1.0))
        found.left_saddle[rows] = True
        found.step[rows] = torch.where((ahead >= behind).unsqueeze(-1), way, -way)


def _backtrack(density: Density, found: Mode, rows: Tensor, theta: Tensor, slack: Tensor) -> Tensor:
    """Halve each row's step until the log joint does not fall beyond rounding; which rows moved."""
    here, step = SearchPoint(found.u[rows], found.log_joint[rows], found.gradient[rows]), found.step[rows]

    def trial(left: Tensor, scale: Tensor) -> SearchPoint:
        u = along_step(here.u[left], scale, step[left])
        return SearchPoint(u, *density.gradient(u, of_rows(theta, rows[left])))

    line = Line((here.gradient * step).sum(-1), slack[rows])
    new, _ = SEARCH(here, torch.arange(len(rows), device=rows.device), line, trial)
    found.u[rows], found.log_joint[rows], found.gradient[rows] = new.u, new.objective, new.gradient
    return (new.u != here.u).any(-1)


def not_a_mode(mode: Mode, row: int, label: Label, causes: Sequence[str] = ()) -> NotAMode:
    """The error message about a search that ended elsewhere than at a maximum.

    :param causes: sentences, where they are known.
    """
    worst = int(mode.gradient[row].abs().argmax())
    steepest, promised = float(mode.gradient[row, worst]), 0.5 * float(mode.decrement[row])
    advice = "Standardise the data, give the site a tighter prior, or try start=Start(restarts=8)."
    return NotAMode(
        f"the search for the posterior mode stopped where the gradient is still {steepest:.2e} at {label(worst)} "
        f"(a Newton step promises {promised:.2e} nats); expected a maximum. "
        f"{' '.join(causes) or advice}"
    )
