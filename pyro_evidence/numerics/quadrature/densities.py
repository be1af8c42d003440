"""Continuous densities over ``z``, from the values at the nodes of a rule."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_evidence.numerics.quadrature.rules import Rule

EDGE = 8.0  # standard deviations beyond which nothing is drawn
CELLS = 512  # of 1/32 of a standard deviation: linear between, a normal is off by a part in 8000 of its top
COARSER = 4  # cells for sums, which need an eighth of a standard deviation: nodes are twice as far apart
NEGLIGIBLE = -100.0  # nats below the top
FINE = 0.3  # standard deviations: linear between, a standard deviation of one is less than one percent too large
LARGEST_TABLE = 2**23  # numbers of a finer lattice
MOST_LAGRANGE = 11  # nodes through which one polynomial is laid


@dataclass(frozen=True, eq=False)
class Normal:
    """A normal density, for designs whose nodes are too few to be interpolated."""

    loc: Tensor  # (d,)
    tril: Tensor  # (d, d) lower Cholesky factor of the covariance

    def unwhiten(self, white: Tensor) -> Tensor:
        """Draws from white noise."""
        return self.loc + white @ self.tril.mT

    def log_prob(self, z: Tensor) -> Tensor:
        """Log density, nats."""
        white = torch.linalg.solve_triangular(self.tril, (z - self.loc).mT, upper=False).mT
        log_det = self.tril.diagonal().log().sum()
        return -0.5 * (white.square() + math.log(math.tau)).sum(-1) - log_det

    def tilted(self, slope: Tensor) -> "Normal":
        """The density times ``exp(slope'z)``, normalised."""
        return Normal(self.loc + self.tril @ (self.tril.mT @ slope), self.tril)

    def permuted(self, order: tuple[int, ...]) -> "Normal":
        """The same density with its axes in another order."""
        covariance = (self.tril @ self.tril.mT)[list(order)][:, list(order)]
        return Normal(self.loc[list(order)], torch.linalg.cholesky(covariance))

    def last_given_others(self, others: Tensor) -> "Grid":
        """Normal with the conditional mean."""
        before = self.tril[:-1, :-1]
        white = torch.linalg.solve_triangular(before, (others - self.loc[:-1]).mT, upper=False).mT
        grid = torch.linspace(-EDGE, EDGE, CELLS + 1, dtype=self.loc.dtype, device=self.loc.device)
        gap = (grid - self.loc[-1] - (white @ self.tril[-1, :-1]).unsqueeze(-1)) / self.tril[-1, -1]
        return Grid(grid, -0.5 * gap.square())


class AxisByAxis:
    """A density of which each coordinate is known given those before it, on a fine grid of its own.

    Draws and densities are exact for one another: between the points of a grid the density is linear.
    """

    _values: Callable[[], Tensor]  # at the nodes, (1, k_1, ..., k_d)
    _conditional: Callable[[Tensor], "Grid"]  # the next coordinate's, of rest (S, k, ...): those behind integrated out
    _given: Callable[[Tensor, Tensor], Tensor]  # rest (S or 1, k, ...) at a value of its first axis for each row

    @property
    def num_dims(self) -> int:
        """Number of axes."""
        return self._values().dim() - 1

    def unwhiten(self, white: Tensor) -> Tensor:
        """Draws from white noise: each coordinate by the inverse of its conditional distribution function."""
        uniform = torch.special.ndtr(white)
        rest, found = self._values(), []
        for axis in range(self.num_dims):
            found.append(self._conditional(rest).icdf(uniform[:, axis]))
            rest = self._given(rest, found[-1])
        return torch.stack(found, -1)

    def log_prob(self, z: Tensor) -> Tensor:
        """Log density, nats; minus infinity beyond the grids."""
        rest, total = self._values(), torch.zeros(len(z)).to(z)
        for axis in range(self.num_dims):
            total = total + self._conditional(rest).log_prob(z[:, axis])
            rest = self._given(rest, z[:, axis])
        return total

    def last_given_others(self, others: Tensor) -> "Grid":
        """The density of the last coordinate given the others ``(S, d - 1)``, one row each."""
        rest = self._values()
        for axis in range(self.num_dims - 1):
            rest = self._given(rest, others[:, axis])
        return self._conditional(rest)


@dataclass(frozen=True, eq=False)
class Interpolated(AxisByAxis):
    """The standard normal density times the exponential of a smooth curve through the nodes, one axis after the other.

    Beyond the outermost nodes the curve goes on as the straight line through the last two; beyond :data:`EDGE` there is
    nothing.
    """

    rule: Rule  # of one axis
    log_ratio: Tensor  # (k,) * d: log density over standard normal at the nodes, nats

    def mass_errors(self, log_ratio: Tensor) -> Tensor:
        """The largest difference from one of the mass of a marginal density, as far as it can be integrated, ``(R,)``.

        Large where the curve rings beside a sharp edge, or has heavy tails beyond the outermost nodes, as under a
        Gamma(.001, .001) prior of a precision.

        :param log_ratio: of many densities on the same nodes, ``(R, k, ..., k)``.
        """
        largest = log_ratio.new_zeros(len(log_ratio))
        for axis in range(self.num_dims):
            grid = self._conditional(log_ratio.movedim(1 + axis, 1), CELLS // COARSER)
            mass = grid.log_density.exp().sum(-1) * ((grid.points[1] - grid.points[0]) / math.tau**0.5)
            largest = torch.maximum(largest, (mass - 1.0).abs())
        return largest

    def _values(self) -> Tensor:
        return self.log_ratio.unsqueeze(0)

    def tilted(self, slope: Tensor) -> "Interpolated":
        """The density times ``exp(slope'z)``, normalised."""
        return Interpolated(self.rule, self.log_ratio + _on_grid([self.rule.nodes[:, 0]] * len(slope)) @ slope)

    def permuted(self, order: tuple[int, ...]) -> "Interpolated":
        """The same density with its axes in another order."""
        return Interpolated(self.rule, self.log_ratio.permute(order))

    def _conditional(self, rest: Tensor, num: int = CELLS) -> "Grid":
        for _ in range(rest.dim() - 2):
            rest = (rest + self.rule.log_weights).logsumexp(-1)
        grid = torch.linspace(-EDGE, EDGE, num + 1, dtype=rest.dtype, device=rest.device)
        log_density = rest @ self._basis(grid).mT - 0.5 * grid.square()
        return Grid(grid, log_density)

    def _given(self, rest: Tensor, z: Tensor) -> Tensor:
        flat = rest.reshape(len(rest), rest.shape[1], -1).expand(len(z), -1, -1)
        return torch.einsum("sk,skm->sm", self._basis(z), flat).reshape(len(z), *rest.shape[2:])

    def _basis(self, z: Tensor) -> Tensor:
        """Weights of the nodes' values at ``z`` ``(S,)``, straight lines beyond the outermost, ``(S, k)``."""
        nodes = self.rule.nodes[:, 0]
        return straight_beyond(nodes, z, lagrange if len(nodes) <= MOST_LAGRANGE else spline)


@dataclass(frozen=True)
class Lattice(AxisByAxis):
    """A density known at the points of a lattice, and nothing outside of it.

    Two layers of points are added, on straight lines of the logarithm.  Between them that is a cubic of four points,
    down to points at most :data:`FINE` apart, or as far as memory allows; then the density is linear.
    """

    step: float  # between neighbours, the same on all axes
    first: Tensor  # (d,) the corner
    log_density: Tensor  # (k_1, ..., k_d) up to a constant, nats; minus infinity where there is next to nothing

    def tilted(self, slope: Tensor) -> "Lattice":
        """The density times ``exp(slope'z)``, normalised."""
        axes = [self.step * torch.arange(num).to(slope) for num in self.log_density.shape]
        return Lattice(self.step, self.first, self.log_density + _on_grid(axes) @ slope)

    def permuted(self, order: tuple[int, ...]) -> "Lattice":
        """The same density with its axes in another order."""
        return Lattice(self.step, self.first[list(order)], self.log_density.permute(order))

    @property
    def num_dims(self) -> int:
        """Number of axes."""
        return self.log_density.dim()

    @cached_property
    def _fine(self) -> tuple[float, Tensor, list[Tensor]]:
        """Spacing and corner of a finer lattice; there the density of the first axis, of the first two, and so on."""
        step, first, table = self.step, self.first, self.log_density - self.log_density.amax()
        for _ in range(2):
            first, table = first - step, extended(table)
        while step > FINE and table.numel() << table.dim() <= LARGEST_TABLE:
            for axis in range(table.dim()):
                table = with_midpoints(table, axis)
            step *= 0.5
        tables = [table.clamp(min=NEGLIGIBLE).exp()]  # so that each row of the lattice has a density
        while tables[0].dim() > 1:
            tables.insert(0, tables[0].sum(-1))
        return step, first, tables

    def _values(self) -> Tensor:
        return self.log_density.new_zeros(1, 0)

    def _conditional(self, rest: Tensor) -> "Grid":
        """That of the next coordinate at those before it, ``rest`` ``(S, j)``: between the corners about these."""
        (step, first, tables), done = self._fine, rest.shape[1]
        table = tables[done]
        row, weight = rest.new_zeros(len(rest), 1).long(), rest.new_ones(len(rest), 1)
        for axis, num in enumerate(table.shape[:-1]):
            cell, share = _cell((rest[:, axis : axis + 1] - first[axis]) / step, num)
            row = torch.cat([row * num + cell, row * num + cell + 1], -1)
            weight = torch.cat([weight * (1.0 - share), weight * share], -1)
        height = torch.einsum("sc,sck->sk", weight, table.reshape(-1, table.shape[-1])[row])
        points = first[done] + step * torch.arange(table.shape[-1], device=first.device).to(first)
        return Grid(points, height.log())

    def _given(self, rest: Tensor, z: Tensor) -> Tensor:
        return torch.cat([rest.expand(len(z), -1), z.unsqueeze(-1)], -1)


def _on_grid(axes: list[Tensor]) -> Tensor:
    """The points of a product of axes, ``(k_1, ..., k_d, d)``."""
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)


def extended(log_density: Tensor) -> Tensor:
    """A table with one more value at each end of each axis, and beside each known one, where none is known.

    On the straight line through the two beside it, and no higher than these; on the lowest of several.

    >>> extended(torch.tensor([-3.0, -1.0, -2.0]))
    tensor([-5., -3., -1., -2., -3.])
    """
    table = torch.nn.functional.pad(log_density, (1, 1) * log_density.dim(), value=-math.inf)
    lowest = torch.full_like(table, math.inf)
    for axis, way in itertools.product(range(table.dim()), (-1, 1)):
        beside = table.roll(way, axis)
        line = beside + (beside - table.roll(2 * way, axis)).clamp(max=0.0)
        lowest = torch.where(line.isfinite(), line.minimum(lowest), lowest)
    return torch.where(table.isfinite() | lowest.isinf(), table, lowest)


def with_midpoints(log_density: Tensor, axis: int) -> Tensor:
    """A table with a value more between any two neighbours on an axis.

    On the cubic of the four values about it, bent at most twice as much as the flatter of the parabolas of three; on
    the parabola where but three are known; on the line where one side is hollow.

    >>> with_midpoints(torch.tensor([0.0, -1.0, -4.0, -10.0]), 0)
    tensor([  0.0000,  -0.2500,  -1.0000,  -2.1875,  -4.0000,  -6.6250, -10.0000])
    """
    y = log_density.movedim(axis, -1)
    curvatures = torch.nn.functional.pad(y, (1, 1), value=-math.inf).diff(dim=-1).diff(dim=-1)
    left, right = curvatures[..., :-1], curvatures[..., 1:]
    flatter, both = left.abs().minimum(right.abs()), 0.5 * (left + right)
    curvature = left.sign() * torch.where(both.isfinite(), both.abs().minimum(2.0 * flatter), flatter)
    curvature = torch.where((left.sign() == right.sign()) & curvature.isfinite(), curvature, 0.0)
    middle = 0.5 * (y[..., :-1] + y[..., 1:]) - curvature / 8.0
    pairs = torch.stack([y, torch.nn.functional.pad(middle, (0, 1))], -1)
    return pairs.flatten(-2)[..., :-1].movedim(-1, axis)


MarginalisedDensity = Normal | Interpolated | Lattice  # normalised, over z (..., d)


def _cell(place: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The cells of ``num`` points at distance one that places lie in, by their lower ends, and the share beyond these.

    Places outside are taken to the nearest point.
    """
    place = place.clamp(0.0, num - 1.0)
    cell = place.floor().long().clamp(max=num - 2)
    return cell, place - cell


def straight_beyond(nodes: Tensor, z: Tensor, curve: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Weights of the values at ``nodes`` ``(k,)`` at ``z`` ``(S,)``, ``(S, k)``: a curve, straight lines beyond."""
    inside = torch.minimum(torch.maximum(z, nodes[:1]), nodes[-1:]).unsqueeze(-1)
    beyond = (z.unsqueeze(-1) - inside) / (nodes[-1] - nodes[-2])
    ends = torch.zeros(2, len(nodes)).to(nodes)
    ends[0, :2], ends[1, -2:] = nodes.new_tensor([-1.0, 1.0]), nodes.new_tensor([-1.0, 1.0])
    return curve(nodes, inside) + torch.where(beyond < 0, beyond * ends[0], beyond * ends[1])


def lagrange(nodes: Tensor, z: Tensor) -> Tensor:
    """The polynomial through values at ``nodes`` ``(k,)``: weights of the values at ``z`` ``(S, 1)``, ``(S, k)``."""
    same = torch.eye(len(nodes), dtype=torch.bool, device=nodes.device)
    gaps = torch.where(same, 1.0, nodes.unsqueeze(-1) - nodes)
    return torch.where(same, 1.0, (z.unsqueeze(-1) - nodes) / gaps).prod(-1)


def spline(nodes: Tensor, z: Tensor) -> Tensor:
    """The natural cubic spline through values at ``nodes`` ``(k,)``: their weights at ``z`` ``(S, 1)``, ``(S, k)``.

    Where there are many nodes: it does not magnify what rounding leaves in the outermost values.
    """
    h = nodes.diff()
    slopes = torch.diff(torch.eye(len(nodes)).to(nodes), dim=0) / h.unsqueeze(-1)
    inner = (2.0 * (h[:-1] + h[1:])).diag() + h[1:-1].diag(1) + h[1:-1].diag(-1)
    curvatures = torch.nn.functional.pad(torch.linalg.solve(inner, 6.0 * slopes.diff(dim=0)), (0, 0, 1, 1))
    cell = (torch.searchsorted(nodes, z[:, 0].contiguous()) - 1).clamp(0, len(h) - 1)
    step = h[cell].unsqueeze(-1)
    a = (nodes[cell + 1].unsqueeze(-1) - z) / step
    b, unit = 1.0 - a, torch.eye(len(nodes)).to(nodes)
    curved = (a**3 - a) * curvatures[cell] + (b**3 - b) * curvatures[cell + 1]
    return a * unit[cell] + b * unit[cell + 1] + curved * step.square() / 6.0


@dataclass(frozen=True, eq=False)
class Grid:
    """Densities on one axis, linear between the points of a grid; one row each, or one for all."""

    points: Tensor  # (G,)
    log_density: Tensor  # (R, G) up to a constant

    @property
    def height(self) -> Tensor:
        """The normalised density at the points, ``(R, G)``."""
        height = (self.log_density - self.log_density.amax(-1, keepdim=True)).exp()
        return height / self._cells(height).sum(-1, keepdim=True)

    def _cells(self, height: Tensor) -> Tensor:
        return 0.5 * (height[:, 1:] + height[:, :-1]) * (self.points[1] - self.points[0])

    def icdf(self, uniform: Tensor) -> Tensor:
        """Quantiles at ``uniform`` ``(S,)``, in rows of their own where there is more than one row."""
        height = self.height
        upto = torch.nn.functional.pad(self._cells(height).cumsum(-1), (1, 0))
        level = uniform.unsqueeze(-1) * upto[:, -1:]
        cell = (torch.searchsorted(upto.expand(len(uniform), -1).contiguous(), level) - 1).clamp(
            0, len(self.points) - 2
        )
        height, upto = height.expand(len(uniform), -1), upto.expand(len(uniform), -1)
        low, high, before = height.gather(1, cell), height.gather(1, cell + 1), upto.gather(1, cell)
        step = self.points[1] - self.points[0]
        mass = level - before
        root = (low.square() + 2.0 * (high - low) * mass / step).relu().sqrt()  # below 0 by rounding alone
        within = torch.where(low + root > 0, 2.0 * mass / (low + root), 0.0)
        return (self.points[cell] + within.clamp(max=float(step))).squeeze(-1)

    def log_prob(self, z: Tensor) -> Tensor:
        """Log density at ``z`` ``(S,)``, nats."""
        return self.prob(z.unsqueeze(-1)).squeeze(-1).log()

    def prob(self, z: Tensor) -> Tensor:
        """Density at ``z`` ``(S, M)``; zero outside the grid."""
        height, step = self.height.expand(len(z), -1), self.points[1] - self.points[0]
        cell, share = _cell((z - self.points[0]) / step, len(self.points))
        value = (1.0 - share) * height.gather(1, cell) + share * height.gather(1, cell + 1)
        return torch.where((z >= self.points[0]) & (z <= self.points[-1]), value, 0.0)


HILL = 0.5  # nats that a log density must rise again by, on the way out, to have another mode


def beyond_valleys(log_density: Tensor) -> Tensor:
    """Points of each axis ``(..., J)`` at which a log density has risen again on the way from the middle, bool."""
    middle = log_density.shape[-1] // 2
    left, right = log_density[..., : middle + 1].flip(-1), log_density[..., middle:]
    risen = [way - way.cummin(-1).values > HILL for way in (left, right)]
    return torch.cat([risen[0].flip(-1)[..., :-1], risen[1]], -1)


HIGHEST = 4  # degree
NODES_PER_TERM = 2  # least squares through fewer would follow each node, with none left to contradict it


@dataclass(frozen=True, eq=False)
class Trend:
    """Values at nodes and the polynomial of least squares through them, of as high a degree as the nodes bear.

    :ivar z: nodes, ``(K, d)``.
    :ivar values: at these, ``(K, D)``.
    """

    z: Tensor
    values: Tensor
    degree: int = HIGHEST

    def __call__(self, z: Tensor) -> Tensor:
        """The value at the nearest node and the polynomial's way from there, at rows ``(R, d)``; ``(R, D)``.

        Beyond the outermost nodes the polynomial stays where it was.
        """
        nearest = torch.cdist(z, self.z).argmin(-1)
        inside = torch.minimum(torch.maximum(z, self.z.amin(0)), self.z.amax(0))
        way = self._terms(inside) - self._terms(self.z[nearest])
        return self.values[nearest] + (way @ self._coefficients).to(self.values)

    @cached_property
    def _products(self) -> list[tuple[int, ...]]:
        """Which axes each term multiplies, a constant first."""
        axes = range(self.z.shape[-1])
        found: list[tuple[int, ...]] = [()]
        for degree in range(1, self.degree + 1):
            more = list(itertools.combinations_with_replacement(axes, degree))
            if NODES_PER_TERM * (len(found) + len(more)) > len(self.z):
                break
            found += more
        return found

    def _terms(self, z: Tensor) -> Tensor:
        """``(R, P)``."""
        x = (z - self._place) / self._spread
        return torch.stack([x[:, list(own)].prod(-1) for own in self._products], -1)

    @property
    def _place(self) -> Tensor:
        return self.z.mean(0)

    @property
    def _spread(self) -> Tensor:
        spread = (self.z - self._place).square().mean(0).sqrt()
        return torch.where(spread > 0, spread, 1.0)

    @cached_property
    def _coefficients(self) -> Tensor:
        """``(P, D)``, zero for products of axes that no node is off."""
        return torch.linalg.pinv(self._terms(self.z)) @ self.values.to(self.z)


TELLING = 4  # nodes, the nearest, that tell how large an error is
PAIRS = 64  # places whose distances from all others are held at a time
CORRELATED = 5.0  # standard deviations over which what a polynomial leaves of a log density is alike


@dataclass(frozen=True, eq=False)
class Kriged(Trend):
    """A curve through one value at each node, ``(K, 1)``: a trend, and what it leaves as a Gaussian process.

    Universal kriging; Cressie (1993), section 3.4.  The nodes are distinct.
    """

    degree: int = 2  # one of four would go through three nodes on either side of each axis, and none contradict it

    def __call__(self, z: Tensor) -> Tensor:
        """The value at rows ``(R, d)``, ``(R, 1)``."""
        rest = self._covariance(z) @ (self._annihilator @ self.values)
        return self._terms(z) @ (self._projector @ self.values) + rest

    def weights(self, z: Tensor) -> Tensor:
        """Those of values at the nodes in the curve at rows ``(R, d)``, ``(R, K)``."""
        return self._terms(z) @ self._projector + self._covariance(z) @ self._annihilator

    def left_out(self, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """Values ``(K, D)`` less where the curves through the other nodes have each (Dubrule, 1983), of some nodes."""
        return (self._annihilator[rows] @ values) / self._annihilator.diagonal()[rows].unsqueeze(-1)

    def errors(self, z: Tensor, apart: Tensor | None = None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Standard errors ``(R,)`` at rows ``(R, d)``, scaled by how far nodes are from the others' curve.

        And the variances of sums of the errors by weights ``(S, R)``, ``(S,)``; those of no weight take no time.

        :param apart: how far that is, ``(K,)``, where the curve is of other values.
        """
        apart = self.left_out(self.values).squeeze(-1) if apart is None else apart
        unit = apart * self._annihilator.diagonal().sqrt()
        nearest = torch.cdist(z, self.z).topk(min(TELLING, len(self.z)), largest=False).indices
        size, covariance = unit[nearest].square().mean(-1).sqrt(), self._covariance(z)
        beyond = self._terms(z) - covariance @ self._inverse @ self._terms(self.z)

        def variances(weights: Tensor) -> Tensor:
            kept = (weights != 0.0).any(0)
            own, places = (weights * size)[:, kept], z[kept]
            seen, trend = own @ covariance[kept], own @ beyond[kept]
            parts = zip(own.split(PAIRS, 1), places.split(PAIRS), strict=True)
            total = sum((own @ replace(self, z=part)._covariance(places) * w).sum(-1) for w, part in parts)
            return total - ((seen @ self._inverse) * seen).sum(-1) + ((trend @ self._design) * trend).sum(-1)

        left = 1.0 - ((covariance @ self._inverse) * covariance).sum(-1) + ((beyond @ self._design) * beyond).sum(-1)
        return size * left.relu().sqrt(), variances  # below 0 by rounding alone

    def _covariance(self, z: Tensor) -> Tensor:
        """That of a Matern process of smoothness 5/2, ``(R, K)``."""
        far = math.sqrt(5.0) / CORRELATED * torch.cdist(z, self.z, compute_mode="donot_use_mm_for_euclid_dist")
        return (1.0 + far + far.square() / 3.0) * (-far).exp()

    @cached_property
    def _inverse(self) -> Tensor:
        return torch.cholesky_inverse(torch.linalg.cholesky(self._covariance(self.z)))

    @cached_property
    def _design(self) -> Tensor:
        """Covariance of the coefficients, ``(P, P)``."""
        terms = self._terms(self.z)
        return torch.linalg.pinv(terms.mT @ self._inverse @ terms, hermitian=True)

    @cached_property
    def _projector(self) -> Tensor:
        """From values to the coefficients, ``(P, K)``."""
        return self._design @ self._terms(self.z).mT @ self._inverse

    @cached_property
    def _annihilator(self) -> Tensor:
        """The matrix that takes the trend out of values and weighs the rest, ``(K, K)``."""
        weighed = self._inverse @ self._terms(self.z)
        return self._inverse - weighed @ self._design @ weighed.mT
