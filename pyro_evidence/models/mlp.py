r"""Multilayer perceptrons whose weights have Gaussian priors in groups.

.. math:: h_1 = f(x W_1 + b_1), \quad h_l = f(h_{l-1} W_l + b_l), \quad \eta = h_{L-1} W_L + b_L, \quad
    W_l \sim N(0, \alpha_{W_l}^{-1}), \quad b_l \sim N(0, \alpha_{b_l}^{-1})

MacKay (1992), "A practical Bayesian framework for backpropagation networks"; Bishop (2006), sec. 5.7.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import Size, Tensor

from pyro_evidence.data.arrays import require_matrix
from pyro_evidence.errors import BadInput
from pyro_evidence.models.likelihoods import Binary as Binary
from pyro_evidence.models.likelihoods import Output as Output
from pyro_evidence.models.likelihoods import Regression as Regression
from pyro_evidence.models.likelihoods import Softmax as Softmax
from pyro_evidence.models.likelihoods import observe
from pyro_evidence.models.regression import LEARNED, Learned, Precision, check_precision, precision_value
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.settings import check_count, check_function, check_methods, seeded
from pyro_evidence.structure import network
from pyro_evidence.structure.network import Activation, Layer, NetworkDensity, Wiring

REGRESSION = Regression()


def _log_likelihood(output: Output, t: Tensor, eta: Tensor, precisions: Mapping[str, Tensor]) -> Tensor:
    return output.distribution(eta, precisions).log_prob(output.data(t, eta)).sum(-1)


def ard(num_inputs: int, start: float = 1.0) -> dict[str, Precision]:
    """Automatic relevance determination: the weights that leave each input have a learned precision of their own.

    For ``MLP(num_inputs, hidden, alpha=ard(num_inputs))``; the other groups keep theirs.
    """
    return {"W1": Learned(torch.full((num_inputs,), start))}


class MLP(PyroModule):
    """A network as an ordinary Pyro model ``model(X, t=None)``, for LaplaceEvidence, SVI and NUTS alike.

    Sites: ``W1`` ``(D, H)``, ``b1`` ``(H,)``, ``W2``, ``b2``, ... up to the output layer, and ``t``.  Params:
    ``alpha_W1``, ``alpha_b1``, ..., one precision per layer and kind unless ``alpha`` says otherwise, and ``beta`` for
    regression.  Standardise inputs and real targets first: all precisions start at 1.

    :param num_inputs: ``D``.
    :param hidden: units of the hidden layer, or of each of several.
    :param activation: elementwise, such as ``torch.tanh``, ``torch.relu`` or ``torch.nn.functional.softplus``.
    :param output: ``Regression()``, ``Binary()`` or ``Softmax(C)``.
    :param alpha: prior precision: one setting for every group, or by site name, as ``{"W1": ..., "b1": ...}``, those
        left out learned.  A number or tensor is fixed; ``Learned(start)`` is learned.  Of shape ``()``, that of the
        site, or for weights ``(I,)``, one per unit that they leave (:func:`ard`).
    :raises BadInput: on settings that are impossible or do not fit.
    """

    def __init__(
        self,
        num_inputs: int,
        hidden: int | Sequence[int],
        *,
        activation: Activation = torch.tanh,
        output: Output = REGRESSION,
        alpha: Precision | Mapping[str, Precision] = LEARNED,
    ) -> None:
        super().__init__()
        sizes = hidden if isinstance(hidden, list | tuple) else (hidden,)
        self.num_hidden: tuple[int, ...] = tuple(check_count("hidden", size, at_least=0) for size in sizes)
        self.num_inputs = num_inputs
        self.activation = activation
        self.output = output
        check_function("activation", activation, "torch.tanh")
        check_methods("output", output, ("distribution", "data"), "Regression()")
        check_count("num_inputs", num_inputs)
        check_count("num_outputs", output.num_outputs)
        if not self.num_hidden or min(self.num_hidden) < 1:
            raise BadInput(
                f"hidden={self.num_hidden}: expected at least one unit in every hidden layer, and at least one layer. "
                f"A network without hidden units is linear: use models.regression.regression(Linear()) or "
                f"models.classifier.classifier(Linear())."
            )
        widths = (num_inputs, *self.num_hidden, output.num_outputs)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.settings: dict[str, tuple[Precision, Size]] = {}
        for layer, (rows, columns) in enumerate(pairwise(widths), start=1):
            self.shapes |= {f"W{layer}": (rows, columns), f"b{layer}": (columns,)}
        settings = alpha if isinstance(alpha, Mapping) else dict.fromkeys(self.shapes, alpha)
        if unknown := sorted(set(settings) - set(self.shapes)):
            raise BadInput(f"alpha names {unknown}; expected some of {', '.join(self.shapes)}.")
        for site, shape in self.shapes.items():
            self._declare(f"alpha_{site}", settings.get(site, LEARNED), [Size(), Size(shape[:1]), Size(shape)])
        for name, setting in output.precisions.items():
            self._declare(name, setting, [Size(), Size([output.num_outputs])][: output.num_outputs])

    def _declare(self, name: str, setting: Precision, shapes: list[Size]) -> None:
        check_precision(name, setting, largest_dim=2)
        shape = torch.as_tensor(setting.start if isinstance(setting, Learned) else setting).shape
        if shape not in shapes:
            raise BadInput(f"{name} has shape {tuple(shape)}; expected one of {[tuple(s) for s in shapes]}.")
        self.settings[name] = (setting, shape)

    def forward(self, X: Tensor, t: Tensor | None = None) -> Tensor:
        """Data, ``t`` where given, drawn otherwise.

        :param X: inputs, shape ``(N, D)``.
        """
        require_matrix("X", X, self.num_inputs)
        weights: dict[str, Tensor] = {}
        for site, shape in self.shapes.items():
            scale = self._precision(f"alpha_{site}", X).rsqrt()
            scale = scale.unsqueeze(-1) if 0 < scale.dim() < len(shape) else scale
            prior = dist.Normal(loc=X.new_zeros(shape), scale=scale).to_event(len(shape))
            weights[site] = pyro.sample(self._full(site), prior)
        eta = network.outputs(X, self._layers(weights), self.activation)
        if eta.dim() > 2:  # inside plates around the model, whose last axis is that of the data
            eta = eta.squeeze(-3)
        precisions = {name: self._precision(name, X) for name in self.output.precisions}
        return observe(self.output, eta, precisions, t, (self._full("data"), self._full("t")))

    def _full(self, name: str) -> str:
        """The name under which Pyro knows a site or param of this module, whatever module it is in."""
        return f"{self._pyro_name}.{name}" if self._pyro_name else name

    def _precision(self, name: str, X: Tensor) -> Tensor:
        setting, shape = self.settings[name]
        return precision_value(self._full(name), setting, shape, X)

    def predictor(self, X: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """The last layer's outputs, before noise, logistic function or softmax, shape ``(..., N, C)``.

        :param X: inputs, shape ``(N, D)``.
        :param weights: values of all weight sites, with any batch in front, as ``posterior.mode`` or
            ``posterior.get_samples()`` give them.
        """
        require_matrix("X", X, self.num_inputs)
        return network.outputs(X, self._layers(weights), self.activation)

    def known_density(self, joint: LogJoint) -> NetworkDensity | None:
        """The density of ``joint`` by back-propagation, where it is this network's alone: a claim to be verified."""
        names = {site: self._full(site) for site in self.shapes}
        if joint.latents.names != tuple(sorted(names.values())) or joint.maximised_sites or joint.discrete:
            return None
        try:
            X, t = self._data(*joint.args, **joint.kwargs)
        except (TypeError, BadInput, AttributeError):  # the arguments of a model around the network
            return None
        layers = tuple((names[f"W{i}"], names[f"b{i}"]) for i in range(1, len(self.num_hidden) + 2))
        alpha = {names[site]: self._full(f"alpha_{site}") for site in self.shapes}
        noise = {name: self._full(name) for name in self.output.precisions}
        given = {self._full(n): setting for n, (setting, _) in self.settings.items()}
        fixed = {n: torch.as_tensor(v).to(X) for n, v in given.items() if not isinstance(v, Learned)}
        needed = {*alpha.values(), *noise.values()}
        if not needed <= {*fixed, *joint.held, *joint.hypers.names}:
            return None

        likelihood = partial(_log_likelihood, self.output, t)  # a name of the module: posteriors are pickled
        return NetworkDensity(joint, Wiring(X, self.activation, layers, alpha, noise, fixed, likelihood))

    def _data(self, X: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The arguments of :meth:`forward` when both are given."""
        require_matrix("X", X, self.num_inputs)
        return X, torch.as_tensor(t)

    def _layers(self, weights: Mapping[str, Tensor]) -> list[Layer]:
        names = {site: self._full(site) for site in self.shapes}
        full = {site: weights[name] if name in weights else weights[site] for site, name in names.items()}
        return [(full[f"W{i}"], full[f"b{i}"]) for i in range(1, len(self.num_hidden) + 2)]

    def starts(self, num: int, seed: int) -> dict[str, Tensor]:
        """Random weights of variance ``2 / (fan in + fan out)`` by site, shape ``(num,) + shape`` each.

        Glorot and Bengio (2010), eq. 12; biases as the weights of their layer.
        """
        generator = seeded(seed)
        found = {}
        for site, shape in self.shapes.items():
            fans = self.shapes[f"W{site[1:]}"]
            white = torch.randn(num, *shape, generator=generator, dtype=torch.float64)
            found[self._full(site)] = white * (2.0 / sum(fans)) ** 0.5
        return found

    def log_symmetries(self) -> float:
        """Log number of relabellings of hidden units that change nothing, nats: ``sum of log(2^H H!)`` for tanh.

        Exchanging units, and for an odd activation mirroring them, maps each mode to another of the same height, so a
        log evidence of one mode lacks this much, if all those modes are different and far apart.
        """
        odd = network.is_odd(self.activation)
        return sum(network.log_symmetries(H, odd) for H in self.num_hidden)

    def log_copies(self, weights: Mapping[str, Tensor], tolerance: float = 1e-4) -> float:
        """Log number of *different* modes that relabelling makes of this one, nats, at most :meth:`log_symmetries`.

        Hidden units that are copies of each other, or zero, are not counted as different: exchanging them changes
        nothing.

        :param weights: one value of every weight site, such as ``posterior.mode``.
        :param tolerance: weights that differ by less, in units of the largest, are one.
        """
        odd, layers = network.is_odd(self.activation), self._layers(weights)
        held = [network.log_stabiliser(a, b[0], odd, tolerance) for a, b in pairwise(layers)]
        return self.log_symmetries() - sum(held)
