"""Docstrings as Markdown: roles become links where there is a page to go to, examples stand above the fields."""

import re

from pages import public_paths

MATH_BLOCK = re.compile(r"^( *)\.\. math::(.*(?:\n(?:\1 +\S.*|\s*(?=\n\1 +\S)))*)", re.MULTILINE)
SEVERAL = re.compile(r"^( *):raises ((?:\w+, )+\w+): (.*)$", re.MULTILINE)
ROLE = re.compile(r":(class|func|meth|attr|data|mod|math):`([^`]+)`")

EXAMPLE = re.compile(r"^>>> .*(?:\n\S.*|\n +\S.*)*", re.MULTILINE)
DIRECTIVE = re.compile(r" *# doctest:.*")
FIELD = re.compile(r"^:\w+", re.MULTILINE)


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


def with_examples(text: str) -> str:
    """A docstring, its examples as code above the first field: below, a parser takes them for a part of the last."""
    found = [DIRECTIVE.sub("", block) for block in EXAMPLE.findall(text)]
    if not found:
        return text
    rest = EXAMPLE.sub("", text)
    field = FIELD.search(rest)
    end = len(rest) if field is None else field.start()
    code = "\n".join(["```pycon", *found, "```"])
    return f"{rest[:end].rstrip()}\n\n{code}\n\n{rest[end:].strip()}".strip()


def readable(text: str) -> str:
    """Markdown of a docstring."""
    text = with_examples(text)
    text = MATH_BLOCK.sub(_formula, text)
    text = SEVERAL.sub(_each, text)
    return ROLE.sub(lambda m: f"${m[2]}$" if m[1] == "math" else linked(m[2]), text)
