"""Hierarchies whose scales are sampled, and models that look alike and have none."""

from collections.abc import Callable
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

SCHOOLS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64)
SCHOOL_SDS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64)


def generated(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers of their own generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = generated(60, 3)
Y = X @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.7 * generated(60, seed=1)
BINARY = (generated(120, seed=2) > 0).double()
COUNTS = torch.tensor([10.0, 9.0, 8.0, 7.0, 7.0, 6.0, 5.0, 4.0, 4.0], dtype=torch.float64)


def schools_centred(y: Tensor) -> None:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, SCHOOL_SDS), obs=y)


def schools_noncentred(y: Tensor) -> None:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", 8):
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu + tau * eta, SCHOOL_SDS), obs=y)


def schools_with_param(y: Tensor) -> None:
    mu, tau = pyro.param("mu", torch.tensor(0.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, SCHOOL_SDS), obs=y)


def regression(X: Tensor, y: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.Normal(0.0, 10.0).expand([X.shape[-1]]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(5.0))
    with pyro.plate("data", len(X)):
        return pyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


def conjugate(X: Tensor, y: Tensor) -> None:
    """Normal-gamma: the weights' prior scales with the noise."""
    beta = pyro.sample("beta", dist.Gamma(3.0, 2.0))
    w = pyro.sample("w", dist.Normal(0.0, 2.0 * beta.rsqrt()).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, beta.rsqrt()), obs=y)


def positive_slope(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 10.0).expand([3]).to_event(1))
    slope = pyro.sample("slope", dist.HalfNormal(5.0))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w + slope * X[:, 0], 1.0), obs=y)


def student(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.StudentT(4.0, 0.0, 10.0).expand([3]).to_event(1))
    sigma, nu = pyro.sample("sigma", dist.HalfNormal(5.0)), pyro.sample("nu", dist.Gamma(2.0, 0.1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.StudentT(nu, X @ w, sigma), obs=y)


def item_response(y: Tensor) -> None:
    spread, centre = pyro.sample("spread", dist.HalfNormal(1.0)), pyro.sample("centre", dist.Normal(0.0, 1.0))
    person, item = torch.arange(120) % 20, torch.arange(120) // 20
    with pyro.plate("persons", 20):
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
    with pyro.plate("items", 6):
        a, b = pyro.sample("a", dist.LogNormal(0.0, 0.5)), pyro.sample("b", dist.Normal(centre, spread))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=a[item] * (theta[person] - b[item])), obs=y)


def network(X: Tensor, y: Tensor) -> None:
    first = pyro.sample("first", dist.Normal(0.0, 1.0).expand([3, 4]).to_event(2))
    second = pyro.sample("second", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal((X @ first).tanh() @ second, 0.5), obs=y)


def network_with_scales(X: Tensor, y: Tensor) -> None:
    """One layer's scale is centred, the other's is not."""
    scales = [pyro.sample(name, dist.HalfNormal(1.0)) for name in ("s1", "s2", "noise")]
    first = pyro.sample("first", dist.Normal(0.0, 1.0).expand([3, 4]).to_event(2))
    second = pyro.sample("second", dist.Normal(0.0, scales[1]).expand([4]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal((X @ (scales[0] * first)).tanh() @ second, scales[2]), obs=y)


PLACES = torch.linspace(0.0, 1.0, 9, dtype=torch.float64)


def covariance(variance: Tensor, length: Tensor) -> Tensor:
    gaps = (PLACES[:, None] - PLACES) / length
    return variance * (-0.5 * gaps.square()).exp() + 1e-4 * torch.eye(9)


def kernel_settings() -> tuple[Tensor, Tensor]:
    return pyro.sample("variance", dist.HalfNormal(1.0)), pyro.sample("length", dist.InverseGamma(5.0, 1.0))


def process_centred(y: Tensor) -> None:
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(9), covariance(*kernel_settings())))
    with pyro.plate("data", 9):
        pyro.sample("y", dist.Poisson(f.exp()), obs=y)


def process_noncentred(y: Tensor) -> None:
    tril = torch.linalg.cholesky(covariance(*kernel_settings()))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([9]).to_event(1))
    with pyro.plate("data", 9):
        pyro.sample("y", dist.Poisson((tril @ z).exp()), obs=y)


def process_marginal(y: Tensor) -> None:
    mean, noise = pyro.sample("mean", dist.Normal(0.0, 1.0)), pyro.sample("noise", dist.HalfNormal(1.0))
    K = covariance(*kernel_settings()) + noise**2 * torch.eye(9)
    pyro.sample("y", dist.MultivariateNormal(mean * torch.ones(9), K), obs=y)


def beta_binomial(k: Tensor) -> None:
    m, kappa = pyro.sample("m", dist.Uniform(0.0, 1.0)), pyro.sample("kappa", dist.Pareto(1.0, 1.5))
    with pyro.plate("players", 9):
        phi = pyro.sample("phi", dist.Beta(m * kappa, (1.0 - m) * kappa))
        pyro.sample("k", dist.Binomial(20, phi), obs=k)


def gamma_poisson(k: Tensor) -> None:
    a, b = pyro.sample("a", dist.HalfNormal(5.0)), pyro.sample("b", dist.HalfNormal(5.0))
    with pyro.plate("units", 9):
        pyro.sample("k", dist.Poisson(pyro.sample("rate", dist.Gamma(a, b))), obs=k)


def poisson_rate(k: Tensor) -> None:
    rate, z = pyro.sample("rate", dist.Gamma(2.0, 1.0)), pyro.sample("z", dist.Normal(0.0, 1.0))
    with pyro.plate("units", 9):
        pyro.sample("k", dist.Poisson(rate * z.exp()), obs=k)


def exponential_rates(k: Tensor) -> None:
    s = pyro.sample("s", dist.HalfNormal(2.0))
    with pyro.plate("units", 9):
        pyro.sample("k", dist.Poisson(pyro.sample("rate", dist.Exponential(s))), obs=k)


def horseshoe(X: Tensor, y: Tensor) -> None:
    tau, sigma = pyro.sample("tau", dist.HalfCauchy(1.0)), pyro.sample("sigma", dist.HalfNormal(1.0))
    local = pyro.sample("local", dist.HalfCauchy(1.0).expand([X.shape[-1]]).to_event(1))
    w = pyro.sample("w", dist.Normal(0.0, tau * local).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


def growth(y: Tensor) -> None:
    size, rate = pyro.sample("size", dist.LogNormal(1.0, 1.0)), pyro.sample("rate", dist.LogNormal(0.0, 1.0))
    start, beta = pyro.sample("start", dist.Normal(0.0, 1.0)), pyro.sample("beta", dist.Gamma(1.0, 1.0))
    t = torch.linspace(0.0, 3.0, len(y))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(start + size * (1.0 - (-rate * t).exp()), beta.rsqrt()), obs=y)


def overdispersed(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    r = pyro.sample("r", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.NegativeBinomial(r, logits=X @ w - r.log()), obs=y)


def gamma_regression(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    shape = pyro.sample("shape", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Gamma(shape, shape / (X @ w).exp()), obs=y)


def shifted_by_its_noise(y: Tensor) -> None:
    mu, noise = pyro.sample("mu", dist.Normal(0.0, 1.0)), pyro.sample("noise", dist.HalfNormal(1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu + 3.0 * noise, noise), obs=y)


def correlated(X: Tensor, y: Tensor) -> None:
    tril = pyro.sample("tril", dist.LKJCholesky(2, 2.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
    sigma, group = pyro.sample("sigma", dist.HalfNormal(1.0)), torch.arange(60) % 6
    with pyro.plate("groups", 6):
        b = pyro.sample("b", dist.MultivariateNormal(torch.zeros(2), scale_tril=scale[:, None] * tril))
    with pyro.plate("data", 60):
        pyro.sample("y", dist.Normal(b[group, 0] + b[group, 1] * X[:, 0], sigma), obs=y)


def scaled_weights(X: Tensor, y: Tensor) -> None:
    alpha, bias = pyro.sample("alpha", dist.Gamma(1.0, 1.0)), pyro.sample("bias", dist.Normal(3.0, 1.0))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=bias + X @ (z * alpha.rsqrt())), obs=y)


@dataclass(frozen=True)
class Case:
    """A model with its data, and the sites whose value spreads others."""

    model: Callable[..., object]
    data: tuple[Tensor, ...]
    marginalised: str


CASES = [
    Case(schools_centred, (SCHOOLS,), "tau"),
    Case(schools_noncentred, (SCHOOLS,), "tau"),
    Case(regression, (X, Y), "sigma"),
    Case(conjugate, (X, Y), "beta"),
    Case(positive_slope, (X, Y), ""),
    Case(student, (X, Y), "nu sigma"),
    Case(item_response, (BINARY,), "a spread"),
    Case(network, (X, Y), ""),
    Case(network_with_scales, (X, Y), "noise s1 s2"),
    Case(process_centred, (COUNTS,), "length variance"),
    Case(process_noncentred, (COUNTS,), "length variance"),
    Case(process_marginal, (generated(9, seed=3),), "length noise variance"),
    Case(beta_binomial, (COUNTS,), "kappa"),
    Case(gamma_poisson, (COUNTS,), "a"),
    Case(poisson_rate, (COUNTS,), ""),
    Case(exponential_rates, (COUNTS,), ""),
    Case(horseshoe, (X, Y), "local sigma tau"),
    Case(growth, (generated(20, seed=4) + 1.0,), "beta"),
    Case(overdispersed, (X, COUNTS.repeat(7)[:60]), "r"),
    Case(gamma_regression, (X, Y.abs() + 0.1), "shape"),
    Case(shifted_by_its_noise, (generated(20, seed=5) + 3.0,), "noise"),
    Case(correlated, (X, Y), "scale sigma tril"),
    Case(scaled_weights, (X, BINARY[:60]), "alpha"),
]
