"""Where params live, how networks' own parameters are exchanged, and which transforms they have."""

import functools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.program.parameters import WithParameters, homes, in_place, maximised_sites, modules, transform_of

assert_exact = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)

GLOBAL = torch.nn.Linear(2, 2)
X = torch.tensor([0.4, -1.0])


def uses_a_global(x: Tensor) -> Any:
    return GLOBAL(x)


def uses_a_function(x: Tensor) -> Any:
    return uses_a_global(x)


class Service:
    def __init__(self, network: torch.nn.Module) -> None:
        self.network = network

    def __call__(self, x: Tensor) -> Any:
        return self.network(x)


@functools.wraps(uses_a_function)
def wrapped(x: Tensor) -> Any:
    return uses_a_function(x)


REACH = [
    GLOBAL,
    uses_a_global,
    uses_a_function,
    wrapped,
    Service(GLOBAL),
    Service(GLOBAL).__call__,
    [GLOBAL],
    {"a": GLOBAL},
]


@pytest.mark.parametrize("thing", [*REACH, partial(uses_a_global, X), partial(Service(GLOBAL), x=X)])
def test_networks_within_reach_are_found(thing: Any) -> None:
    assert GLOBAL in modules(thing)


@pytest.mark.parametrize("thing", [len, X, 3, "text", None, torch.exp, Service, lambda x: x])
def test_other_things_hold_no_network(thing: Any) -> None:
    assert modules(thing) == []


def test_things_that_hold_themselves_come_to_an_end() -> None:
    loop: list[Any] = []
    loop += [loop, GLOBAL]
    assert GLOBAL in modules(loop)


def test_homes_are_all_places_of_a_tied_weight() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    network[1].weight = network[0].weight
    found = homes(network[0].weight, [network])
    assert [(id(m), key) for m, key in found] == [(id(network[0]), "weight"), (id(network[1]), "weight")]


def test_parameters_are_exchanged_and_put_back() -> None:
    network = torch.nn.Linear(2, 2)
    weight = network.weight
    replacement = torch.eye(2, requires_grad=True)
    where = {"w": homes(weight, [network])}
    with in_place({"w": replacement}, where):
        assert_exact(network(X), X + network.bias)
        assert torch.autograd.grad(network(X).sum(), replacement)[0] is not None
    assert network.weight is weight
    with pytest.raises(ZeroDivisionError), in_place({"w": replacement}, where):
        raise ZeroDivisionError
    assert network.weight is weight
    assert_exact(WithParameters(network, {"w": replacement}, where)(X), X + network.bias)
    assert network.weight is weight


@pytest.mark.parametrize("constraint", [constraints.positive, constraints.simplex, constraints.lower_cholesky])
def test_transforms_of_params_are_inverted_by_their_inverse(constraint: Any) -> None:
    value = {constraints.simplex: torch.tensor([0.2, 0.8])}.get(constraint, torch.tensor([[2.0, 0.0], [-0.4, 1.0]]))
    value = torch.tensor(3.0) if constraint is constraints.positive else value
    transform = transform_of(constraint)
    assert_exact(transform(transform.inv(value)), value)


def test_maximised_sites_keep_the_order_of_the_model() -> None:
    sites = ("c", "a", "b")
    assert maximised_sites(sites, (), None, None) == ()
    assert maximised_sites(sites, ("p",), None, ["b", "p", "c"]) == ("c", "b")
    assert maximised_sites(sites, (), ["a"], None) == ("c", "b")
    assert maximised_sites(sites, (), ["a"], ["b"]) == ("c", "b")
    assert maximised_sites(sites, (), ["a", "b", "c"], ()) == ()
