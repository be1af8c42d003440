"""Marginalised sites integrated numerically around Laplace's evidence of everything inside."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from pyro_evidence.errors import NotAMode
from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.laplace.gradient import STEP, differences, slope, slopes_and_modes
from pyro_evidence.laplace.mean_shift import mean_shift
from pyro_evidence.laplace.mode_checks import double_precision
from pyro_evidence.nested import skewness
from pyro_evidence.nested.inner import ConditionalModes, is_affordable, is_batched, profiles, solve_inner
from pyro_evidence.nested.skewness import Margins, Profiles, Shift, SkewnessCorrection, skewness_points
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.batched import HELD_NUMBERS, Batched
from pyro_evidence.numerics.newton import rises_without_end
from pyro_evidence.numerics.quadrature import rules
from pyro_evidence.numerics.quadrature.densities import (
    Interpolated,
    Kriged,
    Lattice,
    MarginalisedDensity,
    Normal,
    Trend,
)
from pyro_evidence.numerics.quadrature.reparameterise import NUM_PARAMS, PROBES, Standardisation, standardising
from pyro_evidence.numerics.quadrature.rules import Rule
from pyro_evidence.precision.dense import Dense, Precision, Separate, packed_factors, precision_tril, unpacked_factors
from pyro_evidence.structure.factors import SMALL

NODES = rules.growing(5, 31, 1.3)  # on each axis
MOST_NODES = 1000  # of a product; each is a search for a mode, and nine on each of three axes are 729
MOST_FOLLOWED = 7000  # where most follow from others; errors of all pairs of them are looked at
MOST_CELLS = 2500  # of a lattice; a normal density on three axes takes 400, one with long tails four times as many
MOVES = 5.0  # the log evidence may move by this part of the tolerance
BARELY = 10.0  # tolerances: a few nodes that are no worse are better than draws, and at half of it than many nodes
LEVEL = 0.003  # nats per squared log unit: the log density changes by one in 26, which is far
STEEP = 1e3  # nats per unconstrained unit, a slope that no end of a search has
SD_PER_NAT = 2.5  # .05 standard deviations where .02 nats are asked for
DEPTHS = {1: 12.0, 2: 12.0, 3: 8.0}  # nats below the top where a lattice ends, by its axes; more take too many cells
NEGLIGIBLE = -16.0  # log weight of a node that may be missing
FIRST = -5.0  # log weight of nodes that are searched at first: they surround the mode
APART = 1.5  # standard deviations between nodes that are searched without regard to what the other tells
MOST_SEARCHED = 400  # nodes, a search each, after which an integral says its error instead of bringing it down
STANDARD_ERRORS = 2.78  # of what follows from other nodes: 95 % of Student's t, as four nodes tell their size
SMALL_SHARE = 1e-4  # of the tolerance: nodes that follow, and together err by less, are added up as if all erred alike
WORTH = 0.1  # of the largest error that a node leaves: those that leave less are not searched beside it
BETWEEN = 0.05  # share of the mass that may lie elsewhere between and beyond the nodes than a smooth curve has it
# of importance sampling, in turn: few settle smooth densities, and where a tenth of the last keep their weight they
# tell .03 nats; the second where the first leave more than is asked, the others only where searches cost little, too
NUM_DRAWS = (256, 512, 2048, 2048, 8192)
EVEN = 2.0  # times the tolerance, where searches are dear: evenly spread points err half as much as independent ones
NUM_STEPS = 4  # of a search, a Hessian each
FEW_HESSIANS = 16_384  # of a thousand draws of four steps each to inner modes: where these cost little all are searched
MOST_KNOWN = 128  # nodes from which draws follow
FEW_DRAWS = 256  # that tell how many do not follow
CLOSE = 0.1  # standard deviations of all coordinates together that a draw may be off where it follows from nodes
NOISE = 32  # white vectors, that tell how far sparse factors are apart
NEAR = 5.0  # unconstrained units that a mode is followed to first order


@dataclass(frozen=True, eq=False)
class OuterMode:
    """A mode of the marginalised sites, and how the inner one follows when the marginalised sites move.

    :ivar state: Laplace's approximation of the inner part there.
    :ivar marginalised: which coordinates of ``theta`` are marginalised, positions ``(d,)``.
    :ivar precision: minus the second derivatives of the log density of the marginalised sites, ``(d, d)``.
    :ivar follows: derivative of the inner mode in the marginalised coordinates, ``(D, d)``.
    """

    state: LaplaceState
    marginalised: Tensor
    precision: Tensor
    follows: Tensor

    @property
    def centre(self) -> Tensor:
        """The mode of the marginalised sites, unconstrained, ``(d,)``."""
        return self.state.theta[self.marginalised]

    def inner(
        self, phi: Tensor, start: Tensor | None = None, *, searches: Tensor | int = 2, **how: Any
    ) -> ConditionalModes:
        """Laplace inside at marginalised coordinates ``(R, d)``.

        :param start: of the searches, ``(R, D)``; by default where those along the axes, or a derivative, lead.
        :param searches, how: as for :func:`solve_inner`.
        """
        if start is None:
            start = followed(self.state.u, self.follows, phi - self.centre)
            if "probed" in vars(self):
                z = self.gaussian.inverse(phi)
                within = z.norm(dim=-1) <= PROBES[-1]  # beyond, first order errs by less than a polynomial
                start[within] = self._modes_along_axes(z[within]).to(start)
        found = solve_inner(self.state.problem, self.theta(phi), start, searches=searches, **how)
        overflown = found.log_density.isnan()  # as scales may be
        return replace(found, log_density=found.log_density.masked_fill(overflown, -math.inf))

    @property
    def names(self) -> list[str]:
        """The marginalised sites."""
        slices, marginalised = self.state.problem.joint.hypers.slices, self.marginalised.tolist()
        return sorted({n for n, s in slices.items() for i in marginalised if s.start <= i < s.stop})

    @cached_property
    def gaussian(self) -> Standardisation:
        """Axes of the Gaussian at the mode of the marginalised sites."""
        return standardising(self.centre, self.precision)

    @cached_property
    def probed(self) -> ConditionalModes:
        """Laplace inside along those axes, at :meth:`Standardisation.probes`, ``(d * J,)`` rows."""
        return self.inner(self.gaussian.probes(), searches=1, held=0)

    @cached_property
    def _modes_along_axes(self) -> Trend:
        """How inner modes move, by those along the axes that were found, the mode once."""
        found, centre = self.profile > -math.inf, PROBES.index(0.0)
        found[centre :: len(PROBES)] = False
        found[centre] = True
        z = self.gaussian.inverse(self.gaussian.probes())
        return Trend(z[found], self.probed.u[found].to(z))

    @cached_property
    def profile(self) -> Tensor:
        """The log density there, nats, ``(d * J,)``."""
        return self.probed.log_density.nan_to_num(nan=-torch.inf)

    def theta(self, phi: Tensor) -> Tensor:
        """All hyperparameters with marginalised coordinates ``(R, d)``, ``(R, T)``."""
        return self.state.theta.expand(len(phi), -1).clone().index_copy(1, self.marginalised, phi)


def followed(u: Tensor, follows: Tensor, away: Tensor) -> Tensor:
    """Where inner modes are expected to first order, ``(..., R, D)``.

    :param u: that at the mode of the marginalised sites.
    :param follows: its derivative, ``(..., D, d)``.
    :param away: marginalised coordinates less their mode, ``(..., R, d)``.
    """
    moved = away @ follows.mT
    far = moved.abs().amax(-1, keepdim=True).clamp(min=NEAR)  # first order is not to be trusted beyond that
    return u + moved * (NEAR / far)


@dataclass(frozen=True, eq=False)
class Integral:
    """The marginalised sites' posterior.

    :ivar log_evidence: the marginalised sites integrated, nats, ``()``.
    :ivar error: how much it moved when the nodes were last made more, and what 95 % of the errors of what follows
        from nodes are below, nats; one standard error where nodes are draws.
    :ivar density: of ``z``, continuous.
    :ivar nodes: Laplace inside at the nodes, and ``log_weights`` the posterior mass of each, ``(K,)``.
    :ivar method: how it was done, for the reader.
    :ivar rule: which function of this module makes it again: ``by_product``, ``by_lattice``, ``by_design``,
        ``by_draws``.
    """

    outer_mode: OuterMode
    standardisation: Standardisation
    density: MarginalisedDensity
    log_evidence: Tensor
    error: float
    nodes: ConditionalModes
    log_weights: Tensor
    method: str
    rule: str

    def __getstate__(self) -> dict[str, Any]:  # without factors that are only kept for speed
        return {name: value for name, value in vars(self).items() if name != "known"}

    @property
    def phi(self) -> Tensor:
        """Marginalised coordinates of the nodes, ``(K, d)``."""
        return self.nodes.theta[:, self.outer_mode.marginalised]

    @cached_property
    def skewness_correction(self) -> SkewnessCorrection | Shift:
        """The shape of the inner densities; of many coordinates a shift to their means, none where they are normal."""
        joint, looked = self.outer_mode.state.problem.joint, self._profiles(2)
        with torch.enable_grad():  # whoever asks for draws may have switched it off
            if looked is not None:
                z = looked[1] if joint.row_bytes is not None else looked[1][:1]  # rows are evaluated one by one
                if found := skewness.skewness_correction(looked[0], z, skewness.num_matched(joint, len(z))):
                    return found
        return Shift(self.nodes.u.new_zeros(1, joint.latents.size) if self._shifts is None else self._shifts[0])

    @cached_property
    def margins(self) -> Margins | None:
        """The shapes of inner coordinates, each by itself; their means alone of many; None where they are normal."""
        looked = self._profiles(2 * len(skewness.POINTS))
        with torch.enable_grad():
            if looked is not None:
                return skewness.margins(*looked)
        if self._shifts is None:
            return None
        loc = self._shifts[1].unsqueeze(-1)
        return Margins(torch.cat([loc, loc.new_zeros(*loc.shape[:-1], NUM_PARAMS - 1)], -1))

    @cached_property
    def _shifts(self) -> tuple[Tensor, Tensor] | None:
        """From inner modes to means, in white noise and in standard deviations, in the basis of marginalised sites.

        ``(B, D)`` each; None where they are not known, or zero.
        """
        z, problem = (
            skewness_points(self.standardisation.num_dims, self.standardisation.centre)[0],
            self.outer_mode.state.problem,
        )
        inner = self.inner(z)
        rows = [(inner.u[i], inner.precision.row(i)) for i in range(len(z))]
        found = [mean_shift(problem, inner.theta[i], *row) for i, row in enumerate(rows)]
        if inner.num_failures or not all(each is not None and bool(each.any()) for each in found):
            return None
        shifts = torch.stack([each for each in found if each is not None])
        basis, sd = skewness.follow(z, len(z)), torch.cat([A.variance for _, A in rows]).sqrt()
        return torch.linalg.solve(basis, inner.precision.whiten(shifts)), torch.linalg.solve(basis, shifts / sd)

    def _profiles(self, num_each: int) -> tuple[Profiles, Tensor] | None:
        """Inner modes at as many marginalised points as so many Hessians for each coordinate allow, and those points.

        None for very many coordinates: an axis through the mode ends before it comes to where the mass is.
        """
        problem, size = self.outer_mode.state.problem, self.outer_mode.state.problem.joint.latents.size
        choices = (
            skewness_points(self.standardisation.num_dims, self.standardisation.centre)
            if size <= skewness.LARGEST
            else ()
        )
        z = next((z for z in choices if is_affordable(problem, num_each * size * len(z))), None)
        if z is None:
            return None
        inner = self.outer_mode.inner(self.standardisation.forward(z))
        found = profiles(problem, replace(inner, precision=self.factored(inner.precision, len(z))))
        return None if found is None else (found, z)

    def factored(self, precision: Precision, num: int = 1) -> Precision:
        """So many precisions of inner sites with the factors that draws are made by."""
        own = () if self.known is None else tuple(self.known.factored(precision.row(row)) for row in range(num))
        return Separate(own) if own else precision

    def inner(self, z: Tensor) -> ConditionalModes:
        """Laplace inside at ``z`` ``(R, d)``: as it follows from the nodes, searched where these do not tell."""
        phi, known = self.standardisation.forward(z), self.known
        if known is None:
            return self.outer_mode.inner(phi, self.modes(z))
        weights, error = known.curve.weights(z), known.curve.errors(z, known.apart)[0]
        log_ratio, u, factors = (weights @ x.to(weights) for x in (known.log_ratio, known.u, known.packed))
        log_density = log_ratio - self.standardisation.log_slope(z) - 0.5 * (z.square() + math.log(math.tau)).sum(-1)
        far = ~(error <= CLOSE)
        if bool(far.any()):
            searched = self.outer_mode.inner(phi[far], self.modes(z[far]))
            u[far], log_density[far] = searched.u.to(u), searched.log_density
            for row, place in enumerate(far.nonzero().flatten().tolist()):
                if bool(log_density[place] > -math.inf):  # else there is no factor
                    factors[place] = packed_factors(known.factored(searched.precision.row(row)))[0]
        return ConditionalModes(self.outer_mode.theta(phi), u, unpacked_factors(factors, known.first), log_density)

    @cached_property
    def known(self) -> "Searched | None":
        """The heaviest nodes, from which draws follow; None where searches cost little, or factors much."""
        if is_affordable(self.outer_mode.state.problem, FEW_HESSIANS):
            return None
        weights = self.log_weights.where(self.nodes.log_density.isfinite(), -math.inf)
        heaviest, rows = weights.topk(min(MOST_KNOWN, len(weights)))
        rows = rows[heaviest > NEGLIGIBLE]
        if not _fits_dense(self.nodes.u[rows]):  # two copies of factors of their own
            each = sum(panel.numel() for panel in self.outer_mode.state.precision.panels)
            rows = rows[: each and HELD_NUMBERS // (2 * each)]
        if not len(rows):
            return None
        found = _searched_at(self.standardisation, self.standardisation.inverse(self.phi), self.nodes).chosen(rows)
        try:
            return found if bool(found.apart.isfinite().all()) else None
        except LinAlgError:  # nodes too near one another
            return None

    @cached_property
    def searched(self) -> float:
        """Share of draws whose inner modes are searched, by a few of them."""
        if self.known is None:
            return 1.0
        z = self.density.unwhiten(
            rules.quasi_normal(FEW_DRAWS, self.standardisation.num_dims).to(self.standardisation.centre)
        )
        return float((self.known.curve.errors(z, self.known.apart)[0] > CLOSE).double().mean())

    @cached_property
    def modes(self) -> Trend:
        """Where inner modes are expected."""
        known = self.log_weights.topk(min(MOST_CELLS, len(self.phi))).indices
        known = known[torch.isfinite(self.nodes.log_density[known])]
        return Trend(self.standardisation.inverse(self.phi[known]), self.nodes.u[known])

    def tilted(self, slope: Tensor) -> "Integral":
        """With a log density that is higher by ``slope'z``, nats, and nodes that weigh accordingly."""
        log_weights = (self.log_weights + self.standardisation.inverse(self.phi) @ slope).log_softmax(0)
        return replace(self, density=self.density.tilted(slope), log_weights=log_weights)

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Means and standard deviations of the marginalised coordinates, ``(d,)`` each."""
        weights = self.log_weights.exp().unsqueeze(-1)
        mean = (weights * self.phi).sum(0)
        return mean, (weights * (self.phi - mean).square()).sum(0).sqrt()


def outer_mode(state: LaplaceState, marginalised: Tensor, rise: Tensor | None = None) -> OuterMode:
    """Second derivatives at a mode of the marginalised sites, by central differences of exact slopes.

    :param rise: the slope there in all hyperparameters ``(T,)``, where it is known and may not be that of a mode.
    :raises ImproperPosterior: where it rises without end.
    :raises NotAMode: where the log density of the marginalised sites is not concave there, or steep.
    """
    # of a central difference, whose rounding is then its error's size
    size = max(STEP, torch.finfo(state.problem.joint.dtype).eps ** (1 / 3))
    steps = size * torch.eye(len(state.theta)).to(state.theta)[marginalised]
    falls, follows = differences(partial(slopes_and_modes, state), steps)
    precision = 0.5 * (falls[:, marginalised] + falls[:, marginalised].mT)
    steep, hypers = 0.0 if rise is None else float(rise[marginalised].abs().max()), state.problem.joint.hypers
    values, vectors = torch.linalg.eigh(precision)
    if -LEVEL < float(values[0]) <= 0.0 and bool(hypers.curved[marginalised].all()):
        # rounding has the last word on the sign: how the density falls, unit by unit, tells whether it has an integral
        precision = (vectors * torch.where(values > LEVEL, values, 1.0)) @ vectors.mT
    elif not float(values[0]) > 0.0 or steep > STEEP:
        rise = slope(state).total
        curved = torch.zeros_like(rise, dtype=torch.bool)
        curved[marginalised] = hypers.curved.to(rise.device)[marginalised]
        endless = rises_without_end(state.theta, rise, curved, hypers.label)
        if endless is not None:
            raise endless
        where = hypers.label(int(marginalised[int(vectors[:, 0].abs().argmax())]))
        steep, spike = float(rise[marginalised].abs().max()), ""
        if steep > STEEP:  # no maximum, whatever the curvature
            spike = (
                f"Its slope there is {steep:.3g}: modes of the other sites merge nearby, such as those of labels that "
                "are equal, and Laplace's log evidence has a spike. Integrate all sites together, marginalise=(). Or: "
            )
        raise NotAMode(
            f"the log density of the marginalised sites has curvature {float(values[0]):.3g} at {where}, where its "
            f"search ended; expected a maximum. {spike}{double_precision(state.problem.joint)}Give that site a proper "
            "prior that says more, name fewer sites in marginalise=, or sample them: "
            "MCMC(NUTS(LaplaceMarginal(model, integrate=[...])))."
        )
    return OuterMode(state, marginalised, precision, follows)


def integrate(found: OuterMode, tolerance: float, elsewhere: Tensor) -> Integral:
    """The integral over the marginalised sites, by as many nodes as the tolerance asks for.

    :param tolerance: of the log evidence, nats; means and standard deviations are good to 2.5 times as many standard
        deviations.
    :param elsewhere: places of other modes on one axis, ``(M, d)``.
    """
    skewed, d = found.gaussian.skewed(found.profile), found.gaussian.num_dims
    if d <= rules.PRODUCT_DIMS:
        settled = None if len(elsewhere) else _settled(found, skewed, tolerance)
        axes = found.gaussian if len(elsewhere) else skewed
        return settled or adaptive_grid(found, axes, tolerance, elsewhere) or _by_adapted(found, skewed, tolerance)
    design = by_design(found, skewed) if d <= rules.LARGEST_DESIGN else None
    if design is not None:
        # several times its error is what skewed densities have beyond it on the diagonals
        if design.error <= (1.0 if found.state.problem.joint.latents.size <= SMALL else BARELY) * tolerance:
            return design
        skewed = skewed.matched(skewed.inverse(design.phi), design.log_weights.exp(), 0.0)
    return _by_adapted(found, skewed, tolerance, design)


def _settled(found: OuterMode, where: Standardisation, tolerance: float) -> Integral | None:
    """By as many nodes as settle; None where they do not."""
    if not _is_whole(found):
        try:
            return _by_kriging(found, where, tolerance)
        except LinAlgError:  # of values that jump no curve can be told
            return None
    made: dict[int, Integral] = {}

    def product(_: Tensor, num: int) -> NodeProducts:
        made[num] = _product(found, where, num, [*made.values()][-1].modes if made else None)
        density = made[num].density
        assert isinstance(density, Interpolated)
        return NodeProducts(*(x.unsqueeze(0) for x in (made[num].log_evidence, *made[num].moments, density.log_ratio)))

    told = settled(product, torch.ones(1, dtype=torch.bool, device=found.centre.device), where.num_dims, tolerance)
    return replace(made[int(told.num_nodes)], error=float(told.error)) if bool(told.found) else None


@dataclass(frozen=True, eq=False)
class NodeProducts(Batched):
    """The integrals over the marginalised sites of some data sets by one product of nodes, rows in front."""

    log_evidence: Tensor  # (R,) nats
    mean: Tensor  # (R, d) of the marginalised coordinates
    sd: Tensor  # (R, d)
    log_ratio: Tensor  # (R, k, ..., k) log density over standard normal at the nodes, nats


@dataclass(frozen=True, eq=False)
class Settled:
    """By how many nodes integrals have settled.

    :ivar log_evidence: nats, ``(R,)``.
    :ivar error: how much it moved when the nodes were last made more, nats, ``(R,)``.
    :ivar num_nodes: on each axis, ``(R,)``; 0 where none settled.
    :ivar found: whether one has, and its density can be integrated along each axis, ``(R,)`` bool.
    """

    log_evidence: Tensor
    error: Tensor
    num_nodes: Tensor
    found: Tensor


def settled(product: Callable[[Tensor, int], NodeProducts], rows: Tensor, num_dims: int, tolerance: float) -> Settled:
    """Ever more nodes until neither log evidence nor moments move, each row by itself.

    On one axis the next number of nodes is taken, for the tails.  A row ends where an inner mode is missing.

    :param product: the integrals of rows ``(r,)`` by so many nodes on each axis.
    :param rows: which are asked for, ``(R,)`` bool.
    :param tolerance: of the log evidence, nats.
    """
    left, before = rows.nonzero().squeeze(-1), None
    log_evidence, error = (torch.full_like(rows, x, dtype=torch.float64) for x in (torch.nan, torch.inf))
    num_nodes, found = left.new_zeros(len(rows)), torch.zeros_like(rows)
    for num in (num for num in NODES if num**num_dims <= MOST_NODES):
        if not len(left):
            break
        now = product(left, num)
        finite, late = now.log_ratio.flatten(1).isfinite().all(-1), num_nodes[left] > 0
        good = torch.zeros_like(late)
        if before is not None:
            apart = (now.log_evidence - before.log_evidence).abs()
            good = torch.maximum(apart, _moved(now.mean - before.mean, now.sd, before.sd)) <= tolerance / MOVES
            error[left] = torch.where(late, error[left], apart)
        taken = finite & (good | late)
        done = left[taken]
        if len(done):
            table = now.log_ratio[taken]
            found[done] = Interpolated(rules.gauss_hermite(num, table.device), table[0]).mass_errors(table) <= BETWEEN
            log_evidence[done], num_nodes[done] = now.log_evidence[taken], num
        on = finite & ~late if num_dims == 1 else finite & ~good
        left, before = left[on], now[on]
    return Settled(log_evidence, error, num_nodes, found)


def _moved(by: Tensor, sd: Tensor, before: Tensor) -> Tensor:
    """The most that means and standard deviations ``(..., d)`` have moved, in units of log evidence, ``(...)``."""
    return torch.maximum(by.abs() / sd, (before / sd).log().abs()).amax(-1) / SD_PER_NAT


def adaptive_grid(found: OuterMode, where: Standardisation, tolerance: float, elsewhere: Tensor) -> Integral | None:
    """Ever finer lattices over all that counts and hangs together with a mode, however it is curved.

    A lattice is fine enough if half of its cells, those whose numbers add up to an even one, have the same integral.

    :param elsewhere: places of other modes, ``(M, 1)``; none on more axes than one, ``(0, d)``.
    :return: the finest that can be paid for; None where that is far from fine enough.
    """
    starts = where.inverse(torch.cat([found.centre.unsqueeze(0), elsewhere]))
    front, step = set(map(tuple, starts.round().long().tolist())), 1.0  # standard deviations at the mode
    if len(elsewhere):  # between modes all may count
        front |= {(cell,) for cell in range(int(starts.min()) - 4, int(starts.max()) + 5)}
    best, region = None, _flood_fill(found, where, step, front)
    while region is not None:
        cells, heights, u = region
        even = cells.sum(-1) % 2 == 0
        error = float((heights[even].logsumexp(0) + math.log(2.0) - heights.logsumexp(0)).abs())
        best = cells, step, u, error
        if error <= tolerance / MOVES or len(cells) * 2**where.num_dims > MOST_CELLS:
            break
        high = cells[heights > heights.amax() - DEPTHS[where.num_dims]]
        front, step = set(map(tuple, (2 * high).tolist())), 0.5 * step
        region = _flood_fill(found, where, step, front)
    if best is None or best[-1] > BARELY * tolerance:
        return None
    cells, step, u, error = best
    axes = "over several modes" if len(elsewhere) else f"of {where.num_dims} axes"
    method = f"{len(cells)} nodes on a lattice {axes}"
    return replace(by_lattice(found, where, cells, step, u), error=error, method=method)


def by_lattice(
    found: OuterMode, where: Standardisation, cells: Tensor, step: float, start: Tensor | None = None
) -> Integral:
    """The integral over cells ``(K, d)`` of a lattice, whole numbers; its error is not known.

    :param start: where inner modes are searched from, ``(K, D)``.
    """
    z = step * cells.to(where.centre)
    log_volume = z.new_full((len(z),), where.num_dims * math.log(step))
    nodes, log_mass = _at(found, where, z, log_volume, start)
    corner = cells.amin(0)
    table = torch.full((cells.amax(0) - corner + 1).tolist(), -math.inf).to(log_mass)
    table[tuple((cells - corner).T)] = log_mass
    density = Lattice(step, step * corner.to(z), table)
    numbers = (log_mass.logsumexp(0), math.inf, nodes, log_mass.log_softmax(0))
    return Integral(found, where, density, *numbers, "a lattice", "by_lattice")


def _flood_fill(
    found: OuterMode, where: Standardisation, step: float, front: set[tuple[int, ...]]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """A lattice's cells ``(K, d)``, log densities ``(K,)`` and inner modes ``(K, D)``.

    Neighbour by neighbour from ``front``, until they are low.

    :return: None where they are more than can be paid for, no inner mode is at the first, or one density is infinite.
    """
    height: dict[tuple[int, ...], float] = {}
    modes = list[Tensor]()
    while front:
        if len(height) + len(front) > MOST_CELLS:
            return None
        cells = sorted(front)
        z = step * found.centre.new_tensor(cells)
        inner = found.inner(where.forward(z), searches=1)
        height |= zip(cells, (inner.log_density + where.log_slope(z)).tolist(), strict=True)
        modes.append(inner.u)
        low = max(height.values()) - DEPTHS[where.num_dims]
        if not math.isfinite(low):
            return None
        front = set()
        for cell, axis, side in itertools.product(cells, range(len(cells[0])), (-1, 1)):
            if height[cell] > low:
                front.add((*cell[:axis], cell[axis] + side, *cell[axis + 1 :]))
        front -= height.keys()
    heights = found.centre.new_tensor(list(height.values()))
    return torch.tensor(list(height), device=heights.device), heights, torch.cat(modes)


def by_product(found: OuterMode, where: Standardisation, num: int, searched: Tensor | None = None) -> Integral:
    """The integral by so many nodes on each axis; its error is not known.

    :param searched: nodes ``(K, d)`` from which the others follow, where not all are evaluated.
    """
    if _is_whole(found) or searched is None:
        return _product(found, where, num)
    known = _searched(found, where, searched)
    assert known is not None
    return known.integral(found, where, num)


def _product(found: OuterMode, where: Standardisation, num: int, modes: Trend | None = None) -> Integral:
    rule = rules.product(rules.gauss_hermite(num, where.centre.device), where.num_dims)
    start = None if modes is None else modes(rule.nodes)
    nodes, log_mass = _at(found, where, rule.nodes, log_volume_of(rule), start, searches=_searches(rule))
    return _of_product(found, where, num, nodes, _filled(rule, log_mass - rule.log_weights))


def _of_product(
    found: OuterMode, where: Standardisation, num: int, nodes: ConditionalModes, log_ratio: Tensor
) -> Integral:
    """The integral of a log density over standard normal, nats, at so many nodes on each axis, ``(K,)``."""
    axis, d = rules.gauss_hermite(num, log_ratio.device), where.num_dims
    rule = rules.product(axis, d)
    log_evidence = rule.log_mean(log_ratio)
    density = Interpolated(axis, (log_ratio - log_evidence).reshape([num] * d))
    numbers = (log_evidence, math.inf, nodes, rule.log_weights + log_ratio - log_evidence)
    method = f"{num} nodes on each of {d} axes" if d > 1 else f"{num} nodes"
    return Integral(found, where, density, *numbers, method, "by_product")


def _is_whole(found: OuterMode) -> bool:
    """Whether all nodes of a product are evaluated, for there is one axis, or they are evaluated together."""
    return len(found.marginalised) == 1 or is_batched(found.state.problem)


def weighted_moments(phi: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of points ``(K, d)`` by weights, ``(d,)`` each; these by absolute deviations.

    The tails that each larger rule adds count as much in them as in a mean.
    """
    weights = log_weights.exp().unsqueeze(-1)
    mean = (weights * phi).sum(0)
    return mean, math.sqrt(0.5 * math.pi) * (weights * (phi - mean).abs()).sum(0)


def _searches(rule: Rule) -> Tensor:
    """Number of searches for the mode at each node: those that may be missing are tried together only."""
    return torch.where(rule.log_weights > NEGLIGIBLE, 2, 0)


def _filled(rule: Rule, log_ratio: Tensor) -> Tensor:
    """Far nodes without an inner mode get their nearest neighbour's value, which their weight makes nothing of."""
    missing = ~torch.isfinite(log_ratio)
    if not bool(missing.any()) or bool(missing.all()) or bool((rule.log_weights[missing] > NEGLIGIBLE).any()):
        return log_ratio
    known = torch.nonzero(~missing).squeeze(-1)
    nearest = known[torch.cdist(rule.nodes[missing], rule.nodes[known]).argmin(-1)]
    return log_ratio.index_copy(0, torch.nonzero(missing).squeeze(-1), log_ratio[nearest])


def _fits_dense(u: Tensor) -> bool:
    """Whether dense factors at inner modes ``(K, D)``, packed, left out and their noise can be held."""
    return 4 * u.numel() * u.shape[-1] <= HELD_NUMBERS


@dataclass(frozen=True, eq=False)
class Searched:
    """Nodes whose inner modes are known, each a search of its own; others follow from them by kriging.

    :ivar log_ratio: log density over standard normal at them, nats, ``(K,)``.
    """

    z: Tensor  # (K, d)
    u: Tensor  # (K, D)
    log_ratio: Tensor
    precisions: tuple[Precision, ...]

    @cached_property
    def curve(self) -> Kriged:
        """Through the log ratios."""
        return Kriged(self.z, self.log_ratio.unsqueeze(-1))

    def modes(self, z: Tensor) -> Tensor:
        """Where inner modes are expected at ``z`` ``(R, d)``, ``(R, D)``."""
        return (self.curve.weights(z) @ self.u.to(self.z)).to(self.u)

    def chosen(self, rows: Tensor) -> "Searched":
        """Some of the nodes, by their numbers."""
        return Searched(self.z[rows], self.u[rows], self.log_ratio[rows], tuple(self.precisions[i] for i in rows))

    def factored(self, A: Precision) -> Precision:
        """A precision, ``R = 1``, with the factor that draws are made by: a dense one, or else its own."""
        return Dense(precision_tril(A, self.u.shape[-1]).unsqueeze(0)) if _fits_dense(self.u) else A.row(0)

    @cached_property
    def first(self) -> Precision:
        """That of the first node, so factored."""
        return self.factored(self.precisions[0])

    @cached_property
    def packed(self) -> Tensor:
        """Nearly straight numbers of the factors, ``(K, n)``."""
        return torch.cat([packed_factors(self.factored(A)) for A in self.precisions])

    @cached_property
    def apart(self) -> Tensor:
        """Distance of draws at each node from where the others lead, standard deviations of all together, ``(K,)``."""
        size, modes, found = self.u.shape[-1], self.curve.left_out(self.u.to(self.z)), list[Tensor]()
        white = (size**0.5 * torch.eye(size) if _fits_dense(self.u) else rules.quasi_normal(NOISE, size)).to(self.z)
        for only in (slice(row, row + 1) for row in range(len(self.u))):
            pair = self.packed[only].clone(), self.packed[only] - self.curve.left_out(self.packed, only)
            own, others = (unpacked_factors(rows, self.first).row(0) for rows in pair)
            noise = others.whiten(own.unwhiten(white)) - white
            found.append((own.whiten(modes[only]).square().sum() + noise.square().sum() / len(white)).sqrt())
        return torch.stack(found)

    def integral(self, found: OuterMode, where: Standardisation, num: int) -> Integral:
        """By a product of nodes that follow from these; its error is not known."""
        rule = rules.product(rules.gauss_hermite(num, where.centre.device), where.num_dims)
        log_density = self.log_ratio - where.log_slope(self.z) - 0.5 * (self.z.square() + math.log(math.tau)).sum(-1)
        nodes = ConditionalModes(found.theta(where.forward(self.z)), self.u, Separate(self.precisions), log_density)
        whole = _of_product(found, where, num, nodes, self.curve(rule.nodes).squeeze(-1))
        nearest, mass = torch.cdist(rule.nodes, self.z).argmin(-1), whole.log_weights.exp()
        return replace(whole, log_weights=torch.zeros_like(self.log_ratio).index_add_(0, nearest, mass).log())


def _searched(found: OuterMode, where: Standardisation, z: Tensor, before: Searched | None = None) -> Searched | None:
    """Nodes ``(K, d)`` after those before; None where one has no inner mode."""
    start, held = (None, 0) if before is None else (before.modes(z), len(before.z))
    nodes = found.inner(where.forward(z), start, held=held)
    new = _searched_at(where, z, nodes)
    if not bool(new.log_ratio.isfinite().all()):
        return None
    if before is None:
        return new
    joined = [torch.cat(pair) for pair in ((before.z, z), (before.u, new.u), (before.log_ratio, new.log_ratio))]
    return Searched(joined[0], joined[1], joined[2], (*before.precisions, *new.precisions))


def _searched_at(where: Standardisation, z: Tensor, nodes: ConditionalModes) -> Searched:
    log_ratio = nodes.log_density + where.log_slope(z) + 0.5 * (z.square() + math.log(math.tau)).sum(-1)
    return Searched(z, nodes.u, log_ratio, tuple(map(nodes.precision.row, range(len(z)))))


def _along_axes(found: OuterMode, where: Standardisation) -> Searched:
    """The nodes at which other modes were looked for along the axes, as far as they count; the mode once."""
    every = _searched_at(where, where.inverse(found.gaussian.probes()), found.probed)
    log_mass = every.log_ratio - 0.5 * every.z.square().sum(-1)
    counts = log_mass > log_mass[log_mass.isfinite()].amax() + NEGLIGIBLE
    counts[PROBES.index(0.0) + len(PROBES) :: len(PROBES)] = False
    return every.chosen(counts.nonzero().flatten())


def _by_kriging(found: OuterMode, where: Standardisation, tolerance: float) -> Integral | None:
    """By nodes that are each a search of its own, as many as a curve through them asks for; None where none settle.

    The curve says by which product of nodes its own integral settles, as :func:`settled` has it, and how far off it is
    itself between the nodes that are searched: Bayesian quadrature (O'Hagan, 1991).  The next are those that take off
    most of that error, none of them near another.
    """
    first = rules.product(rules.gauss_hermite(NODES[0], where.centre.device), where.num_dims)
    off_axes = (first.nodes.abs() > first.nodes.abs().amin()).sum(-1) > 1
    surrounding = first.nodes[off_axes & (first.log_weights > FIRST)]
    searched = _searched(found, where, surrounding, _along_axes(found, where))
    while searched is not None:
        curve, before = searched.curve, None
        for num in (num for num in NODES if num**where.num_dims <= MOST_FOLLOWED):
            rule = rules.product(rules.gauss_hermite(num, where.centre.device), where.num_dims)
            log_mass, phi = rule.log_weights + curve(rule.nodes).squeeze(-1), where.forward(rule.nodes)
            log_evidence, (mean, sd) = log_mass.logsumexp(0), weighted_moments(phi, log_mass.log_softmax(0))
            moved = math.inf if before is None else float((log_evidence - before[0]).abs())
            if before is not None and max(moved, float(_moved(mean - before[1], sd, before[2]))) <= tolerance / MOVES:
                break
            before = log_evidence, mean, sd
        nearest = rule.log_weights + searched.log_ratio[torch.cdist(rule.nodes, searched.z).argmin(-1)]
        log_share = torch.maximum(log_mass, nearest) - log_evidence
        z, phi, log_share = (x[log_share > NEGLIGIBLE] for x in (rule.nodes, phi, log_share))
        away, (spread, variances) = ((phi - mean) / sd).mT, curve.errors(z)
        grown = torch.where(spread > 0, spread.expm1() / spread, 1.0)  # a log density that is wrong by nats
        moments = torch.cat([away, math.sqrt(0.5 * math.pi) * away.abs() - 1.0]) / SD_PER_NAT
        ways = torch.cat([torch.ones_like(away[:1]), moments]) * (log_share.exp() * grown)
        worth = (ways.abs() * spread).amax(0)  # at most so much does each add to a standard error
        order = worth.argsort()
        small = order[worth[order].cumsum(0) <= SMALL_SHARE * tolerance]
        errors = variances(ways.index_fill(1, small, 0.0)).relu().sqrt() + worth[small].sum()
        errors = STANDARD_ERRORS * errors
        if float(errors.max()) <= 2.0 * tolerance / MOVES or len(searched.z) >= MOST_SEARCHED:
            integral, error = searched.integral(found, where, num), moved + float(errors[0])
            assert isinstance(integral.density, Interpolated)
            off = float(integral.density.mass_errors(integral.density.log_ratio.unsqueeze(0)))
            return replace(integral, error=error) if error <= BARELY * tolerance and off <= BETWEEN else None
        left, new = worth.argsort()[-int((worth >= WORTH * worth.max()).sum()) :], z[:0]
        while len(left):
            new = torch.cat([new, z[left[-1:]]])
            left = left[torch.cdist(z[left], new[-1:])[:, 0] > APART]
        searched = _searched(found, where, new, searched)
    return None


def log_volume_of(rule: Rule) -> Tensor:
    """Log of the volume that each node of a rule for standard normal densities stands for, ``(K,)``."""
    return rule.log_weights + 0.5 * (rule.nodes.square() + math.log(math.tau)).sum(-1)


def _at(
    found: OuterMode, where: Standardisation, z: Tensor, log_volume: Tensor, start: Tensor | None = None, **how: Any
) -> tuple[ConditionalModes, Tensor]:
    """Laplace inside at ``z`` ``(K, d)``, and the log mass of the marginalised sites about each, nats, ``(K,)``.

    :param log_volume: of which each stands for all ``z``, ``(K,)``.
    :param start, how: as for :meth:`OuterMode.inner`.
    """
    nodes = found.inner(where.forward(z), start, held=0, **how)
    return nodes, nodes.log_density + where.log_slope(z) + log_volume


def by_design(found: OuterMode, where: Standardisation) -> Integral:
    """A central composite design; its error is what its centre and axes alone would say otherwise."""
    rule = rules.central_composite(where.num_dims, where.centre.device)
    nodes, log_mass = _at(found, where, rule.nodes, log_volume_of(rule), searches=_searches(rule))
    log_evidence = log_mass.logsumexp(0)
    log_ratio = log_mass - rule.log_weights
    error = float((rules.axes_of(rule).log_mean(log_ratio[: 2 * where.num_dims + 1]) - log_evidence).abs())
    weights = log_mass - log_evidence
    method = f"central composite design of {len(rule.nodes)} nodes in {where.num_dims} dimensions"
    numbers = (log_evidence, error, nodes, weights)
    return Integral(found, where, _normal(rule.nodes, weights), *numbers, method, "by_design")


def _normal(z: Tensor, log_weights: Tensor) -> Normal:
    """The normal density with the moments of weighted points."""
    weights = log_weights.exp().unsqueeze(-1)
    loc = (weights * z).sum(0)
    covariance = (weights * (z - loc)).mT @ (z - loc)
    return Normal(loc, torch.linalg.cholesky(covariance))


def by_draws(found: OuterMode, where: Standardisation, z: Tensor) -> Integral:
    """Importance sampling over the marginalised sites by draws ``(S, d)`` from a Student-t, in mapped coordinates."""
    return _of_draws(found, where, z, *_drawn(found, where, z))


def _drawn(found: OuterMode, where: Standardisation, z: Tensor) -> tuple[ConditionalModes, Tensor]:
    """Laplace inside at draws, and the log mass that each stands for, nats, ``(S,)``."""
    log_density = rules.student_log_density(z.square().sum(-1), z.shape[-1])
    nodes, log_mass = _at(found, where, z, -log_density - math.log(len(z)), searches=1)
    return nodes, log_mass.nan_to_num(nan=-torch.inf)


def _of_draws(
    found: OuterMode, where: Standardisation, z: Tensor, nodes: ConditionalModes, log_mass: Tensor
) -> Integral:
    weights, error = log_mass.log_softmax(0), float(importance.standard_error(log_mass))
    method = f"importance sampling with {len(z)} draws in {where.num_dims} dimensions"
    numbers = (log_mass.logsumexp(0), error, nodes, weights)
    return Integral(found, where, _normal(z, weights), *numbers, method, "by_draws")


def _by_adapted(found: OuterMode, where: Standardisation, tolerance: float, design: Integral | None = None) -> Integral:
    """By draws, more of them in turn, each time from a Student-t with the moments of those before.

    Cappe, Guillin, Marin and Robert (2004), section 3, with the covariance drawn to the one before where few draws
    have the weight.

    :param design: what is taken where a few draws carry all the weight, with what these say otherwise for an error,
        unless its own is too large.
    :raises NotAMode: where they do, and there is none.
    """
    tried = list[tuple[Standardisation, Tensor, ConditionalModes, Tensor]]()
    worth, d, error = list[float](), where.num_dims, math.inf
    for num in NUM_DRAWS:
        if tried and not is_affordable(found.state.problem, NUM_STEPS * num):
            if len(tried) > 1 or error <= EVEN * tolerance:
                break
        if tried:
            weights = importance.checked(tried[-1][-1]).weights
            share = min(1.0, 2.0 * d * float(weights.square().sum()))
            where = where.matched(tried[-1][1], weights, share)
        z = rules.student_draws(num, d).to(where.centre)
        tried.append((where, z, *_drawn(found, where, z)))
        worth.append(float(importance.effective_sample_size(tried[-1][-1]).nan_to_num(0.0)))  # where none has a mode
        error = float(importance.standard_error(tried[-1][-1]))
        if not error > tolerance:  # nan where no draw has an inner mode
            break
    best = tried[worth.index(max(worth))]
    if not max(worth) >= max(20.0, 2.0 * d):
        if design is not None and design.error <= BARELY * tolerance:
            off = float((best[-1].logsumexp(0) - design.log_evidence).abs())
            if off < math.inf:
                return replace(design, error=max(off, design.error))
        inside = list(found.state.problem.joint.latents.names)
        raise NotAMode(
            f"the marginalised sites {found.names}, {len(found.marginalised)} coordinates, cannot be integrated from "
            f"their mode: {len(best[1])} draws there are worth {max(worth):.1f}. Sample them instead, the rest "
            f"integrated: MCMC(NUTS(LaplaceMarginal(model, integrate={inside})), ...); or name fewer in marginalise=, "
            "or maximise some by maximise=."
        )
    return _of_draws(found, *best)
