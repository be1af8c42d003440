"""The weights of data that come in chunks of rows: sums over a pass, never a whole design matrix."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data import ranks as joining
from pyro_evidence.data.chunks import Chunks
from pyro_evidence.data.ranks import SINGLE_PROCESS, Communicator
from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.numerics.derivatives import generic_directions
from pyro_evidence.numerics.linear_predictor import gram
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.relevance.weights import LinearTarget, Weights, linear_parts, weights_of
from pyro_evidence.structure.observed import EPS, Part
from pyro_evidence.structure.streamed import LinearRows, linear_rows

Passes = Callable[[], Iterator[Part]]  # one pass over the data: the predictors of a chunk at a time
Local = Callable[
    [Part, Tensor], tuple[Tensor, Tensor]
]  # part, eta (1, N, C) -> (1, N, C) slopes, (1, N, C, C) curvatures


@dataclass(frozen=True)
class Sums:
    """What one pass adds up at a point; ``a + b`` are those of both chunks."""

    value: Tensor  # () log likelihood, nats
    gradient: Tensor  # (D,)
    precision: Tensor  # (D, D)
    null: Tensor  # () log likelihood at 0, wherever the rest is

    @staticmethod
    def none(y: Tensor) -> "Sums":
        """Those of no rows, at ``y`` ``(D,)``."""
        return Sums(y.new_zeros(()), torch.zeros_like(y), y.new_zeros(len(y), len(y)), y.new_zeros(()))

    def __add__(self, other: "Sums") -> "Sums":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Sums(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class StreamedTarget:
    """The log likelihood as a sum over chunks; one pass gives value, gradient and curvature together."""

    passes: Passes
    eps: float = EPS  # of the dtype in which the model is run
    join: Communicator = SINGLE_PROCESS
    _last: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # the sums at the last point
    _turned: list[tuple[Tensor, "StreamedTarget"]] = field(default_factory=list, compare=False, repr=False)

    def value(self, y: Tensor) -> Tensor:
        known = [self._known(row) for row in y]
        if all(v is not None for v in known):
            return torch.stack([v for v in known if v is not None])
        return joining.total(
            self.join, self.passes(), lambda p: p.log_likelihood(p.eta(y)), lambda: y.new_zeros(len(y))
        )

    def gradient(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Value ``(R,)`` and gradient ``(R, D)``."""
        found = [self.sums(row) for row in y]
        return torch.stack([s.value for s in found]), torch.stack([s.gradient for s in found])

    def precision(self, y: Tensor) -> Tensor:
        """Minus the Hessian, shape ``(R, D, D)``."""
        return torch.stack([self.sums(row).precision for row in y])

    def along(self, T: Tensor) -> "StreamedTarget":
        if not (self._turned and torch.equal(self._turned[0][0], T)):
            self._turned[:] = [(T, StreamedTarget(lambda: (p.along(T) for p in self.passes()), self.eps, self.join))]
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
        return joining.total(self.join, self.passes(), partial(sums_of, y, local), lambda: Sums.none(y))

    def _known(self, y: Tensor) -> Tensor | None:
        """The value where it was met in a pass."""
        if "y" not in self._last:
            return None
        found: Sums = self._last["sums"]
        return found.value if torch.equal(self._last["y"], y) else None if bool(y.any()) else found.null


def sums_of(y: Tensor, local: Local, part: Part) -> Sums:
    """What one chunk adds."""
    eta = part.eta(y.unsqueeze(0))
    slope, B = local(part, eta)
    values = part.log_likelihood(torch.cat([eta, part.c.unsqueeze(0)]))
    return Sums(values[0], slope.flatten() @ part.J.flatten(0, 1), gram(part.J, B)[0], values[1])


@dataclass(frozen=True)
class QuadraticTarget:
    """A log likelihood that is quadratic in the weights: the sums of one pass say everything, for any noise.

    :ivar origin: the sums at weights of zero, under the noise at the start.
    :ivar squares: sum of squared residuals there, in units of that noise; ``num_data`` of them.
    :ivar log_scale: of the noise precision, over that at the start.
    """

    origin: Sums
    squares: Tensor | float = 0.0
    num_data: Tensor | float = 0.0
    log_scale: float = 0.0
    eps: float = EPS

    @property
    def _scale(self) -> float:
        return math.exp(self.log_scale)

    def value(self, y: Tensor) -> Tensor:
        """Nats, shape ``(R,)``, of rows ``(R, D)``."""
        rise = y @ self.origin.gradient - 0.5 * ((y @ self.origin.precision) * y).sum(-1)
        norm = 0.5 * (self.num_data * self.log_scale - math.expm1(self.log_scale) * self.squares)
        return self.origin.value + norm + self._scale * rise

    def gradient(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Value ``(R,)`` and gradient ``(R, D)``."""
        return self.value(y), self._scale * (self.origin.gradient - y @ self.origin.precision)

    def precision(self, y: Tensor) -> Tensor:
        """Minus the Hessian, shape ``(R, D, D)``."""
        return self._scale * self.origin.precision.expand(len(y), -1, -1)

    def along(self, T: Tensor) -> "QuadraticTarget":
        A = T.mT @ self.origin.precision @ T
        return replace(self, origin=replace(self.origin, gradient=self.origin.gradient @ T, precision=A))

    def sums(self, y: Tensor) -> Sums:
        """Value, gradient and curvature at ``y`` ``(D,)``."""
        (value,), (gradient,) = self.gradient(y.unsqueeze(0))
        null = self.value(torch.zeros_like(y).unsqueeze(0))[0]
        return Sums(value, gradient, self._scale * self.origin.precision, null)

    def squares_at(self, y: Tensor) -> Tensor:
        """Sum of squared residuals at ``y`` ``(D,)`` in units of the noise, shape ``()``."""
        return self._scale * (self.squares - 2.0 * y @ self.origin.gradient + y @ self.origin.precision @ y)

    def scaled(self, log_scale: float) -> "QuadraticTarget":
        """The same data under noise whose precision is ``exp(log_scale)`` times that of the start."""
        return replace(self, log_scale=log_scale)


def summarised(target: StreamedTarget, like: Tensor) -> StreamedTarget | QuadraticTarget:
    """The target by its sums at zero, where it is quadratic, as two more points tell; otherwise itself.

    :param like: a point, shape ``(D,)``.
    """
    zero, eps = torch.zeros_like(like), target.eps**0.75
    found = QuadraticTarget(target.sums(zero), eps=target.eps)
    step = found.origin.precision.diagonal().clamp(min=1e-300).rsqrt()  # a column of zeros may move by anything
    for move in step * generic_directions(2, len(like), like) * like.new_tensor([[1.0], [3.0]]):
        foretold, there = found.sums(move), target.sums(move)
        scale = 1.0 + foretold.value.abs(), found.origin.precision.abs().amax()
        if not bool((there.value - foretold.value).abs() <= eps * scale[0]):
            return target
        if not bool(((there.precision - foretold.precision).abs() <= eps * scale[1]).all()):
            return target
    return found


@dataclass(frozen=True)
class StreamedWeights:
    """The weights of data in chunks.

    :ivar weights: with a target that is a sum over all rows.
    :ivar first: those of the first few rows alone.
    """

    weights: Weights
    first: Weights
    rows: LinearRows

    def of_chunks(self) -> Iterator[Weights]:
        """One pass: the weights of each chunk alone."""
        for density in self.rows.pieces:
            target = LinearTarget(linear_parts(density, self.first.order), None, self.first.target.eps)
            yield replace(self.first, joint=density.joint, target=target, slots=density.slots)


def streamed_weights(
    model: Model, site: str | Sequence[str] | None, chunks: Chunks, join: Communicator = SINGLE_PROCESS
) -> StreamedWeights:
    """The weights with a streamed target; one pass, in which every chunk is checked.

    Every chunk of every pass is read and dropped again.

    :raises BadInput: for no chunks, for those that can be gone through only once, or whose weights differ.
    :raises UnsupportedModel: for a predictor that is not linear, or latent sites besides the weights.
    """
    rows = linear_rows(model, chunks, join, partial(LogJoint, model, maximise=()))
    first = weights_of(rows.joint, site)
    if not isinstance(first.target, LinearTarget) or first.num_others:
        raise UnsupportedModel(
            "chunks of rows need linear predictors and no latent sites besides the weights. Pass all data to run(...)."
        )

    def passes() -> Iterator[Part]:
        for density in rows.pieces:
            yield from linear_parts(density, first.order)

    return StreamedWeights(replace(first, target=StreamedTarget(passes, first.target.eps, join)), first, rows)
