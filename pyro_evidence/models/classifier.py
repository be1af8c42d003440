r"""Logistic and softmax regression on a basis.

.. math:: w \sim N(0, \mathrm{diag}(\alpha)^{-1}), \qquad t_n \sim p(t \mid \text{logits} = \Phi_n w)

Bishop (2006), sec. 4.3 and 4.5; MacKay (1992), "The evidence framework applied to classification networks".
"""

from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence.models.basis import Basis, TensorValue, class_predictor, design_matrix, linear_predictor
from pyro_evidence.models.regression import LEARNED, Precision, WeightPrior, observed, weight_prior
from pyro_evidence.settings import check_count


@dataclass(frozen=True, eq=False)
class LogisticRegression(TensorValue):
    """The Pyro model that :func:`classifier` returns for two classes.

    Sites: ``w``, shape ``(M,)``, and ``t``, shape ``(N,)``, Bernoulli, in the plate ``data``.  Params: those
    of ``alpha`` and ``alpha_bias`` that are learned.
    """

    basis: Basis
    prior: WeightPrior

    def __call__(self, X: Tensor, t: Tensor | None = None) -> Tensor:
        """Labels 0 or 1 in the dtype of ``X``, shape ``(N,)``: ``t`` where given, drawn otherwise.

        :param X: inputs, shape ``(N, D)``.
        """
        Phi = design_matrix(self.basis, X)
        alpha = self.prior.precision(Phi)
        w = pyro.sample("w", dist.Normal(loc=torch.zeros_like(alpha), scale=alpha.rsqrt()).to_event(1))
        likelihood = dist.Bernoulli(logits=linear_predictor(Phi, w))
        labels = observed(t, Phi)
        with pyro.plate("data", Phi.shape[-2]):
            return pyro.sample("t", likelihood, obs=None if labels is None else labels.to(Phi.dtype))


@dataclass(frozen=True, eq=False)
class SoftmaxRegression(TensorValue):
    """The Pyro model that :func:`classifier` returns for more than two classes.

    Sites: ``w``, shape ``(C, M)``, and ``t``, shape ``(N,)``, Categorical, in the plate ``data``.  Params:
    those of ``alpha`` and ``alpha_bias`` that are learned; the classes share them.  All ``C`` rows of ``w``
    are free: adding one vector to each changes no probability, so only the prior holds that direction.
    """

    basis: Basis
    prior: WeightPrior
    num_classes: int

    def __call__(self, X: Tensor, t: Tensor | None = None) -> Tensor:
        """Labels 0 to C - 1, shape ``(N,)``: ``t`` where given, drawn otherwise.

        :param X: inputs, shape ``(N, D)``.
        """
        Phi = design_matrix(self.basis, X)
        alpha = self.prior.precision(Phi)
        prior = dist.Normal(loc=torch.zeros_like(alpha), scale=alpha.rsqrt())
        w = pyro.sample("w", prior.expand([self.num_classes, len(alpha)]).to_event(2))
        likelihood = dist.Categorical(logits=class_predictor(Phi, w))
        with pyro.plate("data", Phi.shape[-2]):
            return pyro.sample("t", likelihood, obs=observed(t, Phi))


def classifier(
    basis: Basis,
    *,
    num_classes: int = 2,
    alpha: Precision = LEARNED,
    alpha_bias: Precision | None = LEARNED,
    groups: Tensor | None = None,
) -> LogisticRegression | SoftmaxRegression:
    """Bayesian logistic or softmax regression on ``basis``, an ordinary Pyro model ``model(X, t=None)``.

    Every precision is learned (a ``pyro.param`` under its name) unless the caller passes its value.

    :param basis: ``X`` to ``Phi``, such as :class:`~pyro_evidence.models.basis.Linear`.
    :param num_classes: labels are the whole numbers from 0 to ``num_classes - 1``.
    :param alpha: prior precision of the weights: one, one per weight, or one per group.
    :param alpha_bias: prior precision of the bias when the basis has one.  None: the bias is a weight like
        the others and is counted in ``groups``.
    :param groups: group of each weight (automatic relevance determination), shape ``(M,)``; groups share a
        precision.  ``torch.arange(M)`` gives each weight its own.
    :raises BadInput: on settings that do not fit each other.
    """
    num_classes = check_count("num_classes", num_classes, 2, "It counts the different labels.")
    prior = weight_prior(basis, alpha, alpha_bias, groups)
    return LogisticRegression(basis, prior) if num_classes == 2 else SoftmaxRegression(basis, prior, num_classes)
