"""Smooth functions of columns: fixed effects for what a penalty does not see, effects of one spread for the rest.

A penalty is a kernel: its functions are ``f(x) = sum_j c_j K(x, k_j)`` plus functions that it does not see, with ``c``
orthogonal to these at the knots ``k``, and it is ``c' K c``: for splines the integral of the squared second derivative
(Wahba 1990, chapters 1 and 2), for a graph the sum of squared differences of neighbours.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import compress, product
from math import isqrt, pi, prod
from operator import getitem

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.models.formula.terms import SMOOTHS, Smooth
from pyro_evidence.models.gmrf import Neighbours

HELD = 4_000_000  # numbers of a kernel at a time, 32 MB
DISTINCT = 2000  # values at which a thin plate's kernel is decomposed, in a second; of more, as in mgcv, a random part
NEAR = 1e-13  # of the largest curvature of a basis: below it rounding decides, and two knots are one


@dataclass(frozen=True, eq=False)
class Penalty:
    """A penalty as a kernel, and the functions that it does not see.

    :ivar kernel: of values ``(N, d)`` and knots ``(K, d)``, ``(N, K)``.
    :ivar free: functions that the penalty does not see, the constant first, ``(N, d)`` -> ``(N, M)``.
    :ivar knots: ``(K, d)``.
    :ivar names: of the free functions but the constant.
    """

    kernel: Callable[[Tensor, Tensor], Tensor]
    free: Callable[[Tensor], Tensor]
    knots: Tensor
    names: tuple[str, ...] = ()


def thin_plate(x: Tensor, smooth: Smooth) -> Penalty:
    """The thin plate spline of one or two covariates, which are in one unit; a knot at every distinct row."""
    centre, knots = x.mean(0), x.unique(dim=0)
    if len(knots) > DISTINCT:
        knots = knots[torch.randperm(len(knots), generator=torch.Generator().manual_seed(0))[:DISTINCT]]

    def kernel(x: Tensor, knots: Tensor) -> Tensor:
        r = torch.cdist(x, knots, compute_mode="donot_use_mm_for_euclid_dist")
        return r**3 if x.shape[1] == 1 else torch.special.xlogy(r.square(), r)

    def free(x: Tensor) -> Tensor:
        return torch.cat([torch.ones_like(x[:, :1]), x - centre], 1)

    return Penalty(kernel, free, knots, smooth.covariates)


def cubic(x: Tensor, smooth: Smooth) -> Penalty:
    """The natural cubic spline: the thin plate of one covariate with fewer knots."""
    return replace(thin_plate(x, smooth), knots=_placed(x, smooth))


def cyclic(x: Tensor, smooth: Smooth) -> Penalty:
    """The periodic cubic spline, whose period lies between the outermost knots."""
    knots = _placed(x, smooth)
    period = knots[-1] - knots[0]

    def kernel(x: Tensor, knots: Tensor) -> Tensor:
        r = ((x - knots.T) / period).remainder(1.0)
        return (1.0 / 30.0 - (r * (1.0 - r)).square()) / 24.0  # minus the fourth Bernoulli polynomial

    return Penalty(kernel, torch.ones_like, knots[:-1])


def neighbours_alike(graph: Neighbours) -> Penalty:
    """Values at the nodes of a graph, each part of which has a level of its own."""
    node, part = (torch.nn.functional.one_hot(index).double() for index in (torch.arange(graph.size), graph.part))
    difference = node[graph.edges[:, 0]] - node[graph.edges[:, 1]]
    covariance = torch.linalg.pinv(difference.T @ difference, hermitian=True)
    # levels, which the penalty does not see, come before all that it sees where few eigenvectors are kept
    covariance = covariance + 2.0 * torch.linalg.matrix_norm(covariance, 2) * (part / part.sum(0)) @ part.T
    names = tuple(f"part {number}" for number in range(2, part.shape[1] + 1))

    def kernel(x: Tensor, knots: Tensor) -> Tensor:
        return covariance[x[:, 0].long()][:, knots[:, 0].long()]

    def free(x: Tensor) -> Tensor:
        return torch.cat([torch.ones_like(x), part[x[:, 0].long(), 1:]], 1)

    return Penalty(kernel, free, torch.arange(graph.size).double().unsqueeze(-1), names)


# Ends of a Gaussian process's range and sines in it: of half the range of the values, lengths from 0.15 to 1 have the
# covariance of the process to 5e-4 of its variance (Riutort-Mayol et al. 2023, section 4, on both).
EDGE, HARMONICS = 3.0, 50


def harmonics(x: Tensor, smooth: Smooth) -> "Basis":
    """Sines that are zero at the ends of a range about the values: eigenfunctions of the Laplacian.

    Riutort-Mayol et al. (2023), section 3.1; the spread of each is that of the spectral density.

    :raises BadInput: where there are not several values of one covariate, and for more functions than can be held.
    """
    size = smooth.size or HARMONICS
    centre, width = 0.5 * (x.max() + x.min()), EDGE * 0.5 * (x.max() - x.min())
    if x.shape[1] != 1 or not float(width) > 0.0 or size**2 > HELD:
        raise BadInput(
            f"{smooth.text} has {len(x.unique(dim=0))} distinct values and is to have {size} functions; expected one "
            f"column of several values, and k= at most {isqrt(HELD)}."
        )

    def kernel(x: Tensor, number: Tensor) -> Tensor:
        if bool(((x - centre).abs() > 0.5 * width).any()):
            ends = f"{float(centre - 0.5 * width):g} to {float(centre + 0.5 * width):g}"
            raise BadInput(f"{smooth.text} at {float(x.min()):g} to {float(x.max()):g}; expected values from {ends}.")
        return (0.5 * pi * number.T * (x - centre + width) / width).sin()

    penalty = Penalty(kernel, torch.ones_like, torch.arange(1.0, size + 1.0, dtype=x.dtype).unsqueeze(-1))
    return Basis(penalty, torch.eye(size, dtype=x.dtype), x.new_zeros(1, size), x.new_zeros(1), x.new_ones(1), width)


# The penalty of some values, and how many functions there are by default: of a curve, and of a surface where it can be.
CURVE, SURFACE = 10, 30
BASES: Mapping[str, tuple[Callable[[Tensor, Smooth], Penalty], tuple[int, ...]]] = {
    "tp": (thin_plate, (CURVE, SURFACE)),
    "cr": (cubic, (CURVE,)),
    "cc": (cyclic, (CURVE,)),
}
MARGIN = 5  # functions of each covariate of a tensor product, by default, as in mgcv


@dataclass(frozen=True, eq=False)
class Basis:
    """Functions with a penalty that is the sum of their squared coefficients.

    Over the rows of the fit they are orthogonal to the free functions, and the mean of their summed squares is one:
    the spread of their coefficients is how far the function is from a free one, in the predictor's unit.

    :ivar weights: of the kernel at the knots, ``(K, r)``.
    :ivar level: of the free functions in each, ``(M, r)``, which is taken away.
    :ivar centre: the means of the free functions, ``(M,)``, zero of the constant.
    :ivar spread: their root mean squares around these, one of the constant.
    :ivar width: of the range of a Gaussian process, half the distance of its ends; its columns have their own scales.
    """

    penalty: Penalty
    weights: Tensor
    level: Tensor
    centre: Tensor
    spread: Tensor
    width: Tensor | None = None

    @classmethod
    def over(cls, x: Tensor, penalty: Penalty, size: int | None, text: str) -> "Basis":
        """The basis of the rows of a fit: the kernel's ``size`` largest eigenvectors span it (Wood 2003, section 3).

        :raises BadInput: where two knots are one by rounding.
        """
        knots, free = penalty.knots, penalty.free(x)
        value, vectors = torch.linalg.eigh(penalty.kernel(knots, knots))
        kept = value.abs().argsort(descending=True)[:size]
        vectors, seen = vectors[:, kept], penalty.free(knots).T @ vectors[:, kept]
        vectors = vectors @ torch.linalg.qr(seen.T, mode="complete").Q[:, free.shape[1] :]
        curvature, axes = torch.linalg.eigh(vectors.T @ penalty.kernel(knots, knots) @ vectors)
        if bool(curvature[0] <= NEAR * curvature[-1]):
            raise BadInput(f"{text}: two of its knots nearly coincide; expected fewer functions (k=) or other knots.")
        weights = vectors @ (axes * curvature.rsqrt())
        # Of all rotations the one that makes fixed sums of rows a symmetric matrix: signs and pairs of eigenvectors are
        # left to rounding, and a fit that was saved is to find its functions again.
        at_knots = penalty.kernel(knots, knots) @ weights
        sums = torch.randn(at_knots.shape[::-1], generator=torch.Generator().manual_seed(0), dtype=x.dtype)
        left, _, right = torch.linalg.svd(sums @ at_knots, full_matrices=False)
        weights = weights @ (left @ right).T
        columns = penalty.kernel(x, knots) @ weights
        level = torch.linalg.lstsq(free, columns).solution
        unit = (columns - free @ level).square().sum(-1).mean().sqrt()
        constant = torch.arange(free.shape[1]) == 0
        centre = free.mean(0).where(~constant, torch.zeros_like(free[0]))
        spread = free.std(0, correction=0).where(~constant, torch.ones_like(free[0]))
        return cls(penalty, weights / unit, level / unit, centre, spread)

    def columns(self, x: Tensor) -> Tensor:
        """The functions at some values, ``(N, r)``."""
        rows = x.split(max(1, HELD // len(self.weights)))
        return torch.cat([self.penalty.kernel(part, self.penalty.knots) @ self.weights for part in rows]) - (
            self.penalty.free(x) @ self.level
        )

    def free(self, x: Tensor) -> Tensor:
        """The free functions there, but for the constant with mean zero over the fit, ``(N, M)``."""
        return self.penalty.free(x) - self.centre


@dataclass(frozen=True, eq=False)
class SmoothColumns:
    """The columns of one smooth at any values.

    :ivar margins: one basis, or of a tensor product one for each covariate.
    :ivar by: what its columns are multiplied by: names as they follow its own, ``("",)`` where there is nothing.
    :ivar constant: whether its constant is a fixed effect, as that of a slope of ``by`` is; not beside an intercept.
    :ivar units: of the blocks of one factor of ``by``.
    """

    smooth: Smooth
    margins: tuple[Basis, ...]
    by: tuple[str, ...]
    constant: bool
    units: tuple[Tensor, ...]

    @classmethod
    def over(
        cls, smooth: Smooth, x: Tensor, by: tuple[str, ...], constant: bool, graph: Neighbours | None = None
    ) -> "SmoothColumns":
        """Columns for the rows of a fit.

        :raises BadInput: for a basis that there is not, and values that it cannot be made of.
        """
        margins = tuple(_basis(part, x, graph) for part, x in _parts(smooth, x))
        process = margins[0].width is not None  # whose constant is a part of it
        raw = cls(smooth, margins, by, constant and not process, tuple(x.new_ones(()) for _ in _subsets(margins)))
        if process:
            return raw
        return replace(raw, units=tuple(part.square().sum(-1).mean().sqrt() for part in raw._penalised(x)))

    @property
    def fixed_names(self) -> tuple[str, ...]:
        """Names of the fixed effects."""
        of_margins = product(*(("", *margin.penalty.names) for margin in self.margins))
        names = [":".join(filter(None, names)) or "1" for names in of_margins]
        return tuple(f"{self.smooth.text}{by}: {name}" for by in self.by for name in names[not self.constant :])

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the blocks of columns, each with a spread of its own."""
        varying = [":".join(compress(self.smooth.covariates, subset)) for subset in _subsets(self.margins)]
        endings = [""] if len(varying) == 1 else [f": {names}" for names in varying]
        return tuple(f"{self.smooth.text}{by}{ending}" for by in self.by for ending in endings)

    @property
    def column_names(self) -> list[tuple[str, ...]]:
        """Names of the columns of each block."""
        sizes = [(len(basis.spread), basis.weights.shape[1]) for basis in self.margins]
        nums = [prod(map(getitem, sizes, subset)) for subset in _subsets(self.margins)]
        return [tuple(str(i) for i in range(1, num + 1)) for _ in self.by for num in nums]

    def fixed(self, x: Tensor, by: Tensor) -> Tensor:
        """Columns of the fixed effects, ``(N, P)``."""
        free = [basis.free(part) for basis, (_, part) in zip(self.margins, _parts(self.smooth, x), strict=True)]
        columns = reduce(_products, free)[:, int(not self.constant) :]
        return torch.cat([factor.unsqueeze(-1) * columns for factor in by.T], 1)

    def blocks(self, x: Tensor, by: Tensor) -> list[Tensor]:
        """Columns of each block, ``(N, r)``."""
        return [factor.unsqueeze(-1) * block for factor in by.T for block in self._penalised(x)]

    def _penalised(self, x: Tensor) -> list[Tensor]:
        """Products of some covariates' functions with the free ones of the others."""
        of_margins = [
            (basis.free(part) / basis.spread, basis.columns(part))
            for basis, (_, part) in zip(self.margins, _parts(self.smooth, x), strict=True)
        ]
        blocks = [
            reduce(_products, (pair[chosen] for pair, chosen in zip(of_margins, subset, strict=True)))
            for subset in _subsets(self.margins)
        ]
        return [block / unit for block, unit in zip(blocks, self.units, strict=True)]


def _parts(smooth: Smooth, x: Tensor) -> list[tuple[Smooth, Tensor]]:
    """The smooth itself, or the margins of a tensor product, each a cubic spline; and their covariates."""
    if smooth.basis != "t2":
        return [(smooth, x)]
    margin = replace(smooth, basis="cr", size=smooth.size or MARGIN)
    return [(replace(margin, covariates=(c,)), part) for c, part in zip(smooth.covariates, x.split(1, 1), strict=True)]


def _subsets(margins: Sequence[Basis]) -> list[tuple[int, ...]]:
    """Margins of which the penalised functions are taken: at least one of them."""
    return [subset for subset in product((0, 1), repeat=len(margins)) if any(subset)]


def _products(one: Tensor, other: Tensor) -> Tensor:
    """The product of every column of one with every column of the other, row by row."""
    return (one.unsqueeze(-1) * other.unsqueeze(-2)).flatten(1)


def _basis(smooth: Smooth, x: Tensor, graph: Neighbours | None) -> Basis:
    """The basis of the covariates of one margin.

    :raises BadInput: for one that there is not, and values that it cannot be made of.
    """
    if smooth.basis == "gp":
        return harmonics(x, smooth)
    if graph is not None:
        return Basis.over(x, neighbours_alike(graph), smooth.size, smooth.text)
    make, sizes = BASES.get(smooth.basis, (None, ()))
    if make is None or not 1 <= x.shape[1] <= len(sizes):
        raise BadInput(f"{smooth.text} with basis {smooth.basis!r}; expected smooths such as {SMOOTHS}.")
    size = smooth.size or sizes[x.shape[1] - 1]
    least, distinct = x.shape[1] + 2, len(x.unique(dim=0))
    if not least <= size <= distinct:
        raise BadInput(
            f"{smooth.text} has {distinct} distinct values and is to have {size} functions; expected k= from {least} "
            f"to the number of values. For few values take a straight line, or C(x)."
        )
    return Basis.over(x, make(x, replace(smooth, size=size)), size, smooth.text)


def _placed(x: Tensor, smooth: Smooth) -> Tensor:
    """Knots at quantiles of the distinct values, two ends that are given among these, or all as given, ``(K, 1)``.

    :raises BadInput: where these are not in ascending order.
    """
    knots = x.new_tensor(smooth.knots)
    if len(knots) in (0, 2):
        values = torch.cat([x.flatten(), knots]).unique()
        knots = values.quantile(torch.linspace(0.0, 1.0, smooth.size or 0, dtype=x.dtype))
    if len(knots) != smooth.size or not bool((knots.diff() > 0.0).all() & knots.isfinite().all()):
        raise BadInput(
            f"{smooth.text} with knots={list(smooth.knots)}; expected the two ends of their range, or {smooth.size} of "
            f"them, as k= says, in ascending order."
        )
    return knots.unsqueeze(-1)
