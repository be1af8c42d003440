"""The arguments of a model in words, and the error message for those on which it cannot be run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.arrays import as_tensor, require_dense
from pyro_evidence.errors import BadInput, UnsupportedModel


def tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments, one level of containers deep, with what to call them."""
    for name, value in _named(args, kwargs).items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{i}]", v) for i, v in enumerate(value) if isinstance(v, Tensor))
        elif isinstance(value, Mapping):
            yield from ((f"{name}[{k!r}]", v) for k, v in value.items() if isinstance(v, Tensor))


def as_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with NumPy's arrays and pandas' columns and tables made tensors, one level of containers deep.

    Floats come in the precision of the floating tensors among the arguments, else in torch's default; whole numbers as
    int64.  What is no array of numbers stays as it is, and so do lists.
    """
    floats = (t.dtype for _, t in tensors(args, kwargs) if t.is_floating_point())
    dtype = next(floats, torch.get_default_dtype())
    found = tuple(_converted(a, dtype) for a in args), {k: _converted(v, dtype) for k, v in kwargs.items()}
    for name, value in tensors(*found):
        require_dense(name, value)
    return found


def column_names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Names of the columns of those arguments that are tables, before they became tensors."""
    tables = {n: v for n, v in _named(args, kwargs).items() if hasattr(v, "columns") and not isinstance(v, Tensor)}
    return {n: tuple(str(c) for c in v.columns) for n, v in tables.items()}


def _converted(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_converted(v, dtype) for v in value)
    if isinstance(value, dict):
        return {k: _converted(v, dtype) for k, v in value.items()}
    return as_tensor(value, dtype)


def require_kept(joint: Any, what: str) -> None:
    """Refuse what needs the data of the fit, where they were not kept.

    :raises BadInput: saying what needs them.
    """
    if not joint.has_data:
        raise BadInput(
            f"{what} needs the data of the fit, which came in chunks and were not kept; pass the model's arguments for "
            f"some rows to predict, log_prob or log_likelihood."
        )


def describe(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The arguments as a reader of an error message wants them: shape, dtype, how many are not finite."""
    given = list(tensors(args, kwargs))
    found = [f"{n}: shape {tuple(t.shape)}, {t.dtype}{bad_entries(t)}{_there(t, given)}" for n, t in given]
    found += [f"{n}: {type(a).__name__}, no tensor" for n, a in arrays(args, kwargs)]
    return "; ".join(found) or "no tensors among the arguments"


def _there(value: Tensor, given: Sequence[tuple[str, Tensor]]) -> str:
    """The integers of the same row as the first bad entry, such as its group, in words; empty for none."""
    bad = ~torch.isfinite(value) if value.is_floating_point() and value.dim() else None
    if bad is None or not bool(bad.any()):
        return ""
    row = int(bad.nonzero()[0, 0])
    levels = [(n, t) for n, t in given if t.dim() == 1 and len(t) == len(value) and t.dtype in INTEGERS]
    return "".join(f", where {n} is {int(t[row])}" for n, t in levels)


def arrays(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Arguments that hold data and are no tensors, arrays, tables, lists of numbers, with what to call them."""
    found = []
    for name, value in _named(args, kwargs).items():
        if isinstance(value, list | tuple):
            is_array = len(value) > 0 and isinstance(value[0], int | float | str | list | tuple)
        else:
            is_array = hasattr(value, "__array__") and not isinstance(value, Tensor)
        if is_array:
            found.append((name, value))
    return found


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by what an error message calls them."""
    return {f"argument {i}": a for i, a in enumerate(args)} | {f"argument {k!r}": a for k, a in kwargs.items()}


def bad_entries(value: Tensor) -> str:
    """The number of entries that are not finite and the place of the first, in words; empty when all are."""
    if not value.is_floating_point():
        return ""
    bad = {"nan": value.isnan(), "inf": value.isinf()}
    return "".join(
        f", {int(cells.sum())} {word} (first at {cells.nonzero()[0].tolist()})"
        for word, cells in bad.items()
        if cells.any()
    )


LINALG_ERROR: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LEVELS = " Levels that index a latent site are whole numbers from 0: write .long() after them."
MORE_JITTER = (
    " A covariance that is not positive definite holds nan, or rows that are nearly alike (inputs that occur twice): "
    "give it more jitter, as in K + 1e-6 * torch.eye(len(K))."
)


@contextmanager
def new_data(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Inside, what a fitted model raises on other arguments becomes an error message.

    :raises BadInput: in place of errors of Pyro's and torch's.
    """
    try:
        yield
    except UnsupportedModel:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise run_failed(error, args, kwargs) from error


def run_failed(error: Exception, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BadInput:
    """The error message for a model that its arguments break; an error message of the model's own is passed on."""
    if isinstance(error, BadInput):
        return BadInput(str(error).split("Trace Shapes:")[0].strip())  # which Pyro appends to whatever a model raises
    given = list(tensors(args, kwargs))
    said, *values = " ".join(str(error).split("Trace Shapes:")[0].split()).split(" found invalid values:")
    said = said[:600] + "".join(f" found values:{v[:60]}{' ...' * (len(v) > 60)}" for v in values)
    advice = "Expected at least one datum. " if any(t.numel() == 0 for _, t in given) else ""
    if gaps := ", ".join(n for n, t in given if bad_entries(t)):
        advice += f"Remove rows with nan or inf from {gaps}, or mask them, with any number of the support in their "
        advice += "place (obs_mask=...). "
    advice += _levels(error, given) or _other_types(given, arrays(args, kwargs))
    singular = "PositiveDefinite" in str(error) or isinstance(error, LINALG_ERROR)
    return BadInput(
        f"the model cannot be run on these arguments ({describe(args, kwargs)}): {said}. {advice}"
        f"Shapes must broadcast, all floating tensors must have one dtype (build priors with X.new_ones(...), or set "
        f"torch's default dtype), and data must lie in the support of their distribution."
        f"{MORE_JITTER if singular else ''}{LEVELS if 'used as indices' in str(error) else ''}"
    )


def _levels(error: Exception, given: Sequence[tuple[str, Tensor]]) -> str:
    """The advice on numbers that index too far, empty for other errors."""
    if "out of bounds" not in str(error):
        return ""
    whole = [(n, t) for n, t in given if t.dtype in INTEGERS and t.numel()]
    seen = ", ".join(f"those of {n} go from {int(t.min())} to {int(t.max())}" for n, t in whole)
    return f"A site of n levels has the levels 0 to n - 1{'; ' * bool(seen)}{seen}. "


def _other_types(given: Sequence[tuple[str, Tensor]], others: Sequence[tuple[str, Any]]) -> str:
    """The advice on data that are no tensors, :func:`arrays`, and on tensors of integers and complex numbers."""
    words = []
    for name, value in others:
        if isinstance(value, list | tuple):
            is_words = isinstance(value[0], str)
        else:
            array = value.__array__()
            objects = array.dtype.kind == "O" and array.size > 0
            is_words = array.dtype.kind in "US" or (objects and isinstance(array.flat[0], str))
        if is_words:
            words.append(name)
    if words:
        named = ", ".join(words)
        return f"Levels are whole numbers from 0: codes, levels = pandas.factorize({named}), and pass the codes. "
    whole = ", ".join(n for n, t in given if not t.is_floating_point() and not t.is_complex())
    imaginary = ", ".join(n for n, t in given if t.is_complex())
    named = ", ".join(n for n, _ in others)
    advice = f"Expected tensors: write torch.as_tensor(...) around {named}. " if others else ""
    advice += f"Expected real numbers: pass the .real or the .abs() of {imaginary}. " if imaginary else ""
    return advice + (f"Integers and floats may not mix: try .double() after {whole}. " if whole else "")
