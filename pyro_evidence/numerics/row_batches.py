"""A function of one row applied to many: at once where its Python allows, within a bound on memory."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

BATCH_BYTES = 2**28  # what autograd may keep for the rows that are evaluated together

RowFunction = Callable[..., Tensor]  # vectors to a scalar


def bytes_per_row(f: RowFunction, *row: Tensor) -> int | None:
    """What autograd keeps for each row of a batch; None when ``f`` takes no batch.

    :param row: one argument each, shape ``(...)``.
    """
    try:
        return max(1, _kept(f, 2, row) - _kept(f, 1, row))
    except Exception:  # f works on one row, so whatever this is, it is vmap that f does not bear
        return None


def _kept(f: RowFunction, num: int, row: tuple[Tensor, ...]) -> int:
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> None:  # the graph keeps nothing: under vmap it would never be let go
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()

    rows = [x.detach().expand(num, *x.shape).clone().requires_grad_() for x in row]
    with saved_tensors_hooks(note, lambda tensor: tensor):
        torch.vmap(f)(*rows)
    return sum(storages.values())


def apply(f: RowFunction, rows: tuple[Tensor, ...], row_bytes: int | None, one: RowFunction) -> Tensor:
    """``f`` of every row, shape ``(R,)``.

    :param rows: the arguments, each ``(R, ...)``.
    :param row_bytes: as :func:`bytes_per_row` found it.
    :param one: what to apply one by one where a batch is not possible.
    """
    if row_bytes is not None and len(rows[0]) > 1:
        try:
            return torch.vmap(f, chunk_size=max(1, BATCH_BYTES // row_bytes))(*rows)
        except Exception:
            pass  # one bad row or too little memory; what one() raises below is what the caller sees
    return torch.stack([one(*row) for row in zip(*rows, strict=True)])
