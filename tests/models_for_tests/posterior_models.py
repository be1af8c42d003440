"""Ordinary Pyro models, and their posteriors on small data, shared by the tests of what a fit returns."""

import copy
from functools import cache, partial

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import ImportancePosterior, LaplaceEvidence, LaplacePosterior, Start

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
assert_approx = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-8)


def positive(name: str, value: Tensor) -> Tensor:
    return pyro.param(name, value, constraint=constraints.positive)


def linear(X: Tensor, t: Tensor | None = None) -> Tensor:
    alpha, beta = positive("alpha", X.new_tensor(0.5)), positive("beta", X.new_tensor(4.0))
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Normal(X @ w, beta.rsqrt()), obs=t)


def other_linear(X: Tensor, t: Tensor | None = None) -> Tensor:
    """The same sites and the same log joint at the mode's mirror image, another density."""
    alpha, beta = positive("alpha", X.new_tensor(0.5)), positive("beta", X.new_tensor(4.0))
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Normal(-X @ w, beta.rsqrt()), obs=t)


def ard(X: Tensor, t: Tensor | None = None) -> Tensor:
    alpha = positive("alpha", X.new_ones(X.shape[-1]))
    w = pyro.sample("w", dist.Normal(X.new_ones(X.shape[-1]), alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Normal(X @ w, 0.5), obs=t)


def logistic(X: Tensor, t: Tensor | None = None) -> Tensor:
    alpha = positive("alpha", X.new_tensor(1.0))
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def many_supports(x: Tensor, votes: Tensor | None = None) -> None:
    """Simplex, positive, interval, Cholesky factor of a correlation matrix, a plate and two nested ones."""
    groups, items = pyro.plate("groups", 2, dim=-2), pyro.plate("items", 3, dim=-1)
    probs = pyro.sample("probs", dist.Dirichlet(x.new_full((4,), 2.0)))
    scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 0.5))
    chance = pyro.sample("chance", dist.Beta(x.new_tensor(2.0), x.new_tensor(3.0)))
    tril = pyro.sample("corr", dist.LKJCholesky(3, x.new_tensor(2.0)))
    with items:
        a = pyro.sample("a", dist.Normal(x.new_zeros(()), 1.0))
        with groups:
            b = pyro.sample("b", dist.Normal(a, 1.0))
            pyro.sample("x", dist.Normal(b + chance, scale), obs=x)
    pyro.deterministic("twice", 2.0 * scale)
    with pyro.plate("rows", 2):
        pyro.sample("row", dist.MultivariateNormal(x.new_zeros(3), scale_tril=scale[..., None, None] * tril), obs=x)
    with pyro.plate("votes", 20):
        pyro.sample("vote", dist.Categorical(probs), obs=votes)


def mixture(x: Tensor, observed: Tensor | None = None) -> Tensor:
    """Two components, ordered by their priors, the assignment enumerated."""
    loc = pyro.sample("loc", dist.Normal(x.new_tensor([-2.0, 2.0]), 0.5).to_event(1))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(x.new_tensor([0.3, 0.7])), infer={"enumerate": "parallel"})
        return pyro.sample("x", dist.Normal(loc[z], 0.5), obs=x if observed is None else observed)


def two_sites(x: Tensor, first: Tensor | None = None, second: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("first", dist.Normal(w * x, 1.0), obs=first)
        pyro.sample("second", dist.Poisson((w + x).exp()), obs=second)


def precision_prior(X: Tensor, t: Tensor | None = None) -> Tensor:
    """A latent precision, to be maximised or integrated."""
    alpha = pyro.sample("alpha", dist.Gamma(X.new_tensor(2.0), 1.0))
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Normal(X @ w, 0.5), obs=t)


def funnel(x: Tensor) -> None:
    """A half-Cauchy scale of effects that the data hardly see: nothing like a Gaussian."""
    scale = pyro.sample("scale", dist.HalfCauchy(x.new_tensor(1.0)))
    with pyro.plate("effects", len(x)):
        effect = pyro.sample("effect", dist.Normal(x.new_zeros(()), 1.0))
        pyro.sample("x", dist.Normal(scale * effect, 1.0), obs=x)


class Module(PyroModule):
    """Dotted names: a PyroSample inside a submodule, two PyroParams and an ordinary parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = PyroModule[torch.nn.Linear](2, 1)
        self.layer.weight = PyroSample(lambda self: dist.Normal(torch.zeros(1, 2), self.alpha.rsqrt()).to_event(2))
        self.layer.alpha = PyroParam(torch.tensor(1.0), constraint=constraints.positive)
        self.scale = PyroParam(torch.tensor(1.0), constraint=constraints.positive)

    def forward(self, X: Tensor, t: Tensor | None = None) -> Tensor:
        loc = self.layer(X).squeeze(-1)
        with pyro.plate("data", len(X)):
            return pyro.sample("t", dist.Normal(loc, self.scale), obs=t)


def inputs(num: int = 30, seed: int = 0) -> Tensor:
    return torch.randn(num, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def regression_data(num: int = 30) -> tuple[Tensor, Tensor]:
    X = inputs(num)
    return X, X @ X.new_tensor([1.5, -1.0]) + 0.5 * inputs(num, seed=1)[:, 0]


def class_data(num: int = 40) -> tuple[Tensor, Tensor]:
    X = inputs(num)
    chance = torch.rand(num, generator=torch.Generator().manual_seed(1), dtype=X.dtype)
    return X, (chance < torch.sigmoid(X @ X.new_tensor([1.5, -1.0]))).to(X.dtype)


def supports_data() -> tuple[Tensor, Tensor]:
    x = torch.tensor([[0.3, -0.2, 1.1], [0.8, 0.1, -0.6]], dtype=torch.float64)
    return x, torch.tensor([0, 1, 2, 3]).repeat_interleave(torch.tensor([3, 9, 2, 6]))


def mixture_data() -> tuple[Tensor]:
    return (torch.tensor([-2.3, -1.8, -2.1, 1.5, 2.2, 1.9, 2.4, 2.0, 1.2], dtype=torch.float64),)


def fit(engine: LaplaceEvidence, *data: Tensor) -> LaplacePosterior:
    """The same whatever the calling test has in the store."""
    with pyro.get_param_store().scope():
        return engine.run(*data)


@cache
def fitted_linear() -> LaplacePosterior:
    """Hyperparameters held at 0.5 and 4, so that everything is a closed form."""
    return fit(LaplaceEvidence(linear, maximise=()), *regression_data())


@cache
def fitted_logistic() -> LaplacePosterior:
    return fit(LaplaceEvidence(logistic), *class_data())


def engine_of_supports() -> LaplaceEvidence:
    """All latents inside; the integral around the mode, which takes most of the time, is for others to test."""
    return LaplaceEvidence(many_supports, marginalise=(), start=Start(tour=0))


@cache
def fitted_supports() -> LaplacePosterior:
    return fit(engine_of_supports(), *supports_data())


def unskewed(posterior: LaplacePosterior) -> LaplacePosterior:
    """A copy whose draws are of the Gaussian about the mean."""
    found = copy.copy(posterior.at_mode(0) if isinstance(posterior, ImportancePosterior) else posterior)
    vars(found)["_skewed"] = None
    return found


@cache
def fitted_mixture() -> LaplacePosterior:
    return fit(LaplaceEvidence(mixture, start=Start(restarts=4)), *mixture_data())


def linear_posterior(X: Tensor, t: Tensor, alpha: float = 0.5, beta: float = 4.0) -> tuple[Tensor, Tensor]:
    """Mean and covariance on paper.  Bishop (2006), eq. 3.53 and 3.54."""
    covariance = torch.linalg.inv(alpha * torch.eye(X.shape[-1]) + beta * X.mT @ X)
    return beta * covariance @ X.mT @ t, covariance


def linear_log_evidence(X: Tensor, t: Tensor, alpha: float = 0.5, beta: float = 4.0) -> Tensor:
    covariance = torch.eye(len(t)) / beta + X @ X.mT / alpha
    return torch.distributions.MultivariateNormal(torch.zeros(len(t)), covariance).log_prob(t)
