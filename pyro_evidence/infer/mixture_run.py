"""One recognised mixture from its start to its posterior, and what is said when it does not converge."""

import warnings
from dataclasses import replace
from typing import Protocol

from pyro_evidence.errors import NotConverged
from pyro_evidence.infer import mixture_em
from pyro_evidence.infer.iterate import Status, Stop
from pyro_evidence.infer.mixture_deletion import Deletion
from pyro_evidence.infer.mixture_journal import Journal
from pyro_evidence.infer.mixture_start import Start
from pyro_evidence.infer.mixture_task import Task, finish
from pyro_evidence.mixture_posterior import MixturePosterior
from pyro_evidence.ops.mixture_updates import Update


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
    posterior = finish(task, fit, deletion, stop, journal)
    if posterior.status == Status.STEP_LIMIT.value and stop.tolerance > 0:  # else it was asked for
        message = f"EvidenceEM: {posterior.status}"
        if stop.throw:
            raise NotConverged(f"{message}. What was reached is in this error's .posterior.", posterior)
        warnings.warn(message, stacklevel=3)
    return posterior
