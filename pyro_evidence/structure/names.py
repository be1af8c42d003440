"""Names of the elements of a site: the user's words, the columns of a table, or plain numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Size

from pyro_evidence.errors import BadInput
from pyro_evidence.program.log_joint import LogJoint

Coords = Mapping[str, Sequence[Any]]
Dims = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Names:
    """Names along dimensions, in ArviZ's form.

    :ivar coords: dimension -> what its elements are called.
    :ivar dims: site or param -> its dimensions, in the order of its shape.
    """

    coords: Coords
    dims: Dims

    def label(self, name: str, index: Sequence[int]) -> str:
        """One element, as in ``b[days]``, ``u[308, days]``, ``w[3]``."""
        return f"{name}[{', '.join(self.words(name, index))}]" if len(index) else name

    def words(self, name: str, index: Sequence[int]) -> list[str]:
        """Names of the places of an element, one word for each dimension."""
        dims = list(self.dims.get(name, ()))
        named = [self.coords[d] for d in dims] if len(dims) == len(index) else [()] * len(index)
        return [str(words[i]) if i < len(words) else str(i) for words, i in zip(named, index, strict=True)]


def names_of(
    joint: LogJoint, coords: Coords | None = None, dims: Dims | None = None, others: Mapping[str, Size] | None = None
) -> Names:
    """The known names: the caller's first, then the model's own ``coords`` and ``dims``, then columns of a table.

    A site is given a table's columns, or those that a linear basis makes of them, a bias last, where its dimension has
    as many and no other table has.

    :param others: shapes of sites beside those of the density.
    :raises BadInput: for a dimension without names, and for names that do not fit.
    """
    coords, dims = dict(coords or {}), dict(dims or {})
    shapes = {p.name: p.shape for part in (joint.hypers, joint.latents) for p in part} | dict(others or {})
    _check(coords, dims, shapes)
    own = as_written(joint.model)
    tables = dict(getattr(joint, "columns", {}))
    columns = {"column" if len(tables) == 1 else f"column of {n}": c for n, c in tables.items()}
    of_basis = getattr(getattr(own, "basis", None), "names", None)
    if of_basis is not None:
        columns |= {f"{d} of the basis": made for d, c in columns.items() if len(made := of_basis(c)) != len(c)}
    sizes = [len(c) for c in columns.values()]
    unique = {len(c): n for n, c in columns.items() if sizes.count(len(c)) == 1}
    by_columns = {n: [unique[s[0]]] for n, s in shapes.items() if len(s) == 1 and s[0] in unique}
    return Names(
        {**columns, **getattr(own, "coords", {}), **coords}, {**by_columns, **getattr(own, "dims", {}), **dims}
    )


def as_written(model: Any) -> Any:
    """The model as the user wrote it, without the wrappers of an engine."""
    while isinstance(model, partial) and model.args:
        model = model.args[0]
    return model


def _check(coords: Coords, dims: Dims, shapes: Mapping[str, Size]) -> None:
    for name, along in dims.items():
        if name not in shapes:
            raise BadInput(f"dims names {name!r}; expected a site or a param, one of {list(shapes)}.")
        lacking = [d for d in along if d not in coords]
        if lacking or len(along) != len(shapes[name]):
            raise BadInput(
                f"dims[{name!r}]={list(along)} for shape {tuple(shapes[name])}; expected a name for each dimension, "
                f"with an entry of coords (there are {list(coords)})."
            )
        wrong = [d for d, size in zip(along, shapes[name], strict=True) if len(coords[d]) != size]
        if wrong:
            raise BadInput(
                f"coords[{wrong[0]!r}] has {len(coords[wrong[0]])} entries; {name!r} has shape {tuple(shapes[name])}. "
                f"Expected one for each element along that dimension."
            )
