"""Points and weights that integrate against the standard normal density."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

# One word per row of a fraction 2^(d-p) of the signs: the first d-p axes are free, the others products of these.
_FRACTIONS: dict[int, tuple[tuple[int, ...], ...]] = {
    5: ((0, 1, 2, 3),),
    6: ((0, 1, 2, 3, 4),),
    7: ((0, 1, 2, 3, 4, 5),),
    8: ((0, 1, 2, 3), (0, 1, 4, 5)),
    9: ((0, 2, 3, 5, 6), (1, 2, 4, 5, 6)),
    10: ((0, 1, 2, 6), (1, 2, 3, 4), (0, 2, 3, 5)),
}
LARGEST_DESIGN = 8  # dimensions


@dataclass(frozen=True)
class Rule:
    """``sum_k exp(log_weight_k) f(node_k)`` is about ``E f(z)``, ``z`` standard normal."""

    nodes: Tensor  # (K, d)
    log_weights: Tensor  # (K,)

    def log_mean(self, log_f: Tensor) -> Tensor:
        """``log E f`` from ``log f`` at the nodes, nats, shape ``()``."""
        return (self.log_weights + log_f).logsumexp(0)


def gauss_hermite(num: int) -> Rule:
    """Gauss's rule of ``num`` nodes on one axis, exact for polynomials of degree ``2 num - 1``.

    The nodes are the eigenvalues of the Jacobi matrix of the Hermite polynomials (Golub and Welsch, 1969); a weight is
    the reciprocal of the sum of squares of the first ``num`` orthonormal polynomials there, right to all digits however
    small it is.

    >>> rule = gauss_hermite(5)
    >>> float((rule.log_weights.exp() * rule.nodes[:, 0] ** 4).sum().round(decimals=12))
    3.0
    """
    beside = torch.arange(1.0, num, dtype=torch.float64).sqrt()
    nodes = torch.linalg.eigvalsh(torch.diag(beside, 1) + torch.diag(beside, -1))
    nodes = 0.5 * (nodes - nodes.flip(0))  # exactly symmetric
    return Rule(nodes.unsqueeze(-1), -0.5 * nodes.square() - _squares(nodes, num).log())


def quasi_normal(num: int, num_dims: int, seed: int = 0) -> Tensor:
    """Scrambled Sobol points with standard normal margins, ``(num, d)``, of equal weight; finite.

    >>> bool(quasi_normal(256, 2).mean().abs() < 0.01)
    True
    """
    uniform = torch.quasirandom.SobolEngine(num_dims, scramble=True, seed=seed).draw(num, dtype=torch.float64)
    return torch.special.ndtri(uniform.clamp(1e-9, 1.0 - 1e-9))


def _squares(x: Tensor, num: int) -> Tensor:
    """Sum of squares of the first ``num`` orthonormal Hermite polynomials, times ``exp(-x^2 / 2)``."""
    before, here = torch.zeros_like(x), (-0.25 * x.square()).exp()
    total = here.square()
    for n in range(1, num):
        before, here = here, (x * here - (n - 1) ** 0.5 * before) / n**0.5
        total = total + here.square()
    return total


def product(rule: Rule, num_dims: int) -> Rule:
    """The rule on every axis at once, ``num ** num_dims`` nodes, the last axis fastest."""
    axis, log_weights = rule.nodes[:, 0], rule.log_weights
    nodes = torch.cartesian_prod(*[axis] * num_dims).reshape(-1, num_dims)
    return Rule(nodes, torch.cartesian_prod(*[log_weights] * num_dims).reshape(-1, num_dims).sum(-1))


def central_composite(num_dims: int) -> Rule:
    """A centre, two points on each axis and a fraction of the corners: exact for polynomials of degree four.

    All points but the centre lie at radius ``sqrt(d + 2)``.  With all corners this is Stroud's (1971) formula of degree
    five; a fraction of resolution five (Box and Hunter, 1961) keeps all moments but products of five different axes.

    :param num_dims: 1 to 8.
    """
    corners = factorial_corners(num_dims)
    d = num_dims
    radius = (d + 2.0) ** 0.5
    axes = radius * torch.cat([torch.eye(d), -torch.eye(d)]).double()
    nodes = torch.cat([torch.zeros(1, d, dtype=torch.float64), axes, corners * (radius / d**0.5)])
    centre = torch.full((1,), 2.0 / (d + 2), dtype=torch.float64)
    each = torch.full((2 * d,), 1.0 / (d + 2) ** 2, dtype=torch.float64)
    corner = torch.full((len(corners),), d**2 / ((d + 2.0) ** 2 * len(corners)), dtype=torch.float64)
    return Rule(nodes, torch.cat([centre, each, corner]).log())


def factorial_corners(num_dims: int) -> Tensor:
    """Signs ``(F, d)`` of a full factorial design, or from five to ten dimensions of a fraction of resolution five."""
    words = _FRACTIONS.get(num_dims, ())
    free = torch.tensor(list(itertools.product((1.0, -1.0), repeat=num_dims - len(words))))
    made = [free[:, list(word)].prod(-1, keepdim=True) for word in words]
    return torch.cat([free, *made], -1).double()


def axes_of(design: Rule) -> Rule:
    """Centre and axes of a central composite design alone, exact for polynomials of degree three."""
    d = design.nodes.shape[-1]
    each = torch.full((2 * d,), 0.5 / (d + 2.0), dtype=torch.float64)
    return Rule(
        design.nodes[: 2 * d + 1], torch.cat([torch.full((1,), 2.0 / (d + 2.0), dtype=torch.float64), each]).log()
    )
