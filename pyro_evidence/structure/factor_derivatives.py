"""Second derivatives of each factor in the coordinates on which it depends: for all at once, or for a few wide ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from pyro_evidence.numerics import batched
from pyro_evidence.numerics.derivatives import Forward, generic_directions, passes, pullback
from pyro_evidence.numerics.recorded import Replay, Unrecordable, replay
from pyro_evidence.precision.elimination import coloured
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure.factor_cells import FactorFamily, cells

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


MANY = 500  # operations of one run
SITES = 25  # with fewer terms, of any kind, there is no loop around them
GAIN = 2  # operations that become one, on average


@dataclass(frozen=True)
class Steps:
    """The terms of a log joint density by a few operations on many at a time; made by :func:`steps`."""

    replay: Replay
    sizes: tuple[int, ...]  # of the families
    _kept: list[int | None] = field(default_factory=list, repr=False, compare=False)

    def families(self, u: Tensor, theta: Tensor) -> tuple[Tensor, ...]:
        """The factors' values of each family, nats, ``(F,)`` each."""
        return self.replay(u, theta)[: sum(self.sizes)].split(self.sizes)

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(D, w | hyperparameters)`` of rows ``(R, D)``, nats, shape ``(R,)``."""
        if len(u) > 1 and not self._kept:
            with torch.enable_grad():
                self._kept.append(batched.bytes_per_row(self._one, u[0], theta if theta.dim() == 1 else theta[0]))
        row_bytes = self._kept[0] if len(u) > 1 else None  # what autograd keeps for each of many rows
        return batched.apply(self._one, (u, theta.expand(len(u), -1)), row_bytes, self._one)

    def _one(self, u: Tensor, theta: Tensor) -> Tensor:
        return self.replay(u, theta).sum()


def steps(joint: LogJoint, families: Sequence[FactorFamily], u: Tensor, theta: Tensor) -> Steps | None:
    """The terms of all sites, those of the families first; None where nothing is gained, or the model branches.

    :param u: where the model was followed, ``(D,)``.
    """
    with_families = {member.name for family in families for member in family.members}

    def terms(u: Tensor, theta: Tensor) -> list[Tensor]:
        found = cells(joint, u, theta)
        own = [member.of(found) for family in families for member in family.members]
        return own + [x for name, x in found.items() if name not in with_families]

    if len(joint.latents.names) + len(joint.discrete) + len(joint.observed) < SITES:
        return None
    try:
        made = replay(terms, u, theta)
    except Unrecordable:
        return None
    found = Steps(made, tuple(len(family.index) for family in families))
    is_gain = made.num_operations >= max(MANY, GAIN * len(made.batches))
    return found if is_gain and _is_right(found, joint, u, theta) else None


def _is_right(found: Steps, joint: LogJoint, u: Tensor, theta: Tensor) -> bool:
    """Whether the log joint is the model's own, where it was followed and elsewhere."""
    moved = generic_directions(3, len(u) + len(theta), u)[2]
    places = torch.stack([u, u + 0.3 * moved[: len(u)]])
    with torch.no_grad():
        pairs = [(f.log_joint(places, theta + 0.1 * moved[len(u) :])) for f in (found, joint)]
    limit = joint.rounding * (1.0 + pairs[1].abs())
    return bool((((pairs[0] - pairs[1]).abs() <= limit) | ~pairs[1].isfinite()).all())
