"""Params of a model that are constants from now on, for every engine that comes after."""

from collections.abc import Mapping
from typing import Any

from pyro.poutine.messenger import Messenger
from torch import Tensor


class Constants(Messenger):
    """Puts values in place of params: a trace shows them, NUTS and SVI leave them as they are.

    ``poutine.substitute`` would do but for SVI, which asks each value of a param for its ``unconstrained()`` one, to
    hand it to the optimiser.  Here that is the constant itself, which has no gradient, and so stays.

    :param values: by the params' names, constrained.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = {name: _constant(value) for name, value in values.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "values": {name: value.detach() for name, value in self.values.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.values = {name: _constant(value) for name, value in self.values.items()}

    def _pyro_param(self, msg: Any) -> None:
        if msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]


def _constant(value: Tensor) -> Tensor:
    value = value.detach().clone()
    value.unconstrained = lambda: value  # type: ignore[attr-defined]
    return value
