"""Base of all estimators: arrays in, an engine's posterior kept, arrays out."""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pyro_evidence.data.arrays import require_dense
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.iterate import Stop
from pyro_evidence.models.wrappers import weighted
from pyro_evidence.program.log_joint import Model

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted
except ImportError as error:
    raise ImportError("estimators need scikit-learn; pip install 'pyro-evidence[sklearn]'.") from error

QUIET = Stop(throw=False, progress=False)  # a fit that runs out of steps warns, as elsewhere in scikit-learn
Array = Any  # an array, a list of rows or a data frame


def tensor(values: Array) -> Tensor:
    """A float64 tensor of the values, its memory its own.

    :raises BadInput: for an array whose elements are no numbers.
    """
    try:
        return torch.from_numpy(np.array(values, dtype=np.float64, order="C"))
    except (ValueError, TypeError) as error:
        raise BadInput(f"an array of {np.asarray(values).dtype} holds no numbers ({error}); expected some.") from error


def counted(X: Any, y: Any, sample_weight: Array) -> tuple[Any, Any, Tensor | None]:
    """Rows that count at all, and how often; None where all count once.

    :raises ValueError: for weights that are no numbers of at least 0, one a row.
    """
    if sample_weight is None:
        return X, y, None
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64)
    if bool((weight < 0.0).any()) or not weight.sum() > 0.0:
        raise BadInput("sample_weight has numbers below 0, or is 0 for every row; expected weights >= 0, not all 0.")
    there = weight > 0.0
    y = y[there] if y is not None else None
    return X[there], y, None if bool((weight[there] == 1.0).all()) else tensor(weight[there])


def as_counted(model: Model, weight: Tensor | None) -> Model:
    """The model with its data weighted, or as it is."""
    return model if weight is None else weighted(model, weight)


def from_torch(name: str, values: Array) -> Array:
    """A NumPy array of a tensor's numbers; anything else as it is."""
    if not isinstance(values, Tensor):
        return values
    require_dense(name, values)
    return (values.double() if values.is_floating_point() else values).numpy(force=True)


def array(values: Tensor) -> Any:
    """A NumPy array of the values."""
    return values.detach().cpu().double().numpy()


class Estimator(BaseEstimator):
    """An engine on a model.

    :ivar posterior_: what the engine returned, with all its members.
    :ivar log_evidence_: its log evidence, nats.
    """

    posterior_: Any

    @property
    def log_evidence_(self) -> float:
        """Log evidence of the fit, nats, total."""
        check_is_fitted(self)
        return float(self.posterior_.log_evidence)

    def _checked(self, X: Array, *y: Array, **settings: Any) -> Any:
        """Validated arrays of numbers; names and number of columns are kept at the fit and compared afterwards.

        By scikit-learn's own validation, a function since 1.6 and a method of the estimator before.

        :raises BadInput: for tensors without numbers, sparse ones say.
        """
        X, y = from_torch("X", X), tuple(from_torch("y", each) for each in y)
        try:
            from sklearn.utils.validation import validate_data
        except ImportError:
            return self._validate_data(X, *y, dtype=np.float64, **settings)
        return validate_data(self, X, *y, dtype=np.float64, **settings)

    def _new(self, X: Array) -> Tensor:
        """New rows, like those of the fit."""
        check_is_fitted(self)
        return tensor(self._checked(X, reset=False))


class Supervised(Estimator):
    """An estimator of what belongs to each row."""

    _fitted: Any  # rows, what belongs to them and their weights or None, to a posterior
    _targets: Any  # what belongs to the rows as a tensor, from an array
    _validation: ClassVar[dict[str, Any]] = {}

    def fit(self, X: Array, y: Array) -> "Supervised":
        """Fit to rows ``X`` ``(N, D)`` and ``y`` ``(N,)``: targets, or labels, which are numbers or words."""
        return self._fit(X, y)

    def _fit(self, X: Array, y: Array, sample_weight: Array = None) -> "Supervised":
        X, y = self._checked(X, y, **self._validation)
        X, y, weight = counted(X, y, sample_weight)
        self.posterior_ = self._fitted(tensor(X), self._targets(y), weight)
        return self


class Weighing(Supervised):
    """One whose engine takes weights of rows."""

    def fit(self, X: Array, y: Array, sample_weight: Array = None) -> "Weighing":
        """Fit to rows ``X`` ``(N, D)`` and ``y`` ``(N,)``: targets, or labels, which are numbers or words.

        :param sample_weight: how often each row counts, ``(N,)``; whole numbers are repeated rows.
        """
        self._fit(X, y, sample_weight)
        return self


class Classifier(ClassifierMixin, Supervised):
    """Class probabilities of an engine's posterior."""

    classes_: Any

    def _targets(self, y: Any) -> Tensor:
        """Numbers of the rows' classes."""
        check_classification_targets(y)
        self.classes_, place = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise BadInput(f"y has one class only, {self.classes_[0]}; a classifier needs at least two classes.")
        return torch.as_tensor(place)

    def predict_proba(self, X: Array) -> Any:
        """Class probabilities averaged over the posterior, shape ``(N, C)``, in the order of ``classes_``."""
        new = self._new(X)
        found = self.posterior_.predict(new)
        return array(found if found.dim() == 2 else torch.stack([1.0 - found, found], -1))

    def predict_log_proba(self, X: Array) -> Any:
        """Logarithms of the class probabilities, shape ``(N, C)``."""
        return np.log(self.predict_proba(X))

    def predict(self, X: Array) -> Any:
        """The likeliest label of each row, shape ``(N,)``."""
        best = self.predict_proba(X).argmax(-1)
        return self.classes_[best]


class Regressor(RegressorMixin, Supervised):
    """Predictive means and standard deviations of an engine's posterior."""

    _targets = staticmethod(tensor)
    _validation: ClassVar[dict[str, Any]] = {"y_numeric": True}

    def predict(self, X: Array, return_std: bool = False) -> Any:
        """Predictive mean, shape ``(N,)``, and with ``return_std`` the standard deviation, noise included."""
        new = self._new(X)
        found = self.posterior_.predict(new, return_std=return_std)
        return tuple(array(x) for x in found) if return_std else array(found)
