"""Cholesky factors that are right or refused; the memory and the threads that dense algebra asks for."""

import math
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from pyro_evidence.errors import NotPositiveDefinite, TooLarge

# Multiplications and additions of an operation that is worth several threads.  Where other processes share the cores,
# each operation on two threads was measured to cost up to 15 ms of processor time more than on one, whatever its size:
# a thread waits for another one's turn.  That is less than .3 of an operation of 50 ms, at 4e10 a second.
LARGE = 2e9
PER_NUMBER = 40.0  # as many take the time in which memory hands over one number

_CALLERS: ContextVar[list[int] | None] = ContextVar("callers_threads", default=None)


@contextmanager
def one_thread_if_small() -> Iterator[None]:
    """Inside, operations run on one thread, from the first large one on (:func:`expect`) on those of the caller.

    ``torch.set_num_threads`` is of the thread that calls it, and of all threads that have yet to begin: threads that
    compute already keep their own number.  Here it is of the calling thread alone, so that threads which begin while a
    fit goes on find what the caller has set.  Whatever is thrown inside, the caller's number is restored.
    """
    number = torch.get_num_threads()
    if number == 1 or _CALLERS.get() is not None:
        yield
        return
    token = _CALLERS.set([number])
    try:
        _set_here(1)
        yield
    finally:
        _set_here(number)
        _CALLERS.reset(token)


def expect(work: float) -> None:
    """Announce an operation: where it is large, the caller's threads come back until the end of the fit.

    :param work: multiplications and additions.
    """
    callers = _CALLERS.get()
    if callers and work >= LARGE:
        _set_here(callers.pop())


def expect_square(A: Tensor) -> None:
    """Announce factors, and products with them, of square matrices ``(..., M, M)``, which are taken one at a time."""
    expect(2.0 * float(A.shape[-1]) ** 3)


def _set_here(number: int) -> None:
    """Another number for this thread; what threads that have yet to begin will find stays.

    ``torch.set_num_threads`` sets both in one call, and torch has no other: the second can be read by a thread that has
    just begun, and put back only by setting the number of such a thread.  So one begins here, for .1 ms, twice a fit;
    the library of OpenMP itself, whose call is of one thread, has another name in every build of torch.
    """
    with ThreadPoolExecutor(1) as beginner:
        default = beginner.submit(torch.get_num_threads).result()
        torch.set_num_threads(number)
        beginner.submit(torch.set_num_threads, default).result()


SMALL = 2**22  # bytes that nobody need ask for
CONTROL_GROUP = Path("/sys/fs/cgroup")
MEMORY_TABLE = Path("/proc/meminfo")
OWN_MEMORY = Path("/proc/self/statm")

Label = Callable[[int], str]  # flat coordinate -> what a reader calls it


def coordinate(index: int) -> str:
    """The default :data:`Label`: the bare position."""
    return f"coordinate {index}"


def cholesky(A: Tensor, name: str, label: Label = coordinate) -> Tensor:
    """Lower Cholesky factor of ``A``, shape ``(..., M, M)``, in float64; nothing is ever added to ``A``.

    :param name: what the reader calls the matrix.
    :param label: names a row, so that the error message can say where the trouble lies.
    :raises NotPositiveDefinite: with the smallest eigenvalue and the row it points at.
    """
    expect_square(A)
    tril, info = torch.linalg.cholesky_ex(A.double())
    failed = bool(info) if info.dim() == 0 else bool(info.any())  # one number is looked at without an operation
    if failed or not math.isfinite(float(tril.detach().diagonal(dim1=-2, dim2=-1).sum())):
        raise NotPositiveDefinite(partial(not_positive_definite, A.detach().double(), name, label))
    return tril


def not_positive_definite(A: Tensor, name: str, label: Label) -> str:
    """Message about a matrix, or several ``(..., M, M)``, without a Cholesky factor."""
    matrices = A.reshape(-1, *A.shape[-2:])
    broken = torch.nonzero(~torch.isfinite(matrices))
    if len(broken):
        return (
            f"{name}, shape {tuple(A.shape)}, contains inf or nan, first in the row of {label(int(broken[0, 1]))}; "
            "expected finite curvature. Look for a density that is not smooth at the mode."
        )
    values, vectors = torch.linalg.eigh(matrices)
    worst = int(values[:, 0].argmin())
    row = int(vectors[worst, :, 0].abs().argmax())
    return (
        f"{name}, shape {tuple(A.shape)}, has smallest eigenvalue {float(values[worst, 0]):.2e}; expected all > 0. "
        f"The direction points at {label(row)}. Either the point is a saddle (try start=Start(restarts=8)), or two "
        f"columns of a design coincide and the prior is flat: give that site a proper prior. Where a latent space can "
        f"be turned at no cost, as in a mixture of probabilistic PCA, use EvidenceEM(model), which integrates over all "
        f"turns. To damp on purpose, pass curvature=damped(exact_hessian, 1e-3)."
    )


def relative_rounding(dtype: torch.dtype) -> float:
    """Relative difference up to which two ways to compute a number may differ: the last three digits."""
    return 1e3 * torch.finfo(dtype).eps


ROUNDED = 1e-12  # of the largest; with a fifth of it a network's fit to labels of one class ends at another mode


def floored(size: Tensor) -> Tensor:
    """Sizes ``(..., n)`` to divide by, none so small beside the largest that rounding may have made it."""
    least = ROUNDED * size.amax(-1, keepdim=True)
    return torch.maximum(size, least + torch.finfo(size.dtype).tiny)


def fix_signs(vectors: Tensor) -> Tensor:
    """Columns ``(..., n, q)``, each turned to the one of its two signs that every machine agrees on.

    By the sign of a fixed sum of its entries, which is zero for no direction that occurs; the largest entry would not
    do, because two may be as large and rounding chooses between them.
    """
    size = vectors.shape[-2]
    mixer = (1.0 + 0.7 * torch.arange(size, dtype=vectors.dtype, device=vectors.device)).cos() + 1.5
    return torch.where((mixer.unsqueeze(-1) * vectors).sum(-2, keepdim=True) < 0, -vectors, vectors)


def most_independent(columns: Tensor) -> Tensor:
    """As many rows of ``(n, m)`` as there are columns, each the farthest from the span of those before, ``(m,)``."""
    left, chosen = columns.clone(), []
    for _ in range(columns.shape[-1]):
        chosen.append(int(left.norm(dim=-1).argmax()))
        direction = left[chosen[-1]] / left[chosen[-1]].norm()
        left = left - (left @ direction).unsqueeze(-1) * direction
    return torch.tensor(chosen, dtype=torch.long, device=columns.device)


def available_bytes(device: torch.device) -> int:
    """Memory of ``device`` that can still be had, in bytes, as far as the system tells."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    return min(_system_bytes(), _control_group_bytes(), _limit_bytes())


def _system_bytes() -> int:
    """Bytes that the kernel could hand out: caches count as free."""
    with suppress(OSError, KeyError, ValueError):
        table = dict(line.split(":") for line in MEMORY_TABLE.read_text().splitlines())
        return 1024 * int(table["MemAvailable"].split()[0])
    with suppress(AttributeError, OSError, ValueError):  # a system that does not say
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sys.maxsize


def _control_group_bytes() -> int:
    """Bytes left under a container's own limit; unlimited where there is none."""
    with suppress(OSError, KeyError, ValueError):
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
        lines = (CONTROL_GROUP / "memory.stat").read_text().splitlines()
        return limit - used + int(dict(line.split() for line in lines)["file"])  # caches can be dropped
    return sys.maxsize


def _limit_bytes() -> int:
    """Bytes left under the process's own limit (``ulimit -v``); unlimited where there is none."""
    with suppress(ImportError, OSError, ValueError, IndexError):
        resource = import_module("resource")  # not on every system
        limit = int(resource.getrlimit(resource.RLIMIT_AS)[0])
        if limit != resource.RLIM_INFINITY:
            pages = int(OWN_MEMORY.read_text().split()[0])
            return max(0, limit - pages * int(resource.getpagesize()))
    return sys.maxsize


def has_room(num_bytes: int, device: torch.device) -> bool:
    """Whether so much memory can be had; for a few megabytes nobody is asked."""
    return num_bytes <= SMALL or num_bytes <= available_bytes(device)


FEWER = (
    "Maximise sites (maximise=[...]) rather than integrate them, or pass curvature=diagonal: one number a coordinate."
)


def require_memory(num_bytes: int, what: str, device: torch.device, remedy: str = FEWER) -> None:
    """Refuse before allocating.

    :param remedy: what the reader can do about it, a sentence.
    :raises TooLarge: when ``num_bytes`` exceeds the free memory of ``device``.
    """
    if not has_room(num_bytes, device):
        free = available_bytes(device)
        raise TooLarge(f"{what} needs {num_bytes:,} bytes; {free:,} are free on {device}. {remedy}")


def place_in_triangle(size: int, offset: int = 0) -> Tensor:
    """Position of each entry of a symmetric matrix in its upper triangle from diagonal ``offset`` on."""
    row, column = torch.triu_indices(size, size, offset)
    table = torch.zeros(size, size, dtype=torch.long)
    table[row, column] = torch.arange(len(row))
    return torch.maximum(table, table.T)
