"""Errors of every round of a mixture's fit, on the data it is fitted to and on others that it does not see."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_evidence.infer.mixture_em import Batch, advance
from pyro_evidence.ops.mixture import MixtureData, e_step
from pyro_evidence.ops.mixture_units import ResponseUnits


@dataclass(frozen=True)
class Journal:
    """Rounds that write down how well they predict, from the start on.

    :ivar units: of the model.
    :ivar data: those that are fitted, and any that are not to be seen, in the units inside.
    :ivar rounds: for each round the log likelihood of each of these, shapes ``(R,)``; the first costs nothing.
    """

    units: ResponseUnits
    data: tuple[MixtureData, ...]
    rounds: list[tuple[Tensor, ...]] = field(default_factory=list)

    def __call__(self, batch: Batch) -> Batch:
        """One round."""
        after = advance(batch)
        self.look(after)
        return after

    def look(self, batch: Batch) -> None:
        """An entry for the batch as it stands."""
        unseen = (e_step(data, batch.at.mixture).log_likelihood for data in self.data[1:])
        self.rounds.append((batch.at.stats.log_likelihood, *unseen))

    def path(self, row: int) -> tuple[Tensor, ...]:
        """Minus mean log density after each round, nats per datum, the model's units, ``(S,)`` for each of the data.

        :param row: the restart; where the batch has shrunk to one row, that one is meant.
        """
        found = (torch.stack([x[min(row, len(x) - 1)] for x in column]) for column in zip(*self.rounds, strict=True))
        pairs = zip(self.data, found, strict=True)
        return tuple((self.units.log_jacobian(data) - height) / data.num_data for data, height in pairs)
