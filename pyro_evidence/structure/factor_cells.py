"""The log joint density of a model as many small terms: one for each cell of each site's plates."""

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.numerics.coordinates import is_affine, is_identity
from pyro_evidence.program import predictors
from pyro_evidence.program.enumeration import term_cells
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure.dependencies import Groups

Parts = Callable[[], tuple[Tensor, ...]]  # tensors whose elements add up to a number

SUMS = (torch.sum, Tensor.sum)
PLUS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
MINUS = (torch.sub, Tensor.sub, Tensor.__sub__)
FROM = (torch.rsub, Tensor.__rsub__)
NEGATIVE = (torch.neg, Tensor.neg, Tensor.__neg__)
TIMES = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
OVER = (torch.div, Tensor.div, Tensor.__truediv__)


def cells(joint: LogJoint, u: Tensor, theta: Tensor, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Terms whose sum is the log joint density, nats, by site; discrete sites summed out.

    The terms of a site have the shape of its plates; the Jacobian of a constrained site has an entry of its own, and
    sites that share a discrete one have one entry, their names joined by ``+``.

    :param u: unconstrained latents ``(D,)``.
    :param names: the sites that count, default all; with all the discrete ones, or none of them.
    """
    names = (*joint.latents.names, *joint.discrete, *joint.observed) if names is None else tuple(names)
    summands = SummandTracker()
    with summands if joint.factors else nullcontext():  # it sees every operation of the run
        trace = joint.trace(u, theta)
    with without_validation():
        found = term_cells(trace, names) if joint.discrete else {}
        for name in () if joint.discrete else names:
            node = trace.nodes[name]
            # what a model has added up itself before it made it a pyro.factor
            parts = summands.of(getattr(node["fn"], "log_factor", None)) if node["mask"] is None else None
            summed = {f"{name}, {i}": part * node["scale"] for i, part in enumerate(parts or ())}
            found |= summed or _of_site(node, name)
    before = joint.latents.unconstrained(u.to(joint.dtype))
    for part in joint.latents:
        if part.name in names and not is_identity(part.transform):
            value = part.transform(before[part.name])
            found[f"{part.name}, Jacobian"] = part.transform.log_abs_det_jacobian(before[part.name], value)
    return {n: x.double() for n, x in found.items()}


def _of_site(node: Any, name: str) -> dict[str, Tensor]:
    """The terms of one site; a distribution that knows its own factors gives those."""
    fn, value = node["fn"], node["value"]
    if node["mask"] is None and hasattr(fn, "element_log_prob"):
        flat = value.flatten(value.dim() - len(fn.event_shape)) if fn.event_shape else value
        each = fn.element_log_prob(flat[..., fn.element_index]) * node["scale"]
        return {name: each, f"{name}, normaliser": fn.log_normaliser() * node["scale"]}
    num = 0  # dims that to_event has made one
    while isinstance(fn, torch.distributions.Independent):
        num += fn.reinterpreted_batch_ndims
        fn = fn.base_dist
    log_prob = fn.log_prob(value)
    if node["mask"] is not None:
        log_prob = torch.where(_around(node["mask"], num), log_prob, 0.0)
    return {name: cast(Tensor, log_prob * _around(node["scale"], num))}


def _around(value: Any, num: int) -> Any:
    """A mask or a scale with ``num`` dims of size one on its right."""
    if not isinstance(value, Tensor) or not value.dim():
        return torch.as_tensor(value) if isinstance(value, bool) else value
    return value.reshape(*value.shape, *(1,) * num)


class SummandTracker(TorchFunctionMode):
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
            known = [self.parts.get(x) if isinstance(x, Tensor) else None for x in args]
            found = None
            if func in SUMS:
                found = _itself(args[0]) if isinstance(args[0], Tensor) and args[0].dim() else None
            elif any(known):
                found = _combined(func, args, known)
            if found is not None:
                self.parts[result] = found
        return result


def _combined(func: Any, args: Any, known: list[Any]) -> Parts | None:
    """The parts of a multiple of a sum, or of a sum and what is added or taken away; None for other functions."""
    if func in (*NEGATIVE, *TIMES, *OVER) and sum(map(bool, known)) == 1 and (func not in OVER or known[0]):
        which = 0 if known[0] else 1
        return _each(known[which], lambda x: func(*args[:which], x, *args[which + 1 :]))
    if func in FROM:
        args, known = args[::-1], known[::-1]
    elif func not in PLUS and func not in MINUS:
        return None
    sign = 1.0 if func in PLUS else -1.0
    first, second = known[0] or _itself(args[0]), _each(known[1] or _itself(args[1]), lambda x: sign * x)
    return lambda: (*first(), *second())


def _itself(value: Any) -> Parts:
    return lambda: (torch.as_tensor(value),)


def _each(parts: Any, change: Callable[[Tensor], Tensor]) -> Parts:
    return lambda: tuple(change(x) for x in parts())


@dataclass(frozen=True, eq=False)
class Member:
    """Some cells of one entry of :func:`pyro_evidence.structure.factor_cells.cells`."""

    name: str
    rows: Tensor | None  # positions in the flattened entry, None for all
    design: Tensor | None = None  # (F, v, k) of a field's values in its coordinates; None: the same

    def of(self, cells: Mapping[str, Tensor]) -> Tensor:
        """The cells, ``(F,)``."""
        flat = cells[self.name].reshape(-1)
        return flat if self.rows is None else flat[self.rows]

    def elements(self, node: Any) -> Tensor:
        """The precisions of a field's factors, or of normals, in their coordinates, ``(F, k, k)``."""
        base = predictors.unwrapped(node["fn"]).base
        if isinstance(base, MultivariateNormal):
            k = base.event_shape.numel()
            return base.precision_matrix.expand(*node["value"].shape, k).reshape(-1, k, k).double()
        if not hasattr(node["fn"], "elements_of"):
            return predictors.gaussian_site(node, node["value"].numel())[1].double().reshape(-1, 1, 1)
        return torch.as_tensor(node["fn"].elements_of(self.design, node["scale"]))


def joined(parts: list[Tensor]) -> Tensor:
    """The parts in one tensor, a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, eq=False)
class FactorFamily:
    """Factors that depend on ``k`` coordinates each.

    :ivar closed: whether second derivatives have a closed form, as those of Gaussian fields and normals.
    """

    members: tuple[Member, ...]
    index: Tensor  # (F, k), different ones in each row; of fields, of which a coordinate may occur again, they add up
    closed: bool = False

    def elements(self, nodes: Mapping[str, Any]) -> Tensor:
        """The precisions of fields, as sites of a trace, ``(F, k, k)``."""
        return joined([member.elements(nodes[member.name]) for member in self.members])

    def of(self, cells: Mapping[str, Tensor]) -> Tensor:
        """The factors' values, nats, ``(F,)``."""
        return joined([member.of(cells) for member in self.members])


def coordinate_table(groups: Groups, shape: Sequence[int]) -> Tensor:
    """The coordinates of each element of a tensor of this shape, flattened, ``(F, m)``; -1 for none."""
    num = torch.Size(shape).numel()
    return torch.cat([g.expand(*shape, g.shape[-1]).reshape(num, g.shape[-1]) for g in groups], -1)


def by_width(index: Tensor) -> list[tuple[Tensor | None, Tensor]]:
    """Rows of coordinates by how many different ones they hold: the rows' positions, and ``(F, k)`` without repeats."""
    if not len(index):
        return []
    if index.shape[-1] == 1 and bool((index >= 0).all()):
        return [(None, index)]
    low, high = index.amin(0), index.amax(0)
    order = low.argsort()
    if bool((low >= 0).all()) and bool((low[order][1:] > high[order][:-1]).all()):
        return [(None, index)]  # the columns' ranges do not overlap
    ordered = index.sort(-1).values
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    fresh &= ordered >= 0
    counts = fresh.sum(-1)
    found: list[tuple[Tensor | None, Tensor]] = []
    for k in counts.unique().tolist():
        if k:
            rows = (counts == k).nonzero().squeeze(-1)
            part = ordered[rows][fresh[rows]].reshape(-1, k)
            found.append((None if len(rows) == len(index) else rows, part))
    return found


FieldValues = tuple[Tensor, Tensor | None]  # coordinates (F, k) of each factor, and the values' design (F, v, k)


def field_values(
    joint: LogJoint, trace: Any, designed: Callable[[str, Tensor], FieldValues | None] = lambda *_: None
) -> dict[str, FieldValues]:
    """By latent field that says its precision, and site of normals: coordinates of its factors' values.

    :param designed: what is known of the values ``(F, v)`` of a site that are not its coordinates.
    """
    found: dict[str, FieldValues] = {}
    for part in joint.latents:
        node = trace.nodes[part.name]
        fn, scale, plain = node["fn"], node["scale"], is_identity(part.transform)
        if plain and not joint.discrete and (width := predictors.normal_width(node, part.size)):
            first = joint.latents.slices[part.name].start
            index = torch.arange(first, first + part.size, device=joint.device)
            found[part.name] = index.reshape(-1, width), None
        elif not hasattr(fn, "element_index") or not is_affine(part.transform) or node["mask"] is not None:
            continue
        elif not joint.discrete and not isinstance(scale, Tensor):
            first = fn.event_shape.numel() * torch.arange(fn.batch_shape.numel())
            values = (first.to(fn.element_index)[:, None, None] + fn.element_index).flatten(0, 1)
            own = (joint.latents.slices[part.name].start + values, None) if plain else designed(part.name, values)
            if own is not None:
                found[part.name] = own
    return found


def families(
    dependencies: Mapping[str, Groups],
    shapes: Mapping[str, Sequence[int]],
    apart: Container[str],
    fields: Mapping[str, FieldValues] | None = None,
) -> tuple[FactorFamily, ...]:
    """Every term that depends on a coordinate, in families of as many coordinates each; those apart come last.

    :param apart: sites with families of their own: data, of which second derivatives vary where those of priors do not.
    :param fields: of :func:`field_values`; whose factors depend on nothing else have families of their own too.
    """
    found: dict[tuple[bool, int, bool], list[tuple[Member, Tensor]]] = {}
    for name, groups in dependencies.items():
        if groups:
            table, (own, design) = coordinate_table(groups, shapes[name]), (fields or {}).get(name, (None, None))
            is_field = own is not None and len(own) == len(table)
            if is_field and own is not None:
                equal = own.unsqueeze(-1) == table.unsqueeze(-2)  # the same coordinates in each row, -1 for none
                is_field = bool(equal.any(-1).all()) and bool((equal.any(-2) | (table < 0)).all())
            for rows, index in [(None, own)] if is_field and own is not None else by_width(table):
                key = name.split(", ")[0] in apart, index.shape[-1], is_field
                found.setdefault(key, []).append((Member(name, rows, design if is_field else None), index))
    return tuple(
        FactorFamily(tuple(member for member, _ in parts), torch.cat([index for _, index in parts]), key[-1])
        for key, parts in sorted(found.items(), key=itemgetter(0))
    )
