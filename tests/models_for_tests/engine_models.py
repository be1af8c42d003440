"""Ordinary Pyro models on small synthetic data, shared by the engine's tests."""

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints


def positive(name: str, value: float | Tensor) -> Tensor:
    return pyro.param(name, lambda: torch.as_tensor(value), constraint=constraints.positive)


def logistic_ard(X: Tensor, t: Tensor | None = None) -> Tensor:
    alpha = positive("alpha", torch.ones(X.shape[-1]))
    w = pyro.sample("w", dist.Normal(0.0, alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def logistic_sd(X: Tensor, t: Tensor | None = None) -> Tensor:
    """The same by prior standard deviations."""
    sd = positive("sd", torch.ones(X.shape[-1]))
    w = pyro.sample("w", dist.Normal(0.0, sd).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def logistic_noncentred(X: Tensor, t: Tensor | None = None) -> Tensor:
    """One precision, which sits in the likelihood."""
    alpha = positive("alpha", 1.0)
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Bernoulli(logits=X @ (z * alpha.rsqrt())), obs=t)


def logistic_shared(X: Tensor, t: Tensor | None = None) -> Tensor:
    alpha = positive("alpha", 1.0)
    w = pyro.sample("w", dist.Normal(0.0, alpha.rsqrt()).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def linear(X: Tensor, y: Tensor | None = None) -> Tensor:
    alpha, beta = positive("alpha", 1.0), positive("beta", 1.0)
    w = pyro.sample("w", dist.Normal(0.0, alpha.rsqrt()).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("y", dist.Normal(X @ w, beta.rsqrt()), obs=y)


def network(X: Tensor, y: Tensor | None = None) -> Tensor:
    """Two tanh units; a group of weights for each layer and a noise precision."""
    alpha, beta = positive("alpha", torch.tensor([0.5, 1.0])), positive("beta", 20.0)
    V = pyro.sample("V", dist.Normal(0.0, alpha[0].rsqrt()).expand([X.shape[-1], 2]).to_event(2))
    v = pyro.sample("v", dist.Normal(0.0, alpha[1].rsqrt()).expand([2]).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("y", dist.Normal(torch.tanh(X @ V) @ v, beta.rsqrt()), obs=y)


def hierarchical(X: Tensor, t: Tensor | None = None) -> Tensor:
    """The prior scale is a latent site itself."""
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    w = pyro.sample("w", dist.Normal(0.0, tau).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def mixture(x: Tensor) -> None:
    """Enumerated; mixing, prior precision of the centres and noise precisions are hyperparameters."""
    mixing = pyro.param("mixing", lambda: torch.tensor([0.4, 0.6]), constraint=constraints.simplex)
    alpha, beta = positive("alpha", 0.1), positive("beta", torch.tensor([1.0, 2.0]))
    with pyro.plate("components", 2):
        centre = pyro.sample("centre", dist.Normal(0.0, alpha.rsqrt()))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(mixing))
        pyro.sample("x", dist.Normal(centre[z], beta[z].rsqrt()), obs=x)


def classes(num: int = 60, num_inputs: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(num, num_inputs, generator=generator)
    w = torch.tensor([2.0, -1.5, 1.0, 0.8]).repeat(1 + num_inputs // 4)[:num_inputs]
    return X, torch.bernoulli(torch.sigmoid(X @ w), generator=generator)


def targets(num: int = 60, num_inputs: int = 4, noise: float = 0.3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(num, num_inputs, generator=generator)
    w = torch.tensor([2.0, -1.5, 0.7, 1.0]).repeat(1 + num_inputs // 4)[:num_inputs]
    return X, X @ w + noise * torch.randn(num, generator=generator)


def curve(num: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(-2.0, 2.0, num)
    y = torch.tanh(1.5 * x - 0.5) - 0.6 * torch.tanh(x + 1.0) + 0.15 * torch.randn(num, generator=generator)
    return torch.stack([x, torch.ones(num)], -1), y


def two_clusters(num: int = 50, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.cat(
        [
            torch.randn(num // 2, generator=generator) - 3.0,
            0.7 * torch.randn(num // 2, generator=generator) + 2.0,
        ]
    )
