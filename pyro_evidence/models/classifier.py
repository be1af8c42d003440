r"""Logistic and softmax regression on a basis.

.. math:: w \sim N(0, \mathrm{diag}(\alpha)^{-1}), \qquad t_n \sim p(t \mid \text{logits} = \Phi_n w)

Bishop (2006), sec. 4.3 and 4.5; MacKay (1992), "The evidence framework applied to classification networks".
"""

from torch import Tensor

from pyro_evidence.models.basis import Basis
from pyro_evidence.models.likelihoods import classes
from pyro_evidence.models.regression import LEARNED, LinearModel, Precision, weight_prior
from pyro_evidence.settings import check_count


def classifier(
    basis: Basis,
    *,
    num_classes: int = 2,
    alpha: Precision = LEARNED,
    alpha_bias: Precision | None = LEARNED,
    groups: Tensor | None = None,
) -> LinearModel:
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
    return LinearModel(basis, weight_prior(basis, alpha, alpha_bias, groups), classes(num_classes))
