"""Components and cycles against the rank of the matrix of differences."""

import numpy as np
import pytest
import torch

from pyro_evidence.precision.dense import Pattern
from pyro_evidence.precision.elimination import components, elimination_order, graph_of, num_cycles, stretches


def random_edges(seed: int, size: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(size, (count, 2), generator=generator)
    return edges[edges[:, 0] != edges[:, 1]]


def differences(edges: torch.Tensor, size: int) -> np.ndarray:
    D = np.zeros((len(edges), size))
    D[np.arange(len(edges)), edges[:, 0]] += 1.0
    D[np.arange(len(edges)), edges[:, 1]] -= 1.0
    return D


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("count", [3, 15, 40])
def test_differences_that_follow_from_others_are_counted(seed: int, count: int) -> None:
    edges = random_edges(seed, 20, count)
    rank = np.linalg.matrix_rank(differences(edges, 20))
    assert num_cycles(edges) == len(edges) - rank
    label = components(20, edges)
    assert len(torch.unique(label)) == 20 - rank
    assert torch.equal(label[edges[:, 0]], label[edges[:, 1]])
    assert torch.equal(label[label], label)  # the lowest node names its part


def test_an_edge_given_twice_is_a_cycle() -> None:
    assert num_cycles(torch.tensor([[4, 7], [7, 4]])) == 1


def test_a_long_path_in_any_order_is_one_part_without_a_cycle() -> None:
    path = torch.randperm(20_000, generator=torch.Generator().manual_seed(0))
    edges = torch.stack([path[:-1], path[1:]], -1)
    assert num_cycles(edges) == 0
    assert bool((components(20_000, edges) == 0).all())


def test_a_chain_whose_nodes_touch_three_on_either_side_is_cut_into_stretches() -> None:
    """Every one of 300 nodes waits for few others; a dense matrix of most of them takes twice as long."""
    chain = Pattern(300, (torch.arange(300).unfold(0, 4, 1).contiguous(),))
    assert len(elimination_order(chain).rest) < 100


def test_nodes_that_all_touch_most_others_are_not_cut_into_stretches() -> None:
    """Seven such nodes are what is left of a grid of 40,000."""
    assert stretches(graph_of(Pattern(7, (torch.arange(7).unsqueeze(0),)))) == []


def test_groups_that_only_common_coordinates_join_are_not_cut_into_stretches() -> None:
    """They are a plate: a search for stretches among a hundred thousand of them takes longer than a fit's step."""
    group = torch.arange(50)
    index = torch.stack([group, torch.full_like(group, 50), torch.full_like(group, 51)], -1)
    assert stretches(graph_of(Pattern(52, (index,)))) == []
