"""What kernels with whole covariance matrices would gain over spherical or diagonal ones, on rows held out."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.models.covariances import Covariance, Full
from pyro_evidence.prbf.densities import column_variance

FOLDS = 3
NOTABLE_GAIN = 10.0  # nats
ERRORS = 3.0  # standard errors that it must exceed as well


@dataclass(frozen=True)
class CovarianceGain:
    """How much likelier rows are by full covariances than by the network's own, each estimated without these rows.

    :ivar nats: over all rows, at the responsibilities as they are; the whole gain is larger.
    :ivar error: its standard error, nats.
    """

    nats: float
    error: float

    @property
    def notes(self) -> list[str]:
        """A sentence with the remedy where the gain is beyond chance."""
        if self.nats <= max(NOTABLE_GAIN, ERRORS * self.error):
            return []
        return [
            f"by rows held out, kernels with full covariances would be about {self.nats:.0f} nats likelier (standard "
            f"error {self.error:.0f}): fit prbf(..., kernels=Full()) and compare errors on rows of your own."
        ]


def covariance_gain(X: Tensor, resp: Tensor, kind: Covariance) -> CovarianceGain:
    r"""Log likelihood of every row under covariances estimated from the other folds, full less restricted.

    .. math:: \sum_{nj} r_{nj} \bigl[\log N(x_n | m_j, S_j) - \log N(x_n | m_j, S'_j)\bigr]

    with ``m_j`` and ``S_j`` the weighted mean and covariance without the fold of row n, and ``S'_j`` the closest one of
    the network's kind.

    :param X: inputs, shape ``(N, D)``.
    :param resp: responsibilities of the kernels, shape ``(N, M)``.
    """
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0)).to(X.device)
    fold, unit = order % FOLDS, kind.floor * column_variance(X)
    gains = torch.zeros_like(X[:, 0])
    for weight in resp.mT:
        for held in (fold == f for f in range(FOLDS)):
            gains[held] += weight[held] * _differences(X, torch.where(held, 0.0, weight), held, kind, unit)
    return CovarianceGain(float(gains.sum()), float(gains.std(correction=0)) * len(X) ** 0.5)


def _differences(X: Tensor, weight: Tensor, held: Tensor, kind: Covariance, unit: Tensor) -> Tensor:
    """``log N`` of the rows held out, full less restricted; 0 for a kernel that has none of the others."""
    mass = weight.sum()
    if float(mass) <= 0.0:
        return torch.zeros_like(weight[held])
    centred = X - weight @ X / mass
    S = (centred * weight.unsqueeze(-1)).mT @ centred / mass
    own = kind.matrix(kind.floored(kind.restricted(S), unit), X.shape[-1])
    return _log_normal(centred[held], Full().floored(S, unit)) - _log_normal(centred[held], own)


def _log_normal(v: Tensor, covariance: Tensor) -> Tensor:
    """Log density of rows ``(n, D)`` about zero, but for a constant."""
    tril = torch.linalg.cholesky(covariance)
    half = torch.linalg.solve_triangular(tril, v.mT, upper=False)
    return -0.5 * half.square().sum(0) - tril.diagonal().log().sum()
