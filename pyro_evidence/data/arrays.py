"""Data as tensors, whatever they come in, and error messages for what holds no numbers that can be used."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_evidence.errors import BadInput


def as_tensor(value: Any, floats: torch.dtype | None = None) -> Any:
    """A copy of an array or table of numbers as a tensor; anything else as it is.

    :param floats: of what holds floats, and then whole numbers come as int64; None: as the array has them.
    :raises BadInput: for an array with a mask, whose numbers behind the mask nobody is to see.
    """
    if isinstance(value, Tensor | type) or not hasattr(value, "__array__"):
        return value
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise BadInput(
            f"an array of shape {value.shape} has {int(np.ma.count_masked(value))} masked elements, which a tensor "
            f"cannot have; expected numbers. Leave these rows out, or pass .filled(np.nan) to a model that takes gaps."
        )
    array = np.asarray(value)
    kind = array.dtype.kind
    if kind not in "fiub":
        return value
    if not array.dtype.isnative or kind == "u" or array.dtype.itemsize > np.dtype(np.float64).itemsize:
        array = array.astype({"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}[kind])
    wanted = None if floats is None else {"f": floats, "b": torch.bool}.get(kind, torch.int64)
    return torch.tensor(array, dtype=wanted)


def require_dense(name: str, value: Tensor) -> None:
    """Refuse a tensor without a number for each of its elements.

    :raises BadInput: for sparse tensors, quantised ones and those on the device ``meta``.
    """
    if value.is_meta:
        what, advice = "on the device meta, where tensors have a shape and no numbers", "load its data first"
    elif value.layout is not torch.strided:
        what, advice = f"sparse ({value.layout})", f"pass {name}.to_dense()"
    elif value.is_quantized:
        what, advice = f"quantised ({value.dtype})", f"pass {name}.dequantize()"
    else:
        return
    raise BadInput(f"{name}, shape {tuple(value.shape)}, is {what}; expected a dense tensor of numbers: {advice}.")


def require_tensor(name: str, value: Any) -> None:
    """Refuse what is no tensor as the inputs or targets of a model.

    :raises BadInput: naming its type.
    """
    if not isinstance(value, Tensor):
        raise BadInput(
            f"{name} is a {type(value).__name__}; expected a tensor of numbers, one row per datum, such as "
            f"torch.tensor(rows, dtype=torch.float64). NumPy's arrays and pandas' tables of numbers go to run(...); "
            f"words become numbers by codes, levels = pandas.factorize({name})."
        )


def require_rows(what: str, *arrays: Any) -> None:
    """Refuse what cannot be taken by rows, and arrays of different lengths.

    :raises BadInput: naming the type, or the lengths.
    """
    for place, array in enumerate(arrays):
        shape = None if isinstance(array, type) else getattr(array, "shape", None)
        if isinstance(array, Tensor):
            require_dense(f"array {place}", array)
        if shape is None or len(shape) == 0:
            found = f"a {type(array).__name__}" if shape is None else "a single number"
            raise BadInput(
                f"{what} was given {found} as array {place}; expected tensors or NumPy's arrays with rows. Convert it: "
                f"torch.as_tensor(...)."
            )
    lengths = [len(a) for a in arrays]
    if len(set(lengths)) != 1:
        raise BadInput(f"{what} was given arrays of {lengths} rows; expected some, all of one length.")
