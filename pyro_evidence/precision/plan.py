"""A precision given by its elements, factorised by the plan that its pattern suggests."""

from typing import Protocol

import torch
from torch import Tensor

from pyro_evidence.numerics.linalg import Label, require_memory
from pyro_evidence.precision.blocks import block_plan
from pyro_evidence.precision.dense import DensePlan, Elements, Pattern, Precision, pattern_product
from pyro_evidence.precision.elimination import elimination_order

__all__ = ["Elements", "Pattern", "Plan", "StructuredPrecision", "elimination", "pattern_product"]


class StructuredPrecision(Precision, Protocol):
    """A posterior precision, ``R = 1``, that also knows its inverse on the pattern of its elements."""

    @property
    def adjoint(self) -> Elements:
        """``d log |A| / d elements``: the inverse where the factors touch it, per family ``(F, k, k)``."""

    def covariance(self, coordinates: Tensor) -> Tensor:
        """``A^-1`` among chosen coordinates ``(c,)``, shape ``(c, c)``."""


class Plan(Protocol):
    """The symbolic half of a factorisation: who is eliminated when.  Made once for a pattern."""

    @property
    def sentence(self) -> str:
        """What is eliminated and how, for the reader."""

    def factorise(self, elements: Elements, label: Label) -> StructuredPrecision:
        """The numerical half.

        :param elements: per family ``(F, k, k)``, symmetric.
        :param label: names a flat coordinate.
        :raises NotPositiveDefinite: naming a coordinate where the precision is not positive.
        """


def elimination(pattern: Pattern) -> Plan:
    """The plan that factorises matrices of this pattern at least cost.

    >>> school = torch.arange(100).repeat_interleave(10)  # of 1000 classes
    >>> classes = torch.stack([torch.arange(1000), 1000 + school], -1)
    >>> elimination(Pattern(1100, (classes,))).sentence
    '1000 blocks of 1 eliminated; dense 100'

    :raises TooLarge: when the places of the entries do not fit into memory.
    """
    entries = sum(index.numel() * index.shape[-1] for index in pattern.index)
    device = pattern.index[0].device if pattern.index else torch.device("cpu")
    require_memory(16 * entries + 64 * pattern.size, f"The pattern of {pattern.size:,} coordinates", device)
    order = elimination_order(pattern)
    return block_plan(pattern, order) if order.levels else DensePlan(pattern)
