"""Values that hold many rows at once, such as the states of restarts: choosing rows, and putting them together."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

Self = TypeVar("Self", bound="Batched")


class Batched:
    """A frozen dataclass of tensors with rows ``(R,)`` in front; fields named in ``shared`` belong to all rows."""

    shared: ClassVar[frozenset[str]] = frozenset()

    def rebuilt(self: Self, change: Callable[[str, Tensor], Tensor]) -> Self:
        """A copy with ``change(name, tensor)`` in the place of every tensor that has rows."""
        value: Any = self
        own = [f.name for f in fields(value) if f.name not in self.shared]
        return replace(value, **{name: change(name, getattr(self, name)) for name in own})

    def __getitem__(self: Self, rows: Tensor) -> Self:
        return self.rebuilt(lambda _, x: x[rows])

    def where(self: Self, take: Tensor, other: Self) -> Self:
        """Rows of this value where ``take`` ``(R,)`` is True, else of the other."""
        return self.rebuilt(lambda name, x: torch.where(along(take, x), x, getattr(other, name)))

    def with_rows(self: Self, rows: Tensor, new: Self) -> Self:
        """With the rows at positions ``rows`` replaced by those of ``new``."""
        return self.rebuilt(lambda name, x: x.index_copy(0, rows, getattr(new, name)))


def along(take: Tensor, like: Tensor) -> Tensor:
    """``take`` ``(R,)`` in a shape that broadcasts with ``like`` ``(R, ...)``."""
    return take.reshape(-1, *[1] * (like.dim() - 1))
