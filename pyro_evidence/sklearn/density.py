"""Mixtures as scikit-learn estimators."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassNamePrefixFeaturesOutMixin, DensityMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.infer.class_conditional import class_conditional
from pyro_evidence.infer.evidence_em import EvidenceEM
from pyro_evidence.models import mppca as planes
from pyro_evidence.models.mixture import DiagonalNoise, gaussian_mixture
from pyro_evidence.settings import Start
from pyro_evidence.sklearn.base import QUIET, Array, Classifier, Estimator, array, tensor


class _Density(DensityMixin, Estimator):
    """A density of rows.

    :ivar n_components_: components that the evidence has kept.
    :ivar weights_: of these, ``(n_components_,)``.
    :ivar means_: ``(n_components_, D)``.
    :ivar covariances_: ``(n_components_, D, D)``, for every kind of noise.
    """

    _engine: Any  # for rows of so many columns
    _components: Any  # weights, means, covariances, numbers that are free; of pruned components too

    def fit(self, X: Array, y: Array = None) -> "_Density":
        """Fit to rows ``X`` ``(N, D)``; ``y`` is not looked at."""
        X = self._checked(X, ensure_min_samples=2)
        posterior: Any = self._engine(X.shape[1]).run(tensor(X))
        self.posterior_, kept, self.n_components_ = posterior, posterior.active, int(posterior.num_components)
        self.weights_, self.means_, self.covariances_, free = (array(part[kept]) for part in self._components)
        self._num_free = int(free.sum()) + self.n_components_ - 1
        return self

    def bic(self, X: Array) -> float:
        """Schwarz's criterion on rows, as scikit-learn's mixtures have it: the lower the better, twice nats.

        ``-2 log p(X) + p log N``; minus twice ``log_evidence_`` is what it approximates.
        """
        log_prob = self.score_samples(X)
        return float(-2.0 * log_prob.sum() + self._num_free * np.log(len(log_prob)))

    def aic(self, X: Array) -> float:
        """Akaike's criterion on rows, ``-2 log p(X) + 2 p``: the lower the better, twice nats."""
        return float(-2.0 * self.score_samples(X).sum() + 2.0 * self._num_free)

    def score_samples(self, X: Array) -> Any:
        """Log density of each row, nats, shape ``(N,)``."""
        new = self._new(X)
        return array(self.posterior_.log_prob(new))

    def score(self, X: Array, y: Array = None) -> float:
        """Mean log density of the rows, nats per row."""
        return float(np.mean(self.score_samples(X)))

    def predict_proba(self, X: Array) -> Any:
        """Probability of each living component for each row, shape ``(N, n_components_)``."""
        new = self._new(X)
        resp = self.posterior_.responsibilities(new)
        return array(resp[:, self.posterior_.active])

    def predict(self, X: Array) -> Any:
        """The likeliest component of each row, shape ``(N,)``."""
        return self.predict_proba(X).argmax(-1)

    def sample(self, n_samples: int = 1, random_state: int | None = None) -> Any:
        """Rows drawn from the density, shape ``(n_samples, D)``."""
        check_is_fitted(self)
        return array(self.posterior_.sample(n_samples, seed=random_state)).reshape(n_samples, -1)


@dataclass(eq=False, repr=False)
class _GaussianMixture(Estimator):
    """The settings of a Gaussian mixture."""

    n_components: int = 10
    _: KW_ONLY
    noise: Any = None
    n_init: int | None = None
    random_state: int | None = None

    def _engine(self, num_columns: int) -> EvidenceEM:
        model = gaussian_mixture(self.n_components, noise=self.noise or DiagonalNoise())
        return EvidenceEM(model, start=Start(restarts=self.n_init, seed=self.random_state), stop=QUIET)


class EvidenceMixture(_GaussianMixture, _Density):
    """A Gaussian mixture that leaves out the components the data do not need.  See :class:`pyro_evidence.EvidenceEM`.

    :param n_components: to begin with; where all are needed, splits are tried.
    :param noise: the model's noise, such as ``FullNoise()``; None is ``DiagonalNoise()``.
    :param n_init: starts, run as one batch; None leaves that to the engine.
    :param random_state: seed of the starts; None: another each time.

    >>> import numpy as np
    >>> X = np.concatenate([np.random.default_rng(0).normal(m, 0.5, (50, 2)) for m in (-3.0, 3.0)])
    >>> found = EvidenceMixture(4, random_state=0).fit(X)
    >>> found.n_components_, found.means_.round().tolist()
    (2, [[-3.0, -3.0], [3.0, 3.0]])
    """

    @property
    def _components(self) -> tuple[Tensor, ...]:
        found, values = self.posterior_.density(), self.posterior_.hyperparameters
        D = found.loc.shape[-1]
        of_noise = values["beta"][0].numel() + (D * (D - 1) // 2 if "correlation_tril" in values else 0)
        mixing = found.log_mixing[0].exp()
        return mixing, found.loc[0], (found.tril @ found.tril.mT)[0], torch.full_like(mixing, D + of_noise)


@dataclass(eq=False, repr=False)
class MPPCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, _Density):
    """A mixture of probabilistic PCA: planes that the data lie near, and their dimensions.

    :param n_components: planes to begin with; where all are needed, splits are tried.
    :param n_latents: the most dimensions of a plane; None is two, or one for two columns.
    :param n_init: starts, run as one batch; None leaves that to the engine.
    :param random_state: seed of the starts; None: another each time.

    >>> import numpy as np
    >>> from pyro_evidence.sklearn import MPPCA
    >>> X = np.random.default_rng(0).normal(size=(60, 4)) + np.repeat([0.0, 6.0], 30)[:, None]
    >>> MPPCA(2, 1, random_state=0).fit(X).score_samples(X).shape
    (60,)
    """

    n_components: int = 5
    n_latents: int | None = None
    _: KW_ONLY
    n_init: int | None = None
    random_state: int | None = None

    def _engine(self, num_columns: int) -> EvidenceEM:
        latents = max(1, min(2, num_columns - 1)) if self.n_latents is None else self.n_latents
        if num_columns <= latents:
            raise BadInput(f"n_latents={latents}, X has {num_columns} feature(s); expected fewer latents than columns.")
        model = planes.mppca(self.n_components, latents, alpha=planes.PerColumn())
        return EvidenceEM(model, start=Start(restarts=self.n_init, seed=self.random_state), stop=QUIET)

    @property
    def _components(self) -> tuple[Tensor, ...]:
        W, values = self.posterior_.mode["W"], self.posterior_.hyperparameters
        D, Q = W.shape[1], self.posterior_.num_latents
        noise = values["beta"].reshape(len(W), -1).expand(-1, D).reciprocal().diag_embed()
        free = D + D * Q - Q * (Q - 1) / 2 + values["beta"][0].numel()  # rotations of the latents change nothing
        return values["mixing"], values["mu"], W @ W.mT + noise, free

    def transform(self, X: Array) -> Any:
        """For each plane its probability and, times that, the coordinates in it, shape ``(N, K (1 + Q))``."""
        found = self.posterior_.transform(self._new(X))
        weighted = found.responsibilities.unsqueeze(-1) * found.mean
        return array(torch.cat([found.responsibilities, weighted.flatten(1)], -1))

    @property
    def _n_features_out(self) -> int:
        components, _, latents = self.posterior_.mode["W"].shape
        return int(components) * (1 + int(latents))

    def reconstruct(self, X: Array) -> Any:
        """The rows as their coordinates have them, shape ``(N, D)``."""
        new = self._new(X)
        return array(self.posterior_.reconstruct(new))


class ClassConditionalMixture(_GaussianMixture, Classifier):
    """One mixture for each class; classes by Bayes' rule.

    :param n_components: of each class, to begin with; where all are needed, splits are tried.
    :param noise: the model's noise; None is ``DiagonalNoise()``.
    :param n_init: starts, run as one batch; None leaves that to the engine.
    :param random_state: seed of the starts; None: another each time.

    >>> import numpy as np
    >>> from pyro_evidence.sklearn import ClassConditionalMixture
    >>> X = np.random.default_rng(0).normal(size=(60, 2)) + np.repeat([0.0, 6.0], 30)[:, None]
    >>> y = np.repeat([0, 1], 30)
    >>> ClassConditionalMixture(2, random_state=0).fit(X, y).score(X, y)
    1.0
    """

    def _fitted(self, X: Tensor, t: Tensor, weight: Tensor | None) -> Any:
        return class_conditional(self._engine(X.shape[1]), X, t)

    @property
    def log_evidence_(self) -> float:
        """Log evidence of the classes' densities, nats, total."""
        return float(sum(p.log_evidence for p in self.posterior_.posteriors))
