"""What an error says, on one line, and whether it says what it should."""

from collections.abc import Callable
from typing import Any

import pytest

from pyro_evidence.program.log_joint import LogJoint


def refused(error: type[Exception], model: Callable[..., Any], *args: Any, **settings: Any) -> str:
    """The error message in which a log joint is refused, on one line."""
    with pytest.raises(error) as caught:
        LogJoint(model, args, **settings)
    return " ".join(str(caught.value).split())


def says(message: str, *parts: str) -> None:
    missing = [p for p in parts if p not in message]
    assert not missing, f"{missing} not in: {message}"
