"""Engines' settings, checked when an engine is made and not in the middle of a fit."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor

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


def check_methods(name: str, value: Any, methods: Sequence[str], example: str) -> None:
    """Refuse an object that lacks methods.

    :param example: an object that has them, as in code.
    :raises BadInput: naming the setting.
    """
    check_object(name, value)
    if missing := [m for m in methods if not callable(getattr(value, m, None))]:
        raise BadInput(f"{name}={value!r} has no {' and no '.join(missing)}; expected an object such as {example}.")


def check_ridge(value: Any) -> None:
    """Refuse what is neither a prior precision nor a function that finds one.

    :raises BadInput: with the value.
    """
    number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    if not callable(value) and not (number and 0.0 <= float(value) < math.inf):
        raise BadInput(
            f"ridge={value!r}; expected a precision of at least 0 and finite, such as 1e-2, or a function such as "
            "isotropic_evidence."
        )


def check_stop(stop: Any) -> None:
    """Refuse a stopping rule that is none.

    :raises BadInput: for anything but a :class:`~pyro_evidence.infer.iterate.Stop`.
    """
    check_instance("stop", stop, Stop)


def check_positive(name: str, value: Any) -> None:
    """Refuse what is no positive finite number.

    :raises BadInput: naming the setting.
    """
    if not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise BadInput(f"{name}={value!r}; expected a positive number.")
