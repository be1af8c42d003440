"""The network's own density against automatic differentiation of the Pyro model, and when it is not used."""

from functools import partial

import pyro
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor

from pyro_evidence.models.mlp import MLP, Binary, Regression, Softmax, ard
from pyro_evidence.models.regression import Learned
from pyro_evidence.program import LogJoint
from pyro_evidence.structure.recognise import Structure, recognise

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def inputs(num: int = 15) -> Tensor:
    return torch.randn(num, 3, generator=torch.Generator().manual_seed(0))


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


NETWORKS = {
    "regression": (lambda: MLP(3, 4), real(15)),
    "fixed": (lambda: MLP(3, 4, alpha=2.0, output=Regression(beta=3.0)), real(15)),
    "two targets": (lambda: MLP(3, 4, output=Regression(2)), real(15, 2)),
    "noise each": (lambda: MLP(3, 2, output=Regression(2, Learned(torch.tensor([1.0, 2.0])))), real(15, 2)),
    "relevance": (lambda: MLP(3, 4, alpha=ard(3), activation=torch.nn.functional.softplus), real(15)),
    "each unit": (lambda: MLP(3, 4, alpha={"W2": Learned(torch.ones(4)), "b1": torch.rand(4) + 0.5}), real(15)),
    "binary": (lambda: MLP(3, 4, output=Binary()), (real(15) > 0).double()),
    "softmax": (lambda: MLP(3, 4, output=Softmax(3)), torch.arange(15) % 3),
    "deep": (lambda: MLP(3, (4, 3), output=Softmax(3)), torch.arange(15) % 3),
}


def rows(joint: LogJoint) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    u = torch.randn(3, joint.latents.size, generator=generator)
    return u, joint.initial_theta + torch.randn(3, joint.hypers.size, generator=generator)


def structure_of(name: str) -> Structure:
    make, t = NETWORKS[name]
    return recognise(LogJoint(make(), (inputs(), t)))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_number_is_that_of_autograd(name: str) -> None:
    structure = structure_of(name)
    known, slow = structure.network, structure.density
    assert known is not None
    u, theta = rows(slow.joint)
    for number in ("log_joint", "precision", "gauss_newton", "precision_diagonal"):
        assert_exact(getattr(known, number)(u, theta), getattr(slow, number)(u, theta))
    assert_exact(known.gradient(u, theta), slow.gradient(u, theta))


@pytest.mark.parametrize("name", ["regression", "noise each", "softmax", "deep"])
@pytest.mark.parametrize("number", ["precision", "gauss_newton"])
def test_third_derivatives_are_those_of_autograd(name: str, number: str) -> None:
    structure = structure_of(name)
    found = []
    for density in (structure.network, structure.density):
        u, theta = (x.requires_grad_() for x in rows(structure.density.joint))
        A = getattr(density, number)(u, theta)
        M = torch.randn(A.shape, generator=torch.Generator().manual_seed(3))
        found.append(torch.autograd.grad((A * M).sum(), (u, theta)))
    assert_exact(found[0], found[1])


def test_float32_data_keep_their_dtype() -> None:
    torch.set_default_dtype(torch.float32)
    try:
        structure = recognise(LogJoint(MLP(3, 4), (inputs().float(), real(15).float())))
        u, theta = rows(structure.density.joint)
        assert structure.network is not None
        expected = structure.density.precision(u.double(), theta.double())
    finally:
        torch.set_default_dtype(torch.float64)
    torch.testing.assert_close(structure.network.precision(u.double(), theta.double()), expected, rtol=1e-4, atol=1e-4)


class Outer(PyroModule):
    """A network inside another module, under a longer name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP(3, 4)

    def forward(self, X: Tensor, t: Tensor | None = None) -> Tensor:
        found: Tensor = self.inner(X, t)
        return found


def test_a_network_within_another_model_is_found() -> None:
    structure = recognise(LogJoint(Outer(), (inputs(), real(15))))
    assert structure.network is not None and structure.density.joint.latents.names[0] == "inner.W1"
    u, theta = rows(structure.density.joint)
    assert_exact(structure.network.precision(u, theta), structure.density.precision(u, theta))


def halved(X: Tensor, t: Tensor | None = None) -> Tensor:
    """Uses a network, but counts every datum half."""
    with poutine.scale(scale=0.5):
        found: Tensor = NETWORK(X, t)
    return found


def doubled(X: Tensor, t: Tensor | None = None) -> Tensor:
    found: Tensor = NETWORK(2.0 * X, t)
    return found


def with_more(X: Tensor, t: Tensor | None = None) -> Tensor:
    found: Tensor = NETWORK(X, t)
    pyro.sample("z", pyro.distributions.Normal(found.mean(), 1.0))
    return found


NETWORK = MLP(3, 4)


@pytest.mark.parametrize("model", [halved, doubled, with_more, poutine.condition(NETWORK, {"W1": torch.ones(3, 4)})])
def test_a_model_that_is_another_does_not_use_it(model) -> None:
    assert recognise(LogJoint(model, (inputs(), real(15)))).network is None
