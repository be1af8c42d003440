"""Models of data of which a known share belongs to nothing: outliers, spread evenly over a box."""

from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_evidence.background import WithBackground
from pyro_evidence.errors import BadInput
from pyro_evidence.gaps import WithGaps
from pyro_evidence.ops.basis import TensorValue
from pyro_evidence.ops.mixture_background import Background
from pyro_evidence.program import Model


class _Spread(poutine.messenger.Messenger):
    """Observed data get a background; draws stay as they are."""

    def __init__(self, share: float, low: Tensor | None, high: Tensor | None) -> None:
        super().__init__()
        self.share, self.low, self.high = share, low, high

    def _pyro_sample(self, msg: Any) -> None:
        value = msg["value"]
        if not msg["is_observed"] or not isinstance(value, Tensor) or not value.numel():
            return
        if not value.is_floating_point():
            raise BadInput(
                f"with_background: site '{msg['name']}' has data of {value.dtype}; expected floats. Write Y.double()."
            )
        low, high = self._box(msg["name"], *_rows(msg["fn"], value))
        msg["fn"] = WithBackground(msg["fn"], Background(torch.as_tensor(self.share).to(low), low, high))

    def _box(self, name: str, rows: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        if self.low is None or self.high is None:
            return torch.where(seen, rows, torch.inf).amin(0), torch.where(seen, rows, -torch.inf).amax(0)
        if self.low.shape != rows.shape[1:]:
            raise BadInput(
                f"with_background: low and high have shape {tuple(self.low.shape)}; expected {tuple(rows.shape[1:])}, "
                f"one number for each column of site '{name}'."
            )
        return self.low.to(rows), self.high.to(rows)


def _rows(fn: Any, value: Tensor) -> tuple[Tensor, Tensor]:
    """The data as vectors ``(N, m)``, and which of their elements were observed."""
    seen = fn.seen.expand(value.shape) if isinstance(fn, WithGaps) else ~value.isnan()
    shape = (-1, *fn.event_shape) if fn.event_shape else (-1, 1)
    return value.reshape(shape), seen.reshape(shape)


@dataclass(frozen=True, eq=False)
class Spread(TensorValue):
    """The Pyro model that :func:`with_background` returns."""

    model: Model
    share: float
    low: Tensor | None
    high: Tensor | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with the background beside its data."""
        with _Spread(self.share, self.low, self.high):
            return self.model(*args, **kwargs)


def with_background(
    model: Model, share: float = 0.05, *, low: Tensor | None = None, high: Tensor | None = None
) -> Spread:
    r"""The same model for data with outliers: a share of each observed site's data is uniform over a box.

    .. math:: p(y_n) = (1 - s)\, p_{\text{model}}(y_n) + s \prod_i 1 / (h_i - l_i)

    An ordinary Pyro model again, for any engine and for NUTS; ``EvidenceEM`` recognises a mixture beneath, whose
    ``mixing`` is then that among the kernels.  The share is held fixed; log evidences of the same data compare shares.
    Banfield and Raftery (1993) model noise so.  Data that are drawn, not observed, come without it.

    :param share: ``s``, expected share of the outliers, at least 0 and below 1.
    :param low: lower corner of the box, shape ``(m,)``, in the data's units; None for the least of each column of the
        data that the model is run on, whose log evidence then changes by ``-N log c`` with their unit.
    :param high: upper corner, given or not as ``low`` is.
    :raises BadInput: on a share or a box that cannot be meant; when run on data that are constant in a column, or that
        are no floats.
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 <= share < 1.0:
        raise BadInput(f"share={share!r}; expected a number of at least 0 and below 1.")
    if (low is None) != (high is None):
        raise BadInput("with_background: one of low and high is given; expected both, or none.")
    if low is not None and high is not None and (low.shape != high.shape or low.dim() != 1 or not _is_box(low, high)):
        raise BadInput(f"with_background: low={low!r}, high={high!r}; expected finite low < high, shape (m,) each.")
    return Spread(model, float(share), low, high)


def _is_box(low: Tensor, high: Tensor) -> bool:
    return bool((low < high).all() and low.isfinite().all() and high.isfinite().all())
