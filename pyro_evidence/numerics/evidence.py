"""Laplace's log evidence with the numbers that come with it."""

import math

from torch import Tensor


def log_evidence(log_joint: Tensor, log_det_A: Tensor, num_weights: Tensor | int) -> Tensor:
    r"""Laplace's approximation to the log evidence, in nats, constants included, shape ``(...)``.

    .. math:: \log p(D) \approx \log p(D, \hat w) + \tfrac M2 \log 2\pi - \tfrac12 \log |A|

    Exact when the joint density is Gaussian in ``w``.  MacKay (1992), eq. 2.4; Bishop (2006), eq. 4.137.

    :param log_joint: ``log p(D, w)`` at its mode, shape ``(...)``.
    :param log_det_A: log determinant of the posterior precision ``A``, shape ``(...)``.
    :param num_weights: number ``M`` of integrated coordinates, pruned ones not counted.
    """
    return log_joint + 0.5 * num_weights * math.log(2.0 * math.pi) - 0.5 * log_det_A


def well_determined(precision: Tensor, variance: Tensor) -> Tensor:
    r"""Well-determinedness of each coordinate, :math:`\gamma_i = 1 - \alpha_i \Sigma_{ii}`, 0 to 1, shape ``(..., M)``.

    Between 0 and 1 for a log-concave likelihood.  MacKay (1992), eq. 4.9; Bishop (2006), eq. 7.89.

    :param precision: prior precision of each coordinate.
    :param variance: posterior variance of each coordinate.
    """
    return 1.0 - precision * variance


def reestimated_log_precision(gradient: Tensor, quadratic: Tensor) -> Tensor:
    r"""Change of the log precision in one round of MacKay's fixed point, exact for any likelihood.

    With :math:`g = \tfrac12 (n - d - q)` the total derivative of the log evidence in :math:`\log\alpha`,
    :math:`q = \alpha \sum_i (w_i - m_i)^2` and :math:`d` the total derivative of :math:`\log|A|`, the round
    :math:`\alpha \leftarrow (n - d) / \sum_i (w_i - m_i)^2` moves :math:`\log\alpha` by :math:`\log(1 + 2g/q)`.
    For a Gaussian likelihood :math:`n - d = \gamma`: Bishop (2006), eq. 7.87 and, for a noise precision, 7.88.
    Otherwise :math:`n - d` has the mode's dependence on the precision in it, which MacKay's rule leaves out and
    without which the fixed point is not where the log evidence is stationary.

    :param gradient: ``g``, nats per unit of the log precision.
    :param quadratic: ``q``, the group's squared deviations in units of its precision.
    :return: same shape; ``-inf`` or nan where ``n - d`` is not positive.
    """
    return (2.0 * gradient / quadratic).log1p()
