"""The state of a fit as tensors, words and containers, and back: objects of a fixed table of classes, never code.

What a fit began with need not stand in a file: it is serialised as its place in the state that the fit began with.
"""

import dataclasses
import importlib
import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from pyro_evidence import files
from pyro_evidence.errors import BadInput

PACKAGE = __name__.split(".", maxsplit=1)[0]
WORDS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "dict": dict, "slice": lambda items: slice(*items)}
Place = list[Any]  # keys that lead from the root to an object inside
Known = Mapping[int, tuple[Place, Any]]  # by identity, which is one's own as long as the object is kept
# Every class of which a checkpoint or a saved posterior may hold objects, by the module that is imported to meet one.
CLASSES = {
    "fitting.iterate": "Status Stop",
    "precision.dense": "Dense Diagonal DenseElements Pattern",
    "precision.blocks": "PanelLayout BlockPrecision BlockPlan FamilyPlaces StepFactor Step",
    "precision.elimination": "Fronts Order",
    "precision.low_rank": "LowRank LowRankPlan",
    "precision.gaussian_process": "LatentPrecision PredictorMode RootFactor WhitenedFactor",
    "blocks.local": "Modes",
    "blocks.terms": "Local",
    "blocks.marginal": "SharedIterate",
    "laplace.approximation": "LaplaceState Problem",
    "laplace.gradient": "Slope",
    "laplace.pruning": "PruningTried",
    "laplace.type2": "TypeII",
    "mixture.data": "Mixture",
    "mixture.expectation": "MixtureStatistics",
    "mixture.fit": "MixtureRestarts",
    "mixture.updates": "EStep SharedParameters",
    "mppca.expectation": "FactorAnalysers FactorStatistics",
    "mppca.updates": "Iterate",
    "mppca.fit": "MPPCARestarts",
    "prbf.densities": "Network Point",
    "prbf.fit": "PRBFRestarts",
    "relevance.fast_marginal": "FastState",
    "relevance.variational": "BoundSums VariationalState",
    "numerics.quadrature.reparameterise": "AxisMap Standardisation",
}
KINDS = {name: f"{module}:{name}" for module, names in CLASSES.items() for name in names.split()}


def encoded_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], advice: str = "") -> tuple[str, list[Tensor]]:
    """The arguments of a model as JSON, in the order of their names, and the tensors among them.

    :param advice: what else to do where they cannot be told from others.
    :raises BadInput: for an argument that a file cannot hold, naming it and the place inside.
    """
    tensors: list[Tensor] = []
    named = {f"argument {i}": value for i, value in enumerate(args)}
    named |= {f"argument {name!r}": kwargs[name] for name in sorted(kwargs)}
    try:
        found = {name: files.encoded(value, tensors, name, " of the model") for name, value in named.items()}
    except BadInput as error:
        raise BadInput(f"{error} Pass such, or bind it to the model by functools.partial{advice}.") from None
    return json.dumps(found), tensors


def children(value: Any) -> list[tuple[Any, Any]]:
    """Parts of a value by key (fields, entries, items); none for a value that is taken as a whole."""
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


def serialised(value: Any, known: Known) -> Any:
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
        return {type(value).__name__: [[key, serialised(child, known)] for key, child in children(value)]}
    kind = type(value).__name__
    if f"{type(value).__module__}:{type(value).__qualname__}" != f"{PACKAGE}.{KINDS.get(kind)}":
        raise BadInput(f"the fit holds a {kind} that came up on the way, which no checkpoint can hold.")
    if isinstance(value, Enum):
        return {"kind": kind, "member": value.name}
    return {"kind": kind, "inside": [[name, serialised(child, known)] for name, child in children(value)]}


def deserialised(stored: Any, root: Any) -> Any:
    """The value that :func:`serialised` stands for, its places looked up in ``root``; no code of the file's is run.

    :raises ValueError: for an object of another class, or with other fields, than a checkpoint may hold.
    """
    if not isinstance(stored, dict):
        return stored
    if "same" in stored:
        for key in stored["same"]:
            root = dict(children(root))[key]
        return root
    if "kind" in stored:
        return _object(stored, root)
    ((container, inside),) = stored.items()
    items = [(key, deserialised(child, root)) for key, child in inside]
    return dict(items) if container == "dict" else CONTAINERS[container](v for _, v in items)


def require_same(found: Any, made: Any, tolerance: float, place: str = "") -> None:
    """Refuse a state of a file that differs from the one that its last step makes by more than rounding.

    :param tolerance: of each number, relative to it, or to the mean size in its tensor.
    :param place: of the two inside of the states.
    :raises ValueError: naming the first place where they differ.
    """
    if found is made:
        return
    inside, expected = dict(children(found)), dict(children(made))
    one_kind, other_kind = ((type(x), *((x.dtype, x.dim()) if isinstance(x, Tensor) else ())) for x in (found, made))
    same = one_kind == other_kind and inside.keys() == expected.keys()
    if same and isinstance(made, Tensor | float):
        one, other = torch.as_tensor(found), torch.as_tensor(made)
        same = one.shape == other.shape
        if same and other.is_floating_point():
            size = float(other.abs().nan_to_num(0.0, 0.0, 0.0).mean())
            same = bool(torch.isclose(one, other, rtol=tolerance, atol=tolerance * size, equal_nan=True).all())
        elif same:
            same = torch.equal(one, other)
    elif not expected:
        same = same and found == made
    if not same:
        raise ValueError(f"what it holds at {place} is not what its last step leads to")
    for key, child in inside.items():
        require_same(child, expected[key], tolerance, f"{place}[{key!r}]")


def _object(stored: Mapping[str, Any], root: Any) -> Any:
    """An object of one of the :data:`KINDS`, a member or a dataclass with these fields; nothing of its class is called.

    :raises ValueError: for any other name, and unless these are all of its fields.
    """
    name = stored["kind"]
    if name not in KINDS:
        raise ValueError(f"it holds a {name!r:.60}, which is no state of a fit")
    kind: Any = getattr(importlib.import_module(f"{PACKAGE}.{KINDS[name].split(':')[0]}"), name)
    if issubclass(kind, Enum):
        return kind[stored["member"]]
    inside = {field: deserialised(child, root) for field, child in stored["inside"]}
    expected = {field.name for field in dataclasses.fields(kind)}
    if inside.keys() != expected:
        missing, unknown = sorted(expected - inside.keys()), sorted(map(str, inside.keys() - expected))
        raise ValueError(f"a {name} in it lacks fields {missing} and has unknown ones {unknown}")
    found = object.__new__(kind)
    for field, value in inside.items():
        object.__setattr__(found, field, value)
    return found
