"""Sums over the members of groups, by plain sums over axes wherever groups are whole axes."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class Pool:
    """Groups of the members of an array; a batch axis stands in front of what is summed."""

    group: Tensor  # (...) long, from 0 on

    @cached_property
    def _axes(self) -> tuple[int, ...] | None:
        """Axes, counted from the end, that a group spans while all others tell groups apart; None if it is not so."""
        group, dims = self.group, range(-self.group.dim(), 0)
        spanned = tuple(d for d in dims if bool((group == group.narrow(d, 0, 1)).all()))
        first = group[tuple(slice(0, 1) if d in spanned else slice(None) for d in dims)]
        return spanned if len(first.unique()) == first.numel() else None

    def __call__(self, x: Tensor) -> Tensor:
        """Each member's sum over its group, of ``x`` ``(R, ...)``; in a shape that broadcasts against that of ``x``."""
        if self._axes is not None:
            return x.sum(self._axes, keepdim=True) if self._axes else x
        sums = x.new_zeros(len(x), int(self.group.max()) + 1)
        return sums.index_add_(1, self.group.flatten(), x.flatten(1))[:, self.group]

    def per_group(self, x: Tensor, members: Tensor) -> Tensor:
        """Sums of ``x`` ``(R, ...)`` over the ``members`` of each group, shape ``(R, groups)``; 0 for other groups."""
        sums = x.new_zeros(len(x), int(self.group.max()) + 1)
        return sums.index_add_(1, self.group[members], x[:, members])

    @cached_property
    def is_single(self) -> bool:
        """Whether every member is a group of its own."""
        return self._axes == ()

    @cached_property
    def is_whole(self) -> bool:
        """Whether all members are one group."""
        return self._axes == tuple(range(-self.group.dim(), 0))
