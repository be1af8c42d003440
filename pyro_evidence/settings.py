"""Settings and arguments, checked where they are given and not in the middle of a fit; one wording for all."""

import math
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput

MOST = 2**53  # of anything that is counted
FINITE, ABOVE_ZERO, BELOW_ONE = sys.float_info.max, math.ulp(0.0), math.nextafter(1.0, 0.0)  # bounds, included
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
PACKAGE = __name__.split(".", maxsplit=1)[0]


@dataclass(frozen=True)
class Start:
    """Where a search begins: how many starts, climbed as one batch, the seed of what is random, and what is given.

    :ivar restarts: number of starts.  None: one where a single mode is to be expected (linear predictors, Gaussian
        processes), several where not (enumerated sites, mixtures, networks, scales that multiply), within a budget.
    :ivar seed: of the starts; for None one is drawn when the object is made.
    :ivar values: of latent sites and params, constrained, by name: what begins there in every start, as with Pyro's
        ``init_to_value``; one number is for all elements.  The other sites begin at random, the other params where the
        model says.  For ``LaplaceEvidence``; a mixture or a network begins at ``initial=``.
    :ivar tour: draws from the prior among which ``LaplaceEvidence`` looks for other modes, once the best is found; 0
        for none.  None: a thousand where there are at most 50 coordinates and the structure does not prove one mode.
    :ivar structures: of a model with structure sites, that ``LaplaceEvidence`` looks at, in a search where there are
        more.  None: all of up to 65,536; else 16,384, or 512 where each takes a fit of its own.

    >>> from pyro_evidence.settings import Start
    >>> Start(restarts=8).number(automatic=4), Start().number(automatic=4)
    (8, 4)
    """

    restarts: int | None = None
    seed: int | None = 0
    values: Mapping[str, Tensor] | None = None
    tour: int | None = None
    structures: int | None = None

    def __post_init__(self) -> None:
        values: Any = self.values
        if values is not None and not (isinstance(values, Mapping) and all(isinstance(n, str) for n in values)):
            raise BadInput(f"Start: values={values!r}; expected values by names of sites, such as values={{'w': w}}.")
        for name, value in (values or {}).items():
            if not isinstance(value, Tensor | Real) or not bool(torch.isfinite(torch.as_tensor(value)).all()):
                raise BadInput(f"Start: values of '{name}' are {value!r}; expected a tensor of finite numbers.")
        for name, at_least in (("restarts", 1), ("tour", 0), ("structures", 2)):
            if getattr(self, name) is not None:
                check_count(f"Start: {name}", getattr(self, name), at_least)
        object.__setattr__(self, "seed", seed_of(self.seed))

    def number(self, automatic: int) -> int:
        """Number of starts.

        :param automatic: where none was asked for.
        """
        return automatic if self.restarts is None else int(self.restarts)


def check_random_start(start: Any) -> None:
    """Refuse a start with values, where an engine takes none.

    :raises BadInput: saying which does.
    """
    check_instance("start", start, Start)
    if start.values:
        raise BadInput(
            f"Start(values=...) gives values of {sorted(start.values)}; expected a number of restarts and a seed. "
            "LaplaceEvidence takes values; EvidenceEM and OverlapEM begin at what initial=... makes."
        )


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


def check_family(update: Any, folder: str, other: str) -> None:
    """Refuse an update that was made for another engine.

    :param folder: of the package, where this engine's updates are.
    :param other: where the other engine's are.
    :raises BadInput: naming both.
    """
    module = str(getattr(update, "__module__", ""))
    if module.startswith(f"pyro_evidence.{other}."):
        shown = getattr(update, "__name__", type(update).__name__)
        raise BadInput(
            f"update={shown} is an update of pyro_evidence.{other}, made for another engine; expected one of "
            f"pyro_evidence.{folder}.updates, or your own function."
        )


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
    check_object("ridge", value)
    expected = "a precision of at least 0 and finite, such as 1e-2, or a function such as isotropic_evidence"
    if not callable(value):
        check_number("ridge", value, expected, 0.0, FINITE)


def real_number(value: Any) -> float:
    """A number, or a tensor of one, as a float; nan for anything else, bools among it."""
    if isinstance(value, Real | Tensor) and getattr(value, "dtype", type(value)) not in (bool, torch.bool):
        with suppress(ValueError, RuntimeError, OverflowError):  # of several numbers, of none, of digits without end
            return float(value)
    return math.nan


def check_number(
    name: str, value: Any, expected: str = "a number", low: float = -math.inf, high: float = math.inf
) -> float:
    """A real number between two bounds, these included, as a float.

    :param expected: what it is to be, in words.
    :raises BadInput: for anything else, nan among it, naming the setting.
    """
    number = real_number(value)
    if not low <= number <= high:
        raise BadInput(f"{name}={value!r}; expected {expected}.")
    return number


def check_seed(value: Any) -> None:
    """Refuse what is no seed of random numbers.

    :raises BadInput: for anything but a whole number that torch takes.
    """
    number = _whole(value)
    if number is None or not -(2**63) <= number < 2**64:
        raise BadInput(f"seed={value!r}; expected a whole number, such as seed=0, or None.")


def seed_of(seed: Any) -> int:
    """The seed; for None another one each time, from the operating system: torch's generator stays where it is.

    :raises BadInput: for what is neither None nor a seed.
    """
    if seed is None:
        return secrets.randbelow(2**31)
    check_seed(seed)
    return int(seed)


def seeded(seed: Any) -> torch.Generator:
    """Random numbers of one's own, on the processor; see :func:`seed_of`.

    :raises BadInput: for what is no seed.
    """
    return torch.Generator(device="cpu").manual_seed(seed_of(seed))


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False: a word such as "no" would count as True.

    :raises BadInput: naming the setting.
    """
    if _whole(value) not in (0, 1) and not (isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")):
        given = f"={value!r}" if isinstance(value, str | Real | None) else f" is a {type(value).__name__}"
        raise BadInput(f"{name}{given}; expected True or False.")


def check_result(name: str, found: Any, kind: type, what: str = "") -> Any:
    """The result of a function of the user's, where it is of the kind that is used.

    :param what: is expected, in words; by default the name of the kind.
    :raises BadInput: where it is not, naming the function.
    """
    if not isinstance(found, kind):
        raise BadInput(f"{name} gave {found!r}; expected {what or 'a ' + kind.__name__}.")
    return found


def check_probability(prob: Any) -> None:
    """Refuse what is no probability between 0 and 1, these two left out.

    :raises BadInput: saying what it is.
    """
    check_number("prob", prob, "a probability between 0 and 1, such as 0.9", ABOVE_ZERO, BELOW_ONE)


def quantile_levels(q: Any) -> Tensor:
    """Probabilities, of which there may be several, as a tensor.

    :raises BadInput: for anything else.
    """
    levels = torch.tensor(math.nan)
    with suppress(TypeError, ValueError, RuntimeError):
        levels = torch.as_tensor(q, dtype=torch.float64)
    if levels.is_meta or levels.dim() > 1 or not bool(((levels >= 0.0) & (levels <= 1.0)).all()):
        raise BadInput(f"quantiles({q!r}): expected probabilities between 0 and 1.")
    return levels


def check_numbers(name: str, value: Any) -> None:
    """Refuse what is neither a number nor a tensor of them.

    :raises BadInput: naming the argument.
    """
    if isinstance(value, bool) or not isinstance(value, Real | Tensor):
        raise BadInput(f"{name} is a {type(value).__name__}; expected a number, or a tensor of numbers.")


def check_tensors(name: str, found: Any, number: int) -> tuple[Tensor, ...]:
    """The result of a function of the user's as a tuple, where it is so many tensors.

    :raises BadInput: where it is not, naming the function.
    """
    if not isinstance(found, tuple | list) or len(found) != number or not all(isinstance(x, Tensor) for x in found):
        raise BadInput(f"{name} gave {found!r}; expected {number} tensors.")
    return tuple(found)


def check_tensor(name: str, value: Any, what: str, advice: str = "Write torch.as_tensor(...) for numbers.") -> None:
    """Refuse what is no tensor.

    :param what: is expected, in words.
    :param advice: what to do, a sentence.
    :raises BadInput: naming the argument.
    """
    if not isinstance(value, Tensor):
        raise BadInput(f"{name} is a {type(value).__name__}; expected a tensor of {what}. {advice}")


def check_path(name: str, value: Any) -> None:
    """Refuse what is no name of a file.

    :raises BadInput: naming the setting.
    """
    what = f"={value!r} is empty or holds a null byte"
    if not isinstance(value, str | os.PathLike):
        what = f" is a {type(value).__name__}"
    elif value and "\0" not in os.fsdecode(value):
        return
    raise BadInput(f"{name}{what}; expected the name of a file, such as 'fit.pt'.")


def check_model(model: Any, goes_to: str = "run(...)") -> None:
    """Refuse what is no Pyro model.

    :param goes_to: which call takes the data, a common mistake.
    :raises BadInput: for anything that cannot be called.
    """
    if not callable(model):
        raise BadInput(f"model is a {type(model).__name__}; expected a callable Pyro model. Data go to {goes_to}.")


def check_count(name: str, value: Any, at_least: int = 1, advice: str = "") -> int:
    """A whole number of at least ``at_least``: Python's, NumPy's, or a tensor of one; a bool or a float is none.

    :param name: of the argument.
    :param advice: what to do, a sentence.
    :return: the number as an ``int``.
    :raises BadInput: naming the argument.

    >>> check_count("num_samples", torch.tensor(3))
    3
    """
    number = _whole(value)
    if number is None or not at_least <= number <= MOST:
        shown = isinstance(value, Real | str) or (isinstance(value, Tensor) and value.numel() == 1)
        beyond = f" and at most {MOST:,}" if number is not None and number > MOST else ""
        given = f"={value!r}" if shown else f" is a {type(value).__name__}"
        raise BadInput(
            f"{name}{given}; expected a whole number of at least {at_least}{beyond}.{' ' * bool(advice)}{advice}"
        )
    return number


def _whole(value: Any) -> int | None:
    """The number, None for what is no whole one."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in WHOLE and not value.is_meta:
        return int(value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def stacklevel() -> int:
    """The ``stacklevel`` at which a warning of the calling function points at the line that called this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] == PACKAGE:
        frame, level = frame.f_back, level + 1
    return level
