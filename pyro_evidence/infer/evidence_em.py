"""Mixtures that do not overfit: evidence-regularised EM for Pyro models."""

import copy
from typing import Any

from pyro_evidence.arguments import check_model
from pyro_evidence.checks import Arguments, same_arguments
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.infer import mixture_run, mppca_task
from pyro_evidence.infer.iterate import Stop
from pyro_evidence.infer.mixture_deletion import Deletion, GreedyDeletion
from pyro_evidence.infer.mixture_generic import run_generic
from pyro_evidence.infer.mixture_start import Start
from pyro_evidence.infer.mixture_task import Task, begin, reached
from pyro_evidence.infer.settings import check_function, check_instance, check_stop
from pyro_evidence.mixture_posterior import MixturePosterior
from pyro_evidence.models.missing import Missing, gaps_explained, marginalised, parsed
from pyro_evidence.mppca_posterior import MPPCAPosterior
from pyro_evidence.ops import mixture_evidence
from pyro_evidence.ops.mixture_evidence import MixtureCurvature
from pyro_evidence.ops.mixture_updates import Guarded, Update
from pyro_evidence.posterior import LaplacePosterior
from pyro_evidence.program import LogJoint, Model

UPDATE, START, DELETION = Guarded(), Start(), GreedyDeletion()
STOP = Stop(tolerance=1e-6, gradient_tolerance=1e-2, num_steps=500, throw=False)  # rounds go slowly at the end


class EvidenceEM:
    """Takes the place of ``SVI`` for a mixture: no collapse, no validation set, a number of components, a log evidence.

    The model is any Pyro mixture of Gaussian kernels whose means are linear in Normal weights, enumerated or
    ``MixtureSameFamily``.  Weights are integrated by Laplace's approximation; prior and noise precisions and the mixing
    are set by regularised EM.  Responses are standardised inside; all results are in the model's units.
    Husmeier (2000).  Mixtures of probabilistic PCA, :mod:`pyro_evidence.models.mppca`, have a way of their own, to
    which ``curvature`` does not apply, and return an :class:`~pyro_evidence.mppca_posterior.MPPCAPosterior`.

    :param model: from :mod:`pyro_evidence.models.mixture`, or one's own; with a uniform component for outliers by
        :func:`~pyro_evidence.models.background.with_background`.
    :param update: one round: ``Guarded()``, ``literal``, ``derived``, ``exact``, ``Unregularised()`` or
        ``WeightDecay(alpha)``.
    :param curvature: of gamma: ``mixture_evidence.full``, ``coordinate`` or ``block``.
    :param start: where to begin, how often, and how many rounds without regularisation.
    :param deletion: what to try after the rounds: ``GreedyDeletion()``, or None for nothing.
    :param stop: tolerances, the most rounds, whether to raise and to show a progress bar.
    :param missing: what nan among the responses means: ``Missing.REFUSE``, an error, or ``Missing.MARGINALISE``, not
        observed and integrated out (or their values ``"refuse"`` and ``"marginalise"``); see
        :func:`~pyro_evidence.models.missing.marginalised`.
    """

    def __init__(
        self,
        model: Model,
        *,
        update: Update = UPDATE,
        curvature: MixtureCurvature = mixture_evidence.coordinate,
        start: Start = START,
        deletion: Deletion | None = DELETION,
        stop: Stop = STOP,
        missing: Missing | str = Missing.REFUSE,
    ) -> None:
        check_model(model)
        check_function("update", update, "Guarded()")
        check_function("curvature", curvature, "mixture_evidence.full")
        check_instance("start", start, Start)
        check_stop(stop)
        check_function("deletion", deletion or GreedyDeletion(), "GreedyDeletion()")
        self.missing = parsed(missing)
        self.model = marginalised(model) if self.missing is Missing.MARGINALISE else model
        self.update, self.curvature = update, curvature
        self.start, self.deletion, self.stop = start, deletion, stop
        self._task: Task | mppca_task.Task | None = None
        self._data: Arguments = ((), {})
        self._watched: Arguments | None = None

    def watching(self, *args: Any, **kwargs: Any) -> "EvidenceEM":
        """This engine, noting how well each round predicts unseen data; the fit itself stays what it is.

        :param args: the model's arguments for those data, responses included: ``watching(Y_test).run(Y).test_nll``.
        """
        found = copy.copy(self)
        found._watched = (args, kwargs)
        return found

    def run(self, *args: Any, **kwargs: Any) -> LaplacePosterior:
        """Fit to data, from scratch.

        Any other model with one local discrete site takes a slower way, without pruning: EM to a mode by Newton's
        method on the expected log joint, then hyperparameters by the exact gradient of the Laplace evidence.
        Unless converged it warns; ``stop.tolerance = 0`` asks for ``num_steps`` rounds, no more and no less.

        :param args: the model's arguments.
        :return: a :class:`~pyro_evidence.mixture_posterior.MixturePosterior` for a recognised mixture.
        :raises NotConverged: with ``stop.throw``, unless converged; or when every restart failed, with all reasons.
        :raises BadInput, UnsupportedModel: see errors.
        """
        joint = self._joint(args, kwargs)
        if (found := mppca_task.begin(joint, self.start, self.update)) is not None:
            self._nothing_watched("a mixture of probabilistic PCA")
            return mixture_run.told(mppca_task.run(found, self.start, self.deletion, self.stop), self.stop)
        try:
            task = self._begin(joint)
        except UnsupportedModel as why:
            self._nothing_watched(f"a model that takes the generic way ({why})")
            return run_generic(joint, why, self.start.restarts, self.start.seed, self.stop)
        unseen = None if self._watched is None else self._joint(*self._watched)
        return mixture_run.run(task, self, task.journal(unseen))

    def _nothing_watched(self, what: str) -> None:
        if self._watched is not None:
            raise UnsupportedModel(
                f"watching(...) is for mixtures of linear-Gaussian kernels, this is {what}: leave it out."
            )

    def step(self, *args: Any, **kwargs: Any) -> float:
        """One round of all restarts, as ``SVI.step``; the first call begins, other data begin anew; no deletion.

        :return: minus the log evidence of the best restart at its current weights, nats, the model's units.
        :raises UnsupportedModel: for a model that is not recognised as a mixture; see :meth:`run`.
        """
        if self._task is None or not same_arguments(self._data, (args, kwargs)):
            joint = self._joint(args, kwargs)
            self._task = mppca_task.begin(joint, self.start, self.update) or self._begin(joint)
            self._data = (args, kwargs)
            self._task = self._task.warmed(self.update, self.start.warm_up)
        else:
            self._task = self._task.advanced()
        return float(self._task.jacobian) - self._task.batch.objective

    @property
    def posterior(self) -> MixturePosterior | MPPCAPosterior:
        """The posterior at the state that :meth:`step` has reached.

        :raises BadInput: before the first step.
        """
        if self._task is None:
            raise BadInput("nothing is fitted yet; call step(...) with the model's data first.")
        if isinstance(self._task, mppca_task.Task):
            return mppca_task.reached(self._task)
        return reached(self._task, self.stop)

    def _joint(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogJoint:
        """The model on its data."""
        with gaps_explained(self.missing, args, kwargs):
            return mppca_task.log_joint(self.model, args, kwargs)

    def _begin(self, joint: LogJoint) -> Task:
        return begin(joint, self.start, self.update, self.curvature)
