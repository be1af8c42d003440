"""One loop, one stopping rule, one honest report."""

import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from tqdm.auto import tqdm

from pyro_evidence.data.ranks import COMMUNICATOR
from pyro_evidence.errors import NotConverged
from pyro_evidence.fitting import checkpoint
from pyro_evidence.fitting.process_state import restored_global_state
from pyro_evidence.settings import check_count, check_flag, check_instance, check_number, check_path, stacklevel


def bar_of(name: str, progress: bool, total: int | None = None) -> Any:
    """A progress bar on one line, after a second; it tells the time left where the number of steps is known.

    Silent without ``progress``, where tqdm's own ``TQDM_DISABLE`` is set, and in all processes but the first.
    """
    silent = {} if progress and COMMUNICATOR.get().is_first else {"disable": True}  # left out, the environment decides
    shape = {} if total else {"bar_format": "{desc}: step {n_fmt}, {elapsed}{postfix}"}
    return tqdm(total=total, desc=name, delay=1.0, leave=False, **silent, **shape)


MANY_STEPS = 2_000  # of loops whose steps are cheap, and go slowly at the end
NOTHING = 1e-12  # nats: a slope at rounding, at which a loop that begins there has ended


class Status(Enum):
    """Why the loop stopped; the value is what the user reads.

    >>> from pyro_evidence import Status
    >>> Status.CONVERGED.value
    'converged'
    """

    CONVERGED = "converged"
    STEP_LIMIT = "ran out of steps: raise num_steps or loosen tolerance"
    STUCK = "no step uphill raises the log evidence, whose gradient is not zero: suspect a density that is not smooth"
    UNBOUNDED = (
        "a hyperparameter runs to infinity, so the log evidence has no maximum: give it a prior, or fix it. If it is "
        "noise that runs to zero, the data are met to their last digits: give that a prior without mass near there"
    )
    PLATEAU = (
        "the log evidence no longer feels a real-valued hyperparameter, so this is a plateau far from the data and no "
        "maximum: start the params nearer to it, scales at the size of the data's, or give them priors (maximise=[...])"
    )
    SINGULAR = (
        "the exact Hessian is becoming singular, where Laplace's log evidence goes to infinity: the mode is about to "
        "merge with another one or to split. Pass curvature=gauss_newton, the default for networks; else try other "
        "restarts, or give the hyperparameters a prior"
    )
    VANISHING = (
        "the posterior mode is about to vanish or to merge with others, and the log evidence has no maximum on this "
        "side of that: the posterior is of the last mode. Other starts may lead to another one, "
        "start=Start(restarts=8), and a network with fewer hidden units may have none that vanish"
    )
    INTERPOLATING = (
        "the data are met so nearly that the noise goes to nothing and the posterior mode can no longer be followed, "
        "while the log evidence still rises: the posterior is of the last mode. Fix the noise precision, or take a "
        "network with fewer hidden units"
    )
    BY_HAND = "stepped by hand, not run to convergence"
    FAILED = "a step failed: this is the last good state"
    INTERRUPTED = "interrupted: this is the last good state"


class Climber(Protocol):
    """A state that knows what it maximises."""

    @property
    def objective(self) -> float:
        """Log evidence plus log hyperprior, nats."""

    @property
    def gradient_norm(self) -> float:
        """Largest derivative of the objective in the log hyperparameters, nats; 0 where there is none."""

    @property
    def stop_reason(self) -> Status | None:
        """Why no further step can be made, if that is so."""


State = TypeVar("State", bound=Climber)


@dataclass(frozen=True)
class Stop:
    """When to stop, and what to do when that is not at convergence.

    :ivar tolerance: relative change of the log evidence in one step that counts as none.  Zero asks for a counted
        number of steps: ``num_steps`` of them, after which nobody complains.
    :ivar gradient_tolerance: largest derivative in the log hyperparameters that counts as zero, nats; for
        ``LaplaceEvidence`` the slope per standard deviation of all hyperparameters, the same in every unit.
    :ivar num_steps: most steps.
    :ivar throw: raise :class:`~pyro_evidence.errors.NotConverged`, which carries the posterior that was reached, unless
        converged; otherwise only warn.  Every engine obeys alike.
    :ivar progress: show a progress bar when the loop takes more than a second.
    :ivar checkpoint: a file for the last good state, where ``engine.resume(path).run(...)`` goes on; None for none.
    :ivar checkpoint_interval: seconds between two writings of it.
    :ivar quadrature_tol: where sites are integrated numerically, the nats by which more nodes may still move the log
        evidence; means and standard deviations are good to 2.5 times as many standard deviations.

    >>> from pyro_evidence import Stop
    >>> Stop(num_steps=1000).throw  # an early end is an error, which carries the posterior
    True
    >>> Stop(tolerance=0.0, num_steps=100).counted  # a hundred rounds, whose end is what was asked for
    True
    """

    tolerance: float = 1e-8
    gradient_tolerance: float = 1e-6  # |d log evidence / d log hyperparameter| in nats
    num_steps: int = 300
    throw: bool = True
    progress: bool = True
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_interval: float = 60.0
    quadrature_tol: float = 0.02  # nats

    def __post_init__(self) -> None:
        check_count("num_steps", self.num_steps, at_least=0)
        for name in ("tolerance", "gradient_tolerance", "checkpoint_interval", "quadrature_tol"):
            check_number(name, getattr(self, name))
        for name in ("throw", "progress"):
            check_flag(name, getattr(self, name))
        if self.checkpoint is not None:
            check_path("checkpoint", self.checkpoint)

    @property
    def counted(self) -> bool:
        """Whether the steps were counted on purpose, so that the last of them is no early end."""
        return self.tolerance <= 0.0

    def __call__(self, before: float, state: Climber, step: int) -> Status | None:
        """The reason to stop after ``step`` steps, or None."""
        size, gap = 1.0 + abs(state.objective), abs(state.objective - before)
        small, level = gap <= self.tolerance * size, state.gradient_norm <= self.gradient_tolerance
        if small and level:
            return Status.CONVERGED
        return state.stop_reason or (Status.STEP_LIMIT if step >= self.num_steps else None)


def check_stop(stop: Any) -> None:
    """Refuse a stopping rule that is none.

    :raises BadInput: for anything but a :class:`Stop`.
    """
    check_instance("stop", stop, Stop)


@dataclass(frozen=True)
class Fit(Generic[State]):
    """The last good state, why the loop stopped, and the way there."""

    state: State
    status: Status
    objectives: tuple[float, ...]


def iterate(
    step: Callable[[State], State],
    state: State,
    stop: Stop,
    name: str,
    quantity: str = "log evidence",
    before: Sequence[float] = (),
) -> Fit[State]:
    """Repeat ``step`` until ``stop`` gives a reason; Ctrl-C keeps the last good state and says so.

    :param name: of the engine, and ``quantity`` of what it maximises, for the progress bar.
    :param before: objectives on the way to ``state``, its own last.
    """
    settled = Status.CONVERGED if state.gradient_norm <= min(NOTHING, stop.gradient_tolerance) else None
    begin = checkpoint.Progress(step, state, tuple(before or [state.objective]), settled)
    loop = checkpoint.begun(name, begin, state.objective)
    last, state, objectives, status = loop.begin.last, loop.begin.state, [*loop.begin.objectives], loop.begin.status
    with bar_of(name, stop.progress, total=stop.num_steps if stop.counted else None) as bar:
        while status is None:
            try:
                with restored_global_state():
                    after = step(state)
            except (KeyboardInterrupt, ArithmeticError) as error:
                status = Status.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Status.FAILED
                warnings.warn(f"{name}, step {len(objectives)}: {status.value}. {error}", stacklevel=stacklevel())
                break
            last, state = None if loop.recorder is None else state, after
            objectives.append(state.objective)
            status = stop(objectives[-2], state, len(objectives) - 1)
            if status is None:
                loop.note(checkpoint.Progress(step, state, tuple(objectives), None, last))
            reached = f"{state.objective:.4f}" if math.isfinite(state.objective) else str(state.objective)
            bar.set_postfix_str(f"{quantity} {reached}", refresh=False)
            bar.update()
    progress = checkpoint.Progress(step, state, tuple(objectives), status, last)
    loop.end(progress, interrupted=status is Status.INTERRUPTED)
    return Fit(state, status, tuple(objectives))


def require_convergence(name: str, status: Status, posterior: object, stop: Stop, detail: str = "") -> None:
    """Complain of a loop that ended early: the one place where ``stop.throw`` is obeyed.

    :param name: of the engine.
    :param detail: what else to say of the place that was reached.
    :raises NotConverged: with ``stop.throw``, unless converged, interrupted by hand, or at the end of steps that were
        counted on purpose; otherwise a warning.
    """
    if status in (Status.CONVERGED, Status.INTERRUPTED) or (status is Status.STEP_LIMIT and stop.counted):
        return
    if stop.throw:
        message = "The posterior so far is in this error's .posterior; Stop(throw=False) returns it instead."
        raise NotConverged(f"{name}: {status.value}{detail}. {message}", posterior)
    if status is not Status.FAILED:  # the loop has already warned
        warnings.warn(f"{name}: {status.value}{detail}.", stacklevel=stacklevel())
