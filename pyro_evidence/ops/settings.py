"""How a model's numbers are given: a value that is fixed, or one for the engine to learn."""

from dataclasses import dataclass

from torch import Tensor

from pyro_evidence.ops.basis import TensorValue


@dataclass(frozen=True, eq=False)
class Learned(TensorValue):
    """A positive number for the engine to learn: a ``pyro.param``, which begins at ``start``."""

    start: float | Tensor = 1.0


LEARNED = Learned()
