"""Checks of arguments that any part of the package takes, in one place and with one wording."""

from typing import Any

from pyro_evidence.errors import BadInput


def check_model(model: Any, goes_to: str = "run(...)") -> None:
    """Refuse what is no Pyro model.

    :param goes_to: which call takes the data, a common mistake.
    :raises BadInput: for anything that cannot be called.
    """
    if not callable(model):
        raise BadInput(f"model is a {type(model).__name__}; expected a callable Pyro model. Data go to {goes_to}.")


def check_count(name: str, value: Any, at_least: int = 1, advice: str = "") -> None:
    """Refuse what is no whole number of at least ``at_least``: a bool, a float, a tensor, a string, too small a one.

    :param name: of the argument.
    :param advice: what to do, a sentence.
    :raises BadInput: naming the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        given = f"={value!r}" if isinstance(value, int | float | str) else f" is a {type(value).__name__}"
        raise BadInput(f"{name}{given}; expected a whole number of at least {at_least}.{' ' * bool(advice)}{advice}")
