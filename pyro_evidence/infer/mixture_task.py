"""One recognised mixture on its way: from the Pyro model to a batch of restarts, and back to a posterior."""

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput, NotConverged
from pyro_evidence.infer import mixture_em
from pyro_evidence.infer.iterate import Fit, Status, Stop, iterate
from pyro_evidence.infer.mixture_deletion import Deletion
from pyro_evidence.infer.mixture_em import Batch
from pyro_evidence.infer.mixture_journal import Journal
from pyro_evidence.infer.mixture_start import Starting
from pyro_evidence.mixture_posterior import MixturePosterior, laplace_state
from pyro_evidence.mixture_structure import MixtureStructure, recognise_mixture
from pyro_evidence.ops import mixture_evidence, mixture_mode, mixture_rows
from pyro_evidence.ops.mixture import Mixture, MixtureData
from pyro_evidence.ops.mixture_evidence import MixtureCurvature
from pyro_evidence.ops.mixture_units import ResponseUnits, response_units
from pyro_evidence.ops.mixture_updates import Update
from pyro_evidence.program import LogJoint

SAME = 1e-6  # relative difference between the evidences of two restarts at one mode


@dataclass(frozen=True)
class Task:
    """A recognised model, the units inside, and all restarts."""

    structure: MixtureStructure
    units: ResponseUnits
    batch: Batch

    @property
    def jacobian(self) -> Tensor:
        """What the log evidence loses by going to the model's units, nats."""
        return self.units.log_jacobian(self.batch.at.data)

    def unseen(self, joint: LogJoint) -> MixtureData:
        """The same model's other data, in the units inside.

        :raises BadInput: when they are not of the same kind.
        """
        found = recognise_mixture(joint)
        ours, theirs = ((x.Y.shape[-1], 1 if x.G is None else x.G.shape[-1]) for x in (self.structure, found))
        if ours != theirs:
            raise BadInput(
                f"the unseen data have {_outputs(theirs)}, the fitted ones {_outputs(ours)}: expected the same."
            )
        products = self.batch.at.data.layout.has_products
        data = self.units.data(found.Y, found.G, found.weight, products=products)
        return found.spread(data, self.structure.background, self.units.unit)

    def journal(self, unseen: LogJoint | None = None) -> Journal:
        """A journal of the errors of every round, with the start as its first entry."""
        found = Journal(self.units, None if unseen is None else self.unseen(unseen))
        found.look(self.batch)
        return found

    def warmed(self, update: Update, num_steps: int) -> "Task":
        """After the warm-up, ready for ``update``."""
        return replace(self, batch=mixture_em.warmed(self.batch, update, num_steps))

    def advanced(self) -> "Task":
        """One round on."""
        return replace(self, batch=mixture_em.advance(self.batch))


def _outputs(shape: tuple[int, int]) -> str:
    return f"{shape[0]} responses and {shape[1]} basis functions"


def begin(joint: LogJoint, start: Starting, update: Update, curvature: MixtureCurvature) -> Task:
    """The mixture recognised, and all restarts before the first round.

    :raises UnsupportedModel: when it is no mixture of linear-Gaussian kernels.
    """
    structure = recognise_mixture(joint)
    units = response_units(structure.Y, structure.G, structure.weight)
    products = curvature is not mixture_evidence.block or structure.correlation is not None
    data = units.data(structure.Y, structure.G, structure.weight, products=products)
    data = structure.spread(data, structure.background, units.unit)
    ties, own = units.ties(structure.ties), units.standard(structure.start)
    return Task(structure, units, mixture_em.first(data, start(data, own, ties), ties, curvature, update))


def finish(task: Task, fit: Fit[Batch], deletion: Deletion | None, stop: Stop, journal: Journal) -> MixturePosterior:
    """From all restarts to one: deletion, choice, and, if anything was deleted, rounds of the chosen one alone.

    :raises NotConverged: when every restart has failed, with all reasons.
    """
    if fit.state.verdict is Status.FAILED:
        letters = "\n".join(fit.state.reasons)
        raise NotConverged(f"EvidenceEM: every restart failed. Pass update=Guarded(rho=0.05).\n{letters}")
    fit = _deleted(fit, deletion) if deletion else fit
    batch, modes = fit.state, fit.state.modes
    best = highest(torch.where(batch.failed, -torch.inf, modes.occam))
    at_mode = mixture_rows.row(modes.mixture, best)
    if deletion and fit.status is not Status.INTERRUPTED:
        rest = iterate(journal, mixture_em.alone(batch, best), stop, "EvidenceEM")
        fit = Fit(rest.state, rest.status, fit.objectives + rest.objectives[1:])
        at_mode = mixture_mode.find_mode(rest.state.at.data, rest.state.at.mixture)
    elif fit.status is Status.STEP_LIMIT and float(batch.change[best]) <= stop.gradient_tolerance:
        fit = Fit(batch, Status.CONVERGED, fit.objectives)  # the others are not
    restarts = torch.where(batch.failed, torch.nan, modes.log_evidence)
    found = posterior_of(task, fit, at_mode, (restarts, batch.reasons))
    return replace(found, paths=journal.path(int(best)))


def reached(task: Task, stop: Stop) -> MixturePosterior:
    """The posterior where the best restart stands."""
    return finish(task, Fit(task.batch, Status.BY_HAND, (task.batch.objective,)), None, stop, task.journal())


def _deleted(fit: Fit[Batch], deletion: Deletion) -> Fit[Batch]:
    if fit.status is Status.INTERRUPTED:
        return fit
    try:
        return Fit(deletion(fit.state), fit.status, fit.objectives)
    except KeyboardInterrupt:
        warnings.warn(f"EvidenceEM, deletion: {Status.INTERRUPTED.value}.", stacklevel=4)
        return Fit(fit.state, Status.INTERRUPTED, fit.objectives)


def posterior_of(
    task: Task, fit: Fit[Batch], at_mode: Mixture, restarts: tuple[Tensor, tuple[str, ...]]
) -> MixturePosterior:
    """One mixture in the model's units.

    :param at_mode: one row, its weights at a mode.
    :param restarts: log evidence of each in the engine's units, and what those that failed said.
    """
    structure, units = task.structure, task.units
    whole = mixture_rows.padded(at_mode, units.standard(structure.start))
    mixture = structure.consistent(units.original(whole))
    return MixturePosterior(
        laplace_state(structure, mixture),
        fit.status.value,
        tuple(v - float(task.jacobian) for v in fit.objectives),
        restarts[0] - task.jacobian,
        restarts[1],
        structure=structure,
        mixture=mixture,
        num_clipped=int(fit.state.at.well_determined.num_clipped.max()),
    )


def highest(heights: Tensor) -> Tensor:
    """The first row that is as high as any, up to rounding: restarts often meet, shape ``(1,)``."""
    top = heights.max()
    return (heights >= top - SAME * (1.0 + top.abs())).to(torch.int8).argmax().reshape(1)
