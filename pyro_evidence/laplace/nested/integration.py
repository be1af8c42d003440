"""Outer sites integrated numerically around Laplace's evidence of everything inside."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_evidence.errors import ImproperPosterior, NotAMode
from pyro_evidence.laplace.approximation import LaplaceState, laplace_state, slope
from pyro_evidence.laplace.nested.inner import Inner, is_affordable, profiles, solve_inner
from pyro_evidence.laplace.shape import marginals, transport
from pyro_evidence.laplace.shape.conditional import Profiles
from pyro_evidence.laplace.shape.marginals import Margins
from pyro_evidence.laplace.shape.outer_points import outer_points
from pyro_evidence.laplace.shape.transport import Bend
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.quadrature import nodes as quadrature
from pyro_evidence.numerics.quadrature import student
from pyro_evidence.numerics.quadrature.chart import PROBES, Chart, chart
from pyro_evidence.numerics.quadrature.interpolated import Grid, Interpolated, Normal, OuterDensity
from pyro_evidence.numerics.quadrature.nodes import Rule
from pyro_evidence.threads import own_random_numbers

PRODUCT_DIMS = 3  # up to which nodes form a product over the axes
NODES = (5, 7, 9, 11, 15, 19, 25, 31)  # on each axis
MOST_NODES = 1500
MOVES = 5.0  # the log evidence may move by this part of the tolerance
SD_PER_NAT = 2.5  # .05 standard deviations where .02 nats are asked for
HILL = 0.5  # nats that the log density must rise again by to have another mode
ENDLESS = 50.0  # a standard deviation in unconstrained units, e^50 of a scale, that no data leave
WORTH = 15.0  # nats below the top that are still worth counting, far away
TABLES = (129, 257, 513)  # nodes
DEEP = 30.0  # nats below the top at which a grid ends
NEGLIGIBLE = -16.0  # log weight of a node that may be missing
NUM_DRAWS = 600  # of importance sampling
STEP = 1e-3  # of differences of slopes, in units of the coordinates


@dataclass(frozen=True)
class Around:
    """An outer mode, and how the inner one follows when the outer sites move.

    :ivar state: Laplace's approximation of the inner part there.
    :ivar outer: which coordinates of ``theta`` are outer, positions ``(d,)``.
    :ivar precision: minus the second derivatives of the outer log density, ``(d, d)``.
    :ivar follows: derivative of the inner mode in the outer coordinates, ``(D, d)``.
    """

    state: LaplaceState
    outer: Tensor
    precision: Tensor
    follows: Tensor

    @property
    def centre(self) -> Tensor:
        """The outer mode, unconstrained, ``(d,)``."""
        return self.state.theta[self.outer]

    def inner(self, phi: Tensor, known: tuple[Tensor, Tensor] | None = None, *, thorough: bool = True) -> Inner:
        """Laplace inside at outer coordinates ``(R, d)``, searched from where the mode is expected to first order.

        :param known: outer coordinates and inner modes there, ``(R, d)`` and ``(R, D)``; by default the outer mode's.
        """
        place, mode = (self.centre, self.state.u) if known is None else known
        moved = (phi - place) @ self.follows.mT
        far = moved.abs().amax(-1, keepdim=True).clamp(min=5.0)  # first order is not to be trusted beyond that
        start = mode + moved * (5.0 / far)
        return solve_inner(self.state.problem, self.theta(phi), start, thorough=thorough)

    def theta(self, phi: Tensor) -> Tensor:
        """All hyperparameters with outer coordinates ``(R, d)``, ``(R, T)``."""
        return self.state.theta.expand(len(phi), -1).clone().index_copy(1, self.outer, phi)


@dataclass(frozen=True)
class Integral:
    """The outer sites' posterior.

    :ivar log_evidence: the outer sites integrated, nats, ``()``.
    :ivar error: how much it moved when the nodes were last made more, nats; a standard error where nodes are draws.
    :ivar density: of ``z``, continuous.
    :ivar nodes: Laplace inside at the nodes, and ``log_weights`` the posterior mass of each, ``(K,)``.
    :ivar method: how it was done, for the reader.
    """

    around: Around
    chart: Chart
    density: OuterDensity
    log_evidence: Tensor
    error: float
    nodes: Inner
    log_weights: Tensor
    method: str

    @property
    def phi(self) -> Tensor:
        """Outer coordinates of the nodes, ``(K, d)``."""
        return self.nodes.theta[:, self.around.outer]

    @cached_property
    def bend(self) -> Bend | None:
        """The shape of the inner densities; None where they are normal, or too many to look at."""
        problem, size = self.around.state.problem, self.around.state.problem.joint.latents.size
        batch = transport.NUM_POINTS if problem.joint.row_bytes is not None else transport.FEW_POINTS
        looked = self._profiles(2 * size) if size <= transport.LARGEST else None
        with torch.enable_grad():  # whoever asks for draws may have switched it off
            return None if looked is None else transport.bend(*looked, batch)

    @cached_property
    def margins(self) -> Margins | None:
        """The shapes of inner coordinates, each by itself; None where they are normal, or too many to look at."""
        looked = self._profiles(2 * self.around.state.problem.joint.latents.size * len(marginals.POINTS))
        with torch.enable_grad():
            return None if looked is None else marginals.margins(*looked)

    def _profiles(self, num_hessians: int) -> tuple[Profiles, Tensor] | None:
        """Inner modes at as many outer points as so many Hessians for each allow, and those points."""
        problem = self.around.state.problem
        choices = outer_points(self.chart.num_dims, self.chart.centre)
        z = next((z for z in choices if is_affordable(problem, num_hessians * len(z))), None)
        found = None if z is None else profiles(problem, self.around.inner(self.chart.forward(z)))
        return None if found is None or z is None else (found, z)

    def inner(self, z: Tensor) -> Inner:
        """Laplace inside at ``z`` ``(R, d)``, searched from the nearest node's mode."""
        known = torch.nonzero(torch.isfinite(self.nodes.log_density)).squeeze(-1)
        nearest = known[torch.cdist(z, self.chart.inverse(self.phi[known])).argmin(-1)]
        return self.around.inner(self.chart.forward(z), (self.phi[nearest], self.nodes.u[nearest]))

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Means and standard deviations of the outer coordinates, ``(d,)`` each."""
        weights = self.log_weights.exp().unsqueeze(-1)
        mean = (weights * self.phi).sum(0)
        return mean, (weights * (self.phi - mean).square()).sum(0).sqrt()


def around(state: LaplaceState, outer: Tensor) -> Around:
    """Second derivatives at an outer mode, by central differences of exact slopes.

    :raises NotAMode: where the outer log density is not concave there.
    """
    steps = STEP * torch.eye(len(state.theta)).to(state.theta)[outer]
    pairs = [[laplace_state(state.problem, state.theta + s * e, state.u) for s in (1.0, -1.0)] for e in steps]
    slopes = torch.stack([slope(a).total[outer] - slope(b).total[outer] for a, b in pairs])
    precision = -0.25 / STEP * (slopes + slopes.mT)
    follows = torch.stack([(a.u - b.u) / (2.0 * STEP) for a, b in pairs], -1)
    if not bool(torch.linalg.eigvalsh(precision)[0] > 0):
        raise NotAMode(_not_concave(state, outer, precision))
    return Around(state, outer, precision, follows)


def _not_concave(state: LaplaceState, outer: Tensor, precision: Tensor) -> str:
    values, vectors = torch.linalg.eigh(precision)
    where = state.problem.joint.hypers.label(int(outer[int(vectors[:, 0].abs().argmax())]))
    return (
        f"the log density of the outer sites has curvature {float(values[0]):.3g} at {where}, where its search ended; "
        "expected a maximum. Give that site a proper prior that says more, name fewer sites in outer=, or sample them: "
        "MCMC(NUTS(LaplaceMarginal(model, integrate=[...])))."
    )


def integrate(found: Around, tolerance: float) -> Integral:
    """The integral over the outer sites, by as many nodes as the tolerance asks for.

    :param tolerance: of the log evidence, nats; means and standard deviations are good to 2.5 times as many standard
        deviations.
    """
    straight = chart(found.centre, found.precision)
    if float(straight.basis.norm(dim=0).max()) > ENDLESS:
        raise ImproperPosterior(_flat(found))
    profile = found.inner(straight.probes(), thorough=False).log_density.nan_to_num(nan=-torch.inf)
    d = straight.num_dims
    _require_fall(found, straight, profile.reshape(d, -1))
    elsewhere = _elsewhere(found, straight, profile)
    if len(elsewhere):
        if d == 1:
            return tabulated(found, straight, elsewhere, tolerance)
        raise NotAMode(_several_hills(found, elsewhere))
    bent = straight.bent(profile)
    if d <= PRODUCT_DIMS:
        settled = _settled(found, bent, tolerance)
        return settled if settled is not None else drawn(found, bent, tolerance)
    if d <= quadrature.LARGEST_DESIGN:
        design = _design(found, bent)
        return design if design.error <= 10.0 * tolerance else drawn(found, bent, tolerance)
    return drawn(found, bent, tolerance)


def _elsewhere(found: Around, where: Chart, profile: Tensor) -> Tensor:
    """Places ``(M, d)`` far from the mode, or beyond a valley, where the density is worth counting: other modes."""
    drawn = prior_draws(found)
    points = torch.cat([where.probes(), drawn])
    height = torch.cat([profile, found.inner(drawn, thorough=False).log_density])
    t = torch.linalg.solve(where.basis, (points - where.centre).mT).mT
    far, worth = t.norm(dim=-1) > -PROBES[0], height > profile.amax() - WORTH
    profiles = profile.reshape(where.num_dims, -1)
    beyond = torch.cat(
        [_beyond_valleys(profiles).reshape(-1), torch.zeros(len(drawn), dtype=torch.bool).to(far.device)]
    )
    return points[worth & (far & (height > _fallen(profiles)) | beyond)]


def prior_draws(found: Around) -> Tensor:
    """Outer coordinates drawn from the prior of each outer site, the others at the mode, ``(16, d)``."""
    joint, state = found.state.problem.joint, found.state
    nodes, chosen = joint.trace(state.u, state.theta).nodes, set(_names(found))
    parts = [p for p in joint.hypers if p.name in chosen]
    with own_random_numbers():
        torch.manual_seed(0)
        draws = [p.transform.inv(nodes[p.name]["fn"].sample((16,))).reshape(16, -1).double() for p in parts]
    rows = torch.cat(draws, -1)
    return rows[torch.isfinite(rows).all(-1)]


def _fallen(profiles: Tensor) -> Tensor:
    """How low the log density has fallen at the ends of the axes where it is highest there."""
    return torch.maximum(profiles[:, 0], profiles[:, -1]).amax() + HILL


def _beyond_valleys(profiles: Tensor) -> Tensor:
    """Points of each axis at which the log density has risen again on the way from the mode, ``(d, J)`` bool."""
    middle = profiles.shape[-1] // 2
    right, left = profiles[:, middle:], profiles[:, : middle + 1].flip(-1)
    risen = [way - way.cummin(-1).values > HILL for way in (left, right)]
    return torch.cat([risen[0].flip(-1)[:, :-1], risen[1]], -1)


def _several_hills(found: Around, places: Tensor) -> str:
    heights = found.inner(torch.cat([found.centre.unsqueeze(0), places[:8]])).log_density
    lines = [
        f"  {h:10.2f} nats at {[round(v, 3) for v in place]}"
        for h, place in zip(heights.tolist(), torch.cat([found.centre.unsqueeze(0), places[:8]]).tolist(), strict=True)
    ]
    return (
        f"the log density of the outer sites {_names(found)} has several modes. Its mode and other places that count, "
        "in unconstrained coordinates:\n" + "\n".join(lines) + "\nName one site in outer=[...], whose modes are all "
        "integrated, or sample them: "
        f"MCMC(NUTS(LaplaceMarginal(model, integrate={list(found.state.problem.joint.latents.names)})), ...)."
    )


def _require_fall(found: Around, where: Chart, profiles: Tensor) -> None:
    """Refuse a density that stays up far from its mode, as under a prior without an integral.

    :raises ImproperPosterior: where it is no lower at 26 than at 6 standard deviations, and that not low enough.
    """
    for axis, end in itertools.product(range(where.num_dims), (0, -1)):
        before = profiles[axis, end]
        if float(profiles.amax() - before) < WORTH:
            far = where.centre + 4.0 * PROBES[end] * where.basis[:, axis]
            if float(before - found.inner(far.unsqueeze(0), thorough=False).log_density) < 1.0:
                raise ImproperPosterior(_flat(found))


def _flat(found: Around) -> str:
    return (
        f"the log density of the outer sites {_names(found)} hardly falls far from where their search ended: it has no "
        "integral, so there is no evidence. Give them proper priors, such as HalfNormal or HalfCauchy, or maximise "
        "them by hyper=."
    )


def tabulated(found: Around, where: Chart, elsewhere: Tensor, tolerance: float) -> Integral:
    """One outer coordinate by the trapezoidal rule over all its hills, on ever finer grids.

    :param elsewhere: places of other hills, ``(M, 1)``.
    """
    ends = torch.cat([where.inverse(elsewhere), where.centre.new_tensor([[PROBES[0]], [PROBES[-1]]])])
    low, high = float(ends.min()) + PROBES[0], float(ends.max()) + PROBES[-1]
    coarse = torch.linspace(low, high, 129).to(where.centre).unsqueeze(-1)
    height = _at(found, where, coarse)[0].log_density
    inside = coarse[height > height.amax() - DEEP, 0]
    step, before = float(coarse[1, 0] - coarse[0, 0]), math.inf
    for num in TABLES:
        z = torch.linspace(float(inside.min()) - step, float(inside.max()) + step, num).to(coarse).unsqueeze(-1)
        nodes = found.inner(where.forward(z))
        log_density = nodes.log_density + where.log_slope(z)
        log_evidence = log_density.logsumexp(0) + (z[1, 0] - z[0, 0]).log()
        error = abs(float(log_evidence) - before)
        if error <= tolerance / MOVES:
            break
        before = float(log_evidence)
    density = Grid(z[:, 0], (log_density - log_evidence).unsqueeze(0))
    method = f"{num} equally spaced nodes over several modes"
    return Integral(found, where, density, log_evidence, error, nodes, log_density.log_softmax(0), method)


def _settled(found: Around, where: Chart, tolerance: float) -> Integral | None:
    """Ever more nodes until nothing moves; None where they do not settle."""
    before: Integral | None = None
    products = _products(found, where)
    for now in products:
        if before is not None:
            now = replace(now, error=float((now.log_evidence - before.log_evidence).abs()))
            if _moved(before, now) <= tolerance / MOVES:
                return replace(next(products, now), error=now.error) if where.num_dims == 1 else now  # for its tails
        before = now
    return None


def _moved(before: Integral, now: Integral) -> float:
    """The largest move of log evidence, means and standard deviations, in nats of tolerance."""
    (mean, sd), (new_mean, new_sd) = before.moments, now.moments
    moved = torch.maximum((new_mean - mean).abs() / new_sd, (sd / new_sd).log().abs()).max()
    worst = max(now.error, float(moved) / SD_PER_NAT)
    return worst if math.isfinite(worst) else math.inf


def _products(found: Around, where: Chart) -> Iterator[Integral]:
    for num in NODES:
        if num**where.num_dims > MOST_NODES:
            return
        axis = quadrature.gauss_hermite(num)
        rule = quadrature.product(axis, where.num_dims)
        nodes, log_ratio = _at(found, where, rule.nodes)
        log_ratio = _filled(rule, log_ratio)
        if not bool(torch.isfinite(log_ratio).all()):
            return
        log_evidence = rule.log_mean(log_ratio)
        density = Interpolated(axis, (log_ratio - log_evidence).reshape([num] * where.num_dims))
        weights = rule.log_weights + log_ratio - log_evidence
        method = f"{num} nodes on each of {where.num_dims} axes" if where.num_dims > 1 else f"{num} nodes"
        yield Integral(found, where, density, log_evidence, math.inf, nodes, weights, method)


def _filled(rule: Rule, log_ratio: Tensor) -> Tensor:
    """Far nodes without an inner mode get their nearest neighbour's value, which their weight makes nothing of."""
    missing = ~torch.isfinite(log_ratio)
    if not bool(missing.any()) or bool(missing.all()) or bool((rule.log_weights[missing] > NEGLIGIBLE).any()):
        return log_ratio
    known = torch.nonzero(~missing).squeeze(-1)
    nearest = known[torch.cdist(rule.nodes[missing], rule.nodes[known]).argmin(-1)]
    return log_ratio.index_copy(0, torch.nonzero(missing).squeeze(-1), log_ratio[nearest])


def _at(found: Around, where: Chart, z: Tensor) -> tuple[Inner, Tensor]:
    """Laplace inside at ``z`` ``(K, d)``, and the log of what is integrated over the standard normal density."""
    nodes = found.inner(where.forward(z))
    log_normal = -0.5 * (z.square() + math.log(math.tau)).sum(-1)
    return nodes, nodes.log_density + where.log_slope(z) - log_normal


def _design(found: Around, where: Chart) -> Integral:
    """A central composite design; its error is what its centre and axes alone would say otherwise."""
    rule = quadrature.central_composite(where.num_dims)
    nodes, log_ratio = _at(found, where, rule.nodes)
    log_evidence = rule.log_mean(log_ratio)
    weights = rule.log_weights + log_ratio - log_evidence
    error = float((quadrature.axes_of(rule).log_mean(log_ratio[: 2 * where.num_dims + 1]) - log_evidence).abs())
    density = _normal(rule.nodes, weights)
    method = f"central composite design of {len(rule.nodes)} nodes in {where.num_dims} dimensions"
    return Integral(found, where, density, log_evidence, error, nodes, weights, method)


def _normal(z: Tensor, log_weights: Tensor) -> Normal:
    """The normal density with the moments of weighted points."""
    weights = log_weights.exp().unsqueeze(-1)
    loc = (weights * z).sum(0)
    covariance = (weights * (z - loc)).mT @ (z - loc)
    return Normal(loc, torch.linalg.cholesky(covariance))


def drawn(found: Around, where: Chart, tolerance: float) -> Integral:
    """Importance sampling over the outer sites from a Student-t at their mode, in the mapped coordinates.

    :raises ImproperPosterior: where a few draws carry all the weight.
    """
    z = student.draws(NUM_DRAWS, where.num_dims).to(where.centre)
    nodes = found.inner(where.forward(z), thorough=False)
    log_weights = (nodes.log_density + where.log_slope(z) - student.log_density(z)).nan_to_num(nan=-torch.inf)
    log_evidence = importance.log_mean(log_weights)
    if float(importance.effective_sample_size(log_weights)) < max(20.0, 2.0 * where.num_dims):
        raise ImproperPosterior(_scattered(found, log_weights))
    weights = log_weights.log_softmax(0)
    error = float(importance.standard_error(log_weights))
    density = _normal(z, weights)
    method = f"importance sampling with {NUM_DRAWS} draws in {where.num_dims} dimensions"
    return Integral(found, where, density, log_evidence, error, nodes, weights, method)


def _names(found: Around) -> list[str]:
    slices = found.state.problem.joint.hypers.slices
    return sorted({n for n, s in slices.items() for i in found.outer.tolist() if s.start <= i < s.stop})


def _scattered(found: Around, log_weights: Tensor) -> str:
    effective = float(importance.effective_sample_size(log_weights))
    inside = list(found.state.problem.joint.latents.names)
    return (
        f"the outer sites {_names(found)}, {len(found.outer)} coordinates, cannot be integrated from their mode: "
        f"{len(log_weights)} draws there are worth {effective:.1f}. Sample them instead, the rest integrated: "
        f"MCMC(NUTS(LaplaceMarginal(model, integrate={inside})), ...); or name fewer in outer=, or maximise some by "
        "hyper=."
    )
