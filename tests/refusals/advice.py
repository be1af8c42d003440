"""How many messages advise something, and which of them rows try: ``python -m tests.refusals.advice``.

An error message is a place in the package that makes one of its errors; it advises where its text has a sentence in the
imperative. A row tries an error message when the message that it ends in holds all of the error message's constant
parts.
"""

import ast
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from pyro_evidence import errors

PACKAGE = Path(errors.__file__).parent
ERRORS = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, Exception)} - {"NotWritten"}
VERBS = (
    "Ask Bring Call call Cast Choose Divide Draw Drop Fill Fit Flatten Give give Leave leave Load load Look Lower Make "
    "Maximise Multiply Name Number Pass pass Put Rescale Run run Scale Set Standardise Start Subtract subtract Take "
    "take Truncate Use use Warm Write write Raise raise fit resume join make hold Draw add"
).split()
IMPERATIVE = re.compile(rf"(?:^|[.;:,(] |\bor )(?:{'|'.join(VERBS)}) [a-zA-Z`'{{(]")
LEAST = 12  # characters of a part that is looked for


@dataclass(frozen=True)
class Message:
    """One place that says no."""

    place: str
    parts: tuple[str, ...]

    @property
    def advises(self) -> bool:
        return bool(IMPERATIVE.search("".join(self.parts)))

    def is_in(self, message: str) -> bool:
        long = [part for part in self.parts if len(part.strip()) >= LEAST]
        return bool(long) and all(part in message for part in long)


def messages() -> Iterator[Message]:
    """Every call of an error's class in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
                yield Message(f"{path.relative_to(PACKAGE)}:{node.lineno}", tuple(_parts(node.args[0])))


def _parts(node: ast.expr) -> Iterator[str]:
    """Constant parts of a text, in order."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from _parts(value) if isinstance(value, ast.Constant) else ("\n",)


def tried() -> list[str]:
    """What all rows end in."""
    from tests.refusals.test_remedies import ROWS

    found = []
    for row in ROWS:
        try:
            row.values[0].broken()  # type: ignore[attr-defined]
        except Exception as error:
            found.append(str(error))
    return found


def report() -> list[str]:
    """The counts, then the error messages that no row tries."""
    found = list(messages())
    advising = [message for message in found if message.advises]
    said = tried()
    covered = {message.place for message in found if any(message.is_in(text) for text in said)}
    left = [message for message in advising if message.place not in covered]
    num = len(advising) - len(left)
    counts = f"{len(found)} messages, {len(advising)} advise, {num} of these are tried by {len(said)} rows"
    return [counts, *(f"{message.place} {' '.join(message.parts)[:160]!r}" for message in left)]


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    sys.stdout.write("\n".join(report()) + "\n")
