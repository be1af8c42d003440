"""What a sum was summed from: the terms of a ``pyro.factor`` that a model adds up itself."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

Parts = Callable[[], tuple[Tensor, ...]]  # tensors whose elements add up to a number

SUMS = (torch.sum, Tensor.sum)
PLUS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
MINUS = (torch.sub, Tensor.sub, Tensor.__sub__)
FROM = (torch.rsub, Tensor.__rsub__)
NEGATIVE = (torch.neg, Tensor.neg, Tensor.__neg__)
TIMES = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
OVER = (torch.div, Tensor.div, Tensor.__truediv__)


class Summands(TorchFunctionMode):
    """A run of the model in which numbers that are sums of tensors' elements keep a way back to these.

    Sums, their multiples, and what is added up of them are followed; whatever else becomes of a number is a term of
    its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: Any = WeakTensorKeyDictionary()

    def of(self, value: Any) -> tuple[Tensor, ...] | None:
        """The tensors whose elements add up to a number; None where nothing is known of it."""
        found = self.parts.get(value) if isinstance(value, Tensor) else None
        return None if found is None else found()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Carry out a function, and note how its result came about if it is a number."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() == 0 and not kwargs and args:
            found = self._parts(func, args)
            if found is not None:
                self.parts[result] = found
        return result

    def _parts(self, func: Any, args: Any) -> Parts | None:
        if func in SUMS:
            return _itself(args[0]) if isinstance(args[0], Tensor) and args[0].dim() else None
        known = [self.parts.get(x) if isinstance(x, Tensor) else None for x in args]
        return _multiple(func, args, known) or _total(func, args, known) if any(known) else None


def _multiple(func: Any, args: Any, known: list[Any]) -> Parts | None:
    """Of the negative or a multiple of a sum."""
    if func in NEGATIVE:
        return _each(known[0], lambda x: -x)
    if func in OVER and known[0] and not known[1]:
        return _each(known[0], lambda x: x / args[1])
    if func in TIMES and not all(known):
        at = 0 if known[0] else 1
        return _each(known[at], lambda x: x * args[1 - at])
    return None


def _total(func: Any, args: Any, known: list[Any]) -> Parts | None:
    """Of a sum to which something is added, or from which it is taken."""
    if func in FROM:
        args, known = args[::-1], known[::-1]
    elif func not in PLUS and func not in MINUS:
        return None
    sign = 1.0 if func in PLUS else -1.0
    return _both(known[0] or _itself(args[0]), _each(known[1] or _itself(args[1]), lambda x: sign * x))


def _itself(value: Any) -> Parts:
    return lambda: (torch.as_tensor(value),)


def _each(parts: Any, change: Callable[[Tensor], Tensor]) -> Parts:
    return lambda: tuple(change(x) for x in parts())


def _both(first: Parts, second: Parts) -> Parts:
    return lambda: (*first(), *second())
