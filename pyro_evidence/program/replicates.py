"""The log joint of one model on many data sets of the same shapes, as rows of one density."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import own_random_numbers, without_validation
from pyro_evidence.numerics import batched
from pyro_evidence.program import checks
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.sites import innermost


class Replicates(LogJoint):
    """A log joint whose ``theta`` ends with the number of a data set, behind the hyperparameters, ``(T + 1,)``.

    :ivar joint: that of the first data set.
    :ivar stacked: arguments of all data sets, ``(K, ...)``; as they are where all share one.
    """

    def __init__(self, joint: LogJoint, sets: Sequence[tuple[Any, ...]]) -> None:
        """The model of ``joint`` on ``sets`` of arguments.

        :raises BadInput: where they cannot be stacked.
        """
        vars(self).update(vars(joint))
        self.joint, self.num, self._row_bytes = joint, len(sets), None
        columns = list(zip(*(checks.as_tensors(each, joint.kwargs)[0] for each in sets), strict=True))
        self.stacked = [_stacked(column) for column in columns]
        self.initial_theta = torch.cat([joint.initial_theta, joint.initial_theta.new_zeros(1)])

    def of_row(self, theta: Tensor) -> tuple[LogJoint, Tensor]:
        """The log joint of the data set that ``theta`` ``(T + 1,)`` ends with, and the hyperparameters before."""
        number, found = theta[-1:].detach().long(), copy.copy(self.joint)
        found.args = tuple(x.index_select(0, number).squeeze(0) if is_own else x for x, is_own in self.stacked)
        return found, theta[:-1]

    def _one(self, u: Tensor, theta: Tensor) -> Tensor:
        joint, own = self.of_row(theta)
        return joint._one(u, own)

    def log_hyperprior(self, theta: Tensor, u: Tensor | None = None) -> Tensor:
        """Log hyperprior as of :meth:`LogJoint.log_hyperprior`, of the data set that ``theta`` ends with."""
        joint, own = self.of_row(theta)
        return joint.log_hyperprior(own, u)

    def in_support(self) -> Tensor:
        """Whether the data of each set lie in the support of what observes them, ``(K,)`` bool."""

        def inside(theta: Tensor) -> Tensor:
            joint, own = self.of_row(theta)
            nodes = joint.trace(self.initial_u, own).nodes
            sites = [(innermost(nodes[n]["fn"]), nodes[n]["value"]) for n in joint.observed]
            return torch.stack([fn.support.check(value).all().double() for fn, value in sites]).prod(0)

        rows = self.rows(torch.arange(self.num))
        with own_random_numbers(), torch.no_grad(), without_validation():
            return batched.apply(inside, (rows,), self.row_bytes, inside) > 0

    def rows(self, numbers: Tensor) -> Tensor:
        """The hyperparameters that a search begins with, for data sets ``(R,)``, ``(R, T + 1)``."""
        begun = self.initial_theta.expand(len(numbers), -1).clone()
        begun[:, -1] = numbers.to(begun)
        return begun


def _stacked(column: Sequence[Any]) -> tuple[Any, bool]:
    """One argument of all data sets, and whether each has its own.

    :raises BadInput: where it has several values that are no tensors of one shape.
    """
    first = column[0]
    if all(x is first for x in column):
        return first, False
    if not all(isinstance(x, Tensor) and x.shape == first.shape and x.dtype == first.dtype for x in column):
        raise BadInput("arguments differ that are no tensors of one shape; expected tensors, to be rows of a batch.")
    if all(x.data_ptr() == first.data_ptr() and x.stride() == first.stride() for x in column):
        return first, False
    return torch.stack(list(column)), True
