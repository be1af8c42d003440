"""What is outside stays as it was: param store, random state, networks; what is handed out works."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.program.log_joint import LogJoint

assert_exact = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)

X = torch.tensor([[0.3, -1.2], [2.0, 0.1], [-0.7, 0.9], [1.1, 1.5]])
T = torch.tensor([0.2, -0.4, 1.3, 2.2])


def regression(X: Tensor, t: Tensor) -> None:
    alpha = pyro.param("alpha", torch.ones(2), constraint=constraints.positive)
    offset = pyro.param("offset", torch.tensor(0.5))
    w = pyro.sample("w", dist.Normal(0.0, alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w + offset, 0.5), obs=t)


class Network(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.beta = PyroParam(torch.tensor(4.0), constraint=constraints.positive)
        self.linear = PyroModule[torch.nn.Linear](2, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
        self.linear.bias = torch.nn.Parameter(torch.tensor([0.5]))

    def forward(self, X: Tensor, t: Tensor) -> None:
        loc = self.linear(X).squeeze(-1)
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Normal(loc, self.beta.rsqrt()), obs=t)


@contextmanager
def nothing_changes(network: torch.nn.Module) -> Iterator[None]:
    """Fails when store, random state, validation or the network are not the very same afterwards."""
    store = pyro.get_param_store()
    leaves = {n: (p, p.detach().clone(), p.requires_grad) for n, p in store.named_parameters()}
    limits = dict(store.get_state()["constraints"])
    held = {n: (p, p.detach().clone()) for n, p in network.named_parameters()}
    random, validation = torch.get_rng_state(), poutine.util.is_validation_enabled()
    yield
    assert list(store.keys()) == list(leaves) and dict(store.get_state()["constraints"]) == limits
    for name, leaf in store.named_parameters():
        before, value, requires_grad = leaves[name]
        assert leaf is before and torch.equal(leaf, value) and leaf.requires_grad == requires_grad
        assert leaf.grad is None and store.param_name(leaf) == name
    for name, parameter in network.named_parameters():
        assert parameter is held[name][0] and torch.equal(parameter, held[name][1]) and parameter.grad is None
    assert torch.equal(torch.get_rng_state(), random)
    assert poutine.util.is_validation_enabled() == validation


def use(joint: LogJoint) -> None:
    """Every public way of evaluating."""
    u = joint.initial(3, seed=1).requires_grad_()
    theta = joint.initial_theta.clone().requires_grad_()
    torch.autograd.grad(joint.log_joint(u, theta).sum(), (u, theta))
    joint.trace(u[0], theta)
    joint.pointwise(u[0], theta)
    joint.substituted(theta)


@pytest.mark.parametrize("filled", [False, True])
def test_nothing_outside_is_touched(filled: bool) -> None:
    network = Network()
    if filled:
        pyro.param("alpha", 3.0 * torch.ones(2), constraint=constraints.positive)
        pyro.param("somebody else's", torch.tensor([1.0, 2.0]))
        poutine.trace(network).get_trace(X, T)
    for model in (regression, network):
        with nothing_changes(network):
            use(LogJoint(model, (X, T)))
        with nothing_changes(network), pytest.raises(RuntimeError, match="shape"):
            LogJoint(model, (X, T)).log_joint(torch.zeros(1), torch.zeros(3))
        with nothing_changes(network), pytest.raises(ValueError):
            LogJoint(model, (X, T[:3]))


def test_svi_goes_on_where_it_was() -> None:
    network = Network()
    svi = SVI(network, AutoDelta(network), pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
    svi.step(X, T)
    before = network.linear.bias.clone()
    use(LogJoint(network, (X, T)))
    svi.step(X, T)
    assert not torch.equal(network.linear.bias, before)
    assert pyro.get_param_store()._params["linear.bias"] is network.linear.bias


def test_validation_stays_off_where_it_was_off() -> None:
    with pyro.validation_enabled(False):
        use(LogJoint(regression, (X, T)))
        assert not poutine.util.is_validation_enabled()


# --- warm start ---


def test_search_starts_at_the_stores_values() -> None:
    pyro.param("alpha", torch.tensor([3.0, 4.0]), constraint=constraints.positive)
    joint = LogJoint(regression, (X, T))
    assert_exact(joint.split_hypers(joint.initial_theta)[0]["alpha"], torch.tensor([3.0, 4.0]))
    assert_exact(joint.split_hypers(joint.initial_theta)[0]["offset"], torch.tensor(0.5))


def test_a_module_starts_at_its_trained_values() -> None:
    network = Network()
    poutine.trace(network).get_trace(X, T)
    pyro.get_param_store()["beta"] = torch.tensor(7.0)
    with torch.no_grad():
        network.linear.bias.fill_(0.9)
    joint = LogJoint(network, (X, T))
    params, _ = joint.split_hypers(joint.initial_theta)
    assert_exact(params["beta"], torch.tensor(7.0))
    assert_exact(params["linear.bias"], torch.tensor([0.9]))


def test_a_network_does_not_start_at_the_values_of_another() -> None:
    first, second = Network(), Network()
    with torch.no_grad():
        first.linear.bias.fill_(0.9)
    poutine.trace(first).get_trace(X, T)
    joint = LogJoint(second, (X, T))
    assert_exact(joint.split_hypers(joint.initial_theta)[0]["linear.bias"], torch.tensor([0.5]))


def test_a_param_that_is_only_read_comes_from_the_store() -> None:
    def model(t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, pyro.param("scale")))
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Normal(w * pyro.param("scale"), 0.5), obs=t)

    pyro.param("scale", torch.tensor(2.0), constraint=constraints.positive)
    joint = LogJoint(model, (T,))
    assert_exact(joint.initial_theta, torch.tensor([2.0]).log())
    w, scale = torch.tensor([0.4]), torch.tensor(3.0)
    expected = td.Normal(0.0, scale).log_prob(w[0]) + td.Normal(w * scale, 0.5).log_prob(T).sum()
    assert_exact(joint.log_joint(w, scale.log().reshape(1)), expected)


def test_a_param_that_the_user_substituted_is_no_hyperparameter() -> None:
    fixed = poutine.substitute(regression, data={"alpha": torch.tensor([3.0, 4.0])})
    joint = LogJoint(fixed, (X, T))
    assert joint.hypers.names == ("offset",)
    pyro.param("alpha", torch.tensor([7.0, 7.0]), constraint=constraints.positive)
    w = torch.tensor([0.4, -1.1])
    prior = td.Normal(0.0, torch.tensor([3.0, 4.0]).rsqrt()).log_prob(w).sum()
    assert_exact(joint.log_joint(w, torch.tensor([0.5])), prior + td.Normal(X @ w + 0.5, 0.5).log_prob(T).sum())


# --- the model with its hyperparameters put in ---


@pytest.mark.parametrize("make", [lambda: regression, Network])
def test_substituted_model_needs_neither_store_nor_network(make: Callable[[], Callable[..., Any]]) -> None:
    model = make()
    joint = LogJoint(model, (X, T))
    theta = joint.initial_theta + torch.linspace(-0.4, 0.8, joint.hypers.size)
    u = torch.tensor([0.4, -1.1])
    fixed = pickle.loads(pickle.dumps(joint.substituted(theta)))
    pyro.param("alpha", torch.tensor([70.0, 70.0]), constraint=constraints.positive)
    site = joint.latents.constrained(u)
    trace = poutine.trace(poutine.condition(fixed, data=site)).get_trace(X, T)
    assert_exact(trace.log_prob_sum(), joint.log_joint(u, theta))
    again = LogJoint(fixed, (X, T))
    assert again.hypers.names == ()
    assert_exact(again.log_joint(u, again.initial_theta), joint.log_joint(u, theta))


def test_substituted_sites_become_observations() -> None:
    def model(t: Tensor) -> None:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        w = pyro.sample("w", dist.Normal(0.0, scale))
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Normal(w, 0.5), obs=t)

    joint = LogJoint(model, (T,), maximise=["scale"])
    theta = torch.tensor([0.3])
    trace = poutine.trace(joint.substituted(theta)).get_trace(T)
    assert trace.nodes["scale"]["is_observed"] and not trace.nodes["w"]["is_observed"]
    assert_exact(trace.nodes["scale"]["value"], theta[0].exp())
