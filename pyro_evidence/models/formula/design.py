"""A data frame as the tensors of a mixed model: fixed effects, what varies by group, groups, response."""

import math
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_evidence.data.arrays import as_tensor, exactly
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import global_lock
from pyro_evidence.lazy_import import import_extra
from pyro_evidence.models.formula.smooths import HELD, SmoothColumns
from pyro_evidence.models.formula.terms import FACTOR_OF, INSTEAD, SMOOTHS, Formula, Smooth, Varying, parsed, with_fixed
from pyro_evidence.models.gmrf import Neighbours

Frame = Any  # a pandas.DataFrame
NUMPY = {
    name: getattr(np, name)
    for name in (
        *("abs", "absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "cbrt", "ceil"),
        *("clip", "cos", "cosh", "deg2rad", "exp", "exp2", "expm1", "floor", "fmax", "fmin", "hypot", "log", "log10"),
        *("log1p", "log2", "logaddexp", "max", "maximum", "mean", "median", "min", "minimum", "mod", "power"),
        *("quantile", "rad2deg", "reciprocal", "rint", "round", "sign", "sin", "sinh", "sqrt", "square", "std", "sum"),
        *("tan", "tanh", "var", "where"),
    )
}
FORMULAE = (
    *("B", "C", "I", "S", "Sum", "T", "Treatment", "binary", "bs", "cc", "center", "cr", "offset", "p", "poly", "prop"),
    *("proportion", "scale", "standardize", "tp"),
)
FUNCTIONS = (*FORMULAE, *NUMPY, *(f"np.{name}" for name in NUMPY))  # all that a formula can call

COUNTED = re.compile(  # numbers of columns, of a polynomial or spline, or of terms that are multiplied
    r"\b(?:poly|bs|cc|cr|tp)\((?:[^()]|\([^()]*\))*?,\s*(\d+)\s*[,)]|\b(?:df|degree)\s*=\s*(\d+)|\*\*\s*(\d+)"
)


@dataclass(frozen=True, eq=False)
class Response:
    """The response as tensors.

    :ivar values: shape ``(N,)``.
    :ivar given: what else is known of each, ``(N,)`` by name: ``trials`` of a binomial, ``event``, ``entry`` of times.
    :ivar classes: in the order of their codes, where it has classes.
    """

    values: Tensor
    given: Mapping[str, Tensor] = field(default_factory=dict)
    classes: tuple[str, ...] = ()


@dataclass
class FrameDesign:
    """The design matrices of a formula on one frame, and how to build them on another.

    :ivar formula: taken apart.
    :ivar kind: what its response may be, as a family says.
    :ivar frame: the rows without gaps, of the columns that the formula names.
    :ivar neighbours: pairs of names by column, for smooths over the nodes of a graph.
    """

    formula: Formula
    kind: str
    frame: Frame
    neighbours: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    _built: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": {}}  # formulae's own objects hold on to whoever called them

    def matrix(self, terms: str, frame: Frame | None = None, *, offset: bool = False) -> Tensor:
        """Columns of some terms, or of the offsets among them, ``(N, P)``."""
        built = self._matrices(terms)
        names = _terms(built, offset=offset)
        if not names:
            return torch.zeros(len(self.frame if frame is None else frame), 0, dtype=torch.float64)
        found = built.common if frame is None else _evaluated(built.common, frame)
        matrix = np.asarray(found.design_matrix, dtype=np.float64)
        return torch.tensor(np.concatenate([matrix[:, built.common.slices[n]] for n in names], 1))

    def names(self, terms: str) -> tuple[str, ...]:
        """Names of those columns."""
        found = _terms(self._matrices(terms)).items()
        return tuple(str(n) for name, t in found for n in ([name] if t.labels is None else t.labels))

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Names of the fixed effects."""
        names = tuple(name for name in self.names(self.formula.fixed) if self._has_intercept or name != "Intercept")
        return names + tuple(name for smooth in self.formula.smooths for name in self.smooth(smooth).fixed_names)

    def fixed(self, frame: Frame | None = None) -> Tensor:
        """Columns of the fixed effects, ``(N, P)``."""
        kept = [self._has_intercept or name != "Intercept" for name in self.names(self.formula.fixed)]
        columns = [self.matrix(self.formula.fixed, frame)[:, torch.tensor(kept, dtype=torch.bool)]]
        return torch.cat(
            [*columns, *(self.smooth(s).fixed(*self.smooth_at(s, frame)) for s in self.formula.smooths)], 1
        )

    def smooth(self, smooth: Smooth) -> SmoothColumns:
        """The columns of a smooth, as the rows of the fit place its knots."""
        if smooth not in self._built:
            by, numeric = smooth.by, smooth.by is not None and self._is_numeric(smooth.by)
            names = ("",) if by is None else tuple(f":{name}" for name in self.names(f"0 + {by}"))
            graph = self._graph(smooth)[1] if smooth.basis == "mrf" else None
            x, _ = self.smooth_at(smooth)
            self._built[smooth] = SmoothColumns.over(smooth, x, names, numeric, graph)
        return self._built[smooth]

    @property
    def smooth_blocks(self) -> list[tuple[str, tuple[str, ...], Tensor | None]]:
        """Every block of a smooth's columns: its name, those of its columns, and the width of a Gaussian process."""
        smooths = [self.smooth(smooth) for smooth in self.formula.smooths]
        return [
            (name, columns, smooth.margins[0].width)
            for smooth in smooths
            for name, columns in zip(smooth.block_names, smooth.column_names, strict=True)
        ]

    def smooth_at(self, smooth: Smooth, frame: Frame | None = None) -> tuple[Tensor, Tensor]:
        """The values that a smooth is a function of ``(N, d)``, and the columns that it is multiplied by ``(N, B)``.

        :raises BadInput: for words, numbers that are not finite, nodes that the graph has not.
        """
        if smooth.basis == "mrf":
            nodes, _ = self._graph(smooth)
            names = (self.frame if frame is None else frame)[smooth.covariates[0]].astype(str)
            if unknown := sorted(set(names) - set(nodes)):
                raise BadInput(
                    f"{smooth.text}: {unknown[0]!r} is none of the {len(nodes)} nodes of the graph; expected one of "
                    f"them, such as {nodes[0]!r}. Pass its neighbours to mixed(..., neighbours=...) too."
                )
            x = torch.tensor([[float(nodes.index(name))] for name in names], dtype=torch.float64)
        else:
            for covariate in smooth.covariates:
                if not self._is_numeric(covariate):
                    raise BadInput(
                        f"{smooth.text}: '{covariate}' has words; expected one column of numbers. An effect of each "
                        f"level is (1 | {covariate}), a smooth for each level s(x, by={covariate})."
                    )
            x = torch.cat([self.matrix(f"0 + {covariate}", frame) for covariate in smooth.covariates], 1)
        if not bool(x.isfinite().all()):
            raise BadInput(f"{smooth.text} has values that are not finite; expected numbers, such as log(x) of x > 0.")
        return x, x.new_ones(len(x), 1) if smooth.by is None else self.matrix(f"0 + {smooth.by}", frame)

    def _is_numeric(self, text: str) -> bool:
        """Whether a term is one column of numbers."""
        kinds = [term.kind for term in _terms(self._matrices(f"0 + {text}")).values()]
        return kinds == ["numeric"] and len(self.names(f"0 + {text}")) == 1

    def _graph(self, smooth: Smooth) -> tuple[list[str], Neighbours]:
        """The nodes of a smooth's graph by name, and who is beside whom.

        :raises BadInput: where there is none.
        """
        column = smooth.covariates[0]
        pairs = [tuple(str(name) for name in pair) for pair in self.neighbours.get(column, ())]
        if len(smooth.covariates) != 1 or not pairs or any(len(pair) != 2 for pair in pairs):
            raise BadInput(
                f"{smooth.text} with bs='mrf' is over the nodes of a graph; expected mixed(..., neighbours={{"
                f"'{column}': [('a', 'b'), ...]}}), each pair of neighbours once."
            )
        nodes = sorted({name for pair in pairs for name in pair})
        return nodes, Neighbours(torch.tensor([[nodes.index(name) for name in pair] for pair in pairs]))

    @property
    def _has_intercept(self) -> bool:
        return self.kind not in ("order", "grades")

    def offset(self, frame: Frame | None = None) -> Tensor | None:
        """The sum of the terms with a coefficient of one, ``(N,)``, or None."""
        columns = self.matrix(self.formula.fixed, frame, offset=True)
        return columns.sum(-1) if columns.shape[1] else None

    def effects(self, varying: Varying) -> tuple[str, ...]:
        """Names of the effects that each group has."""
        if varying.structure != "ar1":
            return self.names(varying.terms)
        return tuple(f"{varying.terms}[{time}]" for time in self._every_time(varying))

    def columns(self, varying: Varying, frame: Frame | None = None) -> Tensor:
        """The columns that these effects are multiplied by, ``(N, P)``.

        :raises BadInput: for times that are not among those of the fit.
        """
        if varying.structure != "ar1":
            return self.matrix(varying.terms, frame)
        times = self._every_time(varying)
        places = {time: place for place, time in enumerate(times)}
        found = (self.frame if frame is None else frame)[_column_of(varying)].tolist()
        if unknown := [time for time in found if time not in places]:
            raise BadInput(
                f"{varying.text}: time {unknown[0]!r} is new; expected {times[0]!r} to {times[-1]!r}, as in the fit. "
                "For later times write the model with models.gmrf.AR1, and take posterior.forecast(...)."
            )
        return torch.nn.functional.one_hot(torch.tensor([places[time] for time in found]), len(places)).double()

    def _every_time(self, varying: Varying) -> Sequence[Any]:
        """Every time in order, those too that lack between whole numbers; of a factor its levels, as in glmmTMB.

        :raises BadInput: for what is no column, times that are neither whole numbers nor equally far apart, and more
            times than a matrix is held of.
        """
        name = _column_of(varying)
        if name not in self.frame.columns:
            raise BadInput(f"{varying.text}; expected one column before the bar, of {list(self.frame.columns)}.")
        times = self.frame[name]
        if hasattr(times, "cat"):
            return list(times.cat.categories)
        with _of_one_kind(varying.text):
            found: Sequence[Any] = sorted(set(times.tolist()))
        if FACTOR_OF.match(varying.terms):
            pass
        elif all(isinstance(time, int | float) and float(time).is_integer() for time in found):
            steps = [int(later - earlier) for earlier, later in pairwise(found)]
            found = range(int(found[0]), int(found[-1]) + 1, math.gcd(*steps) or 1)
        elif not all(isinstance(time, str | bool) for time in found):
            steps = [later - earlier for earlier, later in pairwise(found)]
            if steps and max(steps) - min(steps) > 1e-6 * max(steps):  # as rounded in single precision
                raise BadInput(
                    f"{varying.text} has times {min(steps)} to {max(steps)} apart; expected equal steps, or whole "
                    f"numbers: round(time / unit), or pandas.Categorical(time) to take their order for equal steps."
                )
        if len(found) ** 2 > HELD:
            raise BadInput(
                f"{varying.text} has {len(found)} times from {found[0]} to {found[-1]}; expected at most "
                f"{math.isqrt(HELD)}. Take a longer unit, or by hand the sparse field models.gmrf.AR1."
            )
        return found

    def levels(self, varying: Varying) -> tuple[str, ...]:
        """Names of the groups, sorted as their columns are."""
        groups = self._groups(varying)
        names = tuple(":".join(group) for group in groups)
        return names if len(set(names)) == len(groups) else tuple(repr(group) for group in groups)

    def index(self, varying: Varying, frame: Frame | None = None) -> tuple[Tensor, int]:
        """The group of each row ``(N,)`` and how many there are; groups that are new come after the others."""
        known = {group: code for code, group in enumerate(self._groups(varying))}
        found = _group_of_rows(self.frame if frame is None else frame, varying)
        codes = [known.setdefault(group, len(known)) for group in found]
        return torch.tensor(codes, dtype=torch.long), len(known)

    def _groups(self, varying: Varying) -> list[tuple[str, ...]]:
        """The groups, sorted, each as the values of its columns."""
        if varying.columns not in self._built:
            columns = list(varying.columns)
            with _of_one_kind(f"group(s) {', '.join(columns)}"):
                rows = self.frame[columns].drop_duplicates().sort_values(columns)
            self._built[varying.columns] = list(dict.fromkeys(_group_of_rows(rows, varying)))
        return list(self._built[varying.columns])

    def response(self, frame: Frame | None = None) -> Response:
        """The response of each row.

        :raises BadInput: where it is not what the family is of.
        """
        frame = self.frame if frame is None else frame
        kind = self.kind
        if kind == "trials":
            are_summed, parts = self._of_trials()
            successes, other = (_float(self._column(part, frame)) for part in parts)
            trials = successes + other if are_summed else other
            inside = bool(((successes >= 0) & (successes <= trials)).all())
            _require(inside, "successes", "from 0 to the number of trials")
            return Response(successes, {"trials": trials})
        if kind in ("times", "order"):
            return self._times(frame)
        if kind in ("binary", "classes", "grades"):
            text, _, level = self.formula.response.partition("[")
            return _classes(self._column(text, frame), level.strip("]'\" "), kind, self._column(text, self.frame))
        values = _float(self._column(self.formula.response, frame))
        least = 1 if kind == "counts above zero" else 0
        if kind.startswith("counts"):
            whole = bool(((values >= least) & (values == values.round())).all())
            _require(whole, self.formula.response, f"whole, from {least}")
        if kind in ("positive", "share"):
            _require(bool((values > 0).all()), self.formula.response, "above 0")
        if kind == "share":
            _require(bool((values < 1).all()), self.formula.response, "below 1")
        return Response(values)

    def trials_in(self, frame: Frame) -> Tensor | None:
        """The number of trials of each row, one where the frame has not their columns; None of other responses."""
        if self.kind != "trials":
            return None
        are_summed, parts = self._of_trials()
        parts = parts if are_summed else parts[1:]
        words = set[str]().union(*(Formula(part, "", ()).words for part in parts))
        needed = [c for c in self.frame.columns if c in words]
        if needed and not any(c in getattr(frame, "columns", ()) for c in needed):
            return torch.ones(len(frame), dtype=torch.float64)
        frame = columns_of(frame, needed, needed)
        return torch.stack([_float(self._column(part, frame)) for part in parts]).sum(0)

    def _of_trials(self) -> tuple[bool, list[str]]:
        """Whether the two terms of a response are successes and failures; else they are successes and trials."""
        found = re.fullmatch(r"(p|prop|proportion|cbind)\((.*),(.*)\)", self.formula.response)
        if not found:
            raise BadInput(
                f"the response of a family of trials is '{self.formula.response}'; expected prop(successes, trials) or "
                f"cbind(successes, failures). For zeros and ones take family='bernoulli'."
            )
        return found.group(1) == "cbind", [text.strip() for text in found.groups()[1:]]

    def _times(self, frame: Frame) -> Response:
        found = re.fullmatch(r"[sS]urv\((.*)\)", self.formula.response)
        parts = found.group(1).split(",") if found else [self.formula.response]
        if not 1 <= len(parts) <= 3:
            raise BadInput(
                f"the response of a family of times is '{self.formula.response}'; expected surv(time, event), "
                f"surv(start, stop, event), or surv(time) where every event was seen."
            )
        columns = [_float(self._column(text, frame)) for text in parts]
        event = torch.ones_like(columns[0]) if len(parts) == 1 else columns.pop()
        entry = {"entry": columns[0]} if len(columns) == 2 else {}
        time, begun = columns[-1], entry.get("entry", torch.zeros_like(columns[-1]))
        _require(bool((time > 0).all()), "times", "above 0")
        _require(bool(((begun >= 0) & (begun < time)).all()), "times of entry", "from 0, and below the time of exit")
        _require(bool(((event == 0) | (event == 1)).all()), "events", "1 where the event was seen, else 0")
        return Response(time, {"event": event, **entry})

    def _column(self, text: str, frame: Frame) -> Any:
        """A column, or what an expression makes of columns; a minus is arithmetic there, as in R's responses."""
        name = text.strip().strip("`")
        if name in frame.columns:
            return frame[name]
        return _design_matrices(f"I({text}) ~ 1", frame).response.design_matrix

    def _matrices(self, terms: str) -> Any:
        if f"~{terms}" not in self._built:
            self._built[f"~{terms}"] = _design_matrices(terms, self.frame)
        return self._built[f"~{terms}"]


MOST_TERMS = 16  # whose choices are gone through
MOST = 2**12  # formulas, a fit for each


def formulas_within(formula: str, frame: Frame) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[bool, ...]], bool]:
    """Terms of the fixed part that a formula may lack, with names of their columns; and each formula with its terms.

    Last whether a term has the same columns in all formulas: levels may have others where the constant, or a margin of
    an interaction, is in none.

    An interaction comes with all terms whose columns are among its own (Nelder, 1977).  Constant, offsets, groups,
    smooths, and formulas of other parameters stay.

    :param formula: ``(a + b + c)^2`` has all interactions of two.
    :raises BadInput: for a formula that cannot be used, or has too many terms.

    >>> import pandas
    >>> frame = pandas.DataFrame({"y": [1.0, 2.0, 4.0], "a": [0.0, 1.0, 2.0], "b": [1.0, 0.0, 1.0]})
    >>> list(formulas_within("y ~ a * b", frame)[1])
    ['y ~ 1', 'y ~ 1 + b', 'y ~ 1 + a', 'y ~ 1 + a + b', 'y ~ 1 + a + b + a:b']
    """
    built = _design_matrices(parsed(formula, frame)[""].fixed, frame)
    named = _terms(built)
    always = ["1" if "Intercept" in named else "0", *_terms(built, offset=True)]
    terms = {name: tuple(map(str, term.labels or [name])) for name, term in named.items() if name != "Intercept"}
    if not 0 < len(terms) <= MOST_TERMS:
        raise BadInput(
            f"{formula!r} has {len(terms)} fixed terms to choose from; expected 1 to {MOST_TERMS}. Of many columns a "
            "structure site of its own, Bernoulli with infer={'branching': True}, is searched."
        )
    parts = [set(term.split(":")) for term in terms]
    margins = [[i for i, part in enumerate(parts) if part < whole] for whole in parts]
    found = {}
    for keep in product((False, True), repeat=len(terms)):
        if not all(keep[i] for t, on in enumerate(keep) if on for i in margins[t]):
            continue
        own = [term for term, on in zip(terms, keep, strict=True) if on]
        found[with_fixed(formula, " + ".join([*always, *own]))] = keep
        if len(found) > MOST:
            raise BadInput(f"{formula!r} has more than {MOST:,} formulas within; expected fewer, a fit for each.")
    whole = "Intercept" in named and all(len(m) == 2 ** len(p) - 2 for m, p in zip(margins, parts, strict=True))
    return terms, found, whole


def complete_rows(formulas: Collection[Formula], frame: Frame, others: Sequence[str] = ()) -> Frame:
    """The rows and columns that the formulas need, and some others, without those rows in which one is missing.

    :raises BadInput: as :func:`columns_of`, and for a frame of which nothing is left.
    """
    words = set(others).union(*(f.words for f in formulas))
    plain = [*others, *(f.response for f in formulas if f.response.isidentifier())]
    labels = [c for f in formulas for v in f.varying for c in v.columns]
    kept = columns_of(frame, words, [*plain, *labels]).dropna()
    if not len(kept):
        raise BadInput(f"frame has {len(frame)} rows, each with a missing value; expected some without. Fill gaps in.")
    for name in kept.columns:
        if (kept[name].dtype.kind in "iu" or kept[name].dtype == np.longdouble) and name not in labels:
            exactly(as_tensor(kept[name]), torch.float64, f"column '{name}'")
    return kept


def columns_of(frame: Frame, words: Container[str], needed: Iterable[str]) -> Frame:
    """Some columns of a frame, their numbers in this machine's byte order, without which pandas sorts none.

    :param words: names of the columns that are kept.
    :param needed: of which these must be there.
    :raises BadInput: for a frame that is none, that lacks a column, has one twice or one called Intercept, and for
        columns of complex numbers and of structures.
    """
    if not hasattr(frame, "columns") or not hasattr(frame, "dropna"):
        raise BadInput(f"frame is a {type(frame).__name__}; expected a pandas.DataFrame, one row for each datum.")
    if lacking := [c for c in needed if c not in frame.columns]:
        raise BadInput(f"frame has no column '{lacking[0]}', expected by the formula; it has {list(frame.columns)}.")
    names = [c for c in frame.columns if c in words]
    if twice := [c for c in names if names.count(c) > 1]:
        raise BadInput(f"frame has several columns '{twice[0]}'; expected one of each name. Rename the others.")
    if "Intercept" in names:  # formulae takes it for the constant
        raise BadInput("frame has a column 'Intercept', the name of the constant; expected another. Rename it.")
    native = {}
    for name, dtype in frame[names].dtypes.items():
        if dtype.kind in "cV":
            raise BadInput(
                f"column '{name}' of the frame holds {dtype}; expected real numbers, or words. Put the parts that are "
                f"meant into columns of their own, such as frame['{name}'].to_numpy().real."
            )
        if isinstance(dtype, np.dtype) and not dtype.isnative:
            native[name] = dtype.newbyteorder("=")
    return frame[names].astype(native)


def _design_matrices(text: str, frame: Frame) -> Any:
    """Design matrices by formulae of a formula, in which only :data:`FUNCTIONS` can be called.

    Its environment holds these functions instead of the names of the caller, and a name that reaches into one of them
    (``np.log.at``, ``C.__globals__``) is refused before formulae sees it.  ``^`` is ``**``, but in quoted names.
    """
    text = "`".join(x if i % 2 else x.replace("^", "**") for i, x in enumerate(text.split("`")))
    missing = "formulas need the package formulae: pip install 'pyro-evidence[formula]'."
    formulae, scanner, parser, environment = (
        import_extra(f"formulae{part}", missing) for part in ("", ".scanner", ".parser", ".environment")
    )
    for found in COUNTED.finditer(text):
        if int(found[found.lastindex or 0]) > math.isqrt(HELD):
            raise BadInput(
                f"'{text}' has {found[0]}; expected a number of columns up to {math.isqrt(HELD):,}. Write a smaller "
                f"number, such as poly(x, 3) or bs(x, df=10), or a smooth, s(x), which shrinks what is not needed."
            )
    known = environment.Environment([{"np": SimpleNamespace(**NUMPY), **NUMPY}])
    try:
        tokens = scanner.Scanner(text).scan(False)
        for token, after in pairwise(tokens):
            name, called = token.lexeme, after.kind in ("LEFT_PAREN", "LEFT_BRACKET")
            column = not called and ("." not in name or name in frame.columns)
            if token.kind == "PYTHON_LITERAL" and name in frame.columns:
                raise BadInput(f"'{text}' has {name}, which is no name in a formula; expected `{name}` for the column.")
            if token.kind == "IDENTIFIER" and name not in FUNCTIONS and not column:
                known = (
                    f"columns of the frame, and of functions {', '.join((*FORMULAE, *NUMPY))}, those of NumPy as "
                    f"np.log too. What is computed otherwise goes into a column of the frame first. Smooths stand "
                    f"between plus signs: {SMOOTHS}"
                )
                raise BadInput(f"'{text}' has '{name}'; expected {INSTEAD.get(name, known)}.")
        reader = parser.Parser(tokens)
        reader.parse()
        if not reader.at_end():  # formulae would leave the rest out
            raise BadInput(
                f"'{text}' cannot be read from '{reader.peek().lexeme}' on; expected + : * / - or ** between terms."
            )
        with global_lock(), redirect_stdout(StringIO()):  # formulae prints of errors before it raises them
            built = formulae.design_matrices(text, frame, na_action="error", env=known)
        if built.common and (none := [n for n, part in built.common.slices.items() if part.start == part.stop]):
            raise BadInput(f"'{text}' has {none[0]}, which makes no column; expected one at least, as poly(x, 1) does.")
        return built
    except BadInput:
        raise
    except Exception as error:  # whatever the formula's functions raise
        kinds = {n: {type(x).__name__ for x in frame[n]} for n, d in frame.dtypes.items() if str(d) == "object"}
        kinds |= {n: {"times"} for n, dtype in frame.dtypes.items() if dtype.kind in "mM"}
        held = "".join(
            f" Column '{n}' holds {', '.join(sorted(kind))}: expected numbers, by "
            f"frame['{n}'].astype(float), of times (frame['{n}'] - frame['{n}'].min()) / pandas.Timedelta('1D'); or "
            f"words; or levels, C({n})."
            for n, kind in kinds.items()
            if kind != {"str"}
        )
        raise BadInput(
            f"'{text}' cannot be made into columns ({type(error).__name__}: {error}); expected columns of the frame, "
            f"{list(frame.columns)}, with + : * and functions of them such as scale(x), C(x), np.log(x).{held}"
        ) from error


def _evaluated(common: Any, frame: Frame) -> Any:
    try:
        with global_lock(), redirect_stdout(StringIO()):
            found = common.evaluate_new_data(frame)
        np.asarray(found.design_matrix, dtype=np.float64)  # of which words among numbers are no part
        return found
    except Exception as error:
        raise BadInput(
            f"the fixed part of the formula cannot be evaluated on the new rows ({error}); expected the fit's columns, "
            f"with levels that the fit has seen. Only groups may be new."
        ) from error


def _column_of(varying: Varying) -> str:
    """The column with the times of an ``ar1``."""
    return FACTOR_OF.sub(r"\1", varying.terms).strip("`")


def _terms(built: Any, *, offset: bool = False) -> dict[str, Any]:
    """The terms with coefficients, or the offsets, by name; none of a formula without either."""
    every = {} if built.common is None else built.common.terms
    return {name: term for name, term in every.items() if (term.kind == "offset") is offset}


def _group_of_rows(frame: Frame, varying: Varying) -> list[tuple[str, ...]]:
    """The values of its columns in each row as words, whole numbers alike whether a column is of floats or not."""
    columns = (frame[c] for c in varying.columns)
    return list(zip(*(x.map(_word) if x.dtype.kind == "f" else x.astype(str) for x in columns), strict=True))


def _float(column: Any) -> Tensor:
    given = np.asarray(column).reshape(-1)
    try:
        if given.dtype.kind in "mM":
            raise TypeError("a time has no unit of its own")
        return torch.tensor(given.astype(np.float64))
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"the response holds words or times ({str(given[0])!r}); expected numbers. For classes take "
            f"family='bernoulli' or 'categorical'; a time becomes a number by a unit, (x - start) / one_day."
        ) from error


def row_weights(column: Any, name: str) -> Tensor:
    """Number of times that each row counts, ``(N,)``.

    :raises BadInput: for what is no finite number above zero.
    """
    values = _float(column)
    _require(
        bool((values.isfinite() & (values > 0.0)).all()), f"weights='{name}'", "above 0; leave rows out that count 0"
    )
    return values


def _classes(column: Any, level: str, kind: str, seen: Any) -> Response:
    """Codes of classes; of two, the second is 1, or the one that was named."""
    categories = getattr(getattr(seen, "cat", None), "categories", None)
    if categories is None:
        with _of_one_kind("the response"):
            categories = sorted(set(np.asarray(seen).reshape(-1).tolist()))
    names = tuple(_word(v) for v in categories)
    if kind == "grades" and not getattr(seen.dtype, "ordered", False) and any(isinstance(c, str) for c in categories):
        raise BadInput(
            f"the grades of the response are words, {list(names)}, which have no order of their own; expected numbers, "
            f"or an ordered column: pandas.Categorical(words, [lowest, ..., highest], ordered=True)."
        )
    if level and level not in names:
        raise BadInput(f"the response has no class '{level}'; expected one of {list(names)}.")
    if level:
        return Response(torch.tensor([float(_word(c) == level) for c in column], dtype=torch.float64))
    if kind == "binary":
        _require(len(names) == 2, f"the response with {len(names)} values", "of two values, or named: y['yes']")
    codes = [names.index(_word(c)) for c in column]
    if kind == "grades" and (empty := sorted({*range(len(names))} - {*codes})):
        raise BadInput(f"no row has the grade '{names[empty[0]]}'; expected one. Drop it: remove_unused_categories().")
    return Response(torch.tensor(codes, dtype=torch.float64 if kind == "binary" else torch.long), classes=names)


@contextmanager
def _of_one_kind(what: str) -> Iterator[None]:
    """Inside, values are brought into an order.

    :raises BadInput: for those of several types, such as ``1`` and ``"1"``.
    """
    try:
        yield
    except TypeError as error:
        raise BadInput(
            f"{what}: values of several types, which have no order ({error}); expected words or numbers. Are 1 and '1' "
            f"one value? Then write frame[...].astype(str) into the column first."
        ) from error


def _word(value: Any) -> str:
    return repr(float(value)).removesuffix(".0") if isinstance(value, float) else str(value)


def _require(holds: bool, what: str, expected: str) -> None:
    if not holds:
        raise BadInput(f"{what}: expected {expected}. Look at the column's smallest and largest values.")
