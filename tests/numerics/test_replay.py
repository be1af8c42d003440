"""Functions recorded once and run with equal operations side by side: the same numbers and derivatives."""

import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from pyro_evidence.numerics.recorded import Unrecordable, replay

A = torch.tensor([[2.0, 0.3], [0.3, 1.0]], dtype=torch.float64)


def walk(x: Tensor, scale: Tensor) -> list[Tensor]:
    data = torch.arange(len(x)).double()
    parts = [
        torch.distributions.Normal(0.9 * x[i - 1], scale.exp(), validate_args=False).log_prob(x[i]).sum()
        for i in range(1, len(x))
    ]
    return [*parts, *(x[i] * data[i] - x[i].exp() for i in range(len(x))), data.sum()]


def vectors(x: Tensor, scale: Tensor) -> list[Tensor]:
    """Steps of two numbers each: products with a matrix, reductions, choices, several results of one operation."""
    found = []
    for i in range(0, len(x) - 1, 2):
        pair = x[i : i + 2]
        low, high = (A @ pair).unbind()
        found += [torch.log_softmax(pair, 0) * scale, torch.where(low > 0.1, low, high * i), pair.reshape(1, 2).mean()]
    return found


def mixed_lengths(x: Tensor, scale: Tensor) -> list[Tensor]:
    """Blocks of different sizes, one the whole argument, and an argument as it is."""
    return [x[: n + 1].square().sum() * scale for n in range(6)] + [x, x.sum()]


def running(x: Tensor, scale: Tensor) -> list[Tensor]:
    """A state that is not an argument of any step but made in the one before, and seen by a term of each."""
    state, found, data = scale.new_zeros(()), [], torch.arange(len(x)).double()
    for i in range(len(x)):
        state = 0.9 * state + scale[0].exp() * x[i]
        found += [-0.5 * (state - data[i]).square() - scale[0], -0.5 * x[i].square()]
    return found


def lists(x: Tensor, scale: Tensor) -> list[Tensor]:
    """Operations on lists of tensors, of constants among them, and on arguments by name."""
    one, found = torch.ones(1).double(), []
    for i in range(0, len(x) - 1, 2):
        both = torch.cat([x[i : i + 1].exp(), one, scale * x[i + 1]])
        table = torch.stack([both, both.square(), one.expand(3)], dim=-1)
        found += [table.sum(dim=0, keepdim=True), table[:, torch.tensor([0, 2])], both.clamp(min=0.1)]
    return found


@pytest.mark.parametrize("f", [walk, vectors, mixed_lengths, running, lists])
def test_a_replay_is_the_same_from_a_pickle(f: Callable[..., Sequence[Tensor]]) -> None:
    x, scale = torch.linspace(-1.0, 1.0, 12).double(), torch.tensor([0.4]).double()
    again = replay(f, x, scale)
    assert torch.equal(pickle.loads(pickle.dumps(again))(x, scale), again(x, scale))


@pytest.mark.parametrize("f", [walk, vectors, mixed_lengths, running, lists])
def test_values_and_derivatives_are_those_of_the_function(f: Callable[..., Sequence[Tensor]]) -> None:
    torch.manual_seed(0)
    again = replay(f, torch.randn(12).double(), torch.zeros(1).double())
    x, scale = torch.randn(12).double().requires_grad_(), torch.tensor([0.4]).double().requires_grad_()
    found, expected = again(x, scale), torch.cat([value.reshape(-1) for value in f(x, scale)])
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    weights = torch.linspace(0.5, 1.5, len(found)).double()
    first, second = (torch.autograd.grad((y * weights).sum(), (x, scale), create_graph=True) for y in (found, expected))
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)
    slopes = (torch.autograd.grad(g[0].square().sum() + g[1].sum(), x)[0] for g in (first, second))
    torch.testing.assert_close(*slopes, rtol=1e-11, atol=1e-11)


def test_a_loop_takes_as_many_batches_however_long_it_is() -> None:
    short, long = (replay(walk, torch.zeros(n).double(), torch.zeros(1).double()) for n in (5, 50))
    assert len(short.batches) == len(long.batches) < 20
    assert long.num_operations > 8 * short.num_operations


def test_of_a_running_state_only_its_own_run_is_step_by_step() -> None:
    again = replay(running, torch.zeros(50).double(), torch.zeros(1).double())
    assert len(again.batches) < 2 * 50 + 20 and again.num_operations > 6 * 50


def test_numbers_do_not_make_single_precision_double() -> None:
    again = replay(
        lambda x: [x[i : i + 1] * torch.tensor(0.1 * i).double() for i in range(4)], torch.ones(4, dtype=torch.float32)
    )
    assert again(torch.ones(4, dtype=torch.float32)).dtype is torch.float32


def _branches(x: Tensor) -> list[Tensor]:
    return [x.exp() if x[0] > 0 else x]


def _adds_in_place(x: Tensor) -> list[Tensor]:
    total = torch.zeros(())
    for part in x:
        total += part
    return [total]


@pytest.mark.parametrize(
    "f",
    [
        _branches,
        _adds_in_place,
        lambda x: [x * float(x[0])],
        lambda x: [torch.dropout(x, 0.5, True)],
        lambda x: [x[x > 0.0]],
    ],
    ids=["branch", "in place", "number", "draw", "as many as there are"],
)
def test_what_may_differ_elsewhere_is_refused(f: Callable[..., Sequence[Tensor]]) -> None:
    with pytest.raises(Unrecordable):
        replay(f, torch.ones(3))
