"""Observed sites behind linear predictors: log likelihoods of ``eta = J y + c`` and their derivatives."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_evidence.numerics import derivatives
from pyro_evidence.numerics.batched import HELD_NUMBERS
from pyro_evidence.numerics.linear_predictor import (
    Layout,
    curvature_blocks,
    gram_diagonal,
    slope_and_curvature,
)

Function = Callable[[Tensor], Tensor]  # rows (R, D) -> (R,)
EPS = torch.finfo(torch.float64).eps
PLACES = (0.0, 0.7, -2.9, 6.1)  # predictors at which a likelihood is looked at
CLOSE = 1e-9  # relative difference of two ways to compute a number


@dataclass(frozen=True)
class Part:
    """One observed site behind a linear predictor ``eta = J y + c``; ``N`` data of ``C`` coupled elements."""

    log_likelihood: Function  # blocks (R, N, C) -> (R,)
    J: Tensor  # (N, C, D)
    c: Tensor  # (N, C)
    eps: float = field(default=EPS, kw_only=True)  # relative rounding of the log likelihood

    def eta(self, y: Tensor) -> Tensor:
        """Predictors of rows ``(R, D)``, shape ``(R, N, C)``."""
        return (y @ self.J.flatten(0, 1).mT).view(-1, *self.c.shape) + self.c

    @property
    def is_closed(self) -> bool:
        """Whether derivatives are formulas, which ask nothing of autograd."""
        return False

    def predictor(self, y: Tensor) -> Tensor:
        """Predictors of one row ``(D,)``, shape ``(1, N, C)``."""
        return torch.addmv(self.c.flatten(), self.columns.mT, y).view(1, *self.c.shape)

    def slope(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """Log likelihood ``(R,)`` and its derivative in ``eta``, shape ``(R, N, C)``."""
        return derivatives.gradient(lambda e, _: self.log_likelihood(e), eta, eta)

    def curvature(self, eta: Tensor) -> Tensor:
        """Minus the second derivatives, shape ``(R, N, C, C)``."""
        eta = eta.detach().requires_grad_()
        return curvature_blocks(self.log_likelihood, Layout(self.c.shape, ()), eta, create_graph=False)

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """Derivative ``(R, N, C)`` and :meth:`curvature` in ``eta``."""
        _, slope, blocks = slope_and_curvature(self.log_likelihood, Layout(self.c.shape, ()), eta)
        return slope, blocks()

    @cached_property
    def columns(self) -> Tensor:
        """``J`` with a row for each weight, ``(D, N C)``; a small one is copied, so that each is in one piece."""
        transposed = self.J.flatten(0, 1).mT
        return transposed.contiguous() if self.J.numel() <= HELD_NUMBERS else transposed

    def weighted(self, B: Tensor) -> Tensor:
        """``J' B`` for curvatures ``(N, C, C)``, shape ``(D, N C)``."""
        return self.columns * B.flatten() if self.c.shape[1] == 1 else (B @ self.J).flatten(0, 1).mT

    def some(self, index: Tensor) -> "Part":
        """This part as a function of the weights ``index`` ``(K,)``, the others 0."""
        return replace(self, J=self.columns.index_select(0, index).mT.unflatten(0, self.c.shape))

    def precision_diagonal(self, B: Tensor) -> Tensor:
        """Diagonal of ``J' B J`` for curvatures ``(N, C, C)``, shape ``(D,)``; keeps the squares of a small ``J``."""
        if self.c.shape[1] > 1 or self.J.numel() > HELD_NUMBERS:
            return gram_diagonal(self.J, B.unsqueeze(0))[0]
        return B.flatten() @ self.squares

    @cached_property
    def squares(self) -> Tensor:
        """``J`` squared, of data of one element each, ``(N, D)``."""
        return self.J[:, 0].square()

    def along(self, T: Tensor) -> "Part":
        """This part as a function of ``x``, ``y = T x``."""
        return replace(self, J=self.J @ T)


@dataclass(frozen=True)
class LogisticPart(Part):
    """A datum's log likelihood is ``half eta - trials log(2 cosh(eta/2))``; derivatives in closed form."""

    half: Tensor  # (N, 1) t - 1/2, times the datum's weight
    trials: Tensor  # (N, 1) the datum's weight

    @property
    def is_closed(self) -> bool:
        return True

    def slope(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """Log likelihood ``(R,)`` and its derivative in ``eta``."""
        return self.log_likelihood(eta), self.half - 0.5 * self.trials * (0.5 * eta).tanh()

    def curvature(self, eta: Tensor) -> Tensor:
        """``trials s (1 - s)``, without cancellation."""
        return (self.trials * eta.sigmoid() * (-eta).sigmoid()).unsqueeze(-1)

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        s = self.trials * eta.sigmoid()
        return self.top - s, s.mul_((-eta).sigmoid_()).unsqueeze(-1)

    @cached_property
    def top(self) -> Tensor:
        """The slope far to the left, ``(N, 1)``."""
        return self.half + 0.5 * self.trials


def logistic(part: Part) -> Part:
    """The part in closed form when its derivatives say that it is Bernoulli in log odds; else itself."""
    if part.c.shape[1] != 1:
        return part
    places = part.c.new_tensor(PLACES).reshape(-1, 1, 1).expand(-1, *part.c.shape)
    value, slope, blocks = slope_and_curvature(part.log_likelihood, Layout(part.c.shape, ()), places)
    curvature = blocks()
    half, trials = slope[0], 4.0 * curvature[0, ..., 0]
    constant = value[0] + math.log(2.0) * trials.sum()

    def log_likelihood(eta: Tensor) -> Tensor:
        log_cosh = torch.logaddexp(0.5 * eta, -0.5 * eta)  # log 2 cosh(eta/2)
        return constant + (half * eta - trials * log_cosh).sum((-2, -1))

    closed = LogisticPart(log_likelihood, part.J, part.c, half, trials)
    found = (*closed.slope(places), closed.curvature(places))
    pairs = zip(found, (value, slope, curvature), strict=True)
    return closed if all(torch.allclose(a, b, rtol=CLOSE, atol=CLOSE) for a, b in pairs) else part


def part_of(log_likelihood: Function, layout: Layout, predictor: tuple[Tensor, Tensor], dtype: torch.dtype) -> Part:
    """One observed site behind ``eta = J y + c``, in closed form where it is Bernoulli.

    :param log_likelihood: of predictors of the layout's shape.
    :param predictor: ``J`` and ``c``.
    :param dtype: in which the model is run.  The likelihood takes predictors in double precision wherever it can.
    """
    J, c = predictor
    own, double = (in_blocks(log_likelihood, layout, d) for d in (dtype, torch.float64))
    if dtype == torch.float64 or _agree(double, own, c):
        return logistic(Part(double, J, c))
    return Part(own, J, c, eps=torch.finfo(dtype).eps)


def in_blocks(log_likelihood: Function, layout: Layout, dtype: torch.dtype) -> Function:
    """The likelihood as a function of blocks ``(R, N, C)``, evaluated in ``dtype``."""
    return lambda blocks: log_likelihood(layout.natural(blocks.to(dtype))).double()


def _agree(double: Function, own: Function, c: Tensor) -> bool:
    """Whether a likelihood in single precision takes predictors in double precision: theirs are added up in it."""
    try:
        values = torch.stack([f((c + x).unsqueeze(0))[0] for x in (0.0, 0.7, -1.3) for f in (double, own)])
    except (RuntimeError, TypeError, ValueError):  # what a distribution may say to two dtypes
        return False
    return torch.allclose(values[::2], values[1::2], rtol=1e-3, atol=1e-3 * len(c))
