"""Mixtures that do not overfit: evidence-regularised EM, and the exact evidence of any model with one local label."""

import copy
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from pyro_evidence.data.chunks import Chunks
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.fitting.checkpoint import NOT_FITTED, Resumable
from pyro_evidence.fitting.em import GreedyDeletion, advance, choose, fit_mixture, warmed
from pyro_evidence.fitting.iterate import Fit, Status, Stop, check_stop
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.mixture import evidence as mixture_evidence
from pyro_evidence.mixture import fit as mixture_fit
from pyro_evidence.mixture.evidence import MixtureCurvature
from pyro_evidence.mixture.fit import RandomWeights
from pyro_evidence.mixture.posterior import MixturePosterior
from pyro_evidence.mixture.recognise import joint_of_rows
from pyro_evidence.mixture.updates import BoundedInflation, Update
from pyro_evidence.models.wrappers import explain_gaps
from pyro_evidence.mppca import fit as mppca_fit
from pyro_evidence.mppca.posterior import MPPCAPosterior
from pyro_evidence.mppca.recognise import is_mppca, own_model
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.program.checks import Arguments, same_arguments
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.settings import (
    Start,
    check_family,
    check_function,
    check_instance,
    check_methods,
    check_model,
    check_random_start,
)

UPDATE, INITIAL, DELETION = BoundedInflation(), RandomWeights(), GreedyDeletion()
STOP = Stop(tolerance=1e-6, gradient_tolerance=1e-2, num_steps=500)  # rounds go slowly at the end


@dataclass(eq=False, repr=False)
class EvidenceEM(Resumable):
    """Takes the place of ``SVI`` for a mixture: no collapse, no validation set, a number of components, a log evidence.

    The model is any Pyro mixture of Gaussian kernels whose means are linear in Normal weights, enumerated or
    ``MixtureSameFamily``.  Weights are integrated by Laplace's approximation; prior and noise precisions and the mixing
    are set by regularised EM.  Responses are standardised inside; all results are in the model's units.
    Husmeier (2000).  Mixtures of probabilistic PCA, :mod:`pyro_evidence.models.mppca`, have a way of their own, to
    which ``curvature`` does not apply, and return an :class:`~pyro_evidence.mppca.posterior.MPPCAPosterior`.

    :param model: from :mod:`pyro_evidence.models.mixture`, or one's own; with a uniform component for outliers by
        :func:`~pyro_evidence.models.wrappers.with_background`, of data in which nan means not observed by
        :func:`~pyro_evidence.models.wrappers.marginalised`.
    :param update: one round: ``BoundedInflation()``, ``husmeier2000_update``, ``corrected``, ``Unregularised()`` or
        ``WeightDecay(alpha)``, of ``pyro_evidence.mixture``.  None ends where Laplace's log evidence is highest;
        ``LaplaceEvidence(model, marginalise=(), start=Start(values=posterior.mode | posterior.hyperparameters))`` does.
    :param curvature: which part of the log joint's Hessian in the weights is used, as in ``LaplaceEvidence``: ``full``,
        ``coordinate`` (a block per component) or ``block`` (one per component and response), of
        ``pyro_evidence.mixture``.
    :param start: number of restarts, run as one batch, None: five, and their seed.
    :param initial: what a restart begins with, and after how many rounds regularisation sets in: ``RandomWeights()``,
        or ``NormalCentres()`` of ``pyro_evidence.mppca``.
    :param deletion: what to try after the rounds: ``GreedyDeletion()``, an object like it, or None for nothing.
    :param stop: tolerances, the most rounds, whether to raise and to show a progress bar.

    >>> import torch
    >>> from pyro_evidence import EvidenceEM
    >>> from pyro_evidence.models.mixture import gaussian_mixture
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> posterior = EvidenceEM(gaussian_mixture(5)).run(Y)
    >>> posterior.num_components
    2
    """

    model: Model
    _: KW_ONLY
    update: Update = UPDATE
    curvature: MixtureCurvature = mixture_evidence.coordinate
    start: Start = Start()
    initial: RandomWeights = INITIAL
    deletion: GreedyDeletion | None = DELETION
    stop: Stop = STOP

    def __post_init__(self) -> None:
        check_model(self.model)
        check_function("update", self.update, "BoundedInflation()")
        check_family(self.update, "mixture", "prbf")
        check_function("curvature", self.curvature, "pyro_evidence.mixture.full")
        check_random_start(self.start)
        check_instance("initial", self.initial, RandomWeights)
        check_stop(self.stop)
        if self.deletion is not None:
            check_methods("deletion", self.deletion, ("__call__", "split"), "GreedyDeletion()")
        self._is_mppca = own_model(self.model) is not None
        self._task: Any = None  # a MixtureFit or an MPPCAFit
        self._data: Arguments = ((), {})
        self._watched: Arguments | None = None

    def track_validation(self, *args: Any, **kwargs: Any) -> "EvidenceEM":
        """This engine, noting how well each round predicts unseen data; the fit itself stays what it is.

        :param args: the model's arguments for those data, responses included: ``watching(Y_test).run(Y).test_nll``.
        """
        found = copy.copy(self)
        found._watched = (args, kwargs)
        return found

    def run(self, *args: Any, **kwargs: Any) -> LaplacePosterior:
        """Fit to data, from scratch.

        Any other model with one local discrete site takes a slower way, without pruning: that of
        :class:`~pyro_evidence.infer.laplace_evidence.LaplaceEvidence`, labels summed out, around the best mode.
        ``stop.tolerance = 0`` asks for ``num_steps`` rounds, no more and no less.

        :param args: the model's arguments.
        :return: a :class:`~pyro_evidence.mixture.posterior.MixturePosterior` for a recognised mixture.
        :raises NotConverged: unless converged, or ``stop.throw`` is off, or the rounds were counted; it carries the
            posterior that was reached.  Also when every restart failed, with all reasons.
        :raises BadInput, UnsupportedModel: see errors.
        """
        joint = self._joint(args, kwargs)
        try:
            task = self._begun(joint, sampled=self.stop.tolerance > 0)  # rounds that are counted are made on all data
        except UnsupportedModel as why:
            if is_mppca(joint):
                raise
            self._nothing_watched(f"a model that LaplaceEvidence fits ({why})")
            if len(joint.discrete) != 1:
                raise UnsupportedModel(
                    f"{why} Nor has it exactly one discrete latent site; LaplaceEvidence may do."
                ) from None
            start = replace(self.start, restarts=self.start.number(mixture_fit.AUTOMATIC), tour=0)
            given: Any = {"nodes": 1, "curvature": exact_hessian, "stop": self.stop, "start": start}
            return LaplaceEvidence(self.model, marginalise=(), **given).run(*args, **kwargs)
        if isinstance(task, mppca_fit.MPPCAFit):
            self._nothing_watched("a mixture of probabilistic PCA")
        elif self._watched is not None:
            task = task.watching(self._joint(*self._watched))
        return fit_mixture(task, self)

    def run_chunks(self, chunks: Chunks) -> MixturePosterior | MPPCAPosterior:
        """Fit to data of which a chunk of rows is in memory at a time: the fit that :meth:`run` makes of all rows.

        Restarts run on a sample of the rows, which is kept; after it a fit takes some ten passes, where components
        overlap some hundred.  The posterior has no training data to fall back on: its methods ask for theirs.

        :param chunks: tuples of the model's positional arguments, such as ``[(y,) for y in Y.split(10_000)]``, or a
            ``DataLoader`` that does not shuffle; gone through once a pass.
        :return: a posterior without data: neither ``save`` nor importance sampling.
        :raises BadInput: for what can be gone through only once, in addition to what :meth:`run` raises.
        :raises UnsupportedModel: for programs of one's own, and for gaps but in mixtures of probabilistic PCA.
        """
        self._nothing_watched("a fit to chunks")
        begin_chunks = mppca_fit.begin_chunks if self._is_mppca else mixture_fit.begin_chunks
        return fit_mixture(begin_chunks(self.model, chunks, self), self)

    def _nothing_watched(self, what: str) -> None:
        if self._watched is not None:
            raise UnsupportedModel(
                f"track_validation(...) is for mixtures of linear-Gaussian kernels, this is {what}: leave it out."
            )

    def step(self, *args: Any, **kwargs: Any) -> float:
        """One round of all restarts, as ``SVI.step``; the first call begins, other data begin anew; no deletion.

        :return: minus the log evidence of the best restart at its current weights, nats, the model's units.
        :raises UnsupportedModel: for a model that is not recognised as a mixture; see :meth:`run`.
        """
        if self._task is None or not same_arguments(self._data, (args, kwargs)):
            joint = self._joint(args, kwargs)
            task = self._begun(joint)
            batch = warmed(task.batch, self.initial.warm_up)
            self._data = (args, kwargs)
        else:
            task = self._task
            batch = advance(task.batch)
        self._task = replace(task, batch=batch)
        return float(self._task.jacobian) - self._task.batch.objective

    @property
    def posterior(self) -> MixturePosterior | MPPCAPosterior:
        """The posterior at the state that :meth:`step` has reached.

        :raises BadInput: before the first step.
        """
        if self._task is None:
            raise BadInput(NOT_FITTED)
        fit = Fit(self._task.batch, Status.BY_HAND, (self._task.batch.objective,))
        return self._task.posterior(choose(self._task, fit, None, self.stop))

    def _joint(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogJoint:
        """The model on its data."""
        try:
            whole: Any = self.model.settled() if self._is_mppca else self.model  # type: ignore[attr-defined]
            return joint_of_rows(self.model, args, kwargs) or LogJoint(whole, args, kwargs)
        except BadInput as error:
            explain_gaps(error, self.model, args, kwargs)
            raise

    def _begun(self, joint: LogJoint, *, sampled: bool = False) -> Any:
        """The fit of the family that recognises the model, before its first round.

        :param sampled: whether restarts may run on a sample of the data.
        :raises UnsupportedModel: where none does, with what keeps it from being a mixture of linear-Gaussian kernels.
        """
        if self._is_mppca:
            return mppca_fit.begin(joint, self, sampled=sampled)
        try:
            return mixture_fit.begin(joint, self, sampled=sampled)
        except UnsupportedModel:
            if not is_mppca(joint):
                raise
            return mppca_fit.begin(joint, self, sampled=sampled)
