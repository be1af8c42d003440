r"""Covariance functions of random networks with one hidden layer, in the limit of infinitely many hidden units.

A hidden unit is :math:`h(b + v^\top x)` with :math:`b \sim N(0, \text{bias\_variance})` and :math:`v_d \sim N(0,
\text{weight\_variance}_d)`; the output weights have variance ``variance / H``, so that the output of ``H`` units has
covariance ``variance E[h h']``, whatever ``H`` is, and is a Gaussian process as ``H`` goes to infinity.  Add
:class:`~pyro_evidence.ops.kernels.Constant` for a bias of the output.

Neal (1996), "Bayesian Learning for Neural Networks", chapter 2; Williams (1998), Neural Computation 10, 1203.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.ops.distance import root
from pyro_evidence.ops.kernels import Kernel, Read, Setting, per_input, value_of
from pyro_evidence.ops.settings import LEARNED


class Network(Kernel):
    """Kernels that are the mean product of a hidden unit's two outputs."""

    weight_variance: Setting
    bias_variance: Setting
    variance: Setting

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


@dataclass(frozen=True, eq=False)
class Arcsine(Network):
    """Hidden units ``erf(.)``: arcsines.  Williams (1998), eq. 11; Rasmussen and Williams (2006), eq. 4.29.

    Units ``tanh(.)`` are within 0.04 of ``erf(sqrt(pi) / 2 .)``, which is this kernel with ``weight_variance`` and
    ``bias_variance`` multiplied by pi / 4; :class:`RandomNetwork` has no such error.

    :param weight_variance: of the weights from input to hidden units, ``()`` or ``(D,)``.
    :param bias_variance: of the hidden units' biases.
    :param variance: of the output weights, times the number of hidden units.
    """

    weight_variance: Setting = LEARNED
    bias_variance: Setting = LEARNED
    variance: Setting = LEARNED

    def product(self, a: Tensor, b: Tensor, cross: Tensor) -> Tensor:
        """``2 / pi arcsin(2 c / sqrt((1 + 2 a)(1 + 2 b)))``."""
        return 2.0 / math.pi * (2.0 * cross / ((1.0 + 2.0 * a) * (1.0 + 2.0 * b)).sqrt()).asin()


@dataclass(frozen=True, eq=False)
class ArcCosine(Network):
    """Hidden units ``relu(.)``: the arc-cosine kernel of order 1.  Cho and Saul (2009), eqs. 1 and 6.

    Its settings are those of :class:`Arcsine`.
    """

    weight_variance: Setting = LEARNED
    bias_variance: Setting = LEARNED
    variance: Setting = LEARNED

    def product(self, a: Tensor, b: Tensor, cross: Tensor) -> Tensor:
        """``(sqrt(a b - c^2) + c (pi - angle)) / 2 pi``, the angle that between both units' inputs."""
        norm = (a * b).sqrt()
        squared = norm.square() - cross.square()
        inside = squared > 1e-14 * norm.square()  # the angle is not 0: its derivative is finite
        sine = torch.where(inside, torch.where(inside, squared, 1.0).sqrt(), 0.0)
        angle = torch.atan2(sine, torch.where(norm > 0, cross, 1.0))
        return (sine + cross * (math.pi - angle)) / (2.0 * math.pi)


@dataclass(frozen=True, eq=False)
class RandomNetwork(Network):
    """Hidden units of any smooth kind, by two-dimensional quadrature at evenly spaced nodes.

    The trapezium rule converges exponentially for analytic units: for tanh the default has 10 digits while the units'
    inputs have variances below 20.  Each covariance takes ``num_nodes^2`` evaluations of the unit: meant for small
    ``N``, and for checks.  Its settings are those of :class:`Arcsine`.

    :param unit: the activation, elementwise; a named function, so that the kernel can be pickled.
    """

    weight_variance: Setting = LEARNED
    bias_variance: Setting = LEARNED
    variance: Setting = LEARNED
    unit: Callable[[Tensor], Tensor] = torch.tanh
    num_nodes: int = 160

    def product(self, a: Tensor, b: Tensor, cross: Tensor) -> Tensor:
        """``sum_ij w_i w_j h(p_ij) h(q_ij)``, at nodes that are turned so that neither unit comes first."""
        x = torch.linspace(-8.0, 8.0, self.num_nodes).to(cross)
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
        return super().resolved(lambda n, setting: keep.get(n.rpartition(".")[2]) or read(n, setting), name)
