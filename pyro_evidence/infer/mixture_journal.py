"""Errors of every round of a mixture's fit, on the data it is fitted to and on others that it does not see."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_evidence.infer.mixture_em import Batch, advance
from pyro_evidence.ops.mixture import MixtureData, e_step
from pyro_evidence.ops.mixture_units import ResponseUnits


@dataclass(frozen=True)
class Journal:
    """Rounds that write their errors down, from the start on.

    :ivar units: of the model.
    :ivar unseen: data to be predicted, in the units inside; None for none.
    :ivar rounds: one entry per round: minus mean log density of the data seen and, if there are any, of the unseen,
        nats per datum, the model's units, shape ``(1 or 2, R)``.
    """

    units: ResponseUnits
    unseen: MixtureData | None
    rounds: list[Tensor] = field(default_factory=list)

    def __call__(self, batch: Batch) -> Batch:
        """One round."""
        after = advance(batch)
        self.look(after)
        return after

    def look(self, batch: Batch) -> None:
        """An entry for the batch as it stands."""
        entry = [self._nll(batch.at.data, batch.at.stats.log_likelihood)]
        if self.unseen is not None:
            entry.append(self._nll(self.unseen, e_step(self.unseen, batch.at.mixture).log_likelihood))
        self.rounds.append(torch.stack(entry))

    def _nll(self, data: MixtureData, log_likelihood: Tensor) -> Tensor:
        return (self.units.log_jacobian(data) - log_likelihood) / data.num_data

    def path(self, row: int) -> tuple[Tensor, ...]:
        """Errors of one restart, shape ``(S,)`` each; where the batch has shrunk to one row, of that one."""
        return torch.stack([entry[:, min(row, entry.shape[1] - 1)] for entry in self.rounds], 1).unbind()
