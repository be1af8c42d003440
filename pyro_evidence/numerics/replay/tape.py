"""What a function of tensors does to its arguments, operation by operation, below autograd."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten

Function = Callable[..., Sequence[Tensor]]  # vectors to tensors

PICKS = {
    packet: None
    for packet in (
        aten.select, aten.slice, aten.view, aten._unsafe_view, aten.reshape, aten.index, aten.index_select,
        aten.expand, aten.unsqueeze, aten.squeeze, aten.alias, aten.detach, aten.clone, aten.permute, aten.t,
        aten.transpose,
    )
}  # fmt: skip
CHOOSE = {aten.index, aten.masked_select}  # as many elements as a constant mask says
VALUES = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}  # tensors that become Python's numbers


class Unrecordable(Exception):
    """The function does what cannot be run again at other values: branches on them, draws, writes in place."""


@dataclass(frozen=True, eq=False)
class Picked:
    """Elements of an argument of the function, moved and nothing else."""

    argument: int
    index: Tensor  # flat positions, in the shape of the value


@dataclass(frozen=True, eq=False)
class Made:
    """One result of an operation."""

    operation: "Operation"
    number: int  # which of its results


@dataclass(frozen=True)
class Form:
    """How the arguments of an operation are made of leaves: each is one, or a list of some."""

    sizes: tuple[int, ...]  # of each list, -1 for a leaf
    names: tuple[str, ...]  # of the last ones, which are passed by name

    @staticmethod
    def taken(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], "Form"]:
        """The leaves of arguments, and their form; a list without tensors is a leaf."""
        leaves, sizes = list[Any](), list[int]()
        for x in (*args, *kwargs.values()):
            many = isinstance(x, list | tuple) and any(isinstance(y, Tensor) for y in x)
            sizes.append(len(x) if many else -1)
            leaves.extend(x if many else [x])
        return leaves, Form(tuple(sizes), tuple(kwargs))

    def arguments(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments that such leaves make."""
        found = list(leaves) if max(self.sizes, default=0) < 0 else self._in_lists(leaves)
        num = len(found) - len(self.names)
        return found[:num], dict(zip(self.names, found[num:], strict=True))

    def _in_lists(self, leaves: Sequence[Any]) -> list[Any]:
        found, place = list[Any](), 0
        for size in self.sizes:
            found.append(leaves[place] if size < 0 else list(leaves[place : place + size]))
            place += abs(size)
        return found


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation on what came before it."""

    func: Any
    leaves: tuple[Any, ...]  # Picked, Made, constant tensors and other values
    form: Form  # of its arguments
    level: int  # operations on the longest way to it
    results: tuple[Any, ...] = field(repr=False)  # shape and dtype of each, None where it is no tensor


Value = Picked | Made


class StandIns:
    """Results of operations that are arguments of what follows: a function of a sum as one of the sum itself."""

    def __init__(self) -> None:
        self.picked: Any = WeakTensorKeyDictionary()
        self.results: list[Tensor] = []

    def add(self, result: Tensor, picked: Picked) -> None:
        """From now on, ``picked`` stands for ``result``."""
        self.picked[result] = picked
        self.results.append(result)


class Tape(TorchDispatchMode):
    """A run of a function that writes down every operation on what is made of its arguments.

    :param arguments: vectors.
    :param stand_ins: what later operations see in place of some results, noted while the function runs.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: the wrapper that it would bring imports torch's compiler."""
        return False

    def __init__(self, arguments: Sequence[Tensor], stand_ins: "StandIns") -> None:
        super().__init__()
        self.stand_ins = stand_ins
        self.known: Any = WeakTensorKeyDictionary()
        self.operations: list[Operation] = []
        for number, x in enumerate(arguments):
            self.known[x] = Picked(number, torch.arange(x.numel(), device=x.device))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Carry out an operation, and write it down if it is on what is made of the arguments."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given, form = Form.taken(args, kwargs)
        num_known = sum(isinstance(x, Tensor) and x in self.known for x in given)
        if num_known:
            self._write(func, (given, form), result, alone=num_known == 1)
        return result

    def _write(self, func: Any, taken: tuple[list[Any], Form], result: Any, *, alone: bool) -> None:
        given, form = taken
        _require_plain(func, result)
        if torch.Tag.dynamic_output_shape in func.tags and not (func.overloadpacket in CHOOSE and alone):
            raise Unrecordable("as many elements as there are")
        leaves = tuple(self.value(x) for x in given)
        if alone and func.overloadpacket in PICKS and isinstance(leaves[0], Picked):
            args, kwargs = form.arguments([leaves[0].index, *given[1:]])
            self.known[result] = Picked(leaves[0].argument, func(*args, **kwargs))
            return
        made = list(result) if isinstance(result, tuple | list) else [result]
        signs = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else None for x in made)
        operation = Operation(func, leaves, form, 1 + max(map(_level, leaves)), signs)
        self.operations.append(operation)
        for number, x in enumerate(made):
            if isinstance(x, Tensor):
                self.known[x] = Made(operation, number)

    def value(self, x: Any) -> Any:
        """What is known of a tensor; the tensor itself where it is a constant."""
        return self.stand_ins.picked.get(x, self.known.get(x, x)) if isinstance(x, Tensor) else x


def _require_plain(func: Any, result: Any) -> None:
    tags = func.tags
    if func.overloadpacket in VALUES or torch.Tag.data_dependent_output in tags:
        raise Unrecordable("a number taken out of a tensor")
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
        raise Unrecordable(str(func))
    if not all(isinstance(x, Tensor) for x in (result if isinstance(result, tuple | list) else [result])):
        raise Unrecordable(str(func))


def _level(leaf: Any) -> int:
    return leaf.operation.level if isinstance(leaf, Made) else 0


def recorded(
    f: Function, arguments: Sequence[Tensor], stand_ins: StandIns | None = None
) -> tuple[list[Operation], list[Any]]:
    """The operations of ``f`` at these arguments in their order, and its results: values, or constant tensors.

    :param stand_ins: as :class:`Tape` takes them; after the results come those for which something stood in.
    :raises Unrecordable: where the same operations would be others at other arguments.
    """
    arguments, stand_ins = [x.detach().clone() for x in arguments], stand_ins or StandIns()
    with torch.no_grad(), Tape(arguments, stand_ins) as tape:
        results = f(*arguments)
    return tape.operations, [*map(tape.value, results), *(tape.known[x] for x in stand_ins.results)]
