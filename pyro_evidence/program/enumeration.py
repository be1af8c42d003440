"""Discrete sites summed out of one trace: sums of exponentials that keep their derivatives, as a ring of Pyro's.

Pyro's own ring takes the logarithm of a clamped sum, whose derivatives are wrong where a component's
probability is below the machine epsilon; this one is right there, and where it is exactly zero.

A discrete site's ``poutine.scale`` counts outside its sum, as in ``TraceEnum_ELBO``: scale 2 is every datum
twice.  A cell in which a discrete site and everything that depends on it is masked counts as 1.  (NUTS scales
inside the sum, and counts such a cell as the number of components.)
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add, attrgetter, or_
from string import ascii_letters
from typing import Any, TypeVar, cast

import torch
from opt_einsum import shared_intermediates
from pyro.distributions.util import is_identically_one
from pyro.ops.contract import contract_tensor_tree, contract_to_tensor
from pyro.ops.packed import pack
from pyro.ops.rings import LogRing
from torch import Tensor

from pyro_evidence.errors import UnsupportedModel

T = TypeVar("T")
Trace = Any  # pyro.poutine.Trace
Node = Any


@dataclass(frozen=True, eq=False)
class SiteFactor:
    """The log probability of one site that meets a discrete one; its axes have letters for names."""

    log_prob: Tensor
    plates: dict[str, int]  # letter -> size
    order: str  # the plates' letters, leftmost axis first
    scale: Any  # of a discrete site, else None

    @property
    def where(self) -> frozenset[str]:
        """The plates around the site."""
        return frozenset(self.plates)


SiteFactors = dict[str, SiteFactor]


def log_sum_exp(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """``log sum exp x`` over ``dim``; a slice that is -inf throughout gives -inf and zero derivatives."""
    possible = (x != -torch.inf).any(dim, keepdim=True)
    total = torch.where(possible, x, 0.0).logsumexp(dim, keepdim=True)
    return torch.where(possible, total, -torch.inf).squeeze(dim)


def safe_log(probability: Tensor) -> Tensor:
    """``log probability``; -inf and zero derivatives where it is exactly 0."""
    possible = probability != 0
    return torch.where(possible, torch.where(possible, probability, 1.0).log(), -torch.inf)


def transpose(a: Tensor, axes: tuple[int, ...]) -> Tensor:
    """``a`` with its axes permuted."""
    return a.permute(axes)


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """``log sum exp sum operands``: an einsum in which + is log-add-exp and * is +.

    Every operand is broadcast to all symbols before the sum, so no factor underflows on its own.
    """
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    summed = sorted(set(inputs) - {",", *output})
    symbols = "".join(summed) + output
    total = reduce(add, (aligned(t, d, symbols) for t, d in zip(operands, terms, strict=True)))
    return log_sum_exp(total, tuple(range(len(summed)))) if summed else total[...]


def aligned(term: Tensor, dims: str, symbols: str) -> Tensor:
    """``term``, whose axes are called ``dims``, with one axis per symbol, of size one where it has none."""
    if dims == symbols:
        return term
    present = [s for s in symbols if s in dims]
    term = term.permute([dims.index(s) for s in present])
    shape = iter(term.shape)
    return term.reshape([next(shape) if s in dims else 1 for s in symbols])


def tensordot(a: Tensor, b: Tensor, axes: tuple[list[int], list[int]]) -> Tensor:
    """The two-operand :func:`einsum` that contracts ``axes[0]`` of ``a`` with ``axes[1]`` of ``b``."""
    left, right = (list(x) for x in axes)
    names_a, names_b = list(ascii_letters[: a.dim()]), list(ascii_letters[a.dim() : a.dim() + b.dim()])
    for i, j in zip(left, right, strict=True):
        names_b[j] = names_a[i]
    kept_a = [s for i, s in enumerate(names_a) if i not in left]
    kept_b = [s for j, s in enumerate(names_b) if j not in right]
    return einsum(f"{''.join(names_a)},{''.join(names_b)}->{''.join(kept_a + kept_b)}", a, b)


class LogSumExpRing(LogRing):
    """Log-space ring whose sums are :func:`einsum`.

    This module has the three names (``einsum``, ``tensordot``, ``transpose``) that ``opt_einsum`` asks of a backend.
    """

    _backend = __name__

    def sumproduct(self, terms: Sequence[Tensor], dims: Iterable[str]) -> Tensor:
        """Sum of products; at once where no pairwise order could be cheaper."""
        inputs = [_dims(t) for t in terms]
        every = set("".join(inputs))
        if len(terms) > 2 and not any(set(d) == every for d in inputs):
            return cast(Tensor, super().sumproduct(terms, dims))
        output = "".join(sorted(every - set(dims)))
        return _named(einsum(f"{','.join(inputs)}->{output}", *terms), output)


def _dims(term: Any) -> str:
    return str(term._pyro_dims)


def _named(term: Any, dims: str) -> Tensor:
    term._pyro_dims = dims
    return cast(Tensor, term)


def log_prob_total(trace: Trace, names: Sequence[str]) -> Tensor:
    """Log density of the named sites of a trace, every discrete one summed out, shape ``()``."""
    chosen = factors(trace, names)
    parts = [trace.nodes[n]["log_prob_sum"] for n in names if n not in chosen]
    for group in _components(chosen, _sum_dims(trace)):
        scale, group = _unscaled(group)
        parts.append(scale * _contracted(trace, group, contract_to_tensor))
    return cast(Tensor, sum(parts[1:], start=parts[0]))


def term_cells(trace: Trace, names: Sequence[str]) -> dict[str, Tensor]:
    """Terms whose sum is :func:`log_prob_total`: one tensor for each site, or for sites that share discrete ones."""
    chosen = factors(trace, names)
    found = {n: cast(Tensor, trace.nodes[n]["log_prob"]) for n in names if n not in chosen}
    for group in _components(chosen, _sum_dims(trace)):
        scale, bare = _unscaled(group)
        tree = _contracted(trace, bare, contract_tensor_tree)
        terms = [scale * term for part in tree.values() for term in part]
        found |= {"+".join(group) + (f", part {i}" if i else ""): term for i, term in enumerate(terms)}
    return found


def pointwise(trace: Trace, names: Sequence[str]) -> dict[str, Tensor]:
    """Log density of each observed site, one number per datum: see :func:`datum_log_prob`.

    Sites that share a discrete site have a joint density only, one number per cell of its plates; their names
    are joined by ``+``.

    :param names: the sites that count: observed ones and discrete ones.
    :raises UnsupportedModel: when a discrete site outside the plates couples the data points.
    """
    chosen = factors(trace, names)
    observed = [n for n in names if "_enumerate_dim" not in trace.nodes[n]["infer"]]
    result = {n: datum_log_prob(trace.nodes[n]) for n in observed if n not in chosen}
    for group in _components(chosen, _sum_dims(trace)):
        shared = [n for n in observed if n in group]
        if shared:
            scale, bare = _unscaled(group)
            ((plates, (term,)),) = _contracted(trace, bare, contract_tensor_tree).items()
            around = bare[shared[0]]
            if around.plates and not plates:
                raise UnsupportedModel(
                    f"site '{shared[0]}': a discrete site outside its plates couples all data points, so there is "
                    f"no pointwise log likelihood. Put the discrete site into the plate, or use log_joint."
                )
            order = "".join(s for s in around.order if s in plates)
            cells = _laid_out(term, frozenset(), order).expand([around.plates[s] for s in order])
            result["+".join(shared)] = scale * cells
    return result


def datum_log_prob(node: Node) -> Tensor:
    """Log density of each datum of an observed site, mask and scale applied.

    A datum is a cell of the plates, or of the batch shape; the whole of a ``to_event`` without either is data
    point by data point.
    """
    fn = node["fn"]
    while isinstance(fn, torch.distributions.Independent) and not fn.batch_shape:
        fn = fn.base_dist
    log_prob = fn.log_prob(node["value"])
    mask = node["mask"]
    log_prob = log_prob if mask is None else torch.where(torch.as_tensor(mask), log_prob, 0.0)
    if node["infer"].get("_dim_to_id"):  # axes of discrete sites that have one state, or that it does not see
        depth = max((-f.dim for f in _frames(node)), default=0)  # axes that plates reach from the right
        log_prob = log_prob.reshape(log_prob.shape[max(0, log_prob.dim() - depth) :])
    return cast(Tensor, log_prob * node["scale"])


def component_table(trace: Trace, site: str, names: Sequence[str]) -> Tensor:
    """``log p(x_n, z_n = k | w)`` of one local discrete site ``z``, shape ``plate_shape + (K,)``.

    :param names: the sites that count, ``z`` among them.
    """
    every = factors(trace, names, all_of_them=True)
    symbol = trace.nodes[site]["infer"]["_enumerate_symbol"]
    own = every[site]
    dependent = {n: f for n, f in every.items() if symbol in _dims(f.log_prob)}
    dependent = dependent or {n: f for n, f in every.items() if own.where <= f.where}  # of one component
    _, dependent = _unscaled(dependent)
    parts = [_laid_out(f.log_prob, f.where - own.where, own.order + symbol) for f in dependent.values()]
    return sum(parts[1:], start=parts[0]).expand([*own.plates.values(), -1])


def factors(trace: Trace, names: Sequence[str], all_of_them: bool = False) -> SiteFactors:
    """The sites among ``names`` that meet a discrete site, or all of them."""
    counted = frozenset(names)
    trace.compute_log_prob(lambda name, _: name in counted)
    trace.symbolize_dims()
    _refuse_stray_axes(trace, names)
    summed = _sum_dims(trace)
    letters = dict[str, set[str]]()  # of the summed axes along which a site's log probability varies
    for name in names:
        shape, symbols = trace.nodes[name]["log_prob"].shape, trace.nodes[name]["infer"]["_dim_to_symbol"]
        letters[name] = summed & {s for d, s in symbols.items() if -d <= len(shape) and shape[d] > 1}
    found = {}
    for name in (n for n in names if all_of_them or letters[n]):
        node = trace.nodes[name]
        symbols, discrete = node["infer"]["_dim_to_symbol"], "_enumerate_dim" in node["infer"]
        log_prob = _absent_as_one(trace, name, letters) if discrete else node["log_prob"]
        plates = {symbols[f.dim]: f.size for f in _frames(node)}
        found[name] = SiteFactor(pack(log_prob, symbols), plates, "".join(plates), node["scale"] if discrete else None)
    return found


def _refuse_stray_axes(trace: Trace, names: Sequence[str]) -> None:
    """Refuse axes to the left of the plates that belong to no discrete site, which nothing would sum out rightly.

    :raises UnsupportedModel: naming the first site that has one.
    """
    first = max((trace.nodes[n]["infer"].get("_enumerate_dim", -math.inf) for n in names), default=-math.inf)
    for name in names:
        node = trace.nodes[name]
        shape, known = node["log_prob"].shape, node["infer"]["_dim_to_symbol"]
        stray = [d for d in range(-len(shape), 0) if d <= first and shape[d] > 1 and d not in known]
        if stray:
            raise UnsupportedModel(
                f"site '{name}' has a log density of shape {tuple(shape)}, whose axis {stray[0]} is neither a plate "
                "nor that of a discrete site. A discrete site that is summed out has all its states on an axis of its "
                "own, left of the plates: use its value as it comes, such as torch.arange(100) < s or loc[s], without "
                "unsqueeze, or index the last axes with Vindex(loc)[..., s]."
            )


def _frames(node: Node) -> list[Any]:
    """The vectorized plates of a site, leftmost axis first."""
    return sorted((f for f in node["cond_indep_stack"] if f.vectorized), key=attrgetter("dim"))


def _sum_dims(trace: Trace) -> set[str]:
    return set(trace.symbol_to_dim) - set(trace.plate_to_symbol.values())


def _absent_as_one(trace: Trace, site: str, letters: Mapping[str, set[str]]) -> Tensor:
    """Log probability of a discrete site, uniform in the cells where it and all that meets it are masked."""
    node = trace.nodes[site]
    log_prob = cast(Tensor, node["log_prob"])
    if node["mask"] is None:
        return log_prob
    symbol = node["infer"]["_enumerate_symbol"]
    masks = [trace.nodes[n]["mask"] for n, seen in letters.items() if n == site or symbol in seen]
    if any(m is None for m in masks):
        return log_prob
    plates = {f.dim for f in _frames(node)}
    present = []
    for mask in map(torch.as_tensor, masks):
        others = [d for d in range(-mask.dim(), 0) if d not in plates]
        present.append(mask.any(others, keepdim=True) if others else mask)
    absent = ~reduce(or_, present)
    num_components = log_prob.shape[node["infer"]["_enumerate_dim"]]
    return torch.where(absent, -math.log(num_components) * node["scale"], log_prob)


def _components(chosen: SiteFactors, sum_dims: set[str]) -> list[SiteFactors]:
    """The factors, grouped by shared summed axes, directly or through others."""
    leader: dict[str, str] = {}  # letter -> another of its group, or itself

    def first(letter: str) -> str:
        while leader[letter] != letter:
            leader[letter] = letter = leader[leader[letter]]
        return letter

    groups: dict[str, SiteFactors] = {}
    letters = {n: sorted(sum_dims & set(_dims(f.log_prob))) for n, f in chosen.items()}
    for shared in letters.values():
        for letter in shared:
            leader.setdefault(letter, letter)
            leader[first(letter)] = first(shared[0])
    for name, factor in chosen.items():
        groups.setdefault(first(letters[name][0]), {})[name] = factor
    return list(groups.values())


def _unscaled(group: SiteFactors) -> tuple[Any, SiteFactors]:
    """The scale of the group's discrete sites, to count outside their sum, and the factors without it.

    :raises UnsupportedModel: when the discrete sites have several scales, or data have scales of their own.
    """
    scales = {n: f.scale for n, f in group.items() if f.scale is not None}
    if all(is_identically_one(s) for s in scales.values()):
        return 1.0, group
    if many := {n: tuple(s.shape) for n, s in scales.items() if isinstance(s, Tensor) and s.numel() > 1}:
        raise UnsupportedModel(
            f"poutine.scale has a number for each datum, shapes {many}, around a discrete site that is summed out; "
            f"expected one number. Weights of data count outside the sum over labels: leave out the discrete site and "
            f"write MixtureSameFamily(Categorical(...), components) under poutine.scale, or take gaussian_mixture with "
            f"run(Y, weight)."
        )
    if len({float(s) for s in scales.values()}) > 1:
        raise UnsupportedModel(
            f"discrete sites that depend on each other have different scales, "
            f"{ ({n: float(s) for n, s in scales.items()}) }; expected one. Put them under the same "
            f"poutine.scale."
        )
    scale = next(iter(scales.values()))
    divided = {n: _named(f.log_prob / scale, _dims(f.log_prob)) for n, f in group.items()}
    return scale, {n: replace(f, log_prob=divided[n]) for n, f in group.items()}


def _contracted(trace: Trace, group: SiteFactors, contract: Callable[..., T]) -> T:
    tree: OrderedDict[frozenset[str], list[Tensor]] = OrderedDict()
    for factor in group.values():
        tree.setdefault(factor.where, []).append(factor.log_prob)
    try:
        with shared_intermediates() as cache:
            return contract(tree, _sum_dims(trace), ring=LogSumExpRing(cache))
    except NotImplementedError as error:  # plates that cross without nesting
        raise UnsupportedModel(
            f"the discrete sites among {', '.join(group)} cannot be summed out: {error}. The plates around "
            f"sites that share a discrete site must be nested in each other."
        ) from error


def _laid_out(term: Tensor, extra: frozenset[str], order: str) -> Tensor:
    """``term`` summed over the plates ``extra`` and laid out in ``order``."""
    dims = _dims(term)
    drop = [i for i, s in enumerate(dims) if s in extra]
    term = term.sum(drop) if drop else term
    return aligned(term, "".join(s for s in dims if s not in extra), order)
