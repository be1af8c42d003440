"""Pyro models written in many ways, all with linear predictors, shared by the tests of what is recognised."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints


class Case(NamedTuple):
    """A model, its data, and by hand: the power of each unconstrained hyperparameter, 0 for those outside groups."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    power: list[float]
    gaussian: bool = True  # a Gaussian prior that is free of the latents


def positive(name: str, value: Any) -> Tensor:
    return pyro.param(name, lambda: torch.as_tensor(value), constraint=constraints.positive)


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(0)


X = torch.randn(30, 3, generator=draws()).double()
noise = torch.randn(30, generator=torch.Generator().manual_seed(1)).double()
real = X @ torch.tensor([1.0, -0.5, 0.3]).double() + 0.5 * noise
binary = (real > 0).double()
count = (0.3 * real).exp().round()
duration = (0.4 * real).exp() + 0.01
label = (real > 0).long() + (real > 0.7).long()
group = torch.arange(30) % 2


def logistic_by_logits(X, t):
    alpha = positive("alpha", [1.0, 2.0, 0.5])
    w = pyro.sample("w", dist.Normal(0.0, alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def logistic_by_probs(X, t):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), positive("alpha", 2.0).rsqrt()).to_event(1))
    pyro.sample("t", dist.Bernoulli(probs=torch.sigmoid(X @ w + 0.1)).to_event(1), obs=t)


def probit(X, t):
    sd = positive("sd", 0.8)
    w = pyro.sample("w", dist.Normal(torch.zeros(3), sd).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(probs=torch.special.ndtr(X @ w)), obs=t)


def softmax_rows(X, t):
    """Weights (C, M), and a bias site with its own precision."""
    w = pyro.sample("w", dist.Normal(0.0, positive("alpha", 1.5).rsqrt()).expand([3, 3]).to_event(2))
    b = pyro.sample("b", dist.Normal(torch.zeros(3), positive("alpha_bias", 0.5).rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Categorical(logits=X @ w.T + b), obs=t)


def softmax_columns(X, t):
    """Weights (M, C), a precision for each row, probabilities instead of logits."""
    alpha = positive("alpha", [1.0, 2.0, 3.0])
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 3), alpha.rsqrt().unsqueeze(-1)).to_event(2))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Categorical(probs=(X @ w).softmax(-1)), obs=t)


def poisson(X, t):
    with pyro.plate("weights", 3):
        w = pyro.sample("w", dist.Normal(0.0, positive("variance", 0.7).sqrt()))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Poisson((X @ w).exp()), obs=t)


def gamma_regression(X, t):
    """Shape held by a param, rate = shape / mean."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3), positive("alpha", 2.0).rsqrt()).to_event(1))
    shape = positive("shape", 3.0)
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Gamma(shape, shape * (-(X @ w)).exp()), obs=t)


def exponential(X, t):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), positive("alpha", 2.0).rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Exponential(torch.exp(0.3 - X @ w)), obs=t)


def negative_binomial(X, t):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), positive("alpha", 2.0).rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.NegativeBinomial(positive("r", 4.0), logits=X @ w), obs=t)


def binomial(X, t):
    w = pyro.sample("w", dist.Normal(torch.ones(3), positive("alpha", 2.0).rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Binomial(total_count=9, logits=X @ w), obs=t)


def linear_event(X, t):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), positive("alpha", 0.5).rsqrt()).to_event(1))
    pyro.sample("t", dist.Normal(X @ w, positive("beta", 4.0).rsqrt()).to_event(1), obs=t)


def linear_plate_by_sd(X, t):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), positive("sd_w", 1.5)).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, positive("sd", 0.6)), obs=t)


def linear_precision_matrix(X, t):
    prior = dist.MultivariateNormal(torch.zeros(3), precision_matrix=positive("alpha", 0.5) * torch.eye(3))
    w = pyro.sample("w", prior)
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, positive("variance", 0.3).sqrt()), obs=t)


def linear_scale_tril(X, t):
    sd = positive("sd", [0.5, 1.0, 2.0])
    w = pyro.sample("w", dist.MultivariateNormal(torch.ones(3), scale_tril=sd.diag()))
    pyro.sample("t", dist.MultivariateNormal(X @ w, 0.5 * torch.eye(len(X))), obs=t)


def student_noise(X, t):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), positive("alpha", 0.5).rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.StudentT(4.0, X @ w, positive("scale", 0.5)), obs=t)


def beta_per_group(X, t):
    """Noise precisions of two groups of data, one of them by an intercept that is a param."""
    beta = positive("beta", [2.0, 5.0])
    w = pyro.sample("w", dist.Normal(torch.zeros(3), positive("alpha", 0.5).rsqrt()).to_event(1))
    b = pyro.param("intercept", lambda: torch.tensor(0.2))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w + b, beta[group].rsqrt()), obs=t)


def assembled_in_place(X, t):
    alpha = positive("alpha", [0.5, 2.0])
    scale = torch.empty(3)
    scale[:2] = alpha[0].rsqrt()
    scale[2] = alpha[1].rsqrt()
    w = pyro.sample("w", dist.Normal(torch.zeros(3), scale).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def several_sites(X, t):
    """Sites in other than alphabetical order, a loop, each with its own precision."""
    eta = pyro.sample("bias", dist.Normal(0.0, positive("alpha_b", 0.3).rsqrt()))
    for i, name in enumerate("cab"):
        eta = eta + X[:, i] * pyro.sample(name, dist.Normal(0.1 * i, positive(f"alpha_{name}x", 1.0 + i).rsqrt()))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=eta), obs=t)


class Regression(PyroModule):
    """Weights by PyroSample, noise by PyroParam."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = PyroParam(torch.tensor(0.5), constraint=constraints.positive)
        self.beta = PyroParam(torch.tensor(3.0), constraint=constraints.positive)
        self.w = PyroSample(lambda m: dist.Normal(torch.zeros(3), m.alpha.rsqrt()).to_event(1))

    def forward(self, X, t):
        eta = X @ self.w
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Normal(eta, self.beta.rsqrt()), obs=t)


def nested_plates(X, t):
    """A matrix of weights in two plates, a response per column."""
    alpha = positive("alpha", [0.5, 2.0])
    with pyro.plate("columns", 2, dim=-1), pyro.plate("rows", 3, dim=-2):
        w = pyro.sample("w", dist.Normal(0.0, alpha.rsqrt()))
    with pyro.plate("outputs", 2, dim=-1), pyro.plate("data", len(X), dim=-2):
        pyro.sample("t", dist.Normal(X @ w, positive("beta", [2.0, 3.0]).rsqrt()), obs=t)


def real_log_alpha(X, t):
    log_alpha = pyro.param("log_alpha", lambda: torch.zeros(3))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), (-0.5 * log_alpha).exp()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def hidden_kernels(x, t):
    """A mixture of two linear kernels, enumerated; each its precision and noise, mixing by a simplex param."""
    mixing = pyro.param("mixing", lambda: torch.tensor([0.4, 0.6]), constraint=constraints.simplex)
    alpha, beta = positive("alpha", [1.0, 2.0]), positive("beta", [3.0, 5.0])
    w = pyro.sample(
        "w", dist.Normal(torch.tensor([[-1.0], [1.0]]), alpha.rsqrt().unsqueeze(-1)).expand([2, 3]).to_event(2)
    )
    with pyro.plate("data", len(x)):
        k = pyro.sample("k", dist.Categorical(mixing))
        pyro.sample("t", dist.Normal((w[k] * x).sum(-1), beta[k].rsqrt()), obs=t)


def mixture_of_kernels(x, t):
    """The same by MixtureSameFamily."""
    mixing = pyro.param("mixing", lambda: torch.tensor([0.4, 0.6]), constraint=constraints.simplex)
    alpha, beta = positive("alpha", [1.0, 2.0]), positive("beta", [3.0, 5.0])
    w = pyro.sample(
        "w", dist.Normal(torch.tensor([[-1.0], [1.0]]), alpha.rsqrt().unsqueeze(-1)).expand([2, 3]).to_event(2)
    )
    with pyro.plate("data", len(x)):
        kernels = dist.Normal(x @ w.T, beta.rsqrt())
        pyro.sample("t", dist.MixtureSameFamily(dist.Categorical(mixing), kernels), obs=t)


def hidden_vectors(x, t):
    """Two responses per datum, a matrix of weights per component."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2, 3, 2), positive("alpha", 1.0).rsqrt()).to_event(3))
    with pyro.plate("data", len(x)):
        k = pyro.sample("k", dist.Categorical(logits=torch.tensor([0.3, -0.3])))
        pyro.sample("t", dist.Normal(torch.einsum("nm,...nmd->...nd", x, w[k]), 0.7).to_event(1), obs=t)


def hidden_centres(t):
    """A Gaussian mixture: the plate repeats the predictor."""
    with pyro.plate("components", 3):
        mu = pyro.sample("mu", dist.Normal(torch.tensor([-2.0, 0.0, 2.0]), positive("alpha", 0.5).rsqrt()))
    with pyro.plate("data", len(t)):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
        pyro.sample("t", dist.Normal(mu[k], positive("sd", 0.8)), obs=t)


def shared_scales(t):
    """One centre, two enumerated noise levels: the predictor has no component dim of its own."""
    mu = pyro.sample("mu", dist.Normal(0.3, positive("alpha", 0.5).rsqrt()))
    with pyro.plate("data", len(t)):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.2, 0.8])))
        pyro.sample("t", dist.Normal(mu, torch.tensor([3.0, 0.5])[k]), obs=t)


def hierarchical(X, t):
    """A half-Cauchy scale in the likelihood's dispersion-free part: the prior is left to autograd."""
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), tau * positive("alpha", [1.0, 2.0, 3.0]).rsqrt()).to_event(1))
    v = pyro.sample("v", dist.Normal(0.0, positive("alpha_v", 2.0).rsqrt()))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w + v), obs=t)


def masked(X, t):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), positive("alpha", 0.5).rsqrt()).to_event(1))
    with pyro.plate("data", len(X)), poutine.mask(mask=group == 0):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def scaled(X, t):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), positive("alpha", 0.5).rsqrt()).to_event(1))
    with pyro.plate("data", len(X)), poutine.scale(scale=2.5):
        pyro.sample("t", dist.Normal(X @ w, positive("beta", 3.0).rsqrt()), obs=t)


def two_views(X, t, s):
    """Two observed sites share the weights; a third does not see them."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3), positive("alpha", 0.5).rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("s", dist.Poisson((0.5 * X @ w).exp()), obs=s)
        pyro.sample("t", dist.Normal(X @ w, positive("beta", 3.0).rsqrt()), obs=t)
        pyro.sample("x", dist.Normal(0.0, positive("spread", 1.2)), obs=X[:, 0])


def repeated(X, t):
    """One intercept for all data, seen through expand; data with a leading plate of replicates."""
    a = pyro.sample("a", dist.Normal(0.0, positive("alpha", 0.5).rsqrt()))
    with pyro.plate("replicates", 2, dim=-2), pyro.plate("data", len(t), dim=-1):
        pyro.sample("t", dist.Normal(a, positive("beta", [[3.0], [4.0]]).rsqrt()), obs=torch.stack([t, t + 0.1]))


def masked_mixture(x, t):
    """Mask and scale around both the component and the datum."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2, 3), positive("alpha", 1.0).rsqrt()).to_event(2))
    with pyro.plate("data", len(x)), poutine.mask(mask=group == 0), poutine.scale(scale=1.5):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.3, 0.7])))
        pyro.sample("t", dist.Normal((w[k] * x).sum(-1), 0.5), obs=t)


CASES = {
    case.model.__name__ if not isinstance(case.model, PyroModule) else "pyro_module": case
    for case in (
        Case(logistic_by_logits, (X, binary), [1, 1, 1]),
        Case(logistic_by_probs, (X, binary), [1]),
        Case(probit, (X, binary), [-2]),
        Case(softmax_rows, (X, label), [1, 1]),
        Case(softmax_columns, (X, label), [1, 1, 1]),
        Case(poisson, (X, count), [-1]),
        Case(gamma_regression, (X, duration), [1, 0]),
        Case(exponential, (X, duration), [1]),
        Case(negative_binomial, (X, count), [1, 0]),
        Case(binomial, (X, count.clamp(max=9)), [1]),
        Case(linear_event, (X, real), [1, 1]),
        Case(linear_plate_by_sd, (X, real), [-2, -2]),
        Case(linear_precision_matrix, (X, real), [1, -1]),
        Case(linear_scale_tril, (X, real), [-2, -2, -2]),
        Case(student_noise, (X, real), [1, 0]),
        Case(beta_per_group, (X, real), [1, 1, 1, 0]),
        Case(assembled_in_place, (X, binary), [1, 1]),
        Case(several_sites, (X, binary), [1, 1, 1, 1]),
        Case(Regression(), (X, real), [1, 1]),
        Case(nested_plates, (X, torch.stack([real, binary], -1)), [1, 1, 1, 1]),
        Case(real_log_alpha, (X, binary), [1, 1, 1]),
        Case(hidden_kernels, (X, real), [1, 1, 0, 0, 0]),
        Case(mixture_of_kernels, (X, real), [1, 1, 0, 0, 0]),
        Case(hidden_vectors, (X, torch.stack([real, binary], -1)), [1]),
        Case(hidden_centres, (real,), [1, 0]),
        Case(shared_scales, (real,), [1]),
        Case(hierarchical, (X, binary), [0, 0, 0, 1], gaussian=False),
        Case(masked, (X, binary), [1]),
        Case(scaled, (X, real), [1, 0]),
        Case(two_views, (X, real, count), [1, 1, -2]),
        Case(repeated, (X, real), [1, 1, 1]),
        Case(masked_mixture, (X, real), [1]),
    )
}
