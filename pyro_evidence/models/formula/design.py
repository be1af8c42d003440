"""A data frame as the tensors of a mixed model: fixed effects, what varies by group, groups, response."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.models.formula.families import FAMILIES
from pyro_evidence.models.formula.terms import Formula, Varying

Frame = Any  # a pandas.DataFrame


@dataclass(frozen=True)
class Response:
    """The response as tensors.

    :ivar values: shape ``(N,)``.
    :ivar trials: of a binomial, shape ``(N,)``.
    :ivar classes: in the order of their codes, where it has classes.
    """

    values: Tensor
    trials: Tensor | None = None
    classes: tuple[str, ...] = ()


@dataclass
class Design:
    """The design matrices of a formula on one frame, and how to build them on another.

    :ivar formula: taken apart.
    :ivar family: its name in :data:`FAMILIES`.
    :ivar frame: the rows without gaps, of the columns that the formula names.
    """

    formula: Formula
    family: str
    frame: Frame
    _built: dict[str, Any] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": {}}  # formulae's own objects hold on to whoever called them

    def matrix(self, terms: str, frame: Frame | None = None) -> Tensor:
        """Columns of some terms, ``(N, P)``."""
        built = self._matrices(terms)
        if built.common is None:
            return torch.zeros(len(self.frame if frame is None else frame), 0, dtype=torch.float64)
        found = built.common if frame is None else _evaluated(built.common, frame)
        columns = _without_offset(built, np.asarray(found.design_matrix, dtype=np.float64))
        return torch.tensor(columns)

    def names(self, terms: str) -> tuple[str, ...]:
        """Names of those columns."""
        built = self._matrices(terms)
        return () if built.common is None else tuple(n for t in _terms(built) for n in _labels(*t))

    def offset(self, frame: Frame | None = None) -> Tensor | None:
        """The sum of the terms with a coefficient of one, ``(N,)``, or None."""
        built = self._matrices(self.formula.fixed)
        if built.common is None or all(t.kind != "offset" for t in built.common.terms.values()):
            return None
        found = built.common if frame is None else _evaluated(built.common, frame)
        slices = [found.slices[n] for n, t in built.common.terms.items() if t.kind == "offset"]
        matrix = np.asarray(found.design_matrix, dtype=np.float64)
        return torch.tensor(sum(matrix[:, s].sum(-1) for s in slices))

    def levels(self, varying: Varying) -> tuple[str, ...]:
        """Names of the groups, sorted as their columns are."""
        if varying.group not in self._built:
            self._built[varying.group] = _levels(self.frame, varying)
        return tuple(self._built[varying.group])

    def index(self, varying: Varying, frame: Frame | None = None) -> tuple[Tensor, int]:
        """The group of each row ``(N,)`` and how many there are; groups that are new come after the others."""
        known = {name: code for code, name in enumerate(self.levels(varying))}
        found = _joined(self.frame if frame is None else frame, varying)
        codes = [known.setdefault(name, len(known)) for name in found]
        return torch.tensor(codes, dtype=torch.long), len(known)

    def response(self, frame: Frame | None = None) -> Response:
        """The response of each row.

        :raises BadInput: where it is not what the family is of.
        """
        frame = self.frame if frame is None else frame
        kind = FAMILIES[self.family].response
        if kind == "trials":
            return self._trials(frame)
        text, _, level = self.formula.response.partition("[")
        if kind in ("binary", "classes"):
            return _classes(self._column(text, frame), level.strip("]'\" "), kind, self._column(text, self.frame))
        return self._numbers(self._column(text, frame), kind)

    def _trials(self, frame: Frame) -> Response:
        found = re.fullmatch(r"(p|prop|proportion|cbind)\((.*),(.*)\)", self.formula.response)
        if not found:
            raise BadInput(
                f"the response of family='binomial' is '{self.formula.response}'; expected prop(successes, trials) or "
                f"cbind(successes, failures). For zeros and ones take family='bernoulli'."
            )
        successes, other = (_float(self._column(text.strip(), frame)) for text in found.groups()[1:])
        trials = successes + other if found.group(1) == "cbind" else other
        _require(bool(((successes >= 0) & (successes <= trials)).all()), "successes", "from 0 to the number of trials")
        return Response(successes, trials)

    def _numbers(self, column: Any, kind: str) -> Response:
        values = _float(column)
        if kind == "counts":
            _require(bool(((values >= 0) & (values == values.round())).all()), self.formula.response, "whole, from 0")
        return Response(values)

    def _column(self, text: str, frame: Frame) -> Any:
        """A column, or what an expression makes of columns."""
        name = text.strip().strip("`")
        if name in frame.columns:
            return frame[name]
        return _design_matrices(f"{text} ~ 1", frame).response.design_matrix

    def _matrices(self, terms: str) -> Any:
        if f"~{terms}" not in self._built:
            self._built[f"~{terms}"] = _design_matrices(terms, self.frame)
        return self._built[f"~{terms}"]


def complete_rows(formula: Formula, frame: Frame) -> Frame:
    """The rows and columns that the formula needs, without those rows in which one is missing.

    :raises BadInput: for a frame that is none, that lacks a column of groups, or of which nothing is left.
    """
    if not hasattr(frame, "columns") or not hasattr(frame, "dropna"):
        raise BadInput(f"frame is a {type(frame).__name__}; expected a pandas.DataFrame, one row for each datum.")
    lacking = [c for v in formula.varying for c in v.columns if c not in frame.columns]
    if lacking:
        raise BadInput(f"frame has no column '{lacking[0]}', expected by the formula; it has {list(frame.columns)}.")
    kept = frame[[c for c in frame.columns if c in formula.words]].dropna()
    if not len(kept):
        raise BadInput(f"frame has {len(frame)} rows, each with a missing value; expected some without. Fill gaps in.")
    return kept


def _design_matrices(text: str, frame: Frame) -> Any:
    try:
        formulae = import_module("formulae")
    except ImportError as error:
        raise ImportError("formulas need the package formulae: pip install 'pyro-evidence[formula]'.") from error
    try:
        return formulae.design_matrices(text, frame, na_action="error", extra_namespace={"np": np})
    except Exception as error:  # whatever the formula's functions raise
        raise BadInput(
            f"'{text}' cannot be made into columns ({type(error).__name__}: {error}); expected "
            f"columns of the frame, {list(frame.columns)}, with + : * and functions of them such as scale(x), C(x), "
            f"np.log(x)."
        ) from error


def _evaluated(common: Any, frame: Frame) -> Any:
    try:
        return common.evaluate_new_data(frame)
    except Exception as error:
        raise BadInput(
            f"the fixed part of the formula cannot be evaluated on the new rows ({error}); expected the fit's columns, "
            f"with levels that the fit has seen. Only groups may be new."
        ) from error


def _terms(built: Any) -> list[tuple[str, Any]]:
    return [(n, t) for n, t in built.common.terms.items() if t.kind != "offset"]


def _labels(name: str, term: Any) -> Sequence[str]:
    return [str(label) for label in term.labels] if term.labels is not None else [name]


def _without_offset(built: Any, matrix: Any) -> Any:
    slices = [built.common.slices[n] for n, _ in _terms(built)]
    return np.concatenate([matrix[:, s] for s in slices], 1) if slices else matrix[:, :0]


def _levels(frame: Frame, varying: Varying) -> list[str]:
    rows = frame[list(varying.columns)].drop_duplicates().sort_values(list(varying.columns))
    return _joined(rows, varying)


def _joined(frame: Frame, varying: Varying) -> list[str]:
    columns = [frame[c].astype(str).tolist() for c in varying.columns]
    return [":".join(row) for row in zip(*columns, strict=True)]


def _float(column: Any) -> Tensor:
    try:
        return torch.tensor(np.asarray(column, dtype=np.float64).reshape(-1))
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"the response holds words ({str(np.asarray(column).reshape(-1)[0])!r}); expected numbers. For classes "
            f"take family='bernoulli' or 'categorical'."
        ) from error


def _classes(column: Any, level: str, kind: str, seen: Any) -> Response:
    """Codes of classes; of two, the second is 1, or the one that was named."""
    names = _class_names(seen)
    if level and level not in names:
        raise BadInput(f"the response has no class '{level}'; expected one of {list(names)}.")
    if level:
        return Response(torch.tensor([float(_word(c) == level) for c in column], dtype=torch.float64))
    if kind == "binary":
        _require(len(names) == 2, f"the response with {len(names)} values", "of two values, or named: y['yes']")
    codes = [names.index(_word(c)) for c in column]
    return Response(torch.tensor(codes, dtype=torch.float64 if kind == "binary" else torch.long), classes=names)


def _class_names(column: Any) -> tuple[str, ...]:
    categories = getattr(getattr(column, "cat", None), "categories", None)
    values = sorted(set(np.asarray(column).reshape(-1).tolist())) if categories is None else categories
    return tuple(_word(v) for v in values)


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _require(holds: bool, what: str, expected: str) -> None:
    if not holds:
        raise BadInput(f"{what}: expected {expected}. Look at the column's smallest and largest values.")


Names = Mapping[str, tuple[str, ...]]
