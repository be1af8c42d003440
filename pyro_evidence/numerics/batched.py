"""Many rows at once: values that hold them, such as the states of restarts, and functions of one applied to many."""

import math
from collections.abc import Callable, Mapping
from contextlib import ContextDecorator
from dataclasses import fields, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

Self = TypeVar("Self", bound="Batched")


class Batched:
    """A frozen dataclass of tensors with rows ``(R,)`` in front; fields named in ``common`` belong to all rows.

    A field may be a tuple or another :class:`Batched` value.
    """

    common: ClassVar[frozenset[str]] = frozenset()

    def rebuilt(self: Self, change: Callable[[str, Tensor], Tensor]) -> Self:
        """A copy with ``change(name, tensor)`` in the place of every tensor that has rows."""
        value: Any = self
        own = [f.name for f in fields(value) if f.name not in self.common]
        return replace(value, **{name: change(name, getattr(self, name)) for name in own})

    @property
    def detached(self: Self) -> Self:
        """These rows without a graph."""
        return _mapped(Tensor.detach, self)

    def __getitem__(self: Self, rows: Tensor | int) -> Self:
        return _mapped(lambda x: x[rows], self)

    def where(self: Self, take: Tensor, other: Self) -> Self:
        """Rows of this value where ``take`` ``(R,)`` is True, else of the other."""
        return _mapped(lambda x, y: torch.where(along(take, x), x, y), self, other)

    def with_rows(self: Self, rows: Tensor, new: Self) -> Self:
        """With the rows at positions ``rows`` replaced by those of ``new``."""
        return _mapped(lambda x, y: x.index_copy(0, rows, y), self, new)


def _mapped(change: Callable[..., Tensor], *values: Any) -> Any:
    """Values of one kind as one, with ``change`` of their tensors in the place of each tensor that has rows."""
    first = values[0]
    if isinstance(first, Tensor):
        return change(*values)
    if isinstance(first, tuple):
        return tuple(_mapped(change, *parts) for parts in zip(*values, strict=True))
    own = [f.name for f in fields(first) if f.name not in first.common]
    return replace(first, **{name: _mapped(change, *(getattr(value, name) for value in values)) for name in own})


def along(take: Tensor, like: Tensor) -> Tensor:
    """``take`` ``(R,)`` in a shape that broadcasts with ``like`` ``(R, ...)``."""
    return take.reshape(-1, *[1] * (like.dim() - 1))


SAME = 1e-6  # relative difference between the log evidences of two restarts at one mode


def first_highest(heights: Tensor) -> Tensor:
    """Number of the first along the last axis that is as high as any, up to rounding."""
    top = heights.amax(-1, keepdim=True)
    away = heights - (top - SAME * (1.0 + top.abs()))
    return (away >= 0.0).to(torch.int8).argmax(-1)


def distinct(heights: Tensor, kinds: Tensor, within: float) -> Tensor:
    """Numbers of the rows whose height is near the highest, highest first, one for each mode.

    :param heights: nats, shape ``(R,)``; -inf where there is none.
    :param kinds: rows at one mode are of one kind, such as the number of their components, shape ``(R,)``.
    :param within: nats below the highest.
    """
    order = heights.argsort(descending=True, stable=True).tolist()
    height, kind, found = heights.tolist(), kinds.tolist(), list[int]()
    for here in order:
        same = any(kind[here] == kind[i] and height[i] - height[here] <= SAME * (1.0 + abs(height[i])) for i in found)
        if not same and height[here] >= height[order[0]] - within and height[here] > -math.inf:
            found.append(here)
    return torch.tensor(found, dtype=torch.long, device=heights.device)


def bisected(is_before: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The places between two bounds up to which ``is_before`` holds, to rounding of their distance."""
    for _ in range(round(-math.log2(torch.finfo(low.dtype).eps))):  # one for each binary digit
        middle = 0.5 * (low + high)
        before = is_before(middle)
        low, high = torch.where(before, middle, low), torch.where(before, high, middle)
    return high


_MAKERS = ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like", "clone", "eye")
_METHODS = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "clone")
MAKERS = frozenset([*(getattr(torch, n) for n in _MAKERS), *(getattr(Tensor, n) for n in _METHODS)])


def log_ndtr(x: Tensor) -> Tensor:
    """Log distribution function of a standard normal number; torch's own has no rows under ``vmap``.

    >>> round(float(log_ndtr(torch.tensor(-40.0))), 2)
    -804.61
    """
    low, high = x.clamp(max=0.0), x.clamp(min=0.0)  # clamp: either is taken on its side of zero only
    below = (0.5 * torch.special.erfcx(-low * 0.5**0.5)).log() - 0.5 * low.square()
    return torch.where(x < 0.0, below, torch.log1p(-0.5 * torch.special.erfc(high * 0.5**0.5)))


def log_add_exp(*pair: Tensor, **other: Tensor) -> Tensor:
    """Log sum of two exponentials; second derivatives of torch's own are nan where they differ by 710."""
    return torch.stack(torch.broadcast_tensors(*pair, *other.values())).logsumexp(0)


PAIRS = (torch.logaddexp, Tensor.logaddexp)
RIGHT: dict[Any, Any] = {torch.special.log_ndtr: log_ndtr} | dict.fromkeys(PAIRS, log_add_exp)


class WithOwnConstants(TorchFunctionMode):
    """Numbers that a function makes belong to its row of a batch, so that it may write the row's values into them.

    And ``torch.special.log_ndtr`` takes rows together, ``torch.logaddexp`` has all its second derivatives.

    :param row: the arguments of the row.
    """

    def __init__(self, row: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._nothing = sum(torch.zeros_like(x.detach().reshape(-1)[:1]).sum() for x in row.values() if x.numel())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = RIGHT.get(func, func)(*args, **(kwargs or {}))
        if func in MAKERS and made.is_floating_point():
            return (made + self._nothing).to(made.dtype)
        return made


class InDouble(TorchFunctionMode):
    """Operations on single precision are in double precision inside, wherever their numbers come from."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result for the same numbers in double precision."""
        return _doubled(func(*_doubled(args), **_doubled(kwargs or {})))


def _doubled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _doubled(each) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_doubled, value))
    return value.double() if isinstance(value, Tensor) and value.dtype is torch.float32 else value


FACTORS: dict[Any, Any] = {torch.linalg.cholesky: torch.linalg.cholesky_ex, torch.linalg.solve: torch.linalg.solve_ex}
FACTORS |= dict.fromkeys((torch.linalg.inv, torch.inverse, Tensor.inverse), torch.linalg.inv_ex)


class SingularIsNan(TorchFunctionMode, ContextDecorator):
    """Results of a singular matrix are nan, where torch refuses all rows of a batch because of one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result, nan for matrices without one."""
        if func not in FACTORS:
            return func(*args, **(kwargs or {}))
        made, info = FACTORS[func](*args, **(kwargs or {}))
        return torch.where(info.reshape(*info.shape, *[1] * (made.dim() - info.dim())) == 0, made, torch.nan)


ROW_BY_ROW = ".*not yet implemented the batching rule"  # derivatives then take memory by the square of the rows
BATCH_BYTES = 2**28  # what autograd may keep for the rows that are evaluated together
BATCH_NUMBERS = 2**22  # of the largest tensors of what is worked on at a time where autograd does not keep it
HELD_NUMBERS = 4 * BATCH_NUMBERS  # that may be held beside the data: 128 MiB
CACHED_NUMBERS = 2**18  # that stay in the cache of a processor

RowFunction = Callable[..., Tensor]  # vectors to a scalar


def bytes_per_row(f: RowFunction, *row: Tensor) -> int | None:
    """Bytes that autograd keeps for each row of a batch; None when ``f`` takes no batch.

    :param row: one argument each, shape ``(...)``.
    """
    try:
        return max(1, _kept(f, 2, row) - _kept(f, 1, row))
    except Exception:  # f works on one row, so whatever this is, it is vmap that f does not bear
        return None


def _kept(f: RowFunction, num: int, row: tuple[Tensor, ...]) -> int:
    storages: dict[int, Any] = {}  # alive to the end: an address is not given twice, and the sum is always the same

    def note(tensor: Tensor) -> None:  # the graph keeps nothing: under vmap it would never be let go
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage

    rows = [x.detach().expand(num, *x.shape).clone().requires_grad_() for x in row]
    with saved_tensors_hooks(note, lambda tensor: tensor):
        torch.vmap(f)(*rows)
    return sum(storage.nbytes() for storage in storages.values())


def apply(
    f: RowFunction,
    rows: tuple[Tensor, ...],
    row_bytes: int | None,
    one: RowFunction,
    shared: tuple[Tensor, ...] = (),
) -> Tensor:
    """``f`` of every row, shape ``(R,)``.

    :param rows: the arguments, ``(R, ...)``.
    :param row_bytes: as :func:`bytes_per_row` found it.
    :param one: what to apply one by one where a batch is not possible.
    :param shared: further arguments, the same for all rows: what hangs on them alone, a kernel's matrix say, is then
        made once.  A function that writes into what it makes of them gets a copy for each row.
    """
    num = len(rows[0])
    each = tuple(x.expand(num, *x.shape) for x in shared)
    if row_bytes is not None and num > 1:
        for together, dims in ((shared, (None,)), (each, (0,)))[0 if shared else 1 :]:
            in_dims, size = (0,) * len(rows) + dims * len(shared), max(1, BATCH_BYTES // row_bytes)
            for g in (f, SingularIsNan()(f)):
                try:
                    return torch.vmap(g, in_dims=in_dims, chunk_size=size)(*rows, *together)
                except LinAlgError:
                    continue  # of one row: its matrices are singular
                except Exception:
                    break  # one bad row or too little memory; what one() raises below is what the caller sees
    return torch.stack([one(*row) for row in zip(*rows, *each, strict=True)])


SUMS = (torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp)
HIGHER = (torch.maximum, Tensor.maximum, torch.max, Tensor.max)  # of two


class OneSummand(TorchFunctionMode):
    """Every log sum of exponentials, and higher one of two, that depends on what requires a gradient, one alone.

    :param number: of the summand; of several sums it counts through the first ones fastest.
    :param most: results of a sum; one that has more is left as it is.
    :ivar count: of such numbers, as the functions that ran inside have it.
    """

    def __init__(self, number: int, most: int) -> None:
        super().__init__()
        self.left, self.most, self.count = number, most, 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        whole = partial(func, *args, **kwargs)
        if func in HIGHER and len(args) == 2 and isinstance(args[1], Tensor):
            args = torch.stack(torch.broadcast_tensors(*args)), 0
        elif func not in SUMS:
            return whole()
        x, dim, keepdim = (*args, *kwargs.values(), False)[:3]
        axes = dim if isinstance(dim, tuple | list) else (dim,)
        if not x.requires_grad or x.numel() > self.most * math.prod(x.shape[axis] for axis in axes):
            return whole()
        for axis in axes:
            size, self.count = x.shape[axis], self.count * x.shape[axis]
            x, self.left = x.narrow(axis, self.left % size, 1), self.left // size
        return x if keepdim else x.squeeze(dim)
