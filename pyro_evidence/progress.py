"""The line that says how far a fit is."""

from typing import Any

from tqdm.auto import tqdm


def bar_of(name: str, progress: bool, total: int | None = None) -> Any:
    """A progress bar on one line, after a second; it tells the time left where the number of steps is known.

    Silent without ``progress``, and where tqdm's own ``TQDM_DISABLE`` is set.
    """
    silent = {} if progress else {"disable": True}  # left out, the environment decides
    shape = {} if total else {"bar_format": "{desc}: step {n_fmt}, {elapsed}{postfix}"}
    return tqdm(total=total, desc=name, delay=1.0, leave=False, **silent, **shape)
