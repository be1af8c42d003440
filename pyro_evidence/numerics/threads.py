"""How many threads torch computes with: one for small operations, as many as the caller has set for large ones."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

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
