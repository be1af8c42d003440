"""Whether second derivatives are those of the density, by differences of its gradient; named where they are not.

A log density with a corner, or one whose formula changes branches at a point, has second derivatives that automatic
differentiation gets wrong there, and Laplace's approximation would use them without a word.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from pyro_evidence.errors import ImproperPosterior, NotAMode, NotSmooth
from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.numerics.coordinates import is_identity
from pyro_evidence.numerics.derivatives import generic_directions, pullback
from pyro_evidence.numerics.linalg import relative_rounding
from pyro_evidence.numerics.newton import Density
from pyro_evidence.precision.dense import Precision
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.predictors import unwrapped
from pyro_evidence.program.sites import Node, is_improper, sample_nodes
from pyro_evidence.structure.density import AutogradDensity

WRONG = "its second derivatives are not those of its slope"
TOLERANCE = 0.05  # of a product with the Hessian, in posterior standard deviations
ONE_AND_HUNDREDTH = (1.0, 0.01)  # of a reach: a smooth slope changes by a hundredth at the second, a corner as much
# Of differences: a bend as narrow as the first step is none at a tenth of it; the rounding of an ill-conditioned slope
# is little at thirty and a thousand times the step, an eighth of a standard deviation, where a corner still shows.
STEPS = (1.0, 0.1, 30.0, 1000.0)
ROUNDED = 1e-3  # of a precision: where each latent alone has variances that others share by so many digits
SQUARED = 0.1  # of a gap, left at a tenth of the step: a smooth slope leaves a hundredth, a corner all of it or more
CUT = 1e-3  # of the change along a site, which its slope leaves out
JUMP = 1e-3  # nats: a smaller one moves no log evidence by more
PIECES = 64  # of a way, in which what a slope does not show is 4e-6 of what it is on the whole, but for jumps
ROUNDS = 12  # each taking a quarter of a way
JUMPS = 0.3  # of a change at a hundred times the distance: what is smooth has a hundredth of it left
MOST_LOOKED_AT = 64  # coordinates along which a corner is looked for


@dataclass(frozen=True, eq=False)
class ModeNeighbourhood:
    """A mode, or where a search for it has stopped, and the density around it.

    :ivar u: the mode, shape ``(D,)``.
    :ivar active: coordinates that are not pruned, bool, shape ``(D,)``.
    """

    joint: LogJoint
    density: Density
    u: Tensor
    theta: Tensor
    active: Tensor

    def fall(self, moves: Tensor) -> Tensor:
        """Fall of the log joint from the mode to ``u`` plus each move ``(P, D)``, nats, shape ``(P,)``."""
        value = self.heights(torch.cat([self.u.unsqueeze(0), self.u + moves]))
        return value[0] - value[1:]

    def heights(self, rows: Tensor) -> Tensor:
        """The log joint at rows ``(P, D)``, nats, shape ``(P,)``."""
        with torch.no_grad(), without_validation():
            return self.density.log_joint(rows, self.theta)

    def slopes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint at rows ``(P, D)``, shape ``(P,)``, and its gradient, shape ``(P, D)``."""
        with without_validation():
            value, gradient = self.density.gradient(rows, self.theta)
        return value.detach(), gradient

    def differences(self, directions: Tensor, step: float) -> Tensor:
        """Central differences of the gradient along each direction, shape ``(P, D)``."""
        slope = self.slopes(torch.cat([self.u + step * directions, self.u - step * directions]))[1]
        ahead, behind = slope.chunk(2)
        return (ahead - behind) / (2.0 * step)


@dataclass(frozen=True, eq=False)
class Products:
    """Directions and what the curvature makes of them.

    :ivar directions: shape ``(P, D)``.
    :ivar images: minus the Hessian times each, as it is believed to be, shape ``(P, D)``.
    :ivar unit: what one unit of each coordinate of an image is worth, shape ``(D,)``: its standard deviation.
    :ivar precision: the Hessian as it is believed to be.
    """

    directions: Tensor
    images: Tensor
    unit: Tensor
    precision: Precision

    def joint_error(self, found: Tensor) -> float:
        """Largest difference of other images ``(P, D)``, in standard deviations of all coordinates together.

        As if a coordinate alone made it, whose share of such a direction falls with the root of their number.
        """
        gap = found - self.images
        return float((gap * self.precision.solve(gap)).sum(-1).amax().abs() * gap.shape[-1]) ** 0.5


def of_precision(precision: Precision, active: Tensor) -> Products:
    """Two directions, each about one posterior standard deviation long, by solving with the precision itself.

    :param active: coordinates that are not pruned, shape ``(D,)``.
    """
    unit = precision.variance[0].sqrt()
    images = generic_directions(2, len(active), unit) / unit * active
    directions = torch.cat([precision.solve(image.unsqueeze(0)) for image in images])
    length = (directions * images).sum(-1, keepdim=True).sqrt()
    return Products(directions / length, images / length, unit * length.mean(), precision)


def curvature_error(neighbourhood: ModeNeighbourhood, products: Products, step: float) -> float:
    """The largest difference between the products and differences of the gradient, relative to the largest of either.

    :param step: of the differences, in units of the directions.
    """
    found = -neighbourhood.differences(products.directions, step)
    size = torch.maximum(products.images.abs(), found.abs()) * products.unit
    gap = (found - products.images).abs() * products.unit
    largest = size.amax()
    return float(gap.amax() / torch.where(largest > 0.0, largest, 1.0))


def certify(neighbourhood: ModeNeighbourhood, products: Products, *, last: bool = True) -> float:
    """Compare products with the Hessian at a mode with differences of the gradient.

    :param last: whether the search has ended.  Before that, where scales are far from the data's, a slope may be lost
        in the rounding of single precision that is none in the end.
    :return: the relative error, 1e-6 or less where all is well.
    :raises NotSmooth: where they disagree, with the site and its distribution, or single precision as the reason.
    :raises NotAMode: where the curvature is next to singular.
    """
    joint = neighbourhood.joint
    step, error = float(torch.finfo(joint.dtype).eps ** 0.25), math.inf  # errors and rounding are small
    for longer in STEPS:
        error = curvature_error(neighbourhood, products, longer * step)
        if error <= TOLERANCE:
            return error
    # Rounding of latents that are nearly functions of one another is large in each, and small in all together.
    error = products.joint_error(-neighbourhood.differences(products.directions, step))
    if error <= TOLERANCE:
        return error
    if joint.dtype is not torch.float64 and _is_rounded_away(neighbourhood, products, step):
        if not last:
            return error
        raise NotSmooth(
            f"second derivatives at the posterior mode cannot be checked: in {joint.dtype} the slope of the log joint "
            f"density is rounded by more than it changes; expected differences that show its curvature. "
            f"{double_precision(joint)}"
        )
    gaps = [-neighbourhood.differences(products.directions, s * step) - products.images for s in (1.0, 0.1)]
    far, near = (float((gap.abs() * products.unit).amax()) for gap in gaps)
    if near < SQUARED * far:  # they draw near with the square of the step, as at no corner
        raise NotAMode(
            f"the curvature at the posterior mode is next to singular: {step:.0e} standard deviations away it is "
            f"another, though the density is smooth, so that Laplace's approximation holds nowhere. The mode is about "
            f"to merge with another one or to split, which hyperparameters that are maximised seek, because the log "
            f"evidence grows without bound there. Give them a prior (maximise=[...] of sites), or fix them."
        )
    alone = generic_directions(2, len(neighbourhood.u), products.unit) * products.precision.variance[0].sqrt()
    if float(products.precision.whiten(alone).square().sum(-1).amax()) > ROUNDED / torch.finfo(torch.float64).eps:
        where = joint.latents.label(int((gaps[0].abs() * products.unit).amax(0).argmax()))
        raise NotAMode(
            f"latents determine one another to the last digits of {joint.dtype}, {where} among them, so that the "
            f"curvature at the posterior mode is rounding; expected latents that vary on their own. Where a covariance "
            f"is maximised and runs to correlations of 1 or -1, as of slopes that do not vary alone, leave such "
            f"slopes out, or their correlations: (x || g) for (x | g) in a formula; or write effects as z @ A.T, z "
            f"standard normal and A a param without constraints."
        )
    require_own_slopes(neighbourhood)
    for way in step * products.directions:
        if (said := jump_message(neighbourhood, way, "at the posterior mode")) is not None:
            raise NotSmooth(said)
    raise _not_smooth(neighbourhood, step * products.directions[0], "at the posterior mode", WRONG)


def double_precision(joint: LogJoint) -> str:
    """The advice to compute in double precision, where a model or its data do not; else nothing."""
    given = [x.dtype for x in (*joint.args, *joint.kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
    single = [dtype for dtype in (joint.dtype, *given) if dtype is not torch.float64]
    if not single:
        return ""
    return (
        f"The model computes in {single[0]}: try double precision first, torch.set_default_dtype(torch.float64) and "
        f".double() after the data. "
    )


def _is_rounded_away(neighbourhood: ModeNeighbourhood, products: Products, step: float) -> bool:
    """Whether slopes a quarter of a step apart, all on one side of the mode, change by leaps: no corner does that."""
    rows = torch.stack([neighbourhood.u + (1.0 + k / 4) * step * products.directions for k in range(3)])
    slope = neighbourhood.slopes(rows.flatten(0, 1))[1].reshape(rows.shape)
    leaps = (slope[0] - 2.0 * slope[1] + slope[2]).abs() * products.unit
    return bool(leaps.amax() > TOLERANCE * 2.0 * step * (products.images.abs() * products.unit).amax())


def certify_sites(joint: LogJoint, u: Tensor, theta: Tensor, names: Sequence[str], unit: Tensor) -> None:
    """Compare second derivatives of some sites with differences of their slopes, where a search starts.

    :param unit: the change of each coordinate that matters to the sites, shape ``(D,)``.
    :raises NotSmooth: with the site and its distribution.
    """
    step = torch.finfo(joint.dtype).eps ** 0.25 * unit * generic_directions(1, len(u), u)[0] / len(u) ** 0.5
    gaps = _site_gaps(joint, u, theta, step)
    bad = [n for n in names if not gaps[n].error <= TOLERANCE]
    if bad:
        raise _kink(gaps[bad[0]], bad[0], "where the search starts", WRONG)


def require_no_corner(neighbourhood: ModeNeighbourhood, gradient: Tensor) -> None:
    """Refuse a log density on a corner of which a search has stopped: its slope jumps there.

    The change of the slope from one side of the point to the other goes to zero with the distance where the density
    is smooth, and does not where there is a corner.

    :param gradient: where the search stopped, shape ``(D,)``; its largest elements are looked at.
    :raises NotSmooth: with the site and its distribution.
    """
    joint, u = neighbourhood.joint, neighbourhood.u
    index = gradient.abs().argsort(descending=True)[:MOST_LOOKED_AT]
    ways = torch.zeros(len(index), len(u), dtype=u.dtype, device=u.device)
    reach = 10.0 * float(torch.finfo(joint.dtype).eps ** 0.5) * (1.0 + u[index].abs())
    ways[torch.arange(len(index)), index] = reach
    changes = [neighbourhood.differences(s * ways, 1.0) for s in (100.0, *ONE_AND_HUNDREDTH)]
    sizes = [2.0 * each.gather(1, index.unsqueeze(-1)).squeeze(-1).abs() for each in changes]
    jumps = torch.stack([torch.where(near > JUMPS * far, near, 0.0) for far, near in pairwise(sizes)]).amax(0)
    worst = int(jumps.argmax())
    if float(jumps[worst]) > 0.1 * float(gradient.abs().max()):
        jump = f"its slope jumps by {float(jumps[worst]):.2e} along {joint.latents.label(int(index[worst]))}"
        raise _not_smooth(neighbourhood, ways[worst], "where the search for the posterior mode stopped", jump)


def jump_message(neighbourhood: ModeNeighbourhood, way: Tensor, where: str, reach: float = 0.0) -> str | None:
    """The error message for a jump of the log density from ``u - way`` to ``u + way``; None where it is continuous.

    Across ever smaller parts of the way, that part is taken in which the density changes most by what its slope does
    not show: nothing of that is left in the end but at a jump.

    :param reach: posterior standard deviations from ``u`` to either end: a jump counts by the mass that lies beyond.
    """
    joint, u = neighbourhood.joint, neighbourhood.u
    if _is_smooth(neighbourhood, way):
        return None
    if (double := joint.in_double) is not joint:  # whose rounding is no jump
        exact = replace(neighbourhood, joint=double, density=AutogradDensity(double, None))
        return jump_message(exact, way, where, reach)
    ends, num = (u - way, u + way), PIECES
    for _ in range(ROUNDS):
        rows = torch.stack([ends[0].lerp(ends[1], i / num) for i in range(num + 1)])
        value, slope = neighbourhood.slopes(rows)
        along = 0.5 / num * (slope @ (ends[1] - ends[0]))
        gaps, rounding = (value.diff() - along[:-1] - along[1:]).abs(), relative_rounding(joint.dtype) * value.abs()
        away = reach * (rows[1:] - u).norm(dim=-1) / way.norm()
        least = JUMP / (2.0 * torch.special.ndtr(-away))
        gaps = torch.where(gaps > torch.maximum(rounding[:-1], rounding[1:]) + least, gaps, 0.0)
        worst, size = int(gaps.argmax()), float(gaps.max())
        if not size:
            return None
        ends, num = (rows[worst], rows[worst + 1]), 4
    moved = torch.where(joint.latents.by_part.to(u.device), ends[1], ends[0])
    jumps = (neighbourhood.heights(moved) - value[worst]).abs().nan_to_num()
    return (
        f"the log joint density jumps by {size:.2g} nats along site '{joint.latents.names[int(jumps.argmax())]}', "
        f"{where}; expected a density that is continuous and smooth in every latent. Look for comparisons with that "
        f"site (torch.where, >=, if, floor, int, indices made of it). A switchpoint is summed out when it is a "
        f"Categorical over the places between the data; or let the change take time, by "
        f"torch.sigmoid((x - switchpoint) / width)."
    )


def _is_smooth(neighbourhood: ModeNeighbourhood, way: Tensor) -> bool:
    """Whether the values of the density from ``u - way`` to ``u + way``, and one slope, tell that it does not jump.

    Seventh differences show a jump twentyfold, and two of one sign fivefold; but not stairs of one height in each
    piece, which rise where the slope does not.
    """
    u, middle = neighbourhood.u, PIECES // 2
    along = neighbourhood.slopes(u.unsqueeze(0))[1][0] @ way / middle
    value = neighbourhood.heights(torch.stack([(u - way).lerp(u + way, i / PIECES) for i in range(PIECES + 1)]))
    near, far = (value[middle + k] - value[middle - k] for k in (1, 2))
    stairs = (8.0 * near - far) / 12.0 - along  # the difference is of order four
    off = torch.cat([value.diff(n=7), stairs.reshape(1)]).abs()
    return bool((off <= JUMP + relative_rounding(neighbourhood.joint.dtype) * value.abs().amax()).all())


def require_own_slopes(neighbourhood: ModeNeighbourhood) -> None:
    """Refuse a density whose slope along some site is not its own.

    Along each site, beside the point, where corners are not, the slope is compared with a difference of the density;
    what that is itself off by, rounding of a nearly singular matrix among it, shows where the step is doubled.

    :raises NotSmooth: naming the site.
    """
    joint, u = neighbourhood.joint, neighbourhood.u
    ways = joint.latents.by_part.to(u.device) * ((1.0 + u.abs()) * generic_directions(1, len(u), u)[0])
    beside = u + 0.01 * (1.0 + u.abs()) * generic_directions(2, len(u), u)[1]
    eps = torch.finfo(joint.dtype).eps
    step = eps ** (1.0 / 3.0)
    slope = neighbourhood.slopes(beside.unsqueeze(0))[1][0]
    ends = neighbourhood.heights(torch.cat([beside + times * step * ways for times in (1.0, -1.0, 2.0, -2.0)]))
    ahead, behind, farther_ahead, farther_behind = ends.chunk(4)
    promised, found = ways @ slope, (ahead - behind) / (2.0 * step)
    unsure = (found - (farther_ahead - farther_behind) / (4.0 * step)).abs()
    rounding = 100.0 * eps * (1.0 + ends.abs().amax()) / step + 10.0 * unsure
    gaps = ((found - promised).abs() - rounding) / (torch.maximum(promised.abs(), found.abs()) + rounding)
    worst = int(gaps.nan_to_num().argmax())
    if not float(gaps[worst]) > max(CUT, 400.0 * step**2):  # a third derivative is up to thousands of the slope
        return
    name = joint.latents.names[worst]
    raise NotSmooth(
        f"the log joint density changes by {float(found[worst]):.3g} nats a unit along site '{name}', and by its slope "
        f"by {float(promised[worst]):.3g}: part of it is computed where no derivative follows. Expected '{name}' to be "
        f"computed with as a tensor: look for {name}.item(), float({name}), int({name}), {name}.detach(), .data or "
        f".numpy(), and for a torch.autograd.Function whose backward is not its derivative."
    )


@dataclass(frozen=True)
class GradientMismatch:
    """By how much one site's slope changes along a step otherwise than its second derivatives promise.

    :ivar kind: the name of the site's distribution.
    :ivar size: absolute difference of the two changes.
    :ivar error: the same relative to the larger.
    """

    kind: str
    size: float
    error: float


def _not_smooth(neighbourhood: ModeNeighbourhood, step: Tensor, where: str, what: str) -> NotSmooth:
    gaps = _site_gaps(neighbourhood.joint, neighbourhood.u, neighbourhood.theta, step)
    name = max(gaps, key=lambda n: gaps[n].size)
    return _kink(gaps[name], name, where, what)


def _kink(gap: GradientMismatch, name: str, where: str, what: str) -> NotSmooth:
    return NotSmooth(
        f"the log density of site '{name}', a {gap.kind}, has a kink {where}: {what}, so that there is no curvature "
        f"for Laplace's approximation. Expected a smooth density. Take a smooth relative (SoftLaplace or StudentT for "
        f"Laplace, softplus for relu or clamp, sqrt(x**2 + 1e-3) for abs), or run NUTS on the model; where weights "
        f"are to be sparse, RVM(model) prunes them."
    )


def _site_gaps(joint: LogJoint, u: Tensor, theta: Tensor, step: Tensor) -> dict[str, GradientMismatch]:
    """Every site's slope at both ends of ``u`` plus and minus ``step`` ``(D,)``, beside its second derivative."""
    point = u.detach().requires_grad_()
    here, sides = _sites(joint, point, theta), []
    for sign in (1.0, -1.0):
        end = (u + sign * step).detach().requires_grad_()
        sides.append({n: _slope(node, end) @ step for n, node in _sites(joint, end, theta).items()})
    gaps = {}
    for name, node in here.items():
        curvature = pullback(_slope(node, point, create_graph=True), point, step) @ step
        change, promised = float(sides[0][name] - sides[1][name]), 2.0 * float(curvature)
        size, largest = abs(change - promised), max(abs(change), abs(promised))
        kind = type(unwrapped(node["fn"]).base).__name__.strip("_")
        gaps[name] = GradientMismatch(kind, size, size / largest if largest > 0.0 else 0.0)
    return gaps


def _sites(joint: LogJoint, point: Tensor, theta: Tensor) -> dict[str, Node]:
    """The sites of a run, with their log densities."""
    trace = joint.trace(point, theta)
    with without_validation():
        trace.compute_log_prob()
    return sample_nodes(trace)


def _slope(node: Node, point: Tensor, *, create_graph: bool = False) -> Tensor:
    """The gradient of a site's log density, ``(D,)``."""
    value = node["log_prob_sum"]
    return pullback(value, point, create_graph=create_graph) if isinstance(value, Tensor) else torch.zeros_like(point)


FAR = (10.0, 30.0, 100.0)  # standard deviations
LEAST = 1.0  # nats, at one of them
BEYOND = (1e4, 1e6)  # standard deviations: another mode is nearer, and the largest number is far
NEAR = 2.0  # standard deviations, where a normal density has fallen by 2 nats
LEAST_FALL = 0.2  # nats, there
ENDS = (1e4, 1e6, 1e8, 1e10, 1e12)  # standard deviations: on the way a vague prior has its say
SLOW = 1e-4  # relative to how an integral that just diverges falls
NUM_ON_THE_WAY = 8  # places up to there
LEAST_DIP = 0.01  # nats below the far end, somewhere before it
FAR_OUT = 1e8  # times the mode, or where a coordinate is as large


def require_proper_mode(neighbourhood: ModeNeighbourhood, precision: Precision) -> None:
    """Walk away from the mode along its flattest direction, and along the ray from the origin through each site.

    A mode at infinity is not found by its curvature, which is rounding there: but further out on the ray the density
    is as high.

    :raises ImproperPosterior: when the log joint stays up on one side.
    """
    direction, rays = precision.least_precise_direction(neighbourhood.active)[0], _rays(neighbourhood)
    most = 2 * (len(FAR) + NUM_ON_THE_WAY)
    # a few of the places show as a rule that none of the others matters
    few = torch.stack([FAR[0] * direction, -FAR[0] * direction, NEAR * direction, -NEAR * direction])
    moves = torch.cat([few, *(ends[:1] for _, ends in rays)])
    falls = torch.cat([neighbourhood.fall(part) for part in moves.split(most)])
    if bool((falls[:2] >= LEAST).all()) and bool((falls[2:].abs() >= LEAST_FALL).all()):
        return
    on_the_way = [NEAR * k / NUM_ON_THE_WAY for k in range(1, NUM_ON_THE_WAY + 1)]
    steps = torch.tensor((*FAR, *on_the_way)).to(direction)[:, None] * direction
    moves = torch.cat([steps, -steps, *(r for _, r in rays)])
    falls = torch.cat([neighbourhood.fall(part) for part in moves.split(most)])
    far, near = falls[:most].reshape(2, len(steps)).split([len(FAR), NUM_ON_THE_WAY], -1)
    stays_up = bool((far < LEAST).all(-1).any())
    dip = near[:, :-1].amax(-1) - near[:, -1]  # behind one there is another mode: a second labelling, for one
    level = bool(((near[:, -1].abs() < LEAST_FALL) & (dip < LEAST_DIP)).any())
    if stays_up or level:
        away = f"{FAR[-1] if stays_up else NEAR:g} posterior standard deviations away"
        raise _improper(neighbourhood, int(direction.abs().argmax()), away)
    for (largest, _), fall in zip(rays, falls[most:].reshape(-1, 2), strict=True):
        _require_fall(neighbourhood, largest, fall)


def require_end(neighbourhood: ModeNeighbourhood, precision: Precision) -> None:
    """Refuse a log joint without an integral, as its ends in some directions tell.

    One that rises without end, where it grows by more than any normal density falls; and one that at last falls no
    faster than ``r^-d`` along a ray in the ``d`` numbers of a real site, the others where they are.

    :raises ImproperPosterior: naming the site that rises most by itself, or that falls too slowly.
    """
    sd = precision.variance[0].sqrt() * neighbourhood.active
    way = generic_directions(1, len(sd), sd)[0] * sd
    moves = torch.stack([sign * far * way for far in BEYOND for sign in (1.0, -1.0)])
    near, far = neighbourhood.fall(moves).chunk(2)
    parts, latents = neighbourhood.joint.latents.by_part.to(sd.device), neighbourhood.joint.latents
    if bool(((far < near) & (near < -LEAST)).any()):
        how, alone = "the log joint rises without end", parts * (BEYOND[0] * way)
        worst = int(torch.minimum(neighbourhood.fall(alone), neighbourhood.fall(-alone)).argmin())
    else:
        real = torch.tensor([is_identity(part.transform) for part in latents], device=sd.device)  # others saturate
        falls = torch.stack([neighbourhood.fall(torch.cat([end * parts * way, -end * parts * way])) for end in ENDS])
        least = (parts * neighbourhood.active).sum(-1) * math.log(
            ENDS[1] / ENDS[0]
        )  # to be faster than r^-d between two
        slow = (falls.diff(dim=0).view(len(ENDS) - 1, 2, -1) <= least * (1.0 + SLOW)).all(0).any(0)
        slow = slow & real & (least > 0)
        if not bool(slow.any()):
            return
        how, worst = "the log joint falls too slowly", int(slow.int().argmax())
    where = f" beyond {BEYOND[0]:g} and {BEYOND[1]:g} posterior standard deviations from its mode"
    raise no_integral(how + where, latents.names[worst])


def no_integral(how: str, site: str) -> ImproperPosterior:
    """The error for a log joint that falls too slowly, or rises, ``site`` most."""
    return ImproperPosterior(
        f"{how}, most in site '{site}': its integral is infinite, and there is no posterior. Look for a pyro.factor or "
        "a likelihood that grows faster than that site's prior falls, or give the site a proper prior or bounded "
        "support."
    )


def is_proper(neighbourhood: ModeNeighbourhood, *, factors: bool = False) -> bool:
    """Whether no prior is flat and no data come by ``pyro.factor``: then almost all data have an evidence.

    :param factors: whether these may be there.
    """
    joint = neighbourhood.joint
    nodes = joint.trace(neighbourhood.u, neighbourhood.theta).nodes
    latent = [*joint.latents.names, *(n for n in joint.hypers.names if nodes[n]["type"] == "sample")]
    return (factors or not joint.factors) and not any(is_improper(nodes[n]) for n in latent)


def rounding(neighbourhood: ModeNeighbourhood, u: Tensor) -> float:
    """Nats by which the log joint at ``u`` ``(D,)``, a sum of terms that may be larger, may be off."""
    terms = [
        node["log_prob"].detach().abs().sum() for node in _sites(neighbourhood.joint, u, neighbourhood.theta).values()
    ]
    return torch.finfo(neighbourhood.joint.dtype).eps * float(sum(terms))


def require_fall_on_rays(neighbourhood: ModeNeighbourhood) -> None:
    """Walk out on the ray from the origin through the mode, and through each site's part of it alone.

    :raises ImproperPosterior: when the log joint stays where it is.
    """
    for largest, ends in _rays(neighbourhood):
        _require_fall(neighbourhood, largest, neighbourhood.fall(ends))


def _rays(neighbourhood: ModeNeighbourhood) -> list[tuple[int, Tensor]]:
    """The largest coordinate of each ray, and the moves ``(2, D)`` to twice the mode and to its far end."""
    rays = []
    for block in [slice(0, len(neighbourhood.u)), *neighbourhood.joint.latents.slices.values()]:
        ray = torch.zeros_like(neighbourhood.u)
        ray[block] = neighbourhood.u[block] * neighbourhood.active[block]
        largest = int(ray.abs().argmax())
        if bool(ray[largest] != 0.0):
            end = FAR_OUT * max(1.0, float(1.0 / ray[largest].abs()))
            rays.append((largest, torch.stack([ray, end * ray])))
    return rays


def _require_fall(neighbourhood: ModeNeighbourhood, largest: int, fall: Tensor) -> None:
    """Refuse a log joint that is where it was both at twice the mode and at the far end of a ray through it."""
    if bool((fall.abs() < LEAST_FALL).all()):
        raise _improper(neighbourhood, largest, "at twice the mode and far beyond")


def _improper(neighbourhood: ModeNeighbourhood, index: int, distance: str) -> ImproperPosterior:
    """The error message for a density that stays up along a direction whose largest coordinate is ``index``."""
    return ImproperPosterior(
        f"the log joint is as high as at its maximum {distance}, along a direction that points at "
        f"{neighbourhood.joint.latents.label(index)}: the posterior is improper or nearly so, or its mode lies at "
        f"infinity (separable classes, collinear columns, a flat prior). {double_precision(neighbourhood.joint)}Give "
        f"that site a proper prior, for example Normal(0, 10) on standardised inputs."
    )


NAMED = 3  # sites that are named


def rounded_inside(joint: LogJoint, u: Tensor, theta: Tensor) -> list[str]:
    """A sentence that names sites whose parameters are float32 though the latents are float64; else nothing."""
    if joint.dtype != torch.float64 or not joint.has_data:  # of chunks that were not kept there is nothing to run
        return []
    trace = joint.trace(u.detach().clone().requires_grad_(), theta)
    names = [name for name, node in sample_nodes(trace).items() if _is_rounded(node)]
    if not names:
        return []
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return [
        f"site(s) {', '.join(names[:NAMED])}{more} round to float32 within a float64 model, so all numbers are good to "
        f"about seven digits: look for .float() or torch.float32 in the model (a float32 tensor times a scalar of "
        f"float64 is float32), and write .double()."
    ]


def _is_rounded(node: Node) -> bool:
    """Whether a parameter that depends on the latents has the digits of float32, whatever its type is by now.

    All its numbers are float32, and not all of them so simple as 0, 1 and 1/2.
    """
    parts = unwrapped(node["fn"])
    for value in (getattr(parts.base, name, None) for name in parts.names):
        if isinstance(value, Tensor) and value.requires_grad:
            exact = value.detach().double()
            if bool((exact.float().double() == exact).all()) and bool((exact.half().double() != exact).any()):
                return True
    return False
