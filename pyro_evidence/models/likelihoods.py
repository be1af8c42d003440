"""Likelihoods: how a datum comes out of the numbers that a linear model, a process or a network predicts for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
from torch import Tensor

from pyro_evidence.data.arrays import require_tensor
from pyro_evidence.errors import BadInput
from pyro_evidence.models.basis import LEARNED, Precision, TensorValue


@dataclass(frozen=True, eq=False)
class Regression(TensorValue):
    """Targets with Gaussian noise.

    :param num_outputs: targets per datum; with one, ``t`` has shape ``(N,)``, otherwise ``(N, C)``.
    :param beta: noise precision, one or ``(C,)``, in units of ``t`` to the power -2.
    """

    num_outputs: int = 1
    beta: Precision = LEARNED

    @property
    def precisions(self) -> Mapping[str, Precision]:
        """Noise precisions by the name of their param."""
        return {"beta": self.beta}

    def distribution(self, eta: Tensor, precisions: Mapping[str, Tensor]) -> Any:
        """Normal about the outputs ``(..., N, C)``; precisions ``()``, ``(..., 1)`` or ``(..., C)``."""
        scale = precisions["beta"].rsqrt()
        if self.num_outputs == 1:
            return dist.Normal(loc=eta.squeeze(-1), scale=scale.squeeze(-1))
        return dist.Normal(loc=eta, scale=scale).to_event(1)

    def data(self, t: Tensor, eta: Tensor) -> Tensor:
        """``t`` as the distribution wants it.

        :raises BadInput: when its shape or its values are impossible; so of all likelihoods.
        """
        return _shaped(t, eta, eta.shape[-1:] if self.num_outputs > 1 else ())


class WithoutNoise:
    """Likelihoods whose one parameter is the prediction."""

    precisions: ClassVar[Mapping[str, Precision]] = {}


@dataclass(frozen=True)
class Binary(WithoutNoise):
    """Labels 0 or 1 by the logistic function of one output."""

    num_outputs: int = 1

    def distribution(self, eta: Tensor, precisions: Mapping[str, Tensor]) -> Any:
        """Bernoulli with the output as log odds."""
        return dist.Bernoulli(logits=eta.squeeze(-1))

    def data(self, t: Tensor, eta: Tensor) -> Tensor:
        """The labels in the dtype of the outputs."""
        _check_labels(t, 2)
        return _shaped(t, eta)


@dataclass(frozen=True)
class Softmax(WithoutNoise):
    """Labels 0 to C - 1 by the softmax of one output per class."""

    num_outputs: int

    def distribution(self, eta: Tensor, precisions: Mapping[str, Tensor]) -> Any:
        """Categorical with the outputs as unnormalised log probabilities."""
        return dist.Categorical(logits=eta)

    def data(self, t: Tensor, eta: Tensor) -> Tensor:
        """The labels, whole numbers."""
        _check_labels(t, self.num_outputs)
        return _shaped(t, eta).long()


@dataclass(frozen=True)
class Counts(WithoutNoise):
    """Counts whose log rate is the output."""

    num_outputs: int = 1

    def distribution(self, eta: Tensor, precisions: Mapping[str, Tensor]) -> Any:
        """Poisson."""
        return dist.Poisson(eta.squeeze(-1).exp())

    def data(self, t: Tensor, eta: Tensor) -> Tensor:
        """The counts in the dtype of the outputs."""
        require_tensor("t", t)
        if not bool(((t >= 0) & (t == t.round())).all()):
            raise BadInput("t holds numbers that are no counts; expected whole numbers from 0.")
        return _shaped(t, eta)


NAMES = ("data", "t")
Output = Regression | Binary | Softmax | Counts  # how many numbers a datum takes, and how it comes out of them


def observe(
    likelihood: Output, eta: Tensor, precisions: Mapping[str, Tensor], t: Tensor | None, names: Sequence[str] = NAMES
) -> Tensor:
    """The data of predictions ``(..., N, C)``: ``t`` where given, drawn otherwise.

    :param names: of their plate and of their site.
    """
    data = None if t is None else likelihood.data(t, eta)
    with pyro.plate(names[0], eta.shape[-2]):
        return pyro.sample(names[1], likelihood.distribution(eta, precisions), obs=data)


def classes(num_classes: int) -> Binary | Softmax:
    """The likelihood of labels 0 to ``num_classes - 1``."""
    return Binary() if num_classes == 2 else Softmax(num_classes)


def _check_labels(t: Tensor, num_classes: int) -> None:
    require_tensor("t", t)
    whole = not t.is_floating_point() or bool((t == t.round()).all())
    if t.numel() and whole and 0 <= float(t.min()) and float(t.max()) < num_classes:  # asked at every run of a model
        return
    wrong = (t != t.long()) | (t < 0) | (t >= num_classes)
    if bool(wrong.any()):
        raise BadInput(
            f"t holds the label {float(t[wrong][0]):g}; expected whole numbers from 0 to {num_classes - 1}. Look at "
            f"t{wrong.nonzero()[0].tolist()}."
        )


def _shaped(t: Tensor, eta: Tensor, event: tuple[int, ...] = ()) -> Tensor:
    """``t`` in the dtype of the predictions, once its shape is known to be ``(N,) + event``."""
    require_tensor("t", t)
    shape = (eta.shape[-2], *event)
    if t.shape != shape:
        outputs = f" and the model {eta.shape[-1]} outputs" if event else ""
        raise BadInput(
            f"t has shape {tuple(t.shape)}, but X has {eta.shape[-2]} rows{outputs}; expected {shape}."
            f"{'' if event else ' Write t[:, 0] for a column.'}"
        )
    if t.is_complex() and not eta.is_complex():
        raise BadInput(f"t is complex ({t.dtype}) and X is not ({eta.dtype}); expected real targets, such as t.real.")
    return t.to(eta)
