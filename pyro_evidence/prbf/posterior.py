"""Posterior of the probabilistic RBF network."""

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence import display
from pyro_evidence.display import Table
from pyro_evidence.errors import BadInput
from pyro_evidence.files import Array, Double
from pyro_evidence.fitting.process_state import entry_point
from pyro_evidence.mixture.posterior import NoiseGain
from pyro_evidence.models.prbf import PRBF, Labels, check_network_inputs, class_labels
from pyro_evidence.numerics.linalg import cholesky
from pyro_evidence.posterior import archive
from pyro_evidence.posterior.base import ClassProbabilities
from pyro_evidence.prbf.densities import Network, log_density, parts_of
from pyro_evidence.prbf.updates import covariance_gain

THICK = 0.1  # nats of overlap at which a kernel's line is thickest


class Rejection(NamedTuple):
    """A class that has left a kernel: its mixing there fell below 1e-8 and stayed there to the end.

    The published clamp makes it zero, for good; the other updates, plain EM too, only let it become small.
    """

    kernel: int
    label: int
    step: int  # the round in which it fell


class DeadKernel(NamedTuple):
    """A kernel that lost its data."""

    kernel: int
    step: int


class ClassWithoutKernels(NamedTuple):
    """A class that every kernel rejected at once: it kept the mixing that it had."""

    label: int
    step: int  # the first round in which this happened
    last: int
    num_rounds: int


SPREADS = tuple(map(Double, ("1 M 1", "1 M D", "1 M D D")))  # of kernels: one, of each axis, full
NETWORK = {  # entries that are called as in PRBFPosterior
    "alpha": float,
    "status": str,
    "objectives": [float],
    "log_likelihood": Double(""),
    "counts": Double("K M"),
    "overlap": Double("M"),
    "rejections": [[int, int, int]],
    "losses": [[int, int]],
    "held": [[int, int, int, int]],
    "floored": Array("M", torch.bool),
    "restarts": Array("R", finite=False),
    "warm_up": int,
}
EVENTS: dict[str, Callable[..., Any]] = {"rejections": Rejection, "losses": DeadKernel, "held": ClassWithoutKernels}


def _sampled(mode: dict[str, Tensor], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """The sites at given values, whatever the model's arguments."""
    for name, value in mode.items():
        pyro.sample(name, dist.Delta(value).to_event(value.dim()))
    return mode


@entry_point
@dataclass(frozen=True, repr=False)
class PRBFPosterior(ClassProbabilities, archive.Saved):
    """The network at the maximum of its penalised likelihood: a point, not a distribution over parameters.

    :ivar model: the Pyro model it was fitted for.
    :ivar network: mixing, centres, covariances and class prior, one row, in the units of the data.
    :ivar alpha: weight of the overlap, in nats.
    :ivar status: why the fit stopped.
    :ivar objectives: eq. 22 after each round, nats, the start first.
    :ivar log_likelihood: ``sum_n log p(x_n | class_n)`` of the training data, nats, shape ``()``.
    :ivar counts: expected number of training data of each class in each kernel, shape ``(K, M)``.
    :ivar overlap: ``delta_j``, expected Bhattacharyya distance of a kernel to its classes' shares, nats, ``(M,)``.
    :ivar rejections: which kernels rejected which classes and when, in order of time.
    :ivar losses: which kernels lost their data and when.
    :ivar held: which classes every kernel rejected at once (eq. 29), and when; ``alpha`` is too large for them.
    :ivar floored: kernels whose covariance rests on the floor, shape ``(M,)`` bool.
    :ivar restarts: eq. 22 of every restart at its end, nats, shape ``(R,)``.
    :ivar warm_up: rounds of plain EM before the first of ``objectives``.

    >>> import torch
    >>> from pyro_evidence import OverlapEM
    >>> from pyro_evidence.models.prbf import prbf
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> labels = torch.arange(60) // 30
    >>> posterior = OverlapEM(prbf(2)).run(Y, labels)
    >>> posterior.predict(torch.tensor([[0.0, 0.0], [6.0, 6.0]])).argmax(-1).tolist()
    [0, 1]
    """

    schema: ClassVar[Mapping[str, Any]] = NETWORK | {
        "model": str,
        "network": [Double("1 K M"), Double("1 M D"), SPREADS, Double("1 K")],
    }

    model: PRBF
    network: Network
    alpha: float
    status: str
    objectives: tuple[float, ...]
    log_likelihood: Tensor
    counts: Tensor
    overlap: Tensor
    rejections: tuple[Rejection, ...]
    losses: tuple[DeadKernel, ...]
    floored: Tensor
    restarts: Tensor
    warm_up: int = 0
    held: tuple[ClassWithoutKernels, ...] = ()
    training: tuple[Tensor, Tensor] | None = field(default=None, compare=False)  # X, labels; not saved

    def __repr__(self) -> str:
        classes, kernels = self.mixing.shape
        return (
            f"PRBFPosterior(num_classes={classes}, kernels={self.num_kernels} of {kernels}, alpha={self.alpha:.4g}, "
            f"log_likelihood={float(self.log_likelihood):.6g}, status={self.status!r})"
        )

    @property
    def mixing(self) -> Tensor:
        """``pi_jk = p(kernel j | class k)``, shape ``(K, M)``, rows add up to 1."""
        return self.network.mixing[0]

    @property
    def loc(self) -> Tensor:
        """Centres of the kernels, shape ``(M, D)``."""
        return self.network.loc[0]

    @property
    def covariance(self) -> Tensor:
        """Covariance matrices of the kernels, shape ``(M, D, D)``."""
        return self.model.kernels.matrix(self.network.covariance[0], self.loc.shape[-1])

    @property
    def class_prior(self) -> Tensor:
        """``P(C_k)``, shape ``(K,)``."""
        return self.network.class_prior[0]

    @property
    def purity(self) -> Tensor:
        """``P(C_k | j)``, eq. 15: to which class a kernel's data belong, shape ``(M, K)``; rows add up to 1."""
        return self.network.ownership[0].mT

    @property
    def num_kernels(self) -> int:
        """Number of kernels that some class uses."""
        return int((self.mixing > 0).any(0).sum())

    @property
    def mode(self) -> dict[str, Tensor]:
        """Values of the model's sites, as ``pyro.poutine.condition`` and ``Predictive`` take them."""
        sites = {"class_prior": self.class_prior, "loc": self.loc}
        sites |= self.model.sharing.sites(self.mixing)
        return sites | self.model.kernels.sites(self.network.covariance[0])

    @property
    def guide(self) -> Callable[..., dict[str, Tensor]]:
        """Called with the model's arguments it samples all sites at :attr:`mode`, ``Predictive``'s guide."""
        return partial(_sampled, self.mode)

    def log_density(self, X: Tensor) -> Tensor:
        """``log p(x_n | C_k)``, eq. 2, nats, shape ``(N, K)``.

        :raises BadInput: on inputs of another shape, or not finite.
        """
        return log_density(self.network, self.model.kernels, self._features(X))[0]

    def log_proba(self, X: Tensor) -> Tensor:
        """``log P(C_k | x_n)``, eq. 1, shape ``(N, K)``."""
        return (self.log_density(X) + self.class_prior.log()).log_softmax(-1)

    def log_prob(self, X: Tensor, labels: Labels | None = None) -> Tensor:
        """``log p(x_n, label_n)``, or ``log p(x_n)`` where the label is unknown, nats, shape ``(N,)``.

        :raises BadInput: on labels that are none of the model's.
        """
        joint = self.log_density(X) + self.class_prior.log()
        y = class_labels(labels, len(X), self.model.num_classes).to(X.device)
        own = joint.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)  # -1 stands for an unknown label
        return torch.where(y >= 0, own, joint.logsumexp(-1))

    def responsibilities(self, X: Tensor, labels: Labels | None = None) -> Tensor:
        """``P(j | x_n, label_n)``, eq. 24, or ``P(j | x_n)`` where the label is unknown, shape ``(N, M)``."""
        natural = self.model.kernels.natural(self.network.loc, self.network.covariance)[0]
        kernels = self._features(X) @ natural.mT
        whole = (self.class_prior.unsqueeze(-2) @ self.mixing).squeeze(-2)
        y = class_labels(labels, len(X), self.model.num_classes).to(X.device)
        mixing = torch.cat([self.mixing, whole.unsqueeze(0)])[y]  # the last row is for unknown labels
        return (kernels + mixing.log()).softmax(-1)

    def _features(self, X: Tensor) -> Tensor:
        check_network_inputs(X)
        if X.shape[-1] != self.loc.shape[-1]:
            raise BadInput(
                f"X has {X.shape[-1]} columns; the network was fitted to {self.loc.shape[-1]}. Pass those, in the "
                "same order."
            )
        return self.model.kernels.features(X.to(self.loc))

    def _record(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in NETWORK}
        own |= {name: [tuple(item) for item in own[name]] for name in EVENTS}
        return own | {"model": repr(self.model), "network": parts_of(self.network)}

    @classmethod
    def _restored(cls, content: Mapping[str, Any], model: PRBF, sizes: Mapping[str, int]) -> "PRBFPosterior":
        # settings without units, a function whose name is a place in memory
        saved, found = (text.partition(", units=")[0] + ")" for text in (content["model"], repr(model)))
        if saved != found:
            raise BadInput(f"it holds the network of {saved}; the model is {found}. Load it with its own model.")
        own = {name: content[name] for name in NETWORK} | {"objectives": tuple(content["objectives"])}
        own |= {name: tuple(kind(*item) for item in own[name]) for name, kind in EVENTS.items()}
        posterior = cls(model=model, network=Network(*content["network"]), **own)
        for name, shares in (("mixing", posterior.mixing), ("class_prior", posterior.class_prior)):
            if bool((shares < 0.0).any()) or not torch.allclose(shares.sum(-1), torch.ones_like(shares[..., 0])):
                raise BadInput(f"{name} of the network has shares {shares.tolist()}; expected some that add up to 1.")
        cholesky(posterior.covariance, "covariance of a kernel")
        return posterior

    @property
    def covariance_gain(self) -> NoiseGain | None:
        """Gain by full covariances, by rows held out; None where they are full, or for a loaded network."""
        if self.training is None or self.model.kernels.event_dim == 2 or self.loc.shape[-1] == 1:
            return None
        X, labels = self.training
        return covariance_gain(X, self.responsibilities(X, labels), self.model.kernels)

    def diagnostics(self) -> dict[str, Any]:
        """Status, eq. 22 per round, kernels in use, rejections, losses, classes held, kernels on the floor.

        ``covariance_gain`` is what full covariances would gain by rows held out, nats, and ``notes`` says it in words.
        """
        gain = self.covariance_gain
        found = ("status", "objectives", "alpha", "num_kernels", "rejections", "losses", "held")
        return {name: getattr(self, name) for name in found} | {
            "floored": self.floored.nonzero().flatten().tolist(),
            "restarts": self.restarts.tolist(),
            "covariance_gain": 0.0 if gain is None else gain.nats,
            "notes": [] if gain is None else gain.notes,
        }

    def table(self) -> Table:
        """A row for each kernel: its data, ``delta_j``, the classes' shares of it; ``.to_pandas()`` has the numbers."""
        shares = [f"P(class {k})" for k in range(len(self.mixing))]
        numbers = torch.cat([self.counts.sum(0).unsqueeze(-1), self.overlap.unsqueeze(-1), self.purity], -1).tolist()
        columns = {"data": "expected number", "delta": "overlap distance, nats", **dict.fromkeys(shares, "")}
        rows = {f"kernel {j}": dict(zip(columns, row, strict=True)) for j, row in enumerate(numbers)}
        return Table(rows, columns, self.diagnostics()["notes"], digits=4)

    def summary(self) -> None:
        """Print one line per kernel, with its share of the data, overlap and classes; and what others would gain."""
        head = f"{self.status}; alpha = {self.alpha:.4g}; eq. 22: {self.objectives[-1]:.4f} nats"
        print("\n".join([head, str(self.table())]))  # noqa: T201

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self.table()._repr_html_()}"

    def plot(self, axes: display.Axes | None = None, *, inputs: tuple[int, int] = (0, 1)) -> display.Axes:
        """The kernels in use: one standard deviation of each, in colour and dashes of the class of most of its data.

        A thick line means a large ``delta_j``: the classes use different sides of the kernel.

        >>> posterior.plot()  # doctest: +SKIP

        :param axes: to draw on; None makes a figure of its own.
        :param inputs: the two on the axes.
        :raises BadInput: for inputs that are not there.
        :raises ImportError: without matplotlib.
        """
        axes = display.axes_or_own(axes)
        display.check_plane("inputs", inputs, self.loc.shape[-1])
        plane = torch.tensor(inputs)
        tril = torch.linalg.cholesky(self.covariance[:, plane.unsqueeze(-1), plane])
        owner = self.purity.argmax(-1)
        for j in (self.mixing > 0).any(0).nonzero().flatten().tolist():
            width = 1.0 + 3.0 * min(float(self.overlap[j]) / THICK, 1.0)
            display.ellipse(axes, self.loc[j, plane], tril[j], 1.0, **display.line_of(int(owner[j])), linewidth=width)
        for label in owner.unique().tolist():
            axes.plot([], [], **display.line_of(label), label=f"kernels of class {label}")
        return display.with_labels(axes, f"input {inputs[0]}", f"input {inputs[1]}")
