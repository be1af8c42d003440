"""Observed sites behind linear predictors: log likelihoods of ``eta = J y + c`` and their derivatives."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_evidence.numerics import derivatives
from pyro_evidence.numerics.linear_predictor import (
    Layout,
    curvature_blocks,
    curvature_graph,
    gram_diagonal,
    slope_and_curvature,
)

Function = Callable[[Tensor], Tensor]  # rows (R, D) -> (R,)
EPS = torch.finfo(torch.float64).eps
PLACES = (0.0, 0.7, -2.9, 6.1)  # predictors at which a likelihood is looked at
KEPT = 2**24  # numbers of a design whose transpose and squares may be kept beside it: 128 MiB each


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
        return transposed.contiguous() if self.J.numel() <= KEPT else transposed

    def weighted(self, B: Tensor) -> Tensor:
        """``J' B`` for curvatures ``(N, C, C)``, shape ``(D, N C)``."""
        return self.columns * B.flatten() if self.c.shape[1] == 1 else (B @ self.J).flatten(0, 1).mT

    def some(self, index: Tensor) -> "Part":
        """This part as a function of the weights ``index`` ``(K,)``, the others 0."""
        return replace(self, J=self.columns.index_select(0, index).mT.unflatten(0, self.c.shape))

    def precision_diagonal(self, B: Tensor) -> Tensor:
        """Diagonal of ``J' B J`` for curvatures ``(N, C, C)``, shape ``(D,)``; keeps the squares of a small ``J``."""
        if self.c.shape[1] > 1 or self.J.numel() > KEPT:
            return gram_diagonal(self.J, B.unsqueeze(0))[0]
        return B.flatten() @ self._squares

    @cached_property
    def _squares(self) -> Tensor:
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
    return closed if all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs) else part


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


class ReadSite(Protocol):
    """One observed site, read in traces; :class:`pyro_evidence.program.predictors.Slot` is one."""

    @property
    def parameter(self) -> str:
        """What depends on the predictor."""

    @property
    def layout(self) -> Layout:
        """How the elements of the predictor couple."""

    @property
    def mixture(self) -> str | None:
        """The discrete site that is summed out, None for none."""

    def log_likelihood(self, trace: Any) -> Function:
        """Log likelihood as a function of the predictor, all else as in the trace."""

    def others(self, trace: Any) -> list[Any]:
        """Everything but the predictor that the log likelihood is made of; names of parameters third."""


@dataclass(frozen=True)
class Derivatives:
    """Of one observed site; what is read off at one setting of the hyperparameters holds while the site is the same."""

    slot: ReadSite
    _last: list[tuple[Any, list[Any], LogisticPart | None]] = field(default_factory=list, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:  # without what is only kept for speed
        return vars(self) | {"_last": []}

    def of(self, trace: Any, eta: Tensor) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        """Log likelihoods ``(R,)``, slopes ``(R, N, C)``, and what gives the curvatures ``(R, N, C, C)``, detached.

        :param trace: where the rest of the site is read.
        :param eta: blocks ``(R, N, C)``.
        """
        part, eta = self._formula(trace, eta), eta.detach()
        if part is None:
            return slope_and_curvature(self.slot.log_likelihood(trace), self.slot.layout, eta)
        return *part.slope(eta), lambda: part.curvature(eta)

    def in_graph(self, trace: Any, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same three in one graph."""
        part = self._formula(trace, eta)
        if part is None:
            return curvature_graph(self.slot.log_likelihood(trace), self.slot.layout, eta)
        return *part.slope(eta), part.curvature(eta)

    def _formula(self, trace: Any, eta: Tensor) -> LogisticPart | None:
        """That of the site, unless the rest of it carries a graph, of which a formula would know nothing."""
        if eta.dtype != torch.float64 or eta.shape[-1] > 1 or self.slot.mixture is not None:
            return None
        known = self._last[0] if self._last else None
        if known is not None and known[0] is trace:
            return known[2]
        others = self.slot.others(trace)
        if any(isinstance(x, Tensor) and x.requires_grad for x in others):
            return None
        found = known[2] if known is not None and _are_equal(known[1], others) else self._read(trace, eta, others)
        self._last[:] = [(trace, others, found)]
        return found

    def _read(self, trace: Any, eta: Tensor, others: list[Any]) -> LogisticPart | None:
        """The likelihood in closed form, if the predictor is its only parameter and it is Bernoulli."""
        if others[2] != [self.slot.parameter]:
            return None
        blocks = in_blocks(self.slot.log_likelihood(trace), self.slot.layout, eta.dtype)
        part = logistic(Part(blocks, torch.empty(0), torch.zeros_like(eta[0])))
        return part if isinstance(part, LogisticPart) else None


def _are_equal(first: list[Any], second: list[Any]) -> bool:
    """Whether two readings of a site are the same, to the last digit."""
    return len(first) == len(second) and all(a is b or _is_equal(a, b) for a, b in zip(first, second, strict=True))


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)
