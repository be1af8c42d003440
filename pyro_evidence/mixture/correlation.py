"""What correlations of the noise would add to a mixture that has none."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.mixture.expectation import Mixture
from pyro_evidence.mixture.recognise import MixtureStructure

NOTABLE_GAIN = 10.0  # nats beyond half the added parameters times log N


@dataclass(frozen=True)
class CorrelationGain:
    """A rise of the log likelihood, and what it costs.

    :ivar nats: that is gained at the responsibilities as they are; the whole rise is larger.
    :ivar num_parameters: that are added.
    :ivar num_data: from which they are estimated.
    """

    nats: float
    num_parameters: int
    num_data: int

    @property
    def notes(self) -> list[str]:
        """A sentence with the remedy where the gain is far beyond what as many parameters gain by chance."""
        if self.nats - 0.5 * self.num_parameters * math.log(self.num_data) <= NOTABLE_GAIN:
            return []
        return [
            f"correlated noise would gain at least {self.nats:.0f} nats by {self.num_parameters} more parameters "
            f"(chance alone gives {0.5 * self.num_parameters:.0f}): fit the model with noise=FullNoise() and compare "
            f"the log evidences."
        ]


def correlation_gain(structure: MixtureStructure, mixture: Mixture, resp: Tensor) -> CorrelationGain | None:
    r"""What one round of EM would gain by correlated noise; None where it has it, or where values are missing.

    .. math:: -\tfrac12 \sum_k N_k \log |R_k|

    with the correlations ``R_k`` of a component's residuals, each datum by how likely it is of it.

    :param mixture: weights and hyperparameters, one row, in the model's units.
    :param resp: responsibilities of the training data, shape ``(N, K)``.
    """
    Y, G, active = structure.Y, structure.G, mixture.active[0]
    if mixture.has_full_noise or len(resp) != len(Y) or not bool(Y.isfinite().all()):
        return None
    means = [w[:, 0] if G is None else G @ w.mT for w in mixture.w[0, active]]
    weights = resp.mT[active] * structure.weight
    nats = sum(gain(Y - mean, weight) for mean, weight in zip(means, weights, strict=True))
    return CorrelationGain(nats, len(means) * Y.shape[1] * (Y.shape[1] - 1) // 2, len(Y))


def gain(residuals: Tensor, weight: Tensor) -> float:
    """Minus half the weight times the log determinant of the correlations of residuals ``(N, m)``, nats."""
    S = (residuals * weight.unsqueeze(-1)).mT @ residuals
    scale = S.diagonal().sqrt()
    return float(-0.5 * weight.sum() * torch.linalg.slogdet(S / torch.outer(scale, scale)).logabsdet)
