"""Engines' settings, checked when an engine is made and not in the middle of a fit."""

from typing import Any

from pyro_evidence.errors import BadInput
from pyro_evidence.infer.iterate import Stop


def check_object(name: str, value: Any) -> None:
    """Refuse a class where an object of it is meant.

    :raises BadInput: naming the setting.
    """
    if isinstance(value, type):
        raise BadInput(f"{name}={value.__name__} is a class; expected an object of it: {name}={value.__name__}(...).")


def check_function(name: str, value: Any, example: str) -> None:
    """Refuse what is no function or object of ours to call: a string, a number, a class without its brackets.

    :param example: what could stand there, as in code.
    :raises BadInput: naming the setting.
    """
    check_object(name, value)
    if not callable(value):
        raise BadInput(f"{name}={value!r}; expected a function or an object that can be called, such as {example}.")


def check_instance(name: str, value: Any, kind: type) -> None:
    """Refuse a setting of another type.

    :raises BadInput: naming the setting and the type.
    """
    if not isinstance(value, kind):
        raise BadInput(f"{name}={value!r}; expected a {kind.__name__}, such as {name}={kind.__name__}().")


def check_stop(stop: Any) -> None:
    """Refuse a stopping rule that is none.

    :raises BadInput: for anything but a :class:`~pyro_evidence.infer.iterate.Stop`.
    """
    check_instance("stop", stop, Stop)
