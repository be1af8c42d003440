"""Rounds of the network's updates over a batch of rows, and what happened on the way."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from pyro_evidence.fitting.iterate import Status
from pyro_evidence.prbf.densities import Network, Point, moved
from pyro_evidence.prbf.updates import Update, em, numerators
from pyro_evidence.settings import check_result

LOST = 1e-6  # share of the data below which a kernel counts as lost
REJECTED = 1e-8  # mixing below which a class counts as gone from a kernel

Lost = Callable[[Point, Tensor, int], Point]  # (point, lost kernels (B, M), round) -> point


def keep_dead_kernels(point: Point, lost: Tensor, step: int) -> Point:
    """Lost kernels stay where they are, and may come back."""
    return point


@dataclass(frozen=True)
class Progress:
    """Where all rows are, and what happened on the way."""

    point: Point
    update: Update
    lost: Lost
    paths: tuple[Tensor, ...]  # eq. 22 of each row after each round, (B,) each
    moved: float
    since: Tensor  # (B, K, M)  round after which a class is gone from a kernel; -1 where it is not
    gone: Tensor  # (B, M)  kernels that the last round left without data
    losses: tuple[tuple[int, int, int], ...] = ()  # (round, row, kernel)
    held: tuple[tuple[int, int, int], ...] = ()  # (round, row, class) whose every kernel rejected it

    @property
    def objective(self) -> float:
        """Eq. 22 of the best row, nats."""
        return float(self.point.objective.max())

    @property
    def gradient_norm(self) -> float:
        """How far the last round moved a mixing, or a centre in standard deviations."""
        return self.moved

    @property
    def stop_reason(self) -> Status | None:
        """A further step can always be made."""
        return None


def begin(point: Point, update: Update, lost: Lost) -> Progress:
    """All rows after the warm-up that ``update`` asks for, in which :func:`plain` EM runs where ``alpha`` is not 0."""
    if bool((point.alpha > 0).any()):
        for _ in range(getattr(update, "warm_up", 0)):
            point = _tried(em, point)
    since = torch.full_like(point.net.mixing, -1, dtype=torch.long)
    return Progress(
        point,
        update,
        lost,
        (point.objective,),
        torch.inf,
        since,
        point.alpha.new_zeros(point.net.mixing[:, 0].shape).bool(),
    )


def advance(now: Progress) -> Progress:
    """One round; rows that become non-finite keep their last good state.

    :raises ArithmeticError: when that is all of them.
    """
    old, step = now.point, len(now.paths)
    new = _updated(old, now.update)
    gone = is_lost(new, old.net)
    fresh = gone & ~now.gone
    new = now.lost(new, gone, step) if bool(gone.any()) else new
    broken = ~new.objective.isfinite()
    if bool(broken.any()):
        if bool(broken.all()):
            raise ArithmeticError("the penalised log likelihood left the finite numbers; pass a larger floor.")
        rows = broken.nonzero().squeeze(-1)
        new = new.with_rows(rows, old[rows])
    low = new.net.mixing <= REJECTED
    since = torch.where(low, torch.where(now.since < 0, step, now.since), -1)
    return replace(
        now,
        point=new,
        paths=(*now.paths, new.objective),
        moved=float(moved(old.net, new.net).max()),
        since=since,
        gone=gone,
        losses=now.losses + events(step, fresh),
        held=now.held if old.lag is None else now.held + events(step, vanishing(old, old.lag)),
    )


def events(step: int, which: Tensor) -> tuple[tuple[int, int, int], ...]:
    """What happened in a round: round, row and column of each True of ``which``."""
    return tuple((step, b, j) for b, j in which.nonzero().tolist())


def _updated(point: Point, update: Update) -> Point:
    """``update`` where there is something to regularise, plain EM where ``alpha`` is 0."""
    none = point.alpha == 0
    if not bool(none.any()):
        return _tried(update, point)
    if bool(none.all()):
        return _tried(em, point)
    rows = none.nonzero().squeeze(-1)
    return _tried(update, point).with_rows(rows, _tried(em, point[rows]))


def _tried(update: Update, point: Point) -> Point:
    """The next point.

    :raises ArithmeticError: when a covariance matrix has become singular, which a floor above 0 prevents.
    """
    try:
        return check_result("update", update(point), Point, "the next Point, such as Ascent() gives")
    except LinAlgError as error:
        raise ArithmeticError(f"a covariance became singular; pass a larger floor, as Full(1e-6). {error}") from error


def is_lost(point: Point, before: Network) -> Tensor:
    """Kernels that were in use before the round, and that hardly any datum belongs to now, shape ``(B, M)``."""
    few = point.counts.sum(1) < LOST * point.data.num_data.reshape(-1, 1)
    return few & (before.mixing > 0).any(1)


def rounds(point: Point, update: Update, num_steps: int, lost: Lost = keep_dead_kernels) -> Progress:
    """A fixed number of rounds from ``point``, after the warm-up."""
    now = begin(point, update, lost)
    for _ in range(num_steps):
        now = advance(now)
    return now


def effective(alpha: Tensor, net: Network) -> Tensor:
    """``alpha``, but 0 where no two classes share a kernel: the penalty is zero at every stationary point then."""
    shared = ((net.mixing > 0).sum(1) > 1).any(-1)
    return torch.where(shared, alpha, 0.0)


def vanishing(point: Point, distance: Tensor) -> Tensor:
    """Classes that eq. 29 would leave no kernel, as none of their numerators is positive; shape ``(B, K)``.

    :param distance: squared distances for eq. 29, shape ``(B, K, M)``; a single kernel stays whatever they are.
    """
    return (numerators(point, distance) <= 0).all(-1) & (distance.shape[-1] > 1)
