r"""Blocks integrated by adaptive Gauss-Hermite quadrature, the coordinates that they share by Laplace around that.

.. math:: \log p(D) \approx \sum_g \log \int p(D_g, b_g \mid \hat w)\, db_g + \log p(\hat w)
    + \tfrac P2 \log 2\pi - \tfrac12 \log|H|

where the integrals are sums over nodes at the mode of each block, in units of its curvature (Naylor and Smith, 1982;
Liu and Pierce, 1994), and ``H`` is minus the second derivative of their sum in the shared ``w``, the nodes moving with
the modes to first order, or held (Louis, 1982).  With more nodes than one both are those of the
integrals, up to their error.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.blocks.integrals import integrals, is_linear, with_derivatives
from pyro_evidence.blocks.local import (
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
    with_prior_expanded,
)
from pyro_evidence.blocks.partition import Partition, partition
from pyro_evidence.blocks.terms import BlockDensity, RowTerms, Terms
from pyro_evidence.errors import BadInput, NotAMode, UnsupportedModel
from pyro_evidence.numerics import evidence
from pyro_evidence.numerics.batched import BATCH_NUMBERS, Batched
from pyro_evidence.numerics.derivatives import pullback, pullbacks
from pyro_evidence.numerics.linalg import Label, cholesky
from pyro_evidence.numerics.line_search import Backtracking, Line, Real, along_step
from pyro_evidence.numerics.newton import Direction, Limits, by_absolute_value
from pyro_evidence.numerics.quadrature.rules import block_rule
from pyro_evidence.precision.blocks import BlockPrecision, StepFactor
from pyro_evidence.precision.choices import Curvature, exact_hessian
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.settings import check_count
from pyro_evidence.structure.factor_mode import SOON
from pyro_evidence.structure.factors import NotSparse
from pyro_evidence.structure.groups import Pruned
from pyro_evidence.structure.recognise import Structure

PATIENCE = 8  # steps that neither halve the least decrement nor gain a nat: rounding leads them
CLOSE = 1e-3  # squared standard deviations that the modes of blocks, about which nodes are placed, may be off
STEPS = 4  # to the modes of blocks from where their normal distribution is, for most
SETTLED = 1e-6  # part of the tolerance: the step that is taken is not Newton's to the last digit


@dataclass(frozen=True, eq=False)
class SharedIterate(Batched):
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
    def direction(self) -> Direction:
        """Newton's step of shared coordinates, one row each."""
        num, size = self.slope.shape[:-1].numel(), self.slope.shape[-1]
        return by_absolute_value(self.curvature.reshape(num, size, size), self.slope.reshape(num, size))

    @property
    def step(self) -> Tensor:
        """Newton's step of shared coordinates, ``(..., P)``."""
        return self.direction.step.reshape(self.slope.shape)

    @property
    def decrement(self) -> Tensor:
        """Twice what that step promises, nats, ``(...)``."""
        return self.direction.decrement.reshape(self.slope.shape[:-1])

    @property
    def value(self) -> Tensor:
        """Log density of shared coordinates and data, blocks integrated, nats, ``(...)``."""
        return self.each.sum(-1)

    @property
    def objective(self) -> Tensor:
        """Minus the gain that Newton's step promises, ``(R,)``; nan where the curvature is not positive definite."""
        return torch.where(self.direction.definite & self.value.isfinite(), -self.decrement, torch.nan)

    def own_at(self, p: Partition, shared: Tensor) -> Tensor:
        """The modes of all blocks that are expected at other shared coordinates ``(..., P)``, to first order."""
        moved = (self.follows @ (shared - self.shared).unsqueeze(-1)).squeeze(-1)
        return self.modes.own + self.modes.step(p) + moved


@dataclass(frozen=True, eq=False)
class Marginal:
    """The log density of what blocks share, the blocks integrated.

    :ivar num: nodes on each axis of a block.
    """

    density: BlockDensity
    num: int
    limits: Limits  # of the search, and of those inside each block
    label: Label

    @property
    def partition(self) -> Partition:
        """Blocks and shared coordinates."""
        return self.density.partition

    def place(self, terms: Terms | RowTerms, own: Tensor, shared: Tensor) -> SharedIterate:
        """Blocks' modes from ``own`` ``(..., n)``, integrals around them, derivatives in ``shared`` ``(..., P)``."""
        modes = block_modes(terms, own, shared, self.limits.tolerance)
        if isinstance(terms, Terms):
            require_curved(terms, modes)
        p, own = self.partition, modes.own + modes.step(self.partition)
        nodes = placed(p, own, modes.tril, self.num)
        along = path(p, modes.tril, beside(terms, own, shared), shared.detach())
        found = with_derivatives(terms, nodes, shared.detach(), along)
        each, slope, curvature = (x.detach() for x in (found.each, found.slope, found.curvature))
        return SharedIterate(shared.detach(), modes, each, slope, curvature, along.slope)

    def enough(self, here: SharedIterate) -> Tensor:
        """The decrement that counts as none, nats, ``(...)``: the tolerance, or rounding, if that is more."""
        return (self.limits.slack * (1.0 + here.value.abs())).clamp(min=self.limits.tolerance)  # rounding, if more

    def find(self, theta: Tensor, u: Tensor, *, exact: bool = True) -> SharedIterate:
        """The mode over shared coordinates, searched from ``u`` ``(D,)``.

        :param exact: whether slopes in the hyperparameters are meant, not the log evidence alone, to 1e-9 nats.
        :raises NotAMode: where the search does not arrive.
        :raises NotPositiveDefinite: where the curvature there is not positive definite.
        """
        terms, p = self.density.terms(theta.detach()), self.partition
        here = best = self.place(terms, u[p.own], u[p.shared])
        waited, least = 0, (SETTLED if exact else 1.0) * self.limits.tolerance
        for _ in range(self.limits.num_steps):
            new = None if here.decrement <= least or waited > PATIENCE else self._moved(terms, here)
            if new is None:
                break
            better = new.decrement <= 0.5 * best.decrement or new.value > best.value + 1.0
            here, best, waited = new, new if better else best, 0 if better else waited + 1
        here = best if best.decrement < here.decrement else here
        if here.decrement > self.enough(here):
            worst = int(here.slope.abs().argmax())
            raise NotAMode(
                f"the search for the mode of what blocks share stopped where the slope is still "
                f"{float(here.slope[worst]):.2e} at {self._named(worst)} (a step promises "
                f"{0.5 * here.decrement:.2e} nats); expected a maximum. Standardise the data, give the site a tighter "
                f"prior, or take nodes=1."
            )
        return here

    def _moved(self, terms: Terms, here: SharedIterate) -> SharedIterate | None:
        """The first of ever shorter steps that rises, or that halves what the next one promises.

        Close to the mode the second counts: slope and value agree up to the error of the nodes only.  Where the
        curvature is not that of a maximum no coordinate moves by more than one.
        """
        decrement, slack = float(here.decrement), self.limits.slack * (1.0 + abs(float(here.value)))
        longest = 1.0 if bool(here.direction.definite) else 1.0 / max(1.0, float(here.step.abs().max()))
        scale = longest
        while scale == longest or slack <= scale * decrement < math.inf:  # less cannot be told from rounding
            with suppress(ArithmeticError):
                shared = here.shared + scale * here.step
                new = self.place(terms, here.own_at(self.partition, shared), shared)
                rise, most = float(new.value - here.value), 0.1 * min(decrement**0.5, 1.0)  # nats that may be lost
                if rise > slack or (new.decrement <= 0.5 * decrement and rise > -most):
                    return new
            scale *= 0.5
        return None

    def near(self, theta: Tensor, u: Tensor) -> list[SharedIterate | None]:
        """The modes near rows ``(R, D)``, each at its hyperparameters; None for rows where a few steps do not arrive.

        :param theta: ``(R, T)``.
        """
        p, going = self.partition, torch.arange(len(u), device=u.device)
        here = self.place(RowTerms(self.density, theta), u[:, p.own], u[:, p.shared])

        def trial(rows: Tensor, scale: Tensor) -> SharedIterate:
            shared = along_step(here.shared[rows], scale, here.step[rows])
            return self.place(RowTerms(self.density, theta[rows]), here[rows].own_at(p, shared), shared)

        for _ in range(SOON):
            going = going[here.objective[going] < -self.limits.tolerance]
            if not len(going):
                break
            here, stuck = TOGETHER(here, going, Line(here.decrement, torch.zeros_like(here.decrement)), trial)
            going = going[~torch.isin(going, stuck)]
        arrived = here.objective >= -self.enough(here)
        return [here[row] if arrived[row] else None for row in range(len(u))]

    def log_evidence(self, here: SharedIterate) -> Tensor:
        """Log evidence at the mode, nats, ``()``."""
        tril = cholesky(here.curvature, "curvature of what blocks share", self._named)
        log_det = 2.0 * tril.diagonal().log().sum()
        return evidence.log_evidence(here.each.sum(), log_det, len(here.shared))

    def _named(self, row: int) -> str:
        return self.label(int(self.partition.shared[row]))

    @property
    def nodes_of_each(self) -> int:
        """Number of nodes of a block, each of which is a row of the density."""
        return len(block_rule(self.num, self.partition.width).nodes)

    @property
    def rows_of_each(self) -> int:
        """Number of rows that take as long: nodes, and some steps to the modes with a slope and curvatures each."""
        return self.nodes_of_each + 2 * STEPS * (1 + self.partition.width)

    @property
    def rows_at_once(self) -> int:
        """Number of rows whose blocks fit into memory together."""
        return max(1, BATCH_NUMBERS // max(1, self.nodes_of_each * sum(len(o) for o in self.partition.owner.values())))

    def integrated(self, theta: Tensor, u: Tensor) -> Tensor:
        """Log density of the shared coordinates of rows ``(S, D)``, their blocks integrated, nats, ``(S,)``."""
        p, found = self.partition, []
        for t, start in zip(theta.split(self.rows_at_once), u.split(self.rows_at_once), strict=True):
            own, shared = start[:, p.own], start[:, p.shared]
            terms = with_prior_expanded(RowTerms(self.density, t), own, shared)
            modes = block_modes(terms, own, shared, CLOSE)
            nodes = placed(p, modes.own + modes.step(p), modes.tril, self.num)
            with torch.no_grad():
                found.append(integrals(terms, nodes, shared).sum(-1))
        return torch.cat(found)

    def whole(self, here: SharedIterate) -> Tensor:
        """All coordinates at a place, ``(D,)``."""
        own = here.modes.own + here.modes.step(self.partition)
        return torch.cat([own, here.shared, self.density.kept])[self.partition.place]

    def precision(self, theta: Tensor, here: SharedIterate) -> BlockPrecision:
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
        return BlockPrecision(p.plan, tuple(factors), tril)


def slope(marginal: Marginal, place: SharedIterate, theta: Tensor) -> tuple[Tensor, Tensor]:
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
        by_theta, by_w, by_nodes = pullbacks(total, (theta, w, at_nodes))
        back = _solved_by_products(found.slope, at_nodes, W, by_w + by_nodes)
        by_theta = by_theta - pullback(found.slope, theta, back)
        marginal.density.evaluated.clear()  # tables of this place, which no other asks for
        return by_theta, partial


def _solved_by_products(slope: Tensor, at_nodes: Tensor, W: Tensor, b: Tensor) -> Tensor:
    """``J'^-1 b`` with ``J = d slope / d at_nodes - W^-1``, by products with the first, which many nodes make small.

    Each round leaves the share of the error that the nodes of a block leave of its integral's second derivatives; all
    products are made where that share is above a half.
    """
    start = x = -(W @ b)
    before = math.inf
    for _ in range(len(b)):
        new = start + W @ pullback(slope, at_nodes, x)
        change, x = float((new - x).abs().max()), new
        if change <= float(x.abs().max()) * torch.finfo(x.dtype).eps ** 0.5:  # of which a share is left
            return x
        if change > 0.5 * before:
            break
        before = change
    moving = torch.stack([pullback(one, at_nodes) for one in slope])
    return torch.linalg.solve((moving - torch.linalg.inv(W)).mT, b)


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


MOST_SHARED = 20  # coordinates, each with a pass over all rows for its second derivatives


def halves(rise: Real, _scale: Real, line: Line) -> Real:
    """Whether a step leaves half as much to gain; heights say less here, for nodes move with what blocks share."""
    return rise >= 0.5 * line.promised


TOGETHER = Backtracking(rule=halves, num_trials=5)


def near_places(marginal: Marginal, theta: Tensor, u: Tensor) -> list[SharedIterate | None]:
    """The modes of what blocks share near rows ``(R, D)``, each at its hyperparameters ``(R, T)``.

    :return: None for rows where a few steps do not arrive, and for all where the model takes no batch of rows.
    """
    p, joint = marginal.partition, marginal.density.joint
    if len(u) == 1 or joint.row_bytes is None or len(p.shared) > MOST_SHARED:
        return [None] * len(u)
    found: list[SharedIterate | None] = []
    for t, start in zip(*(x.split(marginal.rows_at_once) for x in (theta, u)), strict=True):
        try:
            found += marginal.near(t, start.detach())
        except RuntimeError:  # a row that breaks the batch; alone it says why
            found += [None] * len(t)
    return found


MOST_NODES = 388  # the outermost weights of 389 are zero in double precision
NODES = 7  # on each axis of blocks that others multiply: of 41 nodes they lack a hundredth of a nat in 40 items
NODES_OF_CURVED = 15  # of logs of latents: in a block that data say little of they lack at most a thousandth of a nat


def marginal_of(joint: LogJoint, structure: Structure, active: Tensor, num: int, limits: Limits) -> Marginal | None:
    """The density of what blocks share, these integrated by ``num`` nodes on each axis; None without blocks.

    :param active: coordinates that are not pruned, ``(D,)`` bool.
    """
    theta = joint.initial_theta
    found = partition(joint, active, crossed=bool(structure.multipliers))
    if isinstance(found, NotSparse):
        return None
    groups = structure.groups
    kept = active.new_zeros(0, dtype=torch.float64) if groups is None else groups.loc[found.held]
    left_out = Pruned(structure.density, groups, active).left_out
    linear = structure.predictors
    quadratic = structure.factors is not None and structure.factors.is_quadratic
    density = BlockDensity(joint, found, linear, kept, left_out, None, structure.likelihoods or (), quadratic)
    if linear is not None and not density.explains(theta):
        density = replace(density, linear=None, is_quadratic=False)
    return Marginal(density, num, limits, joint.latents.label)


def check_nodes(nodes: Any, curvature: Curvature | None) -> int | str:
    """The setting ``nodes``, checked.

    :raises BadInput: for what is neither a whole number from 1 to :data:`MOST_NODES` nor ``"auto"``, and beside a
        curvature that is not the exact Hessian.
    """
    if isinstance(nodes, str) and nodes != "auto":
        raise BadInput(f"nodes={nodes!r}; expected a whole number of at least 1, such as 7, or 'auto'.")
    number = nodes if isinstance(nodes, str) else check_count("nodes", nodes)
    if number != "auto" and int(number) > MOST_NODES:
        raise BadInput(f"nodes={nodes!r}; expected at most {MOST_NODES}: the outermost of more would weigh nothing.")
    if number != 1 and curvature not in (None, exact_hessian):
        raise BadInput(
            f"nodes={nodes!r} asks for quadrature about each block's own curvature, which must be the exact Hessian; "
            f"it came with curvature={getattr(curvature, '__name__', curvature)}. Leave one of them out."
        )
    return number


def all_blocks(joint: LogJoint, structure: Structure) -> Partition | NotSparse:
    """The blocks of a model with all of its coordinates, or why there are none."""
    active = torch.ones(joint.latents.size, dtype=torch.bool, device=joint.device)
    return partition(joint, active, crossed=bool(structure.multipliers))


def no_blocks(joint: LogJoint, structure: Structure, asked: str) -> UnsupportedModel:
    """The error message for a model whose coordinates are tied together.

    :param asked: the setting or the call that asks for blocks.
    """
    found = all_blocks(joint, structure)
    reason = found.reason if isinstance(found, NotSparse) else "all of them are pruned"
    return UnsupportedModel(
        f"{asked} asks for independent blocks, such as groups, but this model has none: {reason}. Crossed effects, "
        "chains and graphs have none; leave nodes=1, whose posterior.log_evidence_error then estimates Laplace's error "
        "to second order."
    )
