"""Relevance vector and eigenvector machines as scikit-learn estimators."""

import math
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.utils.multiclass import type_of_target
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.iterate import MANY_STEPS, Stop
from pyro_evidence.infer.revm import REVM, Ridge, isotropic_evidence
from pyro_evidence.infer.rvm import RVM, VRVM
from pyro_evidence.models.basis import Basis, GaussianRBF, Learned
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.regression import regression
from pyro_evidence.program.log_joint import Model
from pyro_evidence.settings import real_number
from pyro_evidence.sklearn.base import (
    Array,
    Classifier,
    Estimator,
    Regressor,
    Weighing,
    as_counted,
    from_torch,
)

RVM_STOP = Stop(num_steps=MANY_STEPS, throw=False, progress=False)


def kernel_basis(X: Tensor, gamma: float | str = "scale", centers: Array = None, weight: Tensor | None = None) -> Basis:
    """Gaussian bumps ``exp(-gamma |x - c|^2)`` and a bias, made of the rows of one fit.

    :param gamma: ``"scale"``, one over number of columns and variance, as in support vector machines; or a number.
    :param centers: ``(C, D)``; a number of them, found by k-means; None for every row.
    :raises BadInput: for a width that is no positive number, and centres that do not fit.
    """
    if gamma == "scale":
        variance = _variance(X, weight)
        gamma = 1.0 / (X.shape[1] * (variance if variance > 0.0 else 1.0))  # constant inputs
    rate = real_number(gamma)
    if not 0.0 < rate < math.inf:
        raise BadInput(f"gamma={gamma!r}; expected 'scale' or a positive number.")
    places = X.clone()
    if isinstance(centers, int | np.integer):
        if not 1 <= centers <= len(X):
            raise BadInput(f"centers={centers} and {len(X)} rows; expected a number from 1 to that of the rows.")
        found = KMeans(centers, n_init=1, random_state=0).fit(X.numpy(), sample_weight=weight)
        places = torch.as_tensor(found.cluster_centers_).to(X)
    elif centers is not None:
        places = torch.as_tensor(centers).to(X)
        if places.dim() != 2 or places.shape[1] != X.shape[1]:
            raise BadInput(f"centers of shape {tuple(places.shape)}; expected (C, {X.shape[1]}), or a number of them.")
    return GaussianRBF(places, scale=(0.5 / rate) ** 0.5)


def _variance(values: Tensor, weight: Tensor | None) -> float:
    """Variance of all elements, rows counted by their weight."""
    of_each = None if weight is None else weight.repeat_interleave(values[0].numel())
    return float(torch.cov(values.flatten(), correction=0, aweights=of_each))


@dataclass(eq=False, repr=False)
class _OnBasis(Estimator):
    """The settings of the relevance engines, and which of them it is."""

    _engine: ClassVar[Any]  # of a model

    basis: Basis | None = None
    _: KW_ONLY
    gamma: float | str = "scale"
    centers: Array = None

    def _basis(self, X: Tensor, weight: Tensor | None) -> Basis:
        """The given basis, or one made of these rows: a search over widths sees no others."""
        return kernel_basis(X, self.gamma, self.centers, weight) if self.basis is None else self.basis


class _SparseClassifier(_OnBasis, Classifier):
    """Base of relevance classifiers."""

    def _fitted(self, X: Tensor, t: Tensor, weight: Tensor | None) -> Any:
        model = classifier(self._basis(X, weight), num_classes=len(self.classes_))
        return self._engine(as_counted(model, weight)).run(X, t)


class _SparseRegressor(_OnBasis, Regressor):
    """Base of relevance regressors."""

    def _fitted(self, X: Tensor, t: Tensor, weight: Tensor | None) -> Any:
        variance = _variance(t, weight)
        model = regression(self._basis(X, weight), beta=Learned(1.0 / variance if variance > 0.0 else 1.0))
        return self._engine(as_counted(model, weight)).run(X, t)


class RVMClassifier(Weighing, _SparseClassifier):
    """A relevance vector machine.  See :class:`pyro_evidence.RVM`.

    :param basis: ``X`` to columns, such as ``GaussianRBF(centres, scale)``; None for Gaussian bumps of the next two.
    :param gamma: of the bumps ``exp(-gamma |x - c|^2)``: a number, or ``"scale"``, as in support vector machines.
    :param centers: of the bumps, ``(C, D)``; how many of them, found by k-means; None for one on every row.

    >>> from sklearn.datasets import make_moons
    >>> X, y = make_moons(60, noise=0.1, random_state=0)
    >>> RVMClassifier().fit(X, y).score(X, y) > 0.9
    True
    """

    _engine = staticmethod(partial(RVM, stop=RVM_STOP))


class RVMRegressor(Weighing, _SparseRegressor):
    """A relevance vector machine with Gaussian noise, whose precision is learned.  See :class:`pyro_evidence.RVM`.

    :param basis: as for :class:`RVMClassifier`, and so ``gamma`` and ``centers``.

    >>> import numpy as np
    >>> from pyro_evidence.sklearn import RVMRegressor
    >>> X = np.linspace(-1.0, 1.0, 24)[:, None]
    >>> y = 2.0 * X[:, 0] + 0.3 * np.cos(40.0 * X[:, 0])
    >>> RVMRegressor().fit(X, y).predict(X).shape
    (24,)
    """

    _engine = staticmethod(partial(RVM, noise="beta", stop=RVM_STOP))


class VRVMClassifier(_SparseClassifier):
    """A variational relevance vector machine, for two classes.  See :class:`pyro_evidence.VRVM`.

    For more classes wrap it: ``sklearn.multiclass.OneVsRestClassifier(VRVMClassifier())``.

    :param basis: as for :class:`RVMClassifier`, and so ``gamma`` and ``centers``.

    >>> import numpy as np
    >>> from pyro_evidence.sklearn import VRVMClassifier
    >>> X = np.linspace(-1.0, 1.0, 24)[:, None]
    >>> y = (X[:, 0] + np.cos(40.0 * X[:, 0]) > 0.0).astype(int)
    >>> VRVMClassifier().fit(X, y).predict_proba(X).shape
    (24, 2)
    """

    def fit(self, X: Array, y: Array) -> "VRVMClassifier":
        """Fit to rows ``X`` ``(N, D)`` and their labels ``y`` ``(N,)``, two different ones.

        :raises BadInput: for more than two.
        """
        if type_of_target(from_torch("y", y)) == "multiclass":
            raise BadInput(
                "Only binary classification is supported. The type of the target is multiclass; expected two labels. "
                "Use OneVsRestClassifier(VRVMClassifier()), or RVMClassifier."
            )
        super().fit(X, y)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def _more_tags(self) -> dict[str, bool]:
        """Tags for scikit-learn before 1.6, in place of ``__sklearn_tags__``."""
        return {"binary_only": True}

    _engine = staticmethod(partial(VRVM, stop=RVM_STOP))


@dataclass(eq=False, repr=False)
class REVMClassifier(_SparseClassifier):
    """A relevance eigenvector machine.  See :class:`pyro_evidence.REVM`.

    :param basis: as for :class:`RVMClassifier`, and so ``gamma`` and ``centers``.
    :param ridge: of the engine; None chooses it by the evidence.  Under the engine's own 1e-2, classes that are far
        apart leave no curvature, and every axis is pruned.

    >>> import numpy as np
    >>> from pyro_evidence.sklearn import REVMClassifier
    >>> X = np.linspace(-1.0, 1.0, 24)[:, None]
    >>> y = (X[:, 0] + np.cos(40.0 * X[:, 0]) > 0.0).astype(int)
    >>> REVMClassifier().fit(X, y).predict_proba(X).shape
    (24, 2)
    """

    _: KW_ONLY
    ridge: float | Ridge | None = None

    def _engine(self, model: Model) -> REVM:
        return REVM(model, ridge=isotropic_evidence if self.ridge is None else self.ridge)


class REVMRegressor(_SparseRegressor):
    """A relevance eigenvector machine with Gaussian noise, held at the variance of the targets.

    See :class:`pyro_evidence.REVM`.

    :param basis: as for :class:`RVMClassifier`, and so ``gamma`` and ``centers``.

    >>> import numpy as np
    >>> from pyro_evidence.sklearn import REVMRegressor
    >>> X = np.linspace(-1.0, 1.0, 24)[:, None]
    >>> y = 2.0 * X[:, 0] + 0.3 * np.cos(40.0 * X[:, 0])
    >>> REVMRegressor().fit(X, y).predict(X).shape
    (24,)
    """

    _engine = REVM
