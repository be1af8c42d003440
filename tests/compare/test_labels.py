"""Assignment against all permutations."""

import itertools

import torch

from pyro_evidence.compare.labels import assign, overlap_cost


def test_assignment_is_the_cheapest_permutation() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 3, 4, 5, 6):
        for _ in range(20):
            cost = torch.randn(size, size, generator=generator)
            best = min(
                itertools.permutations(range(size)),
                key=lambda p, c=cost: float(sum(c[i, j] for i, j in enumerate(p))),
            )
            assert assign(cost) == list(best)


def test_ties_still_give_a_permutation() -> None:
    assert sorted(assign(torch.zeros(5, 5))) == list(range(5))


def test_overlap_finds_a_relabelling() -> None:
    resp = torch.softmax(3.0 * torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), -1)
    order = [2, 0, 3, 1]
    found = assign(overlap_cost(resp[:, order], resp))
    assert torch.equal(resp[:, order][:, found], resp)
