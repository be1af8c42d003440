"""The coordinates that are followed through a computation, against the places where its Jacobian is not zero."""

from collections.abc import Callable

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.structure import dependencies
from pyro_evidence.structure.dependencies import NARROW, Follow, Lost

D = 12
GROUP = torch.tensor([2, 0, 1, 1, 2, 0])
X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

COMPUTATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elementwise": lambda u: (u[:6].exp() * u[6:]).log1p(),
    "groups": lambda u: u[:3][GROUP] + X[:, 0] * u[3],
    "linear predictor": lambda u: X @ u[:3] + u[3:9],
    "differences": lambda u: u[1:] - u[:-1],
    "sums of rows": lambda u: u.reshape(3, 4).square().sum(-1),
    "products of rows": lambda u: u.reshape(3, 4).transpose(0, 1).prod(-1),
    "put together": lambda u: torch.cat([torch.stack([u[0], u[1] * u[2]]), u[5:8].flip(0)]),
    "a normal": lambda u: torch.distributions.Normal(u[0], u[1].exp()).log_prob(u[4:8]),
    "a half Cauchy": lambda u: dist.HalfCauchy(u[0]).log_prob(u[4:8]),  # which Pyro fills in place
    "sorted": lambda u: u[:6].reshape(2, 3).sort().values.sum(-1),
    "one number": lambda u: u[:5].logsumexp(0),
    "repeated": lambda u: u[:2].unsqueeze(-1).expand(2, 3) * u[2:5],
}


def coordinates(notes: Follow, result: Tensor) -> list[set[int]]:
    """Those noted of each element, flattened."""
    groups = [group.expand(*result.shape, group.shape[-1]).reshape(result.numel(), -1) for group in notes.of(result)]
    return [{int(c) for group in groups for c in group[n] if c >= 0} for n in range(result.numel())]


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_what_is_followed_is_where_the_jacobian_is_not_zero(name: str) -> None:
    function = COMPUTATIONS[name]
    u = torch.rand(D, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    expected = torch.autograd.functional.jacobian(function, u).reshape(-1, D) != 0
    with Follow(u) as notes:
        result = function(u)
    assert coordinates(notes, result) == [set(row.nonzero().flatten().tolist()) for row in expected]


def test_a_recursion_notes_each_coordinate_once() -> None:
    """As of a hidden Markov model, whose steps would double the notes of the first ones."""
    u = torch.rand(D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with Follow(u) as notes:
        state = u[6:9].unsqueeze(-1) + u[4:6]  # of three sequences
        for _ in range(16):
            state = (u[:4].reshape(2, 2) + state.unsqueeze(-1)).logsumexp(-2)
    assert coordinates(notes, state) == [{*range(6), 6 + n} for n in range(3) for _ in range(2)]
    assert max(group.shape[-1] for group in notes.of(state)) <= NARROW


def test_many_coordinates_are_told_apart_a_few_elements_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependencies, "BATCH_NUMBERS", 16 * 40)
    group = torch.randint(-1, 6, (3, 5, 20), generator=torch.Generator().manual_seed(1))
    found = dependencies.once(group)
    for own, row in zip(found.reshape(15, -1).tolist(), group.reshape(15, -1).tolist(), strict=True):
        assert sorted(i for i in own if i >= 0) == sorted(set(row) - {-1})


def test_what_all_elements_see_alike_is_noted_once_and_not_at_each() -> None:
    """As of a field that sums to zero: each value is its own coordinate and a sum of all, with edges between values."""
    size = 200
    u = torch.rand(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with Follow(u) as notes:
        field = u - u.mean() - u.square().sum()
        edges = (field[:-1] - field[1:]).square()
    assert sum(group.numel() for group in notes.of(edges)) <= 3 * size
    assert coordinates(notes, edges) == [set(range(size))] * (size - 1)


def test_steps_of_a_differential_equation_note_each_coordinate_once() -> None:
    """Of two species, each of which changes with both: unions and parts put together double notes as sums do."""
    u = torch.rand(D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with Follow(u) as notes:
        state = u[:2]
        for _ in range(12):
            prey, hunters = state.unbind()
            state = state + 0.1 * torch.stack([(u[2] - u[3] * hunters) * prey, (u[4] * prey - u[5]) * hunters])
    assert coordinates(notes, state) == [set(range(6))] * 2
    assert sum(group.shape[-1] for group in notes.of(state)) <= NARROW


def test_of_two_values_that_may_be_chosen_both_count() -> None:
    u = torch.ones(D, dtype=torch.float64)
    with Follow(u) as notes:
        result = torch.where(u[6:9] > 0.0, u[:3], u[3:6])
    assert coordinates(notes, result) == [{0, 3}, {1, 4}, {2, 5}]


def test_a_number_taken_out_of_a_tensor_is_said_to_be_lost() -> None:
    u = torch.ones(D, dtype=torch.float64)
    with pytest.raises(Lost, match=r"\.item\(\)"), Follow(u):
        float(u[3] * 2.0)


def test_a_constant_depends_on_nothing() -> None:
    u = torch.ones(D, dtype=torch.float64)
    with Follow(u) as notes:
        assert notes.of(torch.ones(3) * 2.0) == () and notes.of(u > 0.0) == ()
