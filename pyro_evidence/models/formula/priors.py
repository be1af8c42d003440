"""Priors of a mixed model: none, weak ones in the data's units, or the user's own, as they stand in the program."""

import ast
import re
from collections.abc import Mapping

import pyro.distributions as dist
from torch import Tensor

from pyro_evidence.errors import BadInput

WEAK = "weak"
FLAT = "flat"
Priors = Mapping[str, str]
EXAMPLE = 'a distribution with its numbers, such as "Normal(0, 2.5)", or "flat"'


def prior_text(name: str, text: str, size: int) -> str:
    """A distribution as a program states it; its numbers in the precision of the data.

    :param text: such as ``Normal(0, 2.5)``; ``LKJ(2)`` for correlations of ``size`` effects.
    :raises BadInput: for what is no distribution of Pyro's with numbers as arguments.
    """
    if text == FLAT:
        return f"dist.Normal(X.new_zeros({size}), 1.0).mask(False).to_event(1)"  # a density of one everywhere
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, TypeError):
        call = None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise BadInput(f"priors[{name!r}]={text!r}; expected {EXAMPLE}.")
    arguments = [_number(a, name, text) for a in call.args]
    arguments += [f"{k.arg}={_number(k.value, name, text)}" for k in call.keywords]
    if call.func.id in ("LKJ", "LKJCholesky"):
        return f"dist.LKJCholesky({size}, {arguments[-1]})"
    if not hasattr(dist, call.func.id):
        raise BadInput(f"priors[{name!r}]={text!r}: Pyro has no distribution {call.func.id}; expected {EXAMPLE}.")
    return f"dist.{call.func.id}({', '.join(arguments)})"


def _number(node: ast.AST, name: str, text: str) -> str:
    try:
        ast.literal_eval(node)
    except ValueError as error:
        raise BadInput(f"priors[{name!r}]={text!r}: its arguments are not numbers; expected {EXAMPLE}.") from error
    return f"X.new_tensor({ast.unparse(node)})"


def weak_priors(X: Tensor, names: tuple[str, ...], family: str, response: Tensor) -> dict[str, str]:
    """Priors that say the units and little more.

    For one standard deviation of a column, two and a half of the response.  Exponential priors, one standard deviation
    on average, hold spreads down.
    """
    gaussian = family == "gaussian"
    unit = float(response.std()) if gaussian and len(response) > 1 else 1.0
    spread = X.std(0) if len(X) > 1 else X.new_ones(X.shape[1])
    scales = [2.5 * unit / (float(s) if float(s) > 0 else 1.0) for s in spread]
    centre = float(response.mean()) if gaussian else 0.0
    locs = [centre if name == "Intercept" else 0.0 for name in names]
    found = {"sd": f"Exponential({1.0 / unit:.3g})", "L": "LKJ(1)"}
    if names:
        found["b"] = f"Normal({_list(locs)}, {_list(scales)})"
    return found | ({"sigma": found["sd"]} if gaussian else {"shape": "Exponential(1)"})


def _list(values: list[float]) -> str:
    return f"[{', '.join(f'{v:.3g}' for v in values)}]"


def check_names(priors: Priors, allowed: set[str]) -> None:
    """Refuse priors of what the model does not have.

    :raises BadInput: naming what it has.
    """
    for name in priors:
        if name not in allowed:
            raise BadInput(f"priors has an entry {name!r}; expected one of {sorted(allowed)}.")


def general(name: str) -> str:
    """Under which name a prior of all its kind stands: ``sd`` for ``sd_subject``."""
    return re.split("_", name, maxsplit=1)[0]
