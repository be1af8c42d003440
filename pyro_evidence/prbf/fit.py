"""One network on its way: from the Pyro model and its data to restarts, round by round, and to a posterior."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from pyro_evidence.data.rows import Rows
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.em import Restarts, advance
from pyro_evidence.fitting.iterate import Fit
from pyro_evidence.models.prbf import PRBF
from pyro_evidence.numerics.batched import first_highest
from pyro_evidence.prbf.data import DataTotals, Labelled, training_of
from pyro_evidence.prbf.densities import ClassData, Network, Piece, Point, by_class, evaluate, moved
from pyro_evidence.prbf.posterior import ClassWithoutKernels, DeadKernel, PRBFPosterior, Rejection
from pyro_evidence.prbf.updates import Update, em, numerators
from pyro_evidence.settings import check_object, check_result, real_number

LOST = 1e-6  # share of the data below which a kernel counts as lost
REJECTED = 1e-8  # mixing below which a class counts as gone from a kernel

Lost = Callable[[Point, Tensor, int], Point]  # (point, lost kernels (B, M), round) -> point


def keep_dead_kernels(point: Point, lost: Tensor, step: int) -> Point:
    """Lost kernels stay where they are, and may come back."""
    return point


Events = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, eq=False)
class PRBFRestarts(Restarts):
    """Where all rows are, and what happened on the way.  Built by :func:`warmed_up`."""

    point: Point
    lost: Lost
    paths: tuple[Tensor, ...]  # eq. 22 of each row after each round, (B,) each
    since: Tensor  # (B, K, M)  round after which a class is gone from a kernel; -1 where it is not
    losses: Events = ()  # (round, row, kernel)
    held: Events = ()  # (round, row, class) whose every kernel rejected it

    parameters = property(attrgetter("point"))
    log_likelihood = log_evidence = property(attrgetter("point.objective"))  # eq. 22, which is maximised, nats, (B,)

    def proposed(self) -> Point:
        """``update`` where there is something to regularise, plain EM where ``alpha`` is 0; then lost kernels."""
        old = self.point
        plain = old.alpha == 0
        new = _tried(em if bool(plain.all()) else self.update, old)
        if bool(plain.any()) and not bool(plain.all()):
            rows = plain.nonzero().squeeze(-1)
            new = new.with_rows(rows, _tried(em, old[rows]))
        few = new.counts.sum(1) < LOST * new.data.num_data  # data belong to the kernel now
        gone = few & (old.net.mixing > 0).any(1)
        new = self.lost(new, gone, self.num_rounds + 1) if bool(gone.any()) else new
        return replace(new, gone=gone)

    def reached(self, parameters: Point) -> "PRBFRestarts":
        old, new, step = self.point, parameters, self.num_rounds + 1
        low = new.net.mixing <= REJECTED
        return replace(
            self,
            point=new,
            paths=(*self.paths, new.objective),
            since=torch.where(low, torch.where(self.since < 0, step, self.since), -1),
            losses=self.losses + events(step, new.gone & ~old.gone),
            held=self.held + events(step, vanishing_classes(old, old.lag)),
        )

    def change_to(self, parameters: Point) -> Tensor:
        """Largest move of a round, of a mixing or of a centre in standard deviations, ``(B,)``."""
        return torch.where(parameters.objective.isfinite(), moved(self.point.net, parameters.net), torch.nan)

    def complaint(self, parameters: Point, row: int) -> str:
        return "the penalised log likelihood left the finite numbers"


def next_round(now: PRBFRestarts) -> PRBFRestarts:
    """One round; rows that become non-finite keep their last good state.

    :raises ArithmeticError: when that is all of them.
    """
    after = advance(now)
    if after.stop_reason is not None:
        raise ArithmeticError("the penalised log likelihood left the finite numbers; pass a larger floor.")
    return after


def events(step: int, which: Tensor) -> Events:
    """Events of a round: round, row and column of each True of ``which``."""
    return tuple((step, b, j) for b, j in which.nonzero().tolist())


def _tried(update: Update, point: Point) -> Point:
    """The next point.

    :raises ArithmeticError: when a covariance matrix has become singular, which a floor above 0 prevents.
    """
    try:
        return check_result("update", update(point), Point, "the next Point, such as Ascent() gives")
    except LinAlgError as error:
        raise ArithmeticError(f"a covariance became singular; pass a larger floor, as Full(1e-6). {error}") from error


def vanishing_classes(point: Point, distance: Tensor) -> Tensor:
    """Classes that eq. 29 would leave no kernel, as none of their numerators is positive; shape ``(B, K)``.

    :param distance: squared distances for eq. 29, shape ``(B, K, M)``; a single kernel stays whatever they are.
    """
    return (numerators(point, distance) <= 0).all(-1) & (distance.shape[-1] > 1)


HEAVY = 50.0  # times the data: beyond every multiple of use, the source's 20 N / (K M) for any K and M among them


@dataclass(frozen=True)
class AlphaPerKernel:
    """``alpha`` in the source's units: ``c N / (K M)``, ``N`` all training data.

    :ivar c: the multiple; the source has 5, 10, 15 and 20.

    >>> import torch
    >>> from pyro_evidence import OverlapEM
    >>> from pyro_evidence.models.prbf import prbf
    >>> from pyro_evidence.prbf import AlphaPerKernel
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> labels = torch.arange(60) // 30
    >>> OverlapEM(prbf(2), alpha=AlphaPerKernel(10.0)).run(Y, labels).alpha  # 10 * 60 / (2 * 2)
    150.0
    """

    c: float

    def __call__(self, num_data: float, num_classes: int, num_kernels: int) -> float:
        """``alpha = c N / (K M)``, nats."""
        return self.c * num_data / (num_classes * num_kernels)


Alpha = float | Callable[[float, int, int], float]


def alpha_of(alpha: Alpha, num_data: float, model: PRBF) -> float:
    """The number that an ``alpha`` stands for, nats.

    :raises BadInput: unless it is finite and not negative.
    """
    check_object("alpha", alpha)
    value = alpha(num_data, model.num_classes, model.num_kernels) if callable(alpha) else alpha
    number = real_number(value)
    if not 0.0 <= number < math.inf:
        raise BadInput(
            f"alpha={alpha!r} is {value!r} nats; expected a finite number of at least 0, or AlphaPerKernel(c) with "
            f"c >= 0. It weighs a penalty: 0 is plain EM."
        )
    return number


@dataclass(frozen=True, eq=False)
class PRBFFit:
    """Data about their mean, and all restarts."""

    model: PRBF
    kept: tuple[Tensor, Tensor] | None  # X (N, D) and labels (N,); None of data that came in chunks
    shift: Tensor  # (D,) subtracted from the inputs
    point: Point
    batch: PRBFRestarts
    warm_up: int = 0


def require_survivors(point: Point) -> None:
    """Refuse an ``alpha`` beyond all data at which eq. 29 would empty a class.

    :raises BadInput: naming the class.
    """
    if not bool((point.alpha > HEAVY * point.data.num_data).any()):
        return
    looked = em(em(point))  # distances at the start are those of random centres
    if bool((gone := vanishing_classes(looked, looked.distance)).any()):
        row, k = gone.nonzero()[0].tolist()
        raise BadInput(
            f"alpha={float(point.alpha[row]):.4g} is so large that class {k} would vanish: every kernel would reject "
            f"it (eq. 29). There are {float(point.data.num_data):g} data; expected an alpha of at most "
            f"{HEAVY:g} times as much, such as AlphaPerKernel(20.0)."
        )


def begin(engine: Any, rows: Rows[Labelled], *alphas: Alpha) -> PRBFFit:
    """All restarts after the warm-up.

    :param engine: whose model, alpha, start, initial, update and lost are used.
    :param alphas: for each of which there are all restarts, in the place of the engine's.
    :raises BadInput: see :class:`~pyro_evidence.prbf.data.DataTotals` and the start; where eq. 22 is no number; when
        ``alpha`` outweighs the data and leaves a class no kernel.
    """
    totals, kind = DataTotals.of(rows, engine.model.num_classes), engine.model.kernels
    shift = totals.mean

    def by_classes(piece: Labelled) -> Piece:  # made anew in every pass where data are not in memory
        return by_class(kind.features(piece[0] - shift), piece[1], engine.model.num_classes)

    data = ClassData(rows.mapped(by_classes), kind, kind.floor * totals.variance, totals.per_class)
    net = engine.initial(training_of(engine.model, rows, totals), start=engine.start)
    net = check_result("initial", net, Network, "a Network, such as RandomPoints() gives")
    num, weights = len(net.loc), [alpha_of(x, float(data.num_data), engine.model) for x in alphas or (engine.alpha,)]
    net = replace(net, loc=net.loc - shift)[torch.arange(num).repeat(len(weights)).to(shift.device)]
    point = first(data, net, net.loc.new_tensor(weights).repeat_interleave(num))
    if len(bad := (~point.objective.isfinite()).nonzero()):
        raise BadInput(
            f"eq. 22 is {float(point.objective[bad[0]])} at start {int(bad[0])}; expected a finite number. Standardise "
            f"the inputs (datasets.standardised), or begin where the data have some density: initial=KMeans()."
        )
    warm_up = getattr(engine.update, "warm_up", 0) if bool((point.alpha > 0).any()) else 0
    warm = point
    for _ in range(warm_up):
        warm = _tried(em, warm)
    seen = {"paths": (warm.objective,), "since": torch.full_like(warm.net.mixing, -1, dtype=torch.long)}
    batch = PRBFRestarts.begun(warm.alpha, point=warm, lost=engine.lost, update=engine.update, **seen)
    require_survivors(warm)
    return PRBFFit(engine.model, rows.example if data.keeps else None, shift, point, batch, warm_up)


def first(data: ClassData, net: Network, alpha: float | Tensor) -> Point:
    """The batch at its start; where no two classes share a kernel the penalty is zero at every stationary point."""
    shared = ((net.mixing > 0).sum(1) > 1).any(-1)
    weights = torch.where(shared, torch.as_tensor(alpha).to(net.loc), 0.0)
    return evaluate(data.sized(net.loc.shape[1], len(net.loc)), net, weights)


def posterior_of(task: PRBFFit, fit: Fit[PRBFRestarts]) -> PRBFPosterior:
    """The best restart, in the units of the data."""
    now = fit.state
    best = int(first_highest(now.point.objective))
    point = now.point[torch.tensor([best], device=now.point.alpha.device)]
    net = point.net
    started = task.point.net.mixing[best] > 0
    gone = ((now.since[best] >= 0).to(started.device) & started).nonzero().tolist()
    rejections = sorted((Rejection(j, k, int(now.since[best, k, j])) for k, j in gone), key=lambda r: r.step)
    held: dict[int, list[int]] = {}  # class to rounds, in the order of the first ones
    for step, _, k in (event for event in now.held if event[1] == best):
        held.setdefault(k, []).append(step)
    return PRBFPosterior(
        model=task.model,
        network=replace(net, loc=net.loc + task.shift),
        alpha=float(point.alpha),
        status=fit.status.value,
        objectives=tuple(float(path[best]) for path in now.paths),
        log_likelihood=point.log_likelihood[0],
        counts=point.counts[0],
        overlap=point.overlap[0],
        rejections=tuple(rejections),
        losses=tuple(DeadKernel(j, step) for step, row, j in now.losses if row == best),
        held=tuple(ClassWithoutKernels(k, found[0], found[-1], len(found)) for k, found in held.items()),
        floored=point.kind.rests(net.covariance, point.data.unit)[0],
        restarts=now.point.objective,
        warm_up=task.warm_up,
        training=task.kept,
    )
