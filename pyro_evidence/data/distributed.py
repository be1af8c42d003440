"""Rows that are shared out among processes: every engine that adds up its passes adds up those of all ranks.

    torchrun --nproc-per-node=8 fit.py

    with pyro_evidence.data.shards():
        posterior = EvidenceEM(model).run(my_rows)

``torch.distributed`` does the work, gloo on processors and nccl on GPUs.  There is one exchange a pass: the small sums
of all ranks are gathered and added in the order of the ranks on each of them, so that timing changes nothing, and every
rank comes to the same posterior.  Before it a few bytes say what each rank is about to do, or that it has failed.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, reduce
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyro_evidence.data.ranks import COMMUNICATOR, Communicator, Sums, tensors_of, with_tensors
from pyro_evidence.errors import BadInput
from pyro_evidence.settings import check_count

TIMEOUT = timedelta(minutes=30)  # that a rank waits for the others, by default
GRACE = 10.0  # seconds at most for others to say that their exchange failed too: one that computes says nothing
LOOK = 0.05  # seconds between two looks whether they did
HEADER = 64  # bytes in which a rank says what it is about to do
FAILED = "has failed"


@dataclass(frozen=True)
class Ranks(Communicator):
    """The processes of a group of ``torch.distributed``, whose rows are different.

    :ivar group: None for all.
    :ivar timeout: that a rank waits for the others.
    :ivar left: the message on ranks that have left; no exchange is possible afterwards.
    """

    group: Any = None
    timeout: timedelta = TIMEOUT
    left: list[str] = field(default_factory=list, compare=False)

    def total(self, here: Sums) -> Sums:
        """Sum over all processes, in the order of their ranks: a tensor, or a value made of tensors."""
        parts = list(tensors_of(here))
        numbers = torch.cat([x.reshape(-1) for x in parts])
        self._meet(f"adds up {len(numbers)} numbers, {numbers.dtype}")
        pieces = reduce(add, self._all_gather(numbers)).split([x.numel() for x in parts])
        return with_tensors(here, (piece.reshape(x.shape) for piece, x in zip(pieces, parts, strict=True)))

    def _all_gather(self, here: Tensor) -> list[Tensor]:
        """A tensor of every rank, all of one shape and dtype.

        :raises RuntimeError: naming the ranks that have left, or fell silent.
        """
        if self.left:
            raise RuntimeError(self.left[0])
        parts = [torch.empty_like(here, memory_format=torch.contiguous_format) for _ in range(self.num_ranks)]
        try:
            dist.all_gather(parts, here.contiguous(), group=self.group)
        except RuntimeError as error:
            self.left.append(self._who_left(error))
            raise RuntimeError(self.left[0]) from error
        return parts

    def _who_left(self, error: RuntimeError) -> str:
        """The message on an exchange that failed: it names the ranks that do not say that theirs has failed as well."""
        members = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        store, own, silent = dist.distributed_c10d._get_default_store(), dist.get_rank(), set(members)
        until = time.monotonic() + min(self.timeout.total_seconds(), GRACE)

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # where the process that keeps the store has left
                store.set(f"pyro_evidence/failed/{own}", "")
                while silent and time.monotonic() < until:
                    silent.difference_update([i for i in silent if store.check([f"pyro_evidence/failed/{i}"])])
                    time.sleep(LOOK)

        asking = threading.Thread(target=ask, daemon=True)  # a store whose process is stopped never answers
        asking.start()
        asking.join(until - time.monotonic())
        gone = {0} if own in silent else silent  # nobody answers without the store, which process 0 keeps
        names = ", ".join(str(i) for i, rank in enumerate(members) if rank in gone)
        return (
            f"rank {names or '(unknown)'} has left the fit, or was silent for longer than shards(timeout=...) allows, "
            f"{self.timeout.total_seconds():g} s: expected every rank to stay. Its own output may say why: it may have "
            f"been killed for memory, or stopped; raise timeout where a step takes that long. ({error})"
        )

    def _meet(self, what: str, wrong: BaseException | None = None) -> None:
        """The beginning of every exchange: a few bytes, in which each rank says what it is about to do.

        A rank that has failed says so here, whatever the others are about to do, so that all of them hear its reason.

        :param wrong: what this rank has failed with.
        :raises BadInput: on every rank, where one has failed, or ranks are not at the same place.  Where all of them
            have failed with the same words it is the error itself.
        """
        text = (FAILED if wrong is not None else what).encode()[:HEADER].ljust(HEADER)
        said = [
            bytes(x.tolist()).decode().strip() for x in self._all_gather(torch.tensor(list(text), dtype=torch.uint8))
        ]
        if FAILED in said:
            reasons = self._texts("" if wrong is None else f"{type(wrong).__name__}: {wrong}")
            error: BaseException = BadInput("; ".join(f"rank {i}: {x}" for i, x in enumerate(reasons) if x))
            if wrong is not None and len(set(reasons)) == 1:
                error = wrong
        elif len(set(said)) > 1:
            other = next(i for i, x in enumerate(said) if x != said[0])
            error = BadInput(
                f"ranks are at different places of a fit: rank 0 {said[0]}; rank {other} {said[other]}. Expected the "
                f"same engine, settings and number of fits on each, with other rows."
            )
        else:
            return
        vars(error).setdefault("known_to", []).append(self)
        raise error from (None if error is wrong else wrong)

    def gathered(self, rows: Tensor) -> Tensor:
        """Rows of all processes, one after the other."""
        self._meet(f"gathers rows {tuple(rows.shape[1:])}, {rows.dtype}")
        return torch.cat(self._parts(rows))

    def _parts(self, rows: Tensor) -> list[Tensor]:
        """The rows of each process."""
        counts = [int(size) for size in self._all_gather(torch.tensor([len(rows)], device=rows.device))]
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        return [part[:count] for part, count in zip(self._all_gather(padded), counts, strict=True)]

    def check_equal(self, what: str, here: str) -> None:
        """Refuse processes that say different things of themselves.

        :raises BadInput: on all of them.
        """
        said = self.gather_str(here)
        different = [i for i, text in enumerate(said) if text != said[0]]
        if different:
            error = BadInput(
                f"ranks have different {what}: rank 0 {said[0]}; rank {different[0]} {said[different[0]]}. Expected "
                f"the same, with other rows."
            )
            vars(error)["known_to"] = [self]
            raise error

    def raise_together(self, wrong: BaseException | None) -> None:
        """Raise on every process what is wrong on one of them.

        :raises BadInput: that names the rank; on the rank itself with its own error as the cause.
        """
        for ranks in (self, self.restarts):
            if isinstance(ranks, Ranks) and not ranks.left and ranks not in getattr(wrong, "known_to", ()):
                try:
                    ranks._meet("goes on", wrong)
                except Exception as error:
                    wrong = error
        if wrong is not None:
            raise wrong

    def gather_str(self, here: str) -> list[str]:
        """Texts of all ranks, in their order."""
        self._meet("says a word")
        return self._texts(here)

    def _texts(self, here: str) -> list[str]:
        """Texts of all ranks, sent as bytes: nothing is unpickled."""
        own = torch.tensor(list(here.encode()), dtype=torch.uint8)
        return [bytes(x.tolist()).decode() for x in self._parts(own)]


@contextmanager
def shards(group: Any = None, *, restarts: int = 1, timeout: timedelta = TIMEOUT) -> Iterator[Ranks]:
    """Inside, ``run`` and ``run_chunks`` of an engine fit to the rows of all processes; each passes its own.

    Ranks may hold different numbers of rows, or none.  Rows are numbered through in the order of the ranks, and samples
    go by these numbers, so that a fit does not depend on how rows are shared out.

    :param group: of ``torch.distributed``; None for all processes, which are brought together first where that has not
        been done, as ``torchrun`` says.
    :param restarts: among how many processes the restarts of a mixture are shared out: ranks 0 to ``restarts - 1`` pass
        the same first rows, the next ones the next, and each takes every ``restarts``-th start.  Worth it where there
        are many starts and rows enough on each machine; other engines repeat themselves.
    :param timeout: how long a rank waits for the others before it says which of them is silent.
    :raises BadInput: without a group, outside ``torchrun``; where the processes cannot be shared out so; and on every
        rank what is wrong on one, naming it.
    :raises RuntimeError: where a rank has left, or is silent for longer than ``timeout``, naming it.
    """
    begun = group is None and not dist.is_initialized()
    if begun:
        if "RANK" not in os.environ:
            raise BadInput(
                "shards() found no processes to work with: expected a start by torchrun, or torch.distributed with an "
                "initialised process group. Write torchrun --nproc-per-node=2 fit.py."
            )
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timeout)
    token = None
    try:
        ranks = _grid(group, check_count("restarts", restarts), timeout)
        token = COMMUNICATOR.set(ranks)
        try:
            yield ranks
        except Exception as error:
            ranks.raise_together(error)
        except BaseException as error:
            with contextlib.suppress(Exception):
                ranks.raise_together(error)
            raise
        ranks.raise_together(None)
    finally:
        if token is not None:
            COMMUNICATOR.reset(token)
        if begun:
            dist.destroy_process_group()


def _grid(group: Any, restarts: int, timeout: timedelta) -> Ranks:
    """Processes with other rows, and those with the same.

    :raises BadInput: where they are not a multiple of ``restarts``.
    """
    whole, own = dist.get_process_group_ranks(group or dist.group.WORLD), dist.get_rank()
    if len(whole) % restarts:
        raise BadInput(f"shards(restarts={restarts}) of {len(whole)} processes; expected a divisor of their number.")
    place = whole.index(own)
    first = place - place % restarts
    make = partial(dist.new_group, timeout=timeout, use_local_synchronization=True)
    rows, same = make(whole[place - first :: restarts]), None
    rank, num_ranks = dist.get_rank(rows), dist.get_world_size(rows)
    if restarts > 1:
        group = make(whole[first : first + restarts])
        same = Ranks(place - first, restarts, None, place == first, group=group, timeout=timeout)
    return Ranks(rank, num_ranks, same, rank == 0 and place == first, group=rows, timeout=timeout)
