"""Densities of which draws are made, each coordinate moved to the marginal that importance weights say."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from pyro_evidence.numerics import importance
from pyro_evidence.numerics.quadrature.rules import quasi_normal

Self = TypeVar("Self", bound="Calibrated")

KNOTS = tuple(0.75 * k for k in range(-4, 5))  # standard normal quantiles, whose levels are matched


@dataclass(frozen=True, eq=False)
class QuantileMap:
    """A monotone map of each coordinate, smooth through pairs of quantiles, and straight beyond the last.

    Rational quadratics between the knots.  Gregory and Delbourgo (1982), eq. 3.

    :ivar before: knots in ascending order, ``(D, K)``.
    :ivar after: where they are moved, ``(D, K)``, ascending.
    """

    before: Tensor
    after: Tensor

    @cached_property
    def slopes(self) -> Tensor:
        """At the knots, ``(D, K)``: harmonic means of those of the chords on either side."""
        chords = self.after.diff(dim=1) / self.before.diff(dim=1)
        inner = 2.0 / (1.0 / chords[:, 1:] + 1.0 / chords[:, :-1])
        return torch.cat([chords[:, :1], inner, chords[:, -1:]], 1)

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Moved coordinates ``(S, D)``, and the log slope of each, ``(S, D)``."""
        x0, x1, y0, y1, d0, d1 = self._ends(u, self.before)
        chord, share = (y1 - y0) / (x1 - x0), ((u - x0) / (x1 - x0)).clamp(0.0, 1.0)  # the line beyond is added
        between = share * (1.0 - share)
        bottom = chord + (d0 + d1 - 2.0 * chord) * between
        rise = (y1 - y0) * (chord * share.square() + d0 * between) / bottom
        top = d1 * share.square() + 2.0 * chord * between + d0 * (1.0 - share).square()
        slope = (chord / bottom).square() * top
        return y0 + rise + slope * (u - x0 - share * (x1 - x0)), slope.log()

    def inverse(self, moved: Tensor) -> Tensor:
        """The coordinates that :meth:`forward` moved, ``(S, D)``."""
        x0, x1, y0, y1, d0, d1 = self._ends(moved, self.after)
        chord, height = (y1 - y0) / (x1 - x0), torch.minimum((moved - y0).relu(), y1 - y0)
        bent = height * (d0 + d1 - 2.0 * chord)
        a, b, c = (y1 - y0) * (chord - d0) + bent, (y1 - y0) * d0 - bent, -chord * height
        share = -2.0 * c / (b + (b.square() - 4.0 * a * c).sqrt())
        slope = torch.where(moved > y1, d1, d0)
        return x0 + share * (x1 - x0) + (moved - y0 - height) / slope

    def _ends(self, places: Tensor, knots: Tensor) -> tuple[Tensor, ...]:
        """The interval about each place ``(S, D)``: its ends before and after, and the slopes there."""
        right = torch.searchsorted(knots, places.mT.contiguous()).clamp(1, knots.shape[1] - 1)
        parts = (self.before, self.after, self.slopes)
        return tuple(part.gather(1, side).mT for part in parts for side in (right - 1, right))


def levels(like: Tensor) -> Tensor:
    """Probabilities below the knots, ``(K,)``."""
    return torch.special.ndtr(like.new_tensor(KNOTS))


def quantile_map(u: Tensor, log_weights: Tensor) -> QuantileMap | None:
    """From quantiles of draws ``(S, D)`` to those by their importance weights ``(S,)``.

    None where weights are as good as equal, or k-hat is above its threshold for certain.
    """
    found = importance.checked(log_weights)
    if found.pareto_k == -math.inf or not found.pareto_k < math.inf or importance.is_beyond(found.pareto_k, len(u)):
        return None
    equal, x = torch.full_like(found.weights, 1.0 / len(u)), u.double()
    knots = [importance.weighted_quantiles(x, each, levels(x)).mT.contiguous() for each in (equal, found.weights)]
    return QuantileMap(*knots) if all(bool((each.diff(dim=1) > 0).all()) for each in knots) else None


@dataclass(frozen=True, eq=False)
class Calibrated:
    """A density that draws are made of, with the marginals that importance weights say.

    :ivar map: of each coordinate; None where there is nothing to be moved, or it is not known.
    :ivar points: quasi-random draws, of which moments and quantiles are taken, ``(S, D)``, of :meth:`calibrated`.
    """

    map: QuantileMap | None = field(default=None, kw_only=True)
    points: Tensor = field(default_factory=partial(torch.zeros, 0), kw_only=True)

    @property
    def loc(self) -> Tensor:
        """The mode, ``(1, D)``."""
        raise NotImplementedError

    def _drawn(self, white: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`drawn` without the map."""
        raise NotImplementedError

    def _log_prob(self, u: Tensor) -> Tensor:
        """:meth:`log_prob` without the map."""
        raise NotImplementedError

    def drawn(self, white: Tensor) -> tuple[Tensor, Tensor]:
        """Draws ``(S, D)`` from white rows, and their log density, nats, ``(S,)``; infinite where it is unknown."""
        u, log_density = self._drawn(white)
        if self.map is None:
            return u, log_density
        moved, log_slope = self.map.forward(u)
        return moved, log_density - log_slope.sum(-1)

    def log_prob(self, u: Tensor) -> Tensor:
        """Log density of unconstrained coordinates ``(S, D)``, nats, ``(S,)``."""
        if self.map is None:
            return self._log_prob(u)
        before = self.map.inverse(u)
        return self._log_prob(before) - self.map.forward(before)[1].sum(-1)

    def calibrated(self: Self, num_points: int, log_weights: Callable[[Tensor, Tensor], Tensor]) -> Self:
        """With the map that so many quasi-random draws say.

        :param log_weights: of draws ``(S, D)`` and their log density, nats, ``(S,)``.
        """
        u, log_density = self._drawn(quasi_normal(num_points, self.loc.shape[1]).to(self.loc))
        found = quantile_map(u, log_weights(u, log_density))
        return replace(self, map=found, points=u if found is None else found.forward(u)[0])
