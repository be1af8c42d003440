"""Nodes for the inside of a block: a product of axes in up to three dimensions, quasi-random points in more."""

from functools import lru_cache

import torch
from torch import Tensor

from pyro_evidence.numerics.quadrature.nodes import Rule, gauss_hermite, product

PRODUCT_DIMS = 3
POINTS = 200  # in more dimensions, at seven nodes or fewer; twice as many for every two nodes more


@lru_cache(maxsize=64)
def block_rule(num: int, num_dims: int) -> Rule:
    """Nodes and log weights against the standard normal density in ``num_dims`` dimensions.

    Up to three dimensions ``num`` nodes on each axis; beyond, 200 quasi-random points (Sobol's, scrambled with a fixed
    seed) and their mirror images among them, twice as many for every two nodes beyond seven.

    >>> block_rule(7, 2).nodes.shape, block_rule(7, 4).nodes.shape, block_rule(9, 4).nodes.shape
    (torch.Size([49, 2]), torch.Size([200, 4]), torch.Size([400, 4]))
    """
    if num == 1 or num_dims <= PRODUCT_DIMS:
        return product(gauss_hermite(num), num_dims)
    return _quasi_random(POINTS * 2 ** max(0, (num - 6) // 2), num_dims)


def _quasi_random(num: int, num_dims: int) -> Rule:
    uniform = torch.quasirandom.SobolEngine(num_dims, scramble=True, seed=0).draw(num // 2, dtype=torch.float64)
    tiny = 0.5 / num  # of a cell: no point lies at infinity
    half = torch.special.ndtri(uniform.clamp(tiny**2, 1.0 - tiny**2))
    nodes = torch.cat([half, -half])
    return Rule(nodes, torch.full((len(nodes),), -1.0, dtype=torch.float64) * float(torch.tensor(len(nodes)).log()))


def joined(rules: list[Rule]) -> tuple[list[Tensor], list[Tensor]]:
    """Nodes and log weights of several rules, padded to the longest with nodes at the centre without weight."""
    most = max(len(rule.nodes) for rule in rules)
    pads = [most - len(rule.nodes) for rule in rules]
    nodes = [torch.nn.functional.pad(r.nodes, (0, 0, 0, p)) for r, p in zip(rules, pads, strict=True)]
    weights = [
        torch.nn.functional.pad(r.log_weights, (0, p), value=-torch.inf) for r, p in zip(rules, pads, strict=True)
    ]
    return nodes, weights
