"""Rows that are shared out among processes: every engine that adds up its passes adds up those of all ranks.

    torchrun --nproc-per-node=8 fit.py

    with pyro_evidence.data.shards():
        posterior = EvidenceEM(model).run(my_rows)

``torch.distributed`` does the work, gloo on processors and nccl on GPUs.  There is one exchange a pass: the small sums
of all ranks are gathered and added in the order of the ranks on each of them, so that timing changes nothing, and every
rank comes to the same posterior.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyro_evidence.data.ranks import COMMUNICATOR, Sums, tensors_of, with_tensors
from pyro_evidence.errors import BadInput
from pyro_evidence.settings import check_count

TIMEOUT = timedelta(minutes=30)  # that a rank waits for the others


@dataclass(frozen=True)
class Ranks:
    """The processes of a group of ``torch.distributed``, whose rows are different.

    :ivar group: None for all.
    :ivar restarts: the processes that have the same rows as this one; None where nobody has.
    """

    group: Any = None
    restarts: "Ranks | None" = None

    @property
    def rank(self) -> int:
        """Number of this process."""
        return dist.get_rank(self.group)

    @property
    def num_ranks(self) -> int:
        """Number of processes."""
        return dist.get_world_size(self.group)

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all: shows progress, writes files."""
        return self.rank == 0 and (self.restarts is None or self.restarts.rank == 0)

    def total(self, here: Sums) -> Sums:
        """Sum over all processes, in the order of their ranks: a tensor, or a value made of tensors."""
        if isinstance(here, Tensor):
            return self._added(here)  # type: ignore[return-value]
        parts = list(tensors_of(here))
        pieces = self._added(torch.cat([x.reshape(-1) for x in parts])).split([x.numel() for x in parts])
        shaped = (piece.reshape(x.shape) for piece, x in zip(pieces, parts, strict=True))
        found: Sums = with_tensors(here, shaped)
        return found

    def _added(self, here: Tensor) -> Tensor:
        parts = [torch.empty_like(here, memory_format=torch.contiguous_format) for _ in range(self.num_ranks)]
        dist.all_gather(parts, here.contiguous(), group=self.group)
        found = parts[0]
        for part in parts[1:]:
            found = found + part
        return found

    def gathered(self, rows: Tensor) -> Tensor:
        """Rows of all processes, one after the other."""
        sizes = [torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(self.num_ranks)]
        dist.all_gather(sizes, torch.tensor([len(rows)], device=rows.device), group=self.group)
        counts = [int(size) for size in sizes]
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def check_equal(self, what: str, here: str) -> None:
        """Refuse processes that say different things of themselves.

        :raises BadInput: on all of them.
        """
        said = self.gather_str(here)
        different = [i for i, text in enumerate(said) if text != said[0]]
        if different:
            raise BadInput(
                f"ranks have different {what}: rank 0 {said[0]}; rank {different[0]} {said[different[0]]}. Expected "
                f"the same, with other rows."
            )

    def raise_together(self, wrong: Exception | None) -> None:
        """Raise on every process what is wrong on one of them.

        :raises BadInput: that names the rank; on the rank itself with its own error as the cause.
        """
        said = self.gather_str("" if wrong is None else f"{type(wrong).__name__}: {wrong}")
        bad = [f"rank {i}: {text}" for i, text in enumerate(said) if text]
        if bad:
            raise BadInput("; ".join(bad)) from wrong

    def gather_str(self, here: str) -> list[str]:
        """What every rank says, as bytes: nothing is unpickled."""
        text = torch.tensor(list(here.encode()), dtype=torch.uint8)
        parts = self.gathered(torch.cat([torch.tensor([len(text)]), text.long()]))
        found, place = list[str](), 0
        for _ in range(self.num_ranks):
            size = int(parts[place])
            found.append(bytes(parts[place + 1 : place + 1 + size].tolist()).decode())
            place += 1 + size
        return found


@contextmanager
def shards(group: Any = None, *, restarts: int = 1) -> Iterator[Ranks]:
    """Inside, ``run`` and ``run_chunks`` of an engine fit to the rows of all processes; each passes its own.

    Ranks may hold different numbers of rows, or none.  Rows are numbered through in the order of the ranks, and samples
    go by these numbers, so that a fit does not depend on how rows are shared out.

    :param group: of ``torch.distributed``; None for all processes, which are brought together first where that has not
        been done, as ``torchrun`` says.
    :param restarts: among how many processes the restarts of a mixture are shared out: ranks 0 to ``restarts - 1`` pass
        the same first rows, the next ones the next, and each takes every ``restarts``-th start.  Worth it where there
        are many starts and rows enough on each machine; other engines repeat themselves.
    :raises BadInput: without a group, outside ``torchrun``; or where the processes cannot be shared out so.
    """
    begun = group is None and not dist.is_initialized()
    if begun:
        _begin()
    token = None
    try:
        ranks = Ranks(group) if check_count("restarts", restarts) == 1 else _grid(group, restarts)
        token = COMMUNICATOR.set(ranks)
        yield ranks
    finally:
        if token is not None:
            COMMUNICATOR.reset(token)
        if begun:
            dist.destroy_process_group()


def _grid(group: Any, restarts: int) -> Ranks:
    """Processes with other rows, and those with the same.

    :raises BadInput: where they are not a multiple of ``restarts``.
    """
    whole, own = dist.get_process_group_ranks(group or dist.group.WORLD), dist.get_rank()
    if len(whole) % restarts:
        raise BadInput(f"shards(restarts={restarts}) of {len(whole)} processes; expected a divisor of their number.")
    others = [whole[i::restarts] for i in range(restarts)]
    alike = [whole[i : i + restarts] for i in range(0, len(whole), restarts)]
    made = [(members, dist.new_group(members)) for members in others + alike]  # all processes make all groups
    rows, same = (found for members, found in made if own in members)
    return Ranks(rows, Ranks(same))


def _begin() -> None:
    if "RANK" not in os.environ:
        raise BadInput(
            "shards() found no processes to work with: expected a start by torchrun, or torch.distributed with an "
            "initialised process group. Write torchrun --nproc-per-node=2 fit.py."
        )
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)
