r"""Blocks integrated by adaptive Gauss-Hermite quadrature, the coordinates that they share by Laplace around that.

.. math:: \log p(D) \approx \sum_g \log \int p(D_g, b_g \mid \hat w)\, db_g + \log p(\hat w)
    + \tfrac P2 \log 2\pi - \tfrac12 \log|H|

where the integrals are sums over nodes at the mode of each block, in units of its curvature (Naylor and Smith, 1982;
Liu and Pierce, 1994), and ``H`` is minus the second derivative of their sum in the shared ``w``, the nodes moving with
the modes to first order, or held (Louis, 1982).  With more nodes than one both are those of the
integrals, up to their error.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyro_evidence.blocks.integrals import integrals, is_linear, with_derivatives
from pyro_evidence.blocks.local import (
    Local,
    Modes,
    Nodes,
    Path,
    beside,
    block_modes,
    local,
    path,
    placed,
    require_curved,
    solved,
)
from pyro_evidence.blocks.partition import Partition
from pyro_evidence.blocks.terms import BlockDensity, RowTerms, Terms
from pyro_evidence.errors import NotAMode
from pyro_evidence.numerics import evidence
from pyro_evidence.numerics.batched import Batched
from pyro_evidence.numerics.derivatives import pullback, pullbacks
from pyro_evidence.numerics.linalg import Label, cholesky
from pyro_evidence.numerics.line_search import Backtracking, Line, Real
from pyro_evidence.numerics.quadrature.rules import block_rule
from pyro_evidence.precision.blocks import BlockPrecision, StepFactor, block_plan
from pyro_evidence.precision.dense import Pattern
from pyro_evidence.precision.elimination import Fronts, Order

NUM_STEPS = 60
PATIENCE = 8  # steps that neither halve the least decrement nor gain a nat: rounding leads them
FIRST_SHIFT = 1e-6  # of the largest diagonal entry, of one step of the search only
SETTLED = 1e-6  # part of the tolerance: the step that is taken is not Newton's to the last digit


@dataclass(frozen=True)
class Limits:
    """What counts as a mode.

    :ivar tolerance: squared length of a step, in posterior standard deviations.
    :ivar slack: relative rounding of the log evidence.
    """

    tolerance: float
    slack: float


@dataclass(frozen=True)
class Place:
    """One point of the search over shared coordinates, or one for each row ``(R,)``.

    :ivar each: the log integral of each block, and last what belongs to none, nats, ``(..., G + 1)``.
    """

    shared: Tensor  # (..., P)
    modes: Modes
    each: Tensor
    slope: Tensor  # (..., P)
    curvature: Tensor  # (..., P, P)
    follows: Tensor  # (..., n, P) derivative of the blocks' modes in shared coordinates

    @cached_property
    def step(self) -> Tensor:
        """Newton's step of shared coordinates, ``(P,)``."""
        return torch.cholesky_solve(self.slope.unsqueeze(-1), _shifted(self.curvature)).squeeze(-1)

    def own_at(self, p: Partition, shared: Tensor) -> Tensor:
        """The modes of all blocks that are expected at other shared coordinates ``(..., P)``, to first order."""
        moved = (self.follows @ (shared - self.shared).unsqueeze(-1)).squeeze(-1)
        return self.modes.own + self.modes.step(p) + moved

    @property
    def decrement(self) -> float:
        """Twice what that step promises, nats."""
        return float(self.slope @ self.step) if len(self.shared) else 0.0

    @property
    def value(self) -> float:
        """Log density of shared coordinates and data, blocks integrated, nats."""
        return float(self.each.sum())


@dataclass(frozen=True)
class Marginal:
    """The log density of what blocks share, the blocks integrated.

    :ivar num: nodes on each axis of a block.
    """

    density: BlockDensity
    num: int
    limits: Limits
    label: Label

    @property
    def partition(self) -> Partition:
        """Blocks and shared coordinates."""
        return self.density.partition

    def place(self, terms: Terms | RowTerms, own: Tensor, shared: Tensor) -> Place:
        """Blocks' modes from ``own`` ``(..., n)``, integrals around them, derivatives in ``shared`` ``(..., P)``."""
        modes = block_modes(terms, own, shared, self.limits.tolerance)
        if isinstance(terms, Terms):
            require_curved(terms, modes)
        p, own = self.partition, modes.own + modes.step(self.partition)
        nodes = placed(p, own, modes.tril, self.num)
        along = path(p, modes.tril, beside(terms, own, shared), shared.detach())
        found = with_derivatives(terms, nodes, shared.detach(), along)
        each, slope, curvature = (x.detach() for x in (found.each, found.slope, found.curvature))
        return Place(shared.detach(), modes, each, slope, curvature, along.slope)

    def find(self, theta: Tensor, u: Tensor) -> Place:
        """The mode over shared coordinates, searched from ``u`` ``(D,)``.

        :raises NotAMode: where the search does not arrive.
        :raises NotPositiveDefinite: where the curvature there is not positive definite.
        """
        terms, p = self.density.terms(theta.detach()), self.partition
        here = self._climbed(terms, self.place(terms, u[p.own], u[p.shared]))
        if here.decrement > max(self.limits.tolerance, self.limits.slack * (1.0 + abs(here.value))):
            raise NotAMode(self._message(here))
        return here

    def _climbed(self, terms: Terms, here: Place) -> Place:
        """The end of the search: a mode, or the best place where steps no longer lead anywhere."""
        best, waited = here, 0
        for _ in range(NUM_STEPS if len(here.shared) else 0):
            settled = here.decrement <= SETTLED * self.limits.tolerance
            new = None if settled or waited > PATIENCE else self._moved(terms, here)
            if new is None:
                break
            better = new.decrement <= 0.5 * best.decrement or new.value > best.value + 1.0
            here, best, waited = new, new if better else best, 0 if better else waited + 1
        return best if best.decrement < here.decrement else here

    def _moved(self, terms: Terms, here: Place) -> Place | None:
        """The first of ever shorter steps that rises, or that halves what the next one promises.

        Close to the mode the second counts: slope and value agree up to the error of the nodes only.
        """
        slack, scale = self.limits.slack * (1.0 + abs(here.value)), 1.0
        for _ in range(30):
            with suppress(ArithmeticError):
                shared = here.shared + scale * here.step
                new = self.place(terms, here.own_at(self.partition, shared), shared)
                rise, lost = new.value - here.value, 0.1 * min(here.decrement**0.5, 1.0)
                if rise > slack or (new.decrement <= 0.5 * here.decrement and rise > -lost):
                    return new
            scale *= 0.5
            if scale * here.decrement < slack:  # nothing that can be told from rounding
                return None
        return None

    def _message(self, here: Place) -> str:
        worst = int(here.slope.abs().argmax())
        return (
            f"the search for the mode of what blocks share stopped where the slope is still "
            f"{float(here.slope[worst]):.2e} at {self.label(int(self.partition.shared[worst]))} (a step promises "
            f"{0.5 * here.decrement:.2e} nats); expected a maximum. Standardise the data, give the site a tighter "
            f"prior, or take nodes=1."
        )

    def log_evidence(self, here: Place) -> Tensor:
        """Log evidence at the mode, nats, ``()``."""
        tril = cholesky(here.curvature, "curvature of what blocks share", self._named)
        log_det = 2.0 * tril.diagonal().log().sum()
        return evidence.log_evidence(here.each.sum(), log_det, len(here.shared))

    def _named(self, row: int) -> str:
        return self.label(int(self.partition.shared[row]))

    def whole(self, here: Place) -> Tensor:
        """All coordinates at a place, ``(D,)``."""
        own = here.modes.own + here.modes.step(self.partition)
        return torch.cat([own, here.shared, self.density.kept])[self.partition.place]

    def precision(self, theta: Tensor, here: Place) -> BlockPrecision:
        """Shared coordinates by the curvature of the integrals; each block, given these, by its own.

        :raises NotPositiveDefinite: naming a shared coordinate.
        """
        p, tril = self.partition, cholesky(here.curvature, "curvature of what blocks share", self._named)
        factors, parts = [], here.follows.split([front.numel() for front in p.fronts])
        for front, L, part in zip(p.fronts, here.modes.tril, parts, strict=True):
            factors.append(StepFactor(L, -L.mT @ part.reshape(*front.shape, -1)))
        if len(p.held):
            one = torch.ones(len(p.held), 1, 1).to(here.shared)
            factors.append(StepFactor(one, one[..., :0]))
        return BlockPrecision(block_plan(Pattern(p.size, ()), order_of(p)), tuple(factors), tril)


def order_of(p: Partition) -> Order:
    """Blocks first, held coordinates with them, then what they share."""
    fronts = [Fronts(front, p.shared.expand(len(front), -1)) for front in p.fronts]
    if len(p.held):
        fronts.append(Fronts(p.held.unsqueeze(-1), p.held.new_zeros(len(p.held), 0)))
    return Order((tuple(fronts),), p.shared)


def _shifted(A: Tensor) -> Tensor:
    """A Cholesky factor for one step of the search, with as much on the diagonal as that takes."""
    tril, info = torch.linalg.cholesky_ex(A)
    shift = FIRST_SHIFT * float(A.diagonal().abs().max())
    while bool(info):
        tril, info = torch.linalg.cholesky_ex(A + shift * torch.eye(len(A)).to(A))
        shift *= 10.0
    return tril


def slope(marginal: Marginal, place: Place, theta: Tensor) -> tuple[Tensor, Tensor]:
    r"""Exact derivatives of the log evidence in ``theta``, and of the log joint at the fixed mode, both ``(T,)``.

    Nodes move with the hyperparameters and with the shared coordinates ``w``: their centres by the implicit function
    theorem, :math:`m + D^{-1} \partial_b \log p`, their widths by the derivative of ``D``.  With ``g(w, theta)`` the
    slope that vanishes at the mode, the nodes' dependence on ``w`` included in its derivative ``J``,

    .. math:: \frac{dE}{d\theta} = \partial_\theta E - \partial_w E\, J^{-1}\, \partial_\theta g
    """
    with torch.enable_grad():
        theta = theta.detach().clone().requires_grad_()
        w, at_nodes = (place.shared.clone().requires_grad_() for _ in range(2))
        terms = marginal.density.terms(theta)
        nodes, follows, joint = _following(marginal.num, terms, place.modes, at_nodes)
        partial = pullback(joint, theta)
        if not len(w):
            return pullback(integrals(terms, nodes, w).sum(), theta), partial
        found = with_derivatives(terms, nodes, w, follows, create_graph=True)
        W = torch.cholesky_inverse(torch.linalg.cholesky(place.curvature))
        total = found.each.sum() - 0.5 * (W * found.curvature).sum()
        by_theta, by_w, by_nodes = pullbacks(total, theta, w, at_nodes)
        moving = torch.stack([pullback(one, at_nodes) for one in found.slope])
        back = torch.linalg.solve((moving - found.curvature.detach()).mT, by_w + by_nodes)
        return by_theta - pullback(found.slope, theta, back), partial


def _following(num: int, terms: Terms, modes: Modes, shared: Tensor) -> tuple[Nodes, Path, Tensor]:
    """Nodes and their path as functions of shared coordinates and hyperparameters, and the log joint."""
    p = terms.density.partition
    start = modes.own.detach().clone().requires_grad_()
    value = terms(start.unsqueeze(0), shared).sum()
    centre = start.detach() + solved(p, modes.tril, pullback(value, start, create_graph=True))
    tril = tuple(torch.linalg.cholesky(D) for D in local(terms, centre, shared, create_graph=True).curvature)
    nodes = placed(p, centre, tril, num)
    if is_linear(terms.density, len(nodes.rows)):
        return nodes, Path(shared, shared.new_zeros(len(start), len(shared))), value
    return nodes, path(p, tril, beside(terms, centre, shared, create_graph=True), shared), value


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
