"""Data that no engine can calculate with: few digits, imaginary parts, huge squares, levels below zero."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from pyro_evidence.errors import BadInput
from pyro_evidence.program.failed_run import tensors
from pyro_evidence.program.sites import Node

LARGEST = 1e70  # its fourth power, which squared curvatures reach, is a float; so is that of its reciprocal
OFFSET = 1e4  # data this far from zero beside their spread are best told without it
HALF = (torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
INDEXING = (Tensor.__getitem__, torch.take, Tensor.take)


def check_sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments whose fourth powers are no floats: what is computed from them would be inf or 0.

    :raises BadInput: naming the argument, the number and its place.
    """
    for name, value in tensors(args, kwargs):
        if value.dtype == torch.float64 and value.numel():  # no other dtype has such numbers
            _check_size(name, value.detach())


def _check_size(name: str, value: Tensor) -> None:
    size = value.abs().nan_to_num(0.0, posinf=0.0)
    largest = float(size.max())
    if largest > LARGEST:
        place = [int(i) for i in torch.unravel_index(size.argmax(), value.shape)]
        raise BadInput(
            f"{name}, shape {tuple(value.shape)}, holds {float(value[tuple(place)]):.3g} at {place}; expected numbers "
            f"of at most {LARGEST:g}, because larger ones have no finite fourth power. If it stands for a missing "
            f"value, leave its row out; else divide by a typical value: {name} / {largest:.0e}."
        )
    if 0.0 < largest < 1.0 / LARGEST:
        raise BadInput(
            f"{name}, shape {tuple(value.shape)}, holds nothing larger than {largest:.3g}; expected some number of at "
            f"least {1.0 / LARGEST:g}, because smaller ones have fourth powers of 0. Divide by a typical value: "
            f"{name} / {largest:.0e}."
        )


def check_kinds(nodes: Mapping[str, Node], arguments: str) -> None:
    """Refuse half precision, which has two or three digits, and complex numbers.

    :param nodes: sample sites of a trace, log probabilities computed.
    :raises BadInput: naming the site.
    """
    for name, node in nodes.items():
        for what in ("value", "log_prob"):
            dtype = getattr(node.get(what), "dtype", None)
            if dtype in HALF:
                raise _other_kind(name, what, dtype, "two or three digits, too few for a log evidence", arguments)
            if dtype is not None and dtype.is_complex:
                raise _other_kind(name, what, dtype, "an imaginary part, and densities are of real numbers", arguments)


def _other_kind(name: str, what: str, dtype: torch.dtype, has: str, arguments: str) -> BadInput:
    kind = {"value": "values", "log_prob": "log densities"}[what]
    advice = ".real, or its .abs(), or both parts as columns" if dtype.is_complex else ".double() or .float()"
    return BadInput(
        f"site '{name}' has {kind} of {dtype}, with {has}; expected float64 or float32. Pass the data's {advice}. "
        f"Arguments: {arguments}."
    )


def check_offset(name: str, value: Tensor, J: Tensor) -> None:
    """Refuse data that differ from one another in the last digits only, or by little where no weight is a constant.

    :param J: design of the site's predictor, ``(N, C, M)``.
    :raises BadInput: naming the site, where sums of squares would be rounding, or the offset is all that is fitted.
    """
    if not value.is_floating_point() or value.numel() < 2:
        return
    centre, spread = float(value.mean()), float(value.std())
    if 0.0 < spread < abs(centre) * torch.finfo(value.dtype).eps ** 0.5:
        raise BadInput(
            f"site '{name}' has values about {centre:.6g} that differ by {spread:.2g} only: half of the digits of "
            f"{value.dtype} are the same in all of them, and squares are rounding. Expected data near zero: subtract "
            f"the mean before the fit."
        )
    if not 0.0 < spread < abs(centre) / OFFSET:
        return
    ones, columns = J.new_ones(len(J) * J.shape[1], 1), J.flatten(0, 1)
    driver = "gelsy" if J.device.type == "cpu" else "gels"
    nearest = columns @ torch.linalg.lstsq(columns, ones, driver=driver).solution
    if not bool((nearest - ones).abs().max() < 1e-3):
        raise BadInput(
            f"site '{name}' has values about {centre:.6g} that differ by {spread:.2g} only, and no combination of the "
            f"model's weights is a constant: the fit would be of the offset. Expected data near zero, or a bias among "
            f"the weights: subtract the mean before the fit, or add a column of ones."
        )


class Levels(TorchFunctionMode):
    """A run of the model that refuses data below zero as an index.

    What the model has counted itself, as in ``x[torch.arange(n) - 1]``, is its own affair; data are its arguments and
    whatever else was there before the run, in another integer type and shape too.

    :param args: the arguments of the run, with ``kwargs``.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = [(n, t) for n, t in tensors(args, kwargs) if t.dtype in INTEGERS]
        self.counted: Any = WeakTensorKeyDictionary()  # tensors of integers that the run has made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Carry out a function; look at an index before, and remember integers that come out of others."""
        if func in INDEXING and len(args) > 1:
            for index in args[1] if isinstance(args[1], tuple) else (args[1],):
                if isinstance(index, Tensor) and index.dtype in INTEGERS:
                    self._check(index)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype in INTEGERS:
            self.counted[result] = True
        return result

    def _check(self, index: Tensor) -> None:
        flat = index.reshape(-1)
        below = (flat < 0).nonzero()[:, 0]
        if not len(below):
            return
        given = (n for n, t in self.arguments if t.numel() == len(flat) and bool((t.reshape(-1) == flat).all()))
        name = next(given, None)
        if name is None and index in self.counted:
            return
        name = name or "a tensor that is no argument of the model's"
        raise BadInput(
            f"{name}, shape {tuple(index.shape)}, is an "
            f"index and holds {int(flat[below[0]])} at {int(below[0])}, numbers below zero in {len(below):,} of "
            f"{len(flat):,} rows; expected levels from 0. In torch -1 is the last level, in pandas' codes a missing "
            f"one. Leave those rows out of all arguments (keep = index >= 0), or give what is missing a level of its "
            f"own (index = torch.where(index < 0, num_levels, index), with one level more); where counting from the "
            f"end is meant, pass index % num_levels."
        )
