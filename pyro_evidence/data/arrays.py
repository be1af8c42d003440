"""Data as tensors, whatever they come in, and error messages for what holds no numbers that can be used."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_evidence.errors import BadInput


def as_tensor(value: Any, floats: torch.dtype | None = None) -> Any:
    """A copy of an array or table of numbers as a tensor, or of a tensor made in inference mode; else what was given.

    :param floats: of what holds floats, and then whole numbers come as int64; None: as the array has them.
    :raises BadInput: for an array with a mask, whose numbers behind the mask nobody is to see, and for numbers that the
        tensor would round or wrap around: of ``uint64`` from ``2**63``, of ``longdouble`` those that are no double.
    """
    if isinstance(value, Tensor) and value.is_inference() and not torch.is_inference_mode_enabled():
        return value.clone()  # torch takes no slope of what is computed from the other
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
    ours: np.dtype[Any] = array.dtype.newbyteorder("=")  # the dtype of this machine's byte order that torch has
    if kind == "u" or ours.itemsize > np.dtype(np.float64).itemsize:
        ours = np.dtype(np.float64 if kind == "f" else np.int64)
    with np.errstate(over="ignore"):
        native = array.astype(ours)  # a copy, whatever order its memory had
    if native.dtype != array.dtype and not np.array_equal(native, array, equal_nan=kind == "f"):
        raise BadInput(
            f"an array of {array.dtype}, shape {array.shape}, holds numbers that {native.dtype} would change, the "
            f"largest {array.max()}; expected some that it holds. Pass .astype(np.float64), which rounds them."
        )
    wanted = None if floats is None else {"f": floats, "b": torch.bool}.get(kind, torch.int64)
    return torch.as_tensor(native, dtype=wanted)


def exactly(value: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """Numbers in another dtype.

    :raises BadInput: for whole numbers that it would round.
    """
    found = value.to(dtype)
    if not value.is_floating_point() and not torch.equal(found.to(value.dtype), value):
        raise BadInput(
            f"{what} holds whole numbers, the largest {int(value.max())}, which {dtype} would round; expected some "
            f"that it holds. Subtract an offset from them; where they name levels, pass .astype(str)."
        )
    return found


def is_fake(value: Tensor) -> bool:
    """Whether a tensor has a shape, and no numbers."""
    return value.is_meta or type(value).__name__ == "FakeTensor"


def require_dense(name: str, value: Tensor) -> None:
    """Refuse a tensor without a number for each of its elements.

    :raises BadInput: for sparse tensors, quantised and nested ones, those whose axes have names, those on the device
        ``meta``, and floats of eight bits, with which torch cannot compute.
    """
    if value.is_nested:
        raise BadInput(f"{name} is a nested tensor, with rows of several lengths; expected a dense one: pad it.")
    if is_fake(value):
        what, advice = "fake or on the device meta, where tensors have a shape and no numbers", "load its data first"
    elif value.layout is not torch.strided:
        what, advice = f"sparse ({value.layout})", f"pass {name}.to_dense()"
    elif any(names := getattr(value, "names", ())):  # of older releases of torch
        what, advice = f"one whose axes have names {names}", f"pass {name}.rename(None)"
    elif value.is_quantized:
        what, advice = f"quantised ({value.dtype})", f"pass {name}.dequantize()"
    elif value.is_floating_point() and value.itemsize == 1:
        what, advice = f"of {value.dtype}, with which torch cannot compute", f"pass {name}.float()"
    else:
        return
    raise BadInput(f"{name}, shape {tuple(value.shape)}, is {what}; expected a dense tensor of numbers: {advice}.")


def require_tensor(name: str, value: Any) -> None:
    """Refuse what is no tensor as the inputs or targets of a model.

    :raises BadInput: naming its type.
    """
    if not isinstance(value, Tensor):
        of = f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
        raise BadInput(
            f"{name} is a {type(value).__name__}{of}; expected a tensor of numbers, one row per datum, such as "
            f"torch.tensor(rows, dtype=torch.float64). Arrays and tables of numbers that a tensor can hold go to "
            f"run(...), others after {name}.astype(float); words become numbers by codes, levels = "
            f"pandas.factorize({name})."
        )


def require_matrix(name: str, value: Any, columns: str | int = "D", *, batched: bool = False) -> None:
    """Refuse what is no matrix of floats, a row for each datum, or has none.

    :param columns: how many there are to be, or what their number is called.
    :param batched: whether there may be a batch of matrices.
    :raises BadInput: with the shape and the dtype.
    """
    require_tensor(name, value)
    other = isinstance(columns, int) and value.shape[-1:] != (columns,)
    if value.dim() < 2 or (value.dim() > 2 and not batched) or not value.is_floating_point() or other:
        raise BadInput(
            f"{name} has shape {tuple(value.shape)} and dtype {value.dtype}; expected floats of shape (N, {columns}), "
            f"one row per datum. Write {name}[:, None] for a single column, {name}.double() for integers."
        )
    if not value.numel():
        raise BadInput(f"{name} has shape {tuple(value.shape)}: no data; expected at least one row and one column.")


def require_rows(what: str, *arrays: Any) -> None:
    """Refuse what cannot be taken by rows, and arrays of different lengths.

    :raises BadInput: naming the type, or the lengths.
    """
    for place, array in enumerate(arrays):
        if isinstance(array, Tensor):
            require_dense(f"array {place}", array)
        shape = getattr(array, "shape", None) if hasattr(array, "__array__") and not isinstance(array, type) else None
        if shape is None or len(shape) == 0:
            found = f"a {type(array).__name__}" if shape is None else "a single number"
            raise BadInput(
                f"{what} was given {found} as array {place}; expected tensors or NumPy's arrays with rows. Convert it: "
                f"torch.as_tensor(...)."
            )
    lengths = [len(a) for a in arrays]
    if len(set(lengths)) != 1:
        raise BadInput(f"{what} was given arrays of {lengths} rows; expected some, all of one length.")
