"""Small models with a weight vector, as users write them."""

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor


def weights(num: int, like: Tensor) -> Tensor:
    return pyro.sample("w", dist.Normal(like.new_zeros(num), 1.0).to_event(1))


def logistic(Phi: Tensor, t: Tensor | None = None) -> Tensor:
    w = weights(Phi.shape[1], Phi)
    with pyro.plate("data", len(Phi)):
        return pyro.sample("t", dist.Bernoulli(logits=Phi @ w), obs=t)


def probit(Phi: Tensor, t: Tensor | None = None) -> Tensor:
    w = weights(Phi.shape[1], Phi)
    with pyro.plate("data", len(Phi)):
        return pyro.sample("t", dist.Bernoulli(probs=torch.special.ndtr(Phi @ w)), obs=t)


def poisson(Phi: Tensor, t: Tensor | None = None) -> Tensor:
    w = weights(Phi.shape[1], Phi)
    with pyro.plate("data", len(Phi)):
        return pyro.sample("t", dist.Poisson((Phi @ w).exp()), obs=t)


def negative_binomial(Phi: Tensor, t: Tensor | None = None) -> Tensor:
    w = weights(Phi.shape[1], Phi)
    with pyro.plate("data", len(Phi)):
        return pyro.sample("t", dist.NegativeBinomial(Phi.new_tensor(5.0), logits=Phi @ w), obs=t)


def softmax(Phi: Tensor, t: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.Normal(Phi.new_zeros(3, Phi.shape[1]), 1.0).to_event(2))
    with pyro.plate("data", len(Phi)):
        return pyro.sample("t", dist.Categorical(logits=Phi @ w.T), obs=t)


def gaussian(Phi: Tensor, t: Tensor | None = None) -> Tensor:
    w = weights(Phi.shape[1], Phi)
    with pyro.plate("data", len(Phi)):
        return pyro.sample("t", dist.Normal(Phi @ w, 0.5), obs=t)


def student(Phi: Tensor, t: Tensor | None = None) -> Tensor:
    w = weights(Phi.shape[1], Phi)
    with pyro.plate("data", len(Phi)):
        return pyro.sample("t", dist.StudentT(2.0, Phi @ w, 0.3), obs=t)


def with_offset(Phi: Tensor, t: Tensor | None = None) -> Tensor:
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    w = weights(Phi.shape[1], Phi)
    with pyro.plate("data", len(Phi)):
        return pyro.sample("t", dist.Bernoulli(logits=Phi @ w + b), obs=t)


def network(X: Tensor, t: Tensor | None = None) -> Tensor:
    w = weights(4 * X.shape[1] + 4, X)
    hidden = torch.tanh(X @ w[:-4].reshape(-1, 4))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Bernoulli(logits=hidden @ w[-4:]), obs=t)


def kernel(X: Tensor, centres: Tensor, variance: float) -> Tensor:
    """``exp(-d^2 / variance)`` and a bias."""
    squares = torch.cdist(X, centres, compute_mode="donot_use_mm_for_euclid_dist").square()
    return torch.cat([(-squares / variance).exp(), torch.ones(len(X), 1)], 1)


def labels(Phi: Tensor, w: Tensor, seed: int = 0) -> Tensor:
    """Bernoulli labels in log odds."""
    uniform = torch.rand(len(Phi), generator=torch.Generator().manual_seed(seed))
    return (uniform < torch.sigmoid(Phi @ w)).to(Phi)


def problem(N: int = 120, M: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    Phi = torch.randn(N, M, generator=generator)
    w = torch.tensor([2.0, -1.0, 0.5] + [0.0] * (M - 3))
    return Phi, labels(Phi, w, seed)
