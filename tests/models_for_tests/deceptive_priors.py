"""Pyro models with linear predictors whose precisions are not, or not all, groups."""

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import constraints

from tests.models_for_tests.deceptive_models import Case, bernoulli, gaussian, weights
from tests.models_for_tests.recognised_models import X, binary, count, positive, real


def used_twice(X, t):
    """In prior and likelihood; another precision is what it seems."""
    alpha = positive("alpha", 1.0)
    v = pyro.sample("v", dist.Normal(0.0, positive("alpha_v", 1.0).rsqrt()))
    pyro.sample("t", dist.Poisson((X @ weights(alpha) + v).exp() * alpha.sqrt()).to_event(1), obs=t)


def prior_and_noise(X, t):
    alpha = positive("alpha", 2.0)
    gaussian(X @ weights(alpha), t, alpha)


def overlapping(X, t):
    """A global precision times local ones; another site has its own."""
    w = weights(positive("alpha", 1.0) * positive("alpha_local", [1.0, 2.0, 3.0]))
    v = pyro.sample("v", dist.Normal(0.0, positive("alpha_v", 1.0).rsqrt()))
    bernoulli(X @ w + v, t)


def overlapping_around(X, t):
    """An innocent precision stands between the two that multiply."""
    w = weights(positive("a", 1.0) * positive("c", 1.0))
    bernoulli(X @ w + pyro.sample("v", dist.Normal(0.0, positive("b", 1.0).rsqrt())), t)


def by_float(X, t):
    """The prior knows the value of alpha, but not its derivative."""
    alpha = positive("alpha", 1.0)
    gaussian(X @ weights(float(alpha)), t, alpha)


def moving_mean(X, t):
    mean, alpha = pyro.param("mean", lambda: torch.tensor(0.3)), positive("alpha", 1.0)
    w = pyro.sample("w", dist.Normal(mean * torch.ones(3), alpha.rsqrt()).to_event(1))
    bernoulli(X @ w, t)


def pooled_mean(X, t):
    """The prior mean is another latent site."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    w = pyro.sample("w", dist.Normal(mean * torch.ones(3), positive("alpha", 1.0).rsqrt()).to_event(1))
    bernoulli(X @ w, t)


def dense_precision(X, t):
    P = torch.eye(3) + 0.3
    w = pyro.sample("w", dist.MultivariateNormal(torch.zeros(3), precision_matrix=positive("alpha", 1.0) * P))
    bernoulli(X @ w, t)


def correlated(X, t):
    """Diagonal only where the search starts."""
    rho = pyro.param("rho", lambda: torch.tensor(0.0), constraint=constraints.interval(-1.0, 1.0))
    P = positive("alpha", 1.0) * (torch.eye(3) + 0.4 * rho * (1.0 - torch.eye(3)))
    w = pyro.sample("w", dist.MultivariateNormal(torch.zeros(3), precision_matrix=P))
    bernoulli(X @ w, t)


def floored(X, t):
    bernoulli(X @ weights(positive("alpha", 1.0).clamp(min=1e-4)), t)


def capped(X, t):
    bernoulli(X @ weights(positive("alpha", 1.0).clamp(max=1e4)), t)


def shifted(X, t):
    bernoulli(X @ weights(positive("alpha", 1.0) + 0.1), t)


def bounded(X, t):
    alpha = pyro.param("alpha", lambda: torch.tensor(1.0), constraint=constraints.interval(0.0, 10.0))
    bernoulli(X @ weights(alpha), t)


def switched_by_precision(X, t):
    """A large precision also changes the likelihood, without a derivative."""
    alpha = positive("alpha", 1.0)
    gaussian(X @ weights(alpha), t, torch.where(alpha > 50.0, 5.0, 4.0))


def switched_logits(X, t):
    alpha = positive("alpha", 1.0)
    bernoulli(X @ weights(alpha) + torch.where(alpha > 50.0, 0.1, 0.0), t)


def mixed_powers(X, t):
    alpha = positive("alpha", 2.0)
    v = pyro.sample("v", dist.Normal(0.0, alpha))
    bernoulli(X @ weights(alpha) + v, t)


def masked_latent(X, t):
    with poutine.mask(mask=False):
        w = weights(positive("alpha", 1.0))
    bernoulli(X @ w, t)
    pyro.sample("s", dist.Normal(0.0, positive("alpha2", 1.0).rsqrt()), obs=torch.tensor(0.3))
    pyro.factor("alpha matters", -pyro.param("alpha"))


def tempered_prior(X, t):
    with poutine.scale(scale=2.0):
        w = weights(positive("alpha", 1.0))
    bernoulli(X @ w, t)


class HeavyNormal(dist.Normal):
    """A Normal by name only."""

    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value) - 0.01 * value.pow(4)


def false_normal(X, t):
    w = pyro.sample("w", HeavyNormal(torch.zeros(3), positive("alpha", 1.0).rsqrt()).to_event(1))
    bernoulli(X @ w, t)


def tempered_noise(X, t):
    beta = positive("beta", 1.0)
    with poutine.scale(scale=0.5):
        gaussian(X @ weights(1.0), t, beta)


def noise_of_a_mixture(t):
    mu = pyro.sample("mu", dist.Normal(torch.tensor([-1.0, 1.0]), positive("alpha", 1.0).rsqrt()).to_event(1))
    with pyro.plate("data", len(t)):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.4, 0.6])))
        pyro.sample("t", dist.Normal(mu[k], positive("beta", 1.0).rsqrt()), obs=t)


CASES = {
    case.model.__name__: case
    for case in (
        Case(used_twice, (X, count), [0, 1], linear=True),
        Case(prior_and_noise, (X, real), [0], linear=True),
        Case(overlapping, (X, binary), [0, 0, 0, 0, 1], linear=True),
        Case(overlapping_around, (X, binary), [0, 1, 0], linear=True),
        Case(by_float, (X, real), [0], linear=True),
        Case(moving_mean, (X, binary), [1, 0], linear=True),
        Case(pooled_mean, (X, binary), [1], linear=True),
        Case(dense_precision, (X, binary), [0], linear=True),
        Case(correlated, (X, binary), [0, 0], linear=True),
        Case(floored, (X, binary), [0], linear=True),
        Case(capped, (X, binary), [0], linear=True),
        Case(shifted, (X, binary), [0], linear=True),
        Case(bounded, (X, binary), [0], linear=True),
        Case(switched_by_precision, (X, real), [0], linear=True),
        Case(switched_logits, (X, binary), [0], linear=True),
        Case(mixed_powers, (X, binary), [0], linear=True),
        Case(masked_latent, (X, binary), [0, 1], linear=True),
        Case(tempered_prior, (X, binary), [0], linear=True),
        Case(false_normal, (X, binary), [0], linear=True),
        Case(tempered_noise, (X, real), [0], linear=True),
        Case(noise_of_a_mixture, (real,), [1, 0], linear=True),
    )
}
