r"""Nodes for the inside of a block: a product of axes in up to three dimensions, spheres in more.

On spheres the integral over the normal density is one over the radius of one over directions,

.. math:: E f(z) = \int_0^\infty \chi_d(r) \int f(r \theta)\, d\theta\, dr

by Gauss's rule for the former (in ``r^2``, of Laguerre's polynomials) and Stroud's (1971) design ``U_n: 5-2``, axes and
corners, for the latter; Genz and Monahan (1999).  All weights are positive.
"""

from functools import lru_cache

import torch
from torch import Tensor

from pyro_evidence.numerics.quadrature.nodes import Rule, factorial_corners, gauss_hermite, product

PRODUCT_DIMS = 3


@lru_cache(maxsize=64)
def block_rule(num: int, num_dims: int) -> Rule:
    """Nodes and log weights against the standard normal density in ``num_dims`` dimensions.

    Up to three dimensions ``num`` nodes on each axis.  Beyond, half as many spheres, which is exact for polynomials of
    degree five, and of degree ``2 num - 1`` in the radius; for every two nodes beyond seven the design on the spheres
    is joined by as many copies of it again, turned at random with a fixed seed.

    >>> block_rule(7, 2).nodes.shape, block_rule(7, 4).nodes.shape, block_rule(9, 4).nodes.shape
    (torch.Size([49, 2]), torch.Size([96, 4]), torch.Size([240, 4]))
    """
    if num == 1 or num_dims <= PRODUCT_DIMS:
        return product(gauss_hermite(num), num_dims)
    radii, mass = _radii((num + 1) // 2, num_dims)
    directions, share = _directions(num_dims)
    turned = torch.cat([directions @ turn.mT for turn in _turns(2 ** max(0, (num - 6) // 2), num_dims)])
    share = share.repeat(len(turned) // len(directions)) * (len(directions) / len(turned))
    nodes = (radii[:, None, None] * turned).reshape(-1, num_dims)
    return Rule(nodes, (mass.unsqueeze(-1) * share).reshape(-1).log())


def _radii(num: int, num_dims: int) -> tuple[Tensor, Tensor]:
    """Radii and their masses, of Gauss's rule for half the square of the radius; Golub and Welsch (1969)."""
    n, alpha = torch.arange(num, dtype=torch.float64), 0.5 * num_dims - 1.0
    beside = (n[1:] * (n[1:] + alpha)).sqrt()
    values, vectors = torch.linalg.eigh((2.0 * n + 1.0 + alpha).diag() + beside.diag(1) + beside.diag(-1))
    return (2.0 * values).sqrt(), vectors[0].square()


def _directions(num_dims: int) -> tuple[Tensor, Tensor]:
    """Unit vectors and their shares, exact for polynomials of degree five on the sphere."""
    d, corners = num_dims, factorial_corners(num_dims) / num_dims**0.5
    corners = torch.cat([corners, -corners]).unique(dim=0)
    axes = torch.eye(d, dtype=torch.float64)
    shares = [torch.full((2 * d,), 1.0 / (d * (d + 2.0))), torch.full((len(corners),), d / (d + 2.0) / len(corners))]
    return torch.cat([axes, -axes, corners]), torch.cat(shares).double()


def _turns(num: int, num_dims: int) -> list[Tensor]:
    """The identity and random rotations, ``num`` together."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(num, num_dims, num_dims, generator=generator, dtype=torch.float64)
    return [torch.eye(num_dims, dtype=torch.float64), *torch.linalg.qr(normal).Q[1:]]


def joined(rules: list[Rule]) -> tuple[list[Tensor], list[Tensor]]:
    """Nodes and log weights of several rules, padded to the longest with nodes at the centre without weight."""
    most = max(len(rule.nodes) for rule in rules)
    pads = [most - len(rule.nodes) for rule in rules]
    nodes = [torch.nn.functional.pad(r.nodes, (0, 0, 0, p)) for r, p in zip(rules, pads, strict=True)]
    weights = [
        torch.nn.functional.pad(r.log_weights, (0, p), value=-torch.inf) for r, p in zip(rules, pads, strict=True)
    ]
    return nodes, weights
