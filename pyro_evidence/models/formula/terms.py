"""A formula's text, taken apart: its response, its fixed part, and who varies by which group."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pyro_evidence.errors import BadInput

EXAMPLE = '"response ~ fixed terms + (varying terms | group)", such as "reaction ~ days + (days | subject)"'
WORD = re.compile(r"`[^`]+`|[^\W\d]\w*(?:\.\w+)*")
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
        """What the groups are called, ``a:b`` for combinations."""
        return ":".join(self.columns)


@dataclass(frozen=True)
class Formula:
    """A formula taken apart."""

    response: str
    fixed: str
    varying: tuple[Varying, ...]

    @property
    def words(self) -> set[str]:
        """Every name in it, columns and functions."""
        text = " ".join([self.response, self.fixed, *(v.terms for v in self.varying)])
        return {w.strip("`") for w in WORD.findall(text)} | {c for v in self.varying for c in v.columns}


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
    parts = list(_split(right, "+-"))
    varying = [v for part in parts if _is_varying(part) for v in _varying(part, text)]
    fixed = " ".join(part for part in parts if not _is_varying(part)).strip().removeprefix("+").strip() or "1"
    if "|" in fixed:
        raise BadInput(f"formula={text!r} has a bar outside of brackets of their own; expected {EXAMPLE}.")
    return Formula(response, fixed, tuple(dict.fromkeys(varying)))


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
    """What a pair of brackets around the whole part holds."""
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
