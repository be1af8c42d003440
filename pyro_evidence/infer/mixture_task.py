"""One recognised mixture on its way: from the Pyro model to a batch of restarts, and back to a posterior."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.infer import mixture_em
from pyro_evidence.infer.iterate import Fit
from pyro_evidence.infer.mixture_em import Batch
from pyro_evidence.infer.mixture_start import Starting
from pyro_evidence.mixture_posterior import MixturePosterior, laplace_state
from pyro_evidence.mixture_structure import MixtureStructure, recognise_mixture
from pyro_evidence.ops import mixture_evidence, mixture_mode, mixture_rows
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


def begin(joint: LogJoint, start: Starting, update: Update, curvature: MixtureCurvature) -> Task:
    """The mixture recognised, and all restarts before the first round.

    :raises UnsupportedModel: when it is no mixture of linear-Gaussian kernels.
    """
    structure = recognise_mixture(joint)
    units = response_units(structure.Y, structure.G, structure.weight)
    products = curvature is not mixture_evidence.block or structure.correlation is not None
    data = units.data(structure.Y, structure.G, structure.weight, products=products)
    ties, own = units.ties(structure.ties), units.standard(structure.start)
    return Task(structure, units, mixture_em.first(data, start(data, own, ties), ties, curvature, update))


def posterior_of(task: Task, fit: Fit[Batch]) -> MixturePosterior:
    """The best restart at its mode, in the model's units."""
    batch, structure, units = fit.state, task.structure, task.units
    modes = mixture_mode.modes(batch.at)
    best = highest(torch.where(batch.failed, -torch.inf, modes.occam))
    like = units.standard(structure.start)
    mixture = mixture_rows.padded(mixture_rows.row(modes.mixture, best), like)
    mixture = structure.consistent(units.original(mixture))
    state = laplace_state(structure, mixture)
    restarts = torch.where(batch.failed, torch.nan, modes.log_evidence) - task.jacobian
    path = tuple(v - float(task.jacobian) for v in fit.objectives)
    return MixturePosterior(
        state,
        fit.status.value,
        path,
        restarts,
        batch.reasons,
        structure=structure,
        mixture=mixture,
        num_clipped=int(batch.at.well_determined.num_clipped[best]),
    )


def highest(heights: Tensor) -> Tensor:
    """The first row that is as high as any, up to rounding: restarts often meet, shape ``(1,)``."""
    top = heights.max()
    return (heights >= top - SAME * (1.0 + top.abs())).to(torch.int8).argmax().reshape(1)
