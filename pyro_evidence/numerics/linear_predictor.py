"""Likelihoods that see the weights only through predictors: their derivatives as dense linear algebra."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_evidence.numerics.batched import BATCH_NUMBERS, HELD_NUMBERS
from pyro_evidence.numerics.derivatives import generic_directions, gradient, measured, passes, pullback
from pyro_evidence.numerics.linalg import expect

LogLikelihood = Callable[[Tensor], Tensor]  # eta (R,) + shape -> (R,)

CHUNK = BATCH_NUMBERS // 2  # numbers of a second, weighted J that may be held at a time


@dataclass(frozen=True)
class Layout:
    """Layout of a predictor whose elements couple within a datum: ``N`` data of ``C`` elements each."""

    shape: torch.Size
    coupled: tuple[int, ...]  # dims of shape that couple; the others run over data

    @cached_property
    def num_coupled(self) -> int:
        """``C``: classes, components, coordinates of one datum."""
        return torch.Size([self.shape[d] for d in self.coupled]).numel()

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The dims of ``shape``, those of data first."""
        return (*(d for d in range(len(self.shape)) if d not in self.coupled), *self.coupled)

    def blocks(self, eta: Tensor) -> Tensor:
        """``(R,) + shape`` to ``(R, N, C)``."""
        laid_out = eta.permute(0, *(1 + d for d in self.order))
        return laid_out.reshape(len(eta), -1, self.num_coupled)

    def natural(self, blocks: Tensor) -> Tensor:
        """``(R, N, C)`` to ``(R,) + shape``."""
        laid_out = blocks.reshape(len(blocks), *(self.shape[d] for d in self.order))
        return laid_out.permute(0, *(1 + self.order.index(d) for d in range(len(self.shape))))


def slope_and_curvature(
    log_likelihood: LogLikelihood, layout: Layout, eta: Tensor
) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """Log likelihoods ``(R,)``, slopes ``(R, N, C)``, and what gives the curvatures from the same graph.

    Curvatures are minus the second derivatives within each datum, ``(R, N, C, C)``.

    :param eta: blocks ``(R, N, C)``.
    """
    eta = eta.detach().requires_grad_()
    with torch.enable_grad():
        value, slope, blocks = _sloped(log_likelihood, layout, eta)
    return value.detach(), slope.detach(), partial(blocks, False)


def curvature_graph(log_likelihood: LogLikelihood, layout: Layout, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log likelihoods ``(R,)``, slopes ``(R, N, C)`` and curvatures ``(R, N, C, C)``, all in one graph.

    :param eta: blocks ``(R, N, C)``, with a graph or without.
    """
    eta = eta if eta.requires_grad else eta.detach().requires_grad_()
    value, slope, blocks = _sloped(log_likelihood, layout, eta)
    return value, slope, blocks(True)


def _sloped(
    log_likelihood: LogLikelihood, layout: Layout, eta: Tensor
) -> tuple[Tensor, Tensor, Callable[[bool], Tensor]]:
    with measured() if eta.shape[-1] > 1 else nullcontext() as kept:
        value = log_likelihood(layout.natural(eta))
        slope = pullback(value.sum(), eta, create_graph=True)
    at_once = kept.passes_at_once if kept is not None else 1
    return value, slope, partial(_blocks, slope, eta, at_once)


def _blocks(slope: Tensor, eta: Tensor, at_once: int, create_graph: bool) -> Tensor:
    if not slope.requires_grad:
        return eta.new_zeros(*eta.shape, eta.shape[-1])
    if eta.shape[-1] == 1:
        return -pullback(slope.sum(), eta, create_graph=create_graph).unsqueeze(-1)
    one_hot = torch.eye(eta.shape[-1], dtype=eta.dtype, device=eta.device)
    cotangents = one_hot[:, None, None, :].expand(-1, *eta.shape)
    rows = torch.cat([passes(slope, eta, chunk, create_graph) for chunk in cotangents.split(at_once)])
    return -rows.permute(1, 2, 0, 3)


def is_separable(log_likelihood: LogLikelihood, layout: Layout, eta: Tensor, tolerance: float) -> bool:
    """Whether the second derivatives at ``eta``, blocks ``(R, N, C)``, vanish outside the layout's blocks.

    One product with a generic vector tells.
    """
    eta = eta.detach().clone().requires_grad_()
    slope = pullback(log_likelihood(layout.natural(eta)).sum(), eta, create_graph=True)
    v = generic_directions(1, eta.numel(), eta).reshape(eta.shape)
    inside = (_blocks(slope, eta, 1, False) @ v.unsqueeze(-1)).squeeze(-1)
    everywhere = -pullback(slope, eta, v)
    return bool(((everywhere - inside).abs() <= tolerance * (1.0 + inside.abs().amax())).all())


def gram(J: Tensor, B: Tensor) -> Tensor:
    """``sum_n J_n' B_n J_n``, shape ``(R, D, D)``; no second ``J`` is ever held.

    :param J: ``(N, C, D)``.
    :param B: ``(R, N, C, C)``.
    """
    expect(2.0 * J.numel() * J.shape[-1])
    if J.requires_grad:
        return J.flatten(0, 1).mT @ (B @ J).flatten(1, 2)
    return _Gram.apply(J, B) if B.requires_grad else _Gram.forward(J, B)


class _Gram(torch.autograd.Function):
    """:func:`gram` of a constant ``J``: keeps nothing for its derivative but its arguments."""

    @staticmethod
    def forward(J: Tensor, B: Tensor) -> Tensor:
        num_rows, D = len(B), J.shape[-1]
        if num_rows * J.numel() <= CHUNK:
            return J.flatten(0, 1).mT @ _weighted(J, B).flatten(1, 2)
        total = J.new_zeros(num_rows, D, D)
        for part, rows in _chunks(J, num_rows):
            weighted = _weighted(part, B[:, rows]).flatten(1, 2)
            total.baddbmm_(part.flatten(0, 1).mT.expand(num_rows, -1, -1), weighted)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, Tensor]:
        (J,), (G,) = ctx.saved_tensors, cotangents
        found = []  # J_n G J_n', (R, N, C, C)
        for part, _ in _chunks(J, len(G)):
            left = (part.flatten(0, 1) @ G).unflatten(1, part.shape[:2])
            single = part.shape[1] == 1
            found.append((left * part).sum(-1, keepdim=True) if single else torch.einsum("rnid,njd->rnij", left, part))
        return None, torch.cat(found, 1)


def gram_diagonal(J: Tensor, B: Tensor) -> Tensor:
    """Diagonal of :func:`gram`, shape ``(R, D)``."""
    parts = [(part * _weighted(part, B[:, rows])).sum((1, 2)) for part, rows in _chunks(J, len(B))]
    return torch.stack(parts).sum(0)


def _chunks(J: Tensor, num_rows: int) -> Iterator[tuple[Tensor, slice]]:
    """Runs of data, few enough for :data:`CHUNK`."""
    size = max(1, CHUNK // max(1, num_rows * J[:1].numel()))
    for start in range(0, len(J), size):
        yield J[start : start + size], slice(start, start + size)


def _weighted(J: Tensor, B: Tensor) -> Tensor:
    """``B_n J_n``, shape ``(R, N, C, D)``."""
    return B * J if B.shape[-1] == 1 else B @ J


Function = Callable[[Tensor], Tensor]  # rows (R, D) -> (R,)
EPS = torch.finfo(torch.float64).eps
PLACES = (0.0, 0.7, -2.9, 6.1)  # predictors at which a likelihood is looked at
CLOSE = 1e-9  # relative difference of two ways to compute a number


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """The log likelihood of independent data behind one predictor each by formulas, with the graph of its fields.

    :ivar targets: times the weights of data, but for normal ones, ``(N, 1)``.
    :ivar size: precision, rate at zero or number of trials, times the weights of data, ``(N, 1)``.
    :ivar constant: of all data, nats, ``()``.
    """

    value: ClassVar[Callable[..., Tensor]]  # of blocks (R, N, 1), each datum's but for the constant, nats
    orders: ClassVar[Callable[..., tuple[Tensor, Tensor]]]  # its first derivative, and minus its second

    targets: Tensor
    size: Tensor
    constant: Tensor

    def __call__(self, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log likelihood ``(R,)`` of blocks ``(R, N, 1)``, slope ``(R, N, 1)`` and curvature ``(R, N, 1, 1)``."""
        slope, curvature = self.orders(eta)
        return self.log_likelihood(eta), slope, curvature.unsqueeze(-1)

    def log_likelihood(self, eta: Tensor) -> Tensor:
        """The first of these."""
        return self.constant + self.value(eta).sum((-2, -1))


class NormalTargets(ClosedForm):
    """Normal about the predictor."""

    def value(self, eta: Tensor) -> Tensor:
        return -0.5 * self.size * (self.targets - eta).square()

    def orders(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        return self.size * (self.targets - eta), self.size.expand_as(eta)


class PoissonTargets(ClosedForm):
    """Counts, of which the predictor is the log rate."""

    def value(self, eta: Tensor) -> Tensor:
        return self.targets * eta - self.size * eta.exp()

    def orders(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        expected = self.size * eta.exp()
        return self.targets - expected, expected


class BinomialTargets(ClosedForm):
    """Numbers of successes, of which the predictor is the log odds."""

    def value(self, eta: Tensor) -> Tensor:
        return self.targets * eta + self.size * torch.nn.functional.logsigmoid(-eta)

    def orders(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        expected = self.size * eta.sigmoid()
        return self.targets - expected, expected * (-eta).sigmoid()


@dataclass(frozen=True, eq=False)
class Part:
    """One observed site behind a linear predictor ``eta = J y + c``; ``N`` data of ``C`` coupled elements."""

    log_likelihood: Function  # blocks (R, N, C) -> (R,)
    J: Tensor  # (N, C, D)
    c: Tensor  # (N, C)
    eps: float = field(default=EPS, kw_only=True)  # relative rounding of the log likelihood
    closed: ClosedForm | None = field(default=None, kw_only=True)  # derivatives by formulas, without autograd

    def eta(self, y: Tensor) -> Tensor:
        """Predictors of rows ``(R, D)``, shape ``(R, N, C)``."""
        return (y @ self.J.flatten(0, 1).mT).view(-1, *self.c.shape) + self.c

    def predictor(self, y: Tensor) -> Tensor:
        """Predictors of one row ``(D,)``, shape ``(1, N, C)``."""
        return torch.addmv(self.c.flatten(), self.columns.mT, y).view(1, *self.c.shape)

    def slope(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """Log likelihood ``(R,)`` and its derivative in ``eta``, shape ``(R, N, C)``."""
        if self.closed is not None:
            return self.closed(eta)[:2]
        return gradient(lambda e, _: self.log_likelihood(e), eta, eta)

    def curvature(self, eta: Tensor) -> Tensor:
        """Minus the second derivatives, shape ``(R, N, C, C)``."""
        return self.derivatives(eta)[1]

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """Derivative ``(R, N, C)`` and :meth:`curvature` in ``eta``."""
        if self.closed is not None:
            slope, curvature = self.closed.orders(eta)
            return slope, curvature.unsqueeze(-1)
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


def in_blocks(log_likelihood: Function, layout: Layout, dtype: torch.dtype) -> Function:
    """The likelihood as a function of blocks ``(R, N, C)``, evaluated in ``dtype``."""
    return lambda blocks: log_likelihood(layout.natural(blocks.to(dtype))).double()


def agree(double: Function, own: Function, c: Tensor) -> bool:
    """Whether a likelihood in single precision takes predictors in double precision: theirs are added up in it."""
    try:
        values = torch.stack([f((c + x).unsqueeze(0))[0] for x in PLACES for f in (double, own)])
    except (RuntimeError, TypeError, ValueError):  # what a distribution may say to two dtypes
        return False
    return bool(((values[::2] - values[1::2]).abs() <= 1e-3 * (len(c) + values[1::2].abs())).all())
