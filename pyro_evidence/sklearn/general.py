"""Gaussian processes, networks, the probabilistic RBF network and any Pyro model as scikit-learn estimators."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.infer.overlap_em import STOP, OverlapEM
from pyro_evidence.models import prbf as rbf_network
from pyro_evidence.models.gp import gp_classifier, gp_regression
from pyro_evidence.models.kernels import RBF, Kernel
from pyro_evidence.models.likelihoods import Output, Regression, classes
from pyro_evidence.models.mlp import MLP
from pyro_evidence.program.log_joint import Model
from pyro_evidence.settings import Start
from pyro_evidence.sklearn.base import (
    QUIET,
    Classifier,
    Estimator,
    Regressor,
    Weighing,
    as_counted,
)

PRBF_STOP = replace(STOP, throw=False, progress=False)


@dataclass(eq=False, repr=False)
class _Process(Estimator):
    """The kernel of a Gaussian process."""

    kernel: Kernel | None = None


class LaplaceGPClassifier(_Process, Classifier):
    """A Gaussian process for labels, its kernel by the evidence.  See :func:`pyro_evidence.models.gp.gp_classifier`.

    :param kernel: a kernel of :mod:`pyro_evidence.models.kernels`; None is ``RBF()``, both settings learned.

    >>> import numpy as np
    >>> from pyro_evidence.sklearn import LaplaceGPClassifier
    >>> X = np.linspace(-1.0, 1.0, 24)[:, None]
    >>> y = (X[:, 0] + np.cos(40.0 * X[:, 0]) > 0.0).astype(int)
    >>> LaplaceGPClassifier().fit(X, y).predict_proba(X).shape
    (24, 2)
    """

    def _fitted(self, X: Tensor, t: Tensor, weight: Tensor | None) -> Any:
        model = gp_classifier(self.kernel or RBF(), num_classes=len(self.classes_))
        return LaplaceEvidence(model, stop=QUIET).run(X, t)


class LaplaceGPRegressor(_Process, Regressor):
    """A Gaussian process with Gaussian noise: exact.  See :func:`pyro_evidence.models.gp.gp_regression`.

    :param kernel: as for :class:`LaplaceGPClassifier`.

    >>> import numpy as np
    >>> from pyro_evidence.sklearn import LaplaceGPRegressor
    >>> X = np.linspace(-1.0, 1.0, 24)[:, None]
    >>> y = 2.0 * X[:, 0] + 0.3 * np.cos(40.0 * X[:, 0])
    >>> LaplaceGPRegressor().fit(X, y).predict(X).shape
    (24,)
    """

    def _fitted(self, X: Tensor, t: Tensor, weight: Tensor | None) -> Any:
        model = gp_regression(self.kernel or RBF())
        return LaplaceEvidence(model, stop=QUIET).run(X, t)


@dataclass(eq=False, repr=False)
class _Network(Estimator):
    """The settings of a network, and its fit."""

    hidden: int = 10
    _: KW_ONLY
    n_init: int | None = None
    random_state: int | None = None

    def _run(self, X: Tensor, t: Tensor, output: Output) -> Any:
        model = MLP(X.shape[1], self.hidden, output=output)
        start = Start(restarts=self.n_init, seed=self.random_state)
        return LaplaceEvidence(model, start=start, stop=QUIET).run(X, t)


class EvidenceMLPClassifier(_Network, Classifier):
    """A network whose weight precisions are chosen by the evidence.  See :class:`pyro_evidence.models.mlp.MLP`.

    :param hidden: units of the hidden layer.
    :param n_init: starts, the best of which is kept; None leaves that to the engine.
    :param random_state: seed of the starts; None: another each time.

    >>> import numpy as np
    >>> from pyro_evidence.sklearn import EvidenceMLPClassifier
    >>> X = np.linspace(-1.0, 1.0, 24)[:, None]
    >>> y = (np.abs(X[:, 0]) + 0.4 * np.cos(40.0 * X[:, 0]) > 0.5).astype(int)
    >>> EvidenceMLPClassifier(2, random_state=0).fit(X, y).predict_proba(X).shape
    (24, 2)
    """

    def _fitted(self, X: Tensor, t: Tensor, weight: Tensor | None) -> Any:
        return self._run(X, t, classes(len(self.classes_)))


class EvidenceMLPRegressor(_Network, Regressor):
    """A network for real targets.  See :class:`pyro_evidence.models.mlp.MLP`.

    :param hidden: units of the hidden layer.
    :param n_init: starts, the best of which is kept; None leaves that to the engine.
    :param random_state: seed of the starts; None: another each time.

    >>> import numpy as np
    >>> from pyro_evidence.sklearn import EvidenceMLPRegressor
    >>> X = np.linspace(-1.0, 1.0, 24)[:, None]
    >>> y = 2.0 * X[:, 0] + 0.3 * np.cos(40.0 * X[:, 0])
    >>> EvidenceMLPRegressor(2, random_state=0).fit(X, y).predict(X).shape
    (24,)
    """

    def _fitted(self, X: Tensor, t: Tensor, weight: Tensor | None) -> Any:
        return self._run(X, t, Regression())


@dataclass(eq=False, repr=False)
class PRBFClassifier(Classifier):
    """The probabilistic RBF network.  See :class:`pyro_evidence.OverlapEM`.

    :param n_kernels: kernels that the classes share.
    :param alpha: weight of the overlap, nats; 0 is plain EM.

    >>> import numpy as np
    >>> from pyro_evidence.sklearn import PRBFClassifier
    >>> X = np.linspace(-1.0, 1.0, 24)[:, None]
    >>> y = (X[:, 0] + np.cos(40.0 * X[:, 0]) > 0.0).astype(int)
    >>> PRBFClassifier(2).fit(X, y).predict_proba(X).shape
    (24, 2)
    """

    n_kernels: int = 8
    _: KW_ONLY
    alpha: float = 0.0

    def _fitted(self, X: Tensor, t: Tensor, weight: Tensor | None) -> Any:
        num = max(self.n_kernels, 1)
        return OverlapEM(rbf_network.prbf(num, len(self.classes_)), alpha=self.alpha, stop=PRBF_STOP).run(X, t)

    @property
    def log_evidence_(self) -> float:
        """There is none: the network's fit maximises a penalised likelihood."""
        raise AttributeError("OverlapEM has no evidence; compare by held-out probabilities.")


Engine = Callable[[Model], Any]


@dataclass(eq=False, repr=False)
class _AnyModel(Estimator):
    """A model and an engine for it."""

    _required_parameters: ClassVar[list[str]] = ["model"]  # asked by scikit-learn before 1.6

    model: Model
    _: KW_ONLY
    engine: Engine | None = None

    def _fitted(self, X: Tensor, t: Tensor, weight: Tensor | None) -> Any:
        engine = self.engine or partial(LaplaceEvidence, stop=QUIET)
        return engine(as_counted(self.model, weight)).run(X, t)


class PyroClassifier(_AnyModel, Weighing, Classifier):
    """Any Pyro model ``model(X, t)`` of labels from 0, any engine.

    :param model: a Pyro model of inputs ``(N, D)`` and labels ``(N,)``, observed as Bernoulli or Categorical.
    :param engine: model to an object with ``run``; None is ``LaplaceEvidence`` without a progress bar.

    >>> import numpy as np
    >>> from pyro_evidence.sklearn import PyroClassifier
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.classifier import classifier
    >>> X = np.linspace(-1.0, 1.0, 24)[:, None]
    >>> y = (X[:, 0] + np.cos(40.0 * X[:, 0]) > 0.0).astype(int)
    >>> PyroClassifier(classifier(Linear())).fit(X, y).predict_proba(X).shape
    (24, 2)
    """


class PyroRegressor(_AnyModel, Weighing, Regressor):
    """Any Pyro model ``model(X, t)`` of numbers, any engine.

    :param model: a Pyro model of inputs ``(N, D)`` and targets ``(N,)``.
    :param engine: as for :class:`PyroClassifier`.

    >>> import numpy as np
    >>> from pyro_evidence.sklearn import PyroRegressor
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> X = np.linspace(-1.0, 1.0, 24)[:, None]
    >>> y = 2.0 * X[:, 0] + 0.3 * np.cos(40.0 * X[:, 0])
    >>> PyroRegressor(regression(Linear())).fit(X, y).predict(X).shape
    (24,)
    """
