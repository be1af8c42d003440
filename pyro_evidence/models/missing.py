"""Models whose data have gaps: nan means not observed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_evidence.background import WithBackground
from pyro_evidence.errors import BadInput
from pyro_evidence.failed_run import tensors
from pyro_evidence.gaps import WithGaps
from pyro_evidence.program import Model


class Missing(str, Enum):
    """What nan among the responses means."""

    REFUSE = "refuse"
    MARGINALISE = "marginalise"


class _Gaps(poutine.messenger.Messenger):
    """Observed values that are nan are integrated out; others stay as they are."""

    def _pyro_sample(self, msg: Any) -> None:
        value = msg["value"]
        if not (msg["is_observed"] and isinstance(value, Tensor) and value.is_floating_point()):
            return
        seen = ~value.isnan()
        if bool(seen.all()):
            return
        _check_columns(msg["name"], seen)
        msg["fn"], msg["value"] = _gappy(msg["fn"], seen), torch.where(seen, value, 0.0)


def _gappy(fn: Any, seen: Tensor) -> Any:
    if isinstance(fn, WithBackground):  # which knows what gaps in its base mean
        return WithBackground(WithGaps(fn.base_dist, seen), fn.background)
    return WithGaps(fn, seen)


def _check_columns(name: str, seen: Tensor) -> None:
    empty = (~seen.reshape(len(seen), -1).any(0)).nonzero().flatten().tolist()
    if empty:
        raise BadInput(f"site '{name}' has no value at all in columns {empty}; expected one at least. Drop them.")


@dataclass(frozen=True, eq=False)
class Marginalised:
    """The Pyro model that :func:`marginalised` returns."""

    model: Model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with the gaps of its data integrated out."""
        with _Gaps():
            return self.model(*args, **kwargs)


def marginalised(model: Model) -> Marginalised:
    """The same model for data with gaps: elements that are nan are integrated out, which is right if missing at random.

    An ordinary Pyro model again, for any engine and for NUTS.  Gaps are possible in observed sites of independent
    elements or of ``MultivariateNormal``, of low rank too, or ``MixtureSameFamily`` of these.

    :raises BadInput: when run on data with a column that has no value at all.
    """
    return Marginalised(model)


def parsed(value: Missing | str) -> Missing:
    """The member, also of its value.

    :raises BadInput: for anything else.
    """
    try:
        return Missing(value)
    except ValueError:
        raise BadInput(f"missing={value!r}; expected one of {[m.value for m in Missing]}.") from None


@contextmanager
def gaps_explained(missing: Missing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Tell the way out with an error about data that hold nan while these are refused.

    :raises BadInput: that error, with a sentence more.
    """
    try:
        yield
    except BadInput as error:
        gaps = any(x.is_floating_point() and bool(x.isnan().any()) for _, x in tensors(args, kwargs))
        if gaps and missing is Missing.REFUSE:
            raise BadInput(f"{error} If nan means not observed: EvidenceEM(..., missing='marginalise').") from error
        raise
