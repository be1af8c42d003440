"""The restarts of a network: what one round leads to, and what happened on the way."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from pyro_evidence.fitting import restarts
from pyro_evidence.fitting.restarts import Restarts
from pyro_evidence.prbf.densities import Network, Point, moved
from pyro_evidence.prbf.updates import Update, em, numerators
from pyro_evidence.settings import check_result

LOST = 1e-6  # share of the data below which a kernel counts as lost
REJECTED = 1e-8  # mixing below which a class counts as gone from a kernel

Lost = Callable[[Point, Tensor, int], Point]  # (point, lost kernels (B, M), round) -> point


def keep_dead_kernels(point: Point, lost: Tensor, step: int) -> Point:
    """Lost kernels stay where they are, and may come back."""
    return point


Events = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class PRBFRestarts(Restarts):
    """Where all rows are, and what happened on the way.  Built by :func:`warmed_up`."""

    point: Point
    lost: Lost
    paths: tuple[Tensor, ...]  # eq. 22 of each row after each round, (B,) each
    since: Tensor  # (B, K, M)  round after which a class is gone from a kernel; -1 where it is not
    gone: Tensor  # (B, M)  kernels that the last round left without data
    losses: Events = ()  # (round, row, kernel)
    held: Events = ()  # (round, row, class) whose every kernel rejected it

    @property
    def parameters(self) -> Point:
        return self.point

    @property
    def log_likelihood(self) -> Tensor:
        """Eq. 22, nats, ``(B,)``."""
        return self.point.objective

    @property
    def log_evidence(self) -> Tensor:
        """Eq. 22, which is what is maximised, nats, ``(B,)``."""
        return self.point.objective

    def proposed(self) -> Point:
        """``update`` where there is something to regularise, plain EM where ``alpha`` is 0; then lost kernels."""
        old = self.point
        plain = old.alpha == 0
        new = _tried(em if bool(plain.all()) else self.update, old)
        if bool(plain.any()) and not bool(plain.all()):
            rows = plain.nonzero().squeeze(-1)
            new = new.with_rows(rows, _tried(em, old[rows]))
        gone = is_lost(new, old.net)
        new = self.lost(new, gone, self.num_rounds + 1) if bool(gone.any()) else new
        return replace(new, gone=gone)

    def reached(self, parameters: Point) -> "PRBFRestarts":
        old, new, step = self.point, parameters, self.num_rounds + 1
        gone = self.gone if new.gone is None else new.gone
        low = new.net.mixing <= REJECTED
        return replace(
            self,
            point=new,
            paths=(*self.paths, new.objective),
            since=torch.where(low, torch.where(self.since < 0, step, self.since), -1),
            gone=gone,
            losses=self.losses + events(step, gone & ~self.gone),
            held=self.held if old.lag is None else self.held + events(step, vanishing_classes(old, old.lag)),
        )

    def change_to(self, parameters: Point) -> Tensor:
        """How far a round moves a mixing, or a centre in standard deviations, ``(B,)``."""
        return torch.where(parameters.objective.isfinite(), moved(self.point.net, parameters.net), torch.nan)

    def complaint(self, parameters: Point, row: int) -> str:
        return "the penalised log likelihood left the finite numbers"


def warmed_up(point: Point, update: Update, lost: Lost) -> PRBFRestarts:
    """All rows after the warm-up that ``update`` asks for, in which :func:`em` runs where ``alpha`` is not 0."""
    if bool((point.alpha > 0).any()):
        for _ in range(getattr(update, "warm_up", 0)):
            point = _tried(em, point)
    since = torch.full_like(point.net.mixing, -1, dtype=torch.long)
    none, nothing = torch.zeros_like(point.alpha).bool(), torch.zeros_like(since[:, 0]).bool()
    change = torch.full_like(point.alpha, torch.inf)
    return PRBFRestarts(point, lost, (point.objective,), since, nothing, update=update, failed=none, change=change)


def next_round(now: PRBFRestarts) -> PRBFRestarts:
    """One round; rows that become non-finite keep their last good state.

    :raises ArithmeticError: when that is all of them.
    """
    after = restarts.advance(now)
    if after.stop_reason is not None:
        raise ArithmeticError("the penalised log likelihood left the finite numbers; pass a larger floor.")
    return after


def events(step: int, which: Tensor) -> Events:
    """What happened in a round: round, row and column of each True of ``which``."""
    return tuple((step, b, j) for b, j in which.nonzero().tolist())


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


def rounds(point: Point, update: Update, num_steps: int, lost: Lost = keep_dead_kernels) -> PRBFRestarts:
    """A fixed number of rounds from ``point``, after the warm-up."""
    return restarts.repeated(warmed_up(point, update, lost), num_steps, next_round)


def effective(alpha: Tensor, net: Network) -> Tensor:
    """``alpha``, but 0 where no two classes share a kernel: the penalty is zero at every stationary point then."""
    shared = ((net.mixing > 0).sum(1) > 1).any(-1)
    return torch.where(shared, alpha, 0.0)


def vanishing_classes(point: Point, distance: Tensor) -> Tensor:
    """Classes that eq. 29 would leave no kernel, as none of their numerators is positive; shape ``(B, K)``.

    :param distance: squared distances for eq. 29, shape ``(B, K, M)``; a single kernel stays whatever they are.
    """
    return (numerators(point, distance) <= 0).all(-1) & (distance.shape[-1] > 1)
