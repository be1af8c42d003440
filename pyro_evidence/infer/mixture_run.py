"""One recognised mixture from its start to its posterior, and what is said when it does not converge."""

from dataclasses import replace
from typing import Protocol, TypeVar

from pyro_evidence.infer import mixture_em
from pyro_evidence.infer.iterate import Status, Stop, require_convergence
from pyro_evidence.infer.mixture_deletion import Deletion
from pyro_evidence.infer.mixture_journal import Journal
from pyro_evidence.infer.mixture_start import Start
from pyro_evidence.infer.mixture_task import Task, finish
from pyro_evidence.mixture_posterior import MixturePosterior
from pyro_evidence.ops.mixture_updates import Update
from pyro_evidence.posterior import LaplacePosterior

Found = TypeVar("Found", bound=LaplacePosterior)


class Settings(Protocol):
    """What an engine was told."""

    update: Update
    start: Start
    deletion: Deletion | None
    stop: Stop


def run(task: Task, settings: Settings, journal: Journal) -> MixturePosterior:
    """Warm-up, rounds of all restarts, deletion, rounds of the chosen one.

    :raises NotConverged: with ``stop.throw``, unless converged; or when every restart failed, with all reasons.
    """
    stop, deletion = settings.stop, settings.deletion
    together = stop if deletion is None else replace(stop, num_steps=min(stop.num_steps, deletion.after))
    fit = mixture_em.em(task.batch, settings.update, settings.start.warm_up, together, journal)
    return told(finish(task, fit, deletion, stop, journal), stop)


def told(posterior: Found, stop: Stop) -> Found:
    """The posterior; where it is not converged, though that was asked for, a warning or an error before.

    :raises NotConverged: with ``stop.throw``.
    """
    status = Status(posterior.status)
    if status in (Status.STEP_LIMIT, Status.FAILED) and stop.tolerance > 0:
        require_convergence("EvidenceEM", status, posterior, stop)
    return posterior
