"""The weights of data that come in chunks of rows: sums over a pass, never a whole design matrix."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.ops.predictor import gram
from pyro_evidence.program import LogJoint, Model
from pyro_evidence.weights import EPS, LinearTarget, Part, Weights, weights_of

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

    def __add__(self, other: "Sums") -> "Sums":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Sums(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class StreamedTarget:
    """The log likelihood as a sum over chunks; one pass gives value, gradient and curvature together."""

    passes: Passes
    eps: float = EPS  # of the dtype in which the model is run
    _last: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # the sums at the last point

    def value(self, y: Tensor) -> Tensor:
        """Nats, shape ``(R,)``."""
        if len(y) == 1 and self._known(y[0]):
            return self._at(y[0]).value.reshape(1)
        return torch.stack([p.log_likelihood(p.eta(y)) for p in self.passes()]).sum(0)

    def gradient(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Value ``(R,)`` and gradient ``(R, D)``."""
        found = [self._at(row) for row in y]
        return torch.stack([s.value for s in found]), torch.stack([s.gradient for s in found])

    def precision(self, y: Tensor) -> Tensor:
        """Minus the Hessian, shape ``(R, D, D)``."""
        return torch.stack([self._at(row).precision for row in y])

    def along(self, T: Tensor) -> "StreamedTarget":
        """The same as a function of ``x``, ``y = T x``, ``T`` of shape ``(D, K)``."""
        return StreamedTarget(lambda: (p.along(T) for p in self.passes()), self.eps)

    def sums(self, y: Tensor, local: Local) -> Sums:
        """Value, gradient and curvature at ``y`` ``(D,)``, with each datum's derivatives by ``local``."""
        total: Sums | None = None
        for part in self.passes():
            eta = part.eta(y.unsqueeze(0))
            slope, B = local(part, eta)
            new = Sums(part.log_likelihood(eta)[0], slope.flatten() @ part.J.flatten(0, 1), gram(part.J, B)[0])
            total = new if total is None else total + new
        assert total is not None  # no chunks are refused when they are first seen
        return total

    def _known(self, y: Tensor) -> bool:
        return "y" in self._last and torch.equal(self._last["y"], y)

    def _at(self, y: Tensor) -> Sums:
        if not self._known(y):
            self._last.update(sums=self.sums(y, lambda part, eta: part.derivatives(eta)), y=y.clone())
        found: Sums = self._last["sums"]
        return found


def streamed_weights(model: Model, site: str | Sequence[str] | None, chunks: Chunks) -> tuple[Weights, Weights]:
    """The weights with a streamed target, and those of the first chunk alone.

    Every chunk of every pass is read, checked and dropped again.

    :raises BadInput: for no chunks, for those that can be gone through only once, or whose weights differ.
    :raises UnsupportedModel: for a predictor that is not linear, or latent sites besides the weights.
    """
    if iter(chunks) is chunks:
        raise BadInput(
            f"chunks is a {type(chunks).__name__}, which can be gone through only once; expected a list, a DataLoader, "
            "or another object that starts anew each time it is iterated."
        )
    first = next((_chunk(model, site, args, 0) for args in chunks), None)
    if first is None:
        raise BadInput("there are no chunks; expected at least one tuple of the model's arguments.")

    def passes() -> Iterator[Part]:
        for number, args in enumerate(chunks):
            weights = _chunk(model, first.sites, args, number)
            if weights.num_weights != first.num_weights:
                raise BadInput(
                    f"chunk {number} has {weights.num_weights} weights and the first {first.num_weights}; chunks must "
                    "differ in their rows only."
                )
            yield from _parts(weights)

    return replace(first, target=StreamedTarget(passes, first.target.eps)), first


def _chunk(model: Model, site: str | Sequence[str] | None, args: Sequence[Any], number: int) -> Weights:
    if not isinstance(args, tuple | list):
        raise BadInput(f"chunk {number} is a {type(args).__name__}; expected a tuple of the model's arguments.")
    weights = weights_of(LogJoint(model, args, hyper=()), site)
    if not isinstance(weights.target, LinearTarget) or weights.num_others:
        raise UnsupportedModel(
            "chunks of rows need linear predictors and no latent sites besides the weights. Pass all data to run(...)."
        )
    return weights


def _parts(weights: Weights) -> tuple[Part, ...]:
    assert isinstance(weights.target, LinearTarget)
    return weights.target.parts
