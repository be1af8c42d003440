"""Functions of tensors recorded operation by operation, below autograd, and run many operations at a time."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten, treespec_dumps, treespec_loads
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
    dtype: torch.dtype | None = None  # of what it stands for, where that is not the argument's


@dataclass(frozen=True, eq=False)
class Made:
    """One result of an operation."""

    operation: "Operation"
    number: int  # which of its results


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation on what came before it."""

    func: Any
    leaves: tuple[Any, ...]  # Picked, Made, constant tensors and other values
    form: TreeSpec  # of its arguments
    results: tuple[Any, ...] = field(repr=False)  # shape and dtype of each


class StandIns:
    """Results of operations that are arguments of what follows: a function of a sum as one of the sum itself."""

    def __init__(self) -> None:
        self.picked: Any = WeakTensorKeyDictionary()
        self.results: list[Tensor] = []

    def add(self, result: Tensor, picked: Picked) -> None:
        """From now on, ``picked`` stands for ``result``."""
        self.picked[result] = picked
        self.results.append(result)


class DispatchMode(TorchDispatchMode):
    """Sees every operation of a run, below autograd."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: the wrapper that it would bring imports torch's compiler, which takes longer than most fits."""
        return False


class Tape(DispatchMode):
    """A run of a function that writes down every operation on what is made of its arguments.

    :param arguments: vectors.
    :param stand_ins: what later operations see in place of some results, noted while the function runs.
    :param in_order: whether all operations are written down, those on constants and those that write in place, too, to
        be run again one by one; but for the look at whether matrices could be factorised.
    """

    def __init__(self, arguments: Sequence[Tensor], stand_ins: "StandIns", *, in_order: bool = False) -> None:
        super().__init__()
        self.stand_ins, self.in_order = stand_ins, in_order
        self.known: Any = WeakTensorKeyDictionary()
        self.fixed: Any = WeakTensorKeyDictionary()  # of what is known: made of constants alone
        self.operations: list[Operation] = []
        for number, x in enumerate(arguments):
            self.known[x] = Picked(number, torch.arange(x.numel(), device=x.device))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Carry out an operation, and write it down if it is on what is made of the arguments."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given, form = tree_flatten((args, kwargs))
        num_varying = sum(isinstance(x, Tensor) and x in self.known and x not in self.fixed for x in given)
        if num_varying or (self.in_order and func.overloadpacket not in VALUES):
            self._write(func, (given, form), result, num_varying)
        return result

    def _write(self, func: Any, taken: tuple[list[Any], TreeSpec], result: Any, num_varying: int) -> None:
        (given, form), varies, alone = taken, num_varying > 0, num_varying == 1
        made = listed(result)
        if self.in_order and func.overloadpacket is aten._linalg_check_errors:
            return
        if varies and (func.overloadpacket in VALUES or torch.Tag.data_dependent_output in func.tags):
            raise Unrecordable("a number taken out of a tensor")
        all_tensors = all(isinstance(x, Tensor) for x in made)
        mutable = func._schema.is_mutable and not self.in_order
        if mutable or torch.Tag.nondeterministic_seeded in func.tags or not all_tensors:
            raise Unrecordable(str(func))
        if torch.Tag.dynamic_output_shape in func.tags and varies and not (func.overloadpacket in CHOOSE and alone):
            raise Unrecordable("as many elements as there are")
        leaves = tuple(self.value(x) for x in given)
        if alone and func.overloadpacket in PICKS and isinstance(leaves[0], Picked):
            args, kwargs = tree_unflatten([leaves[0].index, *given[1:]], form)
            self.known[result] = replace(leaves[0], index=func(*args, **kwargs))
            return
        signs = tuple((x.shape, x.dtype) for x in made)
        operation = Operation(func, leaves, form, signs)
        self.operations.append(operation)
        for number, x in enumerate(made):
            self.known[x] = Made(operation, number)
            self.fixed.pop(x, None)
            if not varies:
                self.fixed[x] = True

    def value(self, x: Any) -> Any:
        """The value that a tensor holds; the tensor itself where it is a constant."""
        return self.stand_ins.picked.get(x, self.known.get(x, x)) if isinstance(x, Tensor) else x


def record(
    f: Function, arguments: Sequence[Tensor], stand_ins: StandIns | None = None, *, in_order: bool = False
) -> tuple[list[Operation], list[Any]]:
    """The operations of ``f`` at these arguments in their order, and its results: values, or constant tensors.

    :param stand_ins, in_order: as :class:`Tape` takes them; after the results come those for which something stood in.
    :raises Unrecordable: where the same operations would be others at other arguments.
    """
    arguments, stand_ins = [x.detach().clone() for x in arguments], stand_ins or StandIns()
    with torch.no_grad(), Tape(arguments, stand_ins, in_order=in_order) as tape:
        results = f(*arguments)
    return tape.operations, [*map(tape.value, results), *(tape.known[x] for x in stand_ins.results)]


Table = tuple[int, int]  # a batch and which of its results; -1 - i for the function's argument i
Tables = Sequence[Sequence[Tensor]]  # for each batch its results, rows (n, ...)


@dataclass(frozen=True, eq=False)
class TableRows:
    """Values that were made before: rows of tables, one under the other, or elements of an argument."""

    tables: tuple[Table, ...]
    rows: Tensor | None  # (n, ...), None for all in their order
    dtype: torch.dtype | None = None  # that they are read in, None for their own

    def read(self, arguments: Sequence[Tensor], tables: Tables) -> Tensor:
        """The values, ``(n, ...)``."""
        found = [arguments[-1 - batch] if batch < 0 else tables[batch][number] for batch, number in self.tables]
        whole = found[0] if len(found) == 1 else torch.cat(found)
        whole = whole if self.dtype is None else whole.to(self.dtype)
        if self.rows is None:
            return whole
        return whole.index_select(0, self.rows.reshape(-1)).reshape(*self.rows.shape, *whole.shape[1:])


@dataclass(frozen=True)
class ConstantLeaf:
    """A constant that all operations have, or one for each."""

    value: Any  # (n, ...) of one for each
    shared: bool

    def read(self, arguments: Sequence[Tensor], tables: Tables) -> Any:
        """The constant or constants."""
        return self.value


Leaf = TableRows | ConstantLeaf


@dataclass(frozen=True)
class OperationBatch:
    """Operations that differ in their numbers only."""

    func: Any
    form: TreeSpec
    leaves: tuple[Leaf, ...]
    count: int
    dim: int  # of the result of one
    elementwise: bool

    def run(self, arguments: Sequence[Tensor], tables: Tables) -> list[Tensor]:
        """Their results, rows ``(n, ...)``."""
        given = [leaf.read(arguments, tables) for leaf in self.leaves]
        if self.elementwise:
            own = []
            for x in (given[i] for i in self._many):  # rows of tensors as they broadcast with rows of others
                ones = (1,) * (self.dim + 1 - x.dim())
                own.append(x.reshape(len(x), *ones, *x.shape[1:]) if ones else x)
            return [self._called(given, own)]
        if self.count == 1:
            return [x.unsqueeze(0) for x in listed(self._called(given, [given[i][0] for i in self._many]))]
        return listed(torch.vmap(lambda *own: self._called(given, own))(*(given[i] for i in self._many)))

    @cached_property
    def _many(self) -> tuple[int, ...]:
        """Leaves of which each operation has its own."""
        return tuple(i for i, leaf in enumerate(self.leaves) if isinstance(leaf, TableRows) or not leaf.shared)

    def _called(self, given: Sequence[Any], own: Sequence[Tensor]) -> Any:
        """One operation, or all of them, with their own in the place of what is given of :attr:`_many`."""
        leaves = list(given)
        for i, x in zip(self._many, own, strict=True):
            leaves[i] = x
        args, kwargs = tree_unflatten(leaves, self.form)
        return self.func(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        func = self.func
        name = func.namespace, func.overloadpacket.__name__, func._overloadname
        return vars(self) | {"func": name, "form": treespec_dumps(self.form)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        namespace, packet, overload = state["func"]
        func = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        self.__dict__.update(state, func=func, form=treespec_loads(state["form"]))


def listed(value: Any) -> list[Any]:
    """A list of results, or of the only one."""
    return list(value) if isinstance(value, tuple | list) else [value]


@dataclass(frozen=True, eq=False)
class Replay:
    """A function of vectors by its operations, many at a time; made by :func:`replay`."""

    batches: tuple[OperationBatch, ...]
    tables: tuple[Table, ...]  # that hold results
    constants: tuple[Tensor, ...]  # results that no argument has a part in
    order: Tensor  # where each element of the results is among those of tables and constants
    num_operations: int  # that the function takes itself

    def __call__(self, *arguments: Tensor) -> Tensor:
        """All elements of the function's results, one after the other."""
        found: list[list[Tensor]] = []
        for batch in self.batches:
            found.append(batch.run(arguments, found))
        parts = [TableRows((table,), None).read(arguments, found).reshape(-1) for table in self.tables]
        return torch.cat([*parts, *self.constants])[self.order]


def replay(f: Function, *arguments: Tensor, stand_ins: StandIns | None = None) -> Replay:
    """``f``, a function of vectors to tensors of one dtype, as it is at these arguments and wherever it does the same.

    Operations of equal kind on equally shaped tensors become one, so that a loop over 500 steps costs what one over
    five does.  Whether the function does the same elsewhere is for the caller to check.

    :param stand_ins: results that are arguments of what follows, and of which the values come after the function's.
    :raises Unrecordable: where it is seen that other operations would be carried out at other arguments.

    >>> f = replay(lambda x: [x[i].exp() * 2.0 for i in range(100)], torch.zeros(100))
    >>> len(f.batches), f.num_operations
    (2, 200)
    >>> f(torch.arange(100.0).log()).sum().round()
    tensor(9900.)
    """
    operations, results = record(f, arguments, stand_ins)
    return _Builder(operations, [x.numel() for x in arguments]).replay(results)


class _Builder:
    """Batches of the operations of a tape."""

    def __init__(self, operations: Sequence[Operation], sizes: Sequence[int]) -> None:
        self.sizes = sizes  # of the function's arguments
        self.ordered = in_batches(operations)
        self.places = {id(o): (number, row) for number, group in enumerate(self.ordered) for row, o in enumerate(group)}

    def replay(self, results: Sequence[Any]) -> Replay:
        """With where the elements of the function's results are."""
        batches = tuple(self._batch(group) for group in self.ordered)
        constants = tuple(x.reshape(-1) for x in results if isinstance(x, Tensor))
        tables = tuple(sorted({self._table(x) for x in results if not isinstance(x, Tensor)}))
        starts = dict(zip(tables, accumulate([0, *map(self._numel, tables)]), strict=False))
        constant, order = sum(map(self._numel, tables)), []
        for x in results:
            if isinstance(x, Tensor):
                order.append(constant + torch.arange(x.numel()))
                constant += x.numel()
            elif isinstance(x, Picked):
                order.append(starts[self._table(x)] + x.index.reshape(-1))
            else:
                size, row = x.operation.results[x.number][0].numel(), self.places[id(x.operation)][1]
                order.append(starts[self._table(x)] + row * size + torch.arange(size))
        return Replay(batches, tables, constants, torch.cat(order), sum(map(len, self.ordered)))

    def _table(self, x: Picked | Made) -> Table:
        return (-1 - x.argument, 0) if isinstance(x, Picked) else (self.places[id(x.operation)][0], x.number)

    def _numel(self, table: Table) -> int:
        """Number of elements of a table."""
        batch, number = table
        if batch < 0:
            return self.sizes[-1 - batch]
        group = self.ordered[batch]
        return len(group) * int(group[0].results[number][0].numel())

    def _batch(self, group: Sequence[Operation]) -> OperationBatch:
        first = group[0]
        columns = zip(*(operation.leaves for operation in group), strict=True)
        leaves = tuple(self._leaf(column, first.results[0][1]) for column in columns)
        elementwise = torch.Tag.pointwise in first.func.tags and len(first.results) == 1
        return OperationBatch(first.func, first.form, leaves, len(group), len(first.results[0][0]), elementwise)

    def _leaf(self, column: Sequence[Any], dtype: torch.dtype) -> Leaf:
        first = column[0]
        if isinstance(first, Picked):
            return TableRows(((-1 - first.argument, 0),), torch.stack([x.index for x in column]), first.dtype)
        if isinstance(first, Made):
            return self._rows(column)
        if not isinstance(first, Tensor) or all(x is first for x in column):
            return ConstantLeaf(first, shared=True)
        is_number = not first.dim() and first.is_floating_point() and dtype.is_floating_point
        stacked = torch.stack(list(column)).to(dtype if is_number else first.dtype)  # rows of numbers promote
        return ConstantLeaf(stacked, shared=False)

    def _rows(self, column: Sequence[Made]) -> TableRows:
        places = [(self.places[id(x.operation)], x.number) for x in column]
        tables = sorted({(batch, number) for (batch, _), number in places})
        counts = [len(self.ordered[batch]) for batch, _ in tables]
        starts = dict(zip(tables, accumulate([0, *counts]), strict=False))
        rows = [starts[batch, number] + row for (batch, row), number in places]
        return TableRows(tuple(tables), None if rows == list(range(sum(counts))) else torch.tensor(rows))


def in_batches(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Operations that can be carried out as one, in an order in which each comes after what it takes.

    Next are always those of the kind that has the longest way to the end before it: of a state that runs from step to
    step first the run of the state itself, and what is made of it at all steps at once.
    """
    users: dict[int, list[Operation]] = defaultdict(list)
    missing: dict[int, int] = {}  # operations that are still to be carried out before each
    for operation in operations:
        taken = {id(leaf.operation) for leaf in operation.leaves if isinstance(leaf, Made)}
        missing[id(operation)] = len(taken)
        for number in taken:
            users[number].append(operation)
    way: dict[int, int] = {}  # operations on the longest way to the end
    for operation in reversed(operations):
        way[id(operation)] = 1 + max((way[id(user)] for user in users[id(operation)]), default=0)

    found: list[list[Operation]] = []
    ready: dict[Any, list[Operation]] = {}  # of each kind, those that have all that they take
    longest: dict[Any, int] = {}  # way among them
    new = [operation for operation in operations if not missing[id(operation)]]
    while new or ready:
        for operation in new:
            kind = operation.func, operation.form, tuple(_sign(leaf) for leaf in operation.leaves)
            ready.setdefault(kind, []).append(operation)
            longest[kind] = max(way[id(operation)], longest.get(kind, 0))
        kind = max(longest, key=lambda kind: longest[kind])
        del longest[kind]
        found.append(ready.pop(kind))
        new = []
        for user in [user for operation in found[-1] for user in users[id(operation)]]:
            missing[id(user)] -= 1
            if not missing[id(user)]:
                new.append(user)
    return found


def _sign(leaf: Any) -> Any:
    if isinstance(leaf, Picked):
        return leaf.argument, leaf.index.shape, leaf.dtype
    if isinstance(leaf, Made):
        return leaf.operation.results[leaf.number]
    if isinstance(leaf, Tensor):
        return "constant", leaf.shape, leaf.dtype
    return type(leaf), repr(leaf)
