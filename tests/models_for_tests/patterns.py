"""Patterns of hierarchical models, and elements that make them positive definite."""

import torch
from torch import Tensor

from pyro_evidence.precision.dense import Pattern


def drawn(high: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(high, (count,), generator=torch.Generator().manual_seed(seed))


def columns(*parts: Tensor | int, count: int) -> Tensor:
    return torch.stack([torch.full((count,), p) if isinstance(p, int) else p for p in parts], -1)


def groups_with_weights() -> Pattern:
    return Pattern(62, (columns(drawn(60, 300), 60, 61, count=300),))


def crossed() -> Pattern:
    return Pattern(520, (columns(drawn(500, 3000), 500 + drawn(20, 3000, 1), count=3000),))


def correlated_slopes() -> Pattern:
    group = drawn(40, 300)
    return Pattern(122, (columns(3 * group, 3 * group + 1, 3 * group + 2, 120, 121, count=300),))


def nested() -> Pattern:
    school = drawn(10, 80)
    return Pattern(91, (columns(torch.arange(80), 80 + school, 90, count=80),))


def chain(steps: int = 299) -> Pattern:
    first = torch.arange(steps)
    return Pattern(steps + 2, (columns(first, first + 1, steps + 1, count=steps),))


def second_order_chain() -> Pattern:
    first = torch.arange(298)
    return Pattern(300, (columns(first, first + 1, first + 2, count=298),))


def grid(side: int = 18) -> Pattern:
    node = torch.arange(side * side).view(side, side)
    across = torch.stack([node[:, :-1].flatten(), node[:, 1:].flatten()], -1)
    down = torch.stack([node[:-1].flatten(), node[1:].flatten()], -1)
    return Pattern(side * side, (torch.cat([across, down]),))


def chains_in_groups() -> Pattern:
    place = torch.arange(200).view(40, 5)
    return Pattern(202, (columns(place[:, :-1].flatten(), place[:, 1:].flatten(), 200, 201, count=160),))


def at_random() -> Pattern:
    return Pattern(150, (drawn(150, 200).view(100, 2), drawn(150, 90, 1).view(30, 3)))


def same_coordinate_twice() -> Pattern:
    return Pattern(7, (drawn(6, 40).view(10, 4),))  # and one that no factor touches


def unconnected() -> Pattern:
    return Pattern(9, (drawn(9, 30).view(30, 1),))


EVERY = [
    groups_with_weights,
    crossed,
    correlated_slopes,
    nested,
    chain,
    second_order_chain,
    grid,
    chains_in_groups,
    at_random,
    same_coordinate_twice,
    unconnected,
]


def with_elements(pattern: Pattern, seed: int = 0) -> tuple[Pattern, tuple[Tensor, ...]]:
    """The pattern with a prior on each coordinate, and positive semidefinite elements."""
    generator = torch.Generator().manual_seed(seed)
    roots = [torch.randn(*rows.shape, 2, generator=generator, dtype=torch.float64) for rows in pattern.index]
    prior = 0.1 + torch.rand(pattern.size, 1, 1, generator=generator, dtype=torch.float64)
    whole = Pattern(pattern.size, (*pattern.index, torch.arange(pattern.size).unsqueeze(-1)))
    return whole, (*(root @ root.mT for root in roots), prior)
