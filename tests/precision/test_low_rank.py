"""A sparse precision with a border of low rank against the dense matrix that it stands for."""

import pytest
import torch
from torch import Tensor

from pyro_evidence.errors import NotPositiveDefinite
from pyro_evidence.precision.dense import Pattern, assembled
from pyro_evidence.precision.low_rank import LowRankPlan

SIZE = 40


def case(singular: bool) -> tuple[Pattern, tuple[Tensor, ...], Tensor]:
    """Two sums; with ``singular`` the sparse part alone has no inverse, and the sums pin its constant."""
    torch.manual_seed(0)
    i, e = torch.arange(SIZE), torch.arange(SIZE - 1)
    first, second = (torch.full((n,), SIZE + k) for n, k in ((SIZE, 0), (SIZE - 1, 1)))
    index = (
        torch.arange(SIZE + 2).unsqueeze(-1),
        torch.stack([i, first], 1),
        torch.stack([e, e + 1, second], 1),
        torch.tensor([[SIZE, SIZE + 1]]),
    )
    roots = [torch.randn(len(rows), rows.shape[1], rows.shape[1]).double() for rows in index]
    elements = [root @ root.mT for root in roots]
    if singular:
        edge = torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]).double()
        elements = [0 * elements[0], 0 * elements[1], edge.expand(SIZE - 1, 3, 3), 1e3 * torch.eye(2).double()[None]]
    return Pattern(SIZE + 2, index), tuple(elements), torch.stack([torch.ones(SIZE), torch.rand(SIZE)]).double()


@pytest.mark.parametrize("singular", [False, True])
def test_all_that_a_precision_is_asked_for(singular: bool) -> None:
    pattern, elements, B = case(singular)
    found = LowRankPlan(pattern, B).factorise(elements, str)
    E = torch.cat([torch.eye(SIZE).double(), B])
    A = E.mT @ assembled(pattern, elements) @ E
    Z, close = torch.linalg.inv(A), {"rtol": 1e-9, "atol": 1e-9 * float(torch.linalg.inv(A).abs().max())}
    rows, chosen = torch.randn(3, SIZE).double(), torch.tensor([0, 7])
    torch.testing.assert_close(found.log_det[0], torch.logdet(A), rtol=1e-11, atol=0.0)
    torch.testing.assert_close(found.variance[0], Z.diagonal(), **close)
    torch.testing.assert_close(found.covariance_of(chosen, len(Z))[:, chosen], Z[chosen][:, chosen], **close)
    torch.testing.assert_close(found.solve(rows), rows @ Z, **close)
    root = found.unwhiten(torch.eye(SIZE).double())
    torch.testing.assert_close(root.mT @ root, Z, **close)
    torch.testing.assert_close(found.whiten(found.unwhiten(rows)), rows, rtol=1e-9, atol=1e-9)
    whole = E @ Z @ E.mT
    for index, own in zip(pattern.index, found.log_det_gradient, strict=True):
        torch.testing.assert_close(own, whole[index.unsqueeze(-1), index.unsqueeze(-2)], **close)


def test_what_is_not_positive_definite_over_its_sums_is_refused() -> None:
    pattern, elements, B = case(False)
    with pytest.raises(NotPositiveDefinite, match="posterior precision A over its sums"):
        LowRankPlan(pattern, B).factorise((*elements[:-1], elements[-1] - 1e6 * torch.eye(2).double()), str)


def test_a_factor_that_begins_with_a_sum_touches_no_coordinate_but_its_own() -> None:
    index = torch.tensor([[7, 4, 5], [6, 7, 2]])
    ((own, _),) = LowRankPlan(Pattern(8, (index,)), torch.ones(2, 6).double())._own
    assert [set(row) for row in own.tolist()] == [{4, 5}, {2}]


def test_directions_of_sums_do_not_turn_from_one_matrix_to_the_next() -> None:
    pattern, elements, B = case(False)
    plan = LowRankPlan(pattern, B)
    for scale in (0.5, 1.0, 2.0, 40.0):
        precision = plan.factorise(tuple(scale * e for e in elements), str)
        assert bool((precision.R.diagonal(dim1=-2, dim2=-1) >= 0.0).all())
