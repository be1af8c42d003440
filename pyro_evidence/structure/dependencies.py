"""Which flat coordinates each element of a tensor is made of, followed through a run of the model.

A run of the model under :class:`Follow` notes, for every floating tensor on its way from the latents, the coordinates
that each element depends on.  Indexing, slicing and reshaping move the notes as they move the numbers; elementwise
arithmetic unites them; sums and matrix products gather them.  What is noted may be more than what is so, never less,
except where the model computes in ways that the rules below do not know; those raise :class:`Lost`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pyro_evidence.numerics.batched import BATCH_NUMBERS
from pyro_evidence.numerics.recorded import DispatchMode, listed

aten = torch.ops.aten

Groups = tuple[Tensor, ...]  # long, each (shape that broadcasts to the tensor's) + (m,); -1 for no coordinate

WIDE = 2**25  # numbers beyond which a note of more than NARROW coordinates for each element is given up
NARROW = 64  # coordinates: so many are noted of any number of elements, at half a kilobyte for each
MATRIX = "a product with a matrix"


class Lost(Exception):
    """The notes cannot be carried on: an operation without a rule, or far too many coordinates for each element."""

    def __init__(self, reason: str, coordinates: Tensor | None = None) -> None:
        super().__init__(reason)
        self.coordinates = coordinates  # some of those that became too many


def united(*many: Groups) -> Groups:
    """Every group once; the same tensor stands for the same coordinates."""
    found: dict[int, Tensor] = {}
    for groups in many:
        for group in groups:
            found.setdefault(id(group), group)
    alike: dict[Any, list[Tensor]] = {}  # of one shape, with the same coordinates first and last
    for group in found.values():
        corners = ((0,) * group.dim(), (-1,) * group.dim()) if group.numel() else ()
        others = alike.setdefault((group.shape, *(int(group[corner]) for corner in corners)), [])
        if not any(torch.equal(group, other) for other in others):
            others.append(group)
    different = {id(group) for others in alike.values() for group in others}
    return tuple(group for group in found.values() if id(group) in different)


def once(group: Tensor) -> Tensor:
    """Each coordinate of a group once: a recursion in time has those of its first step twice as often at each."""
    parts = []
    for part in group.reshape(-1, group.shape[-1]).split(max(1, BATCH_NUMBERS // (16 * group.shape[-1]))):  # 2 MiB
        ordered = part.sort(-1, descending=True).values
        again = torch.nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
        different = ordered.masked_fill(again, -1).sort(-1, descending=True).values
        parts.append(different[:, : max(1, int((different >= 0).sum(-1).max()))].clone())  # lets the rest go
    most = max(part.shape[-1] for part in parts)
    padded = [torch.nn.functional.pad(part, (0, most - part.shape[-1]), value=-1) for part in parts]
    return torch.cat(padded).reshape(*group.shape[:-1], most)


class Follow(DispatchMode):
    """A run of the model in which coordinates are followed.

    :param origin: the flat coordinates ``(D,)`` that the run starts from.
    """

    def __init__(self, origin: Tensor) -> None:
        super().__init__()
        self.notes: Any = WeakTensorKeyDictionary()
        self.most: int = 0
        self.widest: Lost = Lost("nothing")
        self.size: int = len(origin)
        self.notes[origin] = (torch.arange(len(origin), device=origin.device).unsqueeze(-1),)

    def gathered(self, group: Tensor, shape: Sequence[int], dims: Sequence[int], keepdim: bool, op: str) -> Tensor:
        """The coordinates of a group, united over ``dims`` of its tensor; what ties very many together is noted.

        :param op: what unites them, for the error message.
        """
        if group.shape[:-1].numel() == 1:  # every element has the same coordinates
            laid = group.reshape(-1)
        else:
            dims = sorted(d % len(shape) for d in dims)
            own = group.reshape((1,) * (len(shape) + 1 - group.dim()) + tuple(group.shape))
            stays = [d for d in range(len(shape)) if d not in dims]
            total = math.prod(own.shape[d] for d in dims) * own.shape[-1]
            kept = math.prod(own.shape[d] for d in stays)
            if total > NARROW and total * kept > WIDE:
                raise Lost(op, group.reshape(-1)[:2])
            laid = own.permute(*stays, *dims, len(shape)).reshape(*(own.shape[d] for d in stays), total)
            if total > NARROW and laid.numel():
                laid = once(laid)
            for d in dims if keepdim else ():
                laid = laid.unsqueeze(d)
        if laid.shape[-1] > NARROW and laid.shape[-1] > self.most:
            self.most, self.widest = laid.shape[-1], Lost(op, laid.reshape(-1)[:2])
        return laid

    def narrowed(self, groups: Groups, shape: torch.Size) -> Groups:
        """The same groups, or with each coordinate once where there are more than can be different.

        Those of all elements alike stay apart, so that they stand once and not at each element.
        """
        if len(groups) < 2 or sum(group.shape[-1] for group in groups) <= self.size or not shape.numel():
            return groups
        alike = [group.reshape(-1) for group in groups if group.shape[:-1].numel() == 1]
        own = [group for group in groups if group.shape[:-1].numel() > 1]
        shared: Groups = (torch.cat(alike).unique(),) if alike else ()
        if shared:
            others = (group.masked_fill(torch.isin(group, shared[0]), -1) for group in own)
            own = [group for group in others if bool((group >= 0).any())]
        total = sum(group.shape[-1] for group in own)
        if len(own) > 1 and total > self.size and total * shape.numel() <= WIDE:
            own = [once(torch.cat([group.expand(*shape, -1) for group in own], -1))]
        return (*shared, *own)

    def of(self, value: Any) -> Groups:
        """The coordinates noted of a tensor, none for a constant."""
        return self.notes.get(value, ()) if isinstance(value, Tensor) else ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Carry out an operation, and note where its results come from."""
        kwargs = kwargs or {}
        tracked = [x for x in _tensors((args, kwargs)) if x in self.notes]
        result = func(*args, **kwargs)
        if tracked:
            self._note(func, args, kwargs, result, tracked)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, tracked: list[Tensor]) -> None:
        packet = func.overloadpacket
        floats = (x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, float) for x in listed(result))
        if packet in CONSTANT or not any(floats):
            return
        if packet in MOVES:
            found = self._moves(func, args, kwargs, tracked)
        elif packet in RULES:
            found = [self._ruled(packet, args, kwargs, result)] * len(listed(result))
        elif torch.Tag.pointwise in func.tags or packet in ELEMENTWISE:
            found = [united(*(self.of(x) for x in tracked))] * len(listed(result))
        else:
            number = packet is aten._local_scalar_dense
            name = "a number taken out of a tensor (.item(), float(...))" if number else f"torch's {packet.__name__}"
            raise Lost(name, self.of(tracked[0])[0].reshape(-1)[:2])
        if func._schema.is_mutable and isinstance(args[0], Tensor) and args[0]._is_view():
            self._write_behind(args[0], found[0])
        for value, groups in zip(listed(result), found, strict=True):
            if isinstance(value, Tensor) and value.is_floating_point():
                self.notes[value] = self.narrowed(groups, value.shape)

    def _ruled(self, packet: Any, args: Any, kwargs: Any, result: Any) -> Groups:
        return RULES[packet](self, args, kwargs)

    def _write_behind(self, view: Tensor, groups: Groups) -> None:
        """Note in the tensor behind a view what has been written to the view."""
        base = view._base
        if base is None or not base.is_contiguous():
            raise Lost("a tensor filled in place, part by part", groups[0].reshape(-1)[:2])
        self.notes[view] = groups
        most = max(sum(g.shape[-1] for g in self.of(x)) for x in (view, base))
        pairs = zip(self._columns(base, most), self._columns(view, most), strict=True)
        written = []
        for old, new in pairs:
            column = old.clone(memory_format=torch.contiguous_format)
            start = view.storage_offset() - base.storage_offset()
            column.as_strided(view.shape, view.stride(), start).copy_(new)
            written.append(column)
        self.notes[base] = (torch.stack(written, -1),)

    def _moves(self, func: Any, args: Any, kwargs: Any, tracked: list[Tensor]) -> list[Groups]:
        """Operations that move elements of their first argument, a tensor or a list of them."""
        if isinstance(args[0], Tensor):
            if len(tracked) > 1 or args[0] not in self.notes:
                raise Lost("an index that is made of latents", self.of(tracked[0])[0].reshape(-1)[:2])

            def move(x: Tensor) -> Any:
                if func.overloadpacket in RESHAPES:
                    return x.reshape(args[1])
                if func.overloadpacket is aten.constant_pad_nd:
                    return func(x, args[1], -1)
                return func(x, *args[1:], **kwargs)

            return self._moved(args[0], move)
        # cat and stack: the k-th coordinates of each part side by side
        most = max(sum(g.shape[-1] for g in self.of(x)) for x in args[0])
        columns = [self._columns(x, most) for x in args[0]]
        joined = [func([c[j] for c in columns], *args[1:], **kwargs) for j in range(most)]
        return [(torch.stack(joined, -1),)]

    def _moved(self, value: Tensor, move: Callable[[Tensor], Any]) -> list[Groups]:
        groups = tuple(group for group in self.of(value) if group.shape[-1])  # some depend on nothing
        each: list[list[Tensor] | None] = []
        for group in groups:
            if group.shape[:-1].numel() == 1:
                each.append(None)
            else:
                full = group.expand(*value.shape, group.shape[-1])
                columns = [listed(move(column)) for column in full.unbind(-1)]
                each.append([torch.stack(parts, -1) for parts in zip(*columns, strict=True)])
        num = next((len(e) for e in each if e is not None), 0)
        if not num:
            num = len(listed(move(torch.zeros((), dtype=torch.long, device=value.device).expand(value.shape))))
        lists = [[g.reshape(-1)] * num if e is None else e for g, e in zip(groups, each, strict=True)]
        return [tuple(parts[k] for parts in lists) for k in range(num)]

    def _columns(self, value: Tensor, most: int) -> list[Tensor]:
        if most * value.numel() > WIDE and most > NARROW:
            raise Lost("parts put together", None)
        found = [c for g in self.of(value) for c in g.expand(*value.shape, g.shape[-1]).unbind(-1)]
        none = torch.full((), -1, device=value.device).expand(value.shape)
        return found + [none] * (most - len(found))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    return [t for v in value for t in _tensors(v)] if isinstance(value, tuple | list) else []


RESHAPES = {aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias}

MOVES = RESHAPES | {
    aten.permute, aten.transpose, aten.t, aten.unsqueeze, aten.squeeze, aten.slice, aten.select, aten.diagonal,
    aten.split, aten.split_with_sizes, aten.unbind, aten.index, aten.index_select, aten.gather, aten.embedding,
    aten.flip, aten.roll, aten.repeat, aten.unfold, aten.cat, aten.stack, aten.masked_select, aten.take, aten.movedim,
    aten.repeat_interleave, aten.tril, aten.triu, aten.chunk, aten.numpy_T, aten.constant_pad_nd,
}  # fmt: skip

CONSTANT = {
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.new_zeros, aten.new_ones, aten.new_full,
    aten.new_empty, aten.sign, aten.floor, aten.ceil, aten.round, aten.isfinite, aten.equal, aten.rand_like,
    aten.randn_like, aten.is_same_size, aten._has_compatible_shallow_copy_type,
}  # fmt: skip

ELEMENTWISE = {
    aten.log_sigmoid_forward, aten.logit, aten.softplus, aten.polygamma, aten.nan_to_num, aten.copy, aten.copy_,
    aten.clone, aten._to_copy, aten.alias, aten.detach, aten.lift_fresh, aten.contiguous, aten.expand,
    aten.binary_cross_entropy_with_logits, aten.masked_fill, aten.masked_fill_,
}  # fmt: skip


def _reduction(follow: Follow, args: Any, kwargs: Any) -> Groups:
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    keep = bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))
    dims = list(given) if isinstance(given, list | tuple) else [] if given is None else [int(given)]
    dims = dims or list(range(args[0].dim()))
    return tuple(follow.gathered(g, args[0].shape, dims, keep, "a sum") for g in follow.of(args[0]))


Rule = Callable[[Follow, Any, Any], Groups]  # of the arguments of an operation


def _over(name: str, *dims: int, keepdim: bool = False) -> Rule:
    """Coordinates of results that depend on all elements along the same dims of every argument; of all by default."""

    def rule(follow: Follow, args: Any, kwargs: Any) -> Groups:
        return _united_over(follow, name, *((x, dims or range(x.dim()), keepdim) for x in _tensors(args)))

    return rule


def _united_over(follow: Follow, name: str, *parts: tuple[Tensor, Sequence[int], bool]) -> Groups:
    """Coordinates of results that depend on all elements of some tensors along dims of each, which are kept or not."""
    return united(tuple(follow.gathered(g, x.shape, dims, keep, name) for x, dims, keep in parts for g in follow.of(x)))


_total, _matrix = _over("a sum"), _over("a function of a whole matrix", -2, -1, keepdim=True)


def _along(name: str) -> Rule:
    def rule(follow: Follow, args: Any, kwargs: Any) -> Groups:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)  # of sorting
        return _over(name, int(dim), keepdim=True)(follow, args[:1], kwargs)

    return rule


def _mm(follow: Follow, args: Any, kwargs: Any) -> Groups:
    """``left @ right``, matrices with the same dims in front, or vectors."""
    left, right = args[:2]
    if left not in follow.notes and left.dim() == 2 and len(left) and left.shape[-1] >= 8:
        most = int((left != 0).sum(-1).max())
        if 0 < 4 * most <= left.shape[-1] and most <= NARROW:  # a constant matrix that picks few rows of ``right``
            picked = (left != 0).to(torch.uint8).topk(most, -1)  # (N, r)
            chosen = torch.where(picked.values != 0, picked.indices, -1)  # -1 for none
            gone = (chosen < 0).reshape(*chosen.shape, *(1,) * right.dim())
            rows = [g.expand(*right.shape, g.shape[-1])[chosen] for g in follow.of(right)]
            return tuple(torch.where(gone, -1, part).movedim(1, -2).flatten(-2) for part in rows)
    dim, keepdim = (-2, True) if right.dim() > 1 else (0, left.dim() > 1)
    return _united_over(follow, MATRIX, (left, [-1], right.dim() > 1), (right, [dim], keepdim))


def _addmm(follow: Follow, args: Any, kwargs: Any) -> Groups:
    return united(follow.of(args[0]), _mm(follow, args[1:3], kwargs))


def _triangular(follow: Follow, args: Any, kwargs: Any) -> Groups:
    """``A^-1 B``: each column of ``B`` for itself."""
    dim = -2 if kwargs.get("left", True) else -1
    return _united_over(follow, "a triangular solve", (args[0], [-2, -1], True), (args[1], [dim], True))


_determinant = _over("a determinant", -2, -1)


def _put(follow: Follow, args: Any, kwargs: Any) -> Groups:
    """``x.index_put(indices, values)``: the values' coordinates where they go, the old ones elsewhere."""
    x, indices, values = args[:3]
    if (len(args) > 3 and args[3]) or kwargs.get("accumulate"):
        raise Lost("sums into a tensor", None)
    most = max(sum(g.shape[-1] for g in follow.of(t)) for t in (x, values))
    old, new = follow._columns(x, most), follow._columns(values, most)
    return (torch.stack([aten.index_put(a, indices, b) for a, b in zip(old, new, strict=True)], -1),)


RULES: dict[Any, Rule] = {
    aten.sum: _reduction, aten.mean: _reduction, aten.logsumexp: _reduction, aten.amax: _reduction,
    aten.amin: _reduction, aten.linalg_vector_norm: _reduction, aten.norm: _total, aten.max: _reduction,
    aten.min: _reduction, aten.prod: _reduction, aten.var: _total, aten.std: _total, aten.var_mean: _total,
    aten._softmax: _along("a softmax"), aten._log_softmax: _along("a softmax"), aten.cumsum: _along("a cumulative sum"),
    aten.cumprod: _along("a cumulative product"), aten.logcumsumexp: _along("a cumulative sum"),
    aten.sort: _along("sorting"), aten.mm: _mm, aten.mv: _mm, aten.bmm: _mm, aten.dot: _mm, aten.vdot: _mm,
    aten.addmm: _addmm, aten.addmv: _addmm, aten.baddbmm: _addmm, aten.linalg_solve_triangular: _triangular,
    aten.linalg_cholesky_ex: _matrix, aten.linalg_inv_ex: _matrix, aten.linalg_qr: _matrix, aten._linalg_eigh: _matrix,
    aten.cholesky_solve: _matrix, aten.cholesky_inverse: _matrix, aten._linalg_solve_ex: _matrix,
    aten._linalg_det: _determinant, aten._linalg_slogdet: _determinant, aten.index_put: _put,
    aten.index_put_: _put,
}  # fmt: skip
