"""Derivatives of ``f(u, theta)`` with rows ``(R, D)``, ``(R, T)`` in and ``(R,)`` out, by plain reverse mode.

Many derivatives of one value are taken as batched reverse passes, in chunks that keep the memory of a chunk near
:data:`BATCH_BYTES`; without a graph the result is filled in place, so that no second copy of it ever exists.

What is asked for where it was asked for last, as a search asks for value, slope and curvature, is :class:`Last`'s.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property as computed_once
from functools import lru_cache, partial, wraps
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node, _engine_run_backward, saved_tensors_hooks

from pyro_evidence.numerics.batched import BATCH_BYTES
from pyro_evidence.numerics.linalg import relative_rounding

LARGEST_CHUNK = 256  # passes; more at once are no faster
FEW = 4  # passes that are faster one by one

Function = Callable[[Tensor, Tensor], Tensor]
Key = TypeVar("Key")
Found = TypeVar("Found")


def cached_property(make: Callable[[Any], Found]) -> computed_once[Found]:
    """``functools.cached_property`` of what holds tensors, for values that models share (:func:`ordinary`)."""
    return computed_once(ordinary(make))


def cached(num: int) -> Callable[[Callable[..., Found]], Callable[..., Found]]:
    """``functools.lru_cache`` of what holds tensors, for functions that models share (:func:`ordinary`)."""
    return lambda make: lru_cache(num)(ordinary(make))


def ordinary(make: Callable[..., Found]) -> Callable[..., Found]:
    """A function whose tensors are ordinary ones in inference mode too, whose own are of no use outside."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Found:
        if not torch.is_inference_mode_enabled():
            return make(*args, **kwargs)
        with torch.inference_mode(mode=False), torch.no_grad():
            return make(*args, **kwargs)

    return made


class Last(Generic[Key, Found]):
    """The last result, kept for speed alone: what is pickled or copied with all its parts has none of it.

    :ivar pair: where that was, and it.
    """

    def __init__(self) -> None:
        self.pair: tuple[Key, Found] | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    def found(self, key: Key, are_same: Callable[[Key, Key], bool], find: Callable[[Key], Found]) -> Found:
        """The result at a place: the last again where that was there, else found anew.

        :param key: the place, which nobody writes into afterwards.
        """
        pair = self.pair  # which another thread may change meanwhile
        if pair is None or not are_same(pair[0], key):
            pair = self.pair = key, find(key)
        return pair[1]


def are_equal(first: Sequence[Any], second: Sequence[Any], tolerance: float = 0.0) -> bool:
    """Whether two readings are the same; up to rounding where it is given, and then but for what is not finite."""
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(is_equal(a, b, tolerance) for a, b in pairs)


def is_equal(a: Any, b: Any, tolerance: float = 0.0) -> bool:
    """Whether two values are the same: tensors of one shape, dtype and device by their numbers."""
    if a is b:
        return True
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and bool(a == b)
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    if torch.equal(a, b):
        return True
    return tolerance > 0.0 and bool(((a - b).abs() <= tolerance * b.abs()).logical_or(~torch.isfinite(b)).all())


@dataclass(frozen=True, eq=False)
class Orders:
    """A log joint with its first and second derivatives in ``u``, rows in front, in one graph."""

    log_joint: Tensor  # (R,) nats
    gradient: Tensor  # (R, D)
    precision: Tensor  # (R, D, D) minus the Hessian


@dataclass
class Kept:
    """Tensors that autograd keeps for the reverse pass of the work done under :func:`measured`."""

    tensors: dict[int, Tensor] = field(default_factory=dict)  # one for each piece of memory

    @property
    def num_bytes(self) -> int:
        """Bytes, shared memory counted once."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())

    @property
    def passes_at_once(self) -> int:
        """Number of reverse passes that fit into a chunk, were each to write as much as is kept."""
        return max(1, min(LARGEST_CHUNK, BATCH_BYTES // max(1, self.num_bytes)))


@contextmanager
def measured() -> Iterator[Kept]:
    """Measure the graph that is built inside."""
    kept = Kept()

    def note(tensor: Tensor) -> Tensor:
        bare = tensor.detach()  # with its graph it would hold the node that holds it, and never be freed
        if tensor.layout is torch.strided:  # sparse ones have no one storage, and are small
            kept.tensors.setdefault(tensor.untyped_storage().data_ptr(), bare)
        return bare

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield kept


def gradient(f: Function, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Values ``(R,)`` and gradients in ``u`` ``(R, D)``, detached."""
    u = u.detach().requires_grad_()
    value = f(u, theta)
    return value.detach(), pullback(value.sum(), u).contiguous()  # not the expanded gradient of a sum


def hessian(f: Function, u: Tensor, theta: Tensor, *, create_graph: bool = False) -> Tensor:
    """Second derivatives in ``u``, shape ``(R, D, D)``; differentiable in ``u`` and ``theta`` on request."""
    return sloped(f, u if u.requires_grad else u.detach().requires_grad_(), theta)[2](create_graph)


def orders(f: Function, u: Tensor, theta: Tensor) -> Orders:
    """Values, first and second derivatives in ``u``, which requires a gradient, all in one graph."""
    value, slope, second = sloped(f, u, theta)
    return Orders(value, slope, -second(True))


def sloped(f: Function, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Callable[[bool], Tensor]]:
    """Values ``(R,)``, gradients in ``u``, which requires one, and what gives :func:`hessian` from the same graph."""
    with measured() as kept:
        value = f(u, theta)
        slope = pullback(value.sum(), u, create_graph=True)
    at_once = kept.passes_at_once

    def second(create_graph: bool) -> Tensor:
        if not (slope.requires_grad and slope.numel()):
            return u.new_zeros(*u.shape, u.shape[-1])

        def rows(index: Tensor) -> Tensor:
            return passes(slope, u, _one_hot(index, u).unsqueeze(1).expand(-1, *u.shape), create_graph)

        return _filled(rows, u, at_once).transpose(0, 1)

    return value, slope, second


def hessian_diagonal(
    f: Function, u: Tensor, theta: Tensor, blocks: Sequence[slice] = (), *, create_graph: bool = False
) -> Tensor:
    """Diagonal of :func:`hessian`, shape ``(R, D)``; the Hessian is never held.

    :param blocks: consecutive coordinates that may be uncoupled among themselves, as those of one site in a plate:
        where two reverse passes confirm that, no more are made for that block.
    """
    u = u if u.requires_grad else u.detach().requires_grad_()
    with measured() as kept:
        slope = pullback(f(u, theta).sum(), u, create_graph=True)
    if not slope.requires_grad:
        return torch.zeros_like(u)
    found = []
    for block in blocks or (slice(0, u.shape[-1]),):
        uncoupled = _uncoupled_diagonal(slope, u, block, create_graph) if block.stop - block.start > 2 else None
        if uncoupled is not None:
            found.append(uncoupled)
            continue
        for index in torch.arange(block.start, block.stop, device=u.device).split(kept.passes_at_once):
            rows = passes(slope, u, _one_hot(index, u).unsqueeze(1).expand(-1, *u.shape), create_graph)
            found.append(rows.gather(-1, index[:, None, None].expand(-1, len(u), 1)).squeeze(-1).mT)
    return torch.cat(found, -1)


def _uncoupled_diagonal(slope: Tensor, u: Tensor, block: slice, create_graph: bool) -> Tensor | None:
    """The diagonal of the derivative of ``slope`` in one block of ``u``, shape ``(R, block)``.

    From two products with generic vectors; None when they contradict each other.
    """
    probes = generic_directions(2, block.stop - block.start, u)
    cotangents = u.new_zeros(2, *u.shape)
    cotangents[..., block] = probes.unsqueeze(1)
    found = passes(slope, u, cotangents, create_graph)[..., block] / probes.unsqueeze(1)
    first, second = found.detach()
    size = first.abs() + first.abs().amax(-1, keepdim=True)
    close = (first - second).abs() <= relative_rounding(first.dtype) * size
    return found[0] if bool(close.all()) else None


def generic_directions(num: int, size: int, like: Tensor) -> Tensor:
    """Fixed directions in which nothing cancels by accident: entries of size 1 to 2, any sign, ``(num, size)``."""
    return (_few_directions if num * size <= 2**14 else _directions)(num, size).to(like)


def _directions(num: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    draw = torch.rand(num, size, generator=generator, dtype=torch.float64)
    sign = torch.where(torch.rand(num, size, generator=generator) < 0.5, -1.0, 1.0)
    return (1.0 + draw) * sign


_few_directions = cached(64)(_directions)


def normal_draws(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, the same at each call, on the processor."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pullback(value: Tensor, x: Tensor, cotangent: Tensor | None = None, *, create_graph: bool = False) -> Tensor:
    """``(d value / d x)' cotangent``; zeros where ``value`` does not depend on ``x``."""
    return pullbacks(value, (x,), cotangent, create_graph=create_graph)[0]


def pullbacks(
    value: Tensor, places: Sequence[Tensor], cotangent: Tensor | None = None, *, create_graph: bool = False
) -> list[Tensor]:
    """:func:`pullback` to several places in one pass.

    The engine itself is called: given a cotangent, ``torch.autograd.grad`` first imports modules for a third of a
    second, and what it checks takes as long as the pass through a small model.
    """
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in places]
    cotangents = (torch.ones_like(value) if cotangent is None else cotangent,)
    options = {"allow_unreachable": True, "accumulate_grad": False}
    found = _engine_run_backward((value,), cotangents, True, create_graph, tuple(places), **options)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(places, found, strict=True)]


def takes_part(value: Tensor, leaves: Sequence[Tensor]) -> list[bool]:
    """Which leaves the graph of ``value`` leads to, without a derivative."""
    ends = {id(getattr(node, "variable", None)) for node in _graph(value)}
    return [id(leaf) in ends for leaf in leaves]


def operations(value: Tensor) -> set[str]:
    """Names, in lower case, of torch's operations between ``value`` and what it is differentiated by."""
    return {node.name().partition("Backward")[0].lower() for node in _graph(value)}


def _graph(value: Tensor) -> set[Node]:
    """The nodes that lead from ``value`` to its leaves."""
    seen, ahead = set[Node](), [value.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [before for before, _ in node.next_functions]
    return seen


class Forward:
    """The derivative of a vector ``(n,)`` in a vector ``(D,)`` as a linear map.

    Forward derivatives are derivatives of the reverse one, which is linear in its cotangent.
    """

    def __init__(self, value: Tensor, x: Tensor, *, at_once: int = LARGEST_CHUNK, create_graph: bool = False) -> None:
        self.value = value
        self.x = x
        self.at_once = at_once
        self.create_graph = create_graph
        self.cotangent: Tensor = torch.zeros_like(value).requires_grad_()

    @cached_property
    def slope(self) -> Tensor | None:
        """The reverse derivative as a function of its cotangent; None where it is zero."""
        if not (self.value.requires_grad and self.value.numel() and self.x.numel()):
            return None
        found = pullback(self.value, self.x, self.cotangent, create_graph=True)
        return found if found.requires_grad else None

    def along(self, directions: Tensor) -> Tensor:
        """Derivatives along each of ``(P, D)``, shape ``(P, n)``."""
        if self.slope is None:
            return self.x.new_zeros(len(directions), *self.value.shape)
        return passes(self.slope, self.cotangent, directions.to(self.slope), self.create_graph)

    def matrix(self) -> Tensor:
        """All of it, shape ``(n, D)``, in ``min(n, D)`` passes."""
        if self.slope is None:
            return self.x.new_zeros(self.value.numel(), self.x.numel())
        if self.value.numel() <= self.x.numel():
            return self._rows(self.value, self.x)
        return self._rows(self.slope, self.cotangent).mT.to(self.x)

    def _rows(self, value: Tensor, x: Tensor) -> Tensor:
        """One reverse pass per element of ``value``."""
        most = min(self.at_once, BATCH_BYTES // (64 * max(value.numel(), x.numel())))  # some numbers per pass
        return _filled(lambda i: passes(value, x, _one_hot(i, value), self.create_graph), value, most)

    def guessed(self, block: slice, guesses: Iterable[Tensor]) -> Tensor | None:
        """The columns in ``block``, shape ``(n, block)``, where a guess or one, each row scaled, is right; else None.

        Whether it is, products with two generic vectors tell.
        """
        size, n = block.stop - block.start, self.value.numel()
        probes = generic_directions(2, size, self.x)
        directions = self.x.new_zeros(2, self.x.numel())
        directions[:, block] = probes
        expected = self.along(directions).mT.double()
        own = [torch.eye(n, dtype=self.x.dtype, device=self.x.device)] if n == size else []
        for guess in chain(own, guesses):
            if guess.numel() == n * size and guess.is_floating_point():
                for design in (guess.reshape(n, size), guess.reshape(size, n).mT):
                    scale = _row_scale(design.to(probes) @ probes.mT, expected, guess.dtype)
                    if scale is not None:
                        return design.double() if bool((scale == 1).all()) else design * scale.unsqueeze(-1)
        return None

    def columns(self, block: slice) -> Tensor:
        """The columns in ``block``, shape ``(n, block)``, one pass each."""
        index = torch.arange(block.start, block.stop, device=self.x.device)
        return _filled(lambda i: self.along(_one_hot(index[i], self.x)), index, self.at_once).mT.to(self.x)


def sole_slopes(values: Tensor, x: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Slopes of ``values`` ``(n,)``, each in the coordinate of ``x`` ``(P,)`` that moves it, and which that is.

    Derivatives along ones and along 1, 2, ... give the slope and its place, one along a generic vector tells whether
    there is no other.

    :param tolerance: of slopes; one so near to a multiple of a half, as powers of precisions are, is that multiple.
    :return: slopes, coordinates, -1 for none, and bool, whether no other coordinate moves the value, ``(n,)`` each.
    """
    point = x.detach()
    mixer, count = generic_directions(1, len(point), point)[0], torch.arange(1.0, len(point) + 1).to(point)
    slope, place, mixed = Forward(values, x).along(torch.stack([torch.ones_like(point), count, mixer])).double()
    slope = torch.where(slope.abs() > tolerance, slope, 0.0)
    owner = torch.where(slope != 0, place / slope, 0.0).round().long() - 1
    owner = torch.where((owner >= 0) & (owner < len(point)), owner, -1)
    sole = (mixed - slope * torch.cat([mixer, mixer.new_zeros(1)])[owner]).abs() <= tolerance * (1.0 + slope.abs())
    half = (2.0 * slope).round() / 2.0
    return torch.where((half - slope).abs() <= tolerance, half, slope), owner, sole


def jacobian(value: Tensor, x: Tensor) -> Tensor:
    """``d value / d x`` for vectors ``(n,)`` and ``(D,)``, shape ``(n, D)``."""
    return Forward(value, x).matrix()


def _row_scale(found: Tensor, expected: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The factor of each row with which ``found`` ``(n, 2)`` is ``expected``: exactly one if that will do, or None."""
    most = relative_rounding(dtype) * expected.abs().amax()
    if bool(((found - expected).abs() <= most).all()):
        return torch.ones_like(found[:, 0])
    scale = (found * expected).sum(-1) / found.square().sum(-1)
    return scale if bool(((found * scale.unsqueeze(-1) - expected).abs() <= most).all()) else None


def passes(value: Tensor, x: Tensor, cotangents: Tensor, create_graph: bool) -> Tensor:
    """One reverse pass per cotangent, shape ``(P,) + x.shape``; zeros where nothing flows."""
    return passes_to(value, [x], cotangents, FEW, create_graph)[0]


def passes_to(
    value: Tensor, places: Sequence[Tensor], cotangents: Tensor, few: int, create_graph: bool
) -> list[Tensor]:
    """:func:`passes` to several places at once; up to ``few`` one by one."""
    if len(cotangents) <= few or not value.requires_grad:
        rows = [pullbacks(value, places, c, create_graph=create_graph) for c in cotangents]
        return [torch.stack(each) for each in zip(*rows, strict=True)]
    return torch.vmap(partial(pullbacks, value, places, create_graph=create_graph))(cotangents)


def _one_hot(index: Tensor, like: Tensor) -> Tensor:
    """Unit vectors of the length of ``like``'s last axis, shape ``(P, n)``."""
    return torch.nn.functional.one_hot(index, like.shape[-1]).to(like)


def _filled(rows: Callable[[Tensor], Tensor], like: Tensor, at_once: int) -> Tensor:
    """``rows`` of the positions in ``like``'s last axis, chunk by chunk, one axis in front.

    Into one piece of memory, so that a second copy never exists, unless they carry a graph.
    """
    chunks = torch.arange(like.shape[-1], device=like.device).split(max(1, min(LARGEST_CHUNK, at_once)))
    first = rows(chunks[0])
    if first.requires_grad or len(chunks) == 1:
        return torch.cat([first, *(rows(index) for index in chunks[1:])])
    total = first.new_empty(like.shape[-1], *first.shape[1:])
    for index, part in zip(chunks, chain([first], map(rows, chunks[1:])), strict=True):
        total[index[0] : index[-1] + 1] = part
    return total
