"""The log joint is minus the potential that NUTS uses: same space, same order, same constants."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.mcmc.util import initialize_model
from pyro.nn import PyroModule, PyroSample
from pyro.ops.indexing import Vindex
from torch import Tensor

from pyro_evidence.program.log_joint import LogJoint
from tests.oracles.density import at

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)

Case = tuple[Callable[..., Any], tuple[Any, ...]]

torch.manual_seed(1)
X = torch.randn(12, 3)
LABELS = (torch.rand(12) < 0.5).double()
SERIES = torch.tensor([0.1, 0.3, 2.0, 2.4, 0.2])


def logistic(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    b = pyro.sample("b", dist.StudentT(3.0, 0.0, 1.0))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w + b), obs=y)


def eight_schools(sigma: Tensor, y: Tensor) -> None:
    eta = pyro.sample("eta", dist.Normal(torch.zeros(8), torch.ones(8)))
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    tau = pyro.sample("tau", dist.HalfCauchy(25.0))
    pyro.sample("y", dist.Normal(mu + tau * eta, sigma), obs=y)


def correlations(x: Tensor) -> None:
    theta = pyro.sample("theta", dist.HalfCauchy(torch.ones(3)).to_event(1))
    L_omega = pyro.sample("L_omega", dist.LKJCholesky(3, 1.0))
    L = theta.diag_embed() @ L_omega
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.MultivariateNormal(torch.zeros(3), scale_tril=L), obs=x)


def coins(y: Tensor) -> None:
    m = pyro.sample("m", dist.Uniform(0.0, 1.0))
    kappa = pyro.sample("kappa", dist.Pareto(1.0, 1.5))
    with pyro.plate("players", len(y)):
        phi = pyro.sample("phi", dist.Beta(m * kappa, (1.0 - m) * kappa))
        pyro.sample("y", dist.Binomial(20, phi), obs=y)


def counts(X: Tensor, y: Tensor) -> None:
    coef = pyro.sample("coef", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    concentration = pyro.sample("concentration", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(X)):
        rate = concentration / (X @ coef).exp()
        pyro.sample("y", dist.GammaPoisson(concentration, rate), obs=y)


class Network(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = PyroModule[torch.nn.Linear](3, 4)
        self.hidden.weight = PyroSample(dist.Normal(0.0, 1.0).expand([4, 3]).to_event(2))
        self.hidden.bias = PyroSample(dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        self.out = PyroSample(dist.Normal(0.0, 1.0).expand([4]).to_event(1))

    def forward(self, X: Tensor, y: Tensor) -> None:
        eta = self.hidden(X).tanh() @ self.out
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def gaussian_process(x: Tensor, t: Tensor) -> None:
    length = pyro.sample("length", dist.LogNormal(0.0, 0.5))
    K = 1.0 * (-0.5 * ((x[:, None] - x) / length).square()).exp()
    K.view(-1)[:: len(x) + 1] += 0.1
    pyro.sample("t", dist.MultivariateNormal(torch.zeros(len(x)), K), obs=t)


def sequential(y: Tensor) -> None:
    loc = pyro.sample("loc", dist.Cauchy(0.0, 1.0))
    for i in pyro.plate("data", len(y)):
        pyro.sample(f"y_{i}", dist.Normal(loc, 0.5), obs=y[i])


def mixture(x: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(0.5 * torch.ones(3)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 2.0))
    with pyro.plate("components", 3):
        locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(x)):
        assignment = pyro.sample("assignment", dist.Categorical(weights))
        pyro.sample("x", dist.Normal(locs[assignment], scale), obs=x)


def hidden_markov(y: Tensor) -> None:
    probs_x = pyro.sample("probs_x", dist.Dirichlet(0.9 * torch.eye(2) + 0.1).to_event(1))
    locs = pyro.sample("locs", dist.Normal(torch.tensor([0.0, 2.0]), 1.0).to_event(1))
    x: Any = 0
    for t in pyro.markov(range(len(y))):
        x = pyro.sample(f"x_{t}", dist.Categorical(probs_x[x]))
        pyro.sample(f"y_{t}", dist.Normal(locs[x], 0.5), obs=y[t])


def a_depends_on_b(a: Tensor, c: Tensor) -> None:
    p_B = pyro.sample("p_B", dist.Beta(torch.ones(2), torch.ones(2)).to_event(1))
    p_C = pyro.sample("p_C", dist.Beta(torch.ones(2, 2), torch.ones(2, 2)).to_event(2))
    with pyro.plate("data", len(a)):
        B = pyro.sample("B", dist.Bernoulli(Vindex(p_B)[a.long()]))
        pyro.sample("C", dist.Bernoulli(Vindex(p_C)[a.long(), B.long()]), obs=c)


CASES: dict[str, Case] = {
    "logistic": (logistic, (X, LABELS)),
    "eight schools": (eight_schools, (torch.linspace(9.0, 18.0, 8), torch.linspace(-3.0, 28.0, 8))),
    "LKJ": (correlations, (X,)),
    "baseball": (coins, (torch.tensor([4.0, 10.0, 7.0]),)),
    "gamma Poisson": (counts, (X, torch.arange(12.0))),
    "network": (Network(), (X, LABELS)),
    "gaussian process": (gaussian_process, (torch.linspace(0.0, 3.0, 5), SERIES)),
    "sequential plate": (sequential, (SERIES,)),
    "enumerated mixture": (mixture, (SERIES,)),
    "pyro.markov": (hidden_markov, (SERIES,)),
    "enumerated with Vindex": (a_depends_on_b, (LABELS, LABELS.flip(0))),
}


@pytest.mark.parametrize("name", list(CASES))
def test_minus_log_joint_is_the_potential(name: str) -> None:
    model, args = CASES[name]
    joint = LogJoint(model, args)
    start, potential, transforms, _ = initialize_model(model, args)
    assert joint.latents.names == tuple(sorted(start))
    for seed in range(3):
        u = at(joint, seed)
        parts = joint.latents.unconstrained(u)
        assert {n: v.shape for n, v in parts.items()} == {n: v.shape for n, v in start.items()}
        with pyro.validation_enabled(False):
            assert_exact(joint.log_joint(u, joint.initial_theta), -potential(parts))
        for site, value in joint.latents.constrained(u).items():
            assert_exact(value, transforms[site].inv(parts[site]))


@pytest.mark.parametrize("name", list(CASES))
def test_gradient_is_that_of_the_potential(name: str) -> None:
    model, args = CASES[name]
    joint = LogJoint(model, args)
    _, potential, _, _ = initialize_model(model, args)
    u = at(joint, 7).requires_grad_()
    with pyro.validation_enabled(False):
        expected = torch.autograd.grad(-potential(joint.latents.unconstrained(u)), u)[0]
    assert_exact(torch.autograd.grad(joint.log_joint(u, joint.initial_theta), u)[0], expected)


def test_user_configured_enumeration_makes_no_difference() -> None:
    plain = LogJoint(mixture, (SERIES,))
    u = at(plain)
    for settings in ({}, {"default": "sequential"}, {"expand": True}):
        configured = LogJoint(pyro.infer.config_enumerate(mixture, **settings), (SERIES,))
        assert_exact(configured.log_joint(u, plain.initial_theta), plain.log_joint(u, plain.initial_theta))
