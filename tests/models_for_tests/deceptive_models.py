"""Pyro models that lack one of the facts, or only look as if they had it near the origin."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from tests.models_for_tests.recognised_models import X, binary, count, group, positive, real


class Case(NamedTuple):
    """A model, its data, and by hand: which facts hold."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    power: list[float]  # of each unconstrained hyperparameter, 0 for those outside groups
    likelihoods: bool = True
    linear: bool = False


def weights(precision: Any, size: int = 3) -> Tensor:
    return pyro.sample("w", dist.Normal(torch.zeros(size), torch.as_tensor(precision).rsqrt()).to_event(1))


def bernoulli(eta: Tensor, t: Tensor) -> None:
    with pyro.plate("data", len(t)):
        pyro.sample("t", dist.Bernoulli(logits=eta), obs=t)


def gaussian(loc: Tensor, t: Tensor, precision: Any = 4.0) -> None:
    with pyro.plate("data", len(t)):
        pyro.sample("t", dist.Normal(loc, torch.as_tensor(precision).rsqrt()), obs=t)


# --- no linear predictor ---


def noncentred(X, t):
    """The precision sits in the likelihood."""
    bernoulli(X @ (weights(1.0) * positive("alpha", [1.0, 2.0, 3.0]).rsqrt()), t)


def lengthscale(X, t):
    """The design depends on a hyperparameter."""
    centres = X[:4]
    Phi = (-torch.cdist(X, centres).square() / positive("length", 2.0)).exp()
    bernoulli(Phi @ weights(positive("alpha", 1.0), 4), t)


def quadratic(X, t):
    gaussian((X @ weights(positive("alpha", 1.0))).square(), t)


def network(X, t):
    alpha = positive("alpha", 2.0)
    W = pyro.sample("W", dist.Normal(torch.zeros(3, 4), alpha.rsqrt()).to_event(2))
    v = pyro.sample("v", dist.Normal(torch.zeros(4), positive("alpha_v", 1.0).rsqrt()).to_event(1))
    gaussian(torch.tanh(X @ W) @ v, t, positive("beta", 3.0))


def kinked(X, t):
    """Linear up to three prior standard deviations."""
    w = weights(positive("alpha", 1.0))
    bernoulli(X @ w + 1e-3 * torch.relu(w[0] - 3.0), t)


def kinked_below(X, t):
    w = weights(1.0)
    gaussian(X @ w + 1e-3 * torch.relu(-w[1] - 3.0), t)


def clamped_logits(X, t):
    bernoulli((X @ weights(1.0)).clamp(-20.0, 20.0), t)


def clamped_rate(X, t):
    pyro.sample("t", dist.Poisson((X @ weights(1.0)).clamp(max=20.0).exp()).to_event(1), obs=t)


def clamped_probs(X, t):
    probs = torch.sigmoid(X @ weights(1.0))
    pyro.sample("t", dist.Bernoulli(probs=probs.clamp(1e-6, 1 - 1e-6)).to_event(1), obs=t)


def switched_predictor(X, t):
    """A switch that leaves no trace in any derivative."""
    w = weights(1.0)
    bernoulli(torch.where(w[0] > 5.0, X @ w - 0.3, X @ w), t)


def switched_noise(X, t):
    w = weights(1.0)
    gaussian(X @ w, t, torch.where(w[2].abs() > 5.0, 3.0, 4.0))


def switched_data(X, t):
    w = weights(1.0)
    gaussian(X @ w, torch.where(w[2].abs() > 5.0, t + 0.1, t))


def switched_factor(X, t):
    w = weights(1.0)
    gaussian(X @ w, t)
    pyro.factor("far", torch.where(w[1].abs() > 5.0, -3.0, 0.0))


def switched_prior(X, t):
    """The prior of v depends on w, but only far out."""
    w = weights(1.0)
    v = pyro.sample("v", dist.Normal(torch.where(w[0].abs() > 5.0, 1.0, 0.0), 1.0))
    gaussian(X @ w + v, t)


def branching(X, t):
    """The model's own Python looks at a latent value."""
    w = weights(1.0)
    gaussian(X @ w if w[0] < 5.0 else X @ w.abs(), t)


def sudden_site(X, t):
    w = weights(1.0)
    if w[0].abs() > 5.0:
        pyro.sample("extra", dist.Normal(0.0, 1.0))
    gaussian(X @ w, t)


def changing_family(X, t):
    w = weights(positive("alpha", 1.0))
    loc, scale = X @ w, positive("beta", 1.0).rsqrt()
    fn = dist.Normal(loc, scale) if w[0].abs() < 5.0 else dist.StudentT(4.0, loc, scale)
    pyro.sample("t", fn.to_event(1), obs=t)


def changing_shape(X, t):
    w = weights(1.0)
    with pyro.plate("data", len(t)):
        pyro.sample("t", dist.Normal(X @ w if w[0].abs() < 5.0 else w[0], 1.0), obs=t)


def changing_scale(X, t):
    w = weights(1.0)
    with poutine.scale(scale=1.0 if w[0].abs() < 5.0 else 2.0):
        gaussian(X @ w, t)


# --- no likelihood either ---


class Smooth(dist.Normal):
    """Data that are no independent draws, whatever the batch shape says."""

    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value) - 0.1 * (self.loc - self.loc.roll(1, -1)).square()


def coupled_data(X, t):
    eta = X @ weights(positive("alpha", 1.0))
    with pyro.plate("data", len(t)):
        pyro.sample("t", Smooth(eta, 1.0), obs=t)


def heteroscedastic(X, t):
    w = weights(1.0)
    v = pyro.sample("v", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(t)):
        pyro.sample("t", dist.Normal(X @ w, (0.1 * v).exp()), obs=t)


def residual_as_data(X, t):
    w = weights(positive("alpha", 1.0))
    gaussian(torch.zeros(len(X)), t - X @ w)


def factor(X, t):
    w = weights(positive("alpha", 1.0))
    pyro.factor("likelihood", -0.5 * (t - X @ w).square().sum())


def masked_distribution(X, t):
    w = weights(positive("alpha", 1.0))
    with pyro.plate("data", len(t)):
        pyro.sample("t", dist.Normal(X @ w, 1.0).mask(group == 0), obs=t)


def masked_beside_plain(X, t):
    """One site that can be read, one that cannot."""
    w = weights(positive("alpha", 1.0))
    with pyro.plate("data", len(t)):
        pyro.sample("s", dist.Bernoulli(logits=X @ w), obs=(t > 0).double())
        pyro.sample("t", dist.Normal(X @ w, 1.0).mask(group == 0), obs=t)


def integrated_mixing(t):
    p = pyro.sample("p", dist.Dirichlet(torch.ones(2)))
    mu = pyro.sample("mu", dist.Normal(torch.tensor([-1.0, 1.0]), positive("alpha", 1.0).rsqrt()).to_event(1))
    with pyro.plate("data", len(t)):
        k = pyro.sample("k", dist.Categorical(p))
        pyro.sample("t", dist.Normal(mu[k], 0.7), obs=t)


def integrated_mixing_same_family(t):
    p = pyro.sample("p", dist.Dirichlet(torch.ones(2)))
    mu = pyro.sample("mu", dist.Normal(torch.tensor([-1.0, 1.0]), positive("alpha", 1.0).rsqrt()).to_event(1))
    with pyro.plate("data", len(t)):
        pyro.sample("t", dist.MixtureSameFamily(dist.Categorical(p), dist.Normal(mu, 0.7)), obs=t)


def shared_choice(t):
    """One choice for three data: the sum over it is not over single data."""
    mu = pyro.sample("mu", dist.Normal(torch.tensor([-1.0, 1.0]), positive("alpha", 1.0).rsqrt()).to_event(1))
    with pyro.plate("groups", 10):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.4, 0.6])))
        with pyro.plate("data", 3):
            pyro.sample("t", dist.Normal(mu[k], 0.7), obs=t.reshape(3, 10))


def two_views_of_a_choice(t):
    mu = pyro.sample("mu", dist.Normal(torch.tensor([-1.0, 1.0]), positive("alpha", 1.0).rsqrt()).to_event(1))
    with pyro.plate("data", len(t)):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.4, 0.6])))
        pyro.sample("s", dist.Normal(-mu[k], 0.7), obs=t)
        pyro.sample("t", dist.Normal(mu[k], 0.7), obs=t)


def choice_seen_elsewhere(t):
    """The component is also told by a site that does not see the latents."""
    mu = pyro.sample("mu", dist.Normal(torch.tensor([-1.0, 1.0]), positive("alpha", 1.0).rsqrt()).to_event(1))
    with pyro.plate("data", len(t)):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.4, 0.6])))
        pyro.sample("s", dist.Bernoulli(torch.tensor([0.3, 0.7])[k]), obs=(t > 0).double())
        pyro.sample("t", dist.Normal(mu[k], 0.7), obs=t)


def chain(t):
    mu = pyro.sample("mu", dist.Normal(torch.tensor([-1.0, 1.0]), positive("alpha", 1.0).rsqrt()).to_event(1))
    k: Any = 0
    for i in pyro.markov(range(4)):
        k = pyro.sample(f"k{i}", dist.Categorical(torch.tensor([[0.7, 0.3], [0.2, 0.8]])[k]))
        pyro.sample(f"t{i}", dist.Normal(mu[k], 0.7), obs=t[i])


CASES = {
    case.model.__name__: case
    for case in (
        Case(noncentred, (X, binary), [0, 0, 0]),
        Case(lengthscale, (X, binary), [1, 0]),
        Case(quadratic, (X, real), [1]),
        Case(network, (X, real), [1, 1, 1]),
        Case(kinked, (X, binary), [1]),
        Case(kinked_below, (X, real), []),
        Case(clamped_logits, (X, binary), []),
        Case(clamped_rate, (X, count), []),
        Case(clamped_probs, (X, binary), []),
        Case(switched_predictor, (X, binary), []),
        Case(switched_noise, (X, real), []),
        Case(switched_data, (X, real), []),
        Case(switched_factor, (X, real), []),
        Case(switched_prior, (X, real), []),
        Case(branching, (X, real), []),
        Case(changing_family, (X, real), [0, 0]),
        Case(changing_shape, (X, real), []),
        Case(changing_scale, (X, real), []),
        Case(coupled_data, (X, real), [1], likelihoods=False),
        Case(sudden_site, (X, real), [], likelihoods=False),
        Case(heteroscedastic, (X, real), [], likelihoods=False),
        Case(residual_as_data, (X, real), [1], likelihoods=False),
        Case(factor, (X, real), [1], likelihoods=False),
        Case(masked_distribution, (X, real), [1], likelihoods=False),
        Case(masked_beside_plain, (X, real), [1], likelihoods=False),
        Case(integrated_mixing, (real,), [1], likelihoods=False),
        Case(integrated_mixing_same_family, (real,), [1], likelihoods=False),
        Case(shared_choice, (real,), [1], likelihoods=False),
        Case(two_views_of_a_choice, (real,), [1], likelihoods=False),
        Case(choice_seen_elsewhere, (real,), [1], likelihoods=False),
        Case(chain, (real,), [1], likelihoods=False),
    )
}
