"""Models around models: data with gaps (nan means not observed), with outliers spread over a box, and with weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_evidence.data.arrays import is_fake
from pyro_evidence.errors import BadInput
from pyro_evidence.models.basis import TensorValue
from pyro_evidence.program.checks import tensors
from pyro_evidence.program.distributions import Background, WithBackground, WithGaps
from pyro_evidence.program.log_joint import Model
from pyro_evidence.settings import BELOW_ONE, check_number


class _Observing(poutine.messenger.Messenger):
    """Every observed site that has data is changed by a function of its message; draws stay as they are."""

    def __init__(self, change: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.change = change

    def _pyro_sample(self, msg: Any) -> None:
        value = msg["value"]
        if msg["is_observed"] and isinstance(value, Tensor) and value.numel():
            self.change(msg, value)


class OtherLikelihood(TensorValue):
    """A model whose observed sites are changed on the way."""

    model: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model inside, its observed sites changed."""
        with _Observing(self._change):
            return self.model(*args, **kwargs)

    def _change(self, msg: Any, value: Tensor) -> None:
        """Change the message of an observed site."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Wrapper(OtherLikelihood):
    """A model around another, which ``EvidenceEM`` knows by a few of its rows where it so knows the one inside."""

    model: Any

    def with_components(self, num_components: int) -> Any:
        """The same about a model of another number of components; None where there is none."""
        inner = getattr(self.model, "with_components", lambda num: None)(num_components)
        return None if inner is None else replace(self, model=inner)

    def rows(self, *args: Any, **kwargs: Any) -> Any:
        """The rows of the model inside."""
        return self.model.rows(*args, **kwargs)

    def few(self, step: int, *args: Any, **kwargs: Any) -> Any:
        """Arguments with every ``step``-th row."""
        return self.model.few(step, *args, **kwargs)


@dataclass(frozen=True, eq=False)
class Marginalised(Wrapper):
    """The Pyro model that :func:`marginalised` returns."""

    def settled(self, rows: Any = None) -> "Marginalised":
        """The same around a model that has settled."""
        return Marginalised(self.model.settled(rows))

    def rows(self, *args: Any, **kwargs: Any) -> Any:
        """The rows of the model inside, with gaps where that allows them."""
        return self.model.rows(*args, gaps=True, **kwargs)

    def _change(self, msg: Any, value: Tensor) -> None:
        """Values that are nan are integrated out; others stay as they are."""
        seen = ~value.isnan()
        if bool(seen.all()):
            return
        if empty := (~seen.reshape(len(seen), -1).any(0)).nonzero().flatten().tolist():
            raise BadInput(f"site '{msg['name']}' has no value in columns {empty}; expected one at least. Drop them.")
        fn = msg["fn"]
        if isinstance(fn, WithBackground):  # which knows what gaps in its base mean
            msg["fn"] = WithBackground(WithGaps(fn.base_dist, seen), fn.background)
        else:
            msg["fn"] = WithGaps(fn, seen)
        msg["value"] = torch.where(seen, value, 0.0)


def marginalised(model: Model) -> Marginalised:
    """A model of data with gaps: elements that are nan are integrated out, which is right if missing at random.

    An ordinary Pyro model again, for any engine and for NUTS.  Gaps are possible in observed sites of independent
    elements or of ``MultivariateNormal``, of low rank too, or ``MixtureSameFamily`` of these.

    >>> import torch
    >>> from pyro_evidence import EvidenceEM
    >>> from pyro_evidence.models import marginalised
    >>> from pyro_evidence.models.mixture import gaussian_mixture
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> Y[::7, 1] = torch.nan
    >>> EvidenceEM(marginalised(gaussian_mixture(2))).run(Y).num_components
    2

    :raises BadInput: when run on data with a column that has no value at all.
    """
    return Marginalised(model)


def explain_gaps(error: BadInput, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell the way out with an error about data that hold nan while these are refused.

    :raises BadInput: that error, with a sentence more.
    """
    given = (x for _, x in tensors(args, kwargs) if x.layout is torch.strided)
    dense = (x for x in given if not (is_fake(x) or x.is_nested))
    gaps = any(x.is_floating_point() and bool(x.isnan().any()) for x in dense)
    if gaps and not isinstance(model, Marginalised):
        raise BadInput(f"{error} If nan means not observed: EvidenceEM(marginalised(model)).") from error


@dataclass(frozen=True, eq=False)
class UniformOutliers(Wrapper):
    """The Pyro model that :func:`with_background` returns."""

    share: float
    low: Tensor | None
    high: Tensor | None

    def _change(self, msg: Any, value: Tensor) -> None:
        """The background stands beside the data."""
        if not value.is_floating_point():
            raise BadInput(
                f"with_background: site '{msg['name']}' has data of {value.dtype}; expected floats. Write Y.double()."
            )
        fn = msg["fn"]
        seen = fn.seen.expand(value.shape) if isinstance(fn, WithGaps) else ~value.isnan()
        shape = (-1, *fn.event_shape) if fn.event_shape else (-1, 1)
        rows, seen = value.reshape(shape), seen.reshape(shape)
        if self.low is None or self.high is None:
            low, high = torch.where(seen, rows, torch.inf).amin(0), torch.where(seen, rows, -torch.inf).amax(0)
        elif self.low.shape == rows.shape[1:]:
            low, high = self.low.to(rows), self.high.to(rows)
        else:
            raise BadInput(
                f"with_background: low and high have shape {tuple(self.low.shape)}; expected {tuple(rows.shape[1:])}, "
                f"one number for each column of site '{msg['name']}'."
            )
        msg["fn"] = WithBackground(fn, Background(torch.as_tensor(self.share).to(low), low, high))

    def settled(self, rows: Any) -> "UniformOutliers":
        """The background around a model that has settled, its box as numbers.

        :raises BadInput: without a box where rows come in chunks: the least and the largest of all rows are no sums.
        """
        low, high = self.low, self.high
        if low is None:
            if not isinstance(rows.pieces, tuple):
                raise BadInput("with_background without a box takes it from all rows at once; pass low= and high=.")
            low, high = rows.example.Y.amin(0), rows.example.Y.amax(0)
        return UniformOutliers(self.model.settled(rows), self.share, low, high)


def with_background(
    model: Model, share: float = 0.05, *, low: Tensor | None = None, high: Tensor | None = None
) -> UniformOutliers:
    r"""A model of data with outliers: a share of each observed site's data is uniform over a box.

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
    share = check_number("share", share, "a number of at least 0 and below 1", 0.0, BELOW_ONE)
    if (low is None) != (high is None):
        raise BadInput("with_background: one of low and high is given; expected both, or none.")
    if low is not None and high is not None:
        shaped = low.shape == high.shape and low.dim() == 1
        if not (shaped and bool((low < high).all() and low.isfinite().all() and high.isfinite().all())):
            raise BadInput(f"with_background: low={low!r}, high={high!r}; expected finite low < high, shape (m,) each.")
    return UniformOutliers(model, share, low, high)


@dataclass(frozen=True, eq=False)
class Weighted(OtherLikelihood):
    """The Pyro model that :func:`weighted` returns."""

    model: Model
    weight: Tensor

    def _change(self, msg: Any, value: Tensor) -> None:
        """Data count as often as their weight says."""
        if msg["fn"].event_dim == value.dim() or value.shape[-1 - msg["fn"].event_dim] != len(self.weight):
            raise BadInput(
                f"weighted: site '{msg['name']}' has data of shape {tuple(value.shape)}, and there are "
                f"{len(self.weight)} weights; expected as many data, with a density each: a plate over rows."
            )
        msg["scale"] = msg["scale"] * self.weight


def weighted(model: Model, weight: Tensor) -> Weighted:
    r"""A model whose datum ``n`` counts ``weight[n]`` times: ``weight[n] log p(t_n)`` in place of ``log p(t_n)``.

    An ordinary Pyro model again, for any engine and for NUTS.  Whole numbers are repeated rows: evidence and posterior
    are those of data in which each row stands as often as its weight says.  Data that are drawn count once.

    :param weight: shape ``(N,)``, at least 0, not all 0.
    :raises BadInput: for other weights; when run on a site that does not have one density for each of ``N`` data.

    >>> import torch
    >>> from pyro_evidence import LaplaceEvidence
    >>> from pyro_evidence.models import weighted
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> X, t = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([0.1, 0.9, 2.2])
    >>> model = regression(Linear(), alpha=1.0, beta=4.0)
    >>> once = LaplaceEvidence(weighted(model, torch.tensor([1.0, 2.0, 1.0]))).run(X, t)
    >>> again = LaplaceEvidence(model).run(X[[0, 1, 1, 2]], t[[0, 1, 1, 2]])
    >>> bool(torch.isclose(once.log_evidence, again.log_evidence))
    True
    """
    check_weights(weight)
    return Weighted(model, weight)


def check_weights(weight: Any, num_data: int | None = None) -> None:
    """Refuse what cannot say how often each datum counts.

    :param num_data: None where that is not known yet.
    :raises BadInput: with the weights.
    """
    good = isinstance(weight, Tensor) and weight.dim() == 1 and bool((weight.isfinite() & (weight >= 0.0)).all())
    if not good or not float(weight.sum()) > 0.0 or num_data not in (None, len(weight)):
        num = "N" if num_data is None else num_data
        raise BadInput(f"weight={weight!r}; expected a tensor ({num},) of finite numbers of at least 0, not all 0.")
