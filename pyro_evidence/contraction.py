"""Discrete sites summed out of one trace: own logsumexp ring under Pyro's tensor variable elimination.

Pyro's own ring takes the logarithm of a clamped sum, whose derivatives are wrong where a component's probability is
below the machine epsilon; this one is right there, and for probabilities that are exactly zero.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, cast

from opt_einsum import shared_intermediates
from pyro.ops.contract import contract_tensor_tree, contract_to_tensor
from pyro.ops.rings import LogRing
from torch import Tensor

from pyro_evidence.errors import UnsupportedModel

Trace = Any  # pyro.poutine.Trace
Factors = dict[str, tuple[frozenset[str], Tensor]]  # site name -> plates, packed log probability


class LogSumExpRing(LogRing):
    """Log-space ring whose sums are :func:`pyro_evidence.ops.reduce.einsum`."""

    _backend = "pyro_evidence.ops.reduce"


def factors(trace: Trace) -> Factors:
    """The packed log probability of every sample site, by name; dims are letters, ``_pyro_dims`` names them."""
    trace.pack_tensors()
    plates = trace.plate_to_symbol
    return {
        name: (frozenset(plates[f.name] for f in site["cond_indep_stack"] if f.vectorized), site["packed"]["log_prob"])
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and "log_prob" in site
    }


def total(trace: Trace, exclude: Iterable[str] = ()) -> Tensor:
    """Log density of the trace with every enumerated site summed out, shape ``()``."""
    excluded = set(exclude)
    tree = _tree({n: f for n, f in factors(trace).items() if n not in excluded})
    with shared_intermediates() as cache:
        return contract_to_tensor(tree, _sum_dims(trace), ring=LogSumExpRing(cache))


def pointwise(trace: Trace, names: Iterable[str]) -> dict[str, Tensor]:
    """Log density of each observed site, one number per cell of its plates.

    Sites that share a discrete site have a joint density only; their names are joined by ``+``.

    :param names: the sites that count: observed ones and enumerated ones.
    :raises UnsupportedModel: when a discrete site outside the plates couples the data points.
    """
    chosen = {n: f for n, f in factors(trace).items() if n in set(names)}
    result = {}
    for group in _components(chosen, _sum_dims(trace)):
        observed = [n for n in group if "_enumerate_dim" not in trace.nodes[n]["infer"]]
        if observed:
            result["+".join(observed)] = _per_plate(trace, {n: chosen[n] for n in group}, observed)
    return result


def component_table(trace: Trace, site: str, names: Iterable[str]) -> Tensor:
    """``log p(x_n, z_n = k | w)`` of one local discrete site ``z``, shape ``plate_shape + (K,)``.

    :param names: the observed and enumerated sites.
    """
    every = factors(trace)
    symbol = _symbol(trace, site)
    plates = every[site][0]
    touching = [f for n, f in every.items() if n in set(names) and symbol in f[1]._pyro_dims]
    order = _plate_order(trace, plates) + symbol
    return cast(Tensor, sum(_reduced(term, where - plates, order) for where, term in touching))


def _sum_dims(trace: Trace) -> set[str]:
    return set(trace.symbol_to_dim) - set(trace.plate_to_symbol.values())


def _tree(chosen: Factors) -> "OrderedDict[frozenset[str], list[Tensor]]":
    tree: OrderedDict[frozenset[str], list[Tensor]] = OrderedDict()
    for where, term in chosen.values():
        tree.setdefault(where, []).append(term)
    return tree


def _components(chosen: Factors, sum_dims: set[str]) -> list[list[str]]:
    """Names of the factors that share summed dims, directly or through others."""
    groups: list[tuple[set[str], list[str]]] = []
    for name, (_, term) in chosen.items():
        dims = sum_dims & set(term._pyro_dims)
        joined = [g for g in groups if g[0] & dims]
        groups = [g for g in groups if not g[0] & dims]
        groups.append((dims.union(*(g[0] for g in joined)), [n for g in joined for n in g[1]] + [name]))
    return [names for _, names in groups]


def _per_plate(trace: Trace, group: Factors, observed: list[str]) -> Tensor:
    with shared_intermediates() as cache:
        contracted = contract_tensor_tree(_tree(group), _sum_dims(trace), ring=LogSumExpRing(cache))
    ((plates, (term,)),) = contracted.items()
    expected = group[observed[0]][0]
    if not plates and expected:
        raise UnsupportedModel(
            f"site '{observed[0]}': a discrete site outside its plates couples all data points, so there is no "
            f"pointwise log likelihood. Put the discrete site into the plate, or use log_joint."
        )
    return _expanded(trace, term, _plate_order(trace, plates))


def _expanded(trace: Trace, term: Tensor, order: str) -> Tensor:
    sizes = {trace.plate_to_symbol[f.name]: f.size for s in trace.nodes.values() for f in s.get("cond_indep_stack", ()) if f.vectorized}
    return _reduced(term, frozenset(), order).expand([sizes[s] for s in order])


def _plate_order(trace: Trace, plates: frozenset[str]) -> str:
    return "".join(sorted(plates, key=lambda s: trace.symbol_to_dim[s]))


def _symbol(trace: Trace, site: str) -> str:
    dim = trace.nodes[site]["infer"]["_enumerate_dim"]
    return str(trace.nodes[site]["infer"]["_dim_to_symbol"][dim])


def _reduced(term: Tensor, extra: frozenset[str], order: str) -> Tensor:
    """``term`` summed over the plates ``extra`` and laid out in ``order``."""
    dims = term._pyro_dims  # type: ignore[attr-defined]
    drop = [i for i, s in enumerate(dims) if s in extra]
    term, dims = (term.sum(drop) if drop else term), [s for s in dims if s not in extra]
    term = term.permute([dims.index(s) for s in order if s in dims])
    shape = iter(term.shape)
    return term.reshape([next(shape) if s in dims else 1 for s in order])


def mixture_table(base: Any, value: Tensor) -> Tensor:
    """``log p(x, k)`` of a ``MixtureSameFamily``, shape ``batch_shape + (K,)``."""
    components = base.component_distribution
    padded = value.unsqueeze(-1 - len(base.event_shape))
    return cast(Tensor, base.mixture_distribution.logits.log_softmax(-1) + components.log_prob(padded))
