"""Hyperparameters: found in params, networks and named sites, then explicit and differentiable."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from pyro import poutine
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.program.log_joint import LogJoint

assert_exact = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)

X = torch.tensor([[0.3, -1.2], [2.0, 0.1], [-0.7, 0.9], [1.1, 1.5]])
T = torch.tensor([0.2, -0.4, 1.3, 2.2])
W, ALPHA, BETA = torch.tensor([0.4, -1.1]), torch.tensor([0.7, 2.5]), torch.tensor(3.0)


def regression(X: Tensor, t: Tensor) -> None:
    alpha = pyro.param("alpha", torch.ones(2), constraint=constraints.positive)
    beta = pyro.param("beta", lambda: torch.tensor(2.0), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, beta.rsqrt()), obs=t)


def density(w: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    return td.Normal(0.0, alpha.rsqrt()).log_prob(w).sum() + td.Normal(X @ w, beta.rsqrt()).log_prob(T).sum()


def test_params_are_explicit_arguments_in_log_space() -> None:
    joint = LogJoint(regression, (X, T))
    assert joint.hypers.names == ("alpha", "beta") and joint.maximised_sites == ()
    assert_exact(joint.initial_theta, torch.tensor([1.0, 1.0, 2.0]).log())
    theta = torch.cat([ALPHA, BETA.reshape(1)]).log()
    assert_exact(joint.log_joint(W, theta), density(W, ALPHA, BETA))


def test_derivatives_in_the_hyperparameters() -> None:
    joint = LogJoint(regression, (X, T))
    theta = torch.cat([ALPHA, BETA.reshape(1)]).log().requires_grad_()
    w = W.clone().requires_grad_()
    expected = density(w, theta[:2].exp(), theta[2].exp())
    slopes = [torch.autograd.grad(f, (theta, w), create_graph=True) for f in (joint.log_joint(w, theta), expected)]
    for actual, oracle in zip(*slopes, strict=True):
        assert_exact(actual, oracle)
    mixed = [torch.autograd.grad(slope[1].sum(), theta)[0] for slope in slopes]
    assert_exact(*mixed)


class Written(PyroModule):
    """The regression as a module: its own param, a prior that reads it, and a nested module."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = PyroParam(torch.ones(2), constraint=constraints.positive)
        self.w = PyroSample(lambda self: dist.Normal(0.0, self.alpha.rsqrt()).to_event(1))
        self.noise = PyroModule()
        self.noise.beta = PyroParam(torch.tensor(2.0), constraint=constraints.positive)

    def forward(self, X: Tensor, t: Tensor) -> None:
        loc = X @ self.w
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Normal(loc, self.noise.beta.rsqrt()), obs=t)


@pytest.mark.parametrize("local", [False, True])
def test_pyro_params_of_nested_modules(local: bool) -> None:
    with pyro.settings.context(module_local_params=local):
        joint = LogJoint(Written(), (X, T))
        assert joint.hypers.names == ("alpha", "noise.beta")
        assert_exact(joint.initial_theta, torch.tensor([1.0, 1.0, 2.0]).log())
        theta = torch.cat([ALPHA, BETA.reshape(1)]).log().requires_grad_()
        actual, expected = joint.log_joint(W, theta), density(W, theta[:2].exp(), theta[2].exp())
        assert_exact(actual, expected)
        assert_exact(*(torch.autograd.grad(f, theta)[0] for f in (actual, expected)))


class HalfBayesian(PyroModule):
    """A linear layer with a prior on its weight and a plain bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = PyroModule[torch.nn.Linear](2, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 2.0).expand([1, 2]).to_event(2))
        self.linear.bias = torch.nn.Parameter(torch.tensor([0.3]))

    def forward(self, X: Tensor, t: Tensor) -> None:
        loc = self.linear(X).squeeze(-1)
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Normal(loc, 0.5), obs=t)


def half_bayesian_density(w: Tensor, bias: Tensor) -> Tensor:
    return td.Normal(0.0, 2.0).log_prob(w).sum() + td.Normal(X @ w + bias, 0.5).log_prob(T).sum()


def inside_a_function(network: HalfBayesian) -> Callable[..., None]:
    def model(X: Tensor, t: Tensor) -> None:
        network(X, t)

    return model


class Holder:
    def __init__(self, network: HalfBayesian) -> None:
        self.parts = {"network": [network]}

    def __call__(self, X: Tensor, t: Tensor) -> None:
        self.parts["network"][0](X, t)

    def method(self, X: Tensor, t: Tensor) -> None:
        self(X, t)


WRAPPERS: dict[str, Callable[[HalfBayesian], Callable[..., None]]] = {
    "itself": lambda network: network,
    "in a closure": inside_a_function,
    "in an object": Holder,
    "a method": lambda network: Holder(network).method,
    "in a partial": lambda network: partial(lambda m, X, t: m(X, t), network),
    "in a handler": lambda network: poutine.scale(inside_a_function(network), scale=1.0),
}


@pytest.mark.parametrize("where", list(WRAPPERS))
def test_plain_parameters_of_a_network_are_maximised(where: str) -> None:
    network = HalfBayesian()
    bias = network.linear.bias
    joint = LogJoint(WRAPPERS[where](network), (X, T))
    assert joint.latents.names == ("linear.weight",) and joint.hypers.names == ("linear.bias",)
    assert_exact(joint.initial_theta, torch.tensor([0.3]))
    theta = torch.tensor([-0.8], requires_grad=True)
    actual, expected = joint.log_joint(W, theta), half_bayesian_density(W, theta[0])
    assert_exact(actual, expected)
    assert_exact(*(torch.autograd.grad(f, theta)[0] for f in (actual, expected)))
    batch = joint.log_joint(torch.stack([W, -W]), theta)
    assert_exact(batch, torch.stack([half_bayesian_density(w, theta[0]) for w in (W, -W)]))
    assert network.linear.bias is bias and bias.tolist() == [0.3] and bias.grad is None


def test_a_network_passed_as_an_argument() -> None:
    joint = LogJoint(lambda network, X, t: network(X, t), (HalfBayesian(), X, T))
    assert_exact(joint.log_joint(W, torch.tensor([-0.8])), half_bayesian_density(W, torch.tensor(-0.8)))


def test_a_frozen_parameter_is_held() -> None:
    network = HalfBayesian()
    network.linear.bias.requires_grad_(False)
    joint = LogJoint(network, (X, T))
    assert joint.hypers.names == () and list(joint.held) == ["linear.bias"]
    assert_exact(joint.log_joint(W, joint.initial_theta), half_bayesian_density(W, torch.tensor(0.3)))
    assert not network.linear.bias.requires_grad


def test_a_tied_parameter_is_one_hyperparameter() -> None:
    class Tied(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = PyroModule[torch.nn.Linear](2, 2), PyroModule[torch.nn.Linear](2, 2)
            for layer in (self.first, self.second):
                layer.weight = PyroSample(dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
            self.second.bias = self.first.bias

        def forward(self, X: Tensor, t: Tensor) -> None:
            loc = self.second(self.first(X)).sum(-1)
            pyro.sample("t", dist.Normal(loc, 0.5).to_event(1), obs=t)

    joint = LogJoint(Tied(), (X, T))
    assert joint.hypers.names == ("first.bias",)
    u, bias = torch.randn(8), torch.tensor([0.3, -0.8])
    A, B = u[:4].reshape(2, 2), u[4:].reshape(2, 2)
    loc = ((X @ A.mT + bias) @ B.mT + bias).sum(-1)
    expected = td.Normal(0.0, 1.0).log_prob(u).sum() + td.Normal(loc, 0.5).log_prob(T).sum()
    assert_exact(joint.log_joint(u, bias), expected)


def test_hold_everything() -> None:
    joint = LogJoint(regression, (X, T), maximise=())
    assert joint.hypers.size == 0
    assert_exact(joint.split_hypers(joint.initial_theta)[0], {"alpha": torch.ones(2), "beta": torch.tensor(2.0)})
    assert_exact(joint.log_joint(W, joint.initial_theta), density(W, torch.ones(2), torch.tensor(2.0)))


def test_a_module_whose_weights_are_hidden_may_be_held() -> None:
    network = torch.nn.Linear(2, 1)

    def model(X: Tensor, t: Tensor) -> None:
        pyro.module("network", network)
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Normal(network(X).squeeze(-1) + b, 0.5), obs=t)

    joint = LogJoint(model, (X, T), maximise=())
    b = torch.tensor([0.4])
    expected = td.Normal(0.0, 1.0).log_prob(b) + td.Normal(network(X).squeeze(-1) + b, 0.5).log_prob(T).sum()
    assert_exact(joint.log_joint(b, joint.initial_theta), expected[0])
    trace = poutine.trace(poutine.condition(joint.substituted(joint.initial_theta), {"b": b[0]})).get_trace(X, T)
    assert_exact(trace.log_prob_sum(), expected[0])


# --- latent sites as hyperparameters ---


def hierarchical(X: Tensor, t: Tensor) -> None:
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    beta = pyro.param("beta", torch.tensor(2.0), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, scale).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, beta.rsqrt()), obs=t)


@pytest.mark.parametrize("choice", [{"maximise": ["scale"]}, {"integrate": ["w"]}, {"maximise": ["scale", "beta"]}])
def test_a_latent_site_can_be_maximised(choice: dict[str, Any]) -> None:
    joint = LogJoint(hierarchical, (X, T), **choice)
    assert joint.latents.names == ("w",) and joint.maximised_sites == ("scale",)
    assert joint.hypers.names == ("beta", "scale")
    theta = torch.tensor([BETA.log(), 0.2, -0.7], requires_grad=True)
    beta, scale = theta[0].exp(), theta[1:].exp()
    assert_exact(joint.log_joint(W, theta), density(W, scale.pow(-2), beta))
    prior, expected = joint.log_hyperprior(theta), td.LogNormal(0.0, 1.0).log_prob(scale).sum()
    assert_exact(prior, expected)
    assert_exact(*(torch.autograd.grad(f, theta)[0] for f in (prior, expected)))
    params, sites = joint.split_hypers(theta)
    assert_exact(params, {"beta": beta})
    assert_exact(sites, {"scale": scale})


def test_without_maximised_sites_there_is_no_hyperprior() -> None:
    joint = LogJoint(regression, (X, T))
    assert_exact(joint.log_hyperprior(joint.initial_theta), torch.tensor(0.0))


# --- constraints ---


def shaped(t: Tensor, constraint: Any, start: Tensor) -> None:
    value = pyro.param("value", start, constraint=constraint)
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(t)):
        pyro.sample("t", dist.Normal(w + value.sin().sum(), 1.0), obs=t)


CONSTRAINED: dict[str, tuple[Any, Tensor]] = {
    "real": (constraints.real, torch.tensor([-1.0, 2.0])),
    "interval": (constraints.interval(-1.0, 3.0), torch.tensor(2.5)),
    "simplex": (constraints.simplex, torch.tensor([0.2, 0.3, 0.5])),
    "lower Cholesky": (constraints.lower_cholesky, torch.tensor([[1.0, 0.0], [-0.4, 2.0]])),
    "ordered": (dist.constraints.ordered_vector, torch.tensor([-1.0, 0.5, 2.0])),
}


@pytest.mark.parametrize("name", list(CONSTRAINED))
def test_params_start_where_they_are_declared(name: str) -> None:
    constraint, start = CONSTRAINED[name]
    joint = LogJoint(shaped, (T, constraint, start))
    w = torch.tensor([0.3])
    expected = td.Normal(0.0, 1.0).log_prob(w[0]) + td.Normal(w + start.sin().sum(), 1.0).log_prob(T).sum()
    assert_exact(joint.log_joint(w, joint.initial_theta), expected)
    assert_exact(joint.split_hypers(joint.initial_theta)[0]["value"], start)
    moved = joint.split_hypers(joint.initial_theta + 0.3)[0]["value"]
    assert bool(constraint.check(moved).all())


def test_a_simplex_has_no_direction_without_effect() -> None:
    constraint, start = CONSTRAINED["simplex"]
    assert LogJoint(shaped, (T, constraint, start)).hypers.size == 2
