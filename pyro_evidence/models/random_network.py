r"""Functions that a network with random weights draws, and the Gaussian process that they become.

.. math:: f(x) = \sum_{h=1}^H v_h\, s(b_h + w_h^\top x), \quad w \sim N(0, \sigma_\text{in}^2), \quad
    b \sim N(0, \sigma_\text{bias}^2), \quad v \sim N(0, \sigma_\text{out}^2)

MacKay (2003), sec. 44.2 and 45.1; Neal (1996), "Bayesian Learning for Neural Networks", chapter 2.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.arrays import require_matrix
from pyro_evidence.models.basis import LEARNED
from pyro_evidence.models.kernels import Kernel, Read, Setting, per_input, root, value_of
from pyro_evidence.numerics.batched import BATCH_NUMBERS
from pyro_evidence.settings import FINITE, check_count, check_number, seeded
from pyro_evidence.structure import network
from pyro_evidence.structure.network import Activation


@dataclass(frozen=True, eq=False)
class NetworkKernel(Kernel):
    """Kernels that are the mean product of a hidden unit's two outputs.

    :param weight_variance: of the weights from input to hidden units, ``()`` or ``(D,)``.
    :param bias_variance: of the hidden units' biases.
    :param variance: of the output weights, times the number of hidden units.
    """

    weight_variance: Setting = LEARNED
    bias_variance: Setting = LEARNED
    variance: Setting = LEARNED

    def product(self, a: Tensor, b: Tensor, cross: Tensor) -> Tensor:
        """``E[h(p) h(q)]`` for ``p`` and ``q`` Gaussian with variances ``a``, ``b`` and covariance ``cross``."""
        raise NotImplementedError

    def covariance(self, X: Tensor, Z: Tensor) -> Tensor:
        """``variance E[h h']``."""
        scaled = X * per_input(self.weight_variance, X, type(self).__name__, "weight_variance")
        bias = value_of(self.bias_variance, X)
        a, b = self._input_variance(X).unsqueeze(-1), self._input_variance(Z).unsqueeze(-2)
        return value_of(self.variance, X) * self.product(a, b, bias + scaled @ Z.mT)

    def diagonal(self, X: Tensor) -> Tensor:
        """``variance E[h^2]``."""
        a = self._input_variance(X)
        return value_of(self.variance, X) * self.product(a, a, a)

    def _input_variance(self, X: Tensor) -> Tensor:
        weight = per_input(self.weight_variance, X, type(self).__name__, "weight_variance")
        return value_of(self.bias_variance, X) + (weight * X.square()).sum(-1)


class Arcsine(NetworkKernel):
    """Hidden units ``erf(.)``: arcsines.  Williams (1998), eq. 11; Rasmussen and Williams (2006), eq. 4.29.

    Units ``tanh(.)`` are within 0.04 of ``erf(sqrt(pi) / 2 .)``, which is this kernel with ``weight_variance`` and
    ``bias_variance`` multiplied by pi / 4; :class:`RandomNetwork` has no such error.
    """

    def product(self, a: Tensor, b: Tensor, cross: Tensor) -> Tensor:
        """``2 / pi arcsin(2 c / sqrt((1 + 2 a)(1 + 2 b)))``."""
        return 2.0 / math.pi * (2.0 * cross / ((1.0 + 2.0 * a) * (1.0 + 2.0 * b)).sqrt()).asin()


class ArcCosine(NetworkKernel):
    """Hidden units ``relu(.)``: the arc-cosine kernel of order 1.  Cho and Saul (2009), eqs. 1 and 6."""

    def product(self, a: Tensor, b: Tensor, cross: Tensor) -> Tensor:
        """``(sqrt(a b - c^2) + c (pi - angle)) / 2 pi``, the angle that between both units' inputs."""
        norm = (a * b).sqrt()
        squared = norm.square() - cross.square()
        inside = squared > 1e-14 * norm.square()  # the angle is not 0: its derivative is finite
        sine = root(torch.where(inside, squared, 0.0))
        angle = torch.atan2(sine, torch.where(norm > 0, cross, 1.0))
        return (sine + cross * (math.pi - angle)) / (2.0 * math.pi)


@dataclass(frozen=True, eq=False)
class RandomNetwork(NetworkKernel):
    """Hidden units of any smooth kind, by two-dimensional quadrature at evenly spaced nodes.

    The trapezium rule converges exponentially for analytic units: for tanh the default has 10 digits while the units'
    inputs have variances below 20.  Each covariance takes ``num_nodes^2`` evaluations of the unit: meant for small
    ``N``, and for checks.

    :param unit: the activation, elementwise; a named function, so that the kernel can be pickled.
    """

    unit: Callable[[Tensor], Tensor] = torch.tanh
    num_nodes: int = 160

    def product(self, a: Tensor, b: Tensor, cross: Tensor) -> Tensor:
        """``sum_ij w_i w_j h(p_ij) h(q_ij)``, at nodes that are turned so that neither unit comes first."""
        x = 8.0 * torch.linspace(-1.0, 1.0, self.num_nodes).to(cross)
        w = (-0.5 * x.square()).softmax(0)
        correlation = (cross / (a * b).sqrt()).clamp(-1.0, 1.0)
        along, apart = (root(0.5 * (1.0 + s * correlation)).unsqueeze(-1) for s in (1.0, -1.0))
        first, second = a.sqrt().unsqueeze(-1), b.sqrt().unsqueeze(-1)
        total = torch.zeros_like(cross)
        for node, weight in zip(x, w, strict=True):
            p, q = first * (along * node + apart * x), second * (along * node - apart * x)
            total = total + weight * ((self.unit(p) * self.unit(q)) @ w)
        return total

    def resolved(self, read: Read, name: str = "kernel") -> "RandomNetwork":
        """Only the variances are settings."""
        keep: dict[str, Any] = {"unit": self.unit, "num_nodes": self.num_nodes}
        return super().resolved(
            lambda n, setting, kernel: keep.get(n.rpartition(".")[2]) or read(n, setting, kernel), name
        )


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
            check_number(name, value, "a finite standard deviation, at least 0", 0.0, FINITE)

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
    num_units = check_count("num_units", num_units)
    num_samples = check_count("num_samples", num_samples)
    require_matrix("X", X)
    generator = seeded(seed)
    at_once = max(1, BATCH_NUMBERS // (num_units * len(X) + 1))
    sizes = [min(at_once, num_samples - done) for done in range(0, num_samples, at_once)]
    functions = []
    for num in sizes:
        shapes = [(num, X.shape[-1], num_units), (num, num_units), (num, num_units, 1)]
        W, b, V = (torch.randn(*s, generator=generator, dtype=torch.float64).to(X) for s in shapes)
        layers = [(scales.sigma_in * W, scales.sigma_bias * b), (scales.sigma_out * V, X.new_zeros(num, 1))]
        functions.append(network.outputs(X, layers, activation).squeeze(-1))
    return torch.cat(functions)
