r"""Functions that a network with random weights draws, and the Gaussian process that they become.

.. math:: f(x) = \sum_{h=1}^H v_h\, s(b_h + w_h^\top x), \quad w \sim N(0, \sigma_\text{in}^2), \quad
    b \sim N(0, \sigma_\text{bias}^2), \quad v \sim N(0, \sigma_\text{out}^2)

MacKay (2003), sec. 44.2 and 45.1; Neal (1996), chapter 2.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.arguments import check_count
from pyro_evidence.errors import BadInput
from pyro_evidence.ops import network
from pyro_evidence.ops.network import Activation
from pyro_evidence.ops.network_kernels import RandomNetwork

CHUNK = 2**22  # numbers of hidden units' outputs that may be held at a time


@dataclass(frozen=True)
class PriorScales:
    """Standard deviations of the weights of a network with one hidden layer.

    The covariance of the functions is proportional to ``num_units * sigma_out**2``: to compare networks of different
    size hold that product.

    :ivar sigma_in: of the weights that leave the inputs: the larger, the shorter the distances over which functions
        change.
    :ivar sigma_bias: of the hidden units' biases: how far from the origin they change.
    :ivar sigma_out: of the weights that leave the hidden units: the functions' scale.
    """

    sigma_in: float
    sigma_bias: float
    sigma_out: float

    def __post_init__(self) -> None:
        """Refuse what is no standard deviation.

        :raises BadInput: unless all are finite and not negative.
        """
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise BadInput(f"{name} is {value}; expected a finite standard deviation, at least 0.")

    def kernel(self, num_units: int, activation: Activation = torch.tanh) -> RandomNetwork:
        """The functions' covariance, for any number of units; their whole law as that goes to infinity."""
        variances = (self.sigma_in**2, self.sigma_bias**2, num_units * self.sigma_out**2)
        return RandomNetwork(*variances, unit=activation)


def random_functions(
    X: Tensor,
    num_units: int,
    scales: PriorScales,
    *,
    activation: Activation = torch.tanh,
    num_samples: int = 10,
    seed: int = 0,
) -> Tensor:
    """Functions drawn from the prior of a network, at ``X`` ``(N, D)``, shape ``(S, N)``.

    :raises BadInput: for fewer than one unit, or inputs that are no matrix of floats.
    """
    check_count("num_units", num_units)
    check_count("num_samples", num_samples)
    if X.dim() != 2 or not X.is_floating_point():
        raise BadInput(f"X has shape {tuple(X.shape)} and dtype {X.dtype}; expected floats of shape (N, D).")
    generator = torch.Generator().manual_seed(seed)
    at_once = max(1, CHUNK // (num_units * len(X) + 1))
    sizes = [min(at_once, num_samples - done) for done in range(0, num_samples, at_once)]
    return torch.cat([_drawn(X, (size, num_units), scales, activation, generator) for size in sizes])


def _drawn(
    X: Tensor, size: tuple[int, int], scales: PriorScales, activation: Activation, generator: torch.Generator
) -> Tensor:
    num, units = size
    shapes = [(num, X.shape[-1], units), (num, units), (num, units, 1)]
    W, b, V = (torch.randn(*s, generator=generator, dtype=torch.float64).to(X) for s in shapes)
    layers = [(scales.sigma_in * W, scales.sigma_bias * b), (scales.sigma_out * V, X.new_zeros(num, 1))]
    return network.outputs(X, layers, activation).squeeze(-1)
