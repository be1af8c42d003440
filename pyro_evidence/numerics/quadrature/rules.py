"""Points and weights that integrate against the standard normal density, and over the whole line."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from string import ascii_uppercase

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from pyro_evidence.numerics.batched import BATCH_NUMBERS, bisected
from pyro_evidence.numerics.derivatives import cached
from pyro_evidence.numerics.linalg import relative_rounding

# Generators of the fractions 2^(d-p) of highest resolution: the first d-p axes, A, B, ..., are free, each other one is
# the product of those that its word names.
# NIST/SEMATECH e-Handbook of Statistical Methods, section 5.3.3.4.7.
OF_DIMENSIONS = "ABCD", "ABCDE", "ABCDEF", "ABCD ABEF", "ACDFG BCEFG", "ABCG BCDE ACDF"  # 5 to 10
GENERATORS = {num: tuple(words.split()) for num, words in enumerate(OF_DIMENSIONS, start=5)}
LARGEST_DESIGN = 8  # dimensions
PRODUCT_DIMS = 3  # up to which nodes form a product over the axes


@dataclass(frozen=True, eq=False)
class Rule:
    """``sum_k exp(log_weight_k) f(node_k)`` is about ``E f(z)``, ``z`` standard normal."""

    nodes: Tensor  # (K, d)
    log_weights: Tensor  # (K,)

    def log_mean(self, log_f: Tensor) -> Tensor:
        """``log E f`` from ``log f`` at the nodes, nats, shape ``()``."""
        return (self.log_weights + log_f).logsumexp(0)


def growing(first: int, last: int, ratio: float) -> tuple[int, ...]:
    """Odd numbers of nodes from ``first`` to ``last``, each about ``ratio`` times the one before.

    >>> growing(5, 20, 1.3)
    (5, 7, 9, 11, 15, 19)
    """
    found, exact = [], float(first)
    while exact < last + 1.0:
        found.append(2 * round(0.5 * (exact - 1.0)) + 1)
        exact *= ratio
    return tuple(found)


@cached(32)
def gauss_hermite(num: int, device: torch.device | None = None) -> Rule:
    """Gauss's rule of ``num`` nodes on one axis, exact for polynomials of degree ``2 num - 1``.

    The nodes are the eigenvalues of the Jacobi matrix of the Hermite polynomials (Golub and Welsch, 1969); a weight is
    the reciprocal of the sum of squares of the first ``num`` orthonormal polynomials there, right to all digits however
    small it is.

    >>> rule = gauss_hermite(5)
    >>> float((rule.log_weights.exp() * rule.nodes[:, 0] ** 4).sum().round(decimals=12))
    3.0
    """
    beside = torch.arange(1.0, num, dtype=torch.float64, device=device).sqrt()
    nodes = torch.linalg.eigvalsh(torch.diag(beside, 1) + torch.diag(beside, -1))
    nodes = 0.5 * (nodes - nodes.flip(0))  # exactly symmetric
    before, here = torch.zeros_like(nodes), (-0.25 * nodes.square()).exp()
    squares = here.square()  # of the polynomials, times exp(-x^2 / 2)
    for n in range(1, num):
        before, here = here, (nodes * here - (n - 1) ** 0.5 * before) / n**0.5
        squares = squares + here.square()
    return Rule(nodes.unsqueeze(-1), -0.5 * nodes.square() - squares.log())


def nodes_and_weights(num: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes ``(Q,)`` and weights of :func:`gauss_hermite`, on the device of ``like``."""
    rule = gauss_hermite(num, like.device)
    return rule.nodes[:, 0], rule.log_weights.exp()


def quasi_normal(num: int, num_dims: int, seed: int = 0) -> Tensor:
    """Scrambled Sobol points with standard normal margins, ``(num, d)``, of equal weight; finite.

    In thousands of dimensions, where scrambling would hold 900 numbers for each, a Latin hypercube: each margin is as
    even, and no more than margins of so many could be.  McKay, Beckman and Conover (1979).

    >>> bool(quasi_normal(256, 2).mean().abs() < 0.01)
    True
    """
    if num_dims * SobolEngine.MAXBIT**2 <= BATCH_NUMBERS:
        uniform = SobolEngine(num_dims, scramble=True, seed=seed).draw(num, dtype=torch.float64)
    else:
        random = torch.rand(2, num_dims, num, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        uniform = (random[0].argsort(-1) + random[1]).mT / num
    least = 1e-9  # six standard deviations
    return torch.special.ndtri(uniform.clamp(least, 1.0 - least))


def product(rule: Rule, num_dims: int) -> Rule:
    """The rule on every axis at once, ``num ** num_dims`` nodes, the last axis fastest."""
    axis, log_weights = rule.nodes[:, 0], rule.log_weights
    nodes = torch.cartesian_prod(*[axis] * num_dims).reshape(-1, num_dims)
    return Rule(nodes, torch.cartesian_prod(*[log_weights] * num_dims).reshape(-1, num_dims).sum(-1))


def central_composite(num_dims: int, device: torch.device | None = None) -> Rule:
    """A centre, two points on each axis and a fraction of the corners: exact for polynomials of degree four.

    All points but the centre lie at radius ``sqrt(d + 2)``.  With all corners this is Stroud's (1971) formula of degree
    five; a fraction of resolution five (Box and Hunter, 1961) keeps all moments but products of five different axes.

    :param num_dims: 1 to 8.
    """
    directions, share = _sphere(factorial_corners(num_dims).to(device))
    centre, d = directions.new_zeros(1, num_dims), num_dims
    mass = torch.cat([share.new_full((1,), 2.0 / (d + 2.0)), d / (d + 2.0) * share])
    return Rule(torch.cat([centre, (d + 2.0) ** 0.5 * directions]), mass.log())


def _sphere(corners: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors along axes and corners ``(F, d)``, and their shares: as exact as the fraction of corners is."""
    num, d = corners.shape
    axes = torch.eye(d).to(corners)
    shares = [corners.new_full((2 * d,), 1.0 / (d * (d + 2.0))), corners.new_full((num,), d / (d + 2.0) / num)]
    return torch.cat([axes, -axes, corners / d**0.5]), torch.cat(shares)


def factorial_corners(num_dims: int) -> Tensor:
    """Signs ``(F, d)`` of a full factorial design, or from five to ten dimensions of a fraction of resolution five."""
    words = GENERATORS.get(num_dims, ())
    free = torch.tensor(list(itertools.product((1.0, -1.0), repeat=num_dims - len(words))))
    made = [free[:, [ascii_uppercase.index(axis) for axis in word]].prod(-1, keepdim=True) for word in words]
    return torch.cat([free, *made], -1).double()


def axes_of(design: Rule) -> Rule:
    """Centre and axes of a central composite design alone, exact for polynomials of degree three."""
    d = design.nodes.shape[-1]
    share = torch.tensor([2.0] + [0.5] * (2 * d)).to(design.nodes) / (d + 2.0)
    return Rule(design.nodes[: 2 * d + 1], share.log())


STRETCH = 0.3  # the log density of the log of a gamma variable of shape .2 to 5: least error of 7 and of 15 nodes


def stretched(rule: Rule) -> Rule:
    """The rule of one axis for exponential tails: ``z`` becomes ``sinh(c z) / c``, by change of variables.

    Gauss's rule wants a function that is nearly a polynomial beside the normal density.  The density of the log of a
    positive latent falls off as ``exp(a z)`` to the left, which no polynomial follows; along the new axis it falls off
    faster than any normal one.  Not exact for polynomials any more: seven nodes miss the normal density by 1e-4.
    """
    further = torch.sinh(STRETCH * rule.nodes) / STRETCH
    log_slope = torch.cosh(STRETCH * rule.nodes).log()
    change = log_slope + 0.5 * (rule.nodes.square() - further.square())
    return Rule(further, rule.log_weights + change.squeeze(-1))


@cached(128)
def block_rule(num: int, num_dims: int, curved: bool = False) -> Rule:
    """Nodes and log weights against the standard normal density in ``num_dims`` dimensions.

    Up to three dimensions ``num`` nodes on each axis.  Beyond, half as many spheres, which is exact for polynomials of
    degree five, and of degree ``2 num - 1`` in the radius; for every two nodes beyond seven the design on the spheres
    is joined by as many copies of it again, turned at random with a fixed seed.

    :param curved: whether the density is that of logs of latents, or the like; on up to three axes nodes are stretched.

    >>> block_rule(7, 2).nodes.shape, block_rule(7, 4).nodes.shape, block_rule(9, 4).nodes.shape
    (torch.Size([49, 2]), torch.Size([96, 4]), torch.Size([240, 4]))
    """
    if num == 1 or num_dims <= PRODUCT_DIMS:
        axis = gauss_hermite(num)
        return product(stretched(axis) if curved and num > 1 else axis, num_dims)
    # radii and their masses, of Gauss's rule for half the square of the radius; Golub and Welsch (1969)
    n, alpha = torch.arange((num + 1) // 2, dtype=torch.float64), 0.5 * num_dims - 1.0
    beside = (n[1:] * (n[1:] + alpha)).sqrt()
    values, vectors = torch.linalg.eigh((2.0 * n + 1.0 + alpha).diag() + beside.diag(1) + beside.diag(-1))
    radii, mass = (2.0 * values).sqrt(), vectors[0].square()
    corners = factorial_corners(num_dims)
    directions, share = _sphere(torch.cat([corners, -corners]).unique(dim=0))  # no product of five axes is left
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2 ** max(0, (num - 6) // 2), num_dims, num_dims, generator=generator, dtype=torch.float64)
    turned = torch.cat([directions, *(directions @ turn.mT for turn in torch.linalg.qr(normal).Q[1:])])
    share = share.repeat(len(turned) // len(directions)) * (len(directions) / len(turned))
    nodes = (radii[:, None, None] * turned).reshape(-1, num_dims)
    return Rule(nodes, (mass.unsqueeze(-1) * share).reshape(-1).log())


def padded(rules: list[Rule]) -> tuple[list[Tensor], list[Tensor]]:
    """Nodes and log weights of several rules, padded to the longest with nodes at the centre without weight."""
    most = max(len(rule.nodes) for rule in rules)
    pads = [most - len(rule.nodes) for rule in rules]
    nodes = [torch.nn.functional.pad(r.nodes, (0, 0, 0, p)) for r, p in zip(rules, pads, strict=True)]
    weights = [
        torch.nn.functional.pad(r.log_weights, (0, p), value=-torch.inf) for r, p in zip(rules, pads, strict=True)
    ]
    return nodes, weights


LONGEST = 50.0  # half of chi square with so many degrees: beyond are 1e-19 of the mass
DEGREES = 5.0  # tails heavier than any normal's, whose weights then stay bounded, with four finite moments


def student_draws(num: int, num_dims: int) -> Tensor:
    """Evenly spread points of a Student-t distribution, the same every time, ``(num, d)``.

    Scrambled Sobol points, the last axis by the inverse distribution function of the squared length that divides.

    >>> [round(float(x), 1) for x in student_draws(512, 3).abs().median(0).values]  # Student's of five degrees: 0.727
    [0.7, 0.7, 0.7]
    """
    normal, last = quasi_normal(num, num_dims + 1).split([num_dims, 1], -1)
    share, half = torch.special.ndtr(last), torch.tensor(0.5 * DEGREES, dtype=torch.float64)
    low, high = torch.zeros_like(share), torch.full_like(share, LONGEST)
    chi = 2.0 * bisected(lambda x: torch.special.gammainc(half, x) < share, low, high)
    return normal * (DEGREES / chi).sqrt()


def student_log_density(square: Tensor, size: int, degrees: float = DEGREES) -> Tensor:
    """Its log density where the squared length of ``size`` coordinates is ``square``, nats, of the same shape."""
    half, each = 0.5 * (degrees + size), math.log(degrees * math.pi)
    norm = math.lgamma(half) - math.lgamma(0.5 * degrees) - 0.5 * size * each
    return norm - half * torch.log1p(square / degrees)


OF_PANEL = 10  # of a panel
AROUND = (-8.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 8.0)  # standard deviations from a mode, where panels end at first
DEEP = 40.0  # nats below the highest, where panels end at last: what is lower counts for nothing in double precision
LAST = 40  # panels beyond these on each side, to e^40 times as far
HALVINGS = 60  # of a panel: its ends are then one number
PRECISE = 1e-11  # share of the integral by which a panel and its halves may differ
MOST = 8  # times as many nodes as are asked for, where panels go on to differ
FLATTEST = 1e-3  # slope of a tail in the log of the distance: what is flatter ends, if at all, beyond all numbers


@dataclass(frozen=True, eq=False)
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

    def panels(ends: Tensor) -> Tensor:
        """``t``, ``x``, log length and log density at the nodes of panels ``(P, 2)``, ``(P, OF_PANEL, 4)``."""
        place, weight = (each.to(loc) for each in gauss_legendre(OF_PANEL))
        width = ends.diff(dim=1)
        t = ends[:, :1] + width * place
        x, length = loc[0] + sd[0] * t.sinh(), width * weight * sd[0] * t.cosh()
        return torch.stack([t, x, length.log(), log_density(x.flatten()).view_as(x)], -1)

    places = (loc + sd * loc.new_tensor(AROUND).unsqueeze(-1)).flatten()
    opened, first = _to_the_ends(panels, ((places - loc[0]) / sd[0]).asinh())
    rest, error = _tails(first.flatten(0, 1), opened, sd[0])
    size = float(first[..., 3].nan_to_num(nan=-math.inf, neginf=-math.inf).amax().nan_to_num(neginf=0.0).abs())
    noise, before, kept, held = relative_rounding(dtype) * (1.0 + size), _log_mass(first), [rest], 0
    for _ in range(HALVINGS):
        halves = torch.stack([opened[:, 0], opened.mean(1), opened.mean(1), opened[:, 1]], 1).view(-1, 2)
        found = panels(halves)
        both = _log_mass(found).view(-1, 2).logsumexp(1)
        total = torch.cat([both, *map(_log_mass, kept)]).logsumexp(0)
        share, held = (both - total).exp(), held + found[..., 0].numel()
        change = (share - (before - total).exp()).abs()
        on = ((change > PRECISE + noise * share) | (share > 4.0 * OF_PANEL / num)) & (held < MOST * num)
        error, done = error + float(change[~on].sum()), (~on).repeat_interleave(2)
        kept.append(found[done])
        opened, before = halves[~done], _log_mass(found)[~done]
        if not len(opened):
            break
    _, x, log_length, height = torch.cat([each.flatten(0, 1) for each in kept]).unbind(-1)
    return Line(x, log_length, height.nan_to_num(nan=-math.inf, neginf=-math.inf), error)


def _log_mass(found: Tensor) -> Tensor:
    """Log integrals over panels ``(P, K, 4)``, ``(P,)``."""
    return found[..., 2:].sum(-1).nan_to_num(nan=-math.inf, neginf=-math.inf).logsumexp(1)


def _to_the_ends(panels: Callable[[Tensor], Tensor], cuts: Tensor) -> tuple[Tensor, Tensor]:
    """Panels between ``cuts`` ``(C,)`` and whole numbers, and further ones as long as the density is not low there."""
    edges = torch.cat([cuts, torch.arange(float(cuts.amin().floor()), float(cuts.amax().ceil()) + 1.0).to(cuts)])
    ends = edges.unique().unfold(0, 2, 1)
    found = panels(ends)
    for side, _ in itertools.product((0, -1), range(LAST)):
        level = found[..., 3] + found[..., 0].cosh().log()  # nan, where numbers end, is the end
        if bool(level[side].amax() > level.nan_to_num(nan=-math.inf).amax() - DEEP):
            more = ends[side, side] + ends.new_tensor([[0.0, 1.0] if side else [-1.0, 0.0]])
            ends, found = (torch.cat(two if side else two[::-1]) for two in ((ends, more), (found, panels(more))))
    return ends, found


def _tails(nodes: Tensor, ends: Tensor, sd: Tensor) -> tuple[Tensor, float]:
    """A node for all beyond panels on each side where the density is not low, ``(at most 2, 1, 4)``, and their error.

    The log density of ``t`` goes on with the slope of the last panel; the error is what that of the one before says.

    :param nodes: ``t``, ``x``, log length and log density in order, ``(K, 4)``.
    """
    parts, error, total = list[Tensor](), 0.0, _log_mass(nodes.unsqueeze(0))[0]
    for outward, rows, edge in ((-1.0, nodes.flip(0), ends[0, 0]), (1.0, nodes, ends[-1, 1])):
        t, x, _, height = rows.unbind(-1)
        level = height + (sd * t.cosh()).log()
        last = max((~level.isnan()).nonzero().flatten().tolist(), default=0)
        if not bool(level[last] > level.nan_to_num(nan=-math.inf).amax() - DEEP):
            continue
        a, b, c = (last - back * OF_PANEL for back in (2, 1, 0))
        before, slope = (outward * float((level[j] - level[i]) / (t[j] - t[i])) for i, j in ((a, b), (b, c)))
        if not slope < -FLATTEST:
            return nodes[:0].unsqueeze(1), math.inf
        beyond = level[last] - math.log(-slope)
        if last + 1 == len(t):
            beyond = beyond + slope * outward * (edge - t[last])
        error += abs(1.0 - (slope / before if before < -FLATTEST else 0.0)) * float((beyond - total).exp())
        parts.append(torch.stack([t[last], x[last], beyond - height[last], height[last]]))
    return torch.cat([nodes[:0], *(part.unsqueeze(0) for part in parts)]).unsqueeze(1), error
