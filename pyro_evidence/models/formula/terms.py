"""A formula's text, taken apart: its response, its fixed part, its smooths, and who varies by which group."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pyro_evidence.errors import BadInput

EXAMPLE = '"response ~ fixed terms + (varying terms | group)", such as "reaction ~ days + (days | subject)"'
WORD = re.compile(r"`[^`]+`|[^\W\d]\w*(?:\.\w+)*")
SMOOTH = re.compile(r"\+?\s*(s|t2)\((.*)\)", re.DOTALL)
SETTING = re.compile(r"(\w+)\s*=(?!=)\s*(.*)", re.DOTALL)
SMOOTHS = (
    """s(x), s(x, k=10), s(x, by=g), s(x, z), s(x, bs='cr'), s(day, bs='cc', knots=[0, 365]), s(g, bs='re'), t2(x, z)"""
)
OPEN, CLOSE = "([{", ")]}"


@dataclass(frozen=True)
class Varying:
    """One ``(terms | group)``.

    :ivar terms: the formula of what varies, such as ``1 + days``.
    :ivar columns: names of the columns whose combinations are the groups.
    :ivar correlated: whether effects of one group are correlated; not where it was written with ``||``.
    """

    terms: str
    columns: tuple[str, ...]
    correlated: bool

    @property
    def group(self) -> str:
        """Name of the groups, ``a:b`` for combinations."""
        return ":".join(self.columns)


@dataclass(frozen=True)
class Smooth:
    """One ``s(x)`` or ``t2(x, z)``.

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
        return f"{'t2' if self.basis == 't2' else 's'}({', '.join(self.covariates)})"


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

    @property
    def of_response(self) -> "Formula":
        """The response alone."""
        return Formula(self.response, "", ())


def parsed(text: str) -> dict[str, Formula]:
    """The formulas in their parts: of the response, under no name, and of each ``; parameter ~ terms`` behind it.

    :raises BadInput: where it is not one.
    """
    if not isinstance(text, str):
        raise BadInput(f"formula={text!r}; expected {EXAMPLE}.")
    first, *others = text.split(";")
    found = {"": _parsed(first)}
    for other in others:
        part = _parsed(other)
        name = part.response
        if not name.isidentifier() or name in found:
            raise BadInput(
                f"formula={text!r}: '{name}' behind a semicolon; expected each time another parameter of the family, "
                f'such as "y ~ x + (1 | g); sigma ~ x" or "count ~ x; zi ~ x".'
            )
        found[name] = replace(part, response="")
    return found


def _parsed(text: str) -> Formula:
    if text.count("~") != 1:
        raise BadInput(f"formula={text!r}; expected {EXAMPLE}.")
    response, right = (side.strip() for side in text.split("~"))
    if not response or not right or not _balanced(text):
        raise BadInput(f"formula={text!r} lacks a side or a bracket; expected {EXAMPLE}.")
    fixed, varying, smooths = list[str](), list[Varying](), list[Smooth]()
    for part in _split(right, "+-"):
        smooth = _smooth(part)
        if smooth and smooth.basis == "re":
            varying += [Varying("1", _columns(":".join(smooth.covariates), text), True)]
        elif smooth:
            smooths.append(smooth)
        elif _is_varying(part):
            varying += _varying(part, text)
        else:
            fixed.append(part)
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
    for piece in _split(found.group(2), ","):
        setting = SETTING.fullmatch(piece.removeprefix(",").strip())
        if setting:
            given[setting.group(1)] = setting.group(2)
        else:
            covariates.append(piece.removeprefix(",").strip())
    try:
        values = {n: ast.literal_eval(text) for n, text in given.items() if n != "by"}
        knots = tuple(float(knot) for knot in values.pop("knots", ()))
        basis, size = values.pop("bs", "tp"), values.pop("k", None)
        if values or not isinstance(basis, str) or not all(covariates) or type(size) not in (int, type(None)):
            raise ValueError
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise BadInput(f"'{part}' in the formula; expected smooths such as {SMOOTHS}.") from error
    return Smooth(tuple(covariates), "t2" if found.group(1) == "t2" else basis, given.get("by"), size, knots)


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


def _inside(part: str) -> str | None:
    """Content of a pair of brackets around the whole part."""
    part = part.removeprefix("+").strip()
    return part[1:-1] if part.startswith("(") and part.endswith(")") and _balanced(part[1:-1]) else None


def _is_varying(part: str) -> bool:
    inside = _inside(part)
    return inside is not None and len(list(_split(inside, "|"))) > 1


def _varying(part: str, text: str) -> Iterator[Varying]:
    inside = _inside(part) or ""
    terms, _, group = inside.partition("|")
    correlated = not group.startswith("|")
    group = group.removeprefix("|").strip()
    if not terms.strip() or not group or "|" in group:
        raise BadInput(f"({inside}) in formula={text!r}; expected {EXAMPLE}.")
    for columns in _groups(group, text):
        yield Varying(terms.strip(), columns, correlated)


def _groups(group: str, text: str) -> Iterator[tuple[str, ...]]:
    """The groupings that ``a + b``, ``a / b``, ``a : b`` and ``a * b`` stand for, each as its columns."""
    for summand in _split(group, "+"):
        piece = summand.removeprefix("+").strip()
        nested = [part.removeprefix("/").strip() for part in _split(piece, "/")]
        crossed = [part.removeprefix("*").strip() for part in _split(piece, "*")]
        if len(crossed) == 2:
            names = [_columns(part, text) for part in crossed]
            yield from (*names, names[0] + names[1])
        else:
            yield from (sum((_columns(p, text) for p in nested[: i + 1]), ()) for i in range(len(nested)))


def _columns(text: str, formula: str) -> tuple[str, ...]:
    names = tuple(part.removeprefix(":").strip() for part in _split(text, ":"))
    plain = tuple(re.sub(r"^C\((.*)\)$", r"\1", n).strip().strip("`") for n in names)
    if not all(re.fullmatch(r"[\w. ]+", n) for n in plain):
        raise BadInput(
            f"groups '{text}' in formula={formula!r}; expected names of columns joined by :, /, * or +. Put what is to "
            f"be computed into a column of the frame first."
        )
    return plain
