"""Adaptive quadrature over the whole line, and what lies beyond the last of its nodes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.numerics.derivatives import cached
from pyro_evidence.numerics.linalg import relative_rounding

NUM_NODES = 10  # of a panel
AROUND = (-8.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 8.0)  # standard deviations from a mode, where panels end at first
DEEP = 40.0  # nats below the highest, where panels end at last: what is lower counts for nothing in double precision
LAST = 40  # panels beyond these on each side, to e^40 times as far
HALVINGS = 60  # of a panel: its ends are then one number
PRECISE = 1e-11  # share of the integral by which a panel and its halves may differ
MOST = 8  # times as many nodes as are asked for, where panels go on to differ
FLATTEST = 1e-3  # slope of a tail in the log of the distance: what is flatter ends, if at all, beyond all numbers


@dataclass(frozen=True)
class Line:
    """Nodes that integrate a density over the line.

    :ivar x: ``(K,)``; the last on a side stands for all that is beyond where a tail has no end.
    :ivar log_length: that each stands for, ``(K,)``.
    :ivar log_density: there, nats, ``(K,)``; -inf where it is nan.
    :ivar error: of the log of the integral, nats: what the last halves of panels changed, and what a tail's slope of a
        panel earlier would; infinite where a tail does not fall.
    """

    x: Tensor
    log_length: Tensor
    log_density: Tensor
    error: float


@dataclass(frozen=True)
class Panels:
    """Intervals of ``t``, where ``x = loc + sd sinh(t)``, with Gauss's nodes in each.

    :ivar ends: ``(P, 2)``.
    :ivar x: nodes, with the log of the length that each stands for, and the log density there, ``(P, NUM_NODES)``.
    """

    ends: Tensor
    x: Tensor
    log_length: Tensor
    log_density: Tensor

    @property
    def log_mass(self) -> Tensor:
        """Of each, ``(P,)``."""
        return (self.log_length + _or_nothing(self.log_density)).logsumexp(1)

    @property
    def t(self) -> Tensor:
        """Of the nodes, ``(P, NUM_NODES)``."""
        return self.ends[:, :1] + self.ends.diff(dim=1) * gauss_legendre(NUM_NODES)[0].to(self.ends)

    @property
    def level(self) -> Tensor:
        """Log density of ``t`` at the nodes, ``(P, NUM_NODES)``."""
        return (
            self.log_density + self.log_length - (self.ends.diff(dim=1) * gauss_legendre(NUM_NODES)[1].to(self.x)).log()
        )


def _or_nothing(log_density: Tensor) -> Tensor:
    return log_density.nan_to_num(nan=-math.inf, neginf=-math.inf)


def _joined(first: Panels, second: Panels) -> Panels:
    """All panels in order."""
    found = [torch.cat(each) for each in zip(vars(first).values(), vars(second).values(), strict=True)]
    order = found[0][:, 0].argsort()
    return Panels(*(each[order] for each in found))


@cached(4)
def gauss_legendre(num: int) -> tuple[Tensor, Tensor]:
    """Gauss's nodes on (0, 1) and their weights, ``(num,)`` each; Golub and Welsch (1969).

    >>> x, weights = gauss_legendre(4)
    >>> float((weights * x**7).sum().round(decimals=12))
    0.125
    """
    n = torch.arange(1.0, num, dtype=torch.float64)
    beside = n / (4.0 * n.square() - 1.0).sqrt()
    values, vectors = torch.linalg.eigh(beside.diag(1) + beside.diag(-1))
    return 0.5 * (1.0 + values), vectors[0].square()


def on_line(log_density: Callable[[Tensor], Tensor], loc: Tensor, sd: Tensor, num: int, dtype: torch.dtype) -> Line:
    """The integral of a density with modes near ``loc`` ``(M,)``, of widths ``sd`` ``(M,)``, the highest first.

    By panels that are halved until halves add up to them.  They are even in ``t``, where ``x`` is the first mode plus
    its width times ``sinh t``: what falls as a power of the distance falls exponentially there.

    :param log_density: of rows ``(K,)``, nats, ``(K,)``; nan where it cannot be computed.
    :param num: of nodes, about, each of which stands for a like part of the integral where that asks for fewer.
    :param dtype: in which the density is computed.
    """

    def panels(ends: Tensor) -> Panels:
        place, weight = (each.to(loc) for each in gauss_legendre(NUM_NODES))
        t = ends[:, :1] + ends.diff(dim=1) * place
        x = loc[0] + sd[0] * t.sinh()
        length = ends.diff(dim=1) * weight * sd[0] * t.cosh()
        return Panels(ends, x, length.log(), log_density(x.reshape(-1)).view_as(x))

    places = (loc + sd * loc.new_tensor(AROUND).unsqueeze(-1)).flatten()
    first = _to_the_ends(panels, ((places - loc[0]) / sd[0]).asinh())
    tails, error = _tails(first)
    size = float(first.log_density[first.log_density.isfinite()].amax().abs())
    noise, before, opened, held = relative_rounding(dtype) * (1.0 + size), first.log_mass, first.ends, 0
    kept = list(tails)
    for _ in range(HALVINGS):
        middle = opened.mean(1)
        halves = panels(torch.stack([opened[:, 0], middle, middle, opened[:, 1]], 1).view(-1, 2))
        both = halves.log_mass.view(-1, 2).logsumexp(1)
        total = torch.cat([both, *(part.log_mass for part in kept)]).logsumexp(0)
        share, held = (both - total).exp(), held + halves.x.numel()
        change = (share - (before - total).exp()).abs()
        on = (change > PRECISE + noise * share) | (share > 4.0 * NUM_NODES / num)
        on = on & (held < MOST * num)
        error += float(change[~on].sum())
        done = (~on).repeat_interleave(2)
        kept.append(Panels(*(each[done] for each in vars(halves).values())))
        opened, before = halves.ends[~done], halves.log_mass[~done]
        if not len(opened):
            break
    x, log_length, height = (
        torch.cat([getattr(part, name).flatten() for part in kept]) for name in ("x", "log_length", "log_density")
    )
    return Line(x, log_length, _or_nothing(height), error)


def _to_the_ends(panels: Callable[[Tensor], Panels], cuts: Tensor) -> Panels:
    """Panels between ``cuts`` ``(C,)`` and whole numbers, and further ones as long as the density is not low there."""
    between = torch.arange(float(cuts.amin().floor()), float(cuts.amax().ceil()) + 1.0).to(cuts)
    edges = torch.cat([cuts, between]).unique()
    found = panels(torch.stack([edges[:-1], edges[1:]], 1))
    for _ in range(LAST):
        level, sides = found.level, []
        least = _or_nothing(level).amax() - DEEP
        if bool(level[0].amax() > least):  # nan, where numbers end, is not
            sides.append(torch.stack([found.ends[0, 0] - 1.0, found.ends[0, 0]]))
        if bool(level[-1].amax() > least):
            sides.append(torch.stack([found.ends[-1, 1], found.ends[-1, 1] + 1.0]))
        if not sides:
            break
        found = _joined(found, panels(torch.stack(sides)))
    return found


def _tails(found: Panels) -> tuple[list[Panels], float]:
    """What is beyond panels on the sides where the density is not low, a node each, and the error of that in nats.

    The log density of ``t`` goes on with the slope of the last panel; the error is what that of the one before says.
    """
    parts, error, total = list[Panels](), 0.0, found.log_mass.logsumexp(0)
    columns = torch.stack([found.t, found.level, found.x, found.log_density]).flatten(1)
    least = _or_nothing(found.level).amax() - DEEP
    for outward, flipped in ((-1.0, True), (1.0, False)):
        t, level, x, height = columns.flip(-1) if flipped else columns
        last = int((~level.isnan()).nonzero().max())
        if not bool(level[last] > least):
            continue
        a, b, c = (last - back * NUM_NODES for back in (2, 1, 0))
        before, slope = (outward * float((level[j] - level[i]) / (t[j] - t[i])) for i, j in ((a, b), (b, c)))
        if not slope < -FLATTEST:
            return [], math.inf
        edge = t[last] if last + 1 < len(t) else found.ends[0, 0] if flipped else found.ends[-1, 1]
        beyond = level[last] + slope * outward * (edge - t[last]) - math.log(-slope)
        error += abs(1.0 - (slope / before if before < -FLATTEST else 0.0)) * float((beyond - total).exp())
        each = (v.expand(1, 1) for v in (x[last], beyond - height[last], height[last]))
        parts.append(Panels(t[last].expand(1, 2), *each))
    return parts, error
