"""When products of nodes have settled, of several densities at once, against closed forms."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyro_evidence.laplace.gradient import differences
from pyro_evidence.nested.integration import NodeProducts, Settled, settled
from pyro_evidence.numerics.quadrature import rules

ROWS: tuple[Callable[[Tensor], Tensor], ...] = (  # log densities over standard normal along each axis
    torch.zeros_like,
    lambda z: z,  # whose integral is exp(1/2)
    lambda z: 10.0 * z.sign(),  # of which every number of nodes says something else
    lambda z: torch.where(z.abs() > 2.0, -torch.inf, 0.0),  # without a value at far nodes
    lambda z: torch.where(z.abs() > 4.0, -torch.inf, 0.0),  # of nine nodes, not of seven
)


def found_on(num_dims: int, asked: Tensor) -> tuple[Settled, list[list[int]]]:
    seen = []

    def product(rows: Tensor, num: int) -> NodeProducts:
        seen.append(rows.tolist())
        rule = rules.product(rules.gauss_hermite(num), num_dims)
        log_ratio = torch.stack([ROWS[row](rule.nodes).sum(-1) for row in rows.tolist()])
        log_evidence = (log_ratio + rule.log_weights).logsumexp(-1)
        weights = (log_ratio + rule.log_weights).softmax(-1).unsqueeze(-1)
        mean = (weights * rule.nodes).sum(1)
        sd = (weights * (rule.nodes - mean.unsqueeze(1)).square()).sum(1).sqrt()
        table = (log_ratio - log_evidence.unsqueeze(-1)).reshape(-1, *[num] * num_dims)
        return NodeProducts(log_evidence, mean, sd, table)

    return settled(product, asked, num_dims, tolerance=0.02), seen


@pytest.mark.parametrize("num_dims", [1, 2])
def test_each_row_settles_by_itself(num_dims: int) -> None:
    told, seen = found_on(num_dims, torch.tensor([True, True, True, True, False]))
    assert told.found.tolist() == [True, True, False, False, False]
    assert told.log_evidence[:2].tolist() == pytest.approx([0.0, 0.5 * num_dims], abs=0.01)
    assert told.num_nodes[2:].tolist() == [0, 0, 0]
    assert float(told.error[:2].max()) < 0.02 / 5.0
    assert all(3 not in rows for rows in seen[1:])  # where a node is missing, no more are asked for
    assert seen[-1] == [2]


def test_on_one_axis_the_next_nodes_are_taken_for_the_tails() -> None:
    one, two = (found_on(num_dims, torch.tensor([True, False]))[0].num_nodes.tolist() for num_dims in (1, 2))
    assert (one, two) == ([9, 0], [7, 0])


def test_missing_tails_leave_what_has_settled() -> None:
    told, _ = found_on(1, torch.tensor([False, False, False, False, True]))
    assert (int(told.num_nodes[4]), bool(told.found[4]), float(told.log_evidence[4])) == (7, True, pytest.approx(0.0))


def test_differences_are_the_derivatives_of_a_quadratic() -> None:
    """The slope of ``-x'Ax / 2`` falls by ``A``; a mode that is linear in ``x`` moves by its matrix."""
    A, B, x = torch.tensor([[2.0, 0.5], [0.5, 1.0]]), torch.tensor([[1.0, -1.0], [0.0, 3.0], [2.0, 2.0]]), torch.ones(2)
    steps = torch.diag(torch.tensor([0.1, 0.3]))
    falls, moves = differences(lambda ends: [(-A @ (x + end), B @ (x + end)) for end in ends], steps)
    torch.testing.assert_close(falls, A, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(moves, B, rtol=0.0, atol=1e-6)
