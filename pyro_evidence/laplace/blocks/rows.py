"""Modes of what blocks share at many hyperparameters at once: the derivatives of all rows are taken together."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.laplace.blocks.local import Local, Modes
from pyro_evidence.laplace.blocks.marginal import Marginal, Place
from pyro_evidence.laplace.blocks.terms import RowTerms
from pyro_evidence.numerics.backtracking import Backtracking, Line, Real
from pyro_evidence.numerics.batched import Batched
from pyro_evidence.numerics.quadrature.block_rules import block_rule

SOON = 15  # steps
MOST_SHARED = 20  # coordinates, each with a pass over all rows for its second derivatives
NUMBERS = 2**21  # log densities of terms at the nodes of all rows that are evaluated together


def halves(rise: Real, _scale: Real, line: Line) -> Real:
    """Whether a step leaves half as much to gain; heights say less here, for nodes move with what blocks share."""
    return rise >= 0.5 * line.promised


TOGETHER = Backtracking(rule=halves, num_trials=5)


@dataclass(frozen=True)
class Reached(Batched):
    """Where the searches are."""

    own: Tensor  # (R, n) modes of all blocks
    follows: Tensor  # (R, n, P) how these follow what blocks share
    w: Tensor  # (R, P) what blocks share
    step: Tensor  # (R, P) Newton's, nan where the curvature is not positive definite
    decrement: Tensor  # (R,) twice what it promises, nats
    value: Tensor  # (R,) nats

    @property
    def objective(self) -> Tensor:
        """What is left to gain, negative."""
        return -self.decrement


def near_places(marginal: Marginal, theta: Tensor, u: Tensor) -> list[Place | None]:
    """The modes of what blocks share near rows ``(R, D)``, each at its hyperparameters ``(R, T)``.

    :return: None for rows where a few steps do not arrive, and for all where the model takes no batch of rows.
    """
    p, joint = marginal.partition, marginal.density.joint
    if len(u) == 1 or joint.row_bytes is None or len(p.shared) > MOST_SHARED:
        return [None] * len(u)
    numbers = len(block_rule(marginal.num, p.width).nodes) * sum(len(owner) for owner in p.owner.values())
    found: list[Place | None] = []
    for t, start in zip(*(x.split(max(1, NUMBERS // max(1, numbers))) for x in (theta, u)), strict=True):
        try:
            found += Rows(marginal, t).near(start.detach())
        except RuntimeError:  # a row that breaks the batch; alone it says why
            found += [None] * len(t)
    return found


@dataclass(frozen=True)
class Rows:
    """Searches side by side."""

    marginal: Marginal
    theta: Tensor  # (R, T)

    def near(self, u: Tensor) -> list[Place | None]:
        """The modes near rows ``(R, D)``; None for rows where a few steps do not arrive."""
        p = self.marginal.partition
        going = torch.arange(len(u), device=u.device)
        here = self._reached(going, u[:, p.own], u[:, p.shared])
        for _ in range(SOON):
            going = going[here.decrement[going] > self.marginal.limits.tolerance]
            if not len(going):
                break
            here, stuck = self._moved(here, going)
            going = going[~torch.isin(going, stuck)]
        return self._places(here)

    def _moved(self, here: Reached, going: Tensor) -> tuple[Reached, Tensor]:
        """After steps that leave half as much to gain, and the rows that have none."""

        def trial(rows: Tensor, scale: Tensor) -> Reached:
            moved = scale.unsqueeze(-1) * here.step[rows]
            own = here.own[rows] + (here.follows[rows] @ moved.unsqueeze(-1)).squeeze(-1)
            return self._reached(rows, own, here.w[rows] + moved)

        return TOGETHER(here, going, Line(here.decrement, torch.zeros_like(here.decrement)), trial)

    def _reached(self, rows: Tensor, own: Tensor, shared: Tensor) -> Reached:
        place = self._place(rows, own, shared)
        tril, info = torch.linalg.cholesky_ex(place.curvature)
        step = torch.cholesky_solve(place.slope.unsqueeze(-1), tril).squeeze(-1)
        value = place.each.sum(-1)
        left = torch.where((info == 0) & value.isfinite(), (place.slope * step).sum(-1), torch.nan)
        own = place.modes.own + place.modes.step(self.marginal.partition)
        return Reached(own, place.follows, shared, step, left, value)

    def _place(self, rows: Tensor, own: Tensor, shared: Tensor) -> Place:
        return self.marginal.place(RowTerms(self.marginal.density, self.theta[rows]), own, shared)

    def _places(self, here: Reached) -> list[Place | None]:
        """Where rows have arrived, what is there."""
        limits = self.marginal.limits
        enough = (limits.slack * (1.0 + here.value.abs())).clamp(min=limits.tolerance)  # rounding, if that is more
        rows = (here.decrement <= enough).nonzero().flatten()
        places = self._place(rows, here.own[rows], here.w[rows])
        known = {row: _row(places, i) for i, row in enumerate(rows.tolist())}
        return [known.get(row) for row in range(len(here.value))]


def _row(all_of: Place, row: int) -> Place:
    """One of many places."""
    here = all_of.modes.here
    inside = Local(here.value[row], here.slope[row], tuple(D[row] for D in here.curvature))
    modes = Modes(all_of.modes.own[row], inside, tuple(L[row] for L in all_of.modes.tril))
    shared, each, slope = all_of.shared[row], all_of.each[row], all_of.slope[row]
    return Place(shared, modes, each, slope, all_of.curvature[row], all_of.follows[row])
