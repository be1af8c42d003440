"""The weights of data that come in chunks of rows: sums over a pass, never a whole design matrix."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.numerics.linear_predictor import gram
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.predictors import Slot
from pyro_evidence.relevance.weights import LinearTarget, Weights, linear_parts, weights_of
from pyro_evidence.structure.observed_parts import EPS, Part
from pyro_evidence.structure.probes import Unreadable
from pyro_evidence.structure.recognise import read_again

Passes = Callable[[], Iterator[Part]]  # one pass over the data: the predictors of a chunk at a time
Local = Callable[
    [Part, Tensor], tuple[Tensor, Tensor]
]  # part, eta (1, N, C) -> (1, N, C) slopes, (1, N, C, C) curvatures
Chunks = Iterable[Sequence[Any]]  # the model's positional arguments for some of the rows, as often as asked


@dataclass(frozen=True)
class Sums:
    """What one pass adds up at a point; ``a + b`` are those of both chunks."""

    value: Tensor  # () log likelihood, nats
    gradient: Tensor  # (D,)
    precision: Tensor  # (D, D)
    null: Tensor  # () log likelihood at 0, wherever the rest is

    def __add__(self, other: "Sums") -> "Sums":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Sums(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class StreamedTarget:
    """The log likelihood as a sum over chunks; one pass gives value, gradient and curvature together."""

    passes: Passes
    eps: float = EPS  # of the dtype in which the model is run
    _last: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # the sums at the last point
    _turned: list[tuple[Tensor, "StreamedTarget"]] = field(default_factory=list, compare=False, repr=False)

    def value(self, y: Tensor) -> Tensor:
        known = [self._known(row) for row in y]
        if all(v is not None for v in known):
            return torch.stack([v for v in known if v is not None])
        return torch.stack([p.log_likelihood(p.eta(y)) for p in self.passes()]).sum(0)

    def gradient(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Value ``(R,)`` and gradient ``(R, D)``."""
        found = [self.sums(row) for row in y]
        return torch.stack([s.value for s in found]), torch.stack([s.gradient for s in found])

    def precision(self, y: Tensor) -> Tensor:
        """Minus the Hessian, shape ``(R, D, D)``."""
        return torch.stack([self.sums(row).precision for row in y])

    def along(self, T: Tensor) -> "StreamedTarget":
        if not (self._turned and torch.equal(self._turned[0][0], T)):
            self._turned[:] = [(T, StreamedTarget(lambda: (p.along(T) for p in self.passes()), self.eps))]
        return self._turned[0][1]

    def sums(self, y: Tensor, local: Local = Part.derivatives) -> Sums:
        """Value, gradient and curvature at ``y`` ``(D,)``, with each datum's derivatives by ``local``; one pass."""
        if local is not Part.derivatives:
            return self._summed(y, local)
        if "y" not in self._last or not torch.equal(self._last["y"], y):
            self._last.update(sums=self._summed(y, lambda part, eta: part.derivatives(eta)), y=y.clone())
        found: Sums = self._last["sums"]
        return found

    def _summed(self, y: Tensor, local: Local) -> Sums:
        total: Sums | None = None
        for part in self.passes():
            eta = part.eta(y.unsqueeze(0))
            slope, B = local(part, eta)
            values = part.log_likelihood(torch.cat([eta, part.c.unsqueeze(0)]))
            new = Sums(values[0], slope.flatten() @ part.J.flatten(0, 1), gram(part.J, B)[0], values[1])
            total = new if total is None else total + new
        assert total is not None  # no chunks are refused when they are first seen
        return total

    def _known(self, y: Tensor) -> Tensor | None:
        """The value where it was met in a pass."""
        if "y" not in self._last:
            return None
        found: Sums = self._last["sums"]
        return found.value if torch.equal(self._last["y"], y) else None if bool(y.any()) else found.null


def streamed_weights(model: Model, site: str | Sequence[str] | None, chunks: Chunks) -> tuple[Weights, Weights]:
    """The weights with a streamed target, and those of the first chunk alone.

    Every chunk of every pass is read and dropped again.

    :raises BadInput: for no chunks, for those that can be gone through only once, or whose weights differ.
    :raises UnsupportedModel: for a predictor that is not linear, or latent sites besides the weights.
    """
    if not isinstance(chunks, Iterable):
        raise BadInput(f"chunks is a {type(chunks).__name__}; expected a list of tuples of the model's arguments.")
    if iter(chunks) is chunks:
        raise BadInput(
            f"chunks is a {type(chunks).__name__}, which can be gone through only once; expected a list, a DataLoader, "
            "or another object that starts anew each time it is iterated."
        )
    first = next((_chunk(_joint(model, args, 0), site) for args in chunks), None)
    if first is None:
        raise BadInput("there are no chunks; expected at least one tuple of the model's arguments.")
    reader = _Reader(model, first, [])

    def passes() -> Iterator[Part]:
        for number, args in enumerate(chunks):
            yield from reader.read(number, args)

    return replace(first, target=StreamedTarget(passes, first.target.eps)), first


@dataclass(frozen=True)
class _Reader:
    """Reads the linear predictors off each chunk: in the first pass with all checks, later without."""

    model: Model
    first: Weights
    slots: list[tuple[Slot, ...]]  # of the chunks that were checked

    def read(self, number: int, args: Sequence[Any]) -> tuple[Part, ...]:
        """The predictors of chunk ``number``."""
        if number < len(self.slots):
            joint = copy.copy(self.first.joint)
            joint.args = tuple(args)
            try:
                return linear_parts(read_again(joint, self.slots[number]), self.first.order)
            except (Unreadable, RuntimeError):  # not what it was in the pass before
                pass
        weights = self._checked(number, args)
        self.slots[number:] = [weights.slots]
        assert isinstance(weights.target, LinearTarget)
        return weights.target.parts

    def _checked(self, number: int, args: Sequence[Any]) -> Weights:
        """The chunk with the params of the first."""
        joint = _joint(self.model, args, number)
        joint.held = self.first.joint.held
        weights = _chunk(joint, self.first.sites)
        if weights.num_weights != self.first.num_weights:
            raise BadInput(
                f"chunk {number} has {weights.num_weights} weights and the first {self.first.num_weights}; chunks must "
                "differ in their rows only."
            )
        return weights


def _joint(model: Model, args: Sequence[Any], number: int) -> LogJoint:
    if not isinstance(args, tuple | list):
        raise BadInput(f"chunk {number} is a {type(args).__name__}; expected a tuple of the model's arguments.")
    return LogJoint(model, args, hyper=())


def _chunk(joint: LogJoint, site: str | Sequence[str] | None) -> Weights:
    weights = weights_of(joint, site)
    if not isinstance(weights.target, LinearTarget) or weights.num_others:
        raise UnsupportedModel(
            "chunks of rows need linear predictors and no latent sites besides the weights. Pass all data to run(...)."
        )
    return weights
