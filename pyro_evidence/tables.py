"""A table of short texts, as plain text, Markdown and HTML."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Table:
    """Rows of numbers under named columns, with remarks below.

    :ivar rows: label -> column -> number; nan is shown as nothing, and a column of nothing but nan not at all.
    :ivar columns: column -> what it says, in the order to show.
    :ivar notes: a line each.
    :ivar corner: heading of the labels.
    :ivar digits: significant ones that are shown; ``rows`` has them all.

    >>> print(Table({"w[0]": {"value": 1.23456, "sd": 0.5}}, {"value": "the mean", "sd": "its standard deviation"}))
          value   sd
    w[0]   1.23  0.5
    """

    rows: Mapping[str, Numbers]
    columns: Mapping[str, str]
    notes: Sequence[str] = ()
    corner: str = ""
    digits: int = 3
    cells: list[list[str]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        used = [c for c in self.columns if any(not math.isnan(row.get(c, math.nan)) for row in self.rows.values())]
        body = [[label, *(_short(row.get(c, math.nan), self.digits) for c in used)] for label, row in self.rows.items()]
        object.__setattr__(self, "cells", [[self.corner, *used], *body])

    def __str__(self) -> str:
        widths = [max(len(row[i]) for row in self.cells) for i in range(len(self.cells[0]))]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in self.cells]
        return "\n".join([*lines, *self.notes])

    def to_markdown(self) -> str:
        """The table for a README or an issue."""
        head, *body = self.cells
        lines = [head, ["---"] * len(head), *body]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return "\n".join([table, *(["", *(f"- {note}" for note in self.notes)] if self.notes else [])])

    def _repr_html_(self) -> str:
        head, *body = self.cells
        titles = "".join(f'<th title="{html.escape(self.columns.get(c, ""))}">{html.escape(c)}</th>' for c in head)
        rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in body)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<table><tr>{titles}</tr>{rows}</table>{notes}"

    def to_pandas(self) -> Any:
        """The numbers as a ``pandas.DataFrame``, one row per label.

        :raises ImportError: when pandas is missing.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: pip install pandas.") from error
        found = pandas.DataFrame.from_dict({n: dict(row) for n, row in self.rows.items()}, orient="index")
        return found[[c for c in self.columns if c in found] + [c for c in found if c not in self.columns]]


def _short(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}g}"
