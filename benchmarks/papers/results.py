"""Numbers by key, appended to a file as they come, so that a benchmark goes on where it was interrupted."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Results(Generic[Value]):
    """One line of JSON for each key; what is known is not computed again."""

    def __init__(self, path: Path) -> None:
        self.path, self.known = path, dict[str, Value]()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            self.known = {row["key"]: row["value"] for row in rows}

    def get(self, key: str, compute: Callable[[], Value]) -> Value:
        """The number of this key."""
        if key not in self.known:
            self.known[key] = compute()
            with self.path.open("a") as file:
                file.write(json.dumps({"key": key, "value": self.known[key]}) + "\n")
        return self.known[key]


def prose(text: str) -> str:
    return " ".join(text.split()) + "\n"


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [list(map(str, row)) for row in (head, *rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (lines[0], ["---"] * len(lines[0]), *lines[1:]))
