"""The state of a fit as tensors, words and containers, and back: objects of a fixed table of classes, never code.

What a fit began with need not stand in a file: it is put down as its place in the state that the fit began with.
"""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput

PACKAGE = __name__.split(".", maxsplit=1)[0]
WORDS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "dict": dict, "slice": lambda items: slice(*items)}
Place = list[Any]  # keys that lead from the root to an object inside
Known = Mapping[int, tuple[Place, Any]]  # by identity, which is one's own as long as the object is kept
# Every class of which a checkpoint or a saved posterior may hold objects, by its name there; imported when one is met.
KINDS = {
    "Status": "fitting.iterate:Status",
    "Stop": "fitting.iterate:Stop",
    "Dense": "precision.dense:Dense",
    "Diagonal": "precision.dense:Diagonal",
    "DenseElements": "precision.dense:DenseElements",
    "Pattern": "precision.dense:Pattern",
    "Layout": "precision.blocks:PanelLayout",
    "Fronts": "precision.elimination:Fronts",
    "Order": "precision.elimination:Order",
    "BlockPrecision": "precision.blocks:BlockPrecision",
    "BlockPlan": "precision.blocks:BlockPlan",
    "BlockFamily": "precision.blocks:FamilyPlaces",
    "BlockFactor": "precision.blocks:StepFactor",
    "BlockStep": "precision.blocks:Step",
    "LowRank": "precision.low_rank:LowRank",
    "LowRankPlan": "precision.low_rank:LowRankPlan",
    "LatentPrecision": "precision.gaussian_process:LatentPrecision",
    "LatentMode": "precision.gaussian_process_mode:PredictorMode",
    "RootFactor": "precision.gaussian_process_mode:RootFactor",
    "WhitenedFactor": "precision.gaussian_process_mode:WhitenedFactor",
    "BlocksLocal": "blocks.local:Local",
    "BlocksModes": "blocks.local:Modes",
    "SharedMode": "blocks.marginal:Place",
    "LaplaceState": "laplace.approximation:LaplaceState",
    "Problem": "laplace.approximation:Problem",
    "Slope": "laplace.gradient:Slope",
    "PruningTried": "laplace.pruning:PruningTried",
    "TypeII": "laplace.type2:TypeII",
    "Mixture": "mixture.data:Mixture",
    "MixtureStatistics": "mixture.expectation:MixtureStatistics",
    "MixtureJournal": "mixture.rounds:Journal",
    "MixtureRestarts": "mixture.rounds:MixtureRestarts",
    "MixtureEStep": "mixture.updates:EStep",
    "MixtureTies": "mixture.updates:SharedParameters",
    "Analysers": "mppca.expectation:FactorAnalysers",
    "AnalysersStatistics": "mppca.expectation:FactorStatistics",
    "AnalysersIterate": "mppca.updates:Iterate",
    "AnalysersRestarts": "mppca.rounds:MPPCARestarts",
    "PRBFNetwork": "prbf.densities:Network",
    "PRBFPoint": "prbf.densities:Point",
    "PRBFRestarts": "prbf.rounds:PRBFRestarts",
    "FastState": "relevance.fast_marginal:FastState",
    "BoundSums": "relevance.variational:BoundSums",
    "VariationalState": "relevance.variational:VariationalState",
    "AxisMap": "numerics.quadrature.reparameterise:AxisMap",
    "Standardisation": "numerics.quadrature.reparameterise:Standardisation",
    "QuadratureRule": "numerics.quadrature.rules:Rule",
    "NormalDensity": "numerics.quadrature.densities:Normal",
    "LatticeDensity": "numerics.quadrature.densities:Lattice",
    "InterpolatedDensity": "numerics.quadrature.densities:Interpolated",
}


def children(value: Any) -> list[tuple[Any, Any]]:
    """What a value is made of, by key: fields, entries, items; nothing for what is taken as a whole."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, slice):
        value = value.start, value.stop, value.step
    return list(enumerate(value)) if isinstance(value, list | tuple) and not isinstance(value, torch.Size) else []


def places(root: Any) -> Known:
    """Where each object inside ``root`` is, by its identity; without lists and dicts, which may change in place."""
    found: dict[int, tuple[Place, Any]] = {}
    pending: list[tuple[Any, Place]] = [(root, [])]
    while pending:
        value, place = pending.pop()
        if isinstance(value, WORDS) or id(value) in found:
            continue
        if not isinstance(value, list | dict):
            found[id(value)] = place, value
        pending += [(child, [*place, key]) for key, child in children(value)]
    return found


def put_down(value: Any, known: Known) -> Any:
    """A value as tensors, words and containers; what is ``known`` as its place.

    :raises BadInput: for what can be neither.
    """
    if isinstance(value, WORDS) and not isinstance(value, Enum):
        return value
    if id(value) in known:
        return {"same": list(known[id(value)][0])}
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (list, tuple, dict, slice):
        return {type(value).__name__: [[key, put_down(child, known)] for key, child in children(value)]}
    return _put_down_object(value, known)


def _put_down_object(value: Any, known: Known) -> dict[str, Any]:
    kind = {"kind": _kind_of(value)}
    if isinstance(value, Enum):
        return kind | {"member": value.name}
    return kind | {"inside": [[name, put_down(child, known)] for name, child in children(value)]}


def _kind_of(value: Any) -> str:
    """The name in :data:`KINDS` of the class that a value is of."""
    own = f"{type(value).__module__}:{type(value).__qualname__}"
    for kind, path in KINDS.items():
        if own == f"{PACKAGE}.{path}":
            return kind
    raise BadInput(f"the fit holds a {type(value).__name__} that came up on the way, which no checkpoint can hold.")


def taken_up(stored: Any, root: Any) -> Any:
    """The value that :func:`put_down` has put down, its places looked up in ``root``; no code of the file's is run.

    :raises ValueError: for an object of another class, or with other fields, than a checkpoint may hold.
    """
    if not isinstance(stored, dict):
        return stored
    if "same" in stored:
        return _at(root, stored["same"])
    if "kind" in stored:
        return _object(stored, root)
    ((container, inside),) = stored.items()
    items = [(key, taken_up(child, root)) for key, child in inside]
    return dict(items) if container == "dict" else CONTAINERS[container](v for _, v in items)


def require_alike(found: Any, begun: Any) -> None:
    """Refuse a state of a file that is not made of the same kinds of parts as the one that a loop began with.

    What is None in one of the two may be anything in the other; lengths may differ.

    :raises ValueError: naming both kinds.
    """
    if found is begun or found is None or begun is None:
        return
    one, other = _kind_in_words(found), _kind_in_words(begun)
    if one != other:
        raise ValueError(f"it holds a {one} where a {other} belongs")
    inside = dict(children(begun))
    for key, child in children(found):
        if key in inside:
            require_alike(child, inside[key])


def _kind_in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of {value.dim()} axes"
    return type(value).__name__


def _object(stored: Mapping[str, Any], root: Any) -> Any:
    """An object of one of the :data:`KINDS`: a member, or fields put together."""
    kind = _class_of(stored["kind"])
    if issubclass(kind, Enum):
        return kind[stored["member"]]
    return _built(kind, {name: taken_up(child, root) for name, child in stored["inside"]})


def _at(root: Any, place: Sequence[Any]) -> Any:
    for key in place:
        root = dict(children(root))[key]
    return root


def _class_of(kind: Any) -> Any:
    """The class that a file calls by a name of :data:`KINDS`.

    :raises ValueError: for any other name.
    """
    if kind not in KINDS:
        raise ValueError(f"it holds a {str(kind)[:60]!r}, which is no state of a fit")
    module, name = KINDS[kind].split(":")
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)


def _built(kind: type, inside: Mapping[str, Any]) -> Any:
    """A dataclass with these fields; nothing of its class is called.

    :raises ValueError: unless these are all of its fields.
    """
    expected = {field.name for field in dataclasses.fields(kind)}
    if inside.keys() != expected:
        missing, unknown = sorted(expected - inside.keys()), sorted(map(str, inside.keys() - expected))
        raise ValueError(f"a {kind.__name__} in it lacks fields {missing} and has unknown ones {unknown}")
    found: Any = object.__new__(kind)
    for name, value in inside.items():
        object.__setattr__(found, name, value)
    return found
