"""Log likelihoods of a weight vector, the weights' own prior left out."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from typing import ClassVar

import torch
from torch import Tensor

from pyro_evidence.data.ranks import Statistics
from pyro_evidence.data.rows import Rows
from pyro_evidence.numerics import derivatives
from pyro_evidence.numerics.derivatives import Last, are_equal, generic_directions
from pyro_evidence.numerics.linear_predictor import EPS, Function, Part, gram

Parts = tuple[Part, ...]  # the observed sites of some rows
AWAY = 3.0  # units of a predictor, at which a likelihood that is not quadratic has another curvature than at 0
Local = Callable[
    [Part, Tensor], tuple[Tensor, Tensor]
]  # part, eta (1, N, C) -> (1, N, C) slopes, (1, N, C, C) curvatures


@dataclass(frozen=True, eq=False)
class LikelihoodSums(Statistics):
    """Sums over rows at a point."""

    value: Tensor  # () log likelihood, nats
    gradient: Tensor  # (D,)
    precision: Tensor  # (D, D) minus the Hessian
    null: Tensor  # () log likelihood at 0, wherever the rest is


def sums_of(y: Tensor, local: Local, parts: Parts) -> LikelihoodSums:
    """The sums over some rows at ``y`` ``(D,)``, with each datum's derivatives by ``local``."""

    def of_part(part: Part) -> LikelihoodSums:
        eta = part.eta(y.unsqueeze(0))
        slope, B = local(part, eta)
        values = part.log_likelihood(torch.cat([eta, part.c.unsqueeze(0)]))
        return LikelihoodSums(values[0], slope.flatten() @ part.J.flatten(0, 1), gram(part.J, B)[0], values[1])

    return reduce(add, map(of_part, parts))


def exact_derivatives(part: Part, eta: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and curvature of the likelihood in its predictor."""
    return part.derivatives(eta)


class SummedTarget:
    """A log likelihood whose :meth:`sums` at a point say all, and the log prior of coordinates that are no weights."""

    rest: Function | None = None
    sums: Callable[[Tensor], LikelihoodSums]  # value, gradient and curvature of the likelihood at y (D,)

    def gradient(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Value ``(R,)`` and gradient ``(R, D)``."""
        found = [self.sums(row) for row in y]
        value, slope = torch.stack([s.value for s in found]), torch.stack([s.gradient for s in found])
        if self.rest is None:
            return value, slope
        rest, rest_slope = derivatives.gradient(_rows(self.rest), y, y)
        return value + rest, slope + rest_slope

    def precision(self, y: Tensor) -> Tensor:
        """Minus the Hessian, shape ``(R, D, D)``."""
        A = torch.stack([self.sums(row).precision for row in y])
        return A if self.rest is None else A - derivatives.hessian(_rows(self.rest), y, y)


@dataclass(frozen=True, eq=False)
class LinearTarget(SummedTarget):
    """Log likelihood of linear predictors, plus the log prior of coordinates that are no weights.

    One pass over the rows gives value, gradient and curvature together, and those at the last point are kept.

    :ivar rest: that log prior as a function of ``y``; None where all coordinates are weights.
    :ivar eps: relative rounding of value and derivatives: that of the dtype in which the model is run.
    """

    rows: Rows[Parts]
    rest: Function | None = None
    eps: float = EPS
    _sums: Last[tuple[Tensor, Local], LikelihoodSums] = field(default_factory=Last, compare=False, repr=False)
    _along: Last[Tensor, "LinearTarget"] = field(default_factory=Last, compare=False, repr=False)

    @staticmethod
    def resident(parts: Parts, rest: Function | None = None, eps: float = EPS) -> "LinearTarget":
        """That of rows which are all in memory."""
        return LinearTarget(Rows.resident(parts, len(parts[0].c)), rest, eps)

    @property
    def is_resident(self) -> bool:
        """Whether all rows are in memory."""
        return isinstance(self.rows.pieces, tuple)

    @property
    def parts(self) -> Parts:
        """All observed sites of rows in memory, or those of the first few rows."""
        return self.rows.example

    def linearise(self, y: Tensor) -> Parts:
        """Parts whose predictor is the tangent at ``y`` ``(D,)``."""
        return self.parts

    def value(self, y: Tensor) -> Tensor:
        """Nats, shape ``(R,)``, at rows ``(R, D)``."""
        known = [self._known(row) for row in y]
        if all(v is not None for v in known):
            value = torch.stack([v for v in known if v is not None])
        else:
            value = self.rows.total(lambda parts: torch.stack([p.log_likelihood(p.eta(y)) for p in parts]).sum(0))
        return value if self.rest is None else value + self.rest(y)

    def _known(self, y: Tensor) -> Tensor | None:
        """The log likelihood where the last pass has met it."""
        if self._sums.pair is None:
            return None
        (last, _), found = self._sums.pair
        return found.value if torch.equal(last, y) else None if bool(y.any()) else found.null

    def along(self, T: Tensor) -> "LinearTarget":
        """The log likelihood as a function of ``x``, ``y = T x``, ``T`` of shape ``(D, K)``."""
        if self.is_resident:
            return self._turned(T)
        return self._along.found(T, torch.equal, self._turned)  # a pass is dear, and nothing but sums is kept

    def _turned(self, T: Tensor) -> "LinearTarget":
        rest = self.rest
        turned = None if rest is None else lambda x: rest(x @ T.mT)
        return LinearTarget(self.rows.mapped(lambda parts: tuple(p.along(T) for p in parts)), turned, self.eps)

    def sums(self, y: Tensor, local: Local = exact_derivatives) -> LikelihoodSums:
        """Value, gradient and curvature of the likelihood at ``y`` ``(D,)``, in one pass.

        :param local: each datum's derivatives.
        """
        return self._sums.found((y.clone(), local), are_equal, self._summed)

    def _summed(self, place: tuple[Tensor, Local]) -> LikelihoodSums:
        return self.rows.total(partial(sums_of, *place))


@dataclass(frozen=True, eq=False)
class AutogradTarget:
    """Log likelihood of predictors that are not linear.

    :ivar linearise: at ``y`` ``(D,)`` parts whose predictor is the tangent there: what Gauss-Newton looks at.
    """

    function: Function
    linearise: Callable[[Tensor], Parts]
    eps: float = EPS
    is_resident: ClassVar[bool] = True

    def value(self, y: Tensor) -> Tensor:
        """Nats, shape ``(R,)``, at rows ``(R, D)``."""
        return self.function(y)

    def gradient(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Value ``(R,)`` and gradient ``(R, D)``."""
        return derivatives.gradient(_rows(self.function), y, y)

    def precision(self, y: Tensor) -> Tensor:
        """Minus the Hessian, shape ``(R, D, D)``."""
        return -derivatives.hessian(_rows(self.function), y, y)

    def along(self, T: Tensor) -> "AutogradTarget":
        """The log likelihood as a function of ``x``, ``y = T x``."""
        function, linearise = self.function, self.linearise
        return AutogradTarget(
            lambda x: function(x @ T.mT), lambda x: tuple(p.along(T) for p in linearise(T @ x)), self.eps
        )


def _rows(f: Function) -> derivatives.Function:
    return lambda y, _: f(y)


@dataclass(frozen=True, eq=False)
class QuadraticTarget(SummedTarget):
    """A log likelihood that is quadratic in the weights: the sums of one pass say everything, for any noise.

    :ivar origin: the sums at weights of zero, under the noise at the start.
    :ivar squares: sum of squared residuals there, in units of that noise; ``num_data`` of them.
    :ivar log_scale: of the noise precision, over that at the start.
    """

    origin: LikelihoodSums
    squares: Tensor | float = 0.0
    num_data: Tensor | float = 0.0
    log_scale: float = 0.0
    eps: float = EPS
    is_resident: ClassVar[bool] = False

    def value(self, y: Tensor) -> Tensor:
        """Nats, shape ``(R,)``, at rows ``(R, D)``."""
        rise = y @ self.origin.gradient - 0.5 * ((y @ self.origin.precision) * y).sum(-1)
        norm = 0.5 * (self.num_data * self.log_scale - math.expm1(self.log_scale) * self.squares)
        return self.origin.value + norm + math.exp(self.log_scale) * rise

    def along(self, T: Tensor) -> "QuadraticTarget":
        """The log likelihood as a function of ``x``, ``y = T x``."""
        A = T.mT @ self.origin.precision @ T
        return replace(self, origin=replace(self.origin, gradient=self.origin.gradient @ T, precision=A))

    def sums(self, y: Tensor) -> LikelihoodSums:
        values, scale = self.value(torch.stack([y, torch.zeros_like(y)])), math.exp(self.log_scale)
        slope = self.origin.gradient - y @ self.origin.precision
        return LikelihoodSums(values[0], scale * slope, scale * self.origin.precision, values[1])


def summarised(target: LinearTarget) -> LinearTarget | QuadraticTarget:
    """The target by its sums at zero, where it is quadratic, as two more points tell; otherwise itself."""
    zero, eps = torch.zeros_like(target.parts[0].J[0, 0]), target.eps**0.75
    found = QuadraticTarget(target.sums(zero), eps=target.eps)
    least = torch.finfo(zero.dtype).tiny
    step = found.origin.precision.diagonal().clamp(min=least).rsqrt()  # a column of zeros may move by anything
    for move in step * generic_directions(2, len(zero), zero) * zero.new_tensor([[1.0], [AWAY]]):
        foretold, there = found.sums(move), target.sums(move)
        scale = 1.0 + foretold.value.abs(), found.origin.precision.abs().amax()
        if not bool((there.value - foretold.value).abs() <= eps * scale[0]):
            return target
        if not bool(((there.precision - foretold.precision).abs() <= eps * scale[1]).all()):
            return target
    return found


Target = LinearTarget | AutogradTarget


@dataclass(frozen=True, eq=False)
class Penalised:
    """A target with an independent Gaussian prior: the density that Newton climbs."""

    target: Target | QuadraticTarget
    alpha: Tensor  # (D,) prior precisions, 0 for none

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """Log likelihood minus half the penalty, ``(R,)``."""
        return self.target.value(u) - 0.5 * (self.alpha * u.square()).sum(-1)

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = self.target.gradient(u)
        return value - 0.5 * (self.alpha * u.square()).sum(-1), slope - self.alpha * u

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian, ``(R, D, D)``."""
        return self.target.precision(u) + self.alpha.diag_embed()
