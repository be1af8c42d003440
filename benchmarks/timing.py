"""Processor time of a job, which other work on the machine stretches little; the param store is empty before each."""

from collections.abc import Callable
from time import process_time
from typing import TypeVar

import pyro

Result = TypeVar("Result")


def timed(job: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds of one run, and what it returned."""
    pyro.clear_param_store()
    start = process_time()
    found = job()
    return process_time() - start, found


def seconds(job: Callable[[], object]) -> float:
    """Of one run."""
    return timed(job)[0]


def least(job: Callable[[], object], num_repeats: int = 3) -> float:
    """Fewest seconds of a few runs, after one to warm up unless there is to be one run only."""
    if num_repeats > 1:
        job()
    return min(seconds(job) for _ in range(num_repeats))
