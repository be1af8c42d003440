"""Docstrings as the site shows them: roles become links where there is a page to go to, formulas become MathML."""

import re
from typing import Any

import griffe
from pages import public_paths

MATH_BLOCK = re.compile(r"^( *)\.\. math::(.*(?:\n(?:\1 +\S.*|\s*(?=\n\1 +\S)))*)", re.MULTILINE)
SEVERAL = re.compile(r"^( *):raises ((?:\w+, )+\w+): (.*)$", re.MULTILINE)
ROLE = re.compile(r":(class|func|meth|attr|data|mod|math):`([^`]+)`")


def _formula(match: re.Match[str]) -> str:
    indent, text = match[1], " ".join(match[2].split())
    return f"{indent}$$\n{indent}{text}\n{indent}$$"


def _each(match: re.Match[str]) -> str:
    return "\n".join(f"{match[1]}:raises {name}: {match[3]}" for name in match[2].split(", "))


def linked(target: str) -> str:
    """A link to a public name, or the name alone."""
    shown = target.lstrip("~.")
    short = shown.split(".")[-1] if target.startswith("~") else shown
    places = public_paths()
    path = shown if shown in places.values() else places.get(shown.split(".")[-1], "")
    return f"[`{short}`][{path}]" if path else f"`{short}`"


def readable(text: str) -> str:
    """Markdown of a docstring."""
    text = MATH_BLOCK.sub(_formula, text)
    text = SEVERAL.sub(_each, text)
    return ROLE.sub(lambda m: f"${m[2]}$" if m[1] == "math" else linked(m[2]), text)


class Roles(griffe.Extension):
    """Rewrites every docstring as it is read from the source."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = readable(obj.docstring.value)
