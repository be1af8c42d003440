"""Second derivatives of each factor in the coordinates on which it depends: for all at once, or for a few wide ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from pyro_evidence.numerics.derivatives import Forward, passes, pullback
from pyro_evidence.precision.elimination import coloured

AT_ONCE = 64  # reverse passes

Values = Callable[[Tensor], tuple[Tensor, ...]]  # u (D,) to the factors of each family, (F,) each; or rows of both


@dataclass(frozen=True)
class Second:
    """Second derivatives of some families of factors.

    Along the sum of all coordinates of one colour, and then of another, the derivative of a factor is that in the two
    coordinates of these colours on which it depends, because that is no more than one of each.
    """

    size: int
    index: tuple[Tensor, ...]  # (F, k) each

    @cached_property
    def colours(self) -> Tensor:
        """``(D,)``."""
        return coloured(self.size, self.index)

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of colours that meet in some factor."""
        num = int(self.colours.max()) + 1 if len(self.colours) else 0
        keys = [(c.unsqueeze(-1) * num + c.unsqueeze(-2)).reshape(-1).unique() for c in self._own]
        every = torch.cat(keys).unique().tolist() if keys else []
        return [(k // num, k % num) for k in every if k // num <= k % num]

    @cached_property
    def _own(self) -> list[Tensor]:
        return [self.colours[index] for index in self.index]

    @cached_property
    def _places(self) -> list[Tensor]:
        """For each family, which of :attr:`pairs` each element is, ``(F, k, k)``."""
        num = int(self.colours.max()) + 1
        place = torch.zeros(num, num, dtype=torch.long, device=self.colours.device)
        for i, (a, b) in enumerate(self.pairs):
            place[a, b] = place[b, a] = i
        return [place[c.unsqueeze(-1), c.unsqueeze(-2)] for c in self._own]

    def _mask(self, colour: int, like: Tensor) -> Tensor:
        return (self.colours == colour).to(like).expand_as(like).unsqueeze(0)

    def _each(self, values: Values, u: Tensor, create_graph: bool) -> Iterator[tuple[Tensor, ...]]:
        """Second derivatives of every factor along each pair of colours, in the order of :attr:`pairs`."""
        with torch.enable_grad():
            u = u if u.requires_grad else u.detach().requires_grad_()
            every = torch.cat(values(u), -1)
            first = Forward(every, u, create_graph=True)
            for a, partners in groupby(self.pairs, lambda pair: pair[0]):
                slope = first.along(self._mask(a, u))[0]
                second = Forward(slope, u, create_graph=create_graph)
                for _, b in partners:
                    yield second.along(self._mask(b, u))[0].split([len(index) for index in self.index], -1)

    def elements(self, values: Values, u: Tensor) -> tuple[Tensor, ...]:
        """Minus the second derivatives, ``(F, k, k)`` for each family; ``(R, F, k, k)`` at rows ``(R, D)``."""
        along, found = list(self._each(values, u, False)), []
        for i, place in enumerate(self._places):
            pairs = torch.stack([each[i] for each in along], -1)  # (..., F, P), of which each entry takes one
            flat = place.flatten(1).expand(*pairs.shape[:-1], -1)
            found.append(-pairs.gather(-1, flat).reshape(*pairs.shape[:-1], *place.shape[1:]))
        return tuple(found)

    @property
    def num_colours(self) -> int:
        """Number of colours, one more than the highest."""
        return int(self.colours.max()) + 1 if len(self.colours) else 0

    def firsts(self, values: Tensor, u: Tensor) -> list[Tensor]:
        """Derivatives of all factors ``(R, F)`` at rows ``(R, D)`` along each colour, with a graph."""
        first = Forward(values, u, create_graph=True)
        return [first.along(self._mask(colour, u))[0] for colour in range(self.num_colours)]

    def seconds(self, firsts: Sequence[Tensor], u: Tensor, create_graph: bool) -> Iterator[Tensor]:
        """Derivatives of these along each pair of colours, ``(R, F)`` in the order of :attr:`pairs`."""
        for a, partners in groupby(self.pairs, lambda pair: pair[0]):
            second = Forward(firsts[a], u, create_graph=create_graph)
            for _, b in partners:
                yield second.along(self._mask(b, u))[0]

    def slopes(self, values: Values, u: Tensor, weights: Sequence[Tensor], wrt: Sequence[Tensor]) -> list[Tensor]:
        """Derivatives in ``wrt`` of ``sum(weights * elements)``, one pair of colours held at a time."""
        totals = [torch.zeros_like(x) for x in wrt]
        for number, found in enumerate(self._each(values, u, True)):
            total = sum(
                ((weight * (place == number)).sum((-1, -2)) * value).sum()
                for weight, place, value in zip(weights, self._places, found, strict=True)
            )
            if isinstance(total, Tensor) and total.requires_grad:
                parts = torch.autograd.grad(-total, list(wrt), allow_unused=True, retain_graph=True)
                totals = [t if p is None else t + p for t, p in zip(totals, parts, strict=True)]
        return totals


def hessians_of_few(values: Tensor, index: Tensor, u: Tensor) -> Tensor:
    """Minus the second derivatives of each of ``values`` ``(F,)`` in its coordinates, ``(F, k, k)``.

    :param index: the coordinates, ``(F, k)``.
    :param u: ``(D,)``, of which the values are made.
    """
    found = []
    for value, own in zip(values, index, strict=True):
        slope = pullback(value, u, create_graph=True)[own]
        one_hot = torch.eye(len(own), dtype=slope.dtype, device=slope.device)
        if slope.requires_grad:
            rows = [passes(slope, u, chunk, False)[:, own] for chunk in one_hot.split(AT_ONCE)]
            found.append(-torch.cat(rows))
        else:
            found.append(torch.zeros_like(one_hot))
    return torch.stack(found)


def slopes_of_few(values: Tensor, index: Tensor, weights: Tensor, u: Tensor, wrt: Sequence[Tensor]) -> list[Tensor]:
    """Derivatives in ``wrt`` of ``sum(weights * hessians)``.

    :param weights: symmetric, ``(F, k, k)``.
    """
    totals = [torch.zeros_like(x) for x in wrt]
    for value, own, weight in zip(values, index, weights, strict=True):
        slope = pullback(value, u, create_graph=True)
        if not slope.requires_grad:
            continue
        for i, row in enumerate(weight):
            product = pullback(slope[own[i]], u, create_graph=True)[own] @ row
            if product.requires_grad:
                parts = torch.autograd.grad(-product, list(wrt), allow_unused=True, retain_graph=True)
                totals = [t if p is None else t + p for t, p in zip(totals, parts, strict=True)]
    return totals
