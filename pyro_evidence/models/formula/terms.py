"""A formula's text, taken apart: its response, its fixed part, its smooths, and who varies by which group."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyro_evidence.errors import BadInput
from pyro_evidence.models.formula.structures import STRUCTURES

EXAMPLE = (
    '"response ~ fixed terms + (varying terms | group)", such as "reaction ~ days + (days | subject)", '
    'formulas of other parameters behind semicolons: "y ~ x; sigma ~ x"'
)
WORD = re.compile(r"`[^`]+`|[^\W\d]\w*(?:\.\w+)*")
SMOOTH = re.compile(r"\+?\s*(s|t2|gp)\((.*)\)", re.DOTALL)
GROUP = re.compile(r"\+?\s*(\w*)\s*\((.*)\)", re.DOTALL)
SETTING = re.compile(r"(\w+)\s*=(?!=)\s*(.*)", re.DOTALL)
SMOOTHS = (
    "s(x), s(x, k=10), s(x, by=g), s(x, z), s(x, bs='cr'), s(day, bs='cc', knots=[0, 365]), s(g, bs='re'), "
    "t2(x, z), gp(x)"
)
FACTOR = re.compile(r"(?<![\w.])(as\.)?factor\(")  # as R has it
FACTOR_OF = re.compile(r"^C\((.*)\)$")
INSTEAD = {  # what is expected in place of functions of R's packages, brms and bambi
    "ns": "cr(x, df=3)",
    **dict.fromkeys(("te", "ti"), "t2(x, z)"),
    "hsgp": "gp(x, k=20)",
    **dict.fromkeys(("mo", "monotonic"), "C(x), a coefficient for each level"),
    **dict.fromkeys(("me", "mi"), "the column itself, or a program of your own that samples it, dist.Normal(x, se)"),
    **dict.fromkeys(("ar", "arma"), "ar1(time | g)"),
    "car": "s(g, bs='mrf') with mixed(..., neighbours=...)",
    "se": "a formula of the standard deviation, 'y ~ x; sigma ~ 0 + offset(log(se))'",
    "weights": "mixed(..., weights='column')",
    "rate": "offset(log(n)) among the terms",
    **dict.fromkeys(("cens", "censored"), "surv(time, event) and a family of times, such as 'weibull' or 'lognormal'"),
    **dict.fromkeys(("surv", "Surv"), "a family of times for that response, such as family='weibull'"),
    "mvbind": "a formula for each response, a fit each",
    "gr": "(0 + f || g), a spread for each level of f as by=f has it",
    "mm": "a program of your own that adds 0.5 * (u[g] + u[h]) with dist.Normal effects u",
}
ZERO = re.compile(r"^0\s*\+\s*|\s*\+\s*0$|\s*-\s*1$")  # no intercept
EVERY = re.compile(r"\+?\s*\.")  # every other column
OPEN, CLOSE = "([{", ")]}"


@dataclass(frozen=True)
class Varying:
    """One ``(terms | group)``, or one of glmmTMB's ``ar1(time | group)``, ``cs(terms | group)`` and the like.

    :ivar terms: the formula of what varies, such as ``1 + days``.
    :ivar columns: names of the columns whose combinations are the groups.
    :ivar structure: how the effects of one group vary together, a row of the table of structures: ``us``, all
        correlated, or ``diag``, as where it was written with ``||``.
    """

    terms: str
    columns: tuple[str, ...]
    structure: str = "us"

    @property
    def text(self) -> str:
        """As the formula has it."""
        name = "" if self.structure in ("us", "diag") else self.structure
        return f"{name}({self.terms} {'||' if self.structure == 'diag' else '|'} {self.group})"

    @property
    def group(self) -> str:
        """Name of the groups, ``a:b`` for combinations."""
        return ":".join(self.columns)


@dataclass(frozen=True)
class Smooth:
    """One ``s(x)``, ``t2(x, z)`` or ``gp(x)``.

    :ivar covariates: what it is a function of, as texts.
    :ivar basis: the name of a row of the table of bases.
    :ivar by: the column that it is multiplied by, or of whose levels each has a function of its own.
    :ivar size: how many basis functions are asked for; None for as many as the basis has by default.
    :ivar knots: where they meet, or the ends of their range.
    """

    covariates: tuple[str, ...]
    basis: str
    by: str | None = None
    size: int | None = None
    knots: tuple[float, ...] = ()

    @property
    def text(self) -> str:
        """Name of the term, with the settings that are not the default."""
        return f"{self.basis if self.basis in ('t2', 'gp') else 's'}({', '.join(self.covariates)})"


@dataclass(frozen=True)
class Formula:
    """A formula taken apart."""

    response: str
    fixed: str
    varying: tuple[Varying, ...]
    smooths: tuple[Smooth, ...] = ()

    @property
    def words(self) -> set[str]:
        """Every name in it, columns and functions."""
        covariates = [c for smooth in self.smooths for c in (*smooth.covariates, smooth.by or "")]
        text = " ".join([self.response, self.fixed, *covariates, *(v.terms for v in self.varying)])
        return {w.strip("`") for w in WORD.findall(text)} | {c for v in self.varying for c in v.columns}


def parsed(text: str, frame: Any = None) -> dict[str, Formula]:
    """The formulas in their parts: of the response, under no name, and of each ``; parameter ~ terms`` behind it.

    :param frame: whose columns a term ``.`` stands for, those that the formula does not name elsewhere.
    :raises BadInput: where it is not one.
    """
    if not isinstance(text, str):
        raise BadInput(f"formula={text!r}; expected {EXAMPLE}.")
    columns = [str(name) for name in getattr(frame, "columns", ())]
    first, *others = text.split(";")
    found = {"": _parsed(first, columns)}
    columns = [name for name in columns if name not in Formula(found[""].response, "", ()).words]
    for other in others:
        part = _parsed(other, columns)
        name = part.response
        if not name.isidentifier() or name in found:
            raise BadInput(
                f"formula={text!r}: '{name}' behind a semicolon; expected each time another parameter of the family, "
                f'such as "y ~ x + (1 | g); sigma ~ x" or "count ~ x; zi ~ x".'
            )
        found[name] = replace(part, response="")
    return found


def with_fixed(text: str, fixed: str) -> str:
    """A formula with another fixed part; its groups, its smooths and what stands behind semicolons stay.

    >>> with_fixed("y ~ a * b + (1 | g); sigma ~ a", "1 + a")
    'y ~ 1 + a + (1 | g); sigma ~ a'
    """
    first, *others = text.split(";")
    response, right = first.split("~")
    kept = [p.removeprefix("+").strip() for p in _split(right.strip(), "+-") if _smooth(p) or _group(p)]
    return ";".join([f"{response.strip()} ~ {' + '.join([fixed, *kept])}", *others])


def _parsed(text: str, columns: Sequence[str]) -> Formula:
    if text.count("~") != 1:
        raise BadInput(f"formula={text!r}; expected {EXAMPLE}.")
    response, right = (side.strip() for side in text.split("~"))
    if not response or not right or not _balanced(text):
        raise BadInput(f"formula={text!r} lacks a side or a bracket; expected {EXAMPLE}.")
    right = "`".join(x if i % 2 else FACTOR.sub("C(", x) for i, x in enumerate(right.split("`")))
    fixed, varying, smooths = list[str](), list[Varying](), list[Smooth]()
    for part in _split(right, "+-"):
        smooth = _smooth(part)
        if smooth and smooth.basis == "re":
            varying += [Varying("1", _columns(":".join(smooth.covariates), text))]
        elif smooth:
            smooths.append(smooth)
        elif group := _group(part):
            varying += _varying(*group, text)
        else:
            fixed.append(part)
    every = [part for part in fixed if EVERY.fullmatch(part)]
    fixed = [part for part in fixed if part not in every]
    if every:
        named = Formula(response, " ".join(fixed), tuple(varying), tuple(smooths)).words
        fixed = [*(f"+ `{name}`" for name in columns if name not in named), *fixed]
    terms = " ".join(fixed).strip().removeprefix("+").strip() or "1"
    if "|" in terms:
        raise BadInput(f"formula={text!r} has a bar outside of brackets of their own; expected {EXAMPLE}.")
    return Formula(response, terms, tuple(dict.fromkeys(varying)), tuple(dict.fromkeys(smooths)))


def _smooth(part: str) -> Smooth | None:
    """The smooth that a term is; its settings are literals or a column's name.

    :raises BadInput: for a setting that there is not.
    """
    found = SMOOTH.fullmatch(part)
    if found is None or not _balanced(found.group(2)):
        return None
    covariates, given = list[str](), dict[str, str]()
    for piece in _pieces(found.group(2), ","):
        setting = SETTING.fullmatch(piece)
        if setting:
            given[setting.group(1)] = setting.group(2)
        else:
            covariates.append(piece)
    try:
        values = {n: ast.literal_eval(text) for n, text in given.items() if n != "by"}
        knots = tuple(float(knot) for knot in values.pop("knots", ()))
        basis, size = values.pop("bs", "tp"), values.pop("k", None)
        whole = size is None or (type(size) is int and size > 0)
        if values or not isinstance(basis, str) or not all(covariates) or not whole:
            raise ValueError
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise BadInput(f"'{part}' in the formula; expected smooths such as {SMOOTHS}.") from error
    return Smooth(tuple(covariates), basis if found.group(1) == "s" else found.group(1), given.get("by"), size, knots)


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in OPEN) - (character in CLOSE)
        if depth < 0:
            return False
    return depth == 0


def _split(text: str, signs: str) -> Iterator[str]:
    """Pieces between signs outside of brackets and quotes, each with the sign before it."""
    depth, piece, quoted = 0, "", False
    for character in text:
        quoted ^= character == "`"
        depth += (character in OPEN) - (character in CLOSE)
        if character in signs and depth == 0 and not quoted and piece.strip():
            yield piece.strip()
            piece = ""
        piece += character
    yield piece.strip()


def _pieces(text: str, sign: str) -> list[str]:
    """Pieces between signs outside of brackets and quotes, without the signs."""
    return [piece.removeprefix(sign).strip() for piece in _split(text, sign)]


def _group(part: str) -> tuple[str, str] | None:
    """Name and content of brackets around a whole part that have a bar in them."""
    found = GROUP.fullmatch(part)
    if found is None or not _balanced(found.group(2)) or len(_pieces(found.group(2), "|")) == 1:
        return None
    return found.group(1), found.group(2)


def _varying(name: str, inside: str, text: str) -> Iterator[Varying]:
    """The effects by each of the groupings that ``a + b``, ``a / b``, ``a : b`` and ``a * b`` stand for."""
    terms, _, group = inside.partition("|")
    if name == "ar1":
        terms = ZERO.sub("", terms.strip())  # as glmmTMB has it, ar1(factor(t) + 0 | g)
    structure = name or ("diag" if group.startswith("|") else "us")
    group = group if name else group.removeprefix("|")
    if not terms.strip() or not group.strip() or "|" in group or structure not in STRUCTURES:
        raise BadInput(
            f"{name}({inside}) in formula={text!r}; expected {EXAMPLE}, and before the brackets of a group one of "
            f"{', '.join(STRUCTURES)} or nothing."
        )
    for summand in _pieces(group.strip(), "+"):
        crossed = _pieces(summand, "*")
        if len(crossed) == 2:
            names = [_columns(part, text) for part in crossed]
            every = [*names, names[0] + names[1]]
        else:
            nested = [_columns(part, text) for part in _pieces(summand, "/")]
            every = [sum(nested[: i + 1], ()) for i in range(len(nested))]
        yield from (Varying(terms.strip(), columns, structure) for columns in every)


def _columns(text: str, formula: str) -> tuple[str, ...]:
    plain = tuple(FACTOR_OF.sub(r"\1", name).strip().strip("`") for name in _pieces(text, ":"))
    if not all(re.fullmatch(r"[\w. ]+", n) for n in plain):
        known = "names of columns joined by :, /, * or +. Put what is to be computed into a column of the frame first"
        expected = INSTEAD.get(text.partition("(")[0], known)
        raise BadInput(f"groups '{text}' in formula={formula!r}; expected {expected}.")
    return plain
