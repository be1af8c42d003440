"""Mixtures that do not overfit: evidence-regularised EM for Pyro models."""

from typing import Any

import torch

from pyro_evidence.errors import BadInput, NotConverged, UnsupportedModel
from pyro_evidence.infer import mixture_em
from pyro_evidence.infer.iterate import Fit, Status, Stop
from pyro_evidence.infer.mixture_em import Batch, Deletion, GreedyDeletion
from pyro_evidence.infer.mixture_generic import run_generic
from pyro_evidence.infer.mixture_start import Start
from pyro_evidence.mixture_posterior import MixturePosterior, laplace_state
from pyro_evidence.mixture_structure import MixtureStructure, recognise_mixture
from pyro_evidence.ops import mixture_evidence, mixture_rows
from pyro_evidence.ops.mixture import Mixture
from pyro_evidence.ops.mixture_evidence import MixtureCurvature
from pyro_evidence.ops.mixture_units import ResponseUnits, response_units
from pyro_evidence.ops.mixture_updates import Guarded, Update, estep
from pyro_evidence.posterior import LaplacePosterior
from pyro_evidence.program import LogJoint, Model

UPDATE, START, DELETION = Guarded(), Start(), GreedyDeletion()
STOP = Stop(tolerance=1e-6, gradient_tolerance=1e-2, num_steps=100, throw=False)  # rounds go slowly at the end


class EvidenceEM:
    """Takes the place of ``SVI`` for a mixture: no collapse, no validation set, a number of components, a log evidence.

    The model is any Pyro mixture of Gaussian kernels whose means are linear in Normal weights, enumerated or
    ``MixtureSameFamily``.  Weights are integrated by Laplace's approximation; prior and noise precisions and the mixing
    are set by regularised EM.  Responses are standardised inside; all results are in the model's units.
    Husmeier (2000).

    :param model: from :mod:`pyro_evidence.models.mixture`, or one's own.
    :param update: one round: ``Guarded()``, ``literal``, ``derived``, ``exact``, ``Unregularised()`` or
        ``WeightDecay(alpha)``.
    :param curvature: of gamma: ``mixture_evidence.full``, ``coordinate`` or ``block``.
    :param start: where to begin, how often, and how many rounds without regularisation.
    :param deletion: what to try after the rounds: ``GreedyDeletion()``, or None for nothing.
    :param stop: tolerances, the most rounds, whether to raise and to show a progress bar.
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
    ) -> None:
        if not callable(model):
            raise BadInput(f"model is a {type(model).__name__}; expected a callable Pyro model. Data go to run(...).")
        self.model, self.update, self.curvature = model, update, curvature
        self.start, self.deletion, self.stop = start, deletion, stop

    def run(self, *args: Any, **kwargs: Any) -> LaplacePosterior:
        """Fit to data, from scratch.

        Any other model with one local discrete site takes a slower way, without pruning: EM to a mode by Newton's
        method on the expected log joint, then hyperparameters by the exact gradient of the Laplace evidence.

        :param args: the model's arguments.
        :return: a :class:`~pyro_evidence.mixture_posterior.MixturePosterior` for a recognised mixture.
        :raises NotConverged: with ``stop.throw``, unless converged; or when every restart failed.
        :raises BadInput, UnsupportedModel: see errors.
        """
        joint = LogJoint(self.model, args, kwargs)
        try:
            structure = recognise_mixture(joint)
        except UnsupportedModel as why:
            return run_generic(joint, why, self.start.restarts, self.start.seed, self.stop)
        return self._run_recognised(structure)

    def _run_recognised(self, structure: MixtureStructure) -> MixturePosterior:
        units = response_units(structure.Y, structure.G, structure.weight)
        fit = mixture_em.em(self._first(structure, units), self.update, self.start.warm_up, self.stop)
        if bool(fit.state.failed.all()):
            raise NotConverged(
                "EvidenceEM: every restart left the finite numbers. Pass update=Guarded(), whose gamma prior bounds it."
            )
        state = self.deletion(fit.state) if self.deletion and fit.status is not Status.INTERRUPTED else fit.state
        posterior = _posterior(structure, units, Fit(state, fit.status, fit.objectives))
        if fit.status not in (Status.CONVERGED, Status.INTERRUPTED) and self.stop.throw:
            raise NotConverged(
                f"EvidenceEM: {fit.status.value}. The posterior so far is in the error's .posterior.",
                posterior,
            )
        return posterior

    def _first(self, structure: MixtureStructure, units: ResponseUnits) -> Batch:
        """All restarts before the first round."""
        products = self.curvature is not mixture_evidence.block or structure.correlation is not None
        data = units.data(structure.Y, structure.G, structure.weight, products=products)
        ties, own = units.ties(structure.ties), units.standard(structure.start)
        return mixture_em.first(data, self.start(data, own, ties), ties, self.curvature, self.update)


def _posterior(structure: MixtureStructure, units: ResponseUnits, fit: Fit[Batch]) -> MixturePosterior:
    """The best restart at its mode, in the model's units."""
    batch = fit.state
    heights, modes = mixture_em.occam(batch.at)
    heights = torch.where(batch.failed, -torch.inf, heights)
    best = heights.argmax().reshape(1)
    like = units.standard(structure.start)
    mixture = structure.consistent(units.original(mixture_rows.padded(mixture_rows.row(modes, best), like)))
    state = laplace_state(structure, mixture)
    jacobian = units.log_jacobian(batch.at.data)
    restarts = _log_evidences(batch, modes) - jacobian
    path = tuple(v - float(jacobian) for v in fit.objectives)
    clipped = int(batch.at.well_determined.num_clipped[best])
    return MixturePosterior(
        state, fit.status.value, path, restarts, structure=structure, mixture=mixture, num_clipped=clipped
    )


def _log_evidences(batch: Batch, modes: Mixture) -> torch.Tensor:
    """Laplace log evidence of each restart at its mode, full Hessian, nan where it failed."""
    at = estep(batch.at.data, modes, batch.at.ties, mixture_evidence.full)
    found = mixture_evidence.log_evidence(mixture_evidence.log_joint(at.data, modes), at.A, modes.alpha)
    return torch.where(batch.failed, torch.nan, found)
