"""Docstrings as the site shows them: see ``docstrings.py``."""

from typing import Any

import griffe
from docstrings import readable


class Roles(griffe.Extension):
    """Rewrites every docstring as it is read from the source."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = readable(obj.docstring.value)
